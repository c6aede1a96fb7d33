"""Broker in this process: its server (MemoryServer), its buckets, and the connection to it (MemoryBroker)."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

from sie_broker import Entry, KeyValue, Subscription, Write, WrongRevision
from sie_broker.limits import API_TIMEOUT_S, STOP_TIMEOUT_S
from sie_broker.memory.connection import Exchange, MemoryConnection
from sie_broker.memory.queue import MemoryAdministration
from sie_broker.tasks import guarded

# Largest number of entries that wait for the handler of a watch. The watch reads further entries from the bucket later.
_HELD_ENTRIES = 4096


class MemoryBucket:
    """Bucket: the last entry of each key, in order of revision. A removed key stays as an entry without a value.

    `age` drops entries that were written more than `max_age_s` seconds ago, or removed more than `removed_age_s`
    seconds ago (0: never). Each read or write of entries calls `age` first.
    """

    def __init__(self, created: str, clock: Callable[[], float], max_age_s: float, removed_age_s: float) -> None:
        self.created = created
        self.revision = 0
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.watches: set[MemoryWatch] = set()
        self._clock = clock
        self._max_age_s = max_age_s
        self._removed_age_s = removed_age_s
        self._written_s: OrderedDict[str, float] = OrderedDict()
        self._removed_s: OrderedDict[str, float] = OrderedDict()

    def age(self) -> None:
        for since_s, age_s in ((self._written_s, self._max_age_s), (self._removed_s, self._removed_age_s)):
            horizon_s = self._clock() - age_s
            while since_s and next(iter(since_s.values())) <= horizon_s:
                self._drop(next(iter(since_s)))

    def purge(self, below: str) -> None:
        for key in [key for key in self.entries if key.startswith(below)]:
            self._drop(key)

    def erase(self, entry: Entry) -> None:
        present = self.entries.get(entry.key)
        if present is not None and present.revision == entry.revision:
            self._drop(entry.key)

    def _drop(self, key: str) -> None:
        del self.entries[key]
        self._written_s.pop(key, None)
        self._removed_s.pop(key, None)

    def since(self, revision: int) -> list[Entry]:
        self.age()
        newest_first = []
        for entry in reversed(self.entries.values()):
            if entry.revision <= revision:
                break
            newest_first.append(entry)
        return newest_first[::-1]

    def write(self, writes: list[Write]) -> int:
        self.age()
        for write in writes:
            last = self.entries.get(write.key)
            revision = last.revision if last is not None else 0
            absent = last is None or last.value is None
            if write.expected is not None and write.expected != revision and not (write.expected == 0 and absent):
                raise WrongRevision(f"{write.key}: the revision is {revision}, not {write.expected}")
        for write in writes:
            self.revision += 1
            entry = self.entries[write.key] = Entry(write.key, write.value, self.revision)
            self.entries.move_to_end(write.key)
            self._removed_s.pop(write.key, None)
            if self._removed_age_s and write.value is None:
                self._removed_s[write.key] = self._clock()
            if self._max_age_s:
                self._written_s[write.key] = self._clock()
                self._written_s.move_to_end(write.key)
            for watch in self.watches:
                watch.written(entry)
        return self.revision


class MemoryKeyValue:
    def __init__(self, connection: MemoryConnection, bucket: MemoryBucket) -> None:
        self._connection = connection
        self._bucket = bucket

    async def get(self, key: str) -> Entry | None:
        await self._connection.reach(API_TIMEOUT_S)
        self._bucket.age()
        entry = self._bucket.entries.get(key)
        return entry if entry is not None and entry.value is not None else None

    async def entries(self, within: str = "") -> list[Entry]:
        await self._connection.reach(API_TIMEOUT_S)
        self._bucket.age()
        below = f"{within}." if within else ""
        entries = (
            entry for entry in self._bucket.entries.values() if entry.value is not None and entry.key.startswith(below)
        )
        return sorted(entries, key=lambda entry: entry.key)

    async def since(self, revision: int) -> list[Entry]:
        await self._connection.reach(API_TIMEOUT_S)
        return self._bucket.since(revision)

    async def write(self, writes: list[Write]) -> int:
        if not writes or len({write.key for write in writes}) != len(writes):
            raise ValueError("a batch must write at least one key, and each key only once")
        await self._connection.reach(API_TIMEOUT_S)
        return self._bucket.write(writes)

    async def purge(self, within: str) -> None:
        await self._connection.reach(API_TIMEOUT_S)
        self._bucket.purge(f"{within}.")

    async def erase(self, entry: Entry) -> None:
        await self._connection.reach(API_TIMEOUT_S)
        self._bucket.erase(entry)

    async def epoch(self) -> str:
        await self._connection.reach(API_TIMEOUT_S)
        return f"{self._bucket.created}:{self._bucket.revision}"

    async def reaches(self, revision: int) -> bool:
        await self._connection.reach(API_TIMEOUT_S)
        return bool(self._bucket.since(revision - 1))

    async def watch(self, handler: Callable[[Entry], Awaitable[None]], after: int = 0) -> Subscription:
        await self._connection.reach(API_TIMEOUT_S)
        return MemoryWatch(self._connection, self._bucket, handler, after)


class MemoryWatch:
    """Watch of a bucket. One task passes the queued entries to the handler. The task exists only while entries wait."""

    def __init__(
        self,
        connection: MemoryConnection,
        bucket: MemoryBucket,
        handler: Callable[[Entry], Awaitable[None]],
        after: int,
    ) -> None:
        self._connection = connection
        self._bucket = bucket
        self._handler = handler
        self._last = after
        self._held: deque[Entry] = deque()
        self._is_behind = False  # whether the bucket has entries after the last queued entry
        self._task: asyncio.Task[None] | None = None
        connection.watches.add(self)
        bucket.watches.add(self)
        self.catch_up()

    def written(self, entry: Entry) -> None:
        self._is_behind |= not self._connection.live or len(self._held) >= _HELD_ENTRIES
        if not self._is_behind:  # if earlier entries are not queued yet, `catch_up` queues this entry after them
            self._held.append(entry)
            self._run()

    def catch_up(self) -> None:
        """Queue the entries after the last queued entry: entries from before the watch, and entries that were written
        while the connection was lost or the queue was full.
        """
        if self._connection.live:
            self._is_behind = False
            self._held.extend(self._bucket.since(self._held[-1].revision if self._held else self._last))
            self._run()

    def _run(self) -> None:
        if self._held and self._task is None:
            self._task = self._connection.own(self._handle(), "a watch")

    async def _handle(self) -> None:
        while self._held:
            entry = self._held.popleft()
            self._last = entry.revision
            await guarded("the handler of a watch", self._handler(entry))
        self._task = None
        if self in self._bucket.watches:
            self.catch_up()

    async def stop(self) -> None:
        self.abandon()
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
            task.cancel()

    def abandon(self) -> None:
        self._connection.watches.discard(self)
        self._bucket.watches.discard(self)


class MemoryStore(MemoryConnection):
    _server: MemoryServer

    async def key_value(
        self,
        bucket: str,
        *,
        storage: str = "file",
        replicas: int = 1,
        max_age_s: float = 0.0,
        removed_age_s: float = 0.0,
    ) -> KeyValue:
        await self.reach(API_TIMEOUT_S)
        opened = self._server.buckets.get(bucket)
        if opened is None:
            stamp, clock = self._server.stamp(), self._server.clock
            opened = self._server.buckets[bucket] = MemoryBucket(stamp, clock, max_age_s, removed_age_s)
        return MemoryKeyValue(self, opened)


class MemoryBroker(MemoryAdministration, MemoryStore):
    """Broker inside this process, with all protocols of `sie_broker`. `MemoryServer.connect` creates the broker."""

    _server: MemoryServer


class MemoryServer(Exchange):
    """In-process server: streams, buckets, and the routing of messages between connections."""

    def __init__(
        self,
        *,
        max_payload: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(max_payload, clock, wall_clock)
        self.buckets: dict[str, MemoryBucket] = {}

    def connect(self, name: str) -> MemoryBroker:
        broker = MemoryBroker(self, name)
        self._connections.add(broker)
        return broker
