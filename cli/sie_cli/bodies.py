"""Body of a reply, read with limits of size and time, because an unknown server may send a body that never ends."""

from __future__ import annotations

import time

MAX_ANSWER_BYTES = 64 << 20  # largest accepted body; 64 vectors of 32,768 numbers as JSON need less
COMPLETE_S = 60.0  # seconds from the beginning of a body within which it must be complete


class LimitedBody(bytearray):
    """Bytes of a body that is being received. The time limit begins when the object is created."""

    def __init__(self) -> None:
        self._end_s = time.monotonic() + COMPLETE_S

    def receive(self, piece: bytes) -> None:
        """Append received bytes. Raises ValueError for a body beyond the limits."""
        if len(self) + len(piece) > MAX_ANSWER_BYTES:
            raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > self._end_s:
            raise ValueError(f"its answer was not complete within {COMPLETE_S:g} s")
        self += piece
