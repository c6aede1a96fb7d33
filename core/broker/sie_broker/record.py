"""Replicated records in key-value buckets: watch, decode, reopen, compare-and-set, and a leader's lease.

    Bucket ──open, created if it does not exist──► KeyValue
    Record[T] ◄── read all, then watch ── bucket        owner.on_value(key, value, revision)
    Record[T].change(key, make) ── get, make, write at that revision ──► bucket
    LeaderLease ── a key that the leader renews ──► bucket

The owner of a record is the object that stores its values. For each change, the owner's callback `on_value` gets the
key, the new value and the revision.

A broker that restarts loses its buckets in memory. So a record is stale after a reconnect, because its bucket may be
lost. `follow` then opens the bucket, or creates it if it is missing. If the creation time has changed, the bucket is
new: `follow` reads all values, calls `on_lost`, passes the values to the owner and watches the bucket again. The owner
keeps its last values until then.

If two writers compete, the later writer gets WrongRevision, and the broker stores no part of its batch. `change` reads
the value again and repeats the attempt after a random pause that grows. It makes at most MAX_ATTEMPTS attempts.

If a watch receives no entries for two seconds, the broker client reads the state of the bucket and the missed entries.
A bucket may also be lost without a reconnect. Another process then creates it again, with revisions from 1 on. So the
record becomes stale if an entry has a revision that is not above the last revision.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

from sie_broker import BrokerError, Entry, KeyValue, PayloadTooBig, Store, Subscription, Write, WrongRevision
from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire import messages
from sie_contracts.wire.topology import LEASES_BUCKET

MAX_ATTEMPTS = 16  # largest number of attempts at one change; an attempt fails if another writer changes the key
# A random pause follows each failed attempt. Its upper limit grows from FIRST_PAUSE_S to MAX_PAUSE_S seconds.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.002, 0.1
LEASE_S = 30.0  # seconds after which an unchanged lease is lost; the leader must renew its lease more often
RELEASED_AGE_S = 60.0
T = TypeVar("T")
R = TypeVar("R")
_logger = logging.getLogger("sie.broker")


class UnreadableRecord(BrokerError):
    """Error for a stored value that cannot be decoded. The value stays in the bucket."""


async def retry_conflicts(attempt: Callable[[], Awaitable[R]], attempts: int | None = MAX_ATTEMPTS) -> R:
    """Call `attempt` until it raises no WrongRevision, and return its result. Raises WrongRevision if all `attempts`
    attempts raise it. With `attempts` None, the number is unlimited, and the caller must set a time-out.

    A random pause follows each failed attempt, so that competing writers do not collide again. The longest pause is at
    first FIRST_PAUSE_S, and doubles after each attempt up to MAX_PAUSE_S.
    """
    pause_s = FIRST_PAUSE_S
    for number in itertools.count(1):
        try:
            return await attempt()
        except WrongRevision:
            if number == attempts:
                raise
        await asyncio.sleep(random.uniform(0, pause_s))  # noqa: S311 random only to separate competing writers
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)
    raise AssertionError("unreachable")


class RecordBucket:
    """Bucket that is opened at its first use. After a failed operation, the next operation opens the bucket again, and
    creates it if the broker has lost it.
    """

    def __init__(
        self,
        broker: Store,
        name: str,
        *,
        storage: str = "file",
        replicas: int = 1,
        max_age_s: float = 0.0,
        removed_age_s: float = 0.0,
    ) -> None:
        self.broker = broker
        self.name = name
        self._key_value = functools.partial(
            broker.key_value, name, storage=storage, replicas=replicas, max_age_s=max_age_s, removed_age_s=removed_age_s
        )
        self._opened: KeyValue | None = None

    async def open(self) -> KeyValue:
        """Open the bucket, even if it is open already, because the broker may have lost it. Raises BrokerError."""
        with self.reporting():
            self._opened = await self._key_value()
        return self._opened

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Context manager around an operation. If the operation raises BrokerError, the error's text is stored in
        `Connection.troubles`, and the next operation opens the bucket again. This is not done for WrongRevision and
        PayloadTooBig, which do not show a fault of the bucket.
        """
        try:
            yield
        except (WrongRevision, PayloadTooBig):
            raise
        except BrokerError as error:
            self._opened = None
            if self.name not in self.broker.troubles:
                _logger.info("bucket %s cannot be used, the next operation opens it again: %s", self.name, error)
            self.broker.troubles[self.name] = str(error)
            raise

    async def get(self, key: str) -> Entry | None:
        return await self.use(lambda bucket: bucket.get(key))

    async def write(self, writes: list[Write]) -> int:
        return await self.use(lambda bucket: bucket.write(writes))

    async def use(self, operation: Callable[[KeyValue], Awaitable[R]]) -> R:
        """Call an operation with the open bucket, and return its result. Raises BrokerError."""
        bucket = self._opened or await self.open()
        with self.reporting():
            result = await operation(bucket)
        self.broker.troubles.pop(self.name, None)
        return result


