"""Streams and consumers of the in-process server: stored messages, leases and their end times, and credits. A credit is
the number of deliveries that a connection has requested from a consumer.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sie_broker import BrokerError, BrokerUnavailable, ConsumerState, Published, StreamFull, StreamState
from sie_contracts.wire.topology import ConsumerSpec, StreamSpec

_MESSAGE_OVERHEAD_BYTES = 48
_DELIVERIES_A_TURN = 64


def matches(pattern: str, subject: str) -> bool:
    """Return whether a subject matches a pattern: `*` matches one token, and a final `>` matches one or more tokens."""
    parts, tokens = pattern.split("."), subject.split(".")
    if parts[-1] == ">":
        parts.pop()
        if len(tokens) <= len(parts):
            return False
    elif len(tokens) != len(parts):
        return False
    return all(want in ("*", token) for want, token in zip(parts, tokens, strict=False))


def overlap(first: str, second: str) -> bool:
    """Return whether any subject matches both patterns."""
    left, right = first.split("."), second.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if "*" not in (a, b) and a != b:
            return False
    return len(left) == len(right)


class Timers:
    """Callbacks, each due at a time of the server's clock. A timer of the event loop calls `run_due` at the earliest of
    these times.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._armed: asyncio.TimerHandle | None = None
        self._armed_s = 0.0

    def at(self, due_s: float, callback: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (due_s, self._count, callback))
        self._arm()

    def run_due(self) -> None:
        self._armed = None
        while self._due and self._due[0][0] <= self._clock():
            heapq.heappop(self._due)[2]()
        self._arm()

    def _arm(self) -> None:
        if not self._due:
            return
        due_s = self._due[0][0]
        if self._armed is not None:
            if self._armed_s <= due_s:
                return
            self._armed.cancel()
        self._armed_s = due_s
        self._armed = asyncio.get_running_loop().call_later(max(0.0, due_s - self._clock()), self.run_due)


@dataclass(slots=True)
class Message:
    sequence: int
    subject: str
    data: bytes
    sent_s: float
    stored_s: float
    size: int


class Puller(Protocol):
    """Pulls of one connection from one stream. The server calls these methods."""

    def attach(self, name: str) -> None:
        """If these pulls have credit for the consumer `name`, add it to the consumer's queue of credits."""

    def attach_all(self) -> None: ...

    def detach_all(self) -> None: ...

    def abandon(self) -> None: ...

    def deliver_leased(self, consumer: Consumer, message: Message) -> None:
        """Pass a leased message to the handler of the pulls."""


class DeliveryCredit:
    """Credit of one connection at one consumer. `left`: number of deliveries that the connection still accepts.
    `queued`: whether the consumer's queue of credits contains this credit.
    """

    __slots__ = ("left", "pulls", "queued")

    def __init__(self, pulls: Puller) -> None:
        self.pulls = pulls
        self.left = 0
        self.queued = False


class Consumer:
    """Consumer of a stream. Each of its messages is in `waiting` (not delivered yet), `leases` (delivered) or `again`
    (waits for another delivery). Connections with credit get messages in turn.
    """

    def __init__(self, spec: ConsumerSpec, stream: Stream) -> None:
        self.spec = spec
        self.stream = stream
        self.waiting: OrderedDict[int, None] = OrderedDict()
        self.leases: OrderedDict[int, float] = OrderedDict()  # sequence -> time at which the lease ends, earliest first
        self.again: dict[int, float] = {}  # sequence -> earliest time of the next delivery
        self.again_order: list[tuple[float, int]] = []  # heap of (time, sequence); a pair that `again` lacks is skipped
        self.delivered: dict[int, int] = {}  # sequence -> number of deliveries so far
        self.credits: deque[DeliveryCredit] = deque()
        self._deliveries = 0
        self._expiry_armed = False

    def state(self) -> ConsumerState:
        spec, waiting = self.spec, len(self.waiting) + len(self.again)
        return ConsumerState(
            spec.name, spec.subject, spec.ack_wait_s, spec.version, self._deliveries, waiting, len(self.leases)
        )

    def drop(self, sequence: int) -> None:
        """Drop the state of a message that was removed from the stream."""
        self.waiting.pop(sequence, None)
        self.delivered.pop(sequence, None)
        self.leases.pop(sequence, None)
        self.again.pop(sequence, None)

    def postpone(self, sequence: int, delay_s: float) -> None:
        due_s = self.stream.server.clock() + delay_s
        self.leases.pop(sequence, None)
        self.again[sequence] = due_s
        heapq.heappush(self.again_order, (due_s, sequence))
        if delay_s:
            self.stream.server.timers.at(due_s, lambda: self.stream.server.serve(self))
        else:
            self.stream.server.serve(self)

    def extend(self, sequence: int, now_s: float) -> None:
        if sequence in self.leases:
            self.leases[sequence] = now_s + self.spec.ack_wait_s
            self.leases.move_to_end(sequence)

    def next(self, now_s: float) -> Message | None:
        """Lease and return the next message, first from `again`, then from `waiting`; None if no message is due."""
        sequence = self._next_sequence(now_s)
        if sequence is None:
            return None
        self.leases[sequence] = now_s + self.spec.ack_wait_s
        self.delivered[sequence] = self.delivered.get(sequence, 0) + 1
        self._deliveries += 1
        self._arm_expiry()
        return self.stream.messages[sequence]

    def _next_sequence(self, now_s: float) -> int | None:
        while self.again_order and self.again_order[0][0] <= now_s:
            due_s, sequence = heapq.heappop(self.again_order)
            if self.again.get(sequence) == due_s:
                del self.again[sequence]
                return sequence
        return self.waiting.popitem(last=False)[0] if self.waiting else None

    def _arm_expiry(self) -> None:
        if not self._expiry_armed and self.leases:
            self._expiry_armed = True
            self.stream.server.timers.at(next(iter(self.leases.values())), self._expire)

    def _expire(self) -> None:
        self._expiry_armed = False
        now_s = self.stream.server.clock()
        while self.leases and next(iter(self.leases.values())) <= now_s:
            self.postpone(next(iter(self.leases)), 0.0)
        self._arm_expiry()


