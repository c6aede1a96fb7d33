"""Checks of `sie serve` before it starts anything."""

from __future__ import annotations

from pathlib import Path

from sie_cli.serve import preflight
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
