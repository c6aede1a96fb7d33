"""Watch of SIE_MODELS_DIR: writes the models of changed files to the catalogue (source `overlay`) without a restart. If
a file was removed, the watch writes the packaged model with this id, or removes the model if there is none.

    look ──changed, and equal at the next look──► all files read and checked ──► written to the bucket, logged
      ▲            └ one is invalid: no change, the log names file, field and line               │
      └── all gateways and workers have it, or WATCHED_S have passed: log which lack it ◄────────┘

The watch compares names, sizes, times and inodes of the files (in an object store, ETags instead of inodes), because
some file systems send no events. The pauses are so long that the comparisons take at most a hundredth of the time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sie_broker import BrokerError
from sie_config_service.aliases import AliasIndex, broken_by
from sie_config_service.mirror import CatalogueSnapshot, HeldModel
from sie_config_service.overlay import Folders, Overlay, Signature
from sie_config_service.store import CatalogueChange, CatalogueStore, normalised
from sie_config_service.workers import CatalogueReaders
from sie_contracts.errors import SIEError, ValidationFailed
from sie_contracts.settings import SettingError
from sie_contracts.wire import configs
from sie_runtime.process import Stop, Trouble

LOOK_S = 0.5
# seconds between two looks at a folder of models in an object store; long, because each look lists all objects
BUCKET_LOOK_S = 30.0
IDLE_SHARE = 0.01
WATCHED_S = 30.0
_logger = logging.getLogger("sie.config")


def warn_of_others(folders: Folders, read: CatalogueSnapshot) -> None:
    """Log a warning for each file that has no effect, because the same model was written over the API."""
    for model, path in folders.files.items():
        stored, packaged = read.held.get(model, HeldModel()).stored, folders.models.get(model)
        if (
            stored is not None
            and stored.source == "api"
            and packaged is not None
            and stored.entry != normalised(packaged[0])
        ):
            does = "removed" if stored.entry is None else "written"
            _logger.warning(
                "%s is not applied, because %s was %s over the API; change the model over the API", path, model, does
            )


def log_broken(read: CatalogueSnapshot, index: AliasIndex, done: Iterable[CatalogueChange]) -> None:
    """Log each alias that is invalid after the changes `done` of the folder: the service applies a change even if an
    alias then becomes invalid. Check only aliases whose document or target was written or removed.
    """
    for alias, why in broken_by(read, index, (change.model for change in done)).items():
        _logger.error("the alias %s is invalid after a change of the model folder: %s", alias, why)


@dataclass
class _Watched:
    """A change of the folder that was written to the catalogue. `epoch`: the first version of the catalogue that has
    the change. Until `due_s` (monotonic time), `Reload` checks whether all gateways, and the workers of `bundles`, have
    read this version or a later one. `outcome`: log text that describes the change.
    """

    outcome: str
    epoch: str
    bundles: tuple[str, ...]
    due_s: float


@dataclass
class Reload:
    """Watch of the folder of models. `signature`: state of its files when they were seeded. `workers`: reports which
    gateways and workers lack a change; None to log nothing about them. `check`: raises ValidationFailed for an entry
    that no worker could load; None to check nothing.
    """

    store: CatalogueStore
    overlay: Overlay
    signature: Signature
    workers: CatalogueReaders | None = None
    check: Callable[[dict[str, Any]], Awaitable[None]] | None = None
    _refused: Signature | None = None  # last refused state of the files, to log its error only once
    _outage: Trouble = field(
        default_factory=lambda: Trouble(_logger, "the folder of models cannot be read, so the catalogue is not changed")
    )
    _trouble: Trouble = field(
        default_factory=lambda: Trouble(_logger, "a change of the folder of models could not be applied yet")
    )
    _watched: list[_Watched] = field(default_factory=list)

    async def run(self, stop: Stop) -> None:
        """Compare the folder with its last state after each pause, and apply changes, until `stop`."""
        look_s = BUCKET_LOOK_S if self.overlay.is_remote else LOOK_S
        last, pause_s = self.signature, look_s
        while not await stop.wait_for(pause_s):
            begun_s = time.monotonic()
            try:
                now = await asyncio.to_thread(self.overlay.read_signature)
            except (SettingError, OSError) as error:
                self._outage.met(error)
                continue
            self._outage.passed()
            pause_s = max(look_s, (time.monotonic() - begun_s) / IDLE_SHARE)
            if now != last:
                self._trouble.passed()  # a new change: discard the failure of the earlier one
            # two successive reads found the same files, so presumably no process is still writing them
            elif now not in (self.signature, self._refused):
                await self._apply(now)
            last = now
            self._report()

    async def _apply(self, now: Signature) -> None:
        try:
            folders = await asyncio.to_thread(self.overlay.folders)
            if await asyncio.to_thread(self.overlay.read_signature) != now:
                return  # the folder changed during the read, so the next look reads it again
            await self._check_files(folders)
            bundles = await self.store.seed_bundles(folders.bundles)
            done = await self.store.seed(folders.models)
            await self._read_back(folders, done)
        except (BrokerError, SIEError, SettingError, OSError) as error:
            if (
                not isinstance(error, SIEError) or error.retryable
            ):  # a temporary error, for example of the broker: the next look tries again
                self._trouble.met(error)
                return
            _logger.error(
                "%s was changed, but cannot be applied, so the catalogue is not changed: %s", self.overlay.name, error
            )
            self._refused = now
            return
        self._trouble.passed()
        self.signature, self._refused = now, None
        if not done:
            outcome = "the bundles now match it" if bundles else "nothing in the catalogue had to be changed"
            _logger.info("%s was changed: %s", self.overlay.name, outcome)

    async def _check_files(self, folders: Folders) -> None:
        """Raise ValidationFailed for a changed entry that no worker can load: `_apply` then refuses the folder."""
        if self.check is None:
            return
        for change in await self.store.to_seed(folders.models):
            if change.entry is not None:
                try:
                    await self.check(change.entry)
                except ValidationFailed as error:
                    raise ValidationFailed(
                        f"{folders.files.get(change.model, change.model)}: {error.message}"
                    ) from None

    async def _read_back(self, folders: Folders, done: list[CatalogueChange]) -> None:
        read = await self.store.snapshot()
        for change in done:
            held = read.held[change.model]
            where = folders.files.get(change.model, "the packaged catalogue")
            if held.entry != change.entry:
                _logger.warning(
                    "the change of %s in %s was overwritten by another writer with revision %d",
                    change.model,
                    where,
                    held.revision,
                )
                continue
            outcome = f"{change.model} is at revision {held.revision}, " + (
                "removed" if held.entry is None else f"as in {where}"
            )
            _logger.info("%s", outcome)
            bundles = tuple(sorted(change.bundles(read.bundles)))
            self._watched.append(
                _Watched(outcome, f"{read.created}:{held.written}", bundles, time.monotonic() + WATCHED_S)
            )
        warn_of_others(folders, read)
        log_broken(read, await self.store.alias_index(), done)

    def _report(self) -> None:
        """Log each change that has reached all gateways and all workers of its bundles. After WATCHED_S seconds, log
        each change that some of these processes lack.
        """
        left = []
        for watched in self._watched if self.workers is not None else ():
            assert self.workers is not None
            epochs = {
                beat.worker: beat.config_epoch for bundle in watched.bundles for beat in self.workers.of_bundle(bundle)
            }
            lag = sorted(
                name
                for name, epoch in (epochs | self.workers.gateways()).items()
                if not configs.has_seen(epoch, watched.epoch)
            )
            if not lag:
                _logger.info("%s; all gateways and workers of its bundles have it", watched.outcome)
            elif time.monotonic() < watched.due_s:
                left.append(watched)
            else:
                _logger.warning(
                    "%s; after %g s these processes do not have it: %s", watched.outcome, WATCHED_S, ", ".join(lag)
                )
        self._watched = left