class Record(Generic[T]):
    """Reader and writer of the decoded values of a bucket. The record passes values and changes to its owner. The
    owner stores the values.

    One task calls `follow` until it succeeds, and again whenever `is_stale` is True. Any task may call `change`.
    """

    def __init__(
        self,
        bucket: RecordBucket,
        decode: Callable[[Entry], T],
        on_value: Callable[[str, T | None, int], None],
        *,
        on_lost: Callable[[], None] = lambda: None,
        read: Callable[[KeyValue], Awaitable[tuple[Sequence[Entry], int]]] | None = None,
        drops_unreadable: bool = False,
        wants: Callable[[str], bool] = lambda key: True,
    ) -> None:
        """Store the callbacks of the record's owner.

        `decode` returns the value of an entry, or raises an error of UNDECODABLE. Keys for which `wants` returns False
        are ignored.

        `on_value(key, value, revision)` is called for each value that a read or the watch delivers, and for each value
        that `change` has written; the value is None for a removed key. After a value that `change` has written, the
        watch may deliver an earlier value. So the owner must ignore a revision below the last revision of the key.
        `on_lost` is called before the first value of a new bucket or a new watch. All earlier values and revisions are
        then invalid.

        `read` returns (entries, revision). The entries are passed to `on_value` before the watch starts. The watch
        delivers all entries after `revision`, and perhaps earlier entries. By default, `read` returns all entries.
        With `drops_unreadable`, an entry that cannot be decoded counts as removed. Otherwise the key keeps its previous
        value.
        """
        self.bucket = bucket
        self.is_stale = True
        self._decode = decode
        self._on_value = on_value
        self._on_lost = on_lost
        self._read = read or _read_all
        self._drops_unreadable = drops_unreadable
        self._wants = wants
        self._watch: Subscription | None = None
        self._created = ""  # time at which the watched bucket was created
        self._last = 0  # last revision that the watch delivered
        self._reconnects = 0
        self._closings = 0

    async def follow(self) -> bool:
        """Read all values, and watch the bucket for later values. Do nothing if this bucket is already watched.

        Return True if values were read, and False if the bucket is already watched or `close` was called meanwhile.
        Raises BrokerError; the owner then keeps its values.
        """
        with self.bucket.reporting():
            is_read = await self._follow()
        self.bucket.broker.troubles.pop(self.bucket.name, None)
        return is_read

    async def _follow(self) -> bool:
        reconnects, closings = self._reconnects, self._closings
        bucket = await self.bucket.open()
        created, _, revision = (await bucket.epoch()).rpartition(":")
        if self._watch is not None and created == self._created:
            self.is_stale = self._reconnects != reconnects
            return False
        entries, after = await self._read(bucket)
        await self._end_watch()
        if closings != self._closings:
            return False
        self._on_lost()
        for entry in entries:
            self.apply(entry)
        # The revision is from the leader of the stream, but the entries may be from a replica that lacks the latest
        # entries. So the watch starts at the lower of both revisions, and delivers the missing entries.
        self._last = min(int(revision), after)
        watch = await bucket.watch(self._on_entry, self._last)
        if closings != self._closings:
            await watch.stop()
            return False
        self._watch = watch
        self._created, self.is_stale = created, self._reconnects != reconnects
        return True

    async def close(self) -> None:
        """Stop the watch, even if a running call of `follow` is just starting it. `follow` may be called again."""
        self._closings += 1
        await self._end_watch()

    async def _end_watch(self) -> None:
        watch, self._watch, self.is_stale = self._watch, None, True
        if watch is not None:
            await watch.stop()

    async def reconnected(self) -> None:
        """Mark the record as stale, because a restarted broker may have lost the bucket. The owner registers this
        method by `Connection.on_reconnect`.
        """
        self._reconnects += 1
        self.is_stale = True

    async def _on_entry(self, entry: Entry) -> None:
        if entry.revision <= self._last:  # revisions of a bucket always increase, so this entry is from a new bucket
            self._created, self.is_stale = "", True
            self._on_lost()
        self._last = entry.revision
        self.apply(entry)

    def apply(self, entry: Entry, on_value: Callable[[str, T | None, int], object] | None = None) -> None:
        """Decode an entry and pass its value to `on_value`, by default the callback that this object was created with.
        Log an error if the entry cannot be decoded.
        """
        if not self._wants(entry.key):
            return
        try:
            value = None if entry.value is None else self._decode(entry)
        except UNDECODABLE as error:
            outcome = "so it counts as removed" if self._drops_unreadable else "so its previous value stays"
            _logger.error("bucket %s: key %s cannot be decoded, %s: %s", self.bucket.name, entry.key, outcome, error)
            if not self._drops_unreadable:
                return
            value = None
        (on_value or self._on_value)(entry.key, value, entry.revision)

    async def refresh(self, key: str) -> None:
        """Read the value of a key again, and pass it to `on_value` if the key exists. Raises BrokerError."""
        entry = await self.bucket.get(key)
        if entry is not None:
            self.apply(entry)

    async def change(self, key: str, make: Callable[[T | None], T | None]) -> T | None:
        """Call `make` with the current value of a key (None for a missing key), write the result, and return the value
        that is then stored. If `make` returns None or an equal value, nothing is written. If another writer has changed
        the key meanwhile, `make` is called again. Raises BrokerError, UnreadableRecord, WrongRevision after
        MAX_ATTEMPTS, and any exception of `make`.
        """

        async def attempt() -> T | None:
            entry = await self.bucket.get(key)
            before, revision = None, 0
            if entry is not None:
                revision = entry.revision
                try:
                    before = self._decode(entry)
                except UNDECODABLE as error:
                    raise UnreadableRecord(f"{self.bucket.name}: key {key} cannot be read: {error}") from error
            after = make(before)
            if after is None or after == before:
                after = before
            else:
                revision = await self.bucket.write([Write(key, messages.encode(after), revision)])
            if after is not None:
                self._on_value(key, after, revision)
            return after

        return await retry_conflicts(attempt)


