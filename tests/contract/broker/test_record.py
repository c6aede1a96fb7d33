"""Records over both brokers: following, a bucket that is lost, races of writers, and the lease of a leader."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import pytest
from broker_harness import Harness, MemoryHarness, NatsHarness
from inprocess import until

from sie_broker import Broker, BrokerError, Entry, KeyValue, Write, WrongRevision
from sie_broker.record import LeaderLease, Record, RecordBucket, UnreadableRecord, retry_conflicts
from sie_contracts.wire import messages

WAIT_S = 30.0
NAME = "things"


class Thing(msgspec.Struct, frozen=True):
    size: int


def decode(entry: Entry) -> Thing:
    return msgspec.msgpack.decode(entry.value or b"", type=Thing)


async def bucket_of(harness: Harness, broker: Broker | None = None) -> RecordBucket:
    """Return a bucket that the broker keeps in memory, over a connection of its own."""
    return RecordBucket(broker or await harness.connect(), NAME, storage="memory")


async def restart(harness: Harness) -> None:
    """Restart the broker: all connections are lost and come back, and the buckets are gone."""
    await harness.crash()
    if isinstance(harness, MemoryHarness):
        harness.server.buckets.clear()
    await harness.restore()


class Owner:
    """The owner of a record, with the values of the record by key."""

    def __init__(self, bucket: RecordBucket, *, drops_unreadable: bool = False) -> None:
        self.sizes: dict[str, int] = {}
        self.losses = 0
        self.record = Record(bucket, decode, self._on_value, on_lost=self._on_lost, drops_unreadable=drops_unreadable)
        bucket.broker.on_reconnect(self.record.reconnected)

    def _on_value(self, key: str, value: Thing | None, revision: int) -> None:
        if value is None:
            self.sizes.pop(key, None)
        else:
            self.sizes[key] = value.size

    def _on_lost(self) -> None:
        self.losses += 1
        self.sizes = {}

    async def shows(self, sizes: dict[str, int]) -> None:
        await until(lambda: self.sizes == sizes, f"{sizes}, at last {self.sizes}", WAIT_S)

    async def follow(self) -> None:
        """Follow the record, again after each error, as the task of an owner does."""
        async with asyncio.timeout(WAIT_S):
            while self.record.is_stale:
                try:
                    await self.record.follow()
                except BrokerError:
                    await asyncio.sleep(0.05)


def thing(key: str, size: int) -> Write:
    return Write(key, messages.encode(Thing(size)))


async def test_values_that_are_there_and_those_that_come_are_told(harness: Harness) -> None:
    writer = await bucket_of(harness)
    await writer.write([thing("a", 1), thing("b", 2)])
    owner = Owner(await bucket_of(harness))
    assert await owner.record.follow()
    assert owner.sizes == {"a": 1, "b": 2}
    await writer.write([thing("a", 3), Write("b", None), thing("c", 4)])
    await owner.shows({"a": 3, "c": 4})
    assert not await owner.record.follow(), "it is the same bucket"
    await owner.record.close()
    await writer.write([thing("a", 5)])
    assert owner.sizes["a"] == 3


async def test_a_bucket_that_was_lost_with_its_broker_is_made_anew_and_followed(harness: Harness) -> None:
    """The values of the new bucket replace those of the old one, although their revisions are lower."""
    writer = await bucket_of(harness)
    for size in range(5):
        await writer.write([thing("a", size), thing("old", size)])
    owner = Owner(await bucket_of(harness))
    await owner.follow()
    assert owner.sizes == {"a": 4, "old": 4}
    before = owner.losses
    await restart(harness)
    await until(lambda: owner.record.is_stale, "the loss of the connection is known", WAIT_S)
    assert owner.sizes == {"a": 4, "old": 4}, "the values before stay until the bucket is read"
    await owner.follow()
    assert owner.losses == before + 1
    await owner.shows({})
    await writer.open()
    await writer.write([thing("a", 7)])
    await owner.shows({"a": 7})
    assert await owner.record.change("a", lambda before: Thing(before.size + 1 if before else 0)) == Thing(8)
    await owner.shows({"a": 8})


async def test_a_reconnect_while_a_bucket_is_read_makes_the_record_stale(harness: Harness) -> None:
    """The values may come from two buckets, so the record reads them again."""
    owner = Owner(await bucket_of(harness))

    async def read(bucket: KeyValue) -> tuple[Sequence[Entry], int]:
        await owner.record.reconnected()
        return await bucket.entries(), 0

    owner.record = Record(owner.record.bucket, decode, owner._on_value, read=read)
    assert await owner.record.follow()
    assert owner.record.is_stale
    assert not await owner.record.follow()
    assert not owner.record.is_stale


async def test_a_record_that_is_closed_while_it_is_read_stays_closed(harness: Harness) -> None:
    writer = await bucket_of(harness)
    await writer.write([thing("a", 1)])
    owner = Owner(await bucket_of(harness))

    async def read(bucket: KeyValue) -> tuple[Sequence[Entry], int]:
        await owner.record.close()
        return await bucket.entries(), 0

    owner.record = Record(owner.record.bucket, decode, owner._on_value, read=read)
    assert not await owner.record.follow()
    assert owner.record.is_stale
    assert owner.record._watch is None
    assert owner.sizes == {}


async def test_only_keys_that_are_wanted_are_decoded(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    writer = await bucket_of(harness)
    await writer.write([thing("mine/a", 1), Write("theirs/a", b"\xc1")])
    owner = Owner(await bucket_of(harness))
    owner.record = Record(owner.record.bucket, decode, owner._on_value, wants=lambda key: key.startswith("mine/"))
    await owner.record.follow()
    await writer.write([Write("theirs/b", b"\xc1"), thing("mine/b", 2)])
    await owner.shows({"mine/a": 1, "mine/b": 2})
    assert "cannot be decoded" not in caplog.text
    await owner.record.close()


async def test_a_watch_that_brings_lower_revisions_makes_the_record_stale(
    nats: Callable[..., Awaitable[NatsHarness]],
) -> None:
    """Another process removes the bucket and creates it anew, and no connection is lost."""
    harness = await nats()
    writer = await bucket_of(harness)
    for size in range(5):
        await writer.write([thing("a", size), thing("old", size)])
    owner = Owner(await bucket_of(harness))
    await owner.follow()
    broker = await harness.connect()
    assert await broker.delete_stream(f"KV_{NAME}")
    await (await bucket_of(harness, broker)).write([thing("a", 7)])
    await owner.shows({"a": 7})
    assert owner.record.is_stale
    await owner.follow()
    assert owner.sizes == {"a": 7}


async def test_racing_changes_all_land_once(harness: Harness) -> None:
    owners = [Owner(await bucket_of(harness)) for _ in range(4)]
    for owner in owners:
        await owner.follow()

    async def add(owner: Owner) -> None:
        for _ in range(10):
            await owner.record.change("count", lambda before: Thing((before.size if before else 0) + 1))

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(add(owner) for owner in owners))
    for owner in owners:
        await owner.shows({"count": 40})


async def test_a_change_to_an_equal_value_writes_nothing(harness: Harness) -> None:
    owner = Owner(await bucket_of(harness))
    await owner.record.change("a", lambda _: Thing(1))
    bucket = await owner.record.bucket.open()
    epoch = await bucket.epoch()
    assert await owner.record.change("a", lambda _: Thing(1)) == Thing(1)
    assert await bucket.epoch() == epoch


@pytest.mark.parametrize(("drops", "left"), [(False, {"a": 1, "b": 2, "c": 3}), (True, {"a": 1, "c": 3})])
async def test_an_entry_that_cannot_be_decoded_does_not_stop_the_rest(
    harness: Harness, drops: bool, left: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    """The entry is logged and not overwritten: `change` raises an error."""
    writer = await bucket_of(harness)
    await writer.write([thing("a", 1), thing("b", 2)])
    owner = Owner(await bucket_of(harness), drops_unreadable=drops)
    await owner.follow()
    await writer.write([Write("b", b"\xc1"), thing("c", 3)])
    await owner.shows(left)
    assert f"{NAME}: key b cannot be decoded" in caplog.text
    with pytest.raises(UnreadableRecord, match="key b cannot be read"):
        await owner.record.change("b", lambda _: Thing(9))
    entry = await writer.get("b")
    assert entry is not None
    assert entry.value == b"\xc1"
    late = Owner(await bucket_of(harness), drops_unreadable=drops)
    await late.follow()
    assert late.sizes == {"a": 1, "c": 3}


async def test_a_change_is_tried_a_bounded_number_of_times() -> None:
    tries = 0

    async def loses() -> None:
        nonlocal tries
        tries += 1
        raise WrongRevision("another writer was first")

    with pytest.raises(WrongRevision):
        await retry_conflicts(loses, attempts=5)
    assert tries == 5


# the lease of a leader


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_lease_passes_on_only_after_its_holder_was_silent(harness: Harness) -> None:
    one_clock, other_clock = Clock(), Clock()
    other_clock.now_s -= 500.0  # clocks of two machines
    first_lease = LeaderLease(await bucket_of(harness), "x", clock=one_clock)
    second_lease = LeaderLease(await bucket_of(harness), "x", clock=other_clock)
    assert await first_lease.acquire()
    for _ in range(10):
        one_clock.now_s += 10.0
        other_clock.now_s += 10.0
        assert await first_lease.acquire()
        assert not await second_lease.acquire()
    other_clock.now_s += 29.0
    assert not await second_lease.acquire()
    other_clock.now_s += 1.5
    assert await second_lease.acquire()
    assert not await first_lease.acquire()
    await second_lease.release()
    assert await first_lease.acquire(), "a lease that was released is free at once"


async def test_of_processes_that_take_a_free_lease_at_once_one_gets_it(harness: Harness) -> None:
    buckets = [await bucket_of(harness) for _ in range(4)]
    leases = [LeaderLease(bucket, "x") for bucket in buckets]
    async with asyncio.timeout(WAIT_S):
        assert sorted(await asyncio.gather(*(lease.acquire() for lease in leases))) == [False] * 3 + [True]


async def test_a_lease_that_was_lost_with_its_broker_is_taken_again(harness: Harness) -> None:
    lease = LeaderLease(await bucket_of(harness), "x")
    assert await lease.acquire()
    await restart(harness)
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                held = await lease.acquire()
            except BrokerError:
                await asyncio.sleep(0.05)
                continue
            break
    assert held
