"""Copy of the catalogue of models in gateways and sidecars. `CatalogueFeed` first reads a full export from the config
service. Then it gets a message (delta) for each write. It polls the catalogue's epoch (version) to find missed deltas.

    subscribe to deltas ──► export ──► snapshot ◄── delta whose `previous` is the snapshot's epoch
                              ▲                      │ any other delta, a reconnect
                              └── epoch differs ◄────┴── poll

A snapshot is replaced as a whole and never edited, so a request uses one snapshot from start to end. The present
snapshot stays in use if a new export is older, empty or cannot be decoded, or if the config service cannot be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import msgspec

from sie_broker import BrokerError, Bus, CoreMessage
from sie_contracts.errors import UNDECODABLE, SIEError, ValidationFailed
from sie_contracts.loopback import verification
from sie_contracts.models import families
from sie_contracts.models.aliases import Alias
from sie_contracts.models.bundles import BundleEntry, parse_bundle
from sie_contracts.models.catalogue import Catalogue, packaged_folder
from sie_contracts.models.entries import ModelEntry, parse_document, parse_entry
from sie_contracts.settings import Secret
from sie_contracts.wire import configs, topology
from sie_contracts.wire.configs import ConfigDelta, ConfigEpoch, ConfigExport, ConfigModel, has_seen
from sie_runtime.process import Stop, Trouble, retry

READ_S = 30.0  # seconds within which the config service must send the whole reply to a request
FIRST_RETRY_S = 0.5  # seconds before the first retry; the pause doubles up to the poll interval
# after a missed delta or a reconnect, each process waits a random time of at most this number of seconds before it
# reads the epoch, so that processes do not all read at the same time
SPREAD_S = 0.2
_SLICE = 50  # number of catalogue entries that are parsed (in about 1 ms) before other tasks may run
# What `_apply` returns for a valid delta. "untrusted": its sender is not trusted. "gap": an earlier delta is missing.
# "stale": the snapshot already contains the write.
_RESULTS = ("applied", "untrusted", "gap", "stale")
_logger = logging.getLogger("sie.feed")


class RawModel(msgspec.Struct, frozen=True):
    """Fields of a ConfigModel that CatalogueFeed needs. `_document` decodes `model_config`, one model at a time."""

    model_id: str
    model_config: msgspec.Raw
    revision: int = 0
    written: int = 0


class RawExport(msgspec.Struct, frozen=True):
    """Fields of a ConfigExport that CatalogueFeed needs."""

    epoch: str
    models: tuple[RawModel, ...]
    bundles: tuple[dict[str, Any], ...] = ()


Export = ConfigExport | RawExport
decode_export = msgspec.json.Decoder(RawExport).decode
_decode_epoch = msgspec.json.Decoder(ConfigEpoch).decode
R = TypeVar("R")


class ConfigUnavailable(Exception):
    """Raised if the config service cannot be reached, refuses the request, or sends a reply that cannot be decoded or
    must not replace the present catalogue.
    """


class ConfigSource(Protocol):
    async def export(self) -> Export: ...

    async def epoch(self) -> ConfigEpoch: ...

    async def close(self) -> None: ...


class HttpConfigSource:
    """HTTP client of the config service. `token`: SIE_CONFIG_READ_TOKEN. The methods raise ConfigUnavailable."""

    def __init__(self, url: str, token: Secret | None) -> None:
        headers = {"authorization": f"Bearer {token.reveal()}"} if token else {}
        self._url = url
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=5.0, trust_env=False, verify=verification(url)
        )

    async def _read(self, name: str, decode: Callable[[bytes], R]) -> R:
        path = f"/v1/configs/{name}"
        try:
            async with asyncio.timeout(READ_S):
                answer = await self._client.get(path)
        except (httpx.HTTPError, TimeoutError) as error:
            raise ConfigUnavailable(f"{self._url}{path}: no reply ({type(error).__name__})") from error
        if answer.status_code != 200:
            fix = (
                ": SIE_CONFIG_READ_TOKEN of this process must equal that of the config service"
                if answer.status_code in (401, 403)
                else ""
            )
            raise ConfigUnavailable(f"{self._url}{path}: status {answer.status_code}{fix}")
        try:
            return decode(answer.content)
        except UNDECODABLE as error:
            raise ConfigUnavailable(f"{self._url}{path}: unreadable reply: {error}") from error

    async def export(self) -> RawExport:
        return await self._read("export", decode_export)

    async def epoch(self) -> ConfigEpoch:
        return await self._read("epoch", _decode_epoch)

    async def close(self) -> None:
        await self._client.aclose()


def config_source(url: str | None, token: Secret | None) -> ConfigSource | None:
    """Return a client for the config service at `url`; None if `url` is None or empty."""
    return HttpConfigSource(url, token) if url else None


async def snapshot(export: Export) -> Catalogue:
    """Return the catalogue in an export. One invalid entry makes the whole export invalid. Other tasks may run between
    entries, because ten thousand entries take 0.2 s.

    Raises ValidationFailed, which names the model, for an invalid model, and msgspec.ValidationError for an invalid
    bundle.
    """
    documents: dict[str, ModelEntry | Alias] = {}
    models: Sequence[ConfigModel | RawModel] = export.models
    for number, model in enumerate(models, 1):
        documents[model.model_id] = _document(model)
        if number % _SLICE == 0:
            await asyncio.sleep(0)
    revisions = {model.model_id: model.revision for model in models}
    written = {model.model_id: model.written for model in models if model.written}
    bundles = {bundle.id: bundle for bundle in (msgspec.convert(raw, BundleEntry) for raw in export.bundles)}
    return Catalogue.from_documents(documents, revisions, bundles, export.epoch, written)


def _document(model: ConfigModel | RawModel) -> ModelEntry | Alias:
    raw: object = model.model_config
    try:
        return parse_document(msgspec.json.decode(raw) if isinstance(raw, msgspec.Raw) else raw)
    except (*UNDECODABLE, SIEError) as error:
        raise ValidationFailed(f"{model.model_id}: {error}") from error


class CatalogueFeed:
    """Keeps the catalogue of this process up to date. Calls the listeners of `on_change` after each new snapshot.

    `initial`: snapshot that is used until the first export is read. `bundle`: only deltas of models that this bundle
    serves are read; None: all deltas. `trusted`: senders whose deltas are applied.
    """

    def __init__(
        self,
        bus: Bus,
        source: ConfigSource | None,
        *,
        trusted: tuple[str, ...],
        poll_s: float,
        full_export_s: float,
        initial: Catalogue | None = None,
        bundle: str | None = None,
    ) -> None:
        self.catalogue = initial or Catalogue()
        self.first = asyncio.Event()  # set when `catalogue` is `initial` or an export
        if initial is not None:
            self.first.set()
        # number of deltas since the start of the process, by (kind, result)
        self.deltas = dict.fromkeys(((kind, result) for kind in ("put", "removal") for result in _RESULTS), 0)
        self.deltas["unknown", "invalid"] = 0
        self._bus = bus
        self._source = source
        self._trusted = frozenset(trusted)
        self._poll_s = poll_s
        self._full_export_s = full_export_s
        self._subject = topology.config_subject(bundle) if bundle else f"{topology.CONFIG_SUBJECT}.*"
        self._bundle = bundle
        self._listeners: list[Callable[[], None]] = []
        # true if the config service's catalogue is older than that of this process, because the service lost writes
        self._is_rewound = False
        self._refresh = asyncio.Event()
        self._soon: asyncio.TimerHandle | None = None
        # set when the present snapshot is replaced; each snapshot has its own event
        self._replaced = asyncio.Event()
        self._trouble = Trouble(_logger, "the catalogue could not be read; the last one that was read stays in use")

    @property
    def is_behind(self) -> bool:
        """Return whether the last read from the config service failed; False until the first export has been read."""
        return self._trouble.lasting

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def renewed(self, is_enough: Callable[[Catalogue], bool], timeout_s: float) -> bool:
        """Read the catalogue again until `is_enough(self.catalogue)` is true, for at most `timeout_s`. Returns the last
        result of `is_enough`.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not is_enough(self.catalogue):
                    self._refresh.set()
                    await self._replaced.wait()
        return is_enough(self.catalogue)

    async def run(self, stop: Stop) -> None:
        """Subscribe to deltas, request the first full export, then follow the catalogue until `stop` is requested."""
        await retry(
            lambda: self._bus.subscribe(self._subject, self._on_delta),
            errors=(BrokerError,),
            stop=stop,
            logger=_logger,
            task="listening for changes of the catalogue",
        )
        self._bus.on_reconnect(self._on_reconnect)
        if self._source is None:
            await stop.wait()
            return
        source, errors = self._source, (ConfigUnavailable, SIEError, msgspec.ValidationError)
        await retry(
            lambda: self._reload(source), errors=errors, stop=stop, logger=_logger, task="reading the catalogue"
        )
        loop = asyncio.get_running_loop()
        full_due_s, failed_s = loop.time() + self._full_export_s, 0.0
        while not await stop.wait_woken(self._refresh, min(self._poll_s, failed_s or self._poll_s)):
            try:
                is_late = await self._is_late(source)
                if is_late or self._is_rewound or (self._full_export_s and loop.time() >= full_due_s):
                    await self._reload(source)
                    full_due_s = loop.time() + self._full_export_s
                self._trouble.passed()
                failed_s = 0.0
            except errors as error:
                self._trouble.met(error)
                failed_s = max(FIRST_RETRY_S, 2 * failed_s)
        await source.close()

    async def _on_reconnect(self) -> None:
        self._ask_soon()

    def _ask_soon(self) -> None:
        """Read the epoch after a random pause, so that processes do not all read it at the same time."""
        if self._soon is None:
            pause_s = SPREAD_S * secrets.randbelow(1000) / 1000
            self._soon = asyncio.get_running_loop().call_later(pause_s, self._refresh_now)

    def _refresh_now(self) -> None:
        self._soon = None
        self._refresh.set()

    async def _is_late(self, source: ConfigSource) -> bool:
        """Return whether the whole catalogue must be read again because this process has missed a write. If no missed
        write concerns a model of `_bundle`, set only the epoch of the snapshot, and return False.
        """
        before = self.catalogue.epoch
        state = await source.epoch()
        self._refuse_older(state.epoch, before)
        present = self.catalogue.epoch  # the catalogue may have changed while the request ran
        if has_seen(present, state.epoch):
            return False
        since = state.bundles.get(self._bundle) if self._bundle else None
        if since and has_seen(state.epoch, present) and has_seen(present, since):
            self._replace(self.catalogue.at(state.epoch))
            return False
        return True

    async def _reload(self, source: ConfigSource) -> None:
        before = self.catalogue.epoch
        new = await snapshot(await source.export())
        self._refuse_older(new.epoch, before)
        if not new.entries:
            raise ConfigUnavailable(
                "the catalogue of the config service has no model, so it does not replace the present one"
            )
        present = self.catalogue.epoch  # the catalogue may have changed while the request ran
        if new.epoch == present or not has_seen(present, new.epoch):
            self._replace(new)
        self._is_rewound = False
        self.first.set()

    def _refuse_older(self, epoch: str, before: str) -> None:
        """Raise ConfigUnavailable if the config service has an older catalogue than this process, because the store of
        the service lost writes. `epoch`: epoch of the service. `before`: epoch of this process when the request was
        sent.

        After such a loss, a new write may get an epoch that a lost write had, so equal epochs may mean different
        catalogues. `_is_rewound` therefore makes `run` read the whole catalogue again as soon as the service has an
        epoch that is not older than `before`.
        """
        if epoch != before and has_seen(before, epoch):
            self._is_rewound = True
            raise ConfigUnavailable(
                f"the config service has the epoch {epoch}, but this process has the newer epoch {before}: was the "
                "store of the config service restored from an older copy? Write the lost changes again, or restart "
                "this process to use that copy"
            )

    def _replace(self, new: Catalogue) -> None:
        self.catalogue = new
        self._replaced.set()
        self._replaced = asyncio.Event()
        for listener in self._listeners:
            listener()

    async def _on_delta(self, message: CoreMessage) -> None:
        kind, result = "unknown", "invalid"
        try:
            delta = configs.decode_delta(message.data)
            result = self._apply(delta)
            kind = "removal" if delta.entry is None else "put"
        except (*UNDECODABLE, SIEError) as error:
            _logger.warning("a change of the catalogue (delta) could not be decoded and is ignored: %s", error)
        self.deltas[kind, result] += 1

    def _apply(self, delta: ConfigDelta) -> str:
        """Apply a delta and return its result, one of `_RESULTS`. Raises ValidationFailed for an invalid entry."""
        if delta.producer not in self._trusted:
            _logger.warning(
                "a change of the catalogue (delta) is ignored: SIE_NATS_CONFIG_TRUSTED_PRODUCERS lacks its sender"
            )
            return "untrusted"
        document, present = None if delta.entry is None else parse_document(delta.entry), self.catalogue.epoch
        if has_seen(present, delta.epoch):
            return "stale"
        between = (
            bool(self._bundle and delta.since) and has_seen(present, delta.since) and has_seen(delta.previous, present)
        )
        # a delta has the change of one model: without a snapshot, the new catalogue would have only this model
        if not self.first.is_set() or (present != delta.previous and not between):
            self._ask_soon()
            return "gap"
        self._replace(self.catalogue.with_model(delta.model, document, delta.revision, delta.epoch))
        return "applied"


