"""What an operator asks of this worker: load a model before any work needs it, or unload it.

gateway ──messages.Residency──► load:   a failed load is forgotten, then as a load ahead of work
                            └─► unload: once nothing is in flight for the model, as an idle eviction
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from sie_broker import CoreMessage
from sie_contracts import messages
from sie_contracts.errors import SIEError
from sie_runtime.process import Tasks
from sie_sidecar.link import AdapterGone
from sie_sidecar.loading import Loading
from sie_sidecar.models import Hosted

_logger = logging.getLogger("sie.sidecar.residency")


class Residency:
    """Obeys `messages.Residency`. `work` keeps the unloads that wait. `on_unloaded` gets the id of an entry."""

    def __init__(self, loading: Loading, work: Tasks, on_unloaded: Callable[[str], None]) -> None:
        self._loading = loading
        self._hosting = loading.hosting
        self._work = work
        self._on_unloaded = on_unloaded

    async def on_message(self, message: CoreMessage) -> None:
        """A gateway passes on what an operator asks. Nothing answers: heartbeats report the state."""
        try:
            asked = messages.decode_residency(message.data)
        except msgspec.DecodeError as error:
            _logger.error("what an operator asks could not be read: %s", error)
            return
        hosted = self._hosting.find(asked.model)
        if asked.action == "load":
            if hosted is not None:
                hosted.retain()
            self._loading.ahead([asked.model])
        elif hosted is not None and hosted.state in ("loading", "loaded"):
            self._work.start(self._unload(hosted), "unload")

    async def _unload(self, hosted: Hosted) -> None:
        try:
            if await self._hosting.unload_when_idle(hosted):
                _logger.info("%s is unloaded, as an operator asked", hosted.name, extra={"model": hosted.name})
                self._on_unloaded(hosted.resolved.entry.id)
        except (AdapterGone, SIEError) as error:
            _logger.warning("%s could not be unloaded: %s", hosted.name, error, extra={"model": hosted.name})
