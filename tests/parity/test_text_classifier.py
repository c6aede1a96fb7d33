"""Classification by the model's own classes through the adapter against transformers' pipeline on the same folder."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity.checkpoints import ARCHITECTURES, WIDTH, build
from parity.score_checkpoints import Asked, Scoring, ScoringEngine, build_head, ragged_documents
from parity.table import ParityTable
from selection import long_but
from transformers import AutoModelForSequenceClassification, pipeline

from sie_contracts.errors import InvalidInput
from sie_contracts.wire.messages import Failed, Input, Ok

FAMILY = "text-classifier"
NAMES = ("anger", "joy", "fear", "calm")
KINDS = ("bert", "roberta", "xlm-roberta", "distilbert", "electra", "modernbert", "deberta-v2", "qwen2 causal")
PAIRED = ("bert", "roberta", "modernbert", "deberta-v2")
MAX_DIFFERENCE = 1e-5

Folders = Callable[..., Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("text-classifiers")

    @functools.cache
    def folder(name: str, labels: tuple[str, ...] = NAMES, problem_type: str | None = None) -> Path:
        place = root / f"{name.replace(' ', '-')}-{len(labels)}-{problem_type}"
        return build_head(place, name, AutoModelForSequenceClassification, labels, problem_type=problem_type)

    return folder


@pytest.fixture(scope="module")
def bert(engine: ScoringEngine, folders: Folders) -> Scoring:
    return engine.load(folders("bert"), FAMILY)


def oracle(folder: Path) -> Callable[..., list[list[dict[str, Any]]]]:
    """Return a pipeline that gives all classes, best first. It reads one text at a time, so that no padding enters."""
    return functools.partial(
        pipeline("text-classification", model=str(folder), device="cpu"), top_k=None, truncation=True
    )


def shares(answer: dict[str, Any]) -> dict[str, float]:
    return {entry["label"]: entry["score"] for entry in answer["classifications"]}


def check(answers: list[dict[str, Any]], expected: list[list[dict[str, Any]]]) -> float:
    """Check the score of every class. Return the largest difference."""
    worst = 0.0
    for ours, theirs in zip(answers, expected, strict=True):
        exact = {entry["label"]: entry["score"] for entry in theirs}
        assert shares(ours) == pytest.approx(exact, abs=MAX_DIFFERENCE, rel=MAX_DIFFERENCE)
        scores = list(shares(ours).values())
        assert scores == sorted(scores, reverse=True)
        worst = max(worst, *(abs(share - exact[label]) for label, share in shares(ours).items()))
    return worst


def test_a_decoder_without_a_pad_token_has_the_scores_of_the_pipeline(engine: ScoringEngine, tmp_path: Path) -> None:
    """GPT-2 has a head of its own, which refuses a batch of several texts without a pad token."""
    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 600}
    architecture = replace(ARCHITECTURES["roberta"], model_type="gpt2", config=sizes)
    head = AutoModelForSequenceClassification
    folder = build(tmp_path, architecture, head=head, num_labels=len(NAMES), pad_token_id=None)
    texts = ragged_documents(8, longest=60)
    check(engine.load(folder, FAMILY).found(texts), oracle(folder)(texts))


def test_a_head_reads_states_that_the_decoder_projects_to_another_width(engine: ScoringEngine, tmp_path: Path) -> None:
    sizes = {"hidden_size": WIDTH, "word_embed_proj_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"ffn_dim": 96}
    architecture = replace(ARCHITECTURES["roberta"], model_type="opt", config={**sizes, "init_std": 0.15})
    folder = build(tmp_path, architecture, head=AutoModelForSequenceClassification, num_labels=len(NAMES))
    texts = ragged_documents(8, longest=60)
    check(engine.load(folder, FAMILY).found(texts), oracle(folder)(texts))


@pytest.mark.parametrize("name", long_but(KINDS, ["bert", "deberta-v2", "qwen2 causal"]))
def test_every_class_has_the_score_of_the_pipeline(
    name: str, engine: ScoringEngine, folders: Folders, table: ParityTable
) -> None:
    """One batch has ragged texts, one of them longer than the model reads. Scores without the activation are compared
    too.
    """
    folder = folders(name)
    scoring, reference = engine.load(folder, FAMILY), oracle(folder)
    texts = [text for text in ragged_documents(16, longest=120) if text or name != "qwen2 causal"]
    texts.append("river mountain " * 400)
    scoring.record(table, f"text-classifier {name}", check(scoring.found(texts), reference(texts)))
    check(scoring.found(texts, raw_scores=True), reference(texts, function_to_apply="none"))


def test_a_pooler_that_is_only_a_linear_layer_reads_the_first_token(engine: ScoringEngine, tmp_path: Path) -> None:
    """Only ALBERT has such a pooler: the activation after it is a module of its own."""
    albert = replace(ARCHITECTURES["electra"], model_type="albert")
    folder = build(
        tmp_path / "albert", albert, head=AutoModelForSequenceClassification, id2label=dict(enumerate(NAMES))
    )
    texts = ragged_documents(6, longest=60)
    check(engine.load(folder, FAMILY).found(texts), oracle(folder)(texts))


@pytest.mark.parametrize("name", PAIRED)
def test_a_pair_is_read_as_the_pipeline_reads_it(name: str, engine: ScoringEngine, folders: Folders) -> None:
    """The batch has texts without a pair too."""
    folder = folders(name)
    scoring, reference = engine.load(folder, FAMILY), oracle(folder)
    lefts = ragged_documents(10, longest=60)
    # transformers takes an empty second text for none
    rights = [text or "winter" for text in ragged_documents(10, seed=1, longest=60)]
    pairs = [Input(left, pair=right) for left, right in zip(lefts, rights, strict=True)]
    answers = scoring.found([*pairs, *lefts])
    check(
        answers[: len(pairs)],
        reference([{"text": left, "text_pair": right} for left, right in zip(lefts, rights, strict=True)]),
    )
    check(answers[len(pairs) :], reference(lefts))


@pytest.mark.parametrize(
    ("labels", "problem_type"),
    long_but(
        [
            (("good",), None),
            (("good", "bad"), None),
            (NAMES, "multi_label_classification"),
            (("stars",), "regression"),
            (NAMES, "regression"),
        ],
        [(("good", "bad"), None), (NAMES, "multi_label_classification")],
    ),
)
def test_the_activation_is_the_one_that_the_model_names(
    labels: tuple[str, ...], problem_type: str | None, engine: ScoringEngine, folders: Folders
) -> None:
    folder = folders("bert", labels, problem_type)
    texts = ragged_documents(6)
    check(engine.load(folder, FAMILY).found(texts), oracle(folder)(texts))
    check(
        engine.load(folder, FAMILY, head={"activation": "identity"}).found(texts),
        oracle(folder)(texts, function_to_apply="none"),
    )


def test_a_text_has_the_same_scores_in_any_company(bert: Scoring) -> None:
    texts = ragged_documents(12, longest=100)
    for text, answer in zip(texts, bert.found(texts), strict=True):
        (alone,) = bert.found([text])
        assert shares(answer) == pytest.approx(shares(alone), abs=2e-6)


def test_a_request_chooses_classes_and_how_many_without_its_mates(bert: Scoring) -> None:
    texts = ragged_documents(5)
    everything = bert.found(texts)
    least = float(np.median([share for answer in everything for share in shares(answer).values()]))
    requests = [
        Asked(texts, None, {"labels": ["joy", "calm"]}),
        Asked(texts, None, {"threshold": least}),
        Asked(texts[:1], None, {}),
        Asked(texts[:2], None, {"labels": ["joy", "sorrow"]}),
    ]
    chosen, above, plain, unknown = bert.run(requests)
    for all_classes, few, best in zip(everything, chosen, above, strict=True):
        assert isinstance(few, Ok)
        assert isinstance(best, Ok)
        expected = {label: pytest.approx(share, abs=2e-6) for label, share in shares(all_classes).items()}
        assert shares(few.data or {}) == {label: expected[label] for label in expected if label in ("joy", "calm")}
        assert shares(best.data or {}) == {
            label: expected[label] for label, share in shares(all_classes).items() if share >= least
        }
    assert isinstance(plain[0], Ok)
    for outcome in unknown:
        assert isinstance(outcome, Failed)
        assert (outcome.error.code, outcome.error.param) == ("INVALID_INPUT", "labels")
        assert "anger, joy, fear, calm" in outcome.error.message
        assert "sorrow" not in outcome.error.message


def test_an_option_of_another_family_is_refused(bert: Scoring) -> None:
    with pytest.raises(InvalidInput, match="multi_label"):
        bert.found(["a"], multi_label=True)
    with pytest.raises(InvalidInput, match="raw_scores"):
        bert.found(["a"], raw_scores="yes")
