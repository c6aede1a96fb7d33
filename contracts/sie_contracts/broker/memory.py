"""The broker inside one process: the queue of `sie serve --standalone`, and the fake of tests.

A `MemoryServer` holds the state, `MemoryServer.connect` makes connections to it. All of it runs on one event loop: operations take effect
before they return, deliveries follow on the next turn of the loop, and time passes through one timer, armed for the earliest thing due.
It promises what the broker in the cluster promises, refusals and lost connections included; nothing survives the process.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

from sie_contracts.broker import (
    BrokerError,
    BrokerUnavailable,
    CoreMessage,
    Delivery,
    Entry,
    KeyValue,
    NoResponder,
    PayloadTooBig,
    Published,
    Pulls,
    StreamFull,
    StreamState,
    Subscription,
    TopologyMismatch,
    Write,
    WrongRevision,
)
from sie_contracts.topology import ConsumerSpec, StreamSpec

log = logging.getLogger("sie.broker")

_API_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 5.0
_MESSAGE_OVERHEAD_BYTES = 48
_HELD_MESSAGES = 1 << 18
_HELD_ENTRIES = 4096
_DELIVERIES_A_TURN = 64
_ADVISORY = "$JS.EVENT.ADVISORY.CONSUMER"
_STREAM_FIELDS = ("subjects", "max_per_subject", "max_bytes", "max_age_s", "duplicate_window_s", "storage", "replicas")
_NEVER_UPDATED = {"storage", "subject"}


def matches(pattern: str, subject: str) -> bool:
    """Does a subject fall under a pattern, where `*` is any one token and a final `>` is one or more?"""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(tokens) <= len(wanted):
            return False
    elif len(tokens) != len(wanted):
        return False
    return all(want in ("*", token) for want, token in zip(wanted, tokens, strict=False))


def overlap(one: str, other: str) -> bool:
    """Is there a subject that falls under both patterns?"""
    left, right = one.split("."), other.split(".")
    for a, b in zip(left, right, strict=False):
        if ">" in (a, b):
            return True
        if "*" not in (a, b) and a != b:
            return False
    return len(left) == len(right)


class _Timers:
    """Callbacks by time of the server's clock. `run_due` runs them; one timer of the loop sees to that."""

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
class _Message:
    sequence: int
    subject: str
    data: bytes
    sent_s: float
    stored_s: float
    size: int


class _Consumer:
    """Each message of the filter is in one place: waiting, leased, or due again. Credits are open pulls, served in turns."""

    def __init__(self, spec: ConsumerSpec, stream: _Stream) -> None:
        self.spec = spec
        self.stream = stream
        self.waiting: OrderedDict[int, None] = OrderedDict()
        self.leases: OrderedDict[int, float] = OrderedDict()  # sequence -> end, in order of the end
        self.again: dict[int, float] = {}
        self.again_order: list[tuple[float, int]] = []
        self.delivered: dict[int, int] = {}
        self.credits: deque[_Credit] = deque()
        self._expiry_armed = False

    def drop(self, sequence: int) -> None:
        """The message has left the stream."""
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

    def next(self, now_s: float) -> _Message | None:
        """Lease the next message: what is due again before what never went out."""
        sequence = self._next_sequence(now_s)
        if sequence is None:
            return None
        self.leases[sequence] = now_s + self.spec.ack_wait_s
        self.delivered[sequence] = self.delivered.get(sequence, 0) + 1
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


