"""Run the tests in lanes, one after another, and beside them lint and the lane `precision`.

    python tests/lanes.py                  everything that `make test` promises
    python tests/lanes.py -k name          only what pytest selects by these arguments; no lint
    python tests/lanes.py tests/unit/test_options.py
    python tests/lanes.py core             the tests of the core, without those of the extras
    python tests/lanes.py --system         what `make test-system` promises
    python tests/lanes.py --long           what `make test-long` promises, an hour of two cores

A lane is a set of markers with its own environment. A lane of one marker collects only the files that name the marker,
because collecting all files takes 10 s of a processor. build/tests/LANE.log gets the output of a lane as it comes, with
each failure at once and the 80 slowest tests at the end; the long lanes print each test. All lanes run, also after one
that failed. The exit status is 0, or that of the first lane that failed, or 5 if no lane selected a test.
The first line says what will run and how long it takes.
"""

import os
import select
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zygote

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "tests"
NO_TESTS = 5  # pytest's exit status when it selects none
COLLECTED = "PYTEST_COLLECTED"  # variable with the arguments by which the forked process collects (worker.py)
_TESTPATHS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]["testpaths"]


@dataclass(frozen=True)
class Lane:
    name: str
    marker: str = ""  # the marker of all its tests; if empty, its tests have none of the markers
    selected: str = ""  # an expression of markers in place of the usual one
    paths: Sequence[str] = ()  # paths to collect in place of the files that name the marker
    options: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    beside: bool = False  # the lane runs beside the others, and its output is printed when they have ended
    is_redundant: bool = False  # the lane is left out, because on this machine it would run as the others do
    minutes: float = 0.0  # that all its tests take on two cores; 0 for a lane that runs beside the others

    @property
    def markers(self) -> str:
        if self.selected:
            return self.selected
        exclusions = [f"not {lane_marker}" for lane_marker in ("debian", "long") if lane_marker != self.marker]
        return " and ".join([self.marker or "not serial", *exclusions])

    def files(self) -> list[str]:
        """Return the files or folders that may have tests of this lane, or an empty list for all."""
        if self.paths or not self.marker:
            return [*self.paths]
        tests = (path for folder in _TESTPATHS for path in sorted((ROOT / folder).rglob("test_*.py")))
        return [str(path.relative_to(ROOT)) for path in tests if f"mark.{self.marker}" in path.read_text("utf-8")]


def _has_more_than_avx2() -> bool:
    """Return True if this CPU has AVX-512, or if the system does not say."""
    about = Path("/proc/cpuinfo")
    return not about.exists() or "flags" not in (text := about.read_text()) or " avx512f" in text


FORKED = (sys.executable, str(ROOT / "tests" / "worker.py"))  # a Python that has collected the tests


def _processes(count: int) -> tuple[str, ...]:
    """Return options for so many processes, of which each runs groups of tests/conftest.py in their order."""
    python = shlex.join(FORKED)
    options = ("--dist", "loadgroup", "--no-loadscope-reorder", "--max-worker-restart", "5")
    return ("--tx", f"{count}*popen//python={python}", *options)


