"""The queue is real: work waits in the broker, and survives it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import nats
import pytest
from cluster import MODEL, Cluster, running, until
from load import Load


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path, "--preload", MODEL) as cluster:
        yield cluster


def waiting(cluster: Cluster) -> int:
    return sum(int(each["num_pending"]) + int(each["num_ack_pending"]) for each in cluster.consumers())  # type: ignore[call-overload]


async def test_a_request_waits_in_its_durable_consumer_while_the_sidecar_is_stopped(cluster: Cluster) -> None:
    """1. the sidecar is stopped; 2. a request is sent; 3. the broker's monitor shows it at its consumer; 4. resumed, it
    is answered.
    """
    assert cluster.encode(["warm"]).status_code == 200
    (sidecar,) = cluster.pids("sidecar")
    await asyncio.to_thread(until, lambda: waiting(cluster) == 0, 5, "an empty consumer")
    cluster.signal(sidecar, signal.SIGSTOP)
    async with httpx.AsyncClient() as client:
        load = Load([cluster.url])
        request = asyncio.create_task(load.one(client, cluster.url, 0))
        await asyncio.to_thread(until, lambda: waiting(cluster) == 1, 5, "the request at its consumer")
        assert not request.done()
        cluster.signal(sidecar, signal.SIGCONT)
        outcome = await request
    assert (outcome.status, outcome.right) == (200, True)
    await asyncio.to_thread(until, lambda: waiting(cluster) == 0, 5, "acknowledged")


async def test_a_lost_stream_is_made_again_and_its_open_requests_are_told(cluster: Cluster) -> None:
    """The stream is deleted behind the gateway's back: what was in it ends with a retryable error, what comes next is
    served.
    """
    assert cluster.encode(["warm"]).status_code == 200
    (sidecar,) = cluster.pids("sidecar")
    cluster.signal(sidecar, signal.SIGSTOP)
    client = await nats.connect(cluster.broker_url())
    async with httpx.AsyncClient(timeout=60) as http:
        held, after = Load([cluster.url], timeout_s=30), Load([cluster.url], timeout_s=30)
        first = asyncio.create_task(held.one(http, cluster.url, 0))
        await asyncio.to_thread(until, lambda: waiting(cluster) >= 1, 5, "the request at its consumer")
        await client.jetstream().delete_stream("WORK__default")
        await client.close()
        second = asyncio.create_task(held.one(http, cluster.url, 1))  # finds out
        await asyncio.gather(first, second)
        assert {(each.code, each.retryable) for each in held.outcomes} == {("QUEUE_UNAVAILABLE", True)}
        cluster.signal(sidecar, signal.SIGCONT)
        outcome = await after.one(http, cluster.url, 2)
        assert (outcome.status, outcome.right) == (200, True)


@pytest.mark.timeout(180)
async def test_accepted_work_survives_a_killed_broker(cluster: Cluster) -> None:
    """L3, L10, S1, S2.

    1. the sidecar is stopped and 100 requests are accepted by the broker; 2. 100 more are under way when the broker is
    killed with -9; 3. it is restarted, the sidecar resumed; 4. every accepted one is answered rightly, the others
    rightly or with a typed retryable error, none past its deadline; 5. every one sent 5 s after the restart is answered
    rightly.
    """
    assert cluster.encode(["warm"]).status_code == 200
    (sidecar,), (broker,) = cluster.pids("sidecar"), cluster.pids("nats-server")
    await asyncio.to_thread(until, lambda: waiting(cluster) == 0, 5, "an empty consumer")
    cluster.signal(sidecar, signal.SIGSTOP)
    limits = httpx.Limits(max_connections=400)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        accepted, late, after = (Load([cluster.url], timeout_s=30) for _ in range(3))
        first = [asyncio.create_task(accepted.one(client, cluster.url, number)) for number in range(100)]
        await asyncio.to_thread(until, lambda: waiting(cluster) == 100, 10, "100 accepted requests")
        second = [asyncio.create_task(late.one(client, cluster.url, number)) for number in range(100)]
        await asyncio.sleep(0)  # they are being sent
        cluster.signal(broker, signal.SIGKILL)
        await asyncio.to_thread(
            until, lambda: cluster.pids("nats-server") not in ([], [broker]), 10, "the broker's restart"
        )
        cluster.signal(sidecar, signal.SIGCONT)
        await asyncio.gather(*first, *second)
        await asyncio.sleep(5)  # the five seconds of the promise
        await asyncio.gather(*(after.one(client, cluster.url, number) for number in range(50)))
    assert [(each.status, each.right) for each in accepted.outcomes] == [(200, True)] * 100
    assert all(each.right or (each.retryable and each.code) for each in late.outcomes), late.outcomes
    assert [(each.status, each.right) for each in after.outcomes] == [(200, True)] * 50
    assert max(accepted.longest_s(), late.longest_s()) < 30 + 2
    assert not accepted.wrong() + late.wrong() + after.wrong()
