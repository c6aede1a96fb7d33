"""Generated image files of every kind: pictures with structure, and files that are hard for decoders."""

from __future__ import annotations

import functools
import io
import random
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, features

WIDTH, HEIGHT = 60, 40


def picture(width: int = WIDTH, height: int = HEIGHT, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Return waves of colour with edges and noise, because flat colours would hide how an image was resized."""
    rng = np.random.default_rng(seed)
    down, right = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = [
        128 + 90 * np.cos(down / (5 + 4 * channel) - right / (9 + 2 * channel) + seed + channel) for channel in range(3)
    ]
    levels = np.stack(waves, -1) + rng.normal(0, 12, (height, width, 3))
    levels[:, :: max(2, width // 6)] = 255
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    sink = io.BytesIO()
    image.save(sink, kind, **options)
    return sink.getvalue()


def several(kind: str, *colours: str) -> bytes:
    """Return a file with an image of each colour."""
    first, *frames = (Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in colours)
    return encoded(first, kind, save_all=True, append_images=frames)


def turned(orientation: int, image: Image.Image | None = None, kind: str = "PNG") -> bytes:
    """Return a file with an orientation in its EXIF data."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image or picture(), kind, exif=exif)


def png(
    width: int, height: int, *, colour: int = 0, bits: int = 1, body: bytes | None = None, clear: bytes = b""
) -> bytes:
    """Return a PNG of any size, which is built without an image in memory. All its pixels are 0, or those of `body`.
    `clear`: the samples of its transparent colour.
    """

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    if body is None:
        row = bytes(1 + (width * bits * {0: 1, 2: 3}[colour] + 7) // 8)
        deflate = zlib.compressobj(9)
        body = b"".join(deflate.compress(row) for _ in range(height)) + deflate.flush()
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"tRNS", clear) * bool(clear)
        + chunk(b"IDAT", body)
        + chunk(b"IEND", b"")
    )


@functools.cache
def bomb() -> bytes:
    """Return a PNG of 50 kB with 400 megapixels."""
    return png(20_000, 20_000)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return data with bytes changed, removed, repeated or overwritten by extreme numbers. Its magic mostly stays."""
    mutant = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        place = rng.randrange(4 if rng.random() < 0.95 else 0, max(5, len(mutant)))
        match rng.randrange(4):
            case 0:
                mutant[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                del mutant[place : place + rng.randint(1, 40)]
            case 2:
                mutant[place:place] = mutant[place : place + rng.randint(1, 40)]
            case _:
                extreme = rng.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 65535, 20_000))
                mutant[place : place + 4] = struct.pack(rng.choice(("<I", ">I")), extreme)
    return bytes(mutant)


def seeds() -> list[bytes]:
    """Return a small file of each kind, for `mutated`."""
    image = picture(48, 36)
    return [
        encoded(image, "JPEG"),
        encoded(image, "JPEG", progressive=True),
        turned(6, image, "JPEG"),
        encoded(image),
        encoded(image.quantize(16)),
        encoded(image, "WEBP"),
        encoded(image, "WEBP", lossless=True),
        several("WEBP", "red", "blue"),
        several("GIF", "red", "blue"),
        encoded(image, "TIFF"),
        *(encoded(image, "TIFF", compression=name) for name in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")),
        encoded(image.convert("1"), "TIFF", compression="group4"),
        encoded(image, "BMP"),
        *([encoded(image, "AVIF")] if features.check("avif") else []),
    ]
