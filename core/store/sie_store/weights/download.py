"""Download engine: fetches the files of a snapshot into a folder. Each file is resumed where an earlier attempt ended.

    files ──► existing files are checked ──► the others are read from the length of their part on ──►
    appended and digested ──► renamed when the digest is right

A file grows only at its end, under its name + PART, so its length is its progress. The next attempt continues there, in
any process. A `Source` returns ranges of one file: the hub (`hub.py`) or a bucket (`bucket.py`). After a failure that
may disappear, the missing bytes are requested again from the byte where the answer ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from sie_store.durable import PART
from sie_store.object_stores import RetryPolicy, StoreError
from sie_store.weights.manifest import FetchFailed, FileFact
from sie_store.weights.progress import FetchProgress

_logger = logging.getLogger("sie.store")
_T = TypeVar("_T")
Piece = bytes | bytearray

FILES_AT_ONCE = 8
PIECE_BYTES = 1 << 18
# bytes that an answer must deliver in `stall_s`; the same number of bytes resets the count of tries
MIN_BYTES = 1 << 14
MAX_WAITING_BYTES = 1 << 20  # bytes of one file that may wait while earlier bytes are being written
# attempts for a file with a wrong digest: it is read once more from its start, because its part on the disk may be
# damaged
ROUNDS = 2


@dataclass(frozen=True)
class DownloadLimits(RetryPolicy):
    """Limits of one download. `stall_s`: the longest wait for the next MIN_BYTES. `tries` counts the answers in a row
    that delivered fewer bytes. `part_bytes`: bytes of one request. `parts_at_once`: parts of all files that are read
    ahead and kept in memory. If `part_bytes` is 0, one request reads all missing bytes of a file, which are written as
    they arrive.
    """

    part_bytes: int = 8 << 20
    parts_at_once: int = 8


@dataclass(frozen=True)
class RemoteFile:
    """A file of a snapshot. `size` is in bytes. `sha256` and `blob` (git's digest of a file) are in hex; a digest is
    empty if the source does not have it.
    """

    path: str
    size: int
    sha256: str = ""
    blob: str = ""


class Source(Protocol):
    """Source of the files of one snapshot. `label` names the snapshot in logs and errors."""

    label: str
    limits: DownloadLimits

    def answer(self, file: RemoteFile, start: int, end: int) -> AsyncGenerator[Piece, None]:
        """Yield the bytes from `start` to before `end`. The answer may end early. Raises StoreError for a failure that
        may disappear, and FetchFailed.
        """
        ...

    def damaged(self, file: RemoteFile) -> FetchFailed:
        """Return the failure of a file whose digest was wrong after every attempt."""
        ...


class Reader:
    """Reads the files of a source. `progress` counts every byte that arrives."""

    def __init__(self, source: Source, progress: FetchProgress) -> None:
        self._source, self._limits, self._progress = source, source.limits, progress
        self._turns = asyncio.Semaphore(source.limits.parts_at_once)

    async def read(self, file: RemoteFile, start: int = 0) -> AsyncGenerator[Piece, None]:
        """Yield the bytes of a file from `start` on, in order. Raises FetchFailed, StoreError."""
        pieces = self._parts(file, start) if self._limits.part_bytes else self._resumed(file, start, file.size)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                yield piece

    async def _parts(self, file: RemoteFile, start: int) -> AsyncGenerator[Piece, None]:
        """Yield the parts of a file; some are read ahead. A part counts as read ahead until the caller consumes it."""
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
            await _cancelled(ahead)

    async def _part(self, file: RemoteFile, start: int, end: int) -> bytearray:
        await self._turns.acquire()
        data = bytearray()
        async for piece in self._resumed(file, start, end):
            data += piece
        return data

    async def _resumed(self, file: RemoteFile, start: int, end: int) -> AsyncGenerator[Piece, None]:
        """Yield the bytes from `start` to before `end`. If an answer ends early, the missing bytes are requested
        again.
        """
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
                raise StoreError(f"the answer ended at byte {at} of {end}")
            except StoreError as error:
                tries = 1 if at - before >= MIN_BYTES else tries + 1
                await self._limits.pause(error, tries, f"{self._source.label}: {file.path}", at)


async def _brisk(answer: AsyncGenerator[Piece, None], stall_s: float) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of an answer. Raises StoreError if the answer delivers less than MIN_BYTES in `stall_s`. Time
    that the caller uses does not count.
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
                raise StoreError(f"the answer delivered {brought} bytes in {waited_s:.0f} s")
            yield piece


class Digests:
    """Digests of the bytes that were added so far."""

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
        """Add the contents of a file. Returns its number of bytes. Raises OSError."""
        with path.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                self.add(piece)
                progress.touch()
        return self._bytes

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def fact(self) -> FileFact | None:
        """Return size and digest of the file; None if they differ from the values of its source."""
        is_right = self._file.sha256 in ("", self.sha256) and self._file.blob in ("", self._blob.hexdigest())
        return FileFact(self._bytes, self.sha256) if is_right and self._bytes == self._file.size else None


class SnapshotDownload:
    """Download of the files of one snapshot into `folder`, a partial folder of the local cache."""

    def __init__(self, source: Source, folder: Path, progress: FetchProgress) -> None:
        self._source, self._folder, self._progress = source, folder, progress
        self._reader = Reader(source, progress)

    async def all(self, files: Sequence[RemoteFile]) -> dict[str, FileFact]:
        """Fetch every file. Returns size and digest of each file, by its path. Raises FetchFailed, StoreError,
        OSError.
        """
        present = await each_file(lambda file: asyncio.to_thread(self._present, file), files)
        missing = [file for file in files if present[file.path] is None]
        total, lacking = (sum(file.size for file in some) for some in (files, missing))
        had = total - lacking + sum(_size(self._part(file)) for file in missing)
        await asyncio.to_thread(self._progress.expect, total, had)
        fetched = await each_file(self._fetched, missing)
        return {path: fact or fetched[path] for path, fact in present.items()}

    def _present(self, file: RemoteFile) -> FileFact | None:
        """Return size and digest of a correct file that exists under its final name, else None. A wrong file and a part
        that is too long are removed. No bytes are written into such a file, because it may be a hard link to a file of
        another program.
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
                "%s: %s does not have the digest that its source names; it is fetched again",
                self._source.label,
                file.path,
            )
            part.unlink()
            self._progress.add(-file.size)
        raise self._source.damaged(file)

    def _begun(self, part: Path, digests: Digests) -> int:
        """Add the bytes that an earlier attempt wrote to `part` to the digests. Returns the number of these bytes."""
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        return digests.add_file(part, self._progress)

    def _part(self, file: RemoteFile) -> Path:
        return self._folder / f"{file.path}{PART}"


