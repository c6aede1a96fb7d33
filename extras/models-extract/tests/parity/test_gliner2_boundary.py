"""GLiNER2 of the boundary architecture through the adapter against the package called directly on the same folder."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
from gliner2 import AutoExtractor
from oracle import ragged_texts
from parity.device import on_device
from parity.gliner_checkpoints import entry_of, gliner2_boundary_folder
from parity.table import ParityTable, Scores, path_of

from sie_adapter.families.extraction import ExtractOptions
from sie_models_extract import gliner2_boundary
from sie_models_extract.extraction import TextWindow
from sie_models_extract.gliner2 import Gliner2Model
from sie_models_extract.gliner2_boundary import BoundedSpan, bounded_entities

LABELS = ("person", "river mountain", "Engine")
THRESHOLD = 0.5
KINDS: dict[str, dict[str, Any]] = {
    "candidates of each label": {},
    "candidates of all labels": {"candidate_pool": "shared"},
    "nested entities": {"overlap_policy": "nested", "enable_abstention": False},
    "a predicted number": {"adaptive_threshold": True, "pair_temperature": 2.0, "classification_temperature": 1.5},
}
TEXTS = [f"{text}." for text in ragged_texts(7, seed=4, longest=40)]


def load(folder: Path, **changes: Any) -> Gliner2Model:
    entry = entry_of(folder, "gliner2", **changes)
    return Gliner2Model(folder, entry, entry.load, on_device())


def oracle(folder: Path) -> Any:
    return AutoExtractor.from_pretrained(str(folder), map_location="cpu").eval()


def rows(entities: Any) -> list[tuple[int, int, str, float]]:
    return sorted((row["start"], row["end"], row["label"], row["score"]) for row in entities)


def assert_equal(ours: list[Any], expected: list[Any]) -> float:
    assert [row[:3] for row in ours] == [row[:3] for row in expected]
    assert [row[3] for row in ours] == pytest.approx([row[3] for row in expected], abs=1e-5)
    return max((abs(row[3] - exact[3]) for row, exact in zip(ours, expected, strict=True)), default=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_entities_equal_those_of_the_package(kind: str, tmp_path: Path, table: ParityTable) -> None:
    folder = gliner2_boundary_folder(tmp_path / "model", **KINDS[kind])
    model, package = load(folder), oracle(folder)
    count = 0
    for text, result in zip(TEXTS, model.extract(TEXTS, [ExtractOptions(LABELS, THRESHOLD)] * len(TEXTS)), strict=True):
        assert isinstance(result, dict)
        theirs = package.extract_entities(
            text, list(LABELS), threshold=THRESHOLD, include_confidence=True, include_spans=True
        )["entities"]
        expected = sorted(
            (row["start"], row["end"], label, row["confidence"]) for label in theirs for row in theirs[label]
        )
        difference = assert_equal(rows(result["entities"]), expected)
        assert all(text[row["start"] : row["end"]] == row["text"] for row in result["entities"])
        [alone] = model.extract([text], [ExtractOptions(LABELS, THRESHOLD)])
        assert_equal(rows(alone["entities"]), rows(result["entities"]))  # type: ignore[index]
        table.record(f"gliner2 boundary, {kind}", path_of(model.attention), model.precision, Scores(difference))
        count += len(expected)
    assert count > 5


@pytest.mark.parametrize("multi_label", [False, True])
def test_classes_equal_those_of_the_package(multi_label: bool, tmp_path: Path, table: ParityTable) -> None:
    folder = gliner2_boundary_folder(tmp_path / "model", **KINDS["a predicted number"])
    model, package = load(folder, output="classifications"), oracle(folder)
    options = ExtractOptions(LABELS, 0.0, {"multi_label": multi_label, "task": "topic"})
    config = {"labels": list(LABELS), "multi_label": multi_label, "cls_threshold": 0.0}
    for text, result in zip(TEXTS, model.extract(TEXTS, [options] * len(TEXTS)), strict=True):
        theirs = package.classify_text(text, {"topic": config}, include_confidence=True)["topic"]
        expected = {row["label"]: row["confidence"] for row in (theirs if multi_label else [theirs])}
        own = {row["label"]: row["score"] for row in result["classifications"]}  # type: ignore[index]
        assert set(own) == set(LABELS)
        assert {label: own[label] for label in expected} == pytest.approx(expected, abs=1e-5)
        assert multi_label or next(iter(own)) in expected
        difference = max(abs(own[label] - score) for label, score in expected.items())
        table.record("gliner2 boundary, classes", path_of(model.attention), model.precision, Scores(difference))


def test_overlaps_are_resolved_over_all_windows_of_a_text() -> None:
    """The set of spans with the largest sum of scores stays: two short spans instead of a long span with a better
    score.
    """
    words = types.SimpleNamespace(starts=[0, 2, 4, 6, 8, 10], ends=[1, 3, 5, 7, 9, 11])
    first, second = TextWindow(0, 0, 4), TextWindow(0, 2, 6)
    by_window = {
        first: [
            BoundedSpan(0.5, 0, 1, 0),
            BoundedSpan(0.9, 0, 3, 0),
            BoundedSpan(0.5, 1, 3, 0),
            BoundedSpan(0.9, 3, 4, 0),
        ],
        second: [BoundedSpan(0.6, 2, 3, 0), BoundedSpan(0.8, 3, 6, 0), BoundedSpan(0.7, 5, 6, 1)],
    }
    entities = bounded_entities("a b c d e f", words, by_window, ["x", "y"], "flat")
    assert rows(entities) == [(0, 1, "x", 0.5), (2, 5, "x", 0.5), (6, 11, "x", 0.8), (10, 11, "y", 0.7)]


@pytest.mark.parametrize("policy", ["flat", "longest", "nested"])
def test_overlapping_spans_are_bounded_and_the_best_are_compared(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gliner2_boundary, "_CANDIDATES", 4)
    compared = []
    resolve = gliner2_boundary.resolve_overlaps

    def counted(spans: Any, *args: Any, **keys: Any) -> Any:
        compared.append(spans)
        return resolve(spans, *args, **keys)

    monkeypatch.setattr(gliner2_boundary, "resolve_overlaps", counted)
    words = types.SimpleNamespace(starts=list(range(60)), ends=list(range(1, 61)))
    chain = [BoundedSpan(0.01 * (start + 1), start, start + 3, 0) for start in range(30)]
    apart = BoundedSpan(0.001, 50, 51, 0)
    entities = bounded_entities("x" * 60, words, {TextWindow(0, 0, 60): [*chain, apart]}, ["x"], policy)
    assert [sorted(own.start for own in spans) for spans in compared] == [[26, 27, 28, 29], [50]]
    assert (29, 32, "x", chain[-1].score) in rows(entities)
    assert (50, 51, "x", 0.001) in rows(entities)
