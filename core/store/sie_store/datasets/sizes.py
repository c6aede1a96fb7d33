"""Sizes of the rows of a span in memory: values and bytes are counted before objects are created from them.

A gateway has at most three spans of each of its jobs in memory. A few bytes of a file may become millions of values:
`[{},{},…]` in JSON, or a column of Parquet that repeats one value.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from sie_contracts.errors import InvalidInput
from sie_contracts.jobs import RowSpan

# largest number of values in the columns of a row that a job reads: lists, maps and their contents
MAX_ROW_VALUES = 100_000
MAX_SPAN_VALUES = 1_000_000  # largest number of values of a span, about 100 bytes each
MAX_DECODED_BYTES = 128 << 20  # bytes of the texts, images and kept columns of a span
MAX_KEYS = 100_000  # largest number of keys of a row of JSON, also in columns that are not read
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.S)
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class TooManyValues(ValueError):
    """Error for a row with too many keys."""


class SpanSize:
    """Size of a span in memory so far."""

    def __init__(self, span: RowSpan) -> None:
        self._span = span
        self._values = self._bytes = 0

    def add(self, values: int, size: int) -> None:
        """Add values and bytes that will be created. Raises InvalidInput if the span has more than the limit."""
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
    """Return the columns of a row of JSON, not decoded. Raises ValueError for a row that is not an object,
    TooManyValues.
    """
    if _count(line, b":", MAX_KEYS) > MAX_KEYS:
        raise TooManyValues(f"the row has more than {MAX_KEYS} keys")
    return _keys(line)


def values_of(value: bytes | msgspec.Raw) -> int:
    """Count the values in JSON: the value itself and all values in it. The result may be too high, but never too low.
    Above MAX_ROW_VALUES, it may be any higher number.
    """
    text = bytes(value)
    return 1 if text[:1] not in (b"[", b"{") else 1 + _count(text, b",:[{", MAX_ROW_VALUES)


def decoded(value: msgspec.Raw) -> Any:
    """Decode a value. Raises ValueError, RecursionError."""
    return msgspec.json.decode(value)


def _count(text: bytes, marks: bytes, most: int) -> int:
    """Count the bytes `marks` in the text. If there are more than `most`, count only the ones outside of strings, like
    `count_outside`.
    """
    total = sum(text.count(marks[at : at + 1]) for at in range(len(marks)))
    return total if total <= most else count_outside(text, marks, most)


def count_outside(text: bytes, marks: bytes, most: int) -> int:
    """Count the bytes `marks` outside of strings in JSON. If there are more than `most`, the result is any number above
    `most`. This is a loop over strings, because no other thread could run during a single call.
    """
    total = at = 0
    for string in _STRING.finditer(text):
        total += sum(text.count(marks[index : index + 1], at, string.start()) for index in range(len(marks)))
        at = string.end()
        if total > most:
            return total
    return total + sum(text.count(marks[index : index + 1], at) for index in range(len(marks)))
