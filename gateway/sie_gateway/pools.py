"""The pools that work can be routed to: this installation's own, and reservations, which come and go over `/v1/pools`.

    POST, renew, DELETE ──compare-and-set──► record in KV ──watch──► every gateway: routes, streams, Pool objects
                                               ▲
    one gateway, by a lease: expiry, removal, assignments ──► KV ──► sidecars ask any

A reservation has a stream of its own. It ends at once for everybody by the broker's clock: requests that wait for it
fail with POOL_NOT_FOUND, then its stream goes. Its name is free again when that is done.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from sie_broker import (
    Broker,
    BrokerError,
    Entry,
    KeyValue,
    Subscription,
    TopologyMismatch,
    Write,
    WrongRevision,
)
from sie_broker.record import Bucket, LeaderLease
from sie_contracts import messages, topology
from sie_contracts.errors import NotReady, PoolConflict, PoolNotFound, PoolOperationForbidden, QueueUnavailable
from sie_contracts.messages import Assigned, Heartbeat, PoolSpec, Reservation, Reservations
from sie_contracts.settings import Settings
from sie_gateway import assignments
from sie_gateway.assignments import Candidate
from sie_gateway.fleet import Fleet
from sie_gateway.inbox import Inbox
from sie_gateway.metrics import Metrics
from sie_gateway.queue import WorkQueue
from sie_runtime.clock import BrokerClock
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Stop, Trouble

MAX_RESERVATIONS = 64
EVERY_S = 1.0
GAP_S = 0.1  # between two looks: heartbeats that come together are one change
RENEW_S, LEASE_S = 2.0, 6.0
# for which a worker whose heartbeats come keeps its place although it is not ready: its adapter may be starting again
UNREADY_S = 30.0
REMOVED_WITHIN_S = 5.0  # a call waits for the end of an earlier pool of its name
HELD_BACK = "it would take the last worker of a bundle that serves everybody, for which the scope admin is needed"
TOO_FEW = "not as many workers are free as it asks for"
ON_THEIR_WAY = "its workers do not serve it yet"
_ATTEMPTS = 16
_RECORD, _ASSIGNED = "reservations", "assigned"
_logger = logging.getLogger("sie.gateway.pools")


class Pools(Collection[str]):
    """The names of all pools that are there now. One task runs `run`; the rest may be called by any."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        fleet: Fleet,
        queue: WorkQueue,
        inbox: Inbox,
        clock: BrokerClock,
        metrics: Metrics,
    ) -> None:
        self.own = frozenset({topology.pool_name("default"), settings.pool})
        self.on_gone: list[Callable[[str], None]] = []  # called with the name of each reservation that has ended
        self._settings = settings
        self._broker = broker
        self._fleet = fleet
        self._queue = queue
        self._inbox = inbox
        self._clock = clock
        self._metrics = metrics
        self._bucket: KeyValue | None = None
        leases = Bucket(
            broker, topology.LEASES_BUCKET, storage=settings.stream_storage, replicas=settings.stream_replicas
        )
        self._lease = LeaderLease(leases, "pools", lease_s=LEASE_S)
        self._is_leader = False
        self._renewed_s = -math.inf
        self._record, self._record_revision = Reservations(), 0
        self._assigned, self._assigned_revision = Assigned(), 0
        self._known: frozenset[str] = frozenset()  # reservations, as of the last look
        self._active: frozenset[str] = frozenset()
        self._unready_s: dict[str, float] = {}
        self._first_s: float | None = None
        self._woken = asyncio.Event()
        self._news = asyncio.Event()
        self._created = ""  # when the broker made the bucket
        self._reopens = False
        self._watch: Subscription | None = None
        fleet.listeners.append(self._on_heartbeat)
        fleet.spec = self.spec
        queue.serves, queue.is_reservation = self.__contains__, lambda name: self.reservation(name) is not None
        broker.on_reconnect(self._on_reconnect)

    # ---- which pools there are

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
        return {name: each for name, each in self._record.pools.items() if now_s < each.expires_s}

    def reservation(self, name: str) -> Reservation | None:
        each = self._record.pools.get(name)
        return each if each is not None and self._clock.now_s() < each.expires_s else None

    def spec(self, name: str) -> PoolSpec | None:
        """What a reservation asks for; None for any other name."""
        each = self.reservation(name)
        return each.spec if each is not None else None

    # ---- what is kept in the broker

    async def start(self) -> None:
        """Open the bucket, making it if it is not there, and learn what it holds. May be called again. Raises
        BrokerError.
        """
        settings = self._settings
        bucket = await self._broker.key_value(
            topology.POOLS_BUCKET, storage=settings.stream_storage, replicas=settings.stream_replicas
        )
        created = (await bucket.epoch()).rpartition(":")[0]
        if created != self._created:  # the first one, or one that was lost and made anew: its revisions begin again
            self._record_revision = self._assigned_revision = 0
            self._record, self._assigned = Reservations(), Assigned()
            for entry in await bucket.entries():
                await self._on_entry(entry)
            if self._watch is not None:
                await self._watch.stop()
            self._watch = await bucket.watch(self._on_entry)
        self._bucket, self._created, self._reopens = bucket, created, False
        self._woken.set()

    async def _on_reconnect(self) -> None:
        self._reopens = self._bucket is not None
        self._woken.set()

    async def _on_entry(self, entry: Entry) -> None:
        try:
            if entry.key == _RECORD and entry.revision > self._record_revision:
                self._take_record(
                    messages.decode_reservations(entry.value) if entry.value else Reservations(), entry.revision
                )
            elif entry.key == _ASSIGNED and entry.revision > self._assigned_revision:
                self._assigned = messages.decode_assigned(entry.value) if entry.value else Assigned()
                self._assigned_revision = entry.revision
        except msgspec.DecodeError as error:
            _logger.error("the record of %s could not be read, the one before stays: %s", entry.key, error)
        self._woken.set()

    def _take_record(self, record: Reservations, revision: int) -> None:
        self._record, self._record_revision = record, revision
        self._news.set()
        self._news = asyncio.Event()
        self._woken.set()

    async def _change(self, make: Callable[[Reservations], Reservations]) -> Reservations:
        """Write what `make` makes of the record as it is, until nobody else was first. Raises BrokerError, and what
        `make` raises.
        """
        if self._bucket is None:
            raise NotReady("the pools have not been read from the broker yet")
        for _ in range(_ATTEMPTS):
            entry = await self._bucket.get(_RECORD)
            before = messages.decode_reservations(entry.value) if entry is not None and entry.value else Reservations()
            revision = entry.revision if entry is not None else 0
            after = make(before)
            if after != before:
                failpoint("gateway.before_pool_write")
                try:
                    revision = await self._bucket.write([Write(_RECORD, messages.encode(after), revision)])
                except WrongRevision:
                    continue
            if revision > self._record_revision:
                self._take_record(after, revision)
            return after
        raise QueueUnavailable("too many changes of pools at once")

    # ---- what clients do

    async def create(self, spec: PoolSpec, *, takes_last: bool = False) -> Reservation:
        """Make a reservation and its stream, or renew one of the same spec. `takes_last` as in `Reservation`.

        Raises PoolConflict with the present pool, PoolOperationForbidden over the limit, QueueUnavailable, BrokerError.
        """
        name = spec.name
        if name in self.own or name in self._physical():
            raise PoolConflict(
                f"name: a pool {shown(name)!r} exists and is no reservation",
                param="name",
                extras={"pool": self.pool(name)},
            )
        await self._until_removed(name)
        now_s = self._clock.now_s()
        made = False

        def make(record: Reservations) -> Reservations:
            nonlocal made
            present = record.pools.get(name)
            if present is not None and present.spec != spec:
                raise PoolConflict(
                    f"name: a reservation {name!r} exists with another spec",
                    param="name",
                    extras={"pool": self._pool_of(present)},
                )
            if name in record.ended or (present is not None and now_s >= present.expires_s):
                raise QueueUnavailable(f"an earlier pool {name!r} is being removed")
            if present is None and len(record.pools) >= MAX_RESERVATIONS:
                raise PoolOperationForbidden(f"{MAX_RESERVATIONS} reservations exist, which is the limit")
            made = present is None
            wanted = (
                Reservation(spec, now_s, now_s)
                if present is None
                else msgspec.structs.replace(present, renewed_s=now_s)
            )
            wanted = msgspec.structs.replace(wanted, takes_last=wanted.takes_last or takes_last)
            return msgspec.structs.replace(record, pools={**record.pools, name: wanted})

        record = await self._change(make)
        self._count("created" if made else "renewed")
        failpoint("gateway.pool_recorded")
        try:
            await self._queue.ensure_pool(name)
        except BrokerError as error:
            if made:
                await self._undo(name, removes=not isinstance(error, TopologyMismatch))
            if isinstance(error, TopologyMismatch):
                raise PoolConflict(f"name: the broker has a queue of another pool {name!r}", param="name") from error
            raise
        return record.pools[name]

    async def _undo(self, name: str, *, removes: bool) -> None:
        """Take back a reservation that got no stream. What fails here ends with its lease."""
        with contextlib.suppress(BrokerError):
            await self._change(lambda record: self._without(record, name, ends=removes))

    async def renew(self, name: str) -> Reservation | None:
        """Begin its lease anew. None for a pool that needs none. Raises PoolNotFound, BrokerError."""
        if name in self.own:
            return None

        def make(record: Reservations) -> Reservations:
            now_s = self._clock.now_s()
            present = record.pools.get(name)
            if present is None or now_s >= present.expires_s:
                raise not_found(name)
            renewed = msgspec.structs.replace(present, renewed_s=max(now_s, present.renewed_s))
            return msgspec.structs.replace(record, pools={**record.pools, name: renewed})

        record = await self._change(make)
        self._count("renewed")
        return record.pools[name]

    async def delete(self, name: str) -> None:
        """End a reservation. Raises PoolNotFound, PoolOperationForbidden for a pool that is none, BrokerError."""
        if name in self.own:
            raise PoolOperationForbidden(f"the pool {shown(name)!r} is no reservation and cannot be deleted")

        def make(record: Reservations) -> Reservations:
            present = record.pools.get(name)
            if present is None or self._clock.now_s() >= present.expires_s:
                raise not_found(name)
            return self._without(record, name, ends=True)

        await self._change(make)
        self._count("deleted")
        with contextlib.suppress(QueueUnavailable):  # it is gone for everybody, only its stream is not yet
            await self._until_removed(name)

    def _without(self, record: Reservations, name: str, *, ends: bool) -> Reservations:
        pools = {other: each for other, each in record.pools.items() if other != name}
        return Reservations(pools, {**record.ended, name: self._clock.now_s()} if ends else record.ended)

    async def _until_removed(self, name: str) -> None:
        """Wait until nothing of an earlier reservation of this name is left. Raises QueueUnavailable."""
        try:
            async with asyncio.timeout(REMOVED_WITHIN_S):
                while name in self._record.ended or (name in self._record.pools and self.reservation(name) is None):
                    await self._news.wait()
        except TimeoutError:
            raise QueueUnavailable(f"an earlier pool {name!r} is still being removed") from None

    # ---- what is told of them

    def workers(self) -> Mapping[str, str]:
        """The reservation of each worker that has one."""
        live = self.live()
        return {worker: pool for worker, pool in self._assigned.workers.items() if pool in live}

    def assigned(self, worker: str) -> tuple[str, ...]:
        """The pools that a worker is to serve. Raises InvalidInput, PoolNotFound, NotReady before the
        record is known.
        """
        if self._bucket is None:
            raise NotReady("the pools have not been read from the broker yet")
        return assignments.assigned(worker, [beat for beat, _ in self._fleet.workers()], self.workers())

    def pinned(self, pools: Iterable[str]) -> list[str]:
        """The models that workers of these pools load before anybody asks for them."""
        return [model for pool in pools if (spec := self.spec(pool)) is not None for model in spec.pinned_models]

    def serving(self, name: str) -> list[Heartbeat]:
        """The healthy workers that serve a pool."""
        reserved = self.workers()
        own = name in self.own
        return [
            beat for beat in self._fleet.healthy() if beat.pool == name and (own or reserved.get(beat.worker) == name)
        ]

    def is_active(self, reservation: Reservation) -> bool:
        """Whether every count is met by healthy workers that serve it."""
        return assignments.is_met(reservation.spec, map(Candidate.of, self.serving(reservation.spec.name)))

    def pool(self, name: str) -> dict[str, Any]:
        """The Pool object of a name. Raises PoolNotFound."""
        present = self.reservation(name)
        if present is not None:
            return self._pool_of(present)
        if name not in self.own and name not in self._physical():
            raise not_found(name)
        spec: dict[str, Any] = {
            "name": shown(name),
            "bundle": None,
            "gpus": {},
            "ttl_seconds": None,
            "minimum_worker_count": 0,
            "gpu_caps": {},
            "pinned_models": [],
        }
        workers = [_worker(beat) for beat in self._fleet.healthy() if beat.pool == name]
        times = {"created_at": None, "last_renewed": None, "expires_at": None}
        return {"name": shown(name), "spec": spec, "status": {"state": "active", "assigned_workers": workers, **times}}

    def _pool_of(self, each: Reservation) -> dict[str, Any]:
        name, reserved = each.spec.name, self.workers()
        spec = {
            **msgspec.structs.asdict(each.spec),
            "bundle": each.spec.bundle or None,
            "pinned_models": list(each.spec.pinned_models),
        }
        workers = [_worker(beat) for beat, _ in self._fleet.workers() if reserved.get(beat.worker) == name]
        reason = self.pending_reason(name)
        return {
            "name": name,
            "spec": spec,
            "status": {
                "state": "pending" if reason else "active",
                "assigned_workers": workers,
                "created_at": each.created_s,
                "last_renewed": each.renewed_s,
                "expires_at": each.expires_s,
                **({"reason": reason} if reason else {}),
            },
        }

    def pending_reason(self, name: str) -> str:
        """Why a reservation is not active. Empty for one that is, and for any other pool."""
        each = self.reservation(name)
        if each is None or self.is_active(each):
            return ""
        if self._is_held_back(each):
            return HELD_BACK
        held = [Candidate.of(beat) for beat in self._fleet.healthy() if self._assigned.workers.get(beat.worker) == name]
        return ON_THEIR_WAY if assignments.is_met(each.spec, held) else TOO_FEW

    def _is_held_back(self, each: Reservation) -> bool:
        return assignments.is_held_back(each, self._default_workers(), self._assigned.workers)

    def _default_workers(self) -> dict[str, Candidate]:
        """The healthy workers that may be reserved."""
        default = topology.pool_name("default")
        return {beat.worker: Candidate.of(beat) for beat in self._fleet.healthy() if beat.own_pool == default}

    def _physical(self) -> set[str]:
        """The pools that workers belong to."""
        return {beat.own_pool or beat.pool for beat, _ in self._fleet.workers()} - self._record.pools.keys()

    def pools(self) -> list[dict[str, Any]]:
        """All Pool objects: the default pool, others that are no reservation, then reservations by name."""
        own = self.own | self._physical()
        return [self.pool(name) for name in (*sorted(own - self.live().keys()), *sorted(self.live()))]

    def reserved(self) -> Counter[tuple[str, str, str]]:
        """The workers that reservations ask for, by reservation, machine profile and bundle."""
        beats = {beat.worker: beat for beat, _ in self._fleet.workers()}
        gpus: dict[str, int] = {}
        for beat in beats.values():
            gpus[beat.machine_profile] = max(gpus.get(beat.machine_profile, 1), beat.gpu_count)
        held: dict[str, list[Candidate]] = {}
        for worker, pool in self.workers().items():
            if worker in beats:
                held.setdefault(pool, []).append(Candidate.of(beats[worker]))
        found: Counter[tuple[str, str, str]] = Counter()
        for name, each in self.live().items():
            for (profile, bundle), count in assignments.asked(each.spec, held.get(name, []), gpus).items():
                found[name, profile, bundle] += count
            if self._is_held_back(each):  # it comes when there is one more
                found[name, min(each.spec.gpus), each.spec.bundle or assignments.DEFAULT_BUNDLE] += 1
        return found

    def pending(self) -> set[tuple[str, str, str]]:
        """Of `reserved`, what belongs to reservations that are not active."""
        active = {name for name, each in self.live().items() if self.is_active(each)}
        return {each for each in self.reserved() if each[0] not in active}

    def _count(self, event: str, count: int = 1) -> None:
        self._metrics.pool_events.labels(event).inc(count)

    # ---- what goes on by itself

    def _on_heartbeat(self) -> None:
        if self._record.pools:
            self._woken.set()

    async def run(self, stop: Stop) -> None:
        """See to streams, leases and assignments until `stop`."""
        trouble = Trouble(_logger, "the pools stand still")
        while not await stop.wait_woken(self._woken, EVERY_S) and not await stop.wait_for(GAP_S):
            try:
                if trouble.lasting or self._reopens:  # the bucket may have been lost with its broker
                    await self.start()
                if math.isinf(self._clock.margin_s):  # leases are of the broker's time
                    await self._clock.measure()
                await self.step()
                trouble.passed()
            except BrokerError as error:
                trouble.met(error)
        if self._is_leader:
            with contextlib.suppress(BrokerError):  # then it lapses
                await self._lease.release()

    async def step(self) -> None:
        """One look at everything. Raises BrokerError."""
        live = frozenset(self.live())
        self._metrics.active_lease_gpus.set(sum(sum(each.spec.gpus.values()) for each in self.live().values()))
        for name in sorted(self._known - live):
            await self._on_gone(name)
        self._known = live
        failure: BrokerError | None = None
        for name in sorted(live):
            if not self._queue.consumers.follows(name):
                try:
                    await self._queue.ensure_pool(name)
                except PoolNotFound:  # it has ended meanwhile
                    continue
                except BrokerError as error:
                    failure = error
        if await self._leads():
            await self._expire()
            await self._assign()  # workers are told to leave before the stream goes
            await self._remove()
        if failure is not None:
            raise failure

    async def _on_gone(self, name: str) -> None:
        """Requests that wait for a reservation that has ended fail, and nothing of it is kept here."""
        self._inbox.fail_pool(name, not_found(name))
        for listener in self.on_gone:
            listener(name)
        await self._queue.forget_pool(name)

    async def _leads(self) -> bool:
        """Whether the work of all gateways for all pools is this one's. While there is none nobody asks. Raises
        BrokerError.
        """
        if not (self._record.pools or self._record.ended or self._assigned.workers):
            return False
        loop_s = asyncio.get_running_loop().time()
        if loop_s - self._renewed_s >= RENEW_S:
            self._is_leader = False
            self._is_leader, self._renewed_s = await self._lease.acquire(), loop_s
        return self._is_leader

    async def _expire(self) -> None:
        """End the reservations whose lease is over for certain."""
        now_s = self._clock.now_s() - self._clock.margin_s  # minus infinity while the broker's time is not known
        over = [name for name, each in self._record.pools.items() if now_s >= each.expires_s]
        for name in over:
            ended = False

            def make(record: Reservations, name: str = name) -> Reservations:
                nonlocal ended
                present = record.pools.get(name)
                ended = present is not None and now_s >= present.expires_s
                return self._without(record, name, ends=True) if ended else record

            await self._change(make)
            if ended:
                self._count("expired")
                _logger.info("the lease of reservation %s is over", name)

    async def _remove(self) -> None:
        """Remove what is left of reservations that have ended; their names are free then."""
        for name in list(self._record.ended):
            failpoint("gateway.before_pool_removal")
            await self._queue.remove_pool(name)
            await self._drop_tables(name)
            await self._change(functools.partial(_removed, name))

    async def _drop_tables(self, name: str) -> None:
        bucket = await self._broker.key_value(topology.PLACEMENT_BUCKET)
        keys = [entry.key for entry in await bucket.entries() if entry.key.startswith(f"{name}.")]
        if keys:
            await bucket.write([Write(key, None) for key in keys])

    async def _assign(self) -> None:
        """Write who serves what, if that has changed."""
        workers = self._candidates()
        live = self.live()
        found = assignments.assign(live.values(), workers, self._assigned.workers)
        if found != self._assigned.workers:
            assert self._bucket is not None
            try:
                revision = await self._bucket.write(
                    [Write(_ASSIGNED, messages.encode(Assigned(found)), self._assigned_revision)]
                )
            except WrongRevision:
                entry = await self._bucket.get(_ASSIGNED)
                self._assigned, self._assigned_revision = Assigned(), 0
                if entry is not None:
                    await self._on_entry(entry)
                return
            before = self._assigned.workers
            if revision > self._assigned_revision:
                self._assigned, self._assigned_revision = Assigned(found), revision
            for worker in sorted(name for name in found.keys() | before.keys() if found.get(name) != before.get(name)):
                self._count("assigned" if worker in found else "released")
                _logger.info("worker %s serves %s", worker, found.get(worker, "its own pool again"))
                # a hint; it asks every few seconds anyway
                await self._broker.send(topology.assigned_subject(worker), b"")
        active = frozenset(name for name, each in live.items() if self.is_active(each))
        self._count("active", len(active - self._active))
        self._count("pending", len((self._active - active) & live.keys()))
        self._active = active

    def _candidates(self) -> dict[str, Candidate]:
        """The workers that may be reserved, or keep their reservation.

        A worker that holds a place keeps it while its heartbeats come and it has not been unready for UNREADY_S; and
        for the time of a heartbeat's time-out after this gateway's start, until it can have heard of it.
        """
        now_s = asyncio.get_running_loop().time()
        if self._first_s is None:
            self._first_s = now_s
        found: dict[str, Candidate] = {}
        unready_s: dict[str, float] = {}
        heard = self._fleet.workers()
        for beat, is_healthy in heard:
            if beat.own_pool != topology.pool_name("default"):
                continue
            if not is_healthy and not beat.leaving and not beat.ready and beat.worker in self._assigned.workers:
                unready_s[beat.worker] = self._unready_s.get(beat.worker, now_s)
                is_healthy = self._fleet.is_heard(beat.worker) and now_s - unready_s[beat.worker] < UNREADY_S
            if is_healthy:
                found[beat.worker] = Candidate.of(beat)
        self._unready_s = unready_s
        if now_s - self._first_s < self._settings.heartbeat_timeout_ms / 1000:
            names = {beat.worker for beat, _ in heard}
            live = self.live()
            for worker, pool in self._assigned.workers.items():
                if worker not in names and pool in live:
                    spec = live[pool].spec
                    found[worker] = Candidate(min(spec.gpus), spec.bundle or assignments.DEFAULT_BUNDLE)
        return found


def _removed(name: str, record: Reservations) -> Reservations:
    return Reservations(record.pools, {other: at_s for other, at_s in record.ended.items() if other != name})


def shown(name: str) -> str:
    """A pool's name as Pool objects print it."""
    return "default" if name == topology.pool_name("default") else name


def not_found(name: str) -> PoolNotFound:
    return PoolNotFound(f"there is no pool {shown(name)[:70]!r}, or its lease is over", param="name")


def _worker(beat: Heartbeat) -> dict[str, Any]:
    return {"name": beat.worker, "url": None, "gpu": beat.machine_profile}
