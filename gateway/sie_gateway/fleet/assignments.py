"""Assignment of workers to reservations (pools that a client has created for itself). Pure functions: gateways that
compute from equal inputs write the same result.

reservations, oldest first ──► a reservation keeps its workers ──► a reservation with too few workers gets all missing
workers, or none
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sie_contracts.errors import InvalidInput, PoolNotFound
from sie_contracts.wire.heartbeats import Heartbeat
from sie_contracts.wire.records import Reservation, ReservationSpec

PATH = "/v1/pools/assignments"
DEFAULT_BUNDLE = "default"  # bundle of the workers that are requested for a reservation whose spec names no bundle


@dataclass(frozen=True)
class AssignableWorker:
    """Worker that may be assigned to a reservation. `models`: loaded models. `busy`: tokens of its unfinished work.
    `is_heard`: False if this gateway has received no heartbeat of the worker: the number of its GPUs is then unknown.
    """

    machine_profile: str
    bundle: str
    gpus: int = 1
    models: frozenset[str] = frozenset()
    busy: int = 0
    is_heard: bool = True

    @classmethod
    def from_heartbeat(cls, beat: Heartbeat) -> AssignableWorker:
        loaded = frozenset(status.model for status in beat.models if status.state == "loaded")
        return cls(beat.machine_profile, beat.bundle, max(1, beat.gpu_count), loaded, beat.held_cost)

    def fits(self, spec: ReservationSpec) -> bool:
        return self.machine_profile in spec.gpus and spec.bundle in ("", self.bundle)


def lacking(spec: ReservationSpec, held: Iterable[AssignableWorker]) -> tuple[dict[str, int], int]:
    """Return what a reservation with the workers `held` lacks: (number of missing GPUs by machine profile, number of
    workers that are missing to reach `minimum_worker_count`).
    """
    gpus, count = Counter[str](), 0
    for worker in held:
        gpus[worker.machine_profile] += worker.gpus
        count += 1
    short = {profile: needed - gpus[profile] for profile, needed in spec.gpus.items() if gpus[profile] < needed}
    return short, max(0, spec.minimum_worker_count - count)


def is_met(spec: ReservationSpec, held: Iterable[AssignableWorker]) -> bool:
    """Return True if the workers `held` are what the reservation requests: enough GPUs of each machine profile, and at
    least `minimum_worker_count` workers.
    """
    short, workers = lacking(spec, held)
    return not short and not workers


def assign(
    reservations: Iterable[Reservation], workers: Mapping[str, AssignableWorker], before: Mapping[str, str]
) -> dict[str, str]:
    """Return worker id -> name of the reservation to which the worker is assigned. `before`: the previous result.

    A reservation keeps the workers that match its spec and that it needs. After a client has replaced the spec, the
    reservation may need fewer workers. A reservation that lacks workers gets new workers only when as many workers are
    free as it lacks. So no reservation gets workers that it cannot use yet, and two reservations cannot each take a
    part of the free workers and block each other. The oldest reservation is served first. One worker of each bundle
    stays unreserved, unless a key with the scope `admin` has set the reservation's spec (`takes_last`).
    """
    order = sorted(reservations, key=lambda reservation: (reservation.created_s, reservation.spec.name))
    held: dict[str, Sequence[str]] = {}  # ids of workers by the name of their reservation
    for reservation in order:
        spec = reservation.spec
        retained = [
            name for name, pool in before.items() if pool == spec.name and name in workers and workers[name].fits(spec)
        ]
        held[spec.name] = _needed(spec, retained, workers)
    for reservation in order:
        spec = reservation.spec
        present = [workers[name] for name in held[spec.name]]
        reserved = set(itertools.chain.from_iterable(held.values()))
        addition = _addition(spec, present, workers, reserved, takes_last=reservation.takes_last)
        held[spec.name] = _needed(spec, [*held[spec.name], *addition], workers)
    assigned = {name: pool for pool, names in held.items() for name in names}
    # repeat until nothing changes: a reservation that has a new worker may not need one of its other workers any more
    return assigned if assigned == before else assign(order, workers, assigned)


def is_held_back(
    reservation: Reservation, workers: Mapping[str, AssignableWorker], assigned: Mapping[str, str]
) -> bool:
    """Return True if a reservation lacks workers only because the last worker of a bundle must stay unreserved."""
    held = [workers[name] for name, pool in assigned.items() if pool == reservation.spec.name and name in workers]
    if reservation.takes_last or is_met(reservation.spec, held):
        return False
    with_last = _addition(reservation.spec, held, workers, assigned, takes_last=True)
    return bool(with_last) and not _addition(reservation.spec, held, workers, assigned, takes_last=False)


def _needed(spec: ReservationSpec, names: Sequence[str], workers: Mapping[str, AssignableWorker]) -> Sequence[str]:
    """Return the workers in `names` that the reservation needs; all `names` if the GPUs of a worker are not known."""
    if not all(workers[name].is_heard for name in names):
        return names
    gpus, count = Counter[str](), len(names)
    for name in names:
        gpus[workers[name].machine_profile] += workers[name].gpus
    needed = []
    for name in sorted(names, key=lambda name: _preference(spec, name, workers[name]), reverse=True):
        profile = workers[name].machine_profile
        remaining = gpus[profile] - workers[name].gpus
        if remaining >= spec.gpus[profile] and count > spec.minimum_worker_count:
            gpus[profile], count = remaining, count - 1
        else:
            needed.append(name)
    return needed


def _preference(spec: ReservationSpec, name: str, worker: AssignableWorker) -> tuple[int, int, str]:
    """Return the sort key of a worker for a reservation. Workers that have loaded more of the pinned models come first;
    among workers with the same number of these models, the least busy worker comes first.
    """
    return -len(worker.models.intersection(spec.pinned_models)), worker.busy, name


def _addition(
    spec: ReservationSpec,
    held: Sequence[AssignableWorker],
    workers: Mapping[str, AssignableWorker],
    assigned: Collection[str],
    *,
    takes_last: bool,
) -> list[str]:
    """Return free workers that, together with the workers `held`, meet the spec; empty if too few workers are free, or
    if the number of GPUs of a worker in `held` is unknown.
    """
    if not all(worker.is_heard for worker in held):
        return []
    free = [name for name, worker in workers.items() if name not in assigned and worker.fits(spec)]
    # this check comes before the sort, because it is fast and fails for most pending reservations
    if not is_met(spec, itertools.chain(held, map(workers.__getitem__, free))):
        return []
    short, count = lacking(spec, held)
    free.sort(key=lambda name: _preference(spec, name, workers[name]))
    if not takes_last:
        free = _without_last(free, workers, assigned)
    chosen = []
    for name in free:
        profile = workers[name].machine_profile
        if short.get(profile, 0) > 0:
            short[profile] -= workers[name].gpus
            chosen.append(name)
    more = [name for name in free if name not in chosen][: max(0, count - len(chosen))]
    complete = all(left <= 0 for left in short.values()) and len(chosen) + len(more) >= count
    return [*chosen, *more] if complete else []


def _without_last(free: Sequence[str], workers: Mapping[str, AssignableWorker], assigned: Collection[str]) -> list[str]:
    """Return `free` without the workers that must stay unreserved. If `free` has all unreserved workers of a bundle,
    the last worker of this bundle in `free` must stay unreserved.
    """
    stays = {worker.bundle for name, worker in workers.items() if name not in assigned and name not in free}
    remaining = []
    for name in reversed(free):
        if workers[name].bundle in stays:
            remaining.append(name)
        stays.add(workers[name].bundle)
    return remaining[::-1]


def requested_workers(
    spec: ReservationSpec, held: Sequence[AssignableWorker], gpus_each: Mapping[str, int]
) -> Counter[tuple[str, str]]:
    """Return (machine profile, bundle) -> number of workers of a reservation: those that it has (`held`) and those
    that it still needs. `gpus_each`: machine profile -> GPUs of one worker, 1 for a profile that is not in the map.
    """
    counts = Counter((worker.machine_profile, worker.bundle) for worker in held)
    short, count = lacking(spec, held)
    bundle = spec.bundle or DEFAULT_BUNDLE
    more = {profile: math.ceil(gpus / gpus_each.get(profile, 1)) for profile, gpus in short.items()}
    first = min(spec.gpus)
    more[first] = more.get(first, 0) + max(0, count - sum(more.values()))
    for profile, workers in more.items():
        counts[profile, bundle] += workers
    return +counts


def assigned(worker: str, workers: Iterable[Heartbeat], reserved: Mapping[str, str]) -> tuple[str, ...]:
    """Return the pools that a worker must serve: its reservation, or the pool of its settings if it is not reserved.
    `reserved`: worker -> reservation.

    Raises InvalidInput if `worker` is empty. Raises PoolNotFound for a worker without a heartbeat: the pool of its
    settings is unknown, and an empty result would tell the worker to serve no pool.
    """
    if not worker:
        raise InvalidInput("worker: a worker's id is needed", param="worker")
    if worker in reserved:
        return (reserved[worker],)
    own = next((beat.own_pool or beat.pool for beat in workers if beat.worker == worker), None)
    if own is None:
        raise PoolNotFound(f"no worker {worker[:70]!r} has sent a heartbeat", param="worker")
    return (own,)