class _Stream:
    def __init__(self, server: MemoryServer, spec: StreamSpec) -> None:
        self.server = server
        self.spec = spec
        self.created = server.stamp()
        self.messages: OrderedDict[int, _Message] = OrderedDict()
        self.bytes = 0
        self.last_sequence = 0
        self.counts: dict[str, int] = {}
        self.consumers: dict[str, _Consumer] = {}
        self._exact: dict[str, _Consumer] = {}
        self._wide: list[_Consumer] = []
        self._ids: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._age_armed = False

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
            raise StreamFull(f"{subject}: maximum messages per subject exceeded")
        size = len(subject) + len(data) + len(message_id) + _MESSAGE_OVERHEAD_BYTES
        if 0 < spec.max_bytes < self.bytes + size:
            raise StreamFull(f"{subject}: maximum bytes exceeded")
        self.last_sequence += 1
        message = _Message(self.last_sequence, subject, data, self.server.wall_clock(), now_s, size)
        self.messages[message.sequence] = message
        self.bytes += size
        self.counts[subject] = count + 1
        self._ids[message_id] = (message.sequence, now_s + _window_s(spec))
        if spec.max_age_s:
            self.arm_age()
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

    def consumer_of(self, subject: str) -> _Consumer | None:
        return self._exact.get(subject) or next((each for each in self._wide if matches(each.spec.subject, subject)), None)

    def add_consumer(self, spec: ConsumerSpec) -> _Consumer:
        if not any(overlap(spec.subject, subject) for subject in self.spec.subjects):
            raise BrokerError(f"{spec.name}: {spec.subject} is no subject of {spec.stream}")
        for other in self.consumers.values():
            if overlap(spec.subject, other.spec.subject):
                raise BrokerError(f"{spec.name}: its filter overlaps that of {other.spec.name}")
        consumer = self.consumers[spec.name] = _Consumer(spec, self)
        if "*" in spec.subject or ">" in spec.subject:
            self._wide.append(consumer)
        else:
            self._exact[spec.subject] = consumer
        subjects = {subject for subject in self.counts if matches(spec.subject, subject)}
        if subjects:
            consumer.waiting.update((number, None) for number, message in self.messages.items() if message.subject in subjects)
        return consumer

    def remove_consumer(self, name: str) -> bool:
        consumer = self.consumers.pop(name, None)
        if consumer is None:
            return False
        consumer.credits.clear()
        if self._exact.pop(consumer.spec.subject, None) is None:
            self._wide.remove(consumer)
        return True

    def arm_age(self) -> None:
        if not self._age_armed and self.messages and self.spec.max_age_s:
            self._age_armed = True
            self.server.timers.at(next(iter(self.messages.values())).stored_s + self.spec.max_age_s, self._age)

    def _age(self) -> None:
        self._age_armed = False
        horizon_s = self.server.clock() - self.spec.max_age_s
        while self.messages and next(iter(self.messages.values())).stored_s <= horizon_s:
            self.remove(next(iter(self.messages)))
        self.arm_age()


def _window_s(spec: StreamSpec) -> float:
    return min(spec.duplicate_window_s, spec.max_age_s) if spec.max_age_s else spec.duplicate_window_s


def _normal(spec: StreamSpec, field: str) -> object:
    """A setting as the broker keeps it: every way to say "no limit" is one."""
    value = getattr(spec, field)
    if field == "duplicate_window_s":
        return _window_s(spec)
    return max(0, value) if field in ("max_bytes", "max_per_subject") else value


class _Bucket:
    """The last entry of each key, in order of revision. A removed key stays as an entry without a value."""

    def __init__(self, created: str) -> None:
        self.created = created
        self.revision = 0
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.watches: set[_Watch] = set()

    def since(self, revision: int) -> list[Entry]:
        newest_first = []
        for entry in reversed(self.entries.values()):
            if entry.revision <= revision:
                break
            newest_first.append(entry)
        return newest_first[::-1]

    def write(self, writes: list[Write]) -> int:
        for write in writes:
            last = self.entries.get(write.key)
            found = last.revision if last is not None else 0
            absent = last is None or last.value is None
            if write.expected is not None and write.expected != found and not (write.expected == 0 and absent):
                raise WrongRevision(f"{write.key}: the revision is {found}, not {write.expected}")
        for write in writes:
            self.revision += 1
            entry = self.entries[write.key] = Entry(write.key, write.value, self.revision)
            self.entries.move_to_end(write.key)
            for watch in self.watches:
                watch.written(entry)
        return self.revision


