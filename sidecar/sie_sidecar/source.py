"""Where work comes from: the pool that this worker serves, its placement table and its pulls."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from sie_broker import Broker, Delivery
from sie_contracts import topology
from sie_contracts.topology import Lane
from sie_sidecar.assignment import Assignment, Role
from sie_sidecar.device import DeviceQueue
from sie_sidecar.in_flight import InFlight
from sie_sidecar.inventory import Inventory
from sie_sidecar.loading import Loading
from sie_sidecar.pulling import Pulling


class Source:
    """Pulls from one pool at a time. `take` makes a work item of a delivery; None: there is none to wait for."""

    def __init__(
        self,
        broker: Broker,
        lane: Lane,
        worker_id: str,
        now_s: Callable[[], float],
        device: DeviceQueue,
        loading: Loading,
        inventory: Inventory,
        take: Callable[[Delivery], InFlight | None],
    ) -> None:
        """`now_s`: the broker's time."""
        self._broker = broker
        self._worker_id = worker_id
        self._now_s = now_s
        self._device = device
        self._loading = loading
        self._inventory = inventory
        self._take = take
        self.pool: str | None = None  # that it pulls from, None while from none
        self._paused: set[str] = set()
        self._refilling = False
        self._open(lane)

    def _open(self, lane: Lane) -> None:
        """Go by the table and the stream of a lane from now on."""
        self.lane = lane
        self.assignment = Assignment(
            self._broker,
            lane,
            self._worker_id,
            self._now_s,
            self._loading.hosting.takes,
            self._holds,
            self._on_assignment,
            lambda: self._device.link.connected,
        )
        device = self._device
        pulling = Pulling(
            self._broker,
            lane,
            device.limits,
            lambda delivery: self._on_delivery(delivery, pulling),
            device.room,
            device.clock,
            self._role,
        )
        self.pulling = pulling

    def _role(self, consumer: str) -> Role:
        held = consumer in self._paused or self._device.is_full_of(consumer)
        return "none" if held else self.assignment.role(consumer)

    def _holds(self, model: str) -> bool:
        """Whether no more work of it is to wait here: some does, or it could not even be loaded for now."""
        hosting = self._loading.hosting
        return self._inventory.is_coming(model) or hosting.holds(model) or hosting.makes_room(model)

    async def pull(self) -> bool:
        """Follow the placement table and begin to pull; may be tried again. The lane's stream must exist. Raises
        BrokerError.
        """
        await self.assignment.start()
        await self.pulling.start()
        self.pool = self.lane.pool
        return True

    async def serve(self, pool: str | None) -> bool:
        """Pull from this pool alone, or from none. What was pulled before is finished here. May be tried again.

        Raises BrokerError, also where the pool has no stream yet: then nothing is pulled.
        """
        if pool == self.pool:
            return True
        self.pool = None
        await self.stop()
        if pool is None:
            return True
        await self._broker.stream_state(topology.stream_name(pool))
        self._open(dataclasses.replace(self.lane, pool=pool))
        return await self.pull()

    async def stop(self) -> None:
        """Pull nothing more. What is on the wire is still delivered before this returns."""
        await asyncio.gather(self.assignment.stop(), self.pulling.stop())

    async def upkeep(self, *, look: bool) -> None:
        """Once a second: credit and loads that depend on time. With `look`, every ten, what the broker knows. Raises
        BrokerError.
        """
        self.pulling.level()
        self._load_ahead()
        if look:
            self.pulling.refill_all()
            await self.pulling.find_consumers()
            if self.pool is not None:
                await self.assignment.look(self._loading.hosting.loaded_models())

    def _on_assignment(self) -> None:
        self.pulling.refill_all()
        self._load_ahead()

    def _load_ahead(self) -> None:
        """Load what this worker hosts beside others, so that it pulls only what it can run."""
        if self._device.link.connected and self.pool is not None:
            self._loading.ahead(self.assignment.ahead())

    def _on_delivery(self, delivery: Delivery, pulling: Pulling) -> None:
        pulling.note(delivery)
        flight = self._take(delivery)
        if flight is None:
            self.refill_soon()
        else:
            pulling.estimate(delivery.consumer, flight.item.cost)

    def weigh(self, flight: InFlight) -> None:
        """It is tokenised: its consumer's credit goes by what its deliveries really cost."""
        if flight.job is not None:
            self.pulling.weigh(flight.lease.delivery.consumer, sum(row.cost for row in flight.rows))

    def refill_soon(self) -> None:
        """Once in this turn of the loop, however many call."""
        if not self._refilling:
            self._refilling = True
            asyncio.get_running_loop().call_soon(self._refill)

    def _refill(self) -> None:
        self._refilling = False
        self.pulling.refill()

    @contextlib.contextmanager
    def paused(self, consumers: set[str]) -> Iterator[None]:
        """Within: nothing is pulled of these, whose models' newest entries this worker waits for."""
        self._paused.update(consumers)
        for consumer in consumers:
            self.pulling.refill_one(consumer)
        try:
            yield
        finally:
            self._paused.difference_update(consumers)
            self.pulling.refill_all()
