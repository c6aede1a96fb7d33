"""Disk space for weights. Before a fetch, the least recently used snapshots are removed from the disk cache if space is
needed. Between fetches, `DiskWatch` removes snapshots while the disk is too full, because other programs fill the disk
too. Files that were computed from weights (`derived`) are removed before any snapshot.

Only data of SIE is removed: derived files, snapshots whose manifest SIE wrote, and partial folders of fetches that no
process continues. Files that the hub's own client or another program wrote into the same cache stay. A snapshot that a
process of this node loads, uses or fetches is never removed: the process has a lease (`LocalCache.lease`).
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

from sie_store.weights import derived
from sie_store.weights.cache import REMOVAL_S, Candidate, LocalCache
from sie_store.weights.locks import Lock, try_lock
from sie_store.weights.manifest import FetchFailed

_logger = logging.getLogger("sie.store")
_POLL_S = 0.2
LOOK_S = 30.0  # seconds between two checks of the disk while the process serves
SPARE_BYTES = 16 << 20  # bytes that must stay free, because a file system stores data of its own, such as folders


class DiskUsage(NamedTuple):
    """Bytes of a file system: used, and still free for this user."""

    used: int
    free: int


Probe = Callable[[Path], DiskUsage]


def usage(folder: Path, limit_bytes: int | None = None) -> DiskUsage:
    """Return the used and free bytes of the file system in which `folder` is or will be created. With `limit_bytes`,
    only the files below `folder` count as used, and at most `limit_bytes` may be used.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk = shutil.disk_usage(there)
    if limit_bytes is None:
        return DiskUsage(disk.used, disk.free)
    sizes = dict(_size(os.path.join(where, name)) for where, _, names in os.walk(folder) for name in names)
    used = sum(sizes.values())
    return DiskUsage(used, max(0, min(disk.free, limit_bytes - used)))


def _size(path: str) -> tuple[tuple[int, int], int]:
    """Return the identity of a file, which all its hard links share, and its number of bytes. The number is 0 for a
    symbolic link, and for a file that was removed meanwhile.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return (0, 0), 0
    return (status.st_dev, status.st_ino), status.st_size if stat.S_ISREG(status.st_mode) else 0


def limited(folder: Path, threshold_percent: float | None, probe: Probe = usage) -> LocalCache:
    """Return the local cache in `folder`. It removes snapshots while its disk is fuller than `threshold_percent`
    (SIE_DISK_PRESSURE_THRESHOLD_PERCENT). With None (SIE_DISK_CACHE_ENABLED is off), it removes no snapshot. In both
    cases, before a fetch begins, it refuses the fetch if the files do not fit on the disk.
    """
    cache = LocalCache(folder)
    cache.room = functools.partial(make_room, cache, threshold_percent, probe)
    if threshold_percent is not None:
        cache.relieve = functools.partial(relieve, cache, threshold_percent, probe)
    return cache


def make_room(cache: LocalCache, threshold_percent: float | None, probe: Probe, needed_bytes: int) -> None:
    """Remove snapshots until the disk has space, below the threshold, for `needed_bytes` and for the bytes that other
    fetches of this node have yet to write. Raises FetchFailed if all these bytes do not fit on the disk. Removes no
    snapshot if the bytes would not fit even after the removal of all candidates.
    """
    with _sole_removal(cache):
        others_bytes = cache.outstanding_bytes()
        needed = needed_bytes + others_bytes

        def is_above() -> bool:
            used, free = probe(cache.folder)
            limit = 100.0 if threshold_percent is None else threshold_percent
            return 100 * (used + needed) > limit * (used + free) or needed + SPARE_BYTES > free

        _remove_derived_while(is_above, cache)
        going = cache.candidates() if threshold_percent is not None else []
        free = probe(cache.folder).free
        if needed + SPARE_BYTES > free + sum(candidate.bytes for candidate in going):
            raise _no_room(cache, threshold_percent, needed, others_bytes, free)
        if threshold_percent is None:
            return
        _remove_while(is_above, cache, going, f"with the new files the disk would be over {threshold_percent:g} % full")
        if is_above():
            _logger.warning(
                "with the new files, the disk of %s will be above %g %% or full, and no other snapshot may be removed",
                cache.folder,
                threshold_percent,
            )
        # Other programs may have written to the disk since the first check.
        if needed + SPARE_BYTES > (free := probe(cache.folder).free):
            raise _no_room(cache, threshold_percent, needed, others_bytes, free)


def relieve(cache: LocalCache, threshold_percent: float, probe: Probe) -> bool:
    """Remove snapshots while the disk is fuller than the threshold. Returns whether the disk is then below it."""

    def is_above() -> bool:
        used, free = probe(cache.folder)
        return 100 * used > threshold_percent * (used + free)

    _remove_derived_while(is_above, cache)
    if is_above():
        with _sole_removal(cache):
            _remove_while(is_above, cache, cache.candidates(), f"the disk is more than {threshold_percent:g} % full")
    return not is_above()


class DiskWatch:
    """Thread that calls `look` every LOOK_S seconds until `close`. `look` returns whether the disk is below its
    threshold. When the result changes from true to false, a warning is logged.
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
                    "the disk of %s is still fuller than SIE_DISK_PRESSURE_THRESHOLD_PERCENT: the remaining snapshots "
                    "of weights are in use or were not fetched by SIE",
                    self._folder,
                )
            was_well = is_well


