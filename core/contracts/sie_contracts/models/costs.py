"""Costs of inputs in device time, in tokens of short texts. Pure.

Everything in a transformer but attention takes the same time for each token, whatever text it is in. Attention takes
time in proportion to the square of a text's length. So a text of n tokens takes n + n²/c times as long as a token of a
short one. c is the length at which attention takes as long as everything else: the crossover length.

By operations c is 6 widths in a BERT: 24 width² a token and layer against 4 n width (Kaplan et al., 2020, "Scaling Laws
for Neural Language Models", section 2.1). On a CPU an operation of attention takes about twice as long as one of a
matrix product, so that c is CROSSOVER_WIDTHS (`bench/rulings.py lengths`).

Waits are predicted from these costs. Budgets that settings give in tokens, those of batches and of keys, count tokens.

An image costs what a worker that has the model loaded tells. Until one does, it counts as IMAGE_TOKENS: about the
patches of 14 pixels in a square of 224. The models differ by a factor of 100. A sound counts as IMAGE_TOKENS, too.
"""

from __future__ import annotations

from typing import NamedTuple

CROSSOVER_WIDTHS = 3
IMAGE_TOKENS = 256  # of one image or sound, in estimates that split and admit requests


class ImageCost(NamedTuple):
    """Cost of an image of a model, and the number of token vectors in its multivector."""

    tokens: int = IMAGE_TOKENS
    vectors: int = IMAGE_TOKENS


def crossover_tokens(width: int, layers: int, full_layers: int) -> int:
    """The crossover length of a model with hidden states of `width` numbers, in tokens. `full_layers` of its `layers`
    attend to the whole text, the others to a window. 0 if none does: then time grows with tokens alone.
    """
    return CROSSOVER_WIDTHS * width * layers // full_layers if full_layers else 0


def text_cost(tokens: float, squares: float, crossover: int) -> float:
    """The cost of texts of so many tokens in all, whose squares add up to `squares`, in a model of this crossover
    length (0: tokens alone count).
    """
    return tokens + squares / crossover if crossover else tokens
