"""Files: bytes in the payload store, and a record of each file in the bucket of jobs.

    receive: record `writing` ──► object ──► record `ready`
    remove:  record `removing` ──► object deleted ──► record deleted

If a process dies between two steps, a record in the state `writing` or `removing` remains. Requests cannot read its
file. The gateway with the lease `files` removes these records and their objects, so that no object remains forever. It
also removes expired files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from sie_broker import BrokerError
from sie_broker.record import LeaderLease
from sie_bulk_jobs.file_objects import FileObjects
from sie_bulk_jobs.gateway.records import JobsBucket, OwnerUsage, RecordUse
from sie_bulk_jobs.gateway.slots import KeySlots
from sie_bulk_jobs.records import FileRecord
from sie_contracts.errors import InvalidInput, NotFound, NotReady, PayloadTooLarge, QueueUnavailable, ResourceExhausted
from sie_runtime.http.asgi import uuid7
from sie_runtime.process import Stop, Trouble
from sie_store.object_stores import ObjectMissing, StoreError, StoreFull

MAX_FILE_BYTES = 512 << 20
# largest number of simultaneous uploads of all keys and of one key, because each upload buffers a part of its file
UPLOADS_AT_ONCE, UPLOADS_OF_A_KEY = 16, 4
# largest number of batch outputs that are written at the same time; uploads have a separate limit and cannot delay
# outputs
OUTPUTS_AT_ONCE = 4
WRITE_S = 3600.0
# age in seconds at which the upload of a record in the state `writing` has surely ended: the time limit WRITE_S, and
# 600 s because clocks differ
ABANDONED_S = WRITE_S + 600.0
CLEAN_S = 20.0
_ID = re.compile("file-[0-9a-f]{32}")
_logger = logging.getLogger("sie.gateway.files")


class FileDescription(NamedTuple):
    """Description of a file. With `expires_after_s` 0 the file does not expire."""

    name: str
    purpose: str
    expires_after_s: float = 0.0


def new_id() -> str:
    """Return a new id of a file. Sorted ids are in the order of their creation."""
    return f"file-{uuid7().replace('-', '')}"


class FileStore:
    """The files of all owners. `wall_clock` returns seconds since 1970.

    All methods except `content`, `clean` and `run` raise NotReady if there is no payload store, or while the records
    have not been read. They raise QueueUnavailable if a call of the broker or the store fails. `remove` raises nothing
    if only the removal of the bytes fails.
    """

    def __init__(
        self,
        bucket: JobsBucket,
        objects: FileObjects | None,
        lease: LeaderLease,
        usage: OwnerUsage,
        wall_clock: Callable[[], float],
        *,
        max_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._bucket = bucket
        self._records = bucket.files
        self._objects = objects
        self._lease = lease
        self._wall_clock = wall_clock
        self._max_bytes = max_bytes
        self._usage = usage
        self._records.listeners.append(self._charge)
        self._uploads = KeySlots(UPLOADS_AT_ONCE, UPLOADS_OF_A_KEY, "uploads", "uploads")
        self._outputs = asyncio.Semaphore(OUTPUTS_AT_ONCE)

    async def find(self, file: str, owns: Callable[[str], bool]) -> FileRecord:
        """Return the record of a file. Raises NotFound, also if `owns(owner)` is False for the owner of the file."""
        self._required()
        record = self._records.get(file)
        # read the record again, because another gateway may have completed the file
        if record is None or record.state == "writing":
            with _unavailable():
                record = await self._records.refresh(file) if _ID.fullmatch(file) else None
        if record is None or not self._is_served(record) or not owns(record.owner):
            raise NotFound("there is no such file, or it belongs to another key", param="file_id")
        return record

    def content(self, file: str) -> tuple[str, str] | None:
        """Return the name that the client chose for a file, and the file's SHA-256; None if the file was removed."""
        record = self._records.get(file)
        return None if record is None else (record.name, record.sha256)

    def page(
        self, owns: Callable[[str], bool], *, purpose: str = "", after: str = "", limit: int, newest_first: bool
    ) -> tuple[list[FileRecord], bool]:
        """Return at most `limit` files by time of creation, and True if more files follow. `after`: id of the last file
        of the previous page; empty for the first page. Raises InvalidInput.
        """
        self._required()
        if after and not _ID.fullmatch(after):
            raise InvalidInput.at("after", "expected the id of a file")
        selected = [
            record
            for id_, record in self._records.items()
            if owns(record.owner)
            and purpose in ("", record.purpose)
            and self._is_served(record)
            and (not after or (id_ < after if newest_first else id_ > after))
        ]
        selected.sort(key=lambda record: record.id, reverse=newest_first)
        return selected[:limit], len(selected) > limit

    def _is_served(self, record: FileRecord) -> bool:
        return record.state == "ready" and not self._is_expired(record)

    def _is_expired(self, record: FileRecord) -> bool:
        return bool(record.expires_s) and record.expires_s <= self._wall_clock()

    async def open(self, record: FileRecord) -> AsyncIterator[bytes]:
        """Open a file and return its bytes in pieces. Raises NotFound before the first piece."""
        with _unavailable():
            return await self._required().open(record.id)

    async def range(self, record: FileRecord, start: int, end: int) -> bytes:
        """Return the bytes `start` to `end - 1` of a file. Raises NotFound."""
        with _unavailable():
            return await self._required().range(record.id, start, end)

    async def create(self, owner: str, about: FileDescription, data: AsyncIterator[bytes], file: str) -> FileRecord:
        """Store an output of a batch as the file with the id `file`. The output may have any length. If the file
        exists, return its record without reading `data`.
        """
        self._required()
        with _unavailable():
            existing = await self._records.refresh(file)
        if existing is not None and existing.state == "ready":
            return existing
        async with self._outputs:
            return await self._receive(owner, data, lambda: about, file, bounded=False)

    async def receive(self, owner: str, data: AsyncIterator[bytes], about: Callable[[], FileDescription]) -> FileRecord:
        """Store a file that a client sends. Call `about` only after the end of `data`, because in a form the fields may
        follow the file.

        Raises InvalidInput for an empty file, PayloadTooLarge, RateLimited above a limit of the key or of all keys,
        ResourceExhausted for a full store or too many uploads of all keys at once, and the errors of `data` and
        `about`. A failed file is removed; if the task is cancelled, `clean` removes the file later.
        """
        with self._uploads.hold(owner):
            return await self._receive(owner, data, about, new_id(), bounded=True)

    async def _receive(
        self, owner: str, data: AsyncIterator[bytes], about: Callable[[], FileDescription], file: str, *, bounded: bool
    ) -> FileRecord:
        """Write a file and its record. `bounded`: check the limits of a file, of the owner and of all owners. The file
        counts in the owner's usage, whether `bounded` or not.
        """
        objects = self._required()
        if bounded:
            self._usage.check(owner, RecordUse(1))
        draft = FileRecord(file, owner, "", "", 0, "", self._wall_clock(), state="writing")
        self._usage.charge(draft.id, owner, 0)

        def grow(size: int) -> None:
            self._usage.charge(draft.id, owner, size)
            if bounded:
                self._usage.check(owner, RecordUse())

        try:
            with _unavailable():
                stored = await self._records.change(
                    draft.id, lambda now: now if now is not None and now.state == "ready" else draft
                )
            if stored is not None and stored.state == "ready":  # another gateway wrote the same file
                return stored
            try:
                with _unavailable():
                    limit = self._max_bytes if bounded else math.inf
                    return await self._write(objects, draft, _Read(data, limit, grow), about)
            except Exception:
                now = self._records.get(draft.id)
                if now is None or now == draft:  # do not remove a file that another gateway has written
                    await self._forsake(draft.id)
                raise
        finally:
            self._charge(draft.id, self._records.get(draft.id))

    def _charge(self, file: str, record: FileRecord | None) -> None:
        if record is None:
            self._usage.release(file)
        # during an upload the record has 0 bytes, which must not replace the bytes that the upload has counted
        elif record.state != "writing" or file not in self._usage:
            self._usage.charge(file, record.owner, record.bytes)

    async def _write(
        self, objects: FileObjects, draft: FileRecord, read: _Read, about: Callable[[], FileDescription]
    ) -> FileRecord:
        await read.begin()
        await objects.put(draft.id, read.pieces(), WRITE_S)
        fields_now = about()
        expires_s = draft.created_s + fields_now.expires_after_s if fields_now.expires_after_s else 0.0
        done = replace(
            draft,
            name=fields_now.name,
            purpose=fields_now.purpose,
            bytes=read.size,
            sha256=read.digest.hexdigest(),
            expires_s=expires_s,
            state="ready",
        )
        if await self._records.change(draft.id, lambda now: done if now is not None and now == draft else now) != done:
            raise QueueUnavailable("writing the file took too long, so its record was removed: send the file again")
        return done

    async def _forsake(self, file: str) -> None:
        """Remove a file. If the broker or the store fails, `clean` removes it later."""
        try:
            await self._erase(file)
        except (BrokerError, StoreError) as error:
            _logger.warning("the gateway cannot remove file %s now and retries later: %s", file, error)

    async def remove(self, record: FileRecord) -> None:
        """Remove a file. Requests cannot read the file afterwards, even if the removal of its bytes fails."""
        self._required()
        with _unavailable():
            await self._records.change(
                record.id, lambda now: replace(now, state="removing") if now is not None else None
            )
        await self._forsake(record.id)

    async def _erase(self, file: str) -> None:
        """Remove the object, then its record, so that no object lacks a record. Raises StoreError, BrokerError."""
        assert self._objects is not None, "there is no file without a store"
        await self._objects.remove(file)
        await self._records.remove(file)

    async def clean(self) -> int:
        """Remove expired files and files with an incomplete upload or removal, and return their number. A gateway
        without the lease removes nothing. Raises BrokerError, StoreError.
        """
        due = [record for record in self._records.values() if self._is_due(record)]
        if self._objects is None or not due or not await self._lease.acquire():
            return 0
        removed = 0
        for record in due:
            marked = await self._records.change(
                record.id, lambda now: replace(now, state="removing") if now is not None and self._is_due(now) else None
            )
            if marked is not None and marked.state == "removing":
                await self._erase(record.id)
                removed += 1
        return removed

    def _is_due(self, record: FileRecord) -> bool:
        if record.state == "writing":
            return record.created_s + ABANDONED_S <= self._wall_clock()
        return record.state == "removing" or self._is_expired(record)

    async def run(self, stop: Stop) -> None:
        """Call `clean` at least every CLEAN_S seconds until `stop`."""
        trouble = Trouble(_logger, "files could not be cleaned up")
        while not await stop.wait_for(CLEAN_S * random.uniform(0.5, 1.0)):  # noqa: S311  no secret
            with trouble.logged(BrokerError, StoreError):
                if removed := await self.clean():
                    _logger.info("removed %d files that had expired or whose upload or removal had failed", removed)
        with contextlib.suppress(BrokerError):  # if the release fails, the lease expires by itself
            await self._lease.release()

    def _required(self) -> FileObjects:
        if self._objects is None:
            raise NotReady(
                "files need a payload store, and SIE_PAYLOAD_STORE_URL is unset",
                extras={"setting": "SIE_PAYLOAD_STORE_URL"},
            )
        self._bucket.require()
        return self._objects


