"""W3C trace context of a request, as text in headers, work items and batches."""

from __future__ import annotations

from typing import NamedTuple


class Context(NamedTuple):
    """Headers with which another process continues a trace. Both are empty if the request is not traced."""

    traceparent: str = ""
    tracestate: str = ""


NONE = Context()