def read_folder(folder: Path) -> Mapping[str, ModelEntry]:
    """Return the model entries in all `*.yaml` files below `folder`, by id; no entry if the folder is missing. Raises
    ValidationFailed, which names the file, for an unreadable file or an invalid entry.
    """
    from sie_contracts import yaml_text

    entries: dict[str, ModelEntry] = {}
    for file in sorted(path for path in folder.rglob("*.yaml") if path.is_file()):
        try:
            entry = parse_entry(yaml_text.load(file.read_text("utf-8")))
        except (yaml_text.NotYAML, UnicodeDecodeError, OSError, SIEError) as error:
            raise ValidationFailed(f"{file.name}: {error}") from error
        entries[entry.id] = entry
    return entries


def read_bundles(folder: Path) -> Mapping[str, BundleEntry]:
    """Return all bundles in the `*.yaml` files of a folder, by id. Raises ValidationFailed for an invalid bundle,
    NotYAML, UnicodeDecodeError or OSError for an unreadable file.
    """
    from sie_contracts import yaml_text

    bundles = (parse_bundle(yaml_text.load(file.read_text("utf-8"))) for file in sorted(folder.glob("*.yaml")))
    return {bundle.id: bundle for bundle in bundles}


def packaged_models() -> Mapping[str, ModelEntry]:
    """Return the entries of the installed package, by id, except those of families that no package here brings. Raises
    ValidationFailed for an invalid entry.
    """
    present = families.rows()
    return {model: entry for model, entry in _packaged(packaged_folder()).items() if entry.family in present}


@functools.cache  # an installed package does not change, and its 200 files take 0.1 s of a processor
def _packaged(folder: Path) -> Mapping[str, ModelEntry]:
    return read_folder(folder / "models")


def packaged_catalogue() -> Catalogue:
    """Return the catalogue of the installed package, for a process without a config service. All revisions are 0."""
    entries = packaged_models()
    return Catalogue(entries, dict.fromkeys(entries, 0), read_bundles(packaged_folder() / "bundles"), "packaged")
