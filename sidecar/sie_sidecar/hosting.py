"""Which models this worker holds: one load per model however many wait for it, failures that are remembered, release when idle.

    available ──EnsureReady──► loading ──Ready──► loaded ──Release, eviction, adapter gone──► available
                                  └──Refused──► failed ──cool-down──► available
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

import msgspec

from sie_contracts import ipc
from sie_contracts.catalogue import Resolved, profile_fingerprint
from sie_contracts.errors import ModelLoadFailed, SIEError
from sie_contracts.messages import ModelStatus
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.tokens import ModelTokenizer

COOL_DOWN_S = 30.0  # after a failure that may pass; a permanent one stands until the entry changes
_logger = logging.getLogger("sie.sidecar.hosting")


class Hosted:
    """One residency on this worker. `held` counts its work items here, whatever stage they are in."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self.state: Literal["available", "loading", "loaded", "failed"] = "available"
        self.ready: ipc.Ready | None = None
        self.tokenizer: ModelTokenizer | None = None
        self.error: SIEError | None = None
        self.failed_s = 0.0
        self.attempts = 0
        self.held = 0
        self.used_s = 0.0
        self.loading: asyncio.Task[None] | None = None
        self._fingerprints: dict[tuple[str, str], str] = {}

    @property
    def name(self) -> str:
        return self.resolved.residency

    def fingerprint(self, profile: str) -> str:
        """Of answers of this profile; empty while nothing is loaded."""
        if self.ready is None:
            return ""
        loaded, entry = self.ready.loaded.fingerprint, self.resolved.entry
        if (loaded, profile) not in self._fingerprints:
            self._fingerprints[loaded, profile] = profile_fingerprint(loaded, entry, profile)
        return self._fingerprints[loaded, profile]

    def status(self) -> ModelStatus:
        loaded = self.ready.loaded if self.ready else None
        return ModelStatus(
            self.name, self.state, loaded.memory_bytes if loaded else 0, self.held, loaded.fingerprint if loaded else "",
            self.error.info() if self.error else None,
        )  # fmt: skip

    def unload(self) -> None:
        """The adapter does not hold it any more."""
        self._fingerprints.clear()
        if self.state == "loaded":
            self.state = "available"
        self.ready = None


class Hosting:
    """All residencies of this worker."""

    def __init__(self, link: AdapterLink, clock: Callable[[], float], on_change: Callable[[], None]) -> None:
        self._link = link
        self._clock = clock
        self._on_change = on_change
        self._hosted: dict[str, Hosted] = {}
        link.listeners.append(self._on_link)

    def all(self) -> list[Hosted]:
        return list(self._hosted.values())

    def of(self, resolved: Resolved) -> Hosted:
        """The residency that serves `resolved`. An entry that changed since is another one: the old copy is not used for it."""
        hosted = self._hosted.get(resolved.residency)
        if hosted is None:
            hosted = self._hosted[resolved.residency] = Hosted(resolved)
        elif hosted.resolved.entry != resolved.entry:
            hosted.resolved = resolved
            hosted.unload()
            if hosted.state == "failed":
                hosted.state, hosted.error, hosted.attempts = "available", None, 0
        return hosted

    def _on_link(self, connected: bool) -> None:
        if not connected:
            for hosted in self._hosted.values():
                hosted.unload()
        self._on_change()

    async def ensure(self, hosted: Hosted) -> None:
        """Return when the model is loaded. Raises ModelLoadFailed, AdapterGone."""
        while hosted.state != "loaded":
            if hosted.state == "failed" and hosted.error is not None:
                permanent = bool(hosted.error.extras.get("permanent"))
                if permanent or self._clock() - hosted.failed_s < COOL_DOWN_S:
                    # a new exception each time: a kept one would collect the frames of everybody who ever met it
                    raise SIEError.from_info(hosted.error.info())
            if hosted.loading is None:
                hosted.loading = asyncio.create_task(self._load(hosted), name=f"load:{hosted.name}")
            await asyncio.shield(hosted.loading)

    async def _load(self, hosted: Hosted) -> None:
        resolved = hosted.resolved
        hosted.state = "loading"
        self._on_change()
        evictable = tuple(other.name for other in self.idle(0.0) if other is not hosted)
        question = ipc.EnsureReady(hosted.name, msgspec.to_builtins(resolved.entry), resolved.profile, evictable)
        try:
            ready = await self._link.ensure_ready(question)
        except AdapterGone:
            hosted.state = "available"
            raise
        except SIEError as error:
            hosted.attempts += 1
            extras = {"error_class": "UNKNOWN", "permanent": hosted.attempts >= 3, **error.extras, "attempts": hosted.attempts}
            hosted.error = ModelLoadFailed(error.message, reason=error.reason, extras=extras)
            hosted.state, hosted.failed_s = "failed", self._clock()
            _logger.error("%s could not be loaded: %s", hosted.name, error.message, extra={"model": hosted.name})
            raise SIEError.from_info(hosted.error.info()) from error
        else:
            if hosted.resolved.entry == resolved.entry:
                self._loaded(hosted, ready)
            else:
                hosted.state = "available"  # the entry changed meanwhile: what was loaded is another model
        finally:
            hosted.loading = None
            self._on_change()

    def _loaded(self, hosted: Hosted, ready: ipc.Ready) -> None:
        for name in ready.evicted:
            if name in self._hosted:
                self._hosted[name].unload()
        hosted.ready, hosted.error, hosted.attempts = ready, None, 0
        hosted.tokenizer = ModelTokenizer(ready.tokenizer, ready.max_tokens)
        hosted.state, hosted.used_s = "loaded", self._clock()
        loaded = ready.loaded
        how = f"{loaded.precision}, {loaded.attention}"
        _logger.info("%s loaded in %.2f s: %s", hosted.name, ready.load_s, how, extra={"model": hosted.name})

    async def release(self, hosted: Hosted) -> None:
        """Unload a model that nothing is held for. Raises AdapterGone, SIEError."""
        hosted.unload()
        self._on_change()
        await self._link.ask(ipc.Release(hosted.name))

    def idle(self, seconds: float) -> list[Hosted]:
        """Loaded models without work that were last used this long ago."""
        before_s = self._clock() - seconds
        loaded = (hosted for hosted in self._hosted.values() if hosted.state == "loaded")
        return [hosted for hosted in loaded if not hosted.held and hosted.used_s <= before_s]