class MemoryServer:
    """The state that connections share.

    `clock` drives ack waits, delays, ages and windows; with a clock of one's own, `run_due` must be called after it was moved.
    `lose_answers` is the number of coming publishes that are stored while their publisher sees BrokerUnavailable.
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
        self.timers = _Timers(clock)
        self.streams: dict[str, _Stream] = {}
        self.buckets: dict[str, _Bucket] = {}
        self.pulls: dict[str, set[_MemoryPulls]] = {}
        self.inboxes: dict[str, asyncio.Future[bytes]] = {}
        self.tokens = 0
        self._connections: set[MemoryBroker] = set()
        self._by_subject: dict[str, _Stream] = {}
        self._exact: dict[str, list[_Listener]] = {}
        self._patterns: list[_Listener] = []
        self._turn = 0
        self._dirty: dict[_Consumer, None] = {}
        self._stamps = 0

    def connect(self, name: str) -> MemoryBroker:
        broker = MemoryBroker(self, name)
        self._connections.add(broker)
        return broker

    def disconnect(self) -> None:
        """Every connection is lost, as when the broker dies: what waits for an answer fails, open pulls are gone, leases go on."""
        for broker in list(self._connections):
            broker.disconnect()

    def reconnect(self) -> None:
        for broker in list(self._connections):
            broker.reconnect()

    def run_due(self) -> None:
        self.timers.run_due()

    def lose_stream(self, name: str) -> None:
        """The stream is gone with all messages and consumers, as when a broker in memory restarts."""
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

    def stream(self, name: str) -> _Stream:
        stream = self.streams.get(name)
        if stream is None:
            raise BrokerError(f"there is no stream {name}")
        return stream

    def stream_of(self, subject: str) -> _Stream:
        stream = self._by_subject.get(subject)
        if stream is None:
            stream = next((one for one in self.streams.values() if any(matches(each, subject) for each in one.spec.subjects)), None)
            if stream is None:
                raise BrokerUnavailable(f"no stream takes {subject}")
            if len(self._by_subject) < 100_000:
                self._by_subject[subject] = stream
        return stream

    def add_stream(self, spec: StreamSpec) -> _Stream:
        for other in self.streams.values():
            if any(overlap(one, two) for one in spec.subjects for two in other.spec.subjects):
                raise BrokerError(f"{spec.name}: its subjects overlap those of {other.spec.name}")
        stream = self.streams[spec.name] = _Stream(self, spec)
        return stream

    def change_stream(self, stream: _Stream, spec: StreamSpec) -> None:
        stream.spec = spec
        stream.arm_age()
        self._by_subject.clear()

    def open_credits(self, consumer: _Consumer) -> None:
        """Credit may have been asked for before the consumer was there."""
        for pulls in self.pulls.get(consumer.spec.stream, ()):
            pulls.attach(consumer.spec.name)

    def advise(self, stream: str, name: str, *, exists: bool) -> None:
        self.route(CoreMessage(f"{_ADVISORY}.{'CREATED' if exists else 'DELETED'}.{stream}.{name}", b""))

    def serve(self, consumer: _Consumer) -> None:
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

    def _deliver_one(self, consumer: _Consumer) -> bool:
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

    def listen(self, listener: _Listener) -> None:
        if "*" in listener.subject or ">" in listener.subject:
            self._patterns.append(listener)
        else:
            self._exact.setdefault(listener.subject, []).append(listener)

    def unlisten(self, listener: _Listener) -> None:
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
        groups: dict[str, list[_Listener]] = {}
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

    def _listeners(self, subject: str) -> Iterator[_Listener]:
        for listener in self._exact.get(subject, ()):
            if listener.broker.live:
                yield listener
        for listener in self._patterns:
            if listener.broker.live and matches(listener.subject, subject):
                yield listener


class MemoryBroker:
    """One connection to a `MemoryServer`. It can be lost and found again on its own."""

    def __init__(self, server: MemoryServer, name: str) -> None:
        self.name = name
        self.max_payload = server.max_payload
        self._server = server
        self._live = True
        self._closed = False
        self._crashed = False
        self._up = asyncio.Event()
        self._up.set()
        self._reconnected = asyncio.Event()
        self._reconnects: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Future[bytes]] = set()
        self._late_acks: list[MemoryDelivery] = []
        self._pulls: set[_MemoryPulls] = set()
        self._listeners: set[_Listener] = set()
        self._watches: set[_Watch] = set()
        self._handlers: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> bool:
        """There is a connection. `connected` also says that all tasks of it are well."""
        return self._live

    @property
    def connected(self) -> bool:
        return self._live and not self._crashed

    async def close(self) -> None:
        self._live = False
        self._closed = True
        self._up.set()
        self._server.forget(self)
        self._fail_waiting("the connection was closed")
        for pulls in list(self._pulls):
            pulls.abandon()
        for listener in self._listeners:
            self._server.unlisten(listener)
        for watch in list(self._watches):
            watch.abandon()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def disconnect(self) -> None:
        self._live = False
        self._up.clear()
        self._fail_waiting("the connection was lost before the answer came")
        for pulls in self._pulls:
            pulls.detach_all()

    def reconnect(self) -> None:
        if self._live or self._closed:
            return
        self._live = True
        self._up.set()
        late, self._late_acks = self._late_acks, []
        for delivery in late:
            delivery.settle()
        for pulls in self._pulls:
            pulls.attach_all()
        for watch in self._watches:
            watch.catch_up()
        self._reconnected.set()

    def on_reconnect(self, handler: Callable[[], Awaitable[None]]) -> None:
        self._handlers.append(handler)
        if self._reconnects is None:
            self._reconnects = self.own(self._run_reconnect_handlers(), "reconnect handlers")

    async def _run_reconnect_handlers(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            for handler in list(self._handlers):
                await _guarded("a reconnect handler", handler())

    def _fail_waiting(self, reason: str) -> None:
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(BrokerUnavailable(f"{self.name}: {reason}"))

    async def reach(self, timeout_s: float) -> float:
        """Wait for a connection. Returns what is left of `timeout_s`; raises BrokerUnavailable when nothing is."""
        await asyncio.sleep(0)  # a round trip lets others run: a caller that asks again and again must not stop the loop
        if self._live:
            return timeout_s
        start_s = time.monotonic()
        if not self._closed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._up.wait()
            except TimeoutError:
                raise BrokerUnavailable(f"{self.name}: no connection to the broker for {timeout_s} s") from None
        self.require()
        return timeout_s - (time.monotonic() - start_s)

    def require(self) -> None:
        """Raises BrokerUnavailable without a connection."""
        if not self._live:
            raise BrokerUnavailable(f"{self.name}: {'the connection to the broker is closed' if self._closed else 'no connection'}")

    def acknowledge(self, delivery: MemoryDelivery) -> None:
        """Unlike the rest, an ack is kept while there is no connection: it is right whenever it arrives."""
        if self._live:
            delivery.settle()
        elif self._closed:
            self.require()
        else:
            self._late_acks.append(delivery)

    def own(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run `work` as a task of this connection: kept, cancelled at close. If it crashes, the connection counts as not connected."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}: {what}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crashed = True
            log.critical("%s crashed", task.get_name(), exc_info=error)

    # ---- core messages

    async def flush(self, timeout_s: float = 2.0) -> None:
        await self.reach(timeout_s)

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        self.require()
        self._check(subject, data)
        self._server.route(CoreMessage(subject, data, reply))

    async def subscribe(self, subject: str, handler: Callable[[CoreMessage], Awaitable[None]], queue: str = "") -> Subscription:
        await self.reach(_API_TIMEOUT_S)
        listener = _Listener(self, self._server, subject, handler, queue, self._listeners)
        self._server.listen(listener)
        self._listeners.add(listener)
        return listener

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        if not self._live:
            timeout_s = await self.reach(timeout_s)
        self._check(subject, data)
        server = self._server
        server.tokens += 1
        inbox = f"_INBOX.{server.tokens}"
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        server.inboxes[inbox] = answer
        self._waiting.add(answer)
        timer = loop.call_later(timeout_s, _expire, answer, subject, timeout_s)
        try:
            if not server.route(CoreMessage(subject, data, inbox)):
                raise NoResponder(f"nobody listens on {subject}")
            return await answer
        finally:
            timer.cancel()
            self._waiting.discard(answer)
            del server.inboxes[inbox]

    def _check(self, subject: str, data: bytes) -> None:
        if len(data) > self.max_payload:
            raise PayloadTooBig(f"a message of {len(data)} bytes passes the broker's limit of {self.max_payload}")
        if not subject or " " in subject:
            raise ValueError(f"{subject!r} is not a subject")

    # ---- streams and consumers

    async def ensure_stream(self, spec: StreamSpec, *, owner: bool) -> StreamState:
        await self.reach(_API_TIMEOUT_S)
        stream = self._server.streams.get(spec.name)
        if stream is None and owner:
            stream = self._server.add_stream(spec)
        if stream is None:
            raise BrokerError(f"there is no stream {spec.name}: its owner has not created it yet")
        found = stream.spec
        field = next((field for field in _STREAM_FIELDS if _normal(found, field) != _normal(spec, field)), None)
        if owner and found.version < spec.version and (field is None or spec.storage == found.storage):
            self._server.change_stream(stream, spec)
        elif field is not None:
            raise TopologyMismatch(spec.name, field, getattr(found, field), getattr(spec, field))
        return stream.state()

    async def stream_state(self, stream: str) -> StreamState:
        await self.reach(_API_TIMEOUT_S)
        return self._server.stream(stream).state()

    async def subject_counts(self, stream: str, subject_filter: str) -> dict[str, int]:
        await self.reach(_API_TIMEOUT_S)
        counts = self._server.stream(stream).counts
        return {subject: count for subject, count in counts.items() if matches(subject_filter, subject)}

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        await self.reach(_API_TIMEOUT_S)
        stream = self._server.stream(spec.stream)
        consumer = stream.consumers.get(spec.name)
        if consumer is None:
            consumer = stream.add_consumer(spec)
            self._server.open_credits(consumer)
            self._server.serve(consumer)
            self._server.advise(spec.stream, spec.name, exists=True)
            return
        found = consumer.spec
        field = next((field for field in ("subject", "ack_wait_s") if getattr(found, field) != getattr(spec, field)), None)
        if found.version < spec.version and field not in _NEVER_UPDATED:
            consumer.spec = spec
        elif field is not None:
            raise TopologyMismatch(spec.name, field, getattr(found, field), getattr(spec, field))

    async def delete_consumer(self, stream: str, name: str) -> bool:
        await self.reach(_API_TIMEOUT_S)
        if stream not in self._server.streams or not self._server.streams[stream].remove_consumer(name):
            return False
        for pulls in self._server.pulls.get(stream, ()):
            pulls.detach(name)
        self._server.advise(stream, name, exists=False)
        return True

    async def consumers(self, stream: str) -> list[str]:
        await self.reach(_API_TIMEOUT_S)
        return list(self._server.stream(stream).consumers)

    async def watch_consumers(self, stream: str, handler: Callable[[str, bool], Awaitable[None]]) -> Subscription:
        async def advised(message: CoreMessage) -> None:
            action, _, name = message.subject.split(".", 6)[4:]
            await handler(name, action == "CREATED")

        return await self.subscribe(f"{_ADVISORY}.*.{stream}.*", advised)

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        if not self._live:
            await self.reach(timeout_s)
        self._check(subject, data)
        published = self._server.stream_of(subject).store(subject, data, message_id)
        if self._server.lose_answers:
            self._server.lose_answers -= 1
            raise BrokerUnavailable(f"{subject}: the answer was lost")
        return published

    async def delete(self, stream: str, sequence: int) -> bool:
        await self.reach(_API_TIMEOUT_S)
        return self._server.stream(stream).remove(sequence)

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls:
        pulls = _MemoryPulls(self, self._server, stream, handler)
        self._pulls.add(pulls)
        self._server.pulls.setdefault(stream, set()).add(pulls)
        return pulls

    def forget(self, pulls: _MemoryPulls) -> None:
        self._pulls.discard(pulls)

    async def key_value(self, bucket: str, *, storage: str = "file", replicas: int = 1) -> KeyValue:
        await self.reach(_API_TIMEOUT_S)
        held = self._server.buckets.get(bucket)
        if held is None:
            held = self._server.buckets[bucket] = _Bucket(self._server.stamp())
        return _MemoryKeyValue(self, held, self._watches)


def _expire(answer: asyncio.Future[bytes], subject: str, timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(BrokerUnavailable(f"{subject}: no answer within {timeout_s:.3g} s"))


async def _guarded(what: str, work: Awaitable[None]) -> None:
    """Await what belongs to somebody else. Its errors are logged, and so is the cancellation of something that it awaited."""
    try:
        await work
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        log.exception("%s was cancelled from inside", what)
    except Exception:
        log.exception("%s failed", what)


class _Listener:
    """A subscription: messages wait in order for one task, which runs only while there are some."""

    def __init__(
        self,
        broker: MemoryBroker,
        server: MemoryServer,
        subject: str,
        handler: Callable[[CoreMessage], Awaitable[None]],
        queue: str,
        listeners: set[_Listener],
    ) -> None:
        self.broker = broker
        self.subject = subject
        self.queue = queue
        self._server = server
        self._handler = handler
        self._listeners = listeners
        self._held: deque[CoreMessage] = deque()
        self._dropped = 0
        self._task: asyncio.Task[None] | None = None

    def put(self, message: CoreMessage) -> None:
        if len(self._held) >= _HELD_MESSAGES:
            self._dropped += 1
            if self._dropped == 1 or self._dropped % 1000 == 0:
                log.error("%s: %d messages dropped: the handler is too slow", self.subject, self._dropped)
            return
        self._held.append(message)
        if self._task is None:
            self._task = self.broker.own(self._handle(), f"handler of {self.subject}")

    async def _handle(self) -> None:
        while self._held:
            await _guarded(f"the handler of {self.subject}", self._handler(self._held.popleft()))
        self._task = None

    async def stop(self) -> None:
        self._server.unlisten(self)
        self._listeners.discard(self)
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=_STOP_TIMEOUT_S)
            task.cancel()


class MemoryDelivery:
    """A leased message. Whoever settles it, also after its lease went to somebody else, settles it for good."""

    __slots__ = ("_broker", "_consumer", "consumer", "data", "delivered", "pending", "sent_s", "sequence", "subject")

    def __init__(self, broker: MemoryBroker, consumer: _Consumer, message: _Message) -> None:
        self._broker = broker
        self._consumer = consumer
        self.consumer = consumer.spec.name
        self.data = message.data
        self.subject = message.subject
        self.sequence = message.sequence
        self.delivered = consumer.delivered[message.sequence]
        self.sent_s = message.sent_s
        self.pending = len(consumer.waiting)

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

    def _held(self) -> _Consumer | None:
        """The consumer, if it is still there and its message not settled: what comes later is void."""
        consumer = self._consumer
        known = consumer.stream.consumers.get(self.consumer) is consumer
        return consumer if known and self.sequence in consumer.delivered else None


class _Credit:
    """What one connection still takes from one consumer. `queued`: it stands in the consumer's line."""

    __slots__ = ("left", "pulls", "queued")

    def __init__(self, pulls: _MemoryPulls) -> None:
        self.pulls = pulls
        self.left = 0
        self.queued = False


