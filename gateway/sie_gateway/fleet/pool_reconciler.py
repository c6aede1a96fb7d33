"""Reconciliation of reservations (pools that clients create): creates and removes their streams, ends reservations
whose lease has expired, and assigns workers to reservations.

each gateway: create the stream of each live reservation; fail the requests of a reservation that has ended
the leader:   end expired reservations ──► assign and release workers ──► remove the streams of ended reservations
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable

from sie_broker import Broker, BrokerError, Write
from sie_broker.independent import independently
from sie_broker.record import LeaderLease, RecordBucket, leases_of
from sie_contracts.settings import Settings
from sie_contracts.wire import topology
from sie_gateway.fleet import assignments, pool_rules
from sie_gateway.fleet.assignments import AssignableWorker
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.fleet.pools import PoolDirectory
from sie_gateway.metrics import Metrics
from sie_gateway.streams.publish import WorkQueue
from sie_runtime.clock import BrokerClock
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Stop, Trouble

EVERY_S = 1.0
GAP_S = 0.1  # shortest time in seconds between two calls of `step`: heartbeats that arrive together cause one call
RENEW_S, LEASE_S = 2.0, 6.0
# seconds for which a worker that is not ready stays assigned to a reservation, as long as it sends heartbeats: its
# adapter may be restarting
UNREADY_S = 30.0
_logger = logging.getLogger("sie.gateway.pools")


class PoolReconciler:
    """Keeps the streams, leases and assignments of reservations up to date. One task calls `run`."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        pools: PoolDirectory,
        fleet: Fleet,
        queue: WorkQueue,
        clock: BrokerClock,
        metrics: Metrics,
        on_gone: Callable[[str], None],
    ) -> None:
        """`on_gone(name)` runs for each ended reservation, before the gateway stops using the reservation's stream."""
        self._settings = settings
        self._broker = broker
        self._pools = pools
        self._record = pools.record
        self._fleet = fleet
        self._queue = queue
        self._clock = clock
        self._metrics = metrics
        self._on_gone = on_gone
        storage, replicas = settings.stream_storage, settings.stream_replicas
        leases = leases_of(broker, storage=storage, replicas=replicas)
        self._lease = LeaderLease(leases, "pools", lease_s=LEASE_S)
        self._tables = RecordBucket(broker, topology.PLACEMENT_BUCKET, storage=storage, replicas=replicas)
        self._is_leader = False
        self._renewed_s = -math.inf
        self._known: dict[str, float] = {}  # creation time of each reservation that was live at the last step
        self._active: frozenset[str] = frozenset()
        self._unready_s: dict[str, float] = {}
        # time since which heartbeats can arrive; None while this gateway has no connection to the broker
        self._since_s: float | None = None
        fleet.listeners.append(self._on_heartbeat)

    def _on_heartbeat(self) -> None:
        if self._record.reservations.pools:
            self._record.woken.set()

    async def run(self, stop: Stop) -> None:
        """Call `step` after a change of the reservations or assignments, after heartbeats, and at least every EVERY_S
        seconds, until `stop`.
        """
        trouble = Trouble(_logger, "reservations are not updated for now")
        while not await stop.wait_woken(self._record.woken, EVERY_S) and not await stop.wait_for(GAP_S):
            with trouble.logged(BrokerError):
                if not self._broker.connected:
                    self._since_s = None
                if trouble.lasting or self._record.is_stale:
                    await self._record.follow()
                # the end of a lease is a time of the broker's clock: before the first step, measure this clock's offset
                if math.isinf(self._clock.margin_s):
                    await self._clock.measure()
                await self.step()
        if self._is_leader:
            with contextlib.suppress(BrokerError):  # if the release fails, the lease expires by itself
                await self._lease.release()

    async def step(self) -> None:
        """Update the streams, leases and assignments of all reservations once. Raises BrokerError."""
        live = self._record.live()
        self._metrics.active_lease_gpus.set(sum(sum(reservation.spec.gpus.values()) for reservation in live.values()))
        created_s = {name: reservation.created_s for name, reservation in live.items()}
        # names of reservations that may have ended. `_known` lacks a reservation that began and ended since the last
        # step, so also look at the pools whose streams this gateway follows.
        reservations = {*self._known, *self._queue.consumers.streams} - self._record.own
        # since the last step, a new reservation may have replaced an ended reservation of the same name
        replaced = {name for name in created_s.keys() & self._known.keys() if created_s[name] != self._known[name]}
        for name in sorted((reservations - live.keys()) | replaced):
            self._on_gone(name)
            await self._queue.forget_pool(name)
        self._known = created_s
        unfollowed = [name for name in sorted(live) if name not in self._queue.consumers.streams]
        await independently((functools.partial(self._queue.ensure_pools, unfollowed), self._lead))

    async def _lead(self) -> None:
        """End reservations, assign workers and remove streams, if this gateway is the leader. Raises BrokerError."""
        if await self._leads():
            await self._expire()
            # assign before `_remove`, because workers must leave the stream of an ended reservation before its deletion
            await self._assign()
            await self._remove()

    async def _leads(self) -> bool:
        """Return True if this gateway is the leader; False while no reservation needs a leader. Raises BrokerError."""
        record = self._record
        if not (record.reservations.pools or record.reservations.ended or record.assigned.workers):
            return False
        loop_s = asyncio.get_running_loop().time()
        if loop_s - self._renewed_s >= RENEW_S:
            self._is_leader = False
            self._is_leader, self._renewed_s = await self._lease.acquire(), loop_s
        return self._is_leader

    async def _expire(self) -> None:
        """End the reservations whose lease has ended by the broker's clock. The gateway's measurement of this clock may
        be up to `margin_s` too high, so subtract `margin_s` from it.
        """
        over_s = self._clock.now_s() - self._clock.margin_s  # minus infinity while the broker's time is unknown
        for name in [
            name for name, reservation in self._record.reservations.pools.items() if over_s >= reservation.expires_s
        ]:
            now_s = self._clock.now_s()
            expired = functools.partial(pool_rules.expired, name=name, over_s=over_s, now_s=now_s)
            # count the reservation only if this gateway has ended it, not another gateway
            if (await self._record.change(expired)).ended.get(name) == now_s:
                self._count("expired")
                _logger.info("the gateway removes reservation %s, because its lease has ended", name)

    async def _remove(self) -> None:
        """Remove the streams and placement tables of ended reservations, so that their names can be used again."""
        await independently(functools.partial(self._remove_one, name) for name in list(self._record.reservations.ended))

    async def _remove_one(self, name: str) -> None:
        failpoint("gateway.before_pool_removal")
        await self._queue.remove_pool(name)
        await self._drop_tables(name)
        await self._record.change(functools.partial(pool_rules.removed, name=name))

    async def _drop_tables(self, name: str) -> None:
        bucket = await self._tables.open()
        keys = [entry.key for entry in await bucket.entries() if entry.key.startswith(f"{name}.")]
        if keys:
            await bucket.write([Write(key, None) for key in keys])

    async def _assign(self) -> None:
        live, before = self._record.live(), self._record.assigned.workers
        # compute in a thread, because the computation for many reservations and workers would block the event loop
        assigned = await asyncio.to_thread(assignments.assign, live.values(), self._candidates(), before)
        if assigned != before:
            if not await self._record.assign(assigned):
                return
            for worker in sorted(
                name for name in assigned.keys() | before.keys() if assigned.get(name) != before.get(name)
            ):
                self._count("assigned" if worker in assigned else "released")
                _logger.info("worker %s is assigned to the pool %s", worker, assigned.get(worker, "of its settings"))
                # a lost message does no harm: the worker also reads its assignment every few seconds
                await self._broker.send(topology.assigned_subject(worker), b"")
        active = frozenset(name for name, reservation in live.items() if self._pools.is_active(reservation))
        self._count("active", len(active - self._active))
        self._count("pending", len((self._active - active) & live.keys()))
        self._active = active

    def _count(self, event: str, count: int = 1) -> None:
        self._metrics.pool_events.labels(event).inc(count)

    def _candidates(self) -> dict[str, AssignableWorker]:
        """Return the workers of the installation's pool that may be reserved, or may keep their reservation.

        A reserved worker keeps its reservation while its heartbeats arrive. The worker loses the reservation if it
        leaves, or if it was not ready for UNREADY_S seconds. After its start or a new connection to the broker, this
        gateway waits `heartbeat_timeout_ms` before a reserved worker without a heartbeat loses its reservation.
        """
        now_s = asyncio.get_running_loop().time()
        if self._since_s is None:
            self._since_s = now_s
        is_recent = now_s - self._since_s < self._settings.heartbeat_timeout_ms / 1000
        assigned = self._record.assigned.workers
        candidates: dict[str, AssignableWorker] = {}
        unready_s: dict[str, float] = {}
        beats = self._fleet.workers()
        for beat, is_healthy in beats:
            if beat.own_pool != self._record.main:
                continue
            if not is_healthy and not beat.leaving and beat.worker in assigned:
                is_healthy = is_recent or self._fleet.is_heard(beat.worker)
                if not beat.ready:
                    unready_s[beat.worker] = self._unready_s.get(beat.worker, now_s)
                    is_healthy = is_healthy and now_s - unready_s[beat.worker] < UNREADY_S
            if is_healthy:
                candidates[beat.worker] = AssignableWorker.from_heartbeat(beat)
        self._unready_s = unready_s
        if is_recent:
            names = {beat.worker for beat, _ in beats}
            live = self._record.live()
            for worker, pool in assigned.items():
                if worker not in names and pool in live:
                    spec = live[pool].spec
                    bundle = spec.bundle or assignments.DEFAULT_BUNDLE
                    candidates[worker] = AssignableWorker(min(spec.gpus), bundle, is_heard=False)
        return candidates
