"""The state that connections share: it finds the stream of a subject, serves consumers in turns and routes core
messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from sie_broker import BrokerError, BrokerUnavailable, CoreMessage
from sie_broker.memory.connection import ADVISORY, MemoryBroker
from sie_broker.memory.pulls import MemoryDelivery
from sie_broker.memory.stream import Stream, Timers, matches, overlap
from sie_contracts.topology import StreamSpec

if TYPE_CHECKING:
    from sie_broker.memory.connection import Listener
    from sie_broker.memory.keyvalue import Bucket
    from sie_broker.memory.pulls import MemoryPulls
    from sie_broker.memory.stream import Consumer

_DELIVERIES_A_TURN = 64


class MemoryServer:
    """The state that connections share.

    `clock` drives ack waits, delays, ages and windows; with a clock of one's own, `run_due` must be called after it was
    moved. `lose_answers` is the number of coming publishes that are stored while their publisher sees
    BrokerUnavailable.
    """

    def __init__(
        self,
        *,
        max_payload: int = 1 << 20,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_payload = max_payload
        self.clock = clock
        self.wall_clock = wall_clock
        self.lose_answers = 0
        self.timers = Timers(clock)
        self.streams: dict[str, Stream] = {}
        self.buckets: dict[str, Bucket] = {}
        self.pulls: dict[str, set[MemoryPulls]] = {}
        self.inboxes: dict[str, asyncio.Future[bytes]] = {}
        self.tokens = 0
        self._connections: set[MemoryBroker] = set()
        self._by_subject: dict[str, Stream] = {}
        self._exact: dict[str, list[Listener]] = {}
        self._patterns: list[Listener] = []
        self._turn = 0
        self._dirty: dict[Consumer, None] = {}
        self._stamps = 0

    def loses_answer(self) -> bool:
        """Whether the answer to this publish is one of those that get lost."""
        if not self.lose_answers:
            return False
        self.lose_answers -= 1
        return True

    def connect(self, name: str) -> MemoryBroker:
        broker = MemoryBroker(self, name)
        self._connections.add(broker)
        return broker

    def disconnect(self) -> None:
        """Every connection is lost, as when the broker dies: what waits for an answer fails, open pulls are gone,
        leases go on.
        """
        for broker in list(self._connections):
            broker.disconnect()

    def reconnect(self) -> None:
        for broker in list(self._connections):
            broker.reconnect()

    def run_due(self) -> None:
        self.timers.run_due()

    def lose_stream(self, name: str) -> None:
        """The stream is gone with all messages and consumers, also as when a broker in memory restarts."""
        stream = self.streams.pop(name)
        for consumer in list(stream.consumers):
            stream.remove_consumer(consumer)
        self._by_subject.clear()
        for pulls in self.pulls.get(name, ()):
            pulls.detach_all()

    def forget(self, broker: MemoryBroker) -> None:
        self._connections.discard(broker)

    def stamp(self) -> str:
        """A time that never repeats."""
        self._stamps += 1
        return f"{self.wall_clock():.6f}-{self._stamps}"

    # ---- streams

    def stream(self, name: str) -> Stream:
        stream = self.streams.get(name)
        if stream is None:
            raise BrokerError(f"there is no stream {name}")
        return stream

    def stream_of(self, subject: str) -> Stream:
        stream = self._by_subject.get(subject)
        if stream is None:
            stream = next(
                (one for one in self.streams.values() if any(matches(each, subject) for each in one.spec.subjects)),
                None,
            )
            if stream is None:
                raise BrokerUnavailable(f"no stream takes {subject}")
            if len(self._by_subject) < 100_000:
                self._by_subject[subject] = stream
        return stream

    def add_stream(self, spec: StreamSpec) -> Stream:
        for other in self.streams.values():
            if any(overlap(one, two) for one in spec.subjects for two in other.spec.subjects):
                raise BrokerError(f"{spec.name}: its subjects overlap those of {other.spec.name}")
        stream = self.streams[spec.name] = Stream(self, spec)
        return stream

    def change_stream(self, stream: Stream, spec: StreamSpec) -> None:
        stream.spec = spec
        stream.arm_age()
        self._by_subject.clear()

    def open_credits(self, consumer: Consumer) -> None:
        """Credit may have been asked for before the consumer was there."""
        for pulls in self.pulls.get(consumer.spec.stream, ()):
            pulls.attach(consumer.spec.name)

    def advise(self, stream: str, name: str, *, exists: bool) -> None:
        self.route(CoreMessage(f"{ADVISORY}.{'CREATED' if exists else 'DELETED'}.{stream}.{name}", b""))

    def serve(self, consumer: Consumer) -> None:
        """Deliver on the next turn of the loop, when whoever caused it is done."""
        if consumer.credits:
            if not self._dirty:
                asyncio.get_running_loop().call_soon(self._deliver)
            self._dirty[consumer] = None

    def _deliver(self) -> None:
        dirty, self._dirty = self._dirty, {}
        for consumer in dirty:
            for _ in range(_DELIVERIES_A_TURN):
                if not self._deliver_one(consumer):
                    break
            else:
                self.serve(consumer)

    def _deliver_one(self, consumer: Consumer) -> bool:
        line = consumer.credits
        while line and not line[0].left:
            line.popleft().queued = False
        message = consumer.next(self.clock()) if line else None
        if message is None:
            return False
        credit = line.popleft()
        credit.left -= 1
        credit.queued = credit.left > 0
        if credit.queued:
            line.append(credit)
        credit.pulls.deliver(MemoryDelivery(credit.pulls.broker, consumer, message))
        return True

    # ---- core messages

    def listen(self, listener: Listener) -> None:
        if "*" in listener.subject or ">" in listener.subject:
            self._patterns.append(listener)
        else:
            self._exact.setdefault(listener.subject, []).append(listener)

    def unlisten(self, listener: Listener) -> None:
        if listener in self._patterns:
            self._patterns.remove(listener)
            return
        listeners = self._exact.get(listener.subject, [])
        if listener in listeners:
            listeners.remove(listener)
        if not listeners:
            self._exact.pop(listener.subject, None)

    def route(self, message: CoreMessage) -> int:
        """Hand to everybody who listens, and to one of each queue group. Returns to how many."""
        inbox = self.inboxes.get(message.subject)
        if inbox is not None:
            if not inbox.done():
                inbox.set_result(message.data)
            return 1
        count = 0
        groups: dict[str, list[Listener]] = {}
        for listener in self._listeners(message.subject):
            if listener.queue:
                groups.setdefault(listener.queue, []).append(listener)
            else:
                listener.put(message)
                count += 1
        for members in groups.values():
            self._turn += 1
            members[self._turn % len(members)].put(message)
            count += 1
        return count

    def _listeners(self, subject: str) -> Iterator[Listener]:
        for listener in self._exact.get(subject, ()):
            if listener.broker.live:
                yield listener
        for listener in self._patterns:
            if listener.broker.live and matches(listener.subject, subject):
                yield listener
