"""The pools that work can be routed to: this installation's own, and reservations, which come and go over `/v1/pools`.

    POST, renew, DELETE ──pool_rules──► PoolRecord, compare-and-set ──watch──► every gateway: routes, Pool objects
                                            ▲
    PoolReconciler: streams; the leader of the gateways: expiry, removal, assignments ──► sidecars ask any gateway

A reservation has a stream of its own. It ends at once for everybody by the broker's clock: requests that wait for it
fail with POOL_NOT_FOUND, then its stream goes. Its name is free again when that is done.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

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

REMOVED_WITHIN_S = 5.0  # a call waits for the end of an earlier pool of its name
_RESERVATIONS, _ASSIGNED = "reservations", "assigned"


def _decode(entry: Entry) -> Reservations | Assigned:
    value = entry.value or b""
    return records.decode_assigned(value) if entry.key == _ASSIGNED else records.decode_reservations(value)


class PoolRecord(Collection[str]):
    """The names of all pools that are there now: `own`, of this installation, and the reservations whose lease has not
    ended. `woken` is set at each change.

    Reservations and assignments of workers are two keys of the bucket `sie_pools`.

    Every gateway follows both. Any gateway changes the reservations by compare-and-set; the leader of the gateways
    writes the assignments. A bucket that was lost with its broker took all reservations with it: their requests fail,
    and their workers return to their own pools.
    """

    def __init__(self, settings: Settings, broker: Store, clock: BrokerClock) -> None:
        self.own = frozenset({topology.DEFAULT_POOL, settings.pool})
        self.reservations = Reservations()
        self.assigned = Assigned()
        self.woken = asyncio.Event()
        self._clock = clock
        self._reservations_revision = self._assigned_revision = 0
        self._changed = asyncio.Event()  # another one after each change of the reservations
        self._is_read = False
        bucket = RecordBucket(
            broker, topology.POOLS_BUCKET, storage=settings.stream_storage, replicas=settings.stream_replicas
        )
        self._record = Record(bucket, _decode, self._on_value, on_lost=self._on_lost)
        broker.on_reconnect(self._on_reconnect)

    @property
    def is_stale(self) -> bool:
        """The bucket may have been lost: `follow` has to be called."""
        return self._record.is_stale

    async def follow(self) -> None:
        """Read the bucket and follow it; made if it is not there. May be called again. Raises BrokerError."""
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
        """Raises NotReady before the bucket was read."""
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
        """The reservations whose lease has not ended, by name."""
        now_s = self._clock.now_s()
        return {
            name: reservation for name, reservation in self.reservations.pools.items() if now_s < reservation.expires_s
        }

    def reservation(self, name: str) -> Reservation | None:
        """A reservation whose lease has not ended."""
        reservation = self.reservations.pools.get(name)
        return reservation if reservation is not None and self._clock.now_s() < reservation.expires_s else None

    def is_reservation(self, name: str) -> bool:
        return self.reservation(name) is not None

    def spec(self, name: str) -> ReservationSpec | None:
        """Specification of a reservation; None for any other name."""
        reservation = self.reservation(name)
        return reservation.spec if reservation is not None else None

    def workers(self) -> Mapping[str, str]:
        """The reservation of each worker that has one."""
        live = self.live()
        return {worker: pool for worker, pool in self.assigned.workers.items() if pool in live}

    async def change(self, make: Callable[[Reservations], Reservations]) -> Reservations:
        """Write what `make` returns for the present reservations; it may be called again. Raises NotReady, BrokerError,
        QueueUnavailable after too many races, and what `make` raises.
        """

        def changed(before: Reservations | Assigned | None) -> Reservations | None:
            present = before if isinstance(before, Reservations) else Reservations()
            after = make(present)
            if after == present:
                return None
            failpoint("gateway.before_pool_write")
            return after

        self.require_read()
        try:
            stored = await self._record.change(_RESERVATIONS, changed)
        except WrongRevision as error:
            raise QueueUnavailable("too many changes of pools at once") from error
        return stored if isinstance(stored, Reservations) else Reservations()

    async def assign(self, workers: dict[str, str]) -> bool:
        """Write the assignments over those that are known here. False, and they are read again, where another gateway
        was first. Raises BrokerError.
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
        """Wait until nothing of an earlier reservation of this name is left. Raises QueueUnavailable."""
        try:
            async with asyncio.timeout(REMOVED_WITHIN_S):
                while name in self.reservations.ended or (
                    name in self.reservations.pools and self.reservation(name) is None
                ):
                    await self._changed.wait()
        except TimeoutError:
            raise QueueUnavailable(f"an earlier pool {name!r} is still being removed") from None


