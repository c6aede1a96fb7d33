"""Conversion of images, documents, audio and video to the form in a request: `{"data": bytes of the file, "format":
str}`. The client sends data URIs, and URLs of images, unchanged: the gateway downloads or refuses the URL.

The client reads the format from the first bytes, or else from the suffix of the file name. If the format is still
unknown, the client omits `format`, and the server detects the format. A document has `format` only if its name has the
suffix of a text format: a text file has no fixed first bytes, and the server detects all other formats.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie_client.errors import InvalidInputError, invalid

# modes of Pillow images that PNG stores without loss; other images are sent as TIFF
_PNG_MODES = frozenset({"1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"})
# values per pixel -> number of the PNG colour type: grey, RGB, RGBA
_PNG_COLOURS = {1: 0, 3: 2, 4: 6}
_PNG_LEVEL = 1  # zlib level; higher levels take much longer and save few bytes
# dtype of samples -> WAV format number: 1 for integers, 3 for floats
_WAV_SAMPLES = {"uint8": 1, "int16": 1, "int32": 1, "float32": 3, "float64": 3}
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"\xff\xd8\xff", "jpeg"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\x00", "tiff"),
    (b"MM\x00*", "tiff"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
    (b"\x1aE\xdf\xa3", "webm"),
)
_RIFF = {b"WEBP": "webp", b"WAVE": "wav", b"AVI ": "avi"}
_SUFFIXES = {"jpg": "jpeg", "tif": "tiff", "htm": "html", "xhtml": "html", "markdown": "md", "text": "txt"}
_TEXTS = frozenset({"html", "md", "txt", "csv"})


def media(value: Any, path: str, *, urls: bool = False, is_document: bool = False) -> Any:
    """Convert a file to the form of a request. Return a data URI unchanged, and a URL if `urls` is true. Raises
    InvalidInputError for a file that cannot be read, and for a URL if `urls` is false.
    """
    if isinstance(value, Mapping):
        item = media(value.get("data"), f"{path}.data", urls=urls, is_document=is_document)
        fields = {name: field for name, field in value.items() if name != "data" and field is not None}
        return {**(item if isinstance(item, dict) else {"data": item}), **fields}
    if isinstance(value, str) and value[:5].lower() == "data:":
        return value
    if isinstance(value, str) and value[:8].lower().startswith(("http://", "https://")):
        if urls:
            return value
        raise _refused(path, "the client fetches no URLs: give the bytes or a path")
    data, name = _read(value, path)
    suffix = _suffix(name)
    kind = (suffix if suffix in _TEXTS else "") if is_document else _format_of(data) or suffix
    return {"data": data, "format": kind} if kind else {"data": data}


def document(value: Any, path: str) -> Any:
    """Convert a document to the form of a request, see `media`."""
    return media(value, path, is_document=True)


def sound(value: Any, path: str) -> Any:
    """Convert a sound to the form of a request, see `media`. A map of numpy samples and their `sample_rate` becomes a
    WAV file.
    """
    if isinstance(value, Mapping) and isinstance(value.get("data"), np.ndarray):
        return {"data": _wav(value["data"], value.get("sample_rate"), path), "format": "wav"}
    if isinstance(value, np.ndarray):
        raise _refused(path, 'samples need their rate: give {"data": samples, "sample_rate": 48000}')
    return media(value, path)


def _wav(samples: NDArray[Any], rate: Any, path: str) -> bytes:
    """Return a WAV file with samples of shape [samples] or [samples, channels], at most 64 channels. Raises
    InvalidInputError.
    """
    kind = _WAV_SAMPLES.get(samples.dtype.name)
    if kind is None or samples.ndim not in (1, 2) or not samples.size or (samples.ndim == 2 and samples.shape[1] > 64):
        got = f"{samples.dtype} {list(samples.shape)}"
        raise _refused(
            f"{path}.data",
            f"expected samples as uint8, int16, int32, float32 or float64, [samples] or [samples, channels], got {got}",
        )
    if not isinstance(rate, int | np.integer) or isinstance(rate, bool) or not 0 < rate < 1 << 24:
        raise _refused(f"{path}.sample_rate", "expected the number of samples a second, a whole number")
    rate = int(rate)  # products of a 16-bit numpy integer would overflow
    channels = samples.shape[1] if samples.ndim == 2 else 1
    width = samples.dtype.itemsize
    data = np.ascontiguousarray(samples, samples.dtype.newbyteorder("<")).tobytes()
    if len(data) >= (1 << 32) - 64:
        raise _refused(f"{path}.data", "expected less than 4 GiB of samples, the limit of a WAV file")
    head = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, kind, channels, rate, rate * channels * width, channels * width, 8 * width
    )
    body = b"WAVE" + head + struct.pack("<4sI", b"data", len(data)) + data + bytes(len(data) % 2)
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def _read(value: Any, path: str) -> tuple[bytes, str]:
    """Return the bytes of a file, and the name of the file (empty if it is unknown)."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), ""
    try:
        if isinstance(value, str | os.PathLike):
            return Path(value).read_bytes(), os.fspath(value)
        if callable(getattr(value, "read", None)):
            data = value.read()
            if not isinstance(data, bytes):
                raise _refused(path, "the file is not open for reading bytes")
            return data, str(getattr(value, "name", ""))
        if callable(getattr(value, "save", None)) and hasattr(value, "mode"):
            return _without_loss(value), ""
        if isinstance(value, np.ndarray):
            return _png(value, path), ""
    except (OSError, ValueError) as error:
        raise _refused(path, f"could not be read: {type(error).__name__}") from error
    expected = "a path, bytes, an open file, an image of PIL or an array of pixels"
    raise _refused(path, f"expected {expected}, got {type(value).__name__}")


def _without_loss(picture: Any) -> bytes:
    written = io.BytesIO()
    picture.save(written, format="PNG" if picture.mode in _PNG_MODES else "TIFF")
    return written.getvalue()


def _png(pixels: NDArray[Any], path: str) -> bytes:
    """Return uint8 pixels, [height, width] or [height, width, N], as PNG. N: 1, 3 or 4. Raises InvalidInputError."""
    values = pixels.shape[2] if pixels.ndim == 3 else 1
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or values not in _PNG_COLOURS or not pixels.size:
        got = f"{pixels.dtype} {list(pixels.shape)}"
        raise _refused(path, f"expected pixels as uint8 [height, width] or [height, width, 3 or 4], got {got}")
    height, width = pixels.shape[:2]
    # in PNG, each row of pixels begins with a filter number; 0 means no filter
    rows = np.zeros((height, 1 + width * values), np.uint8)
    rows[:, 1:] = pixels.reshape(height, width * values)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOURS[values], 0, 0, 0)),
            _chunk(b"IDAT", zlib.compress(rows.data, _PNG_LEVEL)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(data, zlib.crc32(kind)))


def _format_of(data: bytes) -> str:
    """Return the format of an image, sound or video that the first bytes show; empty if the bytes show no format."""
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12], "")
    if data[4:8] == b"ftyp":
        return "mp4"
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), "")


def _suffix(name: str) -> str:
    suffix = Path(name).suffix[1:].lower()
    return _SUFFIXES.get(suffix, suffix)


def _refused(path: str, why: str) -> InvalidInputError:
    return invalid(f"{path}: {why}", param=path, reason="invalid_media")
