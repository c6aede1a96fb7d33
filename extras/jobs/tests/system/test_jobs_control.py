"""Commands of the owner of a job: pause, resume, cancel, delete, windows, throughput, deadlines, the cache, the
list.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from cluster import until
from job_client import ENDED, Job, JobClient, jsonl, parquet_file
from job_stack import (
    CACHE_BYTES,
    GROUP,
    MODEL,
    SLOW,
    TEXT,
    computed,
    config,
    entry,
    fingerprint,
    rows_of,
    running,
    serving,
    shown,
)
from stack import Stack

from sie_broker.nats import connect
from sie_bulk_jobs.gateway.ledger import JobLedger
from sie_bulk_jobs.gateway.records import JobsBucket, OwnerUsage, RecordUse, UseBound
from sie_bulk_jobs.records import JobRecord
from sie_contracts.api.jobs import JobInput, JobRequest

pytestmark = GROUP


def test_a_job_is_paused_resumed_cancelled_and_deleted(jobs: JobClient, job_folder: Path) -> None:
    file = jobs.upload("rows.jsonl", jsonl(rows_of(1000)))
    job = jobs.submit(MODEL, {"file": file, **TEXT}, output={"url": f"file://{job_folder}/out/"}, **SLOW)
    running(jobs, job)
    assert "error" in jobs.ask("DELETE", f"/v1/jobs/{job['id']}", 409)
    jobs.steer(job["id"], "pause")
    paused = jobs.reaches(job["id"], "paused")
    assert paused["error"] is None
    parts = sorted((job_folder / "out").iterdir())
    time.sleep(1.5)  # enough time for five shards
    assert jobs.show(job["id"])["counts"] == paused["counts"]
    assert sorted((job_folder / "out").iterdir()) == parts
    jobs.steer(job["id"], "resume")
    until(lambda: jobs.show(job["id"])["counts"]["done"] > paused["counts"]["done"] + 20, 60, "it goes on")
    jobs.steer(job["id"], "cancel")
    cancelled = jobs.reaches(job["id"], "cancelled")
    assert 0 < cancelled["counts"]["done"] < 1000
    assert jobs.steer(job["id"], "resume", 409)["error"]["code"] == "CONTENT_CONFLICT"
    manifest = json.loads((job_folder / "out" / "manifest.json").read_bytes())
    assert (manifest["state"], manifest["rows"]) == ("cancelled", len(jobs.rows(job["id"])))
    assert manifest["rows"] == cancelled["counts"]["done"]
    assert jobs.ask("DELETE", f"/v1/jobs/{job['id']}")["deleted"]
    assert (job_folder / "out" / "manifest.json").exists(), "what it wrote elsewhere stays"


def test_the_same_idempotency_key_is_the_same_job(jobs: JobClient) -> None:
    file = jobs.upload("rows.jsonl", jsonl(rows_of(3)))
    name = secrets.token_hex(8)
    first, second = (jobs.submit(MODEL, {"file": file, **TEXT}, key=name) for _ in range(2))
    assert first["id"] == second["id"]
    refusal = jobs.submit(MODEL, {"file": file, **TEXT}, key=name, shard_rows=7, status=422)
    assert refusal["error"]["code"] == "IDEMPOTENCY_MISMATCH"
    jobs.done(first["id"])


def test_outside_its_windows_a_job_waits_and_says_when(job_cluster: Stack, jobs: JobClient) -> None:
    now = datetime.now(UTC)
    window = f"{now + timedelta(hours=2):%H:%M}-{now + timedelta(hours=3):%H:%M}"
    file = jobs.upload("rows.jsonl", jsonl(rows_of(30)))
    job = jobs.submit(MODEL, {"file": file, **TEXT}, windows=[window])
    waiting = jobs.trouble(job["id"], "OUTSIDE_WINDOW")
    assert (waiting["counts"]["rows"], waiting["counts"]["done"]) == (30, 0)
    assert f"the job works only in the window {window} UTC" in shown(job_cluster, job["id"])
    jobs.steer(job["id"], "cancel")
    jobs.reaches(job["id"], "cancelled")
    window = f"{now - timedelta(hours=1):%H:%M}-{now + timedelta(hours=1):%H:%M}"
    assert jobs.done(jobs.submit(MODEL, {"file": file, **TEXT}, windows=[window])["id"])["counts"]["done"] == 30


def test_a_throughput_is_kept_and_a_deadline_that_expires_ends_the_job(job_cluster: Stack, jobs: JobClient) -> None:
    """The job runs at 1,000 tokens a second. Rows before the deadline are in the output, and later rows do not run."""
    file = jobs.upload("rows.jsonl", jsonl(rows_of(3000)))
    deadline_s = time.time() + 4
    job = jobs.submit(MODEL, {"file": file, **TEXT}, **SLOW, deadline=deadline_s, expires=True)
    expired = jobs.reaches(job["id"], "expired")
    assert 0 <= expired["ended_at"] - deadline_s < 15
    tokens = sum(row["tokens"] for row in jobs.rows(job["id"]))
    assert tokens == expired["counts"]["tokens"]
    ran_s = expired["ended_at"] - expired["started_at"]
    group = 20 * max(
        row["tokens"] for row in jobs.rows(job["id"])
    )  # a request starts when those before it are paid for
    assert 200 * ran_s < tokens <= 1000 * ran_s + group
    assert jobs.manifest(job["id"])["rows"] == expired["counts"]["done"]
    assert "expired" in shown(job_cluster, job["id"])


@pytest.mark.long
def test_a_job_says_when_it_will_be_done(jobs: JobClient) -> None:
    """The forecast comes as soon as the rate is known, which is that of its limit: 1,000 tokens a second, in rows of 12
    tokens.
    """
    file = jobs.upload("rows.jsonl", jsonl(rows_of(2000)))
    began_s = time.time()
    job = jobs.submit(MODEL, {"file": file, **TEXT}, **SLOW, deadline=began_s + 15)
    forecast = until(lambda: jobs.show(job["id"])["forecast"], 15, "a forecast", lambda: jobs.show(job["id"]))
    assert isinstance(forecast, dict)
    assert 60 < forecast["rows_per_s"] < 120
    assert forecast["workers"] == 1
    assert forecast["workers_needed"] is None, "more workers do not help a job that is held to a rate"
    done = jobs.done(job["id"])
    print("forecast", forecast, "ended", done["ended_at"])
    assert abs(forecast["done_at"] - done["ended_at"]) < 3 * max(2.0, forecast["plus_minus_s"])


def test_the_cache_answers_what_did_not_change_and_equal_rows_are_computed_once(
    job_cluster: Stack, jobs: JobClient, job_folder: Path
) -> None:
    """The first run has 5,000 rows, of which a fifth equal others. In the second run 1 % of the rows are new, and only
    these are computed. A model with another fingerprint takes nothing from the cache. The size of the cache is bounded.
    """
    texts = [f"document {number % 4000:05}" for number in range(5000)]
    (job_folder / "rows.parquet").write_bytes(parquet_file([{"text": text} for text in texts]))
    source = {"url": f"file://{job_folder}/rows.parquet", **TEXT}
    first = jobs.done(jobs.submit(MODEL, source, cache=True, shard_rows=5000)["id"])
    assert (first["counts"]["done"], first["counts"]["reused"]) == (5000, 1000)
    for number in range(0, 5000, 100):
        texts[number] = f"changed {number:05}"
    (job_folder / "rows.parquet").write_bytes(parquet_file([{"text": text} for text in texts]))
    inputs_before = computed(job_cluster)
    second = jobs.done(jobs.submit(MODEL, source, cache=True, shard_rows=1000)["id"])
    assert second["counts"]["done"] - second["counts"]["reused"] == 50
    assert computed(job_cluster) - inputs_before in (50, 51), "and an input that tells the fingerprint"
    direct = jobs.ask("POST", f"/v1/encode/{MODEL}", json={"items": texts[:300]})["items"]
    for row, slot in zip(jobs.rows(second["id"])[:300], direct, strict=True):
        assert np.allclose(row["dense"], slot["dense"]["values"], atol=1e-6)
    with serving(job_cluster, jobs, "toy/cached") as before:
        for reused in (990, 5000):
            cached_run = jobs.done(jobs.submit("toy/cached", source, cache=True, shard_rows=5000)["id"])
            assert cached_run["counts"]["reused"] == reused, "rows of another model are not taken"
        config(job_cluster, "PUT", "toy/cached", entry("toy/cached", max_tokens=400))
        until(lambda: fingerprint(jobs, "toy/cached") not in ("", before), 60, "the model is another one")
        cached_run = jobs.done(jobs.submit("toy/cached", source, cache=True, shard_rows=5000)["id"])
        assert cached_run["counts"]["reused"] == 990
    (job_folder / "rows.parquet").write_bytes(parquet_file(rows_of(40_000, word="more than is kept")))
    cache = job_cluster.folder / "payloads" / "cache"
    job, sizes = jobs.submit(MODEL, source, cache=True, shard_rows=1000)["id"], [0]
    while jobs.show(job)["state"] not in ENDED:
        sizes.append(kept_bytes(cache))
    assert jobs.done(job)["counts"]["done"] == 40_000
    assert max(sizes) < 1.5 * CACHE_BYTES, "older answers are removed while it runs"
    assert CACHE_BYTES / 2 < kept_bytes(cache) <= CACHE_BYTES


def kept_bytes(folder: Path) -> int:
    """Return the bytes of the files below a folder, from which some may be removed meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


