"""Loads and unloads the models of this worker: one load per model however many wait for it, room for it by turns,
release when idle. What is held and what may go is decided by `models`.

    ensure ──► loaded, and its gate is open ──► return
          └──► load ──► the adapter drops what may go ──► Ready
                  └──► no room beside models with work ──► one of them is closed to new work ──► load again

Memory pressure is relieved with every batch, and once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from sie_contracts.errors import SIEError
from sie_contracts.models.catalogue import Resolved
from sie_contracts.wire import ipc
from sie_sidecar.device.link import AdapterGone, AdapterLink
from sie_sidecar.models.models import ModelState, ModelStates

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
