"""Download engine: it fetches the files of a snapshot (weights of a model at one commit) into a folder. It continues a
file where an earlier attempt ended.

    files ──► existing files are checked ──► missing bytes are requested, from the end of the PART file on ──►
    appended to the PART file and digested ──► the PART file is renamed if the digest is right

An incomplete file has the suffix PART and only grows at its end, so its length is the progress, and any process can
continue it. A `Source`, the hub (`hub.py`) or a bucket (`bucket.py`), returns ranges of a file. If a response ends
early, the missing bytes are requested again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sie_runtime.process import cancel_all
from sie_store.durable import PART
from sie_store.object_stores import RetryPolicy, StoreError, gather
from sie_store.weights.manifest import FetchFailed, FileFact
from sie_store.weights.progress import FetchProgress

_logger = logging.getLogger("sie.store")
Piece = bytes | bytearray

FILES_AT_ONCE = 8
PIECE_BYTES = 1 << 18
# number of bytes that must arrive within `stall_s`; a response with at least this number resets the count of failures
MIN_BYTES = 1 << 14
# largest number of unwritten bytes of a file in memory; at this limit, the download waits for the running write
MAX_WAITING_BYTES = 1 << 20
# number of times that a file with a wrong digest is fetched; the second fetch begins at byte 0, because bytes of the
# PART file may be damaged
ROUNDS = 2


@dataclass(frozen=True)
class DownloadLimits(RetryPolicy):
    """Limits of a download. `stall_s`: longest time in which fewer than MIN_BYTES may arrive. `tries`: number of
    attempts in a row, each with fewer than MIN_BYTES, after which the download fails. `part_bytes`: bytes of one
    request; with 0, one request reads all missing bytes of a file. `parts_at_once`: largest number of parts, counted
    over all files, that are requested ahead and kept in memory.
    """

    part_bytes: int = 8 << 20
    parts_at_once: int = 8


@dataclass(frozen=True)
class RemoteFile:
    """File of a snapshot. `sha256` and `blob` (git's digest of the file): in hex, empty if the source lacks it."""

    path: str
    size: int
    sha256: str = ""
    blob: str = ""


class Source(Protocol):
    """Source of the files of one snapshot, a hub or a bucket. `label`: name of the snapshot in logs and errors."""

    label: str
    limits: DownloadLimits

    def answer(self, file: RemoteFile, start: int, end: int) -> AsyncGenerator[Piece, None]:
        """Yield the bytes of a file from `start` to before `end`, or fewer bytes if the response ends early. Raises
        StoreError if another attempt may help, otherwise FetchFailed.
        """
        ...

    def damaged(self, file: RemoteFile) -> FetchFailed:
        """Return the error for a file whose digest was wrong in all attempts."""
        ...


class Reader:
    """Reads files of a source. Every byte that arrives is counted in `progress`."""

    def __init__(self, source: Source, progress: FetchProgress) -> None:
        self._source, self._limits, self._progress = source, source.limits, progress
        self._turns = asyncio.Semaphore(source.limits.parts_at_once)

    async def read(self, file: RemoteFile, start: int = 0) -> AsyncGenerator[Piece, None]:
        """Yield the bytes of a file from position `start` on. Raises FetchFailed, StoreError."""
        pieces = self._parts(file, start) if self._limits.part_bytes else self._resumed(file, start, file.size)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def _parts(self, file: RemoteFile, start: int) -> AsyncGenerator[Piece, None]:
        """Yield a file part by part. Up to `parts_at_once` parts are requested ahead, before the caller needs them."""
        step = self._limits.part_bytes
        starts = iter(range(start, file.size, step))
        ahead = deque[asyncio.Task[bytearray]]()
        try:
            while True:
                while len(ahead) < self._limits.parts_at_once and (at := next(starts, None)) is not None:
                    ahead.append(asyncio.create_task(self._part(file, at, min(file.size, at + step))))
                if not ahead:
                    return
                yield await ahead.popleft()
                self._turns.release()
        finally:
            await cancel_all(ahead)

    async def _part(self, file: RemoteFile, start: int, end: int) -> bytearray:
        await self._turns.acquire()
        data = bytearray()
        async for piece in self._resumed(file, start, end):
            data += piece
        return data

    async def _resumed(self, file: RemoteFile, start: int, end: int) -> AsyncGenerator[Piece, None]:
        """Yield the bytes from `start` to before `end`. If a response ends early, the missing bytes are requested."""
        at, tries = start, 0
        while at < end:
            before = at
            try:
                answer = _brisk(self._source.answer(file, at, end), self._limits.stall_s)
                async with contextlib.aclosing(answer):
                    async for sent in answer:
                        piece = sent[: end - at]
                        at += len(piece)
                        self._progress.add(len(piece))
                        yield piece
                        if at == end:
                            return
                raise StoreError(f"the source's response ended early, at byte {at} of {end}")
            except StoreError as error:
                tries = 1 if at - before >= MIN_BYTES else tries + 1
                await self._limits.pause(error, tries, f"{self._source.label}: {file.path}", at)


async def _brisk(answer: AsyncGenerator[Piece, None], stall_s: float) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of a response. Raises StoreError if fewer than MIN_BYTES arrive within `stall_s`. The time that
    the caller needs for a piece does not count.
    """
    waited_s, brought = 0.0, 0
    async with contextlib.aclosing(answer):
        while True:
            began_s = time.monotonic()
            piece = await anext(answer, None)
            if piece is None:
                return
            waited_s += time.monotonic() - began_s
            brought += len(piece)
            if brought >= MIN_BYTES:
                waited_s, brought = 0.0, 0
            elif waited_s > stall_s:
                raise StoreError(f"the source delivered only {brought} bytes in {waited_s:.0f} s")
            yield piece


class Digests:
    """SHA-256 and git blob digest of a file, computed from the bytes that `add` and `add_file` have added."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._bytes = file, 0
        self._sha256 = hashlib.sha256()
        self._blob = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)

    def add(self, data: Piece) -> None:
        self._bytes += len(data)
        self._sha256.update(data)
        if self._file.blob:
            self._blob.update(data)

    def add_file(self, path: Path, progress: FetchProgress) -> int:
        """Add the bytes of a file. Returns the number of all bytes that were added so far. Raises OSError."""
        with path.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                self.add(piece)
                progress.touch()
        return self._bytes

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def fact(self) -> FileFact | None:
        """Return (size, SHA-256) of the added bytes; None if the size or the digest differs from that of the file."""
        is_right = self._file.sha256 in ("", self.sha256) and self._file.blob in ("", self._blob.hexdigest())
        return FileFact(self._bytes, self.sha256) if is_right and self._bytes == self._file.size else None


