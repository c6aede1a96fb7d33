"""Loading of models and LoRAs when work needs them, and operators' requests to load or unload models. All callers that
need the same LoRA share one load, and work items wait at most HOLD_S seconds for it. A failed load of a LoRA is not
tried again for COOL_DOWN_S seconds. A caller that holds the lock `ModelState.lora_lock` (argument `in_turn`) shares no
load, and neither limit applies to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from sie_broker import CoreMessage
from sie_contracts.errors import (
    UNDECODABLE,
    BundleConflict,
    ErrorInfo,
    GatewayTimeout,
    LoraLoadFailed,
    LoraLoading,
    ModelLoadFailed,
    ModelLoading,
    ModelNotFound,
    SIEError,
)
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.wire import ipc, messages
from sie_contracts.wire.messages import WorkItem
from sie_runtime.feed import CatalogueFeed
from sie_runtime.process import Tasks, cancel_all
from sie_sidecar.in_flight import InFlight, Inventory, unsettled
from sie_sidecar.link import AdapterGone, AdapterLinks
from sie_sidecar.models import ModelState, WorkerModels

HOLD_S = 5.0
COOL_DOWN_S = 30.0
# largest number of entries of `LoraLoads._failures`, and of `ModelState.lora_digests` of each model. A full dict is
# emptied. Clients choose the names of LoRAs, and must not fill the memory with names
MAX_REMEMBERED = 1000
_Key = tuple[int, str, str]  # number of the device, residency (a model with one set of load options), LoRA


class LoraLoads:
    """Loads LoRAs into loaded models, and lists them in `ModelState.loras`. The adapter may unload a listed LoRA."""

    def __init__(self, links: AdapterLinks) -> None:
        self._links = links
        self._loads: dict[_Key, asyncio.Task[None]] = {}
        self._failures: dict[_Key, tuple[float, ErrorInfo]] = {}

    async def ensure(self, hosted: ModelState, name: str, *, in_turn: bool = False) -> None:
        """Load a LoRA if needed. With `in_turn`, the caller holds `lora_lock`, and waits without a limit. Raises
        LoraLoadFailed, ModelLoading, AdapterGone; without `in_turn`, LoraLoading after HOLD_S seconds.
        """
        if name in hosted.loras:
            return
        if in_turn:
            await self._request_lora(hosted, name)
            return
        failed_s, failure = self._failures.get((hosted.device, hosted.name, name), (0.0, None))
        if failure is not None and time.monotonic() - failed_s < COOL_DOWN_S:
            raise SIEError.from_info(failure)
        load = self._load_of(hosted, name)
        done, _ = await asyncio.wait([load], timeout=HOLD_S)
        if not done:
            shown = name[:200]
            raise LoraLoading(f"the LoRA {shown} is being loaded", extras={"lora_id": shown, "lora": shown})
        load.result()

    async def preload(self, hosted: ModelState) -> None:
        """Load the LoRAs of the model's profiles one by one, and log failures. For COOL_DOWN_S seconds after a
        LoraLoadFailed, requests for the LoRA get the same error.
        """
        for name in named(hosted.resolved):
            try:
                await asyncio.shield(self._load_of(hosted, name))
            except (SIEError, AdapterGone) as error:
                _logger.warning(
                    "a LoRA of a profile of %s could not be loaded: %s",
                    hosted.name,
                    error,
                    extra={"model": hosted.name},
                )

    async def stop(self) -> None:
        """Cancel the running loads. This also cancels the callers that wait for a load."""
        await cancel_all(self._loads.values())

    def _load_of(self, hosted: ModelState, name: str) -> asyncio.Task[None]:
        key = (hosted.device, hosted.name, name)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = asyncio.create_task(self._load(hosted, name), name="lora")
            # retrieve the exception, so that asyncio does not log it when no caller waits for this load any more
            load.add_done_callback(lambda task: task.cancelled() or task.exception())
        return load

    async def _load(self, hosted: ModelState, name: str) -> None:
        key = (hosted.device, hosted.name, name)
        try:
            async with hosted.lora_lock:
                pass
            await self._request_lora(hosted, name)
        except LoraLoadFailed as error:
            if len(self._failures) >= MAX_REMEMBERED:
                self._failures.clear()
            self._failures[key] = (time.monotonic(), error.info())
            raise
        finally:
            del self._loads[key]

    async def _request_lora(self, hosted: ModelState, name: str) -> None:
        digest = await self._links[hosted.device].ensure_lora(ipc.EnsureLora(hosted.name, name))
        if len(hosted.lora_digests) >= MAX_REMEMBERED:
            hosted.reset_loras()
        hosted.loras.add(name)
        hosted.lora_digests[name] = digest


def named(resolved: Resolved) -> list[str]:
    """Return the names of the LoRAs in all profiles of the model that share the residency of `resolved`."""
    entry = resolved.entry
    views = [Catalogue.resolve_profile(entry, profile, entry.id) for profile in ("default", *entry.profiles)]
    return list(
        dict.fromkeys(view.run.lora for view in views if view.run.lora and view.residency == resolved.residency)
    )


# seconds for which a model's work waits after a failed load, because the config service may restore an earlier revision
RESTORED_S = 10.0
_logger = logging.getLogger("sie.sidecar.loading")


class Loading:
    """Loads models for work items and operators, and unloads models for operators. `work` runs the loads that no caller
    waits for. `on_unloaded` is called with the id of a model that was unloaded.
    """

    def __init__(
        self,
        feed: CatalogueFeed,
        links: AdapterLinks,
        models: WorkerModels,
        inventory: Inventory,
        work: Tasks,
        on_unloaded: Callable[[str], None],
    ) -> None:
        self._feed = feed
        # resolved profiles of the models in `_catalogue`, by model and profile
        self._catalogue = feed.catalogue
        self._resolved: dict[tuple[str, str], Resolved] = {}
        self._links = links
        self.models = models
        self._inventory = inventory
        self.loras = LoraLoads(links)
        self._work = work
        self._on_unloaded = on_unloaded

    def revision(self, model: str) -> int:
        """Return the revision of the model in this worker's catalogue; 0 if the catalogue lacks the model."""
        return self._feed.catalogue.revisions.get(model, 0)

    async def renewed(self, item: WorkItem, within_s: float) -> None:
        """Wait at most `within_s` seconds for a catalogue with the item's model at the gateway's revision or later."""
        await self._feed.renewed(
            lambda catalogue: catalogue.revisions.get(item.model, 0) >= item.config_revision, max(0.0, within_s)
        )

    def find(self, item: WorkItem) -> ModelState | None:
        """Choose a device for the item. Return the model's state there; None if the catalogue lacks the item's
        revision.
        """
        catalogue = self._feed.catalogue
        if catalogue is not self._catalogue:
            self._catalogue = catalogue
            self._resolved.clear()
        entry, revision = catalogue.entries.get(item.model), catalogue.revisions.get(item.model, 0)
        if entry is None or entry.revision != item.revision or revision < item.config_revision:
            return None
        resolved = self._resolved.get((item.model, item.profile))
        if resolved is None:
            resolved = catalogue.resolve_profile(entry, item.profile, item.model)
            self._resolved[item.model, item.profile] = resolved
        return self.models.obtain(resolved, revision)

    async def restored(self, item: WorkItem, hosted: ModelState) -> bool:
        """Wait until the config service has replaced the catalogue entry that could not be loaded, for example by the
        entry before it. Return True if the catalogue then has a later revision of the model. Wait only if an earlier
        entry of the model was loaded here, and at most until RESTORED_S seconds after the failed load.
        """
        left_s = hosted.failed_s + RESTORED_S - time.monotonic()
        if hosted.refusal(time.monotonic()) is None or not 0 < hosted.loaded_revision < hosted.revision or left_s <= 0:
            return False
        refused = hosted.revision
        return await self._feed.renewed(lambda catalogue: catalogue.revisions.get(item.model, 0) > refused, left_s)

    def ahead(self, names: Iterable[str], *, for_work: bool = False) -> None:
        """Load these models (names or model:profile) in the background. Failures are logged. `for_work`: work waits for
        the models; if not, do not load a model while an operator's request to unload it is carried out.
        """
        for name in names:
            # an unknown model is ignored: this worker's catalogue may be older or newer than the gateway's
            with contextlib.suppress(ModelNotFound, BundleConflict):
                resolved = self._feed.catalogue.resolve(name)
                self._work.start(self._obtain_and_load(resolved, for_work=for_work), "load ahead")

    def copy(self, hosted: ModelState) -> None:
        if self._is_leaving(hosted.name):
            return
        _logger.info(
            "%s is also being loaded on device %d, because the devices that have loaded it are busy",
            hosted.name,
            hosted.device,
            extra={"model": hosted.name},
        )
        self._work.start(self._load(hosted), "load of a copy")

    def _is_leaving(self, name: str) -> bool:
        """Return True while an operator's request to unload the model is carried out on a device."""
        return any(state.leaves for state in self.models.find(name))

    async def _obtain_and_load(self, resolved: Resolved, *, for_work: bool) -> None:
        # `obtain` chooses a device also by the models that are being loaded there. A load counts only once its task has
        # begun, so `obtain` is called in this task and not by `ahead`, which starts all tasks first.
        hosted = self.models.obtain(resolved, self.revision(resolved.entry.id))
        if for_work or not self._is_leaving(hosted.name):
            await self._load(hosted)

    async def _load(self, hosted: ModelState) -> None:
        try:
            await self.models.device_of(hosted).ensure(hosted)
        except (SIEError, AdapterGone) as error:  # only logged, because no caller waits; later work gets the error
            _logger.warning(
                "the load of %s on device %d, for which no request waits, failed: %s",
                hosted.name,
                hosted.device,
                error,
                extra={"model": hosted.name},
            )

    async def ensure(
        self, hosted: ModelState, flights: Sequence[InFlight], *, past_gate: bool = False, in_turn: bool = False
    ) -> None:
        """Load the model and the LoRA of these work items if needed. Return early if all items were settled meanwhile.
        `in_turn`: the caller holds the lock `ModelState.lora_lock`. Raises SIEError; with `past_gate` also AdapterGone.

        If the device's adapter is lost, or if the load fails there but may succeed on another device, move the items to
        another device and try again. While no adapter is connected, wait for one. The attempts end at the last deadline
        of the items, so that an input that crashes every adapter does not run for ever.

        `past_gate`: the items have left the queue, and run even if the model is closed to new work. They stay on their
        device: raise AdapterGone instead of moving them, and the caller queues them again. If the device's adapter was
        lost, first wait AWAY_S seconds for its next adapter.
        """
        began_s = time.monotonic()
        try:
            await self._ensure(hosted, flights, past_gate=past_gate, in_turn=in_turn)
        finally:
            for flight in flights:
                flight.waited_for_load(time.monotonic() - began_s)

    async def _ensure(self, hosted: ModelState, flights: Sequence[InFlight], *, past_gate: bool, in_turn: bool) -> None:
        lora, items = flights[0].item.options.lora, functools.partial(unsettled, flights)
        until_s = max(flight.deadline_s for flight in flights)
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self.models.device_of(hosted).ensure(hosted, items, past_gate=past_gate)
                if not items():
                    return
                if lora:
                    await self.loras.ensure(hosted, lora, in_turn=in_turn)
            except TimeoutError:
                break
            except AdapterGone:
                link = self._links[hosted.device]
                if self._links.connected and not link.connected:
                    if not past_gate:
                        hosted = self.moved(hosted, flights)
                    elif not await link.is_back():
                        raise
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_s - time.monotonic()):
                        await (link.wait_connected() if past_gate else self._links.wait_connected())
            except ModelLoadFailed as error:
                chosen = self.models.obtain(hosted.resolved, hosted.revision)
                # if the load failed on the chosen device too, no connected device can load the model now: only a device
                # whose adapter was lost and comes back could load it
                if chosen.refusal(time.monotonic()) is not None:
                    if error.extras.get("permanent") or not await self._is_another_back():
                        raise
                elif past_gate:
                    raise AdapterGone(f"{hosted.name} was not loaded on device {hosted.device}") from error
                else:
                    hosted = self._move(flights, chosen)
            except ModelLoading:  # the model was evicted before its LoRA was loaded
                hosted.mark_unloaded()
            else:
                if hosted.state == "loaded":  # if the model was evicted meanwhile, the loop loads it again
                    return
        raise GatewayTimeout("the time limit of the request passed before its model was loaded")

    async def _is_another_back(self) -> bool:
        """Wait until AWAY_S seconds after the loss of the adapters. Return True as soon as an adapter is connected."""
        waits = [asyncio.create_task(link.is_back()) for link in self._links if not link.connected]
        try:
            for wait in asyncio.as_completed(waits):
                if await wait:
                    return True
            return False
        finally:
            await cancel_all(waits)

    def moved(self, hosted: ModelState, flights: Sequence[InFlight]) -> ModelState:
        """Assign these work items to a newly chosen device. Return the state of their model on the chosen device."""
        return self._move(flights, self.models.obtain(hosted.resolved, hosted.revision))

    def _move(self, flights: Sequence[InFlight], chosen: ModelState) -> ModelState:
        for flight in flights:
            if flight.hosted is not None:
                self._inventory.move(flight, chosen)
        return chosen

    def park(self, flight: InFlight) -> Callable[[], None]:
        """Allow the eviction of the model of a waiting work item. Return a function that forbids the eviction again.
        The caller must call this function before the item runs.
        """
        assert flight.hosted is not None
        count = functools.partial(unsettled, [flight])
        self.models.device_of(flight.hosted).park(flight.hosted, count)
        return functools.partial(flight.hosted.before_gate.remove, count)

    async def on_residency(self, message: CoreMessage) -> None:
        """Load or unload a model, as an operator requested. There is no reply: heartbeats report the state."""
        try:
            request = messages.decode_residency(message.data)
        except UNDECODABLE as error:
            _logger.error("a request to load or unload a model was ignored, because it could not be decoded: %s", error)
            return
        states = self.models.find(request.model)
        if request.action == "load":
            for hosted in states:
                hosted.retain()
            self.ahead([request.model])
            return
        for hosted in states:
            if hosted.state in ("loading", "loaded"):
                self._work.start(self._unload(hosted), "unload")

    async def _unload(self, hosted: ModelState) -> None:
        try:
            if await self.models.device_of(hosted).unload_when_idle(hosted):
                _logger.info("%s was unloaded at the request of an operator", hosted.name, extra={"model": hosted.name})
                self._on_unloaded(hosted.resolved.entry.id)
        except (AdapterGone, SIEError) as error:
            _logger.warning("%s could not be unloaded: %s", hosted.name, error, extra={"model": hosted.name})
