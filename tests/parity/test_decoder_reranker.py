"""Decoders that answer yes or no against the computation of their model cards, written out here with plain
transformers.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from parity.checkpoints import MAX_TOKENS
from parity.device import SIXTEEN, SIXTEEN_TYPE, require_precision
from parity.score_checkpoints import (
    MXBAI_ENTRY,
    MXBAI_PIECES,
    QWEN3_ENTRY,
    QWEN3_PIECES,
    TAU,
    Asked,
    Scoring,
    ScoringEngine,
    build_reranker,
    copied,
    edit_json,
    ragged_documents,
    score_of,
    sentence,
    tau,
    without,
)
from parity.table import ParityTable, Scores
from safetensors.torch import load_file, save_file
from selection import long_but
from transformers import AutoModelForCausalLM, AutoTokenizer

from sie_contracts.errors import ModelLoadFailed

Kind = Literal["qwen3", "mxbai"]
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# the architecture of each folder, and the changes of its configuration
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3 causal", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2 causal", {"tie_word_embeddings": False}),
    "llama": ("llama causal", {}),
    "gemma3": ("gemma3 causal", {"final_logit_softcapping": 2.0}),
}
PAIRS: list[tuple[str, Kind]] = [
    ("qwen3", "qwen3"),
    ("qwen2", "mxbai"),
    ("qwen2", "qwen3"),
    ("llama", "qwen3"),
    ("gemma3", "mxbai"),
]
ENTRIES: dict[Kind, dict[str, Any]] = {"qwen3": QWEN3_ENTRY, "mxbai": MXBAI_ENTRY}
MAX_DIFFERENCE = 1e-5

Folders = Callable[[str], Path]
Load = Callable[..., Scoring]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("rerankers")

    @functools.cache
    def folder(name: str) -> Path:
        architecture, config = CHECKPOINTS[name]
        return build_reranker(root / name, architecture, **config)

    return folder


@pytest.fixture(scope="module")
def load(engine: ScoringEngine, folders: Folders) -> Load:
    @functools.cache
    def loaded(name: str, kind: Kind, precision: str = "float32", max_tokens: int = MAX_TOKENS) -> Scoring:
        scoring = engine.load(folders(name), "decoder-reranker", precision, max_tokens=max_tokens, **ENTRIES[kind])
        require_precision(scoring.precision, precision)
        return scoring

    return loaded


class Card:
    """The computation of a model card, with transformers. `max_tokens` is its max_length."""

    def __init__(self, folder: Path, kind: Kind, precision: str = "float32", max_tokens: int = MAX_TOKENS) -> None:
        self.kind, self.max_tokens = kind, max_tokens
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=precision, attn_implementation="eager").eval()

    def ids(self, query: str, document: str, instruction: str = "", limit: int = 0) -> list[int]:
        return {"qwen3": self._qwen3, "mxbai": self._mxbai}[self.kind](
            query, document, instruction, limit or self.max_tokens
        )

    def _plain(self, text: str, limit: int | None = None) -> list[int]:
        cut = {} if limit is None else {"truncation": True, "max_length": limit}
        return self.tokenizer(text, add_special_tokens=False, **cut)["input_ids"]

    def _qwen3(self, query: str, document: str, instruction: str, limit: int) -> list[int]:
        """README of Qwen3-Reranker: prefix and suffix are never cut, the three fields are tokenised as one text."""
        prefix = self.tokenizer.encode(QWEN3_PIECES[0], add_special_tokens=False)
        suffix = self.tokenizer.encode(QWEN3_PIECES[-1], add_special_tokens=False)
        text = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        middle = self.tokenizer(text, truncation="longest_first", max_length=limit - len(prefix) - len(suffix))[
            "input_ids"
        ]
        return [*prefix, *middle, *suffix]

    def _mxbai(self, query: str, document: str, instruction: str, limit: int) -> list[int]:
        """The library mxbai-rerank: every piece is tokenised by itself. The query gets at most three quarters of the
        limit, the document the rest.
        """
        prefix, task, suffix = (self._plain(MXBAI_PIECES[index]) for index in (0, 5, 6))
        separator = self._plain("\n")
        question = f"instruction: {instruction}\nquery: {query}" if instruction else f"query: {query}"
        left = self._plain(question, limit * 3 // 4)
        fixed = len(prefix) + len(task) + len(suffix) + 2 * len(separator)
        right = self._plain(f"document: {document}", limit - len(left) - fixed)
        return [*prefix, *left, *separator, *right, *separator, *task, *suffix]

    @torch.no_grad()
    def scores(self, rows: Sequence[list[int]], *, padded: bool = False) -> np.ndarray:
        """Return float32 [rows]. `padded`: as one batch with padding on the left, as on the cards; else one by one."""
        if padded:
            inputs = self.tokenizer.pad({"input_ids": list(rows)}, padding=True, return_tensors="pt")
            last = self.model(**inputs).logits[:, -1]
        else:
            last = torch.cat([self.model(torch.tensor([row])).logits[:, -1] for row in rows])
        if self.kind == "mxbai":
            one_id, zero = (self.tokenizer.convert_tokens_to_ids(token) for token in "10")
            return (last[:, one_id].float() - last[:, zero].float()).numpy()
        yes, no = (self.tokenizer.convert_tokens_to_ids(token) for token in ("yes", "no"))
        both = torch.stack([last[:, no], last[:, yes]], dim=1).float()
        return torch.nn.functional.log_softmax(both, dim=1)[:, 1].exp().numpy()


@pytest.mark.parametrize(("name", "kind"), long_but(PAIRS, [("qwen3", "qwen3")]))
def test_scores_equal_the_model_card(name: str, kind: Kind, load: Load, folders: Folders, table: ParityTable) -> None:
    """Batches of 1 to 64 ragged pairs, against rows one by one and against a batch with padding on the left."""
    scoring, card = load(name, kind), Card(folders(name), kind)
    rng, texts, start = random.Random(1), ragged_documents(72, longest=120), 0
    for count in (1, 2, 5, 64):
        query, documents = sentence(rng, rng.randint(0, 12)), texts[start : start + count]
        start += count
        rows = [card.ids(query, text) for text in documents]
        got = np.array(scoring.scores(query, documents))
        expected = card.scores(rows)
        scale = max(1.0, float(np.abs(expected).max()))
        difference = float(np.abs(got - expected).max()) / scale
        scoring.record(table, f"decoder-reranker {name}, as {kind}", difference)
        assert difference <= MAX_DIFFERENCE
        assert np.abs(got - card.scores(rows, padded=True)).max() <= 10 * MAX_DIFFERENCE * scale


@pytest.mark.parametrize(("name", "kind"), long_but(PAIRS, PAIRS[:2]))
def test_rows_are_those_of_the_model_card(name: str, kind: Kind, load: Load, folders: Folders) -> None:
    """Past the limit the end of the document is cut. The text behind the document stays."""
    scoring, card = load(name, kind), Card(folders(name), kind)
    suffix = scoring.tokenizer.tokenise([QWEN3_PIECES[-1] if kind == "qwen3" else MXBAI_PIECES[-1]], 100, "NONE")[
        0
    ].ids.tolist()
    rng = random.Random(2)
    words = sentence(rng, 700).split()  # each word is one token
    room = MAX_TOKENS - len(card.ids("river", ""))
    texts = [*ragged_documents(12), *(" ".join(words[:count]) for count in range(room - 3, room + 4)), " ".join(words)]
    (rows,) = scoring.rows([Asked(texts, "river")])
    full = []
    for row, text in zip(rows, texts, strict=True):
        assert row.ids.tolist() == card.ids("river", text)
        assert row.ids.tolist()[-len(suffix) :] == suffix
        full.append(len(card.ids("river", text, limit=1 << 20)))
        assert row.truncated == (full[-1] > MAX_TOKENS)
    assert {MAX_TOKENS - 1, MAX_TOKENS, MAX_TOKENS + 1} <= set(full)


def test_a_long_query_keeps_three_quarters_and_leaves_room_for_the_document(load: Load, folders: Folders) -> None:
    query = sentence(random.Random(3), 900)
    card = Card(folders("qwen2"), "mxbai", max_tokens=1024)
    (rows,) = load("qwen2", "mxbai", max_tokens=1024).rows(
        [Asked(["river bank", sentence(random.Random(4), 900)], query)]
    )
    for row, text in zip(rows, ["river bank", sentence(random.Random(4), 900)], strict=True):
        assert row.ids.tolist() == card.ids(query, text)
        assert row.truncated
    scoring = load("qwen3", "qwen3", max_tokens=1024)
    (rows,) = scoring.rows([Asked(["river bank"], query)])
    document = scoring.tokenizer.tokenise(["\n<Document>: river bank"], 100, "NONE")[0].ids.tolist()
    ids = rows[0].ids.tolist()
    assert any(ids[start : start + len(document)] == document for start in range(len(ids)))
    assert rows[0].truncated
    assert len(ids) <= 1024


@pytest.mark.parametrize(("name", "kind"), long_but([("qwen3", "qwen3"), ("qwen2", "mxbai")], [("qwen3", "qwen3")]))
def test_bfloat16_ranks_as_float32(name: str, kind: Kind, load: Load, folders: Folders, table: ParityTable) -> None:
    """Kendall's tau over 50 documents, the mean of three queries."""
    scoring = load(name, kind, SIXTEEN)
    exact_card, card = Card(folders(name), kind), Card(folders(name), kind, SIXTEEN)
    documents = ragged_documents(50, seed=3, longest=60)
    ours, stock = [], []
    for query in ("search engine", "river", "winter music history"):
        rows = [card.ids(query, text) for text in documents]
        exact = exact_card.scores(rows)
        got, library = np.array(scoring.scores(query, documents)), card.scores(rows)
        ours.append(tau(got, exact))
        stock.append(tau(library, exact))
        row, scale = f"decoder-reranker {name}, as {kind}", max(1.0, float(np.abs(exact).max()))
        scoring.record(table, row, np.abs(got - exact).max() / scale, ours[-1])
        table.record(row, "stock", SIXTEEN, Scores(float(np.abs(library - exact).max()) / scale, stock[-1]))
    assert np.mean(ours) >= min(TAU, np.mean(stock) - 0.01)


