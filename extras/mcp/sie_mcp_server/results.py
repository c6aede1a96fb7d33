"""Results that are too long for an answer. Their owner reads them in pages. They stay in memory until TTL_S seconds
after their last use.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

PAGE_CHARS = 12_000
PAGE_NUMBERS = 1024  # largest count of numbers on a page of vectors; a longer vector is a page of its own
TTL_S = 900.0
MAX_RESULTS = 64  # largest number of stored results of one owner (API key)
OWNER_BYTES = 16 << 20
TOTAL_BYTES = 256 << 20
REFERENCE_BYTES = 16


class ResultMissing(Exception):
    """Raised if the store has no result with the requested reference for this owner and session."""


class ResultTooLarge(Exception):
    """Raised for a single result that is larger than OWNER_BYTES, the limit for all results of one owner."""


class PagedText:
    """Text in pages of at most PAGE_CHARS. A page ends at the last line break in its last quarter, or at PAGE_CHARS."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._starts = [0]
        while len(text) - self._starts[-1] > PAGE_CHARS:
            end = self._starts[-1] + PAGE_CHARS
            line_end = text.rfind("\n", end - PAGE_CHARS // 4, end)
            self._starts.append(end if line_end < 0 else line_end + 1)

    @property
    def size_bytes(self) -> int:
        return 4 * len(self._text)

    @property
    def pages(self) -> int:
        return len(self._starts)

    def page(self, number: int) -> str:
        """Return a page. The first page has the number 1."""
        return self._text[self._starts[number - 1] : (*self._starts, len(self._text))[number]]


class PagedVectors:
    """Dense vectors of one model. A page has whole vectors, one JSON array in each line."""

    def __init__(self, model: str, vectors: NDArray[np.float32]) -> None:
        self.model = model
        self.vectors = vectors
        self._per_page: int = max(1, PAGE_NUMBERS // vectors.shape[1])

    @property
    def size_bytes(self) -> int:
        return int(self.vectors.nbytes)

    @property
    def pages(self) -> int:
        return -(-len(self.vectors) // self._per_page)

    def page(self, number: int) -> str:
        rows = self.vectors[(number - 1) * self._per_page : number * self._per_page]
        return "\n".join(msgspec.json.encode(numbers(row)).decode() for row in rows)


Paged = PagedText | PagedVectors  # content that is read in pages


def numbers(vector: NDArray[np.float32]) -> list[float]:
    """Return a vector as floats with 7 significant digits, because float32 has no more."""
    return [float(f"{value:.7g}") for value in vector.tolist()]


@dataclass
class _StoredResult:
    session: str
    content: Paged
    expires_s: float


class ResultStore:
    """Results by owner and reference. If an owner would exceed MAX_RESULTS or OWNER_BYTES, `add` drops this owner's
    least recently used results. If all owners together would exceed TOTAL_BYTES, `add` drops the least recently used
    results of any owner. A result expires TTL_S seconds after its last use.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: dict[str, OrderedDict[str, _StoredResult]] = {}

    def add(self, owner: str, session: str, content: Paged) -> str:
        """Store a result, and return its reference. Raises ResultTooLarge."""
        if content.size_bytes > OWNER_BYTES:
            raise ResultTooLarge
        self._drop_expired()
        results = self._owners.setdefault(owner, OrderedDict())
        while results and (len(results) >= MAX_RESULTS or self._bytes_of(results) + content.size_bytes > OWNER_BYTES):
            results.popitem(last=False)
        while self.size_bytes + content.size_bytes > TOTAL_BYTES:
            self._drop_oldest()
        reference = secrets.token_urlsafe(REFERENCE_BYTES)
        # `_drop_oldest` may have removed this owner from `_owners`
        self._owners.setdefault(owner, results)[reference] = _StoredResult(session, content, self._clock() + TTL_S)
        return reference

    def get(self, owner: str, session: str, reference: str) -> Paged:
        """Return a result. Raises ResultMissing, also for a result of another owner or session."""
        self._drop_expired()
        result = self._owners.get(owner, OrderedDict()).get(reference)
        if result is None or result.session != session:
            raise ResultMissing
        self._owners[owner].move_to_end(reference)
        result.expires_s = self._clock() + TTL_S
        return result.content

    @property
    def size_bytes(self) -> int:
        return sum(map(self._bytes_of, self._owners.values()))

    @staticmethod
    def _bytes_of(results: OrderedDict[str, _StoredResult]) -> int:
        return sum(result.content.size_bytes for result in results.values())

    def _drop_oldest(self) -> None:
        owner = min(
            (owner for owner, results in self._owners.items() if results),
            key=lambda owner: next(iter(self._owners[owner].values())).expires_s,
        )
        self._owners[owner].popitem(last=False)
        if not self._owners[owner]:
            del self._owners[owner]

    def _drop_expired(self) -> None:
        now_s = self._clock()
        for owner, results in list(self._owners.items()):
            while results and next(iter(results.values())).expires_s <= now_s:
                results.popitem(last=False)
            if not results:
                del self._owners[owner]
