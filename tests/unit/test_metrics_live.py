"""Metrics of work in progress: the age of the queue, the use by each key, exemplars, certificates, padding, the
config service.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import config_api
import httpx
import pytest
from config_api import ADMIN, listened
from fake_adapter import toy_entry
from inprocess import GatewayProcess, InProcess
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from sie_broker import BrokerError
from sie_broker.memory import MemoryServer
from sie_config_service.app import create_app
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.wire import topology
from sie_contracts.wire.ipc import BatchDone
from sie_contracts.wire.messages import BatchNote, Ok, Stages, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.admission import key_of
from sie_gateway.fleet import lag
from sie_gateway.http.app import Gate
from sie_gateway.inference.results import work_of
from sie_gateway.streams.backlog import Backlog
from sie_runtime.metrics_table import tables
from sie_sidecar.metrics import SidecarMetrics

WAIT_S = 30


async def eventually(gateway: GatewayProcess, name: str, value: float | None = None, **labels: str) -> float:
    """Wait until a metric has this value, or without a value is above 0."""
    async with asyncio.timeout(WAIT_S):
        while True:
            reading = await gateway.metric(name, **labels)
            if reading == value if value is not None else reading > 0:
                return reading  # otherwise scrape again; a scrape awaits


async def test_the_age_of_the_queue_is_told_by_lane_priority_and_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter holds the only request of the priority. Once it is answered, the age is zero, not absent."""
    monkeypatch.setattr(lag, "EVERY_S", 0.1)
    model, lane = "toy/with.dots_and-More", {"pool": "_default", "machine_profile": "cpu", "bundle": "default"}
    async with InProcess(tmp_path, toy_entry(model)) as cluster:
        gateway, _ = await cluster.gateway(SIE_MACHINE_PROFILE="cpu"), await cluster.sidecar(SIE_MACHINE_PROFILE="cpu")
        (adapter,) = cluster.adapters
        adapter.hold_batches = True
        task = asyncio.create_task(gateway.encode("x", model=model, X_SIE_Priority="bulk"))
        await eventually(gateway, "sie_gateway_queue_messages", 1, priority="bulk", **lane)
        assert await gateway.metric("sie_gateway_queue_messages", priority="interactive", **lane) == 0
        before_s = await eventually(gateway, "sie_gateway_queue_oldest_seconds", priority="bulk", **lane)
        assert await gateway.metric("sie_gateway_model_queue_messages", model=model, priority="bulk", **lane) == 1
        async with asyncio.timeout(WAIT_S):
            while (
                await gateway.metric("sie_gateway_model_queue_oldest_seconds", model=model, priority="bulk", **lane)
                <= before_s
            ):
                pass  # the scrape awaits
        adapter.let_go()
        assert (await task).status_code == 200
        await eventually(gateway, "sie_gateway_queue_messages", 0, priority="bulk")
        text = (await gateway.get("/metrics")).text
        labels = 'bundle="default",machine_profile="cpu",pool="_default",priority="bulk"'
        assert f"sie_gateway_queue_oldest_seconds{{{labels}}} 0.0" in text
        assert "sie_gateway_model_queue_messages{" not in text


async def test_what_cannot_be_asked_is_absent() -> None:
    """Figures of a backlog that is no longer fresh are absent, not zero."""
    now_s = 0.0
    server = MemoryServer()
    broker = server.connect("gateway")
    await broker.ensure_stream(
        topology.work_stream("_default", storage="memory", replicas=1, max_bytes=1 << 20, max_age_s=60)
    )
    backlog = Backlog(broker, {"_default"}, lambda: now_s)
    queue_lag = lag.Lag(broker, backlog, {"_default"}, lambda: now_s)
    lane = Lane("_default", "cpu", "default")
    await broker.publish(topology.work_subject(lane, "bulk", "m"), b"nothing of ours", "1")
    await backlog.fresh("_default", 0)
    await queue_lag.refresh()
    assert queue_lag.lanes["_default", "cpu", "default", "bulk"].count == 1
    assert queue_lag.models == {}, "nobody can read it, so it names no model"
    for number, subject in enumerate(("sie.work._default.x", "sie.work._default.cpu.default")):
        await broker.publish(subject, b"of a program that is no gateway", f"foreign-{number}")
    await backlog.fresh("_default", 0)
    await queue_lag.refresh()
    assert sum(waiting.count for waiting in queue_lag.lanes.values()) == 1, "no lane has them"
    now_s = 100.0
    await queue_lag.refresh()
    assert queue_lag.lanes == {}
    await backlog.fresh("_default", 0)
    server.disconnect()
    with pytest.raises(BrokerError):
        await queue_lag.refresh()
    server.reconnect()
    await backlog.stop()
    await broker.close()


@pytest.mark.parametrize("name", ["cpu", "l4-spot", "with.dots", "with_underscore", "Grün 1"])
def test_the_lane_of_a_subject_is_read_back(name: str) -> None:
    lane = Lane("p_1", name, f"{name}-bundle")
    assert lag.lane_of(topology.work_subject(lane, "bulk", "m" * 300)) == lane
    assert lag.lane_of(topology.slot_subject(lane, "interactive", "m")) == lane


