"""Token classification through the adapter against transformers' pipeline with aggregation "simple" on
the same folder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.score_checkpoints import (
    Asked,
    Scoring,
    ScoringEngine,
    build_head,
    copied,
    edit_json,
    ragged_documents,
    without,
)
from parity.table import ParityTable
from safetensors.torch import load_file, save_file
from selection import long_but
from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

from sie_contracts.errors import ModelLoadFailed
from sie_contracts.wire.messages import Ok

FAMILY = "token-classifier"
BIO = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
PLAIN = ("O", "person", "place")
LABELS = {"bio": BIO, "plain": PLAIN}
NAMES = ["bert", "xlm-roberta", "modernbert", "deberta-v2", "roberta", "distilbert", "electra"]
MAX_DIFFERENCE = 1e-5
ODD = [
    "Anna met 👩‍💻 in Zürich 😀😀, then went home",
    "e\u0301te\u0301 na\u0308ive cafe\u0301 in winter",
    "שלום עולם, مرحبا بالعالم and music",
    "  spaces   and\ttabs\nlines ",
    "東京 and 中文字 in the garden",
    "",
    "😀",
    "[SEP] search [CLS]",
]

Folders = Callable[..., Path]
Entities = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("token-classifiers")

    @functools.cache
    def folder(name: str, labels: tuple[str, ...] = BIO) -> Path:
        return balanced(build_head(root / f"{name}-{'-'.join(labels)}", name, AutoModelForTokenClassification, labels))

    return folder


def balanced(folder: Path) -> Path:
    """Scale a random classifier, which has a favourite label, so that each label has a share of the tokens."""
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = torch.cat(
            [
                model(**tokenizer(text, return_tensors="pt")).logits[0]
                for text in [*ODD, *ragged_documents(24, longest=80)]
            ]
        )
        spread = 1.5 / logits.std(0)
        model.classifier.weight.mul_(spread[:, None])
        model.classifier.bias.sub_(logits.mean(0)).mul_(spread)
    model.save_pretrained(folder)
    return folder


def expected_entities(folder: Path, texts: list[str]) -> list[Entities]:
    """Return the entities of each text, with the text that their offsets cover. The pipeline's own `word` is decoded
    from the ids.
    """
    reference = pipeline("token-classification", model=str(folder), aggregation_strategy="simple", device="cpu")
    return [
        [
            {
                "text": text[entity["start"] : entity["end"]],
                "label": entity["entity_group"],
                "score": float(entity["score"]),
                "start": entity["start"],
                "end": entity["end"],
            }
            for entity in reference(text)
        ]
        for text in texts
    ]


def assert_equal(answers: list[Entities], expected: list[Entities]) -> None:
    for ours, theirs in zip(answers, expected, strict=True):
        assert [{**entity, "score": 0} for entity in ours] == [{**entity, "score": 0} for entity in theirs]
        assert [entity["score"] for entity in ours] == pytest.approx(
            [entity["score"] for entity in theirs], abs=MAX_DIFFERENCE
        )


def entities(scoring: Scoring, texts: list[str], **parameters: Any) -> list[Entities]:
    return [answer["entities"] for answer in scoring.found(texts, **parameters)]


@pytest.mark.parametrize(
    ("name", "labels"),
    long_but(
        [(name, labels) for name in NAMES for labels in LABELS],
        [("bert", "plain"), *((name, "bio") for name in ("bert", "modernbert", "deberta-v2"))],
    ),
)
def test_entities_equal_the_pipeline(
    name: str, labels: str, engine: ScoringEngine, folders: Folders, table: ParityTable
) -> None:
    """Labels, scores and offsets in code points are equal. Texts have characters of several bytes, and graphemes of
    several characters.
    """
    folder = folders(name, LABELS[labels])
    scoring = engine.load(folder, FAMILY)
    texts = [*ODD, *ragged_documents(24, longest=120)]
    expected = expected_entities(folder, texts)
    assert sum(map(len, expected)) > 50
    assert {entity["label"] for group in expected for entity in group} == {
        label.rpartition("-")[2] for label in LABELS[labels][1:]
    }
    got = entities(scoring, texts)
    assert_equal(got, expected)
    pairs = [pair for both in zip(got, expected, strict=True) for pair in zip(*both, strict=True)]
    scoring.record(
        table, f"token-classifier {name}", max(abs(ours["score"] - theirs["score"]) for ours, theirs in pairs)
    )


def test_a_text_past_the_limit_is_cut_as_the_pipeline_cuts_it(engine: ScoringEngine, folders: Folders) -> None:
    folder = folders("bert")
    long = " ".join(ragged_documents(30, seed=4))
    scoring = engine.load(folder, FAMILY)
    assert_equal(entities(scoring, [long]), expected_entities(folder, [long]))
    ((row,),) = scoring.rows([Asked([long])])
    assert row.truncated


def test_entities_are_the_same_in_any_company(engine: ScoringEngine, folders: Folders) -> None:
    scoring = engine.load(folders("xlm-roberta"), FAMILY)
    texts = [*ODD, *ragged_documents(8)]
    requests = [Asked(texts[:3]), Asked(texts[3:9], None, {"threshold": 0.5}), Asked(texts[9:])]
    for call, outcomes in zip(requests, scoring.run(requests), strict=True):
        for text, outcome in zip(call.texts, outcomes, strict=True):
            assert isinstance(outcome, Ok)
            assert outcome.data is not None
            assert_equal([outcome.data["entities"]], entities(scoring, [text], **call.parameters))


def test_a_threshold_drops_what_is_below_it(engine: ScoringEngine, folders: Folders) -> None:
    scoring = engine.load(folders("bert"), FAMILY)
    texts = ragged_documents(10)
    everything = entities(scoring, texts)
    least = sorted(entity["score"] for group in everything for entity in group)[20]
    answers = entities(scoring, texts, threshold=least)
    assert_equal(answers, [[entity for entity in all_of if entity["score"] >= least] for all_of in everything])
    assert sum(map(len, answers)) < sum(map(len, everything))


def test_shuffled_names_stay_with_their_numbers(engine: ScoringEngine, folders: Folders) -> None:
    folder = folders("bert", ("I-LOC", "B-PER", "O", "I-PER", "B-LOC"))
    texts = ragged_documents(10)
    assert_equal(entities(engine.load(folder, FAMILY), texts), expected_entities(folder, texts))


def test_tags_of_five_kinds_begin_and_continue(engine: ScoringEngine, folders: Folders, tmp_path: Path) -> None:
    """The pipeline takes the prefixes E- and S- of BIOES for parts of labels. The same weights with B- and I- in their
    place give the same entities.
    """
    five, plain = ("O", "B-PER", "I-PER", "E-PER", "S-PER"), ("O", "B-PER", "I-PER", "I-PER", "B-PER")
    texts = ragged_documents(12)
    as_bio = copied(folders("bert", five), tmp_path / "bio")
    edit_json(as_bio / "config.json", id2label=dict(enumerate(plain)), label2id={})
    answers = entities(engine.load(folders("bert", five), FAMILY), texts)
    assert_equal(answers, expected_entities(as_bio, texts))
    assert {entity["label"] for all_of in answers for entity in all_of} == {"PER"}


@pytest.mark.parametrize("name", ["bert", "modernbert", "electra"])
def test_a_missing_head_is_refused(name: str, engine: ScoringEngine, folders: Folders, tmp_path: Path) -> None:
    without(folders(name), "classifier.weight", tmp_path)
    with pytest.raises(ModelLoadFailed, match=r"classifier\.weight"):
        engine.load(tmp_path, FAMILY)


def test_a_pooler_that_nothing_reads_is_no_fault(engine: ScoringEngine, folders: Folders, tmp_path: Path) -> None:
    """Published BERT taggers were saved with a pooler."""
    tensors = load_file(copied(folders("bert"), tmp_path) / "model.safetensors")
    width = tensors["classifier.weight"].shape[1]
    tensors |= {"bert.pooler.dense.weight": torch.randn(width, width), "bert.pooler.dense.bias": torch.randn(width)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    texts = ragged_documents(5)
    assert_equal(entities(engine.load(tmp_path, FAMILY), texts), expected_entities(folders("bert"), texts))
