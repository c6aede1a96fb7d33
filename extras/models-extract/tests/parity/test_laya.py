"""Laya through the adapter against the package called directly on the same folder."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from laya import Agent
from laya.structured import decide
from oracle import WORDS, ragged_texts
from parity.decision_checkpoints import laya_folder
from parity.device import on_device
from parity.gliner_checkpoints import entry_of
from parity.table import ParityTable, Scores, path_of
from parity.toys import edit_weights

from sie_adapter.families.extraction import ExtractOptions
from sie_contracts.errors import InvalidInput, ModelLoadFailed
from sie_contracts.models.output_schemas import parts_of_schema
from sie_models_extract.laya import LayaModel

LABELS = ("person", "river mountain: where water runs", "Engine")
QUESTION = "Who is it of?"
TEXTS = [*ragged_texts(8, seed=4, longest=70), " ".join(WORDS * 12), "Zürich [MASK] [SEP] search: 3.14!", "queue"]
ROUNDED = 6e-5  # the package rounds probabilities to four digits

Question = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return laya_folder(tmp_path_factory.mktemp("laya") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> LayaModel:
    return load(folder)


@pytest.fixture(scope="module")
def package(folder: Path) -> Any:
    return agent(folder)


def load(folder: Path, **changes: Any) -> LayaModel:
    entry = entry_of(folder, "laya", output="classifications", **{"max_tokens": 256, **changes})
    return LayaModel(folder, entry, entry.load, on_device())


def agent(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the temperature is not the folder's
        return Agent(str(folder), device="cpu")


def choice(labels: tuple[str, ...] = LABELS) -> Question:
    criteria = {label.partition(": ")[0]: label.partition(": ")[2] or None for label in labels}
    return {"type": "choice", "instructions": QUESTION, "criteria": criteria}


QUESTIONS: dict[str, tuple[Question, ExtractOptions]] = {
    "choice": (choice(), ExtractOptions(LABELS, instruction=QUESTION)),
    "score": (
        {"type": "score", "instructions": QUESTION, "criteria": list(LABELS)},
        ExtractOptions(LABELS, instruction=QUESTION, parameters={"task": "score"}),
    ),
    # So many options are each cut, and their temperature is below the least one of the package.
    "choice of many": (choice(tuple(WORDS[:8])), ExtractOptions(tuple(WORDS[:8]), instruction=QUESTION)),
    "choice of long labels": (
        choice(tuple(f"{word} {' '.join(WORDS[:25])}" for word in WORDS[:4])),
        ExtractOptions(tuple(f"{word} {' '.join(WORDS[:25])}" for word in WORDS[:4]), instruction=QUESTION),
    ),
}


def probabilities(result: Any) -> dict[str, float]:
    return {row["label"]: row["score"] for row in result["classifications"]}


@pytest.mark.parametrize("head_layers", [0, 2])
@pytest.mark.parametrize("kind", QUESTIONS)
def test_probabilities_equal_those_of_the_package(
    kind: str, head_layers: int, tmp_path: Path, table: ParityTable
) -> None:
    """One batch has ragged texts, one of which is cut. Each text gives the same alone."""
    folder = laya_folder(tmp_path / "model", head_layers=head_layers)
    model, package = load(folder), agent(folder)
    question, options = QUESTIONS[kind]
    together = model.extract(TEXTS, [options] * len(TEXTS))
    worst = 0.0
    for text, result in zip(TEXTS, together, strict=True):
        answer = package.predict(text, {"q": question})["answers"]["q"]
        own = probabilities(result)
        theirs = dict(zip(options.labels, answer["probabilities"].values(), strict=True))
        assert own == pytest.approx(theirs, abs=ROUNDED)
        assert list(own.values()) == sorted(own.values(), reverse=True)
        [alone] = model.extract([text], [options])
        assert probabilities(alone) == pytest.approx(own, abs=1e-5)
        worst = max(worst, *(abs(own[label] - theirs[label]) for label in own))
    table.record(f"laya {kind}", path_of(model.attention), model.precision, Scores(worst))
    assert len({max(probabilities(result), key=probabilities(result).__getitem__) for result in together}) > 1


def test_labels_that_are_statements_equal_those_of_the_package(model: LayaModel, package: Any) -> None:
    options = ExtractOptions(LABELS, parameters={"multi_label": True})
    questions = {label: {"type": "noul", "instructions": label} for label in LABELS}
    for text, result in zip(TEXTS, model.extract(TEXTS, [options] * len(TEXTS)), strict=True):
        answers = package.predict(text, questions)["answers"]
        assert probabilities(result) == pytest.approx({label: answers[label]["noul"] for label in LABELS}, abs=ROUNDED)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["calm", "angry", "sad"]},
        "topic_of_text": {"enum": ["river", "engine"], "description": "Of what does it speak?"},
        "is_late": {"type": "boolean"},
        "leaves": {"type": "boolean", "description": "The buyer wants to leave."},
        "urgency": {"type": "integer", "minimum": 2, "maximum": 6},
        "size": {"type": "integer", "minimum": -1, "maximum": 1, "description": "How large is it?"},
    },
}


def test_a_schema_is_answered_as_the_package_answers_it(model: LayaModel, package: Any) -> None:
    parts = parts_of_schema("output_schema", SCHEMA, "test/model", finds_spans=False, reads_scales=True)
    results = model.extract(TEXTS, [ExtractOptions((), parts=parts)] * len(TEXTS))
    values = set()
    for text, result in zip(TEXTS, results, strict=True):
        assert isinstance(result, dict)
        answer = decide(package, text, schema=SCHEMA, return_details=True)
        assert result["data"] == answer.values
        first = {name: own.get("minimum", 0) for name, own in SCHEMA["properties"].items()}
        expected = {
            f"{name}.{int(label) + first[name] if label.isdigit() else label}": score
            for name, scores in answer.probabilities.items()
            for label, score in scores.items()
        }
        assert probabilities(result) == pytest.approx(expected, abs=ROUNDED)
        values.add(tuple(result["data"].values()))
    assert len(values) > 3


def test_a_statement_is_whole_or_refused(tmp_path: Path) -> None:
    """The package cuts off the label of a long statement, so all labels would have one score."""
    model = load(laya_folder(tmp_path / "model", head_max_len=192, max_len=512), max_tokens=512)
    labels = ("billing", "refund")

    def asked(count: int, labels: tuple[str, ...] = labels) -> Any:
        own = ExtractOptions(labels, None, {"multi_label": True}, instruction="w " * count)
        return model.extract(["queue"], [own])[0]

    assert len(set(probabilities(asked(10)).values())) == 2
    refused, long = asked(100), asked(0, ("billing", "w " * 200))
    for error, param in ((refused, "instruction"), (long, "labels")):
        assert isinstance(error, InvalidInput)
        assert error.param == param
    room = int(re.search(r"at most (\d+) tokens", refused.message)[1])  # type: ignore[index]
    tokens = len(model._ids("w " * 10)) // 10
    assert len(set(probabilities(asked(room // tokens - 2)).values())) == 2
    assert isinstance(asked(room // tokens + 2), InvalidInput)
    schema = {
        "type": "object",
        "properties": {"topics": {"type": "array", "items": {"enum": list(labels)}, "description": "y " * 499}},
    }
    parts = parts_of_schema("s", schema, "test/model", finds_spans=False, reads_scales=True)
    [error] = model.extract(["queue"], [ExtractOptions((), parts=parts)])
    assert isinstance(error, InvalidInput)
    assert error.message.startswith("topics: instruction: ")


def test_folders_that_the_family_does_not_run_are_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "rl_agent_config.json").read_text())
    encoder = json.loads((folder / "encoder" / "config.json").read_text())
    for number, (file, changed, message) in enumerate(
        (
            ("rl_agent_config.json", config | {"option_layout": "parallel"}, "option_layout is parallel"),
            ("rl_agent_config.json", config | {"temperature": [1.0]}, "a temperature for each of choice, score, noul"),
            ("rl_agent_config.json", config | {"head_layers": 3}, "missing keys: head.layers.2"),
            ("encoder/config.json", encoder | {"model_type": "none"}, "no encoder none"),
            ("encoder/config.json", {}, "has no encoder/config.json"),
        )
    ):
        copied = shutil.copytree(folder, tmp_path / str(number))
        (copied / file).write_text(json.dumps(changed))
        with pytest.raises(ModelLoadFailed, match=message):
            load(copied)
    copied = shutil.copytree(folder, tmp_path / "weights")
    edit_weights(copied, lambda weights: weights.update(extra=torch.zeros(1)))
    with pytest.raises(ModelLoadFailed, match="1 unexpected keys: extra"):
        load(copied)
