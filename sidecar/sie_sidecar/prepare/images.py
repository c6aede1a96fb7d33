"""Decoding of image files to the pixels that a model reads, with Pillow. Only the media worker processes import this
module, because decoders are C code that reads the data of clients.

    first bytes ──► header ──► limits ──► decode ──► upright ──► alpha on white, 16 to 8 bits ──► resize, crop or pad

FORMATS has the supported formats. Of a file with several images, only the first image is read. Colour profiles and
gamma are ignored, as in the image processors of transformers.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from PIL import AvifImagePlugin, Image, ImageFile, UnidentifiedImageError, features

from sie_contracts.errors import InvalidInput
from sie_contracts.media.images import Filter, Recipe, Size, check, pixels_of, resizes
from sie_contracts.media.media import fault

AVIF = "AVIF"
FORMATS: tuple[str, ...] = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", *((AVIF,) if features.check("avif") else ()))
_MAGIC: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("JPEG", lambda head: head.startswith(b"\xff\xd8\xff")),
    ("PNG", lambda head: head.startswith(b"\x89PNG\r\n\x1a\n")),
    ("WEBP", lambda head: head.startswith(b"RIFF") and head[8:12] == b"WEBP"),
    ("GIF", lambda head: head.startswith((b"GIF87a", b"GIF89a"))),
    ("TIFF", lambda head: head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"))),
    ("BMP", lambda head: head.startswith(b"BM")),
    (AVIF, lambda head: head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis", b"mif1", b"msf1")),
)
_ORIENTATION = 0x0112  # number of the EXIF tag for the orientation
_UPRIGHT: Mapping[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_FILTERS: Mapping[Filter, Image.Resampling] = {
    "nearest": Image.Resampling.NEAREST,
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}
# number of pixels that are laid over a white background at a time; this needs five times the memory of these pixels
_STRIP_PIXELS = 1 << 20
_LEVELS_16 = [round(level / 257) for level in range(1 << 16)]
_LEVELS_12 = [min(255, round(level * 255 / 4095)) for level in range(1 << 16)]
# numbers of two TIFF tags: number of bits of a sample, and photometric interpretation (whether 0 means black or white)
_BITS, _WHITE = 0x0102, 0x0106
# A PNG file may declare one sample value as transparent. Pillow converts the samples to 8 bits, but not this value.
# So: Pillow's raw mode of the samples -> function that converts this value as Pillow converts the samples.
_CLEAR_LEVELS: Mapping[object, Callable[[int], int]] = {
    "L;2": lambda level: level % 4 * 85,
    "L;4": lambda level: level % 16 * 17,
    "RGB;16B": lambda level: level >> 8,
}

Image.MAX_IMAGE_PIXELS = None  # disables Pillow's limit: `check` has its own limits, which are tested before decoding
# one thread for the AVIF decoder: there are several media workers, and each thread needs memory, which is limited
AvifImagePlugin.DEFAULT_MAX_THREADS = 1


class Pixels(NamedTuple):
    """Pixels of an image, uint8 RGB by rows. `upright`: size after EXIF rotation. `animated`: the file has further
    images, which were not read.
    """

    pixels: bytes
    size: Size
    upright: Size
    animated: bool

    def digest(self) -> bytes:
        digest = hashlib.sha256(b"%d x %d\n" % self.size)
        digest.update(self.pixels)
        return digest.digest()


def prepare(data: bytes, recipe: Recipe) -> Pixels:
    """Return the pixels of an image file, resized by the recipe that the model requires. Raises InvalidInput with the
    reason `invalid_media`; its message begins with the cause: too_large, undecodable or aspect (ratio).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hides warnings about damaged metadata, which is not used
            return _prepared(data, recipe)
    except InvalidInput:
        raise
    except MemoryError as error:
        raise fault("too_large", "decoding the image takes more memory than a media worker has") from error
    except UnidentifiedImageError as error:
        raise fault("undecodable", "the header of the image file is damaged") from error
    except Exception as error:  # decoders raise exceptions of any class for a damaged file
        raise fault("undecodable", "the image file is damaged or incomplete") from error


def _prepared(data: bytes, recipe: Recipe) -> Pixels:
    image, animated = _decoded(data, recipe)
    upright = Size(image.height, image.width)
    check(recipe, upright)
    for step in resizes(recipe, upright):
        image = image.resize((step.width, step.height), _FILTERS[recipe.resample])
    size = pixels_of(recipe, upright)
    return Pixels(_placed(image, recipe, size).tobytes(), size, upright, animated)


