"""Settings that each process of `sie serve` resolves. The command runs unchanged up to the point where it would start
them. Then each process reads its own command line and environment.

The two examples at the end of the documentation of the configuration are used word for word.
tests/system/test_seed_examples.py starts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner
from documented_examples import DEVELOPMENT, PRODUCTION, exported

from sie_cli.main import main
from sie_cli.options import loaded
from sie_cli.serve import processes
from sie_cli.serve.ports import free_port
from sie_cli.serve.standalone import standalone
from sie_cli.serve.supervisor import Child
from sie_contracts.settings import Mode, Settings
from sie_sidecar.batch import BatchLimits
from sie_sidecar.process import limits_of

QUEUE = {"config": ("config",), "gateway": ("gateway",), "sidecar": ("sidecar",), "adapter": ("adapter",)}


STANDALONE = {"standalone": ("gateway", "config", "sidecar"), "adapter": ("adapter",)}


def values_of(service: Served, field: str) -> dict[str, Any]:
    """Return the value of a field in each process."""
    return {name: getattr(settings, field) for name, settings in service.settings.items()}


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
