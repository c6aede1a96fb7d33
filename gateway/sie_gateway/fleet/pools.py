"""Pools to which work can be routed: the pools of this installation, and reservations, which are pools that clients
create and delete with `/v1/pools`.

    POST, renew, DELETE ──pool_rules──► PoolRecord ──watch──► every gateway: routes, Pool objects, streams
    PoolReconciler of the leader ──────────►┘ writes the ends of leases, removals and the pools of workers

The sidecar of a worker requests the worker's pool from a gateway. A reservation has its own stream. All gateways end a
reservation at the same time of the broker's clock. Unfinished requests to the reservation then fail with
POOL_NOT_FOUND. After the leading gateway has removed the stream, a client may use the name again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from sie_broker import BrokerError, Entry, Store, TopologyMismatch, Write, WrongRevision
from sie_broker.record import Record, RecordBucket
from sie_contracts.api import operations as api
from sie_contracts.errors import NotReady, PoolConflict, PoolOperationForbidden, QueueUnavailable
from sie_contracts.settings import Settings
from sie_contracts.wire import messages, records, topology
from sie_contracts.wire.heartbeats import Heartbeat
from sie_contracts.wire.records import Assigned, Reservation, Reservations, ReservationSpec
from sie_gateway.admission.grant import Grant
from sie_gateway.fleet import assignments, pool_rules
from sie_gateway.fleet.assignments import AssignableWorker
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.fleet.pool_rules import HELD_BACK, ON_THEIR_WAY, TOO_FEW, not_found
from sie_gateway.metrics import Metrics
from sie_gateway.streams.publish import WorkQueue
from sie_runtime.clock import BrokerClock
from sie_runtime.failpoints import failpoint

REMOVED_WITHIN_S = 5.0  # seconds for which a call waits until the stream of an earlier pool of this name is removed
_RESERVATIONS, _ASSIGNED = topology.RESERVATIONS_KEY, "assigned"


def _decode(entry: Entry) -> Reservations | Assigned:
    value = entry.value or b""
    return records.decode_assigned(value) if entry.key == _ASSIGNED else records.decode_reservations(value)


class PoolRecord(Collection[str]):
    """Names of all pools that exist now: the pools in the gateway's settings (`own`), and the reservations whose lease
    has not ended. The record sets `woken` at each change.

    The bucket `sie_pools` has two keys: the reservations, which any gateway changes by compare-and-set, and the
    assignments of workers, which only the leader writes. Every gateway watches both keys. If the broker loses the
    bucket, all reservations end: their requests fail, and each of their workers returns to the pool in its settings.
    """

    def __init__(self, settings: Settings, broker: Store, clock: BrokerClock) -> None:
        self.main = settings.pool  # pool of requests that name none; reservations take their workers from it
        self.own = frozenset({topology.DEFAULT_POOL, self.main})
        self.reservations = Reservations()
        self.assigned = Assigned()
        self.woken = asyncio.Event()
        self._clock = clock
        self._reservations_revision = self._assigned_revision = 0
        self._changed = asyncio.Event()  # set at each change of the reservations, then replaced by a new event
        self._is_read = False
        bucket = RecordBucket(
            broker, topology.POOLS_BUCKET, storage=settings.stream_storage, replicas=settings.stream_replicas
        )
        self._record = Record(bucket, _decode, self._on_value, on_lost=self._on_lost)
        broker.on_reconnect(self._on_reconnect)

    @property
    def is_stale(self) -> bool:
        """Return True if the broker may have lost the bucket. The caller must then call `follow`."""
        return self._record.is_stale

    async def follow(self) -> None:
        """Create the bucket if it is missing, read it and watch it. Repeated calls are allowed. Raises BrokerError."""
        await self._record.follow()
        self._is_read = True
        self.woken.set()

    async def _on_reconnect(self) -> None:
        await self._record.reconnected()
        self.woken.set()

    def _on_lost(self) -> None:
        self.reservations, self.assigned = Reservations(), Assigned()
        self._reservations_revision = self._assigned_revision = 0

    def _on_value(self, key: str, value: Reservations | Assigned | None, revision: int) -> None:
        if key == _RESERVATIONS and revision > self._reservations_revision:
            self.reservations = value if isinstance(value, Reservations) else Reservations()
            self._reservations_revision = revision
            self._changed.set()
            self._changed = asyncio.Event()
        elif key == _ASSIGNED and revision > self._assigned_revision:
            self.assigned = value if isinstance(value, Assigned) else Assigned()
            self._assigned_revision = revision
        self.woken.set()

    def require_read(self) -> None:
        """Raise NotReady until the bucket has been read."""
        if not self._is_read:
            raise NotReady("the pools have not been read from the broker yet")

    def __contains__(self, name: object) -> bool:
        return name in self.own or (isinstance(name, str) and self.reservation(name) is not None)

    def __iter__(self) -> Iterator[str]:
        yield from sorted(self.own)
        yield from sorted(self.live())

    def __len__(self) -> int:
        return len(self.own) + len(self.live())

    def live(self) -> dict[str, Reservation]:
        """Return the reservations whose lease has not ended, by name."""
        now_s = self._clock.now_s()
        return {
            name: reservation for name, reservation in self.reservations.pools.items() if now_s < reservation.expires_s
        }

    def reservation(self, name: str) -> Reservation | None:
        """Return the reservation with this name; None if there is none, or if its lease has ended."""
        reservation = self.reservations.pools.get(name)
        return reservation if reservation is not None and self._clock.now_s() < reservation.expires_s else None

    def is_reservation(self, name: str) -> bool:
        return self.reservation(name) is not None

    def spec(self, name: str) -> ReservationSpec | None:
        """Return the spec of a reservation; None for any other name."""
        reservation = self.reservation(name)
        return reservation.spec if reservation is not None else None

    def workers(self) -> Mapping[str, str]:
        """Return worker id -> name of its live reservation."""
        live = self.live()
        return {worker: pool for worker, pool in self.assigned.workers.items() if pool in live}

    async def change(self, make: Callable[[Reservations], Reservations]) -> Reservations:
        """Replace the reservations by the result of `make`, and return the new reservations. After a conflict with
        another gateway, call `make` again with the newer reservations. Raises NotReady, BrokerError, and the errors of
        `make`.
        """

        def changed(before: Reservations | Assigned | None) -> Reservations | None:
            present = before if isinstance(before, Reservations) else Reservations()
            after = make(present)
            if after == present:
                return None
            failpoint("gateway.before_pool_write")
            return after

        self.require_read()
        stored = await self._record.change(_RESERVATIONS, changed)
        return stored if isinstance(stored, Reservations) else Reservations()

    async def assign(self, workers: dict[str, str]) -> bool:
        """Replace the stored assignments by `workers` (worker -> pool) and return True. If another gateway has changed
        the assignments since the last read, read them again and return False. Raises BrokerError.
        """
        write = Write(_ASSIGNED, messages.encode(Assigned(workers)), self._assigned_revision)
        try:
            revision = await self._record.bucket.write([write])
        except WrongRevision:
            self.assigned, self._assigned_revision = Assigned(), 0
            await self._record.refresh(_ASSIGNED)
            return False
        if revision > self._assigned_revision:
            self.assigned, self._assigned_revision = Assigned(workers), revision
        return True

    async def until_removed(self, name: str) -> None:
        """Wait until the stream of an ended reservation is removed. Raises QueueUnavailable after REMOVED_WITHIN_S."""
        try:
            async with asyncio.timeout(REMOVED_WITHIN_S):
                while name in self.reservations.ended or (
                    name in self.reservations.pools and self.reservation(name) is None
                ):
                    await self._changed.wait()
        except TimeoutError:
            raise QueueUnavailable(f"an earlier pool {name!r} is still being removed: try again") from None


@dataclass(eq=False)
class PoolDirectory:
    """Operations of clients on pools, and the pools that a client may see."""

    record: PoolRecord
    fleet: Fleet
    queue: WorkQueue
    clock: BrokerClock
    metrics: Metrics

    async def create(self, spec: ReservationSpec, grant: Grant) -> Reservation:
        """Create a reservation and its stream. If the key already has a reservation of this name, replace its spec and
        renew its lease.

        Raises PoolConflict if the name belongs to a pool that is not a reservation, to a reservation of another key, or
        to a stream with other settings. Raises PoolOperationForbidden over a limit, NotReady, QueueUnavailable,
        BrokerError.
        """
        name = spec.name
        if name in self.record.own or name in self._worker_pools():
            message = f"name: a pool {pool_rules.shown(name)!r} exists and is no reservation"
            pool = msgspec.to_builtins(self.pool(name, grant))
            raise PoolConflict(message, param="name", extras={"pool": pool})
        await self.record.until_removed(name)
        now_s = self.clock.now_s()
        is_new = False

        def make(record: Reservations) -> Reservations:
            nonlocal is_new
            is_new = name not in record.pools
            return pool_rules.created(record, spec, grant, now_s)

        record = await self.record.change(make)
        self._count("created" if is_new else "renewed")
        failpoint("gateway.pool_recorded")
        try:
            await self.queue.ensure_pool(name)
        except BrokerError as error:
            if is_new:
                await self._undo(name, removes=not isinstance(error, TopologyMismatch))
            if isinstance(error, TopologyMismatch):
                raise PoolConflict(f"name: the stream of {name!r} exists with other settings", param="name") from error
            raise
        return record.pools[name]

    async def _undo(self, name: str, *, removes: bool) -> None:
        """Remove a reservation whose stream could not be created. If the removal fails, the reservation ends with its
        lease. `removes`: also remove the stream, which may exist in spite of the error.
        """
        ended_s = self.clock.now_s() if removes else None
        with contextlib.suppress(BrokerError):
            await self.record.change(lambda record: pool_rules.without(record, name, ended_s))

    async def renew(self, name: str, grant: Grant) -> Reservation | None:
        """Renew the lease of a reservation. Returns None for a pool in the settings of a gateway or worker: such a pool
        has no lease. Raises PoolNotFound, BrokerError.
        """
        if self._has_no_lease(name):
            return None
        record = await self.record.change(lambda record: pool_rules.renewed(record, name, grant, self.clock.now_s()))
        self._count("renewed")
        return record.pools[name]

    async def delete(self, name: str, grant: Grant) -> None:
        """End a reservation. Raises PoolNotFound, BrokerError; PoolOperationForbidden for any other pool."""
        if self._has_no_lease(name):
            raise PoolOperationForbidden(f"the pool {pool_rules.shown(name)!r} is no reservation and cannot be deleted")
        await self.record.change(lambda record: pool_rules.deleted(record, name, grant, self.clock.now_s()))
        self._count("deleted")
        with contextlib.suppress(QueueUnavailable):  # the reservation has ended; the leader removes its stream later
            await self.record.until_removed(name)

    def assigned(self, worker: str) -> tuple[str, ...]:
        """Return the pools that a worker must serve. Raises InvalidInput, PoolNotFound, NotReady."""
        self.record.require_read()
        return assignments.assigned(worker, [beat for beat, _ in self.fleet.workers()], self.record.workers())

    def pinned(self, pools: Iterable[str]) -> list[str]:
        """Return the pinned models of `pools`: the workers of a pool load them before the first request."""
        return [model for pool in pools if (spec := self.record.spec(pool)) is not None for model in spec.pinned_models]

    def serving(self, name: str) -> list[Heartbeat]:
        reserved = self.record.workers()
        own = name in self.record.own
        return [
            beat for beat in self.fleet.healthy() if beat.pool == name and (own or reserved.get(beat.worker) == name)
        ]

    def is_active(self, reservation: Reservation) -> bool:
        """Return True if a reservation has as many healthy GPUs and workers as it requests."""
        return assignments.is_met(
            reservation.spec, map(AssignableWorker.from_heartbeat, self.serving(reservation.spec.name))
        )

    def visible(self, grant: Grant) -> Callable[[str], bool]:
        """Return a function that returns True for the name of a pool that a credential may read. A credential without
        the scope `admin` may read its own reservations, and the pools in the settings of gateways and workers.
        """
        if not grant.key or "admin" in grant.scopes:
            return lambda name: True
        # "" is the pool of a worker that has not reported its pool; every credential may see it
        own = self.record.own | self._worker_pools() | {""}
        own |= {name for name, reservation in self.record.reservations.pools.items() if grant.owns(reservation.owner)}
        return own.__contains__

    def pool(self, name: str, grant: Grant) -> api.Pool:
        """Return the Pool object with this name. Raises PoolNotFound, also for a reservation of another key."""
        present = self.record.reservation(name)
        if present is not None:
            if not grant.owns(present.owner):
                raise not_found(name)
            reserved = self.record.workers()
            workers = [beat for beat, _ in self.fleet.workers() if reserved.get(beat.worker) == name]
            return pool_rules.reserved_pool(present, workers, self.pending_reason(name))
        if not self._has_no_lease(name):
            raise not_found(name)
        return pool_rules.own_pool(name, [beat for beat in self.fleet.healthy() if beat.pool == name])

    def pending_reason(self, name: str) -> str:
        """Return the reason why a reservation is not active; empty for an active reservation and for other pools."""
        reservation = self.record.reservation(name)
        if reservation is None or self.is_active(reservation):
            return ""
        assigned = self.record.assigned.workers
        if assignments.is_held_back(reservation, self._assignable(), assigned):
            return HELD_BACK
        held = [
            AssignableWorker.from_heartbeat(beat) for beat in self.fleet.healthy() if assigned.get(beat.worker) == name
        ]
        return ON_THEIR_WAY if assignments.is_met(reservation.spec, held) else TOO_FEW

    def _assignable(self) -> dict[str, AssignableWorker]:
        """Return the healthy workers that reservations may take."""
        return {
            beat.worker: AssignableWorker.from_heartbeat(beat)
            for beat in self.fleet.healthy()
            if beat.own_pool == self.record.main
        }

    def _has_no_lease(self, name: str) -> bool:
        """Return True if the pool is in the settings of this gateway or of a worker: it is then not a reservation."""
        return name in self.record.own or name in self._worker_pools()

    def _worker_pools(self) -> set[str]:
        """Return the pools in the settings of the workers that send heartbeats, without the reservations."""
        return {beat.own_pool or beat.pool for beat, _ in self.fleet.workers()} - self.record.reservations.pools.keys()

    def pools(self, grant: Grant) -> list[api.Pool]:
        """Return the Pool objects that a credential may see: the pools without a lease, sorted by name, then the
        credential's reservations, sorted by name.
        """
        live = self.record.live()
        own = (self.record.own | self._worker_pools()) - live.keys()
        reserved = sorted(name for name, reservation in live.items() if grant.owns(reservation.owner))
        return [self.pool(name, grant) for name in (*sorted(own), *reserved)]

    def reserved(self) -> Counter[tuple[str, str, str]]:
        """Return (name of a reservation, machine profile, bundle) -> number of workers that the reservation needs."""
        beats = {beat.worker: beat for beat, _ in self.fleet.workers()}
        gpus: dict[str, int] = {}
        for beat in beats.values():
            gpus[beat.machine_profile] = max(gpus.get(beat.machine_profile, 1), beat.gpu_count)
        held: dict[str, list[AssignableWorker]] = {}
        for worker, pool in self.record.workers().items():
            if worker in beats:
                held.setdefault(pool, []).append(AssignableWorker.from_heartbeat(beats[worker]))
        counts: Counter[tuple[str, str, str]] = Counter()
        assignable, assigned = self._assignable(), self.record.assigned.workers
        for name, reservation in self.record.live().items():
            for (profile, bundle), count in assignments.requested_workers(
                reservation.spec, held.get(name, []), gpus
            ).items():
                counts[name, profile, bundle] += count
            # The reservation needs the last unreserved worker of its bundle, but one worker must stay unreserved. So
            # count one more worker: when it has started, it stays unreserved, and the reservation gets the other.
            if assignments.is_held_back(reservation, assignable, assigned):
                counts[name, min(reservation.spec.gpus), reservation.spec.bundle or assignments.DEFAULT_BUNDLE] += 1
        return counts

    def pending(self) -> set[str]:
        """Return the names of the reservations that are not active yet."""
        return {name for name, reservation in self.record.live().items() if not self.is_active(reservation)}

    def _count(self, event: str, count: int = 1) -> None:
        self.metrics.pool_events.labels(event).inc(count)
