"""Choice of the spans of a text to replace, from all spans that the model and the patterns return."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple


class SensitiveSpan(NamedTuple):
    """Part of a text with personal data: code points `start` to `end` - 1. `score`: confidence of the model, None for a
    span that a pattern matched.
    """

    start: int
    end: int
    kind: str
    score: float | None
    source: Literal["model", "pattern"]


def disjoint(spans: Iterable[SensitiveSpan]) -> list[SensitiveSpan]:
    """Return spans that do not overlap, in the order of the text. Together they cover the same characters as `spans`.

    Overlapping spans are joined. The joined span gets the kind of the longest of the overlapping spans. If several are
    equally long, a span of a pattern is preferred, then the span with the highest score, then the first span in the
    text. Spans that only touch are not joined.
    """
    joined: list[SensitiveSpan] = []
    best: SensitiveSpan | None = None
    # the score is not part of the sort key, because it is None for a pattern and None cannot be compared
    for span in sorted(spans, key=lambda span: (span.start, span.end, span.kind, span.source)):
        if best is None or span.start >= joined[-1].end:
            joined.append(span)
            best = span
            continue
        if _rank(span) > _rank(best):
            best = span
        joined[-1] = best._replace(start=joined[-1].start, end=max(joined[-1].end, span.end))
    return joined


def _rank(span: SensitiveSpan) -> tuple[int, bool, float]:
    return span.end - span.start, span.source == "pattern", span.score or 0.0


def with_marks(text: str, span: SensitiveSpan) -> SensitiveSpan:
    """Return the span extended by the combining marks that follow it: they belong to its last character."""
    end = span.end
    while end < len(text) and unicodedata.category(text[end]) in ("Mn", "Me", "Mc"):
        end += 1
    return span if end == span.end else span._replace(end=end)


def utf16_offsets(text: str, places: Sequence[int]) -> list[int]:
    """Convert ascending offsets in code points (`places`) to offsets in UTF-16 code units."""
    pieces = [text[start:end] for start, end in zip((0, *places), places, strict=False)]
    return list(accumulate(len(piece) + sum(map("\uffff".__lt__, piece)) for piece in pieces))
