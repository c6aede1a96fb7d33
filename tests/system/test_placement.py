"""Two worker processes, twelve models and room for eight on each, through a real broker: with the placement table and
without it.

    fixed cost: a load is 0.5 s of waiting        real: checkpoints of transformers, a limit on the adapter's memory,
                                                  the processor shared
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import resource
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import local_models
import numpy as np
import pytest
from stack import Device, Plan, Stack, Worker
from unit.adapter import toys

from sie_broker import Broker, CoreMessage, Write
from sie_broker.nats import connect
from sie_contracts.models.entries import parse_entry
from sie_contracts.settings import load
from sie_contracts.wire import messages, topology
from sie_contracts.wire.heartbeats import Heartbeat
from sie_contracts.wire.messages import Confirmation, Input, RunOptions, WorkItem
from sie_contracts.wire.records import Placement
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.fleet.placement import Ages, Placer
from sie_gateway.streams.backlog import Backlog
from sie_runtime.clock import BrokerClock
from sie_runtime.process import Stop

LANE = Lane("_default", "cpu", "default")
SLOTS = 8
BUDGET_S = 60
IMPORTS_S = 90.0  # imports of torch by two adapters at once on a busy machine
MEMORY_PERCENT = 85  # share of its memory that an adapter fills, SIE_MEMORY_PRESSURE_THRESHOLD_PERCENT
CONFIRMED = messages.encode(Confirmation("taken"))


@dataclass(frozen=True)
class Setup:
    """Models of each worker, and the traffic: `rate` requests a second, measured for `measured_s` after `warm_s`.
    `data_bytes`: the RLIMIT_DATA of each adapter; 0 sets none.
    """

    models: Sequence[str]
    plan: Plan
    rate: float
    warm_s: float
    measured_s: float
    data_bytes: int = 0


TOYS = [f"toy/m{number:02}" for number in range(12)]
DEVICE = Device(batch_ms=5.0, slots=SLOTS, load_s=0.5)
FIXED = Setup(TOYS, Plan(models=TOYS, gateways=0, workers=(DEVICE, DEVICE), preload=False), 40.0, 6.0, 12.0)


class Publisher:
    """The gateway's end of the queue, without a gateway: publishes, takes results, and notes how long each took.
    `late`: of those, the ones that were dropped because their budget was over.
    """

    def __init__(self, broker: Broker, revisions: dict[str, str]) -> None:
        self._broker = broker
        self._revisions = revisions
        self._sent_s: dict[str, float] = {}
        self.times_s: dict[str, float] = {}
        self.late: set[str] = set()

    async def start(self) -> None:
        await self._broker.subscribe("sie.result.test.*", self._on_result)

    async def _on_result(self, message: CoreMessage) -> None:
        result = messages.decode_result(message.data)
        if result.request in self._sent_s:
            (outcome,) = result.outcomes
            if isinstance(outcome, messages.Failed):
                assert outcome.error.code == "GATEWAY_TIMEOUT", outcome
                self.late.add(result.request)
            self.times_s[result.request] = time.perf_counter() - self._sent_s.pop(result.request)
        await self._broker.send(message.reply, CONFIRMED)

    def item(self, number: int, model: str) -> WorkItem:
        return WorkItem(
            f"r{number}",
            0,
            model,
            self._revisions[model],
            "encode",
            (Input(f"text {number}"),),
            RunOptions(),
            f"sie.result.test.r{number}",
            1000 * BUDGET_S,
            cost=10,
        )

    async def publish(self, item: WorkItem) -> None:
        self._sent_s[item.request] = time.perf_counter()
        await self._broker.publish(
            topology.work_subject(LANE, "interactive", item.model), messages.encode(item), item.request
        )

    @property
    def open(self) -> int:
        return len(self._sent_s)


@asynccontextmanager
async def workers(folder: Path, setup: Setup) -> AsyncIterator[tuple[Stack, Broker]]:
    """Start a broker with the topology that a gateway makes, and no gateway. The workers are started later."""
    stack = Stack(folder, setup.plan)
    broker: Broker | None = None
    try:
        for part in (*stack.brokers, stack.config):
            part.start()
            part.wait_ready()
        broker = await connect(stack.broker_urls, name="test")
        stream = topology.work_stream(LANE.pool, storage="memory", replicas=1, max_bytes=1 << 28, max_age_s=600.0)
        await broker.ensure_stream(stream)
        for model in setup.models:
            await broker.ensure_consumer(topology.work_consumer(LANE, "interactive", model, 10.0))
        yield stack, broker
    finally:
        if broker is not None:
            await broker.close()
        await asyncio.to_thread(stack.stop)


def start(workers: Sequence[Worker], data_bytes: int = 0) -> None:
    for worker in workers:
        worker.adapter.start()
    for worker in workers:
        worker.adapter.wait_ready(IMPORTS_S)
        if data_bytes:
            resource.prlimit(worker.adapter.pid, resource.RLIMIT_DATA, (data_bytes, data_bytes))
        worker.sidecar.start()
    for worker in workers:
        worker.sidecar.wait_ready()


@dataclass(frozen=True)
class Figures:
    """`late`: requests that were not answered within their budget; their times count too. `most_loaded`: the most
    models that one worker was seen to have. `slots`: for how many models each worker reports that it has room.
    """

    loads_per_min: float
    p50_s: float
    p99_s: float
    late: int
    most_loaded: int
    slots: tuple[int, ...] = ()


async def metric(stack: Stack, name: str) -> list[float]:
    """Return the sum of a sidecar's metric over all models, for each worker."""
    totals = []
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for worker in stack.workers:
            text = (await client.get(f"{worker.url}/metrics")).text
            totals.append(sum(float(value) for value in re.findall(rf"^{name}\{{.*\}} (\S+)$", text, re.MULTILINE)))
    return totals


