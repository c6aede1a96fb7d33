"""Promises of every broker about core messages. Each test runs in memory and at a real nats-server."""

from __future__ import annotations

import asyncio
import time

import pytest
from broker_harness import WAIT_S, Box, Harness

from sie_broker import BrokerUnavailable, CoreMessage, NoResponder


async def test_a_request_is_confirmed_by_whoever_listens(harness: Harness) -> None:
    """One member of a queue group answers. Without a listener the request fails at once, not at its time-out."""
    caller, worker = await harness.connect("caller"), await harness.connect("worker")
    handled: Box[CoreMessage] = Box()

    async def confirm(message: CoreMessage) -> None:
        handled.put(message)
        await worker.send(message.reply, b"confirmed " + message.data)

    members = [await worker.subscribe("results.>", confirm, queue="gateways") for _ in range(3)]
    answers = await asyncio.gather(*(caller.request("results.one", b"%d" % number, 30.0) for number in range(50)))
    assert answers == [b"confirmed %d" % number for number in range(50)]
    assert len(handled.items) == 50

    for member in members:
        await member.stop()
    started_s = time.monotonic()
    with pytest.raises(NoResponder):
        await caller.request("results.one", b"lost", 60.0)
    assert time.monotonic() - started_s < 20.0


async def test_a_listener_that_never_answers_ends_in_a_time_out(harness: Harness) -> None:
    caller = await harness.connect()
    box: Box[CoreMessage] = Box()
    await caller.subscribe("void", box.take)
    with pytest.raises(BrokerUnavailable):
        await caller.request("void", b"x", 0.2)
    assert len(box.items) == 1


async def test_messages_of_a_subscription_are_handled_one_by_one_and_survive_failures(harness: Harness) -> None:
    """No message is lost while a handler stalls. A handler that raises, or awaits a cancelled future, fails only for
    its own message.
    """
    sender, receiver = await harness.connect("sender"), await harness.connect("receiver")
    box: Box[bytes] = Box()
    release = asyncio.Event()
    running = 0

    async def slow(message: CoreMessage) -> None:
        nonlocal running
        running += 1
        assert running == 1
        await release.wait()
        running -= 1
        box.put(message.data)
        if message.data == b"1":
            raise RuntimeError("planted")
        if message.data == b"2":
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future

    subscription = await receiver.subscribe("beats.*", slow)
    for number in range(5000):
        await sender.send("beats.x", b"%d" % number)
    await sender.flush(WAIT_S)
    await receiver.flush(WAIT_S)
    release.set()

    assert await box.fill(5000) == [b"%d" % number for number in range(5000)]
    assert receiver.connected
    await subscription.stop()


@pytest.mark.parametrize("limit", [{"held_messages": 10}, {"held_bytes": 10_100}])
async def test_what_a_full_subscription_drops_is_told_with_its_subject(harness: Harness, limit: dict[str, int]) -> None:
    """Ten messages of a kilobyte wait while the handler holds one more. The connection stays open."""
    sender, receiver = await harness.connect("sender"), await harness.connect("receiver")
    box: Box[str] = Box()
    dropped: list[str] = []
    begun, release = asyncio.Event(), asyncio.Event()

    async def slow(message: CoreMessage) -> None:
        begun.set()
        await release.wait()
        box.put(message.subject)

    await receiver.subscribe("full.*", slow, on_dropped=dropped.append, **limit)  # type: ignore[arg-type]
    subjects = [f"full.{number}" for number in range(30)]
    await sender.send(subjects[0], bytes(1000))
    await asyncio.wait_for(begun.wait(), 30)
    for subject in subjects[1:]:
        await sender.send(subject, bytes(1000))
    await sender.flush(WAIT_S)
    await receiver.flush(WAIT_S)
    assert dropped == subjects[11:]
    release.set()
    assert await box.fill(11) == subjects[:11]
    await sender.send("full.again", b"")
    assert (await box.fill(12))[-1] == "full.again"
    assert receiver.connected


async def test_stopping_a_subscription_handles_what_has_arrived(harness: Harness) -> None:
    broker = await harness.connect()
    box: Box[bytes] = Box()

    async def slow(message: CoreMessage) -> None:
        await asyncio.sleep(0)
        box.put(message.data)

    subscription = await broker.subscribe("beats", slow)
    for number in range(100):
        await broker.send("beats", b"%d" % number)
    await broker.flush(WAIT_S)
    await subscription.stop()
    assert len(box.items) == 100
    await broker.send("beats", b"late")
    await broker.flush(WAIT_S)
    assert len(box.items) == 100
