"""Records of jobs in the broker, and of their shards (groups of input rows)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sie_broker import Store, Write, WrongRevision
from sie_broker.record import RecordBucket
from sie_bulk_jobs import records
from sie_bulk_jobs.gateway.records import JobsBucket, OwnerUsage, RecordUse
from sie_bulk_jobs.records import JobRecord, ShardRecord
from sie_contracts.errors import NotFound
from sie_contracts.wire import topology
from sie_runtime.metrics import Scrape


class JobLedger:
    """Records of all jobs. Changes by other gateways arrive while a task runs `JobsBucket.run` of `bucket`.

    While a job runs, its record grows by less than 20 KiB. `usage` counts these bytes for the job's owner. The limits
    of `usage` are checked only for new records, so the growth of a record may exceed them.
    """

    def __init__(self, bucket: JobsBucket, broker: Store, replicas: int, usage: OwnerUsage) -> None:
        self._usage = usage
        self._bucket = bucket
        self._jobs = bucket.jobs
        self._jobs.listeners.append(self._on_job)
        self._shards = RecordBucket(broker, topology.SHARDS_BUCKET, storage="file", replicas=replicas)
        self._listeners: dict[str, Callable[[JobRecord | None], None]] = {}
        self.woken = asyncio.Event()  # set when a job has changed; cleared by the only task that waits for it

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(list(self._jobs.values()))

    @property
    def is_read(self) -> bool:
        return self._bucket.is_read

    def find(self, job_id: str) -> JobRecord:
        """Return a job. Raises NotFound, and NotReady while the records have not been read."""
        self._bucket.require()
        job = self._jobs.get(job_id)
        if job is None:
            raise NotFound("there is no such job", param="job")
        return job

    def listen(self, job_id: str, listener: Callable[[JobRecord | None], None] | None) -> None:
        """Set the listener that is called on each change of this job; None removes it."""
        if listener is None:
            self._listeners.pop(job_id, None)
        else:
            self._listeners[job_id] = listener

    async def create(self, job: JobRecord) -> JobRecord:
        """Store a new job. If a job with this id exists, return that job. Raises RateLimited above a limit,
        BrokerError.
        """
        # a job in `_usage` exists or is being stored, so it already counts towards the limits
        if job.id not in self._usage:
            size = len(records.encode(job))
            self._usage.check(job.owner, RecordUse(1, size))
            self._usage.charge(job.id, job.owner, size)
        try:
            stored = await self._jobs.change(job.id, lambda before: job if before is None else before)
            assert stored is not None
            return stored
        finally:
            self._charge(job.id, self._jobs.get(job.id))

    def require(self) -> None:
        self._bucket.require()

    async def change(self, job_id: str, make: Callable[[JobRecord], JobRecord]) -> JobRecord:
        """Replace a job by `make(job)`. Raises BrokerError, and NotFound for a missing job."""

        def changed(before: JobRecord | None) -> JobRecord:
            if before is None:
                raise NotFound("there is no such job", param="job")
            return make(before)

        stored = await self._jobs.change(job_id, changed)
        assert stored is not None
        return stored

    async def shards(self, job_id: str) -> dict[int, ShardRecord]:
        """Return the records of a job's shards, by the number of the shard. Raises BrokerError."""
        entries = await self._shards.use(lambda bucket: bucket.entries(job_id))
        return await asyncio.to_thread(
            lambda: {
                int(entry.key.rpartition(".")[2]): records.decode_shard(entry.value)
                for entry in entries
                if entry.value is not None
            }
        )

    async def keep_shard(self, job_id: str, number: int, shard: ShardRecord) -> bool:
        """Store the record of a shard. Returns False if the shard has a record already. Raises BrokerError."""
        try:
            await self._shards.write([Write(f"{job_id}.{number}", records.encode(records.bounded(shard)), 0)])
        except WrongRevision:
            return False
        return True

    async def remove(self, job_id: str) -> None:
        """Remove the records of a job and of its shards. The output of the job stays. Raises BrokerError."""
        await self._shards.use(lambda bucket: bucket.purge(job_id))
        await self._jobs.remove(job_id)

    def _charge(self, job_id: str, job: JobRecord | None) -> None:
        if job is None:
            self._usage.release(job_id)
        else:
            self._usage.charge(job_id, job.owner, len(records.encode(job)))

    def _on_job(self, job_id: str, job: JobRecord | None) -> None:
        self._charge(job_id, job)
        if (listener := self._listeners.get(job_id)) is not None:
            listener(job)
        self.woken.set()


class JobFigures(Collector):
    """Metrics of all stored jobs, also of jobs that other gateways run."""

    def __init__(self, ledger: JobLedger) -> None:
        self._ledger = ledger
        self._scrape = Scrape("gateway")

    def collect(self) -> Iterator[Metric]:
        jobs = list(self._ledger)
        states = Counter(job.state for job in jobs)
        waiting = sum(max(0, (job.rows or 0) - job.done) for job in jobs if not job.ended)
        gauge = self._scrape.gauge
        yield gauge("sie_gateway_jobs", {(state,): count for state, count in states.items()})
        yield gauge("sie_gateway_job_rows_waiting", waiting)
        yield gauge("sie_gateway_jobs_in_trouble", sum(job.trouble is not None for job in jobs if not job.ended))
