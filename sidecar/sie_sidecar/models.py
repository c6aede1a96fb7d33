"""Models of this worker. `ModelStates` has their states and decides, without I/O, which models may be evicted.
`Hosting` loads and unloads the models of one device: callers that need the same model share one load, models that do
not fit into memory together are loaded in alternation, and idle models are unloaded (SIE_IDLE_EVICT_S). Unloading is
removing a model from memory for any reason. Evicting is unloading because memory is short, or the model is idle.

    available ──► loading ──► loaded ──idle, or an operator's request──► unloading ──► available
                    │           └──evicted by the adapter, or adapter lost──► available
                    └──error──► failed ──after a pause──► loading

The sidecar decides which models may be evicted and in what order; the adapter decides when, because it knows its
memory. Three kinds of calls list the models that the adapter may evict: loads, batches, and `AdapterLink.relieve`,
which runs every second. Their replies list the evicted models. The adapter evicts models only during these calls. The
sidecar unloads one model with the request `Release`.

    Hosting.ensure ──► the model is loaded and open to new work ──► return
          └──► load ──► the adapter evicts listed models if it needs memory ──► Ready
                  └──► only models with work are left ──► one is closed to new work until it is idle ──► load again

`WorkerModels` has the `Hosting` of each device. A model may be loaded on several devices. The module `devices` chooses
the device for new work.

A residency is a model with one set of load options. Profiles of a model with equal load options share a residency, and
so one copy of the weights in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from sie_contracts.errors import ModelLoadFailed, SIEError
from sie_contracts.media.images import max_blocks, max_ids
from sie_contracts.models.catalogue import Resolved, answer_fingerprint, profile_fingerprint
from sie_contracts.models.load_errors import MAX_ATTEMPTS, incompatible
from sie_contracts.wire import ipc
from sie_contracts.wire.heartbeats import (
    REPORTED_LORAS,
    Fetched,
    ModelStatus,
    ServedEngine,
    ServedLora,
    ServedPrecision,
)
from sie_contracts.wire.messages import RunOptions
from sie_runtime.process import Trouble, cancel_all
from sie_sidecar import devices
from sie_sidecar.devices import DeviceView, SecondCopies
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.prepare.rows import ModelTokenizer, without_panic

State = Literal["available", "loading", "loaded", "unloading", "failed"]

# seconds until a failed load may be tried again, by error class. After a permanent failure, the load is tried again
# only if the catalogue entry changes or an operator requests the load
COOL_DOWN_S = {"OOM": 60.0}
OTHER_COOL_DOWN_S = 30.0
PASSING = ("OOM", "NETWORK")  # error classes that never become permanent: the load is always tried again
PERMANENT = ("GATED", "NOT_FOUND", "DEPENDENCY", "INCOMPATIBLE", "CERTIFICATE")
# part of the device's memory that may be in use before models are evicted, if the adapter reports no threshold
MEMORY_USED = 0.85
RATE_OVER_S = 10.0
FILL_WEIGHT = 0.1  # weight of the newest batch in the moving mean `fill_ratio`
# limit on the tokenizers kept for models that are not loaded: their estimated memory in bytes, summed
SPARE_TOKENIZER_BYTES = 1 << 30
# largest number of states (`ModelState`) on a device. It is limited because each heartbeat contains all states. Above
# it, `remove_unused` removes the least recently used states of models that are not loaded
MAX_STATES = 1000
# a state may be removed this number of seconds after its last use, because no task refers to it any more by then
UNUSED_S = 600.0
# If model B waits for the memory of a loaded model A that has work, A stays open to new work for at most this number of
# seconds, or for `swap_after_s` if that is longer. A request for B waits for these seconds and then for the load of B.
# The gateway limits this wait (SIE_LOAD_HOLD_S)
MAX_TURN_S = 5.0
# A load of another model may evict an idle model only after the idle model has had no work for this many seconds, or
# from `ModelStates._turn_ends_s` on if that is earlier. A gateway publishes the next chunk of a request when it has the
# results of earlier chunks. Without this pause, two models that do not fit into memory together would be loaded again
# for each chunk
NEXT_CHUNK_S = 0.1


def _image_cost(ready: ipc.Ready) -> tuple[int, int]:
    """Return the largest cost of one image in tokens, and the largest number of its token ids, of all operations."""
    costs = []
    for rows in ready.rows.values():
        if (recipe := rows.images) is not None:
            count = max_ids(recipe, rows.image_tokens) if rows.image_tokens else 0
            costs.append((recipe.tokens + max_blocks(recipe) * recipe.block_tokens, count))
    return max((patches + ids for patches, ids in costs), default=0), max((ids for _, ids in costs), default=0)


def usable_bytes(device: ipc.Description) -> float:
    """Return the bytes of a device that may be in use before models are evicted."""
    return (device.threshold_percent / 100 or MEMORY_USED) * device.memory_total_bytes


class ModelState:
    """State of a residency (a model with one set of load options) on a device. `held`: number of work items that need
    the model.
    """

    def __init__(self, resolved: Resolved, device: int = 0) -> None:
        self.resolved = resolved
        self.name = resolved.residency
        self.device = device  # number of the device
        self.revision = 0  # revision of the catalogue entry in `resolved`, 0 if unknown
        self.loaded_revision = 0  # revision of the catalogue entry that was loaded last
        self.state: State = "available"
        self.ready: ipc.Ready | None = None
        self.tokenizer: ModelTokenizer | None = None
        self.error: SIEError | None = None
        self.failed_s = 0.0
        self.attempts = 0
        self.held = 0
        # one function for each group of parked work items (items that wait while the model may be evicted); it returns
        # the number of items in the group
        self.before_gate: list[Callable[[], int]] = []
        self.arriving = False  # true while the adapter loads the model, false while the load waits for memory
        self.leaves = False  # true if an operator wants the model unloaded as soon as it is idle
        # true while the model accepts no new work, because another model needs its memory
        self.is_closed = False
        self.loaded_s = 0.0
        # time when the model was last loaded, used by work, or returned by `obtain` while it was not loaded
        self.used_s = 0.0
        self.uses = 0  # number of arrivals and ends of work items; it grows whenever the model is used
        self.swapped = False  # true if another model was closed to new work to free memory for the last load
        self.load_s = 0.0  # seconds that the last load took
        self.memory_bytes = 0  # bytes of device memory that the model used after its last load
        # mean fill of recent batches: tokens of a batch divided by tokens of a full batch; None before the first batch
        self.fill_ratio: float | None = None
        self._cost_rate = 0.0
        self._cost_s = 0.0
        # one function for each caller that waits for the model; returns how many of its work items still need the model
        self.waiting_counts: list[Callable[[], int]] = []
        # A batch holds this lock while it loads its LoRA and runs, so that no other LoRA is loaded meanwhile.
        # Otherwise, LoRAs that do not fit into memory together could replace each other for ever.
        self.lora_lock = asyncio.Lock()
        # names of LoRAs that were loaded into the model; the adapter may have unloaded a LoRA since then
        self.loras: set[str] = set()
        self.lora_digests: dict[str, str] = {}  # name of each LoRA that was loaded -> digest of its files
        self._fingerprints: dict[tuple[str, str], str] = {}

    @property
    def is_open(self) -> bool:
        """Return True if the model is loaded and accepts new work, so that its messages may be pulled."""
        return self.state == "loaded" and not self.is_closed

    def is_ready(self, lora: str) -> bool:
        """Return True if new work can run now: the model is open, and the LoRA, if one is named, was loaded."""
        return self.state == "loaded" and not self.is_closed and (not lora or lora in self.loras)

    @property
    def has_waiters(self) -> bool:
        """Return True if a caller waits for the model and has a work item that still needs the model."""
        return any(count() for count in self.waiting_counts)

    @property
    def parked(self) -> int:
        """Return the number of parked work items. They wait for their model, and do not prevent its eviction."""
        return sum(count() for count in self.before_gate)

    @property
    def is_quiet(self) -> bool:
        """Return True if no work item needs the model now. The model may then be unloaded."""
        return self.held == (self.parked if self.before_gate else 0)

    @property
    def is_unneeded(self) -> bool:
        """Return True if the model is not loaded, and neither work nor a waiting caller needs it."""
        is_needed = self.held or self.waiting_counts or self.before_gate or self.leaves or self.is_closed
        return self.state in ("available", "failed") and not is_needed

    def came_in(self, cost: int, now_s: float) -> None:
        """Add the tokens of an accepted work item to the rate of arriving tokens."""
        self._cost_rate = self.cost_rate(now_s) + cost / RATE_OVER_S
        self._cost_s = now_s

    def filled(self, ratio: float) -> None:
        """Add the fill of a batch (its tokens divided by the tokens of a full batch) to the mean."""
        self.fill_ratio = (
            ratio if self.fill_ratio is None else self.fill_ratio + FILL_WEIGHT * (ratio - self.fill_ratio)
        )

    def cost_rate(self, now_s: float) -> float:
        """Return the arriving tokens per second. Work from RATE_OVER_S seconds ago has 1/e the weight of new work."""
        return self._cost_rate * math.exp((self._cost_s - now_s) / RATE_OVER_S)

    def fingerprint(self, profile: str, options: RunOptions) -> str:
        """Return the fingerprint of answers with this profile and these options. Return an empty text if the model or
        the LoRA is not loaded, or if the catalogue entry no longer has the profile.
        """
        entry = self.resolved.entry
        if self.ready is None or (profile != "default" and profile not in entry.profiles):
            return ""
        loaded = self.ready.loaded.fingerprint
        if (loaded, profile) not in self._fingerprints:
            self._fingerprints[loaded, profile] = profile_fingerprint(loaded, entry, profile)
        if options.lora and options.lora not in self.lora_digests:
            return ""
        lora = options.lora and (self.lora_digests[options.lora] or options.lora)
        fingerprint = self._fingerprints[loaded, profile]
        return answer_fingerprint(fingerprint, lora, options.variant) if lora or options.variant else fingerprint

    def status(self, now_s: float, fetched: Fetched | None = None) -> ModelStatus:
        loaded = self.ready.loaded if self.ready else None
        image_tokens, image_vectors = _image_cost(self.ready) if self.ready else (0, 0)
        return ModelStatus(
            self.name,
            self.state,
            loaded.memory_bytes if loaded else 0,
            self.held,
            loaded.fingerprint if loaded else "",
            self.error.info() if self.error else None,
            loaded.certificate or None if loaded else None,
            self.load_s,
            cost_rate=round(self.cost_rate(now_s), 1),
            fetched=fetched if self.state == "loading" else None,
            precision=ServedPrecision(loaded.precision, loaded.requested_precision, loaded.precision_reason)
            if loaded
            else None,
            engine=ServedEngine(loaded.engine, loaded.engine_reason) if loaded else None,
            crossover_tokens=loaded.crossover_tokens if loaded else 0,
            image_tokens=image_tokens,
            image_vectors=image_vectors,
            revision=self.revision,
            loaded_revision=self.loaded_revision,
            loras=tuple(ServedLora(name, digest) for name, digest in self.lora_digests.items() if digest)[
                -REPORTED_LORAS:
            ],
        )

    def refusal(self, now_s: float) -> SIEError | None:
        """Return the error of the last load; None if the load may be tried again."""
        if self.state != "failed" or self.error is None:
            return None
        cool_down_s = COOL_DOWN_S.get(str(self.error.extras.get("error_class")), OTHER_COOL_DOWN_S)
        if not self.error.extras.get("permanent") and now_s - self.failed_s >= cool_down_s:
            return None
        # a new exception each time: a stored exception would keep the stack frames of its callers in memory
        return SIEError.from_info(self.error.info())

    def mark_unloaded(self) -> None:
        """Record that the adapter does not have the model any more."""
        self._fingerprints.clear()
        self.reset_loras()
        if self.state == "loaded":
            self.state = "available"
        self.ready = None

    def reset_failure(self) -> None:
        """Reset the count of failed loads, and allow the next load at once."""
        self.attempts = 0
        if self.state == "failed":
            self.state, self.error = "available", None

    def retain(self) -> None:
        """Prepare the state for an operator's request to load: cancel a pending unload, and allow a failed load to be
        tried again.
        """
        self.leaves = False
        self.reset_failure()

    def reset_loras(self) -> None:
        """Mark all LoRAs as not loaded. The next use of a LoRA loads it again, which is fast if the adapter still has
        it.
        """
        self.loras.clear()
        self.lora_digests.clear()


class ModelStates:
    """States of all residencies (models with one set of load options) on one device."""

    def __init__(
        self,
        clock: Callable[[], float],
        swap_after_s: float = 1.0,
        *,
        assigned: Callable[[], frozenset[str] | None] = lambda: None,
        fetching: Callable[[], Mapping[str, Fetched]] = dict,
        everywhere: Callable[[], Iterable[ModelState]] | None = None,
        device: int = 0,
    ) -> None:
        """Create the states of a device. `swap_after_s`: seconds that a load waits for memory before it closes another
        model to new work. `assigned()`: models that the placement table assigns to this worker, None if unknown.
        `fetching()`: progress of downloads by id of the catalogue entry. `everywhere()`: states on all devices of this
        worker, which share tokenizers; None if the worker has only this device.
        """
        self.device = device
        self.held_cost = 0  # tokens of the work items that need a model here, as estimated by gateways
        self._clock = clock
        self._swap_after_s = swap_after_s
        self._assigned = assigned
        self._fetching = fetching
        self._everywhere = everywhere or self.all
        self._hosted: dict[str, ModelState] = {}
        self.of_model: dict[str, list[ModelState]] = {}  # by model: its residencies
        # bytes of device memory that models may use; None until `slots` has computed the number while no load runs
        self._usable_bytes: float | None = None

    def all(self) -> list[ModelState]:
        return list(self._hosted.values())

    def statuses(self) -> tuple[ModelStatus, ...]:
        now_s, fetching = self._clock(), self._fetching()
        return tuple(hosted.status(now_s, fetching.get(hosted.resolved.entry.id)) for hosted in self._hosted.values())

    def slots(self, device: ipc.Description) -> int:
        """Return how many models of mean size fit into the memory that models may use; 0 if unknown."""
        sizes = [hosted.memory_bytes for hosted in self._hosted.values() if hosted.memory_bytes]
        # compute `_usable_bytes` only while no load runs: `device.models` lacks a model that is being loaded, so the
        # model's bytes would count as bytes of other programs
        if not any(hosted.state == "loading" for hosted in self._hosted.values()):
            beside_bytes = max(0, device.memory_used_bytes - sum(model.memory_bytes for model in device.models))
            self._usable_bytes = usable_bytes(device) - beside_bytes
        return (
            max(1, int(self._usable_bytes * len(sizes) / sum(sizes))) if sizes and self._usable_bytes is not None else 0
        )

    def obtain(self, resolved: Resolved, revision: int = 0) -> ModelState:
        """Return the state of a model at `revision`. If its catalogue entry has changed, mark the model as unloaded."""
        hosted = self._hosted.get(resolved.residency)
        if hosted is None:
            hosted = self._hosted[resolved.residency] = ModelState(resolved, self.device)
            self.of_model.setdefault(resolved.entry.id, []).append(hosted)
        elif hosted.resolved.entry is not resolved.entry and hosted.resolved.entry != resolved.entry:
            hosted.resolved = resolved
            hosted.mark_unloaded()
            hosted.tokenizer = None  # the tokenizer belongs to the old catalogue entry
            hosted.reset_failure()
        if hosted.state != "loaded":
            hosted.used_s = self._clock()
        hosted.revision = revision
        return hosted

    def remove_unused(self) -> None:
        """If there are more than MAX_STATES states, remove the surplus, the least recently used states first. A state
        is removed only if no work needs it and it was not used for UNUSED_S seconds.
        """
        before_s = self._clock() - UNUSED_S
        unused = [hosted for hosted in self._hosted.values() if hosted.is_unneeded and hosted.used_s <= before_s]
        unused.sort(key=lambda hosted: hosted.used_s)
        for hosted in unused[: max(0, len(self._hosted) - MAX_STATES)]:
            del self._hosted[hosted.name]
            self.of_model[hosted.resolved.entry.id].remove(hosted)
            if not self.of_model[hosted.resolved.entry.id]:
                del self.of_model[hosted.resolved.entry.id]

    def find(self, residency: str) -> ModelState | None:
        """Return the state of this residency, or None if `obtain` was not called for it yet."""
        return self._hosted.get(residency)

    def add_items(self, hosted: ModelState, items: int = 1, cost: int = 0) -> None:
        """Record that work items of `cost` tokens need the model. Nothing may evict it before `park` or `let_go`."""
        hosted.held += items
        hosted.uses += 1
        hosted.used_s = self._clock()
        self.held_cost += cost

    def idle(self, seconds: float) -> list[ModelState]:
        """Return the loaded models that no work item needs now, and whose last use was at least `seconds` ago."""
        before_s = self._clock() - seconds
        return [
            hosted
            for hosted in self._hosted.values()
            if hosted.state == "loaded" and hosted.used_s <= before_s and hosted.is_quiet
        ]

    def evictable(self, idle_s: float) -> list[ModelState]:
        """Return the models idle for `idle_s` seconds in the order of eviction. Models that the placement table does
        not assign to this worker are the first group, the other models the second. A group begins with its least
        recently used model. The rest of the group is sorted by size, the largest first, so that few evictions are
        needed.
        """
        idle = self.idle(idle_s)
        if not idle:
            return []
        assigned = self._assigned()
        elsewhere: list[ModelState] = []
        here: list[ModelState] = []
        for hosted in sorted(idle, key=lambda state: state.used_s):
            is_elsewhere = assigned is not None and hosted.resolved.entry.id not in assigned
            (elsewhere if is_elsewhere else here).append(hosted)
        return [
            hosted
            for group in (elsewhere, here)
            for hosted in (*group[:1], *sorted(group[1:], key=lambda state: -state.memory_bytes))
        ]

    def busy(self, hosted: ModelState) -> list[ModelState]:
        """Return the other models whose memory cannot be freed now: they are in use, were in use just before, or are
        being loaded.
        """
        states = (state for state in self._hosted.values() if state is not hosted)
        return [
            state
            for state in states
            if state.arriving or (state.state == "loaded" and self.until_evictable_s(state) > 0)
        ]

    def until_evictable_s(self, hosted: ModelState) -> float:
        """Return the seconds until a load may evict a loaded model; 0 or less if it may evict the model now. While a
        work item needs the model: `math.inf`. After that: the rest of NEXT_CHUNK_S, at most until `_turn_ends_s`. If
        the model is closed to new work or was not used since its load: 0.
        """
        if not hosted.is_quiet:
            return math.inf
        if not hosted.is_open or hosted.used_s <= hosted.loaded_s:
            return 0.0
        return min(hosted.used_s + NEXT_CHUNK_S, self._turn_ends_s(hosted)) - self._clock()

    def left_over(self, loaded_models: Iterable[ipc.LoadedModel]) -> list[str]:
        """Return the names of the models that the adapter loaded for an earlier process of this sidecar."""
        names = {hosted.name for hosted in self._hosted.values() if hosted.state in ("loading", "loaded")}
        return [loaded.model for loaded in loaded_models if loaded.model not in names]

    def next_to_close(self, had_work: list[ModelState], asked_s: float) -> tuple[ModelState | None, float | None]:
        """Choose a model to close to new work, because a load that began at `asked_s` needs memory. `had_work`: models
        that could not be evicted because they had work. Return one of these models, and the seconds until it may be
        closed: when the load has waited for `swap_after_s`, but not before `_turn_ends_s`. Return (None, None) if all
        models of `had_work` are closed or unloaded.
        """
        able = [state for state in had_work if state.is_open]
        first = min(able, key=self._turn_ends_s, default=None)
        if first is None:
            return None, None
        return first, max(asked_s + self._swap_after_s, self._turn_ends_s(first)) - self._clock()

    def _turn_ends_s(self, hosted: ModelState) -> float:
        """Return the time from which a model may be closed. After its load, it stays open for as long as the load
        took, at most MAX_TURN_S, but at least `swap_after_s`. Otherwise models would be evicted before they run.
        """
        return hosted.loaded_s + max(self._swap_after_s, min(hosted.load_s, MAX_TURN_S))

    def _tokenizer_of(self, ready: ipc.Ready) -> ModelTokenizer:
        """Return the tokenizer of a model that the adapter has loaded. An equal tokenizer of any model is used again,
        because creating a tokenizer blocks the event loop for up to a second: the library holds the interpreter lock.
        Raises ModelLoadFailed if the tokenizer cannot be used.
        """
        states = list(self._everywhere())
        for state in states:
            tokenizer = state.tokenizer
            if tokenizer and tokenizer.max_tokens == ready.max_tokens and tokenizer.serialised == ready.tokenizer:
                return tokenizer
        _drop_spare_tokenizers(states)
        try:
            return without_panic(lambda: ModelTokenizer(ready.tokenizer, ready.max_tokens))
        except Exception as error:  # the library raises no narrower exception
            cause = f"its tokenizer cannot be used ({error})"
            fix = "take tokenizer.json and tokenizer_config.json from the repository that the weights come from"
            raise incompatible(f"{cause}: {fix}") from error

    def loaded(self, hosted: ModelState, ready: ipc.Ready, load_s: float) -> None:
        """Record that the adapter has loaded `hosted`, which took `load_s` seconds. Raises ModelLoadFailed, and records
        nothing, if its tokenizer cannot be used.
        """
        hosted.tokenizer = self._tokenizer_of(ready)
        hosted.ready, hosted.error, hosted.attempts = ready, None, 0
        hosted.loaded_revision = hosted.revision
        hosted.state, hosted.used_s, hosted.loaded_s = "loaded", self._clock(), self._clock()
        hosted.memory_bytes, hosted.load_s = ready.loaded.memory_bytes, load_s

    def failed(self, hosted: ModelState, error: SIEError) -> SIEError:
        """Record that `hosted` could not be loaded. Return the error that later work items of this model get."""
        error_class = error.extras.get("error_class", "UNKNOWN")
        hosted.attempts += 1
        permanent = error_class in PERMANENT or (error_class not in PASSING and hosted.attempts >= MAX_ATTEMPTS)
        extras = {"error_class": error_class, "permanent": permanent, **error.extras, "attempts": hosted.attempts}
        hosted.error = ModelLoadFailed(error.message, reason=error.reason, extras=extras)
        hosted.state, hosted.failed_s = "failed", self._clock()
        return hosted.error

    def dropped(self, names: Iterable[str]) -> list[ModelState]:
        """Record that the adapter has evicted these models. Return the states of the models that this process knows."""
        unloaded = [self._hosted[name] for name in names if name in self._hosted]
        for hosted in unloaded:
            hosted.mark_unloaded()
        return unloaded


def _drop_spare_tokenizers(states: Iterable[ModelState]) -> None:
    """Drop tokenizers of models that are not loaded, the least recently used first, until the remaining tokenizers of
    such models need at most SPARE_TOKENIZER_BYTES. To tokenize for a model whose tokenizer was dropped, the sidecar
    loads the model again.
    """
    having = sorted((state for state in states if state.tokenizer), key=lambda state: state.used_s, reverse=True)
    retained = {id(state.tokenizer) for state in having if state.state == "loaded"}
    left_bytes = SPARE_TOKENIZER_BYTES
    for state in having:
        assert state.tokenizer is not None
        if id(state.tokenizer) in retained:
            continue
        left_bytes -= state.tokenizer.memory_bytes
        if left_bytes >= 0:
            retained.add(id(state.tokenizer))
        else:
            state.tokenizer = None


# seconds without use until a batch or `relieve` may evict a model, because a model in steady use must not be loaded
# again and again. A load need not wait for these seconds: it may evict any model that has been idle for NEXT_CHUNK_S
IDLE_S = 1.0
RELIEVE_S = 1.0
EARLIER_LOAD_S = 0.5
_logger = logging.getLogger("sie.sidecar.hosting")


def _names(models: list[ModelState]) -> tuple[str, ...]:
    return tuple([hosted.name for hosted in models])


class Hosting(ModelStates):
    """Loads and unloads the models of one device, through the connection `link` to its adapter."""

    def __init__(
        self,
        link: AdapterLink,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        swap_after_s: float = 1.0,
        *,
        assigned: Callable[[], frozenset[str] | None] = lambda: None,
        on_loaded: Callable[[ModelState], object] = lambda hosted: None,
        on_failed: Callable[[ModelState, SIEError], object] = lambda hosted, error: None,
        on_role: Callable[[ModelState], object] = lambda hosted: None,
        everywhere: Callable[[], Iterable[ModelState]] | None = None,
        device: int = 0,
    ) -> None:
        """Create the object without models. A load that needs memory waits until other models have no work; after
        `swap_after_s`, one of them is closed to new work. `assigned()`: models that the placement table assigns to this
        worker, None if unknown. `on_role` is called when a model is unloaded, evicted by the adapter, closed to new
        work, or opened again. `everywhere()`: states on all devices of this worker; None if it has only this device.
        """
        super().__init__(
            clock, swap_after_s, assigned=assigned, fetching=lambda: link.fetching, everywhere=everywhere, device=device
        )
        self.swaps = 0
        self.idle_evictions = 0
        self._asked = 0  # number of loads that were requested from the adapter since the start
        # for each load that waits for memory: time at which the load was requested, and future that ends its wait
        self._waiters: list[tuple[float, asyncio.Future[None]]] = []
        # name of a closed model -> event that is set when the model accepts new work again
        self._gates: dict[str, asyncio.Event] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._releasing: dict[str, asyncio.Task[None]] = {}
        self.link = link
        self._relief = Trouble(_logger, f"the adapter of device {device} cannot free memory")
        self._on_change = on_change
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._on_role = on_role
        link.listeners.append(self._on_link)
        link.attach(self._may_drop, self._on_dropped)

    def let_go(self, hosted: ModelState, cost: int = 0) -> None:
        """Record that a work item with `cost` tokens was settled or moved to another device."""
        self.add_items(hosted, -1, -cost)
        if self._waiters and hosted.is_quiet:
            self._look_again()

    def park(self, hosted: ModelState, items: Callable[[], int]) -> None:
        """Record that work items need the model later but not now: the model may be evicted. `items()` returns the
        number of these items. Remove `items` from `ModelState.before_gate` when the items need the model.
        """
        hosted.before_gate.append(items)
        if hosted.is_quiet:
            self._look_again()

    def _on_link(self, connected: bool) -> None:
        if not connected:
            for hosted in self.all():
                hosted.mark_unloaded()
            self._look_again()
        self._on_change()

    def _may_drop(self) -> tuple[str, ...]:
        """Return the names of the models that a batch or `relieve` may evict, in the order of eviction."""
        idle = self.evictable(IDLE_S)
        return _names(idle) if idle else ()

    def _on_dropped(self, names: tuple[str, ...]) -> None:
        _logger.info("the adapter evicted %s to free memory", ", ".join(names))
        for hosted in self.dropped(names):
            self._on_role(hosted)
        self._on_change()

    async def ensure(
        self, hosted: ModelState, items: Callable[[], int] | None = None, *, past_gate: bool = False
    ) -> None:
        """Load the model if needed, and wait until it accepts new work. Return early if no work item needs it now.
        `items` returns the number of waiting work items of this call; None: load without work. `past_gate`: the model
        accepted this work before it was closed to new work. Do not wait until it is open again: the other model, which
        needs its memory, is loaded only after this work.

        Raises ModelLoadFailed, AdapterGone.
        """
        count = items or (lambda: 1)
        hosted.waiting_counts.append(count)
        try:
            await self._until_ready(hosted, items or int, count, past_gate=past_gate)
        finally:
            hosted.waiting_counts.remove(count)

    async def _until_ready(
        self, hosted: ModelState, items: Callable[[], int], waiting_items: Callable[[], int], *, past_gate: bool
    ) -> None:
        while waiting_items() and (hosted.state != "loaded" or (hosted.is_closed and not past_gate)):
            if hosted.is_closed and not past_gate:
                self.park(hosted, items)  # the model may be evicted while it is closed
                try:
                    await self._gates[hosted.name].wait()
                finally:
                    hosted.before_gate.remove(items)
                continue
            if (refusal := hosted.refusal(self._clock())) is not None:
                raise refusal
            if (releasing := self._releasing.get(hosted.name)) is not None:
                # wait until the unload has ended or failed, then load the model again
                await asyncio.wait([releasing])
                continue
            if (loading := self._loading.get(hosted.name)) is None:
                loading = asyncio.create_task(self._load(hosted), name=f"load:{hosted.name}")
                # retrieve the exception, so that asyncio does not log it when no caller waits for this load any more
                loading.add_done_callback(lambda task: task.cancelled() or task.exception())
                self._loading[hosted.name] = loading
            await asyncio.shield(loading)

    async def stop(self) -> None:
        await cancel_all(self._loading.values())

    async def _load(self, hosted: ModelState) -> None:
        resolved, asked_s = hosted.resolved, self._clock()
        hosted.state, hosted.swapped = "loading", False
        self._on_change()
        closed: ModelState | None = None
        try:
            ready, began_s = None, asked_s
            # stop if no caller waits for this catalogue entry any more: an unneeded load could evict a model in use
            while ready is None and hosted.has_waiters and hosted.resolved.entry == resolved.entry:
                began_s = self._clock()
                ready = await self._asked_to_load(hosted, resolved)
                if ready is None:
                    closed = await self._wait_for_memory(hosted, asked_s, closed)
            if ready is None:
                return
            # if the catalogue entry has changed during the load, the adapter loaded the old entry: ignore the result
            if hosted.resolved.entry == resolved.entry:
                self._ready(hosted, ready, ready.load_s or self._clock() - began_s)
        except SIEError:
            # if the catalogue entry has changed during the load, the error is about the old entry: load the new entry
            if hosted.resolved.entry == resolved.entry:
                raise
        finally:
            if hosted.state == "loading":
                hosted.state = "available"
            if closed is not None:
                self._open(closed)
            self._loading.pop(hosted.name, None)
            self._on_change()

    async def _asked_to_load(self, hosted: ModelState, resolved: Resolved) -> ipc.Ready | None:
        """Let the adapter load a model, and return the adapter's report. Return None if memory was short because other
        models were in use or being loaded. Raises AdapterGone, ModelLoadFailed; another SIEError if the catalogue entry
        has changed during the load.
        """
        offered = [
            candidate
            for candidate in self.evictable(0.0)
            if candidate is not hosted and self.until_evictable_s(candidate) <= 0
        ]
        left_over = self.left_over(self._described())
        beside, number, uses = self.busy(hosted), self._asked + 1, [candidate.uses for candidate in offered]
        self._asked, hosted.arriving = number, True
        try:
            entry, may_drop = msgspec.to_builtins(resolved.entry), (*left_over, *_names(offered))
            return await self.link.ensure_ready(ipc.EnsureReady(hosted.name, entry, resolved.profile, may_drop))
        except SIEError as error:
            came = self._asked > number or uses != [candidate.uses for candidate in offered]
            if error.extras.get("error_class") == "OOM" and (
                beside or came or self.busy(hosted) or await self._went_to_earlier_loads(error, left_over)
            ):
                return None
            # if the model has a new catalogue entry now, the error is about the old entry, and is not recorded
            if hosted.resolved.entry != resolved.entry:
                raise
            raise self._load_failed(hosted, error) from error
        finally:
            hosted.arriving = False
            self._look_again()

    def _load_failed(self, hosted: ModelState, error: SIEError) -> SIEError:
        """Record and log that a model could not be loaded. Return the exception for the callers that wait for it."""
        failure = self.failed(hosted, error)
        self._on_failed(hosted, failure)
        _logger.error("%s could not be loaded: %s", hosted.name, error.message, extra={"model": hosted.name})
        return SIEError.from_info(failure.info())

    async def _went_to_earlier_loads(self, error: SIEError, offered: list[str]) -> bool:
        """Return True if another attempt may free memory: an earlier process of this sidecar has loaded models, or has
        begun to load them, that were not `offered` for eviction. While such a load runs, first wait for EARLIER_LOAD_S,
        because its model can be evicted when the load has ended. Raises AdapterGone.
        """
        arriving = error.extras.get("arriving")
        if isinstance(arriving, (list, tuple)) and set(arriving) - {
            hosted.name for hosted in self.all() if hosted.arriving
        }:
            # an earlier process requested these loads, so the adapter does not report their end to this process
            await asyncio.sleep(EARLIER_LOAD_S)
            return True
        await self.link.describe()
        there = {loaded.model for loaded in self._described()}
        finding = [load for name, load in self._loading.items() if name in there]
        # The adapter loaded these models at the request of an earlier sidecar process, so loads that this process
        # requests end at once. Then each of these models has work or can be evicted.
        if finding:
            await asyncio.wait(finding, timeout=EARLIER_LOAD_S)
            return True
        return any(name not in offered for name in self.left_over(self._described()))

    def _described(self) -> tuple[ipc.LoadedModel, ...]:
        return self.link.description.models if self.link.description else ()

    async def _wait_for_memory(
        self, hosted: ModelState, asked_s: float, closed: ModelState | None
    ) -> ModelState | None:
        """Wait until one of the other models with work has no more work, or until no caller needs `hosted` any more.
        When `hosted` has waited for `swap_after_s`, close one of the other models (`next_to_close`): it accepts no new
        work until `hosted` is loaded. `closed`: the model that was closed in an earlier call. Return the closed model,
        or None.
        """
        had_work = self.busy(hosted)
        while hosted.has_waiters and had_work and all(busy_model in self.busy(hosted) for busy_model in had_work):
            if closed is not None and (closed.state != "loaded" or not closed.is_closed):
                self._open(closed)  # another load has used the freed memory: open the closed model again
                closed = None
            first, due_s = self.next_to_close(had_work, asked_s) if closed is None else (None, None)
            if first is not None and due_s is not None and due_s <= 0:
                closed = first
                self._close(closed)
                self.swaps += 1
                hosted.swapped = True
                _logger.info(
                    "%s accepts no new work until %s is loaded, because the two do not fit into memory together",
                    closed.name,
                    hosted.name,
                    extra={"model": closed.name},
                )
                continue
            # leave out models that may be evicted in 0 s or less. These models are being loaded: the end of their load
            # calls `_look_again`, which ends this wait
            waits_s = [wait_s for state in had_work if (wait_s := self.until_evictable_s(state)) > 0]
            limit_s = min([*waits_s, math.inf if due_s is None else due_s])
            # wait at least a millisecond: because of rounding errors, a timer may fire slightly too early
            await self._until_quiet(asked_s, None if limit_s == math.inf else max(0.001, limit_s))
        return closed

    async def _until_quiet(self, asked_s: float, timeout_s: float | None) -> None:
        """Wait at most `timeout_s` seconds for a call of `_look_again`, which reports that memory may be free."""
        waiter = asked_s, asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter[1]
        finally:
            self._waiters.remove(waiter)

    def _look_again(self) -> None:
        """Wake the loads that wait for memory, the oldest load first. Without this order, two models could replace each
        other for ever while a third one waits.
        """
        for _, waiter in sorted(self._waiters, key=lambda entry: entry[0]):
            if not waiter.done():
                waiter.set_result(None)

    def _close(self, hosted: ModelState) -> None:
        hosted.is_closed = True
        self._gates[hosted.name] = asyncio.Event()
        self._on_role(hosted)

    def _open(self, hosted: ModelState) -> None:
        hosted.is_closed = False
        if (gate := self._gates.pop(hosted.name, None)) is not None:
            gate.set()
        self._on_role(hosted)
        self._look_again()

    def _ready(self, hosted: ModelState, ready: ipc.Ready, load_s: float) -> None:
        try:
            self.loaded(hosted, ready, load_s)
        except ModelLoadFailed as error:
            raise self._load_failed(hosted, error) from error
        how = f"{ready.loaded.engine}, {ready.loaded.precision}, {ready.loaded.attention}"
        _logger.info("%s loaded in %.2f s: %s", hosted.name, ready.load_s, how, extra={"model": hosted.name})
        self._on_loaded(hosted)

    async def release(self, hosted: ModelState) -> None:
        """Unload a model that no work needs. Work that arrives then loads it again. Raises AdapterGone, SIEError."""
        hosted.mark_unloaded()
        self._on_role(hosted)
        hosted.state = "unloading"
        releasing = asyncio.create_task(self._release(hosted), name=f"release:{hosted.name}")
        self._releasing[hosted.name] = releasing
        self._on_change()
        await asyncio.shield(releasing)

    async def unload_when_idle(self, hosted: ModelState) -> bool:
        """Wait until the model is neither being loaded nor needed, then unload it. `ModelState.retain` ends the wait.
        Return True if this call has unloaded the model. Raises AdapterGone, SIEError.
        """
        if hosted.leaves:  # another call already waits to unload this model
            return False
        hosted.leaves = True
        try:
            while hosted.leaves and (hosted.state == "loading" or (hosted.state == "loaded" and not hosted.is_quiet)):
                await self._until_quiet(self._clock(), None)
            if not hosted.leaves or hosted.state != "loaded":
                return False
            await self.release(hosted)
            return True
        finally:
            hosted.leaves = False

    async def _release(self, hosted: ModelState) -> None:
        try:
            await self.link.request(ipc.Release(hosted.name))
        finally:
            del self._releasing[hosted.name]
            hosted.state = "available"
            self._on_change()

    async def run(self, idle_evict_s: int | None) -> None:
        """Every second, let the adapter free memory if needed, remove states if there are too many, and evict models
        idle for `idle_evict_s` seconds.
        """
        while True:
            await asyncio.sleep(RELIEVE_S)
            await self.relieve()
            self.remove_unused()
            # list the idle models again after each unload, because new work may have arrived meanwhile
            while idle := self.idle(math.inf if idle_evict_s is None else idle_evict_s):
                hosted = idle[0]
                _logger.info(
                    "%s was idle for %d s and is being evicted", hosted.name, idle_evict_s, extra={"model": hosted.name}
                )
                try:
                    await self.release(hosted)
                    self.idle_evictions += 1
                except (AdapterGone, SIEError) as error:
                    _logger.warning("%s could not be evicted: %s", hosted.name, error, extra={"model": hosted.name})

    async def relieve(self) -> None:
        """Let the adapter evict idle models while its memory is above the threshold."""
        may_drop = self._may_drop()
        if not may_drop:
            return
        # AdapterGone is not logged: without an adapter, no model is loaded
        with contextlib.suppress(AdapterGone), self._relief.logged(SIEError):
            await self.link.relieve(may_drop)


_RANKS: tuple[State, ...] = ("loaded", "loading", "unloading", "failed", "available")


class WorkerModels:
    """Models on all devices of this worker."""

    def __init__(self) -> None:
        self._copies = SecondCopies()
        self.devices: list[Hosting] = []  # the index is the number of the device

    def __iter__(self) -> Iterator[ModelState]:
        """Iterate over the states of all models, one for each device that knows the model."""
        return (hosted for device in self.devices for hosted in device.all())

    def device_of(self, hosted: ModelState) -> Hosting:
        return self.devices[hosted.device]

    def find(self, residency: str) -> list[ModelState]:
        """Return the states of the residency `residency` on all devices that know this residency."""
        return [hosted for device in self.devices if (hosted := device.find(residency)) is not None]

    def obtain(self, resolved: Resolved, revision: int = 0) -> ModelState:
        """Return the state of a model on the device that should run its new work."""
        if len(self.devices) == 1:
            return self.devices[0].obtain(resolved, revision)
        states = [device.obtain(resolved, revision) for device in self.devices]
        weighs_memory = not any(hosted.is_open for hosted in states)
        return states[devices.choose([self._view(hosted, weighs_memory=weighs_memory) for hosted in states])]

    def _view(self, hosted: ModelState, *, weighs_memory: bool) -> DeviceView:
        """Return the data that `choose` needs. `weighs_memory`: include `models` and `idle_since_s`, which are slow to
        compute.
        """
        device, now_s = self.device_of(hosted), time.monotonic()
        description = device.link.description
        usable = usable_bytes(description) if description else 0.0
        evictable = device.evictable(0.0) if weighs_memory else []
        models = device.all() if weighs_memory else []
        refusal = hosted.refusal(now_s)
        return DeviceView(
            connected=device.link.connected,
            loaded=hosted.is_open,
            # `has_waiters` stays true for a moment after a load has failed, hence the check of `refusal`
            coming=not hosted.is_open
            and (hosted.state in ("loaded", "loading") or (refusal is None and hosted.has_waiters)),
            refused=refusal is not None,
            gives_up=refusal is not None and refusal.extras.get("error_class") in PERMANENT,
            held_cost=device.held_cost,
            models=sum(state.state in ("loaded", "loading") or state.has_waiters for state in models),
            size_bytes=max((state.memory_bytes for state in self.find(hosted.name)), default=0),
            free_bytes=usable - (description.memory_used_bytes if description else 0),
            usable_bytes=usable,
            idle_since_s=evictable[0].used_s if evictable else math.inf,
        )

    def second_copies(self, is_behind: Callable[[ModelState], bool]) -> list[ModelState]:
        """Return the states of models that should be loaded on one more device: for each model, its state on that
        device. `is_behind(state)` returns True if work of the model waits for the device of `state`.
        """
        if len(self.devices) == 1:
            return []
        loaded: dict[str, list[ModelState]] = {}
        for hosted in self:
            if hosted.state == "loaded":
                loaded.setdefault(hosted.name, []).append(hosted)
        behind = {name: states[0] for name, states in loaded.items() if all(map(is_behind, states))}
        states = {
            name: [device.obtain(first.resolved, first.revision) for device in self.devices]
            for name, first in behind.items()
        }
        views = {name: [self._view(hosted, weighs_memory=True) for hosted in copies] for name, copies in states.items()}
        return [states[name][number] for name, number in self._copies.check(views).items()]

    def of_model(self, model: str) -> Iterator[ModelState]:
        """Iterate over the states of all residencies of a model, on all devices."""
        return (hosted for device in self.devices for hosted in device.of_model.get(model, ()))

    def is_open(self, model: str) -> bool:
        """Return True if the model is loaded on a device and accepts new work there."""
        for device in self.devices:
            for hosted in device.of_model.get(model, ()):
                if hosted.state == "loaded" and not hosted.is_closed:
                    return True
        return False

    def holds(self, model: str) -> bool:
        """Return True if a work item of this worker needs this model."""
        return any(hosted.held for hosted in self.of_model(model))

    def is_closed(self, model: str) -> bool:
        """Return True if the model is closed to new work on a device, and open on no other device."""
        closed = {hosted.device for hosted in self.of_model(model) if hosted.is_closed}
        return bool(closed) and not any(
            hosted.is_open and hosted.device not in closed for hosted in self.of_model(model)
        )

    def loaded_models(self) -> set[str]:
        return {hosted.resolved.entry.id for hosted in self if hosted.state == "loaded"}

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Return a status for each model: its state on the device where it is closest to being loaded, and the sums
        over all devices of its memory, its queued work and its rate of tokens.
        """
        if len(self.devices) == 1:
            return self.devices[0].statuses()
        by_name: dict[str, list[ModelStatus]] = {}
        for device in self.devices:
            for status in device.statuses():
                by_name.setdefault(status.model, []).append(status)
        return tuple(
            msgspec.structs.replace(
                min(statuses, key=lambda status: _RANKS.index(status.state)),
                memory_bytes=sum(status.memory_bytes for status in statuses),
                queued=sum(status.queued for status in statuses),
                cost_rate=round(sum(status.cost_rate for status in statuses), 1),
            )
            for statuses in by_name.values()
        )

    def slots(self) -> int:
        """Return how many models of the mean size fit on all connected devices together. 0 if this is unknown."""
        return sum(
            device.slots(device.link.description)
            for device in self.devices
            if device.link.connected and device.link.description is not None
        )

    async def stop(self) -> None:
        await asyncio.gather(*(device.stop() for device in self.devices))
