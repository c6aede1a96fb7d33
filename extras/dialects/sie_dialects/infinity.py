"""Routes of Infinity that the core does not have: the classes of each text, the ranking of documents at `/rerank`, and
the list of models at `/models`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

from fastapi import Request
from fastapi.responses import Response

from sie_contracts.errors import CODE, ERROR, Family
from sie_dialects import tei
from sie_gateway.dialects import fields, native
from sie_gateway.dialects import rerank as reranks
from sie_gateway.dialects.selection import able
from sie_gateway.inference.call import Call, EncodedReply, InferRequest
from sie_gateway.operations import handlers

if TYPE_CHECKING:
    from sie_gateway.inference.handler import Inference
    from sie_gateway.state import Gateway

shape = Family("infinity", (ERROR._replace(reader="Infinity"), CODE))


async def classify(inference: Inference, call: Call, body: fields.Body) -> EncodedReply:
    """Answer `POST /classify` and `POST /v1/classify` with all classes of each text, the best class first."""
    resolved = able(inference, call, "predict", body.get("model"))
    value = body.get("input")
    items = fields.items([value] if isinstance(value, str) else value, "input", inference.max_items(call))
    params = {**fields.parameters(body, "truncate", "options"), "raw_scores": fields.flag(body, "raw_scores")}
    finished = await inference.run(call, InferRequest("extract", resolved, items, params, inputs_field="input"))
    began_s = time.perf_counter()
    content = {
        "object": "classify",
        "data": tei.classes(finished, "input"),
        "model": resolved.requested,
        "id": f"classify-{uuid4()}",
        "created": int(time.time()),
        **fields.shared(call, finished),
    }
    return native.written(call, finished, content, began_s)


async def rerank(inference: Inference, call: Call, body: fields.Body) -> EncodedReply:
    """Answer `POST /rerank`. If the body has `texts`, the reply and its errors are in the format of TEI."""
    if body.get("texts") is not None:
        call.shape = tei.shape
        return await tei.rerank(inference, call, body)
    return await reranks.rerank(inference, call, body, version=1, root=True)


async def models(gateway: Gateway, request: Request) -> Response:
    """Return all models, each with the owner `infinity`: Infinity's client library refuses other owners."""
    return await handlers.models(gateway, request, owned_by="infinity")