class _Read:
    """Reader that counts and hashes the bytes of a file, and calls `grow(bytes so far)` after each piece. Raises
    PayloadTooLarge after `limit` bytes.
    """

    def __init__(self, data: AsyncIterator[bytes], limit: float, grow: Callable[[int], None]) -> None:
        self.size = 0
        self._grow = grow
        self.digest = hashlib.sha256()
        self._data = data
        self._limit = limit
        self._first = b""

    async def begin(self) -> None:
        """Wait for the first bytes. Raises InvalidInput if the file is empty."""
        while not self._first:
            try:
                self._first = await anext(self._data)
            except StopAsyncIteration:
                raise InvalidInput.at("file", "the file is empty") from None

    async def pieces(self) -> AsyncIterator[bytes]:
        yield self._counted(self._first)
        async for piece in self._data:
            yield self._counted(piece)

    def _counted(self, piece: bytes) -> bytes:
        self.size += len(piece)
        if self.size > self._limit:
            raise PayloadTooLarge(f"file: more than {self._limit} bytes", param="file", extras={"limit": self._limit})
        self._grow(self.size)
        self.digest.update(piece)
        return piece


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except BrokerError as error:
        raise QueueUnavailable(f"the broker failed, try again: {error}") from error
    except ObjectMissing as error:
        raise NotFound("the bytes of this file were removed", param="file_id") from error
    except StoreFull as error:
        raise ResourceExhausted("the payload store has no room for this file", reason="store_full") from error
    except StoreError as error:
        _logger.warning("a call of the payload store for a file failed: %s", error)
        raise QueueUnavailable("the payload store, where files are stored, did not answer: try again") from error
