"""Rows of every layout against those of the fast tokenizers of transformers, of each kind and with the templates of
their models.
"""

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

from sie_contracts.wire.ipc import Layout, Rows, Side
from sie_contracts.wire.messages import Input, RunOptions, Truncate
from sie_sidecar.prepare.layouts import NOWHERE, QUERY_SHARE, make
from sie_sidecar.prepare.long_text import HARD_TEXT
from sie_sidecar.prepare.rows import BatchPart, ModelTokenizer, TokenRow, WorkItemInput, texts_of, to_batch

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


def test_a_template_is_whole_even_where_it_passes_the_limit() -> None:
    """No answer could be read from a part of it. The adapter refuses rows above the model's own limit."""
    pieces = (("search index query vector",), ("document", "document", ""), ("river mountain engine",))
    (row,) = rows_of("wordpiece", "pieces", work(["paper " * 9], "", pieces=pieces, max_tokens=2))
    assert row.ids.tolist() == plain("wordpiece", "search index query vector river mountain engine")
    assert row.truncated


def test_a_field_that_a_client_writes_is_text() -> None:
    pieces = (("", "query", " | ", "document", ""),)
    (row,) = rows_of("byte-level", "pieces", work(["{query} {document}"], "{document}", pieces=pieces))
    assert row.ids.tolist() == plain("byte-level", "{document} | {query} {document}")


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


def test_a_side_without_special_tokens_has_the_text_alone() -> None:
    layout = Rows("text", query=Side(special=False))
    (row,) = rows_of("wordpiece", layout, work(["river mountain"], is_query=True))
    assert row.ids.tolist() == plain("wordpiece", "river mountain")
    (document,) = rows_of("wordpiece", layout, work(["river mountain"]))
    assert document.ids.tolist() == library("wordpiece")("river mountain")["input_ids"]


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
