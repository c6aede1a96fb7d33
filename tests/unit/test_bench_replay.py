"""`sie bench replay`: traces with results computed by hand, properties of replays, and the command."""

from __future__ import annotations

import dataclasses
import resource
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from sie_cli.main import main
from sie_cli.replay.curve import percentile, svg
from sie_cli.replay.replay import Machine, Replay, ReplayPlan, ReplayReport
from sie_cli.replay.trace import MAX_TOKENS, Ran, Trace, TraceError, TraceRequest, fit, generate, read, write

MACHINE = Machine(base_s=0.010, token_s=0.0001)
PLAN = ReplayPlan()


def runs(requests: list[TraceRequest], plan: ReplayPlan = PLAN, machine: Machine = MACHINE) -> ReplayReport:
    return Replay(requests, plan, machine).run()


# results computed by hand


def test_a_lone_request_takes_its_forward_pass_and_nothing_else() -> None:
    """A forward pass takes 10 ms and 0.1 ms for each of 100 tokens. The bounds of waiting and gathering do not matter
    without other requests.
    """
    slow = dataclasses.replace(PLAN, max_wait_ms=500, min_quantum_ms=100, max_quantum_ms=500)
    for plan in (PLAN, slow):
        report = runs([TraceRequest(0.0, (100,)), TraceRequest(1.0, (100,))], plan)
        assert report.latency_s == pytest.approx([0.020, 0.020])
        assert report.wait_s == pytest.approx([0.0, 0.0])
        assert (report.batches, report.items, report.tokens, report.calls) == (2, 2, 200, 2)
        assert report.device_s == pytest.approx(0.040)


def test_tokenising_and_taking_in_come_before_the_forward_pass() -> None:
    machine = dataclasses.replace(MACHINE, call_s=0.001, read_s=0.00001, delivery_s=0.002)
    report = runs([TraceRequest(0.0, (100,))], machine=machine)
    assert report.latency_s == pytest.approx([0.002 + 0.001 + 0.001 + 0.020])
    assert report.host_s == pytest.approx(0.002)


def test_what_comes_while_the_device_is_busy_runs_as_one_batch_behind_it() -> None:
    """The pipeline depth is 1. A batch of 20 ms begins at 0. Three requests come meanwhile, run together at 20 ms, and
    take 10 ms and 30 tokens.
    """
    plan = dataclasses.replace(PLAN, pipeline_depth=1)
    arrivals = [
        TraceRequest(0.0, (100,)),
        TraceRequest(0.005, (10,)),
        TraceRequest(0.010, (10,)),
        TraceRequest(0.015, (10,)),
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
        TraceRequest(0.0, (100,)),
        TraceRequest(0.005, (10,)),
        TraceRequest(0.0099, (10,)),
        TraceRequest(0.015, (10,)),
    ]
    report = runs(arrivals)
    assert report.batches == 3
    assert report.latency_s == pytest.approx([0.020, 0.027, 0.0221, 0.028])


def test_the_budget_cuts_batches_and_a_request_waits_for_its_last_chunk() -> None:
    """Ten inputs of 100 tokens, in messages of 200 and batches of 400 tokens, run as 4, 4 and 2 inputs. Squares are
    summed over inputs.
    """
    plan = dataclasses.replace(PLAN, chunk_cost=200, max_batch_cost=400)
    report = runs([TraceRequest(0.0, (100,) * 10)], plan, Machine(0.010, 0.0001, square_s=1e-6))
    assert (report.batches, report.items, report.tokens) == (3, 5, 1000)
    assert report.device_s == pytest.approx(3 * 0.010 + 1000 * 0.0001 + 10 * 100**2 * 1e-6)
    assert report.latency_s == pytest.approx([report.device_s])


def test_two_workers_share_the_work_and_two_lanes_run_side_by_side() -> None:
    arrivals = [TraceRequest(0.0, (100,)), TraceRequest(0.0, (100,))]
    alone = dataclasses.replace(PLAN, max_batch_requests=1)
    assert runs(arrivals, alone).latency_s == pytest.approx([0.020, 0.040])
    assert runs(arrivals, dataclasses.replace(alone, workers=2)).latency_s == pytest.approx([0.020, 0.020])
    assert runs(arrivals, dataclasses.replace(alone, lanes=2)).latency_s == pytest.approx([0.020, 0.020])


def test_bulk_work_lets_interactive_work_pass() -> None:
    """An interactive request comes a moment after thirty bulk requests. It waits only for the batch at the device and
    the sealed batch.
    """
    plan = dataclasses.replace(PLAN, max_batch_requests=1)
    report = runs([*(TraceRequest(0.0, (100,), priority="bulk") for _ in range(30)), TraceRequest(0.001, (100,))], plan)
    assert report.latency_s[-1] == pytest.approx(0.059)
    assert max(report.latency_s[:-1]) == pytest.approx(31 * 0.020)


