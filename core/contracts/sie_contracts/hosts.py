"""Order the workers of a lane (pool, machine profile and bundle) for the choice of a model's hosts. A host is a worker
that should load the model.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

UNLIMITED = 1 << 30  # value of `HostWorker.slots` for a worker that may load any number of models
_LOAD_STEPS = 10  # `HostWorker.use` is compared in tenths, so that small differences do not decide
_NEAR = 16  # number of workers on a ring among which a model chooses its host; see `Order`
# order of workers: first those with a free slot, then by planned use in tenths, then by number of models
Key = tuple[bool, int, int]


@dataclass(frozen=True)
class Holdings:
    """Models of one live worker. `refused`: models that the worker did not load, because they exceed its memory."""

    loaded: frozenset[str] = frozenset()
    loading: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()

    def has(self, model: str) -> bool:
        return model in self.loaded or model in self.loading

    @property
    def kinds(self) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
        return self.loaded, self.loading, self.refused


@dataclass(slots=True, eq=False)
class HostWorker:
    name: str
    index: int  # index of the worker in the arrays of `models.layout`
    lot: int  # hash of the name
    holdings: Holdings
    slots: int  # number of models that fit into the worker's memory at the same time
    models: set[str] = field(default_factory=set)
    use: float = 0.0  # share of the worker's time, from 0 to 1, that the models planned for it need

    @property
    def free(self) -> int:
        """Return the number of free slots; negative if the worker has more models than slots."""
        return self.slots - len(self.models)

    @property
    def key(self) -> Key:
        return (self.free <= 0, int(self.use * _LOAD_STEPS + 1e-6), len(self.models))


class Order:
    """Order in which a model chooses its hosts among workers that have not loaded the model. The order is by `Key`:
    first workers with a free slot, then by planned use, then by number of models.

    Workers with equal keys are on a ring, ordered by a hash of their names. Among the next _NEAR workers after the
    model's hash (consistent hashing), the model chooses the one with the smallest hash of worker and model (rendezvous
    hashing). So different models prefer different workers, the preference hardly changes when a worker joins or leaves,
    and the models of a lost worker move to different workers.
    """

    def __init__(self, workers: Iterable[HostWorker]) -> None:
        self._rings: dict[Key, list[tuple[int, str]]] = {}
        self._keys: dict[str, Key] = {}
        for worker in workers:
            key = self._keys[worker.name] = worker.key
            self._rings.setdefault(key, []).append((worker.lot, worker.name))
        for ring in self._rings.values():
            ring.sort()
        self._sorted = sorted(self._rings)

    def moved(self, worker: HostWorker) -> None:
        """Move the worker to its new position, after its slots, use or number of models have changed."""
        before, key, entry = self._keys[worker.name], worker.key, (worker.lot, worker.name)
        if key == before:
            return
        ring = self._rings[before]
        ring.pop(bisect.bisect_left(ring, entry))
        if not ring:
            del self._rings[before]
            self._sorted.pop(bisect.bisect_left(self._sorted, before))
        self._keys[worker.name] = key
        if key in self._rings:
            bisect.insort(self._rings[key], entry)
        else:
            self._rings[key] = [entry]
            bisect.insort(self._sorted, key)

    def first(self, lot: int, excluded: set[str], *, only_free: bool) -> tuple[Key, str] | None:
        """Return the key and the name of the worker that a model with the hash `lot` chooses; None if no worker is
        left. Skip the workers in `excluded`, and with `only_free` the workers without a free slot.
        """
        for key in self._sorted:
            if only_free and key[0]:
                return None
            ring = self._rings[key]
            start = bisect.bisect_left(ring, (lot, ""))
            behind = (ring[position % len(ring)] for position in range(start, start + len(ring)))
            near = list(itertools.islice((entry for entry in behind if entry[1] not in excluded), _NEAR))
            if near:
                return key, min(near, key=lambda entry: pair(lot, entry[0]))[1]
        return None


def pair(lot: int, second_lot: int) -> int:
    """Return a hash of two hashes (Fibonacci hashing)."""
    return (lot ^ second_lot) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


def lot_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
