"""Manifests of jobs that no decoder accepts are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from undecodable import FAULTS, MARK, check, damages_of, json, of_file

from sie_cli.refusal import CommandRefused
from sie_migrate.migration import has_files


@pytest.mark.parametrize("fault", FAULTS)
def test_has_files_refuses_a_manifest_that_cannot_be_decoded(fault: str, tmp_path: Path) -> None:
    data = damages_of({"job": MARK}, json)[fault]
    check(lambda: of_file(lambda file: has_files(file.parent, "j"), "manifest.json")(data, tmp_path), CommandRefused)
