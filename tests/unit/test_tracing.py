"""Effects of the tracing settings, in one process with a fake adapter, with a real collector over gRPC; and the
limits of a trace.

A trace down to the forward pass is in tests/system/test_tracing.py.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from inprocess import GatewayProcess, InProcess
from opentelemetry.sdk.trace.export import SpanExportResult
from otlp import Collector, HttpCollector, Seen

from sie_cli.serve.ports import free_port
from sie_contracts.settings import SettingError, load
from sie_contracts.wire.trace_context import NONE
from sie_gateway.inference.call import Call
from sie_gateway.inference.results import RequestResult
from sie_runtime import current_trace, spans, tracing

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE = CLIENT.split("-")[1]
UNSAMPLED = CLIENT[:-2] + "00"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # a variable of the SDK: milliseconds between two exports
    with Collector() as collector:
        yield collector


@pytest.fixture(autouse=True)
def nothing_stays_current() -> Iterator[None]:
    """Clear the current trace: a test that begins a request does so in the context of all tests of its process."""
    yield
    current_trace.set_current(NONE)


def settings_of(**environ: str) -> tracing.Tracing:
    return load(environ=environ).settings.tracing


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def traced(cluster: InProcess, **environ: str) -> GatewayProcess:
    """Return a gateway with a sidecar, both with these settings and with tracing on."""
    own = {"SIE_TRACING_ENABLED": "true", **environ}
    gateway = await cluster.gateway(**own)
    await cluster.sidecar(**own)
    return gateway


async def until(collector: Collector, name: str, count: int = 1) -> list[Seen]:
    """Return all spans once there are `count` of that name."""

    def enough(spans: list[Seen]) -> list[Seen]:
        return list(spans) if sum(span.name == name for span in spans) >= count else []

    return await asyncio.to_thread(collector.until, enough, f"{count} of {name}")


async def test_enabled_a_request_is_one_trace_and_disabled_the_collector_gets_nothing(
    tmp_path: Path, collector: Collector
) -> None:
    """SIE_TRACING_ENABLED."""
    async with InProcess(made(tmp_path / "on")) as cluster:
        gateway = await traced(cluster, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url)
        answer = await gateway.encode("a")
        trace = answer.headers["x-trace-id"]
        spans = await until(collector, "POST encode")
        await until(collector, "batch")
    spans = [span for span in collector.of(trace) if span.name != "publish"]
    by_name = {span.name: span for span in spans}
    (root,) = [span for span in spans if not span.parent]
    assert root.name == "POST encode"
    assert by_name["work"].parent == by_name["queue"].parent == root.id
    assert by_name["batch"].parent == by_name["work"].id
    assert {span.component for span in spans} == {"gateway", "sidecar"}
    assert root.attributes["sie.request_id"] == answer.headers["x-sie-request-id"]
    before = len(collector.spans)
    async with InProcess(made(tmp_path / "off")) as cluster:
        own = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        gateway = await cluster.gateway(**own)
        adapter = await cluster.adapter()
        await cluster.sidecar(adapter, **own)
        answer = await gateway.encode("a", traceparent=CLIENT, tracestate="vendor=1")
        assert "x-trace-id" not in answer.headers
        batch = adapter.batches[-1]
        # the context of the client is passed on without spans
        assert (batch.traceparent, batch.tracestate, batch.groups[0].traceparent) == (CLIENT, "vendor=1", "")
    assert len(collector.spans) == before


async def test_spans_are_told_by_the_service_name_and_components_by_their_own(
    tmp_path: Path, collector: Collector
) -> None:
    """OTEL_SERVICE_NAME."""
    async with InProcess(tmp_path) as cluster:
        gateway = await traced(cluster, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_SERVICE_NAME="search")
        await gateway.encode("a")
        await until(collector, "POST encode")
        spans = await until(collector, "batch")
    assert {span.resource["service.name"] for span in spans} == {"search"}
    instances = {span.component: span.resource["service.instance.id"] for span in spans}
    assert instances.keys() == {"gateway", "sidecar"}
    assert instances["sidecar"].startswith("sidecar-w0-")
    assert settings_of().service_name == "sie-server"


async def test_spans_go_to_the_collector_to_the_console_or_nowhere(
    tmp_path: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    """OTEL_TRACES_EXPORTER."""
    outputs = {}
    for exporter in ("console", "none"):
        async with InProcess(made(tmp_path / exporter)) as cluster:
            gateway = await traced(cluster, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_TRACES_EXPORTER=exporter)
            answer = await gateway.encode("a", traceparent=CLIENT)
            assert answer.headers["x-trace-id"] == TRACE
        outputs[exporter] = capsys.readouterr().out
    assert TRACE in outputs["console"]
    assert TRACE not in outputs["none"]
    assert collector.spans == []


async def test_the_named_collector_gets_the_spans_and_one_that_is_away_hurts_nobody(
    tmp_path: Path, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    """OTEL_EXPORTER_OTLP_ENDPOINT."""
    with Collector() as named_collector:
        async with InProcess(tmp_path) as cluster:
            gateway = await traced(cluster, OTEL_EXPORTER_OTLP_ENDPOINT=named_collector.url)
            assert (await gateway.encode("a")).status_code == 200
            await until(named_collector, "batch")
    assert collector.spans == []
    async with InProcess(made(tmp_path / "away")) as cluster:
        gateway = await traced(cluster, OTEL_EXPORTER_OTLP_ENDPOINT=f"http://user:secret@127.0.0.1:{free_port()}")
        for _ in range(20):
            assert (await gateway.encode("a")).status_code == 200
    assert "secret" not in caplog.text


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_the_log_of_a_collector_that_is_away_has_no_credentials_of_its_url(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://user:secret@127.0.0.1:1"
    exporter = spans._SpanCollector(url, protocol)
    reasons: list[str] = []
    monkeypatch.setattr(exporter._trouble, "met", lambda error: reasons.append(str(error)))

    def fails(_spans: Any) -> SpanExportResult:
        spans._last_log.last = f"Failed to export traces to {url.removeprefix('http://')}: UNAVAILABLE"
        return SpanExportResult.FAILURE

    monkeypatch.setattr(exporter._inner, "export", fails)
    assert exporter.export([]) is SpanExportResult.FAILURE
    assert reasons == ["Failed to export traces to ***@127.0.0.1:1: UNAVAILABLE"]
    exporter.shutdown()


@pytest.mark.parametrize("client", [None, CLIENT, UNSAMPLED])
async def test_the_sampler_decides_and_every_process_decides_alike(
    tmp_path: Path, collector: Collector, client: str | None
) -> None:
    """OTEL_TRACES_SAMPLER: a `parentbased_` sampler decides as the client did, if the client did."""
    headers = {} if client is None else {"traceparent": client}
    by_client = {"parentbased_always_off": client == CLIENT, "parentbased_always_on": client != UNSAMPLED}
    expected = {"always_on": True, "always_off": False, **by_client}
    for sampler, is_sampled in expected.items():
        tracer = tracing.start(
            settings_of(SIE_TRACING_ENABLED="true", OTEL_TRACES_EXPORTER="none", OTEL_TRACES_SAMPLER=sampler), "gateway"
        )
        context, span = tracing.begin_request(tracer, headers, "GET", "r", 0.0)
        assert span is not None
        assert (span.is_recording, span.trace_id is not None) == (is_sampled, is_sampled)
        assert current_trace.trace_id_of(context.traceparent) == (span.trace_id if is_sampled else None)
        assert current_trace.TRACE_ID.get() == span.trace_id
    async with InProcess(made(tmp_path / "off")) as cluster:
        gateway = await traced(
            cluster, OTEL_EXPORTER_OTLP_ENDPOINT=collector.url, OTEL_TRACES_SAMPLER="parentbased_always_off"
        )
        answer = await gateway.encode("a", **headers)
        assert ("x-trace-id" in answer.headers) == (client == CLIENT)
        if client == CLIENT:
            await until(collector, "batch")
    assert bool(collector.spans) == (client == CLIENT)


@pytest.mark.parametrize(("rate", "least", "most"), [("0", 0, 0), ("0.1", 50, 160), ("1.0", 1000, 1000)])
def test_the_rate_is_the_share_of_traces_that_are_sampled(rate: str, least: int, most: int) -> None:
    """OTEL_TRACES_SAMPLER_ARG."""
    own = {"SIE_TRACING_ENABLED": "true", "OTEL_TRACES_EXPORTER": "none", "OTEL_TRACES_SAMPLER": "traceidratio"}
    tracers = [tracing.start(settings_of(**own, OTEL_TRACES_SAMPLER_ARG=rate), name) for name in ("gateway", "sidecar")]
    assert all(tracers)
    above, below = tracers
    spans = [above.begin("a") for _ in range(1000)]
    assert least <= sum(span.is_recording for span in spans) <= most
    assert all(below.begin("b", span.context).is_recording == span.is_recording for span in spans)


def test_a_disabled_sdk_traces_nothing() -> None:
    """OTEL_SDK_DISABLED: whatever SIE_TRACING_ENABLED says."""
    on = {"SIE_TRACING_ENABLED": "true", "OTEL_TRACES_EXPORTER": "none"}
    assert tracing.start(settings_of(**on), "gateway") is not None
    assert tracing.start(settings_of(**on, OTEL_SDK_DISABLED="TRUE"), "gateway") is None


def test_spans_go_to_the_collector_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_EXPORTER_OTLP_PROTOCOL: the headers of the SDK's own variable are sent."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=search,authorization=Bearer%20abc")
    with HttpCollector() as collector:
        own = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        tracer = tracing.start(settings_of(SIE_TRACING_ENABLED="true", **own), "gateway")
        assert tracer is not None
        tracer.begin("over http").end()
        tracer.close()
    ((path, headers, names),) = collector.seen
    assert (path, names) == ("/v1/traces", ["over http"])
    assert (headers["x-team"], headers["authorization"]) == ("search", "Bearer abc")
    assert settings_of(OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf").endpoint == "http://localhost:4318/v1/traces"


def test_what_is_said_of_traces_comes_before_what_is_said_of_all_signals(collector: Collector) -> None:
    """OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_PROTOCOL."""
    own = {
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",
    }
    own |= {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}
    tracer = tracing.start(settings_of(SIE_TRACING_ENABLED="true", **own), "gateway")
    assert tracer is not None
    tracer.begin("by its own address").end()
    collector.until(lambda spans: [span for span in spans if span.name == "by its own address"], "the span")
    tracer.close()


def test_without_the_propagator_a_client_s_context_is_left_alone() -> None:
    """OTEL_PROPAGATORS."""
    own = {"SIE_TRACING_ENABLED": "true", "OTEL_TRACES_EXPORTER": "none"}
    for propagators, is_taken_up in (("tracecontext,baggage", True), ("baggage", False), ("none", False)):
        tracer = tracing.start(settings_of(**own, OTEL_PROPAGATORS=propagators), "gateway")
        context, span = tracing.begin_request(tracer, {"traceparent": CLIENT}, "GET", "r", 0.0)
        assert span is not None
        assert (current_trace.trace_id_of(context.traceparent) == TRACE) == is_taken_up


def test_a_collector_that_never_answers_holds_up_neither_spans_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More spans end than the queue holds. The end waits for its bound and logs that."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level(logging.WARNING):
        environ = {
            "SIE_TRACING_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
        }
        tracer = tracing.start(settings_of(**environ), "gateway")
        assert tracer is not None
        begin_s = time.monotonic()
        for _ in range(3000):
            tracer.begin("a").end()
        tracer.close()
        assert time.monotonic() - begin_s < 5  # an exporter gives up after 10 s
    assert "the last spans were not exported within 1 s" in caplog.text


@pytest.mark.parametrize(
    ("traceparent", "tracestate", "expected"),
    [
        (CLIENT, "a=1", (CLIENT, "a=1")),
        (CLIENT, "x" * 513, (CLIENT, "")),
        (CLIENT, "a=\x07", (CLIENT, "")),
        (CLIENT + "-x", "a=1", ("", "")),
        ("x" * 60_000, "", ("", "")),
        ("", "a=1", ("", "")),
        ("ff" + CLIENT[2:], "", ("", "")),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", "a=1", ("", "")),
        (f"00-{TRACE}-{'0' * 16}-01", "a=1", ("", "")),
        (CLIENT.upper(), "", ("", "")),
        (f"cc{CLIENT[2:-2]}ff-what-comes", "a=1", (CLIENT, "a=1")),
        (f"cc{UNSAMPLED[2:]}", "", (UNSAMPLED, "")),
    ],
)
def test_what_is_no_context_is_dropped(traceparent: str, tracestate: str, expected: tuple[str, str]) -> None:
    """W3C defines version ff and ids of zeros alone as invalid, and a later version is read as this version."""
    context = current_trace.context_from_headers(traceparent, tracestate)
    assert context == expected
    assert current_trace.trace_id_of(context.traceparent) == (TRACE if context.traceparent == CLIENT else None)


def test_a_request_that_was_pipelined_is_not_told_of_as_the_one_before() -> None:
    """The server begins a pipelined request in the task of the one before, with its context."""
    tracing.begin_request(None, {"traceparent": CLIENT}, "GET", "r", 0.0)
    assert current_trace.TRACE_ID.get() == TRACE
    tracing.begin_request(None, {}, "GET", "r", 0.0)
    assert current_trace.TRACE_ID.get() is None


def test_without_the_package_the_start_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "sie_runtime.spans", raising=False)
    monkeypatch.delattr("sie_runtime.spans", raising=False)
    with pytest.raises(SettingError, match=r"SIE_TRACING_ENABLED: .*pip install 'sie-cluster\[tracing\]'"):
        tracing.start(settings_of(SIE_TRACING_ENABLED="true"), "gateway")
    assert tracing.start(settings_of(), "gateway") is None


async def test_work_that_is_handed_back_at_the_end_is_told_of(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sie_sidecar.process.DRAIN_S", 0.1)
    async with InProcess(tmp_path) as cluster:
        own = {"SIE_TRACING_ENABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        gateway, adapter = await cluster.gateway(**own), await cluster.adapter()
        sidecar = await cluster.sidecar(adapter, **own)
        adapter.hold_batches = True
        encode_task = asyncio.create_task(gateway.encode("a"))
        await adapter.until(lambda adapter: adapter.running == 1, "the batch at the device")
        await sidecar.end()
        await until(collector, "work")
        adapter.let_go()
        await cluster.sidecar()
        assert (await encode_task).status_code == 200


@pytest.mark.parametrize(
    "variable",
    [
        "OTEL_EXPORTER_OTLP_COMPRESSION=brotli",
        "OTEL_EXPORTER_OTLP_TIMEOUT=10s",
        "OTEL_BSP_SCHEDULE_DELAY=-5",
        "OTEL_ATTRIBUTE_COUNT_LIMIT=x",
        "OTEL_EXPORTER_OTLP_HEADERS=nonsense",
        "OTEL_RESOURCE_ATTRIBUTES=nonsense",
        "OTEL_EXPORTER_OTLP_CERTIFICATE=/nowhere.pem",
        "OTEL_PROPAGATORS=nonsense",
    ],
)
def test_no_variable_of_the_sdk_ends_a_process(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process ignores the variable, or tracing stays off with a warning that says why."""
    monkeypatch.setenv(*variable.split("=", 1))
    tracer = tracing.start(
        settings_of(SIE_TRACING_ENABLED="true", OTEL_EXPORTER_OTLP_ENDPOINT="https://127.0.0.1:9"), "gateway"
    )
    messages = [record.message for record in caplog.records if record.name == "sie.tracing"]
    assert (tracer is None) == any(
        line.startswith("tracing stays off: OpenTelemetry refuses one of its variables") for line in messages
    )
    if tracer is not None:
        tracer.begin("x").end()
        tracer.close()


