"""Models of this worker. `ModelStates` has their states and decides, without I/O, which may be evicted. `Hosting` loads
and unloads them: one load per model for all callers that wait for it; models alternate in memory; idle models are
released.

    available ──► loading ──► loaded ──released──► unloading ──► available
                    │           └──dropped by the adapter, or the adapter is gone──► available
                    └──refused──► failed ──cool-down──► loading

The sidecar decides which models may be evicted, and in what order; the adapter decides when. Each request to the
adapter names the models that may be dropped for it, and its reply names the dropped ones.

    Hosting.ensure ──► loaded, and its gate is open ──► return
          └──► load ──► the adapter drops models that it may ──► Ready
                  └──► no memory left by models with work ──► one of them is closed to new work ──► load again

Models are evicted under memory pressure with every batch, and once per second.

Each device of the worker has a `Hosting` of its own: its adapter, its models, its memory. `WorkerModels` has all of
them. A model may be loaded on several devices; `devices` chooses one for work.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import msgspec

from sie_contracts.errors import ModelLoadFailed, SIEError
from sie_contracts.media.images import max_blocks
from sie_contracts.models.catalogue import Resolved, profile_fingerprint
from sie_contracts.models.load_errors import MAX_ATTEMPTS
from sie_contracts.wire import ipc
from sie_contracts.wire.heartbeats import Fetched, ModelStatus, ServedEngine, ServedPrecision
from sie_contracts.wire.messages import RunOptions
from sie_sidecar.device.link import AdapterGone, AdapterLink
from sie_sidecar.models import devices
from sie_sidecar.models.devices import DeviceView, SecondCopies
from sie_sidecar.prepare.tokens import ModelTokenizer

State = Literal["available", "loading", "loaded", "unloading", "failed"]

# seconds after a temporary failure, by error class; a permanent failure is final until the entry changes
COOL_DOWN_S = {"OOM": 60.0}
OTHER_COOL_DOWN_S = 30.0
PASSING = ("OOM", "NETWORK")  # error classes of loads that are tried again without a limit
PERMANENT = ("GATED", "NOT_FOUND", "DEPENDENCY", "INCOMPATIBLE", "CERTIFICATE")
MEMORY_USED = 0.85  # share of the device's memory to use if the adapter reports no threshold
RATE_OVER_S = 10.0
FILL_WEIGHT = 0.1  # weight of the newest batch in the mean
# largest time in seconds that a model keeps its memory after its load: the request for the next model waits for
# SIE_LOAD_HOLD_S, and the load of that model must fit into that time as well
MAX_TURN_S = 5.0


def _image_cost(ready: ipc.Ready) -> tuple[int, int]:
    """Return the cost of an image, and its number of token ids in a row. Each value is the maximum over all operations
    of the model.
    """
    costs = []
    for rows in ready.rows.values():
        if (recipe := rows.images) is not None:
            blocks, ids = max_blocks(recipe), rows.image_tokens
            count = len(ids.before) + (ids.count or blocks) + len(ids.after) if ids else 0
            costs.append((recipe.tokens + blocks * recipe.block_tokens, count))
    return max((patches + ids for patches, ids in costs), default=0), max((ids for _, ids in costs), default=0)


def usable_bytes(device: ipc.Description) -> float:
    """Return the memory of a device that may be in use before models are evicted."""
    return (device.threshold_percent / 100 or MEMORY_USED) * device.memory_total_bytes


def _precision(loaded: ipc.LoadedModel) -> ServedPrecision:
    """Return the precision of a loaded model, in the form for heartbeats."""
    return ServedPrecision(loaded.precision, loaded.requested_precision, loaded.precision_reason)


class ModelState:
    """One residency on one device of this worker. `held` counts its work items there, in any stage."""

    def __init__(self, resolved: Resolved, device: int = 0) -> None:
        self.resolved = resolved
        self.device = device  # number of the device
        self.revision = 0  # revision of the entry in `resolved`; 0 if unknown
        self.loaded_revision = 0  # revision of the model that was loaded last
        self.state: State = "available"
        self.ready: ipc.Ready | None = None
        self.tokenizer: ModelTokenizer | None = None
        self.error: SIEError | None = None
        self.failed_s = 0.0
        self.attempts = 0
        self.held = 0
        # functions of the callers that wait while the model is closed to new work; each returns the number of its work
        # items
        self.before_gate: list[Callable[[], int]] = []
        self.arriving = False  # true while the adapter loads the model
        self.leaves = False  # true if an operator requested its unload as soon as it is idle
        # true while new work waits, because another model needs the memory of this model
        self.is_closed = False
        self.loaded_s = 0.0
        self.used_s = 0.0  # time when work last arrived, ran or ended
        self.uses = 0  # number of times that work arrived or ended
        self.swapped = False  # true if the last load of this model closed another model to new work
        self.load_s = 0.0  # seconds of the last load
        self.memory_bytes = 0  # memory of the copy that was loaded last
        # mean fill of its recent batches: their tokens divided by the tokens of a full batch
        self.fill_ratio: float | None = None
        self._cost_rate = 0.0
        self._cost_s = 0.0
        # functions of the callers that wait for the model; each returns the number of its work items that need it
        self.waiting_counts: list[Callable[[], int]] = []
        self.loras: set[str] = set()  # LoRAs of the loaded copy, as far as known; the adapter may have dropped some
        self.lora_digests: dict[str, str] = {}  # digests of the files of loaded LoRAs and of unloaded ones
        self._fingerprints: dict[tuple[str, str], str] = {}

    @property
    def name(self) -> str:
        return self.resolved.residency

    @property
    def has_waiters(self) -> bool:
        """True if a waiting caller still needs the model."""
        return any(count() for count in self.waiting_counts)

    @property
    def parked(self) -> int:
        """Number of the model's work items at this worker that wait because the model is closed to new work."""
        return sum(count() for count in self.before_gate)

    @property
    def is_quiet(self) -> bool:
        """True if all work of the model waits because the model is closed to new work, so that the model may be
        unloaded.
        """
        return self.held == self.parked

    def came_in(self, cost: int, now_s: float) -> None:
        """Count the tokens of work that was accepted."""
        self._cost_rate = self.cost_rate(now_s) + cost / RATE_OVER_S
        self._cost_s = now_s

    def used(self, now_s: float) -> None:
        """Record that work of this model arrived, ran or ended."""
        self.used_s = now_s

    def add_items(self, items: int, now_s: float) -> None:
        """Add `items` to the number of work items at this worker. A negative number removes some."""
        self.held += items
        self.uses += 1
        self.used(now_s)

    def filled(self, ratio: float) -> None:
        """Record the fill of a batch."""
        self.fill_ratio = (
            ratio if self.fill_ratio is None else self.fill_ratio + FILL_WEIGHT * (ratio - self.fill_ratio)
        )

    def cost_rate(self, now_s: float) -> float:
        """Return the tokens per second that arrive: a mean whose weights fall by a factor e in RATE_OVER_S seconds."""
        return self._cost_rate * math.exp((self._cost_s - now_s) / RATE_OVER_S)

    def fingerprint(self, profile: str, options: RunOptions) -> str:
        """Return the fingerprint of answers of this profile with these options; empty while the model is not loaded."""
        if self.ready is None:
            return ""
        loaded, entry = self.ready.loaded.fingerprint, self.resolved.entry
        if (loaded, profile) not in self._fingerprints:
            self._fingerprints[loaded, profile] = profile_fingerprint(loaded, entry, profile)
        fingerprint = self._fingerprints[loaded, profile]
        # a LoRA is identified by the digest of its files, which may change under the same name
        for part in (options.lora and (self.lora_digests.get(options.lora) or options.lora), options.variant):
            if part:
                fingerprint = hashlib.sha256(f"{fingerprint} {part}".encode()).hexdigest()[:16]
        return fingerprint

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
            precision=_precision(loaded) if loaded else None,
            engine=ServedEngine(loaded.engine, loaded.engine_reason) if loaded else None,
            crossover_tokens=loaded.crossover_tokens if loaded else 0,
            image_tokens=image_tokens,
            image_vectors=image_vectors,
            revision=self.revision,
            loaded_revision=self.loaded_revision,
        )

    def refusal(self, now_s: float) -> SIEError | None:
        """Return the error of the model's last load if the load must not be tried again yet, else None."""
        if self.state != "failed" or self.error is None:
            return None
        cool_down_s = COOL_DOWN_S.get(str(self.error.extras.get("error_class")), OTHER_COOL_DOWN_S)
        if not self.error.extras.get("permanent") and now_s - self.failed_s >= cool_down_s:
            return None
        # a new exception each time: a stored exception would keep the frames of all callers that raised it
        return SIEError.from_info(self.error.info())

    def mark_unloaded(self) -> None:
        """Record that the adapter no longer has the model."""
        self._fingerprints.clear()
        self.reset_loras()
        if self.state == "loaded":
            self.state = "available"
        self.ready = None

    def reset_failure(self) -> None:
        """Reset the failed loads of the model, so that the next load counts as the first."""
        self.attempts = 0
        if self.state == "failed":
            self.state, self.error = "available", None

    def retain(self) -> None:
        """Keep the model loaded by request of an operator: it is not unloaded when idle, and a failed load is tried
        again.
        """
        self.leaves = False
        self.reset_failure()

    def reset_loras(self) -> None:
        """Clear the list of the model's LoRAs. A LoRA that is not in the list is requested again, which is fast if the
        adapter has it.
        """
        self.loras.clear()
        self.lora_digests.clear()