async def loads(stack: Stack) -> float:
    """Return the number of all loads so far, by the sidecars' own metric."""
    return sum(await metric(stack, "sie_model_loads_total"))


async def send(publisher: Publisher, placer: Placer | None, number: int, model: str) -> None:
    item = publisher.item(number, model)
    if placer is not None:
        placer.note(LANE, [item])
    await publisher.publish(item)


async def answered(broker: Broker, publisher: Publisher) -> None:
    async with asyncio.timeout(1.5 * BUDGET_S):
        while publisher.open:
            await broker.flush(30.0)


async def each_once(
    broker: Broker, publisher: Publisher, placer: Placer | None, models: Sequence[str], first: int = 0
) -> None:
    """Send one request for each model, numbered from `first`, and wait until all are answered."""
    for number, model in enumerate(models, first):
        await send(publisher, placer, number, model)
    await answered(broker, publisher)


async def drive(stack: Stack, broker: Broker, publisher: Publisher, placer: Placer | None, setup: Setup) -> Figures:
    """Send one request for each model, then Zipf traffic. Return the figures when all is answered."""
    chance, models = random.Random(7), setup.models
    weights = [(rank + 1) ** -1.1 for rank in range(len(models))]
    await each_once(broker, publisher, placer, models)
    begin_s, first, number, measured, before, most_loaded = time.perf_counter(), len(models), len(models), -1, 0.0, 0.0
    while (now_s := time.perf_counter() - begin_s) < setup.warm_s + setup.measured_s:
        if measured < 0 and now_s >= setup.warm_s:
            measured, before = number, await loads(stack)
        if number % 20 == 0:
            most_loaded = max(most_loaded, *await metric(stack, "sie_model_loaded"))
        await send(publisher, placer, number, chance.choices(models, weights)[0])
        number += 1
        # the pace of an open loop
        await asyncio.sleep(max(0.0, (number - first) / setup.rate - (time.perf_counter() - begin_s)))
    after = await loads(stack)
    await answered(broker, publisher)
    times_s: Sequence[float] = [publisher.times_s[f"r{index}"] for index in range(measured, number)]
    p50_s, p99_s = np.quantile(times_s, (0.5, 0.99))
    return Figures(
        (after - before) * 60 / setup.measured_s, float(p50_s), float(p99_s), len(publisher.late), int(most_loaded)
    )


