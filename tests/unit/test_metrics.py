"""Properties of metrics under any traffic: bounded labels, counts that outlive an adapter, no series of workers and
models that are gone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pages
import pytest
from fake_adapter import toy_entry
from inprocess import InProcess, Process, until_told
from metrics_page import PAGE, page
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import sie_contracts
from sie_contracts.errors import InternalFailure, QueueFull
from sie_contracts.wire.device_reports import Shortages
from sie_contracts.wire.ipc import Description
from sie_contracts.wire.messages import Failed, Ok, WorkResult
from sie_gateway.metrics import Metrics as GatewayMetrics
from sie_runtime.metrics import TURN_S, Fold, MetricMaker, Scrape
from sie_runtime.metrics_table import FOLDED, LABELS, MAX_SERIES, Metric, tables
from sie_runtime.metrics_table import Process as Kind
from sie_sidecar.metrics import AdapterCounts, SidecarMetrics, oom_counts

CANARY = "ZyKanarienvogel"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry(), toy_entry("toy/two")) as cluster:
        yield cluster


def result(*codes: str) -> WorkResult:
    """Return the result of a chunk with one outcome for each code. An empty code is a success."""
    errors = {"QUEUE_FULL": QueueFull("full"), "INTERNAL_ERROR": InternalFailure("broken")}
    return WorkResult("r", 0, "w", tuple(Failed(errors[code].info()) if code else Ok({}) for code in codes))


def series(registry: CollectorRegistry) -> set[tuple[str, ...]]:
    return {
        (sample.name, *(f"{label}={value}" for label, value in sorted(sample.labels.items())))
        for family in registry.collect()
        for sample in family.samples
    }


def test_the_first_label_sets_keep_their_names_and_all_others_share_some() -> None:
    """A label set that comes again keeps its place. When all places are taken, new label sets share one."""
    fold = Fold(Metric("m", "counter", "", ("model", "status"), most=6, rest=3))
    label_sets = [fold((model, status)) for model in "abcab" for status in "xy"]
    assert label_sets[:2] == [("a", "x"), ("a", "y")]
    assert label_sets[2:6] == [("b", "x"), ("other", "y"), ("other", "x"), ("other", "y")]
    assert label_sets[6:] == [("a", "x"), ("a", "y"), ("b", "x"), ("other", "y")]
    assert fold(("c", "z")) == ("other", "other")
    assert fold(("d", "v")) == ("other", "other")


class Scraped:
    """Metrics of a worker on a clock that the test sets, and the increases that Prometheus computes from scrapes."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.make = MetricMaker("worker", lambda: self.now_s)
        self.whole: Counter[str] = Counter()  # by metric, the increase of all its series
        self._last: dict[tuple[str, ...], float] = {}

    def scrape(self, after_s: float = 15.0) -> dict[tuple[str, ...], float]:
        self.now_s += after_s
        samples = [
            sample
            for family in self.make.registry.collect()
            for sample in family.samples
            if not sample.name.endswith("_bucket")
        ]
        values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
        for key, value in values.items():
            before = self._last.get(key, 0.0)
            self.whole[key[0]] += int(value - before if value >= before else value)  # as rate() reads a counter
        self._last = values
        self.make.registry.scraped()
        return values

    def names(self, metric: str) -> set[str]:
        return {key[1] for key in self.scrape() if key[0] == metric}


