"""The grant of a credential: who it is, what it may do, and how many tokens it may use.

Tokens per minute of a key are a bucket that refills all the time, charged by estimate at the edge and settled by what
was really used.

    estimate ──take──► level ──► the request runs ──► settle(true tokens): the difference goes back, or is owed
                         └ too little: RateLimited with the time until there is enough

Gateways share a quota as they share the window of a key: each has its part by their number, so it holds approximately.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from sie_contracts.errors import PayloadTooLarge, RateLimited
from sie_runtime.keys import NO_LIMITS, KeyLimits

MINUTE_S = 60.0
WORKERS_NAME = "config-read"  # of the token that workers hold
_MAX_IDLE = 4096  # buckets that are kept; a full one says nothing that a new one does not say


@dataclass(frozen=True)
class Grant:
    """`key` names a credential among others: whose turn, whose quota; empty for all who need none.

    `name` says in metrics who it is: nothing of a token, nor what one could be guessed by.
    """

    key: str = ""
    scopes: frozenset[str] = frozenset()
    limits: KeyLimits = NO_LIMITS
    name: str = "anonymous"

    def owns(self, owner: str) -> bool:
        """Whether this credential may see and change what `owner`, the key of a credential, made."""
        return owner == self.key or "admin" in self.scopes


ANYBODY = Grant()


@dataclass(slots=True)
class _TokenLevel:
    """Tokens that a key may use here now; below 0 they are owed."""

    tokens: float
    at_s: float


class Quotas:
    """`gateways`: how many share them. Owned by the gateway's loop."""

    def __init__(self, gateways: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._gateways = gateways
        self._clock = clock
        self._levels: dict[str, _TokenLevel] = {}

    def charge(self, key: str, limits: KeyLimits) -> Charge | None:
        """Open the charge of one call of this key; None if it may use any number of tokens."""
        return Charge(self, key, limits.tokens_per_minute) if limits.tokens_per_minute else None

    def spend(self, key: str, per_minute: int, cost: int) -> None:
        """Use `cost` tokens, or raise.

        What is more than this gateway's part goes by when the part is whole, and is owed then: a quota of the whole
        installation must not refuse for good what it allows. RateLimited says when to come again; what no minute allows
        is PayloadTooLarge.
        """
        if cost > per_minute:
            message = (
                f"this request has about {cost} tokens, its key may use {per_minute} per minute: send fewer items at a "
                "time"
            )
            raise PayloadTooLarge(message, param="items", extras={"limit": per_minute})
        level, part = self._level(key, per_minute)
        missing = min(float(cost), part) - level.tokens
        if missing > 0:
            message = f"this key may use {per_minute} tokens per minute, and this request has about {cost}"
            wait_s = math.ceil(missing / part * MINUTE_S)
            raise RateLimited(message, retry_after_s=max(1, wait_s), extras={"limit": per_minute})
        level.tokens -= cost

    def settle(self, key: str, per_minute: int, difference: int) -> None:
        """Give back, or take where it is below 0, what an estimate was wrong by."""
        level, part = self._level(key, per_minute)
        level.tokens = min(part, level.tokens + difference)

    def _level(self, key: str, per_minute: int) -> tuple[_TokenLevel, float]:
        """The level as it is now, and what it is at most."""
        now_s, part = self._clock(), per_minute / max(1, self._gateways())
        level = self._levels.get(key)
        if level is None:
            if len(self._levels) >= _MAX_IDLE:
                self._drop_full(now_s)
            level = self._levels[key] = _TokenLevel(part, now_s)
        level.tokens = min(part, level.tokens + (now_s - level.at_s) * part / MINUTE_S)
        level.at_s = now_s
        return level, part

    def _drop_full(self, now_s: float) -> None:
        """Drop what has not been used for so long that it is full, unless more than a minute was owed."""
        self._levels = {
            key: level for key, level in self._levels.items() if level.tokens < 0 or now_s - level.at_s < MINUTE_S
        }


class Charge:
    """The tokens of one call: `spend` before it runs, `settle` when its usage is known, `refund` if it ended without
    any.
    """

    __slots__ = ("_key", "_per_minute", "_quotas", "_taken")

    def __init__(self, quotas: Quotas, key: str, per_minute: int) -> None:
        self._quotas = quotas
        self._key = key
        self._per_minute = per_minute
        self._taken = 0

    def spend(self, cost: int) -> None:
        """Raises RateLimited, PayloadTooLarge."""
        self._quotas.spend(self._key, self._per_minute, cost)
        self._taken += cost

    def settle(self, tokens: int) -> None:
        """It used so many."""
        if self._taken:
            self._quotas.settle(self._key, self._per_minute, self._taken - tokens)
            self._taken = 0

    def refund(self) -> None:
        """It used none, through no fault of the client."""
        self.settle(0)
