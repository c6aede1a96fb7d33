"""Requests for what nobody has loaded: the demand they leave, and what they are told when they were held long enough.

held until the end of the hold ──► loaded somewhere: go on waiting
                               ──► a worker loads it: MODEL_LOADING
                               ──► no worker of the lane is ready: PROVISIONING (202 to clients that expect it)
                               ──► a worker is ready and has not begun: go on waiting
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sie_contracts.errors import ModelLoading, Provisioning
from sie_contracts.topology import Lane
from sie_gateway.demand import DemandRecords
from sie_gateway.fleet import Fleet
from sie_gateway.metrics import Metrics

MAX_RETRY_S = 5
USUAL_START_S = 60.0  # of a worker, while this gateway has not seen one start
ASKED_S = 60.0  # a start that nobody asked for in this time is measured no further


class _Start:
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
        self._starts: dict[Lane, _Start] = {}  # lanes are those of the catalogue and the machine profiles
        self._took_s: dict[Lane, float] = {}

    def asked(self, lane: Lane) -> None:
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
            self._starts.setdefault(lane, _Start(now_s)).last_s = now_s

    def forget(self, pool: str) -> None:
        """The pool is there no more."""
        for known in (self._starts, self._took_s):
            for lane in [lane for lane in known if lane.pool == pool]:
                del known[lane]

    def check(self, lane: Lane, residency: str) -> bool:
        """From the end of a hold: whether a worker has it loaded. False: one may soon begin to. Raises ModelLoading,
        Provisioning.
        """
        if self._fleet.hosts(lane, residency):
            return True
        self.asked(lane)
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
            raise Provisioning(
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
