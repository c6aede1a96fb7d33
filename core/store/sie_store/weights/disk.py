"""Room for weights on a disk that is nearly full. Least recently used snapshots are evicted before a fetch begins, and
also while the process serves (`DiskWatch`), because others fill the disk too.

Only what SIE put there is removed: snapshots whose manifest it wrote, and partial folders of fetches that no process
continues. What the hub's own client, or anybody else, put into the same cache stays. A snapshot that a process of this
node loads, holds or fetches is never removed: the process holds a lease (`LocalCache.lease`), and a removal needs that
there is none.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sie_store.weights.cache import REMOVAL_S, Candidate, LocalCache
from sie_store.weights.locks import Lock, taken
from sie_store.weights.manifest import FetchFailed

_logger = logging.getLogger("sie.store")
_POLL_S = 0.2
LOOK_S = 30.0  # between two checks of the disk while the process serves
SPARE_BYTES = 16 << 20  # file systems need some of their own


class DiskUsage(NamedTuple):
    """Used bytes of a file system, and bytes that this user may still write."""

    used: int
    free: int


Probe = Callable[[Path], DiskUsage]


def usage(folder: Path, limit_bytes: int | None = None) -> DiskUsage:
    """The usage of the file system of `folder`, or of the one that will hold it. With a limit: of so many bytes for
    what is below `folder`.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk = shutil.disk_usage(there)
    if limit_bytes is None:
        return DiskUsage(disk.used, disk.free)
    used = sum(_size(os.path.join(where, name)) for where, _, names in os.walk(folder) for name in names)
    return DiskUsage(used, max(0, min(disk.free, limit_bytes - used)))


def _size(path: str) -> int:
    """Bytes of a file; 0 for a link, and for a file that was removed meanwhile."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def limited(folder: Path, threshold_percent: float | None, probe: Probe = usage) -> LocalCache:
    """The local cache in `folder`. It evicts snapshots while its disk is above `threshold_percent`
    (SIE_DISK_PRESSURE_THRESHOLD_PERCENT).

    None: nothing is removed (SIE_DISK_CACHE_ENABLED is off). In both cases a fetch that does not fit is refused before
    it begins.
    """
    cache = LocalCache(folder)
    cache.room = functools.partial(make_room, cache, threshold_percent, probe)
    if threshold_percent is not None:
        cache.relieve = functools.partial(relieve, cache, threshold_percent, probe)
    return cache


def make_room(cache: LocalCache, threshold_percent: float | None, probe: Probe, needed_bytes: int) -> None:
    """Evict snapshots until the disk stays below the threshold with `needed_bytes` more and what other fetches of this
    node have still to write, or until nothing may be removed any more. Raises FetchFailed, and removes nothing, if the
    bytes would not fit even then.
    """
    with _sole_removal(cache):
        going = cache.candidates() if threshold_percent is not None else []
        others_bytes = cache.outstanding_bytes()
        needed = needed_bytes + others_bytes
        free = probe(cache.folder).free
        if needed + SPARE_BYTES > free + sum(candidate.bytes for candidate in going):
            raise _no_room(cache, threshold_percent, needed, others_bytes, free)
        if threshold_percent is None:
            return

        def is_above() -> bool:
            used, free = probe(cache.folder)
            return 100 * (used + needed) > threshold_percent * (used + free) or needed + SPARE_BYTES > free

        _remove_while(is_above, cache, going, f"with what is to come the disk would be above {threshold_percent:g} %")
        if is_above():
            _logger.warning(
                "the disk of %s stays above %g %%: nothing else there may be removed", cache.folder, threshold_percent
            )
        if needed + SPARE_BYTES > (free := probe(cache.folder).free):  # other programs wrote meanwhile
            raise _no_room(cache, threshold_percent, needed, others_bytes, free)


def relieve(cache: LocalCache, threshold_percent: float, probe: Probe) -> bool:
    """Evict snapshots while the disk is above the threshold and some may be removed. Returns whether it is below it
    now.
    """

    def is_above() -> bool:
        used, free = probe(cache.folder)
        return 100 * used > threshold_percent * (used + free)

    if is_above():
        with _sole_removal(cache):
            _remove_while(is_above, cache, cache.candidates(), f"the disk is above {threshold_percent:g} %")
    return not is_above()


class DiskWatch:
    """A thread that calls `look` every LOOK_S until it is closed. `look` returns whether all is well; when that changes
    to False, a warning is logged.
    """

    def __init__(self, look: Callable[[], bool], folder: Path) -> None:
        self._look = look
        self._folder = folder
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        was_well = True
        while not self._closed.wait(LOOK_S):
            try:
                is_well = self._look()
            except OSError as error:
                _logger.warning("the disk of %s cannot be checked: %s", self._folder, error)
                continue
            if was_well and not is_well:
                _logger.warning(
                    "the disk of %s is above SIE_DISK_PRESSURE_THRESHOLD_PERCENT: nothing there may be removed",
                    self._folder,
                )
            was_well = is_well


def _remove_while(is_above: Callable[[], bool], cache: LocalCache, going: list[Candidate], why: str) -> None:
    for candidate in going:
        if not is_above():
            return
        name = cache.log_name(candidate.repository, candidate.revision)
        if _removed(cache, candidate):
            minutes = (time.time() - candidate.used_s) / 60
            _logger.warning("removed %s from the local cache, last used %.0f min ago: %s", name, minutes, why)


def _removed(cache: LocalCache, candidate: Candidate) -> bool:
    try:
        return cache.discard(candidate)
    except OSError as error:  # another user's: the next one may go
        name = cache.log_name(candidate.repository, candidate.revision)
        why = error.strerror or type(error).__name__  # without the path, which contains the name
        _logger.warning("%s could not be removed from the local cache: %s", name, why)
        return False


def _no_room(
    cache: LocalCache, threshold_percent: float | None, needed_bytes: int, others_bytes: int, free: int
) -> FetchFailed:
    """A failure of a class that is tried again later, when there may be room. `others_bytes`: the part of
    `needed_bytes` that other fetches need.
    """
    shared = f" ({others_bytes / 2**20:.1f} of them by other fetches)" if others_bytes else ""
    needs = (
        f"no space on the disk of {cache.folder}: {needed_bytes / 2**20:.1f} MiB are needed{shared}, {free / 2**20:.1f}"
        " are free"
    )
    if threshold_percent is None:
        return FetchFailed("NETWORK", f"{needs}; make room there, or set SIE_DISK_CACHE_ENABLED=true")
    return FetchFailed("NETWORK", f"{needs}, and what may be removed there is too little; make room there")


def _sole_removal(cache: LocalCache) -> Lock:
    """The lock for one removing process of the node at a time: two would remove twice as much. If its holder hangs, if
    its file belongs to another user or if there is no room for it, room is made without the lock.
    """
    deadline_s = time.monotonic() + REMOVAL_S
    try:
        while (lock := taken(cache.hub / ".locks" / "sie.removal", shared=False)) is None:
            if time.monotonic() > deadline_s:
                return Lock(None)
            time.sleep(_POLL_S)
    except OSError as error:
        _logger.warning("room is made in %s without a lock: %s", cache.folder, error)
        return Lock(None)
    return lock