@pytest.mark.parametrize(("name", "kind"), long_but(PAIRS, PAIRS[:2]))
def test_a_pair_scores_the_same_in_any_company(name: str, kind: Kind, load: Load) -> None:
    scoring = load(name, kind)
    documents = ragged_documents(16, seed=5, longest=100)
    alone = [scoring.scores("river bank", [text])[0] for text in documents]
    mixed = scoring.run(
        [Asked(documents[:5], "another query"), Asked(documents[::-1], "river bank"), Asked(["x"], "third")]
    )
    np.testing.assert_allclose(scoring.scores("river bank", documents), alone, rtol=0, atol=5e-6)
    np.testing.assert_allclose([score_of(outcome) for outcome in mixed[1]][::-1], alone, rtol=0, atol=5e-6)


def test_an_instruction_stands_where_the_template_has_it(load: Load, folders: Folders) -> None:
    """Braces in an instruction, in a query and in a document are text."""
    scoring, card = load("qwen3", "qwen3"), Card(folders("qwen3"), "qwen3")
    odd = ("judge {query} by {document} and {instruction}", "a {document} query", "the {query} {text} {0} {{}}")
    (rows,) = scoring.rows([Asked([odd[2]], odd[1], {"instruction": odd[0]})])
    assert rows[0].ids.tolist() == card.ids(odd[1], odd[2], odd[0])
    got = scoring.scores(odd[1], [odd[2]], instruction=odd[0])
    assert got[0] == pytest.approx(float(card.scores([rows[0].ids.tolist()])[0]), abs=MAX_DIFFERENCE)
    assert got != pytest.approx(scoring.scores(odd[1], [odd[2]]), abs=1e-4)


