"""The queue at a real broker: work waits there, and survives the broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import httpx
import nats
import pytest
from cluster import until
from load import Load
from stack import Part, Plan, Stack

MODEL = "toy/one"
PROMISED_S = 5.0  # from the restart of a broker until all is answered; the machine may be busy


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("queue"), Plan(models=(MODEL,))) as stack:
        yield stack


@pytest.fixture
def sidecar(stack: Stack) -> Iterator[Part]:
    """Yield the sidecar of a stack that has answered and is idle. It goes on afterwards."""
    answer = httpx.post(f"{stack.urls[0]}/v1/encode/{MODEL}", json={"items": ["warm"]}, timeout=60)
    assert answer.status_code == 200, answer.text
    until(lambda: waiting(stack) == 0, 60, "an empty consumer")
    part = stack.workers[0].sidecar
    yield part
    part.resume()


def waiting(stack: Stack) -> int:
    """Return how many work items of all consumers no worker has acknowledged."""
    return sum(consumer["num_pending"] + consumer["num_ack_pending"] for consumer in stack.consumers())


def load(stack: Stack) -> Load:
    return Load(stack.urls, model=MODEL)


async def test_a_lost_stream_is_made_again_and_its_open_requests_are_told(stack: Stack, sidecar: Part) -> None:
    """The stream is deleted behind the gateway's back. The requests in it end with a retryable error, and the next
    request is served.
    """
    sidecar.pause()
    client = await nats.connect(stack.broker_urls)
    async with httpx.AsyncClient(timeout=60) as http:
        held, after = load(stack), load(stack)
        first = asyncio.create_task(held.one(http, stack.urls[0], 0))
        await asyncio.to_thread(until, lambda: waiting(stack) >= 1, 60, "the request at its consumer")
        await client.jetstream().delete_stream("WORK__default")
        await client.close()
        second = asyncio.create_task(held.one(http, stack.urls[0], 1))  # the gateway notices the loss at this request
        await asyncio.gather(first, second)
        assert {(entry.code, entry.retryable) for entry in held.outcomes} == {("QUEUE_UNAVAILABLE", True)}
        sidecar.resume()
        outcome = await after.one(http, stack.urls[0], 2)
        assert (outcome.status, outcome.right) == (200, True)


@pytest.mark.timeout(180)
async def test_accepted_work_survives_a_killed_broker(stack: Stack, sidecar: Part) -> None:
    """The sidecar is stopped, and the broker accepts 100 requests. 100 more are under way when the broker is killed
    with -9. The broker is restarted and the sidecar resumed. Every accepted request is answered rightly, every other
    one rightly or with a typed retryable error, and none long after its deadline. Soon after that all requests are
    answered rightly.
    """
    (broker,) = stack.brokers
    sidecar.pause()
    limits = httpx.Limits(max_connections=400)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        accepted, late, probes, after = (load(stack) for _ in range(4))
        first = [asyncio.create_task(accepted.one(client, stack.urls[0], number)) for number in range(100)]
        await asyncio.to_thread(until, lambda: waiting(stack) == 100, 60, "100 accepted requests")
        second = [asyncio.create_task(late.one(client, stack.urls[0], number)) for number in range(100)]
        await asyncio.sleep(0)  # lets the tasks begin to send
        broker.kill()
        broker.start()
        await asyncio.to_thread(broker.wait_ready)
        sidecar.resume()
        await asyncio.gather(*first, *second)
        answered_s = time.monotonic()
        while not (await probes.one(client, stack.urls[0], 0)).right:
            assert time.monotonic() - answered_s < 3 * PROMISED_S
        await asyncio.gather(*(after.one(client, stack.urls[0], number) for number in range(50)))
    assert [(outcome.status, outcome.right) for outcome in accepted.outcomes] == [(200, True)] * 100
    assert all(outcome.right or (outcome.retryable and outcome.code) for outcome in late.outcomes), late.outcomes
    assert [(outcome.status, outcome.right) for outcome in after.outcomes] == [(200, True)] * 50
    assert max(accepted.longest_s(), late.longest_s()) < 30 + 10
    assert not accepted.wrong() + late.wrong() + after.wrong()
