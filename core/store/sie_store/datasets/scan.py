"""Positions of the rows in the bytes of JSON Lines and CSV. No value is decoded, and only one piece is in memory.

    pieces of any size ──Scanner──► (start, end) of each row ──Cutter──► spans of rows

A row ends at a line feed. In CSV (RFC 4180) it ends at a line feed with an even number of quotes before it. A line of
only spaces, tabs and carriage returns is not a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Offsets = NDArray[np.int64]
BOM = b"\xef\xbb\xbf"
# bytes that are scanned in one step: the positions of short lines need eight times more bytes than the lines
STEP_BYTES = 1 << 20
_LINE_FEED, _QUOTE = 10, 34
_BLANK = np.zeros(256, bool)
_BLANK[[9, 10, 13, 32]] = True


class Scanner:
    """Finder of rows in the bytes of a text, which arrive in pieces. `at`: the position of the next byte."""

    def __init__(self, *, is_quoted: bool, at: int = 0) -> None:
        self._is_quoted = is_quoted
        self._at = self._start = at
        self._is_odd = 0  # 1 if the number of quotes read so far is odd, else 0
        self._has_content = False  # True: the incomplete line has content

    def feed(self, piece: bytes) -> Iterator[tuple[Offsets, Offsets]]:
        """Yield the starts and ends of the rows that the piece completes. An end is the position after the line
        feed.
        """
        for first in range(0, len(piece), STEP_BYTES):
            yield self._step(np.frombuffer(piece, np.uint8, min(STEP_BYTES, len(piece) - first), first))

    def end(self) -> tuple[Offsets, Offsets]:
        """Return the start and the end of the last row if it has no line feed; otherwise empty arrays."""
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
        if not has_content.all():  # whole lines are tested only if a line begins with a blank
            has_content = np.logical_or.reduceat(~_BLANK[data[: feeds[-1] + 1]], firsts)
        has_content[0] |= self._has_content
        starts, ends = firsts + self._at, feeds + (self._at + 1)
        starts[0] = self._start
        self._has_content = not bool(_BLANK[data[feeds[-1] + 1 :]].all())
        self._start = int(ends[-1])
        self._at += len(data)
        return starts[has_content], ends[has_content]


def rows_of(data: bytes, *, is_quoted: bool) -> list[bytes]:
    """Return the rows of a text without their line ends."""
    scanner = Scanner(is_quoted=is_quoted)
    bounds = [*scanner.feed(data), scanner.end()]
    return [
        data[start:end].removesuffix(b"\n").removesuffix(b"\r")
        for starts, ends in bounds
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


class Cut(NamedTuple):
    """Rows `first` to before `first + rows` of an object. `start` and `end` are the positions of their bytes, or, in
    Parquet, the numbers of their row groups.
    """

    first: int
    rows: int
    start: int
    end: int


class Cutter:
    """Builder of spans while rows are found. A span has at most `max_rows` rows, and at most `max_bytes` bytes unless
    one row alone has more.
    """

    def __init__(self, max_rows: int, max_bytes: int) -> None:
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._first = self._rows = self._start = 0

    def feed(self, starts: Offsets, ends: Offsets) -> Iterator[Cut]:
        """Yield the spans that the next rows complete."""
        at, count = 0, len(starts)
        while at < count:
            if not self._rows:
                self._start = int(starts[at])
            by_bytes = int(np.searchsorted(ends, self._start + self._max_bytes, side="right"))
            to = min(at + self._max_rows - self._rows, max(by_bytes, at + (not self._rows)), count)
            self._rows += max(0, to - at)
            at = max(at, to)
            if at < count:
                yield from self.end(int(starts[at]))

    def end(self, end: int) -> Iterator[Cut]:
        """Yield the span that ends at the position `end`, if it has rows."""
        if self._rows:
            yield Cut(self._first, self._rows, self._start, end)
        self._first += self._rows
        self._rows = 0
