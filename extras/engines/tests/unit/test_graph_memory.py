"""Allocation failures in a graph, in a process of their own."""

from __future__ import annotations

import json
from pathlib import Path

from unit.adapter.allocation_failures import MAX_TOKENS
from unit.adapter.test_memory_limits import _HEADROOM_MIB, ended, wide  # noqa: F401  a fixture

from sie_adapter.engine.engine import DEVICE_LOST_STATUS


def test_process_ends_with_a_lower_limit_when_a_graph_has_no_memory_for_a_pass(
    wide: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    script = ended("allocation_failures.py", wide, tmp_path, _HEADROOM_MIB, 40, 1, 3000, "openvino", timeout_s=100)
    assert script.returncode == DEVICE_LOST_STATUS, script.stderr[-2000:]
    (edge,) = json.loads((tmp_path / "sie" / "frontier.json").read_bytes())["edges"].values()
    assert 0 < edge["fail_tokens"] < MAX_TOKENS
