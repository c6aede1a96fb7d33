"""Settings of logs and traces."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import BOOL, COLLECTOR, PROTOCOL, TEXT, choice, choices, number


@dataclass(frozen=True)
class Tracing:
    """Settings of tracing. `exporters`: destinations of spans, `otlp` or `console`, or both. `protocol` and `endpoint`
    apply only to `otlp`. `rate`: share of traces that are sampled, only for the samplers `traceidratio` and
    `parentbased_traceidratio`. `propagates`: whether spans continue the trace of the client.
    """

    enabled: bool
    service_name: str
    exporters: tuple[str, ...]
    protocol: str
    endpoint: str
    sampler: str
    rate: float
    propagates: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class TelemetrySettings:
    log_json: bool = row(False, "all", BOOL, "Whether each log line is a JSON object.")
    tracing_enabled: bool = row(
        False, "all", BOOL, "Whether requests are traced with OpenTelemetry, from HTTP to the forward pass."
    )
    otel_sdk_disabled: bool = row(False, "all", BOOL, "Whether tracing is off, whatever SIE_TRACING_ENABLED says.")
    otel_service_name: str = row(
        "sie-server",
        "all",
        TEXT,
        "Service name in traces. If unset, a service.name in OTEL_RESOURCE_ATTRIBUTES takes precedence over the default.",
    )
    otel_traces_exporter: tuple[str, ...] = row(("otlp",), "all", choices("otlp", "console", "none"), "Span exporters.")
    otel_exporter_otlp_endpoint: str = row(
        "http://localhost:4317",
        "all",
        COLLECTOR,
        "Address of the collector. With http/protobuf, the default port is 4318, and /v1/traces is appended.",
    )
    otel_exporter_otlp_traces_endpoint: str | None = row(
        None,
        "all",
        COLLECTOR,
        "Address of the collector for traces, used unchanged. Default: OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    otel_exporter_otlp_protocol: str = row("grpc", "all", PROTOCOL, "Protocol to the collector.")
    otel_exporter_otlp_traces_protocol: str | None = row(
        None, "all", PROTOCOL, "Protocol to the collector for traces. Default: OTEL_EXPORTER_OTLP_PROTOCOL."
    )
    otel_traces_sampler: str = row(
        "always_on",
        "all",
        choice(
            "always_on",
            "always_off",
            "traceidratio",
            "parentbased_always_on",
            "parentbased_always_off",
            "parentbased_traceidratio",
        ),
        "Sampling strategy.",
    )
    otel_traces_sampler_arg: float = row(1.0, "all", number(0, 1), "Share of traces that traceidratio samples.")
    otel_propagators: tuple[str, ...] = row(
        ("tracecontext", "baggage"),
        "all",
        choices("tracecontext", "baggage", "none"),
        "Formats of trace context in requests. With tracecontext, spans continue the trace of the client. Baggage is not read.",
    )
