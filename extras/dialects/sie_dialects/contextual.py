"""`POST /v1/contextualizedembeddings` in the format of Voyage. A document is a list of chunks. With
`enable_auto_chunking`, a document is one text that the server splits into chunks. The model reads the whole document.
The vector of a chunk is pooled from the hidden states of the chunk's tokens.
"""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any

from sie_contracts.errors import InvalidInput
from sie_contracts.wire import chunk_tables
from sie_contracts.wire.messages import MAX_RULE_TOKENS, ChunkRule, TextChunks
from sie_gateway.dialects import embedding_types, fields, joined_texts, openai
from sie_gateway.dialects.dialect import DialectHandler, ParsedRequest, RequestView
from sie_gateway.inference import chunk_fields, reply
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply
from sie_gateway.inference.results import InferRequest, RequestResult

# limits of a request: documents, chunks, and tokens of all documents; Voyage has the same limits
MAX_DOCUMENTS, MAX_CHUNKS, MAX_TOKENS = 1000, 16_000, 120_000
CHUNK_TOKENS = 512  # default of the field `chunk_size`, in tokens


async def _embeddings(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of `POST /v1/contextualizedembeddings`. The reply has the vectors of each document, in the order of
    its chunks.
    """
    kind, is_base64 = embedding_types.requested(body, "output_dtype")
    side = fields.choice(body, "input_type", ("query", "document"), "")
    limit = min(MAX_DOCUMENTS, view.limit)
    items = _items(fields.inputs(body.get("inputs"), "inputs", limit), side, _rule(body, side))
    parameters = fields.parameters(body, "input_type", "normalize", "options")
    if (width := fields.whole(body, "output_dimension", 1)) is not None:
        parameters["dimensions"] = width
    parameters |= {"output_types": ["dense"], "output_dtype": "float32"}
    return ParsedRequest(
        request=InferRequest("encode", view.resolved, items, parameters, side="", inputs_field="inputs"),
        names={"dimensions": "output_dimension", "output_types": "model"},
        max_tokens=MAX_TOKENS,
        render=functools.partial(_answer, kind=kind, is_base64=is_base64),
    )


embeddings = DialectHandler("embed", _embeddings)


def _rule(body: fields.Body, side: str) -> ChunkRule | None:
    """Return the rule by which workers split documents; None if the client has split them. Raises InvalidInput."""
    if not fields.flag(body, "enable_auto_chunking"):
        for name in ("chunk_size", "chunk_overlap"):
            if body.get(name) is not None:
                raise InvalidInput.at(name, "allowed only with enable_auto_chunking")
        return None
    if side != "document":
        raise InvalidInput.at("enable_auto_chunking", "allowed only with the input_type document")
    size = fields.whole(body, "chunk_size", 1, MAX_RULE_TOKENS) or CHUNK_TOKENS
    return ChunkRule(size, fields.whole(body, "chunk_overlap", 0, size // 2) or 0)


def _items(values: list[Any], side: str, rule: ChunkRule | None) -> tuple[RequestItem, ...]:
    items: list[RequestItem] = []
    count = 0
    for index, value in enumerate(values):
        path = f"inputs[{index}]"
        texts = _texts(value, path)
        count += len(texts)
        if len(texts) > 1 and (side == "query" or rule is not None):
            message = f"got {len(texts)} texts, a {'query' if rule is None else 'document to split'} is one text"
            raise InvalidInput.at(path, message)
        item = RequestItem(texts[0]) if side == "query" else joined_texts.joined(texts, path)
        items.append(item if rule is None else RequestItem(item.text, chunks=TextChunks(rule)))
    if count > MAX_CHUNKS:
        message = f"got {count} chunks, at most {MAX_CHUNKS} are allowed for all documents together"
        raise InvalidInput.at("inputs", message, reason="too_many_chunks", extras={"limit": MAX_CHUNKS})
    return tuple(items)


def _texts(value: Any, path: str) -> list[str]:
    for index, text in enumerate(fields.inputs(value, path, chunk_fields.MAX_CHUNKS)):
        where = f"{path}[{index}]"
        if not fields.string(text, where):
            raise InvalidInput.at(where, "expected a text that is not empty", reason="empty_item")
    return list(value)


def _answer(call: Call, finished: RequestResult, *, kind: str, is_base64: bool) -> EncodedReply:
    began_s = time.perf_counter()
    vectors = joined_texts.vectors_of(finished, "inputs")
    entries = iter(embedding_types.entries(list(itertools.chain.from_iterable(vectors)), kind, is_base64=is_base64))
    data = []
    for index, (item, (result, outcome), own) in enumerate(
        zip(finished.request.items, finished.succeeded("inputs"), vectors, strict=True)
    ):
        chunks = [{**entry, "index": place} for place, entry in enumerate(itertools.islice(entries, len(own)))]
        if item.chunks is not None and item.chunks.rule is not None:
            spans = reply.array_of(result, outcome, chunk_tables.TABLE)[:, :2].tolist()
            for chunk, (start, end) in zip(chunks, spans, strict=True):
                chunk["text"] = (item.text or "")[start:end]
        data.append({"object": "list", "index": index, "data": chunks})
    return openai.listed(call, finished, data, began_s)
