"""Items and replies on the wire. A request is encoded once. An array of a reply is copied once, out of the reply."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_client.errors import InvalidInputError
from sie_client.media import media, sound
from sie_client.types import Item, ItemUsage, Usage
from sie_contracts import arrays
from sie_contracts.models.costs import IMAGE_TOKENS

FILES = ("document", "audio", "video")
_OUTPUTS = ("dense", "sparse", "multivector")
# bytes of English UTF-8; the estimate is used only to split lists into parts, because the server counts exactly
_BYTES_PER_TOKEN = 4
_SPECIAL_TOKENS = 2
# largest number of tokens that is assumed for one text: models truncate long texts, most of them earlier
_MAX_TOKENS = 8192
_FILE_TOKENS = 1024


def item(value: Any, path: str) -> Any:
    """Return an item in the form of a request, with its files read. `path` is its name in errors. Raises
    InvalidInputError.
    """
    if isinstance(value, str):
        return value if type(value) is str else str(value)  # msgspec does not encode numpy's string type
    sent = mapped(value, path)
    if sent.get("images") is not None:
        images = sent["images"]
        several = (
            images
            if isinstance(images, Sequence) and not isinstance(images, str | bytes | bytearray | memoryview)
            else [images]
        )
        sent["images"] = [media(image, f"{path}.images[{number}]", urls=True) for number, image in enumerate(several)]
    for name in FILES:
        if sent.get(name) is not None:
            read = sound if name == "audio" else media
            sent[name] = read(sent[name], f"{path}.{name}")
    if sent.get("multivector") is not None:
        sent["multivector"] = _matrix(sent["multivector"], f"{path}.multivector")
    return sent


def mapped(value: Any, path: str) -> dict[str, Any]:
    """Return an item as a new map. A scalar of pyarrow is its value. Raises InvalidInputError for a value that is
    neither text nor a map.
    """
    if isinstance(value, str):
        return {"text": value}
    if hasattr(value, "as_py"):
        return mapped(value.as_py(), path)
    if not isinstance(value, Mapping):
        message = f"{path}: expected a str or a map, got {type(value).__name__}"
        raise InvalidInputError(message, code="INVALID_INPUT", details={"param": path, "reason": "schema"})
    return dict(value)


def has_files(value: Item | str) -> bool:
    return isinstance(value, Mapping) and any(value.get(name) is not None for name in ("images", *FILES))


def weight(sent: Any) -> tuple[int, int]:
    """Return the estimated tokens and bytes of an item that `item` returned."""
    if isinstance(sent, str):
        size = len(sent) if sent.isascii() else len(sent.encode("utf-8", "replace"))
        return min(_MAX_TOKENS, size // _BYTES_PER_TOKEN + _SPECIAL_TOKENS), size
    tokens, size = weight(sent["text"]) if isinstance(sent.get("text"), str) else (_SPECIAL_TOKENS, 0)
    if sent.get("chunks") is not None:  # read to its end
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
    """Return an array [tokens, width], as float32 unless the value is already float16."""
    try:
        array = np.asarray(value)
        array = array if array.dtype == np.float16 else array.astype(np.float32, copy=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{path}: expected a matrix of numbers, got {type(value).__name__}", code="INVALID_INPUT"
        ) from error
    if array.ndim != 2:
        raise InvalidInputError(
            f"{path}: expected a matrix [tokens, width], got the shape {array.shape}", code="INVALID_INPUT"
        )
    return array


def _hook(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return arrays.pack(value)
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_hook)


def encode(body: Mapping[str, Any], subject: str) -> bytes:
    """Return a request body as msgpack. Raises InvalidInputError, which begins with `subject`, for values that msgpack
    cannot represent.
    """
    try:
        return _encoder.encode(body)
    except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
        raise InvalidInputError(f"{subject}: {error}", code="INVALID_INPUT", details={"reason": "schema"}) from error


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
_HEADERS = {0xC4: 2, 0xC5: 3, 0xC6: 5}  # bytes of the header of bin 8, bin 16 and bin 32


def decode_vectors(body: bytes) -> dict[str, Any]:
    """Return a reply of encode. `items` have their arrays by name, and the description of each array under `outputs`.

    Raises the exceptions that `reading` converts: ValueError, KeyError, msgspec.DecodeError and others.
    """
    reply = cast("dict[str, Any]", _decoder.decode(body))
    for slot in reply["items"]:
        for vectors in (slot, *slot.get("chunks", ())):
            _read_outputs(vectors)
        if "metadata" in slot:
            slot["metadata"] = arrays.unpack(slot["metadata"])
    return reply


def _read_outputs(slot: dict[str, Any]) -> None:
    """Replace the outputs of an item or a chunk by their arrays, and put the descriptions of these under `outputs`."""
    slot["outputs"] = {}
    for name in _OUTPUTS:
        if name in slot:
            vectors = {key: _array(value) if isinstance(value, dict) else value for key, value in slot[name].items()}
            slot[name] = (
                {key: vectors.pop(key) for key in ("indices", "values")} if name == "sparse" else vectors.pop("values")
            )
            slot["outputs"][name] = vectors


def _array(sent: _ArrayMap) -> NDArray[Any]:
    """Return an array that the caller owns and may modify. It is copied once, so that its address is aligned for its
    type.
    """
    if bytes(sent[b"nd"]) != _TRUE or bytes(sent.get(b"kind", _EMPTY)) != _EMPTY:
        raise ValueError("array: expected nd true and no kind")
    dtype = _DTYPES[bytes(sent[b"type"])]
    shape = msgspec.msgpack.decode(sent[b"shape"], type=list[int])
    data = memoryview(sent[b"data"])
    data = data[_HEADERS[data[0]] :]
    if min(shape, default=0) < 0 or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"array: {len(data)} bytes do not fit the shape {shape} of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def decode(body: bytes) -> dict[str, Any]:
    """Return a reply of score or extract. Raises the same errors as `decode_vectors`."""
    reply = arrays.unpack(arrays.decode_msgpack(body))
    if not isinstance(reply, dict):
        raise ValueError(f"expected a map, got {type(reply).__name__}")
    return reply
