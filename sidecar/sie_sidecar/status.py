"""State of this worker: the websocket `/ws/status` sends all of it five times per second (`WorkerStatus`), and each
scrape of Prometheus reads the metrics of the present state (`WorkerCollector`).

The websocket is on the port of the metrics and probes. If SIE_CONFIG_READ_TOKEN is set, a client must send this token:
it is the only token that a worker has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import pwd
import time
from collections import Counter as Sum
from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

import sie_contracts
from sie_contracts.errors import NotFound, SIEError, Unauthenticated
from sie_contracts.models.entries import ModelEntry, RunDefaults, listed_outputs, widths
from sie_contracts.settings import Settings
from sie_contracts.wire.topology import Lane
from sie_runtime.http.asgi import App, Receive, Scope, Send, headers_of, refuse_upgrade
from sie_runtime.http.routes import bearer
from sie_runtime.http.server import probes
from sie_runtime.http.websocket import Seats, ViewerFrames
from sie_runtime.metrics import Scrape, epoch_number
from sie_runtime.metrics_table import OOM, OTHER
from sie_sidecar.batch import BatchLimits
from sie_sidecar.health import WorkerHealth
from sie_sidecar.metrics import SidecarMetrics, of_models
from sie_sidecar.models import ModelState
from sie_sidecar.worker import Worker

EVERY_S = 0.2
# seconds between two updates of those parts of the status that are slow to compute: state of the devices, and sums of
# the metrics
DEVICE_EVERY_S = 1.0
MAX_SOCKETS = 32
PATH = "/ws/status"


class WorkerStatus:
    """Status of one worker as JSON frames, and the websockets that receive these frames."""

    def __init__(
        self,
        settings: Settings,
        health: WorkerHealth,
        metrics: SidecarMetrics,
        lane: Lane,
        worker_id: str,
        limits: BatchLimits,
    ) -> None:
        self._settings = settings
        self._health = health
        self._metrics = metrics
        self._lane = lane
        self._id = worker_id
        self._limits = limits
        self._started_s = time.monotonic()
        self._server = {
            "version": sie_contracts.__version__,
            "user": _user(),
            "working_dir": os.getcwd(),
            "pid": os.getpid(),
        }
        self._configs: dict[str, tuple[ModelEntry, RunDefaults, dict[str, Any]]] = {}
        self._summed: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self.frames = ViewerFrames(self._frame, EVERY_S)
        self._seats = Seats(MAX_SOCKETS, "worker")

    async def run(self) -> None:
        """Read devices and sum metrics every DEVICE_EVERY_S while websockets are open. Runs until cancelled."""
        while True:
            await self.frames.looked.wait()
            self._summed = of_models(self._metrics.registry)
            await self._health.refresh()
            await asyncio.sleep(DEVICE_EVERY_S)

    async def show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames to a websocket until it closes. Refuse a wrong path or token, and sockets beyond MAX_SOCKETS."""
        try:
            self._admit(scope)
            with self._seats.seat(scope):
                if not self.frames.looking:
                    self._summed = of_models(self._metrics.registry)
                await self.frames.show(scope, receive, send)
        except SIEError as error:  # all of these errors are raised before the websocket is accepted
            await refuse_upgrade(scope, send, error)

    def _admit(self, scope: Scope) -> None:
        """Check the token and the path of a websocket. Raises NotFound, Unauthenticated."""
        expected, token = self._settings.config_read_token, bearer(headers_of(scope).get("authorization", ""))
        if expected is not None and not expected.matches(token):
            raise Unauthenticated(
                "send the config read token as bearer token" if not token else "this token is not the config read token"
            )
        if scope["path"] != PATH:
            raise NotFound(f"no such path; the status of a worker is at {PATH}")

    def _frame(self) -> str:
        worker, health = self._health.worker, self._health
        hosted: dict[str, list[ModelState]] = {}
        for state in worker.models if worker else ():
            hosted.setdefault(state.name, []).append(state)
        counters, histograms = self._summed
        shown = health.descriptions.values()
        ran = [batch for description in shown for batch in description.batches or ()]
        is_reported = any(description.batches is not None for description in shown)
        batches = {"batches": [msgspec.structs.asdict(batch) for batch in ran]} if is_reported else {}
        return msgspec.json.encode(
            {
                "timestamp": time.time(),
                "ready": health.not_ready() is None,
                "name": self._id,
                "machine_profile": self._lane.machine_profile,
                "pool_name": worker.source.lane.pool if worker else self._lane.pool,
                "gpu_count": health.gpu_count,
                "bundle": self._lane.bundle,
                "bundle_config_hash": health.feed.catalogue.epoch,
                "loaded_models": [
                    name for name, states in hosted.items() if any(state.state == "loaded" for state in states)
                ],
                "max_batch_requests": self._limits.requests,
                "server": {**self._server, "uptime_seconds": round(time.monotonic() - self._started_s, 3)},
                "gpus": self._devices(),
                "models": self._models(worker, hosted),
                "counters": counters,
                "histograms": histograms,
                **batches,
            }
        ).decode()

    def _devices(self) -> list[dict[str, Any]]:
        health = self._health
        return [
            {
                "device": health.device_name(health.links[number]),
                "name": description.gpu or platform.machine(),
                "gpu_type": self._settings.gpu_type or description.gpu or description.device.partition(":")[0],
                "utilization_pct": description.utilization_percent,
                "memory_used_bytes": description.memory_used_bytes,
                "memory_total_bytes": description.memory_total_bytes,
                "memory_threshold_pct": description.threshold_percent,
            }
            for number, description in health.descriptions.items()
        ]

    def _models(self, worker: Worker | None, hosted: dict[str, list[ModelState]]) -> list[dict[str, Any]]:
        """Return the models of this worker's bundle, and other models that it loaded or tried to load, sorted by used
        memory, the largest first.
        """
        pending = worker.inventory.pending_inputs() if worker else {}
        statuses = {status.model: status for status in worker.models.statuses()} if worker else {}
        catalogue = self._health.feed.catalogue
        rows = []
        for name in sorted(
            {
                *(entry.id for entry in catalogue.entries.values() if self._lane.bundle in catalogue.bundles_of(entry)),
                *hosted,
            }
        ):
            here, status = hosted.get(name, []), statuses.get(name)
            loaded = [state for state in here if state.state == "loaded"]
            if here:
                entry, run = here[0].resolved.entry, here[0].resolved.run
            else:
                entry = catalogue.entries[name]
                run = entry.run
            row = {
                "name": name,
                "state": status.state if status else "available",
                "device": ",".join(self._health.device_name(self._health.links[state.device]) for state in loaded),
                "memory_bytes": status.memory_bytes if status else 0,
                "config": self._config(name, entry, run),
                "queue_depth": status.queued if status else 0,
                "queue_pending_items": pending.get(name, 0),
            }
            if worker is not None and loaded:
                row["adaptive_batching"] = self._batching(worker, loaded[0])
            rows.append(row)
        return sorted(rows, key=lambda row: -row["memory_bytes"])

    def _config(self, name: str, entry: ModelEntry, run: RunDefaults) -> dict[str, Any]:
        cached = self._configs.get(name)
        if cached is None or cached[0] is not entry or cached[1] is not run:
            present = self._health.feed.catalogue.entries
            self._configs = {
                model: config for model, config in self._configs.items() if model.partition(":")[0] in present
            }
            cached = self._configs[name] = (
                entry,
                run,
                {
                    "hf_id": entry.weights.hub or None,
                    "adapter": entry.family,
                    "inputs": entry.inputs,
                    "outputs": listed_outputs(entry),
                    "dims": widths(entry, run),
                    "max_sequence_length": entry.max_tokens,
                },
            )
        return cached[2]

    def _batching(self, worker: Worker, hosted: ModelState) -> dict[str, Any]:
        """Return how long the sidecar gathers deliveries (the same for all models), and how full the batches of this
        model are. `p50_ms`: median time of recent work items from delivery to answer. `headroom_ms`: target minus
        `p50_ms`. Before the first answer, `p50_ms` and `headroom_ms` are null, and `calibrated` is false.
        """
        p50_s, wait_s = worker.intake.gathering()
        target_ms = self._settings.adaptive_target_p50_ms
        p50_ms = None if p50_s is None else round(1000 * p50_s, 3)
        return {
            "calibrated": p50_ms is not None,
            "target_p50_ms": target_ms,
            "wait_ms": round(1000 * wait_s, 3),
            "batch_cost": self._limits.cost,
            "p50_ms": p50_ms,
            "headroom_ms": None if p50_ms is None else round(target_ms - p50_ms, 3),
            "fill_ratio": None if hosted.fill_ratio is None else round(hosted.fill_ratio, 4),
        }


def worker_app(health: WorkerHealth, metrics: SidecarMetrics, status: WorkerStatus) -> App:
    """Build the application for the worker's port: metrics, probes and `/ws/status`."""
    plain = probes(health.not_ready, metrics.registry)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await status.show(scope, receive, send)
        else:
            await plain(scope, receive, send)

    return app


def _user() -> str:
    with contextlib.suppress(KeyError):  # a user id of a container may have no name
        return pwd.getpwuid(os.getuid()).pw_name
    return str(os.getuid())


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
