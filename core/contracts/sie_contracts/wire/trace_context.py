"""The W3C trace context that goes with a request, as text: through headers, work items and batches."""

from __future__ import annotations

from typing import NamedTuple


class Context(NamedTuple):
    """Context of a trace for a span of another process: the headers `traceparent` and `tracestate`. Empty: there is
    none.
    """

    traceparent: str = ""
    tracestate: str = ""


NONE = Context()
