"""The cluster of the tests of jobs, with the fixed-cost adapter, and requests to it."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cluster import until
from job_client import Job, JobClient, Rows
from stack import Device, Plan, Stack

from sie_cli.main import main

GROUP = pytest.mark.xdist_group("jobs-stack")  # tests of this cluster
ADMIN = secrets.token_urlsafe(16)
MODEL = "toy/one"
TEXT = {"text": "{text}"}
SLOW: Any = {"tokens_per_s": 1000.0, "shard_rows": 20}  # with rows of ten tokens a shard takes a fifth of a second


def job_stack(folder: Path) -> Stack:
    """Return a cluster with tokens, and a folder `data` for files."""
    environ = {
        "SIE_AUTH_MODE": "token",
        "SIE_ADMIN_TOKEN": ADMIN,
        "SIE_HF_FALLBACK": "false",
        "SIE_PAYLOAD_STORE_URL": str(folder / "payloads"),
        "SIE_JOBS_URLS": f"file://{folder}/data",
        "SIE_JOBS_AT_ONCE": "8",
    }
    return Stack(folder, Plan(workers=(Device(batch_ms=1.0),), environ=environ))


def rows_of(count: int, first: int = 0, word: str = "row") -> Rows:
    return [{"text": f"{word} {number:06}"} for number in range(first, first + count)]


def ids(name: str, count: int) -> list[str]:
    return [f"{name}#{number}" for number in range(count)]


def shown(stack: Stack, job: str) -> str:
    """Return the output of `sie jobs show`."""
    result = CliRunner().invoke(main, ["jobs", "show", job, "--url", stack.urls[0]], env={"SIE_AUTH_TOKEN": ADMIN})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def running(jobs: JobClient, job: Job, shards: int = 2) -> Job:
    """Return the job once so many of its shards are done, while it still runs."""

    def looked() -> Job | None:
        snapshot = jobs.show(job["id"])
        assert snapshot["state"] in ("queued", "planning", "running"), snapshot
        return snapshot if snapshot["counts"]["shards_done"] >= shards else None

    record = until(looked, 60, f"{shards} shards of {job['id']}")
    assert isinstance(record, dict)
    return record
