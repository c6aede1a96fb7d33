"""Rows of a text whose chunks get vectors of their own: windows of the whole text, or one row for each chunk.

    text ──► tokens and their positions ──► chunks, by a rule or as the client sent them
        with context     overlapping windows ──► segments: the tokens of each chunk in the windows
        without context  the text of each chunk alone

A text that is not longer than the model's limit is one window. A longer text gets windows of about equal length;
neighbours overlap by about an eighth of the longest window. A token in an overlap belongs to the window in which it is
further from the nearest end: each overlap is divided in the middle.

Special tokens and the prompt are in every window. Tokens before the text belong to the chunk with the first token of
the text, and tokens after the text to the chunk with its last token. So a single chunk that covers the text is pooled
like a text without chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from sie_contracts.errors import InvalidInput
from sie_contracts.wire.ipc import ChunkedRows
from sie_contracts.wire.messages import Input, RunOptions, TextChunks
from sie_sidecar.prepare.rows import MAX_CHARACTERS, Ids, ModelTokenizer, TokenRow, bad_chunks, prompted, too_many

MAX_CHUNKS = 4096  # maximum number of chunks of one text
MAX_TOKENS = 1 << 16  # maximum number of tokens of a text with chunks, without special tokens and prompt
LEAST_WINDOW = 16  # minimum number of tokens of the text in a window, besides special tokens and prompt
OVERLAP_SHARE = 8  # neighbouring windows overlap by 1 / OVERLAP_SHARE of the longest window

Spans = NDArray[np.int32]  # shape [chunks, 3]: start and end in code points, number of tokens


@dataclass(frozen=True)
class ChunkContents:
    """One text with chunks, before its rows are made. `contents`: finished rows, or texts with their prompt. `spans`:
    the chunks in the text. `segments`: int32 [segments, 4], columns chunk, row, first token in the row, token after the
    last; None if each row is one chunk.
    """

    contents: Sequence[TokenRow | str]
    spans: Spans
    segments: NDArray[np.int32] | None = None

    def chunked(self, rows: Sequence[TokenRow], around: int) -> ChunkedRows:
        """Return the description of the finished `rows`. `around`: number of special and prompt tokens in each row."""
        if self.segments is not None:
            return ChunkedRows(len(rows), self.spans.tobytes(), self.segments.tobytes())
        counts = [max(0, len(row.ids) - around) for row in rows]
        return ChunkedRows(len(rows), np.column_stack((self.spans[:, :2], counts)).astype("<i4").tobytes())


def contents_of(
    tokenizer: ModelTokenizer, source: Input, options: RunOptions, special: tuple[Ids, Ids], most: int
) -> ChunkContents:
    """Return the contents of a text with chunks. `special`: the ids of the special tokens that begin and end each row.
    `most`: largest number of tokens in a row. Raises InvalidInput.
    """
    chunks, text = source.chunks, source.text or ""
    assert chunks is not None
    if not chunks.context and chunks.rule is None:
        return _alone(text, _read_spans(chunks, text), options)
    tokens = _TextTokens(tokenizer, source, options)
    if not chunks.context:
        room = most - len(special[0]) - len(special[1]) - tokens.before - tokens.after
        if chunks.rule is not None and chunks.rule.max_tokens > room:
            message = f"without context a chunk has at most {room} tokens besides special tokens and the prompt"
            raise bad_chunks(message, "too_long", "max_tokens", room)
        return _alone(text, tokens.spans(chunks, text), options)
    return _late(tokens, tokens.spans(chunks, text), special, most)


def _read_spans(chunks: TextChunks, text: str) -> Spans:
    """Return the chunks that the client sent, with 0 as their token counts. Raises InvalidInput for invalid chunks."""
    spans = np.frombuffer(chunks.spans, "<i4")
    if not len(spans) or len(spans) % 2 or len(spans) > 2 * MAX_CHUNKS:
        raise bad_chunks(f"expected 1 to {MAX_CHUNKS} spans", "schema")
    pairs = spans.reshape(-1, 2)
    if (pairs[:, 0] < 0).any() or (pairs[:, 0] >= pairs[:, 1]).any() or int(pairs.max()) > len(text):
        raise bad_chunks("a span is empty or outside of the text", "schema")
    return np.column_stack((pairs, np.zeros(len(pairs), np.int32)))


def _alone(text: str, spans: Spans, options: RunOptions) -> ChunkContents:
    around = len(options.prefix) + len(options.suffix)
    characters = int((spans[:, 1] - spans[:, 0]).sum()) + around * len(spans)
    if characters > MAX_CHARACTERS:
        raise too_many(f"chunks: they have {characters} characters with their prompts", MAX_CHARACTERS)
    parts = [prompted(Input(text[first:end]), options) for first, end, _ in spans.tolist()]
    return ChunkContents(parts, spans)


class _TextTokens:
    """Tokens of a text with its prompt. `ids`: the ids of all tokens. The first `before` and the last `after` ids
    belong to the prompt. `ends`: for each token of the text, its end in code points, ascending.
    """

    def __init__(self, tokenizer: ModelTokenizer, source: Input, options: RunOptions) -> None:
        (encoding,) = tokenizer.whole([prompted(source, options)], special=False)
        self.ids = np.array(encoding.ids, np.int32)
        places = np.array(encoding.offsets, np.int64).reshape(-1, 2) - len(options.prefix)
        length = len(source.text or "")
        self.before = int((places[:, 1] <= 0).sum()) if options.prefix else 0
        self.after = int((places[:, 0] >= length).sum()) if options.suffix else 0
        own = places[self.before : len(places) - self.after, 1]
        self.ends = np.minimum(np.maximum.accumulate(own), length) if len(own) else own
        if len(own) > MAX_TOKENS:
            message = f"text: it has {len(own)} tokens, but a text with chunks may have at most {MAX_TOKENS}"
            raise InvalidInput(message, reason="too_many_tokens", param="text", extras={"limit": MAX_TOKENS})
        if not len(own):
            raise InvalidInput("text: the tokenizer finds no token", reason="no_tokens", param="text")

    def spans(self, chunks: TextChunks, text: str) -> Spans:
        """Return the chunks with their numbers of tokens. Raises InvalidInput for too many chunks or an empty chunk."""
        if chunks.rule is None:
            spans = _read_spans(chunks, text)
        else:
            from sie_contracts import chunker  # its libraries need 8 MB, so only a process that cuts texts imports them

            by_rule = list(islice(chunker.spans(text, self.ends, chunks.rule), MAX_CHUNKS + 1))
            if len(by_rule) > MAX_CHUNKS:
                message = f"the rule makes more than {MAX_CHUNKS} chunks of this text, which is the limit"
                raise bad_chunks(message, "too_many_chunks", "max_tokens", MAX_CHUNKS)
            spans = np.array([(*span, 0) for span in by_rule], np.int32)
        first, stop = self.ranges(spans).T
        spans[:, 2] = stop - first
        empty = np.flatnonzero(spans[:, 2] == 0)
        if len(empty):
            raise InvalidInput(
                f"chunks[{empty[0]}]: the tokenizer finds no token", reason="no_tokens", param=f"chunks[{empty[0]}]"
            )
        return spans

    def ranges(self, spans: Spans) -> NDArray[np.int64]:
        """Return for each chunk the index of its first token and the index after its last token, [chunks, 2]."""
        bounds = np.searchsorted(self.ends, spans[:, :2], side="right")
        bounds[spans[:, 0] == 0, 0] = 0
        return bounds


def windows(tokens: int, longest: int) -> list[tuple[int, int]]:
    """Return for each window the position of its first token and the position after its last token. A window has at
    most `longest` tokens.
    """
    if tokens <= longest:
        return [(0, tokens)]
    overlap = longest // OVERLAP_SHARE
    count = -(-(tokens - overlap) // (longest - overlap))
    length = -(-(tokens + (count - 1) * overlap) // count)
    return [(start, start + length) for start in (j * (tokens - length) // (count - 1) for j in range(count))]


def _late(tokens: _TextTokens, spans: Spans, special: tuple[Ids, Ids], most: int) -> ChunkContents:
    first, last = special
    before = np.concatenate((first, tokens.ids[: tokens.before]))
    after = np.concatenate((tokens.ids[len(tokens.ids) - tokens.after :], last))
    room = most - len(before) - len(after)
    if room < max(LEAST_WINDOW, most // 2):
        message = f"the prompt leaves {max(0, room)} of {most} tokens for the text, too few for chunks with context"
        raise bad_chunks(message, "too_long", limit=most)
    count = len(tokens.ends)
    bounds = windows(count, room)
    own = tokens.ids[tokens.before : tokens.before + count]
    rows = [np.concatenate((before, own[start:stop], after)) for start, stop in bounds]
    # the tokens from `owned[i]` to `owned[i + 1]` belong to window i; overlaps are divided in the middle
    owned = [0, *((start + stop + 1) // 2 for (_, stop), (start, _) in pairwise(bounds)), count]
    segments = []
    for chunk, (begin, end) in enumerate(tokens.ranges(spans).tolist()):
        row = int(np.searchsorted(owned, begin, side="right")) - 1
        while begin < end:
            shift, stop = len(before) - bounds[row][0], min(end, owned[row + 1])
            segment_end = stop + shift if stop < count else len(rows[row])
            segments.append((chunk, row, begin + shift if begin else 0, segment_end))
            begin, row = stop, row + 1
    return ChunkContents([TokenRow(row, len(row)) for row in rows], spans, np.array(segments, np.int32))
