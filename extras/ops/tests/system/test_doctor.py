"""`sie doctor` at real faults: it names what is wrong and what mends it, and has no finding for a healthy cluster."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import httpx
import msgspec
import pytest
from click.testing import CliRunner
from cluster import SIE, until
from diagnosis import ADMIN, BEATS, TOKEN, Examined, environ_of, health
from fake_adapter import toy_entry
from inprocess import settings_of
from nats_server import NatsServer
from stack import Part, Plan, Stack

from sie_broker.nats import NatsBroker
from sie_broker.nats.api import StreamInfo, stream_config
from sie_cli.main import main
from sie_cli.serve.ports import free_port
from sie_contracts.wire import topology
from sie_contracts.wire.topology import Lane
from sie_gateway.streams.publish import work_spec
from sie_ops.doctor import probe

PLAN = Plan(environ={"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": TOKEN, "SIE_ADMIN_TOKEN": ADMIN, **BEATS})
CLUSTER = (
    "gateway",
    "broker",
    "streams",
    "damage",
    "config",
    "loads",
    "refusals",
    "queue",
    "clock",
    "versions",
)
AHEAD_S = 90
SITE = """
import time
import sie_contracts

def _shift(now_s=time.time, now_ns=time.time_ns):
    time.time = lambda: now_s() + {ahead_s}
    time.time_ns = lambda: now_ns() + {ahead_s} * 1_000_000_000

_shift()
sie_contracts.__version__ = "{version}"
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("doctor") / "stack", PLAN) as started:
        yield started


@contextlib.contextmanager
def restarted(part: Part, environ: dict[str, str]) -> Iterator[None]:
    """Restart a process with a changed environment, and in the end with its own again."""
    own = part.environ

    def restart(environ: dict[str, str]) -> None:
        part.stop()
        part.environ = environ
        part.start()
        part.wait_ready()

    try:
        restart({**own, **environ})
        yield
    finally:
        restart(own)


