"""How much a device runs while it is busy. Pure: the caller has the clock."""

from __future__ import annotations

import math

MEMORY_S = 10.0  # busy seconds after which a batch counts 1/e


class Rate:
    """Tokens a second, over the time in which at least one batch is at the adapter, so several lanes and batches sent
    ahead count once.

    Tokens and busy time fade together, which weighs a batch by the time it took. It is the rate of batches as they are
    formed now: small ones, of an idle worker, make it lower than what the device can do.
    """

    def __init__(self) -> None:
        self._running = 0
        self._since_s = 0.0
        self._tokens = 0.0
        self._busy_s = 0.0

    @property
    def running(self) -> int:
        return self._running

    @property
    def tokens_per_s(self) -> float:
        """0 until a batch has ended."""
        return self._tokens / self._busy_s if self._tokens and self._busy_s else 0.0

    def sent(self, now_s: float) -> None:
        """A batch is at the adapter from now on."""
        if self._running == 0:
            self._since_s = now_s
        self._running += 1

    def ended(self, tokens: int, now_s: float) -> None:
        """A batch of so many tokens is done; 0 if it failed: its time was spent all the same."""
        spent_s = now_s - self._since_s
        kept = math.exp(-spent_s / MEMORY_S)
        self._tokens = self._tokens * kept + tokens
        self._busy_s = self._busy_s * kept + spent_s
        self._since_s = now_s
        self._running -= 1