class _MemoryPulls:
    def __init__(self, broker: MemoryBroker, server: MemoryServer, stream: str, handler: Callable[[Delivery], None]) -> None:
        self.broker = broker
        self._server = server
        self._stream = stream
        self._handler = handler
        self._credits: dict[str, _Credit] = {}
        self._stopped = False

    def want(self, consumer: str, credit: int) -> None:
        entry = self._credits.get(consumer)
        if entry is None:
            if credit <= 0 or self._stopped:
                return
            entry = self._credits[consumer] = _Credit(self)
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


class _MemoryKeyValue:
    def __init__(self, broker: MemoryBroker, bucket: _Bucket, watches: set[_Watch]) -> None:
        self._broker = broker
        self._bucket = bucket
        self._watches = watches

    async def get(self, key: str) -> Entry | None:
        await self._broker.reach(_API_TIMEOUT_S)
        entry = self._bucket.entries.get(key)
        return entry if entry is not None and entry.value is not None else None

    async def entries(self) -> list[Entry]:
        await self._broker.reach(_API_TIMEOUT_S)
        return sorted((entry for entry in self._bucket.entries.values() if entry.value is not None), key=lambda entry: entry.key)

    async def write(self, writes: list[Write]) -> int:
        if not writes or len({write.key for write in writes}) != len(writes):
            raise ValueError("a batch writes at least one key and each key once")
        await self._broker.reach(_API_TIMEOUT_S)
        return self._bucket.write(writes)

    async def epoch(self) -> str:
        await self._broker.reach(_API_TIMEOUT_S)
        return f"{self._bucket.created}:{self._bucket.revision}"

    async def watch(self, handler: Callable[[Entry], Awaitable[None]], after: int = 0) -> Subscription:
        await self._broker.reach(_API_TIMEOUT_S)
        return _Watch(self._broker, self._bucket, self._watches, handler, after)


