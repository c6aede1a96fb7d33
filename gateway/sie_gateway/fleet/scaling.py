"""Number of workers that a lane (pool, machine profile and bundle) needs, and the reply to an autoscaler. All gateways
compute the same number, because it is a pure function of facts that are equal for all gateways.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from sie_broker import BrokerError
from sie_contracts.api.operations import LaneFigures
from sie_contracts.errors import NotFound, QueueUnavailable
from sie_contracts.settings import Settings
from sie_contracts.wire.messages import PRIORITIES
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.admission import Peers, mean_cost
from sie_gateway.admission.grant import Grant
from sie_gateway.fleet.demand import DemandRecords
from sie_gateway.fleet.lag import Lag
from sie_gateway.fleet.lanes import Fleet, worker_rate
from sie_gateway.fleet.pools import PoolDirectory
from sie_gateway.streams.backlog import Backlog
from sie_runtime.feed import CatalogueFeed

USED = 0.7  # share of a worker's rate that arriving work may use; the rest is free for bursts
DRAIN_S = 30.0  # seconds in which the planned workers must finish a backlog


def wanted_replicas(
    *, backlog_cost: float, arriving: float, rate: float, ready_workers: int, reserved: int = 0, demand: bool = False
) -> int:
    """Return the number of workers that a lane needs.

    `reserved`: workers that reservations have or request; they do no other work. `backlog_cost`: tokens that wait or
    run, in the queue and in gateways. `arriving`: tokens per second that arrive. `rate`: tokens per second that one
    busy worker runs, 0 while unknown.

    The workers must run the tokens as they arrive, and in addition complete the backlog within DRAIN_S. The number is
    at least one if work waits, or if a request has recorded demand. The result includes `reserved`. While the rate is
    unknown, a lane with work keeps its ready workers. A fraction below 0.01 worker is rounded down: the mean of the
    arriving tokens decays slowly after the last request, and must not keep a worker.
    """
    busy = backlog_cost > 0
    least = 1 if busy or demand else 0
    if rate > 0:
        return reserved + max(least, math.ceil((arriving + backlog_cost / DRAIN_S) / (USED * rate) - 0.01))
    return reserved + max(least, ready_workers if busy else 0)


@dataclass(eq=False)
class Scaling:
    """Computes the replies to `GET /v1/scaling/{lane}`."""

    settings: Settings
    feed: CatalogueFeed
    fleet: Fleet
    backlog: Backlog
    lag: Lag
    peers: Peers
    demand: DemandRecords
    pools: PoolDirectory
    # functions that return the number of workers that a lane needs for work other than requests, such as jobs
    further: list[Callable[[Lane], int]] = field(default_factory=list, init=False)

    def find(self, name: str, grant: Grant | None = None) -> Lane:
        """Return the lane `pool.machine_profile.bundle`. Raises NotFound if the pool, the machine profile or the bundle
        is unknown, or if the credential may not see the pool.
        """
        beats = [beat for beat, _ in self.fleet.workers()]
        profiles = {
            self.settings.profile,
            *(gpu.strip().lower() for gpu in self.settings.gateway_configured_gpus or ()),
        }
        profiles |= {beat.machine_profile for beat in beats}
        profiles |= {profile for reservation in self.pools.record.live().values() for profile in reservation.spec.gpus}
        bundles = {*self.feed.catalogue.bundles} | {beat.bundle for beat in beats}
        visible = self.pools.visible(grant) if grant is not None else bool
        for pool in filter(visible, self.pools.record):
            for profile in profiles:
                rest = name.removeprefix(f"{pool}.{profile}.")
                if rest != name and rest in bundles:
                    return Lane(pool, profile, rest)
        raise NotFound(f"no lane named {name[:200]!r}: expected pool.machine_profile.bundle")

    async def answer(self, name: str, grant: Grant | None = None) -> LaneFigures:
        """Return the backlog, the ready workers and the needed workers of a lane. Raises NotFound, QueueUnavailable."""
        lane = self.find(name, grant)
        try:
            await self.backlog.fresh(lane.pool, 0.0)
            counts = {priority: self.backlog.messages(lane, priority) or 0 for priority in PRIORITIES}
            items = sum(counts.values())
            oldest_s = await self.lag.oldest_s(lane) if items else 0.0
            demand = await self.demand.is_wanted(lane)
        except BrokerError as error:
            raise QueueUnavailable("the backlog could not be read from the broker: try again") from error
        requested, pending = self.pools.reserved(), self.pools.pending()
        # A reservation takes its workers from the pool of the installation. The autoscaler reads the lane of that pool,
        # so this lane counts the workers of reservations too.
        is_main = lane.pool == self.pools.record.main
        mine = {
            key
            for key in requested
            if key[1:] == (lane.machine_profile, lane.bundle) and (is_main or key[0] == lane.pool)
        }
        reserved = sum(requested[key] for key in mine)
        traffic = {priority: self.peers.traffic(lane, priority) for priority in PRIORITIES}
        # the mean tokens of a waiting message are unknown if no gateway has sent work lately: assume `chunk_cost`
        cost = sum(
            count * (mean_cost(traffic[priority]) or self.settings.chunk_cost) for priority, count in counts.items()
        )
        flows = [flow for of_priority in traffic.values() for flow in of_priority]
        workers = self.fleet.of_lane(lane)
        desired = reserved
        if not self.pools.record.is_reservation(lane.pool):
            for_requests = wanted_replicas(
                backlog_cost=cost + sum(flow.waiting for flow in flows),
                arriving=sum(flow.rate for flow in flows),
                rate=worker_rate(workers),
                ready_workers=len(workers),
                reserved=reserved,
                demand=demand,
            )
            desired = max([for_requests, *(reserved + want(lane) for want in self.further)])
        return LaneFigures(
            lane=str(lane),
            backlog_items=items,
            backlog_cost=round(cost),
            oldest_age_s=round(oldest_s, 3),
            ready_workers=len(workers),
            wanted_replicas=desired,
            reserved=reserved,
            demand=int(demand or any(pool in pending for pool, _, _ in mine)),
        )
