"""Records of jobs and files in the broker, and the limits of their number and bytes, for one owner (API key) and for
all owners.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar, cast

import msgspec

from sie_broker import BrokerError, Entry, Store, Write
from sie_broker.record import Record, RecordBucket, retry_conflicts
from sie_bulk_jobs.records import FileRecord, JobRecord, bounded
from sie_contracts.errors import NotReady, RateLimited
from sie_contracts.wire import topology
from sie_runtime.process import Stop, Trouble

RETRY_S = 60


class RecordUse(NamedTuple):
    """Number of records, and the sum of their bytes."""

    records: int = 0
    size: int = 0

    def plus(self, more: RecordUse) -> RecordUse:
        return RecordUse(self.records + more.records, self.size + more.size)


class UseBound(NamedTuple):
    """Limits of records. `most`: largest number and largest sum of bytes. `settings`: names of their two settings."""

    most: RecordUse
    settings: tuple[str, str]


class OwnerUsage:
    """Number and bytes of records by owner. A record of this gateway counts from the start of its write. A record of
    another gateway counts only after the watch has delivered this record, so the total may exceed a limit for a moment.

    Above a limit, `check` raises RateLimited. `kinds`: words for the number and the bytes in the error message, such as
    `files` and `bytes of files`. `remedy`: advice in the message. `reason`: field `reason` of the error.
    """

    def __init__(self, of_key: UseBound, in_all: UseBound, *, kinds: tuple[str, str], remedy: str, reason: str) -> None:
        self._of_key, self._in_all = of_key, in_all
        self._kinds, self._remedy, self._reason = kinds, remedy, reason
        self._charges: dict[str, tuple[str, int]] = {}  # record id -> (owner, bytes)
        self._uses: dict[str, RecordUse] = {}  # owner -> number and bytes of the records
        self._whole = RecordUse()

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._charges

    def charge(self, record_id: str, owner: str, size: int) -> None:
        """Count a record of this owner with `size` bytes, in place of the record's earlier size."""
        self.release(record_id)
        self._charges[record_id] = (owner, size)
        self._add(owner, RecordUse(1, size))

    def release(self, record_id: str) -> None:
        if (charge := self._charges.pop(record_id, None)) is not None:
            owner, size = charge
            self._add(owner, RecordUse(-1, -size))

    def check(self, owner: str, more: RecordUse) -> None:
        """Check that `more` fits below the limits of this owner and of all owners. Raises RateLimited."""
        self._check(self._uses.get(owner, RecordUse()).plus(more), self._of_key, "this key may have at most")
        self._check(self._whole.plus(more), self._in_all, "all keys together may have at most")

    def _check(self, use: RecordUse, bound: UseBound, subject: str) -> None:
        for have, most, kind, setting in zip(use, bound.most, self._kinds, bound.settings, strict=True):
            if have > most:
                message = f"{subject} {most} {kind} ({setting}): {self._remedy}"
                raise RateLimited(message, reason=self._reason, retry_after_s=RETRY_S)

    def _add(self, owner: str, use: RecordUse) -> None:
        self._whole = self._whole.plus(use)
        self._uses[owner] = self._uses.get(owner, RecordUse()).plus(use)
        if not self._uses[owner].records:
            del self._uses[owner]


# seconds for which the broker stores the removal of a record; a gateway that was disconnected for a longer time does
# not learn of the removal, and lists the removed record
REMOVED_AGE_S = 7 * 86_400.0
LOOK_S = 0.5  # seconds between two checks whether the broker may have lost the bucket; a check sends no request
_Kept = FileRecord | JobRecord
T = TypeVar("T", FileRecord, JobRecord)
_decoder = msgspec.msgpack.Decoder(_Kept)
_logger = logging.getLogger("sie.gateway.jobs")


