"""Bounds of a work item: rows, text and tokens are bounded before they are created, and only their own item is
refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_adapter import ids_of, vector_of
from inprocess import InProcess, until
from parity import tokenizer_recipes as recipes

from sie_contracts.wire.ipc import MAX_REQUEST_BYTES, Layout, Rows
from sie_contracts.wire.messages import Input, RunOptions
from sie_sidecar.prepare import layouts, rows
from sie_sidecar.prepare.layouts import make
from sie_sidecar.prepare.rows import INLINE_CHARACTERS, ModelTokenizer, WorkItemInput, WorkRows, effort_of, reached

TOKENIZER = ModelTokenizer(recipes.BERT.train().to_str().encode(), 64)
LABELS = tuple(f"label {number}" for number in range(1000))
BESIDE_QUERY = (("find ",), ("", "query", " in ", "document", " ?"))


def work(*texts: str, query: str | None = None, **options: Any) -> WorkItemInput:
    return WorkItemInput(
        [Input(text) for text in texts], None if query is None else Input(query), RunOptions(**options)
    )


def ids(work_rows: WorkRows) -> list[list[int]]:
    return [row.ids.tolist() for row in work_rows.rows]


@pytest.mark.parametrize(
    ("layout", "excess", "named"),
    [
        ("hypotheses", work(*["a"] * 66, labels=LABELS), "66 items with 1000 labels"),
        ("hypotheses", work("a", labels=LABELS, parameters={"hypothesis_template": "x" * 34_000 + "{}"}), "characters"),
        ("text", work(*["a"] * 2048, prefix="p" * 20_000), "characters"),
        ("sides", work(*["a"] * 2048, query="q", suffix="s" * 20_000), "characters"),
        ("pieces", work(*["a"] * 2048, query="q" * 20_000, pieces=BESIDE_QUERY), "characters"),
    ],
)
def test_what_memory_could_not_hold_is_refused_and_its_mates_are_as_alone(
    layout: Layout, excess: WorkItemInput, named: str
) -> None:
    """The excess is a product of what a client sends: each factor alone fits a message."""
    mate = work("paper river", "music", query="who", labels=("one", "two"), pieces=BESIDE_QUERY)
    before, refused, after = make(TOKENIZER, Rows(layout), [mate, excess, mate])
    (alone,) = make(TOKENIZER, Rows(layout), [mate])
    assert ids(before) == ids(after) == ids(alone) != []
    assert refused.rows == []
    assert refused.error is not None
    assert (refused.error.code, refused.error.reason) == ("INVALID_INPUT", "too_many_tokens")
    assert named in refused.error.message
    assert not re.search("pp|qq|ss|xx|label 1", refused.error.message)


def test_labels_times_long_texts_are_bounded_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts exactly the tokens that the rows have after truncation."""
    item = work("paper river " * 60, "music", labels=LABELS[:20])
    (work_rows,) = make(TOKENIZER, Rows("hypotheses"), [item])
    tokens = sum(len(row.ids) for row in work_rows.rows)
    monkeypatch.setattr(layouts, "MAX_TOKENS", tokens)
    assert ids(make(TOKENIZER, Rows("hypotheses"), [item])[0]) == ids(work_rows)
    monkeypatch.setattr(layouts, "MAX_TOKENS", tokens - 1)
    (refused,) = make(TOKENIZER, Rows("hypotheses"), [item])
    assert refused.error is not None
    assert str(tokens) in refused.error.message


def test_a_model_that_reads_a_text_for_each_question_is_bounded_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Rows("raw", questions=5)
    together = work("paper river", "music " * 100, labels=LABELS[:20])
    apart = work("paper river", "music " * 100, labels=LABELS[:20], parameters={"multi_label": True})
    part = {"type": "decision", "labels": LABELS[:7], "is_many": True}
    decided = work("paper river", parameters={"parts": [part, {"type": "decision", "labels": ("yes",)}]})
    (joint_rows,), (many,), (parts,) = (make(TOKENIZER, layout, [item]) for item in (together, apart, decided))
    own = [len(TOKENIZER.tokenise([f" {label}"], 64, "END")[0].ids) for label in LABELS[:20]]
    words = [row.full for row in many.rows]
    assert [row.cost for row in many.rows] == [
        max(count, sum(min(TOKENIZER.max_tokens, count + 5 + size) for size in own)) for count in words
    ]
    assert joint_rows.rows[0].cost == min(TOKENIZER.max_tokens, words[0] + 5 + sum(own))
    assert parts.rows[0].cost > 8 * (words[0] + 5)
    assert make(TOKENIZER, Rows("raw"), [apart])[0].rows[0].cost == words[0]
    monkeypatch.setattr(layouts, "MAX_TOKENS", sum(row.cost for row in many.rows))
    assert make(TOKENIZER, layout, [apart])[0].error is None
    monkeypatch.setattr(layouts, "MAX_TOKENS", layouts.MAX_TOKENS - 1)
    refused, mate = make(TOKENIZER, layout, [apart, together])
    assert refused.error is not None
    assert refused.error.reason == "too_many_tokens"
    assert mate.error is None
    (pairs,) = make(TOKENIZER, layout, [work(*["a"] * 66, labels=LABELS, parameters={"multi_label": True})])
    assert pairs.error is not None


