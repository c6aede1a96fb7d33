"""Token vectors of questions and of pages equal those of transformers' own Qwen2.5-VL and Qwen3-VL, their image
processor and a projection, as colpali-engine puts them together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from parity import qwen_checkpoints
from parity.device import SIXTEEN, SIXTEEN_TYPE
from parity.page_engine import Given, Served, Vectors, served_by
from parity.page_retrieval import agreement_with, check_scores, in_turns, merged, page_entry
from parity.qwen_checkpoints import LEAST, MOST, SPECIALS, WIDTH
from parity.table import ParityTable
from parity.toys import image, png
from selection import long_but

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.wire.messages import Input

MAX_DIFFERENCE = {"float32": 5e-6, SIXTEEN: 8e-2}
MAX_TOKENS = 200
QUESTION = "{text}" + "<|endoftext|>" * 10
PAGE = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>"
TEXTS = ["what is the total price", "river", "a {brace} and 東京, naïve 2026", ""]
# a square, a strip, a page that is scaled down, a page that is scaled up
PAGES = [
    image(width, height, seed) for seed, (width, height) in enumerate([(112, 112), (60, 230), (400, 200), (31, 33)])
]


entry_of = partial(page_entry, width=WIDTH, max_tokens=MAX_TOKENS, question=QUESTION)
SOURCES = in_turns(TEXTS, PAGES)


class Oracle:
    """The library's model and image processor, one input at a time, with weights to which the LoRA was added."""

    def __init__(self, folder: Path, lora: Path | None, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoConfig, AutoModel

        weights = merged(folder, lora)
        self._projection = [weights.pop(f"custom_text_proj.{part}").to(dtype) for part in ("weight", "bias")]
        config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
        self._model = AutoModel.from_config(config).eval()
        names = {name: re.sub(r"^model\.", "language_model.", name) for name in weights}
        self._model.load_state_dict({names[name]: tensor for name, tensor in weights.items()})
        self._model.to(dtype)
        self.inputs = qwen_checkpoints.Inputs(folder, min_pixels=LEAST, max_pixels=MOST)

    def __call__(self, source: Given) -> Vectors:
        """Return [tokens, width], each row of length one."""
        inputs = self.inputs(QUESTION.format(text=source)) if isinstance(source, str) else self.inputs(PAGE, [source])
        with torch.inference_mode():
            states = self._model(**inputs).last_hidden_state[0]
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


@pytest.mark.parametrize("precision", long_but(["float32", SIXTEEN], ["float32"]))
def test_token_vectors_equal_the_oracle(
    precision: str, kind: str, load: Callable[..., Served], folder: Path, lora: Path, oracle: Oracle, table: ParityTable
) -> None:
    """Questions and pages of many sizes in one batch, against the library one by one."""
    served = load(precision)
    agreement = agreement_with(oracle, served.run("encode", SOURCES), SOURCES)
    table.record(f"vision-language {kind}", served.path, precision, agreement)
    assert agreement.difference <= MAX_DIFFERENCE[precision]
    assert served.path == "packed"
    if precision == SIXTEEN:
        stock = Oracle(folder, lora, SIXTEEN_TYPE)
        own = agreement_with(oracle, [stock(source) for source in SOURCES], SOURCES)
        table.record(f"vision-language {kind}", "stock", precision, own)
        assert agreement.mean_distance <= 1.5 * own.mean_distance


def test_scores_equal_the_oracle(load: Callable[..., Served], oracle: Oracle) -> None:
    check_scores(load(), oracle, TEXTS[0], PAGES)


def test_rows_and_their_costs_follow_the_sizes_of_the_pages(load: Callable[..., Served], oracle: Oracle) -> None:
    """Ids are the processor's. A block costs its token, and as much again for the tower."""
    inputs = [Input(images=(png(page),)) for page in PAGES]
    work_rows = load().rows("encode", inputs)
    for row, page in zip(work_rows.rows, PAGES, strict=True):
        expected = oracle.inputs(PAGE, [page])["input_ids"][0].tolist()
        assert row.ids.tolist() == expected
        assert row.cost == len(expected) + 1 + expected.count(SPECIALS.index("<|image_pad|>"))


def test_a_text_with_the_token_of_images_and_a_second_image_are_refused_alone(load: Callable[..., Served]) -> None:
    file = png(PAGES[0])
    work_rows = load().rows(
        "encode", [Input("a <|image_pad|> of a river"), Input("a river"), Input(images=(file, file))]
    )
    assert {index: error.reason for index, error in work_rows.unfit.items()} == {
        0: "reserved_token",
        2: "unsupported_modality",
    }
