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


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    ended = kit()
    assert ended.returncode == 3
    (line,) = ended.stdout.splitlines()
    assert "no GPU" in line


@pytest.mark.long  # a minute each
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["tests", "parity", "serve"])
def test_the_rehearsal_of_a_part_writes_its_table(part: str, tmp_path: Path) -> None:
    ended = kit("--rehearse", "--parts", part, "--results", str(tmp_path), "--limit", f"{part}=800", "--within", "850")
    log = tmp_path / f"{part}.log"
    assert ended.returncode == 0, ended.stdout + (log.read_text()[-3000:] if log.exists() else "")
    check_table(tmp_path / f"{part}.md")


@pytest.mark.long  # half a minute
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


def test_a_part_is_cut_off_at_its_limit(runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "endless.py").write_text("import threading; print('| row |', flush=True); threading.Event().wait()")
    monkeypatch.setitem(runner.PARTS, "endless", (str(tmp_path / "endless.py"),))
    monkeypatch.setattr(runner, "lacks", lambda parts: {})
    arguments = ["--rehearse", "--parts", "endless", "--results", str(tmp_path), "--limit", "300,endless=1.5"]
    assert runner.main(arguments) == 1
    assert (tmp_path / "endless.log").read_text() == "| row |\n"
