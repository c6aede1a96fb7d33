"""What metrics promise whatever is served: bounded labels, counts that outlive an adapter, no series for what is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fake_adapter import toy_entry
from inprocess import InProcess, Process
from prometheus_client.parser import text_string_to_metric_families

import sie_contracts
from sie_contracts import messages, topology
from sie_contracts.errors import InternalFailure, QueueFull
from sie_contracts.ipc import Description, Shortages
from sie_contracts.messages import ConfigDelta, Failed, Ok, WorkResult
from sie_contracts.runtime.metrics import MOST_MODELS, Names, epoch_number
from sie_gateway.metrics import Metrics as GatewayMetrics
from sie_sidecar.metrics import OOM, Metrics, Remedies, of_models

CANARY = "ZyKanarienvogel"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry(), toy_entry("toy/two")) as cluster:
        yield cluster


def result(*codes: str) -> WorkResult:
    """A chunk's result, with a failed outcome for each code."""
    errors = {"QUEUE_FULL": QueueFull("full"), "INTERNAL_ERROR": InternalFailure("broken")}
    return WorkResult("r", 0, "w", tuple(Failed(errors[code].info()) if code else Ok({}) for code in codes))


def test_the_first_models_keep_their_names_and_all_others_share_one() -> None:
    """B4: also the same one again."""
    names = Names(3)
    assert [names(name) for name in ("a", "b", "a", "c", "d", "e", "b", "d")] == ["a", "b", "a", "c", "other", "other", "b", "other"]


def test_thousands_of_models_make_a_bounded_number_of_series() -> None:
    """B4"""
    metrics = Metrics()
    for number in range(2000):
        model = f"org/model-{number}"
        metrics.loaded(model)
        metrics.ran(model, 1, 10)
        metrics.answered(model, "encode", result(""))
    series = {
        (sample.name, *sorted(sample.labels.items())) for family in metrics.registry.collect() for sample in family.samples
    }
    models = {sample.labels["model"] for family in metrics.registry.collect() for sample in family.samples if "model" in sample.labels}
    assert len(models) == MOST_MODELS + 1
    assert "other" in models
    assert len(series) < 200 * (MOST_MODELS + 1)
    counters, histograms = of_models(metrics.registry)
    assert sum(counters["sie_tokens_processed_total"].values()) == 20_000, "nothing is lost, it is only told together"
    assert histograms["sie_batch_size"]["other"]["counts"][-1] == 2000 - MOST_MODELS


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        (("",), "success"), (("", "INTERNAL_ERROR"), "error"), (("QUEUE_FULL", "QUEUE_FULL"), "queue_full"),
        (("QUEUE_FULL", "INTERNAL_ERROR"), "error"),
    ],
)
def test_a_chunk_is_counted_by_what_became_of_its_inputs(codes: tuple[str, ...], status: str) -> None:
    metrics = Metrics()
    metrics.answered("m", "embeddings", result(*codes))
    (sample,) = (
        sample for family in metrics.registry.collect() for sample in family.samples if sample.name == "sie_requests_total"
    )
    assert sample.labels == {"model": "m", "endpoint": "embeddings", "status": status}


def test_counters_and_histograms_of_models_are_sums_over_the_other_labels() -> None:
    """One list of buckets for each model, whatever its endpoints; phases are parts of the total and are not added to it."""
    metrics = Metrics()
    for endpoint in ("encode", "score"):
        metrics.answered("m", endpoint, result("", ""))
    counters, histograms = of_models(metrics.registry)
    assert counters["sie_requests_total"] == {"m": 2}
    found = histograms["sie_request_duration_seconds"]["m"]
    assert found["counts"][-1] == 2
    assert found["counts"] == sorted(found["counts"])
    assert len(found["buckets"]) == len(found["counts"]) - 1


def described(pid: int, *shortages: Shortages) -> Description:
    return Description(2, pid, "fake", "test", shortages=shortages)


def test_what_an_adapter_did_about_memory_is_counted_over_its_successors_too() -> None:
    """A counter never falls: an adapter that starts counts from zero."""
    remedies = Remedies()
    remedies.told(described(1, Shortages("m", cache_clears=2)))
    remedies.told(described(1, Shortages("m", cache_clears=3, batch_splits=1)))
    assert remedies.count("m", "cache_clears") == 3
    remedies.told(described(2))
    remedies.told(described(2, Shortages("m", cache_clears=1), Shortages("other", terminal_failures=1)))
    assert (remedies.count("m", "cache_clears"), remedies.count("m", "batch_splits")) == (4, 1)
    assert remedies.models() == {"m", "other"}
    assert remedies.count("nobody", "cache_clears") == 0


def test_the_epoch_is_told_as_the_number_that_grows() -> None:
    """B8"""
    assert [epoch_number(epoch) for epoch in ("2026-11-20T15:00:00.5Z:42", "packaged", "")] == [42.0, 0.0, 0.0]


