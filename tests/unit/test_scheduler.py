"""The batch former: its invariants under random work, checked by a state machine, its order in hand-written cases, its
rate, and what a running sidecar tells of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from batch_entries import BatchEntry
from fake_adapter import SPECIAL, toy_entry
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from inprocess import InProcess, until

from sie_contracts.wire.heartbeats import Heartbeat
from sie_sidecar.batch import (
    MEMORY_S,
    Batch,
    BatchKey,
    BatchLimits,
    DeviceLoad,
    Load,
    Quantum,
    Rate,
    Waiting,
    WaitUntil,
    credit,
    next_batch,
)
from sie_sidecar.intake import WorkIntake
from sie_sidecar.prepare.rows import TokenRow

MODELS = ("m0", "m1", "m2")
LORAS = ("", "l1", "l2", "l3")
TICK_S = 0.001


class Scheduling(RuleBasedStateMachine):
    """A device whose work arrives, runs, ends, and sometimes has to run again. The list `here` has the jobs that the
    queue should hold.
    """

    @initialize(
        cost=st.integers(1, 40),
        requests=st.integers(1, 5),
        wait=st.integers(0, 12),
        overtakes=st.integers(0, 3),
        depth=st.integers(1, 3),
    )
    def begin(self, cost: int, requests: int, wait: int, overtakes: int, depth: int) -> None:
        self.limits = BatchLimits(cost, requests, wait * TICK_S, overtakes, reorder_s=20 * TICK_S)
        self.depth = depth
        self.waiting: Waiting[BatchEntry[int]] = Waiting()
        self.here: list[BatchEntry[int]] = []
        self.at_device: list[Batch[BatchEntry[int]]] = []
        self.now_s = 0.0
        self.more_expected = False
        self.number = 0
        self.overtaken = 0  # interactive batches since the last bulk one, while bulk work waited
        # by priority: the oldest due job, and within how many batches of its priority it must run
        self.due: dict[bool, tuple[BatchEntry[int], int] | None] = {False: None, True: None}

    @rule(
        model=st.sampled_from(MODELS),
        lora=st.sampled_from(LORAS),
        operation=st.sampled_from(("encode", "score")),
        cost=st.integers(1, 50),
        bulk=st.booleans(),
        alone=st.sampled_from((False, False, False, True)),
        count=st.integers(1, 6),
    )
    def arrive(self, model: str, lora: str, operation: str, cost: int, bulk: bool, alone: bool, count: int) -> None:
        for _ in range(count):
            self.number += 1
            self.now_s += 1e-6  # no two jobs arrive at once, so one is the oldest
            key = BatchKey(model, "1", operation, "", lora, padded=model == "m2")
            entry = BatchEntry(key, 1 + (cost * self.number) % 50, self.now_s, self.number, bulk, alone)
            self.waiting.add(entry)
            self.here.append(entry)

    @rule(ticks=st.integers(1, 15))
    def time_passes(self, ticks: int) -> None:
        self.now_s += ticks * TICK_S

    @rule()
    def the_device_keeps_up(self) -> None:
        """Send batches in a row, each to a device with room for it."""
        for _ in range(8):
            self.at_device = self.at_device[: self.depth - 1]
            self.send()

    @rule(expected=st.booleans())
    def more_is_expected(self, expected: bool) -> None:
        self.more_expected = expected

    @precondition(lambda self: self.at_device)
    @rule(again=st.booleans())
    def a_batch_ends(self, again: bool) -> None:
        """End a batch. If `again`, its adapter died: its jobs come back, older than those that arrived meanwhile."""
        batch = self.at_device.pop(0)
        for entry in batch.entries if again else ():
            self.waiting.add(entry, back=True)
            self.here.append(entry)
            self.due[entry.bulk] = None  # another job is the oldest now
        self.here.sort(key=lambda entry: entry.arrived_s)

    @precondition(lambda self: self.here)
    @rule(place=st.integers(0, 100))
    def one_is_cancelled(self, place: int) -> None:
        entry = self.here.pop(place % len(self.here))
        self.waiting.remove(entry)
        if (due_entry := self.due[entry.bulk]) is not None and due_entry[0] is entry:
            self.due[entry.bulk] = None

    def oldest(self, bulk: bool) -> BatchEntry[int] | None:
        return next((entry for entry in self.here if entry.bulk == bulk), None)

    def of_key(self, key: BatchKey, bulk: bool) -> list[BatchEntry[int]]:
        return [entry for entry in self.here if entry.key == key and entry.bulk == bulk]

    def is_due(self, entry: BatchEntry[int]) -> bool:
        return self.now_s >= entry.arrived_s + self.limits.wait_s

    def is_full(self, entries: Sequence[BatchEntry[int]]) -> bool:
        total = sum(entry.cost for entry in entries)
        return (
            total >= self.limits.cost or len(entries) >= self.limits.requests or any(entry.alone for entry in entries)
        )

    @rule()
    def send(self) -> None:
        for bulk in (False, True):
            entry, due_entry = self.oldest(bulk), self.due[bulk]
            if entry is not None and self.is_due(entry) and (due_entry is None or due_entry[0] is not entry):
                keys = {
                    candidate.key
                    for candidate in self.here
                    if candidate.bulk == bulk and candidate.key.residency == entry.key.residency
                }
                self.due[bulk] = (entry, len(keys))
        action = next_batch(
            self.waiting, self.now_s, self.limits, DeviceLoad(len(self.at_device), 1, self.depth, self.more_expected)
        )
        if isinstance(action, Batch):
            self.check(action)
        elif isinstance(action, WaitUntil):
            heads = [entry for bulk in (False, True) if (entry := self.oldest(bulk)) is not None]
            assert action.until_s == min(entry.arrived_s for entry in heads) + self.limits.wait_s > self.now_s
            assert self.at_device or self.more_expected
            assert not any(self.is_full(self.of_key(entry.key, entry.bulk)) for entry in self.here)
        else:
            assert not self.here or len(self.at_device) == self.depth

    def check(self, batch: Batch[BatchEntry[int]]) -> None:
        bulk = batch.entries[0].bulk
        queue = self.of_key(batch.key, bulk)
        head = queue[0]
        # contents
        assert len({entry.work for entry in batch.entries}) == len(batch.entries)
        assert all(any(entry is candidate for candidate in queue) for entry in batch.entries), (
            "each waits, and has this key and this priority"
        )
        assert batch.cost == sum(entry.cost for entry in batch.entries)
        assert len(batch.entries) == 1 or (
            batch.cost <= self.limits.cost and not any(entry.alone for entry in batch.entries)
        )
        assert len(batch.entries) <= self.limits.requests
        assert [entry.cost for entry in batch.entries] == sorted(entry.cost for entry in batch.entries)
        # order
        assert any(entry is head for entry in batch.entries), "the oldest of its key"
        works = {entry.work for entry in batch.entries}
        left = [entry for entry in queue if entry.work not in works]
        latest_s = max(entry.arrived_s for entry in batch.entries)
        if batch.key.padded:
            assert all(latest_s - entry.arrived_s <= self.limits.reorder_s for entry in left)
        else:
            assert all(latest_s < entry.arrived_s for entry in left)
        # reason to run now
        idle = not self.at_device and not self.more_expected
        spent = bulk and self.overtaken >= self.limits.bulk_max_overtakes > 0
        assert idle or self.is_full(queue) or self.is_due(head) or spent
        heads = [entry for priority in (False, True) if (entry := self.oldest(priority)) is not None]
        if self.limits.bulk_max_overtakes == 0 and all(map(self.is_due, heads)):
            assert min(heads, key=lambda entry: entry.arrived_s).bulk == bulk
        # no job starves
        for entry in batch.entries:
            self.here.remove(entry)
        if bulk:
            self.overtaken = 0
        elif self.oldest(True) is not None:
            self.overtaken += 1
            assert self.overtaken <= self.limits.bulk_max_overtakes or self.limits.bulk_max_overtakes == 0
        if (due_entry := self.due[bulk]) is not None:
            entry, may_see = due_entry
            if entry.work in works:
                self.due[bulk] = None
            else:
                assert may_see > 1, (
                    "the oldest job is in one of the next batches, at most as many as its model has keys"
                )
                self.due[bulk] = (entry, may_see - 1)
        self.at_device.append(batch)

    @invariant()
    def everything_is_where_it_belongs(self) -> None:
        if hasattr(self, "here"):
            assert sorted(entry.work for entry in self.waiting) == sorted(entry.work for entry in self.here)
            assert len(self.waiting) == len(self.here)

    def teardown(self) -> None:
        """Check that an idle device takes all jobs that are left, without a wait."""
        if hasattr(self, "here"):
            self.at_device.clear()
            self.more_expected = False
            while self.here:
                before = len(self.here)
                self.send()
                self.at_device.clear()
                assert len(self.here) < before


Scheduling.TestCase.settings = settings(
    max_examples=80, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow]
)
TestScheduling = Scheduling.TestCase


# hand-written cases

BOUNDS = BatchLimits(cost=1000, requests=2, wait_s=0.01)
BUSY = DeviceLoad(sent=1, lanes=1, depth=2, more_expected=False)


def key(model: str = "m", lora: str = "", *, padded: bool = False) -> BatchKey:
    return BatchKey(model, "1", "encode", "", lora, padded)


def formed(entries: Sequence[BatchEntry[str]], limits: BatchLimits, now_s: float = 1.0) -> list[str]:
    """Return the batches of a busy device in order, each as the joined names of its jobs."""
    waiting: Waiting[BatchEntry[str]] = Waiting()
    for entry in entries:
        waiting.add(entry)
    batches = []
    while isinstance(batch := next_batch(waiting, now_s, limits, BUSY), Batch):
        batches.append("".join(entry.work for entry in batch.entries))
    return batches


@pytest.mark.parametrize("padded", [False, True])
def test_the_bytes_of_pixels_bound_a_batch_too(padded: bool) -> None:
    """A batch goes to the adapter in one frame. An image over the bound runs alone."""
    bounds = BatchLimits(cost=1000, requests=10, wait_s=0.01, media_bytes=100)
    sizes = [60, 40, 60, 30, 20, 500, 10]
    entries = [
        BatchEntry(key(padded=padded), 1, number / 1000, str(number), media_bytes=size)
        for number, size in enumerate(sizes)
    ]
    batches = formed(entries, bounds)
    assert sorted("".join(batches)) == list("0123456")
    assert all(sum(sizes[int(number)] for number in batch) <= 100 or len(batch) == 1 for batch in batches)
    assert len(batches) <= 5


def test_the_loras_of_a_model_take_turns() -> None:
    """A backlog of one LoRA does not hold up the others. No batch mixes two LoRAs."""
    backlog = [BatchEntry(key(lora="a"), 1, number / 1000, "a") for number in range(8)]
    later_entries = [BatchEntry(key(lora=lora), 1, 0.1 + number / 1000, lora) for number, lora in enumerate("bbbc")]
    assert formed([*backlog, *later_entries], BOUNDS) == ["aa", "bb", "c", "aa", "b", "aa", "aa"]


def test_the_model_whose_oldest_job_waited_longest_goes_first() -> None:
    entries = [BatchEntry(key(model), 1, number / 1000, model) for number, model in enumerate("xxxyyzx")]
    assert formed(entries, BOUNDS) == ["xx", "xx", "yy", "z"]


def test_a_lora_that_is_not_due_does_not_spend_its_turn() -> None:
    """While the device is busy with the backlog, the batch of the other LoRA grows."""
    entries = [
        *(BatchEntry(key(lora="a"), 1, number / 1000, "a") for number in range(4)),
        BatchEntry(key(lora="b"), 1, 0.995, "b"),
    ]
    assert formed(entries, BOUNDS, now_s=1.0) == ["aa", "aa"]
    assert formed(entries, BOUNDS, now_s=1.005) == ["aa", "b", "aa"]


def test_a_full_batch_goes_though_another_model_waits_for_its_own_to_fill() -> None:
    waiting: Waiting[BatchEntry[str]] = Waiting()
    for entry in (
        BatchEntry(key("x"), 1, 0.0, "x"),
        BatchEntry(key("y"), 1, 0.001, "y"),
        BatchEntry(key("y"), 1, 0.001, "y"),
    ):
        waiting.add(entry)
    batch = next_batch(waiting, 0.002, BOUNDS, BUSY)
    assert isinstance(batch, Batch)
    assert batch.key == key("y")
    assert next_batch(waiting, 0.002, BOUNDS, BUSY) == WaitUntil(0.01)


@pytest.mark.parametrize(
    ("token_s", "sent", "batches"),
    [
        (0.001, 0, ["abc", "def"]),
        (0.0, 0, ["abcdef"]),  # the time of a batch is unknown
        (0.00001, 0, ["abcdef"]),  # a batch of half the work ends 3 ms sooner
        (0.001, 1, []),
    ],
)
def test_work_that_finds_all_lanes_idle_is_shared_by_them(token_s: float, sent: int, batches: list[str]) -> None:
    """Only a batch that finds the whole device idle is divided. The other lanes get their shares without a wait."""
    waiting: Waiting[BatchEntry[str]] = Waiting()
    for tokens in (100, 200, 400, 800):
        waiting.times_of("m").note(tokens, tokens * token_s)
    for number, name in enumerate("abcdef"):
        waiting.add(BatchEntry(key(), 100, number / 1000, name))
    limits, formed_batches = BatchLimits(cost=1000, requests=10, wait_s=60.0), []
    while isinstance(batch := next_batch(waiting, 0.01, limits, DeviceLoad(sent, 2, 3, False)), Batch):
        formed_batches.append("".join(entry.work for entry in batch.entries))
        sent += 1
    assert formed_batches == batches


def test_where_rows_are_padded_jobs_of_like_cost_run_together() -> None:
    """Long and short jobs alternate. In order of arrival each batch would be padded to a long row. Packed rows have no
    padding and go in order of arrival.
    """
    arrivals = [
        BatchEntry(key(padded=True), 100 if number % 2 else 10, number / 1000, "Ls"[number % 2 == 0])
        for number in range(8)
    ]
    assert formed(arrivals, BOUNDS) == ["ss", "LL", "ss", "LL"]
    packed = [BatchEntry(key(), entry.cost, entry.arrived_s, entry.work) for entry in arrivals]
    assert formed(packed, BOUNDS) == ["sL"] * 4


def test_like_cost_overtakes_within_the_age_bound_only() -> None:
    """The long job runs when it is the oldest. A job that arrived later by more than the bound does not overtake it."""
    spaced = [
        BatchEntry(key(padded=True), 100 if number == 1 else 10, number / 10, "L" if number == 1 else "s")
        for number in range(6)
    ]
    assert formed(spaced, BatchLimits(1000, 2, 0.01, reorder_s=0.25)) == ["ss", "sL", "ss"]
    assert formed(spaced, BatchLimits(1000, 2, 0.01, reorder_s=0.05)) == ["s", "L", "s", "s", "s", "s"]


def test_a_batch_that_may_be_overtaken_no_more_goes_as_it_is() -> None:
    """A bulk batch that is neither full nor due runs after `bulk_max_overtakes` full interactive batches."""
    waiting: Waiting[BatchEntry[str]] = Waiting()
    waiting.add(BatchEntry(key(), 1, 0.0, "b", bulk=True))
    for number in range(20):
        waiting.add(BatchEntry(key(), 1, 0.0, str(number)))
    bounds = BatchLimits(cost=1000, requests=2, wait_s=60.0, bulk_max_overtakes=3)
    order = []
    while isinstance(batch := next_batch(waiting, 0.001, bounds, BUSY), Batch):
        order.append("b" if batch.entries[0].bulk else "i")
    assert "".join(order) == "iiibiiiiiii"


def test_credit_is_what_two_batches_for_each_lane_can_take_beyond_what_is_held() -> None:
    limits = BatchLimits(cost=1000, requests=10, wait_s=0.01)
    assert credit(Load(0, 0, 1), 500.0, limits) == 4
    assert credit(Load(0, 0, 2), 500.0, limits) == 8
    assert credit(Load(1400, 3, 1), 500.0, limits) == 1, "room for less than one of them"
    assert credit(Load(2000, 3, 1), 500.0, limits) == 0, "no room"
    assert credit(Load(80, 8, 1), 10.0, limits) == 12, "small ones are bounded by number"
    assert credit(Load(200, 20, 1), 10.0, limits) == 0


ROWS = ((12, 0), (12, 32), (40, 32))  # tokens of a row, and its length on the device


def test_time_without_a_batch_does_not_count() -> None:
    rate = Rate()
    assert rate.tokens_per_s == 0
    for began_s in (0.0, 100.0, 200.0):
        rate.sent(began_s)
        rate.ended(500, began_s + 0.5)
    assert rate.tokens_per_s == pytest.approx(1000)


def test_batches_sent_ahead_count_the_time_once() -> None:
    """One lane has two batches at the adapter at any time: one runs for 1 s, the other waits."""
    rate = Rate()
    rate.sent(0.0)
    rate.sent(0.0)
    for second in range(1, 20):
        rate.ended(1000, float(second))
        rate.sent(float(second))
    assert rate.tokens_per_s == pytest.approx(1000)


def test_lanes_that_run_side_by_side_add_up() -> None:
    rate = Rate()
    for _ in range(4):
        rate.sent(0.0)
    for _ in range(4):
        rate.ended(250, 1.0)
    assert rate.tokens_per_s == pytest.approx(1000)


def test_the_rate_follows_the_device_and_a_failed_batch_costs_time() -> None:
    rate = Rate()
    for second in range(20):
        rate.sent(float(second))
        rate.ended(1000, second + 1.0)
    before = rate.tokens_per_s
    rate.sent(20.0)
    rate.ended(0, 21.0)
    assert rate.tokens_per_s < before
    for second in range(int(5 * MEMORY_S)):
        rate.sent(30.0 + second)
        rate.ended(100, 31.0 + second)
    assert rate.tokens_per_s == pytest.approx(100, rel=0.1)


def test_what_inputs_cost() -> None:
    """The cost of a text is its number of tokens, or its length on the device if that is more."""
    costs = [TokenRow(np.zeros(tokens, np.int32), tokens, expanded=expanded).cost for tokens, expanded in ROWS]
    assert costs == [12, 32, 40]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry("toy/one"), toy_entry("toy/two")) as cluster:
        yield cluster


async def test_a_gathering_whose_deliveries_were_all_cancelled_is_not_counted() -> None:
    metrics, queues = Mock(), Mock(all=[Mock()])
    intake = WorkIntake(Mock(), Mock(), queues, Mock(), Mock(), Quantum(0.0, 0.0, 1.0), metrics, None)
    intake.arrived = [Mock(settled=True)]
    intake._arrival.set()
    assert await intake.next(Mock(tokenising=0), Mock(more_expected=Mock(return_value=False))) == []
    metrics.gathered.observe.assert_not_called()


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
