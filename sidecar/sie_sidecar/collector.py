"""Metrics that are read from the worker's state at each scrape of Prometheus."""

from __future__ import annotations

from collections import Counter as Sum
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import sie_contracts
from sie_contracts.wire.ipc import Description
from sie_runtime.metrics import Scrape, epoch_number
from sie_runtime.metrics_table import OOM, OTHER
from sie_sidecar.health import WorkerHealth


class WorkerCollector(Collector):
    """Collector that reads the state of the worker's parts at each scrape."""

    def __init__(self, health: WorkerHealth) -> None:
        self._health = health
        self._scrape = Scrape("worker")

    def collect(self) -> Iterator[Metric]:
        health, gauge, counter = self._health, self._scrape.gauge, self._scrape.counter
        yield gauge("sie_build_info", {(sie_contracts.__version__,): 1})
        yield gauge("sie_ready", health.not_ready() is None)
        yield gauge("sie_config_epoch", epoch_number(health.feed.catalogue.epoch))
        yield gauge("sie_config_behind", health.feed.is_behind)
        yield counter("sie_config_deltas", health.feed.deltas)
        yield from self._device(health.description)
        worker = health.worker
        all_hosted = worker.hosting.all() if worker else []
        depths: Sum[tuple[str, ...]] = Sum(
            {(OTHER,): worker.depth - sum(hosted.held for hosted in all_hosted)} if worker else {}
        )
        loaded: Sum[tuple[str, ...]] = Sum()
        memory: Sum[tuple[str, ...]] = Sum()
        engines: Sum[tuple[str, ...]] = Sum()
        for hosted in all_hosted:
            depths[hosted.name,] += hosted.held
            loaded[hosted.name, health.device] += hosted.state == "loaded"
            memory[hosted.name,] += hosted.ready.loaded.memory_bytes if hosted.ready else 0
            if hosted.ready:
                engines[hosted.name, hosted.ready.loaded.engine] += 1
        yield gauge("sie_queue_depth", {key: max(0, depth) for key, depth in depths.items()})
        yield gauge("sie_model_loaded", loaded)
        yield gauge("sie_model_memory_bytes", memory)
        yield gauge("sie_model_engine", engines)
        yield counter("sie_model_swaps", worker.hosting.swaps if worker else 0)
        yield counter("sie_idle_evictions", worker.hosting.idle_evictions if worker else 0)
        yield counter("sie_tower_outputs", health.towers.counts())
        model_names = sorted({hosted.name for hosted in all_hosted} | health.remedies.models())
        for remedy in OOM:
            yield counter(
                f"sie_oom_{remedy}", {(model,): health.remedies.count(model, remedy) for model in model_names}
            )

    def _device(self, description: Description | None) -> Iterator[Metric]:
        """Yield metrics of the device from the adapter's last description. Unknown values are absent, never zero."""
        gauge = self._scrape.gauge
        yield gauge("sie_device_lanes", description.lanes if description else 0)
        busy = description.utilization_percent if description else None
        yield gauge("sie_device_utilization_ratio", {} if busy is None else busy / 100)
        yield gauge("sie_device_memory_used_bytes", description.memory_used_bytes if description else {})
        yield gauge("sie_device_memory_total_bytes", description.memory_total_bytes if description else {})
        yield gauge("sie_tower_output_bytes", description.towers.held_bytes if description else {})
