"""Conversion of a detector's candidates to objects: label, score, box in pixels of the upright submitted image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Float32 = NDArray[np.float32]


class Sight(NamedTuple):
    """Raw output of a detector for a batch of images. `boxes`: centre, width and height, as fractions of the area that
    the model sees (`ImageFrame`), float32 [images, candidates, 4]. `scores`: the score of each label, float32 [images,
    candidates, labels].
    """

    boxes: Tensor
    scores: Tensor


class ImageFrame(NamedTuple):
    """Size of an image, and size of the area that the model sees, both in pixels of the image. The area is larger than
    the image if the model pads the image.
    """

    width: int
    height: int
    seen_width: int
    seen_height: int


def objects(
    boxes: Float32, scores: Float32, best: NDArray[np.int64], labels: Sequence[str], frame: ImageFrame, least: float
) -> list[dict[str, Any]]:
    """Return the candidates of one image whose score is at least `least`, best first. `boxes`: [candidates, 4], see
    `Sight`. `best`: the index of the best label of each candidate. `scores` [candidates]: the score of this label.

    A box is cut at the edges of the image, then its corners are rounded. Boxes without area are left out.
    """
    chosen = np.flatnonzero(scores >= least)
    chosen = chosen[np.argsort(-scores[chosen], kind="stable")]
    middles, halves = boxes[chosen, :2], boxes[chosen, 2:] * np.float32(0.5)
    seen_size = np.array([frame.seen_width, frame.seen_height], np.float32)
    edge = np.array([frame.width, frame.height], np.float32)
    first, last = (np.rint(((middles + halves * side) * seen_size).clip(0, edge)).astype(np.int64) for side in (-1, 1))
    return [
        {"label": labels[best[candidate]], "score": float(scores[candidate]), "bbox": [*start, *(size)]}
        for candidate, start, size in zip(chosen.tolist(), first.tolist(), (last - first).tolist(), strict=True)
        if min(size) > 0
    ]
