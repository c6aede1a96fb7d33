"""Texts that are chunks of one document, in the formats of Jina and Voyage. This module joins the texts to a document,
and the model reads the whole document. The vector of a text is pooled from the hidden states of the text's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sie_contracts.arrays import Array
from sie_contracts.errors import InvalidInput
from sie_contracts.wire import chunk_tables
from sie_contracts.wire.messages import TextChunks
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.chunk_fields import MAX_CHUNKS, MAX_TEXT
from sie_gateway.inference.reply import array_of, chunks_missing
from sie_gateway.inference.results import RequestResult


def joined(texts: Sequence[str], path: str) -> RequestItem:
    """Return a document that has a chunk for each text. No text may be empty. If two texts have no white space between
    them, a space is inserted. Raises InvalidInput if the document has too many chunks or is too long.
    """
    if len(texts) > MAX_CHUNKS:
        message = f"got {len(texts)} chunks of one document, at most {MAX_CHUNKS} are allowed"
        raise InvalidInput.at(path, message, reason="too_many_chunks", extras={"limit": MAX_CHUNKS})
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    end = 0
    for text in texts:
        if pieces and not (pieces[-1][-1].isspace() or text[0].isspace()):
            pieces.append(" ")
            end += 1
        spans.append((end, end + len(text)))
        pieces.append(text)
        end += len(text)
    if end > MAX_TEXT:
        message = f"the document has {end} code points, at most {MAX_TEXT} are allowed"
        raise InvalidInput.at(path, message, reason="too_long", extras={"limit": MAX_TEXT})
    return RequestItem("".join(pieces), chunks=TextChunks(spans=np.array(spans, "<i4").tobytes()))


def vectors_of(finished: RequestResult, name: str) -> list[list[Array]]:
    """Return the vectors of each input: a vector for each chunk, or a single vector if the input has no chunks. Raises
    FailedRequest, InternalFailure.
    """
    vectors = []
    for item, (result, outcome) in zip(finished.request.items, finished.succeeded(name), strict=True):
        dense = array_of(result, outcome, "dense")
        if item.chunks is not None and chunk_tables.TABLE not in outcome.outputs:
            raise chunks_missing()
        vectors.append([dense] if item.chunks is None else list(dense))
    return vectors
