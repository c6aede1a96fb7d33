"""Every metric of the sidecar, declared once: `Metrics` what is counted where it happens, `Live` what is read when somebody scrapes.

The adapter has no port: what it counts comes with its description.
"""

from __future__ import annotations

from collections import Counter as Sum
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import sie_contracts
from sie_contracts.ipc import Description
from sie_contracts.messages import Failed, WorkResult
from sie_contracts.runtime.metrics import OTHER, Names, counter, epoch_number, gauge

if TYPE_CHECKING:
    from sie_sidecar.health import Health

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
OOM = ("recoveries_attempted", "recoveries_succeeded", "terminal_failures", "cache_clears", "evictions_triggered", "batch_splits")
_OUTCOMES = ("taken", "duplicate", "unknown", "cancelled", "late", "changed", "handed_back")


class Metrics:
    """`name` is what a model is called in labels. A series whose labels are known from the start is there from the start."""

    def __init__(self) -> None:
        self.name = Names()
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("sie_requests", "Chunks answered", ["model", "endpoint", "status"], registry=registry)
        self.duration = Histogram(
            "sie_request_duration_seconds", "Time of a chunk", ["model", "endpoint", "phase"], buckets=_SECONDS, registry=registry
        )
        self.batch_size = Histogram("sie_batch_size", "Inputs per batch", ["model"], buckets=_COUNTS, registry=registry)
        self.tokens = Counter("sie_tokens_processed", "Tokens run", ["model"], registry=registry)
        self.gathered = Histogram("sie_gathered_deliveries", "Deliveries taken from the wire together", buckets=_COUNTS, registry=registry)
        self.batches = Gauge("sie_batches_in_progress", "Batches sent to the adapter", registry=registry)
        self.loads = Counter("sie_model_loads", "Loads that ended with a resident model", ["model"], registry=registry)
        self.deliveries = Counter("sie_deliveries", "Deliveries taken in", ["redelivered"], registry=registry)
        self.settlements = Counter("sie_settlements", "What became of deliveries", ["outcome"], registry=registry)
        self.dead_letters = Counter("sie_dead_letters", "Work given up, by whether it was kept", ["result"], registry=registry)
        for metric, values in ((self.deliveries, ("true", "false")), (self.settlements, _OUTCOMES), (self.dead_letters, ("kept", "lost"))):
            for value in values:
                metric.labels(value)
        self.poisoned = Counter("sie_poisoned_inputs", "Inputs refused because they ended two adapters", registry=registry)
        self.adapter_deaths = Counter("sie_adapter_deaths", "Adapters that went away", registry=registry)

    def loaded(self, model: str) -> None:
        self.loads.labels(self.name(model)).inc()

    def ran(self, model: str, inputs: int, tokens: int) -> None:
        """Account for a batch."""
        name = self.name(model)
        self.batch_size.labels(name).observe(inputs)
        self.tokens.labels(name).inc(tokens)

    def answered(self, model: str, endpoint: str, result: WorkResult) -> None:
        """Account for a chunk, after its result has left."""
        name = self.name(model) if model != OTHER else OTHER
        codes = {outcome.error.code for outcome in result.outcomes if isinstance(outcome, Failed)}
        status = "success" if not codes else "queue_full" if codes == {"QUEUE_FULL"} else "error"
        self.requests.labels(name, endpoint, status).inc()
        stages = result.stages
        for phase, millis in (
            ("total", stages.worker_ms), ("queue", stages.device_wait_ms), ("tokenize", stages.preprocess_ms),
            ("batch_wait", stages.batch_wait_ms), ("inference", stages.inference_ms), ("postprocess", stages.postprocess_ms),
        ):  # fmt: skip
            self.duration.labels(name, endpoint, phase).observe(millis / 1000)


class Remedies:
    """How often what was done about memory that ran out, over all adapters of this process, whose own counts begin at zero."""

    def __init__(self) -> None:
        self._before: Sum[tuple[str, str]] = Sum()  # by adapters that are gone
        self._now: dict[tuple[str, str], int] = {}
        self._pid = 0

    def told(self, description: Description) -> None:
        """Take in what an adapter counts."""
        if description.pid != self._pid:
            self._before.update(self._now)
            self._pid = description.pid
        self._now = {(each.model, remedy): getattr(each, remedy) for each in description.shortages for remedy in OOM}

    def count(self, model: str, remedy: str) -> int:
        return self._before[model, remedy] + self._now.get((model, remedy), 0)

    def models(self) -> set[str]:
        """Those that ever ran out of memory."""
        return {model for model, _ in (*self._before, *self._now)}


