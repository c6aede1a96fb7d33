"""Status of the cluster for people and programs: `/health` and websockets."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import parse_qs

import msgspec

import sie_contracts
from sie_broker import Broker, BrokerError
from sie_broker.dead_letters import letter_stream
from sie_contracts.api.operations import ClusterInfo, DeviceInfo, Health, ModelSummary, WorkerInfo
from sie_contracts.errors import ErrorInfo, NotFound, NotReady
from sie_contracts.settings import Settings, public_url
from sie_contracts.status import QueueInfo
from sie_contracts.wire.heartbeats import Heartbeat
from sie_gateway.admission.admission import Peers
from sie_gateway.admission.grant import Grant
from sie_gateway.fleet.lag import Labels, Lag
from sie_gateway.fleet.lanes import LOADS, STATES, Fleet
from sie_gateway.fleet.planner import ModelBacklog
from sie_gateway.fleet.pool_rules import HIDDEN
from sie_gateway.fleet.workers import WorkerFrame, WorkerSocket, WorkerSockets
from sie_runtime.feed import CatalogueFeed
from sie_runtime.http.asgi import Receive, Scope, Send
from sie_runtime.http.websocket import Seats, ViewerFrames
from sie_runtime.process import Stop

CLUSTER_EVERY_S = 1.0
# seconds between two checks whether a worker has sent a new status frame; a worker sends five frames per second
WORKER_EVERY_S = 0.1
FIRST_FRAME_S = 2.0
MAX_SOCKETS = 128
DEAD_EVERY_S = 5.0
CLUSTER_PATH, WORKER_PATH = "/ws/cluster-status", "/ws/status"
_OF_LANE = ("pool", "machine_profile", "bundle", "priority")
Pooled = TypeVar("Pooled", WorkerInfo, QueueInfo)


@dataclass(frozen=True)
class ViewedWorker:
    """Worker as pages show it. `models`: model -> (state, queue depth). `failures`: model -> error of the failed load.
    `clock_ahead_s`: the worker's clock minus the broker's clock in seconds, None if unknown.
    """

    info: WorkerInfo
    models: Mapping[str, tuple[str, int]]
    failures: Mapping[str, ErrorInfo] = field(default_factory=dict)
    clock_ahead_s: float | None = None


def of_heartbeat(beat: Heartbeat, *, healthy: bool, starting: bool = False) -> ViewedWorker:
    """Describe a worker by its heartbeat. `models` is empty for a worker that is neither healthy nor starting."""
    reason = "" if healthy else beat.unready if starting or beat.leaving else "its heartbeats have stopped"
    reports = [status for status in beat.models if healthy or (starting and status.state in LOADS)]
    info = WorkerInfo(
        name=beat.worker,
        url=None,
        gpu=beat.machine_profile,
        gpu_count=beat.gpu_count,
        pool=beat.pool,
        loaded_models=[status.model for status in beat.models if status.state == "loaded"],
        queue_depth=beat.queue_depth,
        memory_used_bytes=beat.memory_used_bytes,
        memory_total_bytes=beat.memory_total_bytes,
        healthy=healthy,
        bundle=beat.bundle,
        bundle_config_hash=beat.config_epoch,
        device=beat.device,
        devices=[
            DeviceInfo(
                device.device,
                device.ready,
                device.gpu,
                device.memory_used_bytes,
                device.memory_total_bytes,
                device.queue_depth,
                list(device.models),
            )
            for device in beat.devices
        ],
        reason=reason,
    )
    failures = {
        status.model: status.error for status in reports if status.state == "failed" and status.error is not None
    }
    models = {status.model: (status.state, status.queued) for status in reports}
    return ViewedWorker(info, models, failures, beat.clock_ahead_s)


def of_socket(url: str, status: WorkerFrame | None) -> ViewedWorker:
    """Describe a worker by the status from its websocket; `status` is None if no status has arrived."""
    url = public_url(url)
    if status is None:
        return ViewedWorker(WorkerInfo(url, url, "", 0, "", [], 0, 0, 0, False, "", "", ""), {})
    devices = status.gpus
    info = WorkerInfo(
        name=status.name,
        url=url,
        gpu=status.machine_profile,
        gpu_count=status.gpu_count,
        pool=status.pool_name,
        loaded_models=status.loaded_models,
        queue_depth=sum(model.queue_depth for model in status.models),
        memory_used_bytes=sum(device.memory_used_bytes for device in devices),
        memory_total_bytes=sum(device.memory_total_bytes for device in devices),
        healthy=status.ready,
        bundle=status.bundle,
        bundle_config_hash=status.bundle_config_hash,
        device=",".join(device.device for device in devices),
    )
    return ViewedWorker(info, {model.name: (model.state, model.queue_depth) for model in status.models})


def summaries(models: Iterable[str], workers: Iterable[ViewedWorker]) -> list[ModelSummary]:
    """Return a summary of each model from the workers' reports. A profile (`model:profile`) counts for its model."""
    reports: dict[str, list[tuple[WorkerInfo, str, int]]] = {model: [] for model in models}
    for worker in workers:
        for name, (state, queued) in worker.models.items():
            reports.get(name.partition(":")[0], []).append((worker.info, state, queued))
    return [_summary(model, states) for model, states in reports.items()]


