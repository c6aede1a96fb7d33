"""Jobs that have ended are forgotten after a time, with what they keep themselves. One gateway at a time does that."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

from sie_broker import BrokerError
from sie_broker.record import LeaderLease
from sie_contracts.errors import SIEError
from sie_gateway.jobs.service import Jobs
from sie_runtime.process import Stop, Trouble

EVERY_S = 60.0
_logger = logging.getLogger("sie.gateway.jobs")


class Sweeper:
    """`keep_s`: how long a job stays after its end. `has_store`: without a payload store nothing is forgotten, since
    what a job keeps there could not be removed.
    """

    def __init__(
        self, jobs: Jobs, lease: LeaderLease, keep_s: float, now_s: Callable[[], float], *, has_store: bool
    ) -> None:
        self._jobs = jobs
        self._lease = lease
        self._keep_s = keep_s
        self._now_s = now_s
        self._has_store = has_store

    async def run(self, stop: Stop) -> None:
        """Until `stop`."""
        trouble = Trouble(_logger, "jobs that have ended stay for now")
        while not await stop.wait_for(EVERY_S * random.uniform(0.5, 1.0)):  # noqa: S311  no secret
            try:
                await self.sweep()
                trouble.passed()
            except (BrokerError, SIEError) as error:
                trouble.met(error)

    async def sweep(self) -> int:
        """Forget what is due. Returns how many. Raises BrokerError, and SIEError for the first one that could not be
        removed, when all others were tried.
        """
        if not self._has_store:
            return 0
        due = [job for job in self._jobs.ledger if job.ended and job.ended_s + self._keep_s <= self._now_s()]
        if not due or not await self._lease.acquire():
            return 0
        refused: list[SIEError] = []
        for job in due:
            try:
                await self._jobs.remove(job)
            except SIEError as error:
                refused.append(error)
        forgotten = len(due) - len(refused)
        if forgotten:
            _logger.info("%d jobs that had ended were forgotten", forgotten)
        if refused:
            raise refused[0]
        return forgotten
