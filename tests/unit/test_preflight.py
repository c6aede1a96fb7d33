"""Checks of `sie serve` before it starts anything."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

from sie_cli.main import main
from sie_cli.serve import preflight, processes
from sie_contracts.settings import load


def test_a_folder_of_models_that_is_not_there_is_told_before_anything_starts(tmp_path: Path) -> None:
    def needs(folder: str) -> preflight.MachineNeeds:
        settings = load(environ={"SIE_MODELS_DIR": folder}).settings
        return preflight.MachineNeeds((), tmp_path, has_broker=False, gateways=1, workers=1, settings=settings)

    (fault,) = preflight._folders(needs(str(tmp_path / "nope")))
    assert fault.startswith("--models-dir (SIE_MODELS_DIR): ")
    assert "is not a folder: make it, or name another one" in fault
    assert list(preflight._folders(needs(str(tmp_path)))) == []
    assert list(preflight._folders(needs("s3://bucket/models"))) == []


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
