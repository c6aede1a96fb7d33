"""Which models are loaded, and which one goes when memory is short.

    EnsureReady ──► loaded already? ──► one load per model, however many ask ──► warm-up ──► resident
                                          └─ before it: evict while memory would be above the threshold
    after a batch, and once a second ──► evict while memory is above the threshold
    out of memory ──► make_room: evict one, whatever the threshold says, or wait for a load to end

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
from typing import Any, Protocol

import msgspec

from sie_adapter.device import Memory
from sie_adapter.remedies import Remedy
from sie_contracts.catalogue import Catalogue, ModelEntry, Resolved, fingerprint
from sie_contracts.errors import ModelLoadFailed, ModelLoading, SIEError
from sie_contracts.ipc import LoadedModel, Rows

_logger = logging.getLogger("sie.adapter")


class Weights(Protocol):
    """What the process needs of a loaded family, beyond running it."""

    tokenizer: bytes
    memory_bytes: int
    attention: str
    precision: str
    requested_precision: str
    precision_reason: str
    crossover_tokens: int
    max_tokens: int
    rows: Mapping[str, Rows]
    certificate: Mapping[str, Any]


@dataclass
class Resident:
    """A loaded model. `entry` may be replaced by one that needs no other weights."""

    model: str
    resolved: Resolved
    weights: Weights
    load_s: float
    last_used_s: float
    running: int = 0
    peak_bytes: int = 0  # of activations, beside the weights
    _fingerprint: str = ""
    _fingerprinted: Resolved | None = None

    @property
    def fingerprint(self) -> str:
        """Of the entry that is served now; every batch asks for it."""
        if self._fingerprinted is not self.resolved:
            self._fingerprint = fingerprint(self.resolved.entry, self.resolved.load, self.weights.precision)
            self._fingerprinted = self.resolved
        return self._fingerprint

    def describe(self, now_s: float) -> LoadedModel:
        """As it goes over the wire."""
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
        )


def same_weights(old: Resolved, new: Resolved) -> bool:
    """Whether the loaded copy for `old` serves `new` as well."""

    def facts(resolved: Resolved) -> bytes:
        entry = resolved.entry
        # a family also keeps what these say: its heads, how rows are made, and limits of its own
        kept = [entry.head, entry.pair, entry.run.pooling, entry.run.parameters]
        return msgspec.json.encode(
            [entry.id, entry.weights, entry.family, entry.max_tokens, entry.outputs, resolved.load, *kept],
            order="sorted",
        )

    return facts(old) == facts(new)


class Residency:
    """The loaded models of this process. Every method may be called from any thread.

    `load` turns a resolved entry into weights and raises ModelLoadFailed; `needed_bytes` tells before it what they will
    take, and fetches their files if need be; `warm_up` runs them once and returns the peak of its activations, bytes.
    `memory` is what the device would hold with so many bytes more. A model goes only while that is above
    `threshold_percent`, or to end a shortage; only if the sidecar named it as idle and nobody used it since; and only
    while nothing runs on it.
    """

    def __init__(
        self,
        load: Callable[[Resolved], Weights],
        memory: Callable[[int], Memory],
        give_memory_back: Callable[[], None],
        threshold_percent: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        needed_bytes: Callable[[Resolved], int] = lambda _: 0,
        warm_up: Callable[[Weights], int] = lambda _: 0,
        ended: Callable[[Resolved], None] = lambda _: None,
        count: Callable[[str, Remedy], None] = lambda model, remedy: None,
    ) -> None:
        """`count` hears, by model, of each remedy for a load that ran out of memory; `ended` of the end of each load,
        good or not.
        """
        self._load = load
        self._memory = memory
        self._give_memory_back = give_memory_back
        self._threshold_percent = threshold_percent
        self._clock = clock
        self._needed_bytes = needed_bytes
        self._warm_up = warm_up
        self._ended = ended
        self._count = count
        self._lock = threading.Lock()
        self._residents: dict[str, Resident] = {}
        self._loads: dict[str, Future[None]] = {}
        self._arriving: dict[str, int] = {}  # bytes of weights whose load has begun
        self._evictable: set[str] = set()
        self._offered: set[str] = set()  # for a load that still looks for room, whatever was told of idle models since
        self._untold: list[str] = []
        self._relieve_due_s = 0.0

    def ensure(
        self, model: str, entry: ModelEntry, profile: str, evictable: tuple[str, ...]
    ) -> tuple[Resident, tuple[str, ...]]:
        """The resident `model`, loaded if it is not there or needs other weights, and what was unloaded for it.

        Raises ModelLoadFailed: class OOM and reason no_room if it cannot fit beside the models that have work.
        """
        resolved = Catalogue.resolve_profile(entry, profile, model)
        while True:
            with self._lock:
                self._offered = set(evictable) - {model}
                self._evictable = set(self._offered)
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
        evicted: tuple[str, ...] = ()
        try:
            evicted = self._room_for(model, resolved)
            resident, more = self._loaded_in_any_room(model, resolved)
        except BaseException as error:
            with self._lock:
                del self._loads[model]
                self._arriving.pop(model, None)
                self._untold.extend(evicted)  # a refusal does not name them
            pending.set_exception(error)
            raise
        finally:
            self._ended(resolved)
        with self._lock:
            self._residents[model] = resident
            del self._loads[model], self._arriving[model]
        pending.set_result(None)
        return resident, (*evicted, *more)

    @contextlib.contextmanager
    def use(self, model: str, fingerprint: str = "") -> Iterator[Resident]:
        """The resident `model` for one batch; it is not evicted meanwhile. Raises ModelLoading if it is not loaded, or
        is another copy than that of `fingerprint`: its entry was changed.
        """
        with self._lock:
            resident = self._residents.get(model)
            if resident is None or (fingerprint and resident.fingerprint != fingerprint):
                raise ModelLoading(f"{model} is not loaded", reason="not_resident")
            resident.running += 1
            resident.last_used_s = self._clock()
            self._evictable.discard(model)
            self._offered.discard(model)
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

    def idle(self, models: tuple[str, ...]) -> tuple[str, ...]:
        """Note which models may go from now on, and tell which ones went unasked since the last call."""
        with self._lock:
            self._evictable = set(models) | self._offered
            untold, self._untold = tuple(self._untold), []
            return untold

    def relieve(self) -> tuple[str, ...]:
        """Evict under pressure, looking at most once a second. Returns what went.

        A load under way made its own room, and what it has taken of that is held by now: counted again, it would cost
        others their place.
        """
        with self._lock:
            now_s = self._clock()
            if now_s < self._relieve_due_s or not self._evictable:
                return ()
            self._relieve_due_s = now_s + 1.0
        return self._tell_later(self._evict(0))

    def make_room(self) -> bool:
        """Because an allocation failed: evict the least recently used idle model, else wait for a load that takes
        memory meanwhile to end. False if there is neither.
        """
        if self._tell_later(self._evict_one("an allocation failed")):
            return True
        with self._lock:
            # of those whose bytes are counted: one that still fetches its files holds no memory, and may take minutes
            pending = next((self._loads[model] for model in self._arriving), None)
        if pending is not None:
            pending.exception()  # whether it failed is for those who asked for it
        return pending is not None

    def describe(self) -> tuple[LoadedModel, ...]:
        """All resident models, in the order in which they were loaded."""
        with self._lock:
            return tuple(resident.describe(self._clock()) for resident in self._residents.values())

    def _room_for(self, model: str, resolved: Resolved) -> tuple[str, ...]:
        needed = self._needed_bytes(resolved)
        with self._lock:
            self._arriving[model] = needed
            arriving = sum(self._arriving.values())
        evicted = self._evict(arriving)
        with self._lock:
            self._offered.clear()
            beside = [name for name in self._arriving if name != model]
        if needed and (would := self._memory(arriving)).used_bytes > would.total_bytes:
            self._tell_later(evicted)
            raise ModelLoadFailed(
                f"{model} needs {needed >> 20} MiB, {max(0, would.total_bytes - would.used_bytes + needed) >> 20} are "
                "free and nothing that is loaded is idle",
                reason="no_room",
                extras={"error_class": "OOM", **({"arriving": beside} if beside else {})},
            )
        return evicted

    def _loaded_in_any_room(self, model: str, resolved: Resolved) -> tuple[Resident, tuple[str, ...]]:
        evicted: tuple[str, ...] = ()
        while True:
            try:
                resident = self._loaded(model, resolved)
                if evicted:
                    self._count(model, "recoveries_succeeded")
                return resident, evicted
            except ModelLoadFailed as error:
                if error.extras.get("error_class") != "OOM":
                    raise
                failure = SIEError.from_info(error.info())  # the frames of this one hold the tensors that were too many
            if not evicted:
                self._count(model, "recoveries_attempted")
            self._collect()
            self._count(model, "cache_clears")
            gone = self._evict_one(f"there was too little memory to load {model}")
            if not gone:
                self._count(model, "terminal_failures")
                self._tell_later(evicted)
                raise failure
            self._count(model, "evictions_triggered")
            evicted += gone

    def _loaded(self, model: str, resolved: Resolved) -> Resident:
        started_s = self._clock()
        weights = self._load(resolved)
        peak_bytes = self._warm_up(weights)
        now_s = self._clock()
        _logger.info(
            "loaded %s in %.2f s: %s, attention %s, %.0f MiB and %.0f MiB to warm up",
            model,
            now_s - started_s,
            weights.precision,
            weights.attention,
            weights.memory_bytes / 2**20,
            peak_bytes / 2**20,
        )
        return Resident(model, resolved, weights, now_s - started_s, now_s, peak_bytes=peak_bytes)

    def _evict(self, more_bytes: int) -> tuple[str, ...]:
        """The least recently used goes first; if that does not clear the threshold, the largest next, and so on."""
        if self._memory(more_bytes).percent <= self._threshold_percent:
            return ()
        # neither what the allocator only keeps, nor a model that went while a batch ran on it, is a reason to unload
        # another
        self._collect()
        evicted: tuple[str, ...] = ()
        while self._memory(more_bytes).percent > self._threshold_percent:
            gone = self._evict_one(f"device memory is above {self._threshold_percent:g} %", by_size=bool(evicted))
            if not gone:
                break
            evicted += gone
        return evicted

    def _evict_one(self, why: str, *, by_size: bool = False) -> tuple[str, ...]:
        with self._lock:
            idle = [
                self._residents[name]
                for name in self._evictable
                if name in self._residents and not self._residents[name].running
            ]
            if not idle:
                return ()
            size = {resident.model: -resident.weights.memory_bytes if by_size else 0 for resident in idle}
            victim = min(idle, key=lambda resident: (size[resident.model], resident.last_used_s)).model
            del self._residents[victim]
            self._evictable.discard(victim)
        del idle
        _logger.warning("unloaded %s: %s", victim, why)
        self._collect()
        return (victim,)

    def _tell_later(self, evicted: tuple[str, ...]) -> tuple[str, ...]:
        with self._lock:
            self._untold.extend(evicted)
        return evicted

    def _collect(self) -> None:
        gc.collect()
        self._give_memory_back()
