"""`POST /v2/embed` and `POST /v1/embed` in the format of Cohere. One run of the model gives all types of vectors.

In version 1, `input_type` is optional, and a request without `embedding_types` gets plain lists of numbers.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import orjson

from sie_contracts.errors import InvalidInput
from sie_contracts.models.option_values import bad
from sie_gateway.dialects import embedding_types, fields, multimodal
from sie_gateway.dialects.dialect import DialectHandler, ParsedRequest, RequestView
from sie_gateway.inference import reply
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply
from sie_gateway.inference.images import header
from sie_gateway.inference.results import InferRequest, RequestResult
from sie_runtime.http.asgi import Body

INPUT_TYPES = ("search_query", "search_document", "classification", "clustering", "image")


async def _embed(version: int, view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of `POST /v{version}/embed`. The reply has the vectors of texts or images in all requested types."""
    kind = fields.choice(body, "input_type", INPUT_TYPES, "")
    if not kind and version == 2:
        raise bad("input_type", None, f"one of {', '.join(INPUT_TYPES)}")
    entry = view.resolved.entry
    name, items = _items(body, view.limit)
    types = _types(body)
    params: dict[str, Any] = {"output_types": ["dense"], "output_dtype": "float32"}
    params |= fields.side(kind, entry)
    params |= fields.parameters(body, "truncate", "normalize", "options")
    if (width := fields.whole(body, "output_dimension", 1)) is not None:
        params["dimensions"] = width
    if (most := fields.whole(body, "max_tokens", 1)) is not None:
        params["max_seq_length"] = min(most, entry.max_tokens)
    return ParsedRequest(
        request=InferRequest(
            "encode", view.resolved, items, params, priority=fields.priority(body), side="", inputs_field=name
        ),
        names={"output_types": "model", "dimensions": "output_dimension"},
        render=functools.partial(
            _answer, name=name, types=types or ["float"], version=version, bare=version == 1 and not types
        ),
    )


v1 = DialectHandler("embed", functools.partial(_embed, 1))
v2 = DialectHandler("embed", functools.partial(_embed, 2))


def _types(body: fields.Body) -> list[str]:
    """Return the types of vectors in `embedding_types`; empty if the field is missing. Raises InvalidInput."""
    names = body.get("embedding_types")
    if names is None:
        return []
    if not isinstance(names, list):
        raise bad("embedding_types", names, "a list")
    for index, name in enumerate(names):
        if not isinstance(name, str) or name not in embedding_types.TYPES:
            raise bad(
                f"embedding_types[{index}]", name, f"one of {', '.join(embedding_types.TYPES)}", "unsupported_dtype"
            )
    return list(dict.fromkeys(names))


def _items(body: fields.Body, limit: int) -> tuple[str, tuple[RequestItem, ...]]:
    """Return (name of the field with the inputs: `texts`, `images` or `inputs`; the inputs). Raises InvalidInput."""
    names = [name for name in ("texts", "images", "inputs") if body.get(name) not in (None, [])]
    if len(names) != 1:
        message = f"expected exactly one of texts, images and inputs, got {' and '.join(names) or 'none'}"
        raise InvalidInput.at("texts", message, reason="schema" if names else "empty_items")
    name = names[0]
    if name == "inputs":
        values = fields.inputs(body[name], name, limit)
        return name, tuple(_parts(value, f"inputs[{index}]") for index, value in enumerate(values))
    if name == "texts":
        return name, fields.items(body[name], name, limit)
    values = fields.inputs(body[name], name, limit)
    return name, tuple(multimodal.image(value, f"images[{index}]") for index, value in enumerate(values))


def _parts(value: Any, path: str) -> RequestItem:
    return multimodal.parts(value.get("content") if isinstance(value, dict) else None, f"{path}.content")


def _answer(
    call: Call, finished: RequestResult, *, name: str, types: Sequence[str], version: int, bare: bool
) -> EncodedReply:
    """Build the reply. If `bare`, `embeddings` is a list of vectors, else a map from each type to such a list."""
    began_s = time.perf_counter()
    vectors = finished.arrays(name, "dense")
    parts: list[Body] = []
    scales: dict[str, dict[str, list[float]]] = {}
    for kind in types:
        rows, extras = embedding_types.converted(vectors, kind)
        if extras:
            scales[kind] = extras
        before = b"[" if bare else f'"{kind}":['.encode()
        start = b'{"embeddings":' if bare else b'{"embeddings":{'
        parts += [b"," if parts else start, reply.listed(rows, len(rows) * vectors[0].size, before)]
    items = finished.request.items
    rest: dict[str, Any] = {
        "id": str(uuid4()),
        "response_type": "embeddings_floats" if bare else "embeddings_by_type",
        "texts": [] if name == "images" else [item.text for item in items],
        **_shown(items),
        "meta": {"api_version": {"version": str(version)}, "billed_units": _billed(finished)},
        **finished.shared(explain=call.explains),
    }
    if scales:
        rest["embeddings_scale"] = scales
    parts.append((b"," if bare else b"},") + orjson.dumps(rest)[1:-1])
    late = functools.partial(finished.late, call.received_s, time.perf_counter() - began_s)
    content = reply.chained(parts, lambda spent_s: b"," + orjson.dumps(late(spent_s))[1:])
    if call.explains and not isinstance(content, bytes):  # the headers leave before the body is written
        late(0.0)
    return EncodedReply(content, "application/json", finished.headers(call.received_s, timed=call.explains))


def _shown(items: Sequence[RequestItem]) -> dict[str, Any]:
    """Return a map with the field `images` of the reply, which describes each image by the header of its file. Return
    an empty map if the request has no images, or if the header of any image cannot be read.
    """
    headers = [header(file) for item in items for file in item.images]
    if not headers or None in headers:
        return {}
    return {"images": [image._asdict() for image in headers if image is not None]}


def _billed(finished: RequestResult) -> dict[str, int]:
    items = finished.request.items
    count = sum(len(item.images) for item in items)
    has_text = any(item.text is not None for item in items)
    return {
        **({"input_tokens": finished.usage["total_tokens"]} if has_text else {}),
        **({"images": count} if count else {}),
    }
