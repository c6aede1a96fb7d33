"""Relations of GLiNER2 through the adapter against the package called directly on the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from gliner2 import GLiNER2
from oracle import WORDS, ragged_texts
from parity.device import on_device
from parity.gliner_checkpoints import entry_of, gliner2_folder
from parity.table import ParityTable, Scores, path_of

from sie_adapter.families.extraction import ExtractOptions
from sie_models_extract.gliner2 import Gliner2Model

LABELS = ("person", "river mountain")
RELATIONS = ("works for", "lives in", "Owns")
Row = tuple[str, str, str, float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gliner2_folder(tmp_path_factory.mktemp("relations") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Gliner2Model:
    return load(folder)


def load(folder: Path, **changes: Any) -> Gliner2Model:
    entry = entry_of(folder, "gliner2", **changes)
    entry = msgspec.structs.replace(entry, outputs={"entities": 0, "relations": 0})
    return Gliner2Model(folder, entry, entry.load, on_device())


def options(
    labels: tuple[str, ...] = (), relations: tuple[str, ...] = RELATIONS, least: float = 0.5, **parameters: Any
) -> ExtractOptions:
    return ExtractOptions(labels, 0.5, {"relation_labels": list(relations), "relation_threshold": least, **parameters})


def rows(result: Any) -> list[Row]:
    return [(row["head"], row["tail"], row["relation"], row["score"]) for row in result["relations"]]


def oracle(package: Any, text: str, labels: tuple[str, ...], relations: tuple[str, ...]) -> tuple[list[Row], Any]:
    """Return the relations of the package, the best of equal ones, and its entities. A relation has the score of the
    worse of its two spans.
    """
    schema = package.create_schema()
    if labels:
        schema = schema.entities(list(labels))
    schema = schema.relations(list(relations))
    answer = package.extract(text, schema, threshold=0.5, include_confidence=True, include_spans=True)
    best: dict[Any, Row] = {}
    for label, pairs in answer["relation_extraction"].items():
        for pair in pairs:
            head, tail = pair["head"], pair["tail"]
            score = min(head["confidence"], tail["confidence"])
            key = (label, head["start"], head["end"], tail["start"], tail["end"])
            if max(head["end"], tail["end"]) <= len(text) and score > best.get(key, ("", "", "", 0.0))[3]:
                best[key] = (head["text"], tail["text"], label, score)
    return sorted(best.values()), answer.get("entities")


def assert_equal(ours: list[Row], expected: list[Row]) -> float:
    ours = sorted(ours)
    assert [row[:3] for row in ours] == [row[:3] for row in expected]
    assert [row[3] for row in ours] == pytest.approx([row[3] for row in expected], abs=1e-5)
    return max((abs(row[3] - exact[3]) for row, exact in zip(ours, expected, strict=True)), default=0.0)


@pytest.mark.parametrize("labels", [(), LABELS], ids=["alone", "beside entities"])
@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_relations_equal_those_of_the_package(
    labels: tuple[str, ...], pooling: str, tmp_path: Path, table: ParityTable
) -> None:
    folder = gliner2_folder(tmp_path / "model", pooling=pooling)
    model, package = load(folder), GLiNER2.from_pretrained(str(folder), map_location="cpu").eval()
    texts = [f"{text}." for text in ragged_texts(5, seed=3, longest=20)]
    count = 0
    for text, result in zip(texts, model.extract(texts, [options(labels)] * len(texts)), strict=True):
        assert isinstance(result, dict)
        expected, entities = oracle(package, text, labels, RELATIONS)
        difference = assert_equal(rows(result), expected)
        assert [row[3] for row in rows(result)] == sorted((row[3] for row in rows(result)), reverse=True)
        assert ("entities" in result) == bool(labels)
        if labels:
            theirs = {(entity["start"], entity["end"], label) for label in labels for entity in entities.get(label, ())}
            assert {(row["start"], row["end"], row["label"]) for row in result["entities"]} == theirs
        table.record(
            f"gliner2 relations, {pooling} of tokens", path_of(model.attention), model.precision, Scores(difference)
        )
        count += len(expected)
    assert count > 10
    [alone] = model.extract(texts[:1], [options(labels)])
    [together] = model.extract(texts, [options(labels)] * len(texts))[:1]
    assert_equal(rows(alone), sorted(rows(together)))


def test_a_long_text_has_the_relations_of_its_windows(folder: Path) -> None:
    """A pair that two windows find is one relation."""
    model = load(folder, max_tokens=160)
    words = WORDS * 6
    text = " ".join(words)
    [result] = model.extract([text], [options(least=0.4)])
    [group] = model.prepare([text], [options(least=0.4)])._prepared.values()
    windows = [" ".join(words[at.start : at.stop]) for read, _ in group.passes for at in read]
    assert len(windows) > 2
    parts = model.extract(windows, [options(least=0.4)] * len(windows))
    expected = {row[:3] for part in parts for row in rows(part)}
    assert {row[:3] for row in rows(result)} == expected
