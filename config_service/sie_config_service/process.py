"""Process of the config service: connects to the broker, seeds the catalogue, serves it, and watches SIE_MODELS_DIR. To
seed is to write the packaged models and the models of SIE_MODELS_DIR to the catalogue's bucket. If the broker loses the
bucket, the process seeds again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

from sie_broker import Broker, BrokerError, BrokerUnavailable
from sie_broker.owner import own
from sie_broker.record import retry_conflicts
from sie_config_service.app import create_app
from sie_config_service.overlay import MAX_TOLD, Overlay, Signature
from sie_config_service.reload import Reload, log_broken, warn_of_others
from sie_config_service.restore import Restore
from sie_config_service.state import ConfigService
from sie_config_service.store import CatalogueStore, open_store
from sie_contracts.errors import NotReady, ValidationFailed
from sie_contracts.settings import SettingError, Settings
from sie_contracts.wire import records, topology
from sie_runtime import tracing
from sie_runtime.clock import BrokerClock
from sie_runtime.connection import connected
from sie_runtime.http.server import HttpServer
from sie_runtime.keys import Keys, remove_foreign
from sie_runtime.process import Stop, Tasks, Trouble, retry

CLEAN_S = 30.0  # seconds between two looks for records in the buckets of keys that are no keys
_logger = logging.getLogger("sie.config")


@dataclass(frozen=True)
class PreparedCatalogue:
    """Catalogue after seeding. `overlay`: the folder of models. `signature`: state of its files when they were read."""

    store: CatalogueStore
    overlay: Overlay
    signature: Signature


async def prepare(settings: Settings, broker: Broker, cached_overlay: Overlay | None = None) -> PreparedCatalogue:
    """Open the store, and seed it with the models of the folders. `cached_overlay`: the `Overlay` of an earlier call.
    If the folders cannot be read now, its last successful read supplies the models. Raises SettingError, BrokerError,
    NotReady.
    """
    overlay = cached_overlay or Overlay(settings)
    signature: Signature = {}
    try:
        _logger.info("%s", await asyncio.to_thread(overlay.describe))  # from which folder models are served
        signature = await asyncio.to_thread(overlay.read_signature)
        folders = await asyncio.to_thread(overlay.folders)
    except (SettingError, ValidationFailed, OSError) as error:
        if overlay.last is None:
            if isinstance(error, SettingError):
                raise
            raise SettingError("SIE_MODELS_DIR", f"{overlay.name}: {error}") from error
        _logger.error(
            "%s cannot be used now: %s. The catalogue gets the models of the last successful read instead",
            overlay.name,
            error,
        )
        folders, signature = overlay.last, {}  # the empty signature makes `Reload` read the folder again
    store = await open_store(broker, settings)
    await store.snapshot()  # after this read, the store refuses a bucket that was created later
    if lost := await retry_conflicts(store.recover):
        names = ", ".join(lost[:MAX_TOLD]) + (", ..." if len(lost) > MAX_TOLD else "")
        _logger.warning(
            "bucket %s had lost %d entries that were written over the API; they were restored from bucket %s: %s",
            topology.CATALOGUE_BUCKET,
            len(lost),
            topology.CATALOGUE_COPY_BUCKET,
            names,
        )
    await store.seed_bundles(folders.bundles)
    changes = await store.seed(folders.models)
    read = await store.snapshot()
    warn_of_others(folders, read)
    log_broken(read, await store.alias_index(), changes)
    _logger.info("the folders have %d models; seeding changed %d in the catalogue", len(folders.models), len(changes))
    return PreparedCatalogue(store, overlay, signature)


async def keep(
    service: ConfigService, settings: Settings, broker: Broker, prepared: PreparedCatalogue, stop: Stop
) -> None:
    """Serve the catalogue and watch the folder of models until `stop`. If the broker loses the catalogue, seed it
    again.

    All replicas seed at the same time, and compare-and-set prevents double writes. Seeding does not replace models
    that were written over the API meanwhile.
    """
    while True:
        service.begin(prepared.store, prepared.overlay.trust())
        following = Stop()
        async with asyncio.TaskGroup() as tasks:
            reload = Reload(prepared.store, prepared.overlay, prepared.signature, service.workers, service.files.check)
            tasks.create_task(reload.run(following))
            tasks.create_task(Restore(service.workers, prepared.store, service.require_writer()).run(following))
            is_lost = await prepared.store.lost(stop)
            following.request()
        if not is_lost:
            return
        service.end()
        _logger.warning("the broker lost the catalogue: requests are refused until it is seeded again from the folders")
        again = await seeded(service, settings, broker, stop, prepared.overlay)
        if again is None:
            return
        recovered = set(again.store.written_over_api())
        if lost := [name for name in prepared.store.written_over_api() if name not in recovered]:
            listed = ", ".join(lost[:MAX_TOLD]) + (", ..." if len(lost) > MAX_TOLD else "")
            _logger.warning(
                "%d models that were written over the API were lost with the catalogue; write them again: %s",
                len(lost),
                listed,
            )
        prepared = again


async def seeded(
    service: ConfigService, settings: Settings, broker: Broker, stop: Stop, overlay: Overlay | None = None
) -> PreparedCatalogue | None:
    """Repeat `prepare` until it succeeds, and return its result; None if `stop` is set first. Meanwhile, /readyz shows
    why the service is not ready. Raises SettingError.
    """

    async def attempt() -> PreparedCatalogue:
        try:
            return await prepare(settings, broker, overlay)
        except (BrokerError, NotReady) as error:
            service.trouble = str(error)
            raise

    prepared: PreparedCatalogue | None = await retry(
        attempt,
        errors=(BrokerError, NotReady),
        stop=stop,
        logger=_logger,
        task="seeding the catalogue",
    )
    return prepared


async def has_pool(service: ConfigService, settings: Settings, name: str) -> bool:
    """Return whether a pool exists: that of the installation, or a reservation. Raises BrokerError."""
    if name in (topology.DEFAULT_POOL, settings.pool):
        return True
    if service.broker is None:
        raise BrokerUnavailable("the config service is not connected to the broker yet")
    replicas = settings.stream_replicas
    bucket = await service.broker.key_value(topology.POOLS_BUCKET, storage=settings.stream_storage, replicas=replicas)
    entry = await bucket.get(topology.RESERVATIONS_KEY)
    pools = records.decode_reservations(entry.value).pools if entry is not None and entry.value else {}
    return name in pools and len(pools) <= topology.MAX_RESERVATIONS


async def _own_streams(service: ConfigService, settings: Settings, stop: Stop) -> None:
    """Act as the broker's user `streams` until `stop`: create the streams and buckets that other processes request, and
    remove from the buckets of API keys what is no key.
    """
    password, is_pool = settings.nats_streams_password, functools.partial(has_pool, service, settings)
    async with connected(settings.nats_url, "sie-streams", stop, password=password, user="streams") as broker:
        if broker is None:
            return
        await retry(
            lambda: own(broker, is_pool), errors=(BrokerError,), stop=stop, logger=_logger, task="owning streams"
        )
        trouble = Trouble(_logger, "records in the buckets of keys that are no keys are not removed")
        while not await stop.wait_for(CLEAN_S):
            if service.broker is None or settings.auth_mode != "token":  # without keys there may be no bucket of keys
                continue
            with trouble.logged(BrokerError):
                if removed := await remove_foreign(service.broker, broker, settings.stream_replicas):
                    service.metrics.foreign_key_records.inc(removed)
                    _logger.warning("%d records in the buckets of API keys were no keys and were removed", removed)


async def run(
    settings: Settings,
    stop: Stop,
    *,
    host: str,
    port: int,
    lame_duck_s: float = 0.0,
    on_listening: Callable[[int], None] | None = None,
) -> int:
    """Run the service until `stop`. If the service was ready, accept requests for another `lame_duck_s` seconds. Then
    finish the running requests. Return the exit status: 1 if a background task failed, else 0.

    Raises SettingError.
    """
    tracer = tracing.start(settings.tracing, "config")
    service = ConfigService(settings)
    service.tracer = tracer
    server = HttpServer(
        create_app(service),
        host,
        port,
        setting="--port",
        allowed_hosts=settings.allowed_hosts,
        refused=service.metrics.count_refused,
        min_rate=settings.min_body_rate,
    )
    await server.start()
    _logger.info("config service listening on %s:%d", host, server.port)
    if on_listening is not None:
        on_listening(server.port)
    tasks = Tasks(_logger, stop.request)
    served = Stop()  # never set: the tasks run until `cancel`, which follows the last request
    try:
        if settings.nats_streams_password is not None:
            tasks.start(_own_streams(service, settings, served), "streams")
        async with connected(settings.nats_url, "sie-config", stop, password=settings.nats_password) as broker:
            service.broker = broker
            if broker is not None:
                await service.workers.follow(broker, stop)
                clock = BrokerClock(broker, f"KV_{topology.CATALOGUE_BUCKET}")
                if settings.auth_mode == "token":
                    keys = Keys(broker, settings.stream_replicas, clock)
                    service.gate.go_by(keys)
                    tasks.start(keys.run(served), "keys")
                prepared = await seeded(service, settings, broker, stop)
                if prepared is not None:
                    broker.on_reconnect(service.reconnected)
                    await clock.begin()
                    tasks.start(clock.run(), "broker clock")
                    tasks.start(keep(service, settings, broker, prepared, served), "catalogue")
            await stop.wait()
            service.leaving = True
            server.leave()
            # a service that was never ready has no clients to wait for
            if lame_duck_s and service.store is not None:
                _logger.info(
                    "config service is stopping: for %g s it still accepts requests and reports not ready", lame_duck_s
                )
                await stop.lame_duck(lame_duck_s)
            # stop the server before the broker's connection closes, so that writes in progress can finish
            await server.stop()
            await tasks.cancel()
    finally:
        await tasks.cancel()
        await server.stop()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    return 1 if tasks.failed else 0