def _decoded(data: bytes, recipe: Recipe) -> tuple[Image.Image, bool]:
    """Return the upright RGB image, and True if the file has further images."""
    image = _opened(data)
    check(recipe, Size(image.height, image.width))
    # an MPO file counts as one image: its further images are previews that a camera stored
    animated = image.format != "MPO" and bool(getattr(image, "is_animated", False))
    _convert_clear_level(image)
    image.load()
    check(recipe, Size(image.height, image.width))  # again: the decoded image may be larger than its header says
    return _rgb(_upright(image)), animated


def _opened(data: bytes) -> ImageFile.ImageFile:
    """Open a file and read its header. Allow only the decoder of the format that the first bytes show."""
    if not data:
        raise fault("undecodable", "the image file is empty")
    kind = next((kind for kind, is_of in _MAGIC if kind in FORMATS and is_of(data[:16])), None)
    if kind is None:
        raise fault("undecodable", f"the first bytes are of no supported image format ({', '.join(FORMATS)})")
    return Image.open(io.BytesIO(data), formats=[kind])


def _convert_clear_level(image: ImageFile.ImageFile) -> None:
    """Convert the transparent sample value of a PNG file in the same way in which `load` will convert its samples."""
    clear = image.info.get("transparency")
    convert = _CLEAR_LEVELS.get(image.tile[0].args) if image.format == "PNG" and image.tile else None
    if convert is not None and clear is not None:
        image.info["transparency"] = tuple(map(convert, clear)) if isinstance(clear, tuple) else convert(clear)


def _upright(image: Image.Image) -> Image.Image:
    """Rotate the image as its EXIF data says. Unreadable EXIF data is ignored, as in browsers."""
    turn = None
    with suppress(Exception):
        turn = _UPRIGHT.get(image.getexif().get(_ORIENTATION, 1))
    return image if turn is None else image.transpose(turn)


def _rgb(image: Image.Image) -> Image.Image:
    """Convert the image to RGB with 8 bits. An image with alpha is laid over a white background."""
    if image.mode in ("F", "I"):
        raise fault("undecodable", f"samples of mode {image.mode} have no fixed value for white, expected 8 or 16 bits")
    if image.mode.startswith("I;16"):
        return _of_16_bits(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    canvas = Image.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        canvas.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return canvas


def _of_16_bits(image: Image.Image) -> Image.Image:
    """Convert a 16 bit grey image to RGB. Pillow's own conversion would turn every value above 255 into white. Also
    convert 12 bit images, and TIFF files in which 0 is white: Pillow gives them the same mode as 16 bit images.
    """
    tags, clear = getattr(image, "tag_v2", {}), image.info.get("transparency")
    levels = _LEVELS_12 if tags.get(_BITS) == (12,) else _LEVELS_16
    if tags.get(_WHITE) == 0:
        levels = levels[::-1]
    if isinstance(clear, int) and 0 <= clear < len(levels):
        levels = [*levels[:clear], 255, *levels[clear + 1 :]]
    return image.convert("I").point(levels, "L").convert("RGB")


def _placed(image: Image.Image, recipe: Recipe, size: Size) -> Image.Image:
    """Return an image of `size`. For a recipe of the kind `page`, put the image into the centre of an empty page. For
    `tiles`, put its tiles one below the other, and below them the whole image, shrunk to one tile. For any other kind,
    crop the image around its centre.
    """
    if (image.height, image.width) == size:
        return image
    if recipe.kind == "page":
        around = Image.new("RGB", (size.width, size.height), recipe.fill)
        around.paste(image, ((size.width - image.width) // 2, (size.height - image.height) // 2))
        return around
    if recipe.kind == "tiles":
        return _tiled(image, recipe, size)
    left, top = (image.width - size.width) // 2, (image.height - size.height) // 2
    return image.crop((left, top, left + size.width, top + size.height))


def _tiled(image: Image.Image, recipe: Recipe, size: Size) -> Image.Image:
    edge = recipe.multiple
    strip = Image.new("RGB", (size.width, size.height))
    for row in range(0, image.height, edge):
        for column in range(0, image.width, edge):
            number = row // edge * (image.width // edge) + column // edge
            strip.paste(image.crop((column, row, column + edge, row + edge)), (0, number * edge))
    strip.paste(image.resize((edge, edge), _FILTERS[recipe.resample]), (0, size.height - edge))
    return strip
