"""Report of a benchmark: printed at once, and stored for a file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def machine() -> str:
    """Return the number of cores, and the processor's name in /proc/cpuinfo (Linux)."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return f"{os.cpu_count()} cores of {', '.join(sorted(names)) or 'an unnamed processor'}"


class Report:
    """Report that is called with each line. `save` writes all lines to the file of --out."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self._lines.append(line)

    def save(self, path: Path | None) -> None:
        if path is not None:
            path.write_text("\n".join(self._lines) + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every benchmark of the queue."""
    parser.add_argument("--code", type=Path, help="another checkout whose processes are to be measured")
    parser.add_argument("--out", type=Path, help="write the report here as well")
