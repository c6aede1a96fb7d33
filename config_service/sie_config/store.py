"""The catalogue in a key-value bucket. Stateless over it: any number of replicas may run, compare-and-set decides between them.

    packaged folder + SIE_MODELS_DIR ──seed──► bucket ──► export, epoch
                                                  └──► one delta for each write, each naming the epoch before it
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from sie_contracts import messages, topology
from sie_contracts.broker import Broker, KeyValue, Write, WrongRevision
from sie_contracts.catalogue import Bundle, ModelEntry, packaged_folder
from sie_contracts.messages import ConfigDelta, ConfigExport, ConfigModel
from sie_contracts.runtime.failpoints import failpoint
from sie_contracts.runtime.feed import read_bundles, read_folder
from sie_contracts.settings import SettingError, Settings

PRODUCER = "sie-config"
SEED_ATTEMPTS = 5
_logger = logging.getLogger("sie.config")


class Stored(msgspec.Struct, frozen=True):
    """The value of a model's key. `source`: packaged, folder or api; seeding only ever touches the first two."""

    entry: dict[str, Any]
    source: str

    @property
    def bundle(self) -> str:
        return str(self.entry.get("bundle", "default"))


@dataclass(frozen=True)
class Change:
    """One write: the new entry or None for a removal, compare-and-set on `expected`, told to the bundles that had or get the model."""

    entry: ModelEntry | None
    source: str
    expected: int
    bundles: frozenset[str]


_stored = msgspec.json.Decoder(Stored)


def model_key(model: str) -> str:
    return f"model.{topology.token(model)}"


class CatalogueStore:
    """Reads and writes of the bucket."""

    def __init__(self, broker: Broker, bucket: KeyValue, bundles: Mapping[str, Bundle]) -> None:
        self._broker = broker
        self._bucket = bucket
        self._bundles = bundles

    async def epoch(self) -> str:
        return await self._bucket.epoch()

    async def models(self) -> dict[str, tuple[Stored, int]]:
        """All models with the revision of their last write, by id."""
        found: dict[str, tuple[Stored, int]] = {}
        for entry in await self._bucket.entries():
            if entry.key.startswith("model.") and entry.value is not None:
                stored = _stored.decode(entry.value)
                found[str(stored.entry["id"])] = (stored, entry.revision)
        return found

    async def export(self) -> ConfigExport:
        """The whole catalogue at one epoch: read again if it changed meanwhile."""
        while True:
            epoch = await self._bucket.epoch()
            models = await self.models()
            if await self._bucket.epoch() == epoch:
                break
        listed = tuple(
            ConfigModel(model, stored.entry, revision, (stored.bundle,))
            for model, (stored, revision) in sorted(models.items())
        )
        bundles = tuple(msgspec.to_builtins(bundle) for bundle in self._bundles.values())
        return ConfigExport(epoch, listed, bundles, generated_at=datetime.now(UTC).isoformat(timespec="seconds"))

    async def write(self, changes: Mapping[str, Change]) -> str:
        """Apply the changes, by model, as one atomic batch and broadcast each. Returns the new epoch.

        Raises WrongRevision if any model was written meanwhile; then nothing is stored.
        """
        writes = [
            Write(
                model_key(model),
                None if change.entry is None else msgspec.json.encode(Stored(msgspec.to_builtins(change.entry), change.source)),
                change.expected,
            )
            for model, change in changes.items()
        ]
        failpoint("config.before_write")
        last = await self._bucket.write(writes)
        epoch = await self._bucket.epoch()
        created = epoch.rpartition(":")[0]
        for number, (model, change) in enumerate(changes.items(), last - len(writes) + 1):
            raw = None if change.entry is None else msgspec.to_builtins(change.entry)
            delta = ConfigDelta(PRODUCER, f"{created}:{number - 1}", f"{created}:{number}", model, number, raw)
            for bundle in change.bundles:
                failpoint("config.before_broadcast")
                await self._broker.send(topology.config_subject(bundle), messages.encode(delta))
        return f"{created}:{last}"

    async def seed(self, wanted: Mapping[str, tuple[ModelEntry, str]]) -> int:
        """Make the bucket hold what the folders hold; models written over the API stay as they are. Returns the number of changes."""
        for _ in range(SEED_ATTEMPTS):
            present = await self.models()
            changes: dict[str, Change] = {}
            for model, (entry, source) in wanted.items():
                stored, revision = present.get(model, (None, 0))
                if stored is None:
                    changes[model] = Change(entry, source, 0, frozenset({entry.bundle}))
                elif stored.source != "api" and stored.entry != msgspec.to_builtins(entry):
                    changes[model] = Change(entry, source, revision, frozenset({entry.bundle, stored.bundle}))
            for model, (stored, revision) in present.items():
                if model not in wanted and stored.source != "api":
                    changes[model] = Change(None, stored.source, revision, frozenset({stored.bundle}))
            if not changes:
                return 0
            try:
                await self.write(changes)
            except WrongRevision:
                continue  # another replica seeds at the same time: look again
            return len(changes)
        raise WrongRevision(f"the catalogue kept changing during {SEED_ATTEMPTS} attempts to seed it")


def wanted_models(settings: Settings) -> dict[str, tuple[ModelEntry, str]]:
    """The packaged catalogue with SIE_MODELS_DIR laid over it, less what SIE_MODEL_FILTER leaves out. Raises SettingError."""
    wanted = {model: (entry, "packaged") for model, entry in read_folder(packaged_folder() / "models").items()}
    overlay = Path(settings.models_dir or "./models")
    if settings.models_dir and settings.models_dir.startswith(("s3://", "gs://")):
        raise SettingError("SIE_MODELS_DIR", "this version reads local folders only")
    if overlay.is_dir():
        wanted |= {model: (entry, "folder") for model, entry in read_folder(overlay).items()}
    elif settings.models_dir:
        raise SettingError("SIE_MODELS_DIR", f"{settings.models_dir} is not a folder")
    if settings.model_filter is None:
        return wanted
    unknown = [name for name in settings.model_filter if name not in wanted]
    if unknown:
        raise SettingError("SIE_MODEL_FILTER", f"no model named {', '.join(unknown)}; there are {', '.join(sorted(wanted))}")
    return {model: found for model, found in wanted.items() if model in settings.model_filter}


async def open_store(broker: Broker, settings: Settings) -> CatalogueStore:
    """The store, with its bucket made if it is not there."""
    bucket = await broker.key_value(topology.CATALOGUE_BUCKET, storage=settings.stream_storage, replicas=settings.stream_replicas)
    return CatalogueStore(broker, bucket, read_bundles(packaged_folder() / "bundles"))
