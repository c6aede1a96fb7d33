"""Common parts of the small random models of images: their weights, the file of their image processor, and images.

Images have structure, since a flat colour would hide an error of the resize.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from sie_contracts.media.images import Recipe
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import Input
from sie_sidecar.prepare import images
from sie_sidecar.prepare.media_frames import PreparedImage


def randomised(model: Any, spread: float = 0.3) -> Any:
    """Give a model of transformers random weights, the same each time. Parameters that a default initialisation leaves
    neutral are random by `spread`: biases, norms, the class token. A parameter that is left out shows.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
            else:
                scale = max(1, parameter[0].numel()) ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def with_processor(folder: Path, processor: Any, published: str) -> Path:
    """Save the processor. `published`: the name of its class in folders from before the library had two backends."""
    processor.save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_processor_type": published}))
    return folder


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    """Waves of three colours with a little noise."""
    rng = np.random.default_rng(seed)
    down, across = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [
        127 + 90 * np.sin(across / rng.uniform(2, 30) + down / rng.uniform(2, 30) + rng.uniform(0, 6)) for _ in range(3)
    ]
    noisy = np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def png(picture: Image.Image) -> bytes:
    """The file of an image, without loss."""
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()


def seen(inputs: Sequence[Input], layout: Rows) -> dict[int, list[PreparedImage]]:
    """The pixels of the inputs that have images, by their index, as worker processes make them."""
    assert layout.images is not None
    return {
        index: [prepared(file, layout.images) for file in entry.images]
        for index, entry in enumerate(inputs)
        if entry.images
    }


def prepared(file: bytes, recipe: Recipe) -> PreparedImage:
    """The pixels of an image file, as a worker process makes them."""
    raster = images.prepare(file, recipe)
    return PreparedImage(
        1,
        *raster.size,
        *raster.upright,
        raster.animated,
        raster.digest(),
        raster.pixels,
    )


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Load the weights of a folder, change them and write them back."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
