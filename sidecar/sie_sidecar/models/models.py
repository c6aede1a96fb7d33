"""Models that this worker holds: `ModelStates` has their states and decides which may be evicted, without I/O;
`Hosting` loads and unloads them: one load per model however many wait for it, room for it by turns, release when idle.

    available ──► loading ──► loaded ──released──► unloading ──► available
                    │           └──dropped by the adapter, or the adapter is gone──► available
                    └──refused──► failed ──cool-down──► loading

The worker decides which models may be evicted, and in what order; the adapter decides when. Each request to the adapter
names the models that may be dropped for it, and its reply those that were.

    Hosting.ensure ──► loaded, and its gate is open ──► return
          └──► load ──► the adapter drops what may go ──► Ready
                  └──► no room beside models with work ──► one of them is closed to new work ──► load again

Memory pressure is relieved with every batch, and once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from sie_contracts.errors import ModelLoadFailed, SIEError
from sie_contracts.media.images import max_blocks
from sie_contracts.models.catalogue import Resolved, profile_fingerprint
from sie_contracts.wire import ipc
from sie_contracts.wire.heartbeats import Fetched, ModelStatus, ServedEngine, ServedPrecision
from sie_contracts.wire.messages import RunOptions
from sie_sidecar.device.link import AdapterGone, AdapterLink
from sie_sidecar.prepare.tokens import ModelTokenizer

State = Literal["available", "loading", "loaded", "unloading", "failed"]

COOL_DOWN_S = {"OOM": 60.0}  # after a failure that may pass; a permanent one stands until the entry changes
OTHER_COOL_DOWN_S = 30.0
PASSING = ("OOM", "NETWORK")  # tried again however often
PERMANENT = ("GATED", "NOT_FOUND", "DEPENDENCY", "INCOMPATIBLE", "CERTIFICATE")
MAX_ATTEMPTS = 3  # of any other failure
MEMORY_USED = 0.85  # of the device, where the adapter does not report its threshold
RATE_OVER_S = 10.0
FILL_WEIGHT = 0.1  # of the last batch
MAX_TURN_S = 5.0  # that a load gives its model: the next one is held for SIE_LOAD_HOLD_S, and its load comes on top


def _image_cost(ready: ipc.Ready) -> tuple[int, int]:
    """Cost of an image, and the number of ids that stand for it, as `layouts` makes its row: the maximum of all
    operations.
    """
    costs = []
    for rows in ready.rows.values():
        if (recipe := rows.images) is not None:
            blocks, ids = max_blocks(recipe), rows.image_tokens
            count = len(ids.before) + (ids.count or blocks) + len(ids.after) if ids else 0
            costs.append((recipe.tokens + blocks * recipe.block_tokens, count))
    return max((patches + ids for patches, ids in costs), default=0), max((ids for _, ids in costs), default=0)


def _precision(loaded: ipc.LoadedModel) -> ServedPrecision:
    """In which precision it computes, as heartbeats report it."""
    return ServedPrecision(loaded.precision, loaded.requested_precision, loaded.precision_reason)


class ModelState:
    """One residency on this worker. `held` counts its work items here, whatever stage they are in."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved = resolved
        self.revision = 0  # of the entry in `resolved`; 0: not known
        self.loaded_revision = 0  # of the copy that was loaded last
        self.state: State = "available"
        self.ready: ipc.Ready | None = None
        self.tokenizer: ModelTokenizer | None = None
        self.error: SIEError | None = None
        self.failed_s = 0.0
        self.attempts = 0
        self.held = 0
        self.before_gate: list[Callable[[], int]] = []  # for each caller that waits there: how many of its items do
        self.arriving = False  # the adapter is loading it now
        self.leaves = False  # it is unloaded once it is idle: an operator asked
        self.makes_room = False  # new work waits before a gate: another model waits for this one's memory
        self.loaded_s = 0.0
        self.used_s = 0.0  # when work last came or went
        self.uses = 0  # how often that was
        self.swapped = False  # whether its last load closed another model to new work
        self.load_s = 0.0  # what the last load took
        self.memory_bytes = 0  # of the copy that was loaded last
        self.fill_ratio: float | None = None  # of its batches lately: their tokens by those of a full one
        self._cost_rate = 0.0
        self._cost_s = 0.0
        self.wanted: list[Callable[[], int]] = []  # for each caller that waits for it: how much of its work needs it
        self.loras: set[str] = set()  # that the loaded copy has, unless it dropped one since
        self.lora_digests: dict[str, str] = {}  # of the files that they, and those it dropped, were loaded from
        self._fingerprints: dict[tuple[str, str], str] = {}

    @property
    def name(self) -> str:
        return self.resolved.residency

    @property
    def is_wanted(self) -> bool:
        """Whether a caller that waits for it still needs it."""
        return any(count() for count in self.wanted)

    @property
    def parked(self) -> int:
        """How many of the held work items wait before the gate."""
        return sum(count() for count in self.before_gate)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is held for it but what waits before the gate: it may go."""
        return self.held == self.parked

    def came_in(self, cost: int, now_s: float) -> None:
        """Work of so many tokens was taken in."""
        self._cost_rate = self.cost_rate(now_s) + cost / RATE_OVER_S
        self._cost_s = now_s

    def used(self, now_s: float) -> None:
        """Work of it came, ran or went."""
        self.used_s = now_s

    def took(self, items: int, now_s: float) -> None:
        """So many more work items, or fewer, are held for it."""
        self.held += items
        self.uses += 1
        self.used(now_s)

    def filled(self, ratio: float) -> None:
        """A batch ran that was so full."""
        self.fill_ratio = (
            ratio if self.fill_ratio is None else self.fill_ratio + FILL_WEIGHT * (ratio - self.fill_ratio)
        )

    def cost_rate(self, now_s: float) -> float:
        """Tokens a second that came in: a mean whose weights fall by e in RATE_OVER_S."""
        return self._cost_rate * math.exp((self._cost_s - now_s) / RATE_OVER_S)

    def fingerprint(self, profile: str, options: RunOptions) -> str:
        """Fingerprint of answers of this profile with these options; empty while nothing is loaded."""
        if self.ready is None:
            return ""
        loaded, entry = self.ready.loaded.fingerprint, self.resolved.entry
        if (loaded, profile) not in self._fingerprints:
            self._fingerprints[loaded, profile] = profile_fingerprint(loaded, entry, profile)
        fingerprint = self._fingerprints[loaded, profile]
        # a LoRA counts by what its files hold: they may change under one name
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
        """The error of its last load, while it is not to be tried again."""
        if self.state != "failed" or self.error is None:
            return None
        cool_down_s = COOL_DOWN_S.get(str(self.error.extras.get("error_class")), OTHER_COOL_DOWN_S)
        if not self.error.extras.get("permanent") and now_s - self.failed_s >= cool_down_s:
            return None
        # a new exception each time: a kept one would collect the frames of everybody who ever met it
        return SIEError.from_info(self.error.info())

    def mark_unloaded(self) -> None:
        """The adapter does not hold it any more."""
        self._fingerprints.clear()
        self.reset_loras()
        if self.state == "loaded":
            self.state = "available"
        self.ready = None

    def reset_failure(self) -> None:
        """Its next load is tried as the first."""
        self.attempts = 0
        if self.state == "failed":
            self.state, self.error = "available", None

    def retain(self) -> None:
        """An operator wants it loaded: it is not unloaded when idle, and a load that failed is tried again."""
        self.leaves = False
        self.reset_failure()

    def reset_loras(self) -> None:
        """A LoRA that is not known is asked for again, which costs nothing if the adapter has it."""
        self.loras.clear()
        self.lora_digests.clear()


class ModelStates:
    """All residencies of this worker."""

    def __init__(
        self,
        clock: Callable[[], float],
        swap_after_s: float = 1.0,
        *,
        assigned: Callable[[], frozenset[str] | None] = lambda: None,
        fetching: Callable[[], Mapping[str, Fetched]] = dict,
    ) -> None:
        """`swap_after_s`: a model with work is closed for another one after that at the earliest. `assigned`: the
        models that this worker is a host of, None while not known. `fetching`: how far weights are that come to this
        node, by the id of their entry.
        """
        self._clock = clock
        self._swap_after_s = swap_after_s
        self._assigned = assigned
        self._fetching = fetching
        self._hosted: dict[str, ModelState] = {}
        self._of_model: dict[str, list[ModelState]] = {}
        self._room_bytes: float | None = None  # for models, when last no load was under way

    def all(self) -> list[ModelState]:
        return list(self._hosted.values())

    def statuses(self) -> tuple[ModelStatus, ...]:
        now_s, fetching = self._clock(), self._fetching()
        return tuple(hosted.status(now_s, fetching.get(hosted.resolved.entry.id)) for hosted in self._hosted.values())

    def is_loaded(self, model: str) -> bool:
        """Whether a residency of this model is loaded."""
        return any(hosted.state == "loaded" for hosted in self._of_model.get(model, ()))

    def takes(self, model: str) -> bool:
        """Whether work of this model may come: a residency is loaded, and need not make room for another model."""
        return any(hosted.state == "loaded" and not hosted.makes_room for hosted in self._of_model.get(model, ()))

    def holds(self, model: str) -> bool:
        """Whether work of this model is held here."""
        return any(hosted.held for hosted in self._of_model.get(model, ()))

    def makes_room(self, model: str) -> bool:
        """Whether work of this model would wait here until another model had its load."""
        return any(hosted.makes_room for hosted in self._of_model.get(model, ()))

    def loaded_models(self) -> list[str]:
        return [model for model in self._of_model if self.is_loaded(model)]

    def slots(self, device: ipc.Description) -> int:
        """How many models of the mean size of those that were loaded here fit beside what else the device holds, before
        any of them has to go; 0 while nobody knows.
        """
        sizes = [hosted.memory_bytes for hosted in self._hosted.values() if hosted.memory_bytes]
        if not any(hosted.state == "loading" for hosted in self._hosted.values()):  # whose bytes are in no model's yet
            beside_bytes = max(0, device.memory_used_bytes - sum(model.memory_bytes for model in device.models))
            self._room_bytes = (
                device.threshold_percent / 100 or MEMORY_USED
            ) * device.memory_total_bytes - beside_bytes
        return max(1, int(self._room_bytes * len(sizes) / sum(sizes))) if sizes and self._room_bytes is not None else 0

    def of(self, resolved: Resolved, revision: int = 0) -> ModelState:
        """The residency that serves `resolved`, the entry of a model at `revision`. An entry that changed since is
        another one: the old copy is not used for it.
        """
        hosted = self._hosted.get(resolved.residency)
        if hosted is None:
            hosted = self._hosted[resolved.residency] = ModelState(resolved)
            self._of_model.setdefault(resolved.entry.id, []).append(hosted)
        elif hosted.resolved.entry != resolved.entry:
            hosted.resolved = resolved
            hosted.mark_unloaded()
            hosted.tokenizer = None  # that of another model
            hosted.reset_failure()
        hosted.revision = revision
        return hosted

    def find(self, residency: str) -> ModelState | None:
        """The residency of this name, None where nothing here ever asked for it."""
        return self._hosted.get(residency)

    def take(self, hosted: ModelState, items: int = 1) -> None:
        """Hold `items` more work items for `hosted`. From now on no request permits to unload it."""
        hosted.took(items, self._clock())

    def let_go(self, hosted: ModelState) -> None:
        """One work item of `hosted` is settled."""
        hosted.took(-1, self._clock())

    def park(self, hosted: ModelState, items: Callable[[], int]) -> None:
        """So many of the work items of `hosted` need it again later, and not now: it may go meanwhile."""
        hosted.before_gate.append(items)

    def unpark(self, hosted: ModelState, items: Callable[[], int]) -> None:
        """They need it now."""
        hosted.before_gate.remove(items)

    def idle(self, seconds: float) -> list[ModelState]:
        """Loaded models without work, other than what waits before the gate, that were last used this long ago."""
        before_s = self._clock() - seconds
        loaded = (hosted for hosted in self._hosted.values() if hosted.state == "loaded")
        return [hosted for hosted in loaded if hosted.is_quiet and hosted.used_s <= before_s]

    def evictable(self, idle_s: float) -> list[ModelState]:
        """The models that were idle for so long, in the order in which they may go: those that are placed elsewhere
        come first. Of these, and of the others, the least recently used one, then the largest one first.
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
        """The other models that take memory now: loaded with work, or on their way."""
        states = (state for state in self._hosted.values() if state is not hosted)
        return [state for state in states if state.arriving or (state.state == "loaded" and not state.is_quiet)]

    def left_over(self, loaded_models: Iterable[ipc.LoadedModel]) -> list[str]:
        """List the adapter's models that an earlier process of this worker left: this process never requested them."""
        names = {hosted.name for hosted in self._hosted.values() if hosted.state in ("loading", "loaded")}
        return [loaded.model for loaded in loaded_models if loaded.model not in names]

    def next_to_close(self, had_work: list[ModelState], asked_s: float) -> tuple[ModelState | None, float | None]:
        """Choose the model to close to new work, for a load that does not fit beside these and was requested at
        `asked_s`; and in how many seconds: once the load has waited long enough, and the turn of the model is over.
        None while all of them make room for other loads.
        """
        able = [state for state in had_work if state.state == "loaded" and not state.makes_room]
        first = min(able, key=self._turn_ends_s, default=None)
        if first is None:
            return None, None
        return first, max(asked_s + self._swap_after_s, self._turn_ends_s(first)) - self._clock()

    def _turn_ends_s(self, hosted: ModelState) -> float:
        """A model that was loaded for its own work gets to it for as long as its load took, at most MAX_TURN_S: else
        there would only be loads.
        """
        return hosted.loaded_s + max(self._swap_after_s, min(hosted.load_s, MAX_TURN_S))

    def loaded(self, hosted: ModelState, ready: ipc.Ready, load_s: float) -> None:
        """The adapter has loaded `hosted`, in so many seconds."""
        hosted.ready, hosted.error, hosted.attempts = ready, None, 0
        hosted.loaded_revision = hosted.revision
        hosted.tokenizer = ModelTokenizer(ready.tokenizer, ready.max_tokens)
        hosted.state, hosted.used_s, hosted.loaded_s = "loaded", self._clock(), self._clock()
        hosted.memory_bytes, hosted.load_s = ready.loaded.memory_bytes, load_s

    def failed(self, hosted: ModelState, error: SIEError) -> SIEError:
        """The adapter has refused to load `hosted`. Returns the error that is remembered."""
        error_class = error.extras.get("error_class", "UNKNOWN")
        hosted.attempts += 1
        permanent = error_class in PERMANENT or (error_class not in PASSING and hosted.attempts >= MAX_ATTEMPTS)
        extras = {"error_class": error_class, "permanent": permanent, **error.extras, "attempts": hosted.attempts}
        hosted.error = ModelLoadFailed(error.message, reason=error.reason, extras=extras)
        hosted.state, hosted.failed_s = "failed", self._clock()
        return hosted.error

    def dropped(self, names: Iterable[str]) -> list[ModelState]:
        """The adapter has unloaded these models. Returns the residencies that are known of them."""
        unloaded = [self._hosted[name] for name in names if name in self._hosted]
        for hosted in unloaded:
            hosted.mark_unloaded()
        return unloaded


