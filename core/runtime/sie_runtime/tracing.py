"""Tracing of every process. If tracing is off, OpenTelemetry is not imported, and a span costs a comparison with None.

    client ──traceparent──► gateway: request ──WorkItem──► sidecar: work item ──RunBatch──► adapter: device stages
                                                                   └─► batch, linked to its work items ──► forward

The trace context has the W3C format and is stored in a `Context`. Logs and exemplars read the trace id from `TRACE_ID`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sie_contracts.settings import SettingError, Tracing
from sie_contracts.wire.trace_context import NONE, Context
from sie_runtime.current_trace import context_from_headers, set_current

if TYPE_CHECKING:
    from sie_runtime.spans import Span, Tracer


_INSTALL = "pip install 'sie-cluster[tracing]', or switch tracing off"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FAULT = 500  # lowest HTTP status for which the span of a request counts as failed
_logger = logging.getLogger("sie.tracing")


def start(settings: Tracing, component: str, instance: str = "") -> Tracer | None:
    """Return the tracer of a component; None if tracing is off. Call this after a fork, because the tracer starts a
    thread, which a fork would not copy.

    `instance`: name that distinguishes components of the same name; by default the host name. Raises SettingError if
    OpenTelemetry is not installed. If the SDK refuses one of its environment variables, a warning is logged and tracing
    stays off.
    """
    if not settings.enabled:
        return None
    _unset_what_means_nothing()
    try:
        # imported after the unusable variables were removed, because the SDK reads its variables at import
        from sie_runtime import spans

        return spans.Tracer(settings, component, instance)
    except ImportError as error:
        raise SettingError("SIE_TRACING_ENABLED", f"OpenTelemetry is not installed ({error}): {_INSTALL}") from error
    except Exception as error:  # noqa: BLE001  the SDK's exceptions have no common base; they must not end the process
        _logger.warning(
            "tracing stays off: OpenTelemetry refuses one of its variables: %s: %s", type(error).__name__, error
        )
        return None


def _unset_what_means_nothing() -> None:
    """Remove environment variables with values that OpenTelemetry's specification treats as not set, but its SDK
    refuses: an empty value, and the compression `none`.
    """
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        value = os.environ[name].strip().lower()
        if not value or (name.endswith("_COMPRESSION") and value == "none"):
            del os.environ[name]


def begin_request(
    tracer: Tracer | None, headers: Mapping[str, str], method: str, request_id: str, received_s: float
) -> tuple[Context, Span | None]:
    """Begin the span of a request, as a child of the client's span if the headers have a valid trace context and the
    tracer propagates it. `headers`: by lower-case name. `received_s`: time of arrival, by perf_counter.

    Returns the context for the work of this request, and the span, which `end_request` must end. Without a tracer, the
    context is the client's (empty if the client sent none) and the span is None.
    """
    context, span = NONE, None
    if "traceparent" in headers and (tracer is None or tracer.propagates):
        context = context_from_headers(headers["traceparent"], headers.get("tracestate", ""))
    if tracer is not None:
        shown_method = method if method in _METHODS else "_OTHER"
        own = {"http.request.method": shown_method, "sie.request_id": request_id}
        start_ns = time.time_ns() - round((time.perf_counter() - received_s) * 1e9)
        span = tracer.begin(shown_method, context, kind="server", start_ns=start_ns, attributes=own)
        context = span.context
    # An empty context must be set too: the task of a pipelined request is created in the task of the previous request,
    # and would inherit the context of that task.
    set_current(context)
    return context, span


def end_request(span: Span, operation: str, status: int, code: str = "") -> None:
    """End the span of a request, whose response was sent. `operation` and the error `code` must contain no text of the
    client.
    """
    span.rename(f"{span.name} {operation}")
    span.set({"http.response.status_code": status})
    if status >= _FAULT:
        span.fail(code or str(status))
    elif code:
        span.set({"error.type": code})
    span.end()
