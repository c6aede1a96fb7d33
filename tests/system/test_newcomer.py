"""A fresh clone, and the commands of README.md: an environment of its own, and the first vector."""

from __future__ import annotations

from pathlib import Path

import newcomer
import pytest

pytestmark = [pytest.mark.debian, pytest.mark.timeout(1200)]


def test_a_fresh_clone_leads_to_a_vector(tmp_path: Path) -> None:
    """Without a hub, and without CUDA: README.md says how much disk it takes."""
    measured = newcomer.measure(tmp_path)
    assert measured.dims == 384
    assert measured.installed_s < measured.ready_s < measured.answered_s
    assert measured.disk_bytes < 2.5e9
