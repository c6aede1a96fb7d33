"""Model folders whose tokenizer or weights cannot be right are refused by `inspect`, `add` and a load alike. Each
refusal says what to do.
"""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from parity import heads_checkpoints
from parity.checkpoints import ARCHITECTURES, add_modules, build, modules_of
from parity.score_checkpoints import build_head
from refused_files import (
    COPY,
    WEIGHTS,
    Good,
    cut_off,
    cut_off_in_the_header,
    empty,
    good_folders,
    lacking,
    larger,
    load,
    of_unreal_words,
    quantised,
    refused_everywhere,
    with_its_configuration_alone,
    with_nan,
    without_a_part,
    without_a_tensor,
    without_markers,
    without_tokenizer,
)
from selection import long_but
from tokenizers import Tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from sie_adapter.loading.inspection import inspect
from sie_adapter.loading.weight_files import check_weights, holds_nan
from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.entries import parse_entry


def dense(folder: Path) -> Path:
    return add_modules(build(folder, ARCHITECTURES["bert"]), modules_of(ARCHITECTURES["bert"]))


def cross(folder: Path) -> Path:
    return build_head(folder, "xlm-roberta", AutoModelForSequenceClassification)


def late(folder: Path) -> Path:
    return heads_checkpoints.stanford(folder, 24, {"query_maxlen": 24, "doc_maxlen": 90, "query_token_id": "[unused1]"})


def sparse(folder: Path) -> Path:
    return heads_checkpoints.splade(folder, heads_checkpoints.masked(folder.with_name("masked"), "bert"))


KINDS: dict[str, Callable[[Path], Path]] = {"dense": dense, "cross": cross, "late": late, "sparse": sparse}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    """Return a function that gives the model folder of a kind and its entry. Each is made once."""
    return good_folders(tmp_path_factory.mktemp("good"), KINDS)


CASES = [
    *((kind, without_tokenizer, ["has no tokenizer", COPY]) for kind in ("dense", "cross", "late", "sparse")),
    ("dense", with_its_configuration_alone, ["has no tokenizer", COPY]),
    ("dense", empty, ["tokenizer", COPY]),
    ("dense", of_unreal_words, ["reads plain sentences", "as unknown tokens", COPY]),
    *((kind, larger, ["its tokenizer has ids up to", "resize_token_embeddings"]) for kind in ("dense", "cross")),
    ("dense", lacking("[UNK]"), ["has no [UNK], which the model needs", COPY]),
    ("dense", lacking("[CLS]", "[SEP]"), ["has no token with the id", "which the model needs", COPY]),
    ("cross", without_markers, ["puts no special token before a text", COPY]),
    *((kind, cut_off, [WEIGHTS, "is cut off or damaged: it has", "download it again"]) for kind in ("dense",)),
    ("cross", cut_off_in_the_header, [WEIGHTS, "is cut off or damaged: it has 100 bytes", "download it again"]),
    *((kind, with_nan, [WEIGHTS, "contains NaN in 1 of its tensors"]) for kind in ("dense", "sparse")),
    *((kind, without_a_tensor, ["1 missing"]) for kind in ("dense", "cross")),
    ("dense", quantised(torch.int8), [WEIGHTS, "in int8, and config.json has no quantization_config"]),
    (
        "cross",
        quantised(torch.float8_e4m3fn),
        [WEIGHTS, "in float8_e4m3fn, and config.json has no quantization_config"],
    ),
    ("dense", without_a_part, ["names 1 files that the folder lacks: model-00002-of-00002.safetensors"]),
]


# one kind of model for each fault
USUAL = [case for number, case in enumerate(CASES) if case[1] not in [spoil for _, spoil, _ in CASES[:number]]]


@pytest.mark.parametrize(
    ("kind", "spoil", "texts"), long_but(CASES, USUAL), ids=[f"{kind} {spoil.__name__}" for kind, spoil, _ in CASES]
)
def test_a_folder_that_cannot_be_right_is_refused_everywhere(
    kind: str, spoil: Callable[[Path], None], texts: list[str], good: Good, tmp_path: Path
) -> None:
    refused_everywhere(spoil, texts, good(kind), tmp_path)


def test_a_file_shorter_than_its_header_is_refused_without_reading_it(tmp_path: Path) -> None:
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate(64 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadFailed, match="its header alone needs"):
            check_weights(tmp_path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize("name", ["float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_nan_is_seen_in_every_float(name: str) -> None:
    values = torch.tensor([[1.0, 2.0]]).to(getattr(torch, name))
    assert not holds_nan(values)
    assert holds_nan(torch.tensor([[1.0, float("nan")]]).to(getattr(torch, name)))
    assert not holds_nan(torch.tensor([1, 2]))


def test_special_tokens_that_the_weights_have_no_row_for_are_read_as_text(good: Good, tmp_path: Path) -> None:
    """Published models have such tokens, for images for instance. A text that holds one is no fault of its client."""
    source, entry = good("dense")
    folder = shutil.copytree(source, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    assert inspect(folder, "test/dense", {"path": str(folder)}).entry["outputs"] == entry["outputs"]
    model = load(parse_entry({**entry, "weights": {"path": str(folder)}}))
    served = Tokenizer.from_buffer(model.tokenizer)
    ids = served.encode("the <image> runs").ids
    assert max(ids) < model.vocabulary
    assert ids == Tokenizer.from_file(str(source / "tokenizer.json")).encode("the <image> runs").ids