class PoolDirectory:
    """Operations of clients on pools, and the pools that they see. May be called by any task."""

    def __init__(
        self, record: PoolRecord, fleet: Fleet, queue: WorkQueue, clock: BrokerClock, metrics: Metrics
    ) -> None:
        self.record = record
        self._fleet = fleet
        self._queue = queue
        self._clock = clock
        self._metrics = metrics

    # ---- what clients do

    async def create(self, spec: ReservationSpec, grant: Grant) -> Reservation:
        """Make a reservation and its stream, or give one of the same owner this spec and a new lease.

        Raises PoolConflict for a name that is no reservation, or of another key; PoolOperationForbidden over a limit,
        QueueUnavailable, BrokerError.
        """
        name = spec.name
        if name in self.record.own or name in self._physical():
            raise pool_rules.exists(name, self.pool(name, grant))
        await self.record.until_removed(name)
        now_s = self._clock.now_s()
        is_new = False

        def make(record: Reservations) -> Reservations:
            nonlocal is_new
            is_new = name not in record.pools
            return pool_rules.created(record, spec, grant, now_s)

        record = await self.record.change(make)
        self._count("created" if is_new else "renewed")
        failpoint("gateway.pool_recorded")
        try:
            await self._queue.ensure_pool(name)
        except BrokerError as error:
            if is_new:
                await self._undo(name, removes=not isinstance(error, TopologyMismatch))
            if isinstance(error, TopologyMismatch):
                raise PoolConflict(f"name: the broker has a queue of another pool {name!r}", param="name") from error
            raise
        return record.pools[name]

    async def _undo(self, name: str, *, removes: bool) -> None:
        """Take back a reservation that got no stream. What fails here ends with its lease."""
        ended_s = self._clock.now_s() if removes else None
        with contextlib.suppress(BrokerError):
            await self.record.change(lambda record: pool_rules.without(record, name, ended_s))

    async def renew(self, name: str, grant: Grant) -> Reservation | None:
        """Begin its lease anew. None for a pool that needs none. Raises PoolNotFound, BrokerError."""
        if name in self.record.own:
            return None
        record = await self.record.change(lambda record: pool_rules.renewed(record, name, grant, self._clock.now_s()))
        self._count("renewed")
        return record.pools[name]

    async def delete(self, name: str, grant: Grant) -> None:
        """End a reservation. Raises PoolNotFound, PoolOperationForbidden for a pool that is none, BrokerError."""
        if name in self.record.own:
            raise PoolOperationForbidden(f"the pool {pool_rules.shown(name)!r} is no reservation and cannot be deleted")
        await self.record.change(lambda record: pool_rules.deleted(record, name, grant, self._clock.now_s()))
        self._count("deleted")
        with contextlib.suppress(QueueUnavailable):  # it is gone for everybody, only its stream is not yet
            await self.record.until_removed(name)

    # ---- what is told of them

    def assigned(self, worker: str) -> tuple[str, ...]:
        """The pools that a worker is to serve. Raises InvalidInput, PoolNotFound, NotReady before the record is
        known.
        """
        self.record.require_read()
        return assignments.assigned(worker, [beat for beat, _ in self._fleet.workers()], self.record.workers())

    def pinned(self, pools: Iterable[str]) -> list[str]:
        """The models that workers of these pools load before anybody asks for them."""
        return [model for pool in pools if (spec := self.record.spec(pool)) is not None for model in spec.pinned_models]

    def serving(self, name: str) -> list[Heartbeat]:
        """The healthy workers that serve a pool."""
        reserved = self.record.workers()
        own = name in self.record.own
        return [
            beat for beat in self._fleet.healthy() if beat.pool == name and (own or reserved.get(beat.worker) == name)
        ]

    def is_active(self, reservation: Reservation) -> bool:
        """Whether every count is met by healthy workers that serve it."""
        return assignments.is_met(
            reservation.spec, map(AssignableWorker.from_heartbeat, self.serving(reservation.spec.name))
        )

    def visible(self, grant: Grant) -> Callable[[str], bool]:
        """Names of the pools that a credential may read: those of the installation, and those that it reserved."""
        if not grant.key or "admin" in grant.scopes:
            return lambda name: True
        own = self.record.own | self._physical() | {""}  # a worker that has not said where it belongs
        own |= {name for name, reservation in self.record.reservations.pools.items() if grant.owns(reservation.owner)}
        return own.__contains__

    def pool(self, name: str, grant: Grant) -> api.Pool:
        """The Pool object of a name. Raises PoolNotFound, also for a reservation of somebody else."""
        present = self.record.reservation(name)
        if present is not None:
            if not grant.owns(present.owner):
                raise not_found(name)
            return self._pool_of(present)
        if name not in self.record.own and name not in self._physical():
            raise not_found(name)
        return pool_rules.own_pool(name, [beat for beat in self._fleet.healthy() if beat.pool == name])

    def _pool_of(self, reservation: Reservation) -> api.Pool:
        name, reserved = reservation.spec.name, self.record.workers()
        workers = [beat for beat, _ in self._fleet.workers() if reserved.get(beat.worker) == name]
        return pool_rules.reserved_pool(reservation, workers, self.pending_reason(name))

    def pending_reason(self, name: str) -> str:
        """Why a reservation is not active. Empty for one that is, and for any other pool."""
        reservation = self.record.reservation(name)
        if reservation is None or self.is_active(reservation):
            return ""
        if self._is_held_back(reservation):
            return HELD_BACK
        assigned = self.record.assigned.workers
        held = [
            AssignableWorker.from_heartbeat(beat) for beat in self._fleet.healthy() if assigned.get(beat.worker) == name
        ]
        return ON_THEIR_WAY if assignments.is_met(reservation.spec, held) else TOO_FEW

    def _is_held_back(self, reservation: Reservation) -> bool:
        default = topology.pool_name("default")
        workers = {
            beat.worker: AssignableWorker.from_heartbeat(beat)
            for beat in self._fleet.healthy()
            if beat.own_pool == default
        }
        return assignments.is_held_back(reservation, workers, self.record.assigned.workers)

    def _physical(self) -> set[str]:
        """The pools that workers belong to."""
        return {beat.own_pool or beat.pool for beat, _ in self._fleet.workers()} - self.record.reservations.pools.keys()

    def pools(self, grant: Grant) -> list[api.Pool]:
        """The Pool objects that a credential may see: the default pool, others that are no reservation, then its
        reservations by name.
        """
        live = self.record.live()
        own = (self.record.own | self._physical()) - live.keys()
        reserved = sorted(name for name, reservation in live.items() if grant.owns(reservation.owner))
        return [self.pool(name, grant) for name in (*sorted(own), *reserved)]

    def reserved(self) -> Counter[tuple[str, str, str]]:
        """The workers that reservations ask for, by reservation, machine profile and bundle."""
        beats = {beat.worker: beat for beat, _ in self._fleet.workers()}
        gpus: dict[str, int] = {}
        for beat in beats.values():
            gpus[beat.machine_profile] = max(gpus.get(beat.machine_profile, 1), beat.gpu_count)
        held: dict[str, list[AssignableWorker]] = {}
        for worker, pool in self.record.workers().items():
            if worker in beats:
                held.setdefault(pool, []).append(AssignableWorker.from_heartbeat(beats[worker]))
        counts: Counter[tuple[str, str, str]] = Counter()
        for name, reservation in self.record.live().items():
            for (profile, bundle), count in assignments.requested_workers(
                reservation.spec, held.get(name, []), gpus
            ).items():
                counts[name, profile, bundle] += count
            if self._is_held_back(reservation):  # it comes when there is one more
                counts[name, min(reservation.spec.gpus), reservation.spec.bundle or assignments.DEFAULT_BUNDLE] += 1
        return counts

    def pending(self) -> set[tuple[str, str, str]]:
        """Part of `reserved` that belongs to reservations that are not active."""
        active = {name for name, reservation in self.record.live().items() if self.is_active(reservation)}
        return {reservation for reservation in self.reserved() if reservation[0] not in active}

    def _count(self, event: str, count: int = 1) -> None:
        self._metrics.pool_events.labels(event).inc(count)
