"""Pixels against the image processors of transformers that work on Pillow. The uint8 pixels of the sidecar, after the
arithmetic of `Normalisation`, equal the library's. Both read the file that the library saves with a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from image_files import encoded, picture

from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import Normalisation, Recipe, Size, UnknownProcessor, check, from_processor
from sie_sidecar.prepare.images import prepare

CLOSE = 1e-6  # if all is float32, where 1/255 is not exact; the largest is 7.2e-7, at the deviation 0.225
RAGGED = [(64, 64), (200, 90), (33, 171), (90, 91), (91, 90), (300, 20), (7, 9), (1, 3), (640, 480)]
SMALL = {"size": {"shortest_edge": 48}, "crop_size": {"height": 48, "width": 48}}
BOUNDS = {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 40}}
# a name, the class without its suffix, and its arguments
PROCESSORS: list[tuple[str, str, dict[str, Any]]] = [
    ("clip", "CLIPImageProcessor", SMALL),
    ("clip, oblong", "CLIPImageProcessor", {**SMALL, "crop_size": {"height": 31, "width": 48}}),
    ("clip, lanczos", "CLIPImageProcessor", {**SMALL, "resample": 1}),
    ("clip, without mean", "CLIPImageProcessor", {**SMALL, "do_normalize": False}),
    ("florence", "CLIPImageProcessor", {"size": {"height": 96, "width": 96}, "do_center_crop": False}),
    ("siglip", "SiglipImageProcessor", {"size": {"height": 64, "width": 64}}),
    ("siglip, oblong", "SiglipImageProcessor", {"size": {"height": 32, "width": 80}, "resample": 2}),
    ("siglip, levels", "SiglipImageProcessor", {"size": {"height": 32, "width": 32}, "do_rescale": False}),
    ("qwen2.5", "Qwen2VLImageProcessor", BOUNDS),
    ("qwen3", "Qwen2VLImageProcessor", {"size": {"shortest_edge": 4096, "longest_edge": 65536}, "patch_size": 16}),
    ("glm", "Glm46VImageProcessor", {"size": {"shortest_edge": 12544, "longest_edge": 28 * 28 * 60}}),
    ("paddle", "PaddleOCRVLImageProcessor", {**BOUNDS, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}),
    ("lighton", "PixtralImageProcessor", {"size": {"longest_edge": 154}, "patch_size": {"height": 14, "width": 14}}),
    ("idefics", "Idefics3ImageProcessor", {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 64}}),
    (
        "idefics, odd",
        "Idefics3ImageProcessor",
        {"size": {"longest_edge": 97}, "max_image_size": {"longest_edge": 41}, "resample": 2},
    ),
    ("grounding dino", "GroundingDinoImageProcessor", {"size": {"shortest_edge": 80, "longest_edge": 133}}),
    ("donut", "DonutImageProcessor", {"size": {"height": 256, "width": 192}}),
    ("donut, wide", "DonutImageProcessor", {"size": {"height": 96, "width": 160}}),
]


def library(processor: Any, image: Any) -> np.ndarray[Any, Any]:
    """Return [3, height, width], or the patches of a tower that takes any size."""
    return np.asarray(processor(images=[image], return_tensors="np")["pixel_values"])


def ours(data: bytes, recipe: Recipe, normalisation: Normalisation, first: type = np.float32) -> np.ndarray[Any, Any]:
    """Return [3, height, width]. `first`: the type of the rescaling, float32 as on a device, or float64 as in the
    library.
    """
    raster = prepare(data, recipe)
    levels = np.frombuffer(raster.pixels, np.uint8).reshape(*raster.size, 3).astype(first)
    rescaled = (levels * first(normalisation.rescale)).astype(np.float32)
    mean, std = (np.array(numbers, np.float32) for numbers in (normalisation.mean, normalisation.std))
    return ((rescaled - mean) / std).transpose(2, 0, 1)


def patches(pixels: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return patches as the towers of Qwen and GLM read them: blocks of merged patches, each patch once for every
    frame.
    """
    size, merge, frames = (int(config[f"{key}_size"]) for key in ("patch", "merge", "temporal_patch"))
    channels, height, width = pixels.shape
    blocks = pixels.reshape(channels, height // size // merge, merge, size, width // size // merge, merge, size)
    ordered = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None].repeat(frames, 5)
    return ordered.reshape(height // size * (width // size), -1)


def test_each_kind_of_processor_is_here() -> None:
    with pytest.raises(UnknownProcessor) as caught:
        from_processor({})
    assert str(caught.value).partition("known are ")[2].split(", ") == sorted({kind for _, kind, _ in PROCESSORS})


@pytest.mark.parametrize(("name", "kind", "options"), PROCESSORS, ids=[name for name, _, _ in PROCESSORS])
def test_pixels_are_the_library_s(name: str, kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Pixels are equal bit for bit if the rescaling is in float64, as in the library."""
    processor = getattr(transformers, f"{kind}Pil")(**options)
    processor.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "preprocessor_config.json").read_text("utf-8"))
    recipe, normalisation = from_processor(config), Normalisation.from_processor(config)
    compared = 0
    for number, (width, height) in enumerate(RAGGED):
        image = picture(width, height, number)
        try:
            check(recipe, Size(height, width))
        except InvalidInput:
            continue
        expected = library(processor, image)
        for arithmetic, most in ((np.float64, 0.0), (np.float32, CLOSE)):
            pixels = ours(encoded(image), recipe, normalisation, arithmetic)
            if recipe.kind == "blocks":
                pixels = unmerged(pixels, config) if kind == "PaddleOCRVLImageProcessor" else patches(pixels, config)
            if recipe.kind == "tiles":
                pixels = pixels.reshape(3, -1, recipe.multiple, recipe.multiple).swapaxes(0, 1)
            assert pixels.size == expected.size
            assert abs(pixels.reshape(expected.shape) - expected).max() <= most, (width, height)
        compared += 1
    assert compared >= 8


def unmerged(pixels: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Return patches as the tower of PaddleOCR-VL reads them: row by row."""
    size = int(config["patch_size"])
    channels, height, width = pixels.shape
    blocks = pixels.reshape(channels, height // size, size, width // size, size)
    return blocks.transpose(1, 3, 0, 2, 4).reshape(-1, channels, size, size)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "L", "P"])
def test_modes_become_rgb_as_in_the_library(mode: str) -> None:
    processor = transformers.SiglipImageProcessorPil(size={"height": 40, "width": 40})
    image = picture(90, 60, mode="RGBA" if mode == "RGBA" else "L" if mode != "P" else "RGB")
    if mode in ("RGBA", "LA"):
        image = image.convert(mode)
        image.putalpha(picture(90, 60, 5, "L"))
    elif mode == "P":
        image = image.quantize(16)
    recipe = Recipe("squash", height=40, width=40)
    pixels = ours(encoded(image), recipe, Normalisation((0.5,) * 3, (0.5,) * 3))
    assert abs(pixels - library(processor, image)[0]).max() <= CLOSE