def test_a_name_is_kept_until_another_one_is_twice_as_busy_and_has_room_for_all_that_is_asked_of_it() -> None:
    metrics = Scraped()
    seconds, traffic = metrics.make.histograms("sie_request_duration_seconds"), metrics.make.traffic
    phases = ("total", "queue", "tokenize", "batch_wait", "inference", "postprocess")

    def ask(model: str, times: int = 1, endpoint: str = "encode") -> None:
        for _ in range(times):
            traffic.met(model)
            for phase in phases:
                seconds.labels(model, endpoint, phase).observe(1)

    metric = tables()["worker"]["sie_request_duration_seconds"]
    first = [f"first-{number}" for number in range((metric.most - metric.rest) // metric.series_per_name)]
    for number, model in enumerate(first):
        ask(model, 100 + number)
    ask("late", 150)
    metrics.scrape(TURN_S)
    ask("late")
    assert metrics.names("sie_request_duration_seconds_count") == {*first, "other"}
    ask("late", 100)
    ask(first[-1], endpoint="embeddings")
    metrics.scrape(TURN_S)
    ask("late")
    ask(first[-1], endpoint="embeddings")
    names = {*first[2:], "late", "other"}  # two of the least busy make room, for another model and another endpoint
    values = metrics.scrape()
    assert {key[1] for key in values} == names
    assert values["sie_request_duration_seconds_count", first[-1], "embeddings", "total"] == 1
    ask("other", 2)
    for _ in range(3):
        assert {key[1] for key in metrics.scrape(TURN_S)} == names, "nobody asks for a name"


@pytest.mark.parametrize("process", tables())
def test_no_process_can_have_more_series_than_a_pod_may(process: Kind) -> None:
    """Neither the declared limits nor thousands of values of every label of every metric exceed the bound."""
    table = tables()[process]
    assert sum(metric.series for metric in table.values()) <= MAX_SERIES
    make, scrape = MetricMaker(process), Scrape(process)
    random.seed(7)
    for name, metric in table.items():
        assert {*metric.labels} <= LABELS.keys(), name
        instrument: Any
        if not metric.labels:
            continue
        sets = [tuple(f"{label} {random.randrange(10_000)}" for label in metric.labels) for _ in range(3000)]
        if metric.kind == "gauge":
            scrape.gauge(name, dict.fromkeys(sets[:1500], 1))
            family = scrape.gauge(name, dict.fromkeys(sets, 1))
            assert sum(sample.value for sample in family.samples) == len(set(sets)), (
                "nothing is lost, it is only told together"
            )
            assert len(family.samples) <= metric.most + (not FOLDED.intersection(metric.labels))
        else:
            instrument = make.counters(name) if metric.kind == "counter" else make.histograms(name)
            for values in sets:
                instrument.labels(*values).inc() if metric.kind == "counter" else instrument.labels(*values).observe(1)
            exported_series = {
                series_per_name for series_per_name in series(make.registry) if series_per_name[0] in metric.exported
            }
            assert len(exported_series) <= metric.series + (not FOLDED.intersection(metric.labels)) * (
                len(metric.buckets) + 3
            ), name


@pages.WHOLE
def test_the_page_is_what_the_table_says() -> None:
    text = PAGE.read_text("utf-8")
    assert page(text) == text, "python tests/metrics_page.py writes it anew"


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        (("",), "success"),
        (("", "INTERNAL_ERROR"), "error"),
        (("QUEUE_FULL", "QUEUE_FULL"), "queue_full"),
        (("QUEUE_FULL", "INTERNAL_ERROR"), "error"),
    ],
)
def test_a_chunk_is_counted_by_what_became_of_its_inputs(codes: tuple[str, ...], status: str) -> None:
    metrics = SidecarMetrics()
    metrics.answered("m", "embeddings", result(*codes))
    (sample,) = (
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "sie_requests_total"
    )
    assert sample.labels == {"model": "m", "endpoint": "embeddings", "status": status}


def described(pid: int, *shortages: Shortages) -> Description:
    return Description(2, pid, "fake", "test", shortages=shortages)


def test_what_an_adapter_did_about_memory_is_counted_over_its_successors_too() -> None:
    """A counter never falls, although a new adapter counts from zero."""
    counts = AdapterCounts(oom_counts)
    counts.update(described(1, Shortages("m", cache_clears=2)))
    counts.update(described(1, Shortages("m", cache_clears=3, batch_splits=1)))
    assert counts.total()["m", "cache_clears"] == 3
    counts.update(described(2))
    counts.update(described(2, Shortages("m", cache_clears=1), Shortages("other", terminal_failures=1)))
    assert (counts.total()["m", "cache_clears"], counts.total()["m", "batch_splits"]) == (4, 1)
    counts.update(described(2, Shortages("m")))  # a container's adapter has the same pid each time
    assert (counts.total()["m", "cache_clears"], counts.total()["other", "terminal_failures"]) == (4, 1)
    assert {model for model, _ in counts.total()} == {"m", "other"}


