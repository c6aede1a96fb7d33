"""Measure the seconds and bytes from a fresh clone to the first vector, by the commands of README.md.

    python tests/newcomer.py

The weights of the model in README.md are a package, so a package index is needed, but no hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from sie_cli.serve.ports import free_port

ROOT = Path(__file__).parents[1]
END_S = 60.0
# variables of a developer's environment that a new machine does not have
_OWN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")


class FirstVector(NamedTuple):
    """The measurement: seconds from the clone to the end of the installation, to `ready in` and to the vector; the
    width of the vector; bytes of the environment, and bytes that this machine received meanwhile.
    """

    installed_s: float
    ready_s: float
    answered_s: float
    dims: int
    disk_bytes: int
    received_bytes: int


def measure(folder: Path) -> FirstVector:
    """Clone the commit of this checkout into a folder, and run the commands of README.md."""
    page = (ROOT / "README.md").read_text("utf-8")
    (command,) = re.findall(r'^make serve ARGS="(\S+)"$', page, re.MULTILINE)
    (path, body) = re.findall(r"^curl -s http://127\.0\.0\.1:8080(\S+) -d '(.*)'$", page, re.MULTILINE)[0]
    port, before = free_port(), _received()
    began_s = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "sie")], check=True)
    arguments = f"ARGS={command} --port {port} --data-dir {folder / 'data'}"
    with _served(folder / "sie", arguments) as lines:
        installed_s = ready_s = 0.0
        for line in lines:
            if line.startswith("[") and not installed_s:
                installed_s = time.monotonic() - began_s
            if line.startswith("[serve] ready in"):
                ready_s = time.monotonic() - began_s
                break
        assert ready_s, "it ended before it was ready"
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body.encode())
        with urllib.request.urlopen(request, timeout=END_S) as answer:
            dims = json.load(answer)["items"][0]["dense"]["dims"]
        answered_s = time.monotonic() - began_s
    environment = folder / "sie" / ".venv"
    disk_bytes = sum(file.lstat().st_blocks * 512 for file in environment.rglob("*"))
    return FirstVector(installed_s, ready_s, answered_s, dims, disk_bytes, _received() - before)


@contextlib.contextmanager
def _served(checkout: Path, arguments: str) -> Iterator[Iterator[str]]:
    """Run `make serve` in a process group of its own. Yield an iterator of its lines, which are printed too."""
    environ = {name: value for name, value in os.environ.items() if name not in _OWN and not name.startswith("SIE_")}
    process = subprocess.Popen(
        ["make", "serve", f"PYTHON={Path(sys.executable).resolve()}", arguments],
        cwd=checkout,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        yield _printed(process.stdout)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=END_S)


def _printed(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        print(line, end="", flush=True)
        yield line


def _received() -> int:
    """Return the bytes that this machine has received from others."""
    return sum(count.bytes_recv for name, count in psutil.net_io_counters(pernic=True).items() if name != "lo")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        found = measure(Path(name))
    print(
        f"installed after {found.installed_s:.0f} s, ready after {found.ready_s:.0f} s, {found.dims} numbers after "
        f"{found.answered_s:.0f} s; {found.disk_bytes / 1e9:.1f} GB on disk, "
        f"{found.received_bytes / 1e9:.1f} GB received"
    )
