"""Costs of inputs: device time, measured in tokens. A cost of n tokens is the time for n tokens of short texts.
`BatchTimes` estimates the time of a batch from earlier batches: a fixed part, and a part for each token. The module
does no I/O.

In a transformer, everything except attention takes the same time for each token, in a short or a long text. Attention
takes time in proportion to the square of a text's length. So a text of n tokens takes n + n²/c times as long as a token
of a short text. c is the crossover length: the length at which attention takes as long as everything else.

By the number of operations, c is 6 times the width in a BERT: each token and layer takes 24 width² operations, and
attention takes 4 n width operations (Kaplan et al., 2020, "Scaling Laws for Neural Language Models", section 2.1). On a
CPU, an operation of attention takes about twice as long as an operation of a matrix product. So c is CROSSOVER_WIDTHS
times the width (`bench/lengths.py`).

Waiting times are predicted from these costs. Limits that settings express in tokens count plain tokens, not costs.

A worker that has a model loaded reports the cost of its images. Without a report, an image or a sound counts as
IMAGE_TOKENS, about the number of patches of 14 x 14 pixels in an image of 224 x 224 pixels. The real costs of models
differ by up to a factor of 100.
"""

from __future__ import annotations

import math
from typing import NamedTuple

CROSSOVER_WIDTHS = 3
# cost of one image or sound, in tokens, until a worker reports it; used to split requests and to admit them
IMAGE_TOKENS = 256


class ImageCost(NamedTuple):
    """Cost of one image in a model, in tokens, and the number of vectors that represent the image in a multivector."""

    tokens: int = IMAGE_TOKENS
    vectors: int = IMAGE_TOKENS


def crossover_tokens(width: int, layers: int, full_layers: int) -> int:
    """Return the crossover length in tokens: the length of a text at which attention takes as long as everything else.
    `width`: numbers in a hidden state. `full_layers` of the `layers` attend to the whole text, the other layers to a
    window. Return 0 if no layer attends to the whole text: then the time depends only on the number of tokens.
    """
    return CROSSOVER_WIDTHS * width * layers // full_layers if full_layers else 0


def text_cost(tokens: float, squares: float, crossover: int) -> float:
    """Return the cost of several texts, in tokens. `tokens`: total number of their tokens; `squares`: the sum of their
    squared lengths; `crossover`: the model's crossover length, 0 if only the number of tokens counts.
    """
    return tokens + squares / crossover if crossover else tokens


# if the predicted time of a batch is above this share of a request's time budget, the gateway predicts the wait of the
# request in whole batches
AHEAD_SHARE = 0.25
# A line is fitted to the measured times only if the batch sizes differ enough: their variance, divided by the square of
# their mean, is above this number.
_MIN_SPREAD = 0.02
# Earlier batches determine a range of possible times (see `BatchTimes`). A measured time is an outlier if it is longer
# than the longest possible time by more than this factor, or shorter than the shortest one by more than this factor.
_IMPOSSIBLE = 2.0
# A measured time above the range is also an outlier if it exceeds the time on the fitted line by more than this factor.
# The same holds for a time below the range that is shorter than the time on the line by more than this factor.
_UNLIKELY = 4.0
# Before the first line is fitted, a batch of at most this factor times the mean tokens has the mean time as its
# predicted time.
_GROWTH = 2.0


class BatchTimes:
    """Estimate of the time of a batch: a fixed part, and a part for each token. A line is fitted by least squares to
    about the last `memory` measured times.

    A device may suddenly become slower or faster, for example when its processor is throttled. A batch with n times the
    tokens of the mean batch should take between 1 and n times the mean time, whatever the two parts are. A time far
    outside this range is an outlier: too long or too short by some factor. A single outlier is ignored, because it may
    be a stall. Two outliers in a row, both too long or both too short, show that the speed of the device has changed.
    Then all earlier times are multiplied by the factor of one of these outliers: the factor that is nearer to 1.
    """

    __slots__ = ("_fixed", "_keep", "_n", "_odd", "_x", "_xx", "_xy", "_y")

    def __init__(self, memory: int = 100) -> None:
        self._keep = 1 - 1 / memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._odd = 1.0  # factor by which the last time was outside its expected range; 1.0 if it was inside
        # fixed part of a batch's time, as the number of tokens that take as long; None before the first line is fitted
        self._fixed: float | None = None

    def note(self, tokens: float, seconds: float) -> None:
        """Record the measured time of a batch: `tokens` took `seconds`."""
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
        if self.line() is not None:
            self._fixed = self.fixed_tokens()

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
        """Return (seconds of the fixed part, seconds per token); None if all batches had about the same size."""
        spread = self._n * self._xx - self._x * self._x
        if spread <= _MIN_SPREAD * self._x * self._x:
            return None
        token_s = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        return max(0.0, (self._y - token_s * self._x) / self._n), token_s

    def fixed_tokens(self) -> float:
        """Return the number of tokens that take as long as the fixed part of a batch; 0 if the fixed part is unknown,
        infinity if the time does not depend on the tokens.
        """
        line = self.line()
        if line is None:
            return 0.0
        return line[0] / line[1] if line[1] else math.inf

    @property
    def is_known(self) -> bool:
        return self._n > 0

    @property
    def is_growth_known(self) -> bool:
        """Return whether batches of different sizes were measured, so that the growth of time with size is known."""
        return self._fixed is not None

    def efficient(self, full: float, loss: float) -> float:
        """Return the smallest efficient batch size, in tokens; 0 if it is not known. `full`: size of a full batch.

        An efficient batch meets two conditions. First, its throughput is at least (1 - `loss`) times that of a full
        batch. Second, compared with a full batch, the share of time that it saves is at least the share of throughput
        that it loses.

        If the fixed part takes as long as F tokens, a batch of c tokens takes (F + c) / (F + full) of the time of a
        full batch. So the first condition is c >= (1 - loss) full F / (F + loss full), and the second is c >= F^2 /
        full.
        """
        fixed = self._fixed
        if not fixed:
            return 0.0
        if fixed >= full:
            return full
        return max((1 - loss) * full * fixed / (fixed + loss * full), fixed * fixed / full)

    def seconds(self, tokens: float) -> float:
        """Return the predicted time of a batch of `tokens`, in seconds; 0 before the first measurement.

        With a fitted line, the prediction is the mean time of the last batches, times the line's value at `tokens`,
        divided by the line's value at the mean size of these batches. Without a fitted line, a batch of up to twice the
        mean size takes the mean time, and the time of a larger batch is proportional to its tokens.
        """
        if not self._n:
            return 0.0
        mean, mean_s = self._x / self._n, self._y / self._n
        if self._fixed is None:
            return mean_s * max(1.0, tokens / (_GROWTH * mean))
        return mean_s if self._fixed == math.inf else mean_s * (self._fixed + tokens) / (self._fixed + mean)

    def tokens(self, seconds: float) -> float:
        """Return the largest number of tokens of a batch with a predicted time of at most `seconds`. The result is 0 if
        every batch would take longer, and infinity before the first measurement.
        """
        if not self._n:
            return math.inf
        mean, mean_s = self._x / self._n, self._y / self._n
        if self._fixed is None:
            return mean * max(_GROWTH, seconds / mean_s)
        if self._fixed == math.inf:
            return math.inf if mean_s <= seconds else 0.0
        return max(0.0, (self._fixed + mean) * seconds / mean_s - self._fixed)
