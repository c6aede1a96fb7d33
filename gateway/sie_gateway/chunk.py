"""A request becomes queue messages: consecutive inputs, bounded by cost, by the size of the message and by the size of
its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BYTES_PER_TOKEN = 4  # of English UTF-8; an estimate for splitting only, the sidecar counts truly
SPECIAL_TOKENS = 2


@dataclass(frozen=True)
class Chunk:
    """Inputs `start` to `stop` of a request. `cost`: the estimated tokens of their rows; `squares`: the sum of the
    squares of these.
    """

    start: int
    stop: int
    cost: int
    squares: int = 0


@dataclass(frozen=True)
class Limits:
    cost: int
    payload_bytes: int
    result_bytes: int


def estimated_tokens(size_bytes: int, max_tokens: int) -> int:
    return min(max_tokens, size_bytes // BYTES_PER_TOKEN + SPECIAL_TOKENS)


def split(
    sizes_bytes: Sequence[int],
    *,
    max_tokens: int,
    item_result_bytes: int,
    limits: Limits,
    token_result_bytes: int = 0,
    each_tokens: int = 0,
    rows: int = 1,
) -> list[Chunk]:
    """Cut inputs of these sizes into chunks. Each holds at least one input; none is larger than the limits unless it
    holds just one.

    The result of an input is at most what each has and what each token adds, where a byte may be a token. `each_tokens`
    come to every input, such as a query's, and each is run as so many `rows`.
    """
    chunks: list[Chunk] = []
    start = cost = squares = payload = result = 0
    for index, size in enumerate(sizes_bytes):
        length = min(max_tokens, size // BYTES_PER_TOKEN + SPECIAL_TOKENS + each_tokens)
        tokens = rows * length
        expected = item_result_bytes + token_result_bytes * min(max_tokens, size + SPECIAL_TOKENS + each_tokens)
        full = (
            cost + tokens > limits.cost
            or payload + size > limits.payload_bytes
            or result + expected > limits.result_bytes
        )
        if full and index > start:
            chunks.append(Chunk(start, index, cost, squares))
            start, cost, squares, payload, result = index, 0, 0, 0, 0
        cost += tokens
        squares += tokens * length
        payload += size
        result += expected
    if start < len(sizes_bytes):
        chunks.append(Chunk(start, len(sizes_bytes), cost, squares))
    return chunks
