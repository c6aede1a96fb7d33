"""The scheduler in virtual time (`bench/replay.py`): latencies and batches computed by hand, and properties."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from replay import Machine, Replay, ReplayPlan, ReplayReport, Request, generate, percentile

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


def test_tokenising_and_taking_in_come_before_the_forward_pass() -> None:
    machine = dataclasses.replace(MACHINE, call_s=0.001, read_s=0.00001, delivery_s=0.002)
    report = runs([Request(0.0, (100,))], machine=machine)
    assert report.latency_s == pytest.approx([0.002 + 0.001 + 0.001 + 0.020])
    assert report.host_s == pytest.approx(0.002)


def test_what_comes_while_the_device_is_busy_runs_as_one_batch_behind_it() -> None:
    """The pipeline depth is 1. A batch of 20 ms begins at 0. Three requests come meanwhile, run together at 20 ms, and
    take 10 ms and 30 tokens.
    """
    plan = dataclasses.replace(PLAN, pipeline_depth=1)
    arrivals = [
        Request(0.0, (100,)),
        Request(0.005, (10,)),
        Request(0.010, (10,)),
        Request(0.015, (10,)),
    ]
    report = runs(arrivals, plan)
    assert report.batches == 2
    assert report.latency_s == pytest.approx([0.020, 0.028, 0.023, 0.018])
    assert report.wait_s == pytest.approx([0.0, 0.015, 0.010, 0.005])


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


def test_two_workers_share_the_work_and_two_lanes_run_side_by_side() -> None:
    arrivals = [Request(0.0, (100,)), Request(0.0, (100,))]
    alone = dataclasses.replace(PLAN, max_batch_requests=1)
    assert runs(arrivals, alone).latency_s == pytest.approx([0.020, 0.040])
    assert runs(arrivals, dataclasses.replace(alone, workers=2)).latency_s == pytest.approx([0.020, 0.020])
    assert runs(arrivals, dataclasses.replace(alone, lanes=2)).latency_s == pytest.approx([0.020, 0.020])


def test_bulk_work_lets_interactive_work_pass() -> None:
    """An interactive request comes a moment after thirty bulk requests. It waits only for the batch at the device and
    the sealed batch.
    """
    plan = dataclasses.replace(PLAN, max_batch_requests=1)
    report = runs([*(Request(0.0, (100,), priority="bulk") for _ in range(30)), Request(0.001, (100,))], plan)
    assert report.latency_s[-1] == pytest.approx(0.059)
    assert max(report.latency_s[:-1]) == pytest.approx(31 * 0.020)


def test_deliveries_that_come_one_by_one_are_gathered() -> None:
    """Thirteen requests come at once and are delivered 1 ms apart. The first is tokenised alone, and the others in one
    call.
    """
    machine = dataclasses.replace(MACHINE, delivery_s=0.001, call_s=0.0001)
    arrivals = [Request(0.0, (10,)) for _ in range(13)]
    assert runs(arrivals, dataclasses.replace(PLAN, min_quantum_ms=50, max_quantum_ms=50), machine).calls == 2
    assert runs(arrivals, dataclasses.replace(PLAN, min_quantum_ms=0, max_quantum_ms=0), machine).calls == 13


# properties of replays


def test_the_quantum_saves_calls_under_load_and_changes_nothing_at_idle() -> None:
    """Loads beyond the device's capacity and far below it, with gathering and without."""
    machine = Machine(0.004, 0.00002, call_s=0.000055, read_s=0.0000018, delivery_s=0.000025)
    none = dataclasses.replace(PLAN, min_quantum_ms=0, max_quantum_ms=0)
    busy = generate("poisson:rate=3000,length=40,seconds=2")
    gathered, alone = runs(busy, PLAN, machine), runs(busy, none, machine)
    assert gathered.calls < 0.8 * alone.calls
    assert gathered.host_s < alone.host_s
    for percent in (50, 99):
        least, most = sorted(percentile(sorted(outcome.latency_s), percent) for outcome in (gathered, alone))
        assert most <= 1.01 * least
    quiet = generate("poisson:rate=20,length=40,seconds=30")
    assert runs(quiet, PLAN, machine) == runs(quiet, none, machine)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    rate=st.integers(5, 500),
    burst=st.integers(1, 40),
    workers=st.integers(1, 3),
    lanes=st.integers(1, 2),
    budget=st.integers(1, 3000),
    requests=st.integers(1, 12),
    quantum=st.integers(0, 20),
)
def test_everything_is_answered_the_same_each_time_and_no_faster_than_the_device(
    seed: int, rate: int, burst: int, workers: int, lanes: int, budget: int, requests: int, quantum: int
) -> None:
    trace = generate(f"poisson:rate={rate},length=80,seconds=1,bulk=0.4,models=3,inputs=3,burst={burst},seed={seed}")
    plan = ReplayPlan(
        workers=workers,
        lanes=lanes,
        max_batch_cost=budget,
        max_batch_requests=requests,
        chunk_cost=300,
        min_quantum_ms=min(2, quantum),
        max_quantum_ms=quantum,
    )
    machine = Machine(0.002, 0.00005, 1e-9, 0.0001, 0.000001, 0.00003)
    report = runs(trace, plan, machine)
    assert report == runs(trace, plan, machine)
    assert report.tokens == sum(sum(request.tokens) for request in trace)
    assert report.items >= len(trace)
    assert report.batches <= report.items
    for request, latency_s, wait_s in zip(trace, report.latency_s, report.wait_s, strict=True):
        least = min(sum(request.tokens), 300)
        assert latency_s >= wait_s + machine.base_s
        assert latency_s >= machine.base_s + machine.token_s * min(least, max(request.tokens))
    assert report.device_s <= report.end_s * workers * lanes + 1e-9
