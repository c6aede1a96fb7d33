"""Spans of traces, with the OpenTelemetry SDK. This module is imported only if tracing is on.

    Span.end ──► queue of 2,048 spans (the oldest are dropped) ──► a separate thread ──► collector, console or nowhere

Only `Tracer.close` waits for a collector, for at most FLUSH_S + GIVE_UP_S. The SDK itself reads environment variables
that `settings.Tracing` does not have: OTEL_BSP_*, OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _COMPRESSION and _TIMEOUT,
OTEL_RESOURCE_ATTRIBUTES, and the limits of spans.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal
from urllib.parse import urlsplit

from opentelemetry import context, trace
from opentelemetry.exporter.otlp.proto.grpc import exporter as grpc_exporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sie_contracts import __version__
from sie_contracts.settings import Tracing, public_url
from sie_contracts.wire.trace_context import NONE, Context
from sie_runtime.current_trace import STAGE
from sie_runtime.process import Trouble

GIVE_UP_S = 0.5  # seconds that `close` waits after it has shut down the exporters
FLUSH_S = 1.0  # seconds in which the last spans must be exported; `sie serve` waits only 3 s for the end of a worker
Value = str | int | float | bool
Kind = Literal["server", "consumer", "internal"]

_headers = TraceContextTextMapPropagator()
_logger = logging.getLogger("sie.tracing")


class Span:
    """Span of a trace. If the span is not sampled, it has only a trace context.

    The times of a span are monotonic times plus an offset to the wall clock. The offset is measured when the span is
    created, so a later change of the wall clock has no effect.
    """

    __slots__ = ("_ended", "_offset_ns", "_span", "_tracer", "is_recording", "name")

    def __init__(self, tracer: trace.Tracer, span: trace.Span, name: str) -> None:
        self.name = name
        self._tracer = tracer
        self._span = span
        self._ended = False
        self._offset_ns = time.time_ns() - time.perf_counter_ns()
        self.is_recording = span.is_recording()

    @property
    def context(self) -> Context:
        """Return the trace context for child spans, computed on demand to save a quarter of a span's time."""
        written: dict[str, str] = {}
        _headers.inject(written, trace.set_span_in_context(self._span, context.Context()))
        return Context(written.get("traceparent", ""), written.get("tracestate", ""))

    @property
    def trace_id(self) -> str | None:
        """Return the trace id as 32 hex digits; None if the trace is not sampled, so that no collector stores it."""
        return trace.format_trace_id(self._span.get_span_context().trace_id) if self.is_recording else None

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        self.name = name
        self._span.update_name(name)

    def fail(self, code: str) -> None:
        """Mark the span as failed with an error code."""
        self._span.set_attribute("error.type", code)
        self._span.set_status(trace.StatusCode.ERROR)

    def ns_before(self, seconds: float) -> int:
        """Return the time `seconds` ago by the clock of this span, in nanoseconds since 1970."""
        return time.perf_counter_ns() + self._offset_ns - round(seconds * 1e9)

    def part(
        self, name: str, start_ns: int, ms: float, *, stage: str = "", attributes: Mapping[str, Value] | None = None
    ) -> int:
        """Add a finished child span from `start_ns` with a duration of `ms` milliseconds, and return its end in ns."""
        end_ns = start_ns + round(ms * 1e6)
        if self.is_recording:
            own = {**(attributes or {}), **({STAGE: stage} if stage else {})}
            parent = trace.set_span_in_context(self._span, context.Context())
            self._tracer.start_span(name, parent, attributes=own, start_time=start_ns).end(end_ns)
        return end_ns

    def lead_to(self, span: Span) -> None:
        """Add a link from this span to `span`. A repeated request that takes over the running work of an earlier one
        links to the span of the earlier request.
        """
        self._span.add_link(span._span.get_span_context())

    def end(self, end_ns: int | None = None) -> None:
        """End the span at `end_ns`, by default now. Further calls have no effect."""
        if not self._ended:
            self._ended = True
            self._span.end(self.ns_before(0) if end_ns is None else end_ns)


