"""A job of the newest public SDK of SIE, as its users install it, in a process of its own (`make test` installs it)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from inprocess import InProcess
from system.test_public_sdks import FOLDER

JOB = """
import json, sys
from sie_sdk import SIEClient
from sie_sdk.client import RequestError
client = SIEClient(sys.argv[1])
job = {"model": "toy/one", "field_map": {"input_field": "t", "id_field": "id"}, "execution": "run"}
with open(sys.argv[2], "rb") as file:
    source = "upload://" + client.files.upload(file, purpose="jobs")["id"]
made = client.jobs.submit(source=source, idempotency_key="a", **job)
ended = client.jobs.wait(made["id"], timeout_s=60, poll_s=0.05)
try:
    client.jobs.submit(source=source, idempotency_key="b", output_field="v", **job)
except RequestError as error:
    refused = str(error)
found = client.jobs.results(made["id"])
listed = [each["state"] for each in client.jobs.list()]
counts = [ended["completed_items"], ended["total_items"]]
print(json.dumps([made["object"], ended["state"], *counts, listed, refused, found["items"]]))
"""


async def test_the_newest_sdk_submits_a_job_and_waits_for_its_end(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"id": f"r{number}", "t": f"text {number}"}) + "\n" for number in range(5)))
    path = os.pathsep.join(map(str, (FOLDER / "0.10.1", FOLDER / "needs")))
    environ = {**os.environ, "PYTHONPATH": path, "NO_PROXY": "*"}
    async with InProcess(tmp_path) as cluster:
        gateway = await cluster.gateway(SIE_PAYLOAD_STORE_URL=str(tmp_path / "payloads"))
        await cluster.sidecar(await cluster.adapter())
        sdk = await asyncio.create_subprocess_exec(
            sys.executable, "-c", JOB, gateway.url, str(rows), env=environ, stdout=-1, stderr=-1
        )
        out, err = await asyncio.wait_for(sdk.communicate(), 100)
    assert sdk.returncode == 0, err.decode()
    kind, state, done, count, listed, refused, items = json.loads(out)
    assert (kind, state, done, count, listed) == ("job", "succeeded", 5, 5, ["succeeded"])
    assert "output_field: leave it out" in refused
    assert items == []
    assert "results are incomplete: retrieved 0 of 5 items" in err.decode()
