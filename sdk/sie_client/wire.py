"""Encode items and decode replies. For speed, an item is encoded only once for all attempts to send it, and an array is
copied only once from a reply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_client.errors import invalid
from sie_client.media import document, media, sound
from sie_client.types import Item, ItemUsage, Usage
from sie_contracts import arrays
from sie_contracts.models.costs import IMAGE_TOKENS

FILES = {"document": document, "audio": sound, "video": media}
_OUTPUTS = ("dense", "sparse", "multivector")
# UTF-8 bytes per token of English text. The client splits a list into requests by this estimate; the server counts the
# real tokens.
_BYTES_PER_TOKEN = 4
_SPECIAL_TOKENS = 2
# upper limit of the estimated tokens of one text: most models truncate texts at this length or earlier
_MAX_TOKENS = 8192
_FILE_TOKENS = 1024


def item(value: Any, path: str) -> Any:
    """Return an item in the form for a request, with the content of its files. `path`: place of the item in the call,
    such as `items[3]`, for the message of InvalidInputError.
    """
    if isinstance(value, str):
        # msgspec cannot encode subclasses of str, such as numpy.str_
        return value if type(value) is str else str(value)
    sent = mapped(value, path)
    if sent.get("images") is not None:
        images = sent["images"]
        if not isinstance(images, Sequence) or isinstance(images, str | bytes | bytearray | memoryview):
            images = [images]
        sent["images"] = [media(image, f"{path}.images[{number}]", urls=True) for number, image in enumerate(images)]
    for name, read in FILES.items():
        if sent.get(name) is not None:
            sent[name] = read(sent[name], f"{path}.{name}")
    if sent.get("multivector") is not None:
        sent["multivector"] = _matrix(sent["multivector"], f"{path}.multivector")
    return sent


def mapped(value: Any, path: str) -> dict[str, Any]:
    """Return an item as a new dict; a str becomes the field `text`. Raises InvalidInputError for another type."""
    if isinstance(value, str):
        return {"text": value}
    if hasattr(value, "as_py"):
        return mapped(value.as_py(), path)
    if not isinstance(value, Mapping):
        message = f"{path}: expected a str or a map, got {type(value).__name__}"
        raise invalid(message, param=path, reason="schema")
    return dict(value)


def has_files(value: Item | str) -> bool:
    return isinstance(value, Mapping) and any(value.get(name) is not None for name in ("images", *FILES))


def weight(sent: Any) -> tuple[int, int]:
    """Estimate how many tokens and bytes an item has. `sent`: the item as `item` returned it."""
    if isinstance(sent, str):
        size = len(sent) if sent.isascii() else len(sent.encode("utf-8", "replace"))
        return min(_MAX_TOKENS, size // _BYTES_PER_TOKEN + _SPECIAL_TOKENS), size
    tokens, size = weight(sent["text"]) if isinstance(sent.get("text"), str) else (_SPECIAL_TOKENS, 0)
    if sent.get("chunks") is not None:  # a text in chunks is not truncated
        tokens = max(tokens, size // _BYTES_PER_TOKEN)
    matrix = sent.get("multivector")
    if isinstance(matrix, np.ndarray):
        tokens, size = tokens + len(matrix), size + matrix.nbytes
    images = sent.get("images") or ()
    files = [sent[name] for name in FILES if sent.get(name) is not None]
    return tokens + IMAGE_TOKENS * len(images) + _FILE_TOKENS * len(files), size + sum(
        len(file if isinstance(file, str) else file["data"]) for file in (*images, *files)
    )


def _matrix(value: Any, path: str) -> NDArray[Any]:
    """Return an array [tokens, width], as float16 if `value` is float16, else as float32. Raises InvalidInputError."""
    try:
        array = np.asarray(value)
        array = array if array.dtype == np.float16 else array.astype(np.float32, copy=False)
    except (TypeError, ValueError) as error:
        raise invalid(f"{path}: expected a matrix of numbers, got {type(value).__name__}") from error
    if array.ndim != 2:
        raise invalid(f"{path}: expected a matrix [tokens, width], got the shape {array.shape}")
    return array


def _hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return arrays.pack(value)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"a value of type {type(value).__name__} cannot be sent")


_encoder = msgspec.msgpack.Encoder(enc_hook=_hook)


def encode(body: Mapping[str, Any], subject: str) -> bytes:
    """Encode a request as msgpack. Raises InvalidInputError, which names `subject`, for a value of an unsuited type."""
    try:
        return _encoder.encode(body)
    except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
        raise invalid(f"{subject}: {error}", reason="schema") from error


_ArrayMap = dict[bytes, msgspec.Raw]


class _OutputMap(TypedDict, total=False):
    values: _ArrayMap
    indices: _ArrayMap
    dims: int
    token_dims: int
    num_tokens: int
    dtype: str
    scale: float | _ArrayMap
    offset: float | _ArrayMap
    source: str


class _ChunkSlot(TypedDict, total=False):
    start: int
    end: int
    tokens: int
    dense: _OutputMap
    sparse: _OutputMap
    multivector: _OutputMap


class _OutputSlot(TypedDict, total=False):
    id: str
    metadata: Any
    dense: _OutputMap
    sparse: _OutputMap
    multivector: _OutputMap
    chunks: list[_ChunkSlot]
    timing: dict[str, float]
    usage: ItemUsage
    error: dict[str, Any]


class _RequestFacts(TypedDict):
    model: str
    timing: dict[str, float]
    usage: Usage
    fingerprint: str


class _EncodedItems(_RequestFacts, total=False):
    muvera: dict[str, Any]
    warnings: list[str]
    explain: Any


class _EncodeReply(_EncodedItems):
    items: list[_OutputSlot]


_decoder = msgspec.msgpack.Decoder(_EncodeReply, ext_hook=arrays.ext_hook)
_DTYPES = {msgspec.msgpack.encode(name): np.dtype(name) for name in sorted(arrays.EMITTED)}
_TRUE, _EMPTY = b"\xc3", b"\xc4\x00"
# first byte of a msgpack byte string (bin 8, bin 16, bin 32) -> number of bytes before its content
_HEADERS = {0xC4: 2, 0xC5: 3, 0xC6: 5}


def decode_vectors(body: bytes) -> dict[str, Any]:
    """Decode a reply of encode. Each item has its arrays under `dense`, `sparse` and `multivector`, and a description
    of each array under `outputs`. Raises exceptions that `core.reading` converts, such as ValueError and KeyError.
    """
    reply = cast("dict[str, Any]", _decoder.decode(body))
    for slot in reply["items"]:
        for vectors in (slot, *slot.get("chunks", ())):
            _read_outputs(vectors)
        if "metadata" in slot:
            slot["metadata"] = arrays.unpack(slot["metadata"])
    return reply


def _read_outputs(slot: dict[str, Any]) -> None:
    """Replace each output of an item or chunk by its array, and move the other fields of the output to `outputs`."""
    slot["outputs"] = {}
    for name in _OUTPUTS:
        if name in slot:
            vectors = {key: _array(value) if isinstance(value, dict) else value for key, value in slot[name].items()}
            slot[name] = (
                {key: vectors.pop(key) for key in ("indices", "values")} if name == "sparse" else vectors.pop("values")
            )
            slot["outputs"][name] = vectors


def _array(sent: _ArrayMap) -> NDArray[Any]:
    """Copy an array out of the reply, because its bytes there may not be aligned for its dtype."""
    if bytes(sent[b"nd"]) != _TRUE or bytes(sent.get(b"kind", _EMPTY)) != _EMPTY:
        raise ValueError("array: expected msgpack-numpy with the field nd true and the field kind empty")
    dtype = _DTYPES[bytes(sent[b"type"])]
    shape = msgspec.msgpack.decode(sent[b"shape"], type=list[int])
    data = memoryview(sent[b"data"])
    data = data[_HEADERS[data[0]] :]
    if min(shape, default=0) < 0 or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"array: {len(data)} bytes do not fit the shape {shape} of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def decode(body: bytes) -> dict[str, Any]:
    """Decode a reply of score or extract. Raises the same exceptions as `decode_vectors`."""
    reply = arrays.unpack(arrays.decode_msgpack(body))
    if not isinstance(reply, dict):
        raise ValueError(f"expected a map, got {type(reply).__name__}")
    return reply
