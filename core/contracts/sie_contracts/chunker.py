"""Spans of a text by a rule: chunks that end where a paragraph or a sentence ends, as far as their tokens allow.

    text ──► blocks of Markdown, sentences, words ──► places by level ──► greedy: the last place that fits ──► spans

A place is a code point before which a text may be cut. Each level has the places of the levels above it as well. No
place is inside a grapheme. The sidecar and the SDK call this function, so both cut a text alike. Needs the packages
sentencex, markdown-it-py and regex.
"""

from __future__ import annotations

import re
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
PARAGRAPH, SENTENCE, LINE, WORD, TOKEN = range(5)  # levels of places, the highest first
# Language of the abbreviations after which no sentence ends. Sentences of other scripts end at their own marks.
_LANGUAGE = "en"
_FIRST_LEVEL: dict[Boundary, int] = {"paragraph": PARAGRAPH, "sentence": SENTENCE, "token": TOKEN}
_LINE_END = re.compile(r"\r\n?|\n")
_WORD_START = re.compile(r"(?<=\s)(?=\S)")
_GRAPHEME = regex.compile(r"\X")
# Code points that are read at once for ends of sentences, and at most for one sentence: the time of the library grows
# with the square of the text.
_PIECE, _LONGEST_PIECE = 512, 2048
_TABLE = re.compile(r"(?m)^(?: {0,3}\|.*(?:\r\n?|\n|\Z))+")


def spans(text: str, ends: Sequence[int] | NDArray[Any], rule: ChunkRule) -> list[tuple[int, int]]:
    """Return the first and the end code point of each chunk, in order. Without overlap the chunks tile the text.

    `ends`: the end of each token of the text in code points, ascending. A token belongs to the chunk that has its last
    code point. A chunk has at most `max_tokens` tokens; only a grapheme of more tokens is a longer chunk. The last
    chunk may have fewer tokens than `min_tokens`. Text without a token has no chunks.
    """
    token_ends = np.asarray(ends, np.int64)
    if not len(token_ends):
        return []
    places = _places(text, token_ends, rule.boundary)
    counts = [np.searchsorted(token_ends, level, side="right") for level in places]
    chunks: list[tuple[int, int]] = []
    start = first = end_count = 0  # the last two: tokens before the start of the chunk, and before the end of the last
    while len(token_ends) - first > rule.max_tokens:
        least = max(first + max(1, rule.min_tokens), end_count + 1)
        end = _end(places, counts, least, first + rule.max_tokens)
        end_count = int(np.searchsorted(token_ends, end, side="right"))
        if end_count == len(token_ends):
            break
        chunks.append((start, end))
        start = _next_start(places, counts, chunks[-1], end_count, rule)
        first = int(np.searchsorted(token_ends, start, side="right"))
    return [*chunks, (start, len(text))]


def _end(places: Sequence[Places], counts: Sequence[Places], least: int, most: int) -> int:
    """Return the last place of the highest level that has one with `least` to `most` tokens before it. Without any,
    return the first place after them: it is the end of a long grapheme.
    """
    for level, count in zip(places, counts, strict=True):
        index = int(np.searchsorted(count, most, side="right")) - 1
        if index >= 0 and count[index] >= least:
            return int(level[index])
    for lower in (most, least - 1):
        index = int(np.searchsorted(counts[-1], lower, side="right"))
        if index < len(counts[-1]):
            return int(places[-1][index])
    raise AssertionError("the end of the text is a place")


def _next_start(
    places: Sequence[Places], counts: Sequence[Places], chunk: tuple[int, int], end_count: int, rule: ChunkRule
) -> int:
    """Return the start of the chunk after `chunk`, which ends after `end_count` tokens: the earliest place of the
    highest level from which at most `overlap_tokens` tokens are repeated. Fewer are repeated if the next chunk could
    not end at its boundary otherwise.
    """
    start, end = chunk
    from_count = end_count - rule.overlap_tokens
    following = int(np.searchsorted(places[0], end, side="right"))
    if following < len(places[0]) and counts[0][following] - end_count <= rule.max_tokens:
        from_count = max(from_count, int(counts[0][following]) - rule.max_tokens)
    for level, count in zip(places, counts, strict=True):
        index = max(int(np.searchsorted(count, from_count)), int(np.searchsorted(level, start, side="right")))
        if index < len(level) and count[index] < end_count:
            return int(level[index])
    return end


def _places(text: str, token_ends: Places, boundary: Boundary) -> list[Places]:
    """Return the places of each level, from that of the boundary down to that of tokens, ascending."""
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
    """Add the places between blocks, sentences, items of lists, and lines of code and tables."""
    starts = np.array([0, *(match.end() for match in _LINE_END.finditer(text)), len(text)])
    whole = np.zeros(len(text) + 1, bool)  # places inside a block in which a full stop ends no sentence
    heading: int | None = None  # start of the heading before this block
    for token in _markdown().parse(text):
        if token.map is None:
            continue
        first, stop = (int(starts[min(line, len(starts) - 1)]) for line in token.map)
        if token.type == "fence":
            _add_lines(starts, first, stop, levels, whole)
        if token.level == 0:
            levels[PARAGRAPH if heading is None else LINE].add(first)
            if heading is not None:  # it stays with this block
                whole[heading + 1 : first + 1] = True
            heading = first if token.type == "heading_open" else None
        elif token.type == "list_item_open":
            levels[SENTENCE].add(first)
    for table in _TABLE.finditer(text):
        _add_lines(starts, *table.span(), levels, whole)
    levels[SENTENCE].update(end for end in _sentence_ends(text) if not whole[end])


def _add_lines(starts: Places, first: int, stop: int, levels: list[set[int]], whole: NDArray[np.bool_]) -> None:
    """Add the lines of a block from `first` to `stop` that is cut between lines only."""
    whole[first + 1 : stop] = True
    lines = slice(int(np.searchsorted(starts, first, side="right")), int(np.searchsorted(starts, stop)))
    levels[LINE].update(starts[lines].tolist())


def _sentence_ends(text: str) -> Iterator[int]:
    """Yield the ends of sentences and paragraphs. A sentence of more than _LONGEST_PIECE code points may have none."""
    start, size = 0, _PIECE
    while start < len(text):
        sentences = sentencex.get_sentence_boundaries(_LANGUAGE, text[start : start + size])
        ends = [start + sentence["end_index"] for sentence in sentences]
        if start + size >= len(text):
            yield from ends
            return
        if len(ends) > 1:  # the last one may go on
            yield from ends[:-1]
            start, size = ends[-2], _PIECE
        elif size < _LONGEST_PIECE:
            size *= 4
        else:
            start, size = start + size, _PIECE


@cache
def _markdown() -> MarkdownIt:
    """Return the reader of blocks. Indented code and HTML are read as text: most texts with them are no Markdown.
    Tables are found by their lines, since the reader makes an object of each cell.
    """
    return MarkdownIt("commonmark").disable(["inline", "code", "html_block"])


def _grapheme_bounds(text: str) -> NDArray[np.bool_]:
    """Return for each code point, and the end of the text, whether a grapheme begins there."""
    bounds = np.ones(len(text) + 1, bool)
    if text.isascii():
        bounds[[match.start() + 1 for match in re.finditer("\r\n", text)]] = False
        return bounds
    bounds[:-1] = False
    bounds[[match.start() for match in _GRAPHEME.finditer(text)]] = True
    return bounds