class Stream:
    def __init__(self, server: StreamServer, spec: StreamSpec) -> None:
        self.server = server
        self.spec = spec
        self.created = server.stamp()
        self.messages: OrderedDict[int, Message] = OrderedDict()
        self.bytes = 0
        self.last_sequence = 0
        self.counts: dict[str, int] = {}
        self.consumers: dict[str, Consumer] = {}
        self._exact: dict[str, Consumer] = {}
        self._wide: list[Consumer] = []
        self._ids: OrderedDict[str, tuple[int, float]] = OrderedDict()  # message id -> (sequence, end of the window)
        self._age_due_s = math.inf  # time at which the timer calls `_age`; infinite without a timer

    def state(self) -> StreamState:
        first = next(iter(self.messages), self.last_sequence + 1 if self.last_sequence else 0)
        return StreamState(self.created, len(self.messages), self.bytes, first, self.last_sequence)

    def store(self, subject: str, data: bytes, message_id: str) -> Published:
        spec, now_s = self.spec, self.server.clock()
        while self._ids and next(iter(self._ids.values()))[1] <= now_s:
            self._ids.popitem(last=False)
        if message_id in self._ids:
            return Published(self._ids[message_id][0], duplicate=True)
        count = self.counts.get(subject, 0)
        if 0 < spec.max_per_subject <= count:
            raise StreamFull(f"{subject}: the stream has reached its maximum number of messages of this subject")
        size = len(subject) + len(data) + len(message_id) + _MESSAGE_OVERHEAD_BYTES
        while spec.retention == "limits" and self.messages and 0 < spec.max_bytes < self.bytes + size:
            self.remove(next(iter(self.messages)))
        if 0 < spec.max_bytes < self.bytes + size:
            raise StreamFull(f"{subject}: the stream has reached its maximum number of bytes")
        self.last_sequence += 1
        message = Message(self.last_sequence, subject, data, self.server.wall_clock(), now_s, size)
        self.messages[message.sequence] = message
        self.bytes += size
        # The loop above may have removed messages of this subject, so `count` may be outdated.
        self.counts[subject] = self.counts.get(subject, 0) + 1
        self._ids[message_id] = (message.sequence, now_s + _window_s(spec))
        if spec.max_age_s:
            self._arm_age()
        consumer = self.consumer_of(subject)
        if consumer is not None:
            consumer.waiting[message.sequence] = None
            self.server.serve(consumer)
        return Published(message.sequence)

    def remove(self, sequence: int) -> bool:
        message = self.messages.pop(sequence, None)
        if message is None:
            return False
        self.bytes -= message.size
        left = self.counts[message.subject] - 1
        if left:
            self.counts[message.subject] = left
        else:
            del self.counts[message.subject]
        consumer = self.consumer_of(message.subject)
        if consumer is not None:
            consumer.drop(sequence)
        return True

    def consumer_of(self, subject: str) -> Consumer | None:
        return self._exact.get(subject) or next(
            (consumer for consumer in self._wide if matches(consumer.spec.subject, subject)), None
        )

    def add_consumer(self, spec: ConsumerSpec) -> Consumer:
        if not any(overlap(spec.subject, subject) for subject in self.spec.subjects):
            raise BrokerError(f"{spec.name}: stream {spec.stream} does not store the subject {spec.subject}")
        for consumer in self.consumers.values():
            if overlap(spec.subject, consumer.spec.subject):
                raise BrokerError(f"{spec.name}: its filter overlaps the filter of consumer {consumer.spec.name}")
        consumer = self.consumers[spec.name] = Consumer(spec, self)
        if "*" in spec.subject or ">" in spec.subject:
            self._wide.append(consumer)
        else:
            self._exact[spec.subject] = consumer
        subjects = {subject for subject in self.counts if matches(spec.subject, subject)}
        if subjects:
            consumer.waiting.update(
                (number, None) for number, message in self.messages.items() if message.subject in subjects
            )
        return consumer

    def remove_consumer(self, name: str) -> bool:
        consumer = self.consumers.pop(name, None)
        if consumer is None:
            return False
        for credit in consumer.credits:
            credit.queued = False
        consumer.credits.clear()
        if self._exact.pop(consumer.spec.subject, None) is None:
            self._wide.remove(consumer)
        return True

    def change(self, spec: StreamSpec) -> None:
        self.spec = spec
        self._age_due_s = math.inf
        self._arm_age()

    def _arm_age(self) -> None:
        if self._age_due_s == math.inf and self.messages and self.spec.max_age_s:
            self._age_due_s = next(iter(self.messages.values())).stored_s + self.spec.max_age_s
            self.server.timers.at(self._age_due_s, self._age)

    def _age(self) -> None:
        if self.server.clock() < self._age_due_s:  # a timer for an earlier spec; the timer for this spec is due later
            return
        self._age_due_s = math.inf
        horizon_s = self.server.clock() - self.spec.max_age_s
        while self.messages and next(iter(self.messages.values())).stored_s <= horizon_s:
            self.remove(next(iter(self.messages)))
        self._arm_age()


