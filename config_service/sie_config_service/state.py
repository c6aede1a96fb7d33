"""State of the config service that all handlers share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sie_broker import Broker
from sie_config_service.access import ConfigGate
from sie_config_service.metrics import ConfigMetrics
from sie_config_service.model_files import ModelFiles
from sie_config_service.store import CatalogueStore
from sie_config_service.workers import CatalogueReaders
from sie_config_service.writes import CatalogueWriter, Edits
from sie_contracts.errors import QueueUnavailable
from sie_contracts.models.trust import Trust
from sie_contracts.settings import Settings
from sie_runtime.connection import because

if TYPE_CHECKING:
    from sie_runtime.spans import Tracer

WORKER_TIMEOUT_S = 15.0  # seconds without a heartbeat after which a worker or gateway is no longer counted


class ConfigService:
    """State of the service. `store` is None until the catalogue is seeded (has the models of the folders), and after
    the broker has lost the catalogue.
    """

    def __init__(self, settings: Settings) -> None:
        self.trouble = ""  # why the last attempt to seed the catalogue failed
        self.leaving = False  # True: /readyz fails, so that no new connections arrive; requests are still answered
        self.broker: Broker | None = None
        self.store: CatalogueStore | None = None
        self.writer: CatalogueWriter | None = None
        self.trust: Trust | None = None
        self.workers = CatalogueReaders(WORKER_TIMEOUT_S)
        self.gate = ConfigGate(settings)
        self.files = ModelFiles(settings)
        self.tracer: Tracer | None = None
        self.metrics = ConfigMetrics(lambda: self.store)

    def begin(self, store: CatalogueStore, trust: Trust) -> None:
        """Serve the catalogue of `store`. `trust`: rules about code and paths in entries written over HTTP."""
        self.store, self.writer, self.trust = store, CatalogueWriter(store, self.files.check), trust
        self.trouble = ""

    def end(self) -> None:
        """Stop serving the catalogue. Requests are refused until it is seeded again."""
        self.store = self.writer = None

    async def reconnected(self) -> None:
        if self.store is not None:
            await self.store.reconnected()

    def not_ready(self) -> str | None:
        if self.leaving:
            return "draining"
        if self.store is not None:
            return None
        reason = f"the catalogue is not built: {self.trouble}" if self.trouble else "the catalogue is not built"
        return because(reason, self.broker) if self.broker is not None else reason

    def require(self) -> CatalogueStore:
        if self.store is None:
            raise QueueUnavailable(
                "the config service has not read the catalogue yet: try again when its /readyz is 200"
            )
        return self.store

    def require_writer(self) -> CatalogueWriter:
        """Return the writer. Raises QueueUnavailable while there is no store."""
        self.require()
        assert self.writer is not None
        return self.writer

    async def edits(self) -> Edits:
        store = self.require()
        assert self.trust is not None
        return Edits(store, await store.bundles(), self.trust)
