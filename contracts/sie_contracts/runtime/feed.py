"""How gateway and sidecar follow the catalogue: full state once, then deltas, then the epoch as the net under both.

    subscribe to deltas ──► export ──► snapshot ◄── delta whose `previous` is the snapshot's epoch
                              ▲                      │ any other
                              └── epoch differs ◄────┴── poll

A snapshot is replaced whole, never edited, so a request that holds one is served by one revision from start to end. When the config
service is away the last good snapshot serves on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import httpx
import msgspec

from sie_contracts import messages, topology
from sie_contracts.broker import Broker, CoreMessage, Subscription
from sie_contracts.catalogue import Bundle, Catalogue, ModelEntry, packaged_folder, parse_entry
from sie_contracts.errors import SIEError, ValidationFailed
from sie_contracts.messages import ConfigDelta, ConfigExport
from sie_contracts.runtime.process import Stop, retry
from sie_contracts.settings import Secret

_logger = logging.getLogger("sie.feed")
_export = msgspec.json.Decoder(ConfigExport)


class ConfigUnavailable(Exception):
    """The config service could not be asked, or answered with something else than the catalogue."""


class ConfigSource(Protocol):
    async def export(self) -> ConfigExport: ...

    async def epoch(self) -> str: ...

    async def close(self) -> None: ...


class HttpConfigSource:
    """The config service over HTTP, read with the read token. Raises ConfigUnavailable."""

    def __init__(self, url: str, token: Secret | None) -> None:
        headers = {"authorization": f"Bearer {token.reveal()}"} if token else {}
        self._url = url
        self._client = httpx.AsyncClient(base_url=url, headers=headers, timeout=5.0, trust_env=False)

    async def _get(self, path: str) -> bytes:
        try:
            answer = await self._client.get(path)
        except httpx.HTTPError as error:
            raise ConfigUnavailable(f"{self._url}{path}: {type(error).__name__}") from error
        if answer.status_code != 200:
            raise ConfigUnavailable(f"{self._url}{path}: status {answer.status_code}")
        return answer.content

    async def export(self) -> ConfigExport:
        try:
            return _export.decode(await self._get("/v1/configs/export"))
        except msgspec.DecodeError as error:
            raise ConfigUnavailable(f"export: {error}") from error

    async def epoch(self) -> str:
        try:
            return str(msgspec.json.decode(await self._get("/v1/configs/epoch"))["epoch"])
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise ConfigUnavailable("epoch: not the expected answer") from error

    async def close(self) -> None:
        await self._client.aclose()


def config_source(url: str | None, token: Secret | None) -> ConfigSource | None:
    """The config service at `url`, if there is one."""
    return HttpConfigSource(url, token) if url else None


def snapshot(export: ConfigExport) -> Catalogue:
    """The catalogue of an export; all or nothing. Raises ValidationFailed or msgspec.ValidationError for an entry that does not fit."""
    entries = {model.model_id: parse_entry(model.model_config) for model in export.models}
    revisions = {model.model_id: model.revision for model in export.models}
    bundles = {bundle.id: bundle for bundle in (msgspec.convert(raw, Bundle) for raw in export.bundles)}
    return Catalogue(entries, revisions, bundles, export.epoch)


class CatalogueFeed:
    """The present snapshot, and its keeping up to date. `on_change` is called with the ids whose entries changed."""

    def __init__(
        self,
        broker: Broker,
        source: ConfigSource | None,
        *,
        trusted: tuple[str, ...],
        poll_s: float,
        full_export_s: float,
        initial: Catalogue | None = None,
        bundle: str | None = None,
    ) -> None:
        self.catalogue = initial or Catalogue()
        self.first = asyncio.Event()  # set with the first snapshot
        if initial is not None:
            self.first.set()
        self.deltas: dict[str, int] = {"applied": 0, "untrusted": 0, "gap": 0, "stale": 0, "invalid": 0}
        self._broker = broker
        self._source = source
        self._trusted = frozenset(trusted)
        self._poll_s = poll_s
        self._full_export_s = full_export_s
        self._subject = topology.config_subject(bundle) if bundle else f"{topology.CONFIG_SUBJECT}.*"
        self._listeners: list[Callable[[frozenset[str]], None]] = []
        self._refresh = asyncio.Event()
        self._subscription: Subscription | None = None

    @property
    def loaded(self) -> bool:
        return self.first.is_set()

    def on_change(self, listener: Callable[[frozenset[str]], None]) -> None:
        self._listeners.append(listener)

    async def run(self, stop: Stop) -> None:
        """Follow until `stop`. The first snapshot is fetched with retries; later failures leave the last good one in place."""
        self._subscription = await self._broker.subscribe(self._subject, self._on_delta)
        self._broker.on_reconnect(self._on_reconnect)
        if self._source is None:
            await stop.wait()
            return
        source, errors = self._source, (ConfigUnavailable, SIEError, msgspec.ValidationError)
        await retry(lambda: self._reload(source), errors=errors, stop=stop, logger=_logger, what="reading the catalogue")
        loop = asyncio.get_running_loop()
        full_due_s = loop.time() + self._full_export_s
        while not stop.requested:
            asked = await self._pause(stop)
            if stop.requested:
                break
            full = bool(self._full_export_s) and loop.time() >= full_due_s
            try:
                if asked or full or await source.epoch() != self.catalogue.epoch:
                    await self._reload(source)
                    full_due_s = loop.time() + self._full_export_s
            except errors as error:
                _logger.warning("the catalogue stays as it was: %s", error)
        await source.close()

    async def _pause(self, stop: Stop) -> bool:
        """Until the next poll, or until a delta did not fit (then true)."""
        waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(self._refresh.wait())]
        _, pending = await asyncio.wait(waits, timeout=self._poll_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        asked = self._refresh.is_set()
        self._refresh.clear()
        return asked

    async def _on_reconnect(self) -> None:
        self._refresh.set()

    async def _reload(self, source: ConfigSource) -> bool:
        self._replace(snapshot(await source.export()))
        self.first.set()
        return True

    def _replace(self, new: Catalogue) -> None:
        old, self.catalogue = self.catalogue, new
        ids = {*old.entries, *new.entries}
        changed = frozenset(model for model in ids if old.entries.get(model) != new.entries.get(model))
        if changed:
            for listener in self._listeners:
                listener(changed)

    async def _on_delta(self, message: CoreMessage) -> None:
        try:
            delta = messages.decode_delta(message.data)
            entry = None if delta.entry is None else parse_entry(delta.entry)
        except (msgspec.DecodeError, SIEError) as error:
            self.deltas["invalid"] += 1
            _logger.warning("a config delta could not be read: %s", error)
            return
        self.deltas[self._apply(delta, entry)] += 1

    def _apply(self, delta: ConfigDelta, entry: ModelEntry | None) -> str:
        if delta.producer not in self._trusted:
            _logger.warning("a config delta of an untrusted producer was ignored")
            return "untrusted"
        if delta.epoch == self.catalogue.epoch:
            return "stale"
        if delta.previous != self.catalogue.epoch:
            self._refresh.set()
            return "gap"
        self._replace(self.catalogue.with_model(delta.model, entry, delta.revision, delta.epoch))
        return "applied"


def read_folder(folder: Path) -> Mapping[str, ModelEntry]:
    """All `*.yaml` entries below `folder`, by id. Raises ValidationFailed naming file and path, OSError."""
    import yaml

    entries: dict[str, ModelEntry] = {}
    for file in sorted(path for path in folder.rglob("*.yaml") if path.is_file()):
        try:
            entry = parse_entry(yaml.safe_load(file.read_text("utf-8")))
        except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
            raise _named(file, str(error)) from error
        except SIEError as error:
            raise _named(file, error.message) from error
        entries[entry.id] = entry
    return entries


def read_bundles(folder: Path) -> Mapping[str, Bundle]:
    """All bundles of a folder, by id."""
    import yaml

    bundles = (msgspec.convert(yaml.safe_load(file.read_text("utf-8")), Bundle) for file in sorted(folder.glob("*.yaml")))
    return {bundle.id: bundle for bundle in bundles}


def packaged_catalogue() -> Catalogue:
    """The catalogue of the distribution, for a process that has no config service."""
    folder = packaged_folder()
    entries = read_folder(folder / "models")
    return Catalogue(entries, dict.fromkeys(entries, 0), read_bundles(folder / "bundles"), "packaged")


def _named(file: Path, message: str) -> SIEError:
    return ValidationFailed(f"{file.name}: {message}")