@asynccontextmanager
async def placing(broker: Broker) -> AsyncIterator[tuple[Placer, Fleet]]:
    """Run the placement of a gateway, and yield it with the fleet."""
    fleet, clock, stop = (
        Fleet(broker, load(environ={}).settings),
        BrokerClock(broker, topology.stream_name(LANE.pool)),
        Stop(),
    )
    await clock.measure()
    await fleet.start()
    placer = Placer(
        broker, 2.0, fleet, Ages(Backlog(broker, [LANE.pool]), clock.now_s).waiting_of, clock.now_s, storage="memory"
    )
    bucket = await broker.key_value(topology.PLACEMENT_BUCKET, storage="memory")
    # the table of a lane that had workers before: without any table all workers would pull all models
    empty = messages.encode(Placement(clock.now_s()))
    await bucket.write([Write(topology.lane_key(LANE), empty, 0)])
    await placer.start()
    task = asyncio.create_task(placer.run(stop))
    try:
        yield placer, fleet
    finally:
        stop.request()
        await task


async def heard(broker: Broker, placer: Placer, fleet: Fleet, count: int) -> None:
    """Wait until `count` workers and a table are there: the first table needs a worker."""
    async with asyncio.timeout(60):
        while len(fleet.healthy()) < count or placer.table(LANE) is None:
            await broker.flush(30.0)


async def ready(stack: Stack, broker: Broker) -> Publisher:
    publisher = Publisher(broker, await revisions(stack))
    await publisher.start()
    return publisher


async def with_the_table(folder: Path, setup: Setup) -> Figures:
    async with workers(folder, setup) as (stack, broker), placing(broker) as (placer, fleet):
        await asyncio.to_thread(start, stack.workers, setup.data_bytes)
        await heard(broker, placer, fleet, len(stack.workers))
        figures = await drive(stack, broker, await ready(stack, broker), placer, setup)
        return dataclasses.replace(figures, slots=tuple(beat.slots for beat in fleet.healthy()))


async def any_takes_any(folder: Path, setup: Setup) -> Figures:
    """Measure without a table: each worker takes work of any model, and evicts the model that ran longest ago."""
    async with workers(folder, setup) as (stack, broker):
        await asyncio.to_thread(start, stack.workers, setup.data_bytes)
        return await drive(stack, broker, await ready(stack, broker), None, setup)


async def revisions(stack: Stack) -> dict[str, str]:
    async with httpx.AsyncClient(trust_env=False, headers={"authorization": "Bearer read"}, timeout=60) as client:
        export = (await client.get(f"{stack.config_url}/v1/configs/export")).json()
    return {model["model_id"]: parse_entry(model["model_config"]).revision for model in export["models"]}


async def compare(folder: Path, setup: Setup) -> None:
    """Compare workers with the table to workers that take any model. With the table each worker has room for what it
    hosts, and models hardly come or go. Without it each worker is full and evicts.
    """
    ours, theirs = await with_the_table(folder / "table", setup), await any_takes_any(folder / "any", setup)
    print(f"\ntable: {ours}\nany worker: {theirs}")
    assert ours.late == 0
    assert len(ours.slots) == 2
    assert all(abs(slots - SLOTS) <= 1 for slots in ours.slots)  # an estimate from a mean
    assert max(ours.most_loaded, theirs.most_loaded) <= SLOTS
    assert theirs.loads_per_min > 20
    assert ours.loads_per_min < theirs.loads_per_min / 10
    assert ours.p99_s < theirs.p99_s / 2


@pytest.mark.long
async def test_with_the_table_models_stay_where_they_are_and_without_it_they_come_and_go(tmp_path: Path) -> None:
    await compare(tmp_path, FIXED)


