"""Types of vectors of Cohere, Jina and Voyage: the float32 vectors of the model are converted to each type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np

from sie_contracts.api.dialects import VectorType
from sie_contracts.arrays import Array
from sie_gateway.inference import reply

TYPES: tuple[str, ...] = get_args(VectorType)


def converted(vectors: Sequence[Array], kind: str) -> tuple[list[Any], dict[str, list[float]]]:
    """Convert vectors to the type `kind`. Return the converted vectors, which are views for `float` and `base64`. Also
    return, by name, the scale and the offset of each vector, if the type has them.

    `base64` is the little-endian float32 bytes of the vector.
    """
    if kind == "float":
        return list(vectors), {}
    if kind == "base64":
        return [vector.data for vector in vectors], {}
    rows: list[Any] = []
    extras: dict[str, list[float]] = {}
    step = max(1, reply.PIECE_VALUES // vectors[0].size)
    for start in range(0, len(vectors), step):
        codes, dtype = _CODES[kind](np.stack(vectors[start : start + step]))
        rows += list(codes)
        for name, values in dtype.items():
            extras.setdefault(name, []).extend(values[:, 0].tolist())
    return rows, extras


def int8(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """Quantise float32 [rows, width] to int8 codes in -127..127, rounded half to even. A value is about code * scale.
    All steps are computed in float32.
    """
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    codes = np.rint(vectors / np.where(largest > 0, largest, np.float32(1)) * np.float32(127)).astype(np.int8)
    return codes, {"scale": largest / np.float32(127)}


def uint8(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """Quantise float32 [rows, width] to uint8 codes in 0..255, rounded half to even. A value is about code * scale +
    offset. All steps are computed in float32.
    """
    low = vectors.min(axis=1, keepdims=True)
    extent = vectors.max(axis=1, keepdims=True) - low
    codes = np.rint((vectors - low) / np.where(extent > 0, extent, np.float32(1)) * np.float32(255)).astype(np.uint8)
    return codes, {"scale": extent / np.float32(255), "offset": low}


def ubinary(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """Pack each vector into bits, eight to a byte. A bit is set if its value is above 0; the first value is the highest
    bit.
    """
    return np.packbits(vectors > 0, axis=1), {}


def binary(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """Pack bits like `ubinary`, but subtract 128 from each byte, so that the bytes are int8."""
    return (np.packbits(vectors > 0, axis=1) ^ 0x80).view(np.int8), {}


_CODES: dict[str, Callable[[Array], tuple[Array, dict[str, Array]]]] = {
    "int8": int8,
    "uint8": uint8,
    "ubinary": ubinary,
    "binary": binary,
}
