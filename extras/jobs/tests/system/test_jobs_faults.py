"""Commands of the owner of a job, and keys that are revoked or have a quota. The adapter is the one with fixed costs,
the rest is real.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from click.testing import CliRunner
from cluster import until
from job_client import JobClient, jsonl
from job_stack import GROUP, MODEL, SLOW, TEXT, ids, rows_of, running, shown
from stack import Stack

from sie_cli.main import main

pytestmark = GROUP


def key(job_cluster: Stack, name: str, *options: str) -> str:
    """Create a key, and return its token when the gateway knows it."""
    token = sie(job_cluster, "create", name, *options).strip()
    with JobClient(job_cluster.urls[0], token) as jobs:
        until(lambda: jobs.http.get("/v1/jobs").status_code == 200, 60, "the key is known")
    return token


def sie(job_cluster: Stack, *args: str) -> str:
    environ = {"SIE_NATS_URL": None, "SIE_AUTH_MODE": None}
    result = CliRunner().invoke(main, ["keys", *args, "--nats-url", job_cluster.broker_urls], env=environ)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_job_whose_key_is_revoked_pauses_and_an_administrator_resumes_it(job_cluster: Stack, jobs: JobClient) -> None:
    token = key(job_cluster, "works", "--scopes", "infer")
    with JobClient(job_cluster.urls[0], token) as own:
        file = own.upload("rows.jsonl", jsonl(rows_of(400)))
        job = own.submit(MODEL, {"file": file, **TEXT}, **SLOW)
        running(own, job)
    sie(job_cluster, "revoke", "works")
    paused = jobs.reaches(job["id"], "paused")
    assert paused["error"]["code"] == "PERMISSION_DENIED"
    assert "the key of this job is not valid any more" in shown(job_cluster, job["id"])
    assert token not in job_cluster.log(400)
    assert 0 < paused["counts"]["done"] < 400
    assert jobs.steer(job["id"], "resume")["state"] in ("queued", "running")
    assert jobs.done(job["id"])["counts"]["done"] == 400
    assert [row["id"] for row in jobs.rows(job["id"])] == ids("rows.jsonl", 400)


def test_a_row_that_is_larger_than_the_quota_of_its_key_does_not_stop_the_others(job_cluster: Stack) -> None:
    token = key(job_cluster, "small", "--scopes", "infer", "--tokens-per-minute", "300")
    with JobClient(job_cluster.urls[0], token) as own:
        texts = ["a", "x" * 4000, "b"]
        file = own.upload("rows.jsonl", jsonl([{"text": text} for text in texts]))
        done = own.done(own.submit(MODEL, {"file": file, **TEXT})["id"])
        assert done["errors"] == {"PAYLOAD_TOO_LARGE": 1}
        errors = [row["error"] and row["error"]["message"] for row in own.rows(done["id"])]
        assert (errors[0], errors[2]) == (None, None)
        assert "its key may use 300 per minute" in errors[1]


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
