"""Records of a bucket by the key that owns them: how many, how many bytes, and the bounds of one key and of all."""

from __future__ import annotations

from typing import NamedTuple

from sie_contracts.errors import RateLimited

RETRY_S = 60


class Use(NamedTuple):
    """Records, and their bytes."""

    records: int = 0
    size: int = 0

    def plus(self, other: Use) -> Use:
        return Use(self.records + other.records, self.size + other.size)


class Bound(NamedTuple):
    """The largest use, with the settings that say so."""

    most: Use
    settings: tuple[str, str]


class Usage:
    """Uses by owner, as this gateway knows them: records that are on their way count from their beginning, those of
    another gateway when its watch has brought them. So each other gateway may exceed a bound by what it takes in this
    time.

    `kinds`: the names of records and bytes in a refusal; `remedy`: what makes room; `reason`: of the refusal.
    """

    def __init__(self, of_key: Bound, in_all: Bound, *, kinds: tuple[str, str], remedy: str, reason: str) -> None:
        self._of_key, self._in_all = of_key, in_all
        self._kinds, self._remedy, self._reason = kinds, remedy, reason
        self._charges: dict[str, tuple[str, int]] = {}  # by record: its owner, bytes
        self._uses: dict[str, Use] = {}  # by owner
        self._whole = Use()

    def __contains__(self, record_id: str) -> bool:
        return record_id in self._charges

    def charge(self, record_id: str, owner: str, size: int) -> None:
        """Have a record count as so many bytes of this owner, in place of what it counted as before."""
        self.release(record_id)
        self._charges[record_id] = (owner, size)
        self._add(owner, Use(1, size))

    def release(self, record_id: str) -> None:
        """Have a record count no longer."""
        if (charge := self._charges.pop(record_id, None)) is not None:
            owner, size = charge
            self._add(owner, Use(-1, -size))

    def check(self, owner: str, more: Use) -> None:
        """Raises RateLimited if `more` would exceed what this owner, or all owners, may have."""
        self._check(self._uses.get(owner, Use()).plus(more), self._of_key, "this key has")
        self._check(self._whole.plus(more), self._in_all, "all keys together have")

    def _check(self, use: Use, bound: Bound, who: str) -> None:
        for have, most, kind, setting in zip(use, bound.most, self._kinds, bound.settings, strict=True):
            if have > most:
                message = f"{who} {most} {kind} ({setting}): {self._remedy}"
                raise RateLimited(message, reason=self._reason, retry_after_s=RETRY_S)

    def _add(self, owner: str, use: Use) -> None:
        self._whole = self._whole.plus(use)
        self._uses[owner] = self._uses.get(owner, Use()).plus(use)
        if not self._uses[owner].records:
            del self._uses[owner]