IDLE_S = 1.0  # a model with less than this between its uses is not worth a reload
RELIEVE_S = 1.0
EARLIER_LOAD_S = 0.5
_logger = logging.getLogger("sie.sidecar.hosting")


def _one() -> int:
    return 1


def _names(models: list[ModelState]) -> tuple[str, ...]:
    return tuple(hosted.name for hosted in models)


class Hosting(ModelStates):
    """The models of this worker, with the adapter that loads and drops them."""

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
    ) -> None:
        """A model that does not fit waits for the others' work to end, for `swap_after_s` at most before one of them is
        closed to more. `assigned`: the models that this worker is a host of, None while not known. `on_role`: a
        residency is unloaded, makes room, or need not any more.
        """
        super().__init__(clock, swap_after_s, assigned=assigned, fetching=lambda: link.fetching)
        self.swaps = 0
        self.idle_evictions = 0
        self._asked = 0  # loads asked for
        self._waiters: list[tuple[float, asyncio.Future[None]]] = []  # for room: since when, and what wakes them
        self._gates: dict[str, asyncio.Event] = {}  # of the models that are closed: set when they open
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._releasing: dict[str, asyncio.Task[None]] = {}
        self._link = link
        self._on_change = on_change
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._on_role = on_role
        link.listeners.append(self._on_link)
        link.attach(lambda: _names(self.evictable(IDLE_S)), self._on_dropped)

    def let_go(self, hosted: ModelState) -> None:
        super().let_go(hosted)
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
        """Return when the model is loaded and its gate is open, or when nobody needs it any more. Raises
        ModelLoadFailed, AdapterGone.

        `items`: for how many of the work items that are held for it, without those that were cancelled since; without
        it the model is wanted for no work in particular. `past_gate`: they were through the gate before and hold what
        others wait for, so that they must not wait there again.
        """
        count = items or _one
        hosted.wanted.append(count)
        try:
            await self._until_ready(hosted, items or int, count, past_gate=past_gate)
        finally:
            hosted.wanted.remove(count)

    async def _until_ready(
        self, hosted: ModelState, items: Callable[[], int], waiting_items: Callable[[], int], *, past_gate: bool
    ) -> None:
        while waiting_items() and (hosted.state != "loaded" or (hosted.makes_room and not past_gate)):
            if hosted.makes_room and not past_gate:
                await self._before_gate(hosted, items)
                continue
            if (refusal := hosted.refusal(self._clock())) is not None:
                raise refusal
            if (releasing := self._releasing.get(hosted.name)) is not None:
                await asyncio.wait([releasing])  # whatever comes of it, what comes now loads it again
                continue
            if (loading := self._loading.get(hosted.name)) is None:
                loading = asyncio.create_task(self._load(hosted), name=f"load:{hosted.name}")
                # its waiters may have gone by then
                loading.add_done_callback(lambda task: task.cancelled() or task.exception())
                self._loading[hosted.name] = loading
            await asyncio.shield(loading)

    async def stop(self) -> None:
        """End the loads that are under way; whoever waits for one is cancelled with it."""
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
                closed = await self._make_room(hosted, asked_s, closed)
                began_s = self._clock()
            if ready is None:
                return
            if hosted.resolved.entry == resolved.entry:  # else it changed meanwhile: what was loaded is another model
                self._ready(hosted, ready, ready.load_s or self._clock() - began_s)
        except SIEError:
            if hosted.resolved.entry == resolved.entry:  # else whoever waits wants another model, which is loaded next
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
        """Whether somebody waits for this very model: a load that nobody needs would drop one that somebody needs."""
        return hosted.is_wanted and hosted.resolved.entry == resolved.entry

    async def _asked_to_load(self, hosted: ModelState, resolved: Resolved) -> ipc.Ready | None:
        """The loaded model, or None if it did not fit beside models that had work meanwhile or were on their way.
        Raises AdapterGone, ModelLoadFailed.
        """
        offered = [candidate for candidate in self.evictable(0.0) if candidate is not hosted]
        left_over = self.left_over(self._described())
        beside, number, uses = self.busy(hosted), self._asked + 1, [candidate.uses for candidate in offered]
        self._asked, hosted.arriving = number, True
        try:
            entry, may_drop = msgspec.to_builtins(resolved.entry), (*left_over, *_names(offered))
            return await self._link.ensure_ready(ipc.EnsureReady(hosted.name, entry, resolved.profile, may_drop))
        except SIEError as error:
            came = self._asked > number or uses != [candidate.uses for candidate in offered]
            if error.extras.get("error_class") == "OOM" and (
                beside or came or self.busy(hosted) or await self._went_to_earlier_loads(error, left_over)
            ):
                return None
            if hosted.resolved.entry != resolved.entry:  # it changed meanwhile: what failed says nothing of it
                raise
            failure = self.failed(hosted, error)
            self._on_failed(hosted, failure)
            _logger.error("%s could not be loaded: %s", hosted.name, error.message, extra={"model": hosted.name})
            raise SIEError.from_info(failure.info()) from error
        finally:
            hosted.arriving = False
            self._look_again()

    async def _went_to_earlier_loads(self, error: SIEError, offered: list[str]) -> bool:
        """Whether the room is taken by loads that an earlier process of this worker began and nobody here knows of.
        Those under way are given some time; those that have ended can be offered. Raises AdapterGone.
        """
        arriving = error.extras.get("arriving")
        if isinstance(arriving, (list, tuple)) and set(arriving) - {
            hosted.name for hosted in self.all() if hosted.arriving
        }:
            await asyncio.sleep(EARLIER_LOAD_S)  # nothing tells of its end
            return True
        await self._link.describe()
        there = {loaded.model for loaded in self._described()}
        finding = [load for name, load in self._loading.items() if name in there]
        if finding:  # its own load finds it there, which makes it one that has work or can be offered
            await asyncio.wait(finding, timeout=EARLIER_LOAD_S)
            return True
        return any(name not in offered for name in self.left_over(self._described()))

    def _described(self) -> tuple[ipc.LoadedModel, ...]:
        """Models that the adapter held at its last description."""
        return self._link.description.models if self._link.description else ()

    async def _before_gate(self, hosted: ModelState, items: Callable[[], int]) -> None:
        """Wait until the gate opens; work that is past it is finished first."""
        self.park(hosted, items)
        try:
            await self._gates[hosted.name].wait()
        finally:
            self.unpark(hosted, items)

    async def _make_room(self, hosted: ModelState, asked_s: float, closed: ModelState | None) -> ModelState | None:
        """Return when one more of the other models has no work, or nobody wants this one any more. Once `hosted` has
        waited `swap_after_s`, the model whose turn is over first is closed to new work, when it is, until `hosted` had
        its load; returns it.
        """
        had_work = self.busy(hosted)
        while hosted.is_wanted and had_work and all(busy_model in self.busy(hosted) for busy_model in had_work):
            if closed is not None and (closed.state != "loaded" or not closed.makes_room):
                self._open(closed)  # its room went to another load
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
        """Return when a model may have no more work, or after `timeout_s`."""
        waiter = asked_s, asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await waiter[1]
        finally:
            self._waiters.remove(waiter)

    def _look_again(self) -> None:
        """Wake those who wait for room, in the order in which they came: else two models could take turns for ever
        beside a third.
        """
        for _, waiter in sorted(self._waiters, key=lambda entry: entry[0]):
            if not waiter.done():
                waiter.set_result(None)

    def _close(self, hosted: ModelState) -> None:
        """New work of it waits before its gate."""
        hosted.makes_room = True
        self._gates[hosted.name] = asyncio.Event()
        self._on_role(hosted)

    def _open(self, hosted: ModelState) -> None:
        """It takes new work again, and may be closed for another one."""
        hosted.makes_room = False
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
        """Unload a model that nothing is held for; work that comes meanwhile waits, and loads it again. Raises
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
        """Unload the model once its load has ended and nothing is in flight for it; whether this call did. Raises
        AdapterGone, SIEError.

        After `ModelState.retain` it stays.
        """
        if hosted.leaves:  # another call waits
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
            await self._link.ask(ipc.Release(hosted.name))
        finally:
            del self._releasing[hosted.name]
            hosted.state = "available"
            self._on_change()

    async def run(self, idle_evict_s: int | None) -> None:
        """Until cancelled: let the adapter relieve its memory, and unload what was idle for `idle_evict_s` seconds."""
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
            await self._link.relieve(may_drop)
        except AdapterGone:
            pass  # nothing is loaded then
        except SIEError as error:
            _logger.warning("memory could not be relieved: %s", error)
