"""Trace of the work that the current task does, and the W3C headers of this trace."""

from __future__ import annotations

import re
from contextvars import ContextVar

from sie_contracts.wire.trace_context import NONE, Context

# largest number of characters of a `tracestate` header; a longer one is left out. The W3C specification asks to support
# at least 512.
MAX_STATE_CHARS = 512
# name of the span attribute that says which stage of a request the span measures: queue, load, preprocess, batch_wait,
# device_wait, inference, postprocess
STAGE = "sie.stage"
_CONTEXT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?P<ids>(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_VERSION = "00"  # version of the W3C format that SIE writes
_SAMPLED = 1  # bit in the flags of a trace context: the trace is sampled
# trace id of the current task's work, as 32 hex digits; None without a trace, or if the trace is not sampled
TRACE_ID: ContextVar[str | None] = ContextVar("sie_trace_id", default=None)


def context_from_headers(traceparent: str, tracestate: str) -> Context:
    """Return the trace context in a client's headers; NONE if `traceparent` is invalid. A `traceparent` of a later
    version of the format is read like version 00. An invalid or too long `tracestate` is left out.
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
    """Return the trace id as 32 hex digits; None for a trace that is not sampled, because no collector stores it."""
    match = _CONTEXT.fullmatch(traceparent)
    return match["trace"] if match is not None and _flags(match) & _SAMPLED else None


def _flags(match: re.Match[str]) -> int:
    return int(match["flags"], 16)


def set_current(context: Context) -> None:
    """Set TRACE_ID to the trace of a request, in this task and in the tasks that this task starts."""
    TRACE_ID.set(trace_id_of(context.traceparent))