def test_an_instruction_is_tokenised_with_the_query(engine: ScoringEngine, folders: Folders) -> None:
    """The prompt is that of mxbai-rerank. The instruction counts towards the share of the query."""
    pieces = [piece.replace("query: ", "instruction: {instruction}\nquery: ") for piece in MXBAI_PIECES]
    scoring = engine.load(folders("qwen2"), "decoder-reranker", **{**MXBAI_ENTRY, "pair": pieces})
    card = Card(folders("qwen2"), "mxbai")
    for query in ("river", sentence(random.Random(0), 600)):
        (rows,) = scoring.rows([Asked(["music", "paper " * 900], query, {"instruction": "find ships!"})])
        assert [row.ids.tolist() for row in rows] == [
            card.ids(query, text, "find ships!") for text in ("music", "paper " * 900)
        ]


def test_requests_with_different_instructions_share_a_batch(load: Load) -> None:
    scoring = load("qwen3", "qwen3")
    requests = [
        Asked(ragged_documents(4), "river", {"instruction": text} if text else {})
        for text in ("", "find ships", "find {query}")
    ]
    together = [[score_of(outcome) for outcome in outcomes] for outcomes in scoring.run(requests)]
    for job, scores in zip(requests, together, strict=True):
        np.testing.assert_allclose(scores, scoring.scores("river", job.texts, **job.parameters), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "kind", "piece", "wrong"),
    [
        ("qwen3", "qwen3", 2, "<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "qwen3", 2, ""),
        ("qwen3", "qwen3", 1, "<Instruct>: {instruction}\n\n<Query>: {query}\n\n<Document>: {document}"),
        ("qwen2", "mxbai", 5, "Relevance:"),
        ("qwen2", "mxbai", 6, ""),
    ],
)
def test_another_template_would_show(
    name: str, kind: Kind, piece: int, wrong: str, engine: ScoringEngine, load: Load, folders: Folders
) -> None:
    """A template without its suffix or a block gives plausible scores. They must differ by far more than the bound."""
    entry = ENTRIES[kind]
    pieces = [wrong if index == piece else text for index, text in enumerate(entry["pair"]) if index != piece or wrong]
    variant = engine.load(folders(name), "decoder-reranker", **{**entry, "pair": pieces})
    documents = ragged_documents(20, longest=60)
    difference = np.abs(np.array(variant.scores("river", documents)) - load(name, kind).scores("river", documents))
    assert difference.mean() > 100 * MAX_DIFFERENCE


