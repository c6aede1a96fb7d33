"""Error codes that jobs provoke (`of_extras`)."""

from __future__ import annotations

from typing import Any

import httpx

Heard = tuple[str, httpx.Response]


async def _gateway_with_job(place: Any) -> tuple[Any, dict[str, Any]]:
    """Start a gateway that stores jobs and runs none. Return it, and the body of a job."""
    gateway = await place.cluster.gateway(
        SIE_PAYLOAD_STORE_URL=str(place.cluster.folder / "payloads"), SIE_JOBS_AT_ONCE="0"
    )
    form = {"files": {"file": ("a.jsonl", b'{"t": "x"}\n')}, "data": {"purpose": "jobs"}}
    file = (await gateway.client.post("/v1/files", **form)).json()["id"]
    return gateway, {"model": "toy/one", "input": {"file": file, "text": "{t}"}}


async def job_in_progress(place: Any) -> list[Heard]:
    gateway, body = await _gateway_with_job(place)
    job = (await gateway.client.post("/v1/jobs", json=body)).json()["id"]
    return [("native", await gateway.client.delete(f"/v1/jobs/{job}"))]


async def another_job_with_the_key(place: Any) -> list[Heard]:
    (gateway, body), headers = await _gateway_with_job(place), {"idempotency-key": "k"}
    assert (await gateway.client.post("/v1/jobs", json=body, headers=headers)).status_code == 201
    assert (await gateway.client.post("/v1/jobs", json=body, headers=headers)).status_code == 201
    return [("native", await gateway.client.post("/v1/jobs", json={**body, "name": "x"}, headers=headers))]


CASES = (("CONTENT_CONFLICT", 409, job_in_progress), ("IDEMPOTENCY_MISMATCH", 422, another_job_with_the_key))
