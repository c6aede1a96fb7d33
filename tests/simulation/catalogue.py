"""The config service of a simulation. It keeps every document that it ever wrote, so that checks know which entries a
request may be answered by.

    fault ──► write ──► delta, which a reader may miss ──► gateways, sidecars
                  └──► epoch, export, which readers poll
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from fake_adapter import toy_entry

from sie_broker import BrokerError, Bus
from sie_contracts.models.aliases import Alias, parse_alias
from sie_contracts.models.entries import ModelEntry
from sie_contracts.wire import messages, topology
from sie_contracts.wire.configs import ConfigDelta, ConfigEpoch, ConfigExport, ConfigModel

MAX_TOKENS = 160
ALIAS = "toy/alias"
_BUNDLE = "default"
Document = ModelEntry | Alias


class Written(NamedTuple):
    """A write of the catalogue. `document` None: the id was removed."""

    number: int
    name: str
    document: Document | None
    revision: int


def entry_of(model: str, version: int) -> ModelEntry:
    """Return a version of a model. Each version has a fingerprint of its own."""
    weights = {"path": "/toy", "revision": f"v{version}"}
    return toy_entry(model, family="text-encoder", max_tokens=MAX_TOKENS, weights=weights)


def alias_of(model: str) -> Alias:
    return parse_alias({"id": ALIAS, "alias": model})


class ConfigService:
    """The catalogue. It answers every poll; only its deltas, which are sent on `bus`, are lost like other messages."""

    def __init__(self, bus: Bus, models: Sequence[str]) -> None:
        self._bus = bus
        self.writes: list[Written] = []
        for model in models:
            self._note(model, entry_of(model, 1))
        self._note(ALIAS, alias_of(models[0]))
        self._versions = 1

    def _note(self, name: str, document: Document | None) -> Written:
        revision = sum(written.name == name for written in self.writes) + 1
        written = Written(len(self.writes) + 1, name, document, revision)
        self.writes.append(written)
        return written

    async def write(self, name: str, document: Document | None) -> None:
        """Write or remove a document, and broadcast the delta."""
        previous = self.present_epoch
        written = self._note(name, document)
        raw = None if document is None else msgspec.to_builtins(document)
        delta = ConfigDelta("sie-config", previous, self.present_epoch, name, written.revision, raw)
        try:
            await self._bus.send(topology.config_subject(_BUNDLE), messages.encode(delta))
        except BrokerError:
            pass  # readers find the write when they poll

    def next_version(self, model: str) -> ModelEntry:
        self._versions += 1
        return entry_of(model, self._versions)

    def models(self) -> list[str]:
        return [name for name, written in self._live().items() if isinstance(written.document, ModelEntry)]

    def documents(self, name: str, epoch: str) -> list[Document | None]:
        """Return the documents that an id has had since this epoch, the one of that time included."""
        number = int(epoch.rpartition(":")[2] or 0)
        history = [written for written in self.writes if written.name == name]
        begin = max((place for place, written in enumerate(history) if written.number <= number), default=0)
        return [written.document for written in history[begin:]]

    def _live(self) -> dict[str, Written]:
        newest = {written.name: written for written in self.writes}
        return {name: written for name, written in newest.items() if written.document is not None}

    @property
    def present_epoch(self) -> str:
        return f"simulated:{len(self.writes)}"

    async def export(self) -> ConfigExport:
        models = tuple(
            ConfigModel(name, msgspec.to_builtins(written.document), written.revision, written=written.number)
            for name, written in self._live().items()
        )
        return ConfigExport(self.present_epoch, models, ({"id": _BUNDLE},))

    async def epoch(self) -> ConfigEpoch:
        return ConfigEpoch(self.present_epoch)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
