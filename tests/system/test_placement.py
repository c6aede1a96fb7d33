"""Two worker processes, twelve models and room for eight on each, through a real broker: with the placement table and without it."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import pytest
from stack import Device, Plan, Stack

from sie_contracts import messages, topology
from sie_contracts.broker import Broker, CoreMessage, Write
from sie_contracts.broker.nats import connect
from sie_contracts.catalogue import parse_entry
from sie_contracts.messages import Confirmation, Input, Placement, RunOptions, WorkItem
from sie_contracts.runtime.clock import BrokerClock
from sie_contracts.runtime.process import Stop
from sie_contracts.settings import load
from sie_contracts.topology import Lane
from sie_gateway.backlog import Backlog
from sie_gateway.fleet import Fleet
from sie_gateway.placement import Ages, Placer

LANE = Lane("_default", "cpu", "default")
MODELS = [f"toy/m{number:02}" for number in range(12)]
DEVICE = Device(batch_ms=5.0, slots=8, load_s=0.5)
RATE = 40.0  # requests a second
WARM_S, MEASURED_S = 6.0, 12.0
CONFIRMED = messages.encode(Confirmation("taken"))


class Publisher:
    """The gateway's end of the queue, without a gateway: publishes, takes results, and notes how long each took."""

    def __init__(self, broker: Broker, revisions: dict[str, str]) -> None:
        self._broker = broker
        self._revisions = revisions
        self._sent_s: dict[str, float] = {}
        self.times_s: dict[str, float] = {}

    async def start(self) -> None:
        await self._broker.subscribe("sie.result.test.*", self._on_result)

    async def _on_result(self, message: CoreMessage) -> None:
        result = messages.decode_result(message.data)
        if result.request in self._sent_s:
            assert isinstance(result.outcomes[0], messages.Ok), result.outcomes
            self.times_s[result.request] = time.perf_counter() - self._sent_s.pop(result.request)
        await self._broker.send(message.reply, CONFIRMED)

    def item(self, number: int, model: str) -> WorkItem:
        return WorkItem(
            f"r{number}", 0, model, self._revisions[model], "encode", (Input(f"text {number}"),), RunOptions(),
            f"sie.result.test.r{number}", 60_000, cost=10,
        )  # fmt: skip

    async def publish(self, item: WorkItem) -> None:
        self._sent_s[item.request] = time.perf_counter()
        await self._broker.publish(topology.work_subject(LANE, "interactive", item.model), messages.encode(item), item.request)

    @property
    def open(self) -> int:
        return len(self._sent_s)


@asynccontextmanager
async def workers(folder: Path) -> AsyncIterator[tuple[Stack, Broker]]:
    """Two workers and a broker with the topology that a gateway makes, and no gateway."""
    stack = Stack(folder, Plan(models=MODELS, gateways=0, workers=(DEVICE, DEVICE), preload=False))
    broker: Broker | None = None
    try:
        for part in (*stack.brokers, stack.config):
            part.start()
            part.wait_ready()
        broker = await connect(stack.broker_urls, name="test")
        stream = topology.work_stream(LANE.pool, storage="memory", replicas=1, max_bytes=1 << 28, max_age_s=600.0)
        await broker.ensure_stream(stream, owner=True)
        for model in MODELS:
            await broker.ensure_consumer(topology.work_consumer(LANE, "interactive", model, 10.0))
        yield stack, broker
    finally:
        if broker is not None:
            await broker.close()
        await asyncio.to_thread(stack.stop)


def start_workers(stack: Stack) -> None:
    for worker in stack.workers:
        worker.adapter.start()
        worker.sidecar.start()
    for worker in stack.workers:
        worker.adapter.wait_ready()
        worker.sidecar.wait_ready()


@dataclass(frozen=True)
class Figures:
    loads_per_min: float
    p50_s: float
    p99_s: float


