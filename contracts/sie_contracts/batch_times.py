"""What a batch takes, learnt from those that ran: a fixed part, and a part for each token. Pure."""

from __future__ import annotations

import math

_MIN_SPREAD = 0.02  # variance of batch sizes over their mean squared, below which a line through their times is noise


class BatchTimes:
    """What a batch takes: something each, and something for each token. Least squares over the last hundred or so results."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, tokens: float, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            self._n = 0.99 * self._n + 1
            self._x = 0.99 * self._x + tokens
            self._y = 0.99 * self._y + seconds
            self._xx = 0.99 * self._xx + tokens * tokens
            self._xy = 0.99 * self._xy + tokens * seconds

    def line(self) -> tuple[float, float] | None:
        """(seconds of each batch, seconds of each token), None while batches of a size say nothing of it."""
        spread = self._n * self._xx - self._x * self._x
        if spread <= _MIN_SPREAD * self._x * self._x:
            return None
        token_s = max(0.0, (self._n * self._xy - self._x * self._y) / spread)
        return max(0.0, (self._y - token_s * self._x) / self._n), token_s

    def fixed_tokens(self) -> float:
        """The tokens that take as long as what each batch takes beside its own. 0 while that is not known."""
        line = self.line()
        if line is None:
            return 0.0
        return line[0] / line[1] if line[1] else math.inf
