"""Rerank in the formats of several APIs. `/v1/rerank` has one format that clients of Jina, Voyage and Cohere can read,
and `/v2/rerank` has the format of Cohere's version 2. `/v1/ranking` has the format of NVIDIA. `/v1/reranking` has the
formats of llama.cpp, NVIDIA and Mixedbread, `/v1/score` that of vLLM.
"""

from __future__ import annotations

import functools
import time
from typing import Any
from uuid import uuid4

from sie_contracts.errors import InvalidInput
from sie_contracts.models.option_values import bad
from sie_gateway.dialects import fields, multimodal, native, openai
from sie_gateway.dialects.dialect import DialectHandler, ParsedRequest, RequestView
from sie_gateway.dialects.scores import ranked, scaled
from sie_gateway.inference import body as bodies
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply, ErrorShape
from sie_gateway.inference.results import InferRequest, RequestResult

DEFAULT_TOKENS_PER_DOC = 4096
MAX_TOKENS_PER_DOC = 1 << 20
DOCUMENTS_PER_UNIT = 100  # number of documents that are billed as one search unit


def _reranking_shape(body: fields.Body) -> ErrorShape | None:
    is_other = body.get("passages") is not None or body.get("input") is not None
    return None if is_other else fields.error_shape(body)


async def _reranking(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of `POST /v1/reranking`: with `passages` in the format of NVIDIA, with `input` in that of Mixedbread,
    else as of `/v1/rerank`, like llama.cpp.
    """
    if body.get("passages") is not None:
        return await _ranking(view, body)
    if body.get("input") is not None:
        return _mixedbread(view, body)
    return await parse(view, body, version=1)


async def parse(view: RequestView, body: fields.Body, *, version: int, root: bool = False) -> ParsedRequest:
    """Read a body of `POST /v{version}/rerank`. The reply has the documents in the order of their relevance to the
    query, best first. `root`: true for the path `/rerank` of a plug-in, whose reply has documents as strings.
    """
    cut = fields.truncation(body)
    query = RequestItem(fields.text(body, "query"))
    items = _documents(body, "documents", view)
    count = _count(body, "top_n" if body.get("top_n") is not None else "top_k")
    with_documents = fields.flag(body, "return_documents", default=version == 1)
    document_tokens = fields.whole(body, "max_tokens_per_doc", 1, MAX_TOKENS_PER_DOC) or DEFAULT_TOKENS_PER_DOC
    is_raw = fields.flag(body, "raw_scores")
    parameters = cut | fields.parameters(body, "instruction", "truncate", "options")
    warnings = []
    if body.get("max_chunks_per_doc") is not None:
        warnings.append("max_chunks_per_doc: ignored, a document is read up to max_tokens_per_doc")
    return ParsedRequest(
        request=InferRequest(
            "score", view.resolved, items, parameters, query, fields.priority(body), inputs_field="documents"
        ),
        adjust=scaled(raw=is_raw, document_tokens=document_tokens),
        render=functools.partial(
            _answer, version=version, root=root, count=count, with_documents=with_documents, warnings=warnings
        ),
    )


def _count(body: fields.Body, name: str) -> int | None:
    """Return the number of documents in the reply; None for all. In vLLM, Infinity and LocalAI, 0 means all."""
    return fields.whole(body, name, 0) or None


def _mixedbread(view: RequestView, body: fields.Body) -> ParsedRequest:
    query = RequestItem(fields.text(body, "query"))
    items = _documents(body, "input", view)
    count = _count(body, "top_k") or len(items)
    with_inputs = fields.flag(body, "return_input")

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        began_s = time.perf_counter()
        scores, order = ranked(finished, "input")
        content = {
            "object": "list",
            "model": view.resolved.requested,
            "data": [
                {
                    "object": "rank_result",
                    "index": index,
                    "score": scores[index],
                    "input": items[index].text if with_inputs else None,
                }
                for index in order[:count]
            ],
            "top_k": count,
            "return_input": with_inputs,
            **fields.shared(call, finished),
        }
        return native.written(call, finished, content, began_s)

    request = InferRequest("score", view.resolved, items, {}, query, inputs_field="input")
    return ParsedRequest(request=request, adjust=scaled(raw=False), render=render)


async def _pair_scores(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of vLLM's `POST /v1/score`. The reply has the score of each document, in the order of the documents.
    The query is in `text_1` or `queries`, the documents are in `text_2` or `documents`.
    """
    query_field, document_field = (
        ([name for name in names if body.get(name) is not None] or names)[0]
        for names in (["text_1", "queries"], ["text_2", "documents"])
    )
    documents, queries = (
        fields.items(_as_list(body.get(name)), name, view.limit) for name in (document_field, query_field)
    )
    if len({query.text for query in queries}) > 1:
        raise InvalidInput.at(query_field, "expected one query: send a request for each query")
    if len(queries) not in (1, len(documents)):
        raise InvalidInput.at(query_field, f"expected one query, or one for each of {len(documents)} documents")
    parameters = fields.parameters(body, "instruction", "truncate", "options")
    is_raw = not fields.flag(body, "use_activation", default=True)

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        began_s = time.perf_counter()
        scores, _ = ranked(finished, document_field)
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(scores)]
        return openai.listed(call, finished, data, began_s)

    request = InferRequest("score", view.resolved, documents, parameters, queries[0], inputs_field=document_field)
    return ParsedRequest(request=request, adjust=scaled(raw=is_raw), render=render)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


