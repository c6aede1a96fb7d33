"""The commands of `sie doctor` are run as printed, with their fault present; the finding is gone afterwards.

Commands of Kubernetes, of package managers and of the clock are an operator's; they are not run here.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import shlex
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from cluster import SIE, Cluster, free_ports
from diagnosis import ADMIN, BEATS, TOKEN, Examined, commands, ran
from stack import Part, Plan, Stack

from sie_broker.nats import NatsBroker
from sie_broker.nats.api import StreamInfo
from sie_cli import access
from sie_cli.serve import readiness
from sie_contracts.settings import Secret

PLAN = Plan(
    models=(),
    workers=(None,),
    preload=False,
    environ={"SIE_AUTH_MODE": "token", "SIE_AUTH_TOKEN": TOKEN, "SIE_ADMIN_TOKEN": ADMIN, **BEATS},
)
BOUND_S = 60.0
CONFIG, GATEWAY, WORKER = (
    "start it (`sie config`)",
    "start it (`sie gateway`, `sie serve",
    "start a worker: `sie sidecar` and `sie adapter`",
)
LOOK = "`sie doctor` on its machine"
KEY, STREAMS, SETTINGS = (
    "`sie keys create NAME --scopes read",
    "`sie topology migrate --yes",
    "`sie settings` lists all settings",
)
AGAIN, OTHER_PORTS, BROKER = (
    "again: it replaces a `sie serve` that was killed",
    "again: it takes other ports",
    "starts a broker",
)
SERVE, ROOM = "start one (`sie serve", "or lower SIE_QUEUE_MAX_BYTES"
REPAIRED = ("`sie repair {}", "`sie restore FILE`")  # test_damage.py runs them
# an operator completes them with a name or a number; test_findings.py looks the commands up
COMPLETED = (
    "`sie models set {name}`",
    "`sie models load {name}`",
    "`sie models unload {name}`",
    "see `sie models list`",
    "`sie keys create` makes",
    "`sie serve` with a higher `--workers`",
    "`sie doctor` tests",
    "`sie doctor` on the machine of the store tests",
    "`sie doctor` there compares",
)
FOLLOWED = (
    *REPAIRED,
    *COMPLETED,
    CONFIG,
    GATEWAY,
    WORKER,
    LOOK,
    KEY,
    STREAMS,
    SETTINGS,
    AGAIN,
    OTHER_PORTS,
    BROKER,
    SERVE,
    ROOM,
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("remedies") / "stack", PLAN) as started:
        yield started


@contextlib.contextmanager
def ended(*parts: Part) -> Iterator[None]:
    """Stop these processes, and start them again in the end, whatever happens."""
    for part in parts:
        part.stop()
    try:
        yield
    finally:
        for part in parts:
            if not part.alive:
                part.start()
        for part in parts:
            part.wait_ready()


def start(part: Part, command: str) -> None:
    """Start the process by the command that doctor printed, with the options and settings of the process."""
    interpreter, sie, _, *options = part.argv
    part.argv = [interpreter, sie, *shlex.split(command)[1:], *options]
    part.start()


async def lacking(stack: Stack, token: str) -> str | None:
    """Return why `sie serve` would not yet say that this gateway and one worker are ready."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return await readiness.lacks_workers(client, f"{stack.urls[0]}/health", Secret(token), 1)


# ---- `sie serve`


class Program(http.server.BaseHTTPRequestHandler):
    """A program that is no part of SIE."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def holding(port: int) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Program) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield
        finally:
            server.shutdown()
            serving.join()


def served(data_dir: Path, command: str) -> Cluster:
    """Start the cluster of the command, on a free port."""
    cluster = Cluster(data_dir)
    cluster.argv = [SIE, *shlex.split(command)[1:], "--port", str(cluster.port), "--no-spare"]
    cluster.environ = {**os.environ, **BEATS}
    return cluster.start(BOUND_S)


def killed(cluster: Cluster) -> None:
    """Kill the cluster as the machine would, without a clean end."""
    assert cluster.process is not None
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    cluster.process.send_signal(signal.SIGKILL)
    cluster.process.wait(BOUND_S)
    _, alive = psutil.wait_procs(children, timeout=BOUND_S)
    assert not alive


async def _alter(url: str) -> None:
    """Change the work stream to what another version would have."""
    broker = NatsBroker("test")
    await broker.open(url, 5.0)
    try:
        (config,) = [info.config for info in await broker.stream_infos() if info.config["name"] == "WORK__default"]
        await broker.api(
            "STREAM.UPDATE.WORK__default", {**config, "max_age": config["max_age"] - 60 * 10**9}, StreamInfo
        )
    finally:
        await broker.close()


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_serve_of_this_machine_is_started_and_mended_as_told(tmp_path: Path) -> None:
    """The faults in turn: no process runs; a stream is altered; the queue may grow above the disk; the serve was
    killed, and another program took a port.
    """
    data_dir, nowhere = tmp_path / "data", f"nats://127.0.0.1:{free_ports(1)[0]}"
    report = Examined(tmp_path, {"SIE_NATS_URL": nowhere})
    (first,) = commands(report.told("broker", "no broker answers", BROKER))
    assert SERVE.strip("`(") in report.says["gateway"]
    assert first == f"sie serve --data-dir {data_dir}" == commands(report.says["gateway"])[0]
    cluster = served(data_dir, first)
    try:
        report = Examined(tmp_path, {})
        assert {report.states[check] for check in ("gateway", "broker", "streams", "ports", "disk")} == {"fine"}, (
            report.output
        )
        assert report.findings["models"] == []

        asyncio.run(_alter(cluster.broker_url()))
        ran(*commands(Examined(tmp_path, {}).told("streams", "max_age is", STREAMS)))
        assert Examined(tmp_path, {}).findings["streams"] == []
        room = shutil.disk_usage(tmp_path)
        assert ROOM in Examined(tmp_path, {"SIE_QUEUE_MAX_BYTES": str(room.total * 2)}).told(
            "disk", "the queue may grow by", ROOM
        )
        assert Examined(tmp_path, {"SIE_QUEUE_MAX_BYTES": str(64 << 20)}).findings["disk"] == []

        gateway, worker = (int(url.rpartition(":")[2]) for url in cluster.access().metrics_urls)
        killed(cluster)
        with holding(gateway):
            report = Examined(tmp_path, {})
            (again,) = commands(report.told("ports", f"nothing listens on port {worker}", AGAIN))
            (command,) = commands(report.told("ports", f"port {gateway}, which", OTHER_PORTS))
            assert again == command == first
            cluster = served(data_dir, again)
            report = Examined(tmp_path, {})
            assert {report.states[check] for check in ("gateway", "broker", "streams", "ports")} == {"fine"}, (
                report.output
            )
        assert access.read(data_dir) is not None
    finally:
        cluster.stop()
