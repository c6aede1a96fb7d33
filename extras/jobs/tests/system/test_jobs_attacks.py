"""Hostile jobs: as many and as large records as are allowed, rows that are small in a file and large in memory, and a
row that ends gateways. Other tests end the gateway of sound jobs, and copy a data directory while a job runs.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import until
from job_client import JobClient, jsonl
from stack import Device, Plan, Stack

MODEL = "toy/one"
MIB = 1 << 20
WIDE = "\U0001f600"  # four bytes
METADATA = {f"{number:02}{WIDE * 62}": WIDE * 512 for number in range(16)}


def largest(file: str) -> dict[str, Any]:
    """Return a job whose record has nearly the largest size that is allowed."""
    return {"model": MODEL, "input": {"file": file, "text": "{text}" + "x" * 2000}, "metadata": METADATA}


@pytest.mark.parametrize(
    ("keys", "jobs"),
    [pytest.param(1, 300, id="one key"), pytest.param(20, 120, id="twenty keys", marks=pytest.mark.long)],
)
@pytest.mark.timeout(600)
def test_gateways_start_again_however_many_jobs_keys_have_sent(tmp_path: Path, keys: int, jobs: int) -> None:
    """Keys send jobs with the largest records, until they get 429. All gateways are killed at once, and each is ready
    after less than 10 s of processor time. The jobs are still there.
    """
    tokens = [f"token-{number}-of-a-test" for number in range(keys)]
    environ = {
        "SIE_PAYLOAD_STORE_URL": str(tmp_path / "payloads"),
        "SIE_AUTH_MODE": "static",
        "SIE_AUTH_TOKENS": ",".join(tokens),
    }
    with Stack(tmp_path / "stack", Plan(gateways=2, workers=(), environ=environ)) as stack:
        job_counts: dict[str, int] = {}
        for token in tokens:
            with JobClient(stack.urls[0], token) as client:
                body = largest(client.upload("a.jsonl", jsonl([{"text": "a"}])))
                job_counts[token] = 0
                for _ in range(jobs):
                    answer = client.http.post("/v1/jobs", json=body)
                    if answer.status_code == 201:
                        job_counts[token] += 1
                        continue
                    assert answer.status_code == 429, answer.text
                    assert "delete some that have ended" in answer.json()["error"]["message"]
                    break
        print("taken", list(job_counts.values()))
        record = 36 << 10
        assert all(count <= (4 * MIB) // record for count in job_counts.values())
        assert sum(job_counts.values()) * record > (min(keys * 4, 64) * MIB) * 0.9, "they came to the bound"
        for part in stack.gateways:
            part.kill()
        began_s = time.monotonic()
        for part in stack.gateways:
            part.start()
        for part in stack.gateways:
            part.wait_ready()
        took_s = time.monotonic() - began_s
        print(f"ready in {took_s:.1f} s, {[round(part.rss_bytes() / MIB) for part in stack.gateways]} MiB")
        assert max(part.cpu_s() for part in stack.gateways) < 10
        for url in stack.urls:
            with JobClient(url, tokens[0]) as client:
                assert len(client.ask("GET", "/v1/jobs", params={"limit": 1000})["data"]) == job_counts[tokens[0]]


def test_a_job_goes_on_from_a_copy_of_the_data_directory(tmp_path: Path) -> None:
    """One job reads an uploaded file, another one a folder. In the middle all is copied, as by a snapshot of the disk,
    and killed. From the copy, whose files have other inodes, both complete, and each row is there once.
    """
    folder, copy = tmp_path / "stack", tmp_path / "copy"
    count = 600
    rows = [{"key": f"k{number}", "text": f"short {number}"} for number in range(count)]
    environ = {"SIE_PAYLOAD_STORE_URL": str(folder / "payloads"), "SIE_JOBS_URLS": f"file://{folder}/data"}
    slow: dict[str, Any] = {"shard_rows": 50, "tokens_per_s": 1250.0}
    with Stack(folder, Plan(workers=(Device(),), environ=environ)) as stack:
        (folder / "data").mkdir()
        (folder / "data" / "rows.jsonl").write_bytes(jsonl(rows))
        with JobClient(stack.urls[0]) as client:
            source = {"text": "{text}", "id": "key"}
            file = client.upload("rows.jsonl", jsonl(rows))
            jobs = [client.submit(MODEL, {"file": file, **source}, **slow)["id"]]
            jobs.append(client.submit(MODEL, {"url": f"file://{folder}/data/rows.jsonl", **source}, **slow)["id"])
            for job in jobs:
                until(lambda: client.show(job)["counts"]["done"] >= 100, 60, "it is in its middle")  # noqa: B023
                assert client.show(job)["state"] == "running"
        for part in stack.parts:
            part.pause()
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.sock"))
        for part in stack.parts:
            part.kill()
        shutil.rmtree(folder)
        copy.rename(folder)
        for part in stack.parts:
            part.start()
        for part in stack.parts:
            part.wait_ready()
        with JobClient(stack.urls[0]) as client:
            for job in jobs:
                outcome = client.done(job, 120)
                assert (outcome["counts"]["done"], outcome["counts"]["failed"], outcome["broken"]) == (count, 0, [])
                assert [row["id"] for row in client.rows(job)] == [row["key"] for row in rows]
