"""What every broker promises, run against the one in memory and a real nats-server."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import importlib.metadata
import logging
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import pytest
from inprocess import until
from nats_server import NatsServer, free_port

from sie_broker import (
    Broker,
    BrokerError,
    BrokerUnavailable,
    ConsumerState,
    CoreMessage,
    Delivery,
    Entry,
    NoResponder,
    PayloadTooBig,
    Pulls,
    StreamFull,
    TopologyMismatch,
    Write,
    WrongRevision,
)
from sie_broker.memory import MemoryServer, matches, overlap
from sie_broker.nats import PULL_EXPIRES_S, NatsBroker, NatsDelivery, connect
from sie_broker.nats.api import ConsumerInfo, consumer_config, version_of
from sie_contracts.topology import (
    TOPOLOGY_VERSION,
    ConsumerSpec,
    Lane,
    StreamSpec,
    dead_letter_stream,
    dead_letter_subject,
    work_consumer,
    work_stream,
    work_subject,
)

T = TypeVar("T")
LANE = Lane("_default", "cpu", "default")
STREAM = work_stream("_default", storage="file", replicas=1, max_bytes=-1, max_age_s=0.0)
WAIT_S = 8.0  # far above what is expected, so that a busy machine does not fail a test


class Box(Generic[T]):
    """Collects what handlers are given; tests wait for it to fill."""

    def __init__(self) -> None:
        self.items: list[T] = []
        self._changed = asyncio.Event()

    def put(self, item: T) -> None:
        self.items.append(item)
        self._changed.set()

    async def take(self, item: T) -> None:
        self.put(item)

    async def fill(self, count: int, timeout_s: float = WAIT_S) -> list[T]:
        """The first `count` items."""
        async with asyncio.timeout(timeout_s):
            while len(self.items) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.items[:count]

    async def quiet(self, for_s: float) -> None:
        """Nothing more comes for that long."""
        count = len(self.items)
        with pytest.raises(TimeoutError):
            await self.fill(count + 1, for_s)


class Harness(abc.ABC):
    """A broker of a test's own, connections to it, and its death and return."""

    pull_expires_s = 0.1

    def __init__(self) -> None:
        self._connections: list[Broker] = []

    async def connect(self, name: str = "test") -> Broker:
        broker = await self._connect(name)
        self._connections.append(broker)
        await broker.subscribe(f"silent.{len(self._connections)}", Box[CoreMessage]().take)
        return broker

    async def crash(self) -> None:
        """Kill the broker; returns when every connection has noticed, which is when a request in flight fails."""
        waiting = [broker.request(f"silent.{number}", b"", 60.0) for number, broker in enumerate(self._connections, 1)]
        noticed = asyncio.gather(*waiting, return_exceptions=True)
        await self._kill()
        async with asyncio.timeout(WAIT_S):
            assert all(isinstance(error, BrokerUnavailable) for error in await noticed)

    async def close(self) -> None:
        for broker in self._connections:
            await broker.close()

    @abc.abstractmethod
    async def _connect(self, name: str) -> Broker: ...

    @abc.abstractmethod
    async def _kill(self) -> None: ...

    @abc.abstractmethod
    async def restore(self) -> None: ...

    @abc.abstractmethod
    async def cut(self) -> None:
        """All connections are lost while the broker lives; returns when they have noticed."""

    @abc.abstractmethod
    async def mend(self) -> None:
        """Let them come back."""


class MemoryHarness(Harness):
    def __init__(self) -> None:
        super().__init__()
        self.server = MemoryServer()

    async def _connect(self, name: str) -> Broker:
        return self.server.connect(name)

    async def _kill(self) -> None:
        await asyncio.sleep(0)
        self.server.disconnect()

    async def restore(self) -> None:
        self.server.reconnect()

    async def cut(self) -> None:
        await self._kill()

    async def mend(self) -> None:
        self.server.reconnect()


class NatsHarness(Harness):
    pull_expires_s = PULL_EXPIRES_S

    def __init__(self, server: NatsServer) -> None:
        super().__init__()
        self.server = server

    async def _connect(self, name: str) -> Broker:
        return await connect(self.server.url, name=name)

    async def _kill(self) -> None:
        await asyncio.to_thread(self.server.kill)

    async def restore(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def cut(self) -> None:
        for broker in self._connections:
            assert isinstance(broker, NatsBroker)
            broker._transport.abort()
        await until(lambda: not any(broker.connected for broker in self._connections), "the loss of the connections")

    async def mend(self) -> None:
        """They come back by themselves."""

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self.server.kill)


