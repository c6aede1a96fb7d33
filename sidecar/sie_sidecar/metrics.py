"""Metrics of the sidecar. `SidecarMetrics` counts events, and `WorkerCollector` reads states at a scrape.

The adapter has no HTTP port: it reports its counts in `ipc.Description`.
"""

from __future__ import annotations

from collections import Counter as Sum
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from sie_contracts.errors import SIEError
from sie_contracts.wire.ipc import BatchDone, Description
from sie_contracts.wire.messages import BatchNote, Failed, WorkResult
from sie_runtime.http.refusals import REFUSED
from sie_runtime.metrics import MetricMaker, exemplar
from sie_runtime.metrics_table import OOM
from sie_sidecar.prepare.media_pool import RESULTS

_OUTCOMES = ("taken", "duplicate", "unknown", "unconfirmed", "fenced", "cancelled", "late", "changed", "handed_back")


class SidecarMetrics:
    """Counters and histograms of events. A series whose labels are known in advance exists from the start, with the
    value 0.
    """

    def __init__(self) -> None:
        make = MetricMaker("worker")
        self.registry = make.registry
        self._traffic = make.traffic
        self.requests = make.counters("sie_requests")
        self.duration = make.histograms("sie_request_duration_seconds")
        self.batch_size = make.histograms("sie_batch_size")
        self.batch_fill = make.histogram("sie_batch_fill_ratio")
        self.tokens = make.counters("sie_tokens_processed")
        self.padding = make.counters("sie_padding_tokens")
        self.device_seconds = make.counters("sie_device_seconds")
        self.gathered = make.histogram("sie_gathered_deliveries")
        self.loads = make.counters("sie_model_loads")
        self.load_failures = make.counters("sie_model_load_failures")
        self.certificates = make.counters("sie_certificates")
        self.deliveries = make.counters("sie_deliveries")
        self.settlements = make.counters("sie_settlements")
        self.refused = make.counters("sie_refused_below_routes")
        self.dead_letters = make.counters("sie_dead_letters")
        self.media = {"image": make.counters("sie_images"), "sound": make.counters("sie_sounds")}
        for metric, values in (
            (self.deliveries, ("true", "false")),
            (self.settlements, _OUTCOMES),
            (self.dead_letters, ("kept", "lost")),
            *((counter, RESULTS) for counter in self.media.values()),
            (self.certificates, ("passed", "failed")),
            (self.refused, REFUSED),
        ):
            for value in values:
                metric.labels(value)
        self.poisoned = make.counter("sie_poisoned_inputs")
        self.adapter_deaths = make.counter("sie_adapter_deaths")

    def count_refused(self, reason: str) -> None:
        """Count a request that the server of probes and metrics refused before routing. `reason`: one of REFUSED."""
        self.refused.labels(reason).inc()

    def count_file(self, noun: str, result: str) -> None:
        """Count an image or sound (`noun`). `result`: one of RESULTS, for example "prepared" or "too_large"."""
        self.media[noun].labels(result).inc()

    def loaded(self, model: str, *, certified: bool) -> None:
        self.loads.labels(model).inc()
        if certified:
            self.certificates.labels("passed").inc()

    def not_loaded(self, model: str, error: SIEError) -> None:
        self.load_failures.labels(model).inc()
        if error.extras.get("error_class") == "CERTIFICATE":
            self.certificates.labels("failed").inc()

    def ran(self, model: str, note: BatchNote, done: BatchDone, fill: float) -> None:
        """Count a batch. `fill`: its tokens divided by the tokens of a full batch."""
        self.batch_size.labels(model).observe(note.items)
        self.batch_fill.observe(fill)
        self.tokens.labels(model).inc(note.tokens)
        self.padding.labels(model).inc(done.padding)
        self.device_seconds.labels(model).inc((done.inference_ms + done.postprocess_ms) / 1000)

    def answered(self, model: str, endpoint: str, result: WorkResult) -> None:
        self._traffic.met(model)
        traced = exemplar()
        status = "success"
        for outcome in result.outcomes:
            if isinstance(outcome, Failed) and status != "error":
                status = "queue_full" if outcome.error.code == "QUEUE_FULL" else "error"
        self.requests.labels(model, endpoint, status).inc()
        stages = result.stages
        for phase, millis in (
            ("total", stages.worker_ms),
            ("queue", stages.device_wait_ms),
            ("tokenize", stages.preprocess_ms),
            ("batch_wait", stages.batch_wait_ms),
            ("inference", stages.inference_ms),
            ("postprocess", stages.postprocess_ms),
        ):
            self.duration.labels(model, endpoint, phase).observe(millis / 1000, traced)


class AdapterCounts:
    """Counts that adapters report, summed over devices and over all adapter processes so far. Each process counts from
    zero.
    """

    def __init__(self, counts_of: Callable[[Description], Mapping[tuple[str, ...], int]]) -> None:
        self._counts_of = counts_of
        self._ended: Sum[tuple[str, ...]] = Sum()  # counts of earlier adapter processes
        # by number of the device: pid of its adapter process, and the counts that it reported last
        self._running: dict[int, tuple[int, Mapping[tuple[str, ...], int]]] = {}

    def update(self, description: Description, device: int = 0) -> None:
        """Update the sums with the counts that the adapter of this device reported last."""
        pid, last = self._running.get(device, (0, {}))
        now = self._counts_of(description)
        # in a container, a new adapter may have the pid of the previous adapter, but the new adapter's counts are lower
        if pid != description.pid or any(now.get(key, 0) < count for key, count in last.items()):
            self._ended.update(last)
        self._running[device] = description.pid, now

    def total(self) -> Sum[tuple[str, ...]]:
        total = Sum(self._ended)
        for _, counts in self._running.values():
            total.update(counts)
        return total


def oom_counts(description: Description) -> dict[tuple[str, ...], int]:
    """Return how often the adapter used each remedy because the device had run out of memory. Keys: model and remedy
    (a name in OOM).
    """
    return {(shortage.model, remedy): getattr(shortage, remedy) for shortage in description.shortages for remedy in OOM}


def tower_counts(description: Description) -> dict[tuple[str, ...], int]:
    """Return the hits and misses of the cache of tower outputs (vectors of one image or sound)."""
    return {("hit",): description.towers.hits, ("miss",): description.towers.misses}


def of_models(registry: CollectorRegistry) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, Any]]]:
    """Return the metrics with the label `model`: counters as metric -> model -> value, and histograms as metric ->
    model -> buckets and counts. Values are summed over the other labels. Of a metric with the label `phase`, only the
    phase `total` is used. `buckets` are upper bounds: `counts[i]` is the number of observations up to `buckets[i]`.
    The last entry of `counts` is the number of all observations.
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
                    buckets, bound = cumulative.setdefault(labels["model"], {}), float(labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
            if cumulative:
                histograms[metric.name] = {
                    model: {
                        "buckets": sorted(buckets)[:-1],
                        "counts": [int(buckets[bound]) for bound in sorted(buckets)],
                    }
                    for model, buckets in cumulative.items()
                }
    return counters, histograms
