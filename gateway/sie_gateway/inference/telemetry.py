"""Trace spans of one request. The gateway uses this module only if the gateway or the client traces. Spans contain no
data from a body or a credential.

A trace has a span for the request, for its publishing, for the time of each chunk in the queue, and for the building of
the reply. The worker reports its own stages as child spans of the request's span.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sie_contracts.stages import STAGES
from sie_contracts.wire.messages import WorkResult
from sie_gateway.inference.call import Call
from sie_runtime import tracing

if TYPE_CHECKING:
    from sie_runtime.spans import Span, Tracer

# machines poll these paths every few seconds, so they have no trace
_POLLED = ("/health", "/v1/scaling/", "/v1/pools/assignments")
_TIMED = (*STAGES, "total_time")


def begin_trace(tracer: Tracer | None, call: Call, method: str) -> None:
    """Read the client's trace context from the headers of the call, and begin a span if this gateway traces (`tracer`)
    and the path is not in `_POLLED`.
    """
    own = None if call.path.startswith(_POLLED) else tracer
    call.context, call.span = tracing.begin_request(own, call.headers, method, call.id, call.received_s)


def trace_chunks(
    span: Span, published_s: float, publish_ms: float, results: Sequence[WorkResult], waits_ms: Sequence[float]
) -> None:
    """Add a span for the publishing of chunks, and a span for the time of each chunk in the queue. `published_s`: start
    of the publishing (perf_counter). `publish_ms`: time until the broker stored the first chunks. `waits_ms`: for each
    result, time from `published_s` to its arrival.
    """
    if not span.is_recording:
        return
    published_ns = span.ns_before(time.perf_counter() - published_s)
    span.part("publish", published_ns, publish_ms)
    for result, wait_ms in zip(results, waits_ms, strict=True):
        own: dict[str, str | int] = {"sie.chunk": result.chunk, "sie.worker": result.worker}
        span.part("queue", published_ns, max(0.0, wait_ms - result.stages.worker_ms), stage="queue", attributes=own)


def end_trace(call: Call, span: Span, endpoint: str, status: int) -> None:
    """End the span of a request after its reply was sent with this status."""
    if span.is_recording:
        span.set({f"sie.{name}": value for name, value in call.labels.items() if value})
        if call.finished is not None and call.finished.reported_times:
            span.set({f"sie.timing.{name}": call.finished.reported_times[name] for name in _TIMED})
            if written_ms := call.finished.written_ms:
                span.part("reply", span.ns_before(written_ms / 1000), written_ms, stage="postprocess")
            if call.finished.last is not None:
                span.set({"sie.timing.chunk": call.finished.last.chunk})
    tracing.end_request(span, endpoint, status, call.code)
