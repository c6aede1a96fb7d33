"""The size of batches near deadlines: the rule, its cost to other jobs, and a worker before a slow device."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from batch_entries import BatchEntry
from fake_adapter import toy_entry
from fixed_cost_adapter import Adapter, Connection
from fixed_cost_adapter import Device as Clock
from hypothesis import given
from hypothesis import strategies as st
from inprocess import InProcess

from sie_contracts.models.costs import BatchTimes
from sie_sidecar.batch import (
    LEAD_S,
    MAX_LOSS,
    SHARE,
    UNKNOWN_S,
    Ask,
    Batch,
    BatchKey,
    BatchLimits,
    DeviceForecast,
    DeviceLoad,
    Waiting,
    WaitUntil,
    batch_of,
    fitting,
    next_batch,
)

LIMITS = BatchLimits(cost=4096, requests=64, wait_s=0.005)
KEY = BatchKey("m", "1", "encode", "", "")


def known(batch_s: float, token_s: float, sizes: tuple[int, ...] = (8, 64, 512)) -> BatchTimes:
    times = BatchTimes(20)
    for tokens in sizes:
        times.note(tokens, batch_s + token_s * tokens)
    return times


def note(waiting: Waiting[BatchEntry[int]], batch: Batch[BatchEntry[int]], seconds: float) -> None:
    waiting.times_of(batch.key.residency).note(batch.time_cost, seconds)


def asks(count: int, left_s: float, cost: int = 8) -> list[Ask]:
    return [Ask(cost, left_s, left_s)] * count


# the time of a batch


def test_two_batches_that_no_cost_explains_scale_what_was_known_and_one_does_not() -> None:
    times = known(0.1, 0.001)
    times.note(512, 6.0)
    assert times.seconds(512) == pytest.approx(0.612)
    times.note(512, 0.612)
    for _ in range(2):
        times.note(256, 10 * 0.356)
    assert times.seconds(256) == pytest.approx(3.56, rel=0.1)
    assert times.seconds(8) == pytest.approx(1.08, rel=0.2)
    for _ in range(2):
        times.note(256, 0.356)
    assert times.seconds(256) == pytest.approx(0.356, rel=0.1)


@pytest.mark.parametrize("noise", [0.15, 0.3])
def test_small_batches_after_noisy_large_ones_are_no_slower_device(noise: float) -> None:
    """A line through the times of large batches may go through zero. A small batch then seems to take many times too
    long.
    """
    for seed in range(40):
        draw = random.Random(seed)
        times = BatchTimes(20)

        def ran(tokens: int, times: BatchTimes = times, draw: random.Random = draw) -> None:
            times.note(tokens, (0.05 + 0.001 * tokens) * draw.uniform(1 - noise, 1 + noise))

        for _ in range(30):
            ran(draw.randint(300, 600))
        for _ in range(3):
            ran(8)
        assert times.seconds(450) == pytest.approx(0.5, rel=0.6), seed


def test_small_and_large_batches_in_turns_show_a_slower_device() -> None:
    """A small batch of a device that became ten times slower takes no longer than a large one did before."""
    times = known(0.04, 0.0007, (256, 400, 512))
    for tokens in (17, 500, 12, 400):
        times.note(tokens, 10 * (0.04 + 0.0007 * tokens))
    assert times.seconds(256) == pytest.approx(10 * (0.04 + 0.0007 * 256), rel=0.2)
    assert times.seconds(8) < 1.0


@given(st.floats(0.0, 0.5), st.floats(1e-6, 0.01), st.lists(st.integers(1, 4096), min_size=1, max_size=30))
def test_a_steady_device_is_predicted_and_tokens_are_the_inverse_of_seconds(
    batch_s: float, token_s: float, sizes: list[int]
) -> None:
    times = known(batch_s, token_s, tuple(sizes))
    if times.is_growth_known:
        for tokens in (min(sizes), max(sizes)):
            assert times.seconds(tokens) == pytest.approx(batch_s + token_s * tokens, rel=0.01)
            assert times.tokens(times.seconds(tokens)) >= tokens * 0.99
    else:
        assert times.tokens(0.0) >= 1.99 * min(sizes), "a larger batch is tried, so that its growth becomes known"


def test_the_smallest_efficient_batch_has_its_share_of_the_tokens_a_second() -> None:
    for batch_s, token_s, loss in ((0.1, 0.001, 0.5), (0.01, 0.002, 0.1), (0.3, 1e-3, 0.01)):
        times = known(batch_s, token_s)
        tokens = times.efficient(512, loss)
        assert tokens / times.seconds(tokens) == pytest.approx((1 - loss) * 512 / times.seconds(512), rel=0.01)
    times = known(0.3, 1e-3)  # here a smaller batch saves as large a share of the time as it loses of the throughput
    tokens = times.efficient(512, 0.5)
    lost = 1 - tokens / times.seconds(tokens) * times.seconds(512) / 512
    assert 1 - times.seconds(tokens) / times.seconds(512) == pytest.approx(lost, rel=0.01)
    assert known(0.6, 1e-3).efficient(512, 0.5) == 512


# how many jobs


@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0.0, 60.0)), min_size=1, max_size=64),
    st.floats(0.0, 0.5),
    st.floats(1e-6, 0.01),
    st.floats(1.001, 10.0),
)
def test_with_ample_budgets_a_batch_is_as_large_as_it_was(
    entries: list[tuple[int, float]], batch_s: float, token_s: float, spare: float
) -> None:
    """The jobs may have waited for any time."""
    times = known(batch_s, token_s)
    budget_s = spare * times.seconds(sum(cost for cost, _ in entries)) / SHARE
    assert fitting([Ask(cost, min(left_s, budget_s), budget_s) for cost, left_s in entries], times) == len(entries)


def test_jobs_that_all_have_little_time_get_a_batch_that_leaves_them_some() -> None:
    times = known(0.05, 0.003)  # 64 of them take 1.6 s
    count = fitting(asks(64, 1.0), times)
    assert 10 <= count <= 16
    assert times.seconds(8 * count) <= SHARE * 1.0
    assert fitting(asks(64, 0.5), times) < count


def test_a_batch_whose_time_is_fixed_is_not_cut() -> None:
    assert fitting(asks(64, 1.0), known(0.5, 1e-9)) == 64


def test_who_would_be_late_in_a_small_batch_as_well_changes_nothing() -> None:
    times = known(0.05, 0.003)
    assert fitting([*asks(32, 0.01), *asks(32, 60.0)], times) == 64
    assert fitting(asks(64, 0.0), times) == 64


@given(st.integers(1, 63), st.floats(0.001, 2.0), st.floats(0.0, 0.5), st.floats(1e-5, 0.01))
def test_some_jobs_cost_the_others_no_more_than_half_of_their_own_share(
    tight: int, left_s: float, batch_s: float, token_s: float
) -> None:
    times = known(batch_s, token_s)
    count = fitting([*asks(tight, left_s), *asks(64 - tight, 60.0)], times)
    assert count >= 1
    full_rate = 512 / times.seconds(512)
    rate = 8 * (count + 1) / times.seconds(8 * (count + 1))  # a batch is of whole jobs
    assert rate >= (1 - MAX_LOSS * tight / 64) * full_rate * 0.999


def test_before_anything_was_measured_one_job_with_little_time_runs_and_then_twice_as_many() -> None:
    times = BatchTimes(20)
    assert fitting(asks(64, 1.0), times) == 1
    assert fitting(asks(64, UNKNOWN_S + 1), times) == 64
    times.note(8, 0.5)
    assert fitting(asks(64, 1.0), times) == 2
    assert fitting(asks(64, UNKNOWN_S + 1), times) == 64
    times.note(16, 0.5001)
    assert fitting(asks(64, 1.0), times) == 64, "it costs nothing to be many"


# in the queue


def waiting(
    entries: list[BatchEntry[int]], times: tuple[float, float] | None = (0.05, 0.003)
) -> Waiting[BatchEntry[int]]:
    queue: Waiting[BatchEntry[int]] = Waiting()
    for entry in entries:
        queue.add(entry)
    for tokens in (8, 64, 512) if times else ():
        key = entries[0].key
        note(queue, batch_of([BatchEntry(key, tokens, 0.0, 0)]), times[0] + times[1] * tokens)  # type: ignore[index]
    return queue


def entry(
    number: int, budget_s: float = 1.0, now_s: float = 0.0, *, key: BatchKey = KEY, cost: int = 8, bulk: bool = False
) -> BatchEntry[int]:
    return BatchEntry(key, cost, 0.001 * number, number, bulk, False, now_s + budget_s, budget_s)


def taken(queue: Waiting[BatchEntry[int]], now_s: float = 1.0) -> Batch[BatchEntry[int]]:
    batch = next_batch(queue, now_s, LIMITS, DeviceLoad(0, 1, 1, False))
    assert isinstance(batch, Batch)
    return batch


def test_the_first_jobs_run_and_the_others_keep_their_places() -> None:
    queue = waiting([entry(number, now_s=1.0) for number in range(64)])
    first = taken(queue)
    assert 10 <= len(first.entries) <= 16
    assert [job.work for job in first.entries] == list(range(len(first.entries)))
    assert len(queue) == 64 - len(first.entries)
    assert taken(queue).entries[0].work == len(first.entries)


def test_of_a_batch_that_pads_those_run_that_are_nearest_to_the_oldest_in_size() -> None:
    padded = KEY._replace(padded=True)
    queue = waiting([entry(number, now_s=1.0, key=padded, cost=12 if number % 2 else 6) for number in range(64)])
    batch = taken(queue)
    assert 0 in {job.work for job in batch.entries}
    assert {job.cost for job in batch.entries} == {6}
    assert len(batch.entries) < 32


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("limits", "count"),
    [
        (BatchLimits(cost=1000, requests=5, wait_s=0.0), 5),
        (BatchLimits(cost=40, requests=64, wait_s=0.0), 5),
        (BatchLimits(cost=39, requests=64, wait_s=0.0), 4),
        (BatchLimits(cost=1000, requests=64, wait_s=0.0, media_bytes=300), 3),
        (BatchLimits(cost=1000, requests=64, wait_s=0.0, media_bytes=299), 2),
    ],
)
def test_a_batch_is_as_large_as_its_limits_and_no_larger(limits: BatchLimits, count: int, padded: bool) -> None:
    key = KEY._replace(padded=padded)
    entries = [BatchEntry(key, 8, 0.001 * number, number, media_bytes=100) for number in range(8)]
    batch = next_batch(waiting(entries, None), 1.0, limits, DeviceLoad(0, 1, 1, False))
    assert isinstance(batch, Batch)
    assert len(batch.entries) == count


def test_a_long_text_counts_by_the_time_that_it_takes() -> None:
    """The attention of a long text takes three times as long as everything else: a quarter as many texts fit."""
    short, long = (
        taken(
            waiting(
                [BatchEntry(KEY, 8, 0.001 * number, number, False, False, 2.0, 1.0, time_cost) for number in range(64)]
            )
        )
        for time_cost in (8.0, 32.0)
    )
    assert 3.5 <= len(short.entries) / len(long.entries) <= 5


@pytest.mark.parametrize("budget_s", [1.0, 60.0])
def test_no_batch_is_sealed_long_before_the_device_is_free(budget_s: float) -> None:
    queue = waiting([entry(number, budget_s, now_s=1.0) for number in range(8)])
    running = DeviceLoad(1, 1, 2, False, 0.5)
    assert next_batch(queue, 1.0, LIMITS, running) == WaitUntil(1.5 - LEAD_S)
    queue.add(entry(8, budget_s, now_s=1.2))
    batch = next_batch(queue, 1.5 - LEAD_S, LIMITS, DeviceLoad(1, 1, 2, False, LEAD_S))
    assert isinstance(batch, Batch)
    assert len(batch.entries) == 9, "work that arrives while the device is busy joins"


@pytest.mark.parametrize("now_s", [1.0, 1234.5678, 1e6])
def test_a_wait_for_the_device_is_always_a_wait(now_s: float) -> None:
    """A wait until the present time would be repeated for ever in a loop whose clock stands still meanwhile."""
    queue = waiting([entry(number, now_s=now_s) for number in range(8)])
    for busy_s in (LEAD_S, math.nextafter(LEAD_S, 1.0), LEAD_S + 1e-9):
        action = next_batch(queue, now_s, LIMITS, DeviceLoad(1, 1, 2, False, busy_s))
        if isinstance(action, Batch):
            queue = waiting([entry(number, now_s=now_s) for number in range(8)])
        else:
            assert isinstance(action, WaitUntil)
            assert action.until_s > now_s


def test_a_prediction_that_was_too_short_holds_no_batch_back() -> None:
    queue = waiting([entry(number, now_s=1.0) for number in range(8)])
    assert isinstance(next_batch(queue, 1.6, LIMITS, DeviceLoad(1, 1, 2, False, 0.0)), Batch)


def test_jobs_with_little_time_do_not_wait_behind_a_batch_of_which_nothing_is_known() -> None:
    queue = waiting([entry(0), entry(1)], times=None)
    assert next_batch(queue, 1.0, LIMITS, DeviceLoad(1, 1, 2, False)) is None
    assert isinstance(next_batch(queue, 1.0, LIMITS, DeviceLoad(1, 2, 3, False)), Batch), "another lane is free"
    queue = waiting([entry(0, UNKNOWN_S + 1)], times=None)
    assert isinstance(next_batch(queue, 1.0, LIMITS, DeviceLoad(1, 1, 2, False)), Batch)


def test_another_model_and_bulk_work_with_time_are_batched_as_before() -> None:
    second_key = BatchKey("n", "1", "encode", "", "")
    queue = waiting([entry(number, now_s=1.0) for number in range(64)])
    for number in range(64):
        queue.add(entry(64 + number, 600.0, key=second_key, bulk=True))
    sizes = {False: 0, True: 0}
    while len(queue):
        batch = taken(queue)
        sizes[batch.entries[0].bulk] = max(sizes[batch.entries[0].bulk], len(batch.entries))
    assert sizes[True] == 64
    assert sizes[False] < 64


def test_what_is_known_of_models_is_bounded() -> None:
    queue: Waiting[BatchEntry[int]] = Waiting()
    for number in range(2000):
        note(queue, batch_of([entry(0, key=KEY._replace(residency=str(number)))]), 0.1)
    assert len(queue._times) <= 1024


def closed_loop(
    budgets_s: list[float], batch_s: float, token_s: float, seconds: float, *, is_sized: bool = True
) -> list[tuple[int, int]]:
    """Run clients that ask again after each answer, before one lane without a sealed batch. Return the numbers of
    answers in time and late, by client.
    """
    queue: Waiting[BatchEntry[int]] = Waiting()
    counts = [(0, 0)] * len(budgets_s)
    now_s = 0.0

    def ask(client: int) -> None:
        budget_s = budgets_s[client]
        queue.add(BatchEntry(KEY, 8, now_s, client, False, False, now_s + budget_s, budget_s if is_sized else math.inf))

    for client in range(len(budgets_s)):
        ask(client)
    while now_s < seconds:
        batch = taken(queue, now_s)
        began_s, now_s = now_s, now_s + batch_s + token_s * batch.cost
        note(queue, batch, now_s - began_s)
        for job in batch.entries:
            in_time, late = counts[job.work]
            is_late = now_s > job.due_s
            counts[job.work] = (in_time + (not is_late), late + is_late)
            ask(job.work)
    return counts


def test_a_client_with_tiny_budgets_does_not_take_the_throughput_of_others() -> None:
    """One of 200 clients has a budget for which only small batches would do. The others lose at most two percent."""
    alone = closed_loop([60.0] * 200, 0.02, 2e-4, 60.0)
    for tiny_s in (0.001, 0.05, 0.1, 0.5):
        beside = closed_loop([tiny_s, *[60.0] * 199], 0.02, 2e-4, 60.0)
        assert sum(in_time for in_time, _ in beside[1:]) >= 0.98 * sum(in_time for in_time, _ in alone[1:])
        assert all(late == 0 for _, late in beside[1:])


@pytest.mark.long
def test_ample_budgets_have_the_throughput_that_they_had() -> None:
    for batch_s, token_s in ((0.001, 2e-5), (0.1, 2e-4), (0.5, 2e-3)):
        assert closed_loop([30.0] * 200, batch_s, token_s, 60.0) == closed_loop(
            [30.0] * 200, batch_s, token_s, 60.0, is_sized=False
        )


def test_the_device_is_busy_for_what_was_sent_and_is_not_done() -> None:
    ahead = DeviceForecast()
    assert ahead.busy_s(0.0, 1) == 0.0
    ahead.sent(1, 2.0, 0.0, 1)
    ahead.sent(2, 1.0, 0.5, 1)
    assert ahead.busy_s(1.0, 1) == pytest.approx(2.0)
    ahead.ended(1, 4.0, 1)  # this batch took longer than predicted
    assert ahead.busy_s(4.0, 1) == pytest.approx(1.0)
    assert ahead.busy_s(4.0, 2) == 0.0, "the other lane is free"
    ahead.ended(2, 4.5, 1)
    assert ahead.busy_s(4.6, 1) == 0.0


# in a worker


# long: the batches of a slow device take 12 s
@pytest.mark.long
async def test_a_worker_before_a_slow_device_answers_in_time_what_it_can(tmp_path: Path) -> None:
    """40 requests with budgets of 4 s come at once. One batch of them takes 6 s, and all would be late. The times are
    seconds, because a busy machine may pause for one.
    """
    clock = Adapter(Clock(1, 0.05, 0.015), load_s=0.0, deadly="")
    sizes: list[int] = []
    late_s = math.inf  # from this time on a batch may have no client any more
    take: Callable[[int, float], tuple[float, float]] = clock.device.take

    def counted(tokens: int, now_s: float) -> tuple[float, float]:
        if asyncio.get_running_loop().time() < late_s:
            sizes.append(tokens)
        return take(tokens, now_s)

    clock.device.take = counted  # type: ignore[method-assign]
    path = tmp_path / "clock.sock"
    server = await asyncio.get_running_loop().create_unix_server(lambda: Connection(clock), str(path))
    async with server, InProcess(tmp_path, toy_entry("toy/one")) as cluster:
        gateway = await cluster.gateway()
        await cluster.sidecar(SIE_IPC_SOCKET_PATH=str(path), SIE_BATCHER_MAX_BATCH_REQUESTS="64")
        for count in (1, 2, 4):  # the worker measures the time of batches
            await asyncio.gather(*(gateway.encode("eight ch") for _ in range(count)))
        sizes.clear()
        late_s = asyncio.get_running_loop().time() + 3.0
        answers = await asyncio.gather(*(gateway.encode("eight ch", X_SIE_Timeout_Ms="4000") for _ in range(40)))
        assert max(sizes) <= 110, "of 400 tokens"
        assert sum(answer.status_code == 200 for answer in answers) >= 10
        late_s = math.inf
        sizes.clear()
        answers = await asyncio.gather(*(gateway.encode("eight ch") for _ in range(40)))
        assert [answer.status_code for answer in answers] == [200] * 40
        assert max(sizes) > 150, "with time enough batches are as large as they were"
