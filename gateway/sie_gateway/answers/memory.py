"""Tier of cached answers in the memory of a gateway, bounded in bytes. The least recently used answer is removed
first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

ENTRY_BYTES = 320  # bytes of memory that an answer takes in addition to its value
LARGEST_SHARE = 8  # an answer is cached if it takes at most this part of the memory: 1 / LARGEST_SHARE


class AnswerSpace(NamedTuple):
    """Answers of one model to one API key with the same options. `name`: see `keys.space_of`. `owner`: the API key;
    empty if all keys share the answers.
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


class AnswerMemory:
    """Packed answers by key. `max_bytes` bounds their memory, with ENTRY_BYTES for each of them. An answer is removed
    `ttl_s` seconds after it was computed.
    """

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.evictions = 0  # answers that were removed for lack of room
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[bytes, _CachedAnswer] = OrderedDict()  # the least recently used first
        self._spaces: dict[str, tuple[AnswerSpace, int]] = {}  # by name, with the number of answers

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> bytes | None:
        """Return the packed answer with this key; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.until_s <= self._clock():
            self._remove(key)
            return None
        self._entries.move_to_end(key)
        return entry.value

    def keep(self, space: AnswerSpace, key: bytes, value: bytes) -> None:
        """Cache a packed answer, and remove others if there is no room for it."""
        size = ENTRY_BYTES + len(value)
        if size * LARGEST_SHARE > self.max_bytes:
            return
        if key in self._entries:
            self._remove(key)
        # all answers of a space refer to the same object
        space, count = self._spaces.get(space.name, (space, 0))
        self._spaces[space.name] = space, count + 1
        self._entries[key] = _CachedAnswer(space, value, self._clock() + self._ttl_s)
        self.held_bytes += size
        while self.held_bytes > self.max_bytes:
            self._remove(next(iter(self._entries)))
            self.evictions += 1

    def _remove(self, key: bytes) -> None:
        entry = self._entries.pop(key)
        self.held_bytes -= ENTRY_BYTES + len(entry.value)
        name = entry.space.name
        space, count = self._spaces[name]
        if count == 1:
            del self._spaces[name]
        else:
            self._spaces[name] = space, count - 1
