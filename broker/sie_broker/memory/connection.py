"""One connection to the server in this process, which can be lost and found again, and the subscriptions on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from sie_broker import (
    BrokerError,
    BrokerUnavailable,
    ConsumerState,
    CoreMessage,
    Delivery,
    KeyValue,
    NoResponder,
    PayloadTooBig,
    Published,
    Pulls,
    Stored,
    StreamState,
    Subscription,
    TopologyMismatch,
)
from sie_broker.limits import API_TIMEOUT_S, HELD_BYTES, HELD_MESSAGES, STOP_TIMEOUT_S, check_room
from sie_broker.memory.keyvalue import Bucket, MemoryKeyValue
from sie_broker.memory.pulls import MemoryPulls, parse_reply
from sie_broker.memory.stream import matches, normal
from sie_broker.tasks import OwnedTasks, expire, guarded
from sie_contracts.topology import ConsumerSpec, StreamSpec

if TYPE_CHECKING:
    from sie_broker.memory.keyvalue import Watch
    from sie_broker.memory.pulls import MemoryDelivery
    from sie_broker.memory.server import MemoryServer

log = logging.getLogger("sie.broker")

ADVISORY = "$JS.EVENT.ADVISORY.CONSUMER"
_STREAM_FIELDS = ("subjects", "max_per_subject", "max_bytes", "max_age_s", "duplicate_window_s", "storage", "replicas")
_NEVER_UPDATED = {"storage", "subject"}


class MemoryBroker:
    """One connection to a `MemoryServer`. It can be lost and found again on its own."""

    def __init__(self, server: MemoryServer, name: str) -> None:
        self.name = name
        self.max_payload = server.max_payload
        self._server = server
        self._live = True
        self._closed = False
        self._up = asyncio.Event()
        self._up.set()
        self._reconnected = asyncio.Event()
        self._reconnects: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Future[bytes]] = set()
        self._late_acks: list[MemoryDelivery] = []
        self._pulls: set[MemoryPulls] = set()
        self._listeners: set[Listener] = set()
        self._watches: set[Watch] = set()
        self._handlers: list[Callable[[], Awaitable[None]]] = []
        self._tasks = OwnedTasks(name)

    @property
    def live(self) -> bool:
        """There is a connection. `connected` also says that all tasks of it are well."""
        return self._live

    @property
    def connected(self) -> bool:
        return self._live and not self._tasks.crashed

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
        await self._tasks.cancel()

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
                await guarded("a reconnect handler", handler())

    def _fail_waiting(self, reason: str) -> None:
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(BrokerUnavailable(f"{self.name}: {reason}"))

    async def reach(self, timeout_s: float) -> float:
        """Wait for a connection. Returns what is left of `timeout_s`; raises BrokerUnavailable when nothing is."""
        # a round trip lets others run: a caller that asks again and again must not stop the loop
        await asyncio.sleep(0)
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
            raise BrokerUnavailable(
                f"{self.name}: {'the connection to the broker is closed' if self._closed else 'no connection'}"
            )

    def acknowledge(self, delivery: MemoryDelivery) -> None:
        """Unlike the rest, an ack is kept while there is no connection: it is right whenever it arrives."""
        if self._live:
            delivery.settle()
        elif self._closed:
            self.require()
        else:
            self._late_acks.append(delivery)

    def own(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run `work` as a task of this connection: kept, cancelled at close. If it crashes, the connection counts as
        not connected.
        """
        return self._tasks.start(work, what)

    # ---- core messages

    async def flush(self, timeout_s: float = 2.0) -> None:
        await self.reach(timeout_s)

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        self.require()
        self._check(subject, data)
        self._server.route(CoreMessage(subject, data, reply))

    async def subscribe(
        self,
        subject: str,
        handler: Callable[[CoreMessage], Awaitable[None]],
        queue: str = "",
        *,
        held_messages: int | None = None,
        held_bytes: int | None = None,
        on_dropped: Callable[[str], None] | None = None,
    ) -> Subscription:
        await self.reach(API_TIMEOUT_S)
        limits = held_messages or HELD_MESSAGES, held_bytes or HELD_BYTES
        listener = Listener(self, self._server, subject, handler, queue, self._listeners, limits, on_dropped)
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
        timer = loop.call_later(timeout_s, expire, answer, subject, timeout_s)
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
        await self.reach(API_TIMEOUT_S)
        stream = self._server.streams.get(spec.name)
        if stream is None and owner:
            stream = self._server.add_stream(spec)
        if stream is None:
            raise BrokerError(f"there is no stream {spec.name}: its owner has not created it yet")
        found = stream.spec
        field = next((field for field in _STREAM_FIELDS if normal(found, field) != normal(spec, field)), None)
        if owner and found.version < spec.version and (field is None or spec.storage == found.storage):
            check_room(spec, found.max_per_subject, stream.counts)
            self._server.change_stream(stream, spec)
        elif field is not None:
            raise TopologyMismatch(spec.name, field, getattr(found, field), getattr(spec, field))
        return stream.state()

    async def stream_state(self, stream: str) -> StreamState:
        await self.reach(API_TIMEOUT_S)
        return self._server.stream(stream).state()

    async def delete_stream(self, stream: str) -> bool:
        await self.reach(API_TIMEOUT_S)
        if stream not in self._server.streams:
            return False
        self._server.lose_stream(stream)
        return True

    async def server_time(self, stream: str) -> float:
        await self.reach(API_TIMEOUT_S)
        self._server.stream(stream)
        return self._server.wall_clock()

    async def subject_counts(self, stream: str, subject_filter: str) -> dict[str, int]:
        await self.reach(API_TIMEOUT_S)
        counts = self._server.stream(stream).counts
        return {subject: count for subject, count in counts.items() if matches(subject_filter, subject)}

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        await self.reach(API_TIMEOUT_S)
        stream = self._server.stream(spec.stream)
        consumer = stream.consumers.get(spec.name)
        if consumer is None:
            consumer = stream.add_consumer(spec)
            self._server.open_credits(consumer)
            self._server.serve(consumer)
            self._server.advise(spec.stream, spec.name, exists=True)
            return
        found = consumer.spec
        field = next(
            (field for field in ("subject", "ack_wait_s") if getattr(found, field) != getattr(spec, field)), None
        )
        if found.version < spec.version and field not in _NEVER_UPDATED:
            consumer.spec = spec
        elif field is not None:
            raise TopologyMismatch(spec.name, field, getattr(found, field), getattr(spec, field))

    async def delete_consumer(self, stream: str, name: str) -> bool:
        await self.reach(API_TIMEOUT_S)
        if stream not in self._server.streams or not self._server.streams[stream].remove_consumer(name):
            return False
        for pulls in self._server.pulls.get(stream, ()):
            pulls.detach(name)
        self._server.advise(stream, name, exists=False)
        return True

    async def consumers(self, stream: str) -> list[str]:
        await self.reach(API_TIMEOUT_S)
        return list(self._server.stream(stream).consumers)

    async def consumer_states(self, stream: str) -> list[ConsumerState]:
        await self.reach(API_TIMEOUT_S)
        return [consumer.state() for consumer in self._server.stream(stream).consumers.values()]

    async def watch_consumers(self, stream: str, handler: Callable[[str, bool], Awaitable[None]]) -> Subscription:
        async def advised(message: CoreMessage) -> None:
            action, _, name = message.subject.split(".", 6)[4:]
            await handler(name, action == "CREATED")

        return await self.subscribe(f"{ADVISORY}.*.{stream}.*", advised)

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        if not self._live:
            await self.reach(timeout_s)
        self._check(subject, data)
        published = self._server.stream_of(subject).store(subject, data, message_id)
        if self._server.loses_answer():
            raise BrokerUnavailable(f"{subject}: the answer was lost")
        return published

    async def delete(self, stream: str, sequence: int) -> bool:
        await self.reach(API_TIMEOUT_S)
        return self._server.stream(stream).remove(sequence)

    async def release(self, reply: str) -> None:
        stream, consumer, sequence = parse_reply(reply)
        self.require()
        held = self._server.streams[stream].consumers.get(consumer) if stream in self._server.streams else None
        if held is not None and sequence in held.delivered:
            held.postpone(sequence, 0.0)

    async def first_stored(self, stream: str, sequence: int = 0, subject: str = ">") -> Stored | None:
        await self.reach(API_TIMEOUT_S)
        messages = self._server.stream(stream).messages.values()
        return next(
            (
                Stored(each.sequence, each.subject, each.data, each.sent_s)
                for each in messages
                if each.sequence >= sequence and matches(subject, each.subject)
            ),
            None,
        )

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls:
        pulls = MemoryPulls(self, self._server, stream, handler)
        self._pulls.add(pulls)
        self._server.pulls.setdefault(stream, set()).add(pulls)
        return pulls

    def forget(self, pulls: MemoryPulls) -> None:
        self._pulls.discard(pulls)

    async def key_value(
        self, bucket: str, *, storage: str = "file", replicas: int = 1, max_age_s: float = 0.0
    ) -> KeyValue:
        await self.reach(API_TIMEOUT_S)
        held = self._server.buckets.get(bucket)
        if held is None:
            held = self._server.buckets[bucket] = Bucket(self._server.stamp(), self._server.clock, max_age_s)
        return MemoryKeyValue(self, held, self._watches)


