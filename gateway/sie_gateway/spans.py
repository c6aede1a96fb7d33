"""What a trace shows of a request at the gateway: the request, what publishing it took, and how long each of its chunks
was in the queue.

The worker's stages are below the request as well, told by the worker. Of what a client sends nothing is told but its
trace context.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sie_contracts.messages import WorkResult
from sie_gateway.call import Call
from sie_gateway.reply import STAGES
from sie_runtime import tracing

if TYPE_CHECKING:
    from sie_runtime.spans import Tracer

_POLLED = ("/health", "/v1/scaling/")  # by machines, every few seconds
_TOLD = (*STAGES, "total_time")


def begin(tracer: Tracer | None, call: Call, method: str) -> None:
    """Take up the client's context, and begin a span where this gateway traces."""
    own = None if call.path.startswith(_POLLED) else tracer
    call.context, call.span = tracing.begin_request(own, call.headers, method, call.id, call.received_s)


def ran(
    call: Call, published_s: float, publish_ms: float, results: Sequence[WorkResult], waits_ms: Sequence[float]
) -> None:
    """Its chunks were published at `published_s` (perf_counter), the first ones stored `publish_ms` later; each result
    came after its wait.
    """
    span = call.span
    if span is None or not span.is_recording:
        return
    published_ns = tracing.ns_before(time.perf_counter() - published_s)
    span.part("publish", published_ns, publish_ms)
    for result, wait_ms in zip(results, waits_ms, strict=True):
        own: dict[str, str | int] = {"sie.chunk": result.chunk, "sie.worker": result.worker}
        span.part("queue", published_ns, max(0.0, wait_ms - result.stages.worker_ms), stage="queue", attributes=own)


def end(call: Call, endpoint: str, status: int) -> None:
    """The answer has left, with that status."""
    span = call.span
    if span is None:
        return
    if span.is_recording:
        span.set({f"sie.{name}": value for name, value in call.labels.items() if value})
        if call.finished is not None and call.finished.told:
            span.set({f"sie.timing.{name}": call.finished.told[name] for name in _TOLD})
            if written_ms := call.finished.written_ms:
                span.part("reply", tracing.ns_before(written_ms / 1000), written_ms, stage="postprocess")
            if call.finished.last is not None:
                span.set({"sie.timing.chunk": call.finished.last.chunk})
    tracing.end_request(span, endpoint, status, call.code)
