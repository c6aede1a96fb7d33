"""A fresh clone, and the commands of README.md: an environment of its own, and the first vector."""

from __future__ import annotations

from pathlib import Path

import newcomer
import pytest

pytestmark = [pytest.mark.debian, pytest.mark.timeout(1200)]


def test_a_fresh_clone_leads_to_a_vector(tmp_path: Path) -> None:
    """The environment needs no hub and no CUDA. README.md says how much disk it takes."""
    measurement = newcomer.measure(tmp_path)
    assert measurement.dims == 384
    assert measurement.installed_s < measurement.ready_s < measurement.answered_s
    assert measurement.disk_bytes < 2.5e9
