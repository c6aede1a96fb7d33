"""Load of `sie eval --type perf`: closed and open loops against senders whose answers are known."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from click.testing import CliRunner
from simulation.virtual import VirtualLoop, in_virtual_time, virtual_time

from sie_cli.main import main
from sie_evals import load, perf, report
from sie_evals.load import NOBODY, NOT_SENT, LoadFailure, LoadLevel, LoadReply, LoadRequest, Send
from sie_evals.outputs import DENSE
from sie_evals.perf import LoadPlan, LoadPoint
from sie_evals.tasks import Texts

TASK = Texts("words", ["one", "two", "three"])


class Sender:
    """A source whose answers come from `send`."""

    name, is_here, scores_pairs, main, identity = "made", False, False, DENSE, ()

    def __init__(self, send: Send) -> None:
        self._send = send

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Send]:
        yield self._send


def points(
    send: Callable[[LoadRequest], Awaitable[LoadReply]], *levels: LoadLevel, seconds: float = 0.5
) -> list[LoadPoint]:
    measured_levels = perf.measure(TASK, [Sender(send)], LoadPlan(levels, seconds, 0.1), {}, lambda: None)  # type: ignore[list-item]
    return [point for level in measured_levels for point in level]


def points_in_virtual_time(send: Callable[[LoadRequest], Awaitable[LoadReply]], *levels: LoadLevel) -> list[LoadPoint]:
    """Return the points of a sender whose requests take virtual time."""
    loop = VirtualLoop()
    runner = functools.partial(asyncio.Runner, loop_factory=lambda: loop)
    with pytest.MonkeyPatch.context() as patched, virtual_time(loop, seed=0):
        patched.setattr(asyncio, "Runner", runner)
        return points(send, *levels)


@pytest.mark.parametrize("clients", [1, 3])
def test_a_closed_loop_has_as_many_requests_under_way_as_it_has_clients(clients: int) -> None:
    under_way = most = 0

    async def send(request: LoadRequest) -> LoadReply:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.005)
        under_way -= 1
        return LoadReply(7, {"inference": 5.0})

    (point,) = points_in_virtual_time(send, LoadLevel(clients=clients))
    assert (most, under_way) == (clients, 0)
    assert point.tokens == 7 * point.items
    assert point.stages_ms == {"inference": 5.0}
    assert point.scores["p50_ms"] == pytest.approx(5.0)
    assert point.items <= clients * (0.5 / 0.005 + 1)


@in_virtual_time
async def test_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """A stall in the first half of the window delays many requests of an open loop, and one of a closed loop."""
    answered = asyncio.Event()

    async def send(request: LoadRequest) -> LoadReply:
        await answered.wait()
        return LoadReply()

    async def stalled(level: LoadLevel) -> list[float]:
        answered.clear()
        requests = itertools.repeat(LoadRequest(["text"]))
        start_s = time.perf_counter()
        asyncio.get_running_loop().call_later(0.5, answered.set)

        async def quick(request: LoadRequest) -> LoadReply:
            await send(request)
            await asyncio.sleep(0.002)
            return LoadReply()

        calls = await level.run(quick, requests, start_s + 1.0)
        return sorted(call.latency_s for call in calls)

    opened, closed = await stalled(LoadLevel(rate=200)), await stalled(LoadLevel(clients=1))
    assert len([latency for latency in opened if latency > 0.1]) > 0.2 * len(opened)
    assert opened[-1] >= 0.4
    assert len([latency for latency in closed if latency >= 0.4]) == 1


def test_what_is_due_beyond_the_bound_is_counted_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MAX_IN_FLIGHT", 5)
    sent = 0

    async def never(request: LoadRequest) -> LoadReply:
        nonlocal sent
        sent += 1
        await asyncio.sleep(60)
        return LoadReply()

    async def run() -> list[load.SentRequest]:
        monkeypatch.setattr(load, "PATIENCE_S", 0.5)
        return await LoadLevel(rate=300).run(never, itertools.repeat(LoadRequest(["text"])), time.perf_counter() + 0.3)

    calls = asyncio.run(run())
    codes = [call.code for call in calls]
    assert sent == 5
    assert codes.count(load.NO_ANSWER) == 5
    assert codes.count(NOT_SENT) == len(codes) - 5 > 5


def test_errors_are_counted_by_code_and_a_dead_server_ends_the_sweep() -> None:
    counter = itertools.count()

    async def send(request: LoadRequest) -> LoadReply:
        await asyncio.sleep(0.001)
        if next(counter) % 10 == 0:
            raise LoadFailure("QUEUE_FULL")
        return LoadReply()

    (point,) = points_in_virtual_time(send, LoadLevel(clients=2))
    assert set(point.errors) == {"QUEUE_FULL"}
    assert point.items > point.errors["QUEUE_FULL"] > 0
    assert "QUEUE_FULL" in report.of_perf("a/b", "t", "", [point], {}, []).markdown()

    async def nobody(request: LoadRequest) -> LoadReply:
        raise LoadFailure(NOBODY)

    (only,) = points(nobody, LoadLevel(clients=2), LoadLevel(clients=4))
    assert only.lost_its_server
    perf_report = report.of_perf("a/b", "t", "", [only], {}, [])
    assert "the server stopped answering" in perf_report.notes[0]
    assert perf_report.figures()["rows"][0]["scores"]["p50_ms"] is None


@pytest.mark.parametrize(
    "options",
    [
        "--rate inf",
        "--sweep rate=inf",
        "--sweep clients=0",
        "--sweep clients=4097",
        "--sweep pace=3",
        "--seconds nan",
        "--warm-up inf",
    ],
)
def test_a_load_without_an_end_and_a_load_of_nothing_are_refused(options: str) -> None:
    """With an infinite rate, each request is due at the time of the one before, so the level would never end."""
    ran = CliRunner().invoke(main, ["eval", "a/b", "-t", "stsb", "--type", "perf", "-s", "st", *options.split()])
    assert ran.exit_code == 1
    assert "finite" in ran.output
