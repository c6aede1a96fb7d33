"""Routes of Infinity that the core does not have: the classes of each text, the ranking of documents at `/rerank`, and
the list of models at `/models`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from sie_contracts.errors import CODE, ERROR, ErrorFormat
from sie_dialects import tei
from sie_gateway.dialects import fields, native
from sie_gateway.dialects import rerank as reranks
from sie_gateway.dialects.dialect import DialectHandler, ParsedRequest, RequestView
from sie_gateway.inference.call import Call, EncodedReply, ErrorShape
from sie_gateway.inference.results import InferRequest, RequestResult
from sie_gateway.operations import handlers

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

shape = ErrorFormat("infinity", (ERROR._replace(reader="Infinity"), CODE))


async def _classify(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of `POST /classify` or `/v1/classify`. The reply has all classes of each text, the best first."""
    value = body.get("input")
    items = fields.items([value] if isinstance(value, str) else value, "input", view.limit)
    params = {**fields.parameters(body, "truncate", "options"), "raw_scores": fields.flag(body, "raw_scores")}

    def render(call: Call, finished: RequestResult) -> EncodedReply:
        began_s = time.perf_counter()
        content = {
            "object": "classify",
            "data": tei.classes(finished, "input"),
            "model": view.resolved.requested,
            "id": f"classify-{uuid4()}",
            "created": int(time.time()),
            **fields.shared(call, finished),
        }
        return native.written(call, finished, content, began_s)

    return ParsedRequest(
        request=InferRequest("extract", view.resolved, items, params, inputs_field="input"), render=render
    )


async def _rerank(view: RequestView, body: fields.Body) -> ParsedRequest:
    """Read a body of `POST /rerank`. If it has `texts`, it and the reply are in the format of TEI."""
    if body.get("texts") is not None:
        return await tei.parse_rerank(view, body)
    return await reranks.parse(view, body, version=1, root=True)


def _rerank_shape(body: fields.Body) -> ErrorShape | None:
    return tei.shape if body.get("texts") is not None else fields.error_shape(body)


classify = DialectHandler("predict", _classify)
rerank = DialectHandler("rerank", _rerank, shape=_rerank_shape)


async def models(gateway: Gateway, request: Request) -> Response:
    """Return all models, each with the owner `infinity`: Infinity's client library refuses other owners."""
    return await handlers.models(gateway, request, owned_by="infinity")
