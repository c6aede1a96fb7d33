"""Loaded models of this process, and eviction of models to free memory for others.

    EnsureReady ──► loaded already? ──► one load per model, for any number of callers ──► warm-up ──► resident
                                          └─ before the load: evict models while memory would be above the threshold
    after a batch, and at a Ping that permits evictions ──► evict models while memory is above the threshold
    out of memory in a batch ──► make_room: evict one model, even below the threshold, or wait for a load to end
    out of memory in a load ──► load again while no other load runs ──► evict one model, and load again
    Release, because the sidecar unloads a model (idle, removed, changed, or requested) ──► release
    before the first eviction for a request: drop cached outputs (`tower_outputs`) and CUDA graphs (`pass_graphs`)

The threshold is `DeviceMemory.threshold_percent`. The sidecar decides which models may be evicted: each request has an
ordered list of these models, and the reply names the evicted models. The adapter stores no permission between requests.
The adapter evicts a model because memory is needed. It unloads a model (`release`) because the sidecar requests this:
the model was idle for SIE_IDLE_EVICT_S seconds, was removed or changed, or an operator has unloaded it.

`ResidentModels` guards its state with one lock, which is never held during a load or a forward pass.
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
from typing import Any, Protocol

import msgspec

from sie_adapter.engine.device import MemoryUse
from sie_adapter.engine.engines import Choice
from sie_adapter.memory.oom import Relief, Remedy
from sie_adapter.memory.shared_lock import SharedLock
from sie_contracts.errors import ModelLoadFailed, ModelLoading, SIEError
from sie_contracts.models.catalogue import Catalogue, Resolved, fingerprint
from sie_contracts.models.entries import ModelEntry
from sie_contracts.wire.ipc import LoadedModel, Rows

_logger = logging.getLogger("sie.adapter")


class LoadedWeights(Protocol):
    """Attributes of every loaded model. The sidecar and the memory limits use them."""

    tokenizer: bytes
    memory_bytes: int
    attention: str
    precision: str
    requested_precision: str
    precision_reason: str
    crossover_tokens: int
    engine_choice: Choice
    max_tokens: int
    rows: Mapping[str, Rows]
    certificate: Mapping[str, Any]


@dataclass
class Resident:
    """A loaded model. `resolved`: its catalogue entry. If the entry changes but needs the same weights, `ensure`
    replaces only this field.
    """

    model: str
    resolved: Resolved
    weights: LoadedWeights
    load_s: float
    last_used_s: float
    running: int = 0
    peak_bytes: int = 0  # bytes of activations at the peak of the warm-up, without the weights
    _fingerprinted: tuple[Resolved | None, str] = (None, "")  # cache of `fingerprint`: an entry and its fingerprint

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the entry in use, cached because every batch reads the fingerprint."""
        # each attribute is read only once, because another thread may replace its value between two reads
        resolved, (before, text) = self.resolved, self._fingerprinted
        if before is resolved:
            return text
        weights = self.weights
        text = fingerprint(resolved.entry, resolved.load, weights.precision, weights.engine_choice.engine)
        self._fingerprinted = resolved, text
        return text

    def describe(self, now_s: float) -> LoadedModel:
        entry, weights = self.resolved.entry, self.weights
        return LoadedModel(
            self.model,
            entry.revision,
            self.fingerprint,
            weights.precision,
            weights.attention,
            weights.memory_bytes,
            round(now_s - self.last_used_s, 3),
            self.peak_bytes,
            dict(weights.certificate),
            weights.requested_precision,
            weights.precision_reason,
            weights.crossover_tokens,
            weights.engine_choice.engine,
            weights.engine_choice.reason,
        )


def same_weights(old: Resolved, new: Resolved) -> bool:
    """Return whether the weights loaded for `old` can be used for `new` without another load."""

    def facts(resolved: Resolved) -> bytes:
        entry = resolved.entry
        # a load copies values of these fields into the loaded model, so a change of one field needs a new load
        retained = [entry.head, entry.pair, entry.run.pooling, entry.run.parameters]
        # a load checks these fields, so a change of one field needs a new load, which may refuse the entry
        checked = [entry.prompts, entry.default_prompt_name, entry.golden, entry.unproven]
        weights = [entry.id, entry.weights, entry.family, entry.max_tokens, entry.outputs, resolved.load]
        return msgspec.json.encode([*weights, *retained, *checked], order="sorted")

    return facts(old) == facts(new)


