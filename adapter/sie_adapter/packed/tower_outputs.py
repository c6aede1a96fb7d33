"""Cache of the outputs of towers (image encoders), so that a tower does not read a repeated image again.

    images ─┬─► cached ──────────────────────────────────────────────────────────┐
            ├─► another thread encodes it now ──► wait ──────────────────────────┼──► an output for each image
            └─► new: encoded once ──► cached; the least recently used is dropped ┘

Images with equal keys and sizes (`packing.Shown`) have equal outputs. All towers of a process share one limit in bytes.
Outputs stay on the device and count as used memory. All outputs are dropped if memory is short. The outputs of a tower
are freed together with the tower.
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

# the cache may use 1 / SHARE of the device's memory: 1 / 64 of 80 GB fits twenty pages of Qwen3-VL 8B, each of 60 MB
SHARE = 64
# seconds without caching after memory was short: new outputs would use the memory up again, and another pass would fail
PAUSE_S = 60.0

Output = tuple[Tensor, ...]  # output of an image encoder for one image
Read = Callable[[Sequence[Shown]], Sequence[Output]]


class _CachedOutput(NamedTuple):
    """Cached output of an image encoder for one image. `is_finite`: whether all values are finite, bool [] on the
    device; the host reads it only at the next use, to avoid a wait for the encoder. `use`: number of the last use,
    from `TowerOutputs.number`.
    """

    output: Output
    is_finite: Tensor
    use: int


class TowerOutputs:
    """Cache for the outputs of all image encoders of a process, at most `max_bytes`; 0 disables the cache. Thread-safe:
    one lock, which is never held while an encoder runs. `hits`: images whose output was cached, was computed by another
    thread, or belongs to an equal image of the same call. `misses`: images that were encoded.
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
        """Return a new, empty cache for one tower. All towers share the limit `max_bytes`."""
        tower = OutputsOfTower(self, self._lock)
        with self._lock:
            self._towers.add(tower)
        return tower

    def use(self) -> TowerUse:
        with self._lock:
            return TowerUse(self.hits, self.misses, self._held_bytes())

    def clear(self) -> bool:
        """Drop all outputs because memory is short; cache none for PAUSE_S seconds. Return whether any was dropped."""
        with self._lock:
            self._paused_until_s = self._clock() + PAUSE_S
            towers = [tower for tower in self._towers if tower.nbytes]
            for tower in towers:
                tower.drop_all()
            return bool(towers)

    def keeps(self, nbytes: int) -> bool:
        return nbytes <= self.max_bytes and self._clock() >= self._paused_until_s

    # `OutputsOfTower` calls the methods below while it holds the lock

    def number(self) -> int:
        """Return the next number of the counter that orders all uses of outputs."""
        return next(self._uses)

    def fit(self) -> None:
        """Drop the least recently used outputs until the others need at most `max_bytes`."""
        while self._held_bytes() > self.max_bytes:
            min((tower for tower in self._towers if tower.nbytes), key=OutputsOfTower.oldest_use).drop_oldest()

    def count(self, hits: int, misses: int) -> None:
        self.hits += hits
        self.misses += misses

    def _held_bytes(self) -> int:
        return sum(tower.nbytes for tower in self._towers)


class OutputsOfTower:
    """Cached outputs of one tower, `nbytes` bytes. The model owns this object: freeing the model frees the outputs."""

    def __init__(self, shared: TowerOutputs, lock: threading.Lock) -> None:
        self.nbytes = 0
        self._shared = shared
        self._lock = lock
        # key of an image -> its output; the least recently used is first
        self._cached: OrderedDict[Hashable, _CachedOutput] = OrderedDict()
        self._reading: dict[Hashable, Future[Output | None]] = {}

    def for_images(self, images: Sequence[Shown], read: Read) -> list[Output]:
        """Return the output of each image; callers must not modify the outputs. `read` computes outputs that are not
        cached. Raises the errors of `read`.
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
                else:
                    # read the image again: another image in the same pass may have caused values that are not finite
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
        """Return the cached outputs, the outputs that another thread computes now, and the names of the images that
        this thread must read.
        """
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
        """Compute the outputs of images, and cache outputs that are not too large. If the computation fails, wake the
        threads that wait for these outputs: the threads then compute the outputs themselves.
        """
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
        # a view is copied, because a view would keep the whole tensor behind it in memory
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

    # `TowerOutputs` calls the methods below while it holds the lock

    def oldest_use(self) -> int:
        """Return the lowest `_CachedOutput.use` in the cache. Do not call this for an empty cache."""
        return next(iter(self._cached.values())).use

    def drop_oldest(self) -> None:
        _, entry = self._cached.popitem(last=False)
        self.nbytes -= _bytes_of(entry.output)

    def drop_all(self) -> None:
        self._cached.clear()
        self.nbytes = 0


def _name(image: Shown, place: int) -> Hashable:
    """Return the name under which an image's output is cached: key, height and width. An image without a key is not
    cached; its name is its position in the batch.
    """
    return (image.key, image.height, image.width) if image.key else place


def _is_key(name: Hashable) -> bool:
    return isinstance(name, tuple)


def _bytes_of(output: Output) -> int:
    return sum(tensor.nbytes for tensor in output)