class Live(Collector):
    """What the worker's parts know anyway."""

    def __init__(self, health: Health, metrics: Metrics) -> None:
        self._health = health
        self._name = metrics.name

    def collect(self) -> Iterator[Metric]:
        health = self._health
        yield gauge("sie_build_info", "1, with the version that runs", {(sie_contracts.__version__,): 1}, ["version"])
        yield gauge("sie_ready", "1 while /readyz answers 200", {(): health.not_ready() is None})
        epoch = {(): epoch_number(health.feed.catalogue.epoch)}
        yield gauge("sie_config_epoch", "Writes of the catalogue that this worker has seen", epoch)
        behind = {(): float(health.feed.is_behind)}
        yield gauge("sie_config_behind", "1 while the last look at the config service failed: the last catalogue serves", behind)
        yield counter("sie_config_deltas", "Config deltas by what became of them", health.feed.deltas, ["kind", "result"])
        worker = health.worker
        all_hosted = worker.hosting.all() if worker else []
        depths: Sum[tuple[str, ...]] = Sum({(OTHER,): worker.depth - sum(hosted.held for hosted in all_hosted)} if worker else {})
        loaded: Sum[tuple[str, ...]] = Sum()
        memory: Sum[tuple[str, ...]] = Sum()
        for hosted in all_hosted:
            name = self._name(hosted.name)
            depths[name,] += hosted.held
            loaded[name, health.device] += hosted.state == "loaded"
            memory[name,] += hosted.ready.loaded.memory_bytes if hosted.ready else 0
        yield gauge("sie_queue_depth", "Chunks held and not yet answered", {key: max(0, depth) for key, depth in depths.items()}, ["model"])
        yield gauge("sie_model_loaded", "1 while the model is resident", loaded, ["model", "device"])
        yield gauge("sie_model_memory_bytes", "Measured memory of a resident model", memory, ["model"])
        yield counter("sie_model_swaps", "Models closed to new work for another one's load", {(): worker.hosting.swaps if worker else 0})
        evictions = worker.hosting.idle_evictions if worker else 0
        yield counter("sie_idle_evictions", "Models unloaded because nobody used them", {(): evictions})
        known = {hosted.name for hosted in all_hosted} | health.remedies.models()
        for remedy in OOM:
            counts: Sum[tuple[str, ...]] = Sum()
            for model in sorted(known):
                counts[self._name(model),] += health.remedies.count(model, remedy)
            yield counter(f"sie_oom_{remedy}", f"Memory that ran out on the device: {remedy.replace('_', ' ')}", counts, ["model"])


def of_models(registry: CollectorRegistry) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, Any]]]:
    """What is counted for single models: counters as metric -> model -> value, and histograms as metric -> model -> buckets and counts.

    Counts are sums over the other labels; of a metric with phases it is the phase `total`, the sum of which the others are parts.
    `buckets` are upper bounds; `counts[i]` observations are at most `buckets[i]`, and the last count, one more, is of all.
    """
    counters: dict[str, dict[str, float]] = {}
    histograms: dict[str, dict[str, Any]] = {}
    for metric in registry.collect():
        if metric.type == "counter":
            for sample in metric.samples:
                if "model" in sample.labels and sample.name.endswith("_total"):
                    values = counters.setdefault(sample.name, {})
                    values[sample.labels["model"]] = values.get(sample.labels["model"], 0.0) + sample.value
        elif metric.type == "histogram":
            cumulative: dict[str, dict[float, float]] = {}
            for sample in metric.samples:
                labels: Mapping[str, str] = sample.labels
                if "model" in labels and sample.name.endswith("_bucket") and labels.get("phase", "total") == "total":
                    found, bound = cumulative.setdefault(labels["model"], {}), float(labels["le"])
                    found[bound] = found.get(bound, 0.0) + sample.value
            if cumulative:
                histograms[metric.name] = {
                    model: {"buckets": sorted(found)[:-1], "counts": [int(found[bound]) for bound in sorted(found)]}
                    for model, found in cumulative.items()
                }
    return counters, histograms
