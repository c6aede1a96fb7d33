"""Zero-shot classification by inference through the adapter against transformers' pipeline on the same folder."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity.checkpoints import MAX_TOKENS
from parity.score_checkpoints import (
    Asked,
    Scoring,
    ScoringEngine,
    build_head,
    copied,
    ragged_documents,
    sentence,
    without,
)
from parity.table import ParityTable
from safetensors.torch import load_file, save_file
from selection import long_but
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from sie_contracts.errors import InvalidInput, ModelLoadFailed
from sie_contracts.wire.messages import Ok

FAMILY = "zero-shot-classifier"
TEMPLATE = "This example is {}."  # the default of the pipeline
LABELS = ["music", "Winter Garden", "physics", "the harbour of a planet"]
# the names of classes in checkpoints, in orders that the pipeline reads right: the opposite of entailment is first, or
# last if entailment is first
NAMES: dict[str, tuple[str, ...]] = {
    "three": ("contradiction", "entailment", "neutral"),
    "mnli": ("CONTRADICTION", "NEUTRAL", "ENTAILMENT"),
    "reversed": ("entailment", "neutral", "contradiction"),
    "two": ("entailment", "not_entailment"),
}
KINDS = [
    *(("deberta-v2", "three"), ("deberta-v2", "two"), ("bert", "reversed")),
    *(("roberta", "mnli"), ("xlm-roberta", "three"), ("modernbert", "two")),
]
MAX_DIFFERENCE = 1e-5

Folders = Callable[[str, tuple[str, ...]], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("zero-shot")

    @functools.cache
    def folder(name: str, labels: tuple[str, ...]) -> Path:
        return build_head(root / f"{name}-{'-'.join(labels)}", name, AutoModelForSequenceClassification, labels)

    return folder


def oracle(folder: Path) -> Any:
    return pipeline("zero-shot-classification", model=str(folder), device="cpu")


def shares(answer: dict[str, Any]) -> dict[str, float]:
    return {entry["label"]: entry["score"] for entry in answer["classifications"]}


@pytest.mark.parametrize(
    ("name", "names"),
    long_but(KINDS, [("deberta-v2", "three"), ("bert", "reversed")]),
)
def test_every_label_has_the_share_of_the_pipeline(
    name: str, names: str, engine: ScoringEngine, folders: Folders, table: ParityTable
) -> None:
    """The request chooses one of several labels, several labels, or has one label. The best label is first."""
    folder = folders(name, NAMES[names])
    scoring, reference = engine.load(folder, FAMILY), oracle(folder)
    texts = [text for text in ragged_documents(10, longest=80) if text]  # the pipeline refuses an empty text
    for labels, multi_label in ((LABELS, False), (LABELS, True), (LABELS[:1], False), (LABELS[:1], True)):
        answers = scoring.found(texts, labels=labels, multi_label=multi_label)
        expected = reference(texts, candidate_labels=labels, multi_label=multi_label)
        for ours, theirs in zip(answers, expected, strict=True):
            exact = dict(zip(theirs["labels"], theirs["scores"], strict=True))
            assert shares(ours) == pytest.approx(exact, abs=MAX_DIFFERENCE)
            difference = max(abs(share - exact[label]) for label, share in shares(ours).items())
            scoring.record(table, f"zero-shot {name}, {len(NAMES[names])} classes", difference)
            scores = list(shares(ours).values())
            assert scores == sorted(scores, reverse=True)
            assert math.isclose(sum(scores), 1, abs_tol=1e-6) or multi_label or len(labels) == 1


def test_one_label_is_not_the_sigmoid_of_its_logit(engine: ScoringEngine, folders: Folders) -> None:
    folder = folders("bert", NAMES["two"])
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    inputs = AutoTokenizer.from_pretrained(folder)("river bank", TEMPLATE.format("music"), return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0]
    (answer,) = engine.load(folder, FAMILY).found(["river bank"], labels=["music"])
    assert shares(answer)["music"] == pytest.approx(float(torch.softmax(logits, 0)[0]), abs=MAX_DIFFERENCE)
    assert abs(shares(answer)["music"] - float(torch.sigmoid(logits[0]))) > 1e-3


@pytest.mark.parametrize(
    "names", [("neutral", "contradiction", "entailment"), ("Entailment", "contradiction", "neutral")]
)
def test_labels_are_found_by_name_wherever_they_stand(
    names: tuple[str, ...], engine: ScoringEngine, folders: Folders, tmp_path: Path
) -> None:
    """In these orders the pipeline takes neutral for the opposite of entailment, so the oracle has the same weights in
    an order that the pipeline reads right.
    """
    usual = ("contradiction", "entailment", "neutral")
    folder, reference = folders("bert", names), copied(folders("bert", usual), tmp_path / "reference")
    order = [[name.lower() for name in names].index(name) for name in usual]
    tensors = load_file(folder / "model.safetensors")
    for key in ("classifier.weight", "classifier.bias"):
        tensors[key] = tensors[key][order]
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    texts = ["search engine", "a river in winter"]
    for multi_label in (False, True):
        answers = engine.load(folder, FAMILY).found(texts, labels=LABELS, multi_label=multi_label)
        expected = oracle(reference)(
            texts, candidate_labels=LABELS, hypothesis_template=TEMPLATE, multi_label=multi_label
        )
        for ours, theirs in zip(answers, expected, strict=True):
            assert shares(ours) == pytest.approx(
                dict(zip(theirs["labels"], theirs["scores"], strict=True)), abs=MAX_DIFFERENCE
            )


@pytest.mark.parametrize(
    "labels", [("LABEL_0", "LABEL_1", "LABEL_2"), ("entailment", "neutral"), ("positive", "negative")]
)
def test_a_model_that_does_not_name_its_classes_is_refused(
    labels: tuple[str, ...], engine: ScoringEngine, folders: Folders
) -> None:
    with pytest.raises(ModelLoadFailed, match="entailment"):
        engine.load(folders("bert", labels), FAMILY)


def test_a_missing_head_is_refused(engine: ScoringEngine, folders: Folders, tmp_path: Path) -> None:
    without(folders("deberta-v2", NAMES["two"]), "classifier.weight", tmp_path)
    with pytest.raises(ModelLoadFailed, match=r"classifier\.weight"):
        engine.load(tmp_path, FAMILY)


@pytest.fixture(scope="module")
def bert(engine: ScoringEngine, folders: Folders) -> Scoring:
    return engine.load(folders("bert", NAMES["reversed"]), FAMILY)


def test_a_template_and_odd_labels_are_text(bert: Scoring, folders: Folders) -> None:
    labels = ["a {label} of braces", "{}", "東京", "music", "music "]
    template = "About {}, in winter?"
    (answer,) = bert.found(["search engine"], labels=labels, hypothesis_template=template)
    expected = oracle(folders("bert", NAMES["reversed"]))(
        "search engine", candidate_labels=labels, hypothesis_template=template
    )
    assert shares(answer) == pytest.approx(
        dict(zip(expected["labels"], expected["scores"], strict=True)), abs=MAX_DIFFERENCE
    )
    with pytest.raises(InvalidInput, match="hypothesis_template"):
        bert.found(["search"], labels=labels, hypothesis_template="no place")


def test_requests_with_their_own_labels_share_a_batch(bert: Scoring) -> None:
    requests = [
        Asked(["search engine", "", "a river"], None, {"labels": LABELS}),
        Asked(["music"], None, {"labels": ["physics"], "multi_label": True}),
        Asked(ragged_documents(6), None, {"labels": LABELS[::-1], "hypothesis_template": "{}"}),
    ]
    for call, outcomes in zip(requests, bert.run(requests), strict=True):
        for text, outcome in zip(call.texts, outcomes, strict=True):
            assert isinstance(outcome, Ok)
            assert outcome.data is not None
            (alone,) = bert.found([text], **call.parameters)
            assert shares(outcome.data) == pytest.approx(shares(alone), abs=2e-6)
            assert set(shares(alone)) == set(call.parameters["labels"])


def test_a_threshold_drops_what_is_below_it(bert: Scoring) -> None:
    (everything,) = bert.found(["search engine"], labels=LABELS)
    least = sorted(shares(everything).values())[1]
    (answer,) = bert.found(["search engine"], labels=LABELS, threshold=least)
    assert shares(answer) == {label: score for label, score in shares(everything).items() if score >= least}
    assert len(shares(answer)) == 3


def test_the_text_is_cut_and_the_hypothesis_is_not(bert: Scoring, folders: Folders) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folders("bert", NAMES["reversed"]))
    long = sentence(random.Random(0), 800)
    (rows,) = bert.rows([Asked([long, "short"], None, {"labels": LABELS})])
    for row, (text, label) in zip(rows, [(text, label) for text in (long, "short") for label in LABELS], strict=True):
        expected = tokenizer(text, TEMPLATE.format(label), truncation="only_first", max_length=MAX_TOKENS)
        assert row.ids.tolist() == expected["input_ids"]
        assert row.types is not None
        assert row.types.tolist() == expected["token_type_ids"]
        assert row.truncated == (text == long)
    answer = bert.found([long], labels=LABELS)[0]
    expected = oracle(folders("bert", NAMES["reversed"]))(long, candidate_labels=LABELS, hypothesis_template=TEMPLATE)
    np.testing.assert_allclose(list(shares(answer).values()), expected["scores"], rtol=0, atol=MAX_DIFFERENCE)


def test_a_text_has_the_same_shares_in_any_company(bert: Scoring) -> None:
    texts = ragged_documents(12, longest=100)
    together = bert.found(texts, labels=LABELS)
    for text, answer in zip(texts, together, strict=True):
        assert shares(answer) == pytest.approx(shares(bert.found([text], labels=LABELS)[0]), abs=2e-6)


SCHEMA = {
    "type": "object",
    "properties": {
        "topic": {"enum": LABELS},
        "places": {"type": "array", "items": {"enum": ["river", "harbour"]}},
        "is_old": {"type": "boolean", "description": "something old"},
    },
}


def test_each_decision_of_a_schema_has_the_shares_of_the_pipeline(bert: Scoring, folders: Folders) -> None:
    """The request has labels too, and the batch has other requests."""
    reference = oracle(folders("bert", NAMES["reversed"]))
    texts = ["search engine", "a river", "the old harbour of a planet"]
    batch = [
        Asked(texts, None, {"labels": ["music", "physics"], "output_schema": SCHEMA}),
        Asked(["queue"], None, {"labels": LABELS}),
        Asked(["river"], None, {"label_groups": {"topic": LABELS}}),
    ]
    first, _, grouped = bert.run(batch)
    cases = [
        ("", ["music", "physics"], False),
        ("topic.", LABELS, False),
        ("places.", ["river", "harbour"], True),
        ("is_old.", ["something old"], True),
    ]
    for text, outcome in zip(texts, first, strict=True):
        assert isinstance(outcome, Ok)
        assert outcome.data is not None
        own, data = shares(outcome.data), outcome.data["data"]
        for prefix, labels, multi_label in cases:
            theirs = reference(text, candidate_labels=labels, hypothesis_template=TEMPLATE, multi_label=multi_label)
            exact = dict(zip(theirs["labels"], theirs["scores"], strict=True))
            if prefix == "is_old.":
                assert data["is_old"] is (exact["something old"] >= 0.5)
                exact = {"true": exact["something old"], "false": 1 - exact["something old"]}
            elif prefix == "places.":
                assert data["places"] == [label for label in labels if exact[label] >= 0.5]
            elif prefix:
                assert data["topic"] == theirs["labels"][0]
            assert {label: own[prefix + label] for label in exact} == pytest.approx(exact, abs=MAX_DIFFERENCE)
        assert len(own) == 10
    [outcome] = grouped
    assert isinstance(outcome, Ok)
    assert outcome.data is not None
    theirs = reference("river", candidate_labels=LABELS, hypothesis_template=TEMPLATE)
    assert outcome.data["data"] == {"topic": theirs["labels"][0]}
