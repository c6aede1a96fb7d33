"""The scheduler inside a running sidecar: gathering of deliveries, recording, and the figures of heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_adapter import SPECIAL, toy_entry
from inprocess import InProcess, settings_of, until

from sie_broker import Delivery, Pulls
from sie_broker.memory import MemoryBroker, MemoryServer
from sie_cli.replay.replay import Machine, Replay, plan_of
from sie_cli.replay.trace import read
from sie_contracts.wire.heartbeats import Heartbeat
from sie_contracts.wire.ipc import BatchDone
from sie_contracts.wire.messages import BatchNote
from sie_sidecar.batching.sizing import Quantum
from sie_sidecar.device import recording
from sie_sidecar.intake.intake import WorkIntake

TURNS = 20  # of the event loop between two deliveries: the sidecar is done with one before the next arrives


class Wire:
    """Pulls whose deliveries come one by one, with `TURNS` turns of the event loop between them."""

    def __init__(self, handler: Callable[[Delivery], None]) -> None:
        self._handler = handler
        self._on_way: deque[Delivery] = deque()
        self._carrying: asyncio.Task[None] | None = None
        self.inner: Pulls

    def put(self, delivery: Delivery) -> None:
        self._on_way.append(delivery)
        if self._carrying is None or self._carrying.done():
            self._carrying = asyncio.create_task(self._carry())

    async def _carry(self) -> None:
        while self._on_way:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            self._handler(self._on_way.popleft())

    def want(self, consumer: str, credit: int) -> None:
        self.inner.want(consumer, max(0, credit - self._coming(consumer)))

    def outstanding(self, consumer: str) -> int:
        return self.inner.outstanding(consumer) + self._coming(consumer)

    def _coming(self, consumer: str) -> int:
        return sum(delivery.consumer == consumer for delivery in self._on_way)

    async def stop(self) -> None:
        await self.inner.stop()
        if self._carrying is not None:
            await self._carrying


class WireBroker(MemoryBroker):
    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls:
        wire = Wire(handler)
        wire.inner = super().pulls(stream, wire.put)
        return wire


class WireServer(MemoryServer):
    def connect(self, name: str) -> MemoryBroker:
        if name != "sidecar":
            return super().connect(name)
        broker = WireBroker(self, name)
        self._connections.add(broker)
        return broker


class Wired(InProcess):
    """An in-process cluster whose sidecars get their deliveries through a `Wire`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._other = self._observer
        self.server = WireServer()
        self._observer = self.server.connect("test")

    async def close(self) -> None:
        await super().close()
        await self._other.close()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry("toy/one"), toy_entry("toy/two")) as cluster:
        yield cluster


async def gatherings(folder: Path, requests: int, **environ: str) -> tuple[float, float]:
    """Return the figures of a worker with a backlog: how often it took deliveries from the wire, and how many batches
    its device ran.
    """
    async with Wired(folder) as cluster:
        gateway = await cluster.gateway()
        sent = [asyncio.create_task(gateway.encode(str(number))) for number in range(requests)]
        await until(
            lambda: len(cluster.server.streams) and stored(cluster.server) == requests, "all requests in the queue"
        )
        adapter = await cluster.adapter()
        sidecar = await cluster.sidecar(adapter, ready=False, **environ)
        assert [answer.status_code for answer in await asyncio.gather(*sent)] == [200] * requests
        gathering_count = await sidecar.metric("sie_gathered_deliveries_count")
        assert await sidecar.metric("sie_gathered_deliveries_sum") == requests
        return gathering_count, len(adapter.batches)


def stored(server: MemoryServer) -> int:
    return sum(stream.state().messages for stream in server.streams.values())


async def test_deliveries_on_their_way_are_gathered_and_tokenised_together(tmp_path: Path) -> None:
    """61 deliveries arrive one by one. Without a quantum the sidecar gathers them almost singly. With a quantum it
    gathers many at once.
    """
    none = {"SIE_ADAPTIVE_MIN_QUANTUM_MS": "0", "SIE_ADAPTIVE_MAX_QUANTUM_MS": "0"}
    long = {"SIE_ADAPTIVE_MIN_QUANTUM_MS": "1000", "SIE_ADAPTIVE_MAX_QUANTUM_MS": "1000"}
    (tmp_path / "none").mkdir()
    (tmp_path / "long").mkdir()
    one_by_one, _ = await gatherings(tmp_path / "none", 61, **none)
    together, _ = await gatherings(tmp_path / "long", 61, **long)
    assert one_by_one > 55
    assert together < 15


async def test_a_gathering_whose_deliveries_were_all_cancelled_is_not_counted() -> None:
    metrics, queues = Mock(), Mock(all=[Mock()])
    intake = WorkIntake(Mock(), Mock(), queues, Mock(), Mock(), Quantum(0.0, 0.0, 1.0), metrics, None)
    intake.arrived = [Mock(settled=True)]
    intake._arrival.set()
    assert (await intake.next(lambda: False, lambda: False)).groups == []
    metrics.gathered.observe.assert_not_called()


async def test_a_lone_request_is_not_held_back(tmp_path: Path) -> None:
    """A delivery is prepared at once if no other one is on its way, however long the quantum."""
    async with Wired(tmp_path) as cluster:
        gateway = await cluster.gateway()
        adapter = await cluster.adapter()
        await cluster.sidecar(adapter, SIE_ADAPTIVE_MIN_QUANTUM_MS="20000", SIE_ADAPTIVE_MAX_QUANTUM_MS="20000")
        async with asyncio.timeout(30):
            for number in range(5):
                assert (await gateway.encode(str(number))).status_code == 200


