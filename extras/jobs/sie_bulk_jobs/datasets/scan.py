"""Find the positions of rows in the bytes of JSON Lines and CSV. The scan decodes no values, and has only one piece of
the object in memory at a time.

    pieces of any size ──Scanner──► (start, end) of each row ──Cutter──► spans of rows

A row ends at a line feed; in CSV (RFC 4180), only at a line feed after an even number of quotes. A line of only spaces,
tabs and carriage returns is not a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
BOM = b"\xef\xbb\xbf"
# number of bytes that are scanned at a time; the int64 positions of line feeds may need eight times as many bytes
STEP_BYTES = 1 << 20
_LINE_FEED, _QUOTE = 10, 34
_BLANK = np.zeros(256, bool)
_BLANK[[9, 10, 13, 32]] = True


class Scanner:
    """Finder of the rows in a text that arrives in pieces. `at`: position of the text's first byte in its object."""

    def __init__(self, *, is_quoted: bool, at: int = 0) -> None:
        self._is_quoted = is_quoted
        self._at = self._start = at
        self._is_odd = 0  # 1 while the number of quotes read so far is odd, otherwise 0
        self._has_content = False  # whether the present line has a character that is not blank

    def feed(self, piece: bytes) -> Iterator[tuple[Offsets, Offsets]]:
        """Yield the start and end positions of the rows that end in this piece. An end is after the line feed."""
        for first in range(0, len(piece), STEP_BYTES):
            yield self._step(np.frombuffer(piece, np.uint8, min(STEP_BYTES, len(piece) - first), first))

    def end(self) -> tuple[Offsets, Offsets]:
        """Return the start and end of a last row without a line feed; empty arrays if the text has no such row."""
        count = int(self._has_content)
        return np.full(count, self._start, np.int64), np.full(count, self._at, np.int64)

    def _step(self, data: NDArray[np.uint8]) -> tuple[Offsets, Offsets]:
        feeds = np.flatnonzero(data == _LINE_FEED)
        if self._is_quoted:
            quotes = np.flatnonzero(data == _QUOTE)
            if len(quotes):
                feeds = feeds[(np.searchsorted(quotes, feeds) + self._is_odd) & 1 == 0]
                self._is_odd = (self._is_odd + len(quotes)) & 1
            elif self._is_odd:
                feeds = feeds[:0]
        if not len(feeds):
            self._has_content = self._has_content or not bool(_BLANK[data].all())
            self._at += len(data)
            return feeds, feeds
        firsts = np.concatenate((feeds[:1] * 0, feeds[:-1] + 1))
        has_content = ~_BLANK[data[firsts]]
        if not has_content.all():  # whole lines are tested only if some line begins with a blank
            has_content = np.logical_or.reduceat(~_BLANK[data[: feeds[-1] + 1]], firsts)
        has_content[0] |= self._has_content
        starts, ends = firsts + self._at, feeds + (self._at + 1)
        starts[0] = self._start
        self._has_content = not bool(_BLANK[data[feeds[-1] + 1 :]].all())
        self._start = int(ends[-1])
        self._at += len(data)
        return starts[has_content], ends[has_content]


def rows_of(data: bytes, *, is_quoted: bool) -> list[bytes]:
    """Return the rows of a text, without the line feeds and carriage returns at their ends."""
    scanner = Scanner(is_quoted=is_quoted)
    bounds = [*scanner.feed(data), scanner.end()]
    return [
        data[start:end].removesuffix(b"\n").removesuffix(b"\r")
        for starts, ends in bounds
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


class Cut(NamedTuple):
    """Consecutive rows of an object: `rows` rows from row `first` on. `start`, `end`: numbers of row groups in Parquet,
    positions of bytes in other formats.
    """

    first: int
    rows: int
    start: int
    end: int


class Cutter:
    """Groups rows into spans of at most `max_rows` rows and `max_bytes` bytes; a single row may have more bytes. A span
    ends with its last row and does not include the blank lines after this row.
    """

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._first = self._rows = self._start = self._end = 0

    def feed(self, starts: Offsets, ends: Offsets) -> Iterator[Cut]:
        at, count = 0, len(starts)
        while at < count:
            if not self._rows:
                self._start = int(starts[at])
            by_bytes = int(np.searchsorted(ends, self._start + self._max_bytes, side="right"))
            to = min(at + self._max_rows - self._rows, max(by_bytes, at + (not self._rows)), count)
            if to > at:
                self._rows += to - at
                self._end = int(ends[to - 1])
                at = to
            if at < count:
                yield from self.end()

    def end(self) -> Iterator[Cut]:
        """Yield the rows since the last span as one span (a range of rows), if there are any, and begin a new span."""
        if self._rows:
            yield Cut(self._first, self._rows, self._start, self._end)
        self._first += self._rows
        self._rows = 0