class _Watch:
    """Entries wait in order for one task, which runs only while there are some. What a lost connection missed is read on its return."""

    def __init__(
        self,
        broker: MemoryBroker,
        bucket: _Bucket,
        watches: set[_Watch],
        handler: Callable[[Entry], Awaitable[None]],
        after: int,
    ) -> None:
        self._broker = broker
        self._bucket = bucket
        self._watches = watches
        self._handler = handler
        self._last = after
        self._held: deque[Entry] = deque()
        self._task: asyncio.Task[None] | None = None
        watches.add(self)
        bucket.watches.add(self)
        self.catch_up()

    def written(self, entry: Entry) -> None:
        if self._broker.live and len(self._held) < _HELD_ENTRIES:
            self._held.append(entry)
            self._run()

    def catch_up(self) -> None:
        """Read what was not held for us."""
        if self._broker.live:
            self._held.extend(self._bucket.since(self._held[-1].revision if self._held else self._last))
            self._run()

    def _run(self) -> None:
        if self._held and self._task is None:
            self._task = self._broker.own(self._handle(), "a watch")

    async def _handle(self) -> None:
        while self._held:
            entry = self._held.popleft()
            self._last = entry.revision
            await _guarded("a watch", self._handler(entry))
        self._task = None
        if self in self._bucket.watches:
            self.catch_up()

    async def stop(self) -> None:
        self.abandon()
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=_STOP_TIMEOUT_S)
            task.cancel()

    def abandon(self) -> None:
        self._watches.discard(self)
        self._bucket.watches.discard(self)
