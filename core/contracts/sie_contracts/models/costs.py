"""Costs of inputs in device time, in tokens of short texts. Pure.

In a transformer, everything except attention takes the same time for each token, in a short or a long text. Attention
takes time in proportion to the square of a text's length. So a text of n tokens takes n + n²/c times as long as a token
of a short text. c is the crossover length: the length at which attention takes as long as everything else.

By the number of operations, c is 6 times the width in a BERT: each token and layer takes 24 width² operations, against
4 n width operations of attention (Kaplan et al., 2020, "Scaling Laws for Neural Language Models", section 2.1). On a
CPU, an operation of attention takes about twice as long as an operation of a matrix product. So c is CROSSOVER_WIDTHS
times the width (`bench/rulings.py lengths`).

Waits are predicted from these costs. Budgets of batches and keys, which settings give in tokens, count plain tokens.

A worker that has a model loaded reports the cost of its images. Until a worker does so, an image counts as
IMAGE_TOKENS: about the number of patches of 14 pixels in a square of 224 pixels. Models differ by a factor of 100. A
sound counts as IMAGE_TOKENS, too.
"""

from __future__ import annotations

from typing import NamedTuple

CROSSOVER_WIDTHS = 3
IMAGE_TOKENS = 256  # tokens of one image or sound, in estimates that split and admit requests


class ImageCost(NamedTuple):
    """Cost of an image of a model, and the number of token vectors in its multivector."""

    tokens: int = IMAGE_TOKENS
    vectors: int = IMAGE_TOKENS


def crossover_tokens(width: int, layers: int, full_layers: int) -> int:
    """Return the crossover length, in tokens, of a model with hidden states of `width` numbers. `full_layers` of its
    `layers` attend to the whole text, the others to a window. Returns 0 if no layer attends to the whole text: time
    then grows with tokens alone.
    """
    return CROSSOVER_WIDTHS * width * layers // full_layers if full_layers else 0


def text_cost(tokens: float, squares: float, crossover: int) -> float:
    """Return the cost of texts that have `tokens` tokens in total, and whose squared lengths add up to `squares`, in a
    model with this crossover length (0: only tokens count).
    """
    return tokens + squares / crossover if crossover else tokens
