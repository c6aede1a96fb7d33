"""Outline of a document in Markdown: the positions at which its pages and its sections begin.

A heading is a line that begins with at most three spaces, one to six `#`, and a space or tab. A line in a fenced block
of code is no heading.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

MAX_HEADING = 256  # largest number of characters of a heading, because each chunk of its section repeats the heading
_T = TypeVar("_T")
_MARK = re.compile(r"(?m)^ {0,3}(?:(?P<fence>`{3,}|~{3,})|#{1,6}(?=[ \t]))(?P<rest>.*)$")


class Section(NamedTuple):
    """Number of the page and text of the heading at a position of a document. `page`: None in a format without pages.
    `heading`: None before the first heading.
    """

    page: int | None
    heading: str | None


class Outline(NamedTuple):
    """Pages as (position of the first character, number) and headings as (position, text), in the order of positions.
    Positions count code points.
    """

    pages: tuple[tuple[int, int], ...]
    headings: tuple[tuple[int, str], ...]

    @classmethod
    def parsed(cls, markdown: str, page_starts: Sequence[tuple[int, int]]) -> Outline:
        headings = []
        open_fence = ""
        for mark in _MARK.finditer(markdown):
            fence, rest = mark["fence"], mark["rest"].strip()
            if open_fence:
                if fence and fence.startswith(open_fence) and not rest:
                    open_fence = ""
            elif fence:
                open_fence = fence
            else:
                headings.append((mark.start(), rest.rstrip("#").rstrip()[:MAX_HEADING]))
        return cls(tuple(page_starts), tuple(headings))

    def at(self, position: int) -> Section:
        """Return the page and the heading of the text at a position."""
        return Section(_last(self.pages, position), _last(self.headings, position))


def _last(starts: Sequence[tuple[int, _T]], position: int) -> _T | None:
    index = bisect.bisect_right(starts, position, key=lambda entry: entry[0])
    return starts[index - 1][1] if index else None
