"""Queue over the streams of the in-process server, and the administration of these streams."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from sie_broker import (
    ConsumerState,
    CoreMessage,
    Delivery,
    Published,
    Pulls,
    StreamMessage,
    StreamState,
    Subscription,
    TopologyMismatch,
)
from sie_broker.limits import API_TIMEOUT_S, check_room
from sie_broker.memory.connection import ADVISORY, Exchange, MemoryBus, MemoryConnection
from sie_broker.memory.streams import Consumer, DeliveryCredit, Message, matches, normal
from sie_contracts.wire.topology import ConsumerSpec, StreamSpec

log = logging.getLogger("sie.broker")

_STREAM_FIELDS = ("subjects", "max_per_subject", "max_bytes", "max_age_s", "duplicate_window_s", "storage", "replicas")
_NEVER_UPDATED = {"storage", "subject"}


class MemoryDelivery:
    """Leased message. An ack removes the message even if another process has leased it meanwhile."""

    __slots__ = (
        "_connection",
        "_consumer",
        "consumer",
        "data",
        "delivered",
        "pending",
        "reply",
        "sent_s",
        "sequence",
        "subject",
    )

    def __init__(self, connection: MemoryConnection, consumer: Consumer, message: Message) -> None:
        self._connection = connection
        self._consumer = consumer
        self.consumer = consumer.spec.name
        self.data = message.data
        self.subject = message.subject
        self.sequence = message.sequence
        self.delivered = consumer.delivered[message.sequence]
        self.sent_s = message.sent_s
        self.pending = len(consumer.waiting)
        self.reply = f"$JS.ACK.{consumer.spec.stream}.{self.consumer}.{self.delivered}.{self.sequence}"

    async def ack(self) -> None:
        self._connection.acknowledge(self.settle)

    async def nak(self, delay_s: float = 0.0) -> None:
        self._connection.require()
        consumer = self._held()
        if consumer is not None:
            consumer.postpone(self.sequence, max(0.0, delay_s))

    async def in_progress(self) -> None:
        self._connection.require()
        consumer = self._held()
        if consumer is not None:
            consumer.extend(self.sequence, consumer.stream.server.clock())

    async def term(self, reason: str) -> None:
        self._connection.require()
        self.settle()

    def settle(self) -> None:
        consumer = self._held()
        if consumer is not None:
            consumer.stream.remove(self.sequence)

    def _held(self) -> Consumer | None:
        consumer = self._consumer
        is_registered = consumer.stream.consumers.get(self.consumer) is consumer
        return consumer if is_registered and self.sequence in consumer.delivered else None


def parse_reply(reply: str) -> tuple[str, str, int]:
    """Return stream, consumer and sequence from the `reply` of a delivery. Raises ValueError for any other text."""
    tokens = reply.split(".")
    if len(tokens) != 6 or tokens[:2] != ["$JS", "ACK"]:
        raise ValueError(f"{reply[:70]!r} is not the reply subject of a delivery")
    return tokens[2], tokens[3], int(tokens[5])


class MemoryPulls:
    def __init__(
        self, connection: MemoryQueue, server: Exchange, stream: str, handler: Callable[[Delivery], None]
    ) -> None:
        self._connection = connection
        self._server = server
        self._stream = stream
        self._handler = handler
        self._credits: dict[str, DeliveryCredit] = {}
        self._stopped = False

    def want(self, consumer: str, credit: int) -> None:
        entry = self._credits.get(consumer)
        if entry is None:
            if credit <= 0 or self._stopped:
                return
            entry = self._credits[consumer] = DeliveryCredit(self)
        entry.left = max(0, credit)
        self.attach(consumer)

    def outstanding(self, consumer: str) -> int:
        entry = self._credits.get(consumer)
        return entry.left if entry is not None and self._connection.live else 0

    async def stop(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._stopped = True
        self.detach_all()
        self._credits.clear()
        self._server.pulls[self._stream].discard(self)
        self._connection.remove(self)

    def deliver_leased(self, consumer: Consumer, message: Message) -> None:
        self.deliver(MemoryDelivery(self._connection, consumer, message))

    def deliver(self, delivery: MemoryDelivery) -> None:
        try:
            self._handler(delivery)
        except Exception:
            log.exception("pulls on stream %s: the handler of a delivery failed", self._stream)

    def attach(self, name: str) -> None:
        entry, consumer = self._credits.get(name), self._consumer(name)
        if entry is not None and consumer is not None and entry.left and not entry.queued and self._connection.live:
            entry.queued = True
            consumer.credits.append(entry)
            self._server.serve(consumer)

    def attach_all(self) -> None:
        for name in self._credits:
            self.attach(name)

    def detach_all(self) -> None:
        for name, entry in self._credits.items():
            consumer = self._consumer(name)
            if consumer is not None and entry.queued:
                entry.queued = False
                consumer.credits.remove(entry)

    def _consumer(self, name: str) -> Consumer | None:
        stream = self._server.streams.get(self._stream)
        return stream.consumers.get(name) if stream is not None else None


class MemoryQueue(MemoryBus):
    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        if not self._live:
            await self.reach(timeout_s)
        self._check(subject, data)
        return self._server.stream_of(subject).store(subject, data, message_id)

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls:
        pulls = MemoryPulls(self, self._server, stream, handler)
        self._pulls.add(pulls)
        self._server.pulls.setdefault(stream, set()).add(pulls)
        return pulls

    def remove(self, pulls: MemoryPulls) -> None:
        self._pulls.discard(pulls)

    async def subject_counts(self, stream: str, subject_filter: str) -> dict[str, int]:
        await self.reach(API_TIMEOUT_S)
        counts = self._server.stream(stream).counts
        return {subject: count for subject, count in counts.items() if matches(subject_filter, subject)}

    async def stream_state(self, stream: str) -> StreamState:
        await self.reach(API_TIMEOUT_S)
        return self._server.stream(stream).state()

    async def delete(self, stream: str, sequence: int) -> bool:
        await self.reach(API_TIMEOUT_S)
        return self._server.stream(stream).remove(sequence)

    async def release(self, reply: str) -> None:
        stream, consumer, sequence = parse_reply(reply)
        self.require()
        registered = self._server.streams[stream].consumers.get(consumer) if stream in self._server.streams else None
        if registered is not None and sequence in registered.delivered:
            registered.postpone(sequence, 0.0)

    async def first_stored(self, stream: str, sequence: int = 0, subject: str = ">") -> StreamMessage | None:
        await self.reach(API_TIMEOUT_S)
        messages = self._server.stream(stream).messages.values()
        return next(
            (
                StreamMessage(message.sequence, message.subject, message.data, message.sent_s)
                for message in messages
                if message.sequence >= sequence and matches(subject, message.subject)
            ),
            None,
        )

    async def server_time(self, stream: str) -> float:
        await self.reach(API_TIMEOUT_S)
        self._server.stream(stream)
        return self._server.wall_clock()

    async def consumers(self, stream: str) -> list[str]:
        await self.reach(API_TIMEOUT_S)
        return list(self._server.stream(stream).consumers)

    async def watch_consumers(self, stream: str, handler: Callable[[str, bool], Awaitable[None]]) -> Subscription:
        async def advised(message: CoreMessage) -> None:
            action, _, name = message.subject.split(".", 6)[4:]
            await handler(name, action == "CREATED")

        return await self.subscribe(f"{ADVISORY}.*.{stream}.*", advised)


class MemoryAdministration(MemoryQueue):
    async def ensure_stream(self, spec: StreamSpec) -> StreamState:
        await self.reach(API_TIMEOUT_S)
        stream = self._server.streams.get(spec.name) or self._server.add_stream(spec)
        current = stream.spec
        field = next((field for field in _STREAM_FIELDS if normal(current, field) != normal(spec, field)), None)
        if current.version < spec.version and (field is None or spec.storage == current.storage):
            check_room(spec, current.max_per_subject, current.max_bytes, stream.bytes, stream.counts)
            self._server.change_stream(stream, spec)
        elif field is not None:
            raise TopologyMismatch(spec.name, field, getattr(current, field), getattr(spec, field))
        return stream.state()

    async def delete_stream(self, stream: str) -> bool:
        await self.reach(API_TIMEOUT_S)
        if stream not in self._server.streams:
            return False
        self._server.lose_stream(stream)
        return True

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        await self.reach(API_TIMEOUT_S)
        stream = self._server.stream(spec.stream)
        consumer = stream.consumers.get(spec.name)
        if consumer is None:
            consumer = stream.add_consumer(spec)
            self._server.open_credits(consumer)
            self._server.advise(spec.stream, spec.name, exists=True)
            return
        current = consumer.spec
        field = next(
            (field for field in ("subject", "ack_wait_s") if getattr(current, field) != getattr(spec, field)), None
        )
        if current.version < spec.version and field not in _NEVER_UPDATED:
            consumer.spec = spec
        elif field is not None:
            raise TopologyMismatch(spec.name, field, getattr(current, field), getattr(spec, field))

    async def delete_consumer(self, stream: str, name: str) -> bool:
        await self.reach(API_TIMEOUT_S)
        if stream not in self._server.streams or not self._server.streams[stream].remove_consumer(name):
            return False
        self._server.advise(stream, name, exists=False)
        return True

    async def consumer_states(self, stream: str) -> list[ConsumerState]:
        await self.reach(API_TIMEOUT_S)
        return [consumer.state() for consumer in self._server.stream(stream).consumers.values()]
