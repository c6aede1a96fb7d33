"""Token vectors of questions and of pages equal those of transformers' own Idefics3, its processor and a projection, as
colpali-engine puts them together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parity import tiled_checkpoints
from parity.device import SIXTEEN, SIXTEEN_TYPE
from parity.page_engine import Given, Served, Vectors, served_by
from parity.page_retrieval import agreement_with, in_turns, merged, page_entry
from parity.table import ParityTable
from parity.tiled_checkpoints import END, LONGEST, TILE, TOKENS, WIDTH
from parity.toys import image
from selection import long_but

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.errors import ModelLoadFailed

MAX_DIFFERENCE = {"float32": 5e-6, SIXTEEN: 8e-2}
MAX_TOKENS = 300
QUESTION = "{text}" + END * 10
PAGE = f"<|im_start|>User:<image>Describe the image.{END}\nAssistant:"
TEXTS = ["what is the total price", "river", "a {brace} and 東京, naïve 2026", "", "river\n\nbank", "7 x"]
# landscape, a strip, a square, portrait, smaller than a tile, as long as the longest edge
PAGES = [
    image(width, height, seed)
    for seed, (width, height) in enumerate([(300, 200), (31, 290), (112, 112), (97, 140), (33, 20), (LONGEST, 60)])
]


entry_of = partial(page_entry, width=WIDTH, max_tokens=MAX_TOKENS, question=QUESTION)
SOURCES = in_turns(TEXTS, PAGES)


class Oracle:
    """The library's model and processor, one input at a time, with weights to which the LoRA was added."""

    def __init__(self, folder: Path, lora: Path | None, dtype: torch.dtype = torch.float32) -> None:
        from transformers import AutoConfig, AutoTokenizer, Idefics3ImageProcessorPil, Idefics3Model, Idefics3Processor

        weights = merged(folder, lora)
        self._dtype = dtype
        self._projection = [weights.pop(f"linear.{part}").to(dtype) for part in ("weight", "bias")]
        config = AutoConfig.from_pretrained(folder, attn_implementation="eager")
        self._model = Idefics3Model(config).eval()
        self._model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
        self._model.to(dtype)
        images, tokenizer = Idefics3ImageProcessorPil.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        self.processor = Idefics3Processor(images, tokenizer, image_seq_len=TOKENS)

    def inputs(self, source: Given) -> Any:
        if isinstance(source, str):
            return self.processor(text=[QUESTION.format(text=source)], return_tensors="pt")
        return self.processor(text=[PAGE], images=[source], return_tensors="pt")

    def __call__(self, source: Given) -> Vectors:
        """Return [tokens, width], each row of length one."""
        with torch.inference_mode():
            states = self._model(**self.inputs(source)).last_hidden_state[0]
            return F.normalize(F.linear(states, *self._projection).float(), dim=-1).numpy()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiled_checkpoints.colidefics3(tmp_path_factory.mktemp("tiles") / "colidefics3")


@pytest.fixture(scope="module")
def lora(folder: Path) -> Path:
    return tiled_checkpoints.lora(folder.parent / "lora", folder)


@pytest.fixture(scope="module")
def load(cpu_engine: AdapterEngine, folder: Path, lora: Path) -> Callable[..., Served]:
    @cache
    def loaded(precision: str = "float32", *, plain: bool = False) -> Served:
        name = f"tiles/{'plain' if plain else 'colidefics3'}-{precision}"
        run = {} if plain else {"lora": str(lora)}
        served = served_by(cpu_engine, entry_of(folder, name, load={"precision": precision}, run=run))
        if not plain:
            cpu_engine.ensure_lora(name, str(lora))
        return served

    return loaded


@pytest.fixture(scope="module")
def oracle(folder: Path, lora: Path) -> Oracle:
    return Oracle(folder, lora)


@pytest.mark.parametrize("precision", long_but(["float32", SIXTEEN], ["float32"]))
def test_token_vectors_equal_the_oracle(
    precision: str, load: Callable[..., Served], folder: Path, lora: Path, oracle: Oracle, table: ParityTable
) -> None:
    """Questions and pages of many sizes in one batch, against the library one by one."""
    served = load(precision)
    agreement = agreement_with(oracle, served.run("encode", SOURCES), SOURCES)
    table.record("vision-language colidefics3", served.path, precision, agreement)
    assert agreement.difference <= MAX_DIFFERENCE[precision]
    assert served.path == "packed"
    if precision == SIXTEEN:
        stock = Oracle(folder, lora, SIXTEEN_TYPE)
        own = agreement_with(oracle, [stock(source) for source in SOURCES], SOURCES)
        table.record("vision-language colidefics3", "stock", precision, own)
        assert agreement.mean_distance <= 1.5 * own.mean_distance


@pytest.mark.parametrize("page", PAGES, ids=[f"{page.width}x{page.height}" for page in PAGES])
def test_the_row_of_a_page_is_the_processors(page: Any, load: Callable[..., Served], oracle: Oracle) -> None:
    """The row costs more than its tokens, because the tower reads the tiles of the page."""
    served, expected = load(), oracle.inputs(page)
    (row,) = served.rows("encode", [page]).rows
    assert row.ids.tolist() == expected.input_ids[0].tolist()
    tiles = expected.pixel_values.shape[1]
    assert row.cost == len(row.ids) + 1 + tiles * (TILE // 16) ** 2 // 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_image_size": {"longest_edge": 32}}, "config.json cuts images into tiles of 64 pixels"),
        ({"do_image_splitting": False}, "do_image_splitting is false, which no recipe supports"),
    ],
)
def test_a_processor_that_cuts_otherwise_is_refused(
    settings: dict[str, Any], message: str, cpu_engine: AdapterEngine, tmp_path: Path
) -> None:
    folder = tiled_checkpoints.colidefics3(tmp_path / "other", **settings)
    with pytest.raises(ModelLoadFailed, match=message):
        cpu_engine.residency.ensure("tiles/other", entry_of(folder, "tiles/other"))
