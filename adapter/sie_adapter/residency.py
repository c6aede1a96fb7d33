"""Which models are loaded, and which one goes when memory is short.

    EnsureReady ──► loaded already? ──► one load per model, however many ask ──► resident
                                          └─ before it: evict while memory is above the threshold, least recently used first

State is owned by `Residency` and guarded by one lock, which is never held over a load or a forward pass.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import msgspec

from sie_adapter.device import Memory
from sie_contracts.catalogue import Catalogue, ModelEntry, Resolved, fingerprint
from sie_contracts.errors import ModelLoading
from sie_contracts.ipc import LoadedModel, Rows

_logger = logging.getLogger("sie.adapter")


class Weights(Protocol):
    """What the process needs of a loaded family, beyond running it."""

    tokenizer: bytes
    memory_bytes: int
    attention: str
    precision: str
    max_tokens: int
    rows: Mapping[str, Rows]


@dataclass
class Resident:
    """A loaded model. `entry` may be replaced by one that needs no other weights."""

    model: str
    resolved: Resolved
    weights: Weights
    load_s: float
    last_used_s: float
    running: int = 0

    def describe(self, now_s: float) -> LoadedModel:
        """As it goes over the wire."""
        entry, weights = self.resolved.entry, self.weights
        return LoadedModel(
            self.model, entry.revision, fingerprint(entry, self.resolved.load, weights.precision), weights.precision, weights.attention,
            weights.memory_bytes, round(now_s - self.last_used_s, 3),
        )  # fmt: skip


def same_weights(old: Resolved, new: Resolved) -> bool:
    """Whether the loaded copy for `old` serves `new` as well."""

    def facts(resolved: Resolved) -> bytes:
        entry = resolved.entry
        return msgspec.json.encode([entry.id, entry.weights, entry.family, entry.max_tokens, entry.outputs, resolved.load], order="sorted")

    return facts(old) == facts(new)


class Residency:
    """The loaded models of this process. Every method may be called from any thread.

    `load` turns a resolved entry into weights and raises ModelLoadFailed. `memory` is asked before a load and after batches; a model goes
    only while its percentage is above `threshold_percent`, only if the sidecar named it as idle, and only while nothing runs on it.
    """

    def __init__(
        self,
        load: Callable[[Resolved], Weights],
        memory: Callable[[], Memory],
        give_memory_back: Callable[[], None],
        threshold_percent: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._memory = memory
        self._give_memory_back = give_memory_back
        self._threshold_percent = threshold_percent
        self._clock = clock
        self._lock = threading.Lock()
        self._residents: dict[str, Resident] = {}
        self._loads: dict[str, Future[None]] = {}
        self._evictable: set[str] = set()
        self._relieve_due_s = 0.0

    def ensure(self, model: str, entry: ModelEntry, profile: str, evictable: tuple[str, ...]) -> tuple[Resident, tuple[str, ...]]:
        """The resident `model`, loaded if it is not there or needs other weights, and what was unloaded for it. Raises ModelLoadFailed."""
        resolved = Catalogue.resolve_profile(entry, profile, model)
        while True:
            with self._lock:
                self._evictable = set(evictable) - {model}
                resident = self._residents.get(model)
                if resident is not None and same_weights(resident.resolved, resolved):
                    resident.resolved = resolved
                    return resident, ()
                pending = self._loads.get(model)
                if pending is None:
                    self._residents.pop(model, None)
                    pending = self._loads[model] = Future()
                    break
            pending.result()
        try:
            evicted = self._evict(evictable)
            resident = self._loaded(model, resolved)
        except BaseException as error:
            with self._lock:
                del self._loads[model]
            pending.set_exception(error)
            raise
        with self._lock:
            self._residents[model] = resident
            del self._loads[model]
        pending.set_result(None)
        return resident, evicted

    @contextlib.contextmanager
    def use(self, model: str) -> Iterator[Resident]:
        """The resident `model` for one batch; it is not evicted meanwhile. Raises ModelLoading if it is not loaded."""
        with self._lock:
            resident = self._residents.get(model)
            if resident is None:
                raise ModelLoading(f"{model} is not loaded", reason="not_resident")
            resident.running += 1
            resident.last_used_s = self._clock()
            self._evictable.discard(model)
        try:
            yield resident
        finally:
            with self._lock:
                resident.running -= 1

    def change(self, model: str, entry: ModelEntry | None) -> None:
        """Serve `entry` from now on: in place if the loaded weights allow it, else by unloading. None unloads."""
        with self._lock:
            resident = self._residents.get(model)
            if resident is not None and entry is not None:
                resolved = Catalogue.resolve_profile(entry, resident.resolved.profile, model)
                if same_weights(resident.resolved, resolved):
                    resident.resolved = resolved
                    return
        self.release(model)

    def release(self, model: str) -> None:
        """Unload `model`, or nothing. A batch that runs on it finishes first; its memory is free after that."""
        with self._lock:
            found = self._residents.pop(model, None) is not None
        if found:
            _logger.info("unloaded %s", model)
            self._collect()

    def relieve(self) -> tuple[str, ...]:
        """Evict under pressure, looking at most once a second, from what the sidecar last called idle and was not used since."""
        with self._lock:
            now_s = self._clock()
            if now_s < self._relieve_due_s or not self._evictable:
                return ()
            self._relieve_due_s = now_s + 1.0
            evictable = tuple(self._evictable)
        return self._evict(evictable)

    def describe(self) -> tuple[LoadedModel, ...]:
        """All resident models, in the order in which they were loaded."""
        with self._lock:
            return tuple(resident.describe(self._clock()) for resident in self._residents.values())

    def _loaded(self, model: str, resolved: Resolved) -> Resident:
        started_s = self._clock()
        weights = self._load(resolved)
        now_s = self._clock()
        _logger.info(
            "loaded %s in %.2f s: %s, attention %s, %.0f MiB", model, now_s - started_s, weights.precision, weights.attention,
            weights.memory_bytes / 2**20,
        )  # fmt: skip
        return Resident(model, resolved, weights, now_s - started_s, now_s)

    def _evict(self, evictable: tuple[str, ...]) -> tuple[str, ...]:
        """The least recently used goes first; if that does not clear the threshold, the largest next, and so on."""
        evicted: list[str] = []
        while self._memory().percent > self._threshold_percent:
            victim = self._pop_victim(evictable, by_size=bool(evicted))
            if victim is None:
                break
            _logger.warning("unloaded %s: device memory is above %g %%", victim, self._threshold_percent)
            self._collect()
            evicted.append(victim)
        return tuple(evicted)

    def _pop_victim(self, evictable: tuple[str, ...], *, by_size: bool) -> str | None:
        with self._lock:
            idle = [self._residents[name] for name in evictable if name in self._residents and not self._residents[name].running]
            if not idle:
                return None
            size = {resident.model: -resident.weights.memory_bytes if by_size else 0 for resident in idle}
            victim = min(idle, key=lambda resident: (size[resident.model], resident.last_used_s)).model
            del self._residents[victim]
            return victim

    def _collect(self) -> None:
        gc.collect()
        self._give_memory_back()
