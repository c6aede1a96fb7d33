"""Vectors and scores of texts with images equal those of transformers' own Qwen3-VL, read as its vendor reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parity import qwen_checkpoints
from parity.device import SIXTEEN
from parity.page_engine import Served, served_by
from parity.qwen_checkpoints import MAX_3, MIN_3
from parity.table import Agreement, ParityTable, Scores
from parity.toys import image, png
from PIL import Image
from selection import long_but

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.wire.messages import Input

MAX_DIFFERENCE = {"float32": 2e-6, SIXTEEN: 5e-2}
MAX_TOKENS = 160
BOUNDS = {"min_pixels": MIN_3, "max_pixels": MAX_3}
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
BEFORE = "<|im_start|>system\n{instruction}<|im_end|>\n<|im_start|>user\n"
TURN = "<|im_end|>\n<|im_start|>assistant\n"
TASK = "Represent the user's input."
PAIR = (
    '<|im_start|>system\nJudge whether the Document meets the requirements. Note that the answer can only be "yes" or '
    '"no".<|im_end|>\n<|im_start|>user\n',
    "<Instruct>: {instruction}<Query>:{query}\n<Document>:{document}",
    TURN,
)
RANKING = "Given a search query, retrieve relevant candidates that answer the query."
# The toy vocabulary lacks yes and no, so two letters stand for them.
YES, NO = "y", "n"
PICTURES = [
    image(width, height, seed)
    for seed, (width, height) in enumerate([(64, 64), (200, 50), (90, 90), (33, 170), (300, 280)])
]
FILES = [png(picture) for picture in PICTURES]
# a text, an image, both, several images, nothing
GIVEN: list[tuple[str, list[int]]] = [
    ("a river", []),
    ("", [0]),
    ("the old town\nby the sea", [1]),
    ("", [2, 3, 4]),
    ("naïve 東京", [3, 1]),
    ("", []),
    ("word " * 9, []),
]


Side = tuple[str, Sequence[Image.Image]]  # a text and its images


def shown(source: tuple[str, list[int]]) -> Side:
    text, places = source
    return text, [PICTURES[place] for place in places]


def entry_of(folder: Path, name: str, **changed: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": name,
            "weights": {"path": str(folder)},
            "family": "multimodal-encoder",
            "inputs": ["text", "image"],
            "outputs": {"dense": 48},
            "max_tokens": MAX_TOKENS,
            "prompts": {"query": BEFORE + "{text}", "document": BEFORE + "{text}", "default_instruction": TASK},
            "load": BOUNDS,
            **changed,
        }
    )


def reranker_of(folder: Path, name: str, **changed: Any) -> ModelEntry:
    ranks = {"pair": PAIR, "head": {"yes_token": YES, "no_token": NO}, "max_tokens": 400}
    own = {"family": "multimodal-reranker", "outputs": {"score": 0}, "prompts": {"default_instruction": RANKING}}
    return entry_of(folder, name, **{**ranks, **own, **changed})


def inputs_of(sources: Sequence[tuple[str, list[int]]]) -> list[Input]:
    return [Input(text, images=tuple(FILES[place] for place in places)) for text, places in sources]


class Oracle:
    """The library's model, one input at a time."""

    def __init__(self, folder: Path) -> None:
        from transformers import Qwen3VLForConditionalGeneration

        self._model = Qwen3VLForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
        self.inputs = qwen_checkpoints.Inputs(folder, **BOUNDS)

    def vector(self, text: str, images: Sequence[Image.Image], task: str = TASK) -> NDArray[np.float32]:
        """Return [width], of length one."""
        content = SHOWN * len(images) + text or "NULL"
        tensors = self.inputs(BEFORE.format(instruction=task) + content + TURN, images)
        with torch.inference_mode():
            state = self._model.model(**tensors).last_hidden_state[0, -1]
            return torch.nn.functional.normalize(state, dim=0).numpy()  # type: ignore[no-any-return]

    def score(self, query: Side, document: Side, task: str = RANKING) -> float:
        """Return P(yes) of the two answers."""
        sides = [SHOWN * len(images) + text or "NULL" for text, images in (query, document)]
        prompt = PAIR[0] + f"<Instruct>: {task}<Query>:{sides[0]}\n<Document>:{sides[1]}" + PAIR[2]
        tensors = self.inputs(prompt, [*query[1], *document[1]])
        answers = [self.inputs(answer)["input_ids"][0] for answer in (NO, YES)]
        assert [len(ids) for ids in answers] == [1, 1]
        with torch.inference_mode():
            logits = self._model(**tensors).logits[0, -1]
            return float(torch.sigmoid(logits[answers[1][0]] - logits[answers[0][0]]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen_checkpoints.qwen3_vl(tmp_path_factory.mktemp("seen") / "qwen3-vl")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def load(cpu_engine: AdapterEngine, folder: Path) -> Callable[..., Served]:
    @cache
    def loaded(precision: str = "float32", *, ranks: bool = False) -> Served:
        make = reranker_of if ranks else entry_of
        entry = make(
            folder, f"seen/{'ranks' if ranks else 'embeds'}-{precision}", load={**BOUNDS, "precision": precision}
        )
        return served_by(cpu_engine, entry)

    return loaded


@pytest.mark.parametrize("precision", long_but(["float32", SIXTEEN], ["float32"]))
def test_vectors_equal_the_oracle(
    precision: str, load: Callable[..., Served], oracle: Oracle, table: ParityTable
) -> None:
    """Texts, images and both in one batch, against the library one by one."""
    served = load(precision)
    vectors = np.stack(served.run("encode", inputs_of(GIVEN)))
    expected = np.stack([oracle.vector(*shown(source)) for source in GIVEN])
    agreement = Agreement.of(vectors, expected)
    table.record("multimodal-encoder qwen3-vl", served.path, precision, agreement)
    assert agreement.difference <= MAX_DIFFERENCE[precision]
    assert served.path == "packed"


INSTRUCTIONS = [("Find it", "Find it."), ("Find it!", "Find it!"), (" Find it ", "Find it.")]


@pytest.mark.parametrize(("instruction", "read"), long_but(INSTRUCTIONS, INSTRUCTIONS[:1]))
def test_an_instruction_ends_with_a_mark(
    instruction: str, read: str, load: Callable[..., Served], oracle: Oracle
) -> None:
    """The vendor adds a full stop where there is none."""
    (vector,) = load().run("encode", [Input("a river")], instruction=instruction)
    assert np.abs(vector - oracle.vector("a river", [], read)).max() <= 2e-6


def test_a_long_text_is_cut_before_the_end_of_the_turn_and_never_its_images(load: Callable[..., Served]) -> None:
    served = load()
    last = served.tokenizer.last.tolist()
    assert len(last) > 2
    for images in ((), (FILES[1], FILES[3])):
        row = served.rows("encode", [Input("word " * 400, images=images)]).rows[0]
        assert len(row.ids) == MAX_TOKENS
        assert row.truncated
        assert row.ids[-len(last) :].tolist() == last
        assert len(row.images) == len(images)
        (whole,) = served.run("encode", [Input("word " * 400, images=images)])
        assert np.isfinite(whole).all()


def test_images_that_fill_more_than_the_model_reads_are_refused_alone(load: Callable[..., Served]) -> None:
    outcomes = load().run("encode", [Input("", images=(FILES[4],) * 12), Input("a river")])
    assert outcomes[0].reason == "too_long"
    assert outcomes[1].shape == (48,)


def test_the_token_of_images_in_a_text_is_refused_beside_images_too(load: Callable[..., Served]) -> None:
    batch = load().rows("encode", [Input("a <|image_pad|>", images=(FILES[0],)), Input("x", images=(FILES[0],))])
    assert {index: error.reason for index, error in batch.unfit.items()} == {0: "reserved_token"}


QUERIES: list[tuple[str, list[int]]] = [("what is by the sea", []), ("", [0]), ("which of these", [1])]


@pytest.mark.parametrize("precision", long_but(["float32", SIXTEEN], ["float32"]))
def test_scores_equal_the_oracle(
    precision: str, load: Callable[..., Served], oracle: Oracle, table: ParityTable
) -> None:
    """Queries and documents have images."""
    served = load(precision, ranks=True)
    scores, expected = [], []
    for query in QUERIES:
        scores += served.run("score", inputs_of(GIVEN), inputs_of([query])[0])
        expected += [oracle.score(shown(query), shown(document)) for document in GIVEN]
    difference = float(np.abs(np.array(scores) - expected).max())
    table.record("multimodal-reranker qwen3-vl", served.path, precision, Scores(difference))
    assert difference <= {"float32": 2e-6, SIXTEEN: 5e-2}[precision]
    assert np.ptp(expected) > 0.05
    assert served.path == "packed"


def test_a_document_is_cut_and_never_its_images_nor_the_template(load: Callable[..., Served]) -> None:
    served = load(ranks=True)
    row = served.rows("score", [Input("word " * 900, images=(FILES[1],))], Input("sea", images=(FILES[0],))).rows[0]
    end = served.tokenizer.tokenise([TURN], 100, "END")[0].ids.tolist()
    assert len(row.ids) == served.weights.max_tokens
    assert row.ids[-len(end) :].tolist() == end
    assert [picture.upright for picture in row.images] == [(64, 64), (50, 200)]
    assert row.truncated
