"""`sie doctor` at real faults: it names what is wrong and what mends it, and has no finding for a healthy cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import httpx
import pytest
from click.testing import CliRunner
from cluster import until
from diagnosis import ADMIN, BEATS, TOKEN, Examined, environ_of, health, ran
from inprocess import settings_of
from nats_server import NatsServer
from stack import Plan, Stack

from sie_broker.nats import NatsBroker
from sie_broker.nats.api import StreamInfo, stream_config
from sie_cli.main import main
from sie_cli.serve.ports import free_port
from sie_contracts.wire import topology
from sie_contracts.wire.topology import Lane
from sie_gateway.streams.publish import work_spec
from sie_ops.doctor import probe

PLAN = Plan(environ={"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": TOKEN, "SIE_ADMIN_TOKEN": ADMIN, **BEATS})
CLUSTER = ["gateway", "broker", "streams", "damage", "config", "loads", "refusals", "queue", "clock", "versions"]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("doctor") / "stack", PLAN) as started:
        yield started


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
    report.named("streams", f"stream {topology.dead_letter_stream('_default', replicas=1).name} is missing", migrate)
    pasted = {finding["fix"].split("`")[1] for finding in report.findings["streams"]}  # as a reader would paste it
    assert pasted == {migrate}
    ran(*pasted)
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
