"""kill -9 of every part under load: answers stay right, clients of the surviving parts see no error, and the worker is
back at once.

The processes that `sie serve` and the parent of the adapter start again are tested with these two, the others with a
fixed-cost adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest
from cluster import MODEL, Cluster, running, scraped, until
from load import Load, answered
from stack import Device, Plan, Stack

CLIENTS = 10
PAUSE_S, TOY_PAUSE_S = 0.1, 0.05  # of a client after an answer; at the slow device most clients wait
ACK_WAIT_S = 3.0
WITHIN_S = 60.0  # bound of what must happen, on a busy machine
TOY = "toy/one"


@contextlib.asynccontextmanager
async def under(load: Load) -> AsyncIterator[Load]:
    """Run the clients until the end of the block, which begins after as many answers as there are clients."""
    tasks = load.start(CLIENTS)
    try:
        await load.successes_after(time.monotonic(), CLIENTS, WITHIN_S)
        yield load
    finally:
        await load.stop(tasks)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    environ = {"SIE_LOAD_HOLD_S": "29"}  # on a busy machine imports and a load take longer than the default
    with running(tmp_path_factory.mktemp("faults"), "--preload", MODEL, environ=environ) as cluster:
        assert len(cluster.pids("adapter")) == 2, cluster.log()  # the one that serves and its parent
        yield cluster


@pytest.fixture
async def load(cluster: Cluster) -> AsyncIterator[Load]:
    async with under(Load(cluster.urls, pause_s=PAUSE_S, expected=answered(cluster.url))) as load:
        yield load


def active_adapter(cluster: Cluster) -> int:
    """Return the process that listens on the socket, from the adapter's log."""
    return int([line for line in cluster.lines if "adapter ready on" in line][-1].rpartition("pid ")[2])


async def test_a_killed_adapter_is_replaced_at_once(cluster: Cluster, load: Load) -> None:
    """No client sees an error. Nothing is imported again: the parent forks the next adapter."""
    (parent, *_), victim = cluster.pids("adapter"), active_adapter(cluster)
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    await load.successes_after(killed_s, CLIENTS, WITHIN_S)
    until(lambda: active_adapter(cluster) != victim, WITHIN_S, "the log names the next adapter")
    assert parent in cluster.pids("adapter")
    assert not load.wrong()
    assert {(outcome.status, outcome.code) for outcome in load.outcomes} == {(200, "")}
    assert len(cluster.pids("adapter")) == 2


@pytest.mark.long
async def test_a_killed_parent_of_the_adapter_takes_it_along_and_both_come_back(cluster: Cluster, load: Load) -> None:
    """The imports make this restart slower. No client sees an error."""
    (parent, *_), victim = cluster.pids("adapter"), active_adapter(cluster)
    assert parent != victim
    killed_s = time.monotonic()
    os.kill(parent, signal.SIGKILL)
    await load.successes_after(killed_s + 0.1, CLIENTS, 60)
    await asyncio.to_thread(until, lambda: active_adapter(cluster) != victim, 60, "another adapter")
    assert set(cluster.pids("adapter")).isdisjoint((parent, victim))
    assert not load.wrong()
    assert {(outcome.status, outcome.code) for outcome in load.outcomes} == {(200, "")}


