"""Promises that only the broker in memory makes."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from broker_harness import STREAM, WAIT_S, Box, consumer_of, publish, subject_of

from sie_broker import BrokerError, Delivery, Entry, Write
from sie_broker.memory import MemoryServer, matches, overlap
from sie_broker.memory import broker as memory_broker
from sie_contracts.wire.topology import StreamSpec


async def test_the_broker_in_memory_obeys_a_clock_of_the_test() -> None:
    """Lease, delay and duplicate window pass without waiting."""
    now_s = 1000.0
    server = MemoryServer(clock=lambda: now_s)
    broker = server.connect("test")
    await broker.ensure_stream(STREAM)
    spec = consumer_of("a", ack_wait_s=10.0)
    await broker.ensure_consumer(spec)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 5)
    await publish(broker, "a", 1)
    (first,) = await box.fill(1)
    now_s += 9.0
    await first.in_progress()
    now_s += 9.0
    server.run_due()
    await broker.flush(WAIT_S)
    assert len(box.items) == 1
    now_s += 1.0
    server.run_due()
    assert (await box.fill(2))[1].delivered == 2
    await first.nak(30.0)
    now_s += 30.0
    server.run_due()
    assert (await box.fill(3))[2].delivered == 3
    now_s += STREAM.duplicate_window_s
    assert not (await broker.publish(subject_of("a"), b"0", "a-0")).duplicate
    await broker.close()


@pytest.mark.parametrize(
    ("before_s", "after_s", "end_s"),
    [(1000.0, 10.0, 10.0), (10.0, 1000.0, 1000.0), (0.0, 10.0, 10.0), (10.0, 0.0, None)],
)
async def test_a_changed_age_limit_holds_for_stored_messages(
    before_s: float, after_s: float, end_s: float | None
) -> None:
    now_s = 0.0
    server = MemoryServer(clock=lambda: now_s)
    broker = server.connect("test")
    await broker.ensure_stream(dataclasses.replace(STREAM, max_age_s=before_s))
    await publish(broker, "a", 1)
    changed = dataclasses.replace(STREAM, max_age_s=after_s, version=STREAM.version + 1)
    await broker.ensure_stream(changed)
    for now_s in (9.0, 10.0, 999.0, 1000.0, 2000.0):
        server.run_due()
        is_stored = end_s is None or now_s < end_s
        assert (await broker.stream_state(STREAM.name)).messages == is_stored, now_s
    await broker.close()


async def test_the_broker_in_memory_loses_streams_on_demand() -> None:
    server = MemoryServer()
    broker = server.connect("test")
    created = (await broker.ensure_stream(STREAM)).created
    server.lose_stream(STREAM.name)
    with pytest.raises(BrokerError):
        await broker.stream_state(STREAM.name)
    assert (await broker.ensure_stream(STREAM)).created != created
    await broker.close()


async def test_a_watch_whose_queue_was_full_gets_the_entries_that_it_could_not_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the overflow, the queue has room again before the next write."""
    monkeypatch.setattr(memory_broker, "_HELD_ENTRIES", 2)
    broker = MemoryServer().connect("test")
    bucket = await broker.key_value("things")
    box: Box[Entry] = Box()
    turns = asyncio.Semaphore(0)

    async def handle(entry: Entry) -> None:
        await turns.acquire()
        box.put(entry)

    watch = await bucket.watch(handle)
    for key in ("a", "b", "c", "d"):  # "a" is with the handler, "b" and "c" wait, "d" finds no room
        await bucket.write([Write(key, b"1")])
    turns.release()
    await box.fill(1)
    await bucket.write([Write("e", b"1")])
    for _ in range(4):
        turns.release()
    assert [entry.key for entry in await box.fill(5)] == ["a", "b", "c", "d", "e"]
    await watch.stop()
    await broker.close()


@pytest.mark.parametrize(
    ("pattern", "subject", "match"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*.b", "a.b", True),
        ("a.*.c", "a.b.d", False),
        ("a.b", "a", False),
    ],
)
def test_patterns_match_as_the_broker_does(pattern: str, subject: str, match: bool) -> None:
    assert matches(pattern, subject) is match
    assert overlap(pattern, subject) is match


def test_patterns_overlap_both_ways() -> None:
    for left_pattern, right_pattern, expected in (
        ("a.*", "*.b", True),
        ("a.>", "*.*.c", True),
        ("a.*", "b.*", False),
        ("a.*.c", "a.b.*", True),
    ):
        assert overlap(left_pattern, right_pattern) is overlap(right_pattern, left_pattern) is expected


def test_a_spec_without_a_limit_equals_one_that_says_so() -> None:
    assert StreamSpec("x", ("x",)) == StreamSpec("x", ("x",), max_bytes=-1, max_per_subject=0)
