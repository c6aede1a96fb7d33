"""The scheduler inside a running sidecar: gathering of deliveries, and the figures of heartbeats."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_adapter import SPECIAL, toy_entry
from inprocess import InProcess, until

from sie_broker import Delivery, Pulls
from sie_broker.memory import MemoryBroker, MemoryServer
from sie_contracts.wire.heartbeats import Heartbeat
from sie_sidecar.batch import Quantum
from sie_sidecar.intake import WorkIntake

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
    assert await intake.next(Mock(tokenising=0), Mock(more_expected=Mock(return_value=False))) == []
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
