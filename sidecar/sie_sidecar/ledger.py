"""The deliveries in our hands, in a file that outlives a killed process: the next one hands them back at once, not when
they lapse.

    hold ──► a slot of the mapped file ──► drop clears it
    kill -9 ──► the next process reads the slots and releases them

The file is mapped memory, all of it reserved at the start: a write is a copy of at most 512 bytes and no system call,
the kernel keeps it when the process dies, and a disk that fills up later cannot stop it. It is not meant to survive the
machine: by then the leases lapsed."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

SLOTS = 4096  # what is held beyond this many just lapses
SLOT_BYTES = 512
_MAGIC = b"SIElease"
_HEADER = struct.Struct("<8sd")  # magic, broker time of the last renewal of everything
_SLOT = struct.Struct("<IHd")  # checksum of the rest, bytes of the reply, broker time of the delivery
_EMPTY = bytes(_SLOT.size)
_SIZE = (1 + SLOTS) * SLOT_BYTES
_logger = logging.getLogger("sie.sidecar.ledger")


class Ledger:
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
        found: list[tuple[float, str]] = []
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
                found.append((held_s, data.decode()))
        if broken:
            _logger.warning("%s: %d entries cannot be read, their leases will lapse", self.path, broken)
        self._map[:] = bytes(_SIZE)
        self.renewed()
        return [reply for _, reply in sorted(found)]

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


def open_ledger(path: Path, now_s: Callable[[], float]) -> Ledger | None:
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
        return Ledger(path, file, now_s)
    except OSError as error:
        _logger.warning(
            "%s: %s; if this process is killed its work waits for the end of its leases", path, error.strerror or error
        )
        if file >= 0:
            os.close(file)
        return None
