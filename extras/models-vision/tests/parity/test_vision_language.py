"""Token vectors of questions and of pages equal those of transformers' own ColPali and processor."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import dual_checkpoints
from parity.device import SIXTEEN
from parity.dual_checkpoints import PAGE, WIDTH
from parity.page_engine import Given, Served, Vectors, served_by
from parity.page_retrieval import agreement_with, check_alone, in_turns, page_entry
from parity.table import ParityTable
from parity.toys import image
from transformers import AutoProcessor, ColPaliForRetrieval

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.models.options import run_options
from sie_contracts.wire.messages import Input
from sie_sidecar.prepare import layouts
from sie_sidecar.prepare.rows import WorkItemInput

MAX_DIFFERENCE = {"float32": 5e-6, SIXTEEN: 6e-2}
MAX_TOKENS = 200
QUESTION = "<bos>Question: {text}" + "<pad>" * 10 + "\n"
TEXTS = ["what is the total price", "river", "a {brace} and 東京, naïve 2026", ""]
PAGES = [
    image(width, height, seed) for seed, (width, height) in enumerate([(100, 140), (300, 40), (PAGE, PAGE), (33, 31)])
]


entry_of = partial(page_entry, width=WIDTH, max_tokens=MAX_TOKENS, question=QUESTION)
SOURCES = in_turns(TEXTS, PAGES)


class Oracle:
    """The library's model and processor, one input at a time."""

    def __init__(self, folder: Path) -> None:
        self._model = ColPaliForRetrieval.from_pretrained(folder, attn_implementation="eager").eval()
        self.processor = AutoProcessor.from_pretrained(folder, backend="pil")

    def __call__(self, source: Given) -> Vectors:
        """Return [tokens, width], each row of length one."""
        inputs = (
            self.processor.process_queries([source])
            if isinstance(source, str)
            else self.processor.process_images([source])
        )
        inputs.pop("labels", None)
        with torch.inference_mode():
            return self._model(**inputs).embeddings[0].numpy()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dual_checkpoints.colpali(tmp_path_factory.mktemp("pages") / "colpali")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def load(cpu_engine: AdapterEngine, folder: Path) -> Callable[..., Served]:
    @cache
    def loaded(precision: str = "float32") -> Served:
        entry = entry_of(folder, f"pages/colpali-{precision}", load={"precision": precision})
        return served_by(cpu_engine, entry)

    return loaded


@pytest.mark.parametrize("precision", ["float32", SIXTEEN])
def test_token_vectors_equal_the_oracle(
    precision: str, load: Callable[..., Served], oracle: Oracle, table: ParityTable
) -> None:
    """Questions and pages of many sizes in one batch, against the library one by one."""
    served = load(precision)
    agreement = agreement_with(oracle, served.run("encode", SOURCES), SOURCES)
    table.record("vision-language colpali", served.path, precision, agreement)
    assert agreement.difference <= MAX_DIFFERENCE[precision]
    assert served.path == "packed"


def test_scores_equal_the_oracle(load: Callable[..., Served], oracle: Oracle) -> None:
    """The scores are MaxSim between a question and pages."""
    scores = load().run("score", PAGES, TEXTS[0])
    expected = oracle.processor.score_retrieval(
        [torch.from_numpy(oracle(TEXTS[0]))], [torch.from_numpy(oracle(page)) for page in PAGES]
    )[0]
    assert np.abs(np.array(scores) - expected.numpy()).max() <= 1e-4


def test_token_vectors_do_not_depend_on_batch_mates(load: Callable[..., Served]) -> None:
    check_alone(load(), SOURCES)


def test_a_text_with_the_token_of_images_is_refused_alone(load: Callable[..., Served]) -> None:
    served = load()
    layout = served.weights.rows["encode"]
    resolved = Catalogue({served.entry.id: served.entry}).resolve(served.entry.id)
    _, options = run_options(resolved, {}, "encode")
    work = WorkItemInput([Input("a <image> of a river"), Input("a river")], None, options.run)
    (batch,) = layouts.make(served.tokenizer, layout, [work])
    assert {index: error.reason for index, error in batch.unfit.items()} == {0: "reserved_token"}
