"""Tier of cached answers in the memory of a gateway, bounded in bytes.

    computed ──► first segment ──used again──► protected segment, at most PROTECTED_SHARE of the memory
                   │  ◄────── least recently used ──────┘
                   └ least recently used: removed

The cache is a segmented LRU, so that many inputs that occur only once do not evict answers that are used often.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sie_contracts.wire.heartbeats import AnswerErasure, GatewayBeat
from sie_gateway.inference.answers import DIGEST_BYTES

ENTRY_BYTES = 320  # bytes of memory that an answer takes in addition to its value
SPACE_BYTES = 400  # bytes of memory that an AnswerSpace takes in addition to its answers
STEP = 10_000  # number of answers after which `erase` lets the event loop run other tasks
PROTECTED_SHARE = 0.8  # largest share of the answers' memory that protected answers (used again) may take
# Largest number of gateways whose erasures `PeerErasures` counts. To count one more, it forgets the gateway with the
# oldest erasure. If that gateway has announced several erasures, its next beat makes this gateway erase all answers.
MAX_PEERS = 1024
LARGEST_SHARE = 8  # an answer is cached only if it takes at most 1 / LARGEST_SHARE of the memory


class AnswerSpace(NamedTuple):
    """Answers of one model to one API key with the same options. `name`: see `answers.space_of`. `owner`: name of the
    API key in metrics; empty if all keys share the answers.
    """

    name: str
    model: str
    owner: str

    def key(self, digest: bytes) -> bytes:
        """Return the key of the answer to the input with this digest."""
        return bytes.fromhex(self.name) + digest


@dataclass(slots=True)
class _CachedAnswer:
    space: AnswerSpace
    value: bytes
    until_s: float

    @property
    def size(self) -> int:
        """Bytes of memory that the answer counts for under the limit `max_bytes`."""
        return ENTRY_BYTES + len(self.value)


class AnswerMemory:
    """Packed answers by key. `max_bytes` bounds the memory of the answers, including ENTRY_BYTES for each answer and
    SPACE_BYTES for each AnswerSpace. `find` returns no answer later than `ttl_s` seconds after the answer was cached.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.erasures = 0  # number of calls of `erase`; a request that began before the last call caches no answers
        self.evictions = 0  # number of answers that were removed because the cache was full
        self._ttl_s = ttl_s
        self._clock = clock
        # answers that were not used since they were cached, or since they left `_protected`; the oldest first
        self._first: OrderedDict[bytes, _CachedAnswer] = OrderedDict()
        self._protected: OrderedDict[bytes, _CachedAnswer] = OrderedDict()
        self._protected_bytes = 0
        self._spaces: dict[str, tuple[AnswerSpace, int]] = {}  # name of a space -> (space, number of its answers)

    def __len__(self) -> int:
        return len(self._first) + len(self._protected)

    def find(self, key: bytes) -> bytes | None:
        """Return the packed answer with this key; None if no answer is cached."""
        answer = self._protected.get(key) or self._first.get(key)
        if answer is None:
            return None
        if answer.until_s <= self._clock():
            self._remove(key)
            return None
        if key in self._protected:
            self._protected.move_to_end(key)
        else:
            self._protected[key] = self._first.pop(key)
            self._protected_bytes += answer.size
            self._demote()
        return answer.value

    def _demote(self) -> None:
        """Move protected answers to the first segment until the protected answers take at most PROTECTED_SHARE of the
        memory of answers.
        """
        room_bytes = self.max_bytes - SPACE_BYTES * len(self._spaces)
        while self._protected_bytes > PROTECTED_SHARE * max(0, room_bytes):
            oldest, answer = self._protected.popitem(last=False)
            self._protected_bytes -= answer.size
            self._first[oldest] = answer

    def keep(self, space: AnswerSpace, key: bytes, value: bytes) -> None:
        """Cache a packed answer. Remove other answers from the cache until all cached answers fit into `max_bytes`."""
        answer = _CachedAnswer(space, value, self._clock() + self._ttl_s)
        if answer.size * LARGEST_SHARE > self.max_bytes:
            return
        if key in self._first or key in self._protected:
            self._remove(key)
        # all answers of a space refer to one AnswerSpace object, which saves memory
        answer.space, count = self._spaces.get(space.name, (space, 0))
        if not count:
            self.held_bytes += SPACE_BYTES
        self._spaces[space.name] = answer.space, count + 1
        self._first[key] = answer
        self.held_bytes += answer.size
        self._demote()
        while self.held_bytes > self.max_bytes:
            self._remove(next(iter(self._first)))
            self.evictions += 1

    async def erase(self, erasure: AnswerErasure) -> int:
        """Remove the answers that `erasure` selects, and return their number. Requests that began before this call do
        not cache their answers.
        """
        self.erasures += 1
        count = 0
        for number, key in enumerate([*self._first, *self._protected]):
            answer = self._first.get(key) or self._protected.get(key)
            if answer is not None and _fits(erasure, answer.space, key):
                self._remove(key)
                count += 1
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
        return count

    def counts(self) -> list[tuple[tuple[str, str], int]]:
        """Return the number of answers by model and owner, the largest number first."""
        totals = Counter[tuple[str, str]]()
        for space, count in self._spaces.values():
            totals[space.model, space.owner] += count
        return totals.most_common()

    def _remove(self, key: bytes) -> None:
        answer = self._first.pop(key, None)
        if answer is None:
            answer = self._protected.pop(key)
            self._protected_bytes -= answer.size
        self.held_bytes -= answer.size
        name = answer.space.name
        space, count = self._spaces[name]
        if count == 1:
            del self._spaces[name]
            self.held_bytes -= SPACE_BYTES
        else:
            self._spaces[name] = space, count - 1


class PeerErasures:
    """Number of erasures that each other gateway has announced. If this gateway has missed an erasure, for example
    while it had no connection to the broker, it erases all its cached answers.
    """

    def __init__(self) -> None:
        self._counts: OrderedDict[str, int] = OrderedDict()

    def due(self, beat: GatewayBeat) -> AnswerErasure | None:
        """Return the erasure that this gateway must carry out after another gateway's announcement. Return None if the
        announcement has no new erasure.
        """
        before = self._counts.get(beat.gateway, 0)
        if beat.erasures <= before:
            return None
        self._counts[beat.gateway] = beat.erasures
        self._counts.move_to_end(beat.gateway)
        if len(self._counts) > MAX_PEERS:
            self._counts.popitem(last=False)
        is_next = beat.erasure is not None and beat.erasures == before + 1
        return beat.erasure if is_next else AnswerErasure()


def _fits(erasure: AnswerErasure, space: AnswerSpace, key: bytes) -> bool:
    return (
        erasure.model in ("", space.model)
        and erasure.key in ("", space.owner)
        and erasure.digest in (b"", key[-DIGEST_BYTES:])
    )
