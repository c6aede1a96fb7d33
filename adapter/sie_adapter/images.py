"""From the uint8 pixels of a batch to what a tower reads: passes of a bounded number of images, normalised on the
device.

Shown, of equal sizes ──► pixels_of: [images, 3, height, width], float ──► the tower
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sie_adapter.checkpoint import read_json
from sie_adapter.device import Compute, to_device
from sie_adapter.packing import Shown
from sie_contracts.entries import ModelEntry
from sie_contracts.images import Normalisation, Recipe, UnknownProcessor, from_processor
from sie_contracts.load_errors import load_failed

PROCESSOR = "preprocessor_config.json"
# Images in one pass of a tower. A CPU gains nothing by more; powers of two keep the sizes few.
_PER_PASS = {"cpu": 8}
_PER_PASS_ELSEWHERE = 64


def processor_of(folder: Path, entry: ModelEntry) -> tuple[Recipe, Normalisation]:
    """How the files say that images become numbers. Raises ModelLoadFailed INCOMPATIBLE for what cannot be
    reproduced.
    """
    config = read_json(folder / PROCESSOR)
    if not config:
        raise load_failed("NOT_FOUND", f"{entry.id}: {folder} has no {PROCESSOR}, which says how images become pixels")
    try:
        return from_processor(config), Normalisation.from_processor(config)
    except UnknownProcessor as error:
        raise load_failed("INCOMPATIBLE", f"{entry.id}: {PROCESSOR}: {error}") from error


class Tower:
    """Images in passes through `run`, [images, 3, height, width] -> [images, ..], in the precision of `compute`. All
    images of a model have one size.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], normalisation: Normalisation, compute: Compute) -> None:
        self._run = run
        self._compute = compute
        self._rescale = normalisation.rescale
        self._mean, self._std = (
            torch.tensor(values, dtype=torch.float32, device=compute.device).view(3, 1, 1)
            for values in (normalisation.mean, normalisation.std)
        )
        self._most = _PER_PASS.get(compute.device.type, _PER_PASS_ELSEWHERE)

    def forward(self, images: Sequence[Shown]) -> Tensor:
        """What `run` gives of each image, in order."""
        return torch.cat(
            [self._run(self._pixels(images[start:stop])) for start, stop in _passes(len(images), self._most)]
        )

    def _pixels(self, images: Sequence[Shown]) -> Tensor:
        stacked = np.stack([image.pixels for image in images])
        levels = to_device(stacked, self._compute.device).permute(0, 3, 1, 2).float()
        return ((levels * self._rescale - self._mean) / self._std).to(self._compute.dtype)


def _passes(images: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut so many images into passes of at most `most`, each a power of two: a CPU keeps memory for each size that it
    has met.
    """
    start = 0
    while start < images:
        size = min(most, 1 << ((images - start).bit_length() - 1))
        yield start, start + size
        start += size