class ModelStates:
    """Residencies of one device of this worker."""

    def __init__(
        self,
        clock: Callable[[], float],
        swap_after_s: float = 1.0,
        *,
        assigned: Callable[[], frozenset[str] | None] = lambda: None,
        fetching: Callable[[], Mapping[str, Fetched]] = dict,
        device: int = 0,
    ) -> None:
        """Create the states without residencies. `swap_after_s` is the shortest time before a model with work is closed
        for another one. `assigned` returns the models of which this worker is a host, or None while unknown. `fetching`
        returns the progress of downloads of weights to this node, by id of their entry. `device` is the number of the
        device.
        """
        self.device = device
        self.held_cost = 0  # tokens of the held work items, by the gateway's estimate
        self._clock = clock
        self._swap_after_s = swap_after_s
        self._assigned = assigned
        self._fetching = fetching
        self._hosted: dict[str, ModelState] = {}
        self._of_model: dict[str, list[ModelState]] = {}
        self._usable_bytes: float | None = None  # bytes of memory for models, measured when no load was running

    def all(self) -> list[ModelState]:
        return list(self._hosted.values())

    def statuses(self) -> tuple[ModelStatus, ...]:
        now_s, fetching = self._clock(), self._fetching()
        return tuple(hosted.status(now_s, fetching.get(hosted.resolved.entry.id)) for hosted in self._hosted.values())

    def is_loaded(self, model: str) -> bool:
        """Return True if a residency of this model is loaded."""
        return any(hosted.state == "loaded" for hosted in self._of_model.get(model, ()))

    def is_open(self, model: str) -> bool:
        """Return True if work of this model may be pulled: a residency is loaded and not closed to new work."""
        return any(hosted.state == "loaded" and not hosted.is_closed for hosted in self._of_model.get(model, ()))

    def holds(self, model: str) -> bool:
        """Return True if this worker has work of this model."""
        return any(hosted.held for hosted in self._of_model.get(model, ()))

    def is_closed(self, model: str) -> bool:
        """Return True if work of this model would have to wait for the load of another model."""
        return any(hosted.is_closed for hosted in self._of_model.get(model, ()))

    def loaded_models(self) -> list[str]:
        return [model for model in self._of_model if self.is_loaded(model)]

    def slots(self, device: ipc.Description) -> int:
        """Return the number of models of the mean loaded size that fit on the device without an eviction, in addition
        to its other memory; 0 while unknown.
        """
        sizes = [hosted.memory_bytes for hosted in self._hosted.values() if hosted.memory_bytes]
        # the bytes of a model that is being loaded are not counted for any model yet
        if not any(hosted.state == "loading" for hosted in self._hosted.values()):
            beside_bytes = max(0, device.memory_used_bytes - sum(model.memory_bytes for model in device.models))
            self._usable_bytes = usable_bytes(device) - beside_bytes
        return (
            max(1, int(self._usable_bytes * len(sizes) / sum(sizes))) if sizes and self._usable_bytes is not None else 0
        )

    def obtain(self, resolved: Resolved, revision: int = 0) -> ModelState:
        """Return the residency for `resolved`, the entry of a model at `revision`. A changed entry is another model:
        the old copy is not used for it.
        """
        hosted = self._hosted.get(resolved.residency)
        if hosted is None:
            hosted = self._hosted[resolved.residency] = ModelState(resolved, self.device)
            self._of_model.setdefault(resolved.entry.id, []).append(hosted)
        elif hosted.resolved.entry != resolved.entry:
            hosted.resolved = resolved
            hosted.mark_unloaded()
            hosted.tokenizer = None  # the tokenizer belongs to another model
            hosted.reset_failure()
        hosted.revision = revision
        return hosted

    def find(self, residency: str) -> ModelState | None:
        """Return the residency of this name, or None if no work here has used it."""
        return self._hosted.get(residency)

    def add_items(self, hosted: ModelState, items: int = 1, cost: int = 0) -> None:
        """Add `items` to the number of work items that need `hosted`, and `cost` tokens. The model is not evicted until
        they are parked or released.
        """
        hosted.add_items(items, self._clock())
        self.held_cost += cost

    def let_go(self, hosted: ModelState, cost: int = 0) -> None:
        """Record that one work item of `hosted` with `cost` tokens is settled, or goes to another device."""
        hosted.add_items(-1, self._clock())
        self.held_cost -= cost

    def park(self, hosted: ModelState, items: Callable[[], int]) -> None:
        """Record work items of `hosted` that need it later, but not now. `items` returns their number. The model may be
        evicted in the meantime.
        """
        hosted.before_gate.append(items)

    def unpark(self, hosted: ModelState, items: Callable[[], int]) -> None:
        """Record that the parked work items need the model now."""
        hosted.before_gate.remove(items)

    def idle(self, seconds: float) -> list[ModelState]:
        """Return the loaded models without work, except work that waits because a model is closed to new work, whose
        last use was at least `seconds` ago.
        """
        before_s = self._clock() - seconds
        loaded = (hosted for hosted in self._hosted.values() if hosted.state == "loaded")
        return [hosted for hosted in loaded if hosted.is_quiet and hosted.used_s <= before_s]

    def evictable(self, idle_s: float) -> list[ModelState]:
        """Return the models that were idle for `idle_s` seconds, in the order in which they may be evicted. Models that
        are placed on other workers are first. In each of the two groups, the least recently used model is first, then
        the other models by size, the largest first.
        """
        assigned = self._assigned()
        elsewhere: list[ModelState] = []
        here: list[ModelState] = []
        for hosted in sorted(self.idle(idle_s), key=lambda state: state.used_s):
            is_elsewhere = assigned is not None and hosted.resolved.entry.id not in assigned
            (elsewhere if is_elsewhere else here).append(hosted)
        return [
            hosted
            for group in (elsewhere, here)
            for hosted in (*group[:1], *sorted(group[1:], key=lambda state: -state.memory_bytes))
        ]

    def busy(self, hosted: ModelState) -> list[ModelState]:
        """Return the other models that occupy memory now: loaded with work, or loading."""
        states = (state for state in self._hosted.values() if state is not hosted)
        return [state for state in states if state.arriving or (state.state == "loaded" and not state.is_quiet)]

    def left_over(self, loaded_models: Iterable[ipc.LoadedModel]) -> list[str]:
        """Return the adapter's models that an earlier process requested. This process never requested them."""
        names = {hosted.name for hosted in self._hosted.values() if hosted.state in ("loading", "loaded")}
        return [loaded.model for loaded in loaded_models if loaded.model not in names]

    def next_to_close(self, had_work: list[ModelState], asked_s: float) -> tuple[ModelState | None, float | None]:
        """Return the model to close to new work, for a load that was requested at `asked_s` and does not fit in
        addition to these models. Also return the seconds until it is closed. It is closed when the load has waited long
        enough and the turn of the model has ended. Return None if all of them are closed already.
        """
        able = [state for state in had_work if state.state == "loaded" and not state.is_closed]
        first = min(able, key=self._turn_ends_s, default=None)
        if first is None:
            return None, None
        return first, max(asked_s + self._swap_after_s, self._turn_ends_s(first)) - self._clock()

    def _turn_ends_s(self, hosted: ModelState) -> float:
        """Return the end of a model's turn. A model that was loaded for its own work keeps its turn for the duration of
        its load, at most MAX_TURN_S: otherwise models would only be loaded and never run.
        """
        return hosted.loaded_s + max(self._swap_after_s, min(hosted.load_s, MAX_TURN_S))

    def loaded(self, hosted: ModelState, ready: ipc.Ready, load_s: float) -> None:
        """Record that the adapter has loaded `hosted`, and the seconds of the load."""
        hosted.ready, hosted.error, hosted.attempts = ready, None, 0
        hosted.loaded_revision = hosted.revision
        hosted.tokenizer = ModelTokenizer(ready.tokenizer, ready.max_tokens)
        hosted.state, hosted.used_s, hosted.loaded_s = "loaded", self._clock(), self._clock()
        hosted.memory_bytes, hosted.load_s = ready.loaded.memory_bytes, load_s

    def failed(self, hosted: ModelState, error: SIEError) -> SIEError:
        """Record that the adapter has refused to load `hosted`. Return the error that is remembered."""
        error_class = error.extras.get("error_class", "UNKNOWN")
        hosted.attempts += 1
        permanent = error_class in PERMANENT or (error_class not in PASSING and hosted.attempts >= MAX_ATTEMPTS)
        extras = {"error_class": error_class, "permanent": permanent, **error.extras, "attempts": hosted.attempts}
        hosted.error = ModelLoadFailed(error.message, reason=error.reason, extras=extras)
        hosted.state, hosted.failed_s = "failed", self._clock()
        return hosted.error

    def dropped(self, names: Iterable[str]) -> list[ModelState]:
        """Record that the adapter has unloaded these models. Return their known residencies."""
        unloaded = [self._hosted[name] for name in names if name in self._hosted]
        for hosted in unloaded:
            hosted.mark_unloaded()
        return unloaded