@pytest.fixture(params=["memory", "nats"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    made: Harness
    if request.param == "memory":
        made = MemoryHarness()
    else:
        made = NatsHarness(NatsServer(tmp_path / "nats"))
        await made.restore()
    yield made
    await made.close()


@pytest.fixture
async def nats(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[NatsHarness]]]:
    """Starts nats-servers with options of the test's own."""
    started: list[NatsHarness] = []

    async def start(**options: Any) -> NatsHarness:
        started.append(NatsHarness(NatsServer(tmp_path / "nats", **options)))
        await started[-1].restore()
        return started[-1]

    yield start
    for each in started:
        await each.close()


@pytest.fixture
async def broker(harness: Harness) -> Broker:
    """A connection with the work stream in place."""
    made = await harness.connect()
    await made.ensure_stream(STREAM, owner=True)
    return made


def consumer_of(model: str, ack_wait_s: float = 30.0) -> ConsumerSpec:
    return work_consumer(LANE, "interactive", model, ack_wait_s)


def subject_of(model: str) -> str:
    return work_subject(LANE, "interactive", model)


async def publish(broker: Broker, model: str, count: int, first: int = 0) -> list[int]:
    """Publish bodies `0`, `1`, …; returns their sequences."""
    numbers = range(first, first + count)
    return [
        (await broker.publish(subject_of(model), b"%d" % number, f"{model}-{number}")).sequence for number in numbers
    ]


async def messages_left(broker: Broker, count: int) -> None:
    """Acks are one way: wait until the stream shows their effect."""
    async with asyncio.timeout(WAIT_S):
        while (await broker.stream_state(STREAM.name)).messages != count:
            await broker.flush()


# ---- publishing


async def test_a_published_message_is_stored_once_per_id(broker: Broker) -> None:
    """L10 L19: a repeated publish is answered with the first one's sequence and says so."""
    first = await broker.publish(subject_of("a"), b"work", "id-1")
    again = await broker.publish(subject_of("a"), b"work", "id-1")
    other = await broker.publish(subject_of("a"), b"work", "id-2")

    assert (first.sequence, first.duplicate) == (1, False)
    assert (again.sequence, again.duplicate) == (1, True)
    assert (other.sequence, other.duplicate) == (2, False)
    assert (await broker.stream_state(STREAM.name)).messages == 2


async def test_many_publishers_in_flight_all_get_their_own_answer(broker: Broker) -> None:
    answers = await asyncio.gather(*(broker.publish(subject_of("a"), b"x", str(number)) for number in range(500)))

    assert sorted(answer.sequence for answer in answers) == list(range(1, 501))


async def test_a_full_subject_refuses_the_newest_while_others_go_on(harness: Harness) -> None:
    """L15: nothing stored is dropped, and a refused message id is not remembered as stored."""
    broker = await harness.connect()
    await broker.ensure_stream(dataclasses.replace(STREAM, max_per_subject=3), owner=True)
    sequences = await publish(broker, "busy", 3)

    with pytest.raises(StreamFull):
        await broker.publish(subject_of("busy"), b"late", "late")
    await broker.publish(subject_of("idle"), b"fine", "fine")
    assert await broker.delete(STREAM.name, sequences[0])
    retried = await broker.publish(subject_of("busy"), b"late", "late")

    assert not retried.duplicate
    assert await broker.subject_counts(STREAM.name, "sie.work.>") == {subject_of("busy"): 3, subject_of("idle"): 1}


async def test_a_full_stream_refuses_the_newest_and_keeps_the_oldest(harness: Harness) -> None:
    """L15"""
    broker = await harness.connect()
    await broker.ensure_stream(dataclasses.replace(STREAM, max_bytes=4096), owner=True)

    async def publish_until_refused() -> None:
        for number in range(10):
            await broker.publish(subject_of("a"), bytes(1000), str(number))

    with pytest.raises(StreamFull):
        await publish_until_refused()
    state = await broker.stream_state(STREAM.name)
    assert state.first_sequence == 1
    assert state.messages == state.last_sequence < 5
    assert state.bytes <= 4096


async def test_publishing_where_no_stream_listens_is_unavailable_at_once(broker: Broker) -> None:
    started_s = time.monotonic()
    with pytest.raises(BrokerUnavailable):
        await broker.publish("elsewhere.a", b"x", "1", timeout_s=5.0)
    assert time.monotonic() - started_s < 1.0


async def test_a_message_above_the_limit_is_refused_without_harm_to_the_connection(broker: Broker) -> None:
    """L11: the limit is the one that the broker announces, and the refusal is typed."""
    with pytest.raises(PayloadTooBig):
        await broker.publish(subject_of("a"), bytes(broker.max_payload + 1), "1")
    with pytest.raises(PayloadTooBig):
        await broker.send("any", bytes(broker.max_payload + 1))

    assert broker.connected
    await broker.publish(subject_of("a"), bytes(broker.max_payload - 100), "2")


# ---- pulling and settling


async def test_pulls_deliver_no_more_than_wanted_and_in_order(broker: Broker) -> None:
    """L8 S5: credit is used up by deliveries, and what waits in the stream is not touched."""
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 10)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)

    pulls.want(spec.name, 4)
    await box.fill(4)
    await box.quiet(0.2)
    assert pulls.outstanding(spec.name) == 0

    pulls.want(spec.name, 3)
    pulls.want(spec.name, 5)
    await box.fill(9)
    await box.quiet(0.2)

    assert [delivery.data for delivery in box.items] == [b"%d" % number for number in range(9)]
    assert [delivery.delivered for delivery in box.items] == [1] * 9
    assert [delivery.sequence for delivery in box.items] == list(range(1, 10))
    assert {delivery.consumer for delivery in box.items} == {spec.name}
    assert {delivery.subject for delivery in box.items} == {subject_of("a")}
    assert box.items[-1].pending == 1
    assert abs(box.items[0].sent_s - time.time()) < 60
    await pulls.stop()


async def test_credit_is_topped_up_while_pulls_are_open(broker: Broker) -> None:
    """S5: several open pulls of a consumer are filled in turns, and their sum is what was wanted."""
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    for credit in (2, 3, 7):
        pulls.want(spec.name, credit)
        await broker.flush()
    assert pulls.outstanding(spec.name) == 7

    await publish(broker, "a", 5)
    await box.fill(5)
    assert pulls.outstanding(spec.name) == 2
    pulls.want(spec.name, 4)
    await publish(broker, "a", 10, first=5)
    await box.fill(9)
    await box.quiet(0.2)

    assert [delivery.sequence for delivery in box.items] == list(range(1, 10))
    await pulls.stop()


async def test_a_handler_that_tops_up_itself_gets_everything_once(broker: Broker) -> None:
    """L8 L12 S5: the way of a scheduler: each delivery is acknowledged and asked for again, over several consumers at
    once.
    """
    models = [f"m/{number}" for number in range(5)]
    for model in models:
        await broker.ensure_consumer(consumer_of(model))
    box: Box[Delivery] = Box()
    names = [consumer_of(model).name for model in models]

    def arrived(delivery: Delivery) -> None:
        assert pulls.outstanding(delivery.consumer) < 8
        pulls.want(delivery.consumer, 8)
        box.put(delivery)

    pulls = broker.pulls(STREAM.name, arrived)
    for name in names:
        pulls.want(name, 8)
    await asyncio.gather(*(publish(broker, model, 200) for model in models))
    for delivery in await box.fill(1000):
        await delivery.ack()

    await messages_left(broker, 0)
    assert len(box.items) == len({delivery.sequence for delivery in box.items}) == 1000
    for name, model in zip(names, models, strict=True):
        assert [item.data for item in box.items if item.consumer == name] == [
            b"%d" % number for number in range(200)
        ], model
    await pulls.stop()


async def test_an_ack_removes_the_message(broker: Broker) -> None:
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 3)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 3)
    deliveries = await box.fill(3)

    assert (await broker.stream_state(STREAM.name)).messages == 3
    await deliveries[0].ack()
    await deliveries[2].ack()
    await messages_left(broker, 1)

    state = await broker.stream_state(STREAM.name)
    assert (state.first_sequence, state.last_sequence) == (2, 3)
    await pulls.stop()


async def test_a_nak_delays_the_next_delivery(broker: Broker) -> None:
    """L5 L8: the count grows by one, nothing limits it, and other messages are not held up."""
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 2)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 1)
    (first,) = await box.fill(1)
    pulls.want(spec.name, 2)

    naked_s = time.monotonic()
    await first.nak(0.5)
    other, again = (await box.fill(3))[1:]

    assert 0.45 < time.monotonic() - naked_s < 3.0
    assert (other.sequence, other.delivered) == (2, 1)
    assert (again.sequence, again.delivered) == (1, 2)
    assert again.sent_s == first.sent_s
    await pulls.stop()


