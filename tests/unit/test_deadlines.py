"""Deadlines by the broker's clock, whatever the wall clock of this machine shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from direct import ENTRY, Direct, is_right, reasons
from fake_adapter import texts_of
from hypothesis import given
from hypothesis import strategies as st
from inprocess import until

from sie_broker import BrokerError, Delivery
from sie_broker.memory import MemoryServer
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import CancelRequests
from sie_contracts.wire.topology import work_stream
from sie_runtime.clock import BrokerClock, ClockSample, estimate
from sie_sidecar.intake import LATE_S

STREAM = work_stream("_default", storage="file", replicas=1, max_bytes=-1, max_age_s=0.0)


@given(
    st.floats(-1e6, 1e6),
    st.lists(st.tuples(st.floats(0, 1e5), st.floats(0, 2.0), st.floats(0, 2.0)), min_size=1, max_size=8),
)
def test_the_offset_is_off_by_no_more_than_the_margin(offset_s: float, trips: list[tuple[float, float, float]]) -> None:
    """The times of the request and of the response do not matter, even if they are unequal."""
    samples = [ClockSample(at_s, at_s + there_s + back_s, at_s + there_s + offset_s) for at_s, there_s, back_s in trips]
    found_s, margin_s = estimate(samples)
    assert abs(found_s - offset_s) <= margin_s + 1e-6
    assert margin_s == pytest.approx(min(there_s + back_s for _, there_s, back_s in trips) / 2, abs=1e-6)


async def test_without_an_answer_the_last_offset_stays() -> None:
    server = MemoryServer(wall_clock=lambda: 1000.0)
    broker = server.connect("test")
    clock = BrokerClock(broker, STREAM.name, lambda: 10.0)
    with pytest.raises(BrokerError, match="no stream"):
        await clock.measure()
    await broker.ensure_stream(STREAM)
    await clock.measure()
    server.lose_stream(STREAM.name)
    with pytest.raises(BrokerError, match="no stream"):
        await clock.measure()
    assert (clock.now_s(), clock.margin_s) == (1000.0, 0.0)
    await broker.close()


async def test_an_end_that_meets_a_reconnect_is_not_lost() -> None:
    """`asyncio.wait_for` of Python 3.11 drops a cancellation if the result comes in the same turn of the event loop. A
    drain would then wait forever.
    """
    server = MemoryServer()
    broker = server.connect("test")
    await broker.ensure_stream(STREAM)
    again: list[Callable[[], Awaitable[None]]] = []
    broker.on_reconnect = again.append  # type: ignore[method-assign]
    clock = BrokerClock(broker, STREAM.name)
    task = asyncio.create_task(clock.run())
    await until(lambda: clock.margin_s < 1.0, "a measurement")
    await again[0]()
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=30)
    assert done
    await broker.close()


# ---- the whole worker


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Direct]:
    async with Direct(tmp_path, ENTRY) as cluster:
        yield cluster


@pytest.mark.parametrize("offset_s", [-30.0, 0.0, 30.0])
async def test_a_clock_that_is_30_s_off_changes_nothing(tmp_path: Path, offset_s: float) -> None:
    """The broker's clock is ahead of that of this machine, or behind it. Work in time is answered, and late work is
    dropped.
    """
    async with Direct(tmp_path, ENTRY) as cluster:
        cluster.server.wall_clock = lambda: time.time() + offset_s
        late = await cluster.publish("late", budget_ms=100)
        # its budget, the tolerance for late work, and the error of the clocks in this process
        await asyncio.sleep(0.1 + LATE_S + 0.2)
        adapter = await cluster.adapter()
        await cluster.sidecar(adapter)
        good = await cluster.publish("good", budget_ms=20_000)  # less than the offset of the clocks
        assert is_right(await cluster.result(good), good, 0)
        assert reasons(await cluster.result(late)) == ["GATEWAY_TIMEOUT"]
        await cluster.left(0)
        assert [texts_of(batch) for batch in adapter.batches] == [["good"]]


async def test_late_work_loads_no_model(cluster: Direct) -> None:
    late = await cluster.publish("late", budget_ms=1)
    await asyncio.sleep(LATE_S + 0.2)
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    assert reasons(await cluster.result(late)) == ["GATEWAY_TIMEOUT"]
    await cluster.left(0)
    assert adapter.loads == []


async def test_work_that_grew_late_while_its_model_was_loaded_is_not_run(cluster: Direct) -> None:
    adapter = await cluster.adapter()
    adapter.hold_loads = True
    await cluster.sidecar(adapter)
    late, good = await cluster.publish("late", budget_ms=300), await cluster.publish("good")
    await adapter.until(lambda adapter: adapter.loads, "a load")
    await asyncio.sleep(0.3 + LATE_S + 0.2)
    adapter.let_go()
    assert is_right(await cluster.result(good), good, 0)
    assert reasons(await cluster.result(late)) == ["GATEWAY_TIMEOUT"]
    assert [texts_of(batch) for batch in adapter.batches] == [["good"]]


async def test_work_that_grew_late_before_the_device_is_not_sent_to_it(cluster: Direct) -> None:
    adapter = await cluster.adapter()
    adapter.hold_batches = True
    await cluster.sidecar(adapter, SIE_RUST_PIPELINE_DEPTH="1")
    first = await cluster.publish("first")
    await adapter.until(lambda adapter: adapter.running, "a batch at the device")
    late, good = await cluster.publish("late", budget_ms=300), await cluster.publish("good")
    await asyncio.sleep(0.3 + LATE_S + 0.2)
    adapter.let_go()
    for item in (first, good):
        assert is_right(await cluster.result(item), item, 0)
    assert reasons(await cluster.result(late)) == ["GATEWAY_TIMEOUT"]
    assert [texts_of(batch) for batch in adapter.batches] == [["first"], ["good"]]


async def test_a_redelivery_keeps_its_age(cluster: Direct) -> None:
    """Work that is redelivered after its budget gets no new budget."""
    item = await cluster.publish("late", budget_ms=200)
    await cluster.broker.ensure_consumer(topology.work_consumer(cluster.lane, "interactive", ENTRY.id, 10.0))
    deliveries: list[Delivery] = []
    pulls = cluster.broker.pulls(cluster.stream.name, deliveries.append)
    pulls.want(topology.work_consumer(cluster.lane, "interactive", ENTRY.id, 10.0).name, 1)
    await until(lambda: deliveries, "a delivery")
    await pulls.stop()
    await deliveries[0].nak(0.2 + LATE_S + 0.2)
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    assert reasons(await cluster.result(item)) == ["GATEWAY_TIMEOUT"]
    assert adapter.batches == []


# ---- cancellation


async def test_cancelled_work_that_is_not_at_the_device_never_runs(cluster: Direct) -> None:
    """Work is cancelled while its model is loaded, and while it waits. A batch at the device goes on. All cancelled
    work leaves the queue.
    """
    adapter = await cluster.adapter()
    adapter.hold_loads = adapter.hold_batches = True
    sidecar = await cluster.sidecar(adapter, SIE_RUST_PIPELINE_DEPTH="1")
    loading = await cluster.publish("loading", request="gone-1")
    await adapter.until(lambda adapter: adapter.loads, "a load")
    await cluster.send(topology.cancel_subject("_default"), messages.encode(CancelRequests(("gone-1", "unknown"))))
    await cluster.left(0)
    adapter.hold_loads = False
    adapter.let_go(1)
    first = await cluster.publish("first")
    await adapter.until(lambda adapter: adapter.running, "a batch at the device")
    waiting = [await cluster.publish("waiting", request="gone-2", chunk=chunk) for chunk in range(2)]
    good = await cluster.publish("good")
    async with asyncio.timeout(30):
        while await sidecar.metric("sie_deliveries_total") < 5:
            pass  # the scrape awaits
    await cluster.send(topology.cancel_subject("_default"), messages.encode(CancelRequests(("gone-2", first.request))))
    await cluster.left(2)
    adapter.let_go()
    for item in (first, good):
        assert is_right(await cluster.result(item), item, 0)
    await cluster.left(0)
    assert [texts_of(batch) for batch in adapter.batches] == [["first"], ["good"]]
    assert not cluster.results.keys() & {(item.request, item.chunk) for item in (loading, *waiting)}
    assert await sidecar.metric("sie_settlements_total", outcome="cancelled") == 3
