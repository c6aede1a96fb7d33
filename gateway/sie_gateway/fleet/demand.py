"""Requests for models that no worker has loaded, and records of the demand for workers of a lane (pool, machine profile
and bundle). The gateway holds such a request for a limited time (SIE_LOAD_HOLD_S), then decides as in the drawing.

held until the time ends ──► a worker has loaded the model: continue to wait, while the lane has a live worker
                         ──► a worker loads the model: MODEL_LOADING
                         ──► no worker of the lane is ready: PROVISIONING (202 to clients that expect it)
                         ──► a worker is ready and has not begun to load: continue to wait

Each lane has one record of demand in the broker, which all gateways read. A record is valid for DEMAND_LIFE_S seconds.
When a request ends with MODEL_LOADING or PROVISIONING, the gateway withdraws the request's work from the queue. The
record remains, so that the autoscaler starts a worker for the client's next attempt.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from sie_broker import BrokerError, Store, Write
from sie_broker.record import RecordBucket
from sie_contracts.errors import UNDECODABLE, ModelLoading, NotProvisioned
from sie_contracts.wire import messages, records, topology
from sie_contracts.wire.records import Demand
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.metrics import Metrics
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Stop, Trouble

DEMAND_LIFE_S = 60.0
# shortest time in seconds between two writes of a lane's demand, to limit the writes while many requests wait
AGAIN_S = 5.0
_RETRY_S = 1.0
MAX_RETRY_S = 5
USUAL_START_S = 60.0  # seconds that the start of a worker is assumed to take, until this gateway has measured a start
# seconds without a request for a lane after which `ColdStarts` stops measuring the start of the lane's first worker
ASKED_S = 60.0
_logger = logging.getLogger("sie.gateway.demand")


def is_live(at_s: float, now_s: float) -> bool:
    """Return True if demand recorded at `at_s` is valid at `now_s`. `at_s` may be the later time, as clocks differ."""
    return now_s - at_s < DEMAND_LIFE_S


class DemandRecords:
    """Records of the demand of lanes. `now_s` returns the broker's time. Only the task `run` writes to the broker."""

    def __init__(self, broker: Store, now_s: Callable[[], float], *, storage: str, replicas: int) -> None:
        self._now_s = now_s
        self._bucket = RecordBucket(
            broker, topology.DEMAND_BUCKET, storage=storage, replicas=replicas, max_age_s=2 * DEMAND_LIFE_S
        )
        # lane -> time of its last request, not written to the broker yet; the map stays small, because a request cannot
        # create a lane
        self._noted: dict[Lane, float] = {}
        self._written: dict[Lane, float] = {}
        self._wake = asyncio.Event()

    def note(self, lane: Lane) -> None:
        """Record that a request waits for a worker of this lane now."""
        now_s = self._now_s()
        if not -AGAIN_S < now_s - self._written.get(lane, -1e12) < AGAIN_S:
            self._noted[lane] = now_s
            self._wake.set()

    def drop_pool(self, pool: str) -> None:
        """Remove the demand for the lanes of a removed pool from this gateway's memory. The broker's records expire."""
        for entries in (self._noted, self._written):
            for lane in [lane for lane in entries if lane.pool == pool]:
                del entries[lane]

    def pending(self) -> set[Lane]:
        """Return the lanes for which this gateway has recorded demand within the last DEMAND_LIFE_S seconds."""
        now_s = self._now_s()
        return {lane for lane, at_s in {**self._written, **self._noted}.items() if is_live(at_s, now_s)}

    async def run(self, stop: Stop) -> None:
        """Until `stop`, write to the broker the demand that `note` records. Repeat a failed write."""
        trouble = Trouble(_logger, "the demand for workers, which autoscalers read, cannot be written to the broker")
        while not await stop.wait_woken(self._wake):
            with trouble.logged(BrokerError):
                await self.write()
            if trouble.lasting:
                self._wake.set()
                await stop.wait_for(_RETRY_S)

    async def write(self) -> None:
        """Write to the broker all demand that `note` has recorded. Raises BrokerError."""
        while self._noted:
            lane, at_s = next(iter(self._noted.items()))
            failpoint("gateway.before_demand")
            await self._bucket.write([Write(topology.lane_key(lane), messages.encode(Demand(at_s)))])
            self._written[lane] = at_s
            if self._noted.get(lane) == at_s:
                del self._noted[lane]

    async def is_wanted(self, lane: Lane) -> bool:
        """Return True if the lane has a valid record of demand, written by any gateway. Raises BrokerError."""
        entry = await self._bucket.get(topology.lane_key(lane))
        if entry is None or entry.value is None:
            return False
        try:
            return is_live(records.decode_demand(entry.value).at_s, self._now_s())
        except UNDECODABLE as error:
            _logger.warning("the gateway ignores the undecodable record of demand for lane %s: %s", lane, error)
            return False