class SnapshotDownload:
    def __init__(self, source: Source, folder: Path, progress: FetchProgress) -> None:
        self._source, self._folder, self._progress = source, folder, progress
        self._reader = Reader(source, progress)

    async def all(self, files: Sequence[RemoteFile]) -> dict[str, FileFact]:
        """Fetch all files. Returns size and SHA-256 of each file, by path. Raises FetchFailed, StoreError, OSError."""
        present = await gather(lambda file: asyncio.to_thread(self._present, file), files, FILES_AT_ONCE)
        complete = {file.path: fact for file, fact in zip(files, present, strict=True) if fact is not None}
        missing = [file for file in files if file.path not in complete]
        total, lacking = (sum(file.size for file in some) for some in (files, missing))
        had = total - lacking + sum(_size(self._part(file)) for file in missing)
        await asyncio.to_thread(self._progress.expect, total, had)
        fetched = await gather(self._fetched, missing, FILES_AT_ONCE)
        return complete | {file.path: fact for file, fact in zip(missing, fetched, strict=True)}

    def _present(self, file: RemoteFile) -> FileFact | None:
        """Return size and SHA-256 of a file that is already complete and correct. For any other file, return None, and
        remove a wrong file and a PART file that is too long. A wrong file is never written to, because it may be a hard
        link to a file of another program.
        """
        path, part = self._folder / file.path, self._part(file)
        if path.exists():
            digests = Digests(file)
            if _size(path) == file.size:
                digests.add_file(path, self._progress)
                if (fact := digests.fact()) is not None:
                    part.unlink(missing_ok=True)
                    return fact
            path.unlink()
        if _size(part) > file.size:
            part.unlink()
        return None

    async def _fetched(self, file: RemoteFile) -> FileFact:
        part = self._part(file)
        for _ in range(ROUNDS):
            digests = Digests(file)
            start = await asyncio.to_thread(self._begun, part, digests)
            appending = _Appending(part, digests)
            try:
                async with contextlib.aclosing(self._reader.read(file, start)) as pieces:
                    async for piece in pieces:
                        await appending.add(piece)
            finally:
                await appending.end()
            if (fact := digests.fact()) is not None:
                await asyncio.to_thread(_complete, part, self._folder / file.path)
                return fact
            _logger.warning(
                "%s: %s does not have the digest that its source names, so its bytes are discarded",
                self._source.label,
                file.path,
            )
            part.unlink()
            self._progress.add(-file.size)
        raise self._source.damaged(file)

    def _begun(self, part: Path, digests: Digests) -> int:
        """Add the bytes of `part`, which an earlier attempt has written, to the digests, and return their number."""
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        return digests.add_file(part, self._progress)

    def _part(self, file: RemoteFile) -> Path:
        return self._folder / f"{file.path}{PART}"


class _Appending:
    """Appends pieces to a partial file, in a thread. Pieces that arrive during a write are joined."""

    def __init__(self, part: Path, digests: Digests) -> None:
        self._part, self._digests = part, digests
        self._waiting = bytearray()
        self._writing: asyncio.Task[None] | None = None

    async def add(self, piece: Piece) -> None:
        """Append a piece. Wait if MAX_WAITING_BYTES are unwritten. Raises OSError if the write of this piece or of an
        earlier piece failed.
        """
        self._waiting += piece
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        if max(len(piece), len(self._waiting)) >= MAX_WAITING_BYTES:
            await self._writing

    async def end(self) -> None:
        """Wait until all added pieces are written. Raises OSError."""
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        while self._waiting:
            data, self._waiting = self._waiting, bytearray()
            await asyncio.to_thread(self._append, data)

    def _append(self, data: bytearray) -> None:
        with self._part.open("ab", buffering=0) as growing:
            view = memoryview(data)
            while view:
                view = view[growing.write(view) :]
        self._digests.add(data)


def _complete(part: Path, path: Path) -> None:
    with part.open("rb") as whole:
        os.fsync(whole.fileno())
    os.replace(part, path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
