"""Rows of every layout and kind of input against those of the fast tokenizers of transformers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import WORDS
from parity import tokenizer_recipes as recipes
from selection import long_but
from transformers import PreTrainedTokenizerFast

from sie_contracts.errors import InvalidInput
from sie_contracts.models.muvera import Muvera
from sie_contracts.models.options import counting, decoding, tokenizing
from sie_contracts.wire.ipc import Layout, Rows, RunBatch, Side
from sie_contracts.wire.ipc import Rows as Described
from sie_contracts.wire.messages import Failed, Input, Ok, RunOptions, Truncate, Vectors
from sie_sidecar.prepare import rows, tokenizer_requests
from sie_sidecar.prepare.layouts import NOWHERE, QUERY_SHARE, make
from sie_sidecar.prepare.long_text import HARD_TEXT
from sie_sidecar.prepare.rows import (
    VECTOR_BYTES,
    BatchPart,
    ModelTokenizer,
    TokenRow,
    WorkItemInput,
    WorkRows,
    texts_of,
    to_batch,
)
from sie_sidecar.prepare.tokenizer_requests import answer

KINDS = {
    "wordpiece": recipes.BERT,
    "byte-level": recipes.ROBERTA,
    "byte-level types": recipes.MODERNBERT,
    "unigram": recipes.XLM_ROBERTA,
    "unigram types": recipes.DEBERTA,
}
EACH = long_but(KINDS, ["wordpiece", "unigram types"])
MODEL_LIMIT = 64
CUTS: tuple[Truncate, ...] = ("END", "START", "NONE")

PARTS = st.sampled_from((*HARD_TEXT, *WORDS, " ", " ", ". "))
TEXTS = st.lists(PARTS, max_size=60).map("".join)
SHORT = st.lists(PARTS, max_size=6).map("".join)
LIMITS = st.integers(6, MODEL_LIMIT)
TRUNCATE = st.sampled_from(CUTS)
EXAMPLES = settings(max_examples=60)


@functools.cache
def ours(kind: str) -> ModelTokenizer:
    return ModelTokenizer(KINDS[kind].train().to_str().encode(), MODEL_LIMIT)


@functools.cache
def library(kind: str, side: str = "right") -> PreTrainedTokenizerFast:
    recipe = KINDS[kind]
    roles: dict[str, Any] = {f"{role}_token": token for role, token in recipe.roles.items()}
    return PreTrainedTokenizerFast(tokenizer_object=recipe.train(), truncation_side=side, **roles)


def side_of(truncate: Truncate) -> str:
    return "left" if truncate == "START" else "right"


def plain(kind: str, text: str) -> list[int]:
    """Ids without special tokens."""
    return list(library(kind)(text, add_special_tokens=False)["input_ids"])


def work(texts: Sequence[str], query: str | None = None, **options: Any) -> WorkItemInput:
    return WorkItemInput(
        [Input(text) for text in texts], None if query is None else Input(query), RunOptions(**options)
    )


def rows_of(kind: str, layout: Layout | Rows, item: WorkItemInput) -> list[TokenRow]:
    (work_rows,) = make(ours(kind), Rows(layout) if isinstance(layout, str) else layout, [item])
    return work_rows.rows


def check_pair(kind: str, row: TokenRow, left: str, right: str, limit: int, truncate: Truncate, strategy: str) -> None:
    """Check `truncated` and the count. Compare the row with the library where it can cut one of the two texts alone."""
    whole = library(kind)([left], [right])
    length = len(whole["input_ids"][0])
    special = length - len(plain(kind, left)) - len(plain(kind, right))
    uncut_ids = plain(kind, right if strategy == "only_first" else left)
    assert row.full == length
    assert row.truncated == (length > limit)
    assert len(row.ids) == min(length, limit)
    if len(uncut_ids) <= int(
        QUERY_SHARE * (limit - special)
    ):  # the text that is not cut fits its share, so the library can do it too
        expected = library(kind, side_of(truncate))(
            [left], [right], truncation=strategy, max_length=limit, return_token_type_ids=True
        )
        assert row.ids.tolist() == expected["input_ids"][0]
        assert (row.types.tolist() if row.types is not None else [0] * len(row.ids)) == expected["token_type_ids"][0]


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(query=st.one_of(SHORT, TEXTS), texts=st.lists(TEXTS, min_size=1, max_size=4), limit=LIMITS, truncate=TRUNCATE)
@example(query="", texts=[""], limit=6, truncate="END")
@example(query="river " * 40, texts=["", "paper", "music " * 60], limit=40, truncate="START")
def test_a_pair_is_what_the_library_cuts_in_its_second_text(
    kind: str, query: str, texts: list[str], limit: int, truncate: Truncate
) -> None:
    token_rows = rows_of(kind, "pair", work(texts, query, truncate=truncate, max_tokens=limit))
    for row, text in zip(token_rows, texts, strict=True):
        check_pair(kind, row, query, text, limit, truncate, "only_second")


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3),
    labels=st.lists(SHORT, min_size=1, max_size=3),
    limit=LIMITS,
    truncate=TRUNCATE,
)
def test_a_hypothesis_is_what_the_library_leaves_whole(
    kind: str, texts: list[str], labels: list[str], limit: int, truncate: Truncate
) -> None:
    parameters = {"hypothesis_template": "is {}."}
    token_rows = iter(
        rows_of(
            kind,
            "hypotheses",
            work(texts, labels=tuple(labels), parameters=parameters, truncate=truncate, max_tokens=limit),
        )
    )
    for text in texts:
        for label in labels:
            check_pair(kind, next(token_rows), text, f"is {label}.", limit, truncate, "only_first")
    assert next(token_rows, None) is None


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(query=TEXTS, text=TEXTS, limit=LIMITS)
@example(query="river " * 60, text="paper " * 60, limit=40)
@example(query="river " * 60, text="paper", limit=40)
@example(query="river " * 40, text="", limit=45)
def test_a_long_query_keeps_its_share_and_what_the_document_leaves(
    kind: str, query: str, text: str, limit: int
) -> None:
    (row,) = rows_of(kind, "pair", work([text], query, max_tokens=limit))
    template = ours(kind).pair
    room = limit - template.special
    left, right = plain(kind, query), plain(kind, text)
    query_length = min(len(left), max(int(QUERY_SHARE * room), room - len(right)))
    expected = [*template.first, *left[:query_length], *template.middle, *right[: room - query_length], *template.last]
    assert row.ids.tolist() == expected


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(query=SHORT, text=TEXTS, limit=st.integers(24, MODEL_LIMIT), truncate=TRUNCATE)
def test_pieces_are_tokenised_one_by_one_and_only_the_document_is_cut(
    kind: str, query: str, text: str, limit: int, truncate: Truncate
) -> None:
    pieces = (("system {query}",), ("query: ", "query", ""), ("\n",), ("document: ", "document", " end"), ("answer:",))
    (row,) = rows_of(kind, "pieces", work([text], query, pieces=pieces, truncate=truncate, max_tokens=limit))
    query_ids = plain(kind, f"query: {query}")
    before = [*plain(kind, "system {query}"), *query_ids[: int(QUERY_SHARE * limit)], *plain(kind, "\n")]
    after, document = plain(kind, "answer:"), plain(kind, f"document: {text} end")
    assert row.ids.tolist() == [*before, *document[: max(0, limit - len(before) - len(after))], *after]
    assert row.ids.tolist()[-len(after) :] == after
    whole = len(plain(kind, "system {query}")) + len(query_ids) + len(plain(kind, "\n")) + len(document) + len(after)
    assert row.full == whole
    assert row.truncated == (whole > len(row.ids))


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(query=TEXTS, text=TEXTS, limit=st.integers(40, MODEL_LIMIT))
@example(query="river " * 60, text="paper", limit=40)
def test_a_query_beside_the_document_is_cut_to_its_share(kind: str, query: str, text: str, limit: int) -> None:
    """Query and document are one text, as in the template of Qwen3-Reranker. A beginning of the query is shown."""
    pieces = (("<",), ("", "query", "\nsee: ", "document", ""), (">",))
    (row,) = rows_of(kind, "pieces", work([text], query, pieces=pieces, max_tokens=limit))
    share = int(QUERY_SHARE * limit)
    shown = query
    if len(plain(kind, query)) > share:
        start = library(kind)(query, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"][share][0]
        shown = query[:start]
    middle = plain(kind, f"{shown}\nsee: {text}")
    first, last = plain(kind, "<"), plain(kind, ">")
    assert row.ids.tolist() == [*first, *middle[: limit - len(first) - len(last)], *last]
    assert row.truncated == (shown != query or len(first) + len(middle) + len(last) > limit)


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), limit=LIMITS, truncate=TRUNCATE)
def test_spans_are_the_offsets_of_the_library(kind: str, texts: list[str], limit: int, truncate: Truncate) -> None:
    token_rows = rows_of(kind, "spans", work(texts, truncate=truncate, max_tokens=limit))
    for row, text in zip(token_rows, texts, strict=True):
        expected = library(kind, side_of(truncate))(
            text, truncation=True, max_length=limit, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        places = [
            (NOWHERE, NOWHERE) if special else place
            for place, special in zip(expected["offset_mapping"], expected["special_tokens_mask"], strict=True)
        ]
        assert row.ids.tolist() == expected["input_ids"]
        assert row.offsets is not None
        assert [tuple(place) for place in row.offsets.tolist()] == places
        assert row.full == len(library(kind)(text)["input_ids"])
    batch = to_batch("b", "m", "extract", "spans", [BatchPart(token_rows, work(texts))])
    assert np.frombuffer(batch.offsets, np.int32).size == 2 * sum(len(row.ids) for row in token_rows)


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=4), query=TEXTS, limit=LIMITS, truncate=TRUNCATE, cap=st.integers(5, 80)
)
def test_sides_are_texts_with_their_own_prompt_marker_and_limit(
    kind: str, texts: list[str], query: str, limit: int, truncate: Truncate, cap: int
) -> None:
    layout = Rows("sides", Side(marker=7, limit=cap, expanded=32), Side(marker=8))
    options = {"query_prefix": "q: ", "query_suffix": "?", "prefix": "d: ", "truncate": truncate, "max_tokens": limit}
    (work_rows,) = make(ours(kind), layout, [work(texts, query, **options)])
    assert work_rows.shared == 1
    tokenizer = library(kind, side_of(truncate))
    for index, (row, text) in enumerate(
        zip(work_rows.rows, [f"q: {query}?", *(f"d: {text}" for text in texts)], strict=True)
    ):
        most = min(limit, cap) if index == 0 else limit
        ids = tokenizer(text, truncation=True, max_length=most - 1)["input_ids"]
        assert row.ids.tolist() == [ids[0], 8 if index else 7, *ids[1:]]
        assert row.cost == max(len(row.ids), 0 if index else 32)
        assert row.truncated == (len(tokenizer(text)["input_ids"]) + 1 > most)


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(texts=st.lists(TEXTS, min_size=1, max_size=4), instruction=TEXTS, limit=LIMITS)
def test_passages_are_pairs_with_the_places_of_their_text(
    kind: str, texts: list[str], instruction: str, limit: int
) -> None:
    """The instruction and the text are a pair as in the library. Where the library would cut the instruction, it is cut
    as a query is.
    """
    token_rows = rows_of(kind, "passages", work(texts, max_tokens=limit, instruction=instruction))
    pairs = rows_of(kind, "pair", work(texts, instruction, max_tokens=limit))
    tokenizer = library(kind)
    for row, pair, text in zip(token_rows, pairs, texts, strict=True):
        assert row.ids.tolist() == pair.ids.tolist()
        assert (row.full, row.types is None) == (pair.full, pair.types is None)
        assert row.offsets is not None
        places = [tuple(place) for place in row.offsets.tolist()]
        expected = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        own = [place for place in places if place != (NOWHERE, NOWHERE)]
        assert own == expected["offset_mapping"][: len(own)]
        inside = [number for number, place in zip(row.ids.tolist(), places, strict=True) if place[0] >= 0]
        assert inside == expected["input_ids"][: len(own)]
        if not row.truncated:
            assert len(own) == len(expected["input_ids"])


@pytest.mark.parametrize("layout", ["text", "pair", "hypotheses", "pieces", "sides", "spans", "passages", "raw"])
@pytest.mark.parametrize("truncate", CUTS)
def test_work_items_tokenised_together_are_as_alone(layout: Layout, truncate: Truncate) -> None:
    """The work items share texts, labels and pieces, or have none of their own."""
    pieces = (("system",), ("ask ", "query", ""), ("see ", "document", "."), ("end",))
    items = [
        work(
            ["river " * 50, "", "paper"],
            "search " * count,
            truncate=truncate,
            max_tokens=40,
            labels=labels,
            pieces=pieces,
            prefix=prefix,
            instruction="find " * count,
        )
        for count, labels, prefix in (
            (1, ("music", "physics"), ""),
            (60, ("physics",), "is "),
            (0, ("music " * 50,), ""),
        )
    ]
    together = make(ours("wordpiece"), Rows(layout), items)
    for item, work_rows in zip(items, together, strict=True):
        (alone,) = make(ours("wordpiece"), Rows(layout), [item])
        assert work_rows.shared == alone.shared
        assert [row.ids.tolist() for row in work_rows.rows] == [row.ids.tolist() for row in alone.rows]
        assert [(row.full, row.truncated) for row in work_rows.rows] == [
            (row.full, row.truncated) for row in alone.rows
        ]


def test_types_of_rows_with_and_without_them_lie_side_by_side() -> None:
    (pair,) = rows_of("wordpiece", "pair", work(["river"], "search"))
    (text,) = rows_of("wordpiece", "text", work(["river"]))
    parts = [BatchPart([text], work(["river"])), BatchPart([pair], work(["river"], "search"))]
    assert to_batch("b", "m", "score", "pair", parts[:1]).types == b""
    assert to_batch("b", "m", "score", "pair", parts).types == bytes([0] * len(text.ids) + [0, 0, 0, 1, 1])


def test_raw_rows_count_and_keep_the_texts() -> None:
    item = work(["river " * 100, "paper"], "search")
    (work_rows,) = make(ours("wordpiece"), Rows("raw"), [item])
    assert texts_of(item) == ["search", "river " * 100, "paper"]
    assert (work_rows.shared, [row.full for row in work_rows.rows]) == (1, [1, 100, 1])


ENCODE = Described("text", tokens=True)
CLASSES = Described("text", pairs=True)
WIDTH = 4
SIDES = Described("sides", Side(marker=7), Side(marker=8), vectors=WIDTH)
FOR_MUVERA = Described("text", tokens=True, vectors=WIDTH)
MAXSIM = {"outputs": ("multivector",)}
OTHER_LAYOUTS: tuple[Layout, ...] = ("pair", "hypotheses", "pieces", "sides", "spans", "passages", "raw")


def input_of(*inputs: Input, query: Input | None = None, **options: Any) -> WorkItemInput:
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
    (expected,) = rows_of(kind, ENCODE, input_of(Input(text), truncate=truncate, max_tokens=limit))
    bare, full = plain(kind, text), whole(kind, text)
    first, last = ours(kind).first, ours(kind).last
    assert full == [*first, *bare, *last]
    given_ids = [full]
    if bare[: len(first)] != list(first) and bare[len(bare) - len(last) :] != list(
        last
    ):  # else its own words spell a special token
        given_ids += [bare, [*first, *bare], [*bare, *last]]
    token_rows = rows_of(
        kind, ENCODE, input_of(*(Input(tokens=tuple(ids)) for ids in given_ids), truncate=truncate, max_tokens=limit)
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
        by_text, by_ids = rows_of(
            kind, ENCODE, input_of(Input(text), Input(tokens=tuple(whole(kind, text))), **options)
        )
        assert by_ids.ids.tolist() == by_text.ids.tolist()
        assert by_ids.full == by_text.full


@pytest.mark.parametrize(
    ("ids", "place"),
    [((-1,), 0), ((5, 6, 1 << 20), 2), ((5, 1 << 40, -3), 1), ((1 << 63,), 0), ((5,) * 5000 + (-7,), 5000)],
)
def test_an_id_that_is_no_token_is_an_error_of_its_own_input(ids: tuple[int, ...], place: int) -> None:
    work_rows = made_of("wordpiece", ENCODE, input_of(Input("river"), Input(tokens=ids), Input(tokens=(40, 41))))
    assert list(work_rows.unfit) == [1]
    error = work_rows.unfit[1]
    size = len(library("wordpiece"))
    assert (error.code, error.reason, error.param) == ("INVALID_INPUT", "bad_token_id", f"tokens[{place}]")
    assert f"from 0 to {size - 1}, got {ids[place]}" in error.message
    assert [row.ids.tolist()[1:-1] for row in work_rows.rows[::2]] == [plain("wordpiece", "river"), [40, 41]]
    assert made_of("wordpiece", ENCODE, input_of(Input(tokens=(size - 1,)))).unfit == {}
    assert made_of("wordpiece", ENCODE, input_of(Input(tokens=(size,)))).unfit != {}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_a_model_that_reads_something_else_refuses_each_such_input_by_itself(layout: Layout) -> None:
    """The whole work item is refused for a query of such a kind, because all inputs need the query."""
    options = {"labels": ("a",), "pieces": (("", "query", " ", "document", ""),), "outputs": ("multivector",)}
    strange = (Input(tokens=(5,)), Input("river", pair="music"), Input(vectors=vectors(2)))
    query = Input("search") if layout in ("pair", "pieces", "sides") else None
    work_rows = made_of(
        "wordpiece", Described(layout), input_of(Input("paper"), *strange, Input("music"), query=query, **options)
    )
    assert work_rows.error is None
    assert list(work_rows.unfit) == [1, 2, 3]
    assert {error.reason for error in work_rows.unfit.values()} == {"unsupported_modality"}
    assert [error.param for error in work_rows.unfit.values()] == ["tokens", "pair", "multivector"]
    alone = made_of("wordpiece", Described(layout), input_of(Input("paper"), Input("music"), query=query, **options))
    assert [work_rows.rows[index].ids.tolist() for index in (*range(work_rows.shared), work_rows.shared, -1)] == [
        row.ids.tolist() for row in alone.rows
    ]
    for odd_query in strange if query else ():
        refused = made_of("wordpiece", Described(layout), input_of(Input("paper"), query=odd_query, **options))
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
    single, pair = rows_of(kind, CLASSES, input_of(Input(alone), Input(left, pair=right), **options))
    check_pair(kind, pair, left, right, limit, truncate, "only_second")
    (expected,) = rows_of(kind, CLASSES, input_of(Input(alone), **options))
    assert single.ids.tolist() == expected.ids.tolist()


# vectors


def frame_of(operation: Any, described: Described, item: WorkItemInput, work_rows: WorkRows) -> RunBatch:
    return to_batch("b", "m", operation, described.layout, [BatchPart(work_rows.rows, item)])


def test_vectors_travel_in_the_place_of_ids() -> None:
    sent = [vectors(3), vectors(0), vectors(2, seed=1)]
    item = input_of(
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
    texts = input_of(Input("river"), query=Input("search"), **MAXSIM)
    plain_frame = frame_of("score", SIDES, texts, made_of("wordpiece", SIDES, texts))
    assert plain_frame.given == plain_frame.vectors == b""


def test_vectors_cost_their_bytes_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 1, 1000):
        (row,) = rows_of(
            "wordpiece", FOR_MUVERA, input_of(Input(vectors=vectors(count)), outputs=("dense",), muvera=Muvera())
        )
        assert row.cost == max(1, 4 * WIDTH * count // VECTOR_BYTES)
        assert not row.truncated
    monkeypatch.setattr(rows, "MAX_VECTOR_BYTES", 4 * WIDTH * 9)
    item = input_of(*(Input(vectors=vectors(3)) for _ in range(2)), query=Input(vectors=vectors(3)), **MAXSIM)
    assert made_of("wordpiece", SIDES, item).error is None
    refused = made_of("wordpiece", SIDES, input_of(*item.inputs, query=Input(vectors=vectors(4)), **MAXSIM))
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
    work_rows = made_of(
        "wordpiece", described, input_of(Input("river"), Input(vectors=vectors(2)), query=query, **options)
    )
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
        input_of(Input("a"), Input(vectors=sent), query=Input("q"), **MAXSIM),
        input_of(Input("a"), query=Input(vectors=sent), **MAXSIM),
    ):
        work_rows = made_of("wordpiece", SIDES, item)
        error = work_rows.unfit.get(1) or work_rows.error
        assert error is not None
        assert (error.code, error.reason) == ("INVALID_INPUT", reason)
        assert named in error.message


ALL_HARD = "".join(HARD_TEXT) + " \U0001f469\u200d\U0001f4bb Zürich 東京"


def told(kind: str, texts: list[str], options: RunOptions) -> list[dict[str, Any]]:
    tokenizations = []
    for outcome in answer(ours(kind), "tokenize", WorkItemInput([Input(text) for text in texts], None, options)):
        assert isinstance(outcome, Ok)
        assert outcome.data is not None
        assert outcome.tokens == len(outcome.data["ids"])
        assert outcome.outputs == {}
        tokenizations.append(outcome.data)
    return tokenizations


def counted(kind: str, inputs: list[Input], run: RunOptions) -> list[int]:
    counts = []
    for outcome in answer(ours(kind), "tokenize", WorkItemInput(inputs, None, counting(run))):
        assert isinstance(outcome, Ok)
        assert outcome.data is None
        counts.append(outcome.tokens)
    return counts


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=4), special=st.booleans(), prefix=st.sampled_from(["", "query: ", "é "])
)
@example(texts=[ALL_HARD, ""], special=True, prefix="")
def test_tokens_are_those_of_the_library_with_their_bytes(
    kind: str, texts: list[str], special: bool, prefix: str
) -> None:
    """A token's slice of the UTF-8 text is its text. The library gives the same places in characters."""
    for text, output in zip(texts, told(kind, texts, tokenizing(prefix, add_special_tokens=special)), strict=True):
        whole = prefix + text
        expected = library(kind)(
            whole, add_special_tokens=special, return_offsets_mapping=True, return_special_tokens_mask=True
        )
        assert output["ids"] == expected["input_ids"]
        assert output["special"] == [mark == 1 for mark in expected["special_tokens_mask"]]
        data = whole.encode()
        for index, (start, stop) in enumerate(expected["offset_mapping"]):
            if output["special"][index]:
                assert output["starts"][index] is None
                assert output["stops"][index] is None
                assert output["texts"][index] == library(kind).convert_ids_to_tokens(output["ids"][index])
            else:
                assert (
                    data[output["starts"][index] : output["stops"][index]].decode()
                    == output["texts"][index]
                    == whole[start:stop]
                )
                assert output["starts"][index] == len(whole[:start].encode())


