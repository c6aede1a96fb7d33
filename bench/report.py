"""Options, alternating rounds, and report of a benchmark."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")


def machine() -> str:
    """Return the number of cores, and the processor's name in /proc/cpuinfo (Linux)."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return f"{os.cpu_count()} cores of {', '.join(sorted(names)) or 'an unnamed processor'}"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Report:
    """Report of a benchmark. A call prints one line; `save` writes all lines to the file of --out."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __call__(self, line: str = "") -> None:
        print(line, flush=True)
        self._lines.append(line)

    def save(self, path: Path | None) -> None:
        if path is not None:
            path.write_text("\n".join(self._lines) + "\n")


def parser_of(
    doc: str | None, *, rounds: int = 0, seconds: float = 0.0, out: str = "", has_code: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with the option --out. `out`: default file of --out, in bench/results. `rounds`, `seconds`:
    defaults of --rounds and --seconds; 0 omits the option. `has_code`: add --code. `doc`: the help text.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds:
        parser.add_argument("--rounds", type=int, default=rounds)
    if seconds:
        parser.add_argument("--seconds", type=float, default=seconds, help="seconds of each measurement")
    if has_code:
        parser.add_argument("--code", type=Path, help="checkout whose processes are measured instead of this one's")
    default = Path(__file__).parent / "results" / out if out else None
    parser.add_argument("--out", type=Path, default=default, help="file to which the report is written as well")
    return parser


def in_turn(rounds: int, runs: Mapping[K, Callable[[], T]]) -> dict[K, list[T]]:
    """Call each function once in each round, so that other load of the machine affects all functions. Return name ->
    results. One further round before these warms up; its results are dropped.
    """
    results = [{name: run() for name, run in runs.items()} for _ in range(rounds + 1)][1:]
    return {name: [result[name] for result in results] for name in runs}