def test_truncate_none_refuses_and_counts(load: Load, folders: Folders) -> None:
    scoring, card = load("qwen3", "qwen3"), Card(folders("qwen3"), "qwen3", max_tokens=1 << 20)
    long = sentence(random.Random(0), 900)
    (rows,) = scoring.rows([Asked(["river", long], "search", {"truncate": "NONE"})])
    assert [row.truncated for row in rows] == [False, True]
    assert [row.full for row in rows] == [len(card.ids("search", text)) for text in ("river", long)]


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_the_output_layer_is_kept_in_float32_and_the_input_layer_is_not(name: str, load: Load) -> None:
    """In the checkpoint qwen3 both layers are one tensor."""
    weights = load(name, "qwen3", SIXTEEN).resident.weights
    head, backbone = weights.heads["answer"]._head._model, weights.backbone._model
    assert [tuple(parameter.shape) for parameter in head.parameters()] == [(2, backbone.config.hidden_size)]
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert backbone.get_input_embeddings().weight.dtype == SIXTEEN_TYPE


# refusals


def test_a_missing_output_layer_is_refused(engine: ScoringEngine, folders: Folders, tmp_path: Path) -> None:
    folder = without(folders("qwen2"), "lm_head.weight", tmp_path)
    with pytest.raises(ModelLoadFailed, match=r"lm_head\.weight"):
        engine.load(folder, "decoder-reranker", **QWEN3_ENTRY)


def test_a_sequence_classifier_is_refused(engine: ScoringEngine, folders: Folders, tmp_path: Path) -> None:
    """A decoder reranker needs the head of a language model. A cross-encoder needs a classification head."""
    folder = copied(folders("qwen2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file({**tensors, "score.weight": torch.randn(1, 64)}, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", architectures=["Qwen2ForSequenceClassification"])
    with pytest.raises(ModelLoadFailed):
        engine.load(folder, "decoder-reranker", **QWEN3_ENTRY)
    with pytest.raises(ModelLoadFailed, match=r"missing|unexpected"):
        engine.load(folders("qwen2"), "cross-encoder")


@pytest.mark.parametrize(
    "entry",
    [
        {**QWEN3_ENTRY, "head": {"yes_token": "certainly yes", "no_token": "no"}},
        {**QWEN3_ENTRY, "head": {}},
        {"head": QWEN3_ENTRY["head"]},
    ],
)
def test_an_entry_without_answers_or_template_is_refused(
    entry: dict[str, Any], engine: ScoringEngine, folders: Folders
) -> None:
    with pytest.raises(ModelLoadFailed, match=r"answer|yes_token"):
        engine.load(folders("qwen3"), "decoder-reranker", **entry)
