"""Starts of `sie serve`: ports, the checks before it, the settings of each process, readiness."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from click.testing import CliRunner
from documented_examples import DEVELOPMENT, PRODUCTION, exported

from sie_cli.main import main
from sie_cli.options import loaded
from sie_cli.serve import ports, preflight, processes
from sie_cli.serve.ports import free_port
from sie_cli.serve.readiness import FailedLoad, failed_load
from sie_cli.serve.standalone import standalone
from sie_cli.serve.supervisor import Child, Supervisor
from sie_contracts.settings import Mode, Secret, SettingError, Settings, load
from sie_sidecar.batch import BatchLimits
from sie_sidecar.process import limits_of

FEW = range(31_000, 31_000 + ports._TRIED)
OTHER = f"""
from sie_cli.serve import ports
ports._BELOW_EPHEMERAL = range({FEW.start}, {FEW.stop})
print(*[ports.free_port() for _ in range(60)], flush=True)
input()
"""


@pytest.fixture
def few_ports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    descriptors: dict[int, int] = {}
    monkeypatch.setattr(ports, "_BELOW_EPHEMERAL", FEW)
    monkeypatch.setattr(ports, "_descriptors", descriptors)
    yield
    for descriptor in descriptors.values():
        os.close(descriptor)


def test_no_process_gets_a_port_that_another_was_given(few_ports: None) -> None:
    mine = [ports.free_port() for _ in range(60)]
    argv = [sys.executable, "-c", OTHER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = [int(port) for port in process.stdout.readline().split()]
        mine += [ports.free_port() for _ in range(20)]
        process.communicate("\n")
    assert len({*mine, *theirs}) == len(mine) + len(theirs) == 140


def test_it_says_when_there_is_none(few_ports: None) -> None:
    with contextlib.suppress(SettingError):
        for _ in FEW:
            ports.free_port()
    with pytest.raises(SettingError, match="no 1 consecutive free ports"):
        ports.free_port()


@pytest.mark.parametrize(("limit", "is_refused"), [(None, False), (1 << 30, False), ((1 << 30) - 1, True)])
def test_a_memory_limit_below_the_needs_of_the_processes_is_refused(
    limit: int | None, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers and two gateways need 1 GiB."""
    monkeypatch.setattr(preflight.control_group, "memory_limit", lambda: limit)
    needs = preflight.MachineNeeds(
        (), tmp_path, has_broker=False, gateways=2, workers=2, settings=load(environ={}).settings
    )
    faults = [fault for fault in preflight._memory(needs) if fault.startswith("memory: ")]
    assert ["the processes use 1.0 GiB" in fault for fault in faults] == [True] * is_refused


@pytest.mark.parametrize(
    ("flag", "more"),
    [("--port", "--gateways=2"), ("--gateway-metrics-port", "--gateways=2"), ("--worker-metrics-port", "--workers=2")],
)
def test_ports_that_count_up_beyond_the_last_one_are_refused_before_anything_starts(
    flag: str, more: str, tmp_path: Path
) -> None:
    with mock.patch.object(processes.LocalCluster, "run", mock.AsyncMock(return_value=0)):
        done = CliRunner().invoke(main, ["serve", "--data-dir", str(tmp_path / "data"), flag, "65535", more])
    assert done.exit_code == 2
    assert f"{flag}: 2 {more[2:-2]} with ports from 65535 need ports above 65535" in done.stderr


def host(state: str, attempts: int = 0, *, permanent: bool = False) -> dict[str, Any]:
    error = {"code": "NETWORK", "attempts": attempts, "permanent": permanent, "message": "no network"}
    return {"worker": "w0", "state": state, "error": error if attempts else None}


