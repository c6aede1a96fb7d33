"""The promises of the queue, in many runs of the whole system under a virtual clock: seeds 0 to 4 in every run of the
tests, up to 399 in the long lane. A failure names the command that repeats its seed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from selection import long_but
from simulation.bugs import BUGS, planted
from simulation.virtual import VirtualLoop, virtual_time
from simulation.world import simulate

from sie_gateway.inference.shadow import Shadows
from sie_gateway.streams.publish import IDLE_S, WorkConsumers

SEEDS, BLOCK = 5, 5
# A seed takes 1.2 s of a processor, all take 8 minutes. A tenth of them finds every planted bug.
# `python -m tests.simulation 400 9999` runs more.
LONG, LONG_BLOCK = 395, 10
MIN_EVENTS = 500
ROOT = Path(__file__).parent.parent.parent


def blocks(seeds: range, size: int) -> list[object]:
    """Return the first seed of each block. Blocks share nothing, so any process may run any block."""
    return [pytest.param(first, marks=pytest.mark.xdist_group(f"seeds-{first}")) for first in seeds[::size]]


def failures(seeds: range) -> list[str]:
    """Return the violations of each seed, with the command that repeats its run."""
    messages = []
    for seed in seeds:
        report = simulate(seed)
        if len(report.events) < MIN_EVENTS:
            messages.append(f"seed {seed}: only {len(report.events)} events")
        if report.violations:
            violations = "\n    ".join(report.violations[:5])
            messages.append(f"seed {seed}, again with `python -m tests.simulation {seed} -v`:\n    {violations}")
    return messages


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", blocks(range(SEEDS), BLOCK))
def test_every_run_keeps_every_promise(first: int) -> None:
    messages = failures(range(first, first + BLOCK))
    assert not messages, "\n".join(messages)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", blocks(range(SEEDS, SEEDS + LONG), LONG_BLOCK))
def test_many_runs_keep_every_promise(first: int) -> None:
    messages = failures(range(first, first + LONG_BLOCK))
    assert not messages, "\n".join(messages)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", long_but(BUGS, [name for name, bug in BUGS.items() if not bug.long]))
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    with planted(name):
        for seed in range(bug.seeds):
            if any(bug.finds in violation for violation in simulate(seed).violations):
                return
    pytest.fail(f"not found by {bug.seeds} seeds")


def test_clocks_that_are_defaults_of_arguments_are_virtual() -> None:
    loop, real_s = VirtualLoop(), time.perf_counter()
    with virtual_time(loop, 0):
        by_name = (WorkConsumers.__init__.__kwdefaults__ or {})["clock"]
        by_place = (Shadows.__init__.__defaults__ or ())[-1]
        assert by_name() == by_place() == time.perf_counter() == loop.now_s
    assert WorkConsumers.__init__.__kwdefaults__ == {"idle_s": IDLE_S, "clock": time.perf_counter}
    assert time.perf_counter() >= real_s
    loop.close()


@pytest.mark.timeout(300)
def test_one_seed_is_one_run() -> None:
    first, second = simulate(3), simulate(3)
    assert first.events == second.events
    assert first.violations == second.violations


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_is_the_same_in_every_process() -> None:
    """Neither addresses nor the order of hashed strings change the events. The other process has another hash seed."""
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    command = [sys.executable, "-m", "tests.simulation", "4", "4", "--digests"]
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode in (0, 1), done.stderr
    digests = (line.split() for line in done.stdout.splitlines() if "digest" in line)
    there = {int(words[1].rstrip(":")): words[-1] for words in digests}
    assert there == {4: simulate(4).digest}