async def test_a_thousand_jobs_are_listed_at_once(job_cluster: Stack, jobs: JobClient) -> None:
    broker = await connect(job_cluster.broker_urls, name="test")
    try:
        many = UseBound(RecordUse(10_000, 1 << 30), ("", ""))
        usage = OwnerUsage(many, many, kinds=("", ""), remedy="", reason="")
        ledger = JobLedger(JobsBucket(broker, 1), broker, 1, usage)
        request = JobRequest(model=MODEL, input=JobInput(file="file-none", text="{text}"), name="listed")
        for number in range(1000):
            name = f"job-{number:032}"
            await ledger.create(JobRecord(name, "owner", "owner", 1.0 + number, "completed", request=request, rows=1))
    finally:
        await broker.close()

    def listed() -> list[Job]:
        return list(jobs.ask("GET", "/v1/jobs", params={"limit": 1000, "state": "completed"})["data"])

    until(lambda: sum(job["name"] == "listed" for job in listed()) > 900, 60, "the gateway knows them")
    times = []
    for _ in range(5):
        before_s = job_cluster.gateways[0].cpu_s()
        listing = listed()
        times.append(job_cluster.gateways[0].cpu_s() - before_s)
        assert len(listing) == 1000
    print("1,000 jobs are listed in", [round(1000 * seconds) for seconds in times], "ms of a processor")
    assert sorted(times)[2] < 0.3  # 0.1 on an idle machine, and the margin