LANES = (
    # four processes on two cores, because two thirds of the time of a test it waits; with six, the clusters of the
    # system's tests starve each other on two slow cores
    Lane("parallel", options=_processes(4), environ={"OMP_NUM_THREADS": "1"}, minutes=9),
    Lane("serial", "serial", options=_processes(1), environ={"OMP_NUM_THREADS": "1"}, minutes=0.5),
    # tests that depend on the precision of the CPU run once more as on a CPU with only AVX2
    Lane(
        "precision",
        "precision",
        environ={"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        beside=True,
        is_redundant=not _has_more_than_avx2(),
    ),
)
SYSTEM = (Lane("system", "debian", options=_processes(3), minutes=5),)
# the time-out is higher, because 1,000 examples may take longer than other tests
_PATIENT = ("-v", "--hypothesis-profile=long", "--timeout=300", "-o", "faulthandler_timeout=3900")
LONG = (
    Lane(
        "long",
        selected="(long or hypothesis) and not serial",
        paths=("tests", "extras"),
        # no more processes: long tests take more memory, and more of them have bounds of time
        options=(*_PATIENT, *_processes(3)),
        environ={"OMP_NUM_THREADS": "1"},
        minutes=60,
    ),
    Lane(
        "long-serial",
        selected="(long or hypothesis) and serial",
        paths=("tests", "extras"),
        options=_PATIENT,
        minutes=10,
    ),
)
_SETS = {"--system": SYSTEM, "--long": LONG}


def main(arguments: Sequence[str]) -> int:
    lanes, is_test = LANES, not arguments or arguments[0] not in _SETS
    if not is_test:
        lanes, arguments = _SETS[arguments[0]], arguments[1:]
    if arguments and arguments[0] == "core":
        arguments = [*(folder for folder in _TESTPATHS if folder != "extras"), *arguments[1:]]
    lanes = [lane for lane in lanes if not lane.is_redundant]
    LOGS.mkdir(parents=True, exist_ok=True)
    announce(lanes, arguments, has_lint=is_test and not arguments)
    beside = [Beside(lane.name, command(lane, arguments), lane.environ) for lane in lanes if lane.beside]
    if is_test and not arguments:
        beside.append(Beside("lint", ["nice", "make", "--no-print-directory", "lint"]))
    zygote.share()  # lanes with the same environment share a process that has imported and collected
    statuses = {lane.name: run(lane, arguments) for lane in lanes if not lane.beside}
    statuses |= {process.name: process.ended() for process in beside}
    failed = {name: status for name, status in statuses.items() if status not in (0, NO_TESTS)}
    if failed:
        print("failed:", ", ".join(failed), flush=True)
        return next(iter(failed.values()))
    return 0 if 0 in statuses.values() else NO_TESTS


def announce(lanes: Sequence[Lane], arguments: Sequence[str], *, has_lint: bool) -> None:
    """Print what will run, and about how long it takes."""
    minutes = f", about {sum(lane.minutes for lane in lanes):g} minutes on two cores" if not arguments else ""
    names = ", then ".join(lane.name for lane in lanes if not lane.beside)
    beside = [lane.name for lane in lanes if lane.beside] + ["lint"] * has_lint
    also = f"; beside them {', '.join(beside)}" if beside else ""
    print(f"tests: {names}{also}{minutes}; logs in {LOGS.relative_to(ROOT)}", flush=True)


def command(lane: Lane, arguments: Sequence[str]) -> list[str]:
    python = [sys.executable] if lane.beside else FORKED
    argv = [*python, "-m", "pytest", "-p", "no:cacheprovider", "-m", lane.markers, *lane.options]
    argv += ["--instafail", "--durations=80", "--durations-min=1"]
    argv += ["--color=yes"] if sys.stdout.isatty() else []
    return [*argv, *collected(lane, arguments)]


def collected(lane: Lane, arguments: Sequence[str]) -> list[str]:
    """Return the arguments by which pytest collects."""
    return [*(arguments or lane.files())]


class Beside:
    """A command that runs beside the lanes."""

    def __init__(self, name: str, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._argv = argv
        self._log = LOGS / f"{name}.log"
        with self._log.open("wb") as log:
            self._child = subprocess.Popen(
                argv, cwd=ROOT, env=os.environ | (environ or {}), stdout=log, stderr=subprocess.STDOUT
            )

    def ended(self) -> int:
        """Wait for the end, print its output, and return its exit status."""
        status = self._child.wait()
        print(f"{self.name}: {shlex.join(self._argv)}\n{self._log.read_text()}", flush=True)
        return status


def run(lane: Lane, arguments: Sequence[str]) -> int:
    """Run pytest, with its output on the terminal and in the lane's log, and return its exit status."""
    argv = command(lane, arguments)
    print(f"{lane.name}: {shlex.join(argv)}", flush=True)
    began_s = time.monotonic()
    environ = os.environ | lane.environ | {COLLECTED: shlex.join(collected(lane, arguments))}
    with (LOGS / f"{lane.name}.log").open("wb", buffering=0) as log:
        child = subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            for chunk in _printed(child):
                log.write(chunk)
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
        finally:
            child.wait()  # after Ctrl-C pytest, which also gets the signal, first ends its clusters
    print(f"{lane.name}: {time.monotonic() - began_s:.0f} s", flush=True)
    return child.returncode


def _printed(child: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield the output of a child until it has ended. Children of it may live on and keep the output open, such as the
    process that the lanes share. Their end is not awaited.
    """
    assert child.stdout is not None
    output, ended = child.stdout.fileno(), os.pidfd_open(child.pid)
    try:
        while output in select.select([output, ended], [], [])[0]:
            if not (chunk := os.read(output, 65536)):
                return
            yield chunk
    finally:
        os.close(ended)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
