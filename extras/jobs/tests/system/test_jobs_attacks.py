"""Hostile jobs: as many and as large records as are allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from job_client import JobClient, jsonl
from stack import Plan, Stack

MODEL = "toy/one"
MIB = 1 << 20
WIDE = "\U0001f600"  # four bytes
METADATA = {f"{number:02}{WIDE * 62}": WIDE * 512 for number in range(16)}


def largest(file: str) -> dict[str, Any]:
    """Return a job whose record has nearly the largest size that is allowed."""
    return {"model": MODEL, "input": {"file": file, "text": "{text}" + "x" * 2000}, "metadata": METADATA}


def test_gateways_start_again_however_many_jobs_keys_have_sent(tmp_path: Path) -> None:
    """A key sends jobs with the largest records, until it gets 429. All gateways are killed at once, and each is ready
    after less than 10 s of processor time. The jobs are still there.
    """
    token = "token-of-a-test"
    environ = {"SIE_PAYLOAD_STORE_URL": str(tmp_path / "payloads"), "SIE_AUTH_MODE": "static", "SIE_AUTH_TOKENS": token}
    with Stack(tmp_path / "stack", Plan(gateways=2, workers=(), environ=environ)) as stack:
        count = 0
        with JobClient(stack.urls[0], token) as client:
            body = largest(client.upload("a.jsonl", jsonl([{"text": "a"}])))
            while (answer := client.http.post("/v1/jobs", json=body)).status_code == 201:
                count += 1
        assert answer.status_code == 429, answer.text
        record = 36 << 10
        assert 0.9 * (4 * MIB) < count * record <= 4 * MIB
        for part in stack.gateways:
            part.kill()
        for part in stack.gateways:
            part.start()
        for part in stack.gateways:
            part.wait_ready()
        assert max(part.cpu_s() for part in stack.gateways) < 10
        for url in stack.urls:
            with JobClient(url, token) as client:
                assert len(client.ask("GET", "/v1/jobs", params={"limit": 1000})["data"]) == count