def test_the_bounds_fit_the_frame_that_an_adapter_reads() -> None:
    """The frame holds the ids, types and lengths of the largest work item."""
    assert 5 * layouts.MAX_TOKENS + 4 * rows.MAX_ROWS < MAX_REQUEST_BYTES


def test_no_labels_are_an_error_of_their_own_item() -> None:
    without, labelled = make(TOKENIZER, Rows("hypotheses"), [work("a"), work("a", labels=("b",))])
    assert without.error is not None
    assert without.error.reason == "labels_required"
    assert len(labelled.rows) == 1


@pytest.mark.parametrize(
    ("layout", "item"),
    [
        ("text", work("a", prefix="p" * INLINE_CHARACTERS)),
        ("text", work(*["a"] * 256)),
        ("hypotheses", work(*"abcd", labels=LABELS[:50])),
        ("pieces", work(*"abcdefgh", query="q" * 520, pieces=BESIDE_QUERY)),
    ],
)
def test_short_texts_with_much_around_them_are_not_tokenised_on_the_loop(layout: Layout, item: WorkItemInput) -> None:
    assert effort_of(Rows(layout), item) > INLINE_CHARACTERS
    assert effort_of(Rows("text"), work("p" * 900)) <= INLINE_CHARACTERS


@pytest.mark.parametrize("layout", ["raw", "spans", "passages"])
def test_text_that_travels_beside_few_tokens_has_its_cost(layout: Layout) -> None:
    """White space has no tokens, but it takes room in a frame."""
    blank = " " * (1 << 17)
    (work_rows,) = make(TOKENIZER, Rows(layout), [work(f"a{blank}b")])
    assert work_rows.rows[0].cost == (1 << 17) // rows.COST_CHARACTERS
    (short,) = make(TOKENIZER, Rows(layout), [work("paper river")])
    assert short.rows[0].cost == len(short.rows[0].ids)


@pytest.mark.parametrize("truncate", ["END", "START", "NONE"])
def test_only_what_the_tokens_reach_of_a_cut_text_is_sent(truncate: str) -> None:
    texts = ["paper river music " * 500, "paper river"]
    (work_rows,) = make(TOKENIZER, Rows("spans"), [work(*texts, truncate=truncate)])
    sent = reached(texts, work_rows.rows)
    places = work_rows.rows[0].offsets
    assert places is not None
    inside = places[places[:, 0] >= 0]
    assert [sent[0][start:end] for start, end in inside] == [texts[0][start:end] for start, end in inside]
    assert all(sent[0][start:end] for start, end in inside)
    assert len(sent[0]) == inside[-1, 1]
    assert (len(sent[0]) < 1000) == (truncate != "START")
    assert sent[1] == texts[1]


async def test_a_refused_work_item_is_answered_and_the_worker_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_CHARACTERS", 100)
    async with InProcess(tmp_path) as cluster:
        own = {"SIE_HEALTH_PUBLISH_INTERVAL_MS": "100", "SIE_HEARTBEAT_TIMEOUT_MS": "5000"}
        gateway, sidecar = await cluster.gateway(), await cluster.sidecar(**own)
        refused = await gateway.encode("canary " * 20)
        assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "too_many_tokens")
        assert "canary" not in refused.text
        right(await gateway.encode("short"), "short")
        await let_go(cluster, sidecar.worker)


async def let_go(cluster: InProcess, worker: str) -> None:
    """Wait for a further heartbeat that says that the worker holds nothing."""
    beat_count = len(cluster.beats)
    await until(
        lambda: any(beat.worker == worker and not beat.queue_depth for beat in cluster.beats[beat_count:]),
        "nothing held",
    )


def right(answer: httpx.Response, text: str) -> None:
    assert answer.status_code == 200, answer.text
    np.testing.assert_allclose(answer.json()["items"][0]["dense"]["values"], vector_of(ids_of(text)), atol=1e-6)
