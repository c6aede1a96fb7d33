"""Folders of models of images that no catalogue knows become entries that load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inspected_models import check_processor_alone, check_that_it_loads, entry_of
from parity import detector_checkpoints, dual_checkpoints, qwen_checkpoints, tiled_checkpoints

from sie_adapter.engine.engine import AdapterEngine
from sie_adapter.loading.inspection import inspect
from sie_contracts.settings import Settings

SETTINGS = Settings(device="cpu", default_compute_precision="float32")


@pytest.fixture(scope="module")
def engine() -> Iterator[AdapterEngine]:
    engine = AdapterEngine(SETTINGS)
    yield engine
    assert engine.stop(10)


@pytest.mark.parametrize(
    ("build_folder", "family", "outputs", "max_tokens"),
    [
        (dual_checkpoints.clip, "dual-encoder", {"dense": dual_checkpoints.WIDTH}, dual_checkpoints.CLIP_TOKENS),
        (dual_checkpoints.siglip, "dual-encoder", {"dense": dual_checkpoints.WIDTH}, dual_checkpoints.SIGLIP_TOKENS),
        (
            dual_checkpoints.marqo,
            "dual-encoder",
            {"dense": dual_checkpoints.OPEN_CLIP_WIDTH},
            dual_checkpoints.FIRST_SIGLIP_TOKENS,
        ),
        (dual_checkpoints.colpali, "vision-language", {"multivector": dual_checkpoints.WIDTH}, 1024),
        (qwen_checkpoints.colqwen, "vision-language", {"multivector": qwen_checkpoints.WIDTH}, 2048),
        (qwen_checkpoints.colqwen3, "vision-language", {"multivector": qwen_checkpoints.WIDTH}, 2048),
        (tiled_checkpoints.colidefics3, "vision-language", {"multivector": tiled_checkpoints.WIDTH}, 2048),
        (qwen_checkpoints.qwen3_vl, "multimodal-encoder", {"dense": 48}, 4096),
        (detector_checkpoints.grounding_dino, "detector", {"objects": 0}, 256),
        (detector_checkpoints.owlv2, "detector", {"objects": 0}, 16),
    ],
)
def test_models_of_images_become_entries_that_load(
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
    ("build_folder", "part", "precision"),
    [
        (dual_checkpoints.clip, "", None),
        (qwen_checkpoints.qwen3_vl, "text_config", "bfloat16"),
        (qwen_checkpoints.qwen3_vl, "", None),
        (dual_checkpoints.colpali, "", "bfloat16"),
    ],
)
def test_what_float16_does_not_hold_is_not_computed_in_it(
    build_folder: Callable[[Path], object], part: str, precision: str | None, tmp_path: Path
) -> None:
    """The language model was published in bfloat16, or is a Gemma."""
    folder = tmp_path / "model"
    build_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    if part:
        config[part]["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    report = inspect(folder, "me/seen", {"path": str(folder)})
    assert entry_of(report).load.precision == precision
    assert any("precision bfloat16" in line for line in report.findings) == (precision is not None)


@pytest.mark.parametrize("build_folder", [dual_checkpoints.clip, dual_checkpoints.siglip])
def test_the_processor_of_a_folder_may_be_in_processor_config_alone(
    build_folder: Callable[[Path], object], tmp_path: Path, engine: AdapterEngine
) -> None:
    build_folder(tmp_path / "model")
    check_processor_alone(tmp_path / "model", engine, "image_processor")
