"""`sie jobs` at an address where nothing listens, or another server answers, and bodies that come slowly."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import pytest
from inprocess import InProcess
from unit.test_environment import keys_reach
from unit.test_hostile_replies import JSON, _Server, escaped, invoked, server  # noqa: F401  a fixture
from unit.test_settings_effects_gateway import must_come_at_the_least_rate
from unit.test_unreachable import ends_at_once, url  # noqa: F401  a fixture

from sie_bulk_jobs.gateway.engine import JobEngine
from sie_bulk_jobs.gateway.ledger import JobLedger
from sie_bulk_jobs.gateway.results import READS_AT_ONCE, READS_OF_A_KEY, JobResults
from sie_bulk_jobs.records import JobRecord, ShardRecord
from sie_contracts.api.jobs import JobInfo, JobInput, JobPage, JobRequest
from sie_contracts.errors import RateLimited, ResourceExhausted

COMMANDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "list": (["jobs", "list"], {**JobPage.EXAMPLE, "has_more": False}),
    "show": (["jobs", "show", "j"], JobInfo.EXAMPLE),
    "submit": (["jobs", "submit", "m", "s3://a/b", "--text", "{c}"], JobInfo.EXAMPLE),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_names_in_a_reply_do_not_control_the_terminal(name: str, server: _Server) -> None:  # noqa: F811
    arguments, body = COMMANDS[name]
    server.reply = (200, JSON, json.dumps(escaped(body)).encode())
    assert invoked(server, arguments).exit_code == 0


def test_a_refused_connection_is_one_line_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    ends_at_once(COMMANDS["list"][0], url, monkeypatch)


@pytest.mark.parametrize(
    ("path", "kind", "piece"),
    [("/v1/files", "multipart/form-data; boundary=x", b"\r\n"), ("/v1/jobs", "application/json", b"  ")],
)
@pytest.mark.parametrize(("rate", "status"), [("4096", 504), ("10", 0)])
async def test_a_body_must_come_at_the_least_rate(
    cluster: InProcess,
    path: str,
    kind: str,
    piece: bytes,
    rate: str,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = await cluster.gateway(SIE_MIN_BODY_RATE=rate, SIE_PAYLOAD_STORE_URL=str(tmp_path / "store"))
    await must_come_at_the_least_rate(gateway, path, kind, piece, status, monkeypatch)


# where `sie jobs` looks for a cluster, and what `sie serve` hands on to the gateway for the jobs


@pytest.mark.parametrize(("urls", "readers"), [(("/a/folder", "gs://rows/x"), {"gateway"}), (("/a/folder",), set())])
def test_keys_of_a_cloud_reach_the_gateway_that_opens_the_bucket(urls: tuple[str, ...], readers: set[str]) -> None:
    keys_reach(readers, jobs_urls=urls)


# results of jobs: how many are read at once


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