def test_deliveries_that_come_one_by_one_are_gathered() -> None:
    """Thirteen requests come at once and are delivered 1 ms apart. The first is tokenised alone, and the others in one
    call.
    """
    machine = dataclasses.replace(MACHINE, delivery_s=0.001, call_s=0.0001)
    arrivals = [TraceRequest(0.0, (10,)) for _ in range(13)]
    assert runs(arrivals, dataclasses.replace(PLAN, min_quantum_ms=50, max_quantum_ms=50), machine).calls == 2
    assert runs(arrivals, dataclasses.replace(PLAN, min_quantum_ms=0, max_quantum_ms=0), machine).calls == 13


# properties of replays


def test_the_quantum_saves_calls_under_load_and_changes_nothing_at_idle() -> None:
    """The traces are those of docs/replay.md: beyond the device's capacity, and far below it, with gathering and
    without.
    """
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


def test_more_workers_and_a_faster_device_are_never_slower_where_every_batch_is_one_message() -> None:
    # one queue, so that the order is that of arrival
    requests = generate("poisson:rate=90,length=60,seconds=10,seed=4")
    alone = dataclasses.replace(PLAN, max_batch_requests=1)
    replays = [runs(requests, dataclasses.replace(alone, workers=workers)) for workers in (1, 2, 4)]
    for percent in (50, 99):
        latencies = [percentile(sorted(outcome.latency_s), percent) for outcome in replays]
        assert latencies == sorted(latencies, reverse=True)
        assert latencies[0] > latencies[-1]
    assert len({round(outcome.device_s, 6) for outcome in replays}) == 1
    quick = runs(requests, alone, Machine(0.005, 0.0001))
    assert all(fast <= slow + 1e-9 for fast, slow in zip(quick.latency_s, replays[0].latency_s, strict=True))


def test_a_longer_wait_makes_fewer_and_larger_batches_where_there_is_load() -> None:
    requests = generate("poisson:rate=300,length=20,seconds=10,seed=2")
    replays = [
        runs(requests, dataclasses.replace(PLAN, max_wait_ms=wait, max_batch_requests=64)) for wait in (0, 10, 40)
    ]
    assert [outcome.batches for outcome in replays] == sorted((outcome.batches for outcome in replays), reverse=True)
    assert replays[0].batches > replays[-1].batches
    assert replays[-1].device_s < replays[0].device_s


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


# traces


def test_a_trace_is_read_back_as_it_was_written_from_its_first_request_on() -> None:
    requests = [TraceRequest(2.5, (3, 4)), TraceRequest(1.5, (7,), "m", "bulk", "l")]
    trace = read(
        [
            *write(requests),
            b'{"ran": {"tokens": 8, "attention": 64, "seconds": 0.5}}',
            b"",
            b'{"settings": {"lanes": 2}}',
        ]
    )
    moved = (TraceRequest(0.0, (7,), "m", "bulk", "l"), TraceRequest(1.0, (3, 4)))
    assert trace == Trace(moved, (Ran(8, 64, 0.5),), {"lanes": 2})


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"nonsense", "line 2"),
        (b'{"at": 1, "tokens": []}', "at least one input"),
        (b'{"at": 1, "tokens": [0]}', "at least one token"),
        (b'{"at": 1, "tokens": [4], "text": "secret"}', "text"),
        (b'{"tokens": [4]}', "at"),
        (b'{"ran": {"tokens": 3}}', "attention"),
        (b'{"at": 1, "tokens": [4], "priority": "urgent"}', "priority"),
        (b"[]", "line 2"),
        (b'{"at": 1, "tokens": [4], "model": "\xff"}', "invalid start byte"),
        (b'{"at": ' + b"[" * 100_000, "recursion"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(line: bytes, problem: str) -> None:
    with pytest.raises(TraceError, match="line 2") as caught:
        read([b'{"at": 0, "tokens": [1]}', line])
    assert problem in str(caught.value)


def test_times_that_are_too_far_apart_are_refused() -> None:
    with pytest.raises(TraceError, match="too far apart"):
        read([b'{"at": -1e308, "tokens": [1]}', b'{"at": 1e308, "tokens": [1]}'])


def test_generated_arrivals_are_as_asked_for() -> None:
    requests = generate("poisson:rate=500,length=50,seconds=20,burst=5,bulk=0.25,models=4,inputs=2,seed=3")
    assert requests == generate("poisson:rate=500,length=50,seconds=20,burst=5,bulk=0.25,models=4,inputs=2,seed=3")
    assert len(requests) == pytest.approx(10_000, rel=0.08)
    assert len({request.at for request in requests}) == len(requests) / 5
    lengths = [tokens for request in requests for tokens in request.tokens]
    assert sum(lengths) / len(lengths) == pytest.approx(50, rel=0.03)
    assert max(lengths) <= MAX_TOKENS
    assert sum(request.priority == "bulk" for request in requests) / len(requests) == pytest.approx(0.25, abs=0.02)
    assert len({request.model for request in requests}) == 4
    assert {request.tokens for request in generate("poisson:length=50,spread=0")} == {(50,)}


@pytest.mark.parametrize(
    "spec",
    [
        "uniform:rate=3",
        "poisson:rate=0",
        "poisson:speed=3",
        "poisson:rate=x",
        "poisson:burst=0",
        "poisson:rate=nan",
        "poisson:rate=1e12",
    ],
)
def test_a_spec_that_makes_no_trace_is_refused(spec: str) -> None:
    with pytest.raises(TraceError):
        generate(spec)


def test_the_device_is_fitted_to_measured_batches() -> None:
    """All three terms are fitted. A term that cannot be told apart, or would be below 0, is 0."""
    rows = [(tokens, tokens * length) for tokens in (64, 500, 2000, 8000) for length in (16, 128, 500)]
    whole = [Ran(tokens, squares, 0.002 + 1e-5 * tokens + 1e-8 * squares) for tokens, squares in rows]
    assert fit(whole) == pytest.approx((0.002, 1e-5, 1e-8))
    assert fit([Ran(tokens, squares, 0.004) for tokens, squares in rows]) == pytest.approx((0.004, 0, 0))
    falling = fit([Ran(tokens, squares, 0.01 - 1e-6 * tokens) for tokens, squares in rows])
    assert min(falling) == 0
    with pytest.raises(TraceError, match="--device"):
        fit([Ran(1, 1, 0.1)])


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, percent) for percent in (0, 1, 50, 99, 99.5, 100)] == [1, 1, 50, 99, 100, 100]


