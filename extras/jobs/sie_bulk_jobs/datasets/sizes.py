"""Memory that the rows of a span (a range of rows) need. Values of JSON and Parquet are counted before Python creates
objects for them, because a few bytes of a file may become millions of values: `[{},{},…]` in JSON, or a column of
Parquet that repeats one value. A gateway has at most three spans of each of its jobs in memory.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sie_bulk_jobs.records import RowSpan
from sie_contracts.errors import InvalidInput

# largest number of values in one row, in the columns that a job reads; lists and maps count as values too
MAX_ROW_VALUES = 100_000
MAX_SPAN_VALUES = 1_000_000  # largest number of values in a span; each needs about 100 bytes of memory
MAX_DECODED_BYTES = 128 << 20  # largest number of bytes of texts, images and copied columns in a span
MAX_KEYS = 100_000  # largest number of keys in a JSON row, including columns that the job does not read
# levels of nesting that a value must leave free below Python's recursion limit; `decoded` refuses a deeper value
SPARE_LEVELS = 200
# The pattern also matches a string without an end. Otherwise the search would start again at each escaped quote in this
# string, and take quadratic time.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+', re.S)
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class TooManyValues(ValueError):
    """Error for a row with more than MAX_KEYS keys."""


class SpanSize:
    """Counter of the memory that the rows of a span (a range of rows) need."""

    def __init__(self, span: RowSpan) -> None:
        self._span = span
        self._values = self._bytes = 0

    def add(self, values: int, size: int) -> None:
        """Add the number of values and bytes of some rows. Raises InvalidInput above a limit."""
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
    """Return the columns of a JSON row, not decoded. Raises TooManyValues, and ValueError if the row is no object."""
    if _count(line, b":", MAX_KEYS) > MAX_KEYS:
        raise TooManyValues(f"the row has more than {MAX_KEYS} keys")
    return _keys(line)


def values_of(value: bytes | msgspec.Raw) -> int:
    """Return the number of values in a JSON value, including this value. The result may be too high. Counting stops
    above MAX_ROW_VALUES.
    """
    text = bytes(value)
    return 1 if text[:1] not in (b"[", b"{") else 1 + _count(text, b",:[{", MAX_ROW_VALUES)


def decoded(value: msgspec.Raw) -> Any:
    """Decode one JSON value of a column. Raises an exception of a type in `errors.UNDECODABLE`."""
    if values_of(value) <= SPARE_LEVELS:
        return msgspec.json.decode(value)
    # The value is encoded again later, when less of the stack is free. If the value can be decoded inside SPARE_LEVELS
    # lists, enough of the stack is free for the later encoding.
    whole = msgspec.json.decode(b"[" * SPARE_LEVELS + bytes(value) + b"]" * SPARE_LEVELS)
    for _ in range(SPARE_LEVELS):
        (whole,) = whole
    return whole


def _count(text: bytes, marks: bytes, most: int) -> int:
    """Return how often the characters in `marks` occur in JSON. If the number is above `most`, count only outside of
    strings, by the slower `count_outside`.
    """
    total = sum(map(text.count, marks))
    return total if total <= most else count_outside(text, marks, most)


def count_outside(text: bytes, marks: bytes, most: int) -> int:
    """Return how often the characters in `marks` occur in JSON outside of strings. Counting stops above `most`. The
    loop lets other threads run, while a single call of a C function would hold the interpreter lock.
    """
    total = at = 0
    for string in _STRING.finditer(text):
        total += sum(text.count(mark, at, string.start()) for mark in marks)
        at = string.end()
        if total > most:
            return total
    return total + sum(text.count(mark, at) for mark in marks)
