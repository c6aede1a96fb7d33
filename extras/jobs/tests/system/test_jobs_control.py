"""Commands of the owner of a job: pause, resume, cancel, delete, windows, throughput, deadlines, the cache, the
list.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from cluster import until
from job_client import JobClient, jsonl
from job_stack import (
    GROUP,
    MODEL,
    SLOW,
    TEXT,
    rows_of,
    running,
    shown,
)
from stack import Stack

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
