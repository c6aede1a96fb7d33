"""Memory that the rows of a span (a range of rows) need. The values of JSON and Parquet are counted before Python
objects are created, because a few bytes of a file may become millions of values: `[{},{},…]` in JSON, or a column of
Parquet that repeats one value. A gateway has at most three spans of each of its jobs in memory.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sie_contracts.errors import InvalidInput
from sie_contracts.jobs import RowSpan

# largest number of values in one row, in the columns that a job reads; lists, maps and their contents count
MAX_ROW_VALUES = 100_000
MAX_SPAN_VALUES = 1_000_000  # largest number of values in a span; each needs about 100 bytes of memory
MAX_DECODED_BYTES = 128 << 20  # largest number of bytes of texts, images and copied columns in a span
MAX_KEYS = 100_000  # largest number of keys in a JSON row, including columns that the job does not read
SPARE_LEVELS = 200  # levels of nesting that a value of a row must leave free below the interpreter's limit
# A string without an end matches as well: otherwise each of its escaped quotes would start a search to the end of
# the row.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+', re.S)
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class TooManyValues(ValueError):
    """Error for a row with too many keys."""


class SpanSize:
    """Counter of the memory that the rows of a span need."""

    def __init__(self, span: RowSpan) -> None:
        self._span = span
        self._values = self._bytes = 0

    def add(self, values: int, size: int) -> None:
        """Add values and bytes of some rows. Raises InvalidInput above a limit."""
        self._values += values
        self._bytes += size
        for have, most, kind in (
            (self._values, MAX_SPAN_VALUES, "values"),
            (self._bytes, MAX_DECODED_BYTES, "bytes"),
        ):
            if have > most:
                span = self._span
                raise InvalidInput(
                    f"{span.source}: {span.rows} rows from {span.first} on have more than {most} {kind}: submit the "
                    "job with fewer shard_rows",
                    reason="too_large",
                    param="shard_rows",
                )


def columns_of(line: bytes) -> dict[str, msgspec.Raw]:
    """Return the columns of a JSON row, not decoded. Raises TooManyValues, and ValueError if it is not an object."""
    if _count(line, b":", MAX_KEYS) > MAX_KEYS:
        raise TooManyValues(f"the row has more than {MAX_KEYS} keys")
    return _keys(line)


def values_of(value: bytes | msgspec.Raw) -> int:
    """Return the number of values in JSON, the outermost included. The result may be too high. It is too low only if it
    is above MAX_ROW_VALUES, where counting stops.
    """
    text = bytes(value)
    return 1 if text[:1] not in (b"[", b"{") else 1 + _count(text, b",:[{", MAX_ROW_VALUES)


def decoded(value: msgspec.Raw) -> Any:
    """Decode one JSON value of a column. Raises an error of UNDECODABLE."""
    if values_of(value) <= SPARE_LEVELS:
        return msgspec.json.decode(value)
    # When the value is encoded again later, more function calls are open. Decoding it inside SPARE_LEVELS lists shows
    # that enough levels remain for them.
    whole = msgspec.json.decode(b"[" * SPARE_LEVELS + bytes(value) + b"]" * SPARE_LEVELS)
    for _ in range(SPARE_LEVELS):
        (whole,) = whole
    return whole


def _count(text: bytes, marks: bytes, most: int) -> int:
    """Return how often `marks` occur in JSON. Occurrences inside strings count as well, because this is faster; only a
    result above `most` is counted again without them.
    """
    total = sum(map(text.count, marks))
    return total if total <= most else count_outside(text, marks, most)


def count_outside(text: bytes, marks: bytes, most: int) -> int:
    """Return how often `marks` occur in JSON outside of strings; counting stops above `most`. The loop over the strings
    lets other threads run in between; a single call would hold the interpreter lock.
    """
    total = at = 0
    for string in _STRING.finditer(text):
        total += sum(text.count(mark, at, string.start()) for mark in marks)
        at = string.end()
        if total > most:
            return total
    return total + sum(text.count(mark, at) for mark in marks)