class _ColdStart:
    """Times of the first and of the last request for a lane that has no worker yet."""

    __slots__ = ("first_s", "last_s")

    def __init__(self, now_s: float) -> None:
        self.first_s = self.last_s = now_s


class ColdStarts:
    """Decides how long requests for models that no worker has loaded may wait. `pending_reason(pool)` returns why a
    reservation lacks workers; an empty text if the reservation has all its workers, or if the pool is not a
    reservation.
    """

    def __init__(
        self,
        fleet: Fleet,
        demand: DemandRecords,
        metrics: Metrics,
        pending_reason: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._demand = demand
        self._metrics = metrics
        self._pending_reason = pending_reason
        self._clock = clock
        # lanes without workers but with requests; the map stays small, because a request cannot create a lane
        self._starts: dict[Lane, _ColdStart] = {}
        self._took_s: dict[Lane, float] = {}

    def requested(self, lane: Lane) -> None:
        """Record a request for a model that no worker of the lane has loaded."""
        self._demand.note(lane)
        now_s = self._clock()
        start = self._starts.get(lane)
        if start is not None and now_s - start.last_s > ASKED_S:
            start = self._starts.pop(lane)
        if self._fleet.of_lane(lane):
            if lane in self._starts:
                self._took_s[lane] = now_s - self._starts.pop(lane).first_s
        else:
            self._starts.setdefault(lane, _ColdStart(now_s)).last_s = now_s

    def drop_pool(self, pool: str) -> None:
        for entries in (self._starts, self._took_s):
            for lane in [lane for lane in entries if lane.pool == pool]:
                del entries[lane]

    def check(self, lane: Lane, residency: str, *, was_hosted: bool = False) -> bool:
        """Check that a request may continue to wait after SIE_LOAD_HOLD_S, and return `was_hosted` for the next check.
        Raises ModelLoading while a worker loads the model, NotProvisioned while the lane has no ready worker.

        `was_hosted`: a worker had the model loaded when the request arrived, or at an earlier check, so the worker may
        have work of the request. The request then also waits while this worker restarts, loads the model again, or
        finishes its work after a move to another pool.
        """
        if self._fleet.hosts(lane, residency) or (was_hosted and self._fleet.is_lane_alive(lane)):
            return True
        self.requested(lane)
        left_s = self._fleet.loading_left_s(lane, residency)
        if left_s is not None:
            raise ModelLoading(
                f"{residency} is being loaded",
                retry_after_s=min(MAX_RETRY_S, math.ceil(left_s)),
                extras={"estimated_wait_s": round(left_s, 1)},
            )
        if not self._fleet.of_lane(lane):
            self._metrics.provisioning.inc()
            left_s = self.start_left_s(lane)
            message = f"no worker for {lane.machine_profile} with bundle {lane.bundle} is ready yet"
            if reason := self._pending_reason(lane.pool):
                message += f"; the pool {lane.pool!r} is pending: {reason}"
            raise NotProvisioned(
                message,
                retry_after_s=min(MAX_RETRY_S, math.ceil(left_s)),
                extras={
                    "status": "provisioning",
                    "gpu": lane.machine_profile,
                    "bundle": lane.bundle,
                    "estimated_wait_s": round(left_s, 1),
                    "message": message,
                },
            )
        return False

    def start_left_s(self, lane: Lane) -> float:
        """Estimate the seconds until a worker of the lane is ready, at least 1, from the duration of the last start."""
        start = self._starts.get(lane)
        waited_s = self._clock() - start.first_s if start is not None else 0.0
        return max(1.0, self._took_s.get(lane, USUAL_START_S) - waited_s)
