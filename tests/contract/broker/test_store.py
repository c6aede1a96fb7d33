"""Promises of every broker about buckets. Each test runs in memory and at a real nats-server."""

from __future__ import annotations

import asyncio

import pytest
from broker_harness import WAIT_S, Box, Harness

from sie_broker import Broker, Entry, Write, WrongRevision


async def test_keys_are_written_by_compare_and_set(harness: Harness) -> None:
    """A write at a revision creates, updates, removes or creates again. A write that loses stores nothing."""
    first_broker, two = await harness.connect("one"), await harness.connect("two")
    bucket, same = await first_broker.key_value("things"), await two.key_value("things")
    assert await bucket.get("a.b") is None
    first = await bucket.write([Write("a.b", b"1", 0)])
    assert await same.get("a.b") == Entry("a.b", b"1", first)
    with pytest.raises(WrongRevision):
        await same.write([Write("a.b", b"2", 0)])
    with pytest.raises(WrongRevision):
        await same.write([Write("a.b", b"2", first + 5)])
    second = await same.write([Write("a.b", b"2", first)])
    assert second > first

    removed = await bucket.write([Write("a.b", None, second)])
    assert await bucket.get("a.b") is None
    assert await bucket.entries() == []
    with pytest.raises(WrongRevision):
        await bucket.write([Write("a.b", b"3", second)])
    again = await bucket.write([Write("a.b", b"3", 0)])
    assert again > removed
    assert await bucket.write([Write("a.b", b"4")]) > again
    assert (await bucket.entries())[0].value == b"4"
    with pytest.raises(ValueError, match="key"):
        Write("a b", b"")
    with pytest.raises(ValueError, match="once"):
        await bucket.write([Write("a", b"1"), Write("a", b"2")])


async def test_entries_are_read_below_the_first_parts_of_their_keys(harness: Harness) -> None:
    bucket = await (await harness.connect()).key_value("things")
    await bucket.write([Write(key, b"1") for key in ("a", "a.b", "a.b.c", "a.d", "ab.c", "b.a")])
    assert [entry.key for entry in await bucket.entries("a")] == ["a.b", "a.b.c", "a.d"]
    assert [entry.key for entry in await bucket.entries("a.b")] == ["a.b.c"]
    assert await bucket.entries("c") == []


async def test_what_was_written_since_is_read_in_order_with_what_was_removed(harness: Harness) -> None:
    bucket = await (await harness.connect()).key_value("things")
    first = await bucket.write([Write("a", b"1"), Write("b.c", b"2"), Write("d", b"3")])
    assert await bucket.since(first) == []
    last = await bucket.write([Write("b.c", b"4"), Write("d", None), Write("e", b"5")])
    assert [(entry.key, entry.value) for entry in await bucket.since(first)] == [
        ("b.c", b"4"),
        ("d", None),
        ("e", b"5"),
    ]
    assert [entry.revision for entry in await bucket.since(first - 3)] == [first - 2, last - 2, last - 1, last]


async def test_a_batch_is_written_whole_or_not_at_all(harness: Harness) -> None:
    broker = await harness.connect()
    bucket = await broker.key_value("things")
    last = await bucket.write([Write("a", b"1", 0), Write("b", b"1", 0), Write("c", b"1", 0)])
    assert [entry.key for entry in await bucket.entries()] == ["a", "b", "c"]
    before = await bucket.epoch()

    for losing in (
        [Write("a", b"2"), Write("b", b"2", 999)],
        [Write("a", b"2", 999), Write("d", b"2", 0)],
        [Write("d", b"2", 0), Write("c", b"2", 0)],
    ):
        with pytest.raises(WrongRevision):
            await bucket.write(losing)
    assert await bucket.epoch() == before
    assert {entry.value for entry in await bucket.entries()} == {b"1"}

    await bucket.write([Write("a", None, 1), Write("d", b"2", 0)])
    assert await bucket.write([Write("a", b"3", 0), Write("d", b"3", last + 2), Write("e", b"3")]) == last + 5
    assert [(entry.key, entry.value) for entry in await bucket.entries()] == [
        ("a", b"3"),
        ("b", b"1"),
        ("c", b"1"),
        ("d", b"3"),
        ("e", b"3"),
    ]


async def test_racing_writers_win_once(harness: Harness) -> None:
    """Twenty writers increment a counter by compare-and-set, and no increment is lost."""
    connections = [await harness.connect(f"writer {number}") for number in range(4)]
    buckets = [await broker.key_value("things") for broker in connections]
    await buckets[0].write([Write("n", b"0", 0), Write("by", b"", 0)])

    async def raise_it(number: int) -> None:
        bucket = buckets[number % 4]
        while True:
            entry = await bucket.get("n")
            assert entry is not None
            assert entry.value is not None
            try:
                await bucket.write(
                    [Write("n", b"%d" % (int(entry.value) + 1), entry.revision), Write("by", b"%d" % number)]
                )
                return
            except WrongRevision:
                continue

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(raise_it(number) for number in range(20)))
    final = await buckets[0].get("n")
    assert final is not None
    assert final.value == b"20"


async def test_the_epoch_names_contents(harness: Harness) -> None:
    broker = await harness.connect()
    bucket, second_bucket = await broker.key_value("things"), await broker.key_value("others")
    empty = await bucket.epoch()
    assert empty == await (await broker.key_value("things")).epoch()
    assert empty != await second_bucket.epoch()
    revision = await bucket.write([Write("a", b"1")])
    full = await bucket.epoch()
    assert full != empty
    assert full.rsplit(":", 1) == [empty.rsplit(":", 1)[0], str(revision)]