class RecordValues(Mapping[str, T], Generic[T]):
    """Records of one kind by id. `listeners` are called with an id and its record, or None for a removed record."""

    def __init__(self, record: Record[_Kept], prefix: str) -> None:
        self.listeners: list[Callable[[str, T | None], None]] = []
        self._record = record
        self._prefix = prefix
        self._values: dict[str, T] = {}
        # id -> revision of the record; after a removal by this gateway: revision of the removal, until the watch has
        # reported it
        self._revisions: dict[str, int] = {}

    def __getitem__(self, id_: str) -> T:
        return self._values[id_]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    async def change(self, id_: str, make: Callable[[T | None], T | None]) -> T | None:
        """Replace a record by `make(record)` (see `Record.change`). Long texts of the new value are shortened."""

        def changed(before: T | None) -> T | None:
            after = make(before)
            return None if after is None else bounded(after)

        stored = await self._record.change(self._prefix + id_, cast("Callable[[_Kept | None], _Kept | None]", changed))
        return cast("T | None", stored)

    async def refresh(self, id_: str) -> T | None:
        """Read a record from the bucket again, store its value here, and return it. Raises BrokerError."""
        await self._record.refresh(self._prefix + id_)
        return self.get(id_)

    async def remove(self, id_: str) -> None:
        """Remove a record, if it exists. Raises BrokerError."""

        async def attempt() -> None:
            key, bucket = self._prefix + id_, self._record.bucket
            entry = await bucket.get(key)
            if entry is not None:
                self.apply(id_, None, await bucket.write([Write(key, None, entry.revision)]), is_ours=True)

        await retry_conflicts(attempt)

    def apply(self, id_: str, value: T | None, revision: int, *, is_ours: bool = False) -> None:
        """Store the new value of a record, or remove the record if `value` is None. `is_ours`: this gateway has written
        the value; otherwise, the watch has delivered it. Does nothing if a later revision was applied before.
        """
        if revision < self._revisions.get(id_, 0):
            return
        if value is not None:
            self._values[id_], self._revisions[id_] = value, revision
        else:
            self._values.pop(id_, None)
            if is_ours:  # so that `apply` ignores older revisions that the watch delivers later
                self._revisions[id_] = revision
            else:
                self._revisions.pop(id_, None)
        for listener in self.listeners:
            listener(id_, value)

    def clear(self) -> None:
        """Discard all records after the broker has lost the bucket."""
        removed = list(self._values)
        self._values.clear()
        self._revisions.clear()
        for listener in self.listeners:
            for id_ in removed:
                listener(id_, None)


class JobsBucket:
    """Bucket of jobs and files. One task calls `run`. `files` and `jobs` are empty until the bucket has been read;
    until then `require` raises NotReady.
    """

    def __init__(self, broker: Store, replicas: int) -> None:
        """Create the reader of the bucket. The bucket uses file storage, because the objects that its records describe
        survive a restart of the broker.
        """
        bucket = RecordBucket(
            broker, topology.JOBS_BUCKET, storage="file", replicas=replicas, removed_age_s=REMOVED_AGE_S
        )
        self._record = Record[_Kept](bucket, _decode, self._on_value, on_lost=self._on_lost)
        broker.on_reconnect(self._record.reconnected)
        self.is_read = False
        self.files = RecordValues[FileRecord](self._record, "file.")
        self.jobs = RecordValues[JobRecord](self._record, "job.")

    async def follow(self) -> None:
        """Create the bucket if it does not exist, read it and watch it. Raises BrokerError."""
        await self._record.follow()
        self.is_read = True

    def require(self) -> None:
        """Raise NotReady while the bucket has not been read."""
        if not self.is_read:
            raise NotReady("the records of jobs and files have not been read from the broker yet")

    async def run(self, stop: Stop) -> None:
        """Follow the bucket until `stop`. If the broker has lost the bucket, create the bucket again."""
        trouble = Trouble(_logger, "the records of jobs and files are not updated for now")
        try:
            while not await stop.wait_for(LOOK_S):
                if self._record.is_stale:
                    with trouble.logged(BrokerError):
                        await self.follow()
        finally:
            await self._record.close()

    def _on_value(self, key: str, value: _Kept | None, revision: int) -> None:
        kind, _, id_ = key.partition(".")
        if kind == "file":
            self.files.apply(id_, cast("FileRecord | None", value), revision)
        elif kind == "job":
            self.jobs.apply(id_, cast("JobRecord | None", value), revision)

    def _on_lost(self) -> None:
        self.files.clear()
        self.jobs.clear()


def _decode(entry: Entry) -> _Kept:
    """Decode an entry. Raises ValueError if it is no record, or if the id in the record differs from its key."""
    if entry.value is None:
        raise ValueError("the record was removed")
    value: _Kept = _decoder.decode(entry.value)
    if entry.key != f"{'file' if isinstance(value, FileRecord) else 'job'}.{value.id}":
        raise ValueError("the id in the record differs from its key in the bucket")
    return value
