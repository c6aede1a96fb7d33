"""Types of vectors in the APIs of Cohere, Jina and Voyage. This module converts the float32 vectors of the model to the
type that the request names. The adapter does the conversion for the native `output_dtype` (`epilogues/dtypes`). The
bytes of `binary` are int8 in this module and uint8 in the adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np

from sie_contracts.api.dialects import VectorType
from sie_contracts.arrays import Array
from sie_contracts.models.option_values import bad
from sie_gateway.dialects import fields
from sie_gateway.inference import reply

TYPES: tuple[str, ...] = get_args(VectorType)


def requested(body: fields.Body, *names: str) -> tuple[str, bool]:
    """Return (type of the vectors, true for base64). The type is the value of the first of the fields `names` that is
    set.
    """
    is_base64 = fields.choice(body, "encoding_format", ("float", "base64"), "float") == "base64"
    name = next((name for name in names if body.get(name) is not None), "")
    if not name:
        return "float", is_base64
    text = body[name]
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if isinstance(text, list):
        raise bad(name, text, "one type; /v2/embed returns several at once", "unsupported_dtype")
    kind = "float" if text == "float32" else text
    if not isinstance(kind, str) or kind not in TYPES:
        raise bad(name, text, f"one of {', '.join(TYPES)}", "unsupported_dtype")
    return ("float", True) if kind == "base64" else (kind, is_base64)


def converted(vectors: Sequence[Array], kind: str) -> tuple[list[Any], dict[str, list[float]]]:
    """Return (vectors of the type `kind`, scales and offsets of the vectors by name). The map is empty for a type
    without scales. Vectors of the types `float` and `base64` (little-endian float32) are not copied.
    """
    if kind == "float":
        return list(vectors), {}
    if kind == "base64":
        return [vector.data for vector in vectors], {}
    rows: list[Any] = []
    extras: dict[str, list[float]] = {}
    step = max(1, reply.PIECE_VALUES // vectors[0].size)
    for start in range(0, len(vectors), step):
        codes, scales = _CODES[kind](np.stack(vectors[start : start + step]))
        rows += list(codes)
        for name, values in scales.items():
            extras.setdefault(name, []).extend(values[:, 0].tolist())
    return rows, extras


def entries(vectors: Sequence[Array], kind: str, *, is_base64: bool) -> list[dict[str, Any]]:
    """Return an entry of the reply for each vector. With `is_base64`, the entry has a memoryview, which the JSON writer
    writes as base64. Without `is_base64`, the entry has an array, which the JSON writer writes as a list.
    """
    rows, extras = converted(vectors, kind)
    data = [
        {"object": "embedding", "index": index, "embedding": row.data if is_base64 else row}
        for index, row in enumerate(rows)
    ]
    for name, values in extras.items():
        for entry, value in zip(data, values, strict=True):
            entry[name] = value
    return data


def int8(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """Quantise float32 [rows, width] to int8 codes in -127..127, rounded half to even. Each value is about its code
    times the scale of its row. All steps are computed in float32.
    """
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    codes = np.rint(vectors / np.where(largest > 0, largest, np.float32(1)) * np.float32(127)).astype(np.int8)
    return codes, {"scale": largest / np.float32(127)}


def uint8(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """Quantise float32 [rows, width] to uint8 codes in 0..255, rounded half to even. Each value is about its code times
    the scale of its row, plus the offset of its row. All steps are computed in float32.
    """
    low = vectors.min(axis=1, keepdims=True)
    extent = vectors.max(axis=1, keepdims=True) - low
    codes = np.rint((vectors - low) / np.where(extent > 0, extent, np.float32(1)) * np.float32(255)).astype(np.uint8)
    return codes, {"scale": extent / np.float32(255), "offset": low}


def ubinary(vectors: Array) -> tuple[Array, dict[str, Array]]:
    """Pack each vector into bits, which are set for values above 0. A byte has eight values, the first in its highest
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
