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

MEMORY_STEPS = 8  # differences of free memory below this part of a device do not decide
CHECKS_BEHIND = 3  # checks in a row, a second apart, after which a model gets a copy on a second device


@dataclass(frozen=True)
class DeviceView:
    """One device, as the choice for a model sees it.

    `loaded`, `coming`: the model takes work there, or it is being loaded or closed for another load. `refused`: its
    load failed there and may not be tried yet; `gives_up`: that failure stands until the entry changes. `models`:
    number of models that are loaded or coming. `size_bytes`: memory of the model, 0 if not known. `idle_since_s`: time
    of the last use of the model that would be evicted first, infinite if none may be.
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
        """True if the model fits beside the models that are loaded."""
        return self.free_bytes >= max(1, self.size_bytes)


def choose(views: Sequence[DeviceView]) -> int:
    """Return the number of the device that should run new work of a model."""
    numbers = [number for number, view in enumerate(views) if view.connected] or list(range(len(views)))
    for able in (
        [number for number in numbers if views[number].loaded],
        [number for number in numbers if views[number].coming],
        [number for number in numbers if views[number].gives_up],  # another device would fail with it as well
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
    """Models that one device cannot keep up with, while another device idles."""

    def __init__(self) -> None:
        self._behind: dict[str, int] = {}  # by residency, checks in a row that found it behind

    def check(self, behind: Mapping[str, Sequence[DeviceView]]) -> dict[str, int]:
        """Return the models to load on one more device, with its number. Called once a second with the models whose
        work waits on each device that has them.
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
