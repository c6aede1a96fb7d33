"""Tests that need root and Debian packages: another user, a full disk, no network, a foreign load generator."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import oracle
import pytest
from cgroups import MemoryGroup
from cluster import MODEL, SIE, free_ports, running, until
from diagnosis import Examined
from load import TEXTS

pytestmark = pytest.mark.debian


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    with mounted(tmp_path / "disk", "24m") as folder:
        yield folder


def test_another_user_cannot_reach_the_socket(tmp_path: Path) -> None:
    """The folder keeps the other user out; the mode of the socket would do so too."""
    code = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    with running(tmp_path / "data", "--standalone", "--no-spare") as cluster:
        path = cluster.data_dir / "run" / "worker-0.sock"
        assert path.stat().st_mode & 0o777 == 0o600
        assert cluster.data_dir.stat().st_mode & 0o777 == 0o700
        own = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=10, check=False
        )
        assert own.returncode == 0
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
        foreign = subprocess.run(
            ["setpriv", "--reuid", "65534", "--clear-groups", python, "-c", code, str(path)],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        assert foreign.returncode != 0
        assert "Permission" in foreign.stderr or "denied" in foreign.stderr


@pytest.mark.timeout(180)
async def test_a_full_queue_refuses_the_newest_and_loses_nothing(tmp_path: Path) -> None:
    """When the stream's bytes are used up, the newest requests get QUEUE_FULL. All that were accepted are answered, and
    so is a later request.
    """
    text = " ".join(TEXTS) * 30
    with running(tmp_path, "--preload", MODEL, "--no-spare", "--queue-max-bytes", str(8 << 20)) as cluster:
        assert cluster.encode(["warm"]).status_code == 200
        (sidecar,) = cluster.pids("sidecar")
        cluster.signal(sidecar, signal.SIGSTOP)
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200)) as client:

            async def big(number: int) -> httpx.Response:
                content = json.dumps({"items": [f"{number} {text}"]})
                return await client.post(
                    f"{cluster.url}/v1/encode/{MODEL}", content=content, headers={"x-sie-timeout-ms": "40000"}
                )

            count = (12 << 20) // len(text)
            done, waiting = await asyncio.wait(
                [asyncio.create_task(big(number)) for number in range(count)], timeout=10
            )
            refused = [task.result() for task in done]
            assert {(answer.status_code, answer.json()["code"]) for answer in refused} == {(503, "QUEUE_FULL")}
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            assert len(waiting) > count // 3
            cluster.signal(sidecar, signal.SIGCONT)
            answers = await asyncio.gather(*waiting)
        assert {answer.status_code for answer in answers} == {200}
        assert cluster.encode(["after"]).status_code == 200


@pytest.mark.timeout(180)
def test_a_full_disk_is_a_typed_error_and_serving_goes_on_when_there_is_room(small_disk: Path, tmp_path: Path) -> None:
    """Another program fills the disk, and the broker cannot write. Each request ends with a retryable 503, or with 504
    if its deadline is before that. The log says what to do, and doctor names the disk and the data directory.
    """
    with running(small_disk / "data", "--preload", MODEL, "--no-spare", "--queue-max-bytes", str(8 << 20)) as cluster:
        assert cluster.encode(["warm"]).status_code == 200
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(65536))
        until(
            lambda: cluster.encode(["x " * 20000], **{"x-sie-timeout-ms": "20000"}).status_code == 503,
            60,
            "the disk's being full",
        )
        started_s = time.monotonic()
        answer = cluster.encode(["more"], **{"x-sie-timeout-ms": "3000"})
        assert (answer.status_code, answer.json()["code"], answer.json()["error"]["retryable"]) == (
            504,
            "GATEWAY_TIMEOUT",
            True,
        )
        assert time.monotonic() - started_s < 3 + 1
        answer = cluster.encode(["more"], **{"x-sie-timeout-ms": "20000"})
        assert (answer.status_code, answer.json()["code"], answer.json()["error"]["retryable"]) == (
            503,
            "QUEUE_UNAVAILABLE",
            True,
        )
        until(lambda: cluster.said("free some space on the disk"), 10, "the log's advice")
        report = Examined(small_disk, {"SIE_QUEUE_MAX_BYTES": str(8 << 20), "SIE_LOCAL_CACHE": str(tmp_path)})
        report.named("disk", f"the file system {small_disk} of 24.0 MiB has", "free space there")
        report.named("disk", f"the data directory {cluster.data_dir} uses", "a --data-dir on a larger disk")
        ballast.unlink()
        until(lambda: cluster.encode(["after"], **{"x-sie-timeout-ms": "3000"}).status_code == 200, 60, "serving again")


def test_a_disk_that_the_queue_does_not_fit_on_is_refused_with_a_queue_that_does(small_disk: Path) -> None:
    """The start is refused before a process runs. The size that the line suggests then serves."""
    argv = [SIE, "serve", "--data-dir", str(small_disk / "data"), "--port", str(free_ports(1)[0])]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"(1342177280 bytes) in {small_disk / 'data' / 'nats'}" in line
    fitting = re.search(r"--queue-max-bytes (\d+)$", line)
    assert fitting is not None
    with running(small_disk / "data", "--no-spare", "--queue-max-bytes", fitting[1]) as cluster:
        assert cluster.encode(["fits"]).status_code == 200


def test_a_control_group_with_less_memory_than_a_start_takes_is_told(tmp_path: Path) -> None:
    with MemoryGroup("sie-first-start") as group:
        group.limit(400 << 20)
        serve = [SIE, "serve", "--data-dir", str(tmp_path / "data"), "--port", str(free_ports(1)[0])]
        done = subprocess.run(group.inside(serve), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: memory: this control group (container, systemd unit) may use 400.0 MiB")


def test_serves_with_no_network_but_loopback(tmp_path: Path) -> None:
    """`sie serve` starts and answers in a network namespace without any route."""
    port, worker_port = free_ports(2)
    serve = [
        SIE,
        "serve",
        "--port",
        str(port),
        "--data-dir",
        str(tmp_path / "data"),
        "--gateway-metrics-port",
        "0",
        "--worker-metrics-port",
        str(worker_port),
        "--no-spare",
        "--exit-with-parent",
    ]
    script = f"""
import json, subprocess, sys, time, urllib.request
serve = subprocess.Popen({serve!r}, stdout=sys.stderr)
for _ in range(600):
    try:
        body = json.dumps({{"items": ["Hello"]}}).encode()
        print(urllib.request.urlopen("http://127.0.0.1:{port}/v1/encode/{MODEL}", body, timeout=30).read().decode())
        break
    except OSError:
        time.sleep(0.1)
serve.terminate()
sys.exit(serve.wait(20))
"""
    inside = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-c", script]
    done = subprocess.run(inside, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    values = json.loads(done.stdout)["items"][0]["dense"]["values"]
    assert float(oracle.cosines(values, oracle.encode(["Hello"])[0])) >= 0.999
