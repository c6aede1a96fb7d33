"""The configuration of the nats-server that `sie serve` starts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sie_cli.serve.embedded import EmbeddedBroker


@pytest.mark.parametrize("folder", ["data", 'a "b" c', "a\\b", "a'b", "a; b} # ä $HOME"])
def test_nats_server_reads_a_configuration_whose_folder_has_any_name(tmp_path: Path, folder: str) -> None:
    data_dir = tmp_path / folder
    data_dir.mkdir()
    broker = EmbeddedBroker.configure(data_dir, 1 << 30)
    ran = subprocess.run([*broker.argv, "-t"], env=broker.environ, capture_output=True, text=True, check=False)
    assert "is valid" in ran.stderr, ran.stderr
