"""Split a text into chunks by a rule. A chunk ends at a boundary that the rule names (paragraph or sentence), if the
token limits of the rule permit this. A span of a chunk is (index of its first code point, index after its last one).

    text ──► blocks of Markdown, sentences, words ──► places by level ──► greedy: the last place that fits ──► spans

A place is a position before a code point, at which the text may be cut; it is never inside a grapheme. A level is a
kind of place: end of a paragraph, of a sentence, and so on. A lower level includes the places of all higher levels. The
sidecar and the SDK both call this module, so they cut a text in the same way. The module needs the packages sentencex,
markdown-it-py and regex.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import regex
import sentencex
from markdown_it import MarkdownIt
from numpy.typing import NDArray

from sie_contracts.wire.messages import Boundary, ChunkRule

Places = NDArray[np.int64]
# levels: kinds of places at which a text may be cut, the most preferred kind first
PARAGRAPH, SENTENCE, LINE, WORD, TOKEN = range(5)
# sentencex knows the abbreviations of this language: their full stops do not end sentences
_LANGUAGE = "en"
_FIRST_LEVEL: dict[Boundary, int] = {"paragraph": PARAGRAPH, "sentence": SENTENCE, "token": TOKEN}
_LINE_END = re.compile(r"\r\n?|\n")
_WIDE_SPACE = re.compile(r"[^\S\x00-\x7f]")  # white space outside of ASCII
_WORD_START = re.compile(r"(?<=\s)(?=\S)")
_GRAPHEME = regex.compile(r"\X")
_FLAG = re.compile("[\U0001f1e6-\U0001f1ff]{2}")  # two regional indicators, which make one grapheme
# numbers of code points in a call of sentencex: the first call gets _PIECE; if no sentence ends within this text, a
# second call gets _LONGEST_PIECE. Both are small, because the time of a call grows with the square of the number
_PIECE, _LONGEST_PIECE = 512, 2048
_TABLE = re.compile(r"(?m)^(?: {0,3}\|.*(?:\r\n?|\n|\Z))+")


def spans(text: str, ends: Sequence[int] | NDArray[Any], rule: ChunkRule) -> Iterator[tuple[int, int]]:
    """Yield (index of the first code point, index after the last one) of each chunk, in order. Without overlap, the
    chunks cover the text without gaps. A caller with a limit stops at the first chunk above it.

    `ends`: end of each token of the text in code points, ascending. A token belongs to the chunk that contains the
    token's last code point. A chunk has at most `max_tokens` tokens, except if a single grapheme has more. The last
    chunk may have fewer tokens than `min_tokens`. A text without tokens has no chunks.
    """
    token_ends = np.asarray(ends, np.int64)
    if not len(token_ends):
        return
    arrays = _places(text, token_ends, rule.boundary)
    # lists, because the loop looks up single numbers: that takes numpy ten times as long
    counts = [np.searchsorted(token_ends, level, side="right").tolist() for level in arrays]
    places, own_ends = [level.tolist() for level in arrays], token_ends.tolist()
    # `first`: number of tokens before the chunk's start; `end_count`: number of tokens before the previous chunk's end
    start = first = end_count = 0
    while len(own_ends) - first > rule.max_tokens:
        least = max(first + max(1, rule.min_tokens), end_count + 1)
        end = _end(places, counts, least, first + rule.max_tokens)
        end_count = bisect_right(own_ends, end)
        if end_count == len(own_ends):
            break
        yield start, end
        start = _next_start(places, counts, (start, end), end_count, rule)
        first = bisect_right(own_ends, start)
    yield start, len(text)


def _end(places: Sequence[Sequence[int]], counts: Sequence[Sequence[int]], least: int, most: int) -> int:
    """Return the end of a chunk. A possible end has `least` to `most` tokens before it. Of the coarsest level (such as
    paragraphs) with a possible end, take the last one. If no level has a possible end, a grapheme of several tokens is
    in the way. Then take the first place after this grapheme.
    """
    for level, count in zip(places, counts, strict=True):
        index = bisect_right(count, most) - 1
        if index >= 0 and count[index] >= least:
            return level[index]
    for lower in (most, least - 1):
        index = bisect_right(counts[-1], lower)
        if index < len(counts[-1]):
            return places[-1][index]
    raise AssertionError("no place to cut was found, although the end of the text is a place")


def _next_start(
    places: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
    chunk: tuple[int, int],
    end_count: int,
    rule: ChunkRule,
) -> int:
    """Return the start of the chunk after `chunk`: the earliest cut of the highest level within the last
    `overlap_tokens` tokens of `chunk`. If there is no cut, return the end of `chunk`.

    The overlap is shorter if the next chunk could otherwise not reach the first cut of the highest level after `chunk`.
    `end_count`: number of tokens before the end of `chunk`.
    """
    start, end = chunk
    from_count = end_count - rule.overlap_tokens
    following = bisect_right(places[0], end)
    if following < len(places[0]) and counts[0][following] - end_count <= rule.max_tokens:
        from_count = max(from_count, counts[0][following] - rule.max_tokens)
    for level, count in zip(places, counts, strict=True):
        index = max(bisect_left(count, from_count), bisect_right(level, start))
        if index < len(level) and count[index] < end_count:
            return level[index]
    return end


def _places(text: str, token_ends: Places, boundary: Boundary) -> list[Places]:
    """Return the positions at which the text may be cut, ascending, for each level from `boundary` down to TOKEN."""
    first = _FIRST_LEVEL[boundary]
    levels: list[set[int]] = [set() for _ in range(TOKEN)]
    if first < TOKEN:
        _add_blocks(text, levels)
        levels[WORD].update(match.start() for match in _WORD_START.finditer(text))
    allowed = _grapheme_bounds(text)
    places, higher = [], set[int]()
    for level in levels[:first]:
        higher |= level
    for level in (*levels[first:], set(token_ends.tolist())):
        higher |= level
        ordered = np.array(sorted({*higher, len(text)}), np.int64)
        places.append(ordered[(ordered > 0) & allowed[ordered]])
    return places


def _add_blocks(text: str, levels: list[set[int]]) -> None:
    starts = np.array([0, *(match.end() for match in _LINE_END.finditer(text)), len(text)])
    # true at each position where the end of a sentence is not a cut, for example inside a code block
    whole = np.zeros(len(text) + 1, bool)
    heading: int | None = None  # start of the heading if the previous block is a heading
    for token in _markdown().parse(text):
        if token.map is None:
            continue
        first, stop = (int(starts[min(line, len(starts) - 1)]) for line in token.map)
        if token.type == "fence":
            _add_lines(starts, first, stop, levels, whole)
        if token.level == 0:
            levels[PARAGRAPH if heading is None else LINE].add(first)
            # The ends of sentences between the start of a heading and the block after it are not cuts, so that the
            # heading stays in one chunk with this block if possible.
            if heading is not None:
                whole[heading + 1 : first + 1] = True
            heading = first if token.type == "heading_open" else None
        elif token.type == "list_item_open":
            levels[SENTENCE].add(first)
    for table in _TABLE.finditer(text):
        _add_lines(starts, *table.span(), levels, whole)
    levels[SENTENCE].update(end for end in _sentence_ends(text) if not whole[end])


def _add_lines(starts: Places, first: int, stop: int, levels: list[set[int]], whole: NDArray[np.bool_]) -> None:
    """Add the line ends of a code block or table as possible cuts. Exclude its sentence ends from the cuts."""
    whole[first + 1 : stop] = True
    lines = slice(int(np.searchsorted(starts, first, side="right")), int(np.searchsorted(starts, stop)))
    levels[LINE].update(starts[lines].tolist())


def _sentence_ends(text: str) -> Iterator[int]:
    """Yield the ends of sentences and paragraphs in code points. The end of a sentence longer than _LONGEST_PIECE may
    be missing.
    """
    # sentencex panics if white space outside of ASCII follows a single capital letter, as in "Appendix A\u00a0. Next"
    text = _WIDE_SPACE.sub(" ", text)
    start, size = 0, _PIECE
    while start < len(text):
        sentences = sentencex.get_sentence_boundaries(_LANGUAGE, text[start : start + size])
        ends = [start + sentence["end_index"] for sentence in sentences]
        if start + size >= len(text):
            yield from ends
            return
        if len(ends) > 1:  # the last sentence may continue in the next piece
            yield from ends[:-1]
            start, size = ends[-2], _PIECE
        elif size < _LONGEST_PIECE:
            size *= 4
        else:
            start, size = start + size, _PIECE


@cache
def _markdown() -> MarkdownIt:
    """Return the parser for blocks of Markdown. It reads indented code and HTML as text, because most texts that
    contain them are not Markdown. The regular expression _TABLE finds tables, because the parser would create an object
    for each cell.
    """
    return MarkdownIt("commonmark").disable(["inline", "code", "html_block"])


def _grapheme_bounds(text: str) -> NDArray[np.bool_]:
    """Return booleans of shape [len(text) + 1]: true where a grapheme begins, and at the end of the text."""
    bounds = np.ones(len(text) + 1, bool)
    if text.isascii():
        bounds[[match.start() + 1 for match in re.finditer("\r\n", text)]] = False
        return bounds
    bounds[:-1] = False
    # The time of \X grows with the square of the number of flags in a row. A letter with an accent has the same bounds.
    text = _FLAG.sub("e\u0301", text)
    bounds[[match.start() for match in _GRAPHEME.finditer(text)]] = True
    return bounds
