"""Costs of inputs, as device time in tokens of short texts. `BatchTimes` estimates the time of a batch from measured
batches: a fixed part and a part for each token. The module does no I/O.

In a transformer, everything except attention takes the same time for each token, in a short or a long text. Attention
takes time in proportion to the square of a text's length. So a text of n tokens takes n + n²/c times as long as a token
of a short text. c is the crossover length: the length at which attention takes as long as everything else.

By the number of operations, c is 6 times the width in a BERT: each token and layer takes 24 width² operations, and
attention takes 4 n width operations (Kaplan et al., 2020, "Scaling Laws for Neural Language Models", section 2.1). On a
CPU, an operation of attention takes about twice as long as an operation of a matrix product. So c is CROSSOVER_WIDTHS
times the width (`bench/rulings.py lengths`).

Waits are predicted from these costs. Budgets of batches and keys, which settings set in tokens, count plain tokens.

A worker that has a model loaded reports the cost of its images. Without a report, an image counts as IMAGE_TOKENS:
about the number of patches of 14 pixels in a square of 224 pixels. Models differ by a factor of 100. A sound counts as
IMAGE_TOKENS, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

CROSSOVER_WIDTHS = 3
IMAGE_TOKENS = 256  # tokens of one image or sound, in estimates that split and admit requests


class ImageCost(NamedTuple):
    """Cost of an image of a model, and the number of token vectors in its multivector."""

    tokens: int = IMAGE_TOKENS
    vectors: int = IMAGE_TOKENS


def crossover_tokens(width: int, layers: int, full_layers: int) -> int:
    """Return the crossover length, in tokens, of a model with hidden states of `width` numbers. `full_layers` of its
    `layers` attend to the whole text, the other layers to a window. Returns 0 if no layer attends to the whole text:
    the time then depends only on the number of tokens.
    """
    return CROSSOVER_WIDTHS * width * layers // full_layers if full_layers else 0


def text_cost(tokens: float, squares: float, crossover: int) -> float:
    """Return the cost of texts in a model with this crossover length (0: only tokens count). The texts have `tokens`
    tokens in total, and their squared lengths add up to `squares`.
    """
    return tokens + squares / crossover if crossover else tokens


AHEAD_SHARE = 0.25  # share of a request's budget; a batch that takes more is not sealed while another batch runs
# limit for (variance of batch sizes / square of their mean); below it a line through the times of the batches is not
# reliable
_MIN_SPREAD = 0.02
_IMPOSSIBLE = 2.0  # factor: an outlier is this many times above or below the range that earlier batches allow
_UNLIKELY = 4.0  # factor: an outlier is this many times above or below the fitted line
# factor: times are predicted for sizes up to this many times the mean size, while only one size was measured
_GROWTH = 2.0


class BatchTimes:
    """Estimate of the time of a batch: a fixed part, and a part for each token. It is a least-squares fit of about the
    last `memory` results.

    A device may suddenly become slower or faster, for example when its processor is throttled. Whatever the two parts
    are, a batch with n times the tokens takes from 1 to n times as long. A result outside this range is an outlier. A
    single outlier is ignored as a stall. After two outliers in a row on the same side, all earlier measurements are
    scaled.
    """

    __slots__ = ("_fixed", "_keep", "_n", "_odd", "_x", "_xx", "_xy", "_y")

    def __init__(self, memory: int = 100) -> None:
        self._keep = 1 - 1 / memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._odd = 1.0  # factor by which the last result was outside the allowed range; 1.0: it was inside
        # fixed part in tokens, from the last fitted line; None: no line was fitted yet
        self._fixed: float | None = None

    def note(self, tokens: float, seconds: float) -> None:
        """Record that a batch of `tokens` took `seconds`."""
        if tokens <= 0 or seconds <= 0:
            return
        odd, before = self._oddness(tokens, seconds), self._odd
        self._odd = odd
        if odd != 1.0:
            if (odd > 1) != (before > 1) or before == 1.0:
                return
            scale = min(odd, before) if odd > 1 else max(odd, before)
            self._y *= scale
            self._xy *= scale
            self._odd = 1.0
        keep = self._keep
        self._n = keep * self._n + 1
        self._x = keep * self._x + tokens
        self._y = keep * self._y + seconds
        self._xx = keep * self._xx + tokens * tokens
        self._xy = keep * self._xy + tokens * seconds
        if (line := self.line()) is not None:
            self._fixed = line[0] / line[1] if line[1] else math.inf

    def _oddness(self, tokens: float, seconds: float) -> float:
        if not self._n:
            return 1.0
        size, mean_s = tokens * self._n / self._x, self._y / self._n
        min_s, max_s = mean_s * min(1.0, size), mean_s * max(1.0, size)
        if not min_s <= seconds <= max_s and (line := self.line()) is not None:
            times = seconds / (line[0] + line[1] * tokens or seconds)
            if max(times, 1 / times) > _UNLIKELY and (times > 1) == (seconds > max_s):
                return times
        if seconds > _IMPOSSIBLE * max_s:
            return seconds / max_s
        return seconds / min_s if seconds * _IMPOSSIBLE < min_s else 1.0

    def line(self) -> tuple[float, float] | None:
        """Return (seconds of the fixed part, seconds for each token). Return None if all batches had about the same
        size.
        """
        spread = self._n * self._xx - self._x * self._x
        if spread <= _MIN_SPREAD * self._x * self._x:
            return None
        token_s = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        return max(0.0, (self._y - token_s * self._x) / self._n), token_s

    def fixed_tokens(self) -> float:
        """Return the number of tokens that take as long as the fixed part of a batch; 0 while unknown."""
        line = self.line()
        if line is None:
            return 0.0
        return line[0] / line[1] if line[1] else math.inf

    @property
    def is_known(self) -> bool:
        """Return whether any batch was measured."""
        return self._n > 0

    @property
    def mean_s(self) -> float:
        """Return the mean seconds of the last batches; 0 while no batch was measured."""
        return self._y / self._n if self._n else 0.0

    @property
    def is_growth_known(self) -> bool:
        """Return whether batches of different sizes were measured."""
        return self._fixed is not None

    def efficient(self, full: float, loss: float) -> float:
        """Return the size of the smallest efficient batch, in tokens; 0 while unknown. `full` is the size of a full
        batch.

        An efficient batch meets two conditions. First, its throughput is at least (1 - `loss`) times the throughput of
        a full batch. Second, the share of time that it saves is at least the share of throughput that it loses. If the
        fixed part takes as long as F tokens, a batch of c tokens takes (F + c) / (F + full) of the time of a full
        batch. So the first condition is c >= (1 - loss) full F / (F + loss full), and the second condition is c >= F^2
        / full.
        """
        fixed = self._fixed
        if not fixed:
            return 0.0
        if fixed >= full:
            return full
        return max((1 - loss) * full * fixed / (fixed + loss * full), fixed * fixed / full)

    def seconds(self, tokens: float) -> float:
        """Return the predicted seconds of a batch of `tokens`, from the mean of the last batches and the slope of the
        line. Without a line, return the mean; above twice the mean size, the prediction grows in proportion to the
        tokens.
        """
        if not self._n:
            return 0.0
        mean, mean_s = self._x / self._n, self._y / self._n
        if self._fixed is None:
            return mean_s * max(1.0, tokens / (_GROWTH * mean))
        return mean_s if self._fixed == math.inf else mean_s * (self._fixed + tokens) / (self._fixed + mean)

    def tokens(self, seconds: float) -> float:
        """Return the size, in tokens, of the largest batch that takes at most `seconds`. Return 0 if every batch takes
        longer, infinity while no batch was measured.
        """
        if not self._n:
            return math.inf
        mean, mean_s = self._x / self._n, self._y / self._n
        if self._fixed is None:
            return mean * max(_GROWTH, seconds / mean_s)
        if self._fixed == math.inf:
            return math.inf if mean_s <= seconds else 0.0
        return max(0.0, (self._fixed + mean) * seconds / mean_s - self._fixed)