async def test_naks_without_delay_never_reach_a_delivery_limit(broker: Broker) -> None:
    """L5"""
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 1)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    for attempt in range(1, 31):
        pulls.want(spec.name, 1)
        delivery = (await box.fill(attempt))[-1]
        assert delivery.delivered == attempt
        await delivery.nak()

    assert (await broker.stream_state(STREAM.name)).messages == 1
    await pulls.stop()


async def test_an_expired_lease_is_delivered_again_and_a_stale_ack_still_removes(
    broker: Broker, harness: Harness
) -> None:
    """L7: (1) a holder falls silent, (2) another connection gets the message, (3) the first one's ack removes it."""
    spec = consumer_of("a", ack_wait_s=0.5)
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 1)
    first_box: Box[Delivery] = Box()
    second_box: Box[Delivery] = Box()
    silent = broker.pulls(STREAM.name, first_box.put)
    silent.want(spec.name, 1)
    (stale,) = await first_box.fill(1)
    leased_s = time.monotonic()

    other = (await harness.connect("other")).pulls(STREAM.name, second_box.put)
    other.want(spec.name, 1)
    (fresh,) = await second_box.fill(1)
    assert time.monotonic() - leased_s > 0.4
    assert (stale.delivered, fresh.delivered) == (1, 2)
    assert stale.sequence == fresh.sequence

    await stale.ack()
    await messages_left(broker, 0)
    other.want(spec.name, 1)
    await fresh.nak()
    await second_box.quiet(0.7)
    await other.stop()
    await silent.stop()


async def test_in_progress_extends_a_lease(broker: Broker) -> None:
    """L7: refreshed every third of the ack wait it is delivered once; left alone it is delivered again with a count of
    2.
    """
    spec = consumer_of("a", ack_wait_s=0.6)
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 1)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 1)
    (delivery,) = await box.fill(1)
    pulls.want(spec.name, 1)

    for _ in range(5):
        await delivery.in_progress()
        await box.quiet(0.2)
    await delivery.in_progress()
    refreshed_s = time.monotonic()
    again = (await box.fill(2))[1]

    assert time.monotonic() - refreshed_s > 0.5
    assert again.delivered == 2
    await pulls.stop()


async def test_a_terminated_message_is_gone(broker: Broker) -> None:
    """L5"""
    spec = consumer_of("a", ack_wait_s=0.5)
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 1)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 2)
    (delivery,) = await box.fill(1)
    await delivery.term("poison")

    await messages_left(broker, 0)
    await box.quiet(0.7)
    await pulls.stop()


async def test_work_waits_for_its_consumer_and_is_shared_by_its_workers(broker: Broker, harness: Harness) -> None:
    """L8 L18: published first, then a consumer, then workers, each message to one of them; ensuring again changes
    nothing.
    """
    await publish(broker, "a", 40)
    spec = consumer_of("a")
    boxes: list[Box[Delivery]] = [Box(), Box()]
    pulls = [
        (await harness.connect(f"worker {number}")).pulls(STREAM.name, box.put) for number, box in enumerate(boxes)
    ]
    for each in pulls:
        each.want(spec.name, 20)
    await broker.ensure_consumer(spec)
    await asyncio.gather(*(box.fill(20) for box in boxes))
    await broker.ensure_consumer(spec)

    for each in pulls:
        each.want(spec.name, 1)
    await boxes[0].quiet(0.2)
    assert sorted(item.sequence for box in boxes for item in box.items) == list(range(1, 41))
    assert {item.delivered for box in boxes for item in box.items} == {1}
    for each in pulls:
        await each.stop()


async def test_overlapping_consumers_are_refused(broker: Broker) -> None:
    """L17: on creation, and as the update of a consumer whose topology is older."""
    await broker.ensure_consumer(consumer_of("a"))
    with pytest.raises(BrokerError):
        await broker.ensure_consumer(ConsumerSpec(STREAM.name, "wide", f"sie.work.{LANE.pool}.>"))

    other = consumer_of("b")
    await broker.ensure_consumer(other)
    moved = dataclasses.replace(other, subject=subject_of("a"), version=other.version + 1)
    with pytest.raises(TopologyMismatch) as refusal:
        await broker.ensure_consumer(moved)
    assert refusal.value.field == "subject"
    assert sorted(await broker.consumers(STREAM.name)) == sorted([consumer_of("a").name, other.name])


async def test_an_open_pull_outlives_its_expiry_and_lowering_takes_effect(broker: Broker, harness: Harness) -> None:
    """S1 S5 L8: after the broker's own expiry the next message is handed over at once, with a delivery count of 1."""
    for model in ("a", "b"):
        await broker.ensure_consumer(consumer_of(model))
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(consumer_of("a").name, 2)
    pulls.want(consumer_of("b").name, 5)
    await broker.flush()
    pulls.want(consumer_of("b").name, 1)
    await box.quiet(harness.pull_expires_s + 0.5)

    assert pulls.outstanding(consumer_of("a").name) == 2
    assert pulls.outstanding(consumer_of("b").name) == 1
    sent_s = time.monotonic()
    await publish(broker, "a", 1)
    (delivery,) = await box.fill(1)
    assert time.monotonic() - sent_s < 1.0
    assert delivery.delivered == 1
    await publish(broker, "b", 2)
    await box.fill(2)
    await box.quiet(0.2)
    await pulls.stop()


@pytest.mark.serial
async def test_handing_over_to_an_idle_pull_is_immediate(broker: Broker) -> None:
    """S5: 200 cycles of an empty wait, then a publish; the hand-off p99 stays below 50 ms."""
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    hand_offs_s = []
    for cycle in range(200):
        pulls.want(spec.name, 1)
        await broker.flush()
        sent_s = time.monotonic()
        await publish(broker, "a", 1, first=cycle)
        delivery = (await box.fill(cycle + 1))[-1]
        hand_offs_s.append(time.monotonic() - sent_s)
        await delivery.ack()

    assert sorted(hand_offs_s)[197] < 0.05
    await messages_left(broker, 0)
    await pulls.stop()


async def test_stopping_pulls_loses_nothing(broker: Broker, harness: Harness) -> None:
    """L13 L18 L24: (1) a worker pulls under load, (2) stops, (3) what it was given plus what the next one gets is
    everything, each once, long before any lease ends.
    """
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    worker = await harness.connect("worker")
    publishing = asyncio.create_task(publish(broker, "a", 2000))
    box: Box[Delivery] = Box()
    open_pulls: list[Pulls] = []

    def arrived(delivery: Delivery) -> None:
        box.put(delivery)
        open_pulls[-1].want(spec.name, 16)

    for turn in range(1, 9):
        open_pulls.append(worker.pulls(STREAM.name, arrived))
        open_pulls[-1].want(spec.name, 16)
        await box.fill(100 * turn)
        await open_pulls[-1].stop()
        count = len(box.items)
        await worker.flush()
        assert len(box.items) == count
    given = box.items
    await publishing

    for delivery in given:
        await delivery.ack()
    rest: Box[Delivery] = Box()
    last = worker.pulls(STREAM.name, rest.put)
    last.want(spec.name, 2000)
    given = given + await rest.fill(2000 - len(given))
    assert sorted(delivery.sequence for delivery in given) == list(range(1, 2001))
    # what the broker finds no taker for on the way out it hands on at once, with a count of 2
    assert sum(delivery.delivered - 1 for delivery in given) < 10
    await last.stop()


