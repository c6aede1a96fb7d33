"""Folders of models of sounds, and of readers, that no catalogue knows become entries that load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inspected_models import check_processor_alone, check_that_it_loads, inspected
from parity import reader_checkpoints, sound_checkpoints

from sie_adapter.engine.engine import AdapterEngine
from sie_contracts.settings import Settings

SETTINGS = Settings(device="cpu", default_compute_precision="float32")


@pytest.fixture(scope="module")
def engine() -> Iterator[AdapterEngine]:
    engine = AdapterEngine(SETTINGS)
    yield engine
    assert engine.stop(10)


def test_a_model_of_sounds_becomes_an_entry_that_loads(tmp_path: Path, engine: AdapterEngine) -> None:
    folder = sound_checkpoints.clap(tmp_path / "model")
    outputs = {"dense": sound_checkpoints.WIDTH}
    model = check_that_it_loads(folder, engine, "sound-encoder", outputs, sound_checkpoints.TOKENS, "audio")
    assert model.rows["encode"].sounds


@pytest.mark.parametrize(("kind", "max_tokens"), [("whisper", 64), ("parakeet", 375)])
def test_a_reader_of_sounds_becomes_an_entry_that_loads(
    kind: str, max_tokens: int, tmp_path: Path, engine: AdapterEngine
) -> None:
    folder = getattr(sound_checkpoints, kind)(tmp_path / "model")
    model = check_that_it_loads(folder, engine, "sound-reader", {"entities": 0, "data": 0}, max_tokens, "audio")
    assert model.rows["extract"].sounds
    assert "generation_config.json" in inspected(folder).weights.digests


@pytest.mark.parametrize(
    ("build_folder", "family", "outputs", "max_tokens"),
    [
        (reader_checkpoints.donut, "document-reader", {"entities": 0, "data": 0}, reader_checkpoints.DONUT_TOKENS),
        (reader_checkpoints.glm, "document-reader", {"entities": 0, "data": 0}, reader_checkpoints.OCR_TOKENS),
    ],
)
def test_readers_of_images_become_entries_that_load(
    build_folder: Callable[[Path], object],
    family: str,
    outputs: dict[str, int],
    max_tokens: int,
    tmp_path: Path,
    engine: AdapterEngine,
) -> None:
    folder = tmp_path / "model"
    build_folder(folder)
    assert check_that_it_loads(folder, engine, family, outputs, max_tokens).rows


@pytest.mark.parametrize(
    "build_folder", [sound_checkpoints.clap, sound_checkpoints.whisper, sound_checkpoints.parakeet]
)
def test_the_processor_of_a_folder_may_be_in_processor_config_alone(
    build_folder: Callable[[Path], object], tmp_path: Path, engine: AdapterEngine
) -> None:
    build_folder(tmp_path / "model")
    check_processor_alone(tmp_path / "model", engine, "feature_extractor")