class Listener:
    """A subscription: messages wait in order for one task, which runs only while there are some."""

    def __init__(
        self,
        broker: MemoryBroker,
        server: MemoryServer,
        subject: str,
        handler: Callable[[CoreMessage], Awaitable[None]],
        queue: str,
        listeners: set[Listener],
        limits: tuple[int, int],
        on_dropped: Callable[[str], None] | None,
    ) -> None:
        self.broker = broker
        self.subject = subject
        self.queue = queue
        self._server = server
        self._handler = handler
        self._listeners = listeners
        self._most_messages, self._most_bytes = limits
        self._on_dropped = on_dropped
        self._held: deque[CoreMessage] = deque()
        self._held_bytes = 0
        self._dropped = 0
        self._task: asyncio.Task[None] | None = None

    def put(self, message: CoreMessage) -> None:
        if len(self._held) >= self._most_messages or self._held_bytes + len(message.data) > self._most_bytes:
            self._dropped += 1
            if self._dropped == 1 or self._dropped % 1000 == 0:
                log.error("%s: %d messages dropped: the handler is too slow", self.subject, self._dropped)
            if self._on_dropped is not None:
                self._on_dropped(message.subject)
            return
        self._held.append(message)
        self._held_bytes += len(message.data)
        if self._task is None:
            self._task = self.broker.own(self._handle(), f"handler of {self.subject}")

    async def _handle(self) -> None:
        while self._held:
            message = self._held.popleft()
            self._held_bytes -= len(message.data)
            await guarded(f"the handler of {self.subject}", self._handler(message))
        self._task = None

    async def stop(self) -> None:
        self._server.unlisten(self)
        self._listeners.discard(self)
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
            task.cancel()