async def test_an_ack_before_close_arrives(broker: Broker, harness: Harness) -> None:
    """L24: long before any lease ends."""
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 200)
    worker = await harness.connect("worker")
    box: Box[Delivery] = Box()
    worker.pulls(STREAM.name, box.put).want(spec.name, 200)
    for delivery in await box.fill(200):
        await delivery.ack()
    await worker.close()

    await messages_left(broker, 0)
    with pytest.raises(BrokerUnavailable):
        await worker.publish(subject_of("a"), b"x", "x")


async def test_a_failing_handler_of_pulls_costs_only_its_own_message(broker: Broker) -> None:
    """L23"""
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    box: Box[Delivery] = Box()

    def arrived(delivery: Delivery) -> None:
        box.put(delivery)
        if delivery.data == b"0":
            raise RuntimeError("planted")

    pulls = broker.pulls(STREAM.name, arrived)
    pulls.want(spec.name, 3)
    await publish(broker, "a", 3)
    await box.fill(3)
    assert broker.connected
    await pulls.stop()


# ---- what a restarted holder needs


async def test_a_released_delivery_comes_again_at_once(broker: Broker, harness: Harness) -> None:
    """What a killed process held is released by its successor, over another connection and by nothing but the name of
    the delivery.
    """
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 2)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 2)
    first, second = await box.fill(2)
    await second.ack()
    await broker.flush()

    successor = await harness.connect("successor")
    for reply in (first.reply, second.reply):
        await successor.release(reply)
    again: Box[Delivery] = Box()
    other = successor.pulls(STREAM.name, again.put)
    other.want(spec.name, 2)
    (delivery,) = await again.fill(1)
    assert (delivery.data, delivery.delivered, delivery.sent_s) == (b"0", 2, first.sent_s)
    assert delivery.reply != first.reply
    await again.quiet(0.2)  # the one that was acknowledged stays gone
    for each in (pulls, other):
        await each.stop()


@pytest.mark.parametrize("reply", ["", "sie.work.x", "$JS.ACK", "$JS.ACK.a", "$JS.API.STREAM.DELETE.WORK__default"])
async def test_only_a_delivery_can_be_released(broker: Broker, reply: str) -> None:
    """A ledger that holds something else must not become a message on that subject."""
    with pytest.raises(ValueError, match=r"delivery|ack subject"):
        await broker.release(reply)


async def test_the_server_tells_the_time_that_it_stamps_messages_with(broker: Broker) -> None:
    before_s = await broker.server_time(STREAM.name)
    await publish(broker, "a", 1)
    stored = await broker.first_stored(STREAM.name)
    assert stored is not None
    assert before_s <= stored.sent_s <= await broker.server_time(STREAM.name)
    with pytest.raises(BrokerError, match=r"there is no stream|stream not found"):
        await broker.server_time("NONE")


async def test_stored_messages_are_found_in_order_also_while_they_are_leased(broker: Broker) -> None:
    spec = consumer_of("b")
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 1)
    await publish(broker, "b", 2)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 1)
    await box.fill(1)

    async def found(sequence: int, subject: str = ">") -> tuple[int, bytes] | None:
        stored = await broker.first_stored(STREAM.name, sequence, subject)
        return (stored.sequence, stored.data) if stored else None

    assert await found(0) == (1, b"0")
    assert await found(2) == (2, b"0")
    assert await found(0, subject_of("b")) == (2, b"0")
    assert await found(3, subject_of("a")) is None
    assert await found(4) is None
    await broker.delete(STREAM.name, 1)
    assert await found(0) == (2, b"0")
    await pulls.stop()


async def test_a_stream_of_dead_letters_drops_the_oldest_when_it_is_full(broker: Broker) -> None:
    """L22: it never refuses the newest, and nothing leaves it by being read."""
    spec = dataclasses.replace(dead_letter_stream("_default", storage="file", replicas=1), max_bytes=4096)
    await broker.ensure_stream(spec, owner=True)
    for number in range(8):
        await broker.publish(dead_letter_subject("_default"), bytes(1000) + b"%d" % number, f"letter-{number}")
    state = await broker.stream_state(spec.name)
    assert state.last_sequence == 8
    assert 1 < state.messages < 5
    newest = await broker.first_stored(spec.name, 8)
    assert newest is not None
    assert newest.data.endswith(b"7")


async def test_keys_of_a_bucket_with_an_age_are_gone_after_it(broker: Broker) -> None:
    bucket = await broker.key_value("passing", max_age_s=1.0)
    await bucket.write([Write("old", b"1"), Write("removed", b"1")])
    await bucket.write([Write("removed", None)])
    assert await bucket.get("old") is not None
    async with asyncio.timeout(WAIT_S):
        while await bucket.get("old") is not None:
            await broker.flush()  # the broker looks for old messages in its own time
    assert await bucket.entries() == []
    last = await bucket.write([Write("old", b"2", 0)])
    assert await bucket.entries() == [Entry("old", b"2", last)]


# ---- the stream as a whole


async def test_waiting_and_leased_messages_are_deleted_by_sequence(broker: Broker) -> None:
    """L19: a cancelled message is not delivered again, and its holder's late settlement does no harm."""
    assert not await broker.delete(STREAM.name, 1)
    spec = consumer_of("a", ack_wait_s=0.5)
    await broker.ensure_consumer(spec)
    sequences = await publish(broker, "a", 3)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 1)
    (leased,) = await box.fill(1)

    assert await broker.delete(STREAM.name, sequences[0])
    assert await broker.delete(STREAM.name, sequences[1])
    assert not await broker.delete(STREAM.name, sequences[1])
    assert not await broker.delete(STREAM.name, 999)
    await leased.nak()
    pulls.want(spec.name, 2)
    rest = (await box.fill(2))[1]

    assert rest.sequence == sequences[2]
    await rest.ack()
    await box.quiet(0.7)
    await messages_left(broker, 0)
    await pulls.stop()


