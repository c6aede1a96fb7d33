"""Administration of streams and consumers by every broker. Each test runs in memory and at a real nats-server."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from broker_harness import STREAM, WAIT_S, Box, Harness, consumer_of, messages_left, publish, pulling, subject_of

from sie_broker import Broker, BrokerError, ConsumerState, Delivery, StreamFull, TopologyMismatch, UnsafeUpdate
from sie_contracts.wire.topology import TOPOLOGY_VERSION, dead_letter_stream


async def test_a_stream_is_created_once_and_other_settings_are_refused(harness: Harness) -> None:
    """Settings that differ are refused without a change."""
    gateway, other = await harness.connect("gateway"), await harness.connect("other")
    created = await gateway.ensure_stream(STREAM)
    assert (await other.ensure_stream(STREAM)).created == created.created

    for change in (
        {"storage": "memory"},
        {"max_bytes": 1_000_000},
        {"max_per_subject": 7},
        {"max_age_s": 300.0},
        {"duplicate_window_s": 60.0},
        {"subjects": (*STREAM.subjects, "sie.more.>")},
    ):
        with pytest.raises(TopologyMismatch) as refusal:
            await gateway.ensure_stream(dataclasses.replace(STREAM, **change))  # type: ignore[arg-type]
        assert refusal.value.field in change
    assert await other.ensure_stream(STREAM) == created


async def test_a_newer_topology_is_applied(harness: Harness) -> None:
    """The update keeps all messages. A field that the broker cannot change in place is refused by its name. After the
    update, an older topology is refused.
    """
    broker = await harness.connect()
    await broker.ensure_stream(STREAM)
    await publish(broker, "a", 2)
    newer = dataclasses.replace(STREAM, max_per_subject=5, max_age_s=600.0, version=STREAM.version + 1)

    assert (await broker.ensure_stream(newer)).messages == 2
    with pytest.raises(TopologyMismatch) as refusal:
        await broker.ensure_stream(STREAM)
    assert refusal.value.field in ("max_per_subject", "max_age_s")
    with pytest.raises(TopologyMismatch) as refusal:
        await broker.ensure_stream(dataclasses.replace(newer, storage="memory", version=newer.version + 1))
    assert refusal.value.field == "storage"
    assert (await broker.ensure_stream(newer)).messages == 2


async def test_a_durable_is_compared_and_updated_from_an_older_topology_only(broker: Broker) -> None:
    """A refusal names the field, and the consumer keeps its delivery state."""
    spec = consumer_of("a", ack_wait_s=20.0)
    box, pulls = await pulling(broker, spec, published=2, wanted=1)
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
    """The leases of a deleted durable end with it. A new durable of the same name delivers the messages that are left,
    and acks of the old leases have no effect.
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
    await broker.flush(WAIT_S)

    await broker.ensure_consumer(specs[0])
    fresh = (await box.fill(2, timeout_s=30.0))[1]
    assert (fresh.sequence, fresh.delivered) == (1, 1)
    await fresh.ack()
    await messages_left(broker, 0)
    await pulls.stop()
    await watcher.stop()


async def test_a_stream_is_removed_with_all_that_is_in_it_and_made_anew_is_another_one(broker: Broker) -> None:
    """The ack of a message from the removed stream has no effect: the message with the same sequence in the new stream
    stays. Open pulls find the new stream.
    """
    before = await broker.ensure_stream(STREAM)
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
    after = await broker.ensure_stream(STREAM)
    assert (after.messages, after.created != before.created) == (0, True)
    assert await broker.consumers(STREAM.name) == []
    await broker.publish(subject_of("m"), b"new", "another id")
    await old.ack()
    await broker.flush(WAIT_S)
    assert (await broker.stream_state(STREAM.name)).messages == 1
    await broker.ensure_consumer(consumer_of("m"))
    pulls.want(consumer_of("m").name, 1)
    fresh = (await box.fill(2, timeout_s=30.0))[1]
    assert (fresh.data, fresh.sequence, fresh.delivered) == (b"new", 1, 1)
    await fresh.ack()
    await messages_left(broker, 0)
    await pulls.stop()


async def test_states_of_consumers_are_told(broker: Broker) -> None:
    """A collector and an operator need the numbers of delivered, waiting and leased messages."""
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
    """A broker drops messages above a lowered limit per subject, even in a stream that discards new messages."""
    broker = await harness.connect()
    await broker.ensure_stream(STREAM)
    sequences = await publish(broker, "a", 100)
    newer = dataclasses.replace(STREAM, max_per_subject=60, version=STREAM.version + 1)
    with pytest.raises(BrokerError, match="not updated yet"):
        await broker.ensure_stream(newer)
    assert (await broker.stream_state(STREAM.name)).messages == 100
    for sequence in sequences[30:]:
        await broker.delete(STREAM.name, sequence)
    assert (await broker.ensure_stream(newer)).messages == 30
    await publish(broker, "a", 30, first=100)
    with pytest.raises(StreamFull):
        await publish(broker, "a", 1, first=200)


async def test_an_update_that_would_drop_dead_letters_is_refused(harness: Harness) -> None:
    """A stream that discards the oldest messages drops those above a lower limit of bytes."""
    broker = await harness.connect()
    letters = dead_letter_stream("full", replicas=1, queue_bytes=1 << 20)
    await broker.ensure_stream(letters)
    for number in range(20):
        await broker.publish(letters.subjects[0], b"x" * 2000, f"letter-{number}")
    newer = dataclasses.replace(letters, version=letters.version + 1)
    with pytest.raises(UnsafeUpdate, match="would drop"):
        await broker.ensure_stream(dataclasses.replace(newer, max_bytes=20_000))
    assert (await broker.stream_state(letters.name)).messages == 20
    assert (await broker.ensure_stream(dataclasses.replace(newer, max_bytes=100_000))).messages == 20


async def test_many_consumers_are_listed(broker: Broker) -> None:
    specs = [consumer_of(f"m{number}") for number in range(60)]
    await asyncio.gather(*(broker.ensure_consumer(spec) for spec in specs))

    assert sorted(await broker.consumers(STREAM.name)) == sorted(spec.name for spec in specs)
