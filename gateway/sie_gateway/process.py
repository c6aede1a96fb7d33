"""The gateway process: connect to NATS, create the streams, listen, serve, shut down.

SIGTERM ──► lame duck: not ready, serves every request, closes each connection after its response
        ──► drain: refuses new work, finishes the requests in progress ──► exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sie_broker import Broker, BrokerError, TopologyMismatch
from sie_contracts import entry_points
from sie_contracts.errors import SHUTTING_DOWN, QueueUnavailable, ShuttingDown
from sie_contracts.settings import SettingError, Settings
from sie_contracts.wire import topology
from sie_gateway.admission.admission import Admission
from sie_gateway.admission.grant import Quotas
from sie_gateway.collector import Live
from sie_gateway.fleet.demand import ColdStarts, DemandRecords
from sie_gateway.fleet.lag import Lag
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.fleet.placement import Ages, Placer
from sie_gateway.fleet.pool_reconciler import PoolReconciler
from sie_gateway.fleet.pool_rules import not_found
from sie_gateway.fleet.pools import PoolDirectory, PoolRecord
from sie_gateway.fleet.residency import Residencies
from sie_gateway.fleet.scaling import Scaling
from sie_gateway.http.app import Gate, create_app, metrics_app, require_tokens
from sie_gateway.http.routes import PLUGINS, inference_route
from sie_gateway.inference.call import RequestListeners, RequestLogger
from sie_gateway.inference.handler import Inference
from sie_gateway.inference.results import ResultInbox
from sie_gateway.inference.runner import Runner
from sie_gateway.metrics import Metrics
from sie_gateway.operations.dead_letters import DeadLetterOperations
from sie_gateway.operations.status import ClusterStatus
from sie_gateway.plugin import PluginContext
from sie_gateway.state import Gateway, GatewayReadiness
from sie_gateway.streams.backlog import Backlog
from sie_gateway.streams.offload import Offload, life_s
from sie_gateway.streams.publish import LOAD_CEILING_S, WorkQueue
from sie_runtime import tracing
from sie_runtime.clock import BrokerClock
from sie_runtime.connection import connected
from sie_runtime.feed import CatalogueFeed, ConfigSource, config_source, packaged_catalogue
from sie_runtime.http.server import STOP_S, HttpServer
from sie_runtime.http.websocket import WebSocketProtocol
from sie_runtime.keys import Keys
from sie_runtime.process import Stop, Tasks, cancel_all, retry
from sie_store.payloads import open_store

EPOCH_POLL_S = 5.0
FULL_EXPORT_S = 300.0
FIRST_ANSWER_S = 2.0
# seconds by which a drain may exceed the longest time limit of a request: time to send the last responses
_LATE_S = 1.0
# field in which an existing stream may differ from the configured stream -> setting that the error then names
_SETTINGS = {
    "storage": "SIE_STREAM_STORAGE",
    "replicas": "SIE_STREAM_REPLICAS",
    "max_bytes": "SIE_QUEUE_MAX_BYTES",
    "max_age_s": "SIE_GATEWAY_REQUEST_TIMEOUT",
}
_logger = logging.getLogger("sie.gateway")


@dataclass(frozen=True, kw_only=True)
class GatewayProcess:
    """Objects of a gateway that `serve` starts and ends. `keys`: None if SIE_AUTH_MODE is not `token`. `offload`: None
    without SIE_PAYLOAD_STORE_URL.
    """

    gateway: Gateway
    readiness: GatewayReadiness
    gate: Gate
    broker: Broker
    feed: CatalogueFeed
    keys: Keys | None
    offload: Offload | None
    clock: BrokerClock
    record: PoolRecord
    keeper: PoolReconciler
    inbox: ResultInbox
    queue: WorkQueue
    placer: Placer
    backlog: Backlog
    lag: Lag
    admission: Admission
    demand: DemandRecords


def build(
    settings: Settings,
    broker: Broker,
    source: ConfigSource | None,
    *,
    host: str,
    port: int,
    nats_monitor_url: str | None = None,
    data_dir: Path | None = None,
) -> GatewayProcess:
    """Build the objects of a gateway. Nothing is started or sent. Raises SettingError."""
    metrics = Metrics()
    initial = packaged_catalogue() if source is None else None
    feed = CatalogueFeed(
        broker,
        source,
        trusted=settings.nats_config_trusted_producers,
        poll_s=EPOCH_POLL_S,
        full_export_s=FULL_EXPORT_S,
        initial=initial,
    )
    clock = BrokerClock(broker, topology.stream_name(settings.pool))
    record = PoolRecord(settings, broker, clock)
    fleet = Fleet(broker, settings, spec=record.spec)
    inbox = ResultInbox(broker, metrics, on_late=lambda result: admission.answered_late(result))

    def on_lost(pool: str) -> None:
        _logger.error("the broker lost the work stream of pool %s, so the open requests of this pool fail", pool)
        lost = QueueUnavailable("the broker lost the queue with the work of this request: send the request again")
        inbox.fail_pool(pool, lost)

    store = open_store(settings.payload_store_url)
    offload = (
        Offload(store, life_s(settings, settings.gateway_request_timeout + LOAD_CEILING_S), metrics)
        if store is not None
        else None
    )
    backlog = Backlog(broker, record)
    ages = Ages(backlog, clock.now_s)
    placer = Placer(
        broker,
        settings.adopt_after_ms / 1000,
        fleet,
        ages.waiting_of,
        clock.now_s,
        serves=record.__contains__,
        storage=settings.stream_storage,
        replicas=settings.stream_replicas,
    )
    queue = WorkQueue(
        broker,
        settings,
        metrics,
        on_lost,
        offload,
        on_publish=placer.note,
        serves=record.__contains__,
        is_reservation=record.is_reservation,
    )
    pools = PoolDirectory(record, fleet, queue, clock, metrics)
    admission = Admission(settings, broker, fleet, backlog, metrics, epoch=lambda: feed.catalogue.epoch)
    demand = DemandRecords(broker, clock.now_s, storage=settings.stream_storage, replicas=settings.stream_replicas)
    cold = ColdStarts(fleet, demand, metrics, pools.pending_reason)

    def on_pool_gone(name: str) -> None:
        inbox.fail_pool(name, not_found(name))
        for part in (admission, backlog, ages, placer, demand, cold, residencies):
            part.drop_pool(name)

    keeper = PoolReconciler(settings, broker, pools, fleet, queue, clock, metrics, on_pool_gone)
    runner = Runner(feed, queue, inbox, metrics, admission, cold, settings.load_hold_s)
    inference = Inference(settings, feed, fleet, record, metrics, admission, runner)
    lag = Lag(broker, backlog, record, clock.now_s)
    scaling = Scaling(settings, feed, fleet, backlog, lag, admission.peers, demand, pools)
    faults = dict(entry_points.FAULTS)
    status = ClusterStatus(
        settings,
        broker,
        feed,
        fleet,
        admission.peers,
        record.own,
        lag,
        nats_monitor_url,
        pools.visible,
        faults,
    )
    keys = Keys(broker, settings.stream_replicas, clock) if settings.auth_mode == "token" else None
    gate = Gate(settings, keys, host)
    letters = DeadLetterOperations(broker, settings, metrics, record.own, placer.note)
    residencies = Residencies(broker, fleet, placer, cold)
    quotas = Quotas(admission.peers.count)
    listeners = RequestListeners(ended=[RequestLogger().ended])
    context = PluginContext(
        settings=settings,
        broker=broker,
        metrics=metrics,
        fleet=fleet,
        admission=admission,
        runner=runner,
        inference=inference,
        quotas=quotas,
        scaling=scaling,
        status=status,
        lag=lag,
        placer=placer,
        listeners=listeners,
        now_s=clock.now_s,
        grant_of_key=gate.of_key,
        inference_route=inference_route,
        host=host,
        port=port,
        data_dir=data_dir,
    )
    services = PLUGINS.build(context, faults)
    readiness = GatewayReadiness(broker, feed, keys)
    gateway = Gateway(
        settings,
        metrics,
        listeners,
        letters,
        residencies,
        quotas,
        fleet,
        pools,
        admission.peers,
        inference,
        status,
        scaling,
        services,
    )
    metrics.registry.register(Live(broker, feed, status, lag, demand, inference, inbox, admission))
    return GatewayProcess(
        gateway=gateway,
        readiness=readiness,
        gate=gate,
        broker=broker,
        feed=feed,
        keys=keys,
        offload=offload,
        clock=clock,
        record=record,
        keeper=keeper,
        inbox=inbox,
        queue=queue,
        placer=placer,
        backlog=backlog,
        lag=lag,
        admission=admission,
        demand=demand,
    )


async def serve(
    settings: Settings,
    broker: Broker,
    source: ConfigSource | None,
    stop: Stop,
    *,
    host: str,
    port: int,
    nats_monitor_url: str | None = None,
    drain_s: float | None = None,
    lame_duck_s: float = 0.0,
    on_listening: Callable[[int], None] | None = None,
    data_dir: Path | None = None,
) -> int:
    """Serve until `stop`. Then accept requests for `lame_duck_s` more seconds, and finish the open requests in at most
    `drain_s` seconds, by default `longest_drain_s`. Return the exit status. Raises SettingError.

    `data_dir`: data folder if `sie serve` runs this gateway, else None.
    """
    tracer = tracing.start(settings.tracing, "gateway")
    parts = build(settings, broker, source, host=host, port=port, nats_monitor_url=nats_monitor_url, data_dir=data_dir)
    gateway, readiness = parts.gateway, parts.readiness
    names, refused = settings.allowed_hosts, gateway.metrics.count_refused
    main = HttpServer(
        create_app(gateway, parts.gate, readiness, tracer),
        host,
        port,
        setting="--port",
        websockets=WebSocketProtocol,
        allowed_hosts=names,
        cors_origins=settings.cors_origins or (),
        refused=refused,
        min_rate=settings.min_body_rate,
    )
    try:
        side = HttpServer(
            metrics_app(gateway, readiness),
            host,
            settings.gateway_metrics_port,
            setting="SIE_GATEWAY_METRICS_PORT",
            allowed_hosts=names,
            refused=refused,
        )
    except SettingError:
        await main.stop()
        raise
    tasks = Tasks(_logger, stop.request)
    # `drained` ends most background tasks. It is set after the drain, because open requests need these tasks. The tasks
    # of plug-ins end at `stop`, before the drain.
    drained = Stop()
    end_s = 0.0
    measuring: asyncio.Task[None] | None = None
    await side.start()
    try:
        measuring = await _begin(parts, main, tasks, stop, drained)
        readiness.started = not stop.requested
        if on_listening is not None:
            on_listening(main.port)
        _logger.info("gateway listening on %s:%d, metrics on %d", host, main.port, side.port)
        await stop.wait()
        readiness.leaving = True
        main.leave()
        side.leave()
        await _leave(parts, main, stop, lame_duck_s)
        end_s = asyncio.get_running_loop().time() + (longest_drain_s(settings) if drain_s is None else drain_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end_s):
                await gateway.inference.idle.wait()
        if gateway.inference.slots.used:
            parts.inbox.fail_all(ShuttingDown(SHUTTING_DOWN))
    finally:
        stop.request()
        drained.request()
        await asyncio.gather(main.stop(max(STOP_S, end_s - asyncio.get_running_loop().time())), side.stop())
        await parts.inbox.stop()
        if measuring is not None:
            measuring.cancel()
        await tasks.settle(2.0)
        await tasks.cancel()
        await parts.queue.close()
        await parts.backlog.stop()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    return 1 if tasks.failed else 0


async def _begin(
    parts: GatewayProcess, main: HttpServer, tasks: Tasks, stop: Stop, drained: Stop
) -> asyncio.Task[None]:
    """Follow the catalogue and the other processes, listen, own the streams, then start all background tasks. Return
    the task that measures the broker's clock, which ends only when it is cancelled.
    """
    gateway, queue, peers = parts.gateway, parts.queue, parts.admission.peers
    tasks.start(parts.feed.run(drained), "catalogue feed")
    if parts.keys is not None:
        tasks.start(parts.keys.run(drained), "keys")
    if parts.offload is not None:
        tasks.start(parts.offload.run(drained), "payload clean-up")
    for listening, purpose in (
        (gateway.fleet.start, "listening for heartbeats"),
        (parts.inbox.start, "listening for results"),
        (peers.start, "listening for other gateways"),
    ):
        await retry(listening, errors=(BrokerError,), stop=stop, logger=_logger, task=purpose)
    own = functools.partial(_own_streams, parts)
    owning = asyncio.create_task(retry(own, errors=(BrokerError,), stop=stop, logger=_logger, task="work streams"))
    try:
        # The operating system accepts connections on the port already. The gateway does not read requests yet, because
        # it would refuse them while it is not ready. So the first requests wait, at most FIRST_ANSWER_S seconds.
        loaded = asyncio.create_task(parts.feed.first.wait())
        await asyncio.wait({owning, loaded}, timeout=FIRST_ANSWER_S)
        loaded.cancel()
        await main.start()
        await owning
    except BaseException:
        await cancel_all([owning])
        raise
    tasks.start(queue.consumers.run(drained), "consumers")
    await parts.clock.begin()
    measuring = tasks.start(parts.clock.run(), "broker clock")
    for part, name in (
        (parts.backlog, "backlog"),
        (parts.lag, "age of the queue"),
        (parts.admission, "admission"),
        (peers, "announcements"),
        (parts.demand, "demand"),
        (parts.placer, "placement"),
        (gateway.residencies, "residencies"),
        (parts.keeper, "pools"),
    ):
        tasks.start(part.run(drained), name)
    for service in gateway.services:
        service.start(tasks, stop)
    tasks.start(gateway.status.run(drained), "status")
    tasks.start(gateway.status.sockets.run(drained), "status sockets")

    async def on_reconnect() -> None:
        await retry(
            queue.reverify,
            errors=(BrokerError,),
            stop=drained,
            logger=_logger,
            task="verifying the queue after a reconnect",
        )

    parts.broker.on_reconnect(on_reconnect)
    return measuring


async def _leave(parts: GatewayProcess, main: HttpServer, stop: Stop, lame_duck_s: float) -> None:
    """Serve for the lame-duck time, then refuse new work."""
    inference, readiness = parts.gateway.inference, parts.readiness
    # a gateway that was never ready gets no traffic, so it needs no lame-duck time
    if lame_duck_s and readiness.started:
        _logger.info(
            "shutdown: the gateway still accepts requests for %g s, %d requests are in progress",
            lame_duck_s,
            inference.slots.used,
        )
        await stop.lame_duck(lame_duck_s)
        # idle connections are closed only after the lame-duck time, because requests may arrive on them until then
        await main.hang_up()
    readiness.draining = True
    inference.away.close()
    await inference.shadows.close()
    _logger.info("gateway draining, %d requests in progress", inference.slots.used)


def longest_drain_s(settings: Settings) -> float:
    """Return the longest time of a drain, in seconds: every accepted inference request gets its response within it."""
    return settings.gateway_request_timeout + _LATE_S


async def _own_streams(parts: GatewayProcess) -> None:
    """Create the buckets of placements, reservations and plug-ins, then the streams of this installation's own pools.
    Raises BrokerError. Raises SettingError if an existing stream has other settings than this gateway, or if the broker
    is a single server and SIE_STREAM_REPLICAS is above 1.
    """
    settings = parts.gateway.settings
    try:
        await parts.placer.start()
        await parts.record.follow()
        for service in parts.gateway.services:
            await service.prepare()
        for pool in sorted(parts.record.own):
            await parts.queue.ensure_pool(pool)
    except TopologyMismatch as error:
        raise SettingError(_SETTINGS.get(error.field, "SIE_POOL"), str(error)) from error
    except BrokerError as error:
        if settings.stream_replicas > 1 and "non-clustered" in str(error):
            raise SettingError(
                "SIE_STREAM_REPLICAS", f"got {settings.stream_replicas}, but the broker is a single server"
            ) from error
        raise


async def run(settings: Settings, stop: Stop, **options: Any) -> int:
    """Connect to NATS, then `serve` with these options until `stop`. Return the exit status. Raises SettingError."""
    # checked before the connection to NATS is opened, so that the operator sees this error even if NATS is down
    require_tokens(settings)
    async with connected(settings.nats_url, "sie-gateway", stop, password=settings.nats_password) as broker:
        if broker is None:
            return 0
        source = config_source(settings.config_service_url, settings.config_read_token)
        return await serve(settings, broker, source, stop, **options)
