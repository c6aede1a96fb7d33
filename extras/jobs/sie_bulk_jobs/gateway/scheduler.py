"""Assignment of jobs to gateways: the gateway that holds the lease of a job leads it (runs it). The oldest jobs get a
leader first.

If the leader dies, another gateway leads the job after LEASE_S seconds. For a moment two gateways may run one job. The
output stays correct, because objects and records of shards are created only once (see `__init__.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from sie_broker import BrokerError
from sie_broker.record import LeaderLease, RecordBucket
from sie_bulk_jobs.gateway.ledger import JobLedger
from sie_bulk_jobs.gateway.run import JobRun, JobWork, is_due
from sie_bulk_jobs.gateway.suspects import left
from sie_bulk_jobs.records import JobRecord
from sie_contracts.errors import NotFound
from sie_runtime.process import Stop, Trouble, cancel_all

EVERY_S = 1.0
LEASE_S = 6.0
RENEW_S = 1.5
# a job stops if its lease has not been renewed for this number of seconds, so that it stops before the lease expires
FENCE_S = 0.75 * LEASE_S
LOOKS = 8  # largest number of leases that one call of `_acquire` requests
_logger = logging.getLogger("sie.gateway.jobs")


class _Running:
    """Job that runs on this gateway. Its task is cancelled if its lease was not renewed for FENCE_S."""

    def __init__(self, job_id: str, task: asyncio.Task[None], lease: LeaderLease) -> None:
        self.task = task
        self.lease = lease
        self._id = job_id
        self.renewed()

    def renewed(self) -> None:
        """Set the time of the next renewal, and stop the job after FENCE_S if no renewal succeeds until then."""
        loop = asyncio.get_running_loop()
        self.renew_s = loop.time() + RENEW_S
        self.fence = loop.call_later(FENCE_S, self._left)

    def _left(self) -> None:
        if not self.task.done():
            _logger.warning("job %s is stopped on this gateway: its lease could not be renewed", self._id)
            self.task.cancel()


class JobScheduler:
    """Scheduler that runs at most `at_once` jobs on this gateway. One task calls `run`."""

    def __init__(
        self,
        ledger: JobLedger,
        leases: RecordBucket,
        name: str,
        work: Callable[[JobRecord, JobRun], JobWork],
        *,
        at_once: int,
        now_s: Callable[[], float],
    ) -> None:
        """`now_s` returns seconds since 1970 by the broker's clock."""
        self._ledger = ledger
        self._leases = leases
        self._name = name
        self._work = work
        self._at_once = at_once
        self._now_s = now_s
        # leases of jobs that other gateways run, oldest check first; a lease has expired if two checks LEASE_S apart
        # read the same revision of its key
        self._observed: dict[str, LeaderLease] = {}
        self._running: dict[str, _Running] = {}
        self._turn = asyncio.Lock()  # held by the job whose suspect runs alone on this gateway

    async def run(self, stop: Stop) -> None:
        """Acquire and renew the leases of at most `at_once` jobs, and run these jobs, until `stop`."""
        trouble = Trouble(_logger, "jobs of this gateway make no progress")
        try:
            while not await stop.wait_woken(self._ledger.woken, EVERY_S):
                with trouble.logged(BrokerError):
                    await self._renew()
                    if self._ledger.is_read:
                        await self._acquire()
                if await stop.wait_for(0.1):  # collects a burst of changes, so that they cause one pass of this loop
                    break
        finally:
            await self._leave()

    async def _renew(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for job_id, running in list(self._running.items()):
            if running.task.done():
                running.fence.cancel()
                await self._hand_over(job_id, running)
                del self._running[job_id]
            elif now_s >= running.renew_s:
                began = running.fence
                if await running.lease.acquire():
                    began.cancel()
                    running.renewed()
                else:
                    _logger.warning("job %s is stopped on this gateway: another gateway leads it", job_id)
                    running.task.cancel()

    async def _acquire(self) -> None:
        now_s = self._now_s()
        due = sorted((job for job in self._ledger if is_due(job, now_s)), key=lambda job: (job.created_s, job.id))
        waiting = {job.id: job for job in due if job.id not in self._running}
        self._observed = {job_id: lease for job_id, lease in self._observed.items() if job_id in waiting}
        free = self._at_once - len(self._running)
        for job in self._jobs_to_lease(waiting) if free > 0 else ():
            if free <= 0:
                break
            lease = self._observed.pop(job.id, None)
            lease = self._observed[job.id] = lease or LeaderLease(self._leases, f"job.{job.id}", lease_s=LEASE_S)
            if await lease.acquire():
                run = JobRun(self._ledger, job, self._name, self._work, self._now_s, self._turn)
                task = asyncio.create_task(run.run(), name=f"job {job.id}")
                task.add_done_callback(lambda _: self._ledger.woken.set())
                self._running[job.id] = _Running(job.id, task, self._observed.pop(job.id))
                free -= 1

    def _jobs_to_lease(self, waiting: dict[str, JobRecord]) -> list[JobRecord]:
        """Return at most LOOKS jobs whose leases this gateway requests now. They are of two groups: jobs that another
        gateway led at the last check, because that gateway may have died; and jobs that were never checked, oldest
        first. If both groups are large, the result has LOOKS / 2 jobs of each.
        """
        fresh = [job for job_id, job in waiting.items() if job_id not in self._observed]
        led = [waiting[job_id] for job_id in self._observed]
        return (led[: max(LOOKS // 2, LOOKS - len(fresh))] + fresh)[:LOOKS]

    async def _leave(self) -> None:
        running, self._running = self._running, {}
        for entry in running.values():
            entry.fence.cancel()
        await cancel_all(entry.task for entry in running.values())
        for job_id, entry in running.items():
            # if this fails, the lease expires later, and the next leader takes this gateway for one that has ended
            with contextlib.suppress(BrokerError):
                await self._hand_over(job_id, entry)

    async def _hand_over(self, job_id: str, running: _Running) -> None:
        """Give up a job whose task ended: remove its leader from the record, release its lease. Raises BrokerError."""
        with contextlib.suppress(NotFound):
            await self._ledger.change(job_id, lambda job: left(job, self._name))
        await running.lease.release()
