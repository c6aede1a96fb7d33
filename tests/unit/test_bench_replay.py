"""The scheduler in virtual time (`bench/replay.py`): latencies and batches computed by hand, and properties."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from replay import Machine, Replay, ReplayPlan, ReplayReport, Request

MACHINE = Machine(base_s=0.010, token_s=0.0001)
PLAN = ReplayPlan()


def runs(requests: list[Request], plan: ReplayPlan = PLAN, machine: Machine = MACHINE) -> ReplayReport:
    return Replay(requests, plan, machine).run()


# results computed by hand


def test_a_lone_request_takes_its_forward_pass_and_nothing_else() -> None:
    """A forward pass takes 10 ms and 0.1 ms for each of 100 tokens. The bounds of waiting and gathering do not matter
    without other requests.
    """
    slow = dataclasses.replace(PLAN, max_wait_ms=500, min_quantum_ms=100, max_quantum_ms=500)
    for plan in (PLAN, slow):
        report = runs([Request(0.0, (100,)), Request(1.0, (100,))], plan)
        assert report.latency_s == pytest.approx([0.020, 0.020])
        assert report.wait_s == pytest.approx([0.0, 0.0])
        assert (report.batches, report.items, report.tokens, report.calls) == (2, 2, 200, 2)
        assert report.device_s == pytest.approx(0.040)


def test_a_pipeline_of_two_seals_the_next_batch_when_its_oldest_has_waited_its_bound() -> None:
    """The next batch is sealed at 10 ms, 5 ms after its first request came, and has the second one. The third request
    is left for another batch.
    """
    arrivals = [
        Request(0.0, (100,)),
        Request(0.005, (10,)),
        Request(0.0099, (10,)),
        Request(0.015, (10,)),
    ]
    report = runs(arrivals)
    assert report.batches == 3
    assert report.latency_s == pytest.approx([0.020, 0.027, 0.0221, 0.028])


def test_the_budget_cuts_batches_and_a_request_waits_for_its_last_chunk() -> None:
    """Ten inputs of 100 tokens, in messages of 200 and batches of 400 tokens, run as 4, 4 and 2 inputs. Squares are
    summed over inputs.
    """
    plan = dataclasses.replace(PLAN, chunk_cost=200, max_batch_cost=400)
    report = runs([Request(0.0, (100,) * 10)], plan, Machine(0.010, 0.0001, square_s=1e-6))
    assert (report.batches, report.items, report.tokens) == (3, 5, 1000)
    assert report.device_s == pytest.approx(3 * 0.010 + 1000 * 0.0001 + 10 * 100**2 * 1e-6)
    assert report.latency_s == pytest.approx([report.device_s])


def test_bulk_work_lets_interactive_work_pass() -> None:
    """An interactive request comes a moment after thirty bulk requests. It waits only for the batch at the device and
    the sealed batch.
    """
    plan = dataclasses.replace(PLAN, max_batch_requests=1)
    report = runs([*(Request(0.0, (100,), priority="bulk") for _ in range(30)), Request(0.001, (100,))], plan)
    assert report.latency_s[-1] == pytest.approx(0.059)
    assert max(report.latency_s[:-1]) == pytest.approx(31 * 0.020)


# properties of replays
