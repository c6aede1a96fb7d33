"""Input of image towers (encoders): the uint8 pixels of a batch, normalised on the device, in passes of limited size.

  images (Shown) of one size ──► Tower: [images, 3, height, width], float ──► run
  images that consist of tiles ──► TileTower: each tile is an image for a Tower
  images of any size ──► GridTower: [patches, values], float, with the grid of each image ──► run

Outputs of a tower are cached (`tower_outputs`) if an image may be read again with another text. On a CPU, a tower with
a cache never reads two images in one pass, so the bits of a cached output do not depend on other images of the batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sie_adapter.engine.device import Compute, to_device
from sie_adapter.packed.packing import Shown, UInt8, missing
from sie_adapter.packed.tower_outputs import Output
from sie_contracts.media.images import Normalisation, Recipe, UnknownProcessor, from_processor
from sie_contracts.media.sounds import SoundRecipe, UnknownExtractor, from_extractor
from sie_contracts.models.entries import LoadOptions, ModelEntry
from sie_contracts.models.load_errors import incompatible, load_failed
from sie_store.folder_files import read_json

PROCESSOR = "preprocessor_config.json"
# Largest number of images or sounds in one pass of a tower. Larger passes are not faster on a CPU.
_PER_PASS = {"cpu": 8}
_PER_PASS_ELSEWHERE = 64
# Largest number of blocks of patches (see `Patches`) in one pass of a `GridTower`. A larger image runs in a pass of its
# own. On a CPU, every image runs in a pass of its own.
_BLOCKS_PER_PASS = 16384


def read_processor(folder: Path, entry: ModelEntry, part: str) -> dict[str, Any]:
    """Return the settings of the image processor or feature extractor of a folder. `part`: the name of the section with
    these settings in processor_config.json, which transformers 5 writes. A folder without this section has the settings
    in preprocessor_config.json. Source: transformers 5.23. Raises ModelLoadFailed NOT_FOUND if no file has settings.
    """
    config = read_json(folder / "processor_config.json").get(part) or read_json(folder / PROCESSOR)
    if not config:
        purpose = "images become pixels" if part == "image_processor" else "sounds become features"
        raise load_failed("NOT_FOUND", f"{entry.id}: {folder} has no {PROCESSOR}, which says how {purpose}")
    return config


def processor_of(folder: Path, entry: ModelEntry, load: LoadOptions) -> tuple[Recipe, Normalisation]:
    """Return the recipe that turns images into pixels, and the normalisation of the pixels. The pixel bounds of `load`
    replace the bounds of the folder. Raises ModelLoadFailed: NOT_FOUND without a configuration, INCOMPATIBLE for a
    configuration that this adapter cannot reproduce.
    """
    config = read_processor(folder, entry, "image_processor")
    bounds = {"min_pixels": load.min_pixels, "max_pixels": load.max_pixels}
    config |= {name: bound for name, bound in bounds.items() if bound is not None}
    try:
        return from_processor(config), Normalisation.from_processor(config)
    except UnknownProcessor as error:
        raise incompatible(f"{entry.id}: {PROCESSOR}: {error}") from error


def extractor_of(folder: Path, entry: ModelEntry, positions: int) -> SoundRecipe:
    """Return the recipe that turns sounds into features. `positions`: the argument of `from_extractor`, which
    determines the cost of a sound. Raises the errors of `processor_of`.
    """
    config = read_processor(folder, entry, "feature_extractor")
    try:
        return from_extractor(config, positions=positions)
    except UnknownExtractor as error:
        raise incompatible(f"{entry.id}: {PROCESSOR}: {error}") from error


class Levels:
    """Normalisation of uint8 pixels [.., 3] to floats on the device: (pixel * rescale - mean) / std, by channel."""

    def __init__(self, normalisation: Normalisation, device: torch.device) -> None:
        self._device = device
        self._rescale = normalisation.rescale
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=device)
            for values in (normalisation.mean, normalisation.std)
        )

    def normalised(self, pixels: UInt8) -> Tensor:
        """Return normalised pixels, float32, of the same shape."""
        return (to_device(pixels, self._device).float() * self._rescale - self._mean) / self._std


class Tower:
    """Image encoder for images of one size. It calls `run`, [images, 3, height, width] -> [images, ..], with a few
    images at a time, in the precision of `compute`. `keeps`: whether outputs are cached.
    """

    def __init__(
        self, run: Callable[[Tensor], Tensor], normalisation: Normalisation, compute: Compute, *, keeps: bool = False
    ) -> None:
        self._run = run
        self._compute = compute
        self._levels = Levels(normalisation, compute.device)
        self._outputs = compute.outputs.of_tower() if keeps else None
        self._most = 1 if keeps and compute.device.type == "cpu" else per_pass(compute)

    def forward(self, images: Sequence[Shown]) -> Tensor:
        if self._outputs is None:
            return self._read(images)
        outputs = self._outputs.for_images(images, lambda some: [(row,) for row in self._read(some)])
        return torch.stack([own for (own,) in outputs])

    def _read(self, images: Sequence[Shown]) -> Tensor:
        return torch.cat(
            [self._run(self._pixels(images[start:stop])) for start, stop in passes(len(images), self._most)]
        )

    def _pixels(self, images: Sequence[Shown]) -> Tensor:
        stacked = np.stack([image.pixels for image in images])
        return self._levels.normalised(stacked).permute(0, 3, 1, 2).to(self._compute.dtype)


class TileTower:
    """Image encoder for images that consist of tiles: squares of `edge` pixels, one below the other. `run` gets
    tiles, as the `run` of `Tower` gets images. The outputs of images are cached.
    """

    def __init__(
        self, run: Callable[[Tensor], Tensor], edge: int, normalisation: Normalisation, compute: Compute
    ) -> None:
        self._tower = Tower(run, normalisation, compute)
        self._edge = edge
        self._outputs = compute.outputs.of_tower()
        self._is_alone = compute.device.type == "cpu"

    def forward(self, images: Sequence[Shown]) -> Tensor:
        """Return the outputs of `run` for the tiles of all images, in order."""
        return torch.cat([own for (own,) in self._outputs.for_images(images, self._read)])

    def _read(self, images: Sequence[Shown]) -> list[Output]:
        tiles = [self._cut(image) for image in images]
        passes_of = tiles if self._is_alone else [list(itertools.chain.from_iterable(tiles))]
        outputs = torch.cat([self._tower.forward(part) for part in passes_of])
        return [(own,) for own in outputs.split([len(part) for part in tiles])]

    def _cut(self, image: Shown) -> list[Shown]:
        tiles = image.pixels.reshape(-1, self._edge, *image.pixels.shape[1:])
        return [image._replace(pixels=pixels) for pixels in tiles]


def per_pass(compute: Compute) -> int:
    return _PER_PASS.get(compute.device.type, _PER_PASS_ELSEWHERE)


def passes(images: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each pass over images or sounds. The size of a pass is a power of two, at most `most`, so
    that few different sizes occur: oneDNN keeps memory for each size.
    """
    start = 0
    while start < images:
        size = min(most, 1 << ((images - start).bit_length() - 1))
        yield start, start + size
        start += size


