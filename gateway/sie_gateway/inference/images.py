"""Read images, sounds and documents from request bodies. Also read the width, height and format of image files from
their headers, to limit the pixels of a request and to describe images in replies. No pixel is decoded.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from sie_contracts.errors import ErrorInfo, InvalidInput
from sie_contracts.media.documents import DocumentFile
from sie_contracts.media.images import MAX_DECODED_PIXELS
from sie_contracts.models.option_values import bad
from sie_contracts.plain import whole_number

_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # channels of a PNG by colour type
_NO_FRAME = frozenset({0xC4, 0xC8, 0xCC})  # JPEG markers that begin no frame; all others from 0xC0 to 0xCF do
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # JPEG markers without a length field
_FILL = re.compile(rb"\xff+")
# largest number of JPEG segments that are read until the first frame: a segment can be as short as 4 bytes, and reading
# the segments blocks the gateway's event loop
MAX_SEGMENTS = 1024


class _TooManySegments(Exception):
    """Raised for a JPEG whose first frame comes after MAX_SEGMENTS segments."""


_UNREADABLE = (struct.error, IndexError, KeyError)


class ImageHeader(NamedTuple):
    """Header of an image: its stored size in pixels, its format, and the bits of one pixel."""

    width: int
    height: int
    format: str
    bit_depth: int


def pixels(data: bytes) -> int:
    """Return the number of pixels of an image file from its header: 0 if the header cannot be read or its format is
    not in `_READERS`, MAX_DECODED_PIXELS if the header has too many segments.
    """
    try:
        image = _header(data)
    except _UNREADABLE:
        return 0
    except _TooManySegments:  # a worker may still decode the file, so assume the largest image
        return MAX_DECODED_PIXELS
    return image.width * image.height if image is not None else 0


def header(data: bytes) -> ImageHeader | None:
    """Return the header of a PNG, JPEG, GIF, WebP or BMP file; None for another format, and for a header that is
    incomplete, not valid, or has too many segments.
    """
    try:
        return _header(data)
    except (*_UNREADABLE, _TooManySegments):
        return None


def _header(data: bytes) -> ImageHeader | None:
    for magic, read_format in _READERS:
        if data.startswith(magic):
            return read_format(data)
    return None


def _png(data: bytes) -> ImageHeader:
    width, height, bits, colours = struct.unpack_from(">IIBB", data, 16)
    return ImageHeader(width, height, "png", bits * _PNG_CHANNELS[colours])


def _gif(data: bytes) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    return ImageHeader(width, height, "gif", (flags & 7) + 1)


def _bmp(data: bytes) -> ImageHeader:
    (size,) = struct.unpack_from("<I", data, 14)
    width, height, _, bits = struct.unpack_from("<HHHH" if size == 12 else "<IiHH", data, 18)
    return ImageHeader(width, abs(height), "bmp", bits)


def _jpeg(data: bytes) -> ImageHeader | None:
    """Return the header from the first frame. Other segments are skipped by their lengths. Raises _TooManySegments."""
    place = 2
    for _ in range(MAX_SEGMENTS):
        if data[place] != 0xFF:
            return None
        if data[place + 1] == 0xFF and (fill := _FILL.match(data, place)) is not None:  # fill bytes before a marker
            place = fill.end() - 1
        marker = data[place + 1]
        if marker in _STANDALONE:
            place += 2
        elif 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, place + 4)
            return ImageHeader(width, height, "jpeg", bits * channels)
        else:
            place += 2 + max(2, struct.unpack_from(">H", data, place + 2)[0])
    raise _TooManySegments


def _webp(data: bytes) -> ImageHeader | None:
    kind = data[8:16]
    if kind == b"WEBPVP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader(width & 0x3FFF, height & 0x3FFF, "webp", 24)
    if kind == b"WEBPVP8L":
        (packed,) = struct.unpack_from("<I", data, 21)
        return ImageHeader((packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1, "webp", 32 if packed >> 28 & 1 else 24)
    if kind == b"WEBPVP8X":
        flags, width, high, height, tall = struct.unpack_from("<B3xHBHB", data, 20)
        return ImageHeader((high << 16) + width + 1, (tall << 16) + height + 1, "webp", 32 if flags & 0x10 else 24)
    return None


_READERS: tuple[tuple[bytes, Callable[[bytes], ImageHeader | None]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8\xff", _jpeg),
    (b"GIF8", _gif),
    (b"RIFF", _webp),
    (b"BM", _bmp),
)
MAX_IMAGES = 64  # largest number of images of one input
EXPECTED = "the bytes of an image file, as base64 or in a data URI"
EXPECTED_SOUND = "the bytes of a sound file, as base64 or in a data URI"
EXPECTED_DOCUMENT = "the bytes of a document, as base64 or in a data URI"
MAX_FORMAT = 32  # largest number of characters in the name of a document's format
_URL = re.compile(r"\s*[a-z][a-z0-9+.-]{0,30}:", re.IGNORECASE)  # beginning of a URL; base64 has no colon
_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
_SPACE = b" \t\r\n"  # whitespace between lines, which some tools add to base64


class Link(NamedTuple):
    """Image at a URL. `place`: index among the images of the input. `path`: path in the request body."""

    place: int
    url: str
    path: str


class Images(NamedTuple):
    """Image files of one input, in order. `fault`: error of the first image that is not valid; `files` is then empty.
    `links`: images at URLs; each has an empty file until it is fetched.
    """

    files: tuple[bytes, ...] = ()
    fault: ErrorInfo | None = None
    links: tuple[Link, ...] = ()


class _Undecodable(Exception):
    """Raised for a text that does not decode to bytes."""


def read(value: Any, path: str) -> Images:
    """Return the files and the links in a list of images or a single image. Raises InvalidInput with the reason
    `schema`.
    """
    if isinstance(value, list):
        return gather([(f"{path}[{index}]", entry) for index, entry in enumerate(value)], path)
    return gather([(path, value)], path)


def read_sound(value: Any, path: str) -> tuple[bytes, ErrorInfo | None]:
    """Return the bytes of a sound, and None. If the base64 of the sound is not valid, return empty bytes and the error
    of the input. Raises InvalidInput with the reason `schema`, or `invalid_media` for a URL.
    """
    if isinstance(value, dict):
        rate = value.get("sample_rate")  # only the type is checked: the sound file has its own rate
        if rate is not None and type(whole_number(rate)) is not int:
            raise bad(f"{path}.sample_rate", rate, "a whole number or null")
    return _single(value, path, "sounds", EXPECTED_SOUND, "the sound as a WAV file")


def read_document(value: Any, path: str) -> tuple[DocumentFile | None, ErrorInfo | None]:
    """Return a document with the format that the client names, and None. If the base64 of the document is not valid,
    return None and the error of the input. Raises the exceptions of `read_sound`.
    """
    data, fault = _single(value, path, "documents", EXPECTED_DOCUMENT, "the document as a file")
    if fault is not None:
        return None, fault
    format_name = (value.get("format") or "") if isinstance(value, dict) else ""
    return DocumentFile(data, format_name.lower().removeprefix(".")[:MAX_FORMAT]), None


def _single(value: Any, path: str, kind: str, expected: str, instead: str) -> tuple[bytes, ErrorInfo | None]:
    try:
        file = _file(value, path, 0, expected, instead)
    except _Undecodable as error:
        return b"", _fault(f"{path}: {error}", path)
    if isinstance(file, Link):
        raise InvalidInput.at(file.path, f"got a URL, {kind} are not fetched: send {expected}", reason="invalid_media")
    return file, None


def gather(entries: Sequence[tuple[str, Any]], path: str) -> Images:
    """Return the images of an input. `entries`: (path in the body, value). Raises the exceptions of `read`."""
    if len(entries) > MAX_IMAGES:
        message = f"{path}: got {len(entries)} images, at most {MAX_IMAGES} are allowed in one input"
        return Images((), _fault(message, path, limit=MAX_IMAGES))
    files: list[bytes] = []
    links: list[Link] = []
    fault = None
    for where, entry in entries:  # the loop continues after a fault, because a later entry may fail the whole request
        try:
            file = _file(entry, where, len(files))
        except _Undecodable as error:
            fault = fault or _fault(f"{where}: {error}", where)
            continue
        if isinstance(file, Link):
            links.append(file)
            file = b""
        files.append(file)
    return Images(() if fault else tuple(files), fault, tuple(links))


def _fault(message: str, path: str, **extras: int) -> ErrorInfo:
    return ErrorInfo("INVALID_INPUT", message, "invalid_media", path, extras=extras)


def _file(
    value: Any, path: str, place: int, expected: str = EXPECTED, instead: str = "the image as a PNG file"
) -> bytes | Link:
    """Return the bytes of a file, or the link to it. Raises _Undecodable, InvalidInput."""
    if isinstance(value, dict):
        if "nd" in value:
            raise InvalidInput.at(path, f"expected {expected}, got an array: send {instead}")
        if not isinstance(value.get("format"), str | None):
            raise bad(f"{path}.format", value["format"], "a string or null")
        value, path = value.get("data"), f"{path}.data"
    if isinstance(value, str):
        if _URL.match(value) and value[:5].lower() != "data:":
            return Link(place, value, path)
        value = _decoded(value)
    if not isinstance(value, bytes):
        raise bad(path, value, expected)
    if not value:
        raise _Undecodable(f"expected {expected}, got nothing")
    return value


def _decoded(text: str) -> bytes:
    """Return the bytes that are encoded in base64 or in a data URI. Raises _Undecodable."""
    if text[:5].lower() == "data:":
        head, _, text = text.partition(",")
        if not head.lower().endswith(";base64"):
            raise _Undecodable("expected a data URI of the form data:TYPE;base64,DATA")
    try:
        try:
            return msgspec.convert(text, bytes)  # msgspec needs a quarter of the time of the standard library
        except msgspec.ValidationError:  # msgspec accepts only the standard alphabet with padding and without spaces
            bare = text.encode("ascii").translate(_TO_STANDARD, _SPACE).decode("ascii")
            return msgspec.convert(bare + "=" * (-len(bare) % 4), bytes)
    except (msgspec.ValidationError, UnicodeEncodeError):
        raise _Undecodable("expected base64 or a data URI, got a string that is neither") from None