@dataclass
class Permission:
    """Models that may be evicted for one request: the models in `may_drop`, in this order, except models that were
    used after the request arrived (`asked_s`).

    `dropped`: the models evicted for the request so far. `has_shed`: whether the caches were already dropped for the
    request (`DeviceMemory.shed`). A second drop would remove outputs that the request has computed again.
    """

    may_drop: tuple[str, ...]
    asked_s: float
    dropped: tuple[str, ...] = ()
    has_shed: bool = False

    def record_drop(self, model: str) -> None:
        self.dropped += (model,)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device. `held(n)` returns the use of the memory as if n more bytes were in use. `give_back` returns
    free memory of the allocator to the device. Models are evicted while more than `threshold_percent` of the memory is
    in use. `shed` drops caches that can be filled again, and returns whether a cache had entries.
    """

    held: Callable[[int], MemoryUse]
    give_back: Callable[[], None]
    threshold_percent: float
    shed: Callable[[], bool] = lambda: False

    def is_short(self, more_bytes: int = 0) -> bool:
        return self.held(more_bytes).percent > self.threshold_percent

    def fits(self, more_bytes: int) -> bool:
        """Return whether a KV cache may use `more_bytes` bytes more. The limit for the memory in use is halfway between
        `threshold_percent` and 100 %. If the limit would be exceeded, first drop caches that can be filled again, and
        free memory of the allocator.
        """
        limit_percent = (self.threshold_percent + 100.0) / 2
        if self.held(more_bytes).percent > limit_percent:
            self.shed()
            self.give_back()
        return self.held(more_bytes).percent <= limit_percent


class ResidentModels:
    """Loaded models of this process. Thread-safe.

    `load` turns a resolved entry into weights and raises ModelLoadFailed. Before a load, `needed_bytes` fetches missing
    files and returns the bytes that the load needs. `warm_up` runs the weights once, returns the peak of the
    activations in bytes, and raises the errors of `load`. A model is evicted only if memory is above the threshold,
    would be above the threshold after a load, or has run out. In each case the request must permit the eviction, and no
    batch may run on the model.
    """

    def __init__(
        self,
        load: Callable[[Resolved], LoadedWeights],
        memory: DeviceMemory,
        clock: Callable[[], float] = time.monotonic,
        *,
        needed_bytes: Callable[[Resolved], int] = lambda _: 0,
        warm_up: Callable[[Resolved, LoadedWeights], int] = lambda *_: 0,
        ended: Callable[[Resolved], None] = lambda _: None,
        count: Callable[[str, Remedy], None] = lambda model, remedy: None,
    ) -> None:
        """`count` gets a model whose load ran out of memory, and the name of the counter to increment. Each load calls
        `ended` at its end, also after a failure.
        """
        self._load = load
        self._memory = memory
        self._clock = clock
        self._needed_bytes = needed_bytes
        self._warm_up = warm_up
        self._ended = ended
        self._count = count
        self._lock = threading.Lock()
        self._loading = SharedLock()
        self._residents: dict[str, Resident] = {}
        # model -> the entry that is being loaded, and a future that ends with the load
        self._loads: dict[str, tuple[Resolved, Future[None]]] = {}
        self._arriving: dict[str, int] = {}  # model that is being loaded -> bytes that its load needs
        self._relieve_due_s = 0.0

    def permission(self, may_drop: tuple[str, ...] = ()) -> Permission:
        return Permission(may_drop, self._clock())

    def ensure(
        self, model: str, entry: ModelEntry, profile: str = "default", permission: Permission | None = None
    ) -> Resident:
        """Return the resident `model`; load it if it is not loaded or needs other weights. `permission` records the
        models that were evicted for the load, even if this method raises. Raises ModelLoadFailed, with the error class
        OOM and the reason no_room if the model does not fit beside the models that must not be evicted.
        """
        permission = permission or self.permission()
        resolved = Catalogue.resolve_profile(entry, profile, model)
        while True:
            with self._lock:
                resident = self._residents.get(model)
                if resident is not None and same_weights(resident.resolved, resolved):
                    resident.resolved = resolved
                    # from now on, a request that arrived earlier cannot evict this model (see `Permission`)
                    resident.last_used_s = self._clock()
                    return resident
                running = self._loads.get(model)
                if running is None:
                    self._residents.pop(model, None)
                    pending: Future[None] = Future()
                    self._loads[model] = resolved, pending
                    break
            # All callers that need the same weights get the error of the load. Each caller gets a copy, because each
            # raise of the same exception makes its traceback longer.
            error = running[1].exception()
            if error is not None and same_weights(running[0], resolved):
                raise SIEError.from_info(error.info()) if isinstance(error, SIEError) else error
        try:
            self._room_for(model, resolved, permission)
            resident = self._loaded_in_any_room(model, resolved, permission)
        except BaseException as error:
            with self._lock:
                del self._loads[model]
                self._arriving.pop(model, None)
            pending.set_exception(error)
            raise
        finally:
            self._ended(resolved)
        with self._lock:
            self._residents[model] = resident
            del self._loads[model], self._arriving[model]
        pending.set_result(None)
        return resident

    @contextlib.contextmanager
    def use(self, model: str, fingerprint: str = "") -> Iterator[Resident]:
        """Yield the resident `model` for one batch. The model is not evicted while the batch runs. Raises ModelLoading
        if the model is not loaded, or has another fingerprint, because its catalogue entry has changed.
        """
        with self._lock:
            resident = self._residents.get(model)
            if resident is None or (fingerprint and resident.fingerprint != fingerprint):
                raise ModelLoading(f"{model} is not loaded", reason="not_resident")
            resident.running += 1
            resident.last_used_s = self._clock()
        try:
            yield resident
        finally:
            with self._lock:
                resident.running -= 1

    def release(self, model: str) -> None:
        """Unload `model` if it is loaded. Its memory stays in use until the batches that run on the model end."""
        with self._lock:
            was_loaded = self._residents.pop(model, None) is not None
        if was_loaded:
            _logger.info("unloaded %s", model)
            self._collect()

    def relieve(self, permission: Permission) -> None:
        """Evict models while memory is above the threshold, at most once per second for all callers. Do not count the
        bytes that a running load still needs, because `ensure` has already freed these bytes.
        """
        with self._lock:
            now_s = self._clock()
            if now_s < self._relieve_due_s or not permission.may_drop:
                return
            self._relieve_due_s = now_s + 1.0
        self._evict_above_threshold(0, permission)

    def make_room(self, permission: Permission) -> Relief | None:
        """Free memory after a failed allocation by the first remedy that is possible: drop cached outputs, evict the
        next permitted model, or wait for the end of a running load. Return the remedy; None if none is possible.
        """
        if self._shed(permission):
            return "cache_clears"
        if self._evict_next(permission, "an allocation failed"):
            return "evictions_triggered"
        with self._lock:
            # wait only for a load whose size is known: any other load is still downloading files, which takes minutes
            # and uses no device memory
            pending = next((self._loads[model][1] for model in self._arriving), None)
        if pending is not None:
            # wait for the end of the load, and ignore its error: the callers that requested that model get the error
            pending.exception()
        return "load_ended" if pending is not None else None

    def describe(self) -> tuple[LoadedModel, ...]:
        """Return all resident models, in the order in which they were loaded."""
        with self._lock:
            return tuple(resident.describe(self._clock()) for resident in self._residents.values())

    def _room_for(self, model: str, resolved: Resolved, permission: Permission) -> None:
        needed = self._needed_bytes(resolved)
        with self._lock:
            self._arriving[model] = needed
            arriving = sum(self._arriving.values())
        self._evict_above_threshold(arriving, permission)
        with self._lock:
            beside = [name for name in self._arriving if name != model]
        if needed and (would := self._memory.held(arriving)).used_bytes > would.total_bytes:
            raise ModelLoadFailed(
                f"{model} needs {needed >> 20} MiB, {max(0, would.total_bytes - would.used_bytes + needed) >> 20} MiB "
                "are free, and no loaded model may be evicted",
                reason="no_room",
                extras={"error_class": "OOM", **({"arriving": beside} if beside else {})},
            )

    def _loaded_in_any_room(self, model: str, resolved: Resolved, permission: Permission) -> Resident:
        """Load a model. If memory runs out, free memory and load again: a load needs more memory than the loaded model,
        for example for the copy of a mapped file. If another load ran at the same time, first repeat this load alone
        and without an eviction, because two loads could evict each other's models for ever.
        """
        with self._loading.shared() as share:
            loaded = self._loaded_or_oom(model, resolved)
        if isinstance(loaded, Resident):
            return loaded
        self._count(model, "recoveries_attempted")
        is_changed = not share.was_alone
        with self._loading.exclusive():
            while not isinstance(loaded, Resident):
                self._collect()
                self._count(model, "cache_clears")
                if not is_changed and not self._shed(permission):
                    if not self._evict_next(permission, f"there was too little memory to load {model}"):
                        self._count(model, "terminal_failures")
                        raise loaded
                    self._count(model, "evictions_triggered")
                is_changed = False
                loaded = self._loaded_or_oom(model, resolved)
        self._count(model, "recoveries_succeeded")
        return loaded

    def _loaded_or_oom(self, model: str, resolved: Resolved) -> Resident | SIEError:
        """Load a model. Return the error if memory ran out. Raises SIEError of any class other than OOM."""
        try:
            return self._loaded(model, resolved)
        except SIEError as error:
            # copy the error, because the traceback of the original keeps the partly loaded model in memory
            failure = SIEError.from_info(error.info())
        if failure.extras.get("error_class") != "OOM":
            self._collect()
            raise failure
        return failure

    def _loaded(self, model: str, resolved: Resolved) -> Resident:
        started_s = self._clock()
        weights = self._load(resolved)
        peak_bytes = self._warm_up(resolved, weights)
        now_s = self._clock()
        _logger.info(
            "loaded %s in %.2f s: %s on %s (%s), attention %s, %.0f MiB of weights, %.0f MiB to warm up",
            model,
            now_s - started_s,
            weights.precision,
            weights.engine_choice.engine,
            weights.engine_choice.reason,
            weights.attention,
            weights.memory_bytes / 2**20,
            peak_bytes / 2**20,
        )
        return Resident(model, resolved, weights, now_s - started_s, now_s, peak_bytes=peak_bytes)

    def _evict_above_threshold(self, more_bytes: int, permission: Permission) -> None:
        if not self._memory.is_short(more_bytes):
            return
        # Before evictions, drop cached outputs, collect garbage and return free memory of the allocator. A model that
        # was unloaded during a batch may be part of this garbage.
        self._memory.shed()
        self._collect()
        why = f"device memory is short, the threshold is {self._memory.threshold_percent:g} %"
        while self._memory.is_short(more_bytes) and self._evict_next(permission, why):
            pass

    def _evict_next(self, permission: Permission, why: str) -> bool:
        """Evict the first model of `permission` that may be evicted now. Return False if there is none."""
        with self._lock:
            victim = next((name for name in permission.may_drop if self._is_evictable(name, permission)), None)
            if victim is None:
                return False
            del self._residents[victim]
            permission.record_drop(victim)
        _logger.warning("evicted %s: %s", victim, why)
        self._collect()
        return True

    def _shed(self, permission: Permission) -> bool:
        if permission.has_shed or not self._memory.shed():
            return False
        permission.has_shed = True
        self._collect()
        return True

    def _is_evictable(self, model: str, permission: Permission) -> bool:
        resident = self._residents.get(model)
        return resident is not None and not resident.running and resident.last_used_s <= permission.asked_s

    def _collect(self) -> None:
        gc.collect()
        self._memory.give_back()
