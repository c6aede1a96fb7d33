"""`python -m tests.simulation SEED [LAST] [-v]`: run one seed or many, and print the events and violations."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from simulation.bugs import BUGS, planted
from simulation.world import plan_of, simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("seed", type=int)
    parser.add_argument("last", type=int, nargs="?", help="all seeds up to this one; only failures are shown")
    parser.add_argument("-v", "--verbose", action="store_true", help="every event, and the logs of the processes")
    parser.add_argument("--digests", action="store_true", help="one line for each seed, whatever came of it")
    parser.add_argument("--bug", choices=list(BUGS), help="with this bug planted")
    arguments = parser.parse_args()
    failed, start_s, events = [], time.process_time(), 0
    for seed in range(arguments.seed, (arguments.last or arguments.seed) + 1):
        with planted(arguments.bug) if arguments.bug else contextlib.nullcontext():
            report = simulate(seed, log=print if arguments.verbose else None)
        events += len(report.events)
        if arguments.verbose:
            print("\n".join(report.events))
            print(plan_of(seed))
        if report.violations or arguments.digests or arguments.last is None:
            print(f"seed {seed}: {len(report.events)} events, {dict(report.answers)}, digest {report.digest}")
            print("\n".join(f"    {line}" for line in report.violations[:10]))
        if report.violations:
            failed.append(seed)
    print(f"{len(failed)} failed, {events} events, {time.process_time() - start_s:.1f} s of CPU")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
