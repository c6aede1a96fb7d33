"""The fields `chunks` and `context` of an item: parts of its text that get vectors of their own.

chunks: [[0, 120], [120, 260]]       start and end of each chunk, in code points of the text
chunks: {max_tokens: 256, ...}       a rule by which the worker splits the text
context: false                       each chunk is encoded alone; by default, the model reads the whole text
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sie_contracts.errors import InvalidInput
from sie_contracts.models.option_values import bad, integer
from sie_contracts.plain import whole_number
from sie_contracts.wire.messages import BOUNDARIES, MAX_RULE_TOKENS, ChunkRule, TextChunks

FIELDS = frozenset({"chunks", "context"})
# largest number of chunks of one item; the worker has the same limit for chunks that it computes by a rule
MAX_CHUNKS = 4096
MAX_REQUEST_CHUNKS = 16384  # largest number of chunks that a request may name by start and end, in all its items
MAX_TEXT = 1 << 18  # largest number of code points of a text with chunks
_RULE = frozenset(ChunkRule.__struct_fields__)


def read(item: Mapping[str, Any], text: str | None, path: str) -> TextChunks | None:
    """Return the chunks of an item, or None. Raises InvalidInput that names the field and the index of a span."""
    value, context = item.get("chunks"), item.get("context")
    if value is None:
        return None
    where = f"{path}.chunks"
    if context is None:
        context = True
    if not isinstance(context, bool):
        raise bad(f"{path}.context", context, "a boolean")
    if not text:
        raise _bad(where, "only an item with a text can have chunks")
    if len(text) > MAX_TEXT:
        message = f"it has {len(text)} code points, a text with chunks may have at most {MAX_TEXT}"
        raise InvalidInput.at(f"{path}.text", message, reason="too_long", extras={"limit": MAX_TEXT})
    if isinstance(value, list):
        return TextChunks(spans=_spans(value, len(text), where), context=context)
    if isinstance(value, dict):
        return TextChunks(rule=_rule(value, where), context=context)
    raise bad(where, value, "a list of spans or a map")


def estimated_chunks(chunks: TextChunks, tokens: int) -> int:
    """Return the estimated number of chunks of a text with about `tokens` tokens."""
    if chunks.rule is None:
        return len(chunks.spans) // 8  # a span has two int32, of 4 bytes each
    return min(MAX_CHUNKS, tokens // step_of(chunks.rule) + 1)


def step_of(rule: ChunkRule) -> int:
    """Return the estimated number of tokens from the start of a chunk to the start of the next one."""
    return max(1, max(rule.min_tokens, rule.max_tokens // 2) - rule.overlap_tokens)


def _bad(path: str, message: str, reason: str = "schema", limit: int = 0) -> InvalidInput:
    extras = {"limit": limit} if limit else None
    return InvalidInput.at(path, message, reason=reason, extras=extras)


def _spans(value: list[Any], length: int, path: str) -> bytes:
    if not value:
        raise _bad(path, "expected at least one span")
    if len(value) > MAX_CHUNKS:
        raise _bad(path, f"got {len(value)} spans, at most {MAX_CHUNKS} are allowed", "too_many_chunks", MAX_CHUNKS)
    # (start, end) of the previous chunk, and the end of the chunk before that, for the checks of order and overlap
    before, earlier_end = (-1, 0), 0
    for index, span in enumerate(value):
        where = f"{path}[{index}]"
        ends = list(map(whole_number, span)) if isinstance(span, list) else []
        if len(ends) != 2 or set(map(type, ends)) != {int}:
            raise bad(where, span, "[start, end], two offsets in code points of the text")
        first, end = ends
        if not 0 <= first < end <= length:
            raise _bad(where, f"expected 0 <= start < end <= {length}, the length of the text, got {first} and {end}")
        if first <= before[0] or end <= before[1]:
            raise _bad(where, "expected a later start and a later end than those of the span before it")
        if first < earlier_end:
            raise _bad(where, f"it overlaps chunks[{index - 2}]; a span may overlap its neighbours only")
        before, earlier_end = (first, end), before[1]
    return np.array(value, "<i4").tobytes()


def _rule(value: Mapping[str, Any], path: str) -> ChunkRule:
    for name in value:
        if name not in _RULE:
            raise _bad(path, f"unknown field `{str(name)[:64]}`, expected {', '.join(ChunkRule.__struct_fields__)}")
    boundary = value.get("boundary", "sentence")
    if boundary not in BOUNDARIES:
        raise bad(f"{path}.boundary", boundary, f"one of {', '.join(BOUNDARIES)}")
    most = _whole(value, "max_tokens", path, 1, MAX_RULE_TOKENS)
    overlap = _whole(value, "overlap_tokens", path, 0, most // 2, default=0)
    least = _whole(value, "min_tokens", path, 0, most, default=0)
    return ChunkRule(most, overlap, boundary, least)


def _whole(value: Mapping[str, Any], name: str, path: str, least: int, most: int, default: int | None = None) -> int:
    number = value.get(name, default)
    if number is None and default is not None:
        return default
    return integer(f"{path}.{name}", number, f"a whole number from {least} to {most}", least, most)
