"""The line in the gateway's log and the spans of one request. Nothing of it comes from a body or a credential: names of
the catalogue, codes of the contract, numbers, the client's trace context, and ids that were made here or have the form
of one.

The log has one line for each inference request. Of those that were refused without having run only the first ones of
each interval have a line, and then one line says how many more there were: overload must not become an overload of the
log. Model, request and trace are fields of the record.

    encode 200 in 9.3 ms items=3 tokens=24 queue_time=2.104 preprocess_time=0.312 ... unattributed_time=1.088
    512 more requests were refused in 10 s: encode 503 code=QUEUE_FULL 500, score 503 code=QUEUE_FULL 12

A trace has a span of the request, what publishing it took, and how long each of its chunks was in the queue. The worker
reports its own stages below the span of the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from sie_contracts.wire.messages import WorkResult
from sie_gateway.inference.call import Call
from sie_gateway.inference.results import STAGES
from sie_runtime import tracing

if TYPE_CHECKING:
    from sie_runtime.spans import Tracer

REFUSED = frozenset({"QUEUE_FULL", "RATE_LIMITED"})  # before anything of the request ran
INTERVAL_S = 10.0
MAX_REFUSED_LINES = 20  # in an interval
_logger = logging.getLogger("sie.gateway")
_of_stages = itemgetter(*STAGES)
_STAGES = " ".join(f"{name}=%s" for name in STAGES)
_POLLED = ("/health", "/v1/scaling/")  # by machines, every few seconds
_TIMED = (*STAGES, "total_time")


class RequestLogger:
    """Owned by the gateway's loop."""

    def __init__(self) -> None:
        self._told = 0  # lines of refused requests in this interval
        self._left_out: Counter[str] = Counter()  # by endpoint, status and code, which all come from fixed sets
        self._timer: asyncio.TimerHandle | None = None  # set while an interval runs

    def ended(self, call: Call, endpoint: str, status: int, seconds: float) -> None:
        """Log a request whose answer was sent, or count it."""
        if call.code in REFUSED:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._summarise)
            self._told += 1
            if self._told > MAX_REFUSED_LINES:
                self._left_out[f"{endpoint} {status} code={call.code}"] += 1
                return
        log_request(call, endpoint, status, seconds)

    def _summarise(self) -> None:
        left_out, self._left_out, self._told, self._timer = self._left_out, Counter(), 0, None
        if left_out:
            kinds = ", ".join(f"{kind} {count}" for kind, count in left_out.most_common())
            _logger.info("%d more requests were refused in %.0f s: %s", left_out.total(), INTERVAL_S, kinds)


def log_request(call: Call, endpoint: str, status: int, seconds: float) -> None:
    """Log a request whose answer was sent, `seconds` after its head came. Stages and tokens only where it ran."""
    if not _logger.isEnabledFor(logging.INFO):
        return
    words = [f"{endpoint} {status} in {seconds * 1000:.1f} ms"]
    if call.code:
        words.append(f"code={call.code}")
    if call.infer_request is not None:
        words.append(f"items={len(call.infer_request.items)}")
    if call.finished is not None:
        words.append(f"tokens={call.finished.usage['total_tokens']}")
        words.append(_STAGES % _of_stages(call.finished.reported_times or call.finished.timing(call.received_s)))
    model = call.labels.get("model") or (call.resolved.canonical if call.resolved is not None else None)
    extra = {"request_id": call.id, "model": model, "latency_ms": round(seconds * 1000, 2)}
    _logger.info(" ".join(words), extra=extra)


def begin_trace(tracer: Tracer | None, call: Call, method: str) -> None:
    """Take over the client's trace context, and begin a span where this gateway traces."""
    own = None if call.path.startswith(_POLLED) else tracer
    call.context, call.span = tracing.begin_request(own, call.headers, method, call.id, call.received_s)


def trace_chunks(
    call: Call, published_s: float, publish_ms: float, results: Sequence[WorkResult], waits_ms: Sequence[float]
) -> None:
    """The chunks were published at `published_s` (perf_counter), the first ones were stored `publish_ms` later; each
    result arrived `waits_ms` after `published_s`.
    """
    span = call.span
    if span is None or not span.is_recording:
        return
    published_ns = span.ns_before(time.perf_counter() - published_s)
    span.part("publish", published_ns, publish_ms)
    for result, wait_ms in zip(results, waits_ms, strict=True):
        own: dict[str, str | int] = {"sie.chunk": result.chunk, "sie.worker": result.worker}
        span.part("queue", published_ns, max(0.0, wait_ms - result.stages.worker_ms), stage="queue", attributes=own)


def end_trace(call: Call, endpoint: str, status: int) -> None:
    """The answer was sent, with that status."""
    span = call.span
    if span is None:
        return
    if span.is_recording:
        span.set({f"sie.{name}": value for name, value in call.labels.items() if value})
        if call.finished is not None and call.finished.reported_times:
            span.set({f"sie.timing.{name}": call.finished.reported_times[name] for name in _TIMED})
            if written_ms := call.finished.written_ms:
                span.part("reply", span.ns_before(written_ms / 1000), written_ms, stage="postprocess")
            if call.finished.last is not None:
                span.set({"sie.timing.chunk": call.finished.last.chunk})
    tracing.end_request(span, endpoint, status, call.code)
