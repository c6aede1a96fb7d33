"""Restore of models. If a worker permanently failed to load a model's new revision, and no worker has loaded this
revision, then the last revision that was loaded is written again.

    heartbeat: permanent failure ──► newest revision? ──► loaded on no worker? ──► earlier one loaded? ──► written again

The write is a new revision. Its note is the reason, which history, list and `sie doctor` show. The revision keeps the
model's source, so that the next change of the model's file in SIE_MODELS_DIR is applied.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sie_broker import BrokerError
from sie_config_service.mirror import HeldModel
from sie_config_service.store import RESTORE, CatalogueStore
from sie_config_service.workers import CatalogueReaders
from sie_config_service.writes import CatalogueWriter, WriteRequest
from sie_contracts.errors import SIEError
from sie_contracts.wire.heartbeats import ModelStatus
from sie_runtime.process import Stop, Trouble

AUTHOR = "sie-config"
_logger = logging.getLogger("sie.config")


@dataclass(frozen=True)
class Unloadable:
    """Model with a `revision` that a worker permanently failed to load. No worker has loaded this revision. `loaded`:
    the revision that was loaded last. `why`: error of the failed load.
    """

    model: str
    revision: int
    loaded: int
    why: str


def unloadable(statuses: Iterable[ModelStatus]) -> list[Unloadable]:
    """Return each model with a revision that meets three conditions: a worker permanently failed to load the revision,
    no worker has loaded it, and a worker that failed had loaded an earlier revision.
    """
    statuses = list(statuses)
    loaded = {(status.model, status.revision) for status in statuses if status.state == "loaded"}
    failed: dict[tuple[str, int], Unloadable] = {}
    for status in statuses:
        if status.state != "failed" or status.error is None or not status.error.extras.get("permanent"):
            continue
        name = (status.model, status.revision)
        before = failed[name].loaded if name in failed else 0
        if name not in loaded and before < status.loaded_revision < status.revision:
            model = status.model.partition(":")[0]  # a profile with its own load options is loaded as `id:profile`
            failed[name] = Unloadable(model, status.revision, status.loaded_revision, status.error.message)
    return list(failed.values())


class Restore:
    """Reader of the workers' heartbeats that restores models that workers cannot load."""

    def __init__(self, workers: CatalogueReaders, store: CatalogueStore, writer: CatalogueWriter) -> None:
        self._workers = workers
        self._store = store
        self._writer = writer
        self._trouble = Trouble(_logger, "a revision that cannot be loaded is not replaced yet")

    async def run(self, stop: Stop) -> None:
        """Restore models until `stop`. After an error, the next heartbeat that reports a failed load
        starts another attempt.
        """
        while not await stop.wait_woken(self._workers.failed):
            failure: Exception | None = None
            for status in unloadable(self._workers.statuses()):
                try:
                    await self._restore(status)
                except (BrokerError, SIEError) as error:
                    failure = error
            if failure is None:
                self._trouble.passed()
            else:
                self._trouble.met(failure)

    async def _restore(self, failed: Unloadable) -> None:
        held = await self._store.held(failed.model)
        before = await self._store.revision(failed.model, failed.loaded)
        is_done = held.stored is None or held.revision != failed.revision or held.stored.operation == RESTORE
        if is_done or before is None or before.entry is None:
            return
        assert held.stored is not None
        entry = before.entry

        async def edit(_held: HeldModel) -> dict[str, Any]:
            return entry

        note = (
            f"revision {failed.revision} could not be loaded, so revision {failed.loaded} was written again: "
            f"{failed.why}"
        )
        source = held.stored.source
        restore = WriteRequest(
            RESTORE, failed.model, edit, if_match=failed.revision, author=AUTHOR, note=note, source=source
        )
        # raises ContentConflict, and changes nothing, if another writer has changed the model, or if an alias would
        # become invalid
        await self._writer.write(restore)
        _logger.error("%s: %s", failed.model, note)
