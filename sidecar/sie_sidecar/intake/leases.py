"""The deliveries in our hands, in a file that outlives a killed process: the next one hands them back at once, not when
they lapse.

    hold ──► a slot of the mapped file ──► drop clears it
    kill -9 ──► the next process reads the slots and releases them

The file is mapped memory, all of it reserved at the start: a write is a copy of at most 512 bytes and no system call,
the kernel keeps it when the process dies, and a disk that fills up later cannot stop it. It is not meant to survive the
machine: by then the leases lapsed."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from sie_broker import BrokerError, Delivery, Queue
from sie_runtime.failpoints import failpoint

SLOTS = 4096  # what is held beyond this many just lapses
SLOT_BYTES = 512
_MAGIC = b"SIElease"
_HEADER = struct.Struct("<8sd")  # magic, broker time of the last renewal of everything
_SLOT = struct.Struct("<IHd")  # checksum of the rest, bytes of the reply, broker time of the delivery
_EMPTY = bytes(_SLOT.size)
_SIZE = (1 + SLOTS) * SLOT_BYTES
_logger = logging.getLogger("sie.sidecar.leases")


class LeaseLedger:
    """One process at a time writes it. `now_s` is broker time, in seconds."""

    def __init__(self, path: Path, file: int, now_s: Callable[[], float]) -> None:
        self.path = path
        self._file = file
        self._now_s = now_s
        self._map = mmap.mmap(file, _SIZE)
        self._free = list(range(SLOTS, 0, -1))

    def put(self, reply: str) -> int:
        """Note a delivery by its ack subject. Returns its slot for `clear`; 0 if it could not be noted."""
        data = reply.encode()
        if not self._free or len(data) > SLOT_BYTES - _SLOT.size:
            return 0
        slot = self._free.pop()
        held_s, at = self._now_s(), slot * SLOT_BYTES
        self._map[at : at + _SLOT.size + len(data)] = _SLOT.pack(_checksum(held_s, data), len(data), held_s) + data
        return slot

    def clear(self, slot: int) -> None:
        """The delivery is not ours any more."""
        if slot:
            self._map[slot * SLOT_BYTES : slot * SLOT_BYTES + _SLOT.size] = _EMPTY
            self._free.append(slot)

    def renewed(self) -> None:
        """Every delivery that is noted was renewed just now."""
        _HEADER.pack_into(self._map, 0, _MAGIC, self._now_s())

    def take_over(self, within_s: float) -> list[str]:
        """The ack subjects that an earlier process held and renewed at most `within_s` ago, oldest first; forgets
        everything.

        Later ones may be somebody else's by now. What cannot be read is left out, with one line in the log.
        """
        readable: list[tuple[float, str]] = []
        broken = 0
        _, renewed_s = _HEADER.unpack_from(self._map)
        for at in range(SLOT_BYTES, _SIZE, SLOT_BYTES):
            checksum, length, held_s = _SLOT.unpack_from(self._map, at)
            if not checksum and not length:
                continue
            data = self._map[at + _SLOT.size : at + _SLOT.size + length]
            if length > SLOT_BYTES - _SLOT.size or checksum != _checksum(held_s, data):
                broken += 1
            elif self._now_s() - max(held_s, renewed_s) < within_s:
                readable.append((held_s, data.decode()))
        if broken:
            _logger.warning("%s: %d entries cannot be read, their leases will lapse", self.path, broken)
        self._map[:] = bytes(_SIZE)
        self.renewed()
        return [reply for _, reply in sorted(readable)]

    def close(self) -> None:
        """Stop writing; the file goes if nothing is held."""
        if len(self._free) == SLOTS:
            self.path.unlink(missing_ok=True)
        self._map.close()
        os.close(self._file)


def _checksum(held_s: float, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(struct.pack("<d", held_s))) or 1


def _reserve(file: int) -> None:
    """An empty ledger, every byte of it written: a hole in the file could not be filled on a full disk, and the write
    would be a signal.
    """
    empty = _HEADER.pack(_MAGIC, 0.0).ljust(_SIZE, b"\0")
    if os.pwrite(file, empty, 0) < _SIZE:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def open_ledger(path: Path, now_s: Callable[[], float]) -> LeaseLedger | None:
    """The ledger at `path`, made if it is not there; None, with one line in the log, where none can be kept: work goes
    on without.
    """
    file = -1
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(file).st_size
        if size != _SIZE or os.pread(file, len(_MAGIC), 0) != _MAGIC:
            if size:
                _logger.warning("%s is no ledger of leases and is made anew", path)
                os.ftruncate(file, 0)
            _reserve(file)
        return LeaseLedger(path, file, now_s)
    except OSError as error:
        _logger.warning(
            "%s: %s; if this process is killed its work waits for the end of its leases", path, error.strerror or error
        )
        if file >= 0:
            os.close(file)
        return None


FENCE = 0.8  # share of ack_wait after which an unrenewed lease counts as lost


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
        ledger: LeaseLedger | None = None,
        flushed: Callable[[float], Awaitable[None]] | None = None,
    ) -> None:
        """`flushed`: returns when the broker has received all that was sent, or raises BrokerError after
        so many seconds.
        """
        self._ack_wait_s = ack_wait_s
        self._ledger = ledger
        self._is_alive = is_alive
        self._flushed = flushed
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
            failpoint("leases.before_release")
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
            if self._flushed is not None:
                await self._flushed(self._ack_wait_s / 3)
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