@pytest.mark.long
async def test_a_second_worker_takes_what_does_not_fit_on_the_first(tmp_path: Path) -> None:
    async with workers(tmp_path, FIXED) as (stack, broker), placing(broker) as (placer, fleet):
        await asyncio.to_thread(start, stack.workers[:1])
        await heard(broker, placer, fleet, 1)
        publisher, count = await ready(stack, broker), len(TOYS)
        await each_once(broker, publisher, placer, TOYS)

        def most_planned() -> int:
            table = placer.table(LANE)
            return max(Counter(worker for hosts in table.hosts.values() for worker in hosts).values()) if table else 0

        assert most_planned() == count  # twelve take turns in room for eight
        await asyncio.to_thread(start, stack.workers[1:])
        async with asyncio.timeout(60):
            while most_planned() > SLOTS:
                await broker.flush(30.0)
        async with asyncio.timeout(60):  # pulls that were open when the table changed still bring work for 5 s
            first, before = count, -1.0
            while (now := await loads(stack)) != before:
                await each_once(broker, publisher, placer, TOYS, first)
                first, before = first + count, now
        assert not publisher.late


# ---- real adapters

WIDTH, LAYERS = 384, 6
# makes most of a model's bytes, and none of its work: other memory of a process varies by tens of megabytes
VOCABULARY = 40_000
AMPLE_BYTES = 3 << 30  # enough for an adapter with all models


def checkpoints(root: Path) -> tuple[list[str], Plan]:
    """Twelve random BERT models of 105 MB in float32, and two workers with real adapters that are to serve them."""
    models = local_models.under(root)
    for seed in range(12):
        toys.save(
            models.weights / f"m{seed:02}",
            "bert",
            seed=seed,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=6,
            initializer_range=0.04,
            vocab_size=VOCABULARY,
        )
        models.add(
            f"m{seed:02}",
            {"family": "text-encoder", "outputs": {"dense": WIDTH}, "max_tokens": 64, "run": {"pooling": "mean"}},
        )
    environ = {
        "SIE_MODELS_DIR": str(models.folder),
        "SIE_MODEL_FILTER": ",".join(models.names),
        "SIE_HF_FALLBACK": "false",
        "MALLOC_ARENA_MAX": "1",  # memory that is free in another arena counts as held
    }
    return models.names, Plan(models=(), gateways=0, workers=(None, None), preload=False, environ=environ)


async def room_for_slots(folder: Path, models: Sequence[str], plan: Plan) -> int:
    """Return the limit on an adapter's data under which SLOTS models fit and one more does not. It is measured when the
    adapter had to give back the memory that is no model's.
    """
    setup = Setup(models, dataclasses.replace(plan, workers=(None,)), 0.0, 0.0, 0.0)
    async with workers(folder, setup) as (stack, broker), placing(broker) as (placer, fleet):

        async def told(least: int, most: int) -> tuple[int, Heartbeat]:
            """Return the number of loaded models, once that is within these bounds, and the heartbeat that says so."""
            count = -1
            async with asyncio.timeout(60):
                while not least <= count <= most:
                    await broker.flush(30.0)
                    count = sum(status.state == "loaded" for status in fleet.healthy()[0].models)
            return count, fleet.healthy()[0]

        await asyncio.to_thread(start, stack.workers, AMPLE_BYTES)
        await heard(broker, placer, fleet, 1)
        await each_once(broker, await ready(stack, broker), placer, models[:SLOTS])
        _, full = await told(SLOTS, SLOTS)
        assert full.memory_total_bytes == AMPLE_BYTES, "something else limits the adapter more than its own limit"
        model_bytes = sum(status.memory_bytes for status in full.models) / SLOTS
        tight_bytes = int((full.memory_used_bytes - SLOTS / 2 * model_bytes) / (MEMORY_PERCENT / 100))
        resource.prlimit(stack.workers[0].adapter.pid, resource.RLIMIT_DATA, (tight_bytes, tight_bytes))
        left, beat = await told(0, SLOTS - 1)
    return int((beat.memory_used_bytes + (SLOTS - left + 0.5) * model_bytes) / (MEMORY_PERCENT / 100))


@pytest.mark.serial  # beside other tests models load more slowly than requests for them come
@pytest.mark.long
@pytest.mark.timeout(600)
async def test_real_models_stay_where_they_are_too(tmp_path: Path) -> None:
    models, plan = checkpoints(tmp_path / "models")
    data_bytes = await room_for_slots(tmp_path / "one", models, plan)
    await compare(tmp_path, Setup(models, plan, 5.0, 6.0, 40.0, data_bytes))
