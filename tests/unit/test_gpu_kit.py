"""`make gpu`: a rehearsal on a CPU runs all parts, and without a GPU the kit ends at once."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
KIT = ROOT / "bench" / "gpu"
SCRIPTS = ("device", "memory", "small", "load")  # parts that start no other programs of this repository
_RUN = "import runpy, sys; [runpy.run_path(script, run_name='__main__') for script in sys.argv[1:]]"


def kit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the kit and return its output and exit status."""
    command = [sys.executable, str(KIT / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def check_table(file: Path) -> None:
    head, _, rows = file.read_text().partition("|---")
    assert head.startswith("# ")
    assert "torch " in head
    assert "\n| " in rows


@pytest.fixture
def runner() -> ModuleType:
    """The module that `make gpu` runs."""
    spec = importlib.util.spec_from_file_location("gpu_run", KIT / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(900)
def test_the_scripts_write_their_tables_in_a_rehearsal(runner: ModuleType, tmp_path: Path) -> None:
    """The scripts run in one process, because most of the time of each is the import of its libraries."""
    assert {"tests", "parity", "serve", *SCRIPTS} == set(runner.PARTS)
    runner.describe_package(tmp_path / "site")
    environ = runner.environment(tmp_path, rehearse=True, site=tmp_path / "site")
    command = [sys.executable, "-c", _RUN, *(str(KIT / runner.PARTS[part][0]) for part in SCRIPTS)]
    ended = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for name in (*SCRIPTS, "device-profile"):
        check_table(tmp_path / f"{name}.md")
