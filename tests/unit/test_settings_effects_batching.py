"""Effects of the batching settings on a virtual clock: from the variable through the sidecar's limits to the batches
that are formed.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from batch_entries import BatchEntry
from inprocess import settings_of

from sie_contracts.settings import Mode, load
from sie_contracts.wire.messages import Truncate
from sie_sidecar.batch import (
    WINDOW,
    WINDOW_S,
    Batch,
    BatchKey,
    BatchLimits,
    DeviceLoad,
    Quantum,
    Waiting,
    WaitUntil,
    next_batch,
    quantum_of,
)
from sie_sidecar.prepare.rows import INLINE_CHARACTERS, TokenizerPool, Tokens
from sie_sidecar.process import limits_of

KEY = BatchKey("toy/one", "local", "encode", "", "")
IDLE = DeviceLoad(sent=0, lanes=1, depth=2, more_expected=False)
EXPECTING = DeviceLoad(sent=0, lanes=1, depth=2, more_expected=True)


def limits(mode: Mode = "queue", **environ: str) -> BatchLimits:
    return limits_of(settings_of(mode, **environ), mode)


def jobs(count: int, cost: int = 1, *, every_s: float = 0.0, bulk: bool = False) -> list[BatchEntry[int]]:
    return [BatchEntry(KEY, cost, number * every_s, number, bulk) for number in range(count)]


def batches_of(
    waiting: Sequence[BatchEntry[int]], bounds: BatchLimits, now_s: float = 0.0
) -> list[Batch[BatchEntry[int]]]:
    """Return all batches that an idle device gets when these jobs wait."""
    queue: Waiting[BatchEntry[int]] = Waiting()
    for job in waiting:
        queue.add(job)
    formed = []
    while isinstance(batch := next_batch(queue, now_s, bounds, IDLE), Batch):
        formed.append(batch)
    assert not len(queue)
    return formed


def sizes(waiting: Sequence[BatchEntry[int]], bounds: BatchLimits) -> list[int]:
    return [len(batch.entries) for batch in batches_of(waiting, bounds)]


def sent_at(arrivals: Sequence[BatchEntry[int]], bounds: BatchLimits) -> list[tuple[float, int]]:
    """Return the time in seconds and the size of each batch for jobs that arrive at their own times, while more are
    always expected.
    """
    queue: Waiting[BatchEntry[int]] = Waiting()
    coming = list(arrivals)
    formed: list[tuple[float, int]] = []
    now_s = 0.0
    while coming or len(queue):
        while coming and coming[0].arrived_s <= now_s:
            queue.add(coming.pop(0))
        action = next_batch(queue, now_s, bounds, EXPECTING)
        if isinstance(action, Batch):
            formed.append((now_s, len(action.entries)))
            continue
        events = [job.arrived_s for job in coming[:1]] + ([action.until_s] if isinstance(action, WaitUntil) else [])
        now_s = min(events)
    return formed


@pytest.mark.parametrize("mode", ["queue", "standalone"])
def test_max_batch_cost_bounds_the_tokens_of_a_batch(mode: Mode) -> None:
    """SIE_MAX_BATCH_COST: 32 texts of 512 tokens are one batch, or four. An item over the budget runs alone."""
    roomy = {"SIE_MAX_BATCH_REQUESTS": "64", "SIE_BATCHER_MAX_BATCH_REQUESTS": "64"}
    assert sizes(jobs(32, 512), limits(mode, **roomy)) == [32]
    assert sizes(jobs(32, 512), limits(mode, SIE_MAX_BATCH_COST="4096", **roomy)) == [8, 8, 8, 8]
    oversize = [*jobs(1, 10), *jobs(1, 9000), *jobs(1, 10)]
    assert sizes(oversize, limits(mode, SIE_MAX_BATCH_COST="4096", **roomy)) == [1, 1, 1]


def test_max_batch_requests_bounds_the_items_of_a_batch_with_standalone_only() -> None:
    """SIE_MAX_BATCH_REQUESTS."""
    assert sizes(jobs(128), limits("standalone")) == [64, 64]
    assert sizes(jobs(128), limits("standalone", SIE_MAX_BATCH_REQUESTS="8")) == [8] * 16
    assert limits("queue", SIE_MAX_BATCH_REQUESTS="8") == limits("queue")
    assert len(load(environ={"SIE_MAX_BATCH_REQUESTS": "8"}, mode="queue").warnings) == 1


def test_max_batch_wait_is_how_long_a_lone_item_waits_for_an_expected_one_with_standalone_only() -> None:
    """SIE_MAX_BATCH_WAIT_MS: a batch that is full never waits."""
    lone = jobs(1)
    assert sent_at(lone, limits("standalone")) == [(0.01, 1)]
    assert sent_at(lone, limits("standalone", SIE_MAX_BATCH_WAIT_MS="5")) == [(0.005, 1)]
    assert sent_at(lone, limits("standalone", SIE_MAX_BATCH_WAIT_MS="200")) == [(0.2, 1)]
    assert sent_at(lone, limits("standalone", SIE_MAX_BATCH_WAIT_MS="0")) == [(0.0, 1)]
    assert sent_at(jobs(64), limits("standalone", SIE_MAX_BATCH_WAIT_MS="200")) == [(0.0, 64)]
    assert limits("queue", SIE_MAX_BATCH_WAIT_MS="200") == limits("queue")
    assert len(load(environ={"SIE_MAX_BATCH_WAIT_MS": "200"}, mode="queue").warnings) == 1


def test_coalescing_joins_what_arrives_within_the_window_in_queue_mode_only() -> None:
    """SIE_BATCHER_COALESCE_MS: items come every 3 ms. A window of 5 ms joins two, one of 1 ms none."""
    assert [size for _, size in sent_at(jobs(6, every_s=0.003), limits())] == [2, 2, 2]
    assert [size for _, size in sent_at(jobs(6, every_s=0.003), limits(SIE_BATCHER_COALESCE_MS="1"))] == [1] * 6
    assert limits("standalone", SIE_BATCHER_COALESCE_MS="1") == limits("standalone")
    assert len(load(environ={"SIE_BATCHER_COALESCE_MS": "1"}, mode="standalone").warnings) == 1


def test_batcher_max_requests_bounds_the_items_of_a_batch_in_queue_mode_only() -> None:
    """SIE_BATCHER_MAX_BATCH_REQUESTS."""
    assert sizes(jobs(24), limits()) == [12, 12]
    assert sizes(jobs(24), limits(SIE_BATCHER_MAX_BATCH_REQUESTS="6")) == [6] * 4
    assert limits("standalone", SIE_BATCHER_MAX_BATCH_REQUESTS="6") == limits("standalone")
    assert len(load(environ={"SIE_BATCHER_MAX_BATCH_REQUESTS": "6"}, mode="standalone").warnings) == 1


def order_of(waiting: Sequence[BatchEntry[int]], bounds: BatchLimits) -> str:
    return "".join("b" if batch.entries[0].bulk else "i" for batch in batches_of(waiting, bounds))


@pytest.mark.parametrize(("variable", "overtakes"), [({}, 4), ({"SIE_BULK_MAX_OVERTAKES": "2"}, 2)])
def test_bulk_work_is_overtaken_at_most_this_often(variable: dict[str, str], overtakes: int) -> None:
    """SIE_BULK_MAX_OVERTAKES: with a backlog of both priorities, a bulk batch runs after this many interactive ones."""
    bounds = limits(SIE_BATCHER_MAX_BATCH_REQUESTS="1", **variable)
    assert order_of([*jobs(4, bulk=True), *jobs(40)], bounds).startswith(("i" * overtakes + "b") * 4)


def test_without_overtaking_it_is_first_come_first_served() -> None:
    """SIE_BULK_MAX_OVERTAKES=0: neither priority starves the other."""
    bounds = limits(SIE_BATCHER_MAX_BATCH_REQUESTS="1", SIE_BULK_MAX_OVERTAKES="0")
    bulk, interactive = (
        jobs(4, every_s=0.2, bulk=True),
        [BatchEntry(KEY, 1, 0.1 + 0.2 * number, number) for number in range(4)],
    )
    assert order_of([*bulk, *interactive], bounds) == "bibibibi"
    assert order_of([*jobs(4, bulk=True), *interactive], bounds) == "bbbbiiii"


def quantum(p50_ms: float | None, **environ: str) -> Quantum:
    """Return the quantum after a second in which work was answered this long after its delivery."""
    batch_quantum = quantum_of(settings_of(**environ))
    for number in range(WINDOW if p50_ms is not None else 0):
        batch_quantum.answered((p50_ms or 0.0) / 1000, number / WINDOW)
    return batch_quantum


def gathered_ms(batch_quantum: Quantum, *, every_ms: float | None) -> float:
    """Return how long a gathering lasts while more is always expected. Deliveries come at this interval, or none after
    the first.
    """
    began_s = last_s = 1.0
    while every_ms is not None and last_s + every_ms / 1000 <= batch_quantum.until_s(began_s, last_s):
        last_s += every_ms / 1000
    return round((batch_quantum.until_s(began_s, last_s) - began_s) * 1000, 6)


def test_gathering_lasts_the_shortest_quantum_when_nothing_comes_or_answers_are_late() -> None:
    """SIE_ADAPTIVE_MIN_QUANTUM_MS: a gathering ends after this time without a delivery. It lasts no longer if the
    median of the answers is over its target, or if there are no answers.
    """
    for environ, shortest_ms in (
        ({}, 2),
        ({"SIE_ADAPTIVE_MIN_QUANTUM_MS": "7"}, 7),
        ({"SIE_ADAPTIVE_MIN_QUANTUM_MS": "0"}, 0),
    ):
        assert gathered_ms(quantum(1, **environ), every_ms=None) == shortest_ms
        assert gathered_ms(quantum(400, **environ), every_ms=0.5) == shortest_ms
        assert gathered_ms(quantum(None, **environ), every_ms=0.5) == shortest_ms


def test_gathering_lasts_up_to_the_longest_quantum_while_deliveries_keep_coming() -> None:
    """SIE_ADAPTIVE_MAX_QUANTUM_MS: the bound is reached while answers are immediate. Old answers do not count."""
    assert gathered_ms(quantum(0), every_ms=0.5) == 15
    assert gathered_ms(quantum(0, SIE_ADAPTIVE_MAX_QUANTUM_MS="40"), every_ms=0.5) == 40
    assert gathered_ms(quantum(0, SIE_ADAPTIVE_MAX_QUANTUM_MS="2"), every_ms=0.5) == 2
    assert quantum(0).seconds(1 + 2 * WINDOW_S) == 0.002


def test_gathering_is_the_longer_the_further_the_median_is_below_its_target() -> None:
    """SIE_ADAPTIVE_TARGET_P50_MS: at half the target it is half way between the bounds, from the target on the
    shortest.
    """
    assert gathered_ms(quantum(25), every_ms=0.5) == 8.5
    assert gathered_ms(quantum(25, SIE_ADAPTIVE_TARGET_P50_MS="25"), every_ms=0.5) == 2
    assert gathered_ms(quantum(25, SIE_ADAPTIVE_TARGET_P50_MS="100"), every_ms=0.5) == 11.75
    batch_quantum = quantum(400)
    for number in range(WINDOW):
        batch_quantum.answered(0.025, 1 + number / WINDOW)
    assert batch_quantum.seconds(2) == pytest.approx(0.0085)


class BarrierTokenizer:
    """A tokenizer whose calls wait until `count` of them run at once. `peak` is the most that ever ran at once."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count)
        self._lock = threading.Lock()
        self._running = 0
        self.peak = 0

    def encode(self, texts: Sequence[str], truncate: Truncate, limit: int) -> list[Tokens]:
        with self._lock:
            self._running += 1
            self.peak = max(self.peak, self._running)
        self._barrier.wait(25)
        with self._lock:
            self._running -= 1
        return [Tokens(np.full(3, len(text), np.int32), 3) for text in texts]


@pytest.mark.parametrize(
    ("variable", "workers"), [({}, 4), ({"SIE_PREPROCESSOR_WORKERS": "1"}, 1), ({"SIE_PREPROCESSOR_WORKERS": "6"}, 6)]
)
async def test_as_many_texts_are_tokenised_at_once_as_there_are_preprocessor_workers(
    variable: dict[str, str], workers: int
) -> None:
    """SIE_PREPROCESSOR_WORKERS: a barrier inside the tokenizer opens only when this many threads are in it. There are
    never more.
    """
    pool = TokenizerPool(settings_of(**variable).preprocessor_workers)
    tokenizer = BarrierTokenizer(workers)
    texts = [["x" * (INLINE_CHARACTERS + 1 + number)] for number in range(3 * workers)]
    try:
        async with asyncio.timeout(30):
            works = [functools.partial(tokenizer.encode, group, "END", 0) for group in texts]
            encodings = await asyncio.gather(
                *(pool.run(len(group[0]), work) for group, work in zip(texts, works, strict=True))
            )
    finally:
        pool.close()
    assert tokenizer.peak == workers
    assert [tokens[0].ids.tolist() for tokens in encodings] == [[len(group[0])] * 3 for group in texts]
