"""Trace spans of a worker. Each work item of a traced request has a span below the span of the request, and its stages
are spans below its own span. A batch with traced work items has a span below the span of the first of these items, with
links to the spans of all of them.

The adapter adds spans of its steps below the batch, and spans `inference` and `postprocess` below each work item.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from sie_broker import Delivery
from sie_contracts.errors import SIEError
from sie_contracts.wire.messages import BatchNote, Failed, Outcome, Stages, WorkItem
from sie_contracts.wire.trace_context import Context

if TYPE_CHECKING:
    from sie_runtime.spans import Span, Tracer
    from sie_sidecar.in_flight import InFlight

# names of the spans of a work item's stages, in the order in which the stages run
_STAGES = ("fetch", "load", "preprocess", "batch_wait", "device_wait")


def of_work(tracer: Tracer, delivery: Delivery, item: WorkItem) -> Span | None:
    """Begin the span of a delivered work item. Return None if its request is not traced."""
    if not item.traceparent:
        return None
    own: dict[str, str | int] = {
        "sie.request_id": item.request,
        "sie.chunk": item.chunk,
        "sie.model": item.model,
        "sie.operation": item.operation,
        "sie.delivery": delivery.delivered,
        "messaging.system": "nats",
    }
    return tracer.begin("work", Context(item.traceparent, item.tracestate), kind="consumer", attributes=own)


@contextlib.contextmanager
def batch(tracer: Tracer, jobs: Sequence[InFlight]) -> Iterator[Span | None]:
    """Context manager: yield the span of a batch of these work items, None if no item is traced, and end the span."""
    traced = [flight.span for flight in jobs if flight.span is not None and flight.span.is_recording]
    if not traced:
        yield None
        return
    span = tracer.begin("batch", traced[0].context, links=traced)
    try:
        yield span
    except BaseException as error:
        span.fail(error.code if isinstance(error, SIEError) else type(error).__name__)
        raise
    finally:
        span.end()


def describe_batch(span: Span, note: BatchNote, model: str) -> None:
    """Set the size of a batch as attributes of its span."""
    sizes = {"sie.batch.items": note.items, "sie.batch.chunks": note.chunks, "sie.batch.tokens": note.tokens}
    span.set({"sie.batch": note.id, "sie.model": model, **sizes})


def settled(span: Span, stages: Stages, outcomes: Sequence[Outcome], batch: str) -> None:
    """Set the stages and the outcome of a work item on its span, and end the span."""
    if span.is_recording:
        stage_times = msgspec.structs.asdict(stages)
        at_ns = span.ns_before(stages.worker_ms / 1000)
        for name in _STAGES:
            if stage_times[f"{name}_ms"] > 0:
                # in the timing that a client gets, these two are parts of `queue`; the other stages have the same names
                stage = "queue" if name in ("fetch", "device_wait") else name
                at_ns = span.part(name, at_ns, stage_times[f"{name}_ms"], stage=stage)
        span.set({f"sie.{name}": value for name, value in stage_times.items()})
        if batch:
            span.set({"sie.batch": batch})
        codes = [outcome.error.code for outcome in outcomes if isinstance(outcome, Failed)]
        if codes and len(codes) == len(outcomes):
            span.fail(codes[0])
    span.end()