def altered(folder: Path, *, ahead_s: int = 0, version: str = "0.1.0") -> dict[str, str]:
    """Return the environment of a process with another wall clock or another version."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SITE.format(ahead_s=ahead_s, version=version))
    return {"PYTHONPATH": str(folder)}


# ---- a cluster


def test_a_healthy_cluster_has_nothing(stack: Stack, tmp_path: Path) -> None:
    report = Examined(tmp_path, environ_of(stack))
    assert (report.status, report.word) == (0, "fine"), report.output
    assert report.states.pop("models") == "absent"
    assert set(report.states.values()) == {"fine"}, report.output
    assert "1 gateway and 1 worker use the catalogue of epoch" in report.says["config"]
    assert "1 healthy worker" in report.says["gateway"]
    assert report.says["clock"].startswith("4 clocks within 0.")  # machine, gateway, config service, worker


def test_a_wrong_token_is_named_and_not_shown(stack: Stack, tmp_path: Path) -> None:
    report = Examined(
        tmp_path, {**environ_of(stack), "SIE_AUTH_TOKEN": "sesame-1", "SIE_CONFIG_READ_TOKEN": "sesame-2"}
    )
    report.named("gateway", "does not let this token read (status 401)", "set SIE_API_KEY")
    report.named("config", "refuses this token (status 401)", "set SIE_CONFIG_READ_TOKEN")
    assert "sesame" not in report.output


def test_an_adapter_that_is_frozen_and_one_that_is_gone_are_named(stack: Stack, tmp_path: Path) -> None:
    adapter, path = stack.workers[0].adapter, environ_of(stack)["SIE_IPC_SOCKET_PATH"]
    adapter.pause()
    try:
        report = Examined(tmp_path, environ_of(stack))
    finally:
        adapter.resume()
    report.named(
        "sockets", f"{path}: the adapter takes connections, but no answer comes", "kill it; start the adapter again"
    )
    adapter.kill()
    try:
        until(
            lambda: httpx.get(f"{stack.workers[0].url}/readyz", trust_env=False, timeout=60).status_code == 503,
            60,
            "the sidecar notices",
        )
        until(lambda: health(stack)["unhealthy_workers"], 60, "the gateway notices")
        report = Examined(tmp_path, environ_of(stack))
        report.named("sockets", f"{path} refuses", f"SIE_IPC_SOCKET_PATH={path}")
        report.named("gateway", "worker w0 (_default.cpu.default) is not healthy", "/readyz")
        report.named("ports", "not ready: no adapter is connected", "sockets")
    finally:
        adapter.start()
        stack.workers[0].sidecar.wait_ready()
        until(lambda: not health(stack)["unhealthy_workers"], 60, "the gateway notices")


@pytest.mark.long
def test_clocks_that_are_off_an_older_version_and_a_worker_that_does_not_follow_are_named(
    stack: Stack, tmp_path: Path
) -> None:
    (gateway,), (worker,) = stack.gateways, stack.workers
    old = altered(tmp_path / "old", ahead_s=-AHEAD_S, version="0.0.9")
    deaf = {"SIE_NATS_CONFIG_TRUSTED_PRODUCERS": "nobody", "SIE_WORKER_CONFIG_POLL_INTERVAL_MS": "600000"}
    with restarted(gateway, altered(tmp_path / "ahead", ahead_s=AHEAD_S)), restarted(worker.sidecar, {**old, **deaf}):
        written = httpx.post(
            f"{stack.config_url}/v1/configs/models",
            json=msgspec.to_builtins(toy_entry("toy/new")),
            timeout=30,
            trust_env=False,
            headers={"authorization": f"Bearer {ADMIN}"},
        )
        assert written.is_success, written.text
        report = Examined(tmp_path, environ_of(stack))
    report.named("clock", f"the clock of the gateway at {stack.urls[0]} is {AHEAD_S}", "timedatectl set-ntp true")
    report.named(
        "clock",
        f"the clock of worker w0 is {AHEAD_S}.0 s behind the broker's",
        "for a pod: its node) with `timedatectl set-ntp true`",
    )
    report.named("versions", "sidecar w0: version 0.0.9, the newest is 0.1.0", "pip install 'sie-cluster==0.1.0'")
    report.named("config", "worker w0 uses an older catalogue", "SIE_NATS_CONFIG_TRUSTED_PRODUCERS")
    assert [len(report.findings[check]) for check in ("clock", "versions", "config")] == [2, 1, 1], report.output


def test_a_config_service_that_is_away_is_named(stack: Stack, tmp_path: Path) -> None:
    stack.config.kill()
    try:
        report = Examined(tmp_path, environ_of(stack))
    finally:
        stack.config.start()
        stack.config.wait_ready()
    report.named("config", f"no config service answers at {stack.config_url}", "start it (`sie config`)")


# ---- a broker


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as started:
        yield started


def test_a_broker_that_is_down_is_named(tmp_path: Path) -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    report = Examined(tmp_path, {}, "--nats-url", url)
    report.named("broker", f"no broker answers at {url}", "SIE_NATS_URL")
    assert report.states["streams"] == report.states["clock"] == "blind"


def test_wrong_credentials_of_the_broker_are_named_and_not_shown(tmp_path: Path) -> None:
    users = 'authorization { users: [{user: "gateway", password: "right"}] }'
    with NatsServer(tmp_path / "nats", extra=users) as server:
        place = server.url.removeprefix("nats://")
        report = Examined(tmp_path, {"SIE_NATS_URL": f"nats://gateway:wrong-sesame@{place}"})
        report.named(
            "broker", f"the broker at nats://{place} refuses these credentials", "SIE_NATS_URL (nats://USER@HOST:PORT)"
        )
        assert "sesame" not in report.output
        assert Examined(tmp_path, {"SIE_NATS_URL": f"nats://gateway:right@{place}"}).states["broker"] == "fine"


def test_a_stream_with_another_setting_and_a_consumer_that_is_missing_are_named(
    server: NatsServer, tmp_path: Path
) -> None:
    spec = work_spec(settings_of(), "_default")

    async def plant() -> None:
        broker = NatsBroker("test")
        await broker.open(server.url, 5.0)
        try:
            changed_spec = dataclasses.replace(spec, max_age_s=spec.max_age_s - 60)
            await broker.api(f"STREAM.CREATE.{spec.name}", stream_config(changed_spec), StreamInfo)
            await broker.publish(
                topology.work_subject(Lane("_default", "cpu", "default"), "interactive", "toy/a"), b"x", "1"
            )
        finally:
            await broker.close()

    asyncio.run(plant())
    report = Examined(tmp_path, {}, "--nats-url", server.url)
    migrate = f"sie topology migrate --yes --url {server.url}"
    report.named("streams", f"stream {spec.name} is not as wanted: max_age is", migrate)
    report.named("streams", "consumer ", migrate)
    assert any(
        "is missing: its subject holds messages" in finding["wrong"] for finding in report.findings["streams"]
    ), report.output
    report.named(
        "streams",
        f"stream {topology.dead_letter_stream('_default', replicas=1).name} is missing",
        migrate,
    )
    pasted = {finding["fix"].split("`")[1] for finding in report.findings["streams"]}  # as a reader would paste it
    assert pasted == {migrate}
    environ = {**os.environ, "PATH": f"{Path(SIE).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", *pasted], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Examined(tmp_path, {}, "--nats-url", server.url).findings["streams"] == []


# ---- this machine


def test_a_socket_that_is_missing_and_one_that_others_may_open_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    report = Examined(tmp_path, {"SIE_IPC_SOCKET_PATH": str(path)})
    report.named("sockets", f"{path}: there is no such socket", "start the adapter again")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o666)
        report = Examined(tmp_path, {"SIE_IPC_SOCKET_PATH": str(path)})
    report.named("sockets", f"{path} may be opened by other users (mode 0666, expected 0600)", f"chmod 600 {path}")


@pytest.mark.debian
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], check=True)
    try:
        (folder / "weights").write_bytes(bytes(30 << 20))
        store = {
            "SIE_LOCAL_CACHE": str(folder),
            "SIE_DISK_PRESSURE_THRESHOLD_PERCENT": "85",
            "SIE_PAYLOAD_STORE_URL": str(folder),
        }
        report = Examined(tmp_path, store)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    report.named("disk", f"({folder}) is 93.8 % full, above 85 %", "free space there")
    report.named("disk", f"the disk of the payload store ({folder}) has 2.0 MiB left", "SIE_PAYLOAD_STORE_URL")


def test_without_a_cluster_it_says_what_it_could_not_see(tmp_path: Path) -> None:
    ports = dict.fromkeys(("SIE_GATEWAY_METRICS_PORT", "SIE_WORKER_METRICS_PORT"), "0")
    report = Examined(tmp_path, ports)
    assert (report.status, report.word) == (2, "blind"), report.output
    assert {check for check, state in report.states.items() if state == "blind"} == set(CLUSTER), report.output
    assert report.states["settings"] == report.states["disk"] == "fine"
    with mock.patch.object(probe, "default_sockets", list):
        environ = {"SIE_LOCAL_CACHE": str(tmp_path), **ports}
        text = CliRunner().invoke(main, ["doctor", "--data-dir", str(tmp_path)], env=environ).output
    assert text.rstrip().endswith(f"not looked at: {', '.join(CLUSTER)}"), text
