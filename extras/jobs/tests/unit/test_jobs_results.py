"""Results of jobs: how many are read at once."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from sie_bulk_jobs.gateway.engine import JobEngine
from sie_bulk_jobs.gateway.ledger import JobLedger
from sie_bulk_jobs.gateway.results import READS_AT_ONCE, READS_OF_A_KEY, JobResults
from sie_bulk_jobs.records import JobRecord, ShardRecord
from sie_contracts.api.jobs import JobInput, JobRequest
from sie_contracts.errors import RateLimited, ResourceExhausted


class Ledger:
    """Ledger whose records arrive when `gate` is set, and whose jobs have no parts."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.reads = 0

    async def shards(self, job: str) -> dict[int, ShardRecord]:
        self.reads += 1
        await self.gate.wait()
        return {}


JOB = JobRecord("job-1", "owner", "", 0.0, request=JobRequest(model="m", input=JobInput(file="f")))


async def test_reads_of_results_are_limited_for_a_key_and_for_all_keys() -> None:
    ledger = Ledger()
    results = JobResults(cast(JobLedger, ledger), cast(JobEngine, None))

    def read(key: str) -> asyncio.Task[object]:
        return asyncio.create_task(results.rows(key, JOB, 1, only_failed=False))

    running = [read("one") for _ in range(READS_OF_A_KEY)]
    with pytest.raises(RateLimited, match=f"this key has {READS_OF_A_KEY} reads of results at once"):
        await read("one")
    with pytest.raises(RateLimited):
        await results.manifest("one", JOB, 0, 1)
    running += [read(f"key-{number}") for number in range(READS_AT_ONCE - READS_OF_A_KEY)]
    with pytest.raises(ResourceExhausted):
        await read("another")
    assert ledger.reads == READS_AT_ONCE
    ledger.gate.set()
    await asyncio.gather(*running)
    await read("one")
