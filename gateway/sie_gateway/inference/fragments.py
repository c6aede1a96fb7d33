"""Results that are larger than a message and arrive in parts.

part ──► Fragments: stored until all parts have arrived ──► put_together, in a thread: checks the digest
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Fragment, WorkResult
from sie_gateway.admission.model_queue import SharedLimit

MAX_HELD_BYTES = 512 << 20  # largest number of bytes of all incomplete results
MAX_REQUEST_BYTES = 256 << 20  # largest number of bytes of the incomplete results of one request
MAX_PARTS = 1 << 16  # largest number of parts of one result
# An incomplete result may be dropped after this number of seconds without a new part. The time is several times as long
# as a worker waits for the confirmation of a part.
MAX_SILENCE_S = 30.0
_SLOT_BYTES = 64  # bytes of memory that a part occupies in addition to its data: a list slot and an object


class InboxFull(Exception):
    """Raised if the bytes of a part would exceed a limit for incomplete results."""


@dataclass
class Assembly:
    """Parts of one result that have arrived. If workers run the same chunk twice, the two results have different
    digests, and each result has its own assembly. `owner`: API key of the request. `touched_s`: time of the last
    part.
    """

    owner: str
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
    """All incomplete results (assemblies) of a gateway. `held`: their bytes. `now_s` of the methods is the time of any
    monotonic clock.

    The bytes of each request, of each API key, and of all requests together, are limited. When a new assembly begins,
    and when a limit is reached, this class drops the assemblies that have received no part for `silence_s` seconds. If
    a worker then sends the last part of a dropped assembly, the reply says that parts are missing, and the worker sends
    all parts again.
    """

    max_bytes: int = MAX_HELD_BYTES
    max_request_bytes: int = MAX_REQUEST_BYTES
    silence_s: float = MAX_SILENCE_S
    held: SharedLimit = field(init=False)
    # assemblies in the order of their last part, the oldest first
    _all: dict[tuple[str, int, str], Assembly] = field(default_factory=dict)
    _requests: dict[str, set[tuple[str, int, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.held = SharedLimit(self.max_bytes)

    def add(self, part: Fragment, now_s: float, owner: str = "") -> Assembly:
        """Store a part once, and return its assembly. Raises InboxFull, and ValueError for an invalid part. `owner`:
        API key of the request.
        """
        if not (0 <= part.index < part.count <= MAX_PARTS and part.data):
            raise ValueError(f"part {part.index} of {part.count} with {len(part.data)} bytes is not valid")
        key = (part.request, part.chunk, part.digest)
        assembly = self._all.pop(key, None)
        # A worker splits a result again if the message limit of the broker has changed. Drop the parts of the first
        # split, because they cannot be joined with the new parts.
        if assembly is not None and len(assembly.parts) != part.count:
            self._all[key] = assembly
            self.drop(assembly)
            assembly = None
        if assembly is None:
            self._expire(now_s)
            assembly = Assembly(owner, part.request, part.chunk, part.digest, [None] * part.count, now_s, part.count)
            self._requests.setdefault(part.request, set()).add(key)
        self._all[key] = assembly
        assembly.touched_s = now_s
        if assembly.parts[part.index] is None:
            # with the first part, also count the memory of the list, which has a slot for every part
            size = len(part.data) + (0 if assembly.held_bytes else _SLOT_BYTES * part.count)
            self._find_room(assembly, size, now_s)
            assembly.parts[part.index] = part.data
            assembly.missing -= 1
            assembly.held_bytes += size
            self.held.use(assembly.owner, size)
        return assembly

    def _find_room(self, keep: Assembly, size: int, now_s: float) -> None:
        held = sum(self._all[key].held_bytes for key in self._requests[keep.request])
        if held + size > self.max_request_bytes:
            raise InboxFull(f"parts of the results of one request exceed {self.max_request_bytes >> 20} MiB")
        if not self.held.accepts(keep.owner, size, now_s):
            self._expire(now_s)
            if not self.held.accepts(keep.owner, size, now_s):
                raise InboxFull(f"the incomplete results in this gateway have {self.held.usage(keep.owner)}")

    def _expire(self, now_s: float) -> None:
        while self._all:
            oldest = next(iter(self._all.values()))
            if oldest.checking or now_s - oldest.touched_s < self.silence_s:
                return
            self.drop(oldest)

    def drop(self, assembly: Assembly) -> None:
        if self._all.get(assembly.key) is not assembly:
            return
        del self._all[assembly.key]
        self.held.use(assembly.owner, -assembly.held_bytes)
        keys = self._requests[assembly.request]
        keys.discard(assembly.key)
        if not keys:
            del self._requests[assembly.request]

    def drop_request(self, request: str) -> None:
        for key in tuple(self._requests.get(request, ())):
            self.drop(self._all[key])


class Damaged(Exception):
    """Raised if the parts do not form the result that the worker sent."""


def put_together(parts: Sequence[bytes], digest: str) -> WorkResult:
    """Join parts, in order, and return the result. Raises Damaged."""
    data = b"".join(parts)
    if hashlib.sha256(data).hexdigest() != digest:
        raise Damaged("the digest of the joined parts differs from the digest that the worker sent")
    try:
        return messages.decode_result(data)
    except UNDECODABLE as error:
        raise Damaged(f"the result cannot be decoded: {error}") from error