class Patches(NamedTuple):
    """Sizes of the patches into which `GridTower` cuts an image. A patch is a square of `edge` pixels; `merged` by
    `merged` patches form a block. Each patch is repeated `frames` times, as if the image were a film.
    """

    edge: int
    merged: int
    frames: int


class GridTower:
    """Image encoder for images of any size. It caches its outputs, and calls `run(patches, grids)` for a few images at
    a time. `patches`: [patches, values], ordered by block (see `Patches`) as in Qwen2-VL's image processors. `grids`:
    frames, rows and columns of patches of each image, int64 [images, 3]. `run` returns tensors [blocks, width].
    """

    def __init__(
        self,
        run: Callable[[Tensor, Tensor], Sequence[Tensor]],
        patches: Patches,
        normalisation: Normalisation,
        compute: Compute,
    ) -> None:
        self._run = run
        self._patches = patches
        self._compute = compute
        self._levels = Levels(normalisation, compute.device)
        self._outputs = compute.outputs.of_tower()

    def grid(self, image: Shown) -> tuple[int, int]:
        """Return the number of rows and columns of blocks into which an image is cut."""
        unit = self._patches.edge * self._patches.merged
        return image.pixels.shape[0] // unit, image.pixels.shape[1] // unit

    def forward(self, images: Sequence[Shown]) -> list[Tensor]:
        """Return the tensors of `run` for the blocks of all images, in the order of `images`; each tensor is
        contiguous.
        """
        outputs = self._outputs.for_images(images, self._read)
        return [torch.cat(parts) for parts in zip(*outputs, strict=True)]

    def _read(self, images: Sequence[Shown]) -> list[Output]:
        outputs: list[Output] = []
        for part in self._parts(images):
            blocks = [math.prod(self.grid(image)) for image in part]
            outputs += zip(*(tensor.split(blocks) for tensor in self._pass(part)), strict=True)
        return outputs

    def _parts(self, images: Sequence[Shown]) -> Iterator[list[Shown]]:
        part: list[Shown] = []
        blocks = 0
        for image in images:
            own = math.prod(self.grid(image))
            if part and (self._compute.device.type == "cpu" or blocks + own > _BLOCKS_PER_PASS):
                yield part
                part, blocks = [], 0
            part.append(image)
            blocks += own
        if part:
            yield part

    def _pass(self, images: Sequence[Shown]) -> list[Tensor]:
        grids = [self.grid(image) for image in images]
        patches = [self._cut(image, *grid) for image, grid in zip(images, grids, strict=True)]
        blocks = sum(rows * columns for rows, columns in grids)
        # oneDNN keeps memory for each number of rows. An empty image pads the pass to one of a few numbers of blocks,
        # so that oneDNN keeps little memory.
        more = missing(blocks) if self._compute.device.type == "cpu" else 0
        if more:
            grids.append((1, more))
            patches.append(patches[0].new_zeros(more * self._patches.merged**2, patches[0].shape[1]))
        sizes = [[1, rows * self._patches.merged, columns * self._patches.merged] for rows, columns in grids]
        results = self._run(torch.cat(patches), to_device(np.array(sizes, np.int64), self._compute.device))
        return [result[:blocks] for result in results]

    def _cut(self, image: Shown, rows: int, columns: int) -> Tensor:
        """Return the patches of an image, [patches, channels x frames x edge x edge]."""
        edge, merged, frames = self._patches
        levels = self._levels.normalised(image.pixels.copy()).to(self._compute.dtype)
        parts = levels.view(rows, merged, edge, columns, merged, edge, 3).permute(0, 3, 1, 4, 6, 2, 5)
        filmed = parts.unsqueeze(5).expand(-1, -1, -1, -1, -1, frames, -1, -1)
        return filmed.reshape(rows * columns * merged**2, -1)
