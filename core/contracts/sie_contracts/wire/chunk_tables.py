"""Split the result of a text with chunks into the arrays of each chunk. `messages.Ok` describes these arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from sie_contracts.arrays import Array

TABLE = "chunks"


class ChunkArrays(NamedTuple):
    """Outputs of one chunk: first and end code point, number of tokens, and arrays by name (views, not copies)."""

    start: int
    end: int
    tokens: int
    arrays: dict[str, Array]


def split(arrays: Mapping[str, Array]) -> Iterator[ChunkArrays]:
    """Yield the chunks of an input in their order."""
    table = arrays[TABLE]
    ends = np.cumsum(table[:, 3:], axis=0)
    for index, (start, end, tokens, vectors, entries) in enumerate(table.tolist()):
        stops = {"dense": index + 1, "multivector": int(ends[index, 0]), "sparse": int(ends[index, 1])}
        sizes = {"dense": 1, "multivector": vectors, "sparse": entries}
        own: dict[str, Array] = {}
        for name, whole in arrays.items():
            if name != TABLE:
                kind = name.partition(".")[0]
                part = whole[stops[kind] - sizes[kind] : stops[kind]]
                own[name] = part[0] if name == "dense" else part
        yield ChunkArrays(start, end, tokens, own)
