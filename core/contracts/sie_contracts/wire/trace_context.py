"""W3C trace context of a request, as text in headers, work items and batches."""

from __future__ import annotations

from typing import NamedTuple


class Context(NamedTuple):
    """Headers `traceparent` and `tracestate` for a span of another process. Both are empty if there is no trace."""

    traceparent: str = ""
    tracestate: str = ""


NONE = Context()
