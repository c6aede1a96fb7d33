"""LoRAs at the adapter: one load however many wait for it, a hold that is shorter than that of a model, failures that are remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sie_contracts import ipc
from sie_contracts.errors import LoraLoading, SIEError
from sie_sidecar.hosting import Hosted
from sie_sidecar.link import AdapterLink

HOLD_S = 5.0
COOL_DOWN_S = 30.0
MOST_REMEMBERED = 1000  # clients choose the names
_Key = tuple[str, str]


class Loras:
    """Which LoRAs the adapter has, as far as this worker asked for them. The adapter may drop one: it then says so, and is asked again."""

    def __init__(self, link: AdapterLink, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock
        self._loads: dict[_Key, asyncio.Task[None]] = {}
        self._failures: dict[_Key, tuple[float, SIEError]] = {}

    async def ensure(self, hosted: Hosted, name: str) -> None:
        """Return when `name` is loaded for a loaded model. Raises LoraLoading after HOLD_S, LoraLoadFailed, AdapterGone."""
        key = (hosted.name, name)
        failed_s, error = self._failures.get(key, (0.0, None))
        if error is not None and self._clock() - failed_s < COOL_DOWN_S:
            raise SIEError.from_info(error.info())
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = asyncio.create_task(self._load(key), name=f"lora:{name}")
            load.add_done_callback(lambda task: task.cancelled() or task.exception())  # its waiters may have gone by then
        done, _ = await asyncio.wait([load], timeout=HOLD_S)
        if not done:
            raise LoraLoading(f"the LoRA {name[:200]} is being loaded", extras={"lora_id": name, "lora": name})
        load.result()

    async def _load(self, key: _Key) -> None:
        try:
            await self._link.ensure_lora(ipc.EnsureLora(*key))
        except SIEError as error:
            if len(self._failures) >= MOST_REMEMBERED:
                self._failures.clear()
            self._failures[key] = (self._clock(), error)
            raise
        finally:
            del self._loads[key]
