"""Sources of the vectors in golden/marqo.json. `toys.image` makes the images; the index of a size is its seed."""

from __future__ import annotations

TEXTS = (
    "a photo of a red square",
    "A PHOTO, of a Red_Square!",
    "naïve 東京 2026",
    "",
    "word " * 40,
    "  many   spaces\tand\nlines  ",
)
SIZES = ((48, 48), (200, 90), (33, 171), (20, 31), (301, 7))
