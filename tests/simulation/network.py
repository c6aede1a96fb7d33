"""Connections to the memory broker with the faults of a network, and the record of which process holds which message.

Every operation takes time. At the rates of `Rates` it is lost on its way, done without an answer, done twice, or late.
Deliveries and settlements take time too, so they overtake each other.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from simulation.virtual import Scope, VirtualLoop

from sie_broker import BrokerError, BrokerUnavailable, CoreMessage, Delivery, Published, Pulls, Subscription
from sie_broker.memory import MemoryBroker, MemoryServer
from sie_broker.memory.queue import MemoryDelivery, MemoryPulls
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Failed, WorkItem, WorkResult

LATE_S = 0.6  # the longest delay; less than a fence leaves of the ack wait
_SURE: contextvars.ContextVar[bool] = contextvars.ContextVar("sure", default=False)


@dataclass
class Rates:
    """The shares of operations with each fate."""

    lost: float = 0.0
    answer_lost: float = 0.0
    twice: float = 0.0
    late: float = 0.0

    def heal(self) -> None:
        for fault in fields(self):
            setattr(self, fault.name, 0.0)


@dataclass
class Holding:
    """The process that last got a message. `excused`: since then the broker has had a reason to redeliver it."""

    scope: Scope
    since_s: float
    excused: bool = False


class Network:
    """All connections of a simulation. `violation(text)` reports a violated property."""

    def __init__(
        self,
        loop: VirtualLoop,
        server: MemoryServer,
        rates: Rates,
        seed: int,
        log: Callable[[str, str], None],
        violation: Callable[[str], None],
        was_well: Callable[[Scope, float], bool],
    ) -> None:
        """`was_well(process, since_s)` says whether that process could renew its leases all the time since then."""
        self.loop, self.server, self.rates, self.log, self.violation, self._was_well = (
            loop,
            server,
            rates,
            log,
            violation,
            was_well,
        )
        self.random = random.Random(seed)
        self.holdings: dict[tuple[str, int], Holding] = {}
        self.stored: dict[tuple[str, str, int, int], int] = {}  # (stream, request, chunk, attempt) -> sequence
        self.connections: list[Connection] = []
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """Return the next number, which is a hash, so that sets of connections have one order in all runs."""
        return next(self._numbers)

    def connect(self, scope: Scope) -> Connection:
        connection = Connection(self, scope)
        self.server._connections.add(connection)
        self.connections.append(connection)
        return connection

    def excuse(self, scope: Scope) -> None:
        """Allow from now on that leases of this process expire."""
        for holding in self.holdings.values():
            if holding.scope is scope:
                holding.excused = True

    def created(self) -> str:
        """Return the creation time of the work stream, which changes after it was lost."""
        return next((stream.created for name, stream in self.server.streams.items() if name.startswith("WORK_")), "")

    def latency_s(self) -> float:
        return self.random.uniform(0.0001, 0.0006)

    def draw(self) -> str:
        """Return the fate of one operation."""
        drawn = self.random.random()
        for name in ("lost", "answer_lost", "twice", "late"):
            drawn -= getattr(self.rates, name)
            if drawn < 0:
                return name
        return ""

    async def pause(self, fate: str) -> None:
        """Let the time pass that one way of an operation takes."""
        await asyncio.sleep(self.random.uniform(0.01, LATE_S) if fate == "late" else self.latency_s())

    # checks of messages

    def published(self, data: bytes, published: Published) -> None:
        item = _work(data)
        if item is None or published.duplicate:
            return
        key = (self.created(), item.request, item.chunk, item.attempt)
        if key in self.stored and self.stored[key] != published.sequence:
            self.violation(f"request {item.request} chunk {item.chunk} attempt {item.attempt} is in the stream twice")
        self.stored[key] = published.sequence

    def handed_out(self, delivery: MemoryDelivery, scope: Scope) -> None:
        key = (self.created(), delivery.sequence)
        before = self.holdings.get(key)
        if (
            before is not None
            and delivery.delivered > 1
            and not before.excused
            and self._was_well(before.scope, before.since_s)
        ):
            self.violation(f"{delivery.sequence} was delivered again although {before.scope.name} held it and was well")
        self.holdings[key] = Holding(scope, self.loop.now_s)

    def excuse_one(self, sequence: int) -> None:
        holding = self.holdings.get((self.created(), sequence))
        if holding is not None:
            holding.excused = True

    def sent(self, data: bytes, scope: Scope) -> None:
        """Check a result that is sent: an error must come from the process that holds the message."""
        try:
            result = messages.decode_result(data)
        except msgspec.DecodeError:
            return
        self.log("result", f"{_short(result.request)}.{result.chunk} of {len(result.outcomes)} {_kinds(result)}")
        if not result.outcomes or not all(isinstance(outcome, Failed) for outcome in result.outcomes):
            return
        sequence = self.stored.get((self.created(), result.request, result.chunk, result.attempt))
        holding = self.holdings.get((self.created(), sequence)) if sequence is not None else None
        streams = self.server.streams.values()
        if (
            holding is not None
            and holding.scope is not scope
            and any(sequence in stream.messages for stream in streams)
        ):
            self.violation(
                f"{scope.name} sent an error for {_short(result.request)}.{result.chunk}, which {holding.scope.name} "
                "holds"
            )


class Connection(MemoryBroker):
    """The connection of one process. Its tasks and callbacks run in the scope of that process."""

    def __init__(self, network: Network, scope: Scope) -> None:
        self._number = network.number()
        super().__init__(network.server, scope.name)
        self.scope = scope
        self.network = network
        self._context = contextvars.copy_context()

    def __hash__(self) -> int:
        return self._number

    def own(self, work: Any, label: str) -> asyncio.Task[None]:
        return self._context.run(super().own, work, label)

    def disconnect(self) -> None:
        self.network.log("disconnected", self.name)
        self.network.excuse(self.scope)
        super().disconnect()

    def reconnect(self) -> None:
        if not self._live and not self._closed:
            self.network.log("reconnected", self.name)
        super().reconnect()

    async def reach(self, timeout_s: float) -> float:
        """Reach the broker, which every request to it does first."""
        if not self._live or _SURE.get():
            return await super().reach(timeout_s)
        fate = self.network.draw()
        await self.network.pause(fate)
        if fate == "lost":
            await self._no_answer("a question", timeout_s)
        return await super().reach(timeout_s)

    async def flush(self, timeout_s: float = 2.0) -> None:
        """Flush; if it fails, the process cannot know that its renewals arrived, so its leases may expire."""
        try:
            await super().flush(timeout_s)
        except BrokerUnavailable:
            self.network.excuse(self.scope)
            raise

    async def _no_answer(self, operation: str, timeout_s: float) -> None:
        self.network.log("lost", f"{operation} of {self.name}")
        await asyncio.sleep(timeout_s)
        raise BrokerUnavailable(f"{operation}: no answer within {timeout_s:.3g} s")

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        network, fate = self.network, self.network.draw() if self._live else ""
        await network.pause(fate)
        if fate == "lost":
            await self._no_answer("a publish", timeout_s)
        published = await super().publish(subject, data, message_id, timeout_s)
        network.published(data, published)
        network.log(
            "published",
            f"{_tail(message_id)} at {published.sequence}{' duplicate' if published.duplicate else ''} {fate}",
        )
        if fate == "twice":
            network.published(data, await super().publish(subject, data, message_id, timeout_s))
        if fate == "answer_lost":
            await self._no_answer("the answer to a publish", timeout_s)
        await asyncio.sleep(network.latency_s())
        self.require()
        return published

    async def ensure_consumer(self, spec: Any) -> None:
        await super().ensure_consumer(spec)
        await self._answered("ensuring a consumer")

    async def delete(self, stream: str, sequence: int) -> bool:
        deleted = await super().delete(stream, sequence)
        self.network.log("deleted", f"{sequence} {deleted}")
        await self._answered("a delete")
        return deleted

    async def _answered(self, operation: str) -> None:
        """Let the answer to an operation that was done travel back."""
        fate = self.network.draw()
        if fate in ("lost", "answer_lost"):
            await self._no_answer(f"the answer to {operation}", 5.0)
        await self.network.pause(fate)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        if not self._live:
            timeout_s = await super().reach(timeout_s)
        network, fate = self.network, self.network.draw()
        network.sent(data, self.scope)
        await network.pause(fate)
        if fate == "lost":
            await self._no_answer("a request", timeout_s)
        if fate == "twice" and self._live:
            network.server.route(CoreMessage(subject, data))
        answer = await super().request(subject, data, timeout_s)
        if fate == "answer_lost":
            await self._no_answer("the answer to a request", timeout_s)
        await asyncio.sleep(network.latency_s())
        self.require()
        return answer

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        self.require()
        self._check(subject, data)
        network, fate = self.network, self.network.draw()
        if fate in ("lost", "answer_lost"):
            network.log("lost", f"a message of {self.name} to {subject.partition('.')[0]}")
            return
        for _ in range(2 if fate == "twice" else 1):
            delay_s = network.random.uniform(0.01, LATE_S) if fate == "late" else network.latency_s()
            network.loop.call_later(delay_s, self._arrive, CoreMessage(subject, data, reply))

    def _arrive(self, message: CoreMessage) -> None:
        self.network.server.route(message)

    async def subscribe(
        self, subject: str, handler: Callable[[CoreMessage], Awaitable[None]], *args: Any, **more: Any
    ) -> Subscription:
        """Subscribe without faults: a subscription of a connected client awaits no answer, so it cannot fail."""
        token = _SURE.set(True)
        try:
            return await super().subscribe(subject, handler, *args, **more)
        finally:
            _SURE.reset(token)

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls:
        pulls = _Pulls(self, self._server, stream, lambda delivery: self._context.run(handler, delivery))
        self._pulls.add(pulls)
        self._server.pulls.setdefault(stream, set()).add(pulls)
        return pulls


class _Pulls(MemoryPulls):
    """Pulls whose deliveries take time, get lost, or come twice. `stop` returns after the deliveries that are under way
    have arrived.
    """

    def __init__(
        self, connection: Connection, server: MemoryServer, stream: str, handler: Callable[[Any], None]
    ) -> None:
        self._order = connection.network.number()
        super().__init__(connection, server, stream, handler)
        self._connection = connection
        self._wire: dict[int, tuple[asyncio.TimerHandle, MemoryDelivery]] = {}
        self._number = 0

    def __hash__(self) -> int:
        return self._order

    def deliver(self, delivery: MemoryDelivery) -> None:
        network = self._connection.network
        fate = network.draw()
        network.handed_out(delivery, self._connection.scope)
        network.log("delivered", f"{delivery.sequence} to {self._connection.name} as {delivery.delivered} {fate}")
        if fate in ("lost", "answer_lost"):
            network.excuse_one(delivery.sequence)
            return
        for _ in range(2 if fate == "twice" else 1):
            delay_s = network.random.uniform(0.01, LATE_S) if fate == "late" else network.latency_s()
            self._number += 1
            handle = network.loop.call_later(delay_s, self._arrive, self._number)
            self._wire[self._number] = (handle, delivery)

    def _arrive(self, number: int) -> None:
        _, delivery = self._wire.pop(number)
        if self._connection.live:
            super().deliver(_Delivery(self._connection, delivery))  # type: ignore[arg-type]

    async def stop(self) -> None:
        await super().stop()
        for number in list(self._wire):
            handle = self._wire[number][0]
            handle.cancel()
            self._arrive(number)

    def detach_all(self) -> None:
        super().detach_all()
        if not self._connection.live:
            for handle, _ in self._wire.values():
                handle.cancel()
            self._wire.clear()


class _Delivery:
    """A delivery whose settlements take time and can be lost or late."""

    def __init__(self, connection: Connection, delivery: MemoryDelivery) -> None:
        self._connection, self._inner = connection, delivery

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def ack(self) -> None:
        await self._settle("ack", self._inner.ack)

    async def nak(self, delay_s: float = 0.0) -> None:
        self._connection.network.excuse_one(self._inner.sequence)
        await self._settle("nak", lambda: self._inner.nak(delay_s))

    async def term(self, reason: str) -> None:
        await self._settle("term", lambda: self._inner.term(reason))

    async def in_progress(self) -> None:
        """Renew the lease. On an open connection this is never lost: it is sent in order with pings, which would
        fail.
        """
        self._connection.require()
        self._connection.network.loop.call_later(
            self._connection.network.latency_s(), self._done, self._inner.in_progress
        )

    async def _settle(self, action: str, settlement: Callable[[], Awaitable[None]]) -> None:
        connection, network = self._connection, self._connection.network
        network.log(action, f"{self._inner.sequence} by {connection.name}")
        if not connection.live:
            await settlement()
            return
        fate = network.draw()
        if fate in ("lost", "answer_lost"):
            network.log("lost", f"{action} of {self._inner.sequence}")
            network.excuse_one(self._inner.sequence)
            return
        if fate == "late":
            network.excuse_one(self._inner.sequence)
            delay_s = network.random.uniform(0.01, LATE_S)
        else:
            delay_s = network.latency_s()
        network.loop.call_later(delay_s, self._done, settlement)

    def _done(self, settlement: Callable[[], Awaitable[None]]) -> None:
        self._connection.own(self._quietly(settlement), "a settlement")

    @staticmethod
    async def _quietly(settlement: Callable[[], Awaitable[None]]) -> None:
        try:
            await settlement()
        except BrokerError:
            pass  # the connection was lost while the settlement was under way


def _work(data: bytes) -> WorkItem | None:
    try:
        return messages.decode_work(data)
    except msgspec.DecodeError:
        return None


def _kinds(result: WorkResult) -> str:
    return ",".join(
        sorted({outcome.error.code if isinstance(outcome, Failed) else "ok" for outcome in result.outcomes})
    )


def _short(request: str) -> str:
    return request[-6:]


def _tail(message_id: str) -> str:
    request, dot, rest = message_id.partition(".")
    return _short(request) + dot + rest