async def test_subjects_are_counted_with_and_without_consumers(broker: Broker) -> None:
    """Waiting and leased count alike; at zero a subject is gone; a filter selects."""
    assert await broker.subject_counts(STREAM.name, "sie.work.>") == {}
    await publish(broker, "a/one", 3)
    await publish(broker, "b.two", 2)
    expected = {subject_of("a/one"): 3, subject_of("b.two"): 2}
    assert await broker.subject_counts(STREAM.name, "sie.work.>") == expected
    assert await broker.subject_counts(STREAM.name, subject_of("b.two")) == {subject_of("b.two"): 2}
    assert await broker.subject_counts(STREAM.name, "sie.work._default.gpu.>") == {}

    spec = consumer_of("a/one")
    await broker.ensure_consumer(spec)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 3)
    deliveries = await box.fill(3)
    assert await broker.subject_counts(STREAM.name, "sie.work.>") == expected
    for delivery in deliveries:
        await delivery.ack()
    await messages_left(broker, 2)
    assert await broker.subject_counts(STREAM.name, "sie.work.>") == {subject_of("b.two"): 2}
    await pulls.stop()


async def test_messages_age_out(harness: Harness) -> None:
    """L15: only by the age that the owner of the stream chose."""
    broker = await harness.connect()
    await broker.ensure_stream(dataclasses.replace(STREAM, max_age_s=0.5), owner=True)
    stored_s = time.monotonic()
    await publish(broker, "a", 3)

    await messages_left(broker, 0)
    assert time.monotonic() - stored_s > 0.4
    await publish(broker, "a", 1, first=9)
    assert (await broker.stream_state(STREAM.name)).last_sequence == 4


async def test_the_owner_creates_and_everybody_else_compares(harness: Harness) -> None:
    """L16: in either order there is one stream or a named refusal, and a refusal changes nothing."""
    gateway, sidecar = await harness.connect("gateway"), await harness.connect("sidecar")
    with pytest.raises(BrokerError, match=STREAM.name):
        await sidecar.ensure_stream(STREAM, owner=False)
    created = await gateway.ensure_stream(STREAM, owner=True)
    assert (await sidecar.ensure_stream(STREAM, owner=False)).created == created.created
    assert (await gateway.ensure_stream(STREAM, owner=True)).created == created.created

    for change in (
        {"storage": "memory"},
        {"max_bytes": 1_000_000},
        {"max_per_subject": 7},
        {"max_age_s": 300.0},
        {"duplicate_window_s": 60.0},
        {"subjects": (*STREAM.subjects, "sie.more.>")},
    ):
        for owner in (True, False):
            with pytest.raises(TopologyMismatch) as refusal:
                await gateway.ensure_stream(dataclasses.replace(STREAM, **change), owner=owner)  # type: ignore[arg-type]
            assert refusal.value.field in change
    assert await sidecar.ensure_stream(STREAM, owner=False) == created


async def test_a_newer_topology_is_applied_by_the_owner_only(harness: Harness) -> None:
    """L16 L18: messages stay; what the broker cannot change in place is refused by name; an older one is refused from
    then on.
    """
    broker = await harness.connect()
    await broker.ensure_stream(STREAM, owner=True)
    await publish(broker, "a", 2)
    newer = dataclasses.replace(STREAM, max_per_subject=5, max_age_s=600.0, version=STREAM.version + 1)

    with pytest.raises(TopologyMismatch):
        await broker.ensure_stream(newer, owner=False)
    assert (await broker.ensure_stream(newer, owner=True)).messages == 2
    await broker.ensure_stream(newer, owner=False)
    with pytest.raises(TopologyMismatch) as refusal:
        await broker.ensure_stream(STREAM, owner=True)
    assert refusal.value.field in ("max_per_subject", "max_age_s")
    with pytest.raises(TopologyMismatch) as refusal:
        await broker.ensure_stream(dataclasses.replace(newer, storage="memory", version=newer.version + 1), owner=True)
    assert refusal.value.field == "storage"
    assert (await broker.ensure_stream(newer, owner=False)).messages == 2


async def test_a_durable_is_compared_and_updated_from_an_older_topology_only(broker: Broker) -> None:
    """L16 L18: a mismatch names the field and keeps the delivery state."""
    spec = consumer_of("a", ack_wait_s=20.0)
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 2)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 1)
    (first,) = await box.fill(1)

    with pytest.raises(TopologyMismatch) as refusal:
        await broker.ensure_consumer(dataclasses.replace(spec, ack_wait_s=0.5))
    assert refusal.value.field == "ack_wait_s"
    await broker.ensure_consumer(dataclasses.replace(spec, ack_wait_s=25.0, version=spec.version + 1))
    with pytest.raises(TopologyMismatch):
        await broker.ensure_consumer(spec)

    pulls.want(spec.name, 2)
    second = (await box.fill(2))[1]
    assert (second.sequence, second.delivered) == (2, 1)
    await first.nak()
    assert (await box.fill(3))[2].delivered == 2
    await pulls.stop()


async def test_consumers_are_listed_and_watched(broker: Broker, harness: Harness) -> None:
    """L18: a deleted durable takes its leases along; its successor delivers what was left, and acks of the old leases
    are void.
    """
    events: Box[tuple[str, bool]] = Box()

    async def seen(name: str, exists: bool) -> None:
        events.put((name, exists))

    watcher = await (await harness.connect("watcher")).watch_consumers(STREAM.name, seen)
    specs = [consumer_of(f"m{number}") for number in range(3)]
    for spec in specs:
        await broker.ensure_consumer(spec)
        await broker.ensure_consumer(spec)
    assert sorted(await broker.consumers(STREAM.name)) == sorted(spec.name for spec in specs)
    assert await events.fill(3) == [(spec.name, True) for spec in specs]

    await publish(broker, "m0", 1)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(specs[0].name, 2)
    (old,) = await box.fill(1)
    assert await broker.delete_consumer(STREAM.name, specs[0].name)
    assert not await broker.delete_consumer(STREAM.name, specs[0].name)
    assert (await events.fill(4))[3] == (specs[0].name, False)
    assert sorted(await broker.consumers(STREAM.name)) == sorted(spec.name for spec in specs[1:])
    await old.ack()
    await broker.flush()

    await broker.ensure_consumer(specs[0])
    fresh = (await box.fill(2, timeout_s=5.0))[1]
    assert (fresh.sequence, fresh.delivered) == (1, 1)
    await fresh.ack()
    await messages_left(broker, 0)
    await pulls.stop()
    await watcher.stop()


