"""Two parts of the GPU kit, `tests` and `parity`. They run tests/gpu, and tests/parity with its models on the GPU.

    pytest ──a line for each test──► NAME.jsonl ─┐
    ParityTable.record ──a line for each cell──► parity-cells.jsonl ─┴──► tables

Each line is written at once, so that the tables also show the lines of a run that a time limit has stopped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import kit
from kit import REHEARSAL, RESULTS

ROOT = Path(__file__).parents[2]
OUTCOMES = ("passed", "skipped", "failed")
PRECISIONS = ("float32", "float16", "bfloat16")
_SIXTEEN = "float16 or half or 16_bit"  # -k expression: tests that compute in 16 bits
# -k expression: tests of CPU engines and CPU memory
_OF_CPU = "graph or openvino or int8 or blocked"


def start(
    name: str, arguments: Sequence[str], environ: Mapping[str, str] = {}, processes: int = 1
) -> subprocess.Popen[bytes]:
    """Start pytest and return its process. Its output goes to the output of this process."""
    (RESULTS / f"{name}.jsonl").unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(Path(__file__).with_name("pytest.ini")),
        "--rootdir",
        str(ROOT),
    ]
    command += ["-p", "outcome_rows", "--tb=short", "-q", "--continue-on-collection-errors", *arguments]
    if processes > 1 and importlib.util.find_spec("xdist"):
        command += ["-n", str(processes), "--dist", "worksteal"]
    more = {"GPU_OUTCOMES": str(RESULTS / f"{name}.jsonl"), "OMP_NUM_THREADS": "1", **environ}
    # A test of the kit may run in a pytest-xdist worker. Without this filter, the new pytest would act as that worker.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.Popen(command, cwd=ROOT, env=own | more)


def lines(name: str) -> Iterator[tuple[str, str, float, str]]:
    """Yield (test, outcome, seconds, message) for each test that has ended."""
    file = RESULTS / f"{name}.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        yield tuple(json.loads(line))


def outcomes(name: str, arguments: Sequence[str]) -> list[tuple[str, str, float, str]]:
    """Run tests to their end and return what `lines` yields. Raise CheckFailed if pytest could not run the tests."""
    status = start(name, arguments).wait()
    if status not in (0, 1):
        raise kit.CheckFailed(f"pytest could not run the tests of {name}: exit status {status}")
    return list(lines(name))


def tabulate(name: str, names: Sequence[str], taken_s: float, *, is_shown: bool) -> bool:
    """Write a table of outcomes by test file, and a table of failed tests. `names`: the pytest runs whose outcomes are
    read. `taken_s`: seconds of these runs. Return True if tests ended and none failed.
    """
    ended = [line for run in names for line in lines(run)]
    table = kit.Table(
        name, f"Outcomes of the tests, {taken_s:.0f} s", ("file", *OUTCOMES, "seconds of tests"), is_shown=is_shown
    )
    for file in sorted({test.partition("::")[0] for test, *_ in ended}):
        own = [line for line in ended if line[0].startswith(f"{file}::")]
        counts = Counter(outcome for _, outcome, *_ in own)
        table.row(file, *(counts[outcome] for outcome in OUTCOMES), sum(seconds for _, _, seconds, _ in own))
    failed = [(test, message) for test, outcome, _, message in ended if outcome == "failed"]
    if failed:
        table.text("| failed | message |\n|---|---|")
        for row in failed:
            table.row(*row)
    return bool(ended) and not failed


def finish(name: str, running: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Write the tables of the outcomes of tests every 20 s until the pytest processes `running` have ended. Raise
    CheckFailed if a test failed or none ran.
    """
    begun_s = time.monotonic()
    while True:
        is_running = any(process.poll() is None for process in running.values())
        is_right = tabulate(name, list(running), time.monotonic() - begun_s, is_shown=not is_running)
        if name == "parity":
            cells(is_shown=not is_running)
        if not is_running:
            break
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s and any(process.poll() is None for process in running.values()):
            time.sleep(0.2)
    if not is_right or any(process.wait() not in (0, 5) for process in running.values()):
        raise kit.CheckFailed("tests failed, or none ran")


def cells(*, is_shown: bool) -> None:
    """Write the table of the worst parity values, by kind of model, path and precision."""
    from parity.table import ParityTable

    table = ParityTable.read(RESULTS / "parity-cells.jsonl")
    columns = [(path, precision) for path in ("packed", "padded") for precision in PRECISIONS]
    columns += [("stock", precision) for precision in PRECISIONS[1:]]
    written = kit.Table(
        "parity-cells",
        "Parity on the device: worst values against oracles in float32 on a processor",
        ("kind", *(f"{path} {precision}" for path, precision in columns)),
        is_shown=is_shown,
    )
    for kind in sorted({kind for kind, *_ in table.cells}):
        written.row(kind, *(table.cells.get((kind, *column), "-") for column in columns))


def tests() -> None:
    """Run tests/gpu without test_memory.py, which the part `memory` runs with no other test at the same time."""
    paths = ["tests/gpu", "--ignore=tests/gpu/test_memory.py"]
    if REHEARSAL:
        paths = ["tests/gpu/test_kernels.py", "-k", "mates"]
    else:
        paths += ["--cuda-table", str(RESULTS / "tests-cosines.md")]
    finish("tests", {"tests": start("tests", paths)})


def parity() -> None:
    """Run tests/parity in float32 and bfloat16 and, at the same time, its 16-bit tests in float16. If flash-attn is
    installed, the default attention uses it, so run all of these a second time with SDPA.
    """
    (RESULTS / "parity-cells.jsonl").unlink(missing_ok=True)
    processes = max(1, (len(os.sched_getaffinity(0)) - 2) // 2)
    attentions = ["auto", *(["sdpa"] if importlib.util.find_spec("flash_attn") else [])]
    extras = [str(place.relative_to(ROOT)) for place in sorted(ROOT.glob("extras/*/tests/parity"))]
    paths = ["tests/parity", *extras, "--ignore=tests/parity/test_table.py"]
    if REHEARSAL:
        paths = ["tests/parity/test_table.py"]
    running = {}
    for attention in attentions:
        for precision, chosen in (("bfloat16", f"not ({_OF_CPU})"), ("float16", f"({_SIXTEEN}) and not ({_OF_CPU})")):
            environ = {
                "PARITY_DEVICE": kit.DEVICE.type,
                "PARITY_PRECISION": precision,
                "PARITY_ATTENTION": attention,
                "PARITY_CELLS": str(RESULTS / "parity-cells.jsonl"),
            }
            name = f"parity-{precision}-{attention}"
            chosen = "test_a_cell" if REHEARSAL else chosen
            running[name] = start(
                name, [*paths, "-m", "not long", "-k", chosen], environ, 1 if REHEARSAL else processes
            )
            if REHEARSAL:
                break
    finish("parity", running)


if __name__ == "__main__":
    {"tests": tests, "parity": parity}[sys.argv[1]]()
