"""Results of a job for its owner: the list of its parts (output files), the bytes of one part, a sample of its rows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from sie_bulk_jobs.datasets import shards
from sie_bulk_jobs.gateway.engine import JobEngine
from sie_bulk_jobs.gateway.ledger import JobLedger
from sie_bulk_jobs.gateway.native import manifest, outcomes_of
from sie_bulk_jobs.gateway.service import broker_errors_mapped
from sie_bulk_jobs.gateway.slots import KeySlots
from sie_bulk_jobs.records import JobRecord
from sie_contracts.api import jobs as api
from sie_contracts.errors import NotFound, QueueUnavailable
from sie_store.object_stores import ObjectMissing, StoreError

SAMPLED = 4  # largest number of parts that are read for a sample of rows
# largest number of manifests and samples of rows that a gateway reads at once: for all keys, and for one key
READS_AT_ONCE, READS_OF_A_KEY = 8, 4


@dataclass(eq=False)
class JobResults:
    """Reader of the results of all jobs. Its callers check the permission to read a job."""

    ledger: JobLedger
    engine: JobEngine
    # limits simultaneous reads, because one read may need memory for all shard records of a job, or for a whole part
    reads: KeySlots = field(
        default_factory=lambda: KeySlots(READS_AT_ONCE, READS_OF_A_KEY, "reads of results", "results")
    )

    async def manifest(self, key: str, job: JobRecord, after: int, limit: int) -> api.JobManifest:
        """Return the manifest with at most `limit` parts; the first `after` parts are left out. `key`: API key
        of the reader. Raises QueueUnavailable, and RateLimited or ResourceExhausted for too many reads at once.
        """
        with self.reads.hold(key):
            async with broker_errors_mapped():
                every = await self.ledger.shards(job.id)
                plan = await self.engine.workplace(job).plan()
            whole = await asyncio.to_thread(manifest, job, job.state, every, plan.unread if plan else ())
        shown = whole.parts[after : after + limit]
        end = after + len(shown)
        return replace(whole, parts=shown, next=end if end < len(whole.parts) else None)

    async def part(self, job: JobRecord, name: str) -> tuple[int, AsyncIterator[bytes]]:
        """Return the number of bytes of a stored part, and its bytes in pieces. Raises NotFound, also if the job
        writes its output to a URL. Raises QueueUnavailable.
        """
        assert job.request is not None
        if job.output_url:
            raise NotFound(f"the parts of this job are at {job.output_url}", param="name")
        async with broker_errors_mapped():
            every = await self.ledger.shards(job.id)
        if name not in {shard.name for shard in every.values() if shard.name}:
            raise NotFound("the job has no such part; its manifest lists all parts", param="name")
        with _store_errors_mapped():
            return await shards.pieces_of(self.engine.output(job), name)

    async def rows(self, key: str, job: JobRecord, limit: int, *, only_failed: bool) -> api.JobRows:
        """Return id, tokens and error of up to `limit` rows in at most SAMPLED parts. `key`: API key of the reader.
        Raises NotFound, QueueUnavailable, ContentConflict for a damaged part, and RateLimited or ResourceExhausted for
        too many reads at once.
        """
        with self.reads.hold(key):
            return api.JobRows(rows=await self._rows(job, limit, only_failed=only_failed))

    async def _rows(self, job: JobRecord, limit: int, *, only_failed: bool) -> list[api.JobRow]:
        assert job.request is not None
        async with broker_errors_mapped():
            every = await self.ledger.shards(job.id)
        rows: list[api.JobRow] = []
        stored = [shard for _, shard in sorted(every.items()) if shard.name and (shard.failed or not only_failed)]
        for shard in stored[:SAMPLED]:
            with _store_errors_mapped():
                data = await shards.bytes_of(self.engine.output(job), shard.name)
            for outcome in await outcomes_of(shard.name, data, job.request.output.format):
                if outcome.error is not None or not only_failed:
                    error = None if outcome.error is None else api.JobError(**outcome.error)
                    rows.append(api.JobRow(id=outcome.id, tokens=outcome.tokens, error=error))
                if len(rows) == limit:
                    return rows
        return rows


@contextlib.contextmanager
def _store_errors_mapped() -> Iterator[None]:
    try:
        yield
    except ObjectMissing as error:
        raise NotFound("the part does not exist any more", param="name") from error
    except StoreError as error:
        raise QueueUnavailable(f"the store of the output failed, try again: {error}") from error
