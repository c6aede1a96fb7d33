"""What towers made of images, kept so that an image that comes again is not read again.

    images ─┬─► kept ─────────────────────────────────────────────────────────────┐
            ├─► another thread reads it now ──► wait ─────────────────────────────┼──► an output for each image
            └─► each distinct one is read once ──► kept; what is unused longest goes ┘

Images with equal keys (`packing.Shown`) have equal outputs. All towers of a process share one bound in bytes. Outputs
stay on the device, where they count like everything else. They go with their tower, and all go where memory is short.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from sie_adapter.packed.packing import Shown
from sie_contracts.wire.device_reports import TowerUse

# Of the device's memory: a sixty-fourth of 80 GB holds twenty pages of Qwen3-VL 8B, each of 60 MB.
SHARE = 64
# Where memory was short, outputs that are kept again at once would only be dropped again, after a pass that failed.
PAUSE_S = 60.0

Output = tuple[Tensor, ...]  # of one image
Read = Callable[[Sequence[Shown]], Sequence[Output]]


class _CachedOutput(NamedTuple):
    """`is_finite`: bool [], on the device: to look at once what it says would be to wait for the tower. `use`: the
    number of its last use.
    """

    output: Output
    is_finite: Tensor
    use: int


class TowerOutputs:
    """Those of all towers of a process, at most `max_bytes`; 0 keeps none. Every method may be called from any thread.

    `hits`: images that were not read because their output was there, or another thread made it; `misses`: images that
    were. One lock guards all state. It is never held while a tower runs.
    """

    def __init__(self, max_bytes: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self.hits = self.misses = 0
        self._clock = clock
        self._lock = threading.Lock()
        self._towers: weakref.WeakSet[OutputsOfTower] = weakref.WeakSet()
        self._uses = itertools.count()
        self._paused_until_s = 0.0

    def of_tower(self) -> OutputsOfTower:
        """Those of a tower that is loaded now."""
        tower = OutputsOfTower(self, self._lock)
        with self._lock:
            self._towers.add(tower)
        return tower

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return self._held_bytes()

    def use(self) -> TowerUse:
        with self._lock:
            return TowerUse(self.hits, self.misses, self._held_bytes())

    def clear(self) -> bool:
        """Drop all outputs because memory is short, and keep none for PAUSE_S. Returns whether there were any."""
        with self._lock:
            self._paused_until_s = self._clock() + PAUSE_S
            towers = [tower for tower in self._towers if tower.nbytes]
            for tower in towers:
                tower.drop_all()
            return bool(towers)

    def keeps(self, nbytes: int) -> bool:
        """Whether an output of so many bytes would be kept now."""
        return nbytes <= self.max_bytes and self._clock() >= self._paused_until_s

    # the rest is for `OutputsOfTower`, which holds the lock

    def number(self) -> int:
        """Of a use."""
        return next(self._uses)

    def fit(self) -> None:
        """Drop what was not used for longest while there is too much."""
        while self._held_bytes() > self.max_bytes:
            min((tower for tower in self._towers if tower.nbytes), key=OutputsOfTower.oldest_use).drop_oldest()

    def count(self, hits: int, misses: int) -> None:
        self.hits += hits
        self.misses += misses

    def _held_bytes(self) -> int:
        return sum(tower.nbytes for tower in self._towers)


class OutputsOfTower:
    """The outputs of one tower. Whoever runs the tower owns this: they are gone with it. `nbytes`: what they take."""

    def __init__(self, shared: TowerOutputs, lock: threading.Lock) -> None:
        self.nbytes = 0
        self._shared = shared
        self._lock = lock
        self._cached: OrderedDict[Hashable, _CachedOutput] = OrderedDict()  # the least recently used one first
        self._reading: dict[Hashable, Future[Output | None]] = {}

    def for_images(self, images: Sequence[Shown], read: Read) -> list[Output]:
        """The output of each image; nobody may write to it. `read` gives those of distinct images that are not kept.
        Raises what `read` raises.
        """
        names = [_name(image, place) for place, image in enumerate(images)]
        images_by_name = dict(zip(names, images, strict=True))
        outputs: dict[Hashable, Output] = {}
        misses = 0
        while missing := [name for name in images_by_name if name not in outputs]:
            cached, elsewhere, own = self._looked_up(missing)
            for name, entry in cached.items():
                if bool(entry.is_finite):
                    outputs[name] = entry.output
                else:  # a mate's overflow may be what was seen: the image is read again
                    self._discard(name, entry)
            misses += len(own)
            outputs.update(self._read_missing({name: images_by_name[name] for name in own}, read))
            for name, reading in elsewhere.items():
                output = reading.result()
                if output is not None:
                    outputs[name] = output
        with self._lock:
            self._shared.count(len(images) - misses, misses)
        return [outputs[name] for name in names]

    def _looked_up(
        self, names: Sequence[Hashable]
    ) -> tuple[dict[Hashable, _CachedOutput], dict[Hashable, Future[Output | None]], list[Hashable]]:
        """Those that are kept, those that another thread reads, and those that this one is to read now."""
        cached: dict[Hashable, _CachedOutput] = {}
        elsewhere: dict[Hashable, Future[Output | None]] = {}
        own: list[Hashable] = []
        with self._lock:
            for name in names:
                if name in self._cached:
                    cached[name] = self._cached[name] = self._cached[name]._replace(use=self._shared.number())
                    self._cached.move_to_end(name)
                elif name in self._reading:
                    elsewhere[name] = self._reading[name]
                else:
                    own.append(name)
                    if _is_key(name):
                        self._reading[name] = Future()
        return cached, elsewhere, own

    def _read_missing(self, images: Mapping[Hashable, Shown], read: Read) -> dict[Hashable, Output]:
        """Read, and kept as far as there is room. Those who wait hear of it, also if it fails: they read then."""
        outputs: dict[Hashable, Output] = {}
        try:
            if images:
                for name, output in zip(images, read(list(images.values())), strict=True):
                    outputs[name] = self._keep(name, output) if _is_key(name) else output
        finally:
            with self._lock:
                ended = {name: self._reading.pop(name) for name in images if _is_key(name)}
            for name, reading in ended.items():
                reading.set_result(outputs.get(name))
        return outputs

    def _keep(self, name: Hashable, output: Output) -> Output:
        if not self._shared.keeps(_bytes_of(output)):
            return output
        # a part of a larger tensor would keep all of that
        own = tuple(
            tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone() for tensor in output
        )
        is_finite = torch.stack([torch.isfinite(tensor).all() for tensor in own]).all()
        with self._lock:
            self._cached[name] = _CachedOutput(own, is_finite, self._shared.number())
            self.nbytes += _bytes_of(own)
            self._shared.fit()
        return own

    def _discard(self, name: Hashable, entry: _CachedOutput) -> None:
        with self._lock:
            now = self._cached.get(name)
            if now is not None and now.output is entry.output:
                del self._cached[name]
                self.nbytes -= _bytes_of(entry.output)

    # under the lock, for `TowerOutputs`

    def oldest_use(self) -> int:
        """Of the output that was not used for longest; there is one."""
        return next(iter(self._cached.values())).use

    def drop_oldest(self) -> None:
        _, entry = self._cached.popitem(last=False)
        self.nbytes -= _bytes_of(entry.output)

    def drop_all(self) -> None:
        self._cached.clear()
        self.nbytes = 0


def _name(image: Shown, place: int) -> Hashable:
    """What tells an image from the others: its key, with all else that a tower may look at; its place without one."""
    return (image.key, image.height, image.width) if image.key else place


def _is_key(name: Hashable) -> bool:
    return isinstance(name, tuple)


def _bytes_of(output: Output) -> int:
    return sum(tensor.nbytes for tensor in output)