class Tracer:
    """Creates the spans of one component. A thread exports them until `close`. All methods are thread-safe."""

    def __init__(self, settings: Tracing, component: str, instance: str = "") -> None:
        resource = Resource.create(
            {
                "service.name": settings.service_name,
                "service.version": __version__,
                "sie.component": component,
                "service.instance.id": f"{component}-{instance or socket.gethostname()}-{os.getpid()}",
            }
        )
        # with shutdown_on_exit, the provider would wait for an unreachable collector when the interpreter exits
        self._provider = TracerProvider(_sampler(settings), resource, shutdown_on_exit=False)
        self.propagates = settings.propagates
        self._exporters = [_exporter(name, settings) for name in settings.exporters]
        for exporter in self._exporters:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(f"sie.{component}", __version__)

    def begin(
        self,
        name: str,
        parent: Context = NONE,
        *,
        kind: Kind = "internal",
        links: Iterable[Span] = (),
        start_ns: int | None = None,
        attributes: Mapping[str, Value] | None = None,
    ) -> Span:
        """Return a new span, which the caller must end. Without a valid `parent`, this span begins a new trace."""
        above = _headers.extract(parent._asdict(), context.Context())
        linked = [trace.Link(span._span.get_span_context()) for span in links]
        span_kind = trace.SpanKind[kind.upper()]
        return Span(self._tracer, self._tracer.start_span(name, above, span_kind, attributes, linked, start_ns), name)

    def close(self) -> None:
        """Export the remaining spans, for at most FLUSH_S; then wait at most GIVE_UP_S for the exporters to stop. Spans
        that end after this call are dropped.
        """
        flushing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_S)
        if flushing.is_alive():
            for exporter in self._exporters:
                exporter.shutdown()  # an exporter that waits for its next attempt stops waiting
            _logger.warning("the last spans were not exported within %g s and are dropped", FLUSH_S)
            flushing.join(GIVE_UP_S)


def _sampler(settings: Tracing) -> Sampler:
    samplers: dict[str, Sampler] = {
        "always_on": ALWAYS_ON,
        "always_off": ALWAYS_OFF,
        "traceidratio": TraceIdRatioBased(settings.rate),
    }
    own = samplers[settings.sampler.removeprefix("parentbased_")]
    return ParentBased(own) if settings.sampler.startswith("parentbased_") else own


def _exporter(name: str, settings: Tracing) -> SpanExporter:
    if name == "console":
        return ConsoleSpanExporter(out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + "\n")
    return _SpanCollector(settings.endpoint, settings.protocol)


class _LastLog(logging.Filter):
    """Filter that drops the exporter's log messages and stores the last one, which `_SpanCollector` logs."""

    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.last = record.getMessage()
        return False


_last_log = _LastLog()


class _SpanCollector(SpanExporter):
    """Exporter to a collector over gRPC or HTTP. It logs a lasting failure once, not at each attempt."""

    def __init__(self, endpoint: str, protocol: str) -> None:
        self._trouble = Trouble(
            _logger, f"spans are dropped: the collector at {public_url(endpoint)} does not accept them"
        )
        # user name and password of the URL; the exporter's messages quote them, and logged messages get `***` instead
        self._credentials = urlsplit(endpoint).netloc.rpartition("@")[0]
        self._inner: SpanExporter
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as over_grpc

            logging.getLogger(grpc_exporter.__name__).addFilter(_last_log)
            self._inner = over_grpc.OTLPSpanExporter(endpoint)
        else:
            from opentelemetry.exporter.otlp.proto.http import trace_exporter as over_http

            logging.getLogger(over_http.__name__).addFilter(_last_log)
            self._inner = over_http.OTLPSpanExporter(endpoint)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._trouble.passed()
        else:
            reason = _last_log.last or "no reason was given"
            if self._credentials:
                reason = reason.replace(self._credentials, "***")
            self._trouble.met(ConnectionError(reason))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()
