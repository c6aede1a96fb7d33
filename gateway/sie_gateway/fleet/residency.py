"""`POST /v1/models/{model}/load` and `/unload`: an operator requests that a worker of a lane (pool, machine profile and
bundle) loads a model before the model's first request, or that workers unload a model.

    load ──► a wish; every EVERY_S: 1. request a worker from the autoscaler, and a host from the planner
                                    2. if the placement table has a host: send it messages.Residency
    unload ──► send messages.Residency once to each worker that has the model

A wish is a requested load, in the memory of one gateway. The wish ends when a worker of the lane has loaded the model,
loads it, or could not load it, when an operator requests an unload, or after LIFE_S. A worker that must unload a model
first completes the model's work in flight.
"""

from __future__ import annotations

import logging
import time
from asyncio import Event
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sie_broker import BrokerError, Bus
from sie_contracts.api.residency import ResidencyState
from sie_contracts.errors import QueueUnavailable
from sie_contracts.models.catalogue import Resolved
from sie_contracts.wire import messages, topology
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.demand import ColdStarts
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.fleet.placement import Placer
from sie_runtime.process import Stop, Trouble

EVERY_S = 0.5
# seconds after which messages.Residency is sent to a worker again: the first message may be lost, or the worker may
# have ignored it because its catalogue was old
AGAIN_S = 2.0
LIFE_S = 600.0  # lifetime of a wish in seconds: the start of a machine and a worker takes minutes
SLOWEST_FIRST: tuple[ResidencyState, ...] = ("provisioning", "loading", "loaded")
_HERE = ("loading", "loaded", "unloading")
_logger = logging.getLogger("sie.gateway.residency")


@dataclass
class _Wish:
    """A requested load. `sent_s`: time of the last message to a worker."""

    model: str  # id of the model's entry
    until_s: float
    sent_s: float | None = None


class Placed(NamedTuple):
    """A model in a lane: its name for clients, its state in this lane, and pairs of a worker's heartbeat and the
    worker's report of the model.
    """

    name: str
    lane: Lane
    state: ResidencyState
    reports: Sequence[tuple[Heartbeat, ModelStatus]]


class Where(NamedTuple):
    """Selection of workers for an unload. An empty `pool` stands for all pools, an empty `machine_profile` for all
    machine profiles.
    """

    pool: str = ""
    machine_profile: str = ""

    def means(self, pool: str, machine_profile: str) -> bool:
        return self.pool in ("", pool) and self.machine_profile in ("", machine_profile)


