"""Where the commands of this extra look for a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.test_command_options import says_how_to_start


@pytest.mark.parametrize("line", ["dlq list", "topology check"])
def test_without_a_server_each_command_says_that_none_runs_and_how_to_start_one(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says_how_to_start(line, tmp_path, monkeypatch)
