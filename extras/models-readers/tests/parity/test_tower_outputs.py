"""Ten questions to one page run its tower once, and their answers are those of a tower that runs each time, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity import detector_checkpoints, dual_checkpoints, qwen_checkpoints, reader_checkpoints
from parity.device import new_engine
from parity.page_engine import Served
from parity.qwen_checkpoints import MAX_3, MIN_3
from parity.toys import image
from selection import long_but

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.models.entries import parse_entry
from sie_sidecar.prepare.rows import ModelTokenizer

PAGE, OTHER = image(90, 130, 1), image(200, 60, 2)
WORDS = ("river", "queue", "old town", "the sea", "price", "total", "engine", "vector", "mountain", "date")
BOUNDS = {"min_pixels": MIN_3, "max_pixels": MAX_3}
RANKED = ("Judge whether", "<Query>:{query}\n<Document>:{document}", " the end")
Ask = Callable[[Served, str], Any]


@dataclass(frozen=True)
class Kind:
    """`ask`: a question to PAGE. `tower`: the object that has the method that reads images, and the method's name."""

    build: Callable[[Path], Path]
    entry: Mapping[str, Any]
    ask: Ask
    tower: Callable[[Any], tuple[Any, str]]


def extracting(**options: Any) -> Ask:
    """Return a question to PAGE. An option that is a function gets the word of the question."""

    def ask(served: Served, word: str) -> Any:
        parameters = {name: value(word) if callable(value) else value for name, value in options.items()}
        return served.run("extract", [PAGE], **parameters)

    return ask


def reads(own: str, method: str = "_run") -> Callable[[Any], tuple[Any, str]]:
    def tower(weights: Any) -> tuple[Any, str]:
        for name in own.split("."):
            weights = getattr(weights, name)
        return weights, method

    return tower


QWEN = {"inputs": ["text", "image"], "max_tokens": 400, "load": BOUNDS}
RANKER = {"family": "multimodal-reranker", "outputs": {"score": 0}, "pair": RANKED}
PAGES = {"family": "vision-language", "inputs": ["text", "image"], "max_tokens": 200}
READER = {"family": "document-reader", "inputs": ["image"], "outputs": {"entities": 0, "data": 0}}
OCR = {**READER, "max_tokens": reader_checkpoints.OCR_TOKENS}
DETECTOR = {"family": "detector", "inputs": ["image"], "outputs": {"objects": 0}}
KINDS = {
    "qwen3-vl reranker": Kind(
        qwen_checkpoints.qwen3_vl,
        {**QWEN, **RANKER, "head": {"yes_token": "y", "no_token": "n"}},
        lambda served, word: served.run("score", [PAGE], word),
        reads("_reader._tower"),
    ),
    "colpali": Kind(
        dual_checkpoints.colpali,
        {**PAGES, "outputs": {"multivector": dual_checkpoints.WIDTH}},
        lambda served, word: served.run("score", [PAGE], word),
        reads("_reader._tower"),
    ),
    "donut": Kind(
        reader_checkpoints.donut,
        {**READER, "max_tokens": reader_checkpoints.DONUT_TOKENS},
        extracting(task="<s_docvqa>", instruction=str, max_new_tokens=9),
        reads("_kind._tower"),
    ),
    "lighton": Kind(
        reader_checkpoints.lighton, OCR, extracting(instruction=str, max_new_tokens=9), reads("_kind", "_page_features")
    ),
    "owlv2": Kind(
        detector_checkpoints.owlv2,
        {**DETECTOR, "max_tokens": detector_checkpoints.LABEL_TOKENS},
        extracting(labels=lambda word: [word], threshold=0.0),
        reads("_kind._model", "image_embedder"),
    ),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[AdapterEngine]:
    engine = new_engine()
    yield engine
    assert engine.stop(10)


@pytest.fixture(scope="module")
def load(engine: AdapterEngine, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    root = tmp_path_factory.mktemp("towers")

    @cache
    def folder(build: Callable[[Path], Path]) -> Path:
        return build(root / build.__name__)

    @cache
    def loaded(name: str) -> Served:
        kind = KINDS[name]
        fields = {
            "id": f"towers/{name.replace(' ', '-').replace(',', '')}",
            "weights": {"path": str(folder(kind.build))},
        }
        entry = parse_entry({**fields, **kind.entry, "load": {"precision": "float32", **kind.entry.get("load", {})}})
        weights = engine.residency.ensure(entry.id, entry).weights
        return Served(engine, entry, weights, ModelTokenizer(weights.tokenizer, weights.max_tokens))

    return loaded


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Served], list[int]]:
    """Return a function that returns a list to which each later pass of the tower appends an element."""

    def counted(name: str, served: Served) -> list[int]:
        passes: list[int] = []
        holder, method = KINDS[name].tower(served.weights)
        original = getattr(holder, method)

        def run(*arguments: Any, **named: Any) -> Any:
            passes.append(1)
            return original(*arguments, **named)

        monkeypatch.setattr(holder, method, run)
        return passes

    return counted


def equal(output: Any, expected: Any) -> bool:
    """Compare two outputs bit for bit."""
    if isinstance(expected, np.ndarray):
        return bool(output.tobytes() == expected.tobytes())
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        return len(output) == len(expected) and all(map(equal, output, expected))
    return bool(output == expected)


@pytest.mark.parametrize("name", long_but(KINDS, ["qwen3-vl reranker"]))
def test_ten_questions_to_one_page_run_its_tower_once(
    name: str, load: Callable[[str], Served], count: Callable[[str, Served], list[int]]
) -> None:
    served, ask = load(name), KINDS[name].ask
    passes = count(name, served)
    nobodys = [ask(served, word) for word in WORDS]
    assert len(passes) >= len(WORDS), "an image of which nobody knows who asked is read each time"
    passes.clear()
    served.engine.outputs.clear()
    served.engine.outputs._paused_until_s = 0.0
    asker_model = replace(served, asker="somebody")
    answers = [ask(asker_model, word) for word in WORDS]
    assert len(passes) == 1
    assert equal(answers, nobodys)
    assert any(not equal(answers[0], answer) for answer in answers[1:]), "the questions are told apart"
    ask(replace(served, asker="somebody else"), WORDS[0])
    assert len(passes) == 2, "the output for one asker is not given to another"
