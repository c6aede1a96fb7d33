"""What an input costs of a batch's budget. The unit is one token on the device after truncation; other modalities are
counted in it by convention, so that one budget bounds every batch. That attention costs the square of a length is not
in here: `BatchNote` tells it.
"""

from __future__ import annotations

VECTOR_BYTES = 512  # 128 numbers, the width of most token vectors
IMAGE_BYTES = 7168  # a batch of 16,384 tokens has 112 MiB of pixels at most, of the 128 MiB that a frame holds


def text(tokens: int, expanded: int = 0) -> int:
    """A text: its tokens, special ones included, or as many as the model fills its row up to."""
    return max(tokens, expanded)


def vectors(size: int) -> int:
    """Vectors of a client in the place of a text, of so many bytes: what bounds a batch of them is its frame."""
    return max(1, size // VECTOR_BYTES)


def images(tokens: int, size: int) -> int:
    """Images that count as so many tokens and whose pixels have so many bytes: a batch of them is bounded by its frame
    as well.
    """
    return max(tokens, size // IMAGE_BYTES)
