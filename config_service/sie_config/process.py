"""The config service process: connect, seed the catalogue, serve it."""

from __future__ import annotations

import logging
from collections.abc import Callable

from sie_config.app import ConfigService, create_app
from sie_config.store import CatalogueStore, open_store, wanted_models
from sie_contracts.broker import Broker, BrokerError
from sie_contracts.runtime.connection import connected
from sie_contracts.runtime.http import HttpServer
from sie_contracts.runtime.process import Stop, retry
from sie_contracts.settings import Settings

_logger = logging.getLogger("sie.config")


async def prepare(settings: Settings, broker: Broker) -> CatalogueStore:
    """Open the store and bring it up to what the folders say. Raises SettingError, ValidationFailed, BrokerError."""
    wanted = wanted_models(settings)
    store = await open_store(broker, settings)
    changes = await store.seed(wanted)
    _logger.info("the catalogue holds %d models, %d changed at start", len(wanted), changes)
    return store


async def run(settings: Settings, stop: Stop, *, host: str, port: int, on_listening: Callable[[int], None] | None = None) -> int:
    """Serve until `stop`. Raises SettingError."""
    service = ConfigService(settings)
    server = HttpServer(create_app(service), host, port, setting="--port")
    await server.start()
    _logger.info("config service listening on %s:%d", host, server.port)
    if on_listening is not None:
        on_listening(server.port)
    try:
        async with connected(settings.nats_url, "sie-config", stop) as broker:
            if broker is not None:
                service.store = await retry(
                    lambda: prepare(settings, broker), errors=(BrokerError,), stop=stop, logger=_logger, what="seeding the catalogue"
                )
            await stop.wait()
    finally:
        await server.stop()
    return 0
