"""A model that takes a minute to load, on a worker that serves two others meanwhile: what it costs them, and what its
own clients see.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cluster import scraped, until
from fake_adapter import ids_of, vector_of
from stack import Device, Plan, Stack

from sie_contracts.wire import topology
from sie_contracts.wire.topology import Lane

STEADY = ("toy/left", "toy/right")
SLOW = "toy/slow"
CONSUMER = topology.work_consumer(Lane("_default", "cpu", "default"), "interactive", SLOW, 10.0).name
LOAD_S = 60.0
BATCH_MS = 20.0
RATE = 40.0  # requests a second, of both models together: about two thirds of the device
WARM_S = 5.0
SPAN_S = 66.0  # length of a measurement: the load, and after it the work that waited for it
# arrivals of the clients of the slow model; the last one comes within one hold of the load's end
ARRIVALS = (
    0.0,
    0.0,
    5.0,
    25.0,
    LOAD_S - 15.0,
)
# Both measurements have the same arrivals, so on a machine with nothing else to do they differ by how late six
# processes wake up. With two cores that others keep busy for part of the time, the p99 says what they did.
NOISE_S = 0.003
RETRY_S = 5.0  # the longest that a client is told to wait


@dataclass
class Traffic:
    """Observations of the clients of the loaded models: how long each request took, and how often its message was
    delivered.
    """

    took_s: list[float] = field(default_factory=list)
    deliveries: list[int] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        return float(np.quantile(self.took_s, 0.99))

    def __str__(self) -> str:
        p50, p99, most = (1000 * float(np.quantile(self.took_s, part)) for part in (0.5, 0.99, 1.0))
        return f"{len(self.took_s)} answers, p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {most:.1f} ms"


def check(answer: httpx.Response, text: str) -> int:
    """Check that an answer is right, and return how often its message was delivered."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    np.testing.assert_allclose(body["items"][0]["dense"]["values"], vector_of(ids_of(text)), atol=1e-6)
    return int(body["explain"][0]["batch"].get("deliveries", 1))


async def ask(client: httpx.AsyncClient, model: str, text: str) -> httpx.Response:
    headers = {"x-sie-explain": "1", "x-sie-timeout-ms": "600000"}
    return await client.post(f"/v1/encode/{model}", json={"items": [text]}, headers=headers)


async def steady(client: httpx.AsyncClient, span_s: float) -> Traffic:
    """Send requests at random times with RATE, the same times in each call, however long the answers take."""
    chance, traffic = random.Random(5), Traffic()

    async def one(model: str, text: str) -> None:
        asked_s = time.perf_counter()
        answer = await ask(client, model, text)
        traffic.took_s.append(time.perf_counter() - asked_s)
        traffic.deliveries.append(check(answer, text))

    due_s, begin_s = 0.0, time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        while (due_s := due_s + chance.expovariate(RATE)) < span_s:
            await asyncio.sleep(max(0.0, begin_s + due_s - time.perf_counter()))
            model = chance.choice(STEADY)
            tasks.create_task(one(model, f"{model} at {due_s:.3f} s"))
    return traffic


@dataclass
class Patience:
    """A client of the slow model: how often it was refused, and when it had its answer."""

    refused: int
    answered_s: float
    deliveries: int


async def patient(client: httpx.AsyncClient, text: str, after_s: float, begin_s: float) -> Patience:
    """Ask, and ask again as told, until the model is there."""
    await asyncio.sleep(after_s)
    refused = 0
    while (answer := await ask(client, SLOW, text)).status_code == 503:
        refused += 1
        assert answer.json()["error"]["code"] == "MODEL_LOADING", answer.text
        assert 1 <= int(answer.headers["retry-after"]) <= RETRY_S
        await asyncio.sleep(int(answer.headers["retry-after"]))
    return Patience(refused, time.perf_counter() - begin_s, check(answer, text))


async def watch(stack: Stack, samples: list[dict[str, Any]]) -> None:
    """Record the broker's report of the slow model's consumer, once a second, until cancelled."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        while True:
            answer = (await client.get(f"{stack.monitor_urls[0]}/jsz?consumers=true")).json()
            streams = [stream for account in answer["account_details"] for stream in account["stream_detail"]]
            consumers = [consumer for stream in streams for consumer in stream.get("consumer_detail") or []]
            samples += [consumer for consumer in consumers if consumer["name"] == CONSUMER]
            await asyncio.sleep(1.0)  # the pace of the looks


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_a_load_of_a_minute_costs_others_no_batch_and_nobody_a_delivery(tmp_path: Path) -> None:
    """Two models run alone, then with the same arrivals while a third one loads for 60 s and requests wait for it.
    Their p99 is less than one batch longer. A request for the third model is told to come again when it was held for
    long enough, and is answered right in the end. The model is loaded once, and no message is delivered twice, though
    some are held for several times the ack wait.
    """
    device = Device(batch_ms=BATCH_MS, load_s_of={SLOW: LOAD_S})
    environ = {"SIE_PRELOAD_MODELS": ",".join(STEADY), "SIE_GATEWAY_REQUEST_TIMEOUT": "600"}
    plan = Plan([*STEADY, SLOW], workers=(device,), preload=False, environ=environ)
    with Stack(tmp_path / "stack", plan) as stack:
        (worker,) = stack.workers
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=stack.urls[0], timeout=600, trust_env=False, limits=limits) as client:
            await steady(client, WARM_S)
            alone = await steady(client, SPAN_S)
            samples: list[dict[str, Any]] = []
            watching, begin_s = asyncio.create_task(watch(stack, samples)), time.perf_counter()
            waiting = [
                asyncio.create_task(patient(client, f"text {number}", after_s, begin_s))
                for number, after_s in enumerate(ARRIVALS)
            ]
            beside = await steady(client, SPAN_S)
            waited = await asyncio.gather(*waiting)
            watching.cancel()
        metrics = f"{worker.url}/metrics"
        print(f"\nalone: {alone}\nbeside a load of {LOAD_S:.0f} s: {beside}")
        print(
            "clients of the slow model:",
            ", ".join(f"answered at {outcome.answered_s:.1f} s, refused {outcome.refused}x" for outcome in waited),
        )
        assert beside.p99_s <= alone.p99_s + BATCH_MS / 1000 + NOISE_S
        assert len(beside.took_s) == len(alone.took_s)
        assert all(LOAD_S <= outcome.answered_s < LOAD_S + RETRY_S + 1.0 for outcome in waited)
        assert waited[0].refused > 0
        assert waited[-1].refused == 0
        assert scraped(metrics, "sie_model_loads_total", model=SLOW) == 1
        assert scraped(metrics, "sie_adapter_deaths_total") == 0
        assert {*alone.deliveries, *beside.deliveries, *(outcome.deliveries for outcome in waited)} == {1}
        assert len(samples) > LOAD_S / 2
        assert max(sample["num_ack_pending"] for sample in samples) > 0
        assert max(sample["num_redelivered"] for sample in samples) == 0
        assert scraped(metrics, "sie_deliveries_total", redelivered="true") == 0
        await asyncio.to_thread(until, lambda: scraped(metrics, "sie_queue_depth") == 0, 5, "nothing held")
