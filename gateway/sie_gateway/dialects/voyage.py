"""Voyage's format on routes of OpenAI and Jina: the field `truncation`, and errors with a text as `detail`."""

from __future__ import annotations

from typing import Any

from sie_gateway.dialects import fields
from sie_gateway.inference.call import Call, family

_SHAPE = family("voyage")


def truncation(call: Call, body: fields.Body) -> dict[str, Any]:
    """Return SIE's parameter `truncate` for Voyage's field `truncation`. Return no parameter if the body also has
    `truncate`, which takes precedence. A body with `truncation` gets errors in Voyage's format, because Voyage's client
    always sends this field.
    """
    if body.get("truncation") is None:
        return {}
    cuts = fields.flag(body, "truncation")
    call.shape = _SHAPE
    return {} if body.get("truncate") is not None else {"truncate": "END" if cuts else "NONE"}
