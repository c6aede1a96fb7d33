"""Deliveries come in: which consumers exist, how much credit each has, and what the broker still holds back.

Work waits in the broker, not here: a quiet consumer has one open pull as a probe, an active one as much as the scheduler can run soon.
"""

from __future__ import annotations

from collections.abc import Callable

from sie_contracts import topology
from sie_contracts.broker import Broker, Delivery, Pulls
from sie_contracts.topology import Lane
from sie_sidecar import batch
from sie_sidecar.batch import Limits

ACTIVE_S = 1.0  # a consumer that delivered this recently is active


class _Consumer:
    """What is known of one durable consumer: how its deliveries look lately."""

    def __init__(self) -> None:
        self.mean_cost = 0.0
        self.pending = 0
        self.delivered_s = -1e9

    def note(self, cost: int, pending: int, now_s: float) -> None:
        self.mean_cost = cost if not self.mean_cost else 0.9 * self.mean_cost + 0.1 * cost
        self.pending, self.delivered_s = pending, now_s


class Pulling:
    """The open pulls of a lane. `room` tells, at each refill, the cost that already waits for the device and the device's lanes;
    None while nothing should be pulled."""

    def __init__(
        self,
        broker: Broker,
        lane: Lane,
        limits: Limits,
        on_delivery: Callable[[Delivery], None],
        room: Callable[[], tuple[int, int] | None],
        clock: Callable[[], float],
    ) -> None:
        self._broker = broker
        self._lane = lane
        self._limits = limits
        self._room = room
        self._clock = clock
        self._stream = topology.stream_name(lane.pool)
        self._consumers: dict[str, _Consumer] = {}
        self._pulls: Pulls = broker.pulls(self._stream, on_delivery)
        self._stopped = False

    async def start(self) -> None:
        """Learn of consumers from now on, and of those that exist. Raises BrokerError."""
        await self._broker.watch_consumers(self._stream, self._on_consumer)
        self._broker.on_reconnect(self.find_consumers)
        await self.find_consumers()

    async def find_consumers(self) -> None:
        """Learn which durable consumers of this lane exist: the net under the broker's notices. Raises BrokerError."""
        for name in await self._broker.consumers(self._stream):
            await self._on_consumer(name, True)

    async def _on_consumer(self, name: str, exists: bool) -> None:
        if not name.startswith(self._lane.consumer_prefix()):
            return
        if exists:
            self._consumers.setdefault(name, _Consumer())
        else:
            self._consumers.pop(name, None)
            self._pulls.want(name, 0)
        self.refill()

    def note(self, delivery: Delivery, cost: int) -> None:
        """Account for a delivery of this estimated cost."""
        self._consumers.setdefault(delivery.consumer, _Consumer()).note(cost, delivery.pending, self._clock())

    def refill(self) -> None:
        """Have the right credit outstanding for every consumer."""
        if self._stopped:
            return
        now_s, room = self._clock(), self._room()
        active = sum(1 for consumer in self._consumers.values() if now_s - consumer.delivered_s < ACTIVE_S)
        for name, consumer in self._consumers.items():
            target = 0
            if room is not None:
                held_cost, lanes = room
                target = batch.credit(held_cost=held_cost, mean_cost=consumer.mean_cost, limits=self._limits, lanes=lanes)
                share = max(1, target // max(1, active)) if now_s - consumer.delivered_s < ACTIVE_S else 1
                target = min(target, share)
            # in strides, so that a busy consumer costs one pull for many messages
            if target == 0 or self._pulls.outstanding(name) <= target // 2:
                self._pulls.want(name, target)

    def more_expected(self) -> bool:
        """Whether the broker has told of more and may send it."""
        return any(consumer.pending > 0 and self._pulls.outstanding(name) > 0 for name, consumer in self._consumers.items())

    async def stop(self) -> None:
        """Pull nothing more. What is on the wire is still delivered before this returns."""
        self._stopped = True
        await self._pulls.stop()
