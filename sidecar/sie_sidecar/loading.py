"""Models and LoRAs that work items need: found in the catalogue, loaded before they run, or ahead of any work."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence

from sie_contracts.errors import BundleConflict, GatewayTimeout, ModelLoading, ModelNotFound, SIEError
from sie_contracts.messages import WorkItem
from sie_runtime.feed import CatalogueFeed
from sie_runtime.process import Tasks
from sie_sidecar.hosting import Hosting
from sie_sidecar.in_flight import InFlight, unsettled
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.loras import Loras
from sie_sidecar.models import Hosted

RESTORED_S = 10.0  # for the config service to make the revision before a failed one the newest
_logger = logging.getLogger("sie.sidecar.loading")


class Loading:
    """What loads for work. `work` keeps the loads that nobody waits for."""

    def __init__(
        self,
        feed: CatalogueFeed,
        link: AdapterLink,
        hosting: Hosting,
        loras: Loras,
        work: Tasks,
        clock: Callable[[], float],
    ) -> None:
        self._feed = feed
        self._link = link
        self.hosting = hosting
        self.loras = loras
        self._work = work
        self._clock = clock

    def revision(self, model: str) -> int:
        """Of this model in this worker's catalogue, 0: it has none."""
        return self._feed.catalogue.revisions.get(model, 0)

    async def renewed(self, item: WorkItem, within_s: float) -> None:
        """Return when this worker's catalogue has the model of `item` as its gateway knew it, or after `within_s`."""
        await self._feed.renewed(
            lambda catalogue: catalogue.revisions.get(item.model, 0) >= item.config_revision, max(0.0, within_s)
        )

    def find(self, item: WorkItem) -> Hosted | None:
        """The residency for this work, or None if this worker's catalogue does not know that revision of the model."""
        entry = self._feed.catalogue.entries.get(item.model)
        if entry is None or entry.revision != item.revision or self.revision(item.model) < item.config_revision:
            return None
        resolved = self._feed.catalogue.resolve_profile(entry, item.profile, item.model)
        return self.hosting.of(resolved, self.revision(item.model))

    async def restored(self, item: WorkItem, hosted: Hosted) -> bool:
        """Whether the config service replaced the revision that `hosted` cannot load. Waits for that until RESTORED_S
        after the failed load, where the worker had an earlier revision loaded.
        """
        left_s = hosted.failed_s + RESTORED_S - self._clock()
        if hosted.refusal(self._clock()) is None or not 0 < hosted.loaded_revision < hosted.revision or left_s <= 0:
            return False
        refused = hosted.revision
        return await self._feed.renewed(lambda catalogue: catalogue.revisions.get(item.model, 0) > refused, left_s)

    def ahead(self, names: Iterable[str]) -> None:
        """Load these, each a model or model:profile, beside everything else, before work needs them; what cannot be
        loaded is told in the log.
        """
        for name in names:
            with contextlib.suppress(
                ModelNotFound, BundleConflict
            ):  # this worker's catalogue lags, or another one's did
                resolved = self._feed.catalogue.resolve(name)
                hosted = self.hosting.of(resolved, self.revision(resolved.entry.id))
                self._work.start(self._load(hosted), "load ahead")

    async def _load(self, hosted: Hosted) -> None:
        try:
            await self.hosting.ensure(hosted)
        except (SIEError, AdapterGone) as error:  # nobody waits for it; work that comes is answered with the reason
            _logger.warning("%s could not be loaded ahead: %s", hosted.name, error, extra={"model": hosted.name})

    async def ensure(
        self, hosted: Hosted, flights: Sequence[InFlight], *, past_gate: bool = False, in_turn: bool = False
    ) -> None:
        """Return when the model of these work items and their LoRA are loaded, or none of them is left to run.

        As Hosting.ensure, over any number of adapters, until the last of their deadlines: an input that kills every
        adapter must not run for ever, nor keep its place while a load does not end. `in_turn`: they have the turn of
        their LoRA. Raises SIEError.
        """
        began_s = self._clock()
        try:
            await self._ensure(hosted, flights, past_gate=past_gate, in_turn=in_turn)
        finally:
            for flight in flights:
                flight.waited_for_load(self._clock() - began_s)

    async def _ensure(self, hosted: Hosted, flights: Sequence[InFlight], *, past_gate: bool, in_turn: bool) -> None:
        lora, items = flights[0].item.options.lora, functools.partial(unsettled, flights)
        until_s = max(flight.deadline_s for flight in flights)
        while (left_s := until_s - self._clock()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self.hosting.ensure(hosted, items, past_gate=past_gate)
                if not items():
                    return
                if lora:
                    await self.loras.ensure(hosted, lora, in_turn=in_turn)
            except TimeoutError:
                break
            except AdapterGone:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_s - self._clock()):
                        await self._link.wait_connected()
            except ModelLoading:  # evicted before its LoRA came
                hosted.unload()
            else:
                if hosted.state == "loaded":  # else it was evicted while its LoRA was loaded
                    return
        raise GatewayTimeout("the budget of the request was over before its model was loaded")

    def park(self, flight: InFlight) -> Callable[[], None]:
        """Its model may be evicted until it is its turn. Returns what to call then."""
        assert flight.hosted is not None
        count = functools.partial(unsettled, [flight])
        self.hosting.park(flight.hosted, count)
        return functools.partial(self.hosting.unpark, flight.hosted, count)
