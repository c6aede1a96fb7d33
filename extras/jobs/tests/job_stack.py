"""The cluster of the tests of jobs, with the fixed-cost adapter, and requests to it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from cluster import scraped, until
from job_client import Job, JobClient, Rows
from stack import Device, Plan, Stack

from sie_cli.main import main

GROUP = pytest.mark.xdist_group("jobs-stack")  # tests of this cluster
ADMIN = secrets.token_urlsafe(16)
MODEL = "toy/one"
TEXT = {"text": "{text}"}
SLOW: Any = {"tokens_per_s": 1000.0, "shard_rows": 20}  # with rows of ten tokens a shard takes a fifth of a second
CACHE_BYTES = 2_000_000


def job_stack(folder: Path) -> Stack:
    """Return a cluster with tokens, a folder `data` for files, and a small cache."""
    environ = {
        "SIE_AUTH_MODE": "token",
        "SIE_ADMIN_TOKEN": ADMIN,
        "SIE_HF_FALLBACK": "false",
        "SIE_PAYLOAD_STORE_URL": str(folder / "payloads"),
        "SIE_JOBS_URLS": f"file://{folder}/data",
        "SIE_JOBS_CACHE_BYTES": str(CACHE_BYTES),
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


def config(stack: Stack, method: str, model: str = "", body: Any = None) -> None:
    """Change the catalogue at the config service."""
    headers = {"Authorization": f"Bearer {ADMIN}"}
    path = f"/v1/configs/models{model and '/' + model}"
    answer = httpx.request(method, stack.config_url + path, json=body, headers=headers, trust_env=False, timeout=30)
    assert answer.status_code in (200, 201, 204), answer.text


def entry(model: str, **more: Any) -> dict[str, Any]:
    return {
        "id": model,
        "bundle": "default",
        "weights": {"path": "/toy"},
        "family": "toy",
        "outputs": {"dense": 8},
        "max_tokens": 512,
        **more,
    }


def fingerprint(jobs: JobClient, model: str) -> str:
    """Return the present fingerprint of a model; empty if it has none."""
    answer = jobs.http.post(f"/v1/encode/{model}", json={"items": ["a"]})
    return str(answer.json()["fingerprint"]) if answer.status_code == 200 else ""


@contextmanager
def serving(stack: Stack, jobs: JobClient, model: str, **more: Any) -> Iterator[str]:
    """Serve a model for this test only. Yield its fingerprint."""
    config(stack, "POST", body=entry(model, **more))
    try:
        yield str(until(lambda: fingerprint(jobs, model), 60, f"{model} to answer"))
    finally:
        config(stack, "DELETE", model)


def running(jobs: JobClient, job: Job, shards: int = 2) -> Job:
    """Return the job once so many of its shards are done, while it still runs."""

    def looked() -> Job | None:
        snapshot = jobs.show(job["id"])
        assert snapshot["state"] in ("queued", "planning", "running"), snapshot
        return snapshot if snapshot["counts"]["shards_done"] >= shards else None

    record = until(looked, 60, f"{shards} shards of {job['id']}")
    assert isinstance(record, dict)
    return record


def computed(stack: Stack) -> float:
    """Return the number of inputs that the device has taken."""
    return scraped(f"{stack.workers[0].url}/metrics", "sie_batch_size_sum")
