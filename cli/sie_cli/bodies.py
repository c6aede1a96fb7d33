"""Bodies of replies, read with limits of size and time, because an unknown server may send a body that never ends."""

from __future__ import annotations

import time

import httpx

MAX_ANSWER_BYTES = 64 << 20  # largest accepted body; 64 vectors of 32,768 numbers as JSON need less
COMPLETE_S = 60.0  # seconds from the beginning of a body within which it must be complete


def append(body: bytearray, piece: bytes) -> None:
    """Append received bytes to a body. Raises ValueError if the body gets longer than MAX_ANSWER_BYTES."""
    if len(body) + len(piece) > MAX_ANSWER_BYTES:
        raise ValueError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
    body += piece


def body_of(answer: httpx.Response) -> bytes:
    """Return the body of an answer that is being received. Raises ValueError for a body beyond the limits."""
    body, end_s = bytearray(), time.monotonic() + COMPLETE_S
    for piece in answer.iter_bytes():
        append(body, piece)
        if time.monotonic() > end_s:
            raise ValueError(f"its answer was not complete within {COMPLETE_S:g} s")
    return bytes(body)
