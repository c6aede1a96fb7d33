"""The sidecar process: connect to the broker and the adapters, read the catalogue, run work, drain at the end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from sie_broker import Broker, BrokerError
from sie_contracts.errors import BundleConflict, ModelNotFound, SIEError
from sie_contracts.models.alias_checks import resolve_all
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.models.load_errors import MAX_ATTEMPTS
from sie_contracts.settings import Mode, SettingError, Settings, default_worker_id
from sie_contracts.wire import topology
from sie_contracts.wire.topology import Lane
from sie_runtime import tracing
from sie_runtime.connection import connected
from sie_runtime.feed import CatalogueFeed, ConfigSource, config_source, packaged_catalogue
from sie_runtime.http.server import HttpServer
from sie_runtime.http.websocket import WebSocketProtocol
from sie_runtime.process import WORKER, Stop, Tasks, Trouble, cancel_all, retry
from sie_sidecar.batch import BatchLimits
from sie_sidecar.health import WorkerHealth
from sie_sidecar.intake import AHEAD_AGAIN_S
from sie_sidecar.link import AdapterGone, AdapterLinks
from sie_sidecar.metrics import SidecarMetrics
from sie_sidecar.pool_membership import PoolMembership
from sie_sidecar.status import WorkerCollector, WorkerStatus, worker_app
from sie_sidecar.worker import Worker, WorkerIdentity
from sie_store.payloads import open_store

DRAIN_S = 9.0
# minimum number of connections to an adapter, which batches and loads share; the settings may set a lower number
MIN_CONNECTIONS = 6
REFILL_S = 1.0
PRELOAD_RETRY_S = 5.0
# seconds to wait for the adapters of all devices before preloading, so that the models can be distributed over them
DEVICES_S = 30.0
SERVE_RETRY_S = 0.5
# seconds that an adapter may take to reply to a ping; added to the time after which the adapter counts as unresponsive
PING_ANSWER_S = 0.25
_logger = logging.getLogger("sie.sidecar")


def limits_of(settings: Settings, mode: Mode) -> BatchLimits:
    """Return the limits of a batch. The largest number of work items and the waiting time come from different settings
    in standalone mode and in queue mode.
    """
    if mode == "standalone":
        requests, wait_ms = settings.max_batch_requests, settings.max_batch_wait_ms
    else:
        requests, wait_ms = settings.batcher_max_batch_requests, settings.batcher_coalesce_ms
    return BatchLimits(settings.max_batch_cost, requests, wait_ms / 1000, settings.bulk_max_overtakes)


def connections_of(settings: Settings, lanes: int) -> int:
    """Return the number of connections to an adapter whose device runs `lanes` batches at the same time."""
    if settings.ipc_pool_size is not None:
        return settings.ipc_pool_size
    return min(settings.pool_size, max(MIN_CONNECTIONS, lanes + settings.rust_pipeline_depth - 1))


async def serve(
    settings: Settings,
    broker: Broker,
    source: ConfigSource | None,
    stop: Stop,
    *,
    host: str,
    mode: Mode = "queue",
    drain_s: float | None = None,
) -> int:
    """Serve the lane (pool, machine profile and bundle) of `settings` until `stop`, then drain. Return the exit status.
    Raises SettingError.
    """
    worker_id = settings.worker_id or default_worker_id()
    WORKER.set(worker_id)
    tracer = tracing.start(settings.tracing, "sidecar", worker_id)
    lane = Lane(settings.pool, settings.profile, settings.bundle)
    metrics = SidecarMetrics()
    feed = CatalogueFeed(
        broker,
        source,
        trusted=settings.nats_config_trusted_producers,
        poll_s=settings.worker_config_poll_interval_ms / 1000,
        full_export_s=settings.worker_config_full_export_interval_ms / 1000,
        initial=packaged_catalogue() if source is None else None,
        bundle=settings.bundle,
    )
    ping_s = settings.worker_ping_interval_ms / 1000
    stale_s = ping_s * settings.worker_readyz_stale_mult + PING_ANSWER_S
    size = functools.partial(connections_of, settings)
    links = AdapterLinks(settings.ipc_socket_path, size=size, ping_s=ping_s, stale_s=stale_s)
    health = WorkerHealth(settings, broker, lane, worker_id, links, feed)
    metrics.registry.register(WorkerCollector(health))
    feed.on_change(health.catalogue_changed)
    status = WorkerStatus(settings, health, metrics, lane, worker_id, limits_of(settings, mode))
    http = HttpServer(
        worker_app(health, metrics, status),
        host,
        settings.worker_metrics_port,
        setting="SIE_WORKER_METRICS_PORT",
        websockets=WebSocketProtocol,
        allowed_hosts=settings.allowed_hosts,
        refused=metrics.count_refused,
    )
    await http.start()
    tasks = Tasks(_logger, stop.request)
    try:
        tasks.start(feed.run(stop), "catalogue feed")
        tasks.start(_in_a_bundle(feed, settings.bundle), "bundle")
        links.for_every(lambda link: link.listeners.append(lambda _: health.changed()))
        tasks.start(links.run(stop), "adapter links")
        with_broker = functools.partial(retry, errors=(BrokerError,), stop=stop, logger=_logger)
        await with_broker(health.listen, task="listening for gateways that look for this worker")
        tasks.start(health.run(), "heartbeats")
        tasks.start(health.observe(), "memory and models on disk")
        tasks.start(status.run(), "status")
        # the file of leases is on the volume of the adapter's socket, because this volume outlives the container.
        # Several workers may share the volume, so the file's name has the worker's id
        ledger = Path(f"{settings.ipc_socket_path}.{topology.token(worker_id)}.leases")
        identity = WorkerIdentity(
            worker_id,
            lane,
            limits_of(settings, mode),
            ledger=ledger if mode == "queue" else None,
            store=open_store(settings.payload_store_url),
            tracer=tracer,
        )
        worker = Worker(
            identity, settings, broker, feed, links, metrics, on_failure=stop.request, on_change=health.changed
        )
        admission: PoolMembership | None = None
        following: asyncio.Task[None] | None = None
        if settings.pool_admission_enabled and settings.gateway_url is not None:
            admission = PoolMembership(settings.gateway_url, settings.config_read_token, worker_id, lane.pool)
            health.asks = True
            hints = topology.assigned_subject(worker_id), admission.on_hint
            await with_broker(lambda: broker.subscribe(*hints), task="listening for changes of the assigned pool")
            tasks.start(admission.run(stop), "pool admission")
        stream = topology.stream_name(lane.pool)
        # `stream_state` fails until the stream exists. Workers do not create it: it is created when a gateway needs it
        await with_broker(lambda: broker.stream_state(stream), task=f"waiting for {stream}")
        try:
            if not stop.requested:
                await worker.start(stop)
                if admission is None:
                    await with_broker(worker.source.pull, task="beginning to pull")
                else:
                    await _unless_stopped(stop, admission.asked.wait())
                    following = tasks.start(_follow(admission, worker, health, stop), "pool assignment")
                health.worker = worker
                health.changed()  # from this heartbeat on, gateways may place models on this worker
                await _unless_stopped(stop, _preload(settings, feed, links, worker, health, stop))
                tasks.start(_upkeep(worker, stop), "upkeep")
                idle_s = settings.idle_evict_s
                links.for_every(lambda link: tasks.start(worker.models.devices[link.number].run(idle_s), "hosting"))
                _logger.info("sidecar %s serves lane %s, metrics on %d", worker_id, lane, http.port)
                await stop.wait()
        finally:
            _logger.info("sidecar draining, %d work items in flight", worker.depth)
            health.leaving = True
            await health.publish()
            if following is not None:
                await cancel_all([following])
            await worker.drain(DRAIN_S if drain_s is None else drain_s)
            # if the broker is unreachable, it redelivers the messages when their leases end
            with contextlib.suppress(BrokerError):
                await broker.flush()
    finally:
        await tasks.cancel()
        await http.stop()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    return 1 if tasks.failed else 0


async def _follow(admission: PoolMembership, worker: Worker, health: WorkerHealth, stop: Stop) -> None:
    """Serve the pool that gateways assign to this worker, and follow changes of the assignment, until `stop`. Load the
    pinned models of the pool immediately, and again every AHEAD_AGAIN_S seconds if they are not loaded.
    """
    trouble = Trouble(_logger, "the assigned pool cannot be served yet")
    while not stop.requested:
        pool = admission.pool()
        if pool == worker.source.pool:
            trouble.passed()
            if pool is not None:
                worker.loading.ahead(admission.pinned)
            await stop.wait_woken(admission.changed, AHEAD_AGAIN_S)
            continue
        _logger.info("pool that this worker now serves: %s", pool or "none, because no gateway assigns one to it")
        try:
            await worker.source.serve(pool)
        except BrokerError as error:
            trouble.met(error)
            await stop.wait_woken(admission.changed, SERVE_RETRY_S)
        health.changed()


async def _preload(
    settings: Settings, feed: CatalogueFeed, links: AdapterLinks, worker: Worker, health: WorkerHealth, stop: Stop
) -> None:
    """Load the models of SIE_PRELOAD_MODELS. The worker is not ready before this function ends. A failed load is tried
    again, at most MAX_ATTEMPTS times in all, unless its error is permanent. Between two attempts, the worker reports
    the error as the reason why it is not ready. After the last attempt, log the error, and serve without the model.
    Raises SettingError for an unknown name.
    """
    if not settings.preload_models:
        return
    health.preloading = ", ".join(settings.preload_models)
    while not feed.first.is_set() and not await stop.wait_for(0.05):
        pass
    if stop.requested:
        return
    await links.wait_all_connected(DEVICES_S)
    resolved = [entry for name in settings.preload_models for entry in _named(feed.catalogue, name, settings.bundle)]
    for index, model in enumerate(resolved):
        left = ", ".join(entry.canonical for entry in resolved[index:])
        health.preloading = left
        while not stop.requested:
            # the catalogue entry may have changed since the last attempt; if it was removed, load the earlier entry
            with contextlib.suppress(ModelNotFound, BundleConflict):
                model = feed.catalogue.resolve(f"{model.entry.id}:{model.profile}", follow=False)
            hosted = worker.models.obtain(model, feed.catalogue.revisions.get(model.entry.id, 0))
            try:
                await worker.models.device_of(hosted).ensure(hosted)
                break
            except AdapterGone:
                await links.wait_connected()
            except SIEError as error:
                if error.extras.get("permanent") or hosted.attempts >= MAX_ATTEMPTS:
                    _logger.error("%s of SIE_PRELOAD_MODELS could not be loaded: %s", model.canonical, error)
                    break
                health.preloading = f"{left} (try {hosted.attempts} of {MAX_ATTEMPTS} failed: {error})"
                health.changed()
                await stop.wait_for(PRELOAD_RETRY_S)
    health.preloading = ""
    health.changed()


async def _unless_stopped(stop: Stop, work: Coroutine[Any, Any, object]) -> None:
    """Wait until `work` ends or `stop` is set. Cancel `work` if it still runs. Raises the exceptions of `work`."""
    doing = asyncio.create_task(work)
    tasks = doing, asyncio.create_task(stop.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
    finally:
        await cancel_all(tasks)


async def _in_a_bundle(feed: CatalogueFeed, bundle: str) -> None:
    """Log an error if the first catalogue lacks the bundle: this worker gets no work until a catalogue has it."""
    await feed.first.wait()
    if bundle not in (bundles := feed.catalogue.bundles):
        _logger.error(
            "SIE_BUNDLE: the catalogue has no bundle %s, so this worker gets no work; it has the bundles %s",
            bundle,
            ", ".join(sorted(bundles)),
        )


def _named(catalogue: Catalogue, name: str, bundle: str) -> tuple[Resolved, ...]:
    """Return the model with this name or, if the name is an alias, all models of the alias. Raises SettingError if the
    name is unknown, or if `bundle` does not serve all of these models.
    """
    try:
        entries = resolve_all(catalogue, name)
    except ModelNotFound as error:
        like = error.extras.get("suggestions")
        fix = f"did you mean {' or '.join(like)}?" if like else "`sie models list` shows all"
        raise SettingError("SIE_PRELOAD_MODELS", f"{error.message}; {fix}") from error
    except BundleConflict as error:
        raise SettingError("SIE_PRELOAD_MODELS", error.message) from error
    for resolved in entries:
        if bundle not in (able := catalogue.bundles_of(resolved.entry)):
            message = (
                f"{resolved.canonical} is served by bundle {' or '.join(able)}, but this worker serves bundle {bundle} "
                "(SIE_BUNDLE)"
            )
            raise SettingError("SIE_PRELOAD_MODELS", message)
    return entries


async def _upkeep(worker: Worker, stop: Stop) -> None:
    """Every second, set how many messages each consumer may deliver, and load a model on one more device if the devices
    that have it cannot keep up with its work. Every ten seconds, also list the consumers.
    """
    trouble = Trouble(_logger, "the consumers or the placement table cannot be checked")
    rounds = 0
    while not await stop.wait_for(REFILL_S):
        rounds += 1
        worker.check_copies()
        with trouble.logged(BrokerError):
            await worker.source.upkeep(is_check=rounds % 10 == 0)


async def run(settings: Settings, stop: Stop, *, host: str, drain_s: float | None = None) -> int:
    """Connect to NATS, serve until `stop`, then drain for at most `drain_s` seconds (None: DRAIN_S). Return the exit
    status. Raises SettingError.
    """
    async with connected(settings.nats_url, "sie-sidecar", stop, password=settings.nats_password) as broker:
        if broker is None:
            return 0
        source = config_source(settings.config_service_url, settings.config_read_token)
        return await serve(settings, broker, source, stop, host=host, drain_s=drain_s)