async def _ranking(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of `POST /v1/ranking`. The reply has the raw score of each passage, the best first."""
    reads_images = "image" in view.resolved.entry.inputs
    query = _document(body.get("query"), "query", None, reads_images=reads_images)
    values = fields.inputs(body.get("passages"), "passages", view.limit)
    items = tuple(
        _document(value, f"passages[{index}]", None, reads_images=reads_images) for index, value in enumerate(values)
    )
    cut = fields.choice(body, "truncate", ("NONE", "END"), "END")

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        began_s = time.perf_counter()
        scores, order = ranked(finished, "passages")
        content = {
            "rankings": [{"index": index, "logit": scores[index]} for index in order],
            **fields.shared(call, finished),
        }
        return native.written(call, finished, content, began_s)

    request = InferRequest("score", view.resolved, items, {"truncate": cut}, query, inputs_field="passages")
    return ParsedRequest(request=request, adjust=scaled(raw=True), render=render)


v1 = DialectHandler("rerank", functools.partial(parse, version=1), shape=fields.error_shape)
v2 = DialectHandler("rerank", functools.partial(parse, version=2), shape=fields.error_shape)
reranking = DialectHandler("rerank", _reranking, shape=_reranking_shape)
ranking = DialectHandler("rerank", _ranking)
pair_scores = DialectHandler("rerank", _pair_scores)


def _documents(body: fields.Body, name: str, view: RequestView) -> tuple[RequestItem, ...]:
    values, reads_images = fields.inputs(body.get(name), name, view.limit), "image" in view.resolved.entry.inputs
    names = body.get("rank_fields")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise bad("rank_fields", names, "a list of names of fields")
    return tuple(
        _document(value, f"{name}[{index}]", names, reads_images=reads_images) for index, value in enumerate(values)
    )


def _document(value: Any, path: str, names: list[str] | None, *, reads_images: bool) -> RequestItem:
    """Read a document: a text or a map. With `names`, the document is the text of these fields of the map, one field
    per line. Without `names`, the document is the fields `text` and `image` of the map. If the model does not read
    images, `image` beside a `text` is ignored, because a map may have any fields. Raises InvalidInput.
    """
    if isinstance(value, str):
        return RequestItem(bodies.utf8(value, path))
    if not isinstance(value, dict):
        raise bad(path, value, "a string or a map")
    if names:
        fields_present = [value[name] for name in names if value.get(name) is not None]
        if not fields_present:
            raise InvalidInput.at(path, "expected at least one of the rank_fields, got none", reason="empty_item")
        for text in fields_present:
            if not isinstance(text, str | int | float) or isinstance(text, bool):
                raise bad(path, text, "strings or numbers in its rank_fields")
        return RequestItem(bodies.utf8("\n".join(map(str, fields_present)), path))
    if isinstance(value.get("text"), str) and not reads_images:
        return multimodal.item(value, path)
    return multimodal.item(value, path, "image")


def _answer(
    call: Call,
    finished: RequestResult,
    *,
    version: int,
    root: bool,
    count: int | None,
    with_documents: bool,
    warnings: list[str],
) -> EncodedReply:
    began_s = time.perf_counter()
    scores, order = ranked(finished, "documents")
    items, order = finished.request.items, order[:count]
    entries = [{"index": index, "relevance_score": scores[index]} for index in order]
    results: list[dict[str, Any]] = entries
    if with_documents:  # the reply repeats texts of documents, but not images
        texts = (items[index].text for index in order)
        results = [
            entry if text is None else {**entry, "document": text if root else {"text": text}}
            for entry, text in zip(entries, texts, strict=True)
        ]
    shared = fields.shared(call, finished)
    if warnings:
        shared["warnings"] = [*warnings, *shared.get("warnings", ())]
    tokens = finished.usage["total_tokens"]
    meta: dict[str, Any] = {
        "api_version": {"version": str(version)},
        "billed_units": {"search_units": -(-len(items) // DOCUMENTS_PER_UNIT)},
        "tokens": {"input_tokens": tokens, "output_tokens": 0},
    }
    content: dict[str, Any] = {
        "id": str(uuid4()),
        "object": "rerank",
        "model": finished.request.resolved.requested,
        "results": results,
        "meta": meta,
        **shared,
        **({"data": entries} if version == 1 else {}),  # Voyage's client reads `data`, and adds the documents itself
    }
    return native.written(call, finished, content, began_s)
