"""`POST /v1/extract` in the format of the GLiNER server that NeMo Guardrails calls: entities of one text.

NeMo Guardrails masks each entity at its offsets. If two entities overlapped, NeMo Guardrails would mask wrong
characters. So this route joins overlapping entities, as a redaction does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sie_contracts.models import families
from sie_gateway.dialects import fields, native
from sie_gateway.dialects.redact import joined_spans, model_spans
from sie_gateway.dialects.selection import able
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EncodedReply, InferRequest, beside
from sie_gateway.redaction.spans import SensitiveSpan

if TYPE_CHECKING:
    from sie_gateway.inference.handler import Inference

_READ = frozenset({"threshold", "flat_ner"})  # fields that become parameters if the model's family has these parameters


async def extract(inference: Inference, call: Call, body: fields.Body) -> EncodedReply:
    """Answer `POST /v1/extract` with the entities, and the text in which each entity is marked as `[entity](label)`."""
    resolved = able(inference, call, "redact", body.get("model"))
    text = fields.text(body, "text")
    for name in ("chunk_length", "overlap"):  # checked but not used: the model itself cuts a long text into windows
        fields.whole(body, name, 0)
    names = _READ & families.row(resolved.entry.family).parameters
    parameters = {**fields.parameters(body, "labels", *names), "truncate": "NONE"}
    request = InferRequest("extract", resolved, (RequestItem(text),), parameters, inputs_field="text")
    finished = await inference.run(call, request)
    ((_, outcome),) = finished.succeeded("text", labels="labels")
    began_s = time.perf_counter()
    content = await beside(
        call, inference.body_threads, lambda: _content(text, joined_spans(text, model_spans(text, outcome, "text")))
    )
    content |= finished.shared(explain=call.explains)
    return native.written(call, finished, content, began_s)


def _content(text: str, spans: Sequence[SensitiveSpan]) -> dict[str, Any]:
    pieces, place = [], 0
    for span in spans:
        pieces += [text[place : span.start], f"[{text[span.start : span.end]}]({span.kind})"]
        place = span.end
    return {
        "entities": [
            {
                "value": text[span.start : span.end],
                "suggested_label": span.kind,
                "start_position": span.start,
                "end_position": span.end,
                "score": span.score,
            }
            for span in spans
        ],
        "total_entities": len(spans),
        "tagged_text": "".join([*pieces, text[place:]]),
    }
