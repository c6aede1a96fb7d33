"""Token vectors of questions and of pages equal those of transformers' own Qwen2.5-VL and Qwen3-VL, their image
processor and a projection, as colpali-engine puts them together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from parity import qwen_checkpoints
from parity.device import SIXTEEN, SIXTEEN_TYPE
from parity.page_engine import Given, Served, Vectors, at_once, served_by
from parity.qwen_checkpoints import BLOCK, LEAST, MOST, SPECIALS, WIDTH
from parity.table import Agreement, ParityTable
from parity.toys import image, png
from selection import long_but

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.packed.packing import PackedBatch
from sie_adapter.pages.qwen_vl import axes_of
from sie_contracts.errors import InternalFailure, ModelLoadFailed
from sie_contracts.models.entries import ModelEntry, parse_entry
from sie_contracts.wire.messages import Input

MAX_DIFFERENCE = {"float32": 5e-6, SIXTEEN: 8e-2}
MAX_TOKENS = 200
QUESTION = "{text}" + "<|endoftext|>" * 10
PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
TEXTS = ["what is the total price", "river", "a {brace} and 東京, naïve 2026", ""]
# a square, a strip, one that is made smaller, one that is made larger
PAGES = [
    image(width, height, seed) for seed, (width, height) in enumerate([(112, 112), (60, 230), (400, 200), (31, 33)])
]


def entry_of(folder: Path, name: str, **changed: Any) -> ModelEntry:
    return parse_entry(
        {
            "id": name,
            "weights": {"path": str(folder)},
            "family": "vision-language",
            "inputs": ["text", "image"],
            "outputs": {"multivector": WIDTH},
            "max_tokens": MAX_TOKENS,
            "prompts": {"query": QUESTION, "document": QUESTION},
            **changed,
        }
    )


class Oracle:
    """The library's model and image processor, one input at a time, with weights to which the LoRA was added."""

    def __init__(self, folder: Path, lora: Path | None, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoConfig, AutoModel

        weights = qwen_checkpoints.merged(folder, lora)
        self._projection = [weights.pop(f"custom_text_proj.{part}").to(dtype) for part in ("weight", "bias")]
        config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
        self._model = AutoModel.from_config(config).eval()
        names = {name: re.sub(r"^model\.", "language_model.", name) for name in weights}
        self._model.load_state_dict({names[name]: each for name, each in weights.items()})
        self._model.to(dtype)
        self.inputs = qwen_checkpoints.Inputs(folder, min_pixels=LEAST, max_pixels=MOST)

    def __call__(self, given: Given) -> Vectors:
        """[tokens, width], each row of the length one."""
        asked = self.inputs(QUESTION.format(text=given)) if isinstance(given, str) else self.inputs(PAGE, [given])
        with torch.inference_mode():
            states = self._model(**asked).last_hidden_state[0]
            return F.normalize(F.linear(states, *self._projection).float(), dim=-1).numpy()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["colqwen2.5", "colqwen3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = {"colqwen2.5": qwen_checkpoints.colqwen, "colqwen3": qwen_checkpoints.colqwen3}[kind]
    return build(tmp_path_factory.mktemp("pages") / "colqwen")


@pytest.fixture(scope="module")
def lora(folder: Path) -> Path:
    return qwen_checkpoints.colqwen_lora(folder.parent / "lora", folder)


@pytest.fixture(scope="module")
def load(cpu_engine: AdapterEngine, kind: str, folder: Path, lora: Path) -> Callable[..., Served]:
    @cache
    def loaded(precision: str = "float32", *, plain: bool = False) -> Served:
        named = {} if plain else {"lora": str(lora)}
        entry = entry_of(
            folder,
            f"pages/{kind}-{'plain' if plain else 'lora'}-{precision}",
            load={"precision": precision, "min_pixels": LEAST, "max_pixels": MOST},
            run=named,
        )
        served = served_by(cpu_engine, entry)
        if not plain:
            cpu_engine.ensure_lora(entry.id, str(lora))
        return served

    return loaded


@pytest.fixture(scope="module")
def oracle(folder: Path, lora: Path) -> Oracle:
    return Oracle(folder, lora)


def _mixed() -> list[Given]:
    return [each for pair in zip(TEXTS, PAGES, strict=True) for each in pair]


@pytest.mark.parametrize("precision", long_but(["float32", SIXTEEN], ["float32"]))
def test_token_vectors_equal_the_oracle(
    precision: str,
    kind: str,
    load: Callable[..., Served],
    folder: Path,
    lora: Path,
    oracle: Oracle,
    table: ParityTable,
) -> None:
    """Questions and pages of many sizes in one batch, against the library one by one."""
    served = load(precision)
    found, expected = served.run("encode", _mixed()), [oracle(each) for each in _mixed()]
    assert [each.shape for each in found] == [each.shape for each in expected]
    agreement = Agreement.of(np.concatenate(found), np.concatenate(expected))
    table.record(f"vision-language {kind}", served.path, precision, agreement)
    assert agreement.difference <= MAX_DIFFERENCE[precision]
    assert served.path == "packed"
    if precision == SIXTEEN:
        stock = Oracle(folder, lora, SIXTEEN_TYPE)
        own = Agreement.of(np.concatenate([stock(each) for each in _mixed()]), np.concatenate(expected))
        table.record(f"vision-language {kind}", "stock", precision, own)
        assert agreement.mean_distance <= 1.5 * own.mean_distance


@pytest.mark.long
def test_without_the_lora_the_base_answers(load: Callable[..., Served], folder: Path) -> None:
    """Which are other vectors, also those of the projection."""
    found, expected = load(plain=True).run("encode", _mixed()), [Oracle(folder, None)(each) for each in _mixed()]
    assert Agreement.of(np.concatenate(found), np.concatenate(expected)).difference <= MAX_DIFFERENCE["float32"]
    assert Agreement.of(np.concatenate(load().run("encode", _mixed())), np.concatenate(expected)).cosine < 0.9


def test_scores_equal_the_oracle(load: Callable[..., Served], oracle: Oracle) -> None:
    """MaxSim between a question and pages."""
    found = load().run("score", PAGES, TEXTS[0])
    expected = [(oracle(TEXTS[0]) @ oracle(page).T).max(1).sum() for page in PAGES]
    assert np.abs(np.array(found) - expected).max() <= 1e-4


def test_token_vectors_do_not_depend_on_batch_mates(load: Callable[..., Served]) -> None:
    served = load()
    for each, beside in zip(_mixed(), served.run("encode", _mixed()), strict=True):
        (alone,) = served.run("encode", [each])
        assert np.abs(alone - beside).max() <= 5e-6


@pytest.mark.long
def test_the_padded_path_gives_the_same(cpu_engine: AdapterEngine, folder: Path, load: Callable[..., Served]) -> None:
    """That of an architecture whose packed states would be wrong."""
    entry = entry_of(folder, f"{folder.parent.name}/padded", load={"min_pixels": LEAST, "max_pixels": MOST})
    padded = served_by(cpu_engine, entry)
    padded.weights.backbone.run_padded()
    for one, other in zip(padded.run("encode", _mixed()), load(plain=True).run("encode", _mixed()), strict=True):
        assert np.abs(one - other).max() <= 5e-6


@pytest.mark.long
def test_two_threads_give_the_same_vectors(load: Callable[..., Served]) -> None:
    served = load()
    expected = np.concatenate(served.run("encode", _mixed()))
    found = at_once(lambda: np.concatenate(served.run("encode", _mixed())), 3)
    assert all(np.array_equal(each, expected) for each in found)


def test_rows_and_their_costs_follow_the_sizes_of_the_pages(load: Callable[..., Served], oracle: Oracle) -> None:
    """Ids are the processor's. A block costs its token, and as much again for the tower."""
    inputs = [Input(images=(png(page),)) for page in PAGES]
    made = load().rows("encode", inputs)
    for row, page in zip(made.rows, PAGES, strict=True):
        expected = oracle.inputs(PAGE, [page])["input_ids"][0].tolist()
        assert row.ids.tolist() == expected
        assert row.cost == len(expected) + 1 + expected.count(SPECIALS.index("<|image_pad|>"))


def test_a_text_with_the_token_of_images_and_a_second_image_are_refused_alone(load: Callable[..., Served]) -> None:
    file = png(PAGES[0])
    made = load().rows("encode", [Input("a <|image_pad|> of a river"), Input("a river"), Input(images=(file, file))])
    assert {index: error.reason for index, error in made.unfit.items()} == {
        0: "reserved_token",
        2: "unsupported_modality",
    }


def test_images_that_do_not_belong_to_their_ids_are_an_error() -> None:
    """And none of the model's own making: a batch that is torn apart gives no vectors."""
    ids = np.array([1, 5, 5, 2], np.int64)
    packed = PackedBatch(ids, np.arange(4), np.array([0, 4], np.int32), np.array([[0, 1, 4, 4]]), np.zeros(1, np.int64))
    assert axes_of(packed, 5, [[(1, 2)]]).tolist() == [[0, 1, 1, 3], [0, 1, 1, 3], [0, 1, 2, 3]]
    with pytest.raises(InternalFailure, match="2 image tokens came with 1 images"):
        axes_of(packed, 5, [[(2, 2)]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"outputs": {"multivector": WIDTH + 1}, "load": {"max_pixels": MOST, "min_pixels": LEAST}},
            "outputs.multivector is 25, the vectors of the model are 24 wide",
        ),
        ({"max_tokens": 30}, "max_tokens is 30, one image needs"),
        ({"load": {"max_pixels": MOST, "min_pixels": BLOCK**2}, "max_tokens": 20}, "max_tokens is 20, one image"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(
    change: dict[str, Any], message: str, cpu_engine: AdapterEngine, folder: Path
) -> None:
    with pytest.raises(ModelLoadFailed, match=message):
        cpu_engine.residency.ensure("pages/wrong", entry_of(folder, "pages/wrong", **change))
