"""The reservations and the assignments of workers, as the broker has them: two keys of the bucket `sie_pools`.

Every gateway follows both. Any gateway changes the reservations by compare-and-set; the leader of the gateways writes
the assignments. A bucket that was lost with its broker took all reservations with it: their requests fail, and their
workers return to their own pools.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from sie_broker import Entry, Store, Write, WrongRevision
from sie_broker.record import Bucket, Record
from sie_contracts import messages, records, topology
from sie_contracts.errors import NotReady, QueueUnavailable
from sie_contracts.records import Assigned, Reservation, Reservations
from sie_contracts.settings import Settings
from sie_runtime.clock import BrokerClock
from sie_runtime.failpoints import failpoint

REMOVED_WITHIN_S = 5.0  # a call waits for the end of an earlier pool of its name
_RESERVATIONS, _ASSIGNED = "reservations", "assigned"


def _decode(entry: Entry) -> Reservations | Assigned:
    value = entry.value or b""
    return records.decode_assigned(value) if entry.key == _ASSIGNED else records.decode_reservations(value)


class PoolRecord:
    """What is known of all reservations. `woken` is set at each change."""

    def __init__(self, settings: Settings, broker: Store, clock: BrokerClock) -> None:
        self.reservations = Reservations()
        self.assigned = Assigned()
        self.woken = asyncio.Event()
        self._clock = clock
        self._reservations_revision = self._assigned_revision = 0
        self._changed = asyncio.Event()  # another one after each change of the reservations
        self._is_read = False
        bucket = Bucket(
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

    def live(self) -> dict[str, Reservation]:
        """The reservations whose lease has not ended, by name."""
        now_s = self._clock.now_s()
        return {name: each for name, each in self.reservations.pools.items() if now_s < each.expires_s}

    def reservation(self, name: str) -> Reservation | None:
        """A reservation whose lease has not ended."""
        each = self.reservations.pools.get(name)
        return each if each is not None and self._clock.now_s() < each.expires_s else None

    def workers(self) -> Mapping[str, str]:
        """The reservation of each worker that has one."""
        live = self.live()
        return {worker: pool for worker, pool in self.assigned.workers.items() if pool in live}

    async def change(self, make: Callable[[Reservations], Reservations]) -> Reservations:
        """Write what `make` returns for the present reservations; it may be called again. Raises NotReady, BrokerError,
        QueueUnavailable after too many races, and what `make` raises.
        """

        def made(before: Reservations | Assigned | None) -> Reservations | None:
            present = before if isinstance(before, Reservations) else Reservations()
            after = make(present)
            if after == present:
                return None
            failpoint("gateway.before_pool_write")
            return after

        self.require_read()
        try:
            found = await self._record.change(_RESERVATIONS, made)
        except WrongRevision as error:
            raise QueueUnavailable("too many changes of pools at once") from error
        return found if isinstance(found, Reservations) else Reservations()

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
