"""Choice of a device for a model in a worker with several devices. No I/O and no clock: facts about the devices are
arguments.

    work of a model ──► loaded on some devices ──► of these, the device with the least work
                   ├──► being loaded on a device ──► this device
                   └──► loaded nowhere ──► a device with free memory, or with the least recently used model

    for some seconds, work waits on every device with its model, and another device is free ──► load there too
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MEMORY_STEPS = 8  # free memory is compared in eighths of the usable memory; smaller differences are ignored
# number of successive calls of `SecondCopies.check` (one per second) in which a model's work must be waiting before the
# model is loaded on one more device
CHECKS_BEHIND = 3


@dataclass(frozen=True)
class DeviceView:
    """Facts about one device, by which `choose` selects the device of one model.

    `loaded`: the model is loaded and accepts work. `coming`: the model is being loaded here, a caller waits for its
    load, or it is loaded but closed to new work. `refused`: the model's load failed here, and must not be tried again
    yet. `gives_up`: the load failed with an error class in `models.PERMANENT`. `held_cost`: tokens of the work for this
    device. `models`: number of models that are loaded or being loaded. `size_bytes`: memory of the model, 0 if unknown.
    `idle_since_s`: time of the last use of the model that would be evicted first; infinite if no model may be evicted.
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
        return self.free_bytes >= max(1, self.size_bytes)


def choose(views: Sequence[DeviceView]) -> int:
    """Return the number of the device on which new work of a model should run. `views`: facts about each device."""
    numbers = [number for number, view in enumerate(views) if view.connected] or list(range(len(views)))
    for able in (
        [number for number in numbers if views[number].loaded],
        [number for number in numbers if views[number].coming],
        # Choose a device on which the load failed with a permanent error class, so that the work gets the stored error.
        # The load would probably fail on the other devices too.
        [number for number in numbers if views[number].gives_up],
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
    """Decides which models are loaded on one more device: models whose work waits while another device is idle."""

    def __init__(self) -> None:
        # residency -> number of checks in a row in which its work waited and another device was free
        self._behind: dict[str, int] = {}

    def check(self, behind: Mapping[str, Sequence[DeviceView]]) -> dict[str, int]:
        """Return the residencies to load on one more device, each with the number of this device. `behind`: residencies
        whose work waits on all devices that have loaded them, each with the view of every device.
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
