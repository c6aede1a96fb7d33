"""The placement table: the two functions that make it, the gateways that write it, and its effect in simulation."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from typing import Literal

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from inprocess import until
from layouts import place
from placement_simulation import Case, Simulation, cases
from selection import long_but
from simulation.virtual import in_virtual_time

from sie_broker import BrokerError, Write
from sie_broker.memory import MemoryBroker, MemoryServer
from sie_contracts.errors import ErrorInfo
from sie_contracts.hosts import Holdings
from sie_contracts.models.layout import HOT
from sie_contracts.settings import load
from sie_contracts.wire import topology
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.messages import Input, RunOptions, WorkItem
from sie_contracts.wire.placement import LOWER_AFTER_S, USED, Replicas, replicas
from sie_contracts.wire.records import Placement, decode_placement
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.fleet.placement import EVERY_S, IDLE_S, UNHEARD_S, Placer
from sie_gateway.fleet.planner import FORGET_S, REFRESH_S, ModelBacklog, Planner
from sie_runtime.process import Stop

LANE = Lane("_default", "l4", "default")


def scaled(
    prev: Replicas | None,
    *,
    demand: float = 0.0,
    age_s: float = 0.0,
    resident: bool = True,
    now_s: float,
    most: int = 10,
    rate: float = 100.0,
    has_room: bool = True,
    is_crowded: bool = False,
) -> Replicas:
    limits = {"most": most, "adopt_after_s": 2.0, "load_s": 5.0}
    return replicas(prev, demand, rate, age_s, resident, now_s, has_room=has_room, is_crowded=is_crowded, **limits)  # type: ignore[arg-type]


# the number of hosts


@given(st.floats(0, 1e4), st.floats(0, 1e3), st.integers(1, 50))
@example(1.0, 5e-324, 3)
def test_as_many_hosts_as_the_demand_fills_to_seventy_percent_at_once(demand: float, rate: float, most: int) -> None:
    next_replicas = scaled(Replicas(1, 0.0), demand=demand, rate=rate, now_s=50.0, most=most)
    hosts_needed = demand / (USED * rate) if USED * rate else 1
    assert next_replicas.count == max(1, math.ceil(min(most, hosts_needed)))


def test_one_more_when_work_waits_although_all_hosts_have_the_model_and_not_before_a_load_has_passed() -> None:
    base = Replicas(1, raised_s=0.0)
    assert scaled(base, age_s=2.1, now_s=6.0).count == 2
    assert scaled(base, age_s=1.9, now_s=6.0).count == 1
    assert scaled(base, age_s=9.0, now_s=4.9).count == 1
    assert scaled(base, age_s=9.0, resident=False, now_s=60.0).count == 1
    assert scaled(base, age_s=9.0, now_s=60.0, most=1).count == 1
    assert scaled(base, age_s=9.0, now_s=60.0, has_room=False).count == 1


def test_replicas_lowers_at_once_where_a_host_is_crowded_but_not_below_the_demand() -> None:
    base = Replicas(3, raised_s=0.0)
    assert scaled(base, age_s=9.0, now_s=1.0, is_crowded=True) == Replicas(2, 0.0)
    assert scaled(base, demand=200.0, age_s=9.0, now_s=1.0, is_crowded=True) == base


def test_one_fewer_for_each_minute_in_which_fewer_would_do() -> None:
    scale = scaled(None, demand=400.0, now_s=0.0)
    assert scale.count == 6
    for second in range(1, 200):
        scale = scaled(scale, now_s=float(second))
        assert scale.count == 6 - max(0, math.floor((second - 1) / LOWER_AFTER_S))
    up = scaled(replace(scale, below_s=150.0), demand=400.0, now_s=200.0)
    assert (up.count, up.below_s) == (6, None)


def test_a_moment_of_demand_starts_the_minute_anew() -> None:
    scale = Replicas(2, 0.0, below_s=10.0)
    scale = scaled(scale, demand=100.0, now_s=69.0)
    assert scale == Replicas(2, 0.0)
    assert scaled(scale, now_s=71.0).count == 2


# the hosts

models, workers = st.integers(0, 24).map("m{}".format), st.integers(0, 7).map("w{}".format)


@st.composite
def lanes(
    draw: st.DrawFn,
) -> tuple[dict[str, tuple[str, ...]], dict[str, int], dict[str, Holdings], dict[str, float], dict[str, int]]:
    host_counts = draw(st.dictionaries(models, st.integers(1, 3), min_size=1, max_size=25))
    live = sorted(draw(st.sets(workers, min_size=1)))
    some = st.sets(models, max_size=6).map(frozenset)
    holdings = {
        name: Holdings(draw(some), draw(some), draw(st.sets(models, max_size=1).map(frozenset))) for name in live
    }
    prev = draw(st.dictionaries(models, st.lists(workers, max_size=4, unique=True).map(tuple), max_size=25))
    demand = draw(st.dictionaries(models, st.floats(0, 3), max_size=25))
    return prev, host_counts, holdings, demand, {name: draw(st.integers(0, 8)) for name in live}


_HOLDS = {name: Holdings(frozenset({model})) for name, model in (("w0", "m1"), ("w1", "m2"), ("w2", "m1"))}


@given(lanes())
# m1 leaves w0 for w1, which is full: it goes to w2, which has it
@example(({"m1": ("w0", "w1"), "m2": ("w1",)}, {"m1": 1, "m2": 1}, _HOLDS, {}, {"w1": 1}))
def test_each_model_gets_so_many_live_workers_each_once_and_at_most_one_that_it_leaves(lane) -> None:  # type: ignore[no-untyped-def]
    prev, host_counts, holdings, demand, slots = lane
    table = place(prev, host_counts, holdings, demand, slots)
    assert table.keys() == host_counts.keys()
    for model, hosts in table.items():
        count = min(host_counts[model], len(holdings))
        assert set(hosts) <= holdings.keys()
        assert len(hosts) == len(set(hosts))
        assert count <= len(hosts) <= count + 1
        if len(hosts) > count:
            assert model in holdings[hosts[0]].loaded
            assert not all(model in holdings[name].loaded for name in hosts[1:])
        elif any(model in holdings[name].loaded for name in hosts):
            assert model in holdings[hosts[0]].loaded


@given(lanes())
@settings(max_examples=60)
def test_equal_inputs_move_nothing_once_the_moves_that_help_are_made(lane) -> None:  # type: ignore[no-untyped-def]
    prev, host_counts, holdings, demand, slots = lane
    table = place(prev, host_counts, holdings, demand, slots)
    for _ in range(len(host_counts) * len(holdings) + 1):
        before, table = table, place(table, host_counts, holdings, demand, slots)
        if table == before:
            return
    raise AssertionError("the table never came to rest")


@given(lanes(), st.data())
def test_a_lost_worker_moves_its_own_models_alone(lane, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    prev, host_counts, holdings, _, _ = lane
    table = place(prev, host_counts, holdings, {}, {})
    table = place(table, host_counts, holdings, {}, {})
    lost = data.draw(st.sampled_from(sorted(holdings)))
    left = {name: held for name, held in holdings.items() if name != lost}
    after = place(table, host_counts, left, {}, {})
    for model in after:
        stayed = [name for name in table[model] if name != lost]
        assert set(stayed) <= set(after[model])
        if lost not in table[model]:
            assert set(after[model]) == set(table[model])


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 40), st.randoms(use_true_random=False))
def test_no_worker_gets_more_models_than_slots_while_another_has_room(
    count: int, slots: int, number: int, random
) -> None:  # type: ignore[no-untyped-def]
    names = [f"w{index}" for index in range(count)]
    host_counts = {f"m{index}": 1 for index in range(number)}
    prev = {model: (random.choice(names),) for model in host_counts if random.random() < 0.5}
    table = place(prev, host_counts, dict.fromkeys(names, Holdings()), {}, dict.fromkeys(names, slots))
    used = [sum(name in hosts for hosts in table.values()) for name in names]
    if number <= count * slots:
        assert max(used) <= slots
    else:
        assert min(used) >= slots


def test_a_table_that_was_lost_is_made_of_what_the_workers_have() -> None:
    holdings = {"w1": Holdings(frozenset({"a", "b"})), "w2": Holdings(frozenset({"c"}), loading=frozenset({"d"}))}
    table = place({}, dict.fromkeys("abcd", 1), holdings, {"a": 0.5, "b": 0.2}, {"w1": 2, "w2": 2})
    assert table == {"a": ("w1",), "b": ("w1",), "c": ("w2",), "d": ("w2",)}


def test_a_move_off_a_hot_worker_keeps_the_old_host_until_the_new_one_has_the_model() -> None:
    host_counts, demand = {"a": 1, "b": 1}, {"a": 0.5, "b": 0.5}
    both, none = Holdings(frozenset({"a", "b"})), Holdings()
    table = place({"a": ("w1",), "b": ("w1",)}, host_counts, {"w1": both, "w2": none}, demand, {})
    assert sorted(table.values()) == [("w1",), ("w1", "w2")]
    moved = next(model for model, hosts in table.items() if len(hosts) == 2)
    assert sum(demand.values()) > HOT
    loading = place(table, host_counts, {"w1": both, "w2": Holdings(loading=frozenset({moved}))}, demand, {})
    assert loading == table
    done = place(table, host_counts, {"w1": both, "w2": Holdings(frozenset({moved}))}, demand, {})
    assert done[moved] == ("w2",)


def test_a_model_that_did_not_fit_goes_to_a_worker_that_did_not_refuse_it() -> None:
    holdings = {"w1": Holdings(refused=frozenset({"a"})), "w2": Holdings()}
    assert place({"a": ("w1",)}, {"a": 1}, holdings, {}, {}) == {"a": ("w2",)}


# what a gateway makes of heartbeats


def beat(
    worker: str, *statuses: ModelStatus, rate: float = 1000.0, slots: int = 4, ready: bool = True, pool: str = LANE.pool
) -> Heartbeat:
    return Heartbeat(
        worker, pool, LANE.machine_profile, LANE.bundle, ready, "", models=statuses, rate=rate, slots=slots
    )


def test_work_that_waited_for_a_load_asks_for_no_further_host() -> None:
    planner = Planner(2.0)
    planner.note({"m": (1, 1, 100)})
    table = planner.step(None, [beat("w1"), beat("w2")], [], {"m": ModelBacklog(1, 0.0)}, 0.0)
    assert table is not None
    host = table.hosts["m"][0]
    beats = [beat(name, *([ModelStatus("m", "loaded", load_s=5.0)] if name == host else ())) for name in ("w1", "w2")]
    for second in (30.0, 31.0, 31.9):
        stepped = planner.step(table, beats, [], {"m": ModelBacklog(1, second)}, second)
        assert stepped is None or len(stepped.hosts["m"]) == 1
    raised = planner.step(table, beats, [], {"m": ModelBacklog(1, 32.5)}, 32.5)
    assert raised is not None
    assert len(raised.hosts["m"]) == 2


def test_planner_lets_models_keep_a_worker_each_that_has_room_for_one() -> None:
    planner = Planner(2.0)
    planner.note({"a": (1, 1, 100)})
    full = [beat("w1", ModelStatus("a", "loaded"), slots=1), beat("w2", slots=1)]
    first = planner.step(None, full, [], {"a": ModelBacklog(1, 0.0)}, 0.0)
    planner.step(first, full, [], {"a": ModelBacklog(1, 0.0)}, 1.0)
    spread = planner.step(first, full, [], {"a": ModelBacklog(9, 30.0)}, 30.0)
    assert spread is not None
    assert len(spread.hosts["a"]) == 2  # the other worker has room
    both = [beat(name, ModelStatus("a", "loaded"), slots=1) for name in ("w1", "w2")]
    table = spread
    for second in (60.0, 61.0, 90.0, 120.0):  # b gets a host, which a then gives up; the old work raises neither
        table = planner.step(table, both, [], dict.fromkeys("ab", ModelBacklog(9, second)), second) or table
    assert sorted(table.hosts["a"] + table.hosts["b"]) == ["w1", "w2"]


def test_a_model_that_is_wanted_without_work_gets_a_host_and_tells_nothing_of_its_cost() -> None:
    """50 messages in 5 s: with the usual 32 tokens each they are too many for one worker, without tokens they fit."""
    usual_planner, cheap_planner = Planner(2.0), Planner(2.0)
    usual_planner.note({"m": (1, 0, 0)})
    table = usual_planner.step(None, [beat("w1"), beat("w2")], [], {}, 0.0)
    assert table is not None
    assert len(table.hosts["m"]) == 1
    beats, waiting = [beat("w1", rate=100.0), beat("w2", rate=100.0)], {"m": ModelBacklog(50, 5.0)}
    cheap_planner.note({"m": (1, 1, 0)})
    cheap = cheap_planner.step(None, beats, [], waiting, 1.0)
    usual = usual_planner.step(table, beats, [], waiting, 1.0)
    assert cheap is not None
    assert usual is not None
    assert (len(cheap.hosts["m"]), len(usual.hosts["m"])) == (1, 2)


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_model_that_every_worker_has_unloaded_has_one_host_unless_work_of_it_waits(waiting: int) -> None:
    def beats(state: Literal["available", "loaded"], cost_rate: float = 0.0) -> list[Heartbeat]:
        return [beat(name, ModelStatus("m", state, cost_rate=cost_rate)) for name in ("w1", "w2")]

    planner, backlog = Planner(2.0), {"m": ModelBacklog(waiting, 0.0)}
    table = planner.step(None, beats("loaded", 900.0), [], {}, 0.0)
    assert table is not None
    assert len(table.hosts["m"]) == 2
    assert planner.step(table, beats("loaded"), [], {}, 0.1) is None
    table = planner.step(table, beats("available"), [], backlog, 0.2) or table
    assert len(table.hosts["m"]) == (2 if waiting else 1)


def test_a_full_worker_gives_a_model_to_an_idle_one_whatever_that_one_ran_before() -> None:
    busy = (ModelStatus("m", "loaded", cost_rate=500.0), ModelStatus("n", "loaded", cost_rate=500.0))
    idle = (ModelStatus("m", "loaded"), ModelStatus("n", "loaded"))
    before = Placement(0.0, {"m": ("w1",), "n": ("w1",)})
    beats = [beat("w1", *busy), beat("w2", *idle, rate=4000.0)]
    table = Planner(2.0).step(before, beats, [], {}, 1.0)
    assert table is not None
    assert sorted(table.hosts.values()) == [("w1",), ("w2",)]


def test_a_profile_with_other_weights_counts_for_its_model_and_other_failures_than_memory_move_nothing() -> None:
    planner = Planner(2.0)
    failed = ModelStatus("n", "failed", error=ErrorInfo("MODEL_LOAD_FAILED", "", extras={"error_class": "GATED"}))
    small = ModelStatus("o", "failed", error=ErrorInfo("MODEL_LOAD_FAILED", "", extras={"error_class": "OOM"}))
    before = Placement(0.0, {"n": ("w1",), "o": ("w1",)})
    table = planner.step(before, [beat("w1", ModelStatus("m:int8", "loaded"), failed, small), beat("w2")], [], {}, 1.0)
    assert table is not None
    assert table.hosts == {"m": ("w1",), "n": ("w1",), "o": ("w2",)}


@pytest.mark.parametrize("busy", ["m", "m:int8"])
def test_the_demand_for_a_model_is_that_of_all_its_profiles(busy: str) -> None:
    profiles = [ModelStatus(name, "loaded", cost_rate=900.0 if name == busy else 0.0) for name in ("m", "m:int8")]
    table = Planner(2.0).step(None, [beat("w1", *profiles), beat("w2", *profiles)], [], {}, 1.0)
    assert table is not None
    assert len(table.hosts["m"]) == 2


def test_a_silent_worker_stays_a_host_until_work_of_its_models_waits() -> None:
    planner = Planner(2.0)
    silent, live = beat("w1", ModelStatus("m", "loaded")), beat("w2")
    table = Placement(0.0, {"m": ("w1",)})
    assert planner.step(table, [live], [silent], {}, 20.0) is None
    moved = planner.step(table, [live], [silent], {"m": ModelBacklog(1, 2.5)}, 23.0)
    assert moved is not None
    assert moved.hosts == {"m": ("w2",)}


def test_a_model_that_nobody_wanted_for_an_hour_and_nobody_has_leaves_the_table() -> None:
    planner = Planner(2.0)
    live = [beat("w1", ModelStatus("kept", "loaded"))]
    table = Placement(0.0, {"kept": ("w1",), "gone": ("w1",)})
    assert planner.step(table, live, [], {}, 1.0) is None
    after = planner.step(table, live, [], {}, 2.0 + FORGET_S)
    assert after is not None
    assert after.hosts == {"kept": ("w1",)}


def test_an_idle_lane_is_written_once_and_a_busy_one_is_kept_fresh() -> None:
    planner = Planner(2.0)
    live = [beat("w1", ModelStatus("m", "loaded"))]
    table = planner.step(None, live, [], {}, 100.0)
    assert table is not None
    assert all(planner.step(table, live, [], {}, float(second)) is None for second in range(101, 700))
    busy = {"m": ModelBacklog(1, 0.0)}
    table = planner.step(table, live, [], busy, 700.0)
    assert table is not None
    assert planner.step(table, live, [], busy, 700.0 + REFRESH_S - 1.0) is None
    assert planner.step(table, live, [], busy, 700.0 + REFRESH_S) is not None


# the gateways that write the table


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def gateway(broker: MemoryBroker, waiting: dict[str, ModelBacklog], clock: Clock) -> tuple[Placer, Fleet]:
    fleet = Fleet(broker, load(environ={}).settings, clock)

    async def read(lane: Lane, models: object) -> dict[str, ModelBacklog]:
        return waiting

    placer = Placer(broker, 2.0, fleet, read, clock, storage="memory")
    await placer.start()
    return placer, fleet


def item(model: str) -> WorkItem:
    return WorkItem("r", 0, model, "", "encode", (Input("x"),), RunOptions(), "inbox", 1000, cost=10)


async def test_of_two_gateways_the_first_writes_and_the_other_goes_on_from_there() -> None:
    server, clock = MemoryServer(), Clock()
    placers = [await gateway(server.connect(f"g{number}"), {}, clock) for number in range(2)]
    bucket = await server.connect("reader").key_value(topology.PLACEMENT_BUCKET)
    for number, (placer, fleet) in enumerate(placers):
        for worker in ("w1", "w2"):
            fleet.note(beat(worker))
        placer.note(LANE, [item(f"m{number}")])
    stale = [placer.table(LANE) for placer, _ in placers]
    assert stale == [None, None]
    await placers[0][0].step()
    placers[1][0]._tables.clear()  # as if the table of the other gateway had not come yet
    await placers[1][0].step()
    await placers[1][0].step()
    entry = await bucket.get(topology.lane_key(LANE))
    assert entry is not None
    assert entry.value is not None
    assert decode_placement(entry.value).hosts.keys() == {"m0", "m1"}
    epoch = await bucket.epoch()
    for _ in range(5):
        clock.now_s += 0.5
        for placer, _ in placers:
            await placer.step()
    assert await bucket.epoch() == epoch, "an idle system writes nothing"


async def test_a_pool_whose_stream_is_lost_holds_up_no_other() -> None:
    server, clock = MemoryServer(), Clock()
    broker, lost = server.connect("g"), [replace(LANE, pool=f"lost{number}") for number in range(8)]
    fleet = Fleet(broker, load(environ={}).settings, clock)

    async def read(lane: Lane, models: object) -> dict[str, ModelBacklog]:
        if lane in lost:
            raise BrokerError(f"there is no stream WORK_{lane.pool}")
        return {}

    placer = Placer(broker, 2.0, fleet, read, clock, storage="memory")
    await placer.start()
    for lane in (*lost, LANE):
        fleet.note(beat(f"of-{lane.pool}", pool=lane.pool))
    placer.note(LANE, [item("m")])
    with pytest.raises(BrokerError, match="no stream WORK_lost"):
        await placer.step()
    table = placer.table(LANE)
    assert table is not None
    assert table.hosts == {"m": (f"of-{LANE.pool}",)}


@pytest.mark.parametrize("drops_first", [True, False])
async def test_a_placer_holds_nothing_of_a_pool_that_was_deleted(drops_first: bool) -> None:
    """The table of the pool is removed from the bucket before or after this gateway drops the pool."""
    server, clock = MemoryServer(), Clock()
    lane = replace(LANE, pool="reserved")
    broker = server.connect("g")
    placer, fleet = await gateway(broker, {}, clock)
    fleet.note(beat("w1", pool=lane.pool))
    placer.note(lane, [item("m")])
    await placer.step()
    assert placer.table(lane) is not None
    bucket = await server.connect("leader").key_value(topology.PLACEMENT_BUCKET)
    if drops_first:
        placer.drop_pool(lane.pool)
    await bucket.write([Write(topology.lane_key(lane), None)])
    await until(lambda: placer.table(lane) is None, "the removal of the table")
    if drops_first:
        placer._on_value(topology.lane_key(lane), None, (1 << 53))  # the removal again
    else:
        placer.drop_pool(lane.pool)
    assert not placer._tables
    assert not placer._planners


@pytest.mark.parametrize("reads", [True, False])
async def test_a_table_that_cannot_be_read_is_computed_and_written_anew(reads: bool) -> None:
    """The gateway reads the table at its start, or its own write is refused because of the table."""
    server, clock = MemoryServer(), Clock()
    bucket = await server.connect("other").key_value(topology.PLACEMENT_BUCKET)
    if reads:
        await bucket.write([Write(topology.lane_key(LANE), b"\xc1")])
    placer, fleet = await gateway(server.connect("g"), {}, clock)
    fleet.note(beat("w1"))
    placer.note(LANE, [item("m")])
    if not reads:
        await bucket.write([Write(topology.lane_key(LANE), b"\xc1")])
    for _ in range(2):
        await placer.step()
    entry = await bucket.get(topology.lane_key(LANE))
    assert entry is not None
    assert entry.value is not None
    assert decode_placement(entry.value).hosts == {"m": ("w1",)}


async def test_a_gateway_that_starts_waits_for_first_heartbeats_before_it_places_elsewhere() -> None:
    server, clock = MemoryServer(), Clock()
    first, fleet = await gateway(server.connect("g1"), {}, clock)
    for worker in ("w1", "w2"):
        fleet.note(beat(worker, ModelStatus(f"of-{worker}", "loaded")))
    await first.step()
    table = first.table(LANE)
    second, fleet = await gateway(server.connect("g2"), {}, clock)
    fleet.note(beat("w1", ModelStatus("of-w1", "loaded")))
    await second.step()
    assert second.table(LANE) == table
    clock.now_s += 16.0
    fleet.note(beat("w1", ModelStatus("of-w1", "loaded")))
    await second.step()
    now = second.table(LANE)
    assert now is not None
    assert now.hosts == {"of-w1": ("w1",), "of-w2": ("w1",)}


# the table in simulation


CASES = cases(measured_s=60.0)
USUAL = [case for case in CASES if case.name in ("56 % load", "56 %, three workers killed")]


@pytest.mark.parametrize("case", long_but(CASES, USUAL), ids=lambda case: case.name)
def test_the_table_beats_any_worker_takes_any_model(case: Case) -> None:
    ours, theirs = Simulation(case, table=True).run(), Simulation(case, table=False).run()
    assert ours.loads_per_min < theirs.loads_per_min
    assert ours.p99_s < theirs.p99_s
    if case.name in ("36 % load", "56 % load", "56 %, 40 % of heartbeats lost"):
        assert ours.loads_per_min <= 10
        assert ours.p99_s < 1.0


@in_virtual_time
async def test_an_idle_placer_asks_the_broker_less_often() -> None:
    """Without work it reads the backlog every IDLE_S seconds. Work, and a worker that comes or leaves, end the
    pause.
    """
    broker, backlog, reads = MemoryServer().connect("g"), dict[str, ModelBacklog](), 0
    fleet = Fleet(broker, load(environ={}).settings, time.monotonic)

    async def read(lane: Lane, models: object) -> dict[str, ModelBacklog]:
        nonlocal reads
        reads += 1
        return backlog

    async def reads_in(seconds: float) -> int:
        before = reads
        for _ in range(round(seconds / 0.25)):
            for worker in workers:
                fleet.note(worker)
            await asyncio.sleep(0.25)
        return reads - before

    placer, stop, workers = Placer(broker, 2.0, fleet, read, time.monotonic, storage="memory"), Stop(), [beat("w1")]
    running = asyncio.create_task(placer.run(stop))
    placer.note(LANE, [item("m")])
    await reads_in(UNHEARD_S)
    assert await reads_in(10 * IDLE_S) == 10
    placer.note(LANE, [item("m")])
    assert await reads_in(2 * EVERY_S) >= 1
    workers.append(beat("w2"))
    assert await reads_in(2 * EVERY_S) >= 1
    workers[1] = msgspec.structs.replace(workers[1], leaving=True)
    assert await reads_in(2 * EVERY_S) >= 1
    backlog["m"] = ModelBacklog(1)
    await reads_in(IDLE_S)
    assert await reads_in(10 * EVERY_S) >= 9
    stop.request()
    await running
