"""Conversion of float32 vectors to the dtype that a client requests, with scale and offset for the way back.

vectors [.., width] ──► float32 ──► per row of the last axis: cast, scale to 8 bits, or one bit per value ──► numpy
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Converted = tuple[Array, Array | None, Array | None]


def convert(vectors: Tensor, dtype: str) -> Converted:
    """Convert finite `vectors` [.., width] to `dtype`. Return the values, `scale` and `offset`. `scale` and `offset`
    are float32 [..], or None if the dtype does not need them.

    `int8` has a scale: a number of `vectors` is about value * scale. `uint8` also has an offset: a number is about
    value * scale + offset. `binary` and `ubinary` store one bit for each number, 1 if the number is above 0. Eight
    numbers share a byte (uint8), the first number has the highest bit, and unused bits of the last byte are 0. Raises
    ValueError for another dtype.
    """
    if dtype not in _CONVERSIONS:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_CONVERSIONS)}")
    return _CONVERSIONS[dtype](vectors.float())


def _int8(vectors: Tensor) -> Converted:
    largest = vectors.abs().amax(-1, keepdim=True)
    codes = (vectors / _nonzero(largest) * 127).round().to(torch.int8)
    return codes.cpu().numpy(), _per_row(largest / 127), None


def _uint8(vectors: Tensor) -> Converted:
    low, high = torch.aminmax(vectors, dim=-1, keepdim=True)
    extent = high - low
    codes = ((vectors - low) / _nonzero(extent) * 255).round().to(torch.uint8)
    return codes.cpu().numpy(), _per_row(extent / 255), _per_row(low)


def _bits(vectors: Tensor) -> Converted:
    return np.packbits((vectors > 0).cpu().numpy(), axis=-1), None, None


def _nonzero(divisor: Tensor) -> Tensor:
    return divisor.where(divisor > 0, 1.0)  # 1 replaces a divisor of 0, because its dividend is also 0


def _per_row(values: Tensor) -> Array:
    rows: Array = values[..., 0].cpu().numpy()
    return rows


_CONVERSIONS: dict[str, Callable[[Tensor], Converted]] = {
    "float32": lambda vectors: (vectors.cpu().numpy(), None, None),
    "float16": lambda vectors: (vectors.half().cpu().numpy(), None, None),
    "int8": _int8,
    "uint8": _uint8,
    "binary": _bits,
    "ubinary": _bits,
}
