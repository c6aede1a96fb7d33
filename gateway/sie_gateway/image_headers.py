"""What the first bytes of an image file say of it: no pixel is decoded. For replies that describe their images."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
_NO_FRAME = frozenset({0xC4, 0xC8, 0xCC})  # among the markers of a JPEG that begin frames
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # without a length


class Header(NamedTuple):
    """Size in pixels as stored, and bits of one pixel."""

    width: int
    height: int
    format: str
    bit_depth: int


def pixels(data: bytes) -> int:
    """Of a file, as its header says; 0 where that cannot be read here."""
    found = header(data)
    return found.width * found.height if found is not None else 0


def header(data: bytes) -> Header | None:
    """None if the file is of another format than PNG, JPEG, GIF, WebP and BMP, or too short."""
    for magic, read in _READERS:
        if data.startswith(magic):
            try:
                return read(data)
            except (struct.error, IndexError, KeyError):
                return None
    return None


def _png(data: bytes) -> Header:
    width, height, bits, colours = struct.unpack_from(">IIBB", data, 16)
    return Header(width, height, "png", bits * _PNG_CHANNELS[colours])


def _gif(data: bytes) -> Header:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    return Header(width, height, "gif", (flags & 7) + 1)


def _bmp(data: bytes) -> Header:
    (size,) = struct.unpack_from("<I", data, 14)
    width, height, _, bits = struct.unpack_from("<HHHH" if size == 12 else "<iiHH", data, 18)
    return Header(width, abs(height), "bmp", bits)


def _jpeg(data: bytes) -> Header | None:
    """The first frame: segments are skipped by their lengths."""
    place = 2
    while data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # filling
            place += 1
        elif marker in _STANDALONE:
            place += 2
        elif 0xC0 <= marker <= 0xCF and marker not in _NO_FRAME:
            bits, height, width, channels = struct.unpack_from(">BHHB", data, place + 4)
            return Header(width, height, "jpeg", bits * channels)
        else:
            place += 2 + max(2, struct.unpack_from(">H", data, place + 2)[0])
    return None


def _webp(data: bytes) -> Header | None:
    kind = data[8:16]
    if kind == b"WEBPVP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return Header(width & 0x3FFF, height & 0x3FFF, "webp", 24)
    if kind == b"WEBPVP8L":
        (packed,) = struct.unpack_from("<I", data, 21)
        return Header((packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1, "webp", 32 if packed >> 28 & 1 else 24)
    if kind == b"WEBPVP8X":
        flags, width, high, height, tall = struct.unpack_from("<B3xHBHB", data, 20)
        return Header((high << 16) + width + 1, (tall << 16) + height + 1, "webp", 32 if flags & 0x10 else 24)
    return None


_READERS: tuple[tuple[bytes, Callable[[bytes], Header | None]], ...] = (
    (b"\x89PNG\r\n\x1a\n", _png),
    (b"\xff\xd8\xff", _jpeg),
    (b"GIF8", _gif),
    (b"RIFF", _webp),
    (b"BM", _bmp),
)
