"""Cost of an input. The unit is one token on the device after truncation. An image costs the patches of its tower, and
the tokens that stand for it; where all images of an encoder have one size, the budget of a batch counts 1 for the
patches of each (`Row.batch_cost`). That attention costs the square of a length is not in here: `BatchNote` tells it.
"""

from __future__ import annotations

VECTOR_BYTES = 512  # 128 numbers, the width of most token vectors


def text(tokens: int, expanded: int = 0) -> int:
    """A text: its tokens, special ones included, or as many as the model fills its row up to."""
    return max(tokens, expanded)


def vectors(size: int) -> int:
    """Vectors of a client in the place of a text, of so many bytes: what bounds a batch of them is its frame."""
    return max(1, size // VECTOR_BYTES)
