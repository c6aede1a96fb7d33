"""GLiNER with relations through the adapter against the package's model on the same folder.

The package's `inference` gives relations to the wrong entities if it left out one that overlaps, or sorted two that
begin at one word. These tests therefore read the model's own pairs and scores. They use `inference` for other texts
only.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from gliner import GLiNER
from oracle import WORDS, ragged_texts
from parity.device import on_device
from parity.gliner_checkpoints import entry_of, gliner_folder
from parity.table import ParityTable, Scores, path_of
from selection import long_but

from sie_adapter.families.extraction import ExtractOptions
from sie_models_extract import gliner_relations as family
from sie_models_extract.gliner_relations import GlinerRelationModel

LABELS = ("person", "river mountain", "Engine")
RELATIONS = ("works for", "lives in", "Owns")
LAYERS = ("gcn", "mlp", "attention", "gat", "bilinear", "dot")
# the threshold that divides the pairs, to all of which a random adjacency layer gives nearly the same score
THRESHOLD = {"mlp": 0.487, "attention": 0.03, "gat": 0.52, "bilinear": 0.85}

Relations = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("relations")
    return {layer: gliner_folder(root / layer, "relations", relations_layer=layer) for layer in LAYERS[:2]}


@pytest.fixture(scope="module")
def model(folders: dict[str, Path]) -> GlinerRelationModel:
    return load(folders["gcn"])


def load(folder: Path, **changes: Any) -> GlinerRelationModel:
    entry = entry_of(folder, "gliner-relations", **changes)
    return GlinerRelationModel(folder, entry, entry.load, on_device())


def options(threshold: float = 0.5, relations: tuple[str, ...] = RELATIONS, **parameters: Any) -> ExtractOptions:
    named = {"relation_labels": list(relations), "relation_threshold": 0.3, "flat_ner": False}
    return ExtractOptions(LABELS, threshold, named | parameters)


def pairs_of_package(
    package: Any, words: list[str], threshold: float
) -> tuple[list[tuple[int, int]], dict[tuple[Any, Any, str], float]]:
    """Return the spans, (first word, last word), between which the package looks for relations, and the score of each
    relation, of a text that runs alone.
    """
    collate = package.data_collator_class(
        package.config, data_processor=package.data_processor, return_id_to_classes=True, prepare_labels=False
    )
    batch = collate([{"tokenized_text": words, "ner": None}], entity_types=list(LABELS), relation_types=list(RELATIONS))
    inputs = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    with torch.inference_mode():
        output = package.model(**inputs, threshold=threshold, adjacency_threshold=threshold)
    best = torch.sigmoid(output.logits[0]).amax(-1)
    selected = [
        (first, first + width)
        for first, width in itertools.product(range(best.shape[0]), range(best.shape[1]))
        if best[first, width] > threshold and first + width < len(words)
    ]
    scores = torch.sigmoid(output.rel_logits[0])
    return selected, {
        (selected[head], selected[tail], label): float(scores[pair, number])
        for pair, (head, tail) in enumerate(output.rel_idx[0].tolist())
        if head >= 0
        for number, label in enumerate(RELATIONS)
        if scores[pair, number] > 0.3
    }


def expected_relations(
    package: Any, text: str, entities: list[dict[str, Any]], threshold: float
) -> list[tuple[str, str, str, float]]:
    words = text.split()
    starts = list(itertools.accumulate((len(word) + 1 for word in words), initial=0))
    present = {(entity["start"], entity["end"]) for entity in entities}
    named = []
    for (head, tail, label), score in pairs_of_package(package, words, threshold)[1].items():
        ranges = [(starts[first], starts[last] + len(words[last])) for first, last in (head, tail)]
        if present.issuperset(ranges):
            (first, last) = (text[start:end] for start, end in ranges)
            named.append((first, last, label, score))
    return named


def rows(relations: Relations) -> list[tuple[str, str, str, float]]:
    return [(row["head"], row["tail"], row["relation"], row["score"]) for row in relations]


def assert_equal(ours: list[tuple[str, str, str, float]], expected: list[tuple[str, str, str, float]]) -> float:
    """Compare regardless of the order; return the largest difference of two scores."""
    ours, expected = (sorted(some) for some in (ours, expected))
    assert [row[:3] for row in ours] == [row[:3] for row in expected]
    assert [row[3] for row in ours] == pytest.approx([row[3] for row in expected], abs=1e-5)
    return max((abs(row[3] - exact[3]) for row, exact in zip(ours, expected, strict=True)), default=0.0)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("layer", long_but(LAYERS, ["gcn", "mlp"]))
def test_relations_equal_those_of_the_package(
    folders: dict[str, Path],
    tmp_path: Path,
    layer: str,
    flat: bool,
    table: ParityTable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(family, "_RELATIONS", 100_000)
    folder = folders.get(layer) or gliner_folder(tmp_path / layer, "relations", relations_layer=layer)
    ours, package, threshold = load(folder), GLiNER.from_pretrained(str(folder)), THRESHOLD.get(layer, 0.5)
    texts = ragged_texts(16, seed=3, longest=15)
    results = ours.extract(texts, [options(threshold, flat_ner=flat)] * len(texts))
    count = 0
    for text, result in zip(texts, results, strict=True):
        assert isinstance(result, dict)
        expected = expected_relations(package, text, result["entities"], threshold)
        difference = assert_equal(rows(result["relations"]), expected)
        assert [row["score"] for row in result["relations"]] == sorted(
            (row["score"] for row in result["relations"]), reverse=True
        )
        table.record(f"gliner-relations {layer}", path_of(ours.attention), ours.precision, Scores(difference))
        count += len(expected)
    assert count > 30


def test_relations_of_a_long_text_are_those_of_its_windows(tmp_path: Path) -> None:
    """Windows of 20 words share eight. Each entity appears once. A relation of two windows has the better score."""
    model = load(gliner_folder(tmp_path / "short", "relations", max_len=20))
    words = list(dict.fromkeys(WORDS))
    texts = [" ".join(words), *(" ".join(words[first : first + 20]) for first in (0, 12, 24))]
    result, *parts = model.extract(texts, [options(0.3)] * len(texts))
    assert isinstance(result, dict)
    ranges = [(entity["start"], entity["end"]) for entity in result["entities"]]
    assert len(set(ranges)) == len(ranges) > 9
    named = {entity["text"] for entity in result["entities"]}
    scores: dict[tuple[str, str, str], list[float]] = {}
    for part in parts:
        assert isinstance(part, dict)
        for head, tail, label, score in rows(part["relations"]):
            if {head, tail} <= named:
                scores.setdefault((head, tail, label), []).append(score)
    assert_equal(rows(result["relations"]), [(*relation, max(own)) for relation, own in scores.items()])
    assert any(len(own) == 2 and own[0] < own[1] for own in scores.values())
    assert any(len(own) == 2 and own[0] > own[1] for own in scores.values())


def test_candidates_and_relations_of_a_window_have_a_limit(
    model: GlinerRelationModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "_CANDIDATES", 3)
    [text] = ragged_texts(1, seed=3, longest=20)
    [result] = model.extract([text], [options(0.0, relation_threshold=0.0)])
    assert isinstance(result, dict)
    assert len(result["entities"]) > 3
    assert 0 < len(result["relations"]) <= 3 * 2 * len(RELATIONS)
    monkeypatch.setattr(family, "_RELATIONS", 2)
    [fewer] = model.extract([text], [options(0.0, relation_threshold=0.0)])
    assert isinstance(fewer, dict)
    assert len(fewer["relations"]) <= 2