def test_a_killed_serve_leaves_no_process(cluster: Cluster) -> None:
    """The parent of all processes gets kill -9, and the kernel ends its children. The cluster's last test."""
    assert cluster.process is not None
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    assert len(children) >= 6
    cluster.process.kill()
    assert psutil.wait_procs(children, timeout=WITHIN_S)[1] == []
    cluster.process.wait(WITHIN_S)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways and two workers, whose leases are short."""
    device, environ = Device(batch_ms=100.0), {"SIE_ACK_WAIT_S": str(int(ACK_WAIT_S))}
    with Stack(tmp_path_factory.mktemp("stack"), Plan((TOY,), 2, (device, device), environ=environ)) as stack:
        yield stack


@pytest.mark.timeout(180)
async def test_work_of_a_killed_sidecar_is_delivered_again(stack: Stack) -> None:
    """The next process of a sidecar returns the work of its ledger. Replies report the deliveries, and every answer is
    right.
    """
    async with under(Load(stack.urls, model=TOY, pause_s=TOY_PAUSE_S)) as load:
        for worker in stack.workers:
            worker.adapter.pause()  # work in hand then stays there
        await load.busy(CLIENTS, WITHIN_S)
        await asyncio.to_thread(until, stack.held, WITHIN_S, "work in hand")
        killed_s = time.monotonic()
        for worker in stack.workers:
            worker.sidecar.kill()
        for worker in stack.workers:
            worker.adapter.resume()
            worker.sidecar.start()
        await load.successes_after(killed_s, 5 * CLIENTS, WITHIN_S)
        await load.successes_after(killed_s + ACK_WAIT_S + 1, CLIENTS, WITHIN_S)
        for worker in stack.workers:
            worker.sidecar.wait_ready()
    assert any("returned to the queue" in line for worker in stack.workers for line in worker.sidecar.log)
    held = [outcome for outcome in load.outcomes if outcome.started_s <= killed_s <= outcome.ended_s]
    assert held
    assert not load.wrong()
    assert {(outcome.status, outcome.code) for outcome in load.outcomes} == {(200, "")}
    assert max(outcome.deliveries for outcome in held) >= 2
    assert max(outcome.deliveries for outcome in load.outcomes if outcome.started_s > killed_s + ACK_WAIT_S + 1) == 1


async def test_a_drain_finishes_what_the_device_has_and_leaves_no_lease(stack: Stack) -> None:
    """SIGTERM comes while the adapter has work. The worker answers it and ends with 0. Before the test that kills a
    gateway: a worker repeats a result for a killed gateway, and a drain waits for that.
    """
    async with under(Load(stack.urls, model=TOY, pause_s=TOY_PAUSE_S)) as load:
        for worker in stack.workers:
            worker.adapter.pause()
        await asyncio.to_thread(until, stack.held, WITHIN_S, "work in hand")
        for worker in stack.workers:
            os.kill(worker.sidecar.pid, signal.SIGTERM)
        for worker in stack.workers:
            worker.adapter.resume()
        for worker in stack.workers:
            ended = functools.partial(lambda sidecar: sidecar.status is not None, worker.sidecar)
            await asyncio.to_thread(until, ended, WITHIN_S, "the end of the drain")
            assert worker.sidecar.status == 0, stack.log()
        assert not list(stack.folder.glob("*.leases"))
        started_s = time.monotonic()
        for worker in stack.workers:
            worker.sidecar.start()
        await load.successes_after(started_s, CLIENTS, WITHIN_S)
    assert {(outcome.status, outcome.code) for outcome in load.outcomes} == {(200, "")}
    assert not load.wrong()


async def test_clients_of_a_killed_gateway_see_a_closed_connection_and_nobody_else_does(stack: Stack) -> None:
    """The other gateway goes on to answer."""
    gateway = stack.gateways[0]
    async with under(Load(stack.urls, model=TOY, pause_s=TOY_PAUSE_S)) as load:
        killed_s = time.monotonic()
        gateway.kill()
        # the killed gateway is not started yet: these are answers of the other one
        await load.successes_after(killed_s, 5 * CLIENTS, WITHIN_S)
    gateway.start()
    gateway.wait_ready()
    broken = [outcome for outcome in load.outcomes if outcome.status != 200]
    assert broken
    assert {(outcome.status, outcome.url) for outcome in broken} == {(0, stack.urls[0])}
    assert {outcome.failure for outcome in broken} <= {"ReadError", "RemoteProtocolError", "ConnectError", "WriteError"}
    assert not load.wrong()


@pytest.mark.timeout(180)
async def test_a_stopped_worker_loses_its_work_to_another_and_its_late_answer_is_dropped(stack: Stack) -> None:
    """The sidecar that serves is stopped until its leases lapse; the other one answers. The stopped one goes on, and
    its late results are counted and dropped.
    """

    def late() -> float:
        return sum(
            scraped(f"{url}/metrics", "sie_gateway_outcomes_total", verdict=verdict)
            for url in stack.metrics_urls
            for verdict in ("unknown", "duplicate")
        )

    before = late()
    async with under(Load(stack.urls, model=TOY, pause_s=TOY_PAUSE_S)) as load:
        # the placement may have given the model to one of the two alone
        (serving,) = (worker for number, worker in enumerate(stack.workers) if f"w{number}" == load.outcomes[-1].worker)
        serving.sidecar.pause()
        stopped_s = time.monotonic()
        await load.successes_after(stopped_s + ACK_WAIT_S + 1, CLIENTS, 60)
        serving.sidecar.resume()
        await load.successes_after(time.monotonic(), 2 * CLIENTS, WITHIN_S)
        await asyncio.to_thread(until, lambda: late() > before, WITHIN_S, "late results, counted")
    assert {(outcome.status, outcome.code) for outcome in load.outcomes} == {(200, "")}
    assert not load.wrong()
    assert max(outcome.deliveries for outcome in load.outcomes) >= 2
