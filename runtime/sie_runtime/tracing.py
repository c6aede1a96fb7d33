"""Traces as every process has them. Off, nothing of OpenTelemetry is imported here and all that is done is to ask `is
None`.

    client ──traceparent──► gateway: the request ──WorkItem──► sidecar: its work ──RunBatch──► adapter: its stages on
    the device
                                                                     └─► a batch, linked to the work in it ──► its
                                                                     forward pass

The context travels as W3C writes it, in `Context`. `current_trace_id` is the one place from which logs and exemplars
have the trace.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

from sie_contracts.settings import SettingError, Tracing
from sie_contracts.trace_context import NONE, Context

if TYPE_CHECKING:
    from sie_runtime.spans import Span, Tracer

MAX_STATE_CHARS = 512  # of a tracestate: the minimum that the specification demands
# attribute of a span of a stage of the reply's timing: queue, preprocess, batch_wait, inference, postprocess
STAGE = "sie.stage"

_CONTEXT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?P<ids>(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_VERSION = "00"  # of the specification
_INSTALL = "pip install 'sie-cluster[tracing]', or leave it off"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FAULT = 500  # from this status on, the span of a server counts as failed
_SAMPLED = 1  # bit in the flags of a trace context
_logger = logging.getLogger("sie.tracing")
_current: ContextVar[str | None] = ContextVar("sie_trace_id", default=None)


def start(settings: Tracing, component: str, instance: str = "") -> Tracer | None:
    """Start the tracer of a component; None if tracing is off. Call it after any fork.

    `instance` tells it from others of its kind; by default it is the host's name. Raises SettingError if OpenTelemetry
    is not installed. If the SDK refuses one of its variables, tracing stays off, with a warning.
    """
    if not settings.enabled:
        return None
    _unset_what_means_nothing()
    try:
        from sie_runtime import spans  # the SDK reads some of its variables when it is imported

        return spans.Tracer(settings, component, instance)
    except ImportError as error:
        raise SettingError("SIE_TRACING_ENABLED", f"OpenTelemetry is not installed ({error}): {_INSTALL}") from error
    except Exception as error:  # noqa: BLE001  the SDK's exceptions have no common base, and no variable of it may end a process
        _logger.warning(
            "tracing stays off: OpenTelemetry refuses one of its variables: %s: %s", type(error).__name__, error
        )
        return None


def _unset_what_means_nothing() -> None:
    """Remove variables from the environment of this process that only state the default and that the SDK for Python
    refuses. Source: the specification of the variables, in which an empty value counts as unset, and `none` is a
    compression.
    """
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        value = os.environ[name].strip().lower()
        if not value or (name.endswith("_COMPRESSION") and value == "none"):
            del os.environ[name]


def begin_request(
    tracer: Tracer | None, headers: Mapping[str, str], method: str, request_id: str, received_s: float
) -> tuple[Context, Span | None]:
    """Read the trace context that a client sends, and begin a span below it. `headers`: by lower-case name.
    `received_s`: by perf_counter.

    Returns the context for work of this request (without a tracer, the client's own) and the span, to be ended by
    `end_request`.
    """
    context, span = NONE, None
    if "traceparent" in headers and (tracer is None or tracer.propagates):
        context = of_headers(headers["traceparent"], headers.get("tracestate", ""))
    if tracer is not None:
        shown_method = method if method in _METHODS else "_OTHER"
        own = {"http.request.method": shown_method, "sie.request_id": request_id}
        start_ns = time.time_ns() - round((time.perf_counter() - received_s) * 1e9)
        span = tracer.begin(shown_method, context, kind="server", start_ns=start_ns, attributes=own)
        context = span.context
    set_current(context)  # also an empty one: a pipelined request begins in the task of the request before it
    return context, span


def end_request(span: Span, what: str, status: int, code: str = "") -> None:
    """The response was sent. `what` was asked for, and `code` is the error, if any. None of these may come from a
    client.
    """
    span.rename(f"{span.name} {what}")
    span.set({"http.response.status_code": status})
    if status >= _FAULT:
        span.fail(code or str(status))
    elif code:
        span.set({"error.type": code})
    span.end()


def of_headers(traceparent: str, tracestate: str) -> Context:
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
    """From now on this task, and the tasks that it starts, work for the request of this context."""
    _current.set(trace_id_of(context.traceparent))


def current_trace_id() -> str | None:
    """The sampled trace that this task works for, 32 hex digits; else None."""
    return _current.get()
