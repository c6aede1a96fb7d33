"""A client of jobs over plain HTTP, and the rows of their output, of which each part is checked by its digest."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pyarrow as pa
from cluster import until
from pyarrow import parquet

ENDED = ("completed", "failed", "cancelled", "expired")
STOPPED = (*ENDED, "paused")
Job = dict[str, Any]
Rows = list[dict[str, Any]]


class JobClient:
    """A client of the jobs of one gateway."""

    def __init__(self, url: str, token: str = "") -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)

    def __enter__(self) -> JobClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ask(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        answer = self.http.request(method, path, **options)
        assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text[:2000]}"
        return answer.json()

    def submit(self, model: str, source: Mapping[str, Any], *, key: str = "", status: int = 201, **options: Any) -> Job:
        headers = {"idempotency-key": key} if key else {}
        body = {"model": model, "input": source, **options}
        return cast(Job, self.ask("POST", "/v1/jobs", status, json=body, headers=headers))

    def upload(self, name: str, data: bytes) -> str:
        reply = self.ask("POST", "/v1/files", files={"file": (name, data)}, data={"purpose": "batch"})
        return str(reply["id"])

    def show(self, job: str) -> Job:
        return cast(Job, self.ask("GET", f"/v1/jobs/{job}"))

    def steer(self, job: str, action: str, status: int = 200) -> Job:
        return cast(Job, self.ask("POST", f"/v1/jobs/{job}/{action}", status))

    def reaches(self, job: str, *states: str, timeout_s: float = 120.0) -> Job:
        """Return the job once it is in one of the states. Fail at once if it ends in another one."""

        def looked() -> Job | None:
            record = self.show(job)
            if record["state"] in states:
                return record
            assert record["state"] not in ENDED, record
            return None

        return cast(Job, until(looked, timeout_s, f"{job} to be {states}", lambda: self.show(job)))

    def done(self, job: str, timeout_s: float = 120.0) -> Job:
        """Return the job once it has completed."""
        record = self.reaches(job, *STOPPED, timeout_s=timeout_s)
        assert record["state"] == "completed", record
        return record

    def manifest(self, job: str) -> dict[str, Any]:
        return cast(dict[str, Any], self.ask("GET", f"/v1/jobs/{job}/manifest", params={"limit": 10_000}))

    def parts(self, job: str) -> list[bytes]:
        """Return the parts of a job's output, and check their digests against the manifest."""
        manifest = self.manifest(job)
        contents = []
        for part in manifest["parts"]:
            if manifest["url"]:
                data = (Path(manifest["url"].removeprefix("file://")) / part["name"]).read_bytes()
            else:
                answer = self.http.get(f"/v1/jobs/{job}/part", params={"name": part["name"]})
                assert answer.status_code == 200, answer.text
                data = answer.content
            assert (len(data), hashlib.sha256(data).hexdigest()) == (part["bytes"], part["sha256"]), part
            contents.append(data)
        return contents

    def rows(self, job: str) -> Rows:
        """Return the rows of the whole output of any format, in the order of its parts."""
        kind = self.manifest(job)["format"]
        return [row for part in self.parts(job) for row in rows_of(part, kind)]


def rows_of(part: bytes, kind: str) -> Rows:
    """Return the rows of a part. Vectors of a NumPy archive are added to their rows."""
    if kind == "parquet":
        return cast(Rows, parquet.read_table(pa.BufferReader(part)).to_pylist())
    if kind == "jsonl":
        return [json.loads(line) for line in part.splitlines()]
    with np.load(io.BytesIO(part)) as arrays:
        rows = [json.loads(line) for line in bytes(arrays["rows.jsonl"]).splitlines()]
        if "dense" in arrays:
            for row, vector, failed in zip(rows, arrays["dense"], arrays["failed"], strict=True):
                if not failed:
                    row["dense"] = vector
    return rows


def jsonl(rows: Rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet_file(rows: Rows, group: int = 1000) -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(rows), sink, row_group_size=group, write_page_checksum=True)
    return sink.getvalue().to_pybytes()
