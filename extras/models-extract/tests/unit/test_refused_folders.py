"""Folders of the extraction packages whose tokenizer or weights cannot be right are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from parity.gliner_checkpoints import gliclass_folder, gliner2_folder, gliner_folder
from refused_files import (
    COPY,
    WEIGHTS,
    Good,
    cut_off,
    good_folders,
    larger,
    refused_everywhere,
    with_its_configuration_alone,
    with_nan,
    without_a_tensor,
    without_tokenizer,
)
from selection import long_but

KINDS: dict[str, Callable[[Path], Path]] = {
    "gliner": gliner_folder,
    "gliner2": gliner2_folder,
    "gliclass": gliclass_folder,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Good:
    """Return a function that gives the model folder of a kind and its entry. Each is made once."""
    return good_folders(tmp_path_factory.mktemp("good"), KINDS)


CASES = [
    ("gliner", with_its_configuration_alone, ["has no tokenizer", COPY]),
    *((kind, without_tokenizer, ["has no tokenizer", COPY]) for kind in ("gliner2", "gliclass")),
    *((kind, larger, ["its tokenizer has ids up to", "resize_token_embeddings"]) for kind in KINDS),
    ("gliner", cut_off, [WEIGHTS, "is cut off or damaged: it has", "download it again"]),
    *((kind, with_nan, [WEIGHTS, "contains NaN in 1 of its tensors"]) for kind in KINDS),
    *((kind, without_a_tensor, ["1 missing"]) for kind in KINDS),
]


@pytest.mark.parametrize(
    ("kind", "spoil", "texts"), long_but(CASES, CASES[:1]), ids=[f"{kind} {spoil.__name__}" for kind, spoil, _ in CASES]
)
def test_a_folder_that_cannot_be_right_is_refused_everywhere(
    kind: str, spoil: Callable[[Path], None], texts: list[str], good: Good, tmp_path: Path
) -> None:
    refused_everywhere(spoil, texts, good(kind), tmp_path)
