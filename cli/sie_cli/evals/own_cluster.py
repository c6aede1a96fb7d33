"""A cluster for one evaluation: `sie serve` with a data directory that is removed afterwards."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from sie_cli import access
from sie_cli.access import Access
from sie_cli.refusal import CommandRefused
from sie_cli.serve.ports import free_port

START_S = 120.0
END_S = 60.0  # `sie serve` drains for less by itself
POLL_S = 0.1
LAST_LINES = 5


@contextlib.contextmanager
def own_cluster() -> Iterator[Access]:
    """Start a cluster on this machine, and end it with the context. Raises CommandRefused with the last lines of its
    log.
    """
    with tempfile.TemporaryDirectory(prefix="sie-eval-") as folder:
        data_dir, log = Path(folder) / "data", Path(folder) / "serve.log"
        argv = [sys.executable, "-m", "sie_cli", "serve", "--data-dir", str(data_dir)]
        argv += ["--port", str(free_port()), "--exit-with-parent"]
        click.echo("no cluster is named and none runs: starting one for this evaluation", err=True)
        with log.open("w") as output:
            process = subprocess.Popen(argv, stdout=output, stderr=output)
        try:
            yield _access(process, data_dir, log)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _access(process: subprocess.Popen[bytes], data_dir: Path, log: Path) -> Access:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        if (record := access.read(data_dir)) is not None:
            return record
        if process.poll() is not None:
            last = "\n".join(log.read_text("utf-8", "replace").splitlines()[-LAST_LINES:])
            raise CommandRefused(f"the cluster for this evaluation ended with status {process.returncode}:\n{last}")
        time.sleep(POLL_S)
    raise CommandRefused(
        f"the cluster for this evaluation has not started within {START_S:.0f} s: start one with `sie serve`"
    )
