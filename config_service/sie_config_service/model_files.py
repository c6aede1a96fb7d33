"""Check that an entry of the catalogue fits the model's files on this machine, before the entry is written."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from sie_contracts.errors import ModelLoadFailed, faulty
from sie_contracts.models.entries import ModelEntry, parse_document
from sie_contracts.settings import Settings
from sie_store.entry_faults import Fault, fault
from sie_store.weights.sources import WeightSources

_logger = logging.getLogger("sie.config")


class ModelFiles:
    """Checks entries against the models' files, if the files are where a worker looks for them. Downloads no files."""

    def __init__(self, settings: Settings) -> None:
        self._sources = WeightSources(settings.cache_folder, may_download=False)

    async def check(self, raw: dict[str, Any]) -> None:
        """Raise ValidationFailed if a load would refuse the entry because it does not fit the model's files. If the
        files are not on this machine, or cannot be read, the entry is accepted.
        """
        entry = parse_document(raw)
        if isinstance(entry, ModelEntry) and (mismatch := await asyncio.to_thread(self._fault, entry)) is not None:
            raise faulty(mismatch.loc, mismatch.message)

    def _fault(self, entry: ModelEntry) -> Fault | None:
        try:
            located = self._sources.locate(entry)
            return fault(located.folder, entry, entry.load)
        except (ModelLoadFailed, OSError) as error:
            _logger.info("model %s is not checked against its files: %s", entry.id, error)
            return None