class _Appending:
    """Appender of pieces to the part of a file, in a thread. Pieces that arrive during one write are written
    together.
    """

    def __init__(self, part: Path, digests: Digests) -> None:
        self._part, self._digests = part, digests
        self._waiting = bytearray()
        self._writing: asyncio.Task[None] | None = None

    async def add(self, piece: Piece) -> None:
        """Append a piece. If MAX_WAITING_BYTES or more are not written yet, wait for the write. Raises OSError, also
        for an earlier piece.
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
        """Wait until all pieces are written. Raises OSError."""
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


async def each_file(call: Callable[[RemoteFile], Awaitable[_T]], files: Sequence[RemoteFile]) -> dict[str, _T]:
    """Return the result of `call` for each file, by its path. FILES_AT_ONCE calls run at a time. The first failure
    cancels the other calls.
    """
    turns = asyncio.Semaphore(FILES_AT_ONCE)

    async def call_in_turn(file: RemoteFile) -> _T:
        async with turns:
            return await call(file)

    tasks = [asyncio.create_task(call_in_turn(file)) for file in files]
    try:
        return dict(zip([file.path for file in files], await asyncio.gather(*tasks), strict=True))
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence[asyncio.Task[_T]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _complete(part: Path, path: Path) -> None:
    with part.open("rb") as whole:
        os.fsync(whole.fileno())
    os.replace(part, path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
