"""Measurements of a queue, the waits that follow from them, and the turns of refused clients."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sie_contracts.wire.heartbeats import Turn
from sie_gateway.admission.model_queue import EXPIRY_S, UNKNOWN_STALL_S, AnswerPace, ExpectedWait, Throughput
from sie_gateway.admission.retry_slots import MAX_RETRY_S, MAX_TURNS, RetrySlots


def drain(*batches: tuple[float, float, float], crowded: bool = False, device_s: float = math.inf) -> Throughput:
    """Return a throughput that got these batches: (time of the result, tokens, time when they were queued)."""
    throughput = Throughput()
    for number, (at_s, tokens, queued_s) in enumerate(batches):
        throughput.left(at_s, str(number), tokens, queued_s, is_crowded=crowded, device_s=device_s)
    return throughput


def wait(
    of: Throughput, now_s: float, ahead: float, *, oldest_s: float = 0.0, full: float = 512, fixed: float = math.inf
) -> ExpectedWait:
    return of.wait(now_s, ahead, 8, oldest_s, full, fixed)


def test_back_to_back_batches_tell_the_rate() -> None:
    """A batch of 512 tokens each half second: 5,120 tokens take five seconds, and one batch more is likely."""
    estimate = wait(drain(*((0.5 * number, 512, -1.0) for number in range(8)), crowded=True), 3.9, 5112)
    assert estimate.evidence == 7
    assert estimate.rate == pytest.approx(1024)
    assert estimate.min_s == pytest.approx(5.0 - 0.4)
    assert estimate.likely_s == pytest.approx(5.5 - 0.4)


def test_results_of_one_batch_are_one_sample() -> None:
    throughput = Throughput()
    for batch in range(4):
        for number in range(64):
            throughput.left(batch * 0.5 + number * 1e-4, f"w {batch}", 8, -1.0, is_crowded=True)
    typical_batch = throughput.batch(1.9)
    assert typical_batch is not None
    assert (typical_batch.tokens, typical_batch.seconds) == (512, pytest.approx(0.5))
    assert wait(throughput, 1.9, 512).evidence == 3


def test_small_batches_of_an_idle_worker_do_not_make_large_work_long() -> None:
    """Twenty texts of 8 tokens come one after the other, each 30 ms on the device. 1,600 tokens are four batches, and
    such a batch may take no longer.
    """
    throughput = drain(*((number * 0.5, 8.0, number * 0.5 - 0.05) for number in range(20)), device_s=0.03)
    assert wait(throughput, 9.6, 1600).likely_s < 0.2
    # noise may look like a cost of tokens: sizes far from the measured ones are not extrapolated
    assert wait(throughput, 9.6, 1600, fixed=1.0).likely_s < 0.6


def test_a_batch_costs_more_as_it_fills_where_that_was_measured() -> None:
    throughput = drain(*((0.1 * number, 128, -1.0) for number in range(8)))
    flat, by_tokens = wait(throughput, 0.8, 504), wait(throughput, 0.8, 504, fixed=0.0)
    assert by_tokens.likely_s > 3 * flat.likely_s


def test_one_stall_says_nothing_of_the_next_batch_and_two_slow_batches_do() -> None:
    quick = [(0.1 * number, 512.0, -1.0) for number in range(20)]
    stalled = drain(*quick, (7.9, 512, -1.0), (8.0, 512, -1.0), (8.1, 512, -1.0), crowded=True)
    assert wait(stalled, 8.15, 512).likely_s < 0.5
    slow = drain(*quick, *((1.9 + 1.0 * number, 512.0, -1.0) for number in range(1, 6)), crowded=True)
    assert wait(slow, 6.95, 512).likely_s > 1.5


def test_of_a_device_that_became_slower_only_what_it_takes_now_counts() -> None:
    """Two batches of five seconds follow many of half a second. The older ones no longer count."""
    throughput = drain(*((0.5 * number, 512.0, -1.0) for number in range(8)), crowded=True, device_s=0.5)
    for number in range(2):
        throughput.left(8.5 + 5 * number, f"slow {number}", 512, -1.0, is_crowded=True, device_s=5.0)
    assert throughput.rate(14.9) == pytest.approx(512 / 5)
    for number in range(2):
        throughput.left(15.0 + 0.5 * number, f"quick {number}", 512, -1.0, is_crowded=True, device_s=0.5)
    assert throughput.rate(15.9) > 3 * 512 / 5


def test_a_queue_that_stands_still_is_seen() -> None:
    throughput = drain(*((0.1 * number, 512, -1.0) for number in range(10)), crowded=True)
    assert wait(throughput, 1.0, 512).stalled_s == 0
    assert wait(throughput, 4.9, 512).stalled_s == pytest.approx(4.0)
    assert wait(Throughput(), UNKNOWN_STALL_S - 1, 8).stalled_s == 0
    assert wait(Throughput(), UNKNOWN_STALL_S + 1, 8).stalled_s == pytest.approx(UNKNOWN_STALL_S + 1)


def test_what_was_measured_expires() -> None:
    throughput = drain(*((0.1 * number, 512, -1.0) for number in range(10)), crowded=True)
    assert wait(throughput, 2.0, 512, oldest_s=2.0).evidence == 9
    assert wait(throughput, EXPIRY_S + 5.0, 512, oldest_s=EXPIRY_S + 5.0) == ExpectedWait()


def test_batches_that_were_cut_for_the_budget_do_not_grow() -> None:
    """Each half second a batch of 200 tokens runs and leaves as many in the queue. Workers cut it so that two batches
    fit into a budget of a second.
    """
    cut = drain(*((0.5 * number, 200, 0.5 * number - 1.1) for number in range(8)), device_s=0.5)
    ample = drain(*((0.5 * number, 200, 0.5 * number - 0.45) for number in range(8)), device_s=0.5)

    def likely_s(of: Throughput) -> float:
        return of.wait(3.9, 600, 8, 0.0, 4096, math.inf, budget_s=1.0).likely_s

    assert likely_s(cut) > 1.5
    assert likely_s(ample) < 1.0


def test_where_no_batch_is_sealed_ahead_those_behind_what_runs_fill_the_next_one() -> None:
    """Batches of 96 tokens take half a second, and one has run for 0.2 s. A request behind it is in the next batch
    while that has room. With a long budget a batch may have been formed before the request came.
    """
    throughput = drain(*((0.5 * number, 96, -1.0) for number in range(8)), crowded=True, device_s=0.5)

    def likely_s(waiting: float, budget_s: float) -> float:
        ahead = 96 + waiting
        return throughput.wait(3.7, ahead, 8, 0.0, 96, math.inf, budget_s=budget_s, running=ahead).likely_s

    assert [likely_s(waiting, 1.0) for waiting in (0, 88, 96)] == pytest.approx([0.8, 0.8, 1.3])
    assert likely_s(88, 60.0) == pytest.approx(1.3)


def test_of_a_queue_it_is_known_again_what_is_ahead_when_all_results_of_a_batch_are_there() -> None:
    throughput = drain(*((0.5 * number, 96, -1.0) for number in range(8)), crowded=True, device_s=0.5)
    for number in range(12):
        assert throughput.is_settled(4.0 + 0.001 * number, 0.1) == (number == 0)
        throughput.left(4.0 + 0.001 * number, "new", 8, -1.0, is_crowded=True, device_s=0.5, chunks=12)
    assert throughput.is_settled(4.012, 0.1)
    throughput.left(4.5, "of several gateways", 8, -1.0, is_crowded=True, device_s=0.5, chunks=12)
    assert not throughput.is_settled(4.5, 0.1)
    assert throughput.is_settled(4.5, 0.6), "a batch takes too little to matter"
    assert throughput.is_settled(4.7, 0.1)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 5000), st.floats(0, 2)), min_size=1, max_size=100),
    st.floats(0, 1e6),
)
def test_a_wait_is_finite_and_grows_with_what_is_ahead(batches: list[tuple[float, int, float]], ahead: float) -> None:
    throughput, now_s = Throughput(), 0.0
    for number, (gap_s, tokens, back_s) in enumerate(batches):
        now_s += gap_s
        throughput.left(
            now_s, str(number), tokens, now_s - back_s, is_crowded=number % 3 == 0, device_s=gap_s or math.inf
        )
    base_wait, more = (
        wait(throughput, now_s + 0.5, ahead, fixed=100.0),
        wait(throughput, now_s + 0.5, ahead + 600, fixed=100.0),
    )
    assert 0 <= base_wait.min_s <= base_wait.likely_s < math.inf
    assert base_wait.min_s <= more.min_s + 1e-6
    assert 0 <= base_wait.evidence <= len(batches)


# turns


def test_clients_of_one_moment_are_told_to_come_one_after_the_other() -> None:
    """The rate is a hundred tokens a second, which is twenty requests of 5 tokens. Each request waits behind all turns
    that were promised before.
    """
    random.seed(7)
    turns = RetrySlots()
    retry_times = [turns.book(0.0, b"%d" % number, 5, 3 + turns.promised(0.0) / 100) for number in range(400)]
    assert min(retry_times) >= 3
    assert max(retry_times) <= 24
    each_second = [retry_times.count(second) for second in range(4, 22)]
    assert max(each_second) <= 40
    assert turns.promised(0.0) == 2000


def most_within_a_second(due: list[float]) -> int:
    return max(sum(start <= moment < start + 1 for moment in due) for start in due)


def test_no_second_has_more_turns_than_it_has_room_for() -> None:
    """The bound is for any span of a second: a client that is refused half a second later also gets a whole number of
    seconds.
    """
    random.seed(5)
    turns = RetrySlots()
    due = []
    for number in range(200):
        now_s = number // 50 / 4
        due.append(now_s + turns.book(now_s, b"%d" % number, 5, 3.0, room=50))
    assert most_within_a_second(due) <= 10
    assert min(due) < 4
    assert max(due) <= 3 + 2 + 200 / 10 / 0.6  # the seconds are filled


def test_a_turn_is_its_clients_once_and_lapses() -> None:
    turns = RetrySlots()
    retry_s = turns.book(0.0, b"me", 5, 10.0)
    assert not turns.claim(retry_s, b"you")
    assert not turns.claim(retry_s * 0.5, b"me")
    assert turns.claim(retry_s * 0.8, b"me")  # clients jitter by a quarter
    assert not turns.claim(retry_s, b"me")
    turns.book(0.0, b"me", 5, 10.0)
    assert 0 < turns.promised(10.0) <= 5
    assert turns.promised(20.0) == 0
    assert not turns.claim(20.0, b"me")
    assert not turns._by_client


def test_a_turn_is_known_to_the_other_gateways() -> None:
    """The other gateways expect a turn that one promised, and let its request in; a request that one let in is not
    expected any more.
    """
    first, second, third = RetrySlots(), RetrySlots(), RetrySlots()
    retry_s = first.book(0.0, b"me", 5, 10.0)
    turns, claimed = first.news(0.1, 100)
    assert [turn.client for turn in turns] == [b"me"]
    assert claimed == ()
    for retry_slots in (second, third):
        retry_slots.peer_announced(0.1, turns, claimed)
        assert retry_slots.promised(0.2) == 5
    assert first.news(0.2, 100) == second.news(0.2, 100) == ((), ())
    assert second.claim(retry_s, b"me")
    turns, claimed = second.news(retry_s, 100)
    assert (turns, claimed) == ((), (b"me",))
    for retry_slots in (first, third):
        retry_slots.peer_announced(retry_s, turns, claimed)
        assert not retry_slots.claim(retry_s, b"me")
        assert retry_slots.promised(retry_s) == 0
        assert not retry_slots._open.costs


def test_what_is_told_of_turns_is_bounded_and_the_rest_is_told_next() -> None:
    turns = RetrySlots()
    for number in range(10):
        turns.book(0.0, b"%d" % number, 1, 60.0)
    assert [len(turns.news(1.0, 4)[0]) for _ in range(4)] == [4, 4, 2, 0]
    slots = RetrySlots()
    slots.peer_announced(0.0, [Turn(b"x", 1e9, 1), Turn(b"y", -1.0, 1), Turn(b"z", 5.0, -3)], [b"unknown"])
    assert len(slots._lapses) == 0


def test_where_many_ask_the_same_a_turn_is_not_claimed_before_its_time() -> None:
    random.seed(1)
    turns = RetrySlots()
    due = sorted(turns.book(0.0, b"same", 5, 5.0 + number) for number in range(10))
    assert not turns.claim(due[0] - 0.1, b"same")
    assert [turns.claim(second, b"same") for second in due] == [True] * 10


def test_turns_are_bounded_and_a_wait_too_long_has_none() -> None:
    turns = RetrySlots()
    for number in range(MAX_TURNS + 10):
        assert turns.book(0.0, b"%d" % number, 1, 60.0) in (60, 61)
    assert len(turns._lapses) == MAX_TURNS
    assert 0.8 * MAX_RETRY_S - 1 <= turns.book(0.0, b"x", 1, 1e9) <= MAX_RETRY_S
    assert turns.promised(1000.0) == 0
    assert len(turns._lapses) == 0


def full_gateway(running: int) -> AnswerPace:
    """Return the pace of a gateway with `running` requests. One ends each tenth of a second, and another one takes its
    place.
    """
    pace = AnswerPace()
    for number in range(running):
        pace.changed(0.0, number + 1)
    for number in range(1, 21):
        pace.changed(number / 10, running - 1)
        pace.changed(number / 10, running)
    return pace


def test_a_gateway_at_its_limit_spreads_clients_over_what_it_answers() -> None:
    random.seed(3)
    assert AnswerPace().retry_s(0.0) == 1
    assert full_gateway(40).retry_s(2.0) in (2, 3)
    assert full_gateway(400).retry_s(2.0) > 15
    pace = full_gateway(40)
    retry_times = [pace.retry_s(2.0) for _ in range(200)]
    assert sorted(retry_times)[100] >= 8
    assert max(retry_times) <= 30


def test_clients_that_do_not_wait_delay_no_later_client_for_longer_than_the_longest_retry() -> None:
    pace = full_gateway(40)
    for _ in range(20_000):  # all are refused within a moment; at the rate of this gateway they would take 2,000 s
        assert pace.retry_s(2.0) <= MAX_RETRY_S
    for number in range(21, 1500):
        pace.changed(number / 10, 39)
        pace.changed(number / 10, 40)
    assert pace.retry_s(150.0) <= 4
