"""Traces as every process has them. Off, nothing of OpenTelemetry is imported here and all that is done is to ask `is
None`.

    client ──traceparent──► gateway: the request ──WorkItem──► sidecar: its work ──RunBatch──► adapter: its stages on
    the device
                                                                     └─► a batch, linked to the work in it ──► its
                                                                     forward pass

The context travels as W3C writes it, in `Context`. `TRACE_ID` is the one place from which logs and exemplars
have the trace.
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


_INSTALL = "pip install 'sie-cluster[tracing]', or leave it off"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FAULT = 500  # from this status on, the span of a server counts as failed
_logger = logging.getLogger("sie.tracing")


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
        context = context_from_headers(headers["traceparent"], headers.get("tracestate", ""))
    if tracer is not None:
        shown_method = method if method in _METHODS else "_OTHER"
        own = {"http.request.method": shown_method, "sie.request_id": request_id}
        start_ns = time.time_ns() - round((time.perf_counter() - received_s) * 1e9)
        span = tracer.begin(shown_method, context, kind="server", start_ns=start_ns, attributes=own)
        context = span.context
    set_current(context)  # also an empty one: a pipelined request begins in the task of the request before it
    return context, span


def end_request(span: Span, operation: str, status: int, code: str = "") -> None:
    """The response was sent. `operation` was asked for, and `code` is the error, if any. None of these may come from a
    client.
    """
    span.rename(f"{span.name} {operation}")
    span.set({"http.response.status_code": status})
    if status >= _FAULT:
        span.fail(code or str(status))
    elif code:
        span.set({"error.type": code})
    span.end()
