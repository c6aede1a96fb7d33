"""The trace that the current task works for, and its context as W3C writes it in headers."""

from __future__ import annotations

import re
from contextvars import ContextVar

from sie_contracts.wire.trace_context import NONE, Context

MAX_STATE_CHARS = 512  # of a tracestate: the minimum that the specification demands
# attribute of a span of a stage of the reply's timing: queue, preprocess, batch_wait, inference, postprocess
STAGE = "sie.stage"
_CONTEXT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?P<ids>(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_VERSION = "00"  # of the specification
_SAMPLED = 1  # bit in the flags of a trace context
# the sampled trace that this task works for, 32 hex digits, else None
TRACE_ID: ContextVar[str | None] = ContextVar("sie_trace_id", default=None)


def context_from_headers(traceparent: str, tracestate: str) -> Context:
    """The context that a client sends. An invalid one is dropped, as the specification asks. A later version is read as
    ours.
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
    """The trace of a context, 32 hex digits, if it is sampled; else None, because no collector has it."""
    match = _CONTEXT.fullmatch(traceparent)
    return match["trace"] if match is not None and _flags(match) & _SAMPLED else None


def _flags(match: re.Match[str]) -> int:
    return int(match["flags"], 16)


def set_current(context: Context) -> None:
    """Set the context of this task, and of the tasks that it starts, to that of a request."""
    TRACE_ID.set(trace_id_of(context.traceparent))
