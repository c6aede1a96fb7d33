"""A part of an image, as models that take one read it."""

from __future__ import annotations

from collections.abc import Sequence

from sie_client.errors import InvalidInputError

_BINS = 1000


def region(bbox: Sequence[float], size: tuple[int, int]) -> str:
    """A box as the `instruction` of Florence-2's tasks about a region, such as `<REGION_TO_OCR>`.

    `bbox`: x, y, width and height in pixels of the upright image, as results have it. `size`: width and height of that
    image. Raises InvalidInputError for a box without an area, and for one that is not within the image.
    """
    if len(bbox) == 4 and len(size) == 2:
        left, top, width, height = bbox
        if width > 0 and height > 0 and 0 <= left <= left + width <= size[0] and 0 <= top <= top + height <= size[1]:
            corners = (left, top, left + width, top + height)
            return "".join(f"<loc_{_bin(place, size[index % 2])}>" for index, place in enumerate(corners))
    message = f"bbox: expected x, y, width and height within an image of {size} pixels, got {list(bbox)}"
    raise InvalidInputError(message, code="INVALID_INPUT", details={"param": "bbox", "reason": "region"})


def _bin(place: float, edge: int) -> int:
    return min(int(place * _BINS / edge), _BINS - 1)
