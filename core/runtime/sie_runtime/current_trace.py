"""Trace of the work in the current task, and its context in the headers of W3C."""

from __future__ import annotations

import re
from contextvars import ContextVar

from sie_contracts.wire.trace_context import NONE, Context

MAX_STATE_CHARS = 512  # largest length of tracestate; the specification requires at least this length
# attribute of a span: its stage in the timing of the reply (queue, preprocess, batch_wait, inference, postprocess)
STAGE = "sie.stage"
_CONTEXT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?P<ids>(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_VERSION = "00"  # version of the W3C specification
_SAMPLED = 1  # bit in the flags of a trace context
# id of the sampled trace of this task's work, 32 hex digits, else None
TRACE_ID: ContextVar[str | None] = ContextVar("sie_trace_id", default=None)


def context_from_headers(traceparent: str, tracestate: str) -> Context:
    """Return the context that a client sent; empty if it is invalid, as the specification requires. A later version is
    read as version 00.
    """
    match = _CONTEXT.fullmatch(traceparent)
    if match is None:
        return NONE
    if match["version"] != _VERSION:
        traceparent = f"{_VERSION}-{match['ids']}-{_flags(match) & _SAMPLED:02x}"
    elif match["more"]:
        return NONE
    is_state = len(tracestate) <= MAX_STATE_CHARS and tracestate.isascii() and tracestate.isprintable()
    return Context(traceparent, tracestate if is_state else "")


def trace_id_of(traceparent: str) -> str | None:
    """Return the trace id of a context, 32 hex digits. Return None if the context is not sampled, because then no
    collector has the trace.
    """
    match = _CONTEXT.fullmatch(traceparent)
    return match["trace"] if match is not None and _flags(match) & _SAMPLED else None


def _flags(match: re.Match[str]) -> int:
    return int(match["flags"], 16)


def set_current(context: Context) -> None:
    """Use the context of a request in this task, and in the tasks that it starts."""
    TRACE_ID.set(trace_id_of(context.traceparent))
