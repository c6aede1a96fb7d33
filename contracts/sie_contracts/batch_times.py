"""What a batch takes, learnt from those that ran: a fixed part, and a part for each token. Pure."""

from __future__ import annotations

import math

AHEAD_SHARE = 0.25  # of a budget: a batch that takes more of it is not sealed while another one runs
_MIN_SPREAD = 0.02  # variance of batch sizes over their mean squared, below which a line through their times is noise
_IMPOSSIBLE = 2.0  # times as long, or as short, as any fixed and any token part allow beside the batches before
_UNLIKELY = 4.0  # times as long, or as short, as the line says
_GROWTH = 2.0  # of the mean batch: the largest batch of which something is said while only one size was measured


class BatchTimes:
    """What a batch takes: something each, and something for each token. Least squares over the last `memory` or so
    results.

    A device may become slower or faster from one moment to the next, where its processor is throttled for one. Whatever
    the two parts are, n times the tokens take between once and n times as long. Two results in a row beyond that, both
    too long or both too short, scale what was measured before; of one alone nothing is learnt: it was a stall.
    """

    __slots__ = ("_fixed", "_keep", "_n", "_odd", "_x", "_xx", "_xy", "_y")

    def __init__(self, memory: int = 100) -> None:
        self._keep = 1 - 1 / memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._odd = 1.0  # times as long as possible, of the last result
        self._fixed: float | None = None  # tokens that the fixed part is worth, as the last line had it

    def note(self, tokens: float, seconds: float) -> None:
        """A batch of so many tokens took so long."""
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
        least_s, most_s = mean_s * min(1.0, size), mean_s * max(1.0, size)
        if not least_s <= seconds <= most_s and (line := self.line()) is not None:
            times = seconds / (line[0] + line[1] * tokens or seconds)
            if max(times, 1 / times) > _UNLIKELY and (times > 1) == (seconds > most_s):
                return times
        if seconds > _IMPOSSIBLE * most_s:
            return seconds / most_s
        return seconds / least_s if seconds * _IMPOSSIBLE < least_s else 1.0

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

    @property
    def is_known(self) -> bool:
        """Whether any batch was measured."""
        return self._n > 0

    @property
    def mean_s(self) -> float:
        """What the last batches took on average, 0 while not known."""
        return self._y / self._n if self._n else 0.0

    @property
    def is_growth_known(self) -> bool:
        """Whether batches of different sizes were measured."""
        return self._fixed is not None

    def efficient(self, full: float, loss: float) -> float:
        """The smallest batch that has 1 - `loss` of the tokens a second that a batch of `full` tokens has, and that
        saves at least as large a part of its seconds as it loses of its tokens a second; 0 while that is not known.

        With a fixed part worth F tokens a batch of c takes (F + c) / (F + full) of the time. The first is then
        c >= (1 - loss) full F / (F + loss full), the second c >= F^2 / full.
        """
        fixed = self._fixed
        if not fixed:
            return 0.0
        if fixed >= full:
            return full
        return max((1 - loss) * full * fixed / (fixed + loss * full), fixed * fixed / full)

    def seconds(self, tokens: float) -> float:
        """What a batch of so many tokens takes, by the mean of the last ones and by how their time was seen to grow.
        Unless that was seen yet: in proportion above twice their mean, as long as the mean below.
        """
        if not self._n:
            return 0.0
        mean, mean_s = self._x / self._n, self._y / self._n
        if self._fixed is None:
            return mean_s * max(1.0, tokens / (_GROWTH * mean))
        return mean_s if self._fixed == math.inf else mean_s * (self._fixed + tokens) / (self._fixed + mean)

    def tokens(self, seconds: float) -> float:
        """The largest batch that takes no longer, 0 if none does; infinite while nothing is known."""
        if not self._n:
            return math.inf
        mean, mean_s = self._x / self._n, self._y / self._n
        if self._fixed is None:
            return mean * max(_GROWTH, seconds / mean_s)
        if self._fixed == math.inf:
            return math.inf if mean_s <= seconds else 0.0
        return max(0.0, (self._fixed + mean) * seconds / mean_s - self._fixed)
