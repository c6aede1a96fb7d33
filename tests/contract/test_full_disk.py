"""An adapter that can write no temporary file, as in a container with a read-only root and a full volume."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_process import batch, start, stop

from sie_contracts.wire.messages import Ok

FULL = """
import tempfile
def none(*_):
    raise FileNotFoundError("No usable temporary directory found")
tempfile._get_default_tempdir = none
"""


@pytest.mark.long
def test_an_adapter_starts_and_serves(tmp_path: Path) -> None:
    adapter = start(tmp_path / "a.sock", before=FULL, TMPDIR=str(tmp_path))
    try:
        adapter.wait_for("no temporary file can be written")
        adapter.wait_for("adapter ready")
        with adapter.connect() as client:
            client.load()
            (outcome,) = client.run(batch([[101, 2003, 102]])).outcomes
            assert isinstance(outcome, Ok)
    finally:
        stop(adapter)
