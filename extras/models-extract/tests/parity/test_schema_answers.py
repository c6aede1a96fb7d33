"""Answers to schemas by real classes of GLiNER2 and GLiClass, against their packages on the same folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gliclass import GLiClassModel, ZeroShotClassificationPipeline
from gliner2 import GLiNER2
from oracle import ragged_texts
from parity.device import on_device
from parity.gliner_checkpoints import entry_of, gliclass_folder, gliner2_folder
from parity.table import ParityTable, Scores, path_of
from transformers import AutoTokenizer

from sie_adapter.families.extraction import ExtractOptions
from sie_contracts.errors import InvalidInput
from sie_contracts.models.output_schemas import parts_of_groups, parts_of_schema
from sie_models_extract.gliclass import GliclassModel
from sie_models_extract.gliner2 import Gliner2Model

THRESHOLD = 0.5
PLACE = {
    "type": "object",
    "properties": {
        "river": {"type": "string", "description": "name of a river"},
        "engines": {"type": "array", "items": {"type": "string"}},
        "size": {"enum": ["small", "very large"]},
        "colours": {"type": "array", "items": {"enum": ["red", "Blue", "green"]}},
    },
}
SCHEMA = {
    "type": "object",
    "title": "journey",
    "properties": {
        "person": {"type": "string"},
        "towns": {"type": "array", "items": {"type": "string"}},
        "mood": {"enum": ["calm", "very angry", "mixed"], "description": "of the traveller"},
        "topics": {"type": "array", "items": {"enum": ["search", "queue"]}},
        "is_late": {"type": "boolean"},
        "place": PLACE,
        "stops": {"type": "array", "items": PLACE},
    },
}
DECISIONS = {
    "type": "object",
    "properties": {name: SCHEMA["properties"][name] for name in ("mood", "topics", "is_late")},  # type: ignore[index]
}
GROUPS = {"urgency": ["low", "high"], "mood": ["calm", "very angry", "mixed"]}
KINDS: dict[str, dict[str, Any]] = {"count_lstm_v2": {}, "mean of tokens": {"pooling": "mean"}}


def options_of(schema: dict[str, Any], *, finds_spans: bool = True, **options: Any) -> ExtractOptions:
    parts = parts_of_schema("output_schema", schema, "test/model", finds_spans=finds_spans)
    return ExtractOptions(
        (), options.pop("threshold", THRESHOLD), options.pop("parameters", {}), parts=parts, **options
    )


def gliner2(folder: Path, **settings: Any) -> Gliner2Model:
    entry = entry_of(folder, "gliner2", **settings)
    return Gliner2Model(folder, entry, entry.load, on_device())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gliner2_folder(tmp_path_factory.mktemp("gliner2") / "model")


@pytest.fixture(scope="module")
def package(folder: Path) -> Any:
    return GLiNER2.from_pretrained(str(folder), map_location="cpu").eval()


@pytest.fixture(scope="module")
def model(folder: Path) -> Gliner2Model:
    return gliner2(folder)


def texts_with_stops(seed: int, count: int = 12) -> list[str]:
    """Return ragged texts that end with a full stop."""
    return [f"{text}." for text in ragged_texts(count, seed=seed, longest=50)]


def structures(package: Any, text: str, name: str, schema: dict[str, Any], **validators: Any) -> list[dict[str, Any]]:
    """Return the objects that the package reads. Each property is a list of values in the order of their scores."""
    builder = package.create_schema()
    structure = builder.structure(name)
    for field, own in schema["properties"].items():
        inner = own.get("items", own)
        structure.field(
            field,
            dtype="list" if "items" in own else "str",
            choices=inner.get("enum"),
            description=own.get("description"),
            validators=validators.get(field),
        )
    records = package.extract(text, builder, threshold=THRESHOLD, include_confidence=True, include_spans=True)[name]
    return [
        {field: value if isinstance(value, list) else [value] if value else [] for field, value in record.items()}
        for record in records
    ]


def evidence(result: dict[str, Any], path: str) -> list[dict[str, Any]]:
    """The rows of a property: those of its value, or of the elements of its list."""
    return [
        row
        for row in [*result["entities"], *result["classifications"]]
        if row["label"] == path or row["label"].startswith((f"{path}[", f"{path}."))
    ]


def assert_property(text: str, result: dict[str, Any], path: str, value: Any, theirs: list[dict[str, Any]]) -> float:
    """Check that the value and its evidence are those of the package. Return the largest difference of a score."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    rows = evidence(result, path)
    beyond = [entity for entity in theirs if entity.get("end", 0) > len(text)]
    if beyond:  # the package's own full stop takes part in its result
        return 0.0
    assert sorted(values) == sorted(entity["text"] for entity in theirs)
    scores = {entity["text"] + str(entity.get("start")): entity["confidence"] for entity in theirs}
    own = {
        (row["text"] if "text" in row else row["label"].rpartition(".")[2]) + str(row.get("start")): row["score"]
        for row in rows
    }
    assert own == pytest.approx(scores, abs=1e-5)
    assert all(text[row["start"] : row["end"]] == row["text"] for row in rows if "text" in row)
    return max((abs(own[key] - scores[key]) for key in scores), default=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_records_equal_the_structures_of_the_package(kind: str, tmp_path: Path, table: ParityTable) -> None:
    """Properties are strings, lists of strings, choices and lists of choices, in one object and in a list of
    objects.
    """
    folder = gliner2_folder(tmp_path / "model", **KINDS[kind])
    model, package = gliner2(folder), GLiNER2.from_pretrained(str(folder), map_location="cpu").eval()
    texts = [*texts_with_stops(3, 8), "Zürich, the harbour (search): 👍🏽 e-mail an_index 3.14!"]
    results = model.extract(texts, [options_of(SCHEMA)] * len(texts))
    counts: dict[str, int] = dict.fromkeys(PLACE["properties"], 0)  # type: ignore[call-overload]
    difference = 0.0
    for text, result in zip(texts, results, strict=True):
        assert isinstance(result, dict)
        data = result["data"]
        for name in ("place", "stops"):
            theirs = structures(package, text, name, PLACE)
            if any(row.get("end", 0) > len(text) for own in theirs for rows in own.values() for row in rows):
                continue
            objects = data["stops"] if name == "stops" else [data["place"]] if "place" in data else []
            assert len(objects) == (len(theirs) if name == "stops" else min(len(theirs), 1))
            for index, (own, expected) in enumerate(zip(objects, theirs, strict=False)):
                prefix = f"stops[{index}]" if name == "stops" else "place"
                for field, rows in expected.items():
                    counts[field] += len(rows)
                    difference = max(
                        difference, assert_property(text, result, f"{prefix}.{field}", own.get(field), rows)
                    )
    assert min(counts.values()) > 2, counts
    table.record(f"gliner2 records, {kind}", path_of(model.attention), model.precision, Scores(difference))


def test_decisions_equal_the_classes_of_the_package(model: Gliner2Model, package: Any, table: ParityTable) -> None:
    texts = texts_with_stops(5)
    options = options_of(DECISIONS)
    answers = set()
    for text, result in zip(texts, model.extract(texts, [options] * len(texts)), strict=True):
        assert isinstance(result, dict)
        difference = 0.0
        for task, labels, path, is_many in (
            ("mood: of the traveller", GROUPS["mood"], "mood", False),
            ("topics", ["search", "queue"], "topics", True),
            ("is_late", ["is late"], "is_late", True),
        ):
            config = {"labels": labels, "multi_label": is_many, "cls_threshold": 0.0}
            theirs = package.classify_text(text, {task: config}, include_confidence=True)[task]
            expected = {row["label"]: row["confidence"] for row in (theirs if is_many else [theirs])}
            own = {row["label"].removeprefix(f"{path}."): row["score"] for row in evidence(result, path)}
            if path == "is_late":
                assert own == pytest.approx({"true": expected["is late"], "false": 1 - expected["is late"]}, abs=1e-5)
                assert result["data"]["is_late"] is (expected["is late"] >= 0.5)
                continue
            assert {label: own[label] for label in expected} == pytest.approx(expected, abs=1e-5)
            difference = max(difference, *(abs(own[label] - score) for label, score in expected.items()))
            if is_many:
                assert result["data"][path] == [label for label in labels if expected[label] >= 0.5]
            else:
                assert result["data"][path] == theirs["label"]
        answers.add(repr(result["data"]))
        table.record("gliner2 decisions", path_of(model.attention), model.precision, Scores(difference))
    assert len(answers) > 1


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[GliclassModel, Path]:
    folder = gliclass_folder(tmp_path_factory.mktemp("gliclass") / "model")
    entry = entry_of(folder, "gliclass", max_tokens=256)
    return GliclassModel(folder, entry, entry.load, on_device()), folder


def class_scores(folder: Path, text: str, labels: list[str], *, is_many: bool, **around: Any) -> dict[str, float]:
    pipeline = ZeroShotClassificationPipeline(
        GLiClassModel.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
        max_length=256,
        device="cpu",
        classification_type="multi-label" if is_many else "single-label",
        progress_bar=False,
    )
    return pipeline([text], labels, return_hierarchical=True, **around)[0]  # type: ignore[no-any-return]


def test_decisions_and_groups_of_gliclass_equal_those_of_its_package(
    classifier: tuple[GliclassModel, Path], table: ParityTable
) -> None:
    model, folder = classifier
    texts = ragged_texts(4, seed=6, longest=40)
    groups = ExtractOptions((), parts=parts_of_groups("label_groups", GROUPS, is_many=False))
    answers = model.extract(texts * 2, [options_of(DECISIONS, finds_spans=False)] * 4 + [groups] * 4)
    for text, decided, grouped in zip(texts, answers[:4], answers[4:], strict=True):
        assert isinstance(decided, dict)
        assert isinstance(grouped, dict)
        for result, path, labels, is_many, around in (
            (decided, "mood", GROUPS["mood"], False, {"prompt": "of the traveller"}),
            (decided, "topics", ["search", "queue"], True, {}),
            (grouped, "urgency", GROUPS["urgency"], False, {}),
            (grouped, "mood", GROUPS["mood"], False, {}),
        ):
            expected = class_scores(folder, text, labels, is_many=is_many, **around)
            own = {row["label"].removeprefix(f"{path}."): row["score"] for row in evidence(result, path)}
            assert own == pytest.approx(expected, abs=1e-5)
            value = result["data"][path]
            assert value == (
                [label for label in labels if expected[label] >= 0.5]
                if is_many
                else max(expected, key=expected.__getitem__)
            )
            difference = max(abs(own[label] - expected[label]) for label in labels)
            table.record("gliclass decisions", path_of(model.attention), model.precision, Scores(difference))
        truth = class_scores(folder, text, ["is late"], is_many=True)["is late"]
        assert decided["data"]["is_late"] is (truth >= 0.5)


@pytest.mark.parametrize(
    "field",
    [
        {"town [E]": {"type": "string"}},
        {"town": {"type": "string", "description": "a [DESCRIPTION] b"}},
        {"place": {"type": "object", "properties": {"size": {"enum": ["small", "[L]"]}}}},
        {"mood [P]": {"enum": ["calm", "angry"]}},
    ],
)
def test_a_reserved_token_in_a_schema_fails_its_text_alone(model: Gliner2Model, field: dict[str, Any]) -> None:
    wrong = options_of({"type": "object", "properties": field})
    refused, answered = model.extract(["search index"] * 2, [wrong, options_of(DECISIONS)])
    assert isinstance(refused, InvalidInput)
    assert "reserves" in refused.message
    assert isinstance(answered, dict)
