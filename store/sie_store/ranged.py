"""The files of a snapshot out of a bucket: ranged reads, some at once, taken in their order.

    manifest ──► parts of all files in order ──► Limits.parts_at_once reads ahead ──► Filling: appended, digested,
    renamed when right
                                                                                 └──► Checking: digested

Since a file only ever grows at its end, its length is how far it is: the next try goes on there, whoever made the first
one. At most the parts that are read ahead, and the one that is taken, are in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sie_store import object_stores
from sie_store.durable import PART
from sie_store.manifest import FetchFailed, Manifest, digest
from sie_store.object_stores import ObjectMissing, Patience, RangeMissing, StoreError
from sie_store.progress import Progress

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_logger = logging.getLogger("sie.store")
CHUNK_BYTES = 1 << 18
ROUNDS = 2  # a file that comes without its digest is read once more: what was there of it may have been damaged


@dataclass(frozen=True)
class Limits(Patience):
    """What one transfer may use. `stall_s` is the longest wait for the next bytes; a part is tried `tries` times in
    all.
    """

    part_bytes: int = 8 << 20
    parts_at_once: int = 8


@dataclass(frozen=True)
class Part:
    """Some bytes of a file. `is_first`: of those that are read; an empty file has one part without bytes."""

    name: str
    start: int
    end: int
    is_first: bool
    is_last: bool


class Damaged(FetchFailed):
    """What the bucket holds is not what the manifest there says. A push repairs it, so the load is tried again."""

    def __init__(self, what: str, wrong: str) -> None:
        super().__init__("NETWORK", f"{what} is damaged there, {wrong}: `sie weights push --force` writes it again")


class Reading:
    """Reads of the files of a snapshot below `prefix`."""

    def __init__(self, store: ObjectStore, prefix: str, manifest: Manifest, progress: Progress, limits: Limits) -> None:
        self.what = progress.what
        self.manifest, self.progress = manifest, progress
        self._store, self._prefix, self._limits = store, prefix, limits

    def parts(self, name: str, start: int = 0) -> Iterator[Part]:
        """The parts of a file from byte `start` on."""
        size = self.manifest.files[name].bytes
        for at in range(start, max(size, start + 1), self._limits.part_bytes):
            end = min(size, at + self._limits.part_bytes)
            yield Part(name, at, end, at == start, end == size)

    async def each(self, parts: Iterator[Part], take: Callable[[Part, bytearray], None]) -> None:
        """Have `take` called with every part in order, in a thread. Raises Damaged, StoreError, and what
        `take` does.
        """
        ahead = deque[tuple[Part, asyncio.Task[bytearray]]]()
        try:
            while True:
                while len(ahead) < self._limits.parts_at_once and (part := next(parts, None)) is not None:
                    ahead.append((part, asyncio.create_task(self._read(part))))
                if not ahead:
                    return
                part, reading = ahead.popleft()
                await asyncio.to_thread(take, part, await reading)
        finally:
            for _, reading in ahead:
                reading.cancel()
            await asyncio.gather(*(reading for _, reading in ahead), return_exceptions=True)

    async def _read(self, part: Part) -> bytearray:
        """The bytes of a part. What came is kept between tries."""
        data = bytearray()
        tries = 0
        while part.start + len(data) < part.end:
            try:
                await self._read_on(part, data)
            except (ObjectMissing, RangeMissing) as error:
                raise Damaged(self.what, f"{part.name}: {error}") from error
            except StoreError as error:
                tries += 1
                await self._limits.pause(error, tries)
        return data

    async def _read_on(self, part: Part, data: bytearray) -> None:
        """One read of what `data` lacks of a part. Raises Damaged, StoreError."""
        import obstore
        from obstore.exceptions import BaseError

        wanted, size = (part.start + len(data), part.end), self.manifest.files[part.name].bytes
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._limits.stall_s) as patience:
                answer = await obstore.get_async(self._store, f"{self._prefix}/{part.name}", options={"range": wanted})
                if answer.meta["size"] != size:
                    raise Damaged(self.what, f"{part.name} has {answer.meta['size']} bytes, the manifest says {size}")
                async for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
                    data += chunk
                    self.progress.add(len(chunk))
                    patience.reschedule(loop.time() + self._limits.stall_s)
        except TimeoutError as error:
            raise StoreError(f"nothing came for {self._limits.stall_s:g} s") from error
        except (BaseError, OSError) as error:
            raise object_stores.failure(error) from error
        if part.start + len(data) < part.end:
            raise StoreError(f"the answer ended at byte {part.start + len(data)} of {part.end}")


class Filling:
    """The files of a snapshot into `folder`, a partial one of the local cache."""

    def __init__(self, reading: Reading, folder: Path) -> None:
        self._reading, self._folder = reading, folder
        self._has: dict[str, int] = {}  # bytes of the files that are not whole yet
        self._damaged: list[str] = []
        self._growing: IO[bytes] | None = None
        self._digest = hashlib.sha256()

    async def all(self) -> None:
        """Bring every file of the manifest. Raises FetchFailed, StoreError, OSError."""
        manifest, progress = self._reading.manifest, self._reading.progress
        await asyncio.to_thread(self._look)
        missing = sum(manifest.files[name].bytes - size for name, size in self._has.items())
        await asyncio.to_thread(progress.expect, manifest.bytes, manifest.bytes - missing)
        for _ in range(ROUNDS):
            try:
                parts = (part for name, size in self._has.items() for part in self._reading.parts(name, size))
                await self._reading.each(parts, self._append)
            finally:
                if self._growing is not None:
                    self._growing.close()
            if not self._damaged:
                return
            for name in self._damaged:
                _logger.warning("%s: %s does not have the SHA-256 that its manifest names", self._reading.what, name)
                progress.add(-manifest.files[name].bytes)
            self._has, self._damaged = dict.fromkeys(self._damaged, 0), []
        raise Damaged(self._reading.what, f"{next(iter(self._has))} does not have the SHA-256 of the manifest")

    def _look(self) -> None:
        """Keep what is there and right, and note how far the others are."""
        for name, fact in self._reading.manifest.files.items():
            path, part = self._folder / name, self._part(name)
            if path.exists():
                if path.stat().st_size == fact.bytes and digest(path, self._reading.progress.touch) == fact.sha256:
                    part.unlink(missing_ok=True)
                    continue
                path.unlink()  # never written into: it may be a link to somebody's file
            self._has[name] = part.stat().st_size if part.exists() else 0
            if self._has[name] > fact.bytes:
                part.unlink()
                self._has[name] = 0

    def _append(self, part: Part, data: bytearray) -> None:
        """Write a part; with the last one the file gets its name, or goes if its digest is another one.
        Raises OSError.
        """
        path = self._part(part.name)
        if part.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._digest, self._growing = hashlib.sha256(), path.open("a+b")
            self._growing.seek(0)
            while piece := self._growing.read(CHUNK_BYTES):
                self._digest.update(piece)
                self._reading.progress.touch()
        growing: Any = self._growing
        growing.write(data)
        growing.flush()
        self._digest.update(data)
        if not part.is_last:
            return
        os.fsync(growing.fileno())
        growing.close()
        if self._digest.hexdigest() == self._reading.manifest.files[part.name].sha256:
            os.replace(path, self._folder / part.name)
        else:
            path.unlink()
            self._damaged.append(part.name)

    def _part(self, name: str) -> Path:
        return self._folder / (name + PART)


class Checking:
    """The digests of the files of a snapshot, of which nothing is kept."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._digest = hashlib.sha256()
        self._wrong: list[str] = []

    async def wrong(self, names: list[str]) -> list[str]:
        """Which of these files have another digest than the manifest says, a line for each. Raises FetchFailed,
        StoreError.
        """
        await self._reading.each((part for name in names for part in self._reading.parts(name)), self._take)
        return self._wrong

    def _take(self, part: Part, data: bytearray) -> None:
        if part.is_first:
            self._digest = hashlib.sha256()
        self._digest.update(data)
        wanted, found = self._reading.manifest.files[part.name].sha256, self._digest.hexdigest()
        if part.is_last and found != wanted:
            self._wrong.append(f"{part.name} has the SHA-256 {found[:16]}.., the manifest says {wanted[:16]}..")
