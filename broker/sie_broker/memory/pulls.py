"""Deliveries of a stream, and the credit that a connection gives to each of its consumers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sie_broker import Delivery

if TYPE_CHECKING:
    from sie_broker.memory.connection import MemoryBroker
    from sie_broker.memory.server import MemoryServer
    from sie_broker.memory.stream import Consumer, Message

log = logging.getLogger("sie.broker")


class MemoryDelivery:
    """A leased message. Whoever settles it, also after its lease went to somebody else, settles it for good."""

    __slots__ = (
        "_broker",
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

    def __init__(self, broker: MemoryBroker, consumer: Consumer, message: Message) -> None:
        self._broker = broker
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
        self._broker.acknowledge(self)

    async def nak(self, delay_s: float = 0.0) -> None:
        self._broker.require()
        consumer = self._held()
        if consumer is not None:
            consumer.postpone(self.sequence, max(0.0, delay_s))

    async def in_progress(self) -> None:
        self._broker.require()
        consumer = self._held()
        if consumer is not None:
            consumer.extend(self.sequence, consumer.stream.server.clock())

    async def term(self, reason: str) -> None:
        self._broker.require()
        self.settle()

    def settle(self) -> None:
        consumer = self._held()
        if consumer is not None:
            consumer.stream.remove(self.sequence)

    def _held(self) -> Consumer | None:
        """The consumer, if it is still there and its message not settled: what comes later is void."""
        consumer = self._consumer
        known = consumer.stream.consumers.get(self.consumer) is consumer
        return consumer if known and self.sequence in consumer.delivered else None


def parse_reply(reply: str) -> tuple[str, str, int]:
    """The stream, the consumer and the sequence that a delivery's `reply` names. Raises ValueError."""
    tokens = reply.split(".")
    if len(tokens) != 6 or tokens[:2] != ["$JS", "ACK"]:
        raise ValueError(f"{reply[:70]!r} names no delivery")
    return tokens[2], tokens[3], int(tokens[5])


class Credit:
    """What one connection still takes from one consumer. `queued`: it stands in the consumer's line."""

    __slots__ = ("left", "pulls", "queued")

    def __init__(self, pulls: MemoryPulls) -> None:
        self.pulls = pulls
        self.left = 0
        self.queued = False


class MemoryPulls:
    def __init__(
        self, broker: MemoryBroker, server: MemoryServer, stream: str, handler: Callable[[Delivery], None]
    ) -> None:
        self.broker = broker
        self._server = server
        self._stream = stream
        self._handler = handler
        self._credits: dict[str, Credit] = {}
        self._stopped = False

    def want(self, consumer: str, credit: int) -> None:
        entry = self._credits.get(consumer)
        if entry is None:
            if credit <= 0 or self._stopped:
                return
            entry = self._credits[consumer] = Credit(self)
        entry.left = max(0, credit)
        if entry.left and not entry.queued and not self._stopped and self.broker.live:
            self.attach(consumer)

    def outstanding(self, consumer: str) -> int:
        entry = self._credits.get(consumer)
        return entry.left if entry is not None and self.broker.live else 0

    async def stop(self) -> None:
        self.abandon()

    def abandon(self) -> None:
        self._stopped = True
        self.detach_all()
        self._credits.clear()
        self._server.pulls[self._stream].discard(self)
        self.broker.forget(self)

    def deliver(self, delivery: MemoryDelivery) -> None:
        try:
            self._handler(delivery)
        except Exception:
            log.exception("pulls on %s: the handler failed", self._stream)

    def attach(self, name: str) -> None:
        """Stand in the consumer's line, if there is one."""
        entry = self._credits.get(name)
        stream = self._server.streams.get(self._stream)
        consumer = stream.consumers.get(name) if stream is not None else None
        if entry is not None and consumer is not None and entry.left and not entry.queued and self.broker.live:
            entry.queued = True
            consumer.credits.append(entry)
            self._server.serve(consumer)

    def attach_all(self) -> None:
        for name in self._credits:
            self.attach(name)

    def detach(self, name: str) -> None:
        entry = self._credits.get(name)
        if entry is not None and entry.queued:
            entry.queued = False
            stream = self._server.streams.get(self._stream)
            consumer = stream.consumers.get(name) if stream is not None else None
            if consumer is not None:
                consumer.credits.remove(entry)

    def detach_all(self) -> None:
        for name in self._credits:
            self.detach(name)