@pytest.mark.parametrize(
    ("state", "hosts", "expected"),
    [
        ("available", [], None),
        ("loading", [host("loading", 1)], None),
        ("loaded", [host("loaded"), host("failed", 3)], None),
        ("failed", [host("failed", 1)], FailedLoad("no network", 1, is_permanent=False)),
        ("failed", [host("failed", 3), host("failed", 2)], FailedLoad("no network", 2, is_permanent=False)),
        ("failed", [host("failed", 1, permanent=True)], FailedLoad("no network", 1, is_permanent=True)),
    ],
)
async def test_a_failed_load_is_that_of_all_workers(
    state: str, hosts: list[dict[str, Any]], expected: FailedLoad | None
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/models/org/m"
        assert request.headers["Authorization"] == "Bearer admin"
        return httpx.Response(200, json={"state": state, "hosts": hosts})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        assert await failed_load(client, "http://gateway", Secret("admin"), "org/m") == expected


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_a_start_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the disk count what the streams hold already, so a disk that they fill passes."""
    monkeypatch.setattr("sie_cli.access.write_private", no_space)
    done = CliRunner().invoke(main, ["serve", "--standalone", "--port", str(free_port()), "--data-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == f"error: --data-dir: {tmp_path}: No space left on device"


QUEUE = {"config": ("config",), "gateway": ("gateway",), "sidecar": ("sidecar",), "adapter": ("adapter",)}
STANDALONE = {"standalone": ("gateway", "config", "sidecar"), "adapter": ("adapter",)}


@dataclass
class Served:
    """The settings of each process by its name, and the warnings of the command and its processes."""

    settings: dict[str, Settings]
    warnings: list[str]


def served(folder: Path, environ: dict[str, str], *args: str) -> Served:
    """Return settings and warnings of the processes that `sie serve` starts with these arguments and this environment.
    The data directory is below `folder`.
    """
    children: list[Child] = []

    async def noted(run: Any) -> int:
        run._set_defaults()
        for group in run._children():
            children.extend(group)
        return 0

    base_environ = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    argv = ["serve", "--port", str(free_port()), "--data-dir", str(folder / "data"), *args]
    with (
        mock.patch.dict(os.environ, base_environ | environ, clear=True),
        mock.patch.object(processes.LocalCluster, "run", noted),
    ):
        done = CliRunner().invoke(main, argv)
    assert done.exit_code == 0, done.output
    lines = done.stderr.splitlines()
    settings = {child.name: _read(child, lines) for child in children if child.name != "nats-server"}
    return Served(settings, [line for line in lines if line.startswith("warning: ")])


def _read(child: Child, lines: list[str]) -> Settings:
    """Return the settings of a process from its command line and environment. Its standard error goes to `lines`."""
    role = next(index for index, word in enumerate(child.argv) if word in {**QUEUE, **STANDALONE})
    command = standalone if child.argv[role] == "standalone" else main.commands[child.argv[role]]
    mode: Mode = "standalone" if child.argv[role] == "standalone" else "queue"
    runner = CliRunner()
    with mock.patch.dict(os.environ, child.environ, clear=True), runner.isolation() as (_, stderr, _):
        values = command.make_context(child.argv[role], list(child.argv[role + 1 :])).params
        settings = loaded(values, mode).settings
        lines += stderr.getvalue().decode().splitlines()
    return settings


def values_of(service: Served, field: str) -> dict[str, Any]:
    """Return the value of a field in each process."""
    return {name: getattr(settings, field) for name, settings in service.settings.items()}


@pytest.mark.parametrize(("name", "documented"), [("SIE_BATCHER_COALESCE_MS", 5), ("SIE_MAX_BATCH_COST", 16384)])
def test_a_variable_that_equals_the_documented_default_wins_over_a_measured_one(
    tmp_path: Path, name: str, documented: int
) -> None:
    field = name.removeprefix("SIE_").lower()
    assert values_of(served(tmp_path / "unset", {"SIE_DEVICE": "cpu"}), field)["sidecar"] != documented
    assert (
        values_of(served(tmp_path / "set", {"SIE_DEVICE": "cpu", name: str(documented)}), field)["sidecar"]
        == documented
    )


@pytest.mark.parametrize(
    ("environ", "most"),
    [
        ({}, 64),
        ({"SIE_MAX_CONCURRENT_BATCHES": "4"}, 4),
        ({"SIE_MACHINE_PROFILE": "mine"}, 64),
        ({"SIE_DEVICE": "cuda"}, 4),
    ],
)
def test_every_core_of_a_cpu_gets_batches_unless_somebody_wrote_how_many(
    tmp_path: Path, environ: dict[str, str], most: int
) -> None:
    """SIE_MAX_CONCURRENT_BATCHES: on a CPU the default is the maximum. There the lanes of the adapter, one for each
    core, are the bound.
    """
    service = served(tmp_path, {"SIE_DEVICE": "cpu", **environ})
    assert service.settings["sidecar"].max_concurrent_batches == most


@pytest.mark.parametrize("device", ["mps", "cuda", "cpu"])
def test_the_development_example_value_by_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    environ = exported(DEVELOPMENT, {"=mps": f"={device}"})
    queued, alone = served(tmp_path, environ), served(tmp_path / "alone", environ, "--standalone")
    for service, mode in ((queued, "queue"), (alone, "standalone")):
        adapter = service.settings["adapter"]
        assert (adapter.device, adapter.models_dir, adapter.instrumentation) == (device, "./models", True)
        assert service.settings["config" if mode == "queue" else "standalone"].models_dir == "./models"
        assert not adapter.log_json
        assert not adapter.tracing.enabled
        assert adapter.memory_pressure_threshold_percent == 85
    cost = 4096 if device == "cpu" else 16384  # measured on a CPU
    assert limits_of(alone.settings["standalone"], "standalone") == BatchLimits(cost, 8, 0.001)
    expected = BatchLimits(4096, 64, 0.002) if device == "cpu" else BatchLimits(16384, 12, 0.005)
    assert limits_of(queued.settings["sidecar"], "queue") == expected
    assert alone.warnings == []
    assert queued.warnings == [
        "warning: SIE_MAX_BATCH_REQUESTS is set, but has no effect in queue mode",
        "warning: SIE_MAX_BATCH_WAIT_MS is set, but has no effect in queue mode",
    ]


def test_the_production_example_standalone_value_by_value(tmp_path: Path) -> None:
    service = served(tmp_path, exported(PRODUCTION, {}), "--standalone")
    assert service.settings.keys() == STANDALONE.keys()
    alone, adapter = service.settings["standalone"], service.settings["adapter"]
    assert limits_of(alone, "standalone") == BatchLimits(16384, 128, 0.005)
    assert alone.max_concurrent_requests == 1024
    assert (adapter.device, adapter.models_dir, alone.models_dir) == (
        "cuda",
        "s3://my-bucket/models/",
        "s3://my-bucket/models/",
    )
    assert (adapter.cluster_cache, adapter.cache_folder) == ("s3://my-bucket/weights/", Path("/mnt/nvme/cache"))
    assert adapter.memory_pressure_threshold_percent == 90
    for process_settings in (alone, adapter):
        assert process_settings.log_json
        assert (process_settings.tracing.enabled, process_settings.tracing.endpoint) == (True, "http://collector:4317")
    assert service.warnings == []


def test_the_production_example_value_by_value(tmp_path: Path) -> None:
    """In queue mode the sidecar's own batching settings hold."""
    service = served(tmp_path, exported(PRODUCTION, {}))
    assert service.settings.keys() == QUEUE.keys()
    settings = service.settings
    adapter, gateway = settings["adapter"], settings["gateway"]
    assert adapter.device == "cuda"
    assert adapter.models_dir == settings["config"].models_dir == "s3://my-bucket/models/"
    assert adapter.cluster_cache == "s3://my-bucket/weights/"
    assert adapter.cache_folder == Path("/mnt/nvme/cache")
    assert adapter.memory_pressure_threshold_percent == 90
    assert gateway.max_concurrent_requests == 1024
    assert set(values_of(service, "log_json").values()) == {True}
    for process_settings in settings.values():
        assert process_settings.tracing.enabled
        assert (process_settings.tracing.endpoint, process_settings.tracing.protocol) == (
            "http://collector:4317",
            "grpc",
        )
    assert limits_of(settings["sidecar"], "queue") == BatchLimits(16384, 12, 0.005)


async def test_output_that_cannot_be_handled_ends_the_command(caplog: pytest.LogCaptureFixture) -> None:
    def failing(*_: str) -> None:
        raise ValueError("a fault of this program")

    supervisor, child = Supervisor(failing), Child("adapter", [sys.executable, "-c", "print(1); input()"], os.environ)
    await supervisor.start(child)
    async with asyncio.timeout(30):
        assert "failed, see above" in await supervisor.fatal
    await supervisor.stop([child])
    assert "task output:adapter failed" in caplog.text
