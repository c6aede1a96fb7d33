"""Fields and errors that only Voyage has on the routes that it shares with OpenAI and Jina: `truncation`, and errors
whose `detail` is a text.
"""

from __future__ import annotations

from typing import Any

from sie_gateway.dialects import fields
from sie_gateway.inference.call import Call, family

_SHAPE = family("voyage")


def truncation(call: Call, body: fields.Body) -> dict[str, Any]:
    """Parameters that `truncation` stands for, empty where `truncate` says it. Its client always sends it: errors have
    its shape then.
    """
    if body.get("truncation") is None:
        return {}
    cuts = fields.flag(body, "truncation")
    call.shape = _SHAPE
    return {} if body.get("truncate") is not None else {"truncate": "END" if cuts else "NONE"}
