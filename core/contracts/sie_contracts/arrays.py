"""Arrays of numpy in bodies. In JSON, an array is nested lists. In msgpack, an array is a map of five entries with
bytes as keys. JavaScript clients send an ext type instead.

Only dtypes in EMITTED are sent, and only dtypes in ACCEPTED are read. Object and structured arrays are refused, so that
decoding cannot execute code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

EMITTED = frozenset({"<f4", "<f2", "<i4", "|i1", "|u1"})
ACCEPTED = EMITTED | {"<f8", "<i2", "<i8", "<u4", "<u8", "<u2", "|b1"}
NUMPY_EXT = 78  # number of the msgpack ext type, ord("N"): its data is `dtype|shape|raw bytes`
_EXT_ACCEPTED = frozenset({"<f4", "<i4"})
VIEW_BYTES = 16 << 10  # arrays of at least this many bytes are encoded from a view, without a further copy


def pack(array: Array) -> dict[bytes, Any]:
    """Return the map that represents an array in msgpack: dtype, shape, and bytes in C order, little endian. Raises
    ValueError for dtypes not in EMITTED.
    """
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    if little.dtype.str not in EMITTED:
        raise ValueError(f"dtype {array.dtype} cannot be sent; allowed: {', '.join(sorted(EMITTED))}")
    # The encoder copies `data`. `tobytes` makes a further copy, but for a small array it is faster than a view.
    data = little.tobytes() if little.nbytes < VIEW_BYTES else little.reshape(-1).view(np.uint8).data
    return {b"nd": True, b"type": little.dtype.str, b"kind": b"", b"shape": list(array.shape), b"data": data}


def packed(dtype: str, shape: Sequence[int], data: memoryview) -> dict[bytes, Any]:
    """Return the same map as `pack`, from the bytes of an array in C order, little endian. Raises ValueError for dtypes
    not in EMITTED.
    """
    if dtype not in EMITTED:
        raise ValueError(f"dtype {dtype} cannot be sent; allowed: {', '.join(sorted(EMITTED))}")
    return {b"nd": True, b"type": dtype, b"kind": b"", b"shape": shape, b"data": data}


def unpack(value: Any) -> Any:
    """Replace each map that represents an array or a scalar (see `pack`), at any depth in `value`, by the numpy array
    or scalar. Return the new value. Arrays are writable copies. Raises ValueError for a map with a wrong dtype, kind,
    shape or number of bytes.
    """
    if isinstance(value, dict):
        marker = value.get(b"nd", value.get("nd")) if value.keys() & {b"data", "data"} else None
        if marker is True:
            return _from_map(value)
        if marker is False:
            return _from_map({**_text_keys(value), "shape": []})[()]
        return {key: unpack(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unpack(item) for item in value]
    return value


def _text_keys(value: dict[Any, Any]) -> dict[str, Any]:
    return {key.decode("ascii", "replace") if isinstance(key, bytes) else str(key): item for key, item in value.items()}


def _from_map(value: dict[Any, Any]) -> Array:
    fields = _text_keys(value)
    dtype, shape, data = fields.get("type"), fields.get("shape"), fields.get("data")
    if isinstance(dtype, bytes):
        dtype = dtype.decode("ascii", "replace")
    if fields.get("kind") not in (None, b"", ""):
        raise ValueError("array: structured and object arrays are refused")
    return _array(dtype, shape, data, ACCEPTED)


def _array(dtype: Any, shape: Any, data: Any, allowed: frozenset[str]) -> Array:
    if not isinstance(dtype, str) or dtype not in allowed:
        raise ValueError(f"array type: got {str(dtype)[:20]!r}, expected one of {', '.join(sorted(allowed))}")
    if (
        not isinstance(shape, list)
        or not all(type(axis) is int and 0 <= axis < 2**31 for axis in shape)
        or len(shape) > 4
    ):
        raise ValueError("array shape: expected a list of at most 4 non-negative integers")
    if not isinstance(data, bytes | memoryview | bytearray):
        raise ValueError("array data: expected bytes")
    # math.prod is exact; a product in int64 could overflow to a small number
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) != expected:
        raise ValueError(f"array data: got {len(data)} bytes, expected {expected} for its shape and type")
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


def multivector(value: Any) -> NDArray[np.float32]:
    """Convert a client's matrix of token vectors to float32 [rows, width]. The matrix is an array, a map in the
    form that `pack` returns, or nested lists. The message of the ValueError names the expected and the received form.
    """
    array = unpack(value)
    if isinstance(array, list):
        array = _nested(array)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "fiu":
        got = array.dtype.name if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"expected a matrix of numbers, got {got}")
    if array.ndim != 2 or not array.shape[1]:
        raise ValueError(f"expected a matrix [rows, width], got an array of shape {list(array.shape)}")
    with np.errstate(over="ignore"):  # a number that is too large becomes infinity, which the next check refuses
        narrow = np.ascontiguousarray(array, dtype=np.float32)
    if not np.isfinite(narrow).all():
        raise ValueError("expected finite numbers of float32, got NaN, infinity or a larger number")
    return narrow


def _nested(rows: list[Any]) -> Array:
    width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
    for index, row in enumerate(rows):
        if not isinstance(row, list):
            raise ValueError(f"expected rows of numbers, got {type(row).__name__} in place of row {index}")
        if len(row) != width:
            raise ValueError(f"expected rows of equal length, got {width} and {len(row)} (row {index})")
        if not set(map(type, row)) <= {float, int}:
            wrong = next(type(number).__name__ for number in row if type(number) not in (float, int))
            raise ValueError(f"expected numbers, got {wrong} in row {index}")
    try:
        return np.array(rows, np.float64).reshape(len(rows), width)
    except OverflowError as error:
        raise ValueError("expected numbers in the range of float64, got a larger number") from error


def ext_hook(code: int, data: memoryview) -> dict[bytes, Any]:
    """Decode an ext type for msgspec: an array from a JavaScript client becomes a map in the form that `pack` returns.
    `unpack` converts this map to an array. Raises ValueError for any other ext type.
    """
    if code != NUMPY_EXT:
        raise ValueError(f"msgpack ext type {code} is not accepted")
    parts = bytes(data).split(b"|", 2)
    # a dtype such as |i1 contains the separator `|`, but no dtype in _EXT_ACCEPTED contains it
    if len(parts) != 3:
        raise ValueError("array ext: expected `dtype|shape|data`")
    name, shape, raw = parts
    dtype = name.decode("ascii", "replace")
    try:
        axes = [int(axis) for axis in shape.decode("ascii").split(",") if axis]
    except ValueError as error:
        raise ValueError("array ext: shape is not a list of integers") from error
    _array(dtype, axes, raw, _EXT_ACCEPTED)
    return {b"nd": True, b"type": dtype, b"kind": b"", b"shape": axes, b"data": raw}


_DECODER = msgspec.msgpack.Decoder(ext_hook=ext_hook)


def decode_msgpack(data: bytes) -> Any:
    """Decode a client's msgpack body. An array of a JavaScript client becomes a map, which `unpack` converts, and a
    timestamp becomes a datetime. Raises one of the errors in UNDECODABLE, also for an unknown ext type.
    """
    return _DECODER.decode(data)
