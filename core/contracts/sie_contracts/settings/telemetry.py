"""Settings of logs and traces."""

from __future__ import annotations

from dataclasses import dataclass

from sie_contracts.settings.rows import row
from sie_contracts.settings.values import BOOL, COLLECTOR, PROTOCOL, TEXT, choice, choices, number


@dataclass(frozen=True)
class Tracing:
    """Settings of tracing. `exporters`: destinations of spans, otlp and console. `protocol` and `endpoint`: for otlp
    only. `rate`: for the samplers traceidratio and parentbased_traceidratio only. `propagates`: whether spans continue
    the trace of the client.
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
    log_json: bool = row(False, "SIE_LOG_JSON", "all", BOOL, "One JSON object per log line.")
    tracing_enabled: bool = row(
        False, "SIE_TRACING_ENABLED", "all", BOOL, "OpenTelemetry tracing of requests, from HTTP to the forward pass."
    )
    otel_sdk_disabled: bool = row(
        False, "OTEL_SDK_DISABLED", "all", BOOL, "Whether tracing is off, whatever SIE_TRACING_ENABLED says."
    )
    otel_service_name: str = row(
        "sie-server",
        "OTEL_SERVICE_NAME",
        "all",
        TEXT,
        "Service name in traces. If unset, a service.name in OTEL_RESOURCE_ATTRIBUTES takes precedence over the default.",
    )
    otel_traces_exporter: tuple[str, ...] = row(
        ("otlp",), "OTEL_TRACES_EXPORTER", "all", choices("otlp", "console", "none"), "Span exporters."
    )
    otel_exporter_otlp_endpoint: str = row(
        "http://localhost:4317",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "all",
        COLLECTOR,
        "Address of the collector. If unset, http/protobuf uses port 4318. For http/protobuf /v1/traces is appended.",
    )
    otel_exporter_otlp_traces_endpoint: str | None = row(
        None,
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "all",
        COLLECTOR,
        "Address of the collector for traces, used unchanged. Default: OTEL_EXPORTER_OTLP_ENDPOINT.",
    )
    otel_exporter_otlp_protocol: str = row(
        "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL", "all", PROTOCOL, "Protocol to the collector."
    )
    otel_exporter_otlp_traces_protocol: str | None = row(
        None,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        "all",
        PROTOCOL,
        "Protocol to the collector for traces. Default: OTEL_EXPORTER_OTLP_PROTOCOL.",
    )
    otel_traces_sampler: str = row(
        "always_on",
        "OTEL_TRACES_SAMPLER",
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
    otel_traces_sampler_arg: float = row(
        1.0, "OTEL_TRACES_SAMPLER_ARG", "all", number(0, 1), "Share of traces that traceidratio samples."
    )
    otel_propagators: tuple[str, ...] = row(
        ("tracecontext", "baggage"),
        "OTEL_PROPAGATORS",
        "all",
        choices("tracecontext", "baggage", "none"),
        "If the list has tracecontext, the W3C trace context of clients is used. Baggage is not read.",
    )
