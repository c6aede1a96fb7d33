"""LoRAs at the adapter: one load however many wait for it, a hold that is shorter than that of a model, failures that
are remembered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sie_contracts import ipc
from sie_contracts.catalogue import Catalogue, Resolved
from sie_contracts.errors import ErrorInfo, LoraLoadFailed, LoraLoading, SIEError
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.models import Hosted

HOLD_S = 5.0
COOL_DOWN_S = 30.0
MAX_REMEMBERED = 1000  # clients choose the names
_Key = tuple[str, str]
_logger = logging.getLogger("sie.sidecar.loras")


class Loras:
    """Loads LoRAs for models that are loaded. `Hosted.loras` are those that the adapter has, less what it has dropped
    and not yet told.
    """

    def __init__(self, link: AdapterLink, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._loads: dict[_Key, asyncio.Task[None]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._failures: dict[_Key, tuple[float, ErrorInfo]] = {}

    def turn(self, hosted: Hosted) -> asyncio.Lock:
        """Held by a batch whose LoRA was dropped while it waited, until it has run: no other LoRA of this model begins
        to load meanwhile.

        Without it, requests for more LoRAs than the adapter keeps would drop each other's for ever.
        """
        return self._turns.setdefault(hosted.name, asyncio.Lock())

    async def ensure(self, hosted: Hosted, name: str, *, in_turn: bool = False) -> None:
        """Return when `name` is loaded for a loaded model. Raises LoraLoading after HOLD_S, LoraLoadFailed,
        ModelLoading, AdapterGone.
        """
        if name in hosted.loras:
            return
        if in_turn:
            await self._ask(hosted, name)
            return
        failed_s, failure = self._failures.get((hosted.name, name), (0.0, None))
        if failure is not None and self._clock() - failed_s < COOL_DOWN_S:
            raise SIEError.from_info(failure)
        load = self._load_of(hosted, name)
        done, _ = await asyncio.wait([load], timeout=HOLD_S)
        if not done:
            shown = name[:200]
            raise LoraLoading(f"the LoRA {shown} is being loaded", extras={"lora_id": shown, "lora": shown})
        load.result()

    async def preload(self, hosted: Hosted) -> None:
        """Load what the profiles of a loaded model name, one after the other. What fails is logged; who asks for it is
        told why.
        """
        for name in named(hosted.resolved):
            try:
                await asyncio.shield(self._load_of(hosted, name))
            except (SIEError, AdapterGone) as error:
                _logger.warning("a profile of %s names a LoRA: %s", hosted.name, error, extra={"model": hosted.name})

    async def stop(self) -> None:
        """End the loads that are under way; whoever waits for one is cancelled with it."""
        loads = list(self._loads.values())
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    def _load_of(self, hosted: Hosted, name: str) -> asyncio.Task[None]:
        key = (hosted.name, name)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = asyncio.create_task(self._load(hosted, name), name="lora")
            # its waiters may have gone by then
            load.add_done_callback(lambda task: task.cancelled() or task.exception())
        return load

    async def _load(self, hosted: Hosted, name: str) -> None:
        key = (hosted.name, name)
        try:
            async with self.turn(hosted):
                pass
            await self._ask(hosted, name)
        except LoraLoadFailed as error:
            if len(self._failures) >= MAX_REMEMBERED:
                self._failures.clear()
            self._failures[key] = (self._clock(), error.info())
            raise
        finally:
            del self._loads[key]

    async def _ask(self, hosted: Hosted, name: str) -> None:
        digest = await self._link.ensure_lora(ipc.EnsureLora(hosted.name, name))
        if len(hosted.lora_digests) >= MAX_REMEMBERED:
            hosted.forget_loras()
        hosted.loras.add(name)
        hosted.lora_digests[name] = digest


def named(resolved: Resolved) -> list[str]:
    """The LoRAs of the profiles that this loaded copy of the weights serves."""
    entry = resolved.entry
    views = [Catalogue.resolve_profile(entry, profile, entry.id) for profile in ("default", *entry.profiles)]
    return list(
        dict.fromkeys(view.run.lora for view in views if view.run.lora and view.residency == resolved.residency)
    )
