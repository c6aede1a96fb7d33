"""Faults while a job runs: no row is lost, every fault is named, and every row that can be answered is. The adapter is
the one with fixed costs, the rest is real.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from cluster import until
from job_client import JobClient, jsonl
from job_stack import (
    GROUP,
    MODEL,
    SLOW,
    TEXT,
    computed,
    ids,
    rows_of,
    running,
    shown,
)
from stack import Stack

from sie_cli.main import main

pytestmark = GROUP


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    """Mount a file system in memory."""
    place.mkdir()
    if sys.platform != "linux" or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place]).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.fixture
def small(job_folder: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with mounted(job_folder / "small", "size=1m"):
        yield job_folder / "small"


def fill(place: Path) -> Path:
    """Write a file that takes all room except for one page, which the mark of the folder's job needs."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            file.truncate(filler.stat().st_size - resource.getpagesize())
            return filler
    raise AssertionError("the disk has no end")


def test_a_job_waits_for_a_disk_that_is_full_and_goes_on_by_itself(
    job_cluster: Stack, jobs: JobClient, small: Path
) -> None:
    """While no part fits, the job says so. When there is room, the job completes, and nothing is computed twice. A job
    whose disk stays full can be paused, resumed and cancelled.
    """
    filler = fill(small)
    file = jobs.upload("rows.jsonl", jsonl(rows_of(300)))
    source, output = {"file": file, **TEXT}, {"url": f"file://{small}/", "format": "jsonl"}
    before = computed(job_cluster)
    job = jobs.submit(MODEL, source, output=output, shard_rows=100)
    waiting = jobs.trouble(job["id"], "STORE_UNAVAILABLE")
    assert "the store has no space for the object" in shown(job_cluster, job["id"])
    assert (waiting["state"], waiting["counts"]["shards_done"]) == ("running", 0)
    filler.unlink()
    done = jobs.done(job["id"])
    assert (done["counts"]["done"], done["counts"]["failed"], done.get("trouble")) == (300, 0, None)
    assert computed(job_cluster) - before == 300, "nothing is computed again"
    assert [row["id"] for row in jobs.rows(job["id"])] == ids("rows.jsonl", 300)
    assert sorted(path.name for path in small.iterdir()) == [
        ".sie-job",
        "manifest.json",
        *(f"part-0000{n}.jsonl" for n in range(3)),
    ]
    for path in small.iterdir():
        path.unlink()
    fill(small)
    job = jobs.submit(MODEL, source, output=output, shard_rows=100)
    jobs.trouble(job["id"], "STORE_UNAVAILABLE")
    jobs.steer(job["id"], "pause")
    jobs.reaches(job["id"], "paused")
    jobs.steer(job["id"], "resume")
    jobs.trouble(job["id"], "STORE_UNAVAILABLE")
    jobs.steer(job["id"], "cancel")
    assert jobs.reaches(job["id"], "cancelled")["counts"]["failed"] == 0
    assert sorted(path.name for path in small.iterdir()) == [".sie-job", "filler"]


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
