"""numpy arrays on the wire: five-entry msgpack maps with bin keys, numpy's ext type of JavaScript clients, nested lists in JSON.

Only the dtypes listed here pass in either direction; object and structured arrays never do, so nothing here can execute code.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

EMITTED = frozenset({"<f4", "<f2", "<i4", "|i1", "|u1"})
ACCEPTED = EMITTED | {"<f8", "<i2", "<i8", "<u4", "<u8", "<u2", "|b1"}
NUMPY_EXT = 78  # ord("N"): the payload is `dtype|shape|raw bytes`
_EXT_ACCEPTED = frozenset({"<f4", "<i4"})


def pack(array: Array) -> dict[bytes, Any]:
    """The map of one array, for a msgpack encoder. C order, little endian. Raises ValueError for a dtype that clients cannot read."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    if little.dtype.str not in EMITTED:
        raise ValueError(f"dtype {array.dtype} does not travel; allowed: {', '.join(sorted(EMITTED))}")
    return {b"nd": True, b"type": little.dtype.str, b"kind": b"", b"shape": list(array.shape), b"data": little.tobytes()}


def unpack(value: Any) -> Any:
    """Replace every array map below `value` by an array, at any depth. Raises ValueError for a dtype or length that does not fit.

    Arrays are copies that the caller owns and may write to.
    """
    if isinstance(value, dict):
        marker = value.get(b"nd", value.get("nd"))
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
    if not isinstance(shape, list) or not all(type(axis) is int and 0 <= axis < 2**31 for axis in shape) or len(shape) > 4:
        raise ValueError("array shape: expected a list of at most 4 non-negative integers")
    if not isinstance(data, bytes | memoryview | bytearray):
        raise ValueError("array data: expected bytes")
    expected = math.prod(shape) * np.dtype(dtype).itemsize  # exact: a product in int64 can wrap round to a small one
    if len(data) != expected:
        raise ValueError(f"array data: got {len(data)} bytes, expected {expected} for its shape and type")
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


def ext_hook(code: int, data: memoryview) -> Any:
    """msgspec's hook for ext types: numpy arrays of JavaScript clients. Any other ext type is refused with ValueError."""
    if code != NUMPY_EXT:
        raise ValueError(f"msgpack ext type {code} is not accepted")
    parts = bytes(data).split(b"|", 2)
    # the dtype itself may begin with a bar, as in "|i1": none of the accepted ones does
    if len(parts) != 3:
        raise ValueError("array ext: expected `dtype|shape|data`")
    dtype, shape, raw = parts
    try:
        axes = [int(axis) for axis in shape.decode("ascii").split(",") if axis]
    except ValueError as error:
        raise ValueError("array ext: shape is not a list of integers") from error
    return _array(dtype.decode("ascii", "replace"), axes, raw, _EXT_ACCEPTED)


_DECODER = msgspec.msgpack.Decoder(ext_hook=ext_hook)


def decode_msgpack(data: bytes) -> Any:
    """Decode a client's msgpack body, array maps left as maps (see `unpack`). Raises ValueError, msgspec.DecodeError or RecursionError."""
    return _DECODER.decode(data)
