"""Results that arrive in parts, until they are whole. Pure: time is an argument, nothing is read, sent or decoded.

    part ──take──► Assembly, kept ... kept ──► whole ──► checked against its digest by the inbox ──► its request

One request, and all of them together, hold so many bytes at most. What has had no part for a while gives its room to
what needs it: its sender is told that parts are missing when it sends the last one, and sends them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sie_contracts.messages import Fragment

MAX_BYTES = 512 << 20
MAX_REQUEST_BYTES = 256 << 20
MAX_PARTS = 1 << 16
LONGEST_SILENCE_S = 30.0  # several times what a worker waits for a confirmation
_SLOT_BYTES = 64  # of the list, and of the object around a part


class NoRoom(Exception):
    """A part that would pass a bound of this gateway."""


@dataclass
class Assembly:
    """One encoded result, as far as it has come. Two attempts at a chunk differ in their digests and are two
    assemblies.
    """

    request: str
    chunk: int
    digest: str
    parts: list[bytes | None]
    touched_s: float
    missing: int
    held_bytes: int = 0
    checking: bool = False

    @property
    def key(self) -> tuple[str, int, str]:
        return self.request, self.chunk, self.digest


@dataclass
class Fragments:
    """All unfinished results of a gateway. `held_bytes` is what they hold now."""

    most_bytes: int = MAX_BYTES
    most_request_bytes: int = MAX_REQUEST_BYTES
    silence_s: float = LONGEST_SILENCE_S
    held_bytes: int = 0
    # the one that waits longest for a part first
    _all: dict[tuple[str, int, str], Assembly] = field(default_factory=dict)
    _requests: dict[str, set[tuple[str, int, str]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._all)

    def take(self, part: Fragment, now_s: float) -> Assembly:
        """Keep a part, once. Raises NoRoom, and ValueError for one that is no part of anything."""
        if not (0 <= part.index < part.count <= MAX_PARTS and part.data):
            raise ValueError(f"part {part.index} of {part.count} with {len(part.data)} bytes")
        key = (part.request, part.chunk, part.digest)
        found = self._all.pop(key, None)
        if found is not None and len(found.parts) != part.count:  # sent again for a broker that takes other sizes
            self._all[key] = found
            self.drop(found)
            found = None
        if found is None:
            self._expire(now_s)
            found = Assembly(part.request, part.chunk, part.digest, [None] * part.count, now_s, part.count)
            self._requests.setdefault(part.request, set()).add(key)
        self._all[key] = found
        found.touched_s = now_s
        if found.parts[part.index] is None:
            size = len(part.data) + _SLOT_BYTES
            self._find_room(found, size, now_s)
            found.parts[part.index] = part.data
            found.missing -= 1
            found.held_bytes += size
            self.held_bytes += size
        return found

    def _find_room(self, wanted: Assembly, size: int, now_s: float) -> None:
        held = sum(self._all[key].held_bytes for key in self._requests[wanted.request])
        if held + size > self.most_request_bytes:
            raise NoRoom(f"parts of the results of one request pass {self.most_request_bytes >> 20} MiB")
        if self.held_bytes + size > self.most_bytes:
            self._expire(now_s)
        if self.held_bytes + size > self.most_bytes:
            raise NoRoom(f"this gateway holds {self.held_bytes >> 20} MiB of unfinished results")

    def _expire(self, now_s: float) -> None:
        while self._all:
            oldest = next(iter(self._all.values()))
            if oldest.checking or now_s - oldest.touched_s < self.silence_s:
                return
            self.drop(oldest)

    def drop(self, assembly: Assembly) -> None:
        """Forget an assembly, whole or not."""
        if self._all.pop(assembly.key, None) is not assembly:
            return
        self.held_bytes -= assembly.held_bytes
        keys = self._requests[assembly.request]
        keys.discard(assembly.key)
        if not keys:
            del self._requests[assembly.request]

    def drop_request(self, request: str) -> None:
        """Forget all parts of a request that ended."""
        for key in tuple(self._requests.get(request, ())):
            self.drop(self._all[key])
