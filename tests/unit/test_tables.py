"""A placement table of any size fits the broker's messages, and its readers find their rows."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import until
from message_examples import EXAMPLES

from sie_broker import Broker, Entry, PayloadTooBig
from sie_broker.memory import MemoryServer
from sie_broker.tables import PART_BYTES, WHOLE_BYTES, StoredTable, decode
from sie_contracts.settings import load
from sie_contracts.wire import messages, topology
from sie_contracts.wire.heartbeats import Heartbeat
from sie_contracts.wire.records import Placement
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.fleet.placement import Placer
from sie_gateway.fleet.planner import ModelBacklog
from sie_sidecar.intake import HostAssignment

LANE = Lane("_default", "l4", "default")
KEY = topology.lane_key(LANE)
LIMIT = 1 << 20
MODELS = 9_999  # one less than a gateway remembers


def table_of(count: int, at_s: float = 1.0) -> Placement:
    hosts = {
        f"organisation/model-{number:05}": (f"sie-worker-default-l4-{number % 1000:04}",) for number in range(count)
    }
    return Placement(at_s, hosts, dict.fromkeys(list(hosts)[:5], at_s))


def apply(table: StoredTable, entry: Entry) -> bool:
    return table.put(entry.key, None if entry.value is None else decode(entry), entry.revision)


class Bucket:
    """Entries in the order in which they were written, and a reader that sees each."""

    def __init__(self) -> None:
        self.revision = 0
        self.entries: dict[str, Entry] = {}
        self.writer, self.reader = StoredTable(KEY), StoredTable(KEY)

    def write(self, table: Placement, limit: int = LIMIT) -> list[Entry]:
        change = self.writer.change(table, limit)
        assert all(len(write.value or b"") <= limit for write in change.writes)
        assert [write.expected for write in change.writes] == [None] * (len(change.writes) - 1) + [self.writer.revision]
        entries = []
        for write in change.writes:
            self.revision += 1
            entries.append(Entry(write.key, write.value, self.revision))
        self.entries |= {entry.key: entry for entry in entries}
        self.writer.written(change, self.revision)
        return entries

    def shown(self, entries: list[Entry]) -> Placement | None:
        for entry in entries:
            apply(self.reader, entry)
        return self.reader.table


def test_a_small_table_is_the_message_of_the_lane() -> None:
    bucket, table = Bucket(), table_of(500)
    (entry,) = bucket.write(table)
    assert entry.value == messages.encode(table)
    assert len(entry.value) <= WHOLE_BYTES
    assert bucket.shown([entry]) == table


def test_ten_thousand_models_are_parts_and_a_change_is_the_part_that_has_it() -> None:
    bucket, table = Bucket(), table_of(10_000)
    entries = bucket.write(table)
    assert max(len(entry.value or b"") for entry in entries) <= PART_BYTES
    assert bucket.shown(entries) == table
    model = "organisation/model-04711"
    moved = Placement(2.0, {**table.hosts, model: ("elsewhere",)}, table.raised_s)
    entries = bucket.write(moved)
    assert len(entries) == 2
    assert bucket.shown(entries) == moved
    entries = bucket.write(Placement(3.0, moved.hosts, moved.raised_s))  # the same, but for its time
    assert [(entry.key, len(entry.value or b"") < 1024) for entry in entries] == [(KEY, True)]
    assert bucket.shown(entries) == Placement(3.0, moved.hosts, moved.raised_s)
    small = table_of(100, 4.0)
    assert bucket.shown(bucket.write(small)) == small
    assert bucket.shown(bucket.write(small)) == small
    live = {key for key, entry in bucket.entries.items() if entry.value is not None}
    assert live == {KEY}, "parts that nobody needs are removed"


@pytest.mark.parametrize("count", [10, 10_000])
def test_an_older_entry_does_not_replace_a_newer_one(count: int) -> None:
    """A watch that is behind delivers the entries of earlier writes after the write of this process."""
    bucket, table = Bucket(), table_of(count)
    older = bucket.write(table)
    moved = Placement(2.0, {**table.hosts, "organisation/model-00000": ("elsewhere",)}, table.raised_s)
    newer = bucket.write(moved)
    assert bucket.shown(newer if count == 10 else [*older, *newer]) == moved
    for replica in (bucket.writer, bucket.reader):
        assert [apply(replica, entry) for entry in older] == [False] * len(older)
        assert replica.table == moved
    last = Placement(3.0, {**moved.hosts, "organisation/model-00000": ("third",)}, table.raised_s)
    assert bucket.shown(bucket.write(last)) == last


@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 3)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=25, deadline=None)
def test_a_reader_shows_a_table_that_was_written_or_the_one_before(sizes: list[tuple[int, int]], random) -> None:  # type: ignore[no-untyped-def]
    """This holds for a late reader, too, which gets only the last write of each key."""
    bucket, written = Bucket(), []
    for number, (count, more) in enumerate(sizes):
        table = table_of(count, float(number))
        hosts = dict(table.hosts)
        for model in random.sample(sorted(hosts), min(more, len(hosts))):
            hosts[model] = ("elsewhere",)
        table = Placement(table.at_s, hosts, {model: at_s for model, at_s in table.raised_s.items() if model in hosts})
        written.append(table)
        for entry in bucket.write(table, limit=1 << 16):
            apply(bucket.reader, entry)
            assert bucket.reader.table is None or bucket.reader.table in written
        assert bucket.reader.table == table
        late = StoredTable(KEY)
        for entry in sorted(bucket.entries.values(), key=lambda entry: entry.revision):
            apply(late, entry)
        assert late.table == table


def test_a_row_that_no_message_holds_is_refused_with_the_limit() -> None:
    table = Placement(1.0, {"m": tuple(f"worker-{number:06}" for number in range(10_000))})
    assert StoredTable(KEY).change(table, LIMIT).writes
    with pytest.raises(PayloadTooBig, match=rf"{KEY}.*max_payload is 65536"):
        StoredTable(KEY).change(table, 1 << 16)


# two gateways and two workers of a lane with 10,000 models, over the smallest messages that are allowed


async def _exercise(brokers: list[Broker]) -> None:
    now_s = 100.0

    def clock() -> float:
        return now_s

    async def waiting(lane: Lane, models: object) -> dict[str, ModelBacklog]:
        return {}

    placers = []
    for broker in brokers[:2]:
        fleet = Fleet(broker, load(environ={}).settings, clock)
        for number in range(200):
            fleet.note(Heartbeat(f"w{number:03}", LANE.pool, LANE.machine_profile, LANE.bundle, True, ""))
        placer = Placer(broker, 2.0, fleet, waiting, clock, storage="memory")
        await placer.start()
        placers.append(placer)
    item = EXAMPLES["work-1"]
    for number in range(MODELS):
        placers[0].note(LANE, [msgspec.structs.replace(item, model=f"organisation/model-{number:05}")])
    early = HostAssignment(
        brokers[2], LANE, "w001", clock, lambda model: False, lambda model: False, lambda: None, lambda: True
    )
    await early.start()
    await placers[0].step()
    late = HostAssignment(
        brokers[2], LANE, "w002", clock, lambda model: False, lambda model: False, lambda: None, lambda: True
    )
    await late.start()
    table = placers[0].table(LANE)
    assert table is not None
    assert len(table.hosts) == MODELS
    await until(lambda: None not in (early.models(), late.models(), placers[1].table(LANE)), "the table everywhere")
    assert placers[1].table(LANE) == table
    for assignment, name in ((early, "w001"), (late, "w002")):
        assert assignment.models() == {model for model, hosts in table.hosts.items() if name in hosts}
    # the second gateway continues from there, and the first sees the change
    placers[1].note(LANE, [msgspec.structs.replace(item, model="new")])
    await placers[1].step()
    second = placers[1].table(LANE)
    assert second is not None
    assert second.hosts == {**table.hosts, "new": second.hosts["new"]}
    await until(lambda: placers[0].table(LANE) == second, "the second's table at the first")
    await asyncio.gather(early.stop(), late.stop())


async def test_gateways_and_workers_share_a_table_of_ten_thousand_models() -> None:
    server = MemoryServer(max_payload=1 << 16)
    await _exercise([server.connect(f"b{number}") for number in range(3)])
