"""Choice of a device for a model: pure functions of how a worker's devices are loaded. A worker with one device has no
choice, and enters nothing here.

    work of a model ──► loaded on some devices ──► the one with the least work
                   ├──► being loaded ──► there
                   └──► nowhere ──► where memory is free, else where the least recently used model may go
    one device is behind with it for seconds, another one idles and has room ──► a second copy there
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MEMORY_STEPS = 8  # number of steps in which the free memory of devices is compared; smaller differences are ignored
# number of checks in a row, one per second, after which a model that is behind gets a copy on another device
CHECKS_BEHIND = 3


@dataclass(frozen=True)
class DeviceView:
    """Properties of one device that decide whether a model is loaded on it.

    `loaded`: the model is loaded and open to work on the device. `coming`: it is being loaded, or closed for another
    load. `refused`: its load failed on the device and may not be tried again yet; `gives_up`: its load is not tried
    again until the entry changes. `models`: number of models that are loaded or coming. `size_bytes`: memory of the
    model, 0 if not known. `idle_since_s`: time of the last use of the model that would be evicted first, infinite if
    none may be.
    """

    connected: bool
    loaded: bool = False
    coming: bool = False
    refused: bool = False
    gives_up: bool = False
    held_cost: int = 0
    models: int = 0
    size_bytes: int = 0
    free_bytes: float = 0.0
    usable_bytes: float = 0.0
    idle_since_s: float = math.inf

    @property
    def fits(self) -> bool:
        """True if the model fits on the device in addition to the loaded models."""
        return self.free_bytes >= max(1, self.size_bytes)


def choose(views: Sequence[DeviceView]) -> int:
    """Return the number of the device that should run new work of a model."""
    numbers = [number for number, view in enumerate(views) if view.connected] or list(range(len(views)))
    for able in (
        [number for number in numbers if views[number].loaded],
        [number for number in numbers if views[number].coming],
        [number for number in numbers if views[number].gives_up],  # the load would probably fail on another device too
    ):
        if able:
            return min(able, key=lambda number: (views[number].held_cost, number))
    able = [number for number in numbers if not views[number].refused] or numbers
    return min(able, key=lambda number: (*_load_order(views[number]), number))


def _load_order(view: DeviceView) -> tuple[bool, float, float, int]:
    if not view.fits:
        return True, view.idle_since_s, 0.0, view.held_cost
    return False, -round(MEMORY_STEPS * view.free_bytes / max(1.0, view.usable_bytes)), view.models, view.held_cost


class SecondCopies:
    """Models whose work is too much for their devices while another device is idle."""

    def __init__(self) -> None:
        self._behind: dict[str, int] = {}  # by residency, number of checks in a row in which it was behind

    def check(self, behind: Mapping[str, Sequence[DeviceView]]) -> dict[str, int]:
        """Return the models that must be loaded on one more device, each with the number of this device. Called once a
        second with the models whose work waits on every device that has the model.
        """
        copies = {}
        counts = {}
        for name, views in behind.items():
            spare = [
                number
                for number, view in enumerate(views)
                if view.connected and not (view.loaded or view.coming or view.refused or view.held_cost) and view.fits
            ]
            if not spare:
                continue
            counts[name] = self._behind.get(name, 0) + 1
            if counts[name] >= CHECKS_BEHIND:
                copies[name] = min(spare, key=lambda number: (*_load_order(views[number]), number))
                del counts[name]
        self._behind = counts
        return copies
