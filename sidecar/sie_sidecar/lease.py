"""Held work: renewed while the adapter is alive, and fenced when a renewal is late.

The broker cannot fence a stale holder: a late NAK redelivers under the new holder, a late error would answer for it. So
before anything but a success the holder asks `is_mine`; a success may always be published, the first terminal result
wins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from sie_broker import BrokerError, Delivery, Queue
from sie_runtime.failpoints import failpoint
from sie_sidecar.ledger import Ledger

FENCE = 0.8  # share of ack_wait after which an unrenewed lease counts as lost
_logger = logging.getLogger("sie.sidecar.lease")


class Lease:
    """One delivery in our hands."""

    __slots__ = ("delivery", "renewed_s", "slot")

    def __init__(self, delivery: Delivery, now_s: float, slot: int) -> None:
        self.delivery = delivery
        self.renewed_s = now_s
        self.slot = slot  # in the ledger


class Leases:
    """All deliveries held by this worker, noted in its ledger if it keeps one."""

    def __init__(
        self,
        ack_wait_s: float,
        is_alive: Callable[[], bool],
        clock: Callable[[], float],
        ledger: Ledger | None = None,
        heard: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        """`heard`: returns when the broker has received all that was sent, or raises BrokerError after
        so many seconds.
        """
        self._ack_wait_s = ack_wait_s
        self._ledger = ledger
        self._is_alive = is_alive
        self._heard = heard
        self._clock = clock
        self._held: dict[tuple[str, int], Lease] = {}  # by pool and sequence: each pool's stream counts from 1
        self.empty = asyncio.Event()
        self.empty.set()

    def hold(self, delivery: Delivery) -> Lease:
        lease = Lease(delivery, self._clock(), self._ledger.put(delivery.reply) if self._ledger else 0)
        self._held[_place(delivery)] = lease
        self.empty.clear()
        return lease

    def adopt(self, delivery: Delivery) -> Lease | None:
        """The lease of work that we still have in hand and that is delivered to us once more, renewed; None for work
        that is new here.
        """
        lease = self._held.get(_place(delivery))
        if (
            lease is None or lease.delivery.data != delivery.data
        ):  # sequences begin anew in a stream that was lost and made again
            return None
        lease.delivery, lease.renewed_s = delivery, self._clock()
        if self._ledger:
            self._ledger.clear(lease.slot)
            lease.slot = self._ledger.put(delivery.reply)
        return lease

    async def release_left(self, queue: Queue) -> int:
        """Hand back what an earlier process of this worker held when it was killed. Returns how many deliveries that
        were.
        """
        left = self._ledger.take_over(FENCE * self._ack_wait_s) if self._ledger else []
        count = 0
        for reply in left:
            failpoint("ledger.before_release")
            try:
                await queue.release(reply)
                count += 1
            except ValueError as error:
                _logger.warning("the ledger of leases: %s", error)
            except BrokerError as error:
                _logger.warning("what was held before is delivered again when its leases lapse: %s", error)
                break
        return count

    def all(self) -> list[Lease]:
        return list(self._held.values())

    def __len__(self) -> int:
        return len(self._held)

    def is_mine(self, lease: Lease) -> bool:
        """Whether nobody else can hold this work yet."""
        return self.left_s(lease) > 0

    def left_s(self, lease: Lease) -> float:
        """For how long that is so without a renewal."""
        return lease.renewed_s + FENCE * self._ack_wait_s - self._clock()

    def drop(self, lease: Lease) -> None:
        """Forget without a word."""
        if self._ledger:
            self._ledger.clear(lease.slot)
            lease.slot = 0
        if self._held.get(_place(lease.delivery)) is lease:
            del self._held[_place(lease.delivery)]
            if not self._held:
                self.empty.set()

    async def finish(self, lease: Lease) -> None:
        """The work is done and its result confirmed, or nobody waits for it."""
        self.drop(lease)
        await self._settle(lease.delivery.ack())

    async def hand_back(self, lease: Lease, delay_s: float = 0.0) -> bool:
        """Somebody else may do better. False, and nothing is sent, if the lease is not ours any more."""
        mine = self.is_mine(lease)
        self.drop(lease)
        if mine:
            await self._settle(lease.delivery.nak(delay_s))
        return mine

    async def refuse(self, lease: Lease, reason: str) -> None:
        """Nobody can do this work."""
        mine = self.is_mine(lease)
        self.drop(lease)
        if mine:
            await self._settle(lease.delivery.term(reason))

    @staticmethod
    async def _settle(settlement: Awaitable[None]) -> None:
        try:
            await settlement
        except BrokerError as error:
            _logger.warning("a settlement was not sent, the work will be delivered again: %s", error)

    async def renew_all(self) -> None:
        """Renew every lease, if the adapter lives: work of a dead one must go to somebody else.

        A renewal counts from when it was sent, once the broker has heard it: what goes into a connection that is dead
        renews nothing.
        """
        if not self._held or not self._is_alive():
            return
        sent_s, renewed = self._clock(), []
        try:
            for lease in list(self._held.values()):
                if self._held.get(_place(lease.delivery)) is lease:
                    await lease.delivery.in_progress()
                    renewed.append(lease)
            if self._heard is not None:
                await self._heard(self._ack_wait_s / 3)
        except BrokerError as error:
            _logger.warning("leases could not be renewed: %s", error)
            return
        for lease in renewed:
            lease.renewed_s = max(lease.renewed_s, sent_s)
        if self._ledger:
            self._ledger.renewed()

    async def run(self) -> None:
        """Renew every third of the ack wait until cancelled, so that one which is not heard ends no lease; draining
        work keeps its leases.
        """
        due_s = self._clock()
        while True:
            due_s = max(due_s + self._ack_wait_s / 3, self._clock())
            await asyncio.sleep(due_s - self._clock())
            await self.renew_all()


def _place(delivery: Delivery) -> tuple[str, int]:
    return delivery.subject.split(".", 3)[2], delivery.sequence
