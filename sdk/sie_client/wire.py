"""Encode items and decode replies. To save time, an item is encoded only once for all attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sie_client.errors import invalid
from sie_client.media import document, media, sound
from sie_client.types import Item
from sie_contracts import arrays
from sie_contracts.models.costs import IMAGE_TOKENS

FILES = {"document": document, "audio": sound, "video": media}
_OUTPUTS = ("dense", "sparse", "multivector")
# bytes of UTF-8 per token of English text. The estimate only decides where lists are split; the server counts exactly
_BYTES_PER_TOKEN = 4
_SPECIAL_TOKENS = 2
# upper limit of the estimated tokens of one text: most models truncate texts at this length or earlier
_MAX_TOKENS = 8192
_FILE_TOKENS = 1024


def item(value: Any, path: str) -> Any:
    """Return an item in the form for a request, with its files read. Raises InvalidInputError, which names `path`."""
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
    """Return an item as a new dict; a text becomes its field `text`. Raises InvalidInputError for another type."""
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
    """Return an array [tokens, width]. float16 is kept, other dtypes become float32. Raises InvalidInputError."""
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
    """Encode a request as msgpack. Raises InvalidInputError, which names `subject`, for a value that cannot be sent."""
    try:
        return _encoder.encode(body)
    except (TypeError, ValueError, OverflowError, NotImplementedError, RecursionError) as error:
        raise invalid(f"{subject}: {error}", reason="schema") from error


def decode_vectors(body: bytes) -> dict[str, Any]:
    """Decode a reply of encode. Each item has its arrays by name (`dense`, `sparse`, `multivector`), and a description
    of each array under `outputs`. Raises exceptions that `core.reading` converts, such as ValueError and KeyError.
    """
    reply = decode(body)
    for slot in reply["items"]:
        for vectors in (slot, *slot.get("chunks", ())):
            _read_outputs(vectors)
    return reply


def _read_outputs(slot: dict[str, Any]) -> None:
    """Replace each output of an item or chunk by its array, and put the other fields of the output under `outputs`."""
    slot["outputs"] = {}
    for name in _OUTPUTS:
        if name in slot:
            fields = slot[name]
            arrays_of = {key: fields.pop(key) for key in (("indices", "values") if name == "sparse" else ("values",))}
            if not all(isinstance(array, np.ndarray) for array in arrays_of.values()):
                raise ValueError(f"{name}: expected arrays")
            slot[name] = arrays_of if name == "sparse" else arrays_of["values"]
            slot["outputs"][name] = fields


def decode(body: bytes) -> dict[str, Any]:
    """Decode a reply of encode, score or extract. Raises the same exceptions as `decode_vectors`."""
    reply = arrays.unpack(arrays.decode_msgpack(body))
    if not isinstance(reply, dict):
        raise ValueError(f"expected a map, got {type(reply).__name__}")
    return reply