async def test_a_stream_is_removed_with_all_that_is_in_it_and_made_anew_is_another_one(broker: Broker) -> None:
    """Work that is leased then is nobody's: its ack is void, and what has its sequence later stays. Open pulls find the
    new stream.
    """
    before = await broker.ensure_stream(STREAM, owner=True)
    await broker.ensure_consumer(consumer_of("m"))
    await publish(broker, "m", 2)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(consumer_of("m").name, 1)
    (old,) = await box.fill(1)
    assert await broker.delete_stream(STREAM.name)
    assert not await broker.delete_stream(STREAM.name)
    with pytest.raises(BrokerError):
        await broker.stream_state(STREAM.name)
    with pytest.raises(BrokerError):
        await publish(broker, "m", 1)
    after = await broker.ensure_stream(STREAM, owner=True)
    assert (after.messages, after.created != before.created) == (0, True)
    assert await broker.consumers(STREAM.name) == []
    await broker.publish(subject_of("m"), b"new", "another id")
    await old.ack()
    await broker.flush()
    assert (await broker.stream_state(STREAM.name)).messages == 1
    await broker.ensure_consumer(consumer_of("m"))
    pulls.want(consumer_of("m").name, 1)
    fresh = (await box.fill(2, timeout_s=5.0))[1]
    assert (fresh.data, fresh.sequence, fresh.delivered) == (b"new", 1, 1)
    await fresh.ack()
    await messages_left(broker, 0)
    await pulls.stop()


async def test_states_of_consumers_are_told(broker: Broker) -> None:
    """What a collector and an operator need: what was delivered, what waits, what is leased."""
    spec = consumer_of("a", ack_wait_s=20.0)
    await broker.ensure_consumer(spec)
    await broker.ensure_consumer(consumer_of("idle"))
    await publish(broker, "a", 5)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 3)
    for delivery in await box.fill(3):
        if delivery.sequence == 1:
            await delivery.ack()
    await messages_left(broker, 4)
    states = {state.name: state for state in await broker.consumer_states(STREAM.name)}
    expected = ConsumerState(spec.name, spec.subject, 20.0, TOPOLOGY_VERSION, 3, 2, 2)
    assert states[spec.name] == expected
    assert states[consumer_of("idle").name].delivered == 0
    await pulls.stop()


async def test_an_update_that_would_drop_messages_waits_until_they_are_done(harness: Harness) -> None:
    """A broker that is told a lower limit per subject drops what is above it, also where it discards the new."""
    broker = await harness.connect()
    await broker.ensure_stream(STREAM, owner=True)
    sequences = await publish(broker, "a", 100)
    newer = dataclasses.replace(STREAM, max_per_subject=60, version=STREAM.version + 1)
    with pytest.raises(BrokerError, match="not updated yet"):
        await broker.ensure_stream(newer, owner=True)
    assert (await broker.stream_state(STREAM.name)).messages == 100
    for sequence in sequences[30:]:
        await broker.delete(STREAM.name, sequence)
    assert (await broker.ensure_stream(newer, owner=True)).messages == 30
    await publish(broker, "a", 30, first=100)
    with pytest.raises(StreamFull):
        await publish(broker, "a", 1, first=200)


async def test_many_consumers_are_listed(broker: Broker) -> None:
    specs = [consumer_of(f"m{number}") for number in range(60)]
    await asyncio.gather(*(broker.ensure_consumer(spec) for spec in specs))

    assert sorted(await broker.consumers(STREAM.name)) == sorted(spec.name for spec in specs)


# ---- core messages


async def test_a_request_is_confirmed_by_whoever_listens(harness: Harness) -> None:
    """L10: one of a queue group answers; without a listener the request fails at once, not at its time-out."""
    caller, worker = await harness.connect("caller"), await harness.connect("worker")
    handled: Box[CoreMessage] = Box()

    async def confirm(message: CoreMessage) -> None:
        handled.put(message)
        await worker.send(message.reply, b"confirmed " + message.data)

    members = [await worker.subscribe("results.>", confirm, queue="gateways") for _ in range(3)]
    answers = await asyncio.gather(*(caller.request("results.one", b"%d" % number, 5.0) for number in range(50)))
    assert answers == [b"confirmed %d" % number for number in range(50)]
    assert len(handled.items) == 50

    for member in members:
        await member.stop()
    started_s = time.monotonic()
    with pytest.raises(NoResponder):
        await caller.request("results.one", b"lost", 5.0)
    assert time.monotonic() - started_s < 1.0


async def test_a_listener_that_never_answers_ends_in_a_time_out(harness: Harness) -> None:
    caller = await harness.connect()
    box: Box[CoreMessage] = Box()
    await caller.subscribe("void", box.take)
    with pytest.raises(BrokerUnavailable):
        await caller.request("void", b"x", 0.2)
    assert len(box.items) == 1


async def test_messages_of_a_subscription_are_handled_one_by_one_and_survive_failures(harness: Harness) -> None:
    """L12 L23: a stalled handler loses nothing; one that raises, or awaits something cancelled, costs only its own
    message.
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
            gone = asyncio.get_running_loop().create_future()
            gone.cancel()
            await gone

    subscription = await receiver.subscribe("beats.*", slow)
    for number in range(5000):
        await sender.send("beats.x", b"%d" % number)
    await sender.flush()
    await receiver.flush()
    release.set()

    assert await box.fill(5000) == [b"%d" % number for number in range(5000)]
    assert receiver.connected
    await subscription.stop()


@pytest.mark.parametrize("limit", [{"held_messages": 10}, {"held_bytes": 10_100}])
async def test_what_a_full_subscription_drops_is_told_with_its_subject(harness: Harness, limit: dict[str, int]) -> None:
    """L12: ten of a kilobyte wait for a handler that holds one more; the connection goes on."""
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
    await asyncio.wait_for(begun.wait(), 10)
    for subject in subjects[1:]:
        await sender.send(subject, bytes(1000))
    await sender.flush()
    await receiver.flush()
    assert dropped == subjects[11:]
    release.set()
    assert await box.fill(11) == subjects[:11]
    await sender.send("full.again", b"")
    assert (await box.fill(12))[-1] == "full.again"
    assert receiver.connected


async def test_stopping_a_subscription_handles_what_has_arrived(harness: Harness) -> None:
    """L13"""
    broker = await harness.connect()
    box: Box[bytes] = Box()

    async def slow(message: CoreMessage) -> None:
        await asyncio.sleep(0)
        box.put(message.data)

    subscription = await broker.subscribe("beats", slow)
    for number in range(100):
        await broker.send("beats", b"%d" % number)
    await broker.flush()
    await subscription.stop()
    assert len(box.items) == 100
    await broker.send("beats", b"late")
    await broker.flush()
    assert len(box.items) == 100


# ---- key value


async def test_keys_are_written_by_compare_and_set(harness: Harness) -> None:
    """Create only, update only at the expected revision, remove, create again; what loses stores nothing."""
    one, two = await harness.connect("one"), await harness.connect("two")
    bucket, same = await one.key_value("things"), await two.key_value("things")
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
    """Twenty writers raise a counter by compare-and-set; no step is lost."""
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
    bucket, other = await broker.key_value("things"), await broker.key_value("others")
    empty = await bucket.epoch()
    assert empty == await (await broker.key_value("things")).epoch()
    assert empty != await other.epoch()
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
    """C2: from the given revision on, removals included, from other connections too; a failing handler
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
    await broker.flush()
    assert len(box.items) == 304