IDLE_S = 1.0  # seconds after its last use before a model may be evicted: a model in steady use should not be reloaded
RELIEVE_S = 1.0
EARLIER_LOAD_S = 0.5
_logger = logging.getLogger("sie.sidecar.hosting")


def _one_item() -> int:
    return 1


def _names(models: list[ModelState]) -> tuple[str, ...]:
    return tuple(hosted.name for hosted in models)


class Hosting(ModelStates):
    """Models of one device of this worker, with the adapter that loads and drops them."""

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
        device: int = 0,
    ) -> None:
        """Create the object without models. A model that does not fit waits until other models have no work, and after
        `swap_after_s` one of them is closed to new work. `assigned` returns the models of which this worker is a host,
        or None while unknown. `on_role` is called when a residency is unloaded, closed to new work, or opened again.
        """
        super().__init__(clock, swap_after_s, assigned=assigned, fetching=lambda: link.fetching, device=device)
        self.swaps = 0
        self.idle_evictions = 0
        self._asked = 0  # number of requested loads
        # callers that wait for memory: start of the wait, and the future that wakes the caller
        self._waiters: list[tuple[float, asyncio.Future[None]]] = []
        self._gates: dict[
            str, asyncio.Event
        ] = {}  # models that are closed to new work; the event is set when the model is opened again
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._releasing: dict[str, asyncio.Task[None]] = {}
        self.link = link
        self._on_change = on_change
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._on_role = on_role
        link.listeners.append(self._on_link)
        link.attach(lambda: _names(self.evictable(IDLE_S)), self._on_dropped)

    def let_go(self, hosted: ModelState, cost: int = 0) -> None:
        super().let_go(hosted, cost)
        if hosted.is_quiet:
            self._look_again()

    def park(self, hosted: ModelState, items: Callable[[], int]) -> None:
        super().park(hosted, items)
        if hosted.is_quiet:
            self._look_again()

    def _on_link(self, connected: bool) -> None:
        if not connected:
            for hosted in self.all():
                hosted.mark_unloaded()
            self._look_again()
        self._on_change()

    def _on_dropped(self, names: tuple[str, ...]) -> None:
        _logger.info("the adapter unloaded %s for its memory", ", ".join(names))
        for hosted in self.dropped(names):
            self._on_role(hosted)
        self._on_change()

    async def ensure(
        self, hosted: ModelState, items: Callable[[], int] | None = None, *, past_gate: bool = False
    ) -> None:
        """Ensure that the model is loaded and open to new work. Return earlier if no caller needs it any more. Raises
        ModelLoadFailed, AdapterGone.

        `items` returns the number of held work items that wait for it, without cancelled ones; if it is None, the model
        is loaded without work. `past_gate`: the work items were admitted to the model before and have resources that
        other work waits for, so they must not wait even if the model is closed to new work.
        """
        count = items or _one_item
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
                await self._before_gate(hosted, items)
                continue
            if (refusal := hosted.refusal(self._clock())) is not None:
                raise refusal
            if (releasing := self._releasing.get(hosted.name)) is not None:
                # whether the release succeeds or not, the model is loaded again for the new work
                await asyncio.wait([releasing])
                continue
            if (loading := self._loading.get(hosted.name)) is None:
                loading = asyncio.create_task(self._load(hosted), name=f"load:{hosted.name}")
                # marks the exception as retrieved: there may be no waiters by then
                loading.add_done_callback(lambda task: task.cancelled() or task.exception())
                self._loading[hosted.name] = loading
            await asyncio.shield(loading)

    async def stop(self) -> None:
        """Cancel the running loads, and with them the callers that wait."""
        loads = list(self._loading.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    async def _load(self, hosted: ModelState) -> None:
        resolved, asked_s = hosted.resolved, self._clock()
        hosted.state, hosted.swapped = "loading", False
        self._on_change()
        closed: ModelState | None = None
        try:
            ready, began_s = None, asked_s
            while (
                self._still_loads(hosted, resolved) and (ready := await self._asked_to_load(hosted, resolved)) is None
            ):
                closed = await self._wait_for_memory(hosted, asked_s, closed)
                began_s = self._clock()
            if ready is None:
                return
            # else: the entry changed in the meantime, and the loaded copy is of another model
            if hosted.resolved.entry == resolved.entry:
                self._ready(hosted, ready, ready.load_s or self._clock() - began_s)
        except SIEError:
            # else: the waiting callers need another entry, which is loaded next
            if hosted.resolved.entry == resolved.entry:
                raise
        finally:
            if hosted.state == "loading":
                hosted.state = "available"
            if closed is not None:
                self._open(closed)
            self._loading.pop(hosted.name, None)
            self._on_change()

    @staticmethod
    def _still_loads(hosted: ModelState, resolved: Resolved) -> bool:
        """Return True if a caller still waits for exactly this model: a load without a caller would drop a model that
        is needed.
        """
        return hosted.has_waiters and hosted.resolved.entry == resolved.entry

    async def _asked_to_load(self, hosted: ModelState, resolved: Resolved) -> ipc.Ready | None:
        """Return the loaded model. Return None if it did not fit in addition to models that had work or were loading.
        Raises AdapterGone, ModelLoadFailed.
        """
        offered = [candidate for candidate in self.evictable(0.0) if candidate is not hosted]
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
            # the entry changed in the meantime: the failure does not concern the new entry
            if hosted.resolved.entry != resolved.entry:
                raise
            failure = self.failed(hosted, error)
            self._on_failed(hosted, failure)
            _logger.error("%s could not be loaded: %s", hosted.name, error.message, extra={"model": hosted.name})
            raise SIEError.from_info(failure.info()) from error
        finally:
            hosted.arriving = False
            self._look_again()

    async def _went_to_earlier_loads(self, error: SIEError, offered: list[str]) -> bool:
        """Return True if the memory is used by loads that an earlier process of this worker began and that this process
        does not know. Loads that still run get some time; models whose load has ended can be offered for eviction.
        Raises AdapterGone.
        """
        arriving = error.extras.get("arriving")
        if isinstance(arriving, (list, tuple)) and set(arriving) - {
            hosted.name for hosted in self.all() if hosted.arriving
        }:
            await asyncio.sleep(EARLIER_LOAD_S)  # the end of that load is not reported
            return True
        await self.link.describe()
        there = {loaded.model for loaded in self._described()}
        finding = [load for name, load in self._loading.items() if name in there]
        if finding:  # these loads will find their models loaded; afterwards a model has work or can be evicted
            await asyncio.wait(finding, timeout=EARLIER_LOAD_S)
            return True
        return any(name not in offered for name in self.left_over(self._described()))

    def _described(self) -> tuple[ipc.LoadedModel, ...]:
        """Return the models in the adapter's last description."""
        return self.link.description.models if self.link.description else ()

    async def _before_gate(self, hosted: ModelState, items: Callable[[], int]) -> None:
        """Wait until the model is open to new work. Until then its work items are parked, so the model may be
        evicted.
        """
        self.park(hosted, items)
        try:
            await self._gates[hosted.name].wait()
        finally:
            self.unpark(hosted, items)

    async def _wait_for_memory(
        self, hosted: ModelState, asked_s: float, closed: ModelState | None
    ) -> ModelState | None:
        """Wait until one more of the other models has no work, or no caller needs this model any more. After `hosted`
        has waited `swap_after_s`, the model whose turn ends first is closed to new work at the end of its turn, until
        `hosted` is loaded. Return the closed model.
        """
        had_work = self.busy(hosted)
        while hosted.has_waiters and had_work and all(busy_model in self.busy(hosted) for busy_model in had_work):
            if closed is not None and (closed.state != "loaded" or not closed.is_closed):
                self._open(closed)  # another load used the memory of the closed model
                closed = None
            first, due_s = self.next_to_close(had_work, asked_s) if closed is None else (None, None)
            if first is not None and due_s is not None and due_s <= 0:
                closed = first
                self._close(closed)
                self.swaps += 1
                hosted.swapped = True
                _logger.info("%s makes room for %s", closed.name, hosted.name, extra={"model": closed.name})
                continue
            await self._until_quiet(asked_s, due_s)
        return closed

    async def _until_quiet(self, asked_s: float, timeout_s: float | None) -> None:
        """Wait until a model may have no more work, at most for `timeout_s` seconds."""
        waiter = asked_s, asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter[1]
        finally:
            self._waiters.remove(waiter)

    def _look_again(self) -> None:
        """Wake the callers that wait for memory, in the order of their waits. Otherwise two models could alternate for
        ever while a third one waits.
        """
        for _, waiter in sorted(self._waiters, key=lambda entry: entry[0]):
            if not waiter.done():
                waiter.set_result(None)

    def _close(self, hosted: ModelState) -> None:
        """Close the model to new work, which then waits."""
        hosted.is_closed = True
        self._gates[hosted.name] = asyncio.Event()
        self._on_role(hosted)

    def _open(self, hosted: ModelState) -> None:
        """Open the model to new work again. It may be closed for another model later."""
        hosted.is_closed = False
        if (gate := self._gates.pop(hosted.name, None)) is not None:
            gate.set()
        self._on_role(hosted)
        self._look_again()

    def _ready(self, hosted: ModelState, ready: ipc.Ready, load_s: float) -> None:
        self.loaded(hosted, ready, load_s)
        how = f"{ready.loaded.engine}, {ready.loaded.precision}, {ready.loaded.attention}"
        _logger.info("%s loaded in %.2f s: %s", hosted.name, ready.load_s, how, extra={"model": hosted.name})
        self._on_loaded(hosted)

    async def release(self, hosted: ModelState) -> None:
        """Unload a model without work. Work that arrives during the unload waits, and loads it again. Raises
        AdapterGone, SIEError.
        """
        hosted.mark_unloaded()
        self._on_role(hosted)
        hosted.state = "unloading"
        releasing = asyncio.create_task(self._release(hosted), name=f"release:{hosted.name}")
        self._releasing[hosted.name] = releasing
        self._on_change()
        await asyncio.shield(releasing)

    async def unload_when_idle(self, hosted: ModelState) -> bool:
        """Unload the model once its load has ended and no work of it is in flight. Return True if this call unloaded
        it. Raises AdapterGone, SIEError.

        After `ModelState.retain` the model stays loaded.
        """
        if hosted.leaves:  # another call is waiting for this already
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
        """Let the adapter relieve its memory every second, and unload models that were idle for `idle_evict_s` seconds,
        until cancelled.
        """
        while True:
            await asyncio.sleep(RELIEVE_S)
            await self.relieve()
            for hosted in self.idle(idle_evict_s) if idle_evict_s is not None else ():
                _logger.info(
                    "%s was idle for %d s and is unloaded", hosted.name, idle_evict_s, extra={"model": hosted.name}
                )
                try:
                    await self.release(hosted)
                    self.idle_evictions += 1
                except (AdapterGone, SIEError) as error:
                    _logger.warning("%s could not be unloaded: %s", hosted.name, error, extra={"model": hosted.name})

    async def relieve(self) -> None:
        """Let the adapter unload idle models if memory is above its threshold."""
        may_drop = _names(self.evictable(IDLE_S))
        if not may_drop:
            return
        try:
            await self.link.relieve(may_drop)
        except AdapterGone:
            pass  # without an adapter, no model is loaded
        except SIEError as error:
            _logger.warning("memory could not be relieved: %s", error)


_RANKS: tuple[State, ...] = ("loaded", "loading", "unloading", "failed", "available")


class WorkerModels:
    """Models of this worker, on all of its devices."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._copies = SecondCopies()
        self.devices: list[Hosting] = []  # by number of the device

    def __iter__(self) -> Iterator[ModelState]:
        """Iterate over the residencies of all devices: one that several devices have comes several times."""
        return (hosted for device in self.devices for hosted in device.all())

    def device_of(self, hosted: ModelState) -> Hosting:
        """Return the models of the device that has this residency."""
        return self.devices[hosted.device]

    def find(self, residency: str) -> list[ModelState]:
        """Return this residency on each device where work has used it."""
        return [hosted for device in self.devices if (hosted := device.find(residency)) is not None]

    def obtain(self, resolved: Resolved, revision: int = 0) -> ModelState:
        """Return the residency that serves new work of `resolved`, on the device that should run it."""
        if len(self.devices) == 1:
            return self.devices[0].obtain(resolved, revision)
        states = [device.obtain(resolved, revision) for device in self.devices]
        return states[devices.choose([self._view(hosted) for hosted in states])]

    def _view(self, hosted: ModelState) -> DeviceView:
        device, now_s = self.device_of(hosted), self._clock()
        description = device.link.description
        usable = usable_bytes(description) if description else 0.0
        evictable = device.evictable(0.0)
        is_open = hosted.state == "loaded" and not hosted.is_closed
        refusal = hosted.refusal(now_s)
        return DeviceView(
            connected=device.link.connected,
            loaded=is_open,
            coming=not is_open and (hosted.state in ("loaded", "loading") or hosted.has_waiters),
            refused=refusal is not None,
            gives_up=refusal is not None and refusal.extras.get("error_class") in PERMANENT,
            held_cost=device.held_cost,
            models=sum(state.state in ("loaded", "loading") or state.has_waiters for state in device.all()),
            size_bytes=max((state.memory_bytes for state in self.find(hosted.name)), default=0),
            free_bytes=usable - (description.memory_used_bytes if description else 0),
            usable_bytes=usable,
            idle_since_s=evictable[0].used_s if evictable else math.inf,
        )

    def second_copies(self, is_behind: Callable[[ModelState], bool]) -> list[ModelState]:
        """Return the residencies to load on one more device. Called once a second. `is_behind` returns True if work of
        a residency waits because its device is busy.
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
        views = {name: [self._view(hosted) for hosted in copies] for name, copies in states.items()}
        return [states[name][number] for name, number in self._copies.check(views).items()]

    # the worker as a whole, for placement and heartbeats

    def is_open(self, model: str) -> bool:
        """Return True if work of this model may come: some device has it loaded and not closed to new work."""
        return any(device.is_open(model) for device in self.devices)

    def holds(self, model: str) -> bool:
        """Return True if work of this model is held here."""
        return any(device.holds(model) for device in self.devices)

    def is_closed(self, model: str) -> bool:
        """Return True if work of this model would have to wait for the load of another model."""
        closed = [device for device in self.devices if device.is_closed(model)]
        return bool(closed) and not any(device.is_open(model) for device in self.devices if device not in closed)

    def loaded_models(self) -> list[str]:
        return list(dict.fromkeys(model for device in self.devices for model in device.loaded_models()))

    def statuses(self) -> tuple[ModelStatus, ...]:
        """Return one status for each residency: that of the device on which it is nearest to loaded, with the memory
        and the work of all devices.
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
        """Return how many models of the mean loaded size fit on the connected devices; 0 while unknown."""
        return sum(
            device.slots(device.link.description)
            for device in self.devices
            if device.link.connected and device.link.description is not None
        )

    async def stop(self) -> None:
        """Cancel the running loads, and with them the callers that wait."""
        await asyncio.gather(*(device.stop() for device in self.devices))