def test_an_empty_text_is_recorded_as_a_token_and_a_batch_with_all_its_times(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model without a tokenizer has no tokens for an empty text. A replay accepts no request without a token."""
    monkeypatch.setattr(recording, "runnable", lambda work: ([SimpleNamespace(cost=0), SimpleNamespace(cost=7)], []))
    lease = SimpleNamespace(delivery=SimpleNamespace(sent_s=1.0))
    work = SimpleNamespace(item=SimpleNamespace(priority="bulk"), lease=lease)
    batch: Any = SimpleNamespace(
        entries=[SimpleNamespace(work=work)], key=SimpleNamespace(residency="toy/one", lora="")
    )
    trace_file = recording.Recording(tmp_path / "trace.jsonl", settings_of())
    trace_file.ran(batch, BatchNote(tokens=7, attention=49), BatchDone("b", (), b"", 20.0, preprocess_ms=5.0), 1)
    trace_file.close()
    trace = read((tmp_path / "trace.jsonl").read_bytes().splitlines())
    assert trace.requests[0].tokens == (1, 7)
    assert trace.ran[0].seconds == 0.025


async def test_what_ran_is_recorded_as_lengths_and_times_and_can_be_replayed(
    cluster: InProcess, tmp_path: Path
) -> None:
    """The recording has no text. It has a request for each message, with its time and the tokens of its rows, and each
    batch that the device ran.
    """
    path = tmp_path / "trace.jsonl"
    gateway = await cluster.gateway()
    adapter = await cluster.adapter(lanes=2)
    sidecar = await cluster.sidecar(adapter)
    before_s = time.time()
    recording.begin(path, sidecar.settings)
    try:
        assert (await gateway.encode("secret", "secrets")).status_code == 200
        assert (await gateway.encode("xyz", model="toy/two", X_SIE_Priority="bulk")).status_code == 200
    finally:
        recording.end()
    raw = path.read_bytes()
    assert b"secret" not in raw
    assert b"xyz" not in raw
    trace = read(raw.splitlines())
    first, second = trace.requests
    assert (first.tokens, first.model, first.priority) == ((6 + SPECIAL, 7 + SPECIAL), "toy/one", "interactive")
    assert (second.tokens, second.model, second.priority) == ((3 + SPECIAL,), "toy/two", "bulk")
    assert first.at == 0 < second.at < time.time() - before_s
    assert [(ran.tokens, ran.attention) for ran in trace.ran] == [(17, 8**2 + 9**2), (5, 5**2)]
    plan = replace(plan_of(sidecar.settings), **trace.settings)
    assert plan == replace(plan_of(sidecar.settings), lanes=2)
    assert len(trace.settings) == 9
    assert Replay(trace.requests, plan, Machine(0.001, 0.0)).run().latency_s == pytest.approx([0.001, 0.001])


async def test_the_heartbeat_tells_what_is_held_for_how_long_and_how_fast_the_device_is(cluster: InProcess) -> None:
    """After a batch the heartbeat has the rate. While batches are held, it has their tokens and the age of the oldest
    item of each model. Afterwards these are zero again.
    """
    gateway = await cluster.gateway()
    adapter = await cluster.adapter()
    sidecar = await cluster.sidecar(adapter, SIE_HEALTH_PUBLISH_INTERVAL_MS="100", SIE_HEARTBEAT_TIMEOUT_MS="5000")
    started = cluster.last_beat("w0", ready=True)
    assert started is not None
    assert started.rate == started.held_cost == 0
    # two batches wait and two are at the adapter (one lane, a pipeline of 2), each of at most 16384 tokens and 12
    # messages
    assert (started.credit_cost, started.credit_items) == (4 * 16384, 4 * 12)
    before_s = time.perf_counter()
    await gateway.encode("x" * 100)
    took_s = time.perf_counter() - before_s
    beat = await until(lambda: rated(cluster), "a rate")
    assert beat.rate > (100 + SPECIAL) / took_s
    adapter.hold_batches = True
    texts = (("abc", "toy/one"), ("abcde", "toy/one"), ("ab", "toy/two"))
    sent = [asyncio.create_task(gateway.encode(text, model=model)) for text, model in texts]
    tokens = 10 + 3 * SPECIAL
    beat = await until(lambda: held(cluster, tokens), "what is held")
    first = {status.model: status.oldest_s for status in beat.models}
    assert await sidecar.metric("sie_queue_depth", model="toy/one") == 2
    assert await sidecar.metric("sie_queue_depth", model="toy/two") == 1
    later = await until(lambda: (new_beat := held(cluster, tokens)) is not beat and new_beat, "a later heartbeat")
    for status in later.models:
        assert status.oldest_s > first[status.model] >= 0
    adapter.let_go()
    await asyncio.gather(*sent)
    beat = await until(lambda: held(cluster, 0), "nothing held")
    assert [status.oldest_s for status in beat.models] == [0.0, 0.0]
    assert await sidecar.metric("sie_queue_depth") == 0


def rated(cluster: InProcess) -> Heartbeat | None:
    beat = cluster.last_beat("w0")
    return beat if beat is not None and beat.rate else None


def held(cluster: InProcess, tokens: int) -> Heartbeat | None:
    beat = cluster.last_beat("w0")
    return beat if beat is not None and beat.held_cost == tokens else None
