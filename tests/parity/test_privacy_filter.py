"""The class of openai/privacy-filter as a token classifier, against the class itself, one text at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity.checkpoints import Architecture, build
from parity.extraction import Entities, assert_equal
from parity.score_checkpoints import Asked, ScoringEngine, ragged_documents
from parity.table import ParityTable
from parity.tokenizer_recipes import QWEN
from transformers import AutoModelForTokenClassification, AutoTokenizer

from sie_adapter.families.entities import ordered_tags
from sie_contracts.wire.messages import Ok

TAGS = ("O", *(f"{kind}-{label}" for label in ("person", "place") for kind in "BIES"))
SMALL = Architecture(
    "openai_privacy_filter",
    QWEN,
    {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "max_position_embeddings": 1024,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
)
TEXTS = [
    *ragged_documents(12, longest=60),
    "  Anna met 👩‍💻 in Zürich 😀, then went home \n",
    "東京 and 中文字",
    "",
    "x",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier that gives each tag its share of the tokens."""
    folder = tmp_path_factory.mktemp("privacy") / "filter"
    names: dict[str, Any] = {
        "id2label": dict(enumerate(TAGS)),
        "label2id": {tag: number for number, tag in enumerate(TAGS)},
    }
    build(folder, SMALL, head=AutoModelForTokenClassification, **names)
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS if text])
        spread = 1.5 / logits.std(0)
        model.score.weight.mul_(spread[:, None])
        model.score.bias.sub_(logits.mean(0)).mul_(spread)
    model.save_pretrained(folder)
    return folder


def expected_entities(folder: Path, text: str) -> Entities:
    model, tokenizer = AutoModelForTokenClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    encoding = tokenizer(text, return_tensors="pt", return_offsets_mapping=True, return_special_tokens_mask=True)
    offsets = encoding.pop("offset_mapping")[0].tolist()
    special = encoding.pop("special_tokens_mask")[0].bool()
    if not encoding["input_ids"].numel():
        return []
    with torch.no_grad():
        scores = model(**encoding).logits[0].log_softmax(1)[~special]
    places = [place for place, is_special in zip(offsets, special.tolist(), strict=True) if not is_special]
    groups: list[list[int]] = []
    tags = ordered_tags(scores, TAGS).tolist()
    for token, number in enumerate(tags):
        if TAGS[number][0] in "BS":
            groups.append([token])
        elif TAGS[number][0] in "IE":
            groups[-1].append(token)
    entities = []
    for tokens in groups:
        start, end = places[tokens[0]][0], places[tokens[-1]][1]
        score = sum(float(scores[token, tags[token]].exp()) for token in tokens) / len(tokens)
        word = text[start:end]
        start, end = start + len(word) - len(word.lstrip()), end - len(word) + len(word.rstrip())
        if start < end:
            label = TAGS[tags[tokens[0]]][2:]
            entities.append({"text": text[start:end], "label": label, "score": score, "start": start, "end": end})
    return entities


def test_entities_are_those_of_the_class_with_tags_in_order(
    folder: Path, engine: ScoringEngine, table: ParityTable
) -> None:
    scoring = engine.load(folder, "token-classifier")
    ours = [answer["entities"] for answer in scoring.found(TEXTS)]
    difference, count = 0.0, 0
    for text, entities in zip(TEXTS, ours, strict=True):
        theirs = expected_entities(folder, text)
        assert_equal(entities, theirs)
        difference = max([difference, *(abs(a["score"] - b["score"]) for a, b in zip(entities, theirs, strict=True))])
        count += len(entities)
    assert count > 30
    scoring.record(table, "token-classifier privacy filter", difference)


def test_entities_are_the_same_in_any_company(folder: Path, engine: ScoringEngine) -> None:
    scoring = engine.load(folder, "token-classifier")
    requests = [Asked(TEXTS[:3]), Asked(TEXTS[3:])]
    for request, outcomes in zip(requests, scoring.run(requests), strict=True):
        for text, outcome in zip(request.texts, outcomes, strict=True):
            assert isinstance(outcome, Ok)
            assert outcome.data is not None
            assert_equal(outcome.data["entities"], scoring.found([text])[0]["entities"])