def test_what_may_never_happen_has_its_series_from_the_start() -> None:
    """An alert on a rate needs a zero before the first event."""
    for metrics, name in (
        (GatewayMetrics(), "sie_gateway_queue_ack_failures_total"),
        (GatewayMetrics(), "sie_gateway_provisioning_responses_total"),
        (GatewayMetrics(), "sie_gateway_queue_payload_offloads_total"),
        (GatewayMetrics(), "sie_gateway_queue_publish_seconds_count"),
        (SidecarMetrics(), "sie_dead_letters_total"),
        (SidecarMetrics(), "sie_settlements_total"),
        (SidecarMetrics(), "sie_adapter_deaths_total"),
    ):
        values = [
            sample.value for family in metrics.registry.collect() for sample in family.samples if sample.name == name
        ]
        assert values, name
        assert set(values) == {0.0}, name


async def scraped(process: Process) -> dict[str, list[tuple[dict[str, str], float]]]:
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families((await process.get("/metrics")).text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


async def test_gauges_tell_of_what_is_there_now_and_of_nothing_that_is_gone(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_HEARTBEAT_TIMEOUT_MS="400", SIE_HEALTH_PUBLISH_INTERVAL_MS="100")
    own = {"SIE_HEALTH_PUBLISH_INTERVAL_MS": "100", "SIE_HEARTBEAT_TIMEOUT_MS": "400"}
    sidecar = await cluster.sidecar(**own)
    leaving = await cluster.sidecar(**own)
    assert (await gateway.encode("x")).status_code == 200

    async def told() -> dict[str, Any] | None:
        """Return the samples once they have both workers: on a slow machine heartbeats may be overdue for a moment."""
        samples = await scraped(gateway)
        beating = {labels["worker"] for labels, _ in samples.get("sie_gateway_worker_queue_depth", [])}
        return samples if "sie_gateway_model_workers" in samples and beating == {"w0", "w1"} else None

    gauges = await until_told(told, "the model's workers")
    assert gauges["sie_gateway_model_workers"] == [({"model": "toy/one"}, 1)]
    assert gauges["sie_gateway_build_info"] == [({"version": sie_contracts.__version__}, 1)]
    assert {labels["worker"] for labels, _ in gauges["sie_gateway_worker_queue_depth"]} == {"w0", "w1"}
    assert {labels["worker"]: value for labels, value in gauges["sie_gateway_worker_memory_used_bytes"]} == {
        "w0": 1 << 20,
        "w1": 1 << 20,
    }
    assert gauges["sie_gateway_nats_connected"] == [({}, 1)]
    assert gauges["sie_gateway_config_epoch"] == [({}, 1)]
    await leaving.end()

    async def is_forgotten() -> bool:
        return {labels["worker"] for labels, _ in (await scraped(gateway))["sie_gateway_worker_queue_depth"]} == {"w0"}

    await until_told(is_forgotten, "ten time-outs after the last word of the worker that leaves")
    worker = await scraped(sidecar)
    assert worker["sie_build_info"] == [({"version": sie_contracts.__version__}, 1)]
    assert worker["sie_ready"] == [({}, 1)]


async def test_no_text_and_no_request_id_is_in_any_metric_or_frame(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    sidecar = await cluster.sidecar()
    answer = await gateway.encode(CANARY, X_Request_ID=f"{CANARY}-id")
    assert answer.status_code == 200
    assert (await gateway.encode(CANARY, X_SIE_MACHINE_PROFILE=f"{CANARY}-gpu")).status_code == 404
    await gateway.client.get(f"/v1/{CANARY}")
    await gateway.encode("x", model=CANARY)
    for text in (
        (await gateway.get("/metrics")).text,
        (await sidecar.get("/metrics")).text,
        (await gateway.client.get("/health")).text,
    ):
        assert CANARY.lower() not in text.lower()
        assert answer.headers["x-sie-request-id"] not in text
