"""kill -9 of every part under load: answers stay right, clients of what survives see nothing, the worker is back at
once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from cluster import MODEL, Cluster, running, until
from load import Load

pytestmark = pytest.mark.serial

CLIENTS = 20
BACK_S = 5.0  # the promise for a killed adapter; 3x is the test's margin


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("faults"), "--preload", MODEL, gateways=2) as cluster:
        assert len(cluster.pids("adapter")) == 2, cluster.log()  # the one that serves and its parent
        yield cluster


@pytest.fixture
async def load(cluster: Cluster) -> AsyncIterator[Load]:
    load = Load(cluster.urls)
    tasks = load.start(CLIENTS)
    await load.successes_after(time.monotonic(), CLIENTS, 30)
    yield load
    await load.stop(tasks)


def active_adapter(cluster: Cluster) -> int:
    return int(cluster_lock(cluster))


def cluster_lock(cluster: Cluster) -> str:
    """The process that listens on the socket, as the adapter's own log tells."""
    return [line for line in cluster.lines if "adapter ready on" in line][-1].rpartition("pid ")[2]


async def test_a_killed_adapter_is_replaced_at_once(cluster: Cluster, load: Load) -> None:
    """P10: no client sees an error; the next answer comes within 5 s."""
    victim = active_adapter(cluster)
    killed_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    back_s = await load.successes_after(killed_s, CLIENTS, 60)
    assert back_s - killed_s < 3 * BACK_S
    assert active_adapter(cluster) != victim
    assert not load.wrong()
    assert {each.status for each in load.outcomes} == {200}
    assert len(cluster.pids("adapter")) == 2


async def test_a_killed_parent_of_the_adapter_takes_it_along_and_both_come_back(cluster: Cluster, load: Load) -> None:
    """P10: slower, by the imports; no client sees an error."""
    (parent, *_), victim = cluster.pids("adapter"), active_adapter(cluster)
    assert parent != victim
    killed_s = time.monotonic()
    os.kill(parent, signal.SIGKILL)
    await load.successes_after(killed_s + 0.1, CLIENTS, 60)
    await asyncio.to_thread(until, lambda: active_adapter(cluster) != victim, 10, "another adapter")
    assert set(cluster.pids("adapter")).isdisjoint((parent, victim))
    assert not load.wrong()
    assert {each.status for each in load.outcomes} == {200}


@pytest.mark.timeout(180)
async def test_work_of_a_killed_sidecar_is_delivered_again(cluster: Cluster, load: Load) -> None:
    """L7, L9: its leases lapse, the work is delivered once more, deliveries are reported, every request is answered
    rightly.
    """
    (sidecar,) = cluster.pids("sidecar")
    killed_s = time.monotonic()
    os.kill(sidecar, signal.SIGKILL)
    await load.successes_after(killed_s, 5 * CLIENTS, 60)
    # requests that the killed sidecar held end when their leases of 10 s lapse
    held = [each for each in load.outcomes if each.started_s <= killed_s <= each.ended_s]
    await asyncio.to_thread(until, lambda: cluster.pids("sidecar") not in ([], [sidecar]), 10, "a new sidecar")
    await load.successes_after(killed_s + 12, CLIENTS, 60)
    held = [each for each in load.outcomes if each.started_s <= killed_s <= each.ended_s]
    assert held
    assert not load.wrong()
    assert {each.status for each in load.outcomes} == {200}
    assert max(each.deliveries for each in held) >= 2
    assert max(each.deliveries for each in load.outcomes if each.started_s > killed_s + 1) == 1


async def test_clients_of_a_killed_gateway_see_a_closed_connection_and_nobody_else_does(
    cluster: Cluster, load: Load
) -> None:
    """L9: the worker's results for it are given up when their budget ends; the other gateway goes on."""
    first, _second = sorted(
        cluster.pids("gateway"), key=lambda pid: str(cluster.port + 1) in Path(f"/proc/{pid}/cmdline").read_text()
    )
    killed_s = time.monotonic()
    os.kill(first, signal.SIGKILL)
    await load.successes_after(killed_s, 10 * CLIENTS, 60)
    broken = [each for each in load.outcomes if each.status != 200]
    assert broken
    assert {each.status for each in broken} == {0}
    assert {each.failure for each in broken} <= {"ReadError", "RemoteProtocolError", "ConnectError", "WriteError"}
    assert not load.wrong()
    during = [each for each in load.outcomes if killed_s < each.started_s < killed_s + 0.3 and each.status == 200]
    assert during, "the other gateway served on"


@pytest.mark.timeout(180)
async def test_a_stopped_worker_loses_its_work_to_another_and_its_late_answer_is_dropped(tmp_path: Path) -> None:
    """W9, L20.

    1. two workers, leases of 3 s; 2. the sidecar that serves is stopped; 3. the other answers; 4. the stopped
    one resumes and its late results are counted and dropped.
    """
    with running(tmp_path, "--preload", MODEL, "--ack-wait-s", "3", "--no-spare", workers=2) as cluster:
        load = Load([cluster.url])
        tasks = load.start(CLIENTS)
        await load.successes_after(time.monotonic(), 2 * CLIENTS, 30)
        # the placement may have given the model to one of the two alone
        stopped = cluster.sidecar(load.outcomes[-1].worker)
        os.kill(stopped, signal.SIGSTOP)
        stopped_s = time.monotonic()
        await load.successes_after(stopped_s + 4, CLIENTS, 60)
        os.kill(stopped, signal.SIGCONT)
        await load.successes_after(time.monotonic(), 2 * CLIENTS, 30)
        await load.stop(tasks)
        assert {each.status for each in load.outcomes} == {200}
        assert not load.wrong()
        assert max(each.deliveries for each in load.outcomes) >= 2
        late = cluster.gateway_metric("sie_gateway_outcomes_total", verdict="unknown")
        late += cluster.gateway_metric("sie_gateway_outcomes_total", verdict="duplicate")
        assert late >= 1
