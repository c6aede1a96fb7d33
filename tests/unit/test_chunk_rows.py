"""Rows of texts with chunks: windows, segments, and which inputs have rows of their own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import tokenizer_recipes as recipes
from text_rows import text_rows

from sie_contracts import chunker
from sie_contracts.errors import InvalidInput
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import ChunkRule, Input, RunOptions, TextChunks, WorkItem
from sie_sidecar.in_flight import InFlight, only, runnable
from sie_sidecar.prepare import chunk_rows
from sie_sidecar.prepare.layouts import make
from sie_sidecar.prepare.rows import ModelTokenizer, WorkItemInput, WorkRows

LAYOUT = Rows(chunks=True, pooling="mean")
WORDS = "the river ran past mills and inns, slowly. "


@functools.cache
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(recipes.BERT.train().to_str().encode(), 64)


def spans(*pairs: tuple[int, int], context: bool = True) -> TextChunks:
    return TextChunks(spans=np.array(pairs, "<i4").tobytes(), context=context)


def made(*inputs: Input, layout: Rows = LAYOUT, **options: Any) -> WorkRows:
    return make(tokenizer(), layout, [WorkItemInput(inputs, None, RunOptions(**options))])[0]


def table(data: bytes, width: int) -> list[list[int]]:
    return np.frombuffer(data, "<i4").reshape(-1, width).tolist()


@given(tokens=st.integers(0, 400), longest=st.integers(16, 60))
@settings(max_examples=200)
def test_windows_cover_the_text_and_overlap(tokens: int, longest: int) -> None:
    bounds = chunk_rows.windows(tokens, longest)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == tokens
    assert all(stop - start <= longest for start, stop in bounds)
    assert len({stop - start for start, stop in bounds}) == 1
    for (_, stop), (start, _) in itertools.pairwise(bounds):
        assert stop - start >= longest // 8 - 1


@given(count=st.integers(1, 60), size=st.integers(3, 200))
@settings(max_examples=100)
def test_segments_of_chunks_that_tile_a_text_have_each_token_once(count: int, size: int) -> None:
    text = (WORDS * 10)[: 7 * count]
    pairs = [(start, min(start + size, len(text))) for start in range(0, len(text), size)]
    rows = made(Input(text, chunks=spans(*pairs)))
    if rows.unfit:  # a chunk of white space alone
        assert rows.unfit[0].reason == "no_tokens"
        return
    (described,) = rows.chunked
    (whole,) = tokenizer().whole([text], special=True)
    segments = table(described.segments, 4)
    read = [number for _, row, first, stop in segments for number in rows.rows[row].ids[first:stop].tolist()]
    assert read == whole.ids
    assert sum(tokens for _, _, tokens in table(described.spans, 3)) == len(whole.ids) - 2


def test_a_text_without_chunks_has_one_row_beside_those_that_have() -> None:
    text = WORDS * 8
    rows = made(Input("first"), Input(text, chunks=spans((0, len(text)))), Input("last"))
    assert [described.rows for described in rows.chunked] == [1, len(rows.rows) - 2, 1]
    assert len(rows.rows) > 3
    assert rows.rows[0].ids.tolist() == text_rows(tokenizer(), ["first"])[0].ids.tolist()
    assert rows.rows[-1].ids.tolist() == text_rows(tokenizer(), ["last"])[0].ids.tolist()


def test_a_chunk_without_context_is_a_row() -> None:
    text = WORDS * 2
    rows = made(Input(text, chunks=spans((0, 10), (10, 40), context=False)), prefix="p: ")
    alone = [row.ids.tolist() for row in text_rows(tokenizer(), ["p: " + text[:10], "p: " + text[10:40]])]
    assert [row.ids.tolist() for row in rows.rows] == alone
    assert not rows.chunked[0].segments
    prompt = len(text_rows(tokenizer(), ["p: "])[0].ids)
    assert [tokens for _, _, tokens in table(rows.chunked[0].spans, 3)] == [len(ids) - prompt for ids in alone]


@pytest.mark.parametrize(
    ("item", "options", "layout", "reason"),
    [
        (Input("a b", chunks=spans((0, 1))), {}, Rows(), "unsupported_modality"),
        (Input("", chunks=spans((0, 1))), {}, LAYOUT, "unsupported_modality"),
        (Input("a b", chunks=spans((0, 1))), {"is_query": True}, LAYOUT, "unsupported_modality"),
        (Input("a b", chunks=spans((0, 1))), {"pooling": "cls"}, LAYOUT, "unsupported_pooling"),
        (Input("a b", chunks=spans((0, 1))), {}, Rows(chunks=True, pooling="last"), "unsupported_pooling"),
        (Input("a b", chunks=spans((0, 9))), {}, LAYOUT, "schema"),
        (Input("a b", chunks=TextChunks()), {}, LAYOUT, "schema"),
        (Input("a b", chunks=spans((1, 2))), {}, LAYOUT, "no_tokens"),
        (Input(" \n", chunks=TextChunks(ChunkRule(4))), {}, LAYOUT, "no_tokens"),
        (Input(WORDS * 500, chunks=TextChunks(ChunkRule(1, boundary="token"))), {}, LAYOUT, "too_many_chunks"),
        (Input(WORDS, chunks=TextChunks(ChunkRule(63), context=False)), {}, LAYOUT, "too_long"),
        (Input(WORDS, chunks=TextChunks(ChunkRule(8))), {"prefix": WORDS * 4}, LAYOUT, "too_long"),
        (Input("a " * (1 << 17), chunks=TextChunks(ChunkRule(60))), {}, LAYOUT, "too_many_tokens"),
        (
            Input("a " * 4000, chunks=spans(*((2 * n, 2 * n + 1) for n in range(4000)), context=False)),
            {"prefix": "x" * 9000},
            LAYOUT,
            "too_many_tokens",
        ),
    ],
)
def test_chunks_that_cannot_be_run_are_refused_alone(
    item: Input, options: dict[str, Any], layout: Rows, reason: str
) -> None:
    rows = made(Input("fine"), item, layout=layout, **options)
    assert {index: error.reason for index, error in rows.unfit.items()} == {1: reason}
    assert len(rows.rows) == 2


def test_a_rule_makes_no_chunk_after_the_first_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made_chunks = 0

    def counted(*arguments: Any) -> Iterator[tuple[int, int]]:
        nonlocal made_chunks
        for span in spans_of_rule(*arguments):
            made_chunks += 1
            yield span

    spans_of_rule = chunker.spans
    monkeypatch.setattr(chunker, "spans", counted)
    rows = made(Input("a " * 20_000, chunks=TextChunks(ChunkRule(1))))
    assert [(error.reason, error.param) for error in rows.unfit.values()] == [("too_many_chunks", "chunks.max_tokens")]
    assert made_chunks == chunk_rows.MAX_CHUNKS + 1


def test_an_input_that_runs_alone_has_its_own_rows() -> None:
    inputs = (Input("first"), Input(WORDS * 8, chunks=TextChunks(ChunkRule(20))), Input("last"))
    rows = made(*inputs)
    item = WorkItem("r", 0, "m", "v", "encode", inputs, RunOptions(), "inbox", 1000)
    flight = InFlight(cast(Any, None), item, 0.0, 1.0, rows=rows.rows, chunked=rows.chunked)
    parts = [only(flight, index) for index in range(3)]
    assert [row for part in parts for row in part.rows] == rows.rows
    assert [part.chunked for part in parts] == [(described,) for described in rows.chunked]
    stopped = replace(flight, unfit={0: InvalidInput("no")})
    run, chosen = runnable(stopped)
    assert (run, chosen) == (rows.rows[1:], [1, 2])