async def test_a_state_in_several_lines_is_one_state(tmp_path: Path) -> None:
    """Two contexts count as none, as W3C defines."""
    async with InProcess(tmp_path) as cluster:
        gateway, adapter = await cluster.gateway(), await cluster.adapter()
        await cluster.sidecar(adapter)
        state = [("tracestate", "a=1"), ("tracestate", "b=2")]
        for contexts in ([CLIENT], [CLIENT, CLIENT]):
            headers = [*(("traceparent", context) for context in contexts), *state]
            assert (
                await gateway.client.post("/v1/encode/toy/one", json={"items": ["a"]}, headers=headers)
            ).status_code == 200
    assert [(batch.traceparent, batch.tracestate) for batch in adapter.batches] == [(CLIENT, "a=1, b=2"), ("", "")]


def test_a_client_that_came_back_leads_to_the_run_that_answers_it() -> None:
    tracer = tracing.start(settings_of(SIE_TRACING_ENABLED="true", OTEL_TRACES_EXPORTER="none"), "gateway")
    assert tracer is not None
    run, again = (Call("r", 0.0, {}, span=tracer.begin("POST")) for _ in range(2))
    run.labels["model"], run.finished = "toy/one", cast("RequestResult", object())
    again.follow(run)
    assert (again.labels, again.finished) == (run.labels, run.finished)
    assert again.span is not None
    assert run.span is not None
    assert [link.context for link in again.span._span.links] == [run.span._span.get_span_context()]  # type: ignore[attr-defined]
