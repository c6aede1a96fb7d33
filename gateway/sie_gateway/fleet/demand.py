"""Requests for models that nobody has loaded: what they are told at the end of their hold, and the demand that they
leave.

held until the end of the hold ──► loaded somewhere: go on waiting
                               ──► a worker loads it: MODEL_LOADING
                               ──► no worker of the lane is ready: PROVISIONING (202 to clients that expect it)
                               ──► a worker is ready and has not begun: go on waiting

The record of demand has one key per lane, which counts for DEMAND_LIFE_S and is the same at every gateway. Work of a
request that ended is withdrawn from the queue, so without this record nobody would start a worker for the client's next
try.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

import msgspec

from sie_broker import BrokerError, Store, Write
from sie_broker.record import RecordBucket
from sie_contracts.errors import ModelLoading, NotProvisioned
from sie_contracts.wire import messages, records, topology
from sie_contracts.wire.records import Demand
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.metrics import Metrics
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Stop

DEMAND_LIFE_S = 60.0
AGAIN_S = 5.0  # a record that is younger is not written again
_RETRY_S = 1.0
MAX_RETRY_S = 5
USUAL_START_S = 60.0  # of a worker, while this gateway has not seen one start
ASKED_S = 60.0  # a start that nobody asked for in this time is measured no further
_logger = logging.getLogger("sie.gateway.demand")


def is_live(at_s: float, now_s: float) -> bool:
    """Whether a record of this time still counts, by the broker's clock. One from a clock ahead of ours
    counts as new.
    """
    return now_s - at_s < DEMAND_LIFE_S


class DemandRecords:
    """`now_s` is the broker's time. One task runs `run`, the only writer of this gateway; `note` never waits."""

    def __init__(self, broker: Store, now_s: Callable[[], float], *, storage: str, replicas: int) -> None:
        self._now_s = now_s
        self._bucket = RecordBucket(
            broker, topology.DEMAND_BUCKET, storage=storage, replicas=replicas, max_age_s=2 * DEMAND_LIFE_S
        )
        self._noted: dict[Lane, float] = {}  # lanes are those of the catalogue and the machine profiles
        self._written: dict[Lane, float] = {}
        self._wake = asyncio.Event()

    def note(self, lane: Lane) -> None:
        """Somebody waits for this lane now."""
        now_s = self._now_s()
        if not -AGAIN_S < now_s - self._written.get(lane, -1e12) < AGAIN_S:
            self._noted[lane] = now_s
            self._wake.set()

    def drop_pool(self, pool: str) -> None:
        """The pool is there no more. What was written of it goes with its age."""
        for entries in (self._noted, self._written):
            for lane in [lane for lane in entries if lane.pool == pool]:
                del entries[lane]

    def pending(self) -> set[Lane]:
        """Lanes that this gateway noted within the life of a record."""
        now_s = self._now_s()
        return {lane for lane, at_s in {**self._written, **self._noted}.items() if is_live(at_s, now_s)}

    async def run(self, stop: Stop) -> None:
        """Write what is noted until `stop`. What cannot be written stays noted and is tried again."""
        while not await stop.wait_woken(self._wake):
            try:
                await self.write()
            except BrokerError as error:
                _logger.warning("demand is not recorded: %s", error)
                self._wake.set()
                await stop.wait_for(_RETRY_S)

    async def write(self) -> None:
        """Write all that is noted. Raises BrokerError."""
        while self._noted:
            lane, at_s = next(iter(self._noted.items()))
            failpoint("gateway.before_demand")
            await self._bucket.write([Write(topology.lane_key(lane), messages.encode(Demand(at_s)))])
            self._written[lane] = at_s
            if self._noted.get(lane) == at_s:
                del self._noted[lane]

    async def is_wanted(self, lane: Lane) -> bool:
        """Whether any gateway recorded demand that still counts. Raises BrokerError."""
        entry = await self._bucket.get(topology.lane_key(lane))
        if entry is None or entry.value is None:
            return False
        try:
            return is_live(records.decode_demand(entry.value).at_s, self._now_s())
        except msgspec.DecodeError as error:
            _logger.warning("the demand of %s could not be read: %s", lane, error)
            return False


class _ColdStart:
    """A lane without a worker: since when it is asked for, and when it last was."""

    __slots__ = ("first_s", "last_s")

    def __init__(self, now_s: float) -> None:
        self.first_s = self.last_s = now_s


class ColdStarts:
    """`pending_reason` says of a pool why it has not the workers that it asks for; empty where it has them, or asks for
    none.
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
        self._starts: dict[Lane, _ColdStart] = {}  # lanes are those of the catalogue and the machine profiles
        self._took_s: dict[Lane, float] = {}

    def requested(self, lane: Lane) -> None:
        """A request came for what no worker of the lane has loaded."""
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
        """The pool is there no more."""
        for entries in (self._starts, self._took_s):
            for lane in [lane for lane in entries if lane.pool == pool]:
                del entries[lane]

    def check(self, lane: Lane, residency: str) -> bool:
        """From the end of a hold: whether a worker has it loaded. False: one may soon begin to. Raises ModelLoading,
        NotProvisioned.
        """
        if self._fleet.hosts(lane, residency):
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
        """How long it still takes until a worker of the lane is ready, at least 1 s, by the last start that this
        gateway saw.
        """
        start = self._starts.get(lane)
        waited_s = self._clock() - start.first_s if start is not None else 0.0
        return max(1.0, self._took_s.get(lane, USUAL_START_S) - waited_s)