@pytest.mark.parametrize("kind", EACH)
@EXAMPLES
@given(text=SHORT, skip=st.booleans())
def test_ids_are_read_back_as_the_library_does(kind: str, text: str, skip: bool) -> None:
    ids = library(kind)(text)["input_ids"]
    (outcome,) = answer(
        ours(kind), "decode", WorkItemInput([Input(tokens=tuple(ids))], None, decoding(skip_special_tokens=skip))
    )
    assert isinstance(outcome, Ok)
    assert outcome.data == {"text": library(kind)._tokenizer.decode(ids, skip_special_tokens=skip)}
    assert outcome.tokens == len(ids)


@pytest.mark.parametrize(("operation", "options"), [("decode", decoding()), ("tokenize", counting(RunOptions()))])
def test_an_id_that_is_no_token_fails_alone_at_the_tokenizer(operation: Any, options: RunOptions) -> None:
    inputs = [Input(tokens=ids) for ids in ((40,), (40, 1 << 33), ())]
    first, wrong, last = answer(ours("wordpiece"), operation, WorkItemInput(inputs, None, options))
    assert isinstance(first, Ok)
    assert isinstance(last, Ok)
    assert isinstance(wrong, Failed)
    assert (wrong.error.code, wrong.error.reason, wrong.error.param) == ("INVALID_INPUT", "bad_token_id", "tokens[1]")


def test_more_than_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is only counted is read in pieces, and may be longer than one whose tokens are returned."""
    monkeypatch.setattr(tokenizer_requests, "MAX_TOLD_CHARACTERS", 100)
    monkeypatch.setattr(tokenizer_requests, "MAX_CHARACTERS", 200)
    inputs = [Input("river " * 20)]
    assert counted("wordpiece", inputs, RunOptions()) == [22]
    with pytest.raises(InvalidInput) as refused:
        told("wordpiece", ["river " * 20], tokenizing())
    assert (refused.value.reason, refused.value.extras) == ("too_many_tokens", {"limit": 100})
    with pytest.raises(InvalidInput):
        counted("wordpiece", inputs * 2, RunOptions())
    with pytest.raises(InvalidInput):
        answer(ours("wordpiece"), "decode", WorkItemInput([Input(tokens=(5,) * 201)], None, decoding()))
