"""Ctrl-C in any command: its status is that of a shell, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RUN = "from sie_cli.entry import main; main()"
STUB = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(99)\n"


def ran(folder: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run `sie --version` in a process whose import of click is interrupted."""
    (folder / "click.py").write_text(STUB)
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    argv = [sys.executable, "-c", before + RUN, "--version"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environ, check=False)


def test_an_interrupt_during_the_imports_ends_the_process_without_a_word(tmp_path: Path) -> None:
    done = ran(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_process_that_ignores_interrupts_still_does(tmp_path: Path) -> None:
    """A shell starts background commands with SIGINT ignored."""
    done = ran(tmp_path, "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); ")
    assert done.returncode == 99