async def loads(stack: Stack) -> float:
    """All loads so far, by the sidecars' own metric."""
    found = 0.0
    async with httpx.AsyncClient(trust_env=False) as client:
        for worker in stack.workers:
            text = (await client.get(f"{worker.url}/metrics")).text
            found += sum(float(value) for value in re.findall(r"^sie_model_loads_total\{.*\} (\S+)$", text, re.MULTILINE))
    return found


async def drive(stack: Stack, broker: Broker, publisher: Publisher, note: Placer | None) -> Figures:
    """Zipf traffic at RATE, measured after WARM_S, until all is answered."""
    chance = random.Random(7)
    weights = [(rank + 1) ** -1.1 for rank in range(len(MODELS))]
    begin_s, number, measured, before = time.perf_counter(), 0, -1, 0.0
    while (now_s := time.perf_counter() - begin_s) < WARM_S + MEASURED_S:
        if measured < 0 and now_s >= WARM_S:
            measured, before = number, await loads(stack)
        model = MODELS[number] if number < len(MODELS) else chance.choices(MODELS, weights)[0]  # first each of them once
        item = publisher.item(number, model)
        if note is not None:
            note.note(LANE, [item])
        await publisher.publish(item)
        number += 1
        await asyncio.sleep(max(0.0, number / RATE - (time.perf_counter() - begin_s)))  # the pace of an open client
    after = await loads(stack)
    async with asyncio.timeout(60):
        while publisher.open:
            await broker.flush()
    times_s: Sequence[float] = [publisher.times_s[f"r{index}"] for index in range(measured, number)]
    p50_s, p99_s = np.quantile(times_s, (0.5, 0.99))
    return Figures((after - before) * 60 / MEASURED_S, float(p50_s), float(p99_s))


async def figures(folder: Path, *, table: bool) -> Figures:
    async with workers(folder) as (stack, broker):
        stop, placing = Stop(), None
        placer: Placer | None = None
        if table:
            fleet, clock = Fleet(broker, load(environ={}).settings), BrokerClock(broker, topology.stream_name(LANE.pool))
            await clock.measure()
            await fleet.start()
            placer = Placer(broker, 2.0, fleet, Ages(broker, Backlog(broker, [LANE.pool]), clock.now_s).of, clock.now_s)
            bucket = await broker.key_value(topology.PLACEMENT_BUCKET, storage="memory")
            empty = messages.encode(Placement(clock.now_s()))  # of a lane that had workers before: without any table all would pull all
            await bucket.write([Write(topology.lane_key(LANE), empty, 0)])
            await placer.start(storage="memory", replicas=1)
            placing = asyncio.create_task(placer.run(stop))
        await asyncio.to_thread(start_workers, stack)
        async with httpx.AsyncClient(trust_env=False, headers={"authorization": "Bearer read"}) as client:
            export = (await client.get(f"{stack.config_url}/v1/configs/export")).json()
        if table:
            async with asyncio.timeout(30):  # the first table needs a worker
                while len(fleet.healthy()) < 2 or placer is None or placer.table(LANE) is None:
                    await broker.flush()
        publisher = Publisher(broker, revisions(export))
        await publisher.start()
        found = await drive(stack, broker, publisher, placer)
        stop.request()
        if placing is not None:
            await placing
        return found


def revisions(export: dict[str, list[dict[str, object]]]) -> dict[str, str]:
    return {str(model["model_id"]): parse_entry(model["model_config"]).revision for model in export["models"]}  # type: ignore[arg-type]


@pytest.mark.long
async def test_with_the_table_models_stay_where_they_are_and_without_it_they_come_and_go(tmp_path: Path) -> None:
    ours, theirs = await figures(tmp_path / "table", table=True), await figures(tmp_path / "any", table=False)
    print(f"table: {ours}\nany worker: {theirs}")
    assert ours.loads_per_min <= 10
    assert theirs.loads_per_min > 10 * ours.loads_per_min
    assert theirs.loads_per_min > 60
    assert ours.p99_s < theirs.p99_s
