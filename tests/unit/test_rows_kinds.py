"""Inputs that are more than a text: token ids, pairs and vectors become rows. An input that does not suit the model is
refused alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from test_rows import (
    CUTS,
    EACH,
    EXAMPLES,
    LIMITS,
    MODEL_LIMIT,
    SHORT,
    TEXTS,
    TRUNCATE,
    check_pair,
    library,
    ours,
    plain,
    rows_of,
)

from sie_contracts.models.muvera import Muvera
from sie_contracts.wire.ipc import Layout, RunBatch, Side
from sie_contracts.wire.ipc import Rows as Described
from sie_contracts.wire.messages import Input, RunOptions, Truncate, Vectors
from sie_sidecar.prepare import rows
from sie_sidecar.prepare.layouts import make
from sie_sidecar.prepare.rows import VECTOR_BYTES, BatchPart, WorkItemInput, WorkRows, to_batch

ENCODE = Described("text", tokens=True)
CLASSES = Described("text", pairs=True)
WIDTH = 4
SIDES = Described("sides", Side(marker=7), Side(marker=8), vectors=WIDTH)
FOR_MUVERA = Described("text", tokens=True, vectors=WIDTH)
MAXSIM = {"outputs": ("multivector",)}
OTHER_LAYOUTS: tuple[Layout, ...] = ("pair", "hypotheses", "pieces", "sides", "spans", "passages", "raw")


def work(*inputs: Input, query: Input | None = None, **options: Any) -> WorkItemInput:
    return WorkItemInput(inputs, query, RunOptions(**options))


def made_of(kind: str, described: Described, item: WorkItemInput) -> WorkRows:
    (work_rows,) = make(ours(kind), described, [item])
    return work_rows


def whole(kind: str, text: str) -> list[int]:
    """Ids with special tokens."""
    return list(library(kind)(text)["input_ids"])


def vectors(count: int, width: int = WIDTH, seed: int = 0) -> Vectors:
    return Vectors.from_array(np.random.default_rng(seed).normal(size=(count, width)).astype(np.float32))


# token ids


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(text=TEXTS, limit=LIMITS, truncate=TRUNCATE)
@example(text="", limit=6, truncate="END")
def test_the_ids_of_a_text_give_the_row_of_the_text(kind: str, text: str, limit: int, truncate: Truncate) -> None:
    """The ids have all special tokens, none, or those of one end. Those that are missing are added, and none twice."""
    (expected,) = rows_of(kind, ENCODE, work(Input(text), truncate=truncate, max_tokens=limit))
    bare, full = plain(kind, text), whole(kind, text)
    first, last = ours(kind).first, ours(kind).last
    assert full == [*first, *bare, *last]
    given_ids = [full]
    if bare[: len(first)] != list(first) and bare[len(bare) - len(last) :] != list(
        last
    ):  # else its own words spell a special token
        given_ids += [bare, [*first, *bare], [*bare, *last]]
    token_rows = rows_of(
        kind, ENCODE, work(*(Input(tokens=tuple(ids)) for ids in given_ids), truncate=truncate, max_tokens=limit)
    )
    for row in token_rows:
        assert row.ids.tolist() == expected.ids.tolist()
        assert row.ids.dtype == np.int32
        assert (row.full, row.truncated, row.cost) == (expected.full, expected.truncated, expected.cost)


@pytest.mark.parametrize("kind", EACH)
@pytest.mark.parametrize("truncate", CUTS)
@pytest.mark.parametrize(
    ("prefix", "suffix"), [("query: ", ""), ("", " ?"), ("find the paper ", " in winter"), ("instruct:\n", "")]
)
def test_a_prompt_stands_around_ids_as_around_their_text(
    kind: str, truncate: Truncate, prefix: str, suffix: str
) -> None:
    """The cases are texts that keep their ids behind the prompt, as after every prompt of a template."""
    options = {"prefix": prefix, "suffix": suffix, "truncate": truncate}
    for text in ("river mountain", "paper " * 100):
        joint, bare = plain(kind, prefix + text + suffix), plain(kind, text)
        at = next(iter(at for at in range(len(joint)) if joint[at : at + len(bare)] == bare), None)
        if at is None:  # where tokens hold spaces, a word without a space before it has other ids
            assert kind.startswith("byte-level") or prefix.endswith("\n")
            continue
        by_text, by_ids = rows_of(kind, ENCODE, work(Input(text), Input(tokens=tuple(whole(kind, text))), **options))
        assert by_ids.ids.tolist() == by_text.ids.tolist()
        assert by_ids.full == by_text.full


def test_a_marker_stands_before_ids_once() -> None:
    described = Described("text", document=Side(marker=8), tokens=True)
    text, marked, bare = rows_of(
        "wordpiece",
        described,
        work(
            Input("river"),
            Input(tokens=(whole("wordpiece", "river")[0], 8, *whole("wordpiece", "river")[1:])),
            Input(tokens=tuple(plain("wordpiece", "river"))),
        ),
    )
    assert text.ids.tolist() == marked.ids.tolist() == bare.ids.tolist()


@pytest.mark.parametrize(
    ("ids", "place"),
    [((-1,), 0), ((5, 6, 1 << 20), 2), ((5, 1 << 40, -3), 1), ((1 << 63,), 0), ((5,) * 5000 + (-7,), 5000)],
)
def test_an_id_that_is_no_token_is_an_error_of_its_own_input(ids: tuple[int, ...], place: int) -> None:
    work_rows = made_of("wordpiece", ENCODE, work(Input("river"), Input(tokens=ids), Input(tokens=(40, 41))))
    assert list(work_rows.unfit) == [1]
    error = work_rows.unfit[1]
    size = len(library("wordpiece"))
    assert (error.code, error.reason, error.param) == ("INVALID_INPUT", "bad_token_id", f"tokens[{place}]")
    assert f"from 0 to {size - 1}, got {ids[place]}" in error.message
    assert [row.ids.tolist()[1:-1] for row in work_rows.rows[::2]] == [plain("wordpiece", "river"), [40, 41]]
    assert made_of("wordpiece", ENCODE, work(Input(tokens=(size - 1,)))).unfit == {}
    assert made_of("wordpiece", ENCODE, work(Input(tokens=(size,)))).unfit != {}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_a_model_that_reads_something_else_refuses_each_such_input_by_itself(layout: Layout) -> None:
    """The whole work item is refused for a query of such a kind, because all inputs need the query."""
    options = {"labels": ("a",), "pieces": (("", "query", " ", "document", ""),), "outputs": ("multivector",)}
    strange = (Input(tokens=(5,)), Input("river", pair="music"), Input(vectors=vectors(2)))
    query = Input("search") if layout in ("pair", "pieces", "sides") else None
    work_rows = made_of(
        "wordpiece", Described(layout), work(Input("paper"), *strange, Input("music"), query=query, **options)
    )
    assert work_rows.error is None
    assert list(work_rows.unfit) == [1, 2, 3]
    assert {error.reason for error in work_rows.unfit.values()} == {"unsupported_modality"}
    assert [error.param for error in work_rows.unfit.values()] == ["tokens", "pair", "multivector"]
    alone = made_of("wordpiece", Described(layout), work(Input("paper"), Input("music"), query=query, **options))
    assert [work_rows.rows[index].ids.tolist() for index in (*range(work_rows.shared), work_rows.shared, -1)] == [
        row.ids.tolist() for row in alone.rows
    ]
    for odd_query in strange if query else ():
        refused = made_of("wordpiece", Described(layout), work(Input("paper"), query=odd_query, **options))
        assert refused.rows == []
        assert refused.error is not None
        assert refused.error.reason == "unsupported_modality"


# pairs


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(left=st.one_of(SHORT, TEXTS), right=TEXTS, alone=TEXTS, limit=LIMITS, truncate=TRUNCATE)
@example(left="", right="", alone="", limit=6, truncate="END")
def test_a_pair_is_what_the_library_makes_of_it(
    kind: str, left: str, right: str, alone: str, limit: int, truncate: Truncate
) -> None:
    """The pair lies beside a text without a pair."""
    options = {"truncate": truncate, "max_tokens": limit}
    single, pair = rows_of(kind, CLASSES, work(Input(alone), Input(left, pair=right), **options))
    check_pair(kind, pair, left, right, limit, truncate, "only_second")
    (expected,) = rows_of(kind, CLASSES, work(Input(alone), **options))
    assert single.ids.tolist() == expected.ids.tolist()


def test_a_pair_needs_a_text_and_ids_are_none() -> None:
    work_rows = made_of(
        "wordpiece",
        Described("text", pairs=True, tokens=True),
        work(Input(tokens=(5,), pair="a"), Input(None, pair="a")),
    )
    assert [work_rows.unfit[index].param for index in (0, 1)] == ["pair", "pair"]


# vectors


def frame_of(operation: Any, described: Described, item: WorkItemInput, work_rows: WorkRows) -> RunBatch:
    return to_batch("b", "m", operation, described.layout, [BatchPart(work_rows.rows, item)])


def test_vectors_travel_in_the_place_of_ids() -> None:
    sent = [vectors(3), vectors(0), vectors(2, seed=1)]
    item = work(
        Input("river"),
        *(Input("not read", vectors=matrix) for matrix in sent[:2]),
        query=Input(vectors=sent[2]),
        **MAXSIM,
    )
    work_rows = made_of("wordpiece", SIDES, item)
    assert (work_rows.error, work_rows.unfit, work_rows.shared) == (None, {}, 1)
    frame = frame_of("score", SIDES, item, work_rows)
    assert np.frombuffer(frame.given, "<i4").tolist() == [2, -1, 3, 0]
    assert frame.vectors == sent[2].data + sent[0].data + sent[1].data
    assert np.frombuffer(frame.lengths, "<i4").tolist() == [0, len(plain("wordpiece", "river")) + 3, 0, 0]
    texts = work(Input("river"), query=Input("search"), **MAXSIM)
    plain_frame = frame_of("score", SIDES, texts, made_of("wordpiece", SIDES, texts))
    assert plain_frame.given == plain_frame.vectors == b""


def test_vectors_cost_their_bytes_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 1, 1000):
        (row,) = rows_of(
            "wordpiece", FOR_MUVERA, work(Input(vectors=vectors(count)), outputs=("dense",), muvera=Muvera())
        )
        assert row.cost == max(1, 4 * WIDTH * count // VECTOR_BYTES)
        assert not row.truncated
    monkeypatch.setattr(rows, "MAX_VECTOR_BYTES", 4 * WIDTH * 9)
    item = work(*(Input(vectors=vectors(3)) for _ in range(2)), query=Input(vectors=vectors(3)), **MAXSIM)
    assert made_of("wordpiece", SIDES, item).error is None
    refused = made_of("wordpiece", SIDES, work(*item.inputs, query=Input(vectors=vectors(4)), **MAXSIM))
    assert refused.error is not None
    assert (refused.error.reason, refused.error.extras) == ("too_many_tokens", {"limit": 4 * WIDTH * 9})


@pytest.mark.parametrize(
    ("described", "options", "reason"),
    [
        (SIDES, {"outputs": ("dense",)}, "unsupported_modality"),
        (SIDES, {"outputs": ("dense", "sparse", "multivector")}, "unsupported_modality"),
        (FOR_MUVERA, {"outputs": ("multivector",)}, "unsupported_modality"),
        (FOR_MUVERA, {"outputs": ("dense", "sparse"), "muvera": Muvera()}, "unsupported_modality"),
        (ENCODE, {"outputs": ("dense",), "muvera": Muvera()}, "unsupported_modality"),
    ],
)
def test_vectors_are_taken_where_token_vectors_are_all_that_is_used(
    described: Described, options: dict[str, Any], reason: str
) -> None:
    query = Input("search") if described is SIDES else None
    work_rows = made_of("wordpiece", described, work(Input("river"), Input(vectors=vectors(2)), query=query, **options))
    assert [(index, error.reason) for index, error in work_rows.unfit.items()] == [(1, reason)]


@pytest.mark.parametrize(
    ("sent", "reason", "named"),
    [
        (vectors(2, WIDTH + 1), "bad_dimensions", f"expected vectors {WIDTH} wide, got {WIDTH + 1}"),
        (Vectors(3, WIDTH, bytes(4 * WIDTH * 2)), "schema", f"{4 * WIDTH * 2} bytes are not 3"),
        (Vectors(-1, WIDTH, b""), "schema", "not -1"),
    ],
)
def test_vectors_of_another_shape_say_what_was_expected(sent: Vectors, reason: str, named: str) -> None:
    for item in (
        work(Input("a"), Input(vectors=sent), query=Input("q"), **MAXSIM),
        work(Input("a"), query=Input(vectors=sent), **MAXSIM),
    ):
        work_rows = made_of("wordpiece", SIDES, item)
        error = work_rows.unfit.get(1) or work_rows.error
        assert error is not None
        assert (error.code, error.reason) == ("INVALID_INPUT", reason)
        assert named in error.message


def test_work_items_of_all_kinds_tokenised_together_are_as_alone() -> None:
    muvera = {"outputs": ("dense",), "muvera": Muvera()}
    items = [
        work(Input("river " * 90), Input(tokens=tuple(plain("wordpiece", "paper music"))), prefix="find "),
        work(Input(vectors=vectors(2)), Input("paper"), **muvera),
        work(Input("music"), Input(tokens=(-1,)), is_query=True),
    ]
    described = Described("text", Side(marker=7, limit=20), Side(marker=8), tokens=True, vectors=WIDTH)
    for item, work_rows in zip(items, make(ours("wordpiece"), described, items), strict=True):
        alone = made_of("wordpiece", described, item)
        assert same(work_rows.rows, alone.rows)
        assert list(work_rows.unfit) == list(alone.unfit)


def same(left: Sequence[rows.TokenRow], right: Sequence[rows.TokenRow]) -> bool:
    return [(row.ids.tolist(), row.full, row.vectors) for row in left] == [
        (row.ids.tolist(), row.full, row.vectors) for row in right
    ]


def test_many_ids_are_as_many_characters_to_read() -> None:
    assert rows.effort_of(ENCODE, work(Input(tokens=(5,) * 3000))) >= 3000
    assert rows.effort_of(CLASSES, work(Input("", pair="a" * 3000))) >= 3000
    assert MODEL_LIMIT < 3000
