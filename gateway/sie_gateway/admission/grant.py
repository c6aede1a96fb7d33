"""Grants of credentials: name, scopes, and quota of tokens.

The quota of a key, in tokens per minute, is a token bucket that refills continuously. Before a request runs, the
gateway subtracts an estimate from the bucket. After the request, it corrects the bucket by the actual usage.

    estimate ──spend──► bucket ──► the request runs ──► settle(actual tokens): the difference is added or subtracted
                          └ too few tokens: RateLimited with the time until there are enough

Gateways share a quota: each of n gateways has 1/n of it. So the tokens that a key can use at all gateways together are
only approximately its quota.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from sie_contracts.errors import PayloadTooLarge, RateLimited
from sie_runtime.keys import NO_LIMITS, KeyLimits

MINUTE_S = 60.0
WORKERS_NAME = "config-read"  # name, in metrics, of the token with which workers read the configuration
# From this number of token buckets on, full buckets are dropped. This changes no quota, because the next request of a
# key without a bucket creates a full bucket.
_MAX_IDLE = 4096


@dataclass(frozen=True)
class Grant:
    """Rights of a credential. `key` identifies the credential for its quota and in the queue; empty if no credential is
    required. `name` identifies the credential in metrics. The token cannot be derived from `key` or `name`. `caches`:
    the gateway may cache answers to the credential's requests.
    """

    key: str = ""
    scopes: frozenset[str] = frozenset()
    limits: KeyLimits = NO_LIMITS
    name: str = "anonymous"
    caches: bool = True

    def owns(self, owner: str) -> bool:
        """Return True if this credential may use the jobs, reservations and recorded requests of `owner`, the key of a
        credential.
        """
        return owner == self.key or "admin" in self.scopes


ANYBODY = Grant()


@dataclass(slots=True)
class _TokenLevel:
    """Tokens that a key may use at this gateway at `at_s`; below 0 if the key has used more than its quota."""

    tokens: float
    at_s: float


class Quotas:
    """Token buckets of keys. `gateways` returns the number of gateways that share each quota. Not thread-safe."""

    def __init__(self, gateways: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._gateways = gateways
        self._clock = clock
        self._levels: dict[str, _TokenLevel] = {}

    def charge(self, key: str, limits: KeyLimits) -> Charge | None:
        """Return the `Charge` that subtracts the tokens of one call from the quota of this key; None if the key has no
        quota.
        """
        return Charge(self, key, limits.tokens_per_minute) if limits.tokens_per_minute else None

    def spend(self, key: str, per_minute: int, cost: int, name: str) -> None:
        """Subtract `cost` tokens from the bucket of `key`. `name`: field with the inputs, for errors.

        The size of a bucket is the quota divided by the number of gateways. A full bucket accepts a cost above its
        size, and then has less than 0 tokens. So each gateway can run a request that costs as much as the whole quota.
        Raises RateLimited with the time until the next try, and PayloadTooLarge if the cost is above the quota of one
        minute.
        """
        if cost > per_minute:
            message = (
                f"this request has about {cost} tokens, its key may use {per_minute} per minute: send fewer items at a "
                "time"
            )
            raise PayloadTooLarge(message, param=name, extras={"limit": per_minute})
        level, part = self._level(key, per_minute)
        missing = min(float(cost), part) - level.tokens
        if missing > 0:
            message = f"this key may use {per_minute} tokens per minute, and this request has about {cost}"
            wait_s = math.ceil(missing / part * MINUTE_S)
            raise RateLimited(message, retry_after_s=max(1, wait_s), extras={"limit": per_minute})
        level.tokens -= cost

    def settle(self, key: str, per_minute: int, difference: int) -> None:
        """Add `difference` tokens to the bucket of `key`. The difference is negative if the estimate was too low."""
        level, part = self._level(key, per_minute)
        level.tokens = min(part, level.tokens + difference)

    def _level(self, key: str, per_minute: int) -> tuple[_TokenLevel, float]:
        """Return the bucket with its current number of tokens, and its size in tokens."""
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
        """Drop the buckets that were not used for a minute, because they are full again. Keep a bucket whose number of
        tokens was below 0 at its last use, because it takes more than a minute to be full again.
        """
        self._levels = {
            key: level for key, level in self._levels.items() if level.tokens < 0 or now_s - level.at_s < MINUTE_S
        }


class Charge:
    """Account of the tokens of one call. `spend` subtracts an estimate from the key's quota before the call runs.
    `settle` replaces the estimate by the actual usage. `refund` puts all tokens back if the call ended without usage.
    """

    def __init__(self, quotas: Quotas, key: str, per_minute: int) -> None:
        self._quotas = quotas
        self._key = key
        self._per_minute = per_minute
        self._taken = 0

    def spend(self, cost: int, name: str = "items") -> None:
        """Subtract `cost` tokens from the quota of the key, for this call. `name`: field with the inputs, for errors.
        Raises RateLimited, PayloadTooLarge.
        """
        self._quotas.spend(self._key, self._per_minute, cost, name)
        self._taken += cost

    def settle(self, tokens: int) -> None:
        """Replace the charged estimate by `tokens`, which the call has used. Called when the call has ended."""
        if self._taken:
            self._quotas.settle(self._key, self._per_minute, self._taken - tokens)
            self._taken = 0

    def refund(self) -> None:
        self.settle(0)
