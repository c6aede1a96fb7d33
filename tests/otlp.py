"""A collector for tests: an OTLP receiver over real gRPC that keeps every span, and the raw bytes of every export."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

WAIT_S = 60.0  # far above the expected time, so that a busy machine does not fail a test


@dataclass(frozen=True)
class Seen:
    """One received span. Ids are hex digits, times nanoseconds since 1970, links (trace, span)."""

    name: str
    trace: str
    id: str
    parent: str
    state: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    is_error: bool
    resource: dict[str, Any]

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6

    @property
    def component(self) -> str:
        return str(self.resource["sie.component"])


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector over gRPC on a free port. It listens within a context manager."""

    def __init__(self) -> None:
        self.raw = b""
        self._spans: list[Seen] = []
        self._changed = threading.Condition()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        with self._changed:
            self.raw += request.SerializeToString()
            self._spans += _seen(request)
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Seen]:
        with self._changed:
            return list(self._spans)

    def of(self, trace: str) -> list[Seen]:
        """Return all spans of a trace so far."""
        return [span for span in self.spans if span.trace == trace]

    def until(self, condition: Callable[[list[Seen]], Any], description: str) -> Any:
        """Wait until a condition of the spans is true, and return its value. Raise AssertionError with the description
        at the time-out.
        """
        end_s = time.monotonic() + WAIT_S
        with self._changed:
            while not (value := condition(self._spans)):
                left_s = end_s - time.monotonic()
                assert left_s > 0, (
                    f"not within {WAIT_S} s: {description}; there are {sorted({span.name for span in self._spans})}"
                )
                self._changed.wait(left_s)
            return value


def _seen(request: Any) -> list[Seen]:
    return [
        Seen(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.trace_state,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _values(span.attributes),
            tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            span.status.code == span.status.STATUS_CODE_ERROR,
            _values(resource_span.resource.attributes),
        )
        for resource_span in request.resource_spans
        for scope in resource_span.scope_spans
        for span in scope.spans
    ]


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in attributes}


class HttpCollector:
    """A collector over HTTP. `seen` has for each export: path, headers by lower-case names, names of the spans."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str], list[str]]] = []
        requests = self.seen

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["content-length"]))
                request = trace_service_pb2.ExportTraceServiceRequest.FromString(sent)
                names = [
                    span.name for group in request.resource_spans for scope in group.scope_spans for span in scope.spans
                ]
                requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}, names))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Write nothing to standard error."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> HttpCollector:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
