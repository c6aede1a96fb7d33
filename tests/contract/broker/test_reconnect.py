"""Promises of every broker about lost connections. Each test runs in memory and at a real nats-server."""

from __future__ import annotations

import asyncio
import time

import pytest
from broker_harness import STREAM, WAIT_S, Box, Harness, consumer_of, messages_left, publish, pulling, subject_of

from sie_broker import Broker, BrokerUnavailable, CoreMessage, Delivery, Entry, Write


async def test_a_lost_broker_is_survived_with_everything_it_stored(broker: Broker, harness: Harness) -> None:
    """The broker is killed while messages wait and others are leased, one of them for the second time. After its
    restart the consumers are ensured again, as gateways do, and open pulls deliver within seconds. Leased messages are
    delivered again, with higher counts if the broker kept the counts, else with a count of 1.
    """
    spec = consumer_of("a", ack_wait_s=2.0)
    idle = consumer_of("idle", ack_wait_s=2.0)
    await broker.ensure_consumer(spec)
    await broker.ensure_consumer(idle)
    await publish(broker, "a", 10)
    box: Box[Delivery] = Box()
    idle_box: Box[Delivery] = Box()
    pulls = broker.pulls(
        STREAM.name, lambda delivery: (idle_box if delivery.consumer == idle.name else box).put(delivery)
    )
    pulls.want(idle.name, 1)
    pulls.want(spec.name, 1)
    (first,) = await box.fill(1)
    await first.nak()
    pulls.want(spec.name, 5)
    leased = (await box.fill(6))[1:]
    again = [delivery.sequence for delivery in leased if delivery.delivered == 2]
    assert again in ([], [1])  # the broker may deliver new messages before the nak arrives
    await broker.flush(WAIT_S)

    await harness.crash()
    assert pulls.outstanding(idle.name) == 0
    with pytest.raises(BrokerUnavailable):
        await broker.publish(subject_of("a"), b"x", "x", timeout_s=0.2)
    with pytest.raises(BrokerUnavailable):
        await leased[0].in_progress()
    with pytest.raises(BrokerUnavailable):
        await leased[0].nak()
    await harness.restore()
    restored_s = time.monotonic()
    for consumer in (spec, idle):
        await broker.ensure_consumer(consumer)

    await broker.publish(subject_of("idle"), b"fresh", "fresh", timeout_s=30.0)
    await idle_box.fill(1)
    assert time.monotonic() - restored_s < 15.0
    pulls.want(spec.name, 20)
    counts = {delivery.sequence: delivery.delivered for delivery in (await box.fill(16))[6:]}
    expected = (
        dict.fromkeys(range(1, 11), 1)
        | {delivery.sequence: delivery.delivered + 1 for delivery in leased}
        | {1: 2 + len(again)}
    )
    assert counts in (expected, dict.fromkeys(range(1, 11), 1))
    for delivery in [*box.items, *idle_box.items]:
        await delivery.ack()
    await messages_left(broker, 0)
    await pulls.stop()


async def test_a_publish_with_a_lost_answer_is_stored_once_when_repeated(broker: Broker, harness: Harness) -> None:
    """The broker dies while a hundred publishes are in flight. Each publish is answered or fails within its time-out,
    and a repeated publish is stored once.
    """

    async def until_stored(number: int) -> None:
        while True:
            try:
                await broker.publish(subject_of("a"), b"x", f"id-{number}", timeout_s=2.0)
                return
            except BrokerUnavailable:
                continue

    publishing = asyncio.gather(*(until_stored(number) for number in range(100)))
    await broker.flush(WAIT_S)
    await harness.crash()
    more = asyncio.gather(*(until_stored(number) for number in range(50, 150)))
    await harness.restore()
    async with asyncio.timeout(WAIT_S):
        await publishing
        await more
    assert (await broker.stream_state(STREAM.name)).messages == 150


async def test_an_ack_without_a_connection_is_sent_with_the_next(broker: Broker, harness: Harness) -> None:
    """A late ack is right, because the work is done and answered."""
    spec = consumer_of("a")
    box, pulls = await pulling(broker, spec, published=2, wanted=1)
    (delivery,) = await box.fill(1)
    await harness.cut()
    await delivery.ack()
    await harness.mend()

    await messages_left(broker, 1)
    await pulls.stop()


async def test_a_watch_goes_on_over_a_lost_broker(harness: Harness) -> None:
    """A watch that was idle before the loss sees each later revision once and in order. The handlers of a reconnect run
    in the order of their registration, although the first one fails.
    """
    broker = await harness.connect()
    bucket = await broker.key_value("things")
    await bucket.write([Write("a", b"1"), Write("b", b"1")])
    box: Box[Entry] = Box()
    steps: Box[str] = Box()

    async def first() -> None:
        await broker.flush(WAIT_S)
        steps.put("first")
        raise RuntimeError("planted")

    async def second() -> None:
        steps.put("second")

    broker.on_reconnect(first)
    broker.on_reconnect(second)
    watch = await bucket.watch(box.take)
    await box.fill(2)
    epoch = await bucket.epoch()

    await harness.crash()
    await harness.restore()
    assert await steps.fill(2) == ["first", "second"]
    assert await bucket.epoch() == epoch
    for number in range(3, 10):
        assert await bucket.write([Write(f"k{number}", b"x")]) == number
    assert [entry.revision for entry in await box.fill(9)] == list(range(1, 10))
    await box.quiet(0.3)
    await watch.stop()


async def test_core_subscriptions_go_on_over_a_lost_broker(harness: Harness) -> None:
    """Requests in flight fail when the connection does, not at their time-out."""
    broker = await harness.connect()
    box: Box[CoreMessage] = Box()
    await broker.subscribe("beats", box.take)
    waiting = asyncio.create_task(broker.request("beats", b"never answered", 60.0))
    await box.fill(1)
    await harness.crash()
    with pytest.raises(BrokerUnavailable):
        await waiting
    with pytest.raises(BrokerUnavailable):
        await broker.send("beats", b"nobody")
    await harness.restore()
    await broker.flush(WAIT_S)
    await broker.send("beats", b"again")
    assert (await box.fill(2))[1].data == b"again"


async def test_a_crashed_task_of_a_connection_shows_as_not_connected(broker: Broker) -> None:
    async def crash() -> None:
        raise RuntimeError("planted")

    assert broker.connected
    await asyncio.wait({broker.own(crash(), "planted")}, timeout=30.0)  # type: ignore[attr-defined]
    assert not broker.connected
