"""Slots for work of clients, limited in total and per key."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from sie_contracts.errors import RateLimited, ResourceExhausted


class KeySlots:
    """`total` slots, of which one API key may use `per_key` at the same time. Error texts name the `work`, for example
    uploads. `reason`: field `reason` of the errors.
    """

    def __init__(self, total: int, per_key: int, work: str, reason: str) -> None:
        self._total, self._per_key, self._work, self._reason = total, per_key, work, reason
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Occupy a slot. Raises RateLimited if the key has `per_key` slots, ResourceExhausted if no slot is free."""
        if self._taken[key] >= self._per_key:
            raise RateLimited(
                f"this key has {self._per_key} {self._work} at once, the limit for one key at this gateway",
                reason=self._reason,
            )
        if self._taken.total() >= self._total:
            raise ResourceExhausted(
                f"this gateway has {self._total} {self._work} at once, the limit for all keys", reason=self._reason
            )
        self._taken[key] += 1
        try:
            yield
        finally:
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]
