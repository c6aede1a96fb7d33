"""Draw frames around detected objects on a copy of an image. Convert boxes to the region text of Florence-2."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sie_client.errors import RequestError, invalid
from sie_client.media import media

if TYPE_CHECKING:
    from PIL.Image import Image

_BINS = 1000


def region(bbox: Sequence[float], size: tuple[int, int]) -> str:
    """Return a box as text. This text is the `instruction` for a task of Florence-2 that is about a region, for example
    `<REGION_TO_OCR>`.

    `bbox`: x, y, width and height in pixels of the upright image, as in results. `size`: width and height of that
    image. Raises InvalidInputError for a box without an area, and for a box that is not within the image.
    """
    if len(bbox) == 4 and len(size) == 2:
        left, top, width, height = bbox
        if width > 0 and height > 0 and 0 <= left <= left + width <= size[0] and 0 <= top <= top + height <= size[1]:
            corners = (left, top, left + width, top + height)
            return "".join(f"<loc_{_bin(place, size[index % 2])}>" for index, place in enumerate(corners))
    message = f"bbox: expected x, y, width and height within an image of {size} pixels, got {list(bbox)}"
    raise invalid(message, param="bbox", reason="region")


def _bin(place: float, edge: int) -> int:
    return min(int(place * _BINS / edge), _BINS - 1)


_COLOURS = ("#e6194b", "#0082c8", "#3cb44b", "#f58231", "#911eb4", "#008080", "#aa6e28", "#800000")
# brightness from 0 to 255: text on a brighter colour is black, text on a darker colour is white
_DARKEST_FOR_BLACK = 150


def draw(image: Any, result: Mapping[str, Any], *, least: float = 0.0) -> Image:
    """Return an upright RGB copy of an image, with a frame around each object and entity that has a box.

    `image`: the image that was sent. `result`: the result of `extract` for this image. `least`: the lowest score of a
    frame that is drawn. Each label has one of eight colours. Of two frames that overlap, the one with the higher score
    is on top. Raises InvalidInputError if Pillow cannot read the image, RequestError if Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont, ImageOps
    except ImportError as error:
        raise RequestError("draw needs the package Pillow: pip install pillow") from error
    try:
        with Image.open(io.BytesIO(_bytes_of(image))) as opened:
            drawn = ImageOps.exif_transpose(opened).convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        message = f"image: Pillow cannot read this image: {error}"
        raise invalid(message, param="image", reason="invalid_media") from error
    entities = [
        entity
        for kind in ("objects", "entities")
        for entity in result.get(kind) or ()
        if entity.get("bbox") and entity["score"] >= least
    ]
    labels = list(dict.fromkeys(entity["label"] for entity in entities))
    pen = ImageDraw.Draw(drawn)
    width = max(1, round(max(drawn.size) / 400))
    font = ImageFont.load_default(max(10, round(max(drawn.size) / 50)))
    for part in sorted(entities, key=lambda part: float(part["score"])):
        colour = _COLOURS[labels.index(part["label"]) % len(_COLOURS)]
        x, y, across, down = part["bbox"]
        pen.rectangle((x, y, x + max(1, across) - 1, y + max(1, down) - 1), outline=colour, width=width)
        text = f"{' '.join(part['label'].split())} {part['score']:.2f}"
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        wide, tall = right - left + 2 * width, bottom - top + 2 * width
        beside, above = max(0, min(x, drawn.width - wide)), y - tall if y >= tall else y
        pen.rectangle((beside, above, beside + wide - 1, above + tall - 1), fill=colour)
        pen.text((beside + width - left, above + width - top), text, fill=_readable_on(colour), font=font)
    return drawn


def _readable_on(colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if (299 * red + 587 * green + 114 * blue) / 1000 > _DARKEST_FOR_BLACK else "white"


def _bytes_of(image: Any) -> bytes:
    """Return the bytes of an image. Raises InvalidInputError for an unreadable file or a URL, ValueError for a wrong
    data URI.
    """
    file = media(image, "image")
    data = file["data"] if isinstance(file, Mapping) else file
    if isinstance(data, bytes):
        return data
    try:
        return base64.b64decode(data.partition(",")[2], validate=True)
    except binascii.Error as error:
        raise ValueError("the data URI has no valid base64 data") from error
