"""Rows of this extra in the tables of routes, and the objects of a tenant (`of_extras`)."""

from __future__ import annotations

from typing import Any

DOCUMENTED = """
    infer  GET /v1/files /v1/files/mine /v1/files/mine/content
    infer  POST /v1/files
    infer  DELETE /v1/files/mine
    infer  GET /v1/jobs /v1/jobs/{job} /v1/jobs/{job}/manifest /v1/jobs/{job}/part /v1/jobs/{job}/rows
    infer  POST /v1/jobs /v1/jobs/{job}/pause /v1/jobs/{job}/resume /v1/jobs/{job}/cancel /v1/jobs/{job}/retry
    infer  DELETE /v1/jobs/{job}
    infer  GET /v1/batches /v1/batches/{batch}
    infer  POST /v1/batches /v1/batches/{batch}/cancel
    infer  DELETE /v1/batches/{batch}
"""
OWNED = """
    GET    /v1/files/{file} /v1/files/{file}/content
    DELETE /v1/files/{file}
    GET    /v1/jobs/{job} /v1/jobs/{job}/manifest /v1/jobs/{job}/part /v1/jobs/{job}/rows
    POST   /v1/jobs/{job}/pause /v1/jobs/{job}/resume /v1/jobs/{job}/cancel /v1/jobs/{job}/retry
    DELETE /v1/jobs/{job}
    GET    /v1/batches/{batch}
    DELETE /v1/batches/{batch}
    POST   /v1/batches/{batch}/cancel
"""
SHOWS = """
    GET    /v1/files /v1/jobs /v1/batches
"""
SILENT = """
    POST   /v1/files /v1/jobs /v1/batches
"""
UNFINISHED = """
    GET    /v1/jobs/{job}/manifest /v1/jobs/{job}/part
"""
SETTINGS = {"SIE_JOBS_AT_ONCE": "0"}


async def make(tenant: Any) -> None:
    """Make a file, a job and a batch, which no gateway runs."""
    file, name = "file-of-tenant-a-9f3c.jsonl", "job-of-tenant-a-9f3c"
    line = b'{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {"model": "toy/one", "input": "x"}}'
    ids = {}
    for purpose in ("jobs", "batch"):
        form = {"files": {"file": (file, line)}, "data": {"purpose": purpose}}
        ids[purpose] = (await tenant.made("POST", "/v1/files", **form))["id"]
    job = {"model": "toy/one", "name": name, "input": {"file": ids["jobs"], "text": "{custom_id}"}}
    batch = {"input_file_id": ids["batch"], "endpoint": "/v1/embeddings", "completion_window": "24h"}
    tenant.ids["{file}"] = ids["jobs"]
    tenant.ids["{job}"] = (await tenant.made("POST", "/v1/jobs", json=job))["id"]
    tenant.ids["{batch}"] = (await tenant.made("POST", "/v1/batches", json=batch))["id"]
    tenant.bodies |= {"/v1/jobs": {"json": job}, "/v1/batches": {"json": batch}}
    tenant.names += [file, name]