def _window_s(spec: StreamSpec) -> float:
    return min(spec.duplicate_window_s, spec.max_age_s) if spec.max_age_s else spec.duplicate_window_s


def normal(spec: StreamSpec, field: str) -> object:
    """Return a setting in a form for comparisons. A negative limit becomes 0, because both mean "no limit". The
    duplicate window is at most the age limit of the messages.
    """
    value = getattr(spec, field)
    if field == "duplicate_window_s":
        return _window_s(spec)
    return max(0, value) if field in ("max_bytes", "max_per_subject") else value


class StreamServer:
    """Streams of an in-process server. `clock`: returns seconds for ack waits, delays, ages and duplicate windows. A
    test with its own clock calls `run_due` after each change of the clock.
    """

    def __init__(self, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        self.clock = clock
        self.wall_clock = wall_clock
        self.timers = Timers(clock)
        self.streams: dict[str, Stream] = {}
        self.pulls: dict[str, set[Puller]] = {}
        self._by_subject: dict[str, Stream] = {}
        self._dirty: dict[Consumer, None] = {}
        self._stamps = 0

    def run_due(self) -> None:
        self.timers.run_due()

    def stamp(self) -> str:
        """Return a creation time for a stream or bucket, as a text that is unique in this server."""
        self._stamps += 1
        return f"{self.wall_clock():.6f}-{self._stamps}"

    def stream(self, name: str) -> Stream:
        stream = self.streams.get(name)
        if stream is None:
            raise BrokerError(f"there is no stream {name}")
        return stream

    def stream_of(self, subject: str) -> Stream:
        stream = self._by_subject.get(subject)
        if stream is None:
            stream = next(
                (
                    stream
                    for stream in self.streams.values()
                    if any(matches(pattern, subject) for pattern in stream.spec.subjects)
                ),
                None,
            )
            if stream is None:
                raise BrokerUnavailable(f"no stream stores messages of {subject}")
            if len(self._by_subject) < 100_000:
                self._by_subject[subject] = stream
        return stream

    def add_stream(self, spec: StreamSpec) -> Stream:
        for existing in self.streams.values():
            if any(overlap(first, two) for first in spec.subjects for two in existing.spec.subjects):
                raise BrokerError(f"{spec.name}: its subjects overlap the subjects of stream {existing.spec.name}")
        stream = self.streams[spec.name] = Stream(self, spec)
        return stream

    def change_stream(self, stream: Stream, spec: StreamSpec) -> None:
        stream.change(spec)
        self._by_subject.clear()

    def lose_stream(self, name: str) -> None:
        """Remove a stream with its messages and consumers, as a broker's restart does for a stream in memory."""
        stream = self.streams.pop(name)
        for consumer in list(stream.consumers):
            stream.remove_consumer(consumer)
        self._by_subject.clear()

    def open_credits(self, consumer: Consumer) -> None:
        """Queue credits at a new consumer, if pulls set credits for its name before the consumer existed."""
        for pulls in self.pulls.get(consumer.spec.stream, ()):
            pulls.attach(consumer.spec.name)

    def serve(self, consumer: Consumer) -> None:
        """Schedule deliveries of this consumer for the next iteration of the event loop."""
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
        credit.pulls.deliver_leased(consumer, message)
        return True