async def test_a_watch_that_falls_behind_ends_at_the_newest_value(harness: Harness) -> None:
    """C2: what was overwritten before it was handed over may be left out; what is seen is in order."""
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


# ---- lost connections


async def test_a_lost_broker_is_survived_with_everything_it_stored(broker: Broker, harness: Harness) -> None:
    """L3 L7 S1 S2: (1) messages wait and are leased, one of them for the second time, (2) the broker is killed, (3) it
    is back, (4) its consumers are ensured again, as gateways do, and open pulls work within 5 s, (5) what was leased is
    delivered again: with its counts by a broker that kept them, from one without, (6) nothing is lost.
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
    assert again in ([], [1])  # the broker may serve what never went out before it hears of the nak
    await broker.flush()

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
    for each in (spec, idle):
        await broker.ensure_consumer(each)

    await broker.publish(subject_of("idle"), b"fresh", "fresh", timeout_s=5.0)
    await idle_box.fill(1, timeout_s=5.0)
    assert time.monotonic() - restored_s < 5.0
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
    """L10: the broker dies under a hundred publishes in flight; each is answered or unavailable within its time, and
    repeating is safe.
    """

    async def until_stored(number: int) -> None:
        while True:
            try:
                await broker.publish(subject_of("a"), b"x", f"id-{number}", timeout_s=2.0)
                return
            except BrokerUnavailable:
                continue

    publishing = asyncio.gather(*(until_stored(number) for number in range(100)))
    await broker.flush()
    await harness.crash()
    more = asyncio.gather(*(until_stored(number) for number in range(50, 150)))
    await harness.restore()
    async with asyncio.timeout(WAIT_S):
        await publishing
        await more
    assert (await broker.stream_state(STREAM.name)).messages == 150


async def test_an_ack_without_a_connection_is_sent_with_the_next(broker: Broker, harness: Harness) -> None:
    """L24: the work is done and answered, so its ack is right whenever it arrives."""
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 2)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(spec.name, 1)
    (delivery,) = await box.fill(1)
    await harness.cut()
    await delivery.ack()
    await harness.mend()

    await messages_left(broker, 1)
    await pulls.stop()


async def test_a_watch_goes_on_over_a_lost_broker(harness: Harness) -> None:
    """C2 S1: idle before, written after, each revision once and in order; the handlers of a reconnect run in the order
    of their entry.
    """
    broker = await harness.connect()
    bucket = await broker.key_value("things")
    await bucket.write([Write("a", b"1"), Write("b", b"1")])
    box: Box[Entry] = Box()
    steps: Box[str] = Box()

    async def first() -> None:
        await broker.flush()
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
    """S1: and requests in flight fail when the connection does, not at their time-out."""
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
    await broker.flush(5.0)
    await broker.send("beats", b"again")
    assert (await box.fill(2))[1].data == b"again"


async def test_a_crashed_task_of_a_connection_shows_as_not_connected(broker: Broker) -> None:
    """L23"""

    async def crash() -> None:
        raise RuntimeError("planted")

    assert broker.connected
    await asyncio.wait({broker.own(crash(), "planted")}, timeout=1.0)  # type: ignore[attr-defined]
    assert not broker.connected


# ---- one implementation only


async def test_a_reachable_broker_is_required_to_connect(caplog: pytest.LogCaptureFixture) -> None:
    """S2: refused within the time-out, and the credentials of the URL are in no log and no error."""
    with caplog.at_level(logging.DEBUG), pytest.raises(BrokerUnavailable) as refusal:
        await connect(f"nats://user:canary@127.0.0.1:{free_port()}", name="test", timeout_s=0.5)
    assert "canary" not in caplog.text + str(refusal.value)
    assert "for good" not in caplog.text  # the caller tries again
    with pytest.raises(ValueError, match="port") as malformed:
        await connect("nats://user:canary@host:port", name="test")
    assert "canary" not in str(malformed.value)


async def test_credentials_of_the_url_are_used(
    nats: Callable[..., Awaitable[NatsHarness]], caplog: pytest.LogCaptureFixture
) -> None:
    """S2: percent-encoded as in any URL; a refusal by the broker names itself."""
    with caplog.at_level(logging.DEBUG):
        server = (await nats(extra='authorization { users: [{user: "gateway", password: "p@ss:canary"}] }')).server
        address = server.url.removeprefix("nats://")
        broker = await connect(f"nats://gateway:p%40ss%3Acanary@{address}", name="test")
        await broker.flush()
        await broker.close()
        with pytest.raises(BrokerUnavailable, match=r"(?i)authorization"):
            await connect(f"nats://gateway:canary-wrong@{address}", name="test", timeout_s=0.5)
    assert "canary" not in caplog.text


async def test_closing_does_not_wait_for_a_silent_broker(nats: Callable[..., Awaitable[NatsHarness]]) -> None:
    """L24 S2: more is buffered than the socket takes and nobody reads it; the process still ends."""
    harness = await nats()
    broker = await harness.connect()
    harness.server.pause()
    sending = [asyncio.create_task(broker.send("big", bytes(1 << 19))) for _ in range(40)]
    async with asyncio.timeout(WAIT_S):
        await broker.close()
    await asyncio.gather(*sending, return_exceptions=True)
    assert not broker.connected


async def test_a_limit_of_the_broker_is_read_and_the_connection_kept(
    nats: Callable[..., Awaitable[NatsHarness]],
) -> None:
    """L11: a broker with 64 KiB per message, headers included; the number of connections it ever saw
    does not change.
    """
    harness = await nats(max_payload=65536)

    def connections() -> int:
        with urllib.request.urlopen(f"{harness.server.monitor_url}/varz", timeout=5) as answer:
            return int(msgspec.json.decode(answer.read())["total_connections"])

    broker = await harness.connect()
    assert broker.max_payload == 65536
    await broker.ensure_stream(STREAM, owner=True)
    before = await asyncio.to_thread(connections)
    for size in (65536, 65530):
        with pytest.raises(PayloadTooBig):
            await broker.publish(subject_of("a"), bytes(size), "id")
    await broker.publish(subject_of("a"), bytes(65400), "id")
    assert await asyncio.to_thread(connections) == before


async def test_a_broker_in_memory_storage_is_noticed_to_be_new(nats: Callable[..., Awaitable[NatsHarness]]) -> None:
    """L3 C2: `created` changes when a restart lost the stream; a watch begins anew with the bucket that replaced its
    own.
    """
    spec = dataclasses.replace(STREAM, storage="memory")
    box: Box[Entry] = Box()
    harness = await nats()
    broker = await harness.connect()
    before = await broker.ensure_stream(spec, owner=True)
    await publish(broker, "a", 3)
    bucket = await broker.key_value("things", storage="memory")
    epoch = await bucket.epoch()
    watch = await bucket.watch(box.take)
    await bucket.write([Write("a", b"old"), Write("b", b"old")])
    await box.fill(2)

    await harness.crash()
    await harness.restore()
    after = await broker.ensure_stream(spec, owner=True)
    assert after.created != before.created
    assert after.messages == 0
    fresh = await broker.key_value("things", storage="memory")
    assert (await fresh.epoch()).rpartition(":")[0] != epoch.rpartition(":")[0]
    await fresh.write([Write("a", b"new")])
    assert (await box.fill(3))[2] == Entry("a", b"new", 1)
    await watch.stop()


async def test_a_broker_that_falls_silent_is_left_and_found_again(nats: Callable[..., Awaitable[NatsHarness]]) -> None:
    """S1 S2: (1) the server stops answering with every connection open, (2) more is sent than the socket takes, (3) the
    connection counts as lost in 30 s, (4) the server goes on, (5) what it hands to pulls of the lost connection comes
    again after the ack wait.
    """
    spec = consumer_of("a", ack_wait_s=1.0)
    box: Box[Delivery] = Box()
    harness = await nats()
    broker = await harness.connect()
    await broker.ensure_stream(STREAM, owner=True)
    await broker.ensure_consumer(spec)
    broker.pulls(STREAM.name, box.put).want(spec.name, 1)
    await broker.flush()
    harness.server.pause()
    sending = (broker.publish(subject_of("b"), bytes(1 << 19), str(number), timeout_s=60.0) for number in range(20))
    async with asyncio.timeout(30.0):
        failed = await asyncio.gather(*sending, return_exceptions=True)
    assert all(isinstance(error, BrokerUnavailable) for error in failed)
    assert not broker.connected

    harness.server.resume()
    await broker.flush(5.0)
    await publish(broker, "a", 1)
    await box.fill(1, timeout_s=5.0)


async def test_a_durable_of_an_earlier_topology_keeps_its_files(nats: Callable[..., Awaitable[NatsHarness]]) -> None:
    """The broker refuses to change that in place, and it decides which leases outlive a broker, not who gets what."""
    harness = await nats()
    broker = await harness.connect()
    assert isinstance(broker, NatsBroker)
    await broker.ensure_stream(STREAM, owner=True)
    spec = consumer_of("a")
    older = consumer_config(dataclasses.replace(spec, version=1, ack_wait_s=5.0)) | {"mem_storage": False}
    body = {"stream_name": STREAM.name, "action": "create", "config": older}
    await broker.api(f"CONSUMER.CREATE.{STREAM.name}.{spec.name}.{spec.subject}", body, ConsumerInfo)
    for _ in range(2):
        await broker.ensure_consumer(spec)
    (info,) = await broker.consumer_infos(STREAM.name)
    assert (info.config.get("mem_storage", False), info.config["ack_wait"], version_of(info.config)) == (
        False,
        30e9,
        spec.version,
    )


async def test_a_watch_whose_reader_brings_nothing_looks_for_itself(
    nats: Callable[..., Awaitable[NatsHarness]], caplog: pytest.LogCaptureFixture
) -> None:
    """S1: what the broker sends is lost on the way, for ever and without a word; the watch compares revisions and reads
    again.
    """
    harness = await nats()
    broker = await harness.connect()
    bucket = await broker.key_value("things")
    box: Box[Entry] = Box()
    watch = await bucket.watch(box.take)
    await bucket.write([Write("a", b"1")])
    await box.fill(1)
    await watch._pulls._subscription.unsubscribe()  # type: ignore[attr-defined]
    await bucket.write([Write("a", b"2")])
    assert (await box.fill(2, 6.0))[1].value == b"2"
    assert "missed what came after revision 1" in caplog.text
    await watch.stop()


def test_the_client_library_is_one_that_this_suite_has_seen() -> None:
    """S5: the broker works around faults of this version and uses seams that are not promised; look at both before this
    line changes.
    """
    assert importlib.metadata.version("nats-py").startswith("2.16.")


def test_facts_of_a_delivery_are_read_from_both_forms_of_its_ack_subject() -> None:
    class Message:
        data, subject, headers = b"x", "sie.work.a", None

        def __init__(self, reply: str) -> None:
            self.reply = reply

    for reply in (
        "$JS.ACK.WORK_p.name.3.17.21.1700000000500000000.9",
        "$JS.ACK.domain.hash.WORK_p.name.3.17.21.1700000000500000000.9",
        "$JS.ACK.domain.hash.WORK_p.name.3.17.21.1700000000500000000.9.random",
    ):
        delivery = NatsDelivery(None, Message(reply))  # type: ignore[arg-type]
        assert (delivery.consumer, delivery.delivered, delivery.sequence, delivery.pending) == ("name", 3, 17, 9)
        assert delivery.sent_s == 1700000000.5
    with pytest.raises(ValueError, match="ack subject"):
        NatsDelivery(None, Message("_INBOX.x"))  # type: ignore[arg-type]


async def test_the_broker_in_memory_obeys_a_clock_of_the_test() -> None:
    """L7 L19: lease, delay and duplicate window pass without waiting."""
    now_s = 1000.0
    server = MemoryServer(clock=lambda: now_s)
    broker = server.connect("test")
    await broker.ensure_stream(STREAM, owner=True)
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
    await broker.flush()
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


async def test_the_broker_in_memory_loses_answers_and_streams_on_demand() -> None:
    """L10: the publish happened, its publisher does not know, and repeating it is safe."""
    server = MemoryServer()
    broker = server.connect("test")
    created = (await broker.ensure_stream(STREAM, owner=True)).created
    server.lose_answers = 1
    with pytest.raises(BrokerUnavailable):
        await broker.publish(subject_of("a"), b"x", "1")
    assert (await broker.publish(subject_of("a"), b"x", "1")).duplicate
    server.lose_stream(STREAM.name)
    with pytest.raises(BrokerError):
        await broker.stream_state(STREAM.name)
    assert (await broker.ensure_stream(STREAM, owner=True)).created != created
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
    """L17"""
    for one, other, expected in (
        ("a.*", "*.b", True),
        ("a.>", "*.*.c", True),
        ("a.*", "b.*", False),
        ("a.*.c", "a.b.*", True),
    ):
        assert overlap(one, other) is overlap(other, one) is expected


def test_a_spec_without_a_limit_equals_one_that_says_so() -> None:
    """L16"""
    assert StreamSpec("x", ("x",)) == StreamSpec("x", ("x",), max_bytes=-1, max_per_subject=0)
