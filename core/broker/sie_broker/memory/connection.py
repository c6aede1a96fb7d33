"""Connections to the in-process server, and messages that are not stored. Tests can interrupt a connection."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain
from typing import Protocol

from sie_broker import BrokerUnavailable, CoreMessage, NoResponder, PayloadTooBig, Subscription
from sie_broker.limits import API_TIMEOUT_S, HELD_BYTES, HELD_MESSAGES, STOP_TIMEOUT_S
from sie_broker.memory.streams import Puller, StreamServer, matches
from sie_broker.tasks import ConnectionState, expire, guarded

log = logging.getLogger("sie.broker")

ADVISORY = "$JS.EVENT.ADVISORY.CONSUMER"


class Exchange(StreamServer):
    """Server of streams that also routes messages that are not stored."""

    def __init__(self, max_payload: int, clock: Callable[[], float], wall_clock: Callable[[], float]) -> None:
        super().__init__(clock, wall_clock)
        self.max_payload = max_payload
        self.inboxes: dict[str, asyncio.Future[bytes]] = {}
        self._tokens = 0
        self._connections: set[MemoryConnection] = set()
        self._exact: dict[str, list[Listener]] = {}
        self._patterns: list[Listener] = []
        self._turn = 0

    def disconnect(self) -> None:
        """Interrupt all connections, as when a broker is killed: requests fail, open pulls end, leases stay."""
        for connection in list(self._connections):
            connection.disconnect()

    def reconnect(self) -> None:
        for connection in list(self._connections):
            connection.reconnect()

    def remove(self, connection: MemoryConnection) -> None:
        """Remove a connection and its subscriptions."""
        self._connections.discard(connection)
        for listener in [*self._patterns, *chain.from_iterable(self._exact.values())]:
            if listener.connection is connection:
                self.unlisten(listener)

    def new_inbox(self) -> str:
        self._tokens += 1
        return f"_INBOX.{self._tokens}"

    def advise(self, stream: str, name: str, *, exists: bool) -> None:
        """Publish the notice that a consumer was created or deleted."""
        self.route(CoreMessage(f"{ADVISORY}.{'CREATED' if exists else 'DELETED'}.{stream}.{name}", b""))

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
        """Deliver a message to each subscription without a queue group, and to one subscription of each queue group.
        Return the number of deliveries.
        """
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
            if listener.connection.live:
                yield listener
        for listener in self._patterns:
            if listener.connection.live and matches(listener.subject, subject):
                yield listener


class WatchReader(Protocol):
    """Watch of a bucket. The connection that opened the watch calls these methods."""

    def catch_up(self) -> None:
        """Read the entries that the watch has missed. Called after a reconnect."""

    def abandon(self) -> None: ...


class MemoryConnection(ConnectionState):
    """Connection to an in-process server. A test can interrupt and restore each connection."""

    def __init__(self, server: Exchange, name: str) -> None:
        super().__init__(name)
        self.owns_streams = True
        self.max_payload = server.max_payload
        self._server = server
        self._live = True
        self._up.set()
        self._waiting: set[asyncio.Future[bytes]] = set()
        self._late_acks: list[Callable[[], None]] = []  # acks that are sent after the reconnect
        self._pulls: set[Puller] = set()
        self.watches: set[WatchReader] = set()

    async def close(self) -> None:
        self._live = False
        self._closed = True
        self._up.set()
        self._server.remove(self)
        self._fail_waiting("the connection was closed")
        for pulls in list(self._pulls):
            pulls.abandon()
        for watch in list(self.watches):
            watch.abandon()
        await self._cancel_tasks()

    def disconnect(self) -> None:
        self._live = False
        self._up.clear()
        self._fail_waiting("the connection was lost before the reply arrived")
        for pulls in self._pulls:
            pulls.detach_all()

    def reconnect(self) -> None:
        if self._live or self._closed:
            return
        self._live = True
        self._up.set()
        late, self._late_acks = self._late_acks, []
        for settle in late:
            settle()
        for pulls in self._pulls:
            pulls.attach_all()
        for watch in self.watches:
            watch.catch_up()
        self._reconnected.set()

    def _fail_waiting(self, reason: str) -> None:
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(BrokerUnavailable(f"{self.name}: {reason}"))

    async def reach(self, timeout_s: float) -> float:
        # Let other tasks run, as during a network round trip. Otherwise a caller that sends requests in a loop would
        # block these tasks.
        await asyncio.sleep(0)
        if self._live:
            return timeout_s
        timeout_s = await super().reach(timeout_s)
        self.require()  # the connection may have been lost again
        return timeout_s

    def require(self) -> None:
        """Raise BrokerUnavailable if the connection is lost or closed."""
        if not self._live:
            raise BrokerUnavailable(
                f"{self.name}: {'the connection to the broker is closed' if self._closed else 'no connection'}"
            )

    def acknowledge(self, settle: Callable[[], None]) -> None:
        """Call `settle`, which acknowledges a delivery. Without a connection, call it after the reconnect: a late ack
        still removes the message.
        """
        if self._live:
            settle()
        elif self._closed:
            self.require()
        else:
            self._late_acks.append(settle)

    async def flush(self, timeout_s: float = 2.0) -> None:
        await self.reach(timeout_s)

    def _check(self, subject: str, data: bytes) -> None:
        if len(data) > self.max_payload:
            raise PayloadTooBig(
                f"a message of {len(data)} bytes is above the broker's max_payload of {self.max_payload}"
            )
        if not subject or " " in subject:
            raise ValueError(f"{subject!r} is not a subject: expected words joined by dots, without blanks")


class MemoryBus(MemoryConnection):
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
        listener = Listener(self, self._server, subject, handler, queue, limits, on_dropped)
        self._server.listen(listener)
        return listener

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        if not self._live:
            timeout_s = await self.reach(timeout_s)
        self._check(subject, data)
        server = self._server
        inbox = server.new_inbox()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()
        server.inboxes[inbox] = answer
        self._waiting.add(answer)
        timer = loop.call_later(timeout_s, expire, answer, subject, timeout_s)
        try:
            if not server.route(CoreMessage(subject, data, inbox)):
                raise NoResponder(f"{subject} has no subscriber")
            return await answer
        finally:
            timer.cancel()
            self._waiting.discard(answer)
            del server.inboxes[inbox]


class Listener:
    """Subscription. One task passes the queued messages to the handler. The task exists only while messages wait."""

    def __init__(
        self,
        connection: MemoryConnection,
        server: Exchange,
        subject: str,
        handler: Callable[[CoreMessage], Awaitable[None]],
        queue: str,
        limits: tuple[int, int],
        on_dropped: Callable[[str], None] | None,
    ) -> None:
        self.connection = connection
        self.subject = subject
        self.queue = queue
        self._server = server
        self._handler = handler
        self._max_messages, self._max_bytes = limits
        self._on_dropped = on_dropped
        self._held: deque[CoreMessage] = deque()
        self._held_bytes = 0
        self._dropped = 0
        self._task: asyncio.Task[None] | None = None

    def put(self, message: CoreMessage) -> None:
        if len(self._held) >= self._max_messages or self._held_bytes + len(message.data) > self._max_bytes:
            self._dropped += 1
            if self._dropped == 1 or self._dropped % 1000 == 0:
                log.error(
                    "%s: %d messages were dropped, because their handler is too slow", self.subject, self._dropped
                )
            if self._on_dropped is not None:
                self._on_dropped(message.subject)
            return
        self._held.append(message)
        self._held_bytes += len(message.data)
        if self._task is None:
            self._task = self.connection.own(self._handle(), f"handler of {self.subject}")

    async def _handle(self) -> None:
        while self._held:
            message = self._held.popleft()
            self._held_bytes -= len(message.data)
            await guarded(f"the handler of {self.subject}", self._handler(message))
        self._task = None

    async def stop(self) -> None:
        self._server.unlisten(self)
        task = self._task
        if task is not None:
            await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
            task.cancel()