def _remove_derived_while(is_above: Callable[[], bool], cache: LocalCache) -> None:
    while is_above() and derived.remove_oldest(cache.folder / derived.FOLDER):
        pass


def _remove_while(is_above: Callable[[], bool], cache: LocalCache, going: list[Candidate], why: str) -> None:
    for candidate in going:
        if not is_above():
            return
        name = cache.log_name(candidate.repository, candidate.revision)
        try:
            is_removed = cache.discard(candidate)
        except OSError as error:  # for example, the snapshot belongs to another user; other snapshots may be removable
            # str(error) is not logged: its path contains the name of the snapshot, which may be a LoRA of a client
            cause = error.strerror or type(error).__name__
            _logger.warning("%s could not be removed from the local cache: %s", name, cause)
            continue
        if is_removed:
            minutes = (time.time() - candidate.used_s) / 60
            _logger.warning("removed %s from the local cache, last used %.0f min ago: %s", name, minutes, why)


def _no_room(
    cache: LocalCache, threshold_percent: float | None, needed_bytes: int, others_bytes: int, free: int
) -> FetchFailed:
    """Return the error for a fetch for which the disk has no space. Its class is NETWORK: the load is tried again, as
    space may become free. `others_bytes`: the part of `needed_bytes` that other fetches need.
    """
    shared = f" ({others_bytes / 2**20:.1f} of them by other fetches)" if others_bytes else ""
    needs = (
        f"no space on the disk of {cache.folder}: {needed_bytes / 2**20:.1f} MiB are needed{shared}, {free / 2**20:.1f}"
        " are free"
    )
    if threshold_percent is None:
        return FetchFailed("NETWORK", f"{needs}; delete files there, or set SIE_DISK_CACHE_ENABLED=true")
    return FetchFailed("NETWORK", f"{needs}, and SIE cannot remove enough of its files; free space on the disk")


def _sole_removal(cache: LocalCache) -> Lock:
    """Acquire the lock that allows one process of the node to remove snapshots: two processes would remove twice as
    much as necessary. Return an object without a lock if another process holds the lock for longer than REMOVAL_S, or
    if the lock file cannot be written.
    """
    deadline_s = time.monotonic() + REMOVAL_S
    try:
        while (lock := try_lock(cache.hub / ".locks" / "sie.removal", shared=False)) is None:
            if time.monotonic() > deadline_s:
                return Lock(None)
            time.sleep(_POLL_S)
    except OSError as error:
        _logger.warning(
            "snapshots in %s are removed without a lock, because the lock file cannot be written: %s",
            cache.folder,
            error,
        )
        return Lock(None)
    return lock
