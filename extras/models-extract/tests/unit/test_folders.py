"""Folders of the extraction packages that no catalogue knows become entries that load and answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from inspected_models import inspected, run
from parity.decision_checkpoints import laya_folder
from parity.gliner_checkpoints import gliclass_folder, gliner2_boundary_folder, gliner2_folder, gliner_folder
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
from torch import nn

from sie_adapter.engine.engine import AdapterEngine
from sie_cli.models.inspect import answers
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import Settings
from sie_models_extract.extraction import fill

TEXTS = ["The river runs north."]
SETTINGS = Settings(device="cpu", default_compute_precision="float32")


@pytest.fixture(scope="module")
def engine() -> Iterator[AdapterEngine]:
    engine = AdapterEngine(SETTINGS)
    yield engine
    assert engine.stop(10)


def test_a_gliner_folder(tmp_path: Path, engine: AdapterEngine) -> None:
    folder = gliner_folder(tmp_path / "gliner", max_len=64)
    entry = inspected(folder)
    assert (entry.family, entry.outputs, entry.max_tokens) == ("gliner", {"entities": 0}, 512)
    assert {"gliner_config.json", "model.safetensors"} <= entry.weights.digests.keys()
    (output,) = run(engine, entry, "extract", TEXTS, labels=["person", "place"], threshold=0.0)
    assert output["entities"]


def test_a_gliner_folder_with_relations(tmp_path: Path, engine: AdapterEngine) -> None:
    entry = inspected(gliner_folder(tmp_path / "gliner", "relations"))
    assert (entry.family, entry.outputs) == ("gliner-relations", {"entities": 0, "relations": 0})
    (output,) = run(
        engine,
        entry,
        "extract",
        TEXTS,
        labels=["person", "place"],
        threshold=0.0,
        relation_labels=["lives in"],
        relation_threshold=0.0,
    )
    assert output["relations"]


@pytest.mark.parametrize(
    ("make", "family", "output"),
    [
        (gliner2_folder, "gliner2", "entities"),
        (gliner2_boundary_folder, "gliner2", "entities"),
        (gliclass_folder, "gliclass", "classifications"),
        (laya_folder, "laya", "classifications"),
    ],
)
def test_other_folders_load_and_answer(make: Callable[[Path], Path], family: str, output: str, tmp_path: Path) -> None:
    entry = inspected(make(tmp_path / "model"))
    assert (entry.family, set(entry.outputs)) == (family, {output})
    lines = answers(entry, SETTINGS)
    assert len(lines) > len(entry.tasks)
    assert "nan" not in "".join(lines).lower()


# folders of the extraction packages whose tokenizer or weights cannot be right are refused


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


# weights of extraction models


def test_a_pooler_of_another_shape_is_not_copied_because_it_is_never_run() -> None:
    model = nn.ModuleDict({"pooler": nn.Linear(2, 2), "body": nn.Linear(2, 3)})
    weights = {name: torch.ones_like(tensor) for name, tensor in model.state_dict().items()}
    fill(model, {**weights, "pooler.weight": torch.ones(5, 5)}, ModelEntry("m", {}, "gliner", {}, 8))
    assert torch.equal(model["body"].weight, torch.ones(3, 2))
