"""Which models this worker holds: one load per model however many wait for it, failures that are remembered, release
when idle.

    available ──EnsureReady──► loading ──Ready──► loaded ──Release, eviction, adapter gone──► available
                                  └──Refused──► failed ──cool-down──► available

Each request to the adapter names the models that may be unloaded for it, the first one first: idle ones, those that are
placed on other workers before all others. Memory pressure is looked at with every batch, and once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import Callable
from typing import Literal

import msgspec

from sie_contracts import ipc
from sie_contracts.catalogue import Resolved, profile_fingerprint
from sie_contracts.errors import ModelLoadFailed, SIEError
from sie_contracts.messages import Fetched, ModelStatus, ServedPrecision
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.tokens import ModelTokenizer

COOL_DOWN_S = {"OOM": 60.0}  # after a failure that may pass; a permanent one stands until the entry changes
OTHER_COOL_DOWN_S = 30.0
PASSING = ("OOM", "NETWORK")  # tried again however often
PERMANENT = ("GATED", "NOT_FOUND", "DEPENDENCY", "INCOMPATIBLE", "CERTIFICATE")
MAX_ATTEMPTS = 3  # of any other failure
MEMORY_USED = 0.85  # of the device, where the adapter does not tell from where on models go
RATE_OVER_S = 10.0
FILL_WEIGHT = 0.1  # of the last batch
IDLE_S = 1.0  # a model with less than this between its uses is not worth a reload
RELIEVE_S = 1.0
EARLIER_LOAD_S = 0.5
# that a load gives its model: who asks for the next one is held for SIE_LOAD_HOLD_S, and its load comes on top
MAX_TURN_S = 5.0
_logger = logging.getLogger("sie.sidecar.hosting")


def _one() -> int:
    return 1


def _names(models: list[Hosted]) -> tuple[str, ...]:
    return tuple(hosted.name for hosted in models)


def _precision(loaded: ipc.LoadedModel) -> ServedPrecision:
    """In which precision it computes, as heartbeats tell it."""
    return ServedPrecision(loaded.precision, loaded.requested_precision, loaded.precision_reason)


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
        self.before_gate: list[Callable[[], int]] = []  # how many of these each of those who wait before the gate has
        self.arriving = False  # the adapter is loading it now
        self.gate = asyncio.Event()  # closed while another model waits for this one's memory
        self.gate.set()
        self.loaded_s = 0.0
        self.used_s = 0.0  # of the last work that came or went
        self.uses = 0  # how often that was
        self.swapped = False  # whether its last load closed another model to new work
        self.load_s = 0.0  # what the last load took
        self.memory_bytes = 0  # of the copy that was loaded last
        self.fill_ratio: float | None = None  # of its batches lately: their tokens by those of a full one
        self._cost_rate = 0.0
        self._cost_s = 0.0
        self.wanted: list[Callable[[], int]] = []  # by those who wait for it: how much of their work still needs it
        self.loading: asyncio.Task[None] | None = None
        self.releasing: asyncio.Task[None] | None = None
        self.loras: set[str] = set()  # that the loaded copy has, unless it dropped one since
        self.lora_digests: dict[str, str] = {}  # of the files that they, and those it dropped, were loaded from
        self._fingerprints: dict[tuple[str, str], str] = {}

    @property
    def name(self) -> str:
        return self.resolved.residency

    @property
    def is_wanted(self) -> bool:
        """Whether anybody who waits for it still needs it."""
        return any(count() for count in self.wanted)

    @property
    def parked(self) -> int:
        """Of what is held, what waits before the gate."""
        return sum(count() for count in self.before_gate)

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

    def fingerprint(self, profile: str, lora: str = "") -> str:
        """Of answers of this profile and this LoRA; empty while nothing is loaded."""
        if self.ready is None:
            return ""
        loaded, entry = self.ready.loaded.fingerprint, self.resolved.entry
        if (loaded, profile) not in self._fingerprints:
            self._fingerprints[loaded, profile] = profile_fingerprint(loaded, entry, profile)
        found = self._fingerprints[loaded, profile]
        # by what its files hold: they may change under one name
        return (
            hashlib.sha256(f"{found} {self.lora_digests.get(lora) or lora}".encode()).hexdigest()[:16]
            if lora
            else found
        )

    def status(self, now_s: float, fetched: Fetched | None = None) -> ModelStatus:
        loaded = self.ready.loaded if self.ready else None
        state: Literal["available", "loading", "loaded", "unloading", "failed"] = self.state
        if self.releasing is not None and state == "available":
            state = "unloading"
        return ModelStatus(
            self.name,
            state,
            loaded.memory_bytes if loaded else 0,
            self.held,
            loaded.fingerprint if loaded else "",
            self.error.info() if self.error else None,
            loaded.certificate or None if loaded else None,
            self.load_s,
            cost_rate=round(self.cost_rate(now_s), 1),
            fetched=fetched if state == "loading" else None,
            precision=_precision(loaded) if loaded else None,
            crossover_tokens=loaded.crossover_tokens if loaded else 0,
        )

    def cool_down_s(self) -> float:
        return COOL_DOWN_S.get(str(self.error.extras.get("error_class")) if self.error else "", OTHER_COOL_DOWN_S)

    def unload(self) -> None:
        """The adapter does not hold it any more."""
        self._fingerprints.clear()
        self.forget_loras()
        if self.state == "loaded":
            self.state = "available"
        self.ready = None

    def forget_loras(self) -> None:
        """What is forgotten is asked for again, which costs nothing if it is there."""
        self.loras.clear()
        self.lora_digests.clear()


class Hosting:
    """All residencies of this worker."""

    def __init__(
        self,
        link: AdapterLink,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        swap_after_s: float = 1.0,
        *,
        assigned: Callable[[], frozenset[str] | None] = lambda: None,
        on_loaded: Callable[[Hosted], object] = lambda hosted: None,
        on_failed: Callable[[Hosted, SIEError], object] = lambda hosted, error: None,
        on_role: Callable[[Hosted], object] = lambda hosted: None,
    ) -> None:
        """A model that does not fit waits for the others' work to end, for `swap_after_s` at most before one of them is
        closed to more. `assigned`: the models that this worker is a host of, None while not known. `on_role`: a
        residency is unloaded, makes room, or need not any more.
        """
        self.swaps = 0
        self.idle_evictions = 0
        self._asked = 0  # loads asked for
        self._room_bytes: float | None = None  # for models, when last no load was under way
        self._swap_after_s = swap_after_s
        self._waiters: list[tuple[float, asyncio.Future[None]]] = []  # for room: since when, and what wakes them
        self._link = link
        self._clock = clock
        self._on_change = on_change
        self._hosted: dict[str, Hosted] = {}
        self._of_model: dict[str, list[Hosted]] = {}
        self._assigned = assigned
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._on_role = on_role
        link.listeners.append(self._on_link)
        link.attach(lambda: _names(self.may_drop(IDLE_S)), self._dropped)

    def all(self) -> list[Hosted]:
        return list(self._hosted.values())

    def statuses(self) -> tuple[ModelStatus, ...]:
        now_s = self._clock()
        return tuple(
            hosted.status(now_s, self._link.fetching.get(hosted.resolved.entry.id)) for hosted in self._hosted.values()
        )

    def is_loaded(self, model: str) -> bool:
        """Whether a residency of this model is loaded."""
        return any(hosted.state == "loaded" for hosted in self._of_model.get(model, ()))

    def takes(self, model: str) -> bool:
        """Whether work of this model may come: a residency is loaded, and need not make room for another model."""
        return any(hosted.state == "loaded" and hosted.gate.is_set() for hosted in self._of_model.get(model, ()))

    def holds(self, model: str) -> bool:
        """Whether work of this model is held here."""
        return any(hosted.held for hosted in self._of_model.get(model, ()))

    def makes_room(self, model: str) -> bool:
        """Whether work of this model would wait here until another model had its load."""
        return any(not hosted.gate.is_set() for hosted in self._of_model.get(model, ()))

    def loaded_models(self) -> list[str]:
        return [model for model in self._of_model if self.is_loaded(model)]

    def slots(self, device: ipc.Description) -> int:
        """How many models of the mean size of those that were loaded here fit beside what else the device holds, before
        any of them has to go; 0 while nobody knows.
        """
        sizes = [hosted.memory_bytes for hosted in self._hosted.values() if hosted.memory_bytes]
        if not any(hosted.state == "loading" for hosted in self._hosted.values()):  # whose bytes would be nobody's
            beside_bytes = max(0, device.memory_used_bytes - sum(model.memory_bytes for model in device.models))
            self._room_bytes = (
                device.threshold_percent / 100 or MEMORY_USED
            ) * device.memory_total_bytes - beside_bytes
        return max(1, int(self._room_bytes * len(sizes) / sum(sizes))) if sizes and self._room_bytes is not None else 0

    def of(self, resolved: Resolved) -> Hosted:
        """The residency that serves `resolved`. An entry that changed since is another one: the old copy is not used
        for it.
        """
        hosted = self._hosted.get(resolved.residency)
        if hosted is None:
            hosted = self._hosted[resolved.residency] = Hosted(resolved)
            self._of_model.setdefault(resolved.entry.id, []).append(hosted)
        elif hosted.resolved.entry != resolved.entry:
            hosted.resolved = resolved
            hosted.unload()
            hosted.tokenizer = None  # that of another model
            hosted.attempts = 0
            if hosted.state == "failed":
                hosted.state, hosted.error = "available", None
        return hosted

    def take(self, hosted: Hosted, items: int = 1) -> None:
        """Hold `items` more work items for `hosted`. From now on no request permits to unload it."""
        hosted.took(items, self._clock())

    def let_go(self, hosted: Hosted) -> None:
        """One work item of `hosted` is settled."""
        hosted.took(-1, self._clock())
        if hosted.held == hosted.parked:
            self._tell_quiet()

    def _on_link(self, connected: bool) -> None:
        if not connected:
            for hosted in self._hosted.values():
                hosted.unload()
            self._tell_quiet()
        self._on_change()

    async def ensure(self, hosted: Hosted, items: Callable[[], int] | None = None, *, past_gate: bool = False) -> None:
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
        self, hosted: Hosted, items: Callable[[], int], wanted: Callable[[], int], *, past_gate: bool
    ) -> None:
        while wanted() and (hosted.state != "loaded" or not (past_gate or hosted.gate.is_set())):
            if not (past_gate or hosted.gate.is_set()):
                await self._park(hosted, items)
                continue
            if hosted.state == "failed" and hosted.error is not None:
                permanent = bool(hosted.error.extras.get("permanent"))
                if permanent or self._clock() - hosted.failed_s < hosted.cool_down_s():
                    # a new exception each time: a kept one would collect the frames of everybody who ever met it
                    raise SIEError.from_info(hosted.error.info())
            if hosted.releasing is not None:
                await asyncio.wait([hosted.releasing])  # whatever comes of it, what comes now loads it again
                continue
            if hosted.loading is None:
                hosted.loading = asyncio.create_task(self._load(hosted), name=f"load:{hosted.name}")
                # its waiters may have gone by then
                hosted.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(hosted.loading)

    async def stop(self) -> None:
        """End the loads that are under way; whoever waits for one is cancelled with it."""
        loads = [hosted.loading for hosted in self._hosted.values() if hosted.loading is not None]
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    async def _load(self, hosted: Hosted) -> None:
        resolved, asked_s = hosted.resolved, self._clock()
        hosted.state, hosted.swapped = "loading", False
        self._on_change()
        closed: Hosted | None = None
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
                self._loaded(hosted, ready)
                hosted.load_s = ready.load_s or self._clock() - began_s
        except SIEError:
            if hosted.resolved.entry == resolved.entry:  # else whoever waits wants another model, which is loaded next
                raise
        finally:
            if hosted.state == "loading":
                hosted.state = "available"
            if closed is not None:
                self._open(closed)
            hosted.loading = None
            self._on_change()

    @staticmethod
    def _still_loads(hosted: Hosted, resolved: Resolved) -> bool:
        """Whether somebody waits for this very model: a load that nobody waits for any more would evict what somebody
        needs.
        """
        return hosted.is_wanted and hosted.resolved.entry == resolved.entry

    async def _asked_to_load(self, hosted: Hosted, resolved: Resolved) -> ipc.Ready | None:
        """The loaded model, or None if it did not fit beside models that had work meanwhile or were on their way.
        Raises AdapterGone, ModelLoadFailed.
        """
        offered, left_over = [other for other in self.may_drop(0.0) if other is not hosted], self._left_over()
        beside, number, uses = self._busy(hosted), self._asked + 1, [other.uses for other in offered]
        self._asked, hosted.arriving = number, True
        try:
            return await self._link.ensure_ready(
                ipc.EnsureReady(
                    hosted.name,
                    msgspec.to_builtins(resolved.entry),
                    resolved.profile,
                    (*left_over, *_names(offered)),
                )
            )
        except SIEError as error:
            error_class = error.extras.get("error_class", "UNKNOWN")
            came = self._asked > number or uses != [other.uses for other in offered]
            if error_class == "OOM" and (
                beside or came or self._busy(hosted) or await self._went_to_earlier_loads(error, left_over)
            ):
                return None
            if hosted.resolved.entry != resolved.entry:  # it changed meanwhile: what failed says nothing of it
                raise
            hosted.attempts += 1
            permanent = error_class in PERMANENT or (error_class not in PASSING and hosted.attempts >= MAX_ATTEMPTS)
            extras = {"error_class": error_class, "permanent": permanent, **error.extras, "attempts": hosted.attempts}
            hosted.error = ModelLoadFailed(error.message, reason=error.reason, extras=extras)
            hosted.state, hosted.failed_s = "failed", self._clock()
            self._on_failed(hosted, hosted.error)
            _logger.error("%s could not be loaded: %s", hosted.name, error.message, extra={"model": hosted.name})
            raise SIEError.from_info(hosted.error.info()) from error
        finally:
            hosted.arriving = False
            self._tell_quiet()

    def may_drop(self, idle_s: float) -> list[Hosted]:
        """The models that were idle for so long, in the order in which they may go: those that are placed elsewhere
        come first. Of these, and of the others, the least recently used one, then the largest one first.
        """
        assigned = self._assigned()
        elsewhere: list[Hosted] = []
        here: list[Hosted] = []
        for hosted in sorted(self.idle(idle_s), key=lambda each: each.used_s):
            is_elsewhere = assigned is not None and hosted.resolved.entry.id not in assigned
            (elsewhere if is_elsewhere else here).append(hosted)
        return [
            hosted
            for group in (elsewhere, here)
            for hosted in (*group[:1], *sorted(group[1:], key=lambda each: -each.memory_bytes))
        ]

    def _left_over(self) -> list[str]:
        """What the adapter held when this process came to it, and nobody here has asked for since."""
        found = self._link.description.models if self._link.description else ()
        known = {hosted.name for hosted in self._hosted.values() if hosted.state in ("loading", "loaded")}
        return [loaded.model for loaded in found if loaded.model not in known]

    async def _went_to_earlier_loads(self, error: SIEError, offered: list[str]) -> bool:
        """Whether the room is taken by loads that an earlier process of this worker began and nobody here knows of.
        Those under way are given some time; those that have ended can be offered. Raises AdapterGone.
        """
        arriving = error.extras.get("arriving")
        if isinstance(arriving, (list, tuple)) and set(arriving) - {
            hosted.name for hosted in self._hosted.values() if hosted.arriving
        }:
            await asyncio.sleep(EARLIER_LOAD_S)  # nothing tells of its end
            return True
        await self._link.describe()
        there = {loaded.model for loaded in self._link.description.models} if self._link.description else set()
        finding = [
            each.loading
            for each in self._hosted.values()
            if each.state == "loading" and each.name in there and each.loading
        ]
        if finding:  # its own load finds it there, which makes it one that has work or can be offered
            await asyncio.wait(finding, timeout=EARLIER_LOAD_S)
            return True
        return any(name not in offered for name in self._left_over())

    async def _park(self, hosted: Hosted, items: Callable[[], int]) -> None:
        """Wait before the gate; work that is past it is finished first."""
        self.park(hosted, items)
        try:
            await hosted.gate.wait()
        finally:
            self.unpark(hosted, items)

    def park(self, hosted: Hosted, items: Callable[[], int]) -> None:
        """So many of the work items of `hosted` need it again later, and not now: it may go meanwhile."""
        hosted.before_gate.append(items)
        if hosted.held == hosted.parked:
            self._tell_quiet()

    def unpark(self, hosted: Hosted, items: Callable[[], int]) -> None:
        """They need it now."""
        hosted.before_gate.remove(items)

    def _busy(self, hosted: Hosted) -> list[Hosted]:
        """The other models that take memory now: loaded with work, or on their way."""
        others = (other for other in self._hosted.values() if other is not hosted)
        return [other for other in others if other.arriving or (other.state == "loaded" and other.held > other.parked)]

    async def _make_room(self, hosted: Hosted, asked_s: float, closed: Hosted | None) -> Hosted | None:
        """Return when one more of the other models has no work, or nobody wants this one any more. Once `hosted` has
        waited `swap_after_s`, the model whose turn is over first is closed to new work, when it is, until `hosted` had
        its load; returns it.
        """
        had_work = self._busy(hosted)
        while hosted.is_wanted and had_work and all(other in self._busy(hosted) for other in had_work):
            if closed is not None and (
                closed.state != "loaded" or closed.gate.is_set()
            ):  # its room went to another load
                self._open(closed)
                closed = None
            # one that is closed already goes for another one's load
            able = (other for other in had_work if other.state == "loaded" and other.gate.is_set())
            first = min(able, key=self._turn_ends_s, default=None)
            due_s = None
            if first is not None and closed is None:
                due_s = max(asked_s + self._swap_after_s, self._turn_ends_s(first)) - self._clock()
            if due_s is not None and due_s <= 0:
                closed = first
                assert closed is not None
                closed.gate.clear()
                self._on_role(closed)
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

    def _tell_quiet(self) -> None:
        """Whoever waits for room looks again, in the order in which they came: else two models could take turns for
        ever beside a third.
        """
        for _, waiter in sorted(self._waiters, key=lambda each: each[0]):
            if not waiter.done():
                waiter.set_result(None)

    def _open(self, closed: Hosted) -> None:
        """It takes new work again, and may be closed for another one."""
        closed.gate.set()
        self._on_role(closed)
        self._tell_quiet()

    def _turn_ends_s(self, hosted: Hosted) -> float:
        """What was loaded for its own work gets to it for as long as its load took, at most MAX_TURN_S: else there are
        only loads.
        """
        return hosted.loaded_s + max(self._swap_after_s, min(hosted.load_s, MAX_TURN_S))

    def _loaded(self, hosted: Hosted, ready: ipc.Ready) -> None:
        hosted.ready, hosted.error, hosted.attempts = ready, None, 0
        hosted.tokenizer = ModelTokenizer(ready.tokenizer, ready.max_tokens)
        hosted.state, hosted.used_s, hosted.loaded_s = "loaded", self._clock(), self._clock()
        loaded = ready.loaded
        hosted.memory_bytes = loaded.memory_bytes
        how = f"{loaded.precision}, {loaded.attention}"
        _logger.info("%s loaded in %.2f s: %s", hosted.name, ready.load_s, how, extra={"model": hosted.name})
        self._on_loaded(hosted)

    def _dropped(self, names: tuple[str, ...]) -> None:
        _logger.info("the adapter unloaded %s for its memory", ", ".join(names))
        for name in names:
            if name in self._hosted:
                self._hosted[name].unload()
                self._on_role(self._hosted[name])
        self._on_change()

    async def release(self, hosted: Hosted) -> None:
        """Unload a model that nothing is held for; work that comes meanwhile waits, and loads it again. Raises
        AdapterGone, SIEError.
        """
        hosted.unload()
        self._on_role(hosted)
        hosted.releasing = asyncio.create_task(self._release(hosted), name=f"release:{hosted.name}")
        self._on_change()
        await asyncio.shield(hosted.releasing)

    async def _release(self, hosted: Hosted) -> None:
        try:
            await self._link.ask(ipc.Release(hosted.name))
        finally:
            hosted.releasing = None
            self._on_change()

    def idle(self, seconds: float) -> list[Hosted]:
        """Loaded models without work, other than what waits before the gate, that were last used this long ago."""
        before_s = self._clock() - seconds
        loaded = (hosted for hosted in self._hosted.values() if hosted.state == "loaded")
        return [hosted for hosted in loaded if hosted.held == hosted.parked and hosted.used_s <= before_s]

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
        may_drop = _names(self.may_drop(IDLE_S))
        if not may_drop:
            return
        try:
            await self._link.relieve(may_drop)
        except AdapterGone:
            pass  # nothing is loaded then
        except SIEError as error:
            _logger.warning("memory could not be relieved: %s", error)