class Residencies:
    """Loads and unloads that operators request, and the messages to workers. One task calls `run`."""

    def __init__(
        self,
        bus: Bus,
        fleet: Fleet,
        placer: Placer,
        cold: ColdStarts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._fleet = fleet
        self._placer = placer
        self._cold = cold
        self._clock = clock
        # (lane, residency) -> wish. A residency is a model with one set of load options. Repeated requests replace the
        # wish, so the catalogue limits the number of wishes.
        self._wishes: dict[tuple[Lane, str], _Wish] = {}
        self._wake = Event()

    async def load(self, lane: Lane, resolved: Resolved) -> Placed:
        """Request that a worker of the lane loads a model. The autoscaler may have to start the worker first. Raises
        QueueUnavailable.
        """
        reports = self._of_lane(lane, resolved)
        if having := [beat for beat, status in reports if status.state == "loaded"]:
            # send the message also to workers that have the model loaded, because they may be about to unload the model
            for beat in having:
                await self._publish(beat, "load", resolved.residency)
            return Placed(resolved.canonical, lane, "loaded", reports)
        self._wishes[lane, resolved.residency] = _Wish(resolved.entry.id, self._clock() + LIFE_S)
        self._wake.set()
        return Placed(resolved.canonical, lane, "loading" if self._fleet.of_lane(lane) else "provisioning", reports)

    def _of_lane(self, lane: Lane, resolved: Resolved) -> list[tuple[Heartbeat, ModelStatus]]:
        """Return the workers of a lane that have a model, or that the placement table names as its hosts. Each worker
        comes with its report of the model.
        """
        table = self._placer.table(lane)
        hosts = table.hosts.get(resolved.entry.id, ()) if table is not None else ()
        workers_of_lane = []
        for beat in self._fleet.of_lane(lane):
            status = _status(beat, resolved.residency)
            if beat.worker in hosts or (status is not None and status.state in _HERE):
                workers_of_lane.append((beat, status or ModelStatus(resolved.residency, "available")))
        return workers_of_lane

    async def unload(self, resolved: Resolved, where: Where) -> list[Placed]:
        """Request that the workers that `where` selects unload a model as soon as it is idle. Drop earlier requests to
        load the model there. Raises QueueUnavailable.
        """
        for lane, residency in list(self._wishes):
            if residency == resolved.residency and where.means(lane.pool, lane.machine_profile):
                del self._wishes[lane, residency]
        placed: dict[Lane, list[tuple[Heartbeat, ModelStatus]]] = {}
        for beat, status in self._fleet.model(resolved.residency)[1]:
            if status.state in _HERE and where.means(beat.pool, beat.machine_profile):
                placed.setdefault(beat.lane, []).append((beat, status))
                await self._publish(beat, "unload", resolved.residency)
        return [Placed(resolved.canonical, lane, "unloading", reports) for lane, reports in sorted(placed.items())]

    async def _publish(self, beat: Heartbeat, action: messages.ResidencyAction, residency: str) -> None:
        try:
            await self._send(beat, action, residency)
        except BrokerError as error:
            raise QueueUnavailable("the broker did not accept the message to the worker: try again") from error

    async def _send(self, beat: Heartbeat, action: messages.ResidencyAction, residency: str) -> None:
        data = messages.encode(messages.Residency(action, residency))
        await self._bus.send(topology.residency_subject(beat.worker), data)

    def drop_pool(self, pool: str) -> None:
        for key in [key for key in self._wishes if key[0].pool == pool]:
            del self._wishes[key]

    async def run(self, stop: Stop) -> None:
        trouble = Trouble(_logger, "loads that operators requested could not be sent to workers")
        while not await stop.wait_woken(self._wake, EVERY_S if self._wishes else None):
            with trouble.logged(BrokerError):
                for (lane, residency), wish in list(self._wishes.items()):
                    if await self._is_over(lane, residency, wish):
                        self._wishes.pop((lane, residency), None)

    async def _is_over(self, lane: Lane, residency: str, wish: _Wish) -> bool:
        """Do the next step of a wish (a requested load). Return True if the wish has ended. Raises BrokerError."""
        now_s, workers = self._clock(), self._fleet.of_lane(lane)
        states = {status.state for beat in workers if (status := _status(beat, residency)) is not None}
        since_s = None if wish.sent_s is None else now_s - wish.sent_s
        if "loaded" in states or (since_s is not None and "loading" in states):
            return True
        if since_s is not None and since_s >= AGAIN_S and "failed" in states:
            return True
        if now_s >= wish.until_s:
            _logger.warning("the load of %s is cancelled: no worker of %s began it in %g s", residency, lane, LIFE_S)
            return True
        self._cold.requested(lane)
        self._placer.want(lane, wish.model)
        if since_s is None or since_s >= AGAIN_S:
            table = self._placer.table(lane)
            hosts = table.hosts.get(wish.model, ()) if table is not None else ()
            beats = {beat.worker: beat for beat in workers}
            if (host := next((beats[name] for name in hosts if name in beats), None)) is not None:
                await self._send(host, "load", residency)
                wish.sent_s = now_s
        return False


def _status(beat: Heartbeat, residency: str) -> ModelStatus | None:
    return next((status for status in beat.models if status.model == residency), None)
