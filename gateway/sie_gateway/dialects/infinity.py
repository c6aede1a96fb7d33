"""`POST /classify` of Infinity: the classes of each text. The modules `openai`, `rerank` and `operations` have the
other routes of Infinity.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from uuid import uuid4

from sie_gateway.dialects import fields, native, tei
from sie_gateway.dialects.selection import able
from sie_gateway.inference.call import Call, EncodedReply, InferRequest

if TYPE_CHECKING:
    from sie_gateway.inference.handler import Inference


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
