"""What a benchmark says: printed as it comes, and kept for a file."""

from __future__ import annotations

import argparse
from pathlib import Path


class Report:
    """Call it with each line. `save` writes all of them where --out says."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self._lines.append(line)

    def save(self, path: Path | None) -> None:
        if path is not None:
            path.write_text("\n".join(self._lines) + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of the queue takes."""
    parser.add_argument("--code", type=Path, help="another checkout whose processes are to be measured")
    parser.add_argument("--out", type=Path, help="write the report here as well")
