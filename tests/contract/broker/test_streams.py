"""Promises of every broker about stored messages. Each test runs in memory and at a real nats-server."""

from __future__ import annotations

import dataclasses
import time

import pytest
from broker_harness import STREAM, WAIT_S, Box, Harness, consumer_of, messages_left, publish, pulling, subject_of

from sie_broker import Broker, BrokerError, Delivery
from sie_contracts.wire.topology import dead_letter_stream, dead_letter_subject


async def test_a_released_delivery_comes_again_at_once(broker: Broker, harness: Harness) -> None:
    """The successor of a killed process releases its deliveries over another connection. It knows only the reply
    subject of each delivery.
    """
    spec = consumer_of("a")
    box, pulls = await pulling(broker, spec, published=2, wanted=2)
    first, second = await box.fill(2)
    await second.ack()
    await broker.flush(WAIT_S)

    successor = await harness.connect("successor")
    for reply in (first.reply, second.reply):
        await successor.release(reply)
    again: Box[Delivery] = Box()
    second_pulls = successor.pulls(STREAM.name, again.put)
    second_pulls.want(spec.name, 2)
    (delivery,) = await again.fill(1)
    assert (delivery.data, delivery.delivered, delivery.sent_s) == (b"0", 2, first.sent_s)
    assert delivery.reply != first.reply
    await again.quiet(0.2)  # the one that was acknowledged stays gone
    for reader in (pulls, second_pulls):
        await reader.stop()


@pytest.mark.parametrize("reply", ["", "sie.work.x", "$JS.ACK", "$JS.ACK.a", "$JS.API.STREAM.DELETE.WORK__default"])
async def test_only_a_delivery_can_be_released(broker: Broker, reply: str) -> None:
    """A subject that is no ack subject is refused, because a release publishes a message on it."""
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
    """The stream accepts each new message, and a read removes no message."""
    spec = dataclasses.replace(dead_letter_stream("_default", replicas=1), max_bytes=4096)
    await broker.ensure_stream(spec)
    for number in range(8):
        await broker.publish(dead_letter_subject("_default"), bytes(1000) + b"%d" % number, f"letter-{number}")
    state = await broker.stream_state(spec.name)
    assert state.last_sequence == 8
    assert 1 < state.messages < 5
    newest = await broker.first_stored(spec.name, 8)
    assert newest is not None
    assert newest.data.endswith(b"7")
    assert await broker.subject_counts(spec.name, ">") == {dead_letter_subject("_default"): state.messages}


async def test_waiting_and_leased_messages_are_deleted_by_sequence(broker: Broker) -> None:
    """A cancelled message is not delivered again, and its holder's late settlement does no harm."""
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
    """Waiting and leased messages both count. A subject without messages is not listed. A filter selects subjects."""
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
    """Messages go after the age that the owner of the stream chose, and sequences go on."""
    broker = await harness.connect()
    await broker.ensure_stream(dataclasses.replace(STREAM, max_age_s=0.5))
    stored_s = time.monotonic()
    await publish(broker, "a", 3)

    await messages_left(broker, 0)
    assert time.monotonic() - stored_s > 0.4
    await publish(broker, "a", 1, first=9)
    assert (await broker.stream_state(STREAM.name)).last_sequence == 4