# the command


def invoked(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["bench", "replay", *arguments])
    return result.exit_code, result.output


def cells(output: str, name: str) -> list[float]:
    (line,) = (line for line in output.splitlines() if line.startswith(name))
    return [float(cell) for cell in line.removeprefix(name).split()]


def test_the_command_shows_how_it_was_beside_what_would_be(tmp_path: Path) -> None:
    trace, plot = tmp_path / "t.jsonl", tmp_path / "t.svg"
    arguments = (str(trace), "--device", "base_ms=10,token_us=100", "--host", "call_us=0,read_us=0,delivery_us=0")
    trace.write_bytes(
        b"".join(write([TraceRequest(0.0, (100,)), TraceRequest(0.0, (100,))]))
        + b'{"settings": {"max_batch_requests": 1}}\n'
    )
    status, output = invoked(
        *arguments, "--what-if", "workers=2", "--what-if", "max_batch_requests=2,max_wait_ms=0", "--plot", str(plot)
    )
    assert status == 0, output
    assert cells(output, "latency p50, ms") == [20, 20, 20]
    assert cells(output, "longest, ms") == [40, 20, 40]
    assert cells(output, "batches") == [2, 2, 2]
    drawn = ElementTree.fromstring(plot.read_text("utf-8"))
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 3
    assert invoked(*arguments, "--base", "max_batch_requests=3") == invoked(
        *arguments, "--base", "max_batch_requests=3"
    )


def test_the_command_fits_the_device_where_the_trace_has_batches(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    ran = (Ran(tokens, tokens * 10, 0.01 + tokens * 1e-4) for tokens in (10, 100, 1000))
    lines = [b'{"at": 7, "tokens": [100]}', *(msgspec.json.encode({"ran": batch}) for batch in ran)]
    trace.write_bytes(b"\n".join(lines))
    status, output = invoked(str(trace), "--host", "call_us=0,read_us=0,delivery_us=0")
    assert status == 0, output
    assert cells(output, "longest, ms") == pytest.approx([20], abs=0.01)


def test_the_command_makes_a_trace_and_never_over_another(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    arguments = (str(trace), "--generate", "poisson:rate=50,seconds=2", "--device", "base_ms=1")
    status, output = invoked(*arguments)
    assert status == 0, output
    before = trace.read_bytes()
    status, output = invoked(*arguments)
    assert status == 1
    assert "exists" in output
    assert trace.read_bytes() == before
    trace.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) - 1, hard))
    try:
        status, output = invoked(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (status, trace.exists()) == (1, False), "a partial trace would be taken for a whole one"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--what-if", "speed=3"), "speed"),
        (("--what-if", "workers=0"), "workers=0"),
        (("--device", "base_ms=-1"), "must not be negative"),
        ((), "--device"),
        (("--device", "base_ms=0"), "must be above 0"),
        (("--base", "min_quantum_ms=20", "--device", "base_ms=1"), "above max_quantum_ms"),
        (("--what-if", "max_batch_cost=1e308"), "too large"),
        (("--device", "base_ms=1", "--generate", "poisson:length=1e308"), "too large"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_line(
    tmp_path: Path, arguments: tuple[str, ...], problem: str
) -> None:
    trace = tmp_path / "t.jsonl"
    if "--generate" not in arguments:
        trace.write_bytes(b"".join(write([TraceRequest(0.0, (1,))])))
    if "--what-if" in arguments:
        arguments = (*arguments, "--device", "base_ms=1")
    status, output = invoked(str(trace), *arguments)
    assert status == 1
    assert output.startswith("Error: ")
    assert problem in output
    assert len(output.splitlines()) == 1


def test_a_curve_is_drawn_for_any_names_and_values() -> None:
    drawn = ElementTree.fromstring(svg({"<a & b>": [0.001], "b": [0.5, 0.0001, 12.0]}))
    assert "<a & b>" in {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
