"""The fairness between keys: properties of the pure core, and a simulated lane that is first in, first out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from sie_contracts.models.costs import BatchTimes
from sie_contracts.wire.heartbeats import Heartbeat
from sie_gateway.admission.model_queue import (
    REFUSED_S,
    REMEMBERED_S,
    KeyWindow,
    QueueBound,
    SharedLimit,
    Shares,
    Ticket,
    bound,
)

QUANTUM = 4096
BATCH = 16_384  # tokens of a batch
UNKNOWN = Heartbeat("w0", "_default", "cpu", "default", ready=True, version="")
FULL = structs.replace(UNKNOWN, credit_cost=4 * BATCH, credit_items=48, batch_cost=BATCH, pipeline=2)


def window() -> KeyWindow:
    return KeyWindow(Shares(), QUANTUM)


def order(grants: list[tuple[Ticket, int]]) -> str:
    return "".join(ticket.key for ticket, _ in grants)


# the bound


def test_one_key_may_fill_what_its_hosts_take_in_and_several_share_less() -> None:
    """One key may fill the pipelines of all hosts. If keys share, 1.5 times the bound fits two full batches."""
    alone = bound([FULL, FULL], cold_tokens=8192, contested=False, mean_cost=100)
    assert alone == QueueBound(8 * BATCH, 96)
    contested = bound([FULL], cold_tokens=8192, contested=True, mean_cost=100)
    assert contested.tokens * 1.5 <= 2 * BATCH
    assert contested.items == 48
    assert bound([FULL], cold_tokens=8192, contested=False, mean_cost=100, replicas=2) == QueueBound(2 * BATCH, 24)


def test_what_a_batch_costs_by_itself_keeps_batches_large_where_keys_share() -> None:
    """If the fixed part is half of the time of a full batch, the bound is two full batches. Without one it is two
    thirds of that.
    """
    times = BatchTimes()
    for tokens in (1000, 2000, 16_000) * 5:
        times.note(tokens, 0.016 + 1e-6 * tokens)
    assert times.fixed_tokens() == pytest.approx(16_000)
    for fixed, tokens in ((0.0, 4 / 3 * BATCH), (BATCH / 4, 1.5 * BATCH), (BATCH, 2 * BATCH), (math.inf, 2 * BATCH)):
        queue_bound = bound([FULL], cold_tokens=1, contested=True, mean_cost=0.0, fixed_tokens=fixed)
        assert queue_bound.tokens == pytest.approx(tokens)


def test_batches_that_take_the_same_whatever_they_hold_cost_by_number() -> None:
    times = BatchTimes()
    for tokens in (10, 5000, 10_000):
        times.note(tokens, 0.02)
    assert times.fixed_tokens() > 1e6


def test_a_fast_device_gets_work_for_the_way_of_a_message() -> None:
    """Otherwise a device that runs two batches in less than the round trip of a message would stand still."""
    fast = structs.replace(UNKNOWN, credit_cost=1000, credit_items=4, rate=1_000_000.0)
    assert bound([fast], cold_tokens=1, contested=False, mean_cost=10) == QueueBound(30_000, 3000)


def test_what_is_not_known_does_not_bound_and_a_model_without_a_host_is_held_back() -> None:
    assert bound([UNKNOWN], cold_tokens=8192, contested=False, mean_cost=0.0) == QueueBound(math.inf, math.inf)
    assert bound([], cold_tokens=8192, contested=True, mean_cost=0.0) == QueueBound(8192)


def test_a_lane_is_contested_while_two_keys_were_seen_lately() -> None:
    shares = Shares()
    shares.seen_s["a"] = 0.0
    assert not shares.contested(0.0)
    shares.seen_s["b"] = 1.0
    assert shares.contested(1.0)
    shares.seen_s["a"] = REMEMBERED_S
    assert shares.contested(REMEMBERED_S)
    assert not shares.contested(REMEMBERED_S + 2)


# turns


def test_keys_take_turns_by_tokens_however_many_requests_each_has() -> None:
    key_window = window()
    for _ in range(40):
        key_window.join(Ticket("a", [QUANTUM]))
    key_window.join(Ticket("b", [QUANTUM] * 3))
    key_window.join(Ticket("c", [QUANTUM // 4] * 12))
    granted = order(key_window.grant(QueueBound(12 * QUANTUM), math.inf))
    assert granted == "abccccabccccabccccaaa"[: len(granted)]
    assert len(granted) == 3 * 6 + 3


def test_a_key_has_at_most_its_window_and_others_pass_it() -> None:
    key_window = window()
    key_window.join(Ticket("a", [QUANTUM] * 10))
    assert order(key_window.grant(QueueBound(), 4 * QUANTUM)) == "aaaa"
    key_window.join(Ticket("b", [10]))
    assert order(key_window.grant(QueueBound(), 4 * QUANTUM)) == "b"
    assert key_window.grant(QueueBound(), 4 * QUANTUM) == []


def test_a_key_has_one_window_over_all_models_of_a_lane_and_priority() -> None:
    shares = Shares()
    first, second = KeyWindow(shares, QUANTUM), KeyWindow(shares, QUANTUM)
    ticket = Ticket("a", [QUANTUM] * 2)
    first.join(ticket)
    second.join(Ticket("a", [QUANTUM]))
    assert len(first.grant(QueueBound(), 2 * QUANTUM)) == 2
    assert second.grant(QueueBound(), 2 * QUANTUM) == []
    first.give_back(ticket, 1)
    assert len(second.grant(QueueBound(), 2 * QUANTUM)) == 1


@pytest.mark.parametrize("cost", [QUANTUM, 1000, 100])
def test_work_of_a_key_for_one_model_lets_its_work_for_another_into_a_full_window(cost: int) -> None:
    """Each chunk that leaves the queue is followed by one of the first model, which has endless work. The other model
    gets its turn when the key has space for its chunk, also if that needs several chunks of the first one to leave. No
    small request for a third model takes the space before.
    """
    shares, most, limit = Shares(), QueueBound(), 4 * QUANTUM
    first, second = KeyWindow(shares, QUANTUM), KeyWindow(shares, QUANTUM)
    bulk_ticket, ticket = Ticket("a", [cost] * 10_000), Ticket("a", [QUANTUM] * 3)
    first.join(bulk_ticket)
    held = first.grant(most, limit)
    second.join(ticket)
    assert second.grant(most, limit) == []
    assert not KeyWindow(shares, QUANTUM).fits_now(Ticket("a", [1]), most, limit)
    turns = []
    for _ in range(4 * limit // cost):
        first.give_back(*held.pop(0))
        held += first.grant(most, limit)
        turns += second.grant(most, limit)
        held += first.grant(most, limit)
    assert turns == [(ticket, 0), (ticket, 1), (ticket, 2)]
    assert shares.tokens["a"] > limit - cost


def test_a_model_whose_queue_is_full_keeps_no_other_model_of_its_key_waiting() -> None:
    shares, limit = Shares(), 2 * QUANTUM
    first, second = KeyWindow(shares, QUANTUM), KeyWindow(shares, QUANTUM)
    ticket = Ticket("a", [QUANTUM] * 9)
    first.join(ticket)
    assert len(first.grant(QueueBound(), limit)) == 2
    second.join(Ticket("a", [QUANTUM]))
    second.join(Ticket("b", [QUANTUM]))
    assert order(second.grant(QueueBound(), limit)) == "b"
    first.give_back(ticket, 0)
    assert first.grant(QueueBound(), limit) == [(ticket, 2)]
    first.give_back(ticket, 1)
    assert first.grant(QueueBound(), limit) == []  # it is the turn of the second model
    assert second.grant(QueueBound(QUANTUM), limit) == []
    assert first.grant(QueueBound(), limit) == [(ticket, 3)]


def test_the_turn_is_kept_while_there_is_no_room_and_a_turns_tokens_may_pass() -> None:
    """Small chunks of many keys, which fit where a large one does not, do not pass the large one for ever."""
    key_window = window()
    holder = Ticket("h", [100])
    key_window.join(holder)
    key_window.grant(QueueBound(), math.inf)
    large = Ticket("a", [QUANTUM])
    key_window.join(large)
    most = QueueBound(QUANTUM + 50)
    passed = []
    for number in range(20):
        small = Ticket(f"b{number}", [QUANTUM // 10])
        key_window.join(small)
        passed += key_window.grant(most, math.inf)
        key_window.give_back(small, 0)
    assert len(passed) == 10
    key_window.give_back(holder, 0)
    assert order(key_window.grant(most, math.inf)) == "a"


def test_a_chunk_above_every_bound_goes_alone() -> None:
    key_window = window()
    large = Ticket("a", [10 * QUANTUM])
    key_window.join(large)
    key_window.join(Ticket("a", [1]))
    assert order(key_window.grant(QueueBound(100, 1), 100)) == "a"
    key_window.give_back(large, 0)
    assert order(key_window.grant(QueueBound(100, 1), 100)) == "a"


def test_a_small_request_of_a_key_does_not_wait_for_its_large_ones_and_these_end_one_by_one() -> None:
    key_window = window()
    large, next_one, small = (Ticket("a", [QUANTUM] * count) for count in (9, 9, 1))
    key_window.join(large)
    assert key_window.grant(QueueBound(2 * QUANTUM), math.inf) == [(large, 0), (large, 1)]
    key_window.join(next_one)
    key_window.join(small)
    tickets = [ticket for ticket, _ in key_window.grant(QueueBound(9 * QUANTUM), math.inf)]
    assert tickets.index(small) <= 3
    assert tickets.count(large) >= 4
    assert tickets.count(next_one) == 1


class Turns(RuleBasedStateMachine):
    """State machine: in any order of events the counts are those of the held chunks, and the bounds hold. At the end
    everything is free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shares = Shares()
        self.windows = [KeyWindow(self.shares, 100) for _ in range(2)]
        self.open: list[tuple[KeyWindow, Ticket]] = []

    @rule(
        key=st.sampled_from("abc"), costs=st.lists(st.integers(1, 250), min_size=1, max_size=6), model=st.integers(0, 1)
    )
    def join(self, key: str, costs: list[int], model: int) -> None:
        ticket = Ticket(key, costs)
        self.open.append((self.windows[model], ticket))
        self.windows[model].join(ticket)

    @rule(model=st.integers(0, 1), tokens=st.integers(1, 600), items=st.integers(1, 8), limit=st.integers(1, 400))
    def grant(self, model: int, tokens: int, items: int, limit: int) -> None:
        key_window = self.windows[model]
        before = dict(self.shares.tokens)
        had = key_window.items
        grants = key_window.grant(QueueBound(tokens, items), limit)
        if grants:
            assert key_window.items <= max(items, had, 1)
            assert key_window.tokens <= tokens or key_window.items == 1 or key_window.items == had
            for key in {ticket.key for ticket, _ in grants}:
                mine = [ticket.costs[chunk] for ticket, chunk in grants if ticket.key == key]
                assert self.shares.tokens[key] <= limit or (len(mine) == 1 and not before.get(key))
        elif (
            key_window.flows and not key_window.items
        ):  # the queue is empty: only a key's own window may hold work back
            assert all(self.shares.tokens.get(key) for key in key_window.waiting_tokens())

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100), chunk=st.integers(0, 6))
    def give_back(self, which: int, chunk: int) -> None:
        key_window, ticket = self.open[which % len(self.open)]
        was_held = chunk in ticket.held
        assert key_window.give_back(ticket, chunk) == was_held
        assert not key_window.give_back(ticket, chunk)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        key_window, ticket = self.open.pop(which % len(self.open))
        key_window.leave(ticket)
        key_window.leave(ticket)
        assert not ticket.held

    @invariant()
    def counted_is_held(self) -> None:
        for key_window in self.windows:
            mine = [ticket for window, ticket in self.open if window is key_window]
            assert key_window.tokens == sum(ticket.costs[chunk] for ticket in mine for chunk in ticket.held)
            assert key_window.items == sum(len(ticket.held) for ticket in mine)
            waiting: dict[str, int] = {}
            for ticket in mine:
                if ticket.waiting:
                    waiting[ticket.key] = waiting.get(ticket.key, 0) + sum(ticket.costs[ticket.next :])
            assert key_window.waiting_tokens() == waiting
        for key in "abc":
            held = sum(ticket.costs[chunk] for _, ticket in self.open if ticket.key == key for chunk in ticket.held)
            assert self.shares.tokens.get(key, 0) == held

    def teardown(self) -> None:
        for key_window, ticket in self.open:
            key_window.leave(ticket)
        assert all(model_window.idle and not model_window.tokens for model_window in self.windows)
        assert not self.shares.tokens