def failures(workers: Iterable[ViewedWorker]) -> dict[str, str]:
    """Return model -> error message of its failed load, at the first of `workers` that reports one."""
    errors: dict[str, str] = {}
    for worker in workers:
        for name, error in worker.failures.items():
            errors.setdefault(name.partition(":")[0], error.message)
    return errors


def _summary(model: str, reports: list[tuple[WorkerInfo, str, int]]) -> ModelSummary:
    present = {state for _, state, _ in reports}
    return ModelSummary(
        model,
        next((state for state in STATES if state in present), "available"),
        len({info.name for info, state, _ in reports if state == "loaded"}),
        sorted({info.gpu for info, _, _ in reports}),
        sum(queued for _, _, queued in reports),
    )


def of_pool(info: Pooled, visible: Callable[[str], bool]) -> Pooled:
    """Return the worker or queue `info`, with HIDDEN as its pool if the credential may not read the pool's name."""
    return info if visible(info.pool) else msgspec.structs.replace(info, pool=HIDDEN)


class ClusterStatus:
    """Status of the cluster, as this gateway knows it. `dead_letters`: number of all dead letters of this gateway's
    pools, deleted ones included.
    """

    def __init__(
        self,
        settings: Settings,
        queue: Broker,
        feed: CatalogueFeed,
        fleet: Fleet,
        peers: Peers,
        pools: Iterable[str],
        lag: Lag,
        nats_monitor_url: str | None,
        visible: Callable[[Grant], Callable[[str], bool]] = lambda grant: lambda pool: True,
        faults: Mapping[str, str] | None = None,
    ) -> None:
        """Create the status. `visible(grant)(pool)` returns True if the credential of `grant` may read the name `pool`.
        `faults`: packages that this gateway could not load, each with the reason.
        Raises SettingError if SIE_GATEWAY_KUBERNETES is set, but the gateway does not run in a pod.
        """
        self._settings = settings
        self.plugin_faults = {} if faults is None else faults
        self._queue = queue
        self._feed = feed
        self._fleet = fleet
        self._peers = peers
        self._pools = pools
        self._lag = lag
        self._nats_monitor_url = nats_monitor_url
        self.visible = visible
        self.sockets = WorkerSockets(settings)
        self.dead_letters = 0
        self.seats = Seats(MAX_SOCKETS, "gateway")
        # (API key, worker) -> frames; the worker is None for frames about the cluster
        self._frames: dict[tuple[str, WorkerSocket | None], ViewerFrames] = {}

    async def run(self, stop: Stop) -> None:
        """Count dead letters every DEAD_EVERY_S seconds. Ends at `stop`."""
        while not await stop.wait_for(DEAD_EVERY_S):
            # ignore errors: other modules report an unreachable broker, and the stream of a new pool may not exist
            with contextlib.suppress(BrokerError):
                states = [await self._queue.stream_state(letter_stream(pool)) for pool in sorted(self._pools)]
                self.dead_letters = sum(state.last_sequence for state in states)

    def workers(self) -> list[ViewedWorker]:
        """Return all known workers, healthy or not, in the order of their names or URLs."""
        if self._settings.gateway_health_mode == "ws":
            return [of_socket(url, status) for url, status in self.sockets.statuses()]
        return [
            of_heartbeat(beat, healthy=healthy, starting=self._fleet.is_starting(beat.worker))
            for beat, healthy in self._fleet.workers()
        ]

    def view(self) -> tuple[list[ViewedWorker], ClusterInfo, list[ModelSummary]]:
        """Return all workers, the totals of the cluster, and a summary of each model."""
        workers = self.workers()
        healthy = [worker for worker in workers if worker.info.healthy]
        cluster = ClusterInfo(
            len(healthy),
            sum(worker.info.gpu_count for worker in healthy),
            len({model for worker in healthy for model in worker.info.loaded_models}),
            round(self._peers.qps(), 3),
        )
        return workers, cluster, summaries(sorted(self._feed.catalogue.entries), workers)

    def health(self, grant: Grant) -> Health:
        """Return the body of `/health`. Names of pools that the credential may not read are replaced by HIDDEN."""
        settings = self._settings
        workers, cluster, models = self.view()
        visible = self.visible(grant)
        infos = [of_pool(worker.info, visible) for worker in workers]
        healthy = [info for info in infos if info.healthy]
        return Health(
            status="healthy" if healthy else "degraded",
            type="gateway",
            version=sie_contracts.__version__,
            nats_url=_public(settings.nats_url),
            nats_monitor_url=_public(self._nats_monitor_url),
            config_url=_public(settings.config_service_url),
            configured_gpu_types=list(settings.gateway_configured_gpus or ()),
            live_gpu_types=sorted({info.gpu for info in healthy}),
            cluster=cluster,
            workers=healthy,
            unhealthy_workers=[info for info in infos if not info.healthy],
            models=models,
        )

    def queues(self) -> tuple[list[QueueInfo], list[QueueInfo]] | None:
        """Return two lists: the queues of the lanes (pool, machine profile and bundle), and the queues of single
        models. Return None while the queues are unknown.
        """
        if not self._lag.is_known:
            return None
        return _queues(_OF_LANE, self._lag.lanes), _queues(("model", *_OF_LANE), self._lag.models)

    def _cluster_frame(self, grant: Grant) -> str:
        workers, cluster, models = self.view()
        visible = self.visible(grant)
        queues, model_queues = (
            [of_pool(entry, visible) for entry in queue_list] if queue_list is not None else None
            for queue_list in self.queues() or (None, None)
        )
        return msgspec.json.encode(
            {
                "timestamp": time.time(),
                "version": sie_contracts.__version__,
                "cluster": cluster,
                "workers": [of_pool(worker.info, visible) for worker in workers],
                "models": models,
                "queues": queues,
                "model_queues": model_queues,
                "failures": failures(workers),
            }
        ).decode()

    async def show(self, path: str, query: str, grant: Grant, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a websocket until it is closed. Before the handshake, raises NotFound, NotReady, ResourceExhausted."""
        if path not in (CLUSTER_PATH, WORKER_PATH):
            raise NotFound("no such path")
        with self.seats.seat(scope, grant.key):
            if path == CLUSTER_PATH:
                frames = ViewerFrames(lambda: self._cluster_frame(grant), CLUSTER_EVERY_S)
                await self._show(self._frames.setdefault((grant.key, None), frames), scope, receive, send)
            else:
                await self._show_worker(query, grant, scope, receive, send)

    async def _show_worker(self, query: str, grant: Grant, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.sockets.watched(self._asked_for(query)) as socket:
            if not await socket.wait_for_frame(FIRST_FRAME_S):
                raise NotReady(f"the worker sent no status within {FIRST_FRAME_S:g} s")

            def frame() -> str | None:
                status = socket.status
                return socket.frame if status is None or self.visible(grant)(status.pool_name) else None

            if frame() is None and socket.frame is not None:
                raise NotFound("this worker serves a reservation of another API key, so its status is not shown")
            frames = self._frames.setdefault((grant.key, socket), ViewerFrames(frame, WORKER_EVERY_S))
            await self._show(frames, scope, receive, send)

    async def _show(self, frames: ViewerFrames, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames to a websocket until it is closed. Websockets share `frames` if they have the same API key and
        show the same: the cluster, or the same worker.
        """
        try:
            await frames.show(scope, receive, send)
        finally:
            if not frames.looking:
                self._frames = {key: entry for key, entry in self._frames.items() if entry is not frames}

    def _asked_for(self, query: str) -> str:
        """Return the URL of the worker whose index is the query parameter `worker` (default 0). Raises NotFound."""
        urls = self.sockets.urls()
        place = parse_qs(query).get("worker", ["0"])[0]
        if not urls:
            raise NotFound(
                f"this gateway has no URL of a worker (set SIE_GATEWAY_WORKERS); {CLUSTER_PATH} shows all workers"
            )
        if not place.isdecimal() or len(place) > 4 or int(place) >= len(urls):
            raise NotFound(f"worker: expected a number from 0 to {len(urls) - 1}")
        return urls[int(place)]


def _queues(names: tuple[str, ...], waiting_by_labels: Mapping[Labels, ModelBacklog]) -> list[QueueInfo]:
    return [
        QueueInfo(messages=waiting.count, oldest_s=round(waiting.oldest_s, 3), **dict(zip(names, labels, strict=True)))
        for labels, waiting in waiting_by_labels.items()
    ]


def _public(url: str | None) -> str | None:
    return public_url(url) if url else None
