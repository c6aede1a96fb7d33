"""Folders of the extraction packages that no catalogue knows become entries that load and answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inspected_models import inspected, run
from parity.decision_checkpoints import laya_folder
from parity.gliner_checkpoints import gliclass_folder, gliner2_boundary_folder, gliner2_folder, gliner_folder

from sie_adapter.engine.engine import AdapterEngine
from sie_cli.models.inspect import answers
from sie_contracts.settings import Settings

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
