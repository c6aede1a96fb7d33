"""Jobs without a cluster: windows of time, pace and forecast, grouping of inputs, the cache of answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import numpy as np
import obstore
import pytest
from fake_adapter import toy_entry
from hypothesis import given
from hypothesis import strategies as st

from sie_bulk_jobs.datasets.answers import RowAnswer
from sie_bulk_jobs.gateway import client as askings
from sie_bulk_jobs.gateway import segments
from sie_bulk_jobs.gateway.client import MAX_ROOM, JobClient, JobIdentity, Room, Throttle
from sie_bulk_jobs.gateway.pace import MIN_LEFT_S, STEP_S, JobPace, forecast, opens_in_s, workers_needed
from sie_bulk_jobs.gateway.segments import StoredAnswers, segment
from sie_bulk_jobs.gateway.values import (
    GROUP_BYTES,
    GROUP_ITEMS,
    SHARD_BYTES,
    TOKEN_BYTES,
    ModelInput,
    bounds,
    grouped,
    unique,
)
from sie_bulk_jobs.records import JobRecord
from sie_contracts.api.jobs import JobInput, JobRequest
from sie_contracts.errors import InvalidInput, ResourceExhausted, SIEError
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import LoadOptions, RunDefaults
from sie_contracts.models.muvera import Muvera
from sie_contracts.models.options import RequestOptions
from sie_contracts.wire.messages import Failed, Ok, RunOptions, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.inference.answers import space_of
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.handler import Inference
from sie_gateway.inference.reply import Placed
from sie_gateway.inference.results import InferRequest
from sie_store.object_stores import opened


def at(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("windows", "zone", "now", "opens"),
    [
        ((), "UTC", "2026-11-24T12:00", 0),
        (("22:00-06:00",), "UTC", "2026-11-24T23:30", 0),
        (("22:00-06:00",), "UTC", "2026-11-24T05:59:59", 0),
        (("22:00-06:00",), "UTC", "2026-11-24T06:00", 16 * 3600),
        (("22:00-06:00",), "UTC", "2026-11-24T21:59:30", 30),
        (("22:00-06:00",), "Europe/Zurich", "2026-11-24T21:30", 0),
        (("01:00-02:00", "13:00-14:00"), "UTC", "2026-11-24T12:30", 1800),
        (("00:00-00:00",), "UTC", "2026-11-24T12:30", 0),
        # clocks go back an hour in this night: from 23:00 until 03:00 are five hours
        (("03:00-04:00",), "Europe/Zurich", "2026-10-24T21:00", 5 * 3600),
    ],
)
def test_a_window_opens(windows: tuple[str, ...], zone: str, now: str, opens: float) -> None:
    assert opens_in_s(windows, zone, at(now)) == opens


def job(deadline: float = 0.0, tokens_per_s: float = 0.0, **fields: object) -> JobRecord:
    request = JobRequest(model="m", input=JobInput(file="f"), deadline=deadline, tokens_per_s=tokens_per_s)
    return JobRecord("job-1", "", "", 0.0, request=request, **fields)  # type: ignore[arg-type]


def test_a_forecast_follows_from_the_rate_and_says_how_sure_it_is() -> None:
    pace = JobPace()
    for step in range(20):
        pace.note(step * STEP_S, int(100 * step * STEP_S))
    assert pace.rate == 100
    running = job(state="running", rows=100_000, done=40_000, rows_per_s=pace.rate, spread=0.1, deadline=1300.0)
    estimate = forecast(running, workers=2, now_s=1000.0)
    assert estimate is not None
    assert (estimate.done_at, estimate.plus_minus_s, estimate.workers) == (1600.0, 120.0, 2)
    assert estimate.workers_needed == 4  # two workers need twice the time that is left
    assert forecast(job(state="running", rows=None, rows_per_s=1.0), 1, 0.0) is None
    assert forecast(job(state="paused", rows=1, rows_per_s=1.0), 1, 0.0) is None


def test_workers_are_asked_for_where_they_help() -> None:
    fields = {"state": "running", "rows": 10_000, "done": 1_000, "rows_per_s": 10.0}
    assert workers_needed(job(**fields, deadline=1450.0), 2, now_s=1000.0) == 4
    late = workers_needed(job(**fields, deadline=1000.0), 2, now_s=9000.0)
    assert late == math.ceil(2 * 9_000 / MIN_LEFT_S / 10)
    assert workers_needed(job(**fields), 2, now_s=1000.0) is None
    assert workers_needed(job(**fields, deadline=1450.0, tokens_per_s=100.0), 2, now_s=1000.0) is None
    for state in ("queued", "planning", "paused", "finalizing", "completed"):
        assert workers_needed(job(**{**fields, "state": state}, deadline=1450.0), 2, now_s=1000.0) is None, state


def test_a_rest_is_no_part_of_the_rate() -> None:
    pace = JobPace()
    pace.note(0.0, 0)
    pace.note(20.0, 2000)
    pace.rest()
    assert pace.rate == 0
    pace.note(3600.0, 2000)
    pace.note(3620.0, 4000)
    assert pace.rate == 100


def inputs(*texts: str, query: str | None = None) -> list[ModelInput]:
    return [ModelInput(RequestItem(text), query) for text in texts]


@given(st.lists(st.tuples(st.text(max_size=8), st.sampled_from([None, "q", "r"])), max_size=60))
def test_each_input_is_in_one_group_and_no_group_has_two_queries(pairs: list[tuple[str, str | None]]) -> None:
    every = [ModelInput(RequestItem(text), query) for text, query in pairs]
    groups = grouped(every)
    assert sorted(place for group in groups for place in group) == list(range(len(every)))
    assert all(len({every[place].query for place in group}) == 1 for group in groups)


def test_groups_have_texts_of_similar_length_and_bounds() -> None:
    every = inputs(*("x" * (place % 7) for place in range(2 * GROUP_ITEMS)), "y" * (GROUP_BYTES + 1))
    groups = grouped(every)
    assert [len(group) for group in groups] == [1, GROUP_ITEMS, GROUP_ITEMS]
    lengths = [every[place].item.size for group in groups for place in group]
    assert lengths == sorted(lengths, reverse=True)


MANY = {"dense": 1024, "multivector": 128}


@pytest.mark.parametrize(
    ("outputs", "run", "has_images", "bytes_of_row", "text_tokens"),
    [
        (MANY, RunOptions(("dense",)), False, 4096, None),
        (MANY, RunOptions(("dense",), dimensions=256, dtype="float16"), False, 512, None),
        (MANY, RunOptions(("dense",), muvera=Muvera()), False, 4 * 10240, None),
        (MANY, RunOptions(("multivector",)), False, 512 * 512, 512),
        (MANY, RunOptions(("multivector",), dtype="int8"), False, 512 * 128, 128),
        (MANY, RunOptions(("dense", "multivector")), True, 4096 + 1024 * 512, None),
        ({"sparse": 30_000}, RunOptions(("sparse",)), False, 8 * 512, None),
    ],
)
def test_a_shard_has_rows_whose_answers_fit_into_memory(
    outputs: dict[str, int], run: RunOptions, has_images: bool, bytes_of_row: int, text_tokens: int | None
) -> None:
    resolved = Resolved(toy_entry(max_tokens=8192, outputs=outputs), "default", RunDefaults(), LoadOptions(), "", "")
    lane = Lane("_default", "_default", "default")
    shard_bounds = bounds(
        InferRequest("encode", resolved, (), {}, options=RequestOptions(run), lane=lane), has_images=has_images
    )
    assert shard_bounds.rows == SHARD_BYTES // bytes_of_row
    assert shard_bounds.text_bytes == (SHARD_BYTES // text_tokens * TOKEN_BYTES if text_tokens else None)


def test_equal_inputs_are_computed_once() -> None:
    every = [
        *inputs("a", "b", "a"),
        *inputs("a", query="q"),
        ModelInput(RequestItem(None, images=(b"a",))),
        *inputs(""),
    ]
    distinct_inputs = unique(every)
    assert [distinct_inputs.inputs[place] for place in distinct_inputs.places] == every
    assert len(distinct_inputs.inputs) == 5
    assert len(set(distinct_inputs.digests)) == 5


def value(number: int) -> RowAnswer:
    array = np.arange(number % 5 + 1, dtype=np.float32)
    return RowAnswer(None, number, number % 2 == 0, {"dense": array}, float(number), {"n": [number]})


def same(left: RowAnswer, right: RowAnswer) -> bool:
    arrays = all(np.array_equal(left.arrays[name], right.arrays[name]) for name in left.arrays)
    return arrays and (left.score, left.data, left.tokens, left.truncated) == (
        right.score,
        right.data,
        right.tokens,
        right.truncated,
    )


async def test_a_cache_finds_what_other_jobs_kept_and_nothing_of_another_space(tmp_path: Path) -> None:
    store = opened(str(tmp_path), "TEST")
    space = space_of("k", "f1", "encode", RunOptions())
    writer = StoredAnswers(store, space)
    await writer.open()
    digests = [ModelInput(RequestItem(str(number))).digest for number in range(300)]
    for start in range(0, 300, 100):
        await writer.keep(f"s{start}", {digests[place]: value(place) for place in range(start, start + 100)})
    await writer.keep("s0", {digests[0]: value(7)})  # by another leader of the same shard: the stored answers stay
    reader = StoredAnswers(store, space)
    await reader.open()
    assert len(reader) == 300
    lookup_digests = [digests[5], ModelInput(RequestItem("new")).digest, digests[250], digests[0]]
    answers = await reader.find(lookup_digests)
    assert answers.keys() == {0, 2, 3}
    assert same(answers[0], value(5))
    assert same(answers[2], value(250))
    assert same(answers[3], value(0))
    foreign_answers = StoredAnswers(store, space_of("k", "f2", "encode", RunOptions()))
    await foreign_answers.open()
    assert await foreign_answers.find(digests) == {}


async def test_a_cache_is_bounded_and_a_removed_segment_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(str(tmp_path), "TEST")
    writer = StoredAnswers(store, "space")
    digests = [ModelInput(RequestItem(str(number))).digest for number in range(200)]
    await writer.keep("s0", {digest: value(1) for digest in digests[:100]})
    await writer.keep("s1", {digest: value(2) for digest in digests[100:]})
    reader = StoredAnswers(store, "space")
    await reader.open()
    size = len(segment({digest: value(2) for digest in digests[100:]}))  # of the newer segment
    assert await segments.trim(store, 1 << 20) == 0
    assert await segments.trim(store, size) == 1
    assert len(await reader.find(digests)) == 100
    monkeypatch.setattr(segments, "MAX_ITEMS", 50)
    smaller = StoredAnswers(store, "space")
    await smaller.open()
    assert len(smaller) == 0


@pytest.mark.parametrize("left", [0, 5, 8, 30, 100, -1])
async def test_a_cache_skips_a_segment_that_was_cut(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    """`left`: bytes that are left of the segment. The other segments are read."""
    store = opened(str(tmp_path), "TEST")
    digests = [ModelInput(RequestItem(str(number))).digest for number in range(6)]
    whole = segment({digest: value(1) for digest in digests[:3]})
    obstore.put(store, "cache/space/cut", whole[:left])
    await StoredAnswers(store, "space").keep("whole", {digest: value(2) for digest in digests[3:]})
    reader = StoredAnswers(store, "space")
    await reader.open()
    answers = await reader.find(digests)
    assert {3, 4, 5} <= answers.keys() < set(range(6))
    assert "cache/space/cut cannot be read" in caplog.text


async def test_there_is_room_for_one_group_at_least_and_more_where_it_is_fast() -> None:
    room = Room()
    await room.enter(MAX_ROOM + 1)
    waiting = asyncio.create_task(room.enter(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    room.leave(MAX_ROOM + 1, 0.1)
    await asyncio.wait_for(waiting, 5)
    assert room.most > 512


async def test_items_come_in_the_order_in_which_they_asked_and_those_that_went_away_leave_no_hole() -> None:
    room = Room()
    await room.enter(512)
    entered: list[int] = []

    async def enter(number: int, count: int) -> None:
        await room.enter(count)
        entered.append(number)

    waiting = [asyncio.create_task(enter(number, count)) for number, count in enumerate((300, 1, 300, 212))]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.wait([waiting[1]])
    assert entered == []
    room.leave(512, 1e9)
    waiting[0].cancel()  # after its admission, before its task runs again
    await asyncio.wait([waiting[0]])
    await asyncio.wait_for(asyncio.gather(*waiting[2:]), 5)
    assert entered == [2, 3]
    room.leave(512, 1e9)
    await asyncio.wait_for(room.enter(room.most), 5)


async def test_a_throttle_holds_requests_that_start_together_to_its_rate() -> None:
    """The first answer gives the tokens of an input. Waiting requests start when the rate has room for their tokens."""
    loop = asyncio.get_running_loop()
    throttle = Throttle(1000.0, clock=loop.time)
    began_s, tokens = loop.time(), 0

    async def ask() -> None:
        nonlocal tokens
        expected = await throttle.enter(5)
        assert tokens <= 1000 * (loop.time() - began_s) + 50, "all but one request are paid for"
        tokens += 50
        await asyncio.sleep(0)
        throttle.settle(expected, 5, 50)

    await asyncio.gather(*[ask() for _ in range(8)])
    assert loop.time() - began_s >= 0.35


async def test_a_throttle_returns_what_a_request_that_failed_did_not_use() -> None:
    now = [0.0]
    throttle = Throttle(10.0, clock=lambda: now[0])
    throttle.settle(await throttle.enter(1), 1, 10)
    now[0] = 1.0
    throttle.settle(await throttle.enter(100), 100, 0)
    await asyncio.wait_for(throttle.enter(1), 5)


class ItemsClient(JobClient):
    """A client whose inference gives each item its next outcome, and records the items of each request."""

    def __init__(self, outcomes: dict[str, list[SIEError | None]]) -> None:
        async def at_once() -> None:
            pass

        super().__init__(cast("Inference", None), cast("JobIdentity", None), {}, lambda _: None, at_once)
        self._outcomes = outcomes
        self.requests: list[str] = []

    async def _whole(
        self, spec: str, operation: object, params: object, items: Sequence[RequestItem], query: object
    ) -> list[Placed]:
        names = [item.text or "" for item in items]
        self.requests.append(" ".join(names))
        errors = [self._outcomes[name].pop(0) for name in names]
        return [(WorkResult("r", 0, "w", ()), Ok({}) if error is None else Failed(error.info())) for error in errors]


async def test_an_item_whose_error_may_disappear_is_sent_again_alone() -> None:
    late, bad = ResourceExhausted("no memory"), InvalidInput("no token", reason="no_tokens", param="text")
    outcomes: dict[str, list[SIEError | None]] = {
        "good": [None],
        "late": [late, late, None],
        "bad": [bad],
        "never": [late] * askings.ATTEMPTS,
    }
    client = ItemsClient(outcomes)
    placed = await client.outcomes("m", "encode", {}, [RequestItem(name) for name in outcomes])
    assert [isinstance(outcome, Ok) for _, outcome in placed] == [True, True, False, False]
    assert client.requests[0] == "good late bad never"
    assert client.requests[1:] == ["late", "never", "late", *["never"] * (askings.ATTEMPTS - 2)]
    assert outcomes == {"good": [], "late": [], "bad": [], "never": []}