async def _read_all(bucket: KeyValue) -> tuple[Sequence[Entry], int]:
    entries = await bucket.entries()
    return entries, max((entry.revision for entry in entries), default=0)


def leases_of(broker: Store, *, storage: str, replicas: int) -> RecordBucket:
    """Return the bucket of all leases: one for each job, and one for each task that one gateway does for all gateways.
    A released lease is a removed key. Its marker expires early, after RELEASED_AGE_S: only watches need markers, and no
    process watches this bucket.
    """
    return RecordBucket(broker, LEASES_BUCKET, storage=storage, replicas=replicas, removed_age_s=RELEASED_AGE_S)


class LeaderLease:
    """Election of a leader among several processes. The leader has the lease, a key that it renews. For a short time,
    two processes or no process may be the leader, so the work of a leader must be correct even then.

    The clocks of two processes are never compared. A process that is not the leader measures on its own clock how long
    the key stays unchanged. After `lease_s` seconds, or at once if the key is missing, this process acquires the key by
    compare-and-set. client-go's leader election has the same rule.
    """

    def __init__(
        self, bucket: RecordBucket, key: str, *, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = bucket
        self._key = key
        self._holder = uuid.uuid4().hex.encode()
        self._lease_s = lease_s
        self._clock = clock
        # last revision of the key that this process has read, and time when it first read this revision
        self._observed = (0, 0.0)

    async def acquire(self) -> bool:
        """Acquire the lease, or renew it. Return whether this process is the leader. Raises BrokerError."""
        entry = await self._bucket.get(self._key)
        now_s = self._clock()
        revision = 0 if entry is None else entry.revision
        if revision != self._observed[0]:
            self._observed = revision, now_s
        if entry is not None and entry.value != self._holder and now_s - self._observed[1] < self._lease_s:
            return False
        try:
            self._observed = await self._bucket.write([Write(self._key, self._holder, revision)]), now_s
        except WrongRevision:
            return False
        return True

    async def release(self) -> None:
        """Release the lease if this process has it. Another process can acquire it at once. Raises BrokerError."""
        entry = await self._bucket.get(self._key)
        if entry is not None and entry.value == self._holder:
            with contextlib.suppress(WrongRevision):  # another process may have acquired the lease meanwhile
                await self._bucket.write([Write(self._key, None, entry.revision)])
