"""The public SDKs of SIE as their users install them, unmodified, in a process of their own (`make test` installs
them).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import shared
from cluster import Cluster
from inprocess import InProcess
from selection import long_but

FOLDER = Path(__file__).parents[2] / ".venv-sdks"
VERSIONS = ["0.3.1", "0.6.4", "0.6.5", "0.8.0", "0.10.1"]
ENCODE = """
import sys
from sie_sdk import SIEClient
found = SIEClient(sys.argv[1]).encode("toy/one", {"text": "x"}, provision_timeout_s=80)
print(len(found["dense"]))
"""


@shared.OPEN
def test_every_public_method_is_answered(open_cluster: Cluster) -> None:
    """A function that this server does not have is refused with a message that says so."""
    path = os.pathsep.join(map(str, (FOLDER / VERSIONS[-1], FOLDER / "needs")))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "clients/sdk_methods.py"), open_cluster.url],
        env={**os.environ, "PYTHONPATH": path, "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr, done.stdout.count("ok: ")) == (0, "", 84), done.stdout


@pytest.mark.parametrize("version", long_but(VERSIONS, ["0.6.4", "0.10.1"]))
async def test_an_sdk_waits_while_the_first_worker_starts(tmp_path: Path, version: str) -> None:
    """The gateway speaks the contract of each version, so that the SDK gives no warning."""
    path = os.pathsep.join(map(str, (FOLDER / version, FOLDER / "needs")))
    environ = {**os.environ, "PYTHONPATH": path, "NO_PROXY": "*"}
    async with InProcess(tmp_path) as cluster:
        gateway = await cluster.gateway()
        sdk = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ENCODE, gateway.url, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        task = asyncio.create_task(sdk.communicate())
        status = "202" if version in ("0.3.1", "0.6.4") else "503"
        async with asyncio.timeout(60):
            while not await gateway.metric("sie_gateway_requests_total", endpoint="encode", status=status):
                assert not task.done(), await task
        refused = await gateway.encode("x", **{"X-SIE-SDK-Version": version})
        assert (str(refused.status_code), int(refused.headers["retry-after"]) > 0) == (status, True)
        await cluster.sidecar(await cluster.adapter())
        out, err = await asyncio.wait_for(task, 100)
    assert (out.decode().strip(), err.decode(), sdk.returncode) == ("8", "", 0)