async def test_many_keys_are_read_in_one_go(harness: Harness) -> None:
    broker = await harness.connect()
    bucket = await broker.key_value("things")
    for start in range(0, 1200, 100):
        await bucket.write([Write(f"k{number:04}", b"%d" % number) for number in range(start, start + 100)])

    assert [entry.value for entry in await bucket.entries()] == [b"%d" % number for number in range(1200)]


async def test_a_watch_sees_each_write_once_in_order(harness: Harness) -> None:
    """The watch begins after the given revision and reports removals and writes of other connections. A failing handler
    does not end it.
    """
    broker, writer = await harness.connect("reader"), await harness.connect("writer")
    bucket, written = await broker.key_value("things"), await writer.key_value("things")
    for number in range(5):
        await written.write([Write(f"k{number}", b"old")])
    box: Box[Entry] = Box()

    async def handle(entry: Entry) -> None:
        box.put(entry)
        if entry.revision == 4:
            raise RuntimeError("planted")

    watch = await bucket.watch(handle, after=2)
    assert [entry.revision for entry in await box.fill(3)] == [3, 4, 5]
    for number in range(300):
        await written.write([Write(f"n{number}", b"%d" % number)])
    await written.write([Write("n0", None)])
    assert [entry.revision for entry in await box.fill(304)] == list(range(3, 307))
    assert box.items[-1] == Entry("n0", None, 306)

    await watch.stop()
    await written.write([Write("k", b"unseen")])
    await broker.flush(WAIT_S)
    assert len(box.items) == 304


async def test_a_watch_that_falls_behind_ends_at_the_newest_value(harness: Harness) -> None:
    """A value that was overwritten before it was handed over may be left out; the values that are seen are in order."""
    broker = await harness.connect()
    bucket = await broker.key_value("things")
    box: Box[Entry] = Box()
    last_seen = asyncio.Event()

    async def handle(entry: Entry) -> None:
        box.put(entry)
        if entry.value == b"last":
            last_seen.set()

    watch = await bucket.watch(handle)
    for _ in range(100):
        await bucket.write([Write("k", b"x")])
    await bucket.write([Write("k", b"last")])
    async with asyncio.timeout(WAIT_S):
        await last_seen.wait()
    revisions = [entry.revision for entry in box.items]
    assert revisions == sorted(set(revisions))
    assert revisions[-1] == 101
    await watch.stop()


async def test_a_removed_key_is_forgotten_after_the_age_of_removals(broker: Broker) -> None:
    """Until then the key is reported as removed. A key that was written anew, and keys of the same batch, stay."""
    bucket = await broker.key_value("removals", removed_age_s=1.0)
    await bucket.write([Write("kept", b"1"), Write("again", b"1"), Write("removed", b"1")])
    await bucket.write([Write("again", None), Write("removed", None)])
    assert [entry.key for entry in await bucket.since(3)] == ["again", "removed"]
    last = await bucket.write([Write("again", b"2", 0)])
    async with asyncio.timeout(WAIT_S):
        while any(entry.value is None for entry in await bucket.since(0)):
            await broker.flush(WAIT_S)  # the broker looks for old messages in its own time
    assert await bucket.entries() == [Entry("again", b"2", last), Entry("kept", b"1", 1)]
    await bucket.write([Write("removed", b"2", 0)])


async def test_a_purge_leaves_nothing_of_the_keys_below_a_name(broker: Broker) -> None:
    bucket = await broker.key_value("purged")
    await bucket.write([Write(key, b"1") for key in ("a.0", "a.b.1", "ab.0", "b.a.0")])
    await bucket.write([Write("a.0", None)])
    await bucket.purge("a")
    assert [entry.key for entry in await bucket.since(0)] == ["ab.0", "b.a.0"]
    await bucket.purge("a")
    last = await bucket.write([Write("a.b.1", b"2", 0)])
    assert await bucket.get("a.b.1") == Entry("a.b.1", b"2", last)


async def test_an_entry_is_erased_without_a_marker_unless_its_key_was_written_again(broker: Broker) -> None:
    bucket = await broker.key_value("erased")
    await bucket.write([Write(key, b"1") for key in ("a", "a.b", "b")])
    old = {entry.key: entry for entry in await bucket.entries()}
    last = await bucket.write([Write("b", b"2")])
    await bucket.erase(old["a"])
    await bucket.erase(old["b"])
    assert await bucket.since(0) == [old["a.b"], Entry("b", b"2", last)]


async def test_keys_of_a_bucket_with_an_age_are_gone_after_it(broker: Broker) -> None:
    bucket = await broker.key_value("passing", max_age_s=1.0)
    await bucket.write([Write("old", b"1"), Write("removed", b"1")])
    await bucket.write([Write("removed", None)])
    assert await bucket.get("old") is not None
    async with asyncio.timeout(WAIT_S):
        while await bucket.get("old") is not None:
            await broker.flush(WAIT_S)  # the broker looks for old messages in its own time
    assert await bucket.entries() == []
    last = await bucket.write([Write("old", b"2", 0)])
    assert await bucket.entries() == [Entry("old", b"2", last)]


async def test_a_bucket_says_whether_it_reaches_a_revision(harness: Harness) -> None:
    """The epoch counts writes that may be gone. Here a purge removed them; a damaged file loses them too."""
    bucket = await (await harness.connect()).key_value("things")
    assert not await bucket.reaches(1)
    first = await bucket.write([Write("a", b"1")])
    last = await bucket.write([Write("b.c", b"2"), Write("b.d", b"3")])
    assert [await bucket.reaches(revision) for revision in (first, last, last + 1)] == [True, True, False]
    await bucket.purge("b")
    assert [await bucket.reaches(revision) for revision in (first, first + 1, last)] == [True, False, False]
    assert (await bucket.epoch()).endswith(f":{last}")
