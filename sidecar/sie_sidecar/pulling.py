"""Deliveries come in: which consumers exist, how much credit each has, and what the broker still holds back.

Work waits in the broker, not here: a quiet consumer has one open pull as a probe, an active one as much as the
scheduler can run soon, one of a model that this worker does not host none at all. What a refill costs depends on the
consumers that deliver, not on those that exist.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sie_broker import BrokerError, Delivery, Pulls, Queue, Subscription
from sie_contracts import topology
from sie_contracts.topology import Lane
from sie_sidecar import batch
from sie_sidecar.assignment import Role
from sie_sidecar.batch import Limits, Load

ACTIVE_S = 1.0  # a consumer that delivered this recently is active
_logger = logging.getLogger("sie.sidecar.pulling")


class _Consumer:
    """What is known of one durable consumer: how its deliveries look lately. `mean_cost` in tokens."""

    def __init__(self) -> None:
        self.mean_cost = 0.0
        self.delivered_s = -1e9


class Pulling:
    """The open pulls of a lane. `room` tells, at each refill, what already waits for the device before work of that
    priority (whether it is bulk); None while nothing should be pulled. `role` tells what a consumer may get: see
    `assignment`.
    """

    def __init__(
        self,
        queue: Queue,
        lane: Lane,
        limits: Limits,
        on_delivery: Callable[[Delivery], None],
        room: Callable[[bool], Load | None],
        clock: Callable[[], float],
        role: Callable[[str], Role] = lambda consumer: "pull",
    ) -> None:
        self._queue = queue
        self._lane = lane
        self._limits = limits
        self._room = room
        self._clock = clock
        self._role = role
        self._stream = topology.stream_name(lane.pool)
        self._bulk = f"{lane.consumer_prefix()}bulk__"
        self._consumers: dict[str, _Consumer] = {}
        self._active: dict[str, _Consumer] = {}
        self._short: dict[
            str, None
        ] = {}  # in order: what delivered since it was looked at, or has less than an idle device would get
        self._more: set[str] = set()  # what the broker holds back work of, as its last delivery said
        self._announced: set[str] = set()  # since the last look at what exists began
        self._open = False  # whether anything may be pulled, as of the last refill
        self._pulls: Pulls = queue.pulls(self._stream, on_delivery)
        self._notices: Subscription | None = None
        self._stopped = False

    async def start(self) -> None:
        """Learn of consumers from now on, and of those that exist. Raises BrokerError."""
        self._notices = await self._queue.watch_consumers(self._stream, self._on_consumer)
        await self.look()

    async def look(self) -> None:
        """`find_consumers` now, if the broker can be asked: notices may have been missed."""
        try:
            await self.find_consumers()
        except BrokerError as error:
            _logger.warning("the consumers could not be listed, the next look is within ten seconds: %s", error)

    async def find_consumers(self) -> None:
        """Learn which durable consumers of this lane exist: the net under the broker's notices. Raises BrokerError."""
        if self._notices is None:  # before the start, when a reconnect asks as well, and after the end
            return
        before, self._announced = set(self._consumers), set()
        found = [
            name for name in await self._queue.consumers(self._stream) if name.startswith(self._lane.consumer_prefix())
        ]
        for name in before.difference(found, self._announced):
            self._forget(name)
        for name in found:
            self._consumers.setdefault(name, _Consumer())
        self.refill_all()

    async def _on_consumer(self, name: str, exists: bool) -> None:
        if not name.startswith(self._lane.consumer_prefix()):
            return
        if exists:
            self._announced.add(name)
            self._consumers.setdefault(name, _Consumer())
            self._refill([name])
        else:
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._consumers.pop(name, None)
        for known in (self._active, self._short):
            known.pop(name, None)
        self._more.discard(name)
        self._pulls.want(name, 0)

    def note(self, delivery: Delivery) -> None:
        """Account for a delivery, whatever is in it: it used up credit."""
        name = delivery.consumer
        consumer = self._active[name] = self._consumers.setdefault(name, _Consumer())
        consumer.delivered_s = self._clock()
        self._short[name] = None
        if delivery.pending:
            self._more.add(name)
        else:
            self._more.discard(name)

    def estimate(self, name: str, cost: int) -> None:
        """A delivery of this consumer has about `cost` tokens: what goes until some were counted."""
        if (consumer := self._consumers.get(name)) is not None and not consumer.mean_cost:
            consumer.mean_cost = cost

    def weigh(self, name: str, cost: int) -> None:
        """A delivery of this consumer has `cost` tokens, as counted: estimates may be wrong by a factor."""
        if (consumer := self._consumers.get(name)) is not None:
            consumer.mean_cost += 0.1 * (cost - consumer.mean_cost)

    def refill_all(self) -> None:
        """Have the right credit outstanding for every consumer: when time has passed, or what the worker hosts has
        changed.
        """
        self._refill(list(self._consumers))

    def refill_one(self, consumer: str) -> None:
        """Have the right credit outstanding for this one."""
        if consumer in self._consumers:
            self._refill([consumer])

    def refill(self) -> None:
        """Have the right credit outstanding for every consumer that may be short of it."""
        self._refill(list(self._short))

    def level(self) -> None:
        """Have the right credit outstanding for every consumer that delivers, those that have too much of it among
        them. Once a second is enough: the broker takes seconds to act on less credit as well.
        """
        self._refill(list(self._active))

    def _refill(self, names: list[str]) -> None:
        if self._stopped:
            return
        now_s, rooms = self._clock(), (self._room(False), self._room(True))
        if (rooms[0] is not None) != self._open:
            self._open, names = rooms[0] is not None, list(self._consumers)
        for name in names:
            consumer = self._consumers[name]
            target = ideal = 0
            room = rooms[name.startswith(self._bulk)]
            if room is not None and (role := self._role(name)) in ("pull", "probe"):
                target = ideal = 1  # on a quiet one also while the device has enough: what comes is one message
                if role == "pull" and now_s - consumer.delivered_s < ACTIVE_S:
                    target, ideal = (self._share(load, consumer) for load in (room, Load(0, 0, room.lanes)))
            # in strides, so that a busy consumer costs one pull for many messages
            if target == 0 or self._pulls.outstanding(name) <= target // 2:
                self._pulls.want(name, target)
            if target >= ideal:
                self._short.pop(name, None)
            else:
                self._short[name] = None
            if now_s - consumer.delivered_s >= ACTIVE_S:
                self._active.pop(name, None)
                self._more.discard(name)

    def _share(self, load: Load, consumer: _Consumer) -> int:
        credit = batch.credit(load, consumer.mean_cost, self._limits)
        return min(credit, max(1, credit // max(1, len(self._active))))

    def more_expected(self) -> bool:
        """Whether the broker has told of more and may send it."""
        return any(self._pulls.outstanding(name) > 0 for name in self._more)

    async def stop(self) -> None:
        """Pull nothing more. What is on the wire is still delivered before this returns."""
        self._stopped = True
        notices, self._notices = self._notices, None
        await asyncio.gather(self._pulls.stop(), *([notices.stop()] if notices is not None else []))
