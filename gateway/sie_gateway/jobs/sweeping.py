"""Jobs that have ended are forgotten after a time, with what they keep themselves. One gateway at a time does that."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from sie_broker import BrokerError
from sie_broker.record import LeaderLease
from sie_contracts.errors import QueueUnavailable
from sie_gateway.jobs.service import Jobs
from sie_runtime.process import Stop, Trouble

EVERY_S = 60.0
_logger = logging.getLogger("sie.gateway.jobs")


class Sweeper:
    """`keep_s`: how long a job stays after its end."""

    def __init__(self, jobs: Jobs, lease: LeaderLease, keep_s: float, now_s: Callable[[], float] = time.time) -> None:
        self._jobs = jobs
        self._lease = lease
        self._keep_s = keep_s
        self._now_s = now_s

    async def run(self, stop: Stop) -> None:
        """Until `stop`."""
        trouble = Trouble(_logger, "jobs that have ended stay for now")
        while not await stop.wait_for(EVERY_S * random.uniform(0.5, 1.0)):  # noqa: S311  no secret
            try:
                await self.sweep()
                trouble.passed()
            except (BrokerError, QueueUnavailable) as error:
                trouble.met(error)

    async def sweep(self) -> int:
        """Forget what is due. Returns how many. Raises BrokerError, QueueUnavailable."""
        due = [job for job in self._jobs.ledger if job.ended and job.ended_s + self._keep_s <= self._now_s()]
        if not due or not await self._lease.acquire():
            return 0
        for job in due:
            await self._jobs.remove(job)
        _logger.info("%d jobs that had ended were forgotten", len(due))
        return len(due)