def test_what_may_never_happen_has_its_series_from_the_start() -> None:
    """B1: an alert on a rate needs the zero before the first one."""
    for metrics, name in (
        (GatewayMetrics(), "sie_gateway_queue_ack_failures_total"), (GatewayMetrics(), "sie_gateway_provisioning_responses_total"),
        (GatewayMetrics(), "sie_gateway_queue_payload_offloads_total"), (GatewayMetrics(), "sie_gateway_queue_publish_seconds_count"),
        (Metrics(), "sie_dead_letters_total"), (Metrics(), "sie_settlements_total"), (Metrics(), "sie_adapter_deaths_total"),
    ):  # fmt: skip
        values = [sample.value for family in metrics.registry.collect() for sample in family.samples if sample.name == name]
        assert values, name
        assert set(values) == {0.0}, name


async def scraped(process: Process) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families((await process.get("/metrics")).text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_gauges_tell_of_what_is_there_now_and_of_nothing_that_is_gone(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_HEARTBEAT_TIMEOUT_MS="400", SIE_HEALTH_PUBLISH_INTERVAL_MS="100")
    own = {"SIE_HEALTH_PUBLISH_INTERVAL_MS": "100", "SIE_HEARTBEAT_TIMEOUT_MS": "400"}
    sidecar = await cluster.sidecar(**own)
    leaving = await cluster.sidecar(**own)
    assert (await gateway.encode("x")).status_code == 200
    async with asyncio.timeout(30):
        while "sie_gateway_model_workers" not in (found := await scraped(gateway)):
            pass
    assert found["sie_gateway_model_workers"] == [({"model": "toy/one"}, 1)]
    assert found["sie_gateway_build_info"] == [({"version": sie_contracts.__version__}, 1)]
    assert {labels["worker"] for labels, _ in found["sie_gateway_worker_queue_depth"]} == {"w0", "w1"}
    assert {labels["worker"]: value for labels, value in found["sie_gateway_worker_memory_used_bytes"]} == {"w0": 1 << 20, "w1": 1 << 20}
    assert found["sie_gateway_nats_connected"] == [({}, 1)]
    assert found["sie_gateway_config_epoch"] == [({}, 1)]
    await leaving.end()
    async with asyncio.timeout(20):  # forgotten ten time-outs after its last word
        while {labels["worker"] for labels, _ in (await scraped(gateway))["sie_gateway_worker_queue_depth"]} != {"w0"}:
            pass  # the scrape awaits
    worker = await scraped(sidecar)
    assert worker["sie_build_info"] == [({"version": sie_contracts.__version__}, 1)]
    assert worker["sie_ready"] == [({}, 1)]
    for remedy in OOM:
        assert all(value == 0 for _, value in worker.get(f"sie_oom_{remedy}_total", [({}, 0)]))


async def test_every_delta_is_counted_by_kind_and_result(cluster: InProcess) -> None:
    """B3"""
    gateway = await cluster.gateway()
    removal = ConfigDelta("sie-config", cluster.source.present_epoch, "test:2", "toy/two", 2, None)
    stranger = ConfigDelta("somebody", "test:2", "test:3", "toy/two", 3, None)
    for delta in (removal, removal, stranger):
        await cluster.send(topology.config_subject("default"), messages.encode(delta))
    await cluster.send(topology.config_subject("default"), b"nothing of ours")

    async def count(kind: str, result: str) -> float:
        return await gateway.metric("sie_gateway_config_deltas_total", kind=kind, result=result)

    async with asyncio.timeout(30):
        while await count("unknown", "invalid") != 1:
            pass
    assert [await count("removal", result) for result in ("applied", "stale", "untrusted", "gap")] == [1, 1, 1, 0]
    assert await count("put", "applied") == 0


async def test_no_text_and_no_request_id_is_in_any_metric_or_frame(cluster: InProcess) -> None:
    """X4"""
    gateway = await cluster.gateway()
    sidecar = await cluster.sidecar()
    answer = await gateway.encode(CANARY, X_Request_ID=f"{CANARY}-id", X_SIE_MACHINE_PROFILE=f"{CANARY}-gpu")
    assert answer.status_code == 200
    await gateway.client.get(f"/v1/{CANARY}")
    await gateway.encode("x", model=CANARY)
    for text in ((await gateway.get("/metrics")).text, (await sidecar.get("/metrics")).text, (await gateway.client.get("/health")).text):
        assert CANARY.lower() not in text.lower()
        assert answer.headers["x-sie-request-id"] not in text


async def test_an_idle_model_that_goes_is_counted(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    sidecar = await cluster.sidecar(SIE_IDLE_EVICT_S="1")
    assert await sidecar.metric("sie_idle_evictions_total") == 0
    assert (await gateway.encode("x")).status_code == 200
    async with asyncio.timeout(15):
        while await sidecar.metric("sie_idle_evictions_total") != 1:
            pass  # the scrape awaits
    assert await sidecar.metric("sie_model_loaded", model="toy/one") == 0
    assert await sidecar.metric("sie_model_memory_bytes", model="toy/one") == 0