TestTurns = Turns.TestCase


@given(st.lists(st.lists(st.integers(1, QUANTUM), min_size=1, max_size=30), min_size=2, max_size=5), st.integers(1, 4))
def test_no_key_that_waits_is_ahead_of_another_by_more_than_three_turns(requests: list[list[int]], room: int) -> None:
    """For any sizes the bound is that of deficit round robin, a quantum and the largest chunk, and one turn more."""
    key_window = window()
    for number, costs in enumerate(requests):
        key_window.join(Ticket(str(number), costs))
    sent = {str(number): 0 for number in range(len(requests))}
    while key_window.flows:
        granted = key_window.grant(QueueBound(room * QUANTUM), math.inf)
        assert granted
        for ticket, chunk in granted:
            sent[ticket.key] += ticket.costs[chunk]
            key_window.give_back(ticket, chunk)
        waiting = [sent[key] for key in key_window.waiting_tokens()]
        if len(waiting) > 1:
            assert max(waiting) - min(waiting) <= 3 * QUANTUM


# a lane, simulated


def test_a_key_that_uses_much_leaves_something_to_other_keys() -> None:
    """The last eighth is for keys with less than their share. A refused key counts as active for a while."""
    now_s, size = 0.0, 16
    memory = SharedLimit(8 * size)

    def fill(key: str) -> int:
        before = memory.used_by[key]
        while memory.accepts(key, 1, now_s):
            memory.use(key, 1)
        return memory.used_by[key] - before

    assert fill("a") == 8 * size
    assert fill("b") == 0
    memory.use("a", -8 * size)
    assert (fill("a"), fill("b"), fill("c")) == (7 * size, size, 0)
    memory.use("a", -2 * size)
    assert (fill("a"), fill("c"), fill("b")) == (size, size, 0)
    for key in ("a", "b", "c"):
        memory.use(key, -memory.used_by[key])
    now_s = REFUSED_S + 1
    assert (fill("a"), memory.used_by) == (8 * size, {"a": 8 * size})
