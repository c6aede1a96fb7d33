"""The records of jobs and of their shards in the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from sie_broker import Store, Write, WrongRevision
from sie_broker.record import Bucket
from sie_contracts import jobs as records
from sie_contracts import topology
from sie_contracts.errors import NotFound
from sie_contracts.jobs import JobRecord, ShardRecord
from sie_gateway.jobs.records import JobsBucket

MAX_JOBS = 10_000  # that are kept; a further one is refused


class Ledger:
    """All jobs, as this gateway knows them. `bucket` is followed by its own task."""

    def __init__(self, bucket: JobsBucket, broker: Store, replicas: int) -> None:
        self._bucket = bucket
        self._jobs = bucket.jobs
        self._jobs.listeners.append(self._on_job)
        self._shards = Bucket(broker, topology.SHARDS_BUCKET, storage="file", replicas=replicas)
        self._listeners: dict[str, Callable[[JobRecord | None], None]] = {}
        self.woken = asyncio.Event()  # set when a job changed; one task waits for it

    def __iter__(self) -> Iterator[JobRecord]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def is_read(self) -> bool:
        """Whether all records are known."""
        return self._bucket.is_read

    def find(self, job_id: str) -> JobRecord:
        """Raises NotReady while the records are not read, NotFound."""
        self._bucket.require()
        job = self._jobs.get(job_id)
        if job is None:
            raise NotFound("there is no such job", param="job")
        return job

    def listen(self, job_id: str, listener: Callable[[JobRecord | None], None] | None) -> None:
        """Have `listener` called whenever this job changes, until it is None."""
        if listener is None:
            self._listeners.pop(job_id, None)
        else:
            self._listeners[job_id] = listener

    async def create(self, job: JobRecord) -> JobRecord:
        """Keep a new job. One with its id stays as it is and is returned. Raises BrokerError."""
        return await self.change(job.id, lambda before: job if before is None else before, created=True)

    def require(self) -> None:
        """Raises NotReady while the records are not read."""
        self._bucket.require()

    async def change(
        self, job_id: str, make: Callable[[JobRecord | None], JobRecord | None], *, created: bool = False
    ) -> JobRecord:
        """As `Record.change`. Raises BrokerError, NotFound for a job that is not there, unless it is `created`."""

        def made(before: JobRecord | None) -> JobRecord | None:
            if before is None and not created:
                raise NotFound("there is no such job", param="job")
            return make(before)

        stands = await self._jobs.change(job_id, made)
        assert stands is not None, "make returned no job"
        return stands

    async def shards(self, job_id: str) -> dict[int, ShardRecord]:
        """The shards of a job that are answered, by number. Raises BrokerError."""
        entries = await self._shards.use(lambda bucket: bucket.entries(job_id))
        return {
            int(entry.key.rpartition(".")[2]): records.decode_shard(entry.value)
            for entry in entries
            if entry.value is not None
        }

    async def keep_shard(self, job_id: str, number: int, shard: ShardRecord) -> bool:
        """Note that a shard is answered. False where it was before. Raises BrokerError."""
        try:
            await self._shards.write([Write(f"{job_id}.{number}", records.encode(shard), 0)])
        except WrongRevision:
            return False
        return True

    async def forget(self, job_id: str) -> None:
        """Remove a job and its shards. What it wrote stays. Raises BrokerError."""
        await self._shards.use(lambda bucket: bucket.purge(job_id))
        await self._jobs.remove(job_id)

    def _on_job(self, job_id: str, job: JobRecord | None) -> None:
        if (listener := self._listeners.get(job_id)) is not None:
            listener(job)
        self.woken.set()
