"""Promises of every broker to publishers and consumers. Each test runs in memory and at a real nats-server."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
from broker_harness import LANE, STREAM, WAIT_S, Box, Harness, consumer_of, messages_left, publish, pulling, subject_of

from sie_broker import (
    Broker,
    BrokerError,
    BrokerUnavailable,
    Delivery,
    PayloadTooBig,
    Pulls,
    StreamFull,
    TopologyMismatch,
)
from sie_contracts.wire.topology import ConsumerSpec

# ---- publishing


async def test_a_published_message_is_stored_once_per_id(broker: Broker) -> None:
    """A repeated publish is answered with the sequence of the first one and marked as a duplicate."""
    first = await broker.publish(subject_of("a"), b"work", "id-1")
    again = await broker.publish(subject_of("a"), b"work", "id-1")
    receipt = await broker.publish(subject_of("a"), b"work", "id-2")

    assert (first.sequence, first.duplicate) == (1, False)
    assert (again.sequence, again.duplicate) == (1, True)
    assert (receipt.sequence, receipt.duplicate) == (2, False)
    assert (await broker.stream_state(STREAM.name)).messages == 2


async def test_many_publishers_in_flight_all_get_their_own_answer(broker: Broker) -> None:
    answers = await asyncio.gather(*(broker.publish(subject_of("a"), b"x", str(number)) for number in range(500)))

    assert sorted(answer.sequence for answer in answers) == list(range(1, 501))


async def test_a_full_subject_refuses_the_newest_while_others_go_on(harness: Harness) -> None:
    """No stored message is dropped, and a refused message id is not remembered as stored."""
    broker = await harness.connect()
    await broker.ensure_stream(dataclasses.replace(STREAM, max_per_subject=3))
    sequences = await publish(broker, "busy", 3)

    with pytest.raises(StreamFull):
        await broker.publish(subject_of("busy"), b"late", "late")
    await broker.publish(subject_of("idle"), b"fine", "fine")
    assert await broker.delete(STREAM.name, sequences[0])
    retried = await broker.publish(subject_of("busy"), b"late", "late")

    assert not retried.duplicate
    assert await broker.subject_counts(STREAM.name, "sie.work.>") == {subject_of("busy"): 3, subject_of("idle"): 1}


async def test_a_full_stream_refuses_the_newest_and_keeps_the_oldest(harness: Harness) -> None:
    broker = await harness.connect()
    await broker.ensure_stream(dataclasses.replace(STREAM, max_bytes=4096))

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
        await broker.publish("elsewhere.a", b"x", "1", timeout_s=60.0)
    assert time.monotonic() - started_s < 20.0


async def test_a_message_above_the_limit_is_refused_without_harm_to_the_connection(broker: Broker) -> None:
    """The limit is the one that the broker announces, and the refusal has a type of its own."""
    with pytest.raises(PayloadTooBig):
        await broker.publish(subject_of("a"), bytes(broker.max_payload + 1), "1")
    with pytest.raises(PayloadTooBig):
        await broker.send("any", bytes(broker.max_payload + 1))

    assert broker.connected
    await broker.publish(subject_of("a"), bytes(broker.max_payload - 100), "2")


# ---- pulling and settling


async def test_pulls_deliver_no_more_than_wanted_and_in_order(broker: Broker) -> None:
    """Deliveries use up the credit, and messages beyond it wait in the stream undelivered."""
    spec = consumer_of("a")
    box, pulls = await pulling(broker, spec, published=10, wanted=4)
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


async def test_a_handler_that_tops_up_itself_gets_everything_once(broker: Broker) -> None:
    """The handler wants a new message for each delivery, as a scheduler does, for several consumers at once."""
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
    box, pulls = await pulling(broker, spec, published=3, wanted=3)
    deliveries = await box.fill(3)

    assert (await broker.stream_state(STREAM.name)).messages == 3
    await deliveries[0].ack()
    await deliveries[2].ack()
    await messages_left(broker, 1)

    state = await broker.stream_state(STREAM.name)
    assert (state.first_sequence, state.last_sequence) == (2, 3)
    await pulls.stop()


async def test_a_nak_delays_the_next_delivery(broker: Broker) -> None:
    """The delivery count grows by one, and other messages are delivered meanwhile."""
    spec = consumer_of("a")
    box, pulls = await pulling(broker, spec, published=2, wanted=1)
    (first,) = await box.fill(1)
    pulls.want(spec.name, 2)

    naked_s = time.monotonic()
    await first.nak(0.5)
    delivery, again = (await box.fill(3))[1:]

    assert 0.45 < time.monotonic() - naked_s < 20.0  # the ack wait is 30 s
    assert (delivery.sequence, delivery.delivered) == (2, 1)
    assert (again.sequence, again.delivered) == (1, 2)
    assert again.sent_s == first.sent_s
    await pulls.stop()


async def test_naks_without_delay_never_reach_a_delivery_limit(broker: Broker) -> None:
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
    """A holder falls silent and another connection gets the message. The ack of the first holder removes it."""
    spec = consumer_of("a", ack_wait_s=0.5)
    await broker.ensure_consumer(spec)
    await publish(broker, "a", 1)
    first_box: Box[Delivery] = Box()
    second_box: Box[Delivery] = Box()
    silent = broker.pulls(STREAM.name, first_box.put)
    silent.want(spec.name, 1)
    (stale,) = await first_box.fill(1)
    leased_s = time.monotonic()

    second_pulls = (await harness.connect("other")).pulls(STREAM.name, second_box.put)
    second_pulls.want(spec.name, 1)
    (fresh,) = await second_box.fill(1)
    assert time.monotonic() - leased_s > 0.4
    assert (stale.delivered, fresh.delivered) == (1, 2)
    assert stale.sequence == fresh.sequence

    await stale.ack()
    await messages_left(broker, 0)
    second_pulls.want(spec.name, 1)
    await fresh.nak()
    await second_box.quiet(0.7)
    await second_pulls.stop()
    await silent.stop()


async def test_in_progress_extends_a_lease(broker: Broker) -> None:
    """A message that is refreshed for longer than the ack wait is delivered once. Without further refreshes it is
    delivered again, with a count of 2.
    """
    spec = consumer_of("a", ack_wait_s=1.2)
    box, pulls = await pulling(broker, spec, published=1, wanted=1)
    (delivery,) = await box.fill(1)
    pulls.want(spec.name, 1)

    began_s = refreshed_s = time.monotonic()
    # the loop ends if the machine stood still, because the lease may have expired
    while len(box.items) == 1 and time.monotonic() < min(refreshed_s + 1.0, began_s + 1.4):
        refreshed_s = time.monotonic()
        await delivery.in_progress()
        await asyncio.sleep(0.1)
    again = (await box.fill(2))[1]

    assert time.monotonic() - refreshed_s > 1.0
    assert again.delivered == 2
    await pulls.stop()


async def test_a_terminated_message_is_gone(broker: Broker) -> None:
    spec = consumer_of("a", ack_wait_s=0.5)
    box, pulls = await pulling(broker, spec, published=1, wanted=2)
    (delivery,) = await box.fill(1)
    await delivery.term("poison")

    await messages_left(broker, 0)
    await box.quiet(0.7)
    await pulls.stop()


async def test_work_waits_for_its_consumer_and_is_shared_by_its_workers(broker: Broker, harness: Harness) -> None:
    """Messages are published and workers pull before the consumer exists. Each message then reaches one worker.
    Ensuring the consumer again changes nothing.
    """
    await publish(broker, "a", 40)
    spec = consumer_of("a")
    boxes: list[Box[Delivery]] = [Box(), Box()]
    pulls = [
        (await harness.connect(f"worker {number}")).pulls(STREAM.name, box.put) for number, box in enumerate(boxes)
    ]
    for worker in pulls:
        worker.want(spec.name, 20)
    await broker.ensure_consumer(spec)
    await asyncio.gather(*(box.fill(20) for box in boxes))
    await broker.ensure_consumer(spec)

    for worker in pulls:
        worker.want(spec.name, 1)
    await boxes[0].quiet(0.2)
    assert sorted(item.sequence for box in boxes for item in box.items) == list(range(1, 41))
    assert {item.delivered for box in boxes for item in box.items} == {1}
    for worker in pulls:
        await worker.stop()


async def test_overlapping_consumers_are_refused(broker: Broker) -> None:
    """The broker refuses an overlapping subject of a new consumer, and of an update from an older topology."""
    await broker.ensure_consumer(consumer_of("a"))
    with pytest.raises(BrokerError):
        await broker.ensure_consumer(ConsumerSpec(STREAM.name, "wide", f"sie.work.{LANE.pool}.>"))

    second_consumer = consumer_of("b")
    await broker.ensure_consumer(second_consumer)
    moved = dataclasses.replace(second_consumer, subject=subject_of("a"), version=second_consumer.version + 1)
    with pytest.raises(TopologyMismatch) as refusal:
        await broker.ensure_consumer(moved)
    assert refusal.value.field == "subject"
    assert sorted(await broker.consumers(STREAM.name)) == sorted([consumer_of("a").name, second_consumer.name])


async def test_an_open_pull_outlives_its_expiry_and_lowering_takes_effect(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a pull has expired at the broker, the next message is delivered at once, with a delivery count of 1."""
    monkeypatch.setattr("sie_broker.nats.client.PULL_EXPIRES_S", 0.8)  # of a pull for one message; others last 1 s
    for model in ("a", "b"):
        await broker.ensure_consumer(consumer_of(model))
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    pulls.want(consumer_of("a").name, 2)
    pulls.want(consumer_of("b").name, 5)
    await broker.flush(WAIT_S)
    pulls.want(consumer_of("b").name, 1)
    await box.quiet(1.5)

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
    """In 200 cycles of a pull that waits and then a publish, the p99 of the delivery time is below 50 ms."""
    spec = consumer_of("a")
    await broker.ensure_consumer(spec)
    box: Box[Delivery] = Box()
    pulls = broker.pulls(STREAM.name, box.put)
    hand_offs_s = []
    for cycle in range(200):
        pulls.want(spec.name, 1)
        await broker.flush(WAIT_S)
        sent_s = time.monotonic()
        await publish(broker, "a", 1, first=cycle)
        delivery = (await box.fill(cycle + 1))[-1]
        hand_offs_s.append(time.monotonic() - sent_s)
        await delivery.ack()

    assert sorted(hand_offs_s)[197] < 0.05
    await messages_left(broker, 0)
    await pulls.stop()


async def test_stopping_pulls_loses_nothing(broker: Broker, harness: Harness) -> None:
    """A worker stops its pulls eight times under load. Its deliveries and those of the next reader are all messages,
    each once, long before any lease ends.
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
        await worker.flush(WAIT_S)
        assert len(box.items) == count
    deliveries = box.items
    await publishing

    for delivery in deliveries:
        await delivery.ack()
    rest: Box[Delivery] = Box()
    last = worker.pulls(STREAM.name, rest.put)
    last.want(spec.name, 2000)
    deliveries = deliveries + await rest.fill(2000 - len(deliveries))
    assert sorted(delivery.sequence for delivery in deliveries) == list(range(1, 2001))
    # the broker delivers again at once, with a count of 2, a message whose pull ended while it was on its way
    assert sum(delivery.delivered - 1 for delivery in deliveries) < 10
    await last.stop()


async def test_an_ack_before_close_arrives(broker: Broker, harness: Harness) -> None:
    """All acks take effect long before any lease ends."""
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
