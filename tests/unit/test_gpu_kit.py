"""`make gpu`: its rehearsal on a processor goes through all parts, and without a GPU it ends at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("tests", "parity", "device", "memory", "small", "serve", "load")


def kit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the kit prints, and its exit status."""
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    ended = kit()
    assert ended.returncode == 3
    (line,) = ended.stdout.splitlines()
    assert "no GPU" in line


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
def test_the_rehearsal_writes_the_table_of_each_part(part: str, tmp_path: Path) -> None:
    ended = kit("--rehearse", "--parts", part, "--results", str(tmp_path))
    log = tmp_path / f"{part}.log"
    assert ended.returncode == 0, ended.stdout + (log.read_text()[-3000:] if log.exists() else "")
    head, _, rows = (tmp_path / f"{part}.md").read_text().partition("|---")
    assert head.startswith("# ")
    assert "torch " in head
    assert "\n| " in rows
