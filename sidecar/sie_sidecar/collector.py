"""Metrics that show the present state of the worker, read at each scrape of Prometheus."""

from __future__ import annotations

from collections import Counter as Sum
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import sie_contracts
from sie_runtime.metrics import Scrape, epoch_number
from sie_runtime.metrics_table import OOM, OTHER
from sie_sidecar.health import WorkerHealth


class WorkerCollector(Collector):
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
        yield from self._devices()
        worker = health.worker
        yield gauge("sie_batches_in_progress", sum(queue.at_adapter for queue in worker.queues.all) if worker else 0)
        all_hosted = list(worker.models) if worker else []
        depths: Sum[tuple[str, ...]] = Sum(
            {(OTHER,): worker.depth - sum(hosted.held for hosted in all_hosted)} if worker else {}
        )
        loaded: Sum[tuple[str, ...]] = Sum()
        memory: Sum[tuple[str, ...]] = Sum()
        engines: Sum[tuple[str, ...]] = Sum()
        for hosted in all_hosted:
            depths[hosted.name,] += hosted.held
            if hosted.device == 0 or hosted.state == "loaded":
                loaded[hosted.name, health.device_name(health.links[hosted.device])] += hosted.state == "loaded"
            memory[hosted.name,] += hosted.ready.loaded.memory_bytes if hosted.ready else 0
            if hosted.ready:
                engines[hosted.name, hosted.ready.loaded.engine] += 1
        yield gauge("sie_queue_depth", {key: max(0, depth) for key, depth in depths.items()})
        yield gauge("sie_model_loaded", loaded)
        yield gauge("sie_model_memory_bytes", memory)
        yield gauge("sie_model_engine", engines)
        devices = worker.models.devices if worker else []
        yield counter("sie_model_swaps", sum(device.swaps for device in devices))
        yield counter("sie_idle_evictions", sum(device.idle_evictions for device in devices))
        yield counter("sie_tower_outputs", {("hit",): 0, ("miss",): 0, **health.towers.total()})
        remedies = health.remedies.total()
        model_names = sorted({hosted.name for hosted in all_hosted} | {model for model, _ in remedies})
        for remedy in OOM:
            yield counter(f"sie_oom_{remedy}", {(model,): remedies[model, remedy] for model in model_names})

    def _devices(self) -> Iterator[Metric]:
        """Yield the metrics of the devices, from the last description of each connected adapter. Values that an adapter
        does not report have no sample. A device without a connected adapter has 0 lanes.
        """
        health, gauge = self._health, self._scrape.gauge
        shown = {(health.device_name(health.links[number]),): here for number, here in health.descriptions.items()}
        away = {(health.device_name(link),): 0 for link in health.links if link.number not in health.descriptions}
        yield gauge("sie_device_lanes", {**away, **{name: here.lanes for name, here in shown.items()}})
        busy = {name: here.utilization_percent for name, here in shown.items()}
        yield gauge(
            "sie_device_utilization_ratio", {name: used / 100 for name, used in busy.items() if used is not None}
        )
        yield gauge("sie_device_memory_used_bytes", {name: here.memory_used_bytes for name, here in shown.items()})
        yield gauge("sie_device_memory_total_bytes", {name: here.memory_total_bytes for name, here in shown.items()})
        yield gauge("sie_tower_output_bytes", {name: here.towers.held_bytes for name, here in shown.items()})
