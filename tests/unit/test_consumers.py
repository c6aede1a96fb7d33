"""Consumers of work: the choice for a model, their repair while requests need them, and their deletion."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from consumer_race import LANE, item, race, work_queue
from hypothesis import given
from hypothesis import strategies as st
from inprocess import settings_of, until

from sie_broker import Broker, BrokerError, BrokerUnavailable, ConsumerState, Delivery
from sie_broker.memory import MemoryBroker, MemoryServer
from sie_contracts.errors import GatewayTimeout, PoolNotFound, QueueFull, QueueUnavailable, SIEError
from sie_contracts.settings import SettingError
from sie_contracts.wire import topology
from sie_contracts.wire.topology import StreamSpec
from sie_gateway.metrics import Metrics
from sie_gateway.streams import publish as life
from sie_gateway.streams.publish import Rest, WorkConsumers, given_up, rests
from sie_runtime import failpoints
from sie_runtime.failpoints import FailpointError

STREAM = topology.stream_name(LANE.pool)


def stream_of(pool: str) -> StreamSpec:
    return topology.work_stream(pool, storage="memory", replicas=1, max_bytes=-1, max_age_s=0.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def server() -> AsyncIterator[MemoryServer]:
    memory_server = MemoryServer()
    broker = memory_server.connect("owner")
    await broker.ensure_stream(stream_of(LANE.pool))
    yield memory_server
    await broker.close()


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def state(name: str, *, delivered: int = 0, waiting: int = 0, leased: int = 0) -> ConsumerState:
    return ConsumerState(name, "sie.work.x", 10.0, topology.TOPOLOGY_VERSION, delivered, waiting, leased)


async def gateway(
    server: MemoryServer, clock: Clock, *, limit: int = 256, idle_s: float = life.IDLE_S
) -> life.StreamConsumers:
    stream = life.StreamConsumers(server.connect("gateway"), STREAM, limit, idle_s, clock)
    await stream.start()
    return stream


def routed(stream: life.StreamConsumers, model: str, deadline_s: float) -> life.WorkRoute:
    return stream.route(*life._routes(LANE, "interactive", model, 10.0), deadline_s)


def names(server: MemoryServer) -> set[str]:
    return set(server.streams[STREAM].consumers)


# ---- the pure core


def test_a_consumer_rests_from_when_it_was_first_seen_to_do_nothing() -> None:
    first = rests({}, [state("a", delivered=3), state("b"), state("c", waiting=1)], 10.0)
    second = rests(first, [state("a", delivered=3), state("b", delivered=1), state("c", waiting=1), state("new")], 20.0)
    assert {name: rest.since_s for name, rest in second.items()} == {"a": 10.0, "b": 20.0, "c": 20.0, "new": 20.0}


@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from("abcdef"), st.integers(0, 2), st.integers(0, 1), st.integers(0, 1)),
            unique_by=lambda entry: entry[0],
        ),
        min_size=1,
        max_size=12,
    )
)
def test_only_what_did_nothing_for_the_whole_time_is_given_up(history: list[list[tuple[str, int, int, int]]]) -> None:
    """In any history of observations a minute apart, a consumer that is deleted was unchanged, empty and unleased for
    the whole time.
    """
    rest_by_name: dict[str, Rest] = {}
    for minute, states in enumerate(history):
        rest_by_name = rests(
            rest_by_name,
            [state(name, delivered=count, waiting=w, leased=held) for name, count, w, held in states],
            minute * 60.0,
        )
        assert set(rest_by_name) == {name for name, *_ in states}
        for name in given_up(rest_by_name, minute * 60.0, 1000, 180.0):
            last = [
                next((entry for entry in snapshot if entry[0] == name), None)
                for snapshot in history[minute - 3 : minute + 1]
            ]
            assert None not in last
            assert len({entry[1] for entry in last if entry}) == 1
            assert not any(entry[2] or entry[3] for entry in last[1:] if entry)


def test_a_crowded_stream_gives_up_those_at_rest_for_the_longest() -> None:
    """The collector leaves at most 15 of 16 places filled. For that it deletes no consumer that was busy lately."""
    resting = {f"own__{number:02}": Rest(1, float(number * 100)) for number in range(20)}
    resting |= {"x__y__bulk___s1": Rest(1, 0.0)}
    assert given_up(resting, 2000.0, 16, 3600.0) == ["own__00", "own__01", "own__02", "own__03", "own__04"]
    assert given_up(resting, 500.0, 16, 3600.0) == ["own__00", "own__01", "own__02"]
    assert given_up(resting, 2000.0, 100, 3600.0) == []
    assert "x__y__bulk___s1" in given_up(resting, 3600.0, 16, 3600.0)


# ---- routes


async def test_beyond_the_bound_models_share_slots_until_a_place_is_free(server: MemoryServer) -> None:
    clock = Clock()
    stream = await gateway(server, clock, limit=2)
    for model in ("toy/a", "toy/b"):
        await stream.ensure(routed(stream, model, 1010.0).consumer)
    cold = routed(stream, "toy/c", 1010.0)
    assert topology.is_slot(cold.consumer.name)
    assert cold.consumer.subject.endswith(".*")
    await stream.ensure(cold.consumer)
    assert not topology.is_slot(routed(stream, "toy/a", 1010.0).consumer.name)
    assert len(names(server)) == 3

    await server.connect("other").delete_consumer(
        STREAM, topology.work_consumer(LANE, "interactive", "toy/b", 10.0).name
    )
    clock.now_s += 60.0
    await stream.refresh(10.0)
    assert routed(stream, "toy/c", 1070.0).subject == topology.work_subject(LANE, "interactive", "toy/c")
    assert topology.is_slot(routed(stream, "toy/b", 1070.0).consumer.name)


async def test_a_burst_of_new_models_does_not_pass_the_bound(server: MemoryServer) -> None:
    """A route takes its place when it is chosen, before its consumer exists. All maps are bounded, and routes are
    forgotten after their deadlines.
    """
    clock = Clock()
    stream = await gateway(server, clock, limit=256)
    routes = [routed(stream, f"toy/{number}", clock.now_s + 10.0) for number in range(10_000)]
    await asyncio.gather(*(stream.ensure(route.consumer) for route in routes))
    own = {name for name in names(server) if not topology.is_slot(name)}
    assert len(own) == 256
    assert len(names(server)) == 256 + topology.SLOTS
    assert len(stream._held) == len(stream.verified) == 256 + topology.SLOTS
    clock.now_s += 11.0
    await stream.refresh(10.0)
    assert not stream._held


async def test_messages_of_both_ways_are_each_delivered_once(server: MemoryServer) -> None:
    """While a model moves between its own consumer and its slot, both hold messages, and neither gets those of the
    other.
    """
    broker = server.connect("test")
    ways = life._routes(LANE, "interactive", "toy/a", 10.0)
    got: list[Delivery] = []
    pulls = broker.pulls(STREAM, got.append)
    for route in ways:
        await broker.ensure_consumer(route.consumer)
        pulls.want(route.consumer.name, 10)
    for number in range(6):
        await broker.publish(ways[number % 2].subject, b"%d" % number, str(number))
    await until(lambda: len(got) == 6, "all deliveries")
    assert sorted(delivery.data for delivery in got) == [b"%d" % number for number in range(6)]
    assert {delivery.delivered for delivery in got} == {1}
    await broker.close()


# ---- repair


async def test_a_deleted_consumer_is_made_again_while_a_request_needs_it(server: MemoryServer) -> None:
    clock = Clock()
    stream, broker = await gateway(server, clock), server.connect("other")
    open_, done = routed(stream, "toy/open", 1100.0).consumer, routed(stream, "toy/done", 1001.0).consumer
    for spec in (open_, done):
        await stream.ensure(spec)
    clock.now_s += 50.0
    for spec in (open_, done):
        assert await broker.delete_consumer(STREAM, spec.name)
    await until(lambda: names(server) == {open_.name}, "the consumer of the open request")


async def test_a_deletion_in_the_middle_of_an_ensure_is_not_overlooked(server: MemoryServer) -> None:
    """The broker confirms the consumer. The consumer is deleted, and the notice is handled before the confirmation
    arrives. The gateway creates the consumer again.
    """
    clock = Clock()

    class Slow(MemoryBroker):
        async def ensure_consumer(self, spec: topology.ConsumerSpec) -> None:
            await super().ensure_consumer(spec)
            calls.append(spec.name)
            if len(calls) == 1:
                await super().delete_consumer(STREAM, spec.name)
                await until(lambda: spec.name in stream._stale, "the notice")

    calls: list[str] = []
    stream = life.StreamConsumers(Slow(server, "slow"), STREAM, 256, life.IDLE_S, clock)
    await stream.start()
    spec = routed(stream, "toy/a", 1100.0).consumer
    await stream.ensure(spec)
    assert len(calls) == 2
    assert spec.name in names(server)


async def test_lost_notices_are_made_up_for_by_the_next_round(server: MemoryServer) -> None:
    """A consumer that an open request needs, or that has messages that no worker holds, comes back; an unneeded one
    does not.
    """
    stream = await gateway(server, Clock())
    deadlines = {"toy/held": 1100.0, "toy/full": 0.0, "toy/idle": 0.0}
    specs = {model: routed(stream, model, deadline_s).consumer for model, deadline_s in deadlines.items()}
    for spec in specs.values():
        await stream.ensure(spec)
    await server.connect("other").publish(specs["toy/full"].subject, b"x", "1")
    for spec in specs.values():
        server.streams[STREAM].remove_consumer(spec.name)  # without a notice
    await stream.refresh(10.0)
    assert names(server) == {specs["toy/held"].name, specs["toy/full"].name}


async def test_a_subject_of_another_form_is_told_and_does_not_stop_the_round(
    server: MemoryServer, caplog: pytest.LogCaptureFixture
) -> None:
    stream, broker = await gateway(server, Clock()), server.connect("other")
    await broker.publish("sie.work._default.odd", b"x", "1")
    await broker.publish(topology.work_subject(LANE, "bulk", "toy/a"), b"x", "2")
    await stream.refresh(10.0)
    assert names(server) == {topology.work_consumer(LANE, "bulk", "toy/a", 10.0).name}
    assert "no worker will get" in caplog.text


# ---- deletion


async def test_consumers_at_rest_for_an_hour_are_deleted_and_others_kept(server: MemoryServer) -> None:
    clock, broker = Clock(), server.connect("worker")
    stream = await gateway(server, clock)
    specs = [routed(stream, f"toy/{name}", 1001.0).consumer for name in ("idle", "leased", "waiting", "busy")]
    for spec in specs:
        await stream.ensure(spec)
    idle, leased, waiting, busy = specs
    got: list[Delivery] = []
    pulls = broker.pulls(STREAM, got.append)
    for number, spec in enumerate((leased, waiting)):
        await broker.publish(spec.subject, b"x", str(number))
    pulls.want(leased.name, 1)
    for minute in range(61):
        await broker.publish(busy.subject, b"x", f"busy-{minute}")
        pulls.want(busy.name, 1)
        await until(lambda count=minute: len(got) == count + 2, "a delivery")
        await got[-1].ack()
        assert names(server) == {spec.name for spec in specs}
        assert await stream.sweep(10.0) == (minute == 60)
        clock.now_s += 60.0
    assert names(server) == {leased.name, waiting.name, busy.name}
    assert idle.name not in names(server)
    await broker.close()


async def test_a_collector_that_dies_after_a_deletion_leaves_nothing_behind(server: MemoryServer) -> None:
    """A message is in the consumer that is deleted, and the collector dies before it counts messages. The next round of
    another gateway creates the consumer again.
    """
    clock = Clock()
    collector, second_collector = await gateway(server, clock, idle_s=0.0), await gateway(server, clock)
    spec = topology.work_consumer(LANE, "interactive", "toy/a", 10.0)
    broker = server.connect("publisher")
    await broker.ensure_consumer(spec)
    await broker.publish(spec.subject, b"x", "1")
    failpoints.arm("gateway.consumer_deleted=error")
    with pytest.raises(FailpointError):
        await collector.sweep(10.0)
    assert not names(server)
    await second_collector.refresh(10.0)
    assert names(server) == {spec.name}


@pytest.mark.parametrize("deletions", [1500, pytest.param(10_000, marks=pytest.mark.long)])
async def test_no_work_is_orphaned_by_deletions_that_race_publishes(deletions: int) -> None:
    """Consumers are deleted while they are idle, waiting and leased; every published message reaches a worker and
    leaves.
    """
    server = MemoryServer()
    brokers: list[Broker] = []

    async def connect(name: str) -> Broker:
        brokers.append(server.connect(name))
        return brokers[-1]

    outcome = await race(connect, deletions)
    for broker in brokers:
        await broker.close()
    assert outcome.deleted >= deletions
    assert outcome.left == 0
    assert set(outcome.published) <= set(outcome.received)
    assert outcome.longest_s < life.ROUND_S / 2  # notices and the count after a deletion repair it, not the round
    assert len(outcome.published) > deletions / 5


# ---- the leader


async def test_one_gateway_sweeps_once_a_minute(server: MemoryServer) -> None:
    clock = Clock()
    gateways = [WorkConsumers(server.connect(name), settings_of(), idle_s=0.0, clock=clock) for name in "ab"]
    broker = server.connect("c")
    for collector in gateways:
        await collector.follow(LANE.pool)
    deleted = []
    for _ in range(3):
        await broker.ensure_consumer(topology.work_consumer(LANE, "bulk", "toy/a", 10.0))
        deleted.append([await stream.take_turn() for stream in gateways])
        clock.now_s += 40.0
    assert deleted == [[1, 0], [0, 0], [1, 0]]


async def test_a_stream_that_is_lost_keeps_no_round_from_the_others(server: MemoryServer) -> None:
    """The consumers of another stream are created and deleted, whatever the order of the streams."""
    broker = server.connect("c")
    consumers = WorkConsumers(server.connect("a"), settings_of(), idle_s=0.0)
    for pool in ("before", LANE.pool, "later"):
        await broker.ensure_stream(stream_of(pool))
        await consumers.follow(pool)
    for pool in ("before", "later"):
        await broker.delete_stream(topology.stream_name(pool))
    await broker.ensure_consumer(topology.work_consumer(LANE, "bulk", "toy/idle", 10.0))
    await broker.publish(topology.work_subject(LANE, "bulk", "toy/full"), b"x", "1")
    with pytest.raises(BrokerError, match="WORK_later"):
        await consumers.reverify()
    assert topology.work_consumer(LANE, "bulk", "toy/full", 10.0).name in names(server)
    with pytest.raises(BrokerError, match="WORK_later"):
        await consumers.take_turn()
    assert names(server) == {topology.work_consumer(LANE, "bulk", "toy/full", 10.0).name}


# ---- limits of the stream


async def test_one_full_model_does_not_block_the_others() -> None:
    """A model that has used its share gets QUEUE_FULL. The next model is served."""
    server = MemoryServer()
    queue = work_queue(server.connect("gateway"), SIE_QUEUE_MAX_BYTES=str(64 << 20))
    await queue.ensure_pool(LANE.pool)
    limit = topology.per_subject_limit(64 << 20)
    deadline_s = time.perf_counter() + 60.0
    await queue.publish(LANE, [item("toy/full", str(number)) for number in range(limit)], deadline_s)
    with pytest.raises(QueueFull):
        await queue.publish(LANE, [item("toy/full", "more")], deadline_s)
    await queue.publish(LANE, [item("toy/other", "other")], deadline_s)
    assert server.streams[STREAM].state().messages == limit + 1


@pytest.mark.parametrize(
    ("budget_s", "patience_s", "is_connected", "refusal"),
    [
        (0.001, 10.0, True, GatewayTimeout),  # less than one attempt: it says nothing about the broker
        (0.3, 10.0, True, GatewayTimeout),
        (0.001, 10.0, False, QueueUnavailable),
        (0.3, 10.0, False, QueueUnavailable),
        (60.0, 0.05, True, QueueUnavailable),  # the broker had its time, and the request has more
    ],
)
async def test_a_publish_that_fails_names_the_broker_unless_the_budget_was_too_short(
    monkeypatch: pytest.MonkeyPatch, budget_s: float, patience_s: float, is_connected: bool, refusal: type[SIEError]
) -> None:
    """The broker stores nothing in time. The connection is there, or is lost."""
    server = MemoryServer()
    broker = server.connect("gateway")
    queue = work_queue(broker)
    await queue.publish(LANE, [item("toy/a", "earlier")], time.perf_counter() + 5.0)
    monkeypatch.setattr(life, "PUBLISH_PATIENCE_S", patience_s)

    async def unanswered(_subject: str, _data: bytes, _id: str, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        raise BrokerUnavailable("no reply in time")

    monkeypatch.setattr(broker, "publish", unanswered)
    if not is_connected:
        server.disconnect()
    with pytest.raises(refusal):
        await queue.publish(LANE, [item("toy/a", "late")], time.perf_counter() + budget_s)
    server.reconnect()
    await queue.consumers.close()


async def test_the_first_work_of_a_pool_makes_its_stream() -> None:
    server = MemoryServer()
    queue = work_queue(server.connect("gateway"))
    lane = topology.Lane("fresh", "cpu", "default")
    for number in range(2):
        await queue.publish(lane, [item("toy/a", str(number))], time.perf_counter() + 5.0)
    assert server.streams["WORK_fresh"].state().messages == 2
    assert set(server.streams["WORK_fresh"].consumers) == {
        topology.work_consumer(lane, "interactive", "toy/a", 10.0).name
    }


def test_a_model_may_fill_a_quarter_of_the_stream() -> None:
    assert topology.per_subject_limit(1 << 30) * (16 << 10) == 1 << 28
    assert topology.per_subject_limit(1 << 20) == 4096


async def test_a_broker_whose_messages_are_too_small_is_refused_with_the_number_to_set() -> None:
    with pytest.raises(SettingError, match=r"max_payload of 32768 bytes is too small.*65536"):
        work_queue(MemoryServer(max_payload=32768).connect("gateway"))
    assert work_queue(MemoryServer(max_payload=65536).connect("gateway")).limits().payload_bytes == 65536 - 16384


async def test_a_reservation_that_ends_during_its_first_publish_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pool is forgotten after its stream was made, and before the first message."""
    queue = work_queue(MemoryServer().connect("gateway"))
    forgotten: list[asyncio.Task[None]] = []
    start = life.StreamConsumers.start

    async def ends_meanwhile(stream: life.StreamConsumers) -> None:
        await start(stream)
        forgotten.append(asyncio.create_task(queue.forget_pool("fresh")))
        await asyncio.sleep(0)

    monkeypatch.setattr(life.StreamConsumers, "start", ends_meanwhile)
    with pytest.raises(PoolNotFound):
        await queue.publish(topology.Lane("fresh", "cpu", "default"), [item("toy/a", "0")], time.perf_counter() + 5.0)
    assert "fresh" not in queue.consumers.streams


async def test_work_for_a_reservation_that_has_ended_is_refused_before_a_host_is_requested() -> None:
    noted: list[topology.Lane] = []
    broker = MemoryServer().connect("gateway")
    queue = life.WorkQueue(
        broker,
        settings_of(),
        Metrics(),
        lambda pool: None,
        on_publish=lambda lane, items: noted.append(lane),
        serves=lambda pool: False,
    )
    with pytest.raises(PoolNotFound):
        await queue.publish(topology.Lane("ended", "cpu", "default"), [item("toy/a", "0")], time.perf_counter() + 5.0)
    assert noted == []
