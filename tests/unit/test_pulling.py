"""Requests of a worker to the broker: credit by priority, consumers that come and go, and unexpected deliveries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
from direct import ENTRY, Direct, is_right, reasons
from inprocess import until

from sie_broker import Delivery
from sie_broker.memory import MemoryBroker, MemoryServer
from sie_contracts.wire import messages, topology
from sie_contracts.wire.topology import Lane
from sie_sidecar.batch import BatchLimits, Load
from sie_sidecar.intake import ACTIVE_S, Pulling, WorkSource

LANE = Lane("_default", "cpu", "default")
LIMITS = BatchLimits(cost=1000, requests=10, wait_s=0.01)
STREAM = topology.work_stream(LANE.pool, storage="memory", replicas=1, max_bytes=-1, max_age_s=0.0)


@dataclass
class Taking:
    """A worker that keeps its deliveries and reports the load before its device."""

    broker: MemoryBroker
    loads: dict[bool, Load] = field(default_factory=lambda: {False: Load(0, 0, 1), True: Load(0, 0, 1)})
    taken: list[Delivery] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.pulling = Pulling(self.broker, LANE, LIMITS, self._on_delivery, self.loads.get, lambda: self.now_s)

    def _on_delivery(self, pulling: Pulling, delivery: Delivery) -> None:
        self.taken.append(delivery)
        pulling.note(delivery, 100)
        pulling.refill()


@pytest.fixture
async def broker() -> AsyncIterator[MemoryBroker]:
    broker = MemoryServer().connect("test")
    await broker.ensure_stream(STREAM)
    yield broker
    await broker.close()


async def publish(broker: MemoryBroker, priority: str, count: int, model: str = "m") -> None:
    await broker.ensure_consumer(topology.work_consumer(LANE, priority, model, 10.0))
    for number in range(count):
        await broker.publish(topology.work_subject(LANE, priority, model), b"work", f"{priority}{model}{number}")


async def test_bulk_work_that_is_held_takes_no_credit_from_interactive_work(broker: MemoryBroker) -> None:
    """Otherwise a search box waits at the broker until a batch of bulk work has left."""
    taking = Taking(broker)
    taking.loads[True] = Load(2000, 20, 1)
    await publish(broker, "bulk", 40)
    await publish(broker, "interactive", 20)
    await taking.pulling.start()
    await until(lambda: len(taking.taken) >= 21, "all interactive work, and the probe of bulk work")
    assert sum("bulk" in delivery.consumer for delivery in taking.taken) == 1
    taking.loads[False] = taking.loads[True]
    taking.pulling.level()
    assert not any(
        taking.pulling._pulls.outstanding(consumer) for consumer in {delivery.consumer for delivery in taking.taken}
    )
    await taking.pulling.stop()


async def test_a_consumer_without_new_deliveries_leaves_its_share_of_the_credit(broker: MemoryBroker) -> None:
    taking = Taking(broker)
    for model in "mn":
        await publish(broker, "interactive", 1, model)
    await taking.pulling.start()
    await until(lambda: len(taking.taken) == 2, "the work of both models")
    busy = taking.taken[1].consumer
    taking.pulling.level()
    shared = taking.pulling._pulls.outstanding(busy)
    taking.now_s = 2 * ACTIVE_S
    taking.pulling.note(taking.taken[1], 0)
    for _ in range(2):  # the first call finds that the other consumer has no new deliveries
        taking.pulling.level()
    assert taking.pulling._pulls.outstanding(busy) == 2 * shared > 0
    await taking.pulling.stop()


async def test_a_consumer_that_is_gone_without_a_notice_is_forgotten(broker: MemoryBroker) -> None:
    """Notices may be lost. The broker refuses every pull from a consumer that was deleted."""
    taking = Taking(broker)
    await publish(broker, "bulk", 0)
    await publish(broker, "interactive", 0)
    await taking.pulling.start()
    assert taking.pulling._notices is not None
    await taking.pulling._notices.stop()
    consumer = topology.work_consumer(LANE, "bulk", "m", 10.0).name
    await broker.delete_consumer(STREAM.name, consumer)
    assert consumer in taking.pulling._consumers
    await taking.pulling.find_consumers()
    assert list(taking.pulling._consumers) == [topology.work_consumer(LANE, "interactive", "m", 10.0).name]
    await taking.pulling.stop()


async def test_a_reconnect_before_the_start_pulls_nothing(broker: MemoryBroker) -> None:
    """The broker may come back while the worker still starts. The leases of work that comes then are not renewed."""
    taking = Taking(broker)
    await publish(broker, "interactive", 1)
    await taking.pulling.refresh_consumers()
    assert not taking.pulling._pulls.outstanding(topology.work_consumer(LANE, "interactive", "m", 10.0).name)
    await taking.pulling.start()
    await until(lambda: taking.taken, "the work")
    await taking.pulling.stop()


# ---- the whole worker


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Direct]:
    async with Direct(tmp_path, ENTRY) as cluster:
        yield cluster


async def test_what_cannot_be_read_does_not_use_up_the_probe(cluster: Direct) -> None:
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    subject = topology.work_subject(cluster.lane, "interactive", ENTRY.id)
    for number in range(3):
        await cluster.broker.publish(subject, b"no work item", f"broken{number}")
    await cluster.left(0)
    item = await cluster.publish("good")
    assert is_right(await cluster.result(item, 5.0), item, 0)


async def test_an_estimate_that_was_too_high_is_no_credit_lost(cluster: Direct) -> None:
    """20 texts of 3 tokens, each estimated at 60, fit into two batches of 100 tokens. All are delivered while the
    device is busy.
    """
    adapter = await cluster.adapter()
    adapter.hold_batches = True
    sidecar = await cluster.sidecar(adapter, SIE_RUST_PIPELINE_DEPTH="1", SIE_MAX_BATCH_COST="100")
    first = await cluster.publish("x")
    await adapter.until(lambda adapter: adapter.running, "a batch at the device")
    subject = topology.work_subject(cluster.lane, "interactive", ENTRY.id)
    for number in range(20):
        item = msgspec.structs.replace(first, request=f"many{number}", cost=60)
        await cluster.broker.publish(subject, messages.encode(item), item.request)
    async with asyncio.timeout(30):
        while await sidecar.metric("sie_deliveries_total") < 21:
            pass  # the scrape awaits
    adapter.let_go()
    await cluster.left(0)


async def test_work_is_answered_at_its_deadline_though_the_load_goes_on(cluster: Direct) -> None:
    adapter = await cluster.adapter()
    adapter.hold_loads = True
    await cluster.sidecar(adapter)
    late = await cluster.publish("late", budget_ms=200)
    assert reasons(await cluster.result(late)) == ["GATEWAY_TIMEOUT"]
    await cluster.left(0)
    assert adapter.loads
    assert not adapter.batches
    adapter.let_go()
    good = await cluster.publish("good")
    assert is_right(await cluster.result(good), good, 0)
    assert len(adapter.loads) == 1


def test_a_consumer_stays_paused_until_the_last_group_that_pauses_it_goes_on(broker: MemoryBroker) -> None:
    queues = Mock(limits=LIMITS, is_full_of=Mock(return_value=False))
    source = WorkSource(broker, LANE, "w0", Mock(), queues, Mock(), Mock(), Mock())
    with source.paused({"a"}):
        with source.paused({"a", "b"}):
            assert [source._role(name) for name in "abc"] == ["none", "none", "pull"]
        assert [source._role(name) for name in "abc"] == ["none", "pull", "pull"]
    assert source._role("a") == "pull"
