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
import torch
from parity import detector_checkpoints, dual_checkpoints, qwen_checkpoints, reader_checkpoints
from parity.device import new_engine
from parity.page_engine import Served
from parity.qwen_checkpoints import MAX_3, MIN_3
from parity.toys import image, png, prepared
from selection import long_but

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.packed.packing import Shown
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
    "qwen3-vl reranker, pages of one query": Kind(
        qwen_checkpoints.qwen3_vl,
        {**QWEN, **RANKER, "head": {"yes_token": "y", "no_token": "n"}},
        lambda served, word: served.run("score", [PAGE, word, PAGE], "river"),
        reads("_reader._tower"),
    ),
    "qwen3-vl embedding": Kind(
        qwen_checkpoints.qwen3_vl,
        {
            **QWEN,
            "family": "multimodal-encoder",
            "outputs": {"dense": 48},
            "prompts": {"document": "{instruction}{text}", "default_instruction": "Represent."},
        },
        lambda served, word: served.run("encode", [PAGE], instruction=word),
        reads("_reader._tower"),
    ),
    "colqwen": Kind(
        qwen_checkpoints.colqwen,
        {**PAGES, "outputs": {"multivector": qwen_checkpoints.WIDTH}, "load": {"max_pixels": qwen_checkpoints.MOST}},
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
    "florence2": Kind(
        reader_checkpoints.florence2,
        {**READER, "outputs": {"entities": 0, "objects": 0, "data": 0}, "max_tokens": 256},
        extracting(task="<DocVQA>", instruction=str, max_new_tokens=9),
        reads("_kind._tower"),
    ),
    "lighton": Kind(
        reader_checkpoints.lighton, OCR, extracting(instruction=str, max_new_tokens=9), reads("_kind", "_page_features")
    ),
    "glm": Kind(
        reader_checkpoints.glm,
        OCR,
        extracting(task=lambda word: "table" if len(word) > 5 else "ocr", max_new_tokens=9),
        reads("_kind", "_page_features"),
    ),
    "paddle": Kind(
        reader_checkpoints.paddle, OCR, extracting(instruction=str, max_new_tokens=9), reads("_kind", "_page_features")
    ),
    "grounding-dino": Kind(
        detector_checkpoints.grounding_dino,
        {**DETECTOR, "max_tokens": detector_checkpoints.PROMPT_TOKENS},
        extracting(labels=lambda word: [word], threshold=0.0),
        reads("_kind._backbone.own", "forward"),
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


@pytest.mark.long
def test_a_page_that_comes_ten_times_in_a_batch_is_read_once(
    load: Callable[[str], Served], count: Callable[[str, Served], list[int]]
) -> None:
    served = replace(load("qwen3-vl reranker"), asker="a batch")
    passes = count("qwen3-vl reranker", served)
    scores = served.run("score", [PAGE, OTHER] * 5, "river")
    assert len(passes) == 2
    assert np.abs(np.array(scores) - np.array(scores[:2] * 5)).max() <= 2e-6


@pytest.mark.long
@pytest.mark.parametrize("name", ["qwen3-vl reranker", "colpali"])
def test_what_a_tower_gives_does_not_depend_on_mates(name: str, load: Callable[[str], Served]) -> None:
    """On a CPU outputs are equal bit for bit, so a cached output does not depend on the batch in which it was made."""
    served = load(name)
    recipe = next(iter(served.weights.rows.values())).images
    pages = [
        Shown(
            np.frombuffer(prepared_page.pixels, np.uint8).reshape(prepared_page.height, prepared_page.width, 3),
            *prepared_page.upright,
        )
        for prepared_page in (prepared(png(page), recipe) for page in (PAGE, OTHER, PAGE))
    ]
    tower, _ = KINDS[name].tower(served.weights)
    with torch.inference_mode():
        together = tower.forward(pages)
        alone = [tower.forward([page]) for page in pages]
    if isinstance(together, torch.Tensor):
        assert torch.equal(together, torch.cat(alone))
    else:
        assert all(
            torch.equal(tensor, torch.cat(own)) for tensor, own in zip(together, zip(*alone, strict=True), strict=True)
        )


def run_short(served: Served, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the vector of PAGE. The first pass behind the tower finds no memory."""
    backbone = served.weights.backbone
    forward, failures = backbone.forward, [MemoryError("no room")]

    def failing(packed: Any) -> Any:
        if failures:
            raise failures.pop()
        return forward(packed)

    with monkeypatch.context() as patched:
        patched.setattr(backbone, "forward", failing)
        (vector,) = served.run("encode", [PAGE])
    assert not failures
    return vector


@pytest.mark.long
def test_outputs_go_when_memory_ends_and_with_their_model(
    load: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass behind the tower finds no memory. All cached outputs are dropped, and the pass is right. Outputs that are
    cached later are dropped when the model is unloaded.
    """
    served = replace(load("qwen3-vl embedding"), asker="short")
    outputs, residency, name = served.engine.outputs, served.engine.residency, served.entry.id
    outputs.clear()
    outputs._paused_until_s = 0.0
    (expected,) = served.run("encode", [PAGE])
    assert outputs.use().held_bytes > 0
    assert equal(run_short(served, monkeypatch), expected)
    assert outputs.use().held_bytes == 0
    outputs._paused_until_s = 0.0
    served.run("encode", [OTHER])
    assert outputs.use().held_bytes > 0
    load.cache_clear()  # type: ignore[attr-defined]
    del served
    residency.release(name)
    assert outputs.use().held_bytes == 0