async def test_tokens_and_device_time_are_told_by_key_and_no_token_is(tmp_path: Path) -> None:
    """No metric holds a token or the start of its digest."""
    tokens = ("the-first-secret", "the-second-secret")
    async with InProcess(tmp_path) as cluster:
        gateway = await cluster.gateway(SIE_AUTH_MODE="static", SIE_AUTH_TOKENS=",".join(tokens), SIE_ADMIN_TOKEN=ADMIN)
        await cluster.sidecar()
        used = (await gateway.encode("one two three", Authorization=f"Bearer {tokens[1]}")).json()["usage"][
            "total_tokens"
        ]
        assert (await gateway.encode("one", Authorization=f"Bearer {ADMIN}")).status_code == 200
        assert await gateway.metric("sie_gateway_key_tokens_total", key="static-2") == used > 0
        assert 0 < await gateway.metric("sie_gateway_key_device_seconds_total", key="static-2") <= 0.001
        assert await gateway.metric("sie_gateway_key_tokens_total", key="admin") > 0
        assert await gateway.metric("sie_gateway_key_tokens_total", key="static-1") == 0
        text = (await gateway.get("/metrics")).text
        for token in (*tokens, ADMIN):
            assert token not in text
            assert key_of(token)[:8] not in text
            grant = Gate(gateway.settings).check("GET", "/v1/models", f"Bearer {token}")
            assert grant.name != grant.key


def test_a_key_has_its_share_of_a_batch_by_tokens() -> None:
    note, stages = BatchNote(tokens=100), Stages(inference_ms=40.0, postprocess_ms=10.0)
    results = [
        WorkResult("r", 0, "w", (Ok({}, 20), Ok({}, 5)), stages=stages, batch=note),
        WorkResult("r", 1, "w", (Ok({}, 100),), stages=stages, batch=note),
        WorkResult("r", 2, "w", (Ok({}, 7),)),
    ]
    assert work_of(results)[1] == pytest.approx(0.0125 + 0.05)


async def exemplars(url: str, name: str) -> set[str]:
    """Return the trace ids of the exemplars of a histogram. The request is that of Prometheus."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=WAIT_S) as client:
        answer = await client.get(
            "/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"}
        )
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    samples = [sample for family in openmetrics(answer.text) if family.name == name for sample in family.samples]
    return {sample.exemplar.labels["trace_id"] for sample in samples if sample.exemplar is not None}


def test_a_batch_is_counted_with_its_fill_its_padding_and_its_time() -> None:
    metrics = SidecarMetrics()
    metrics.ran("m", BatchNote(items=3, tokens=80), BatchDone("b", (), b"", 20.0, 5.0, padding=20), 0.5)
    values = {
        sample.name: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert (values["sie_tokens_processed_total"], values["sie_padding_tokens_total"]) == (80, 20)
    assert values["sie_device_seconds_total"] == pytest.approx(0.025)
    assert (values["sie_batch_fill_ratio_sum"], values["sie_batch_size_sum"]) == (0.5, 3)


async def test_the_config_service_tells_of_its_requests_and_of_its_catalogue() -> None:
    """The epoch, with which those of gateways and workers are compared, is absent, not zero, before it is known."""
    bundles = {"default": BundleEntry("default", families=("toy",))}
    api = config_api.Api(MemoryServer(), bundles, topology.config_subject("default"), SIE_ADMIN_TOKEN=ADMIN)

    async def told() -> dict[str, float]:
        text = (await api.client.get("/metrics")).text
        return {
            f"{sample.name}{sorted(sample.labels.values())}": sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }

    before = await told()
    assert before["sie_config_ready[]"] == 0
    assert not any(name.startswith(("sie_config_catalogue_epoch", "sie_config_models")) for name in before)
    await api.start()
    entry = {"id": "org/one", "weights": {"package": "x"}, "family": "toy", "outputs": {"dense": 4}, "max_tokens": 16}
    await api.call("POST", "/v1/configs/models", entry, 201)
    await api.call("GET", "/v1/configs/models/org/none", status=404)
    epoch = (await api.call("GET", "/v1/configs/epoch"))["epoch"]
    metrics = await told()
    assert metrics["sie_config_catalogue_epoch[]"] == float(epoch.rpartition(":")[2]) > 0
    assert (metrics["sie_config_models[]"], metrics["sie_config_ready[]"]) == (1, 1)
    await api.service.reconnected()
    assert (await told())["sie_config_ready[]"] == 1, "as /readyz says"
    assert metrics["sie_config_requests_total['201', 'POST', 'models']"] == 1
    assert metrics["sie_config_requests_total['404', 'GET', 'model']"] == 1
    assert metrics["sie_config_request_seconds_count['epoch']"] == 1
    pieces = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return pieces.pop(0)

    async def send(_message: Any) -> None:
        """Drop the message: the client has disconnected."""

    headers = [(b"authorization", f"Bearer {ADMIN}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/configs/models", "query_string": b"", "headers": headers}
    await listened(create_app(api.service))(scope, receive, send)
    metrics = await told()
    assert metrics["sie_config_requests_total['499', 'POST', 'models']"] == 1
    names = {name.partition("[")[0] for name in metrics}
    assert names <= {name for metric in tables()["config"].values() for name in metric.exported}
