"""Room for weights on a disk that is nearly full: snapshots that were used longest ago go, before a fetch begins and,
since others fill the disk too, while the process serves (`Watch`).

Only what SIE put there goes: snapshots whose manifest it wrote, and what is left of fetches that nobody goes on with.
What the hub's own client, or anybody else, put into the same cache stays. Nor does anything go that a process of this
node loads, has loaded or fetches: each holds a lease (`LocalCache.lease`), and a removal needs that there is none.
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

from sie_store.cache import REMOVAL_S, Candidate, LocalCache
from sie_store.locks import Lock, taken
from sie_store.manifest import FetchFailed

_logger = logging.getLogger("sie.store")
_POLL_S = 0.2
LOOK_S = 30.0  # between two looks at the disk while the process serves
SPARE_BYTES = 16 << 20  # file systems need some of their own


class Usage(NamedTuple):
    """Bytes of a file system that are used, and that this user may still fill."""

    used: int
    free: int


Probe = Callable[[Path], Usage]


def usage(folder: Path, limit_bytes: int | None = None) -> Usage:
    """Of the file system of `folder`, or of what will hold it; with a limit, of so many bytes for what is below
    `folder`.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    found = shutil.disk_usage(there)
    if limit_bytes is None:
        return Usage(found.used, found.free)
    used = sum(_size(os.path.join(where, name)) for where, _, names in os.walk(folder) for name in names)
    return Usage(used, max(0, min(found.free, limit_bytes - used)))


def _size(path: str) -> int:
    """Bytes of a file; 0 for a link, and for what has gone since it was listed."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def limited(folder: Path, threshold_percent: float | None, probe: Probe = usage) -> LocalCache:
    """The local cache in `folder`, which makes room on its disk above `threshold_percent` of it
    (SIE_DISK_PRESSURE_THRESHOLD_PERCENT).

    None: nothing is removed (SIE_DISK_CACHE_ENABLED is off). A fetch that does not fit is refused before it begins,
    either way.
    """
    cache = LocalCache(folder)
    cache.room = functools.partial(make_room, cache, threshold_percent, probe)
    if threshold_percent is not None:
        cache.relieve = functools.partial(relieve, cache, threshold_percent, probe)
    return cache


def make_room(cache: LocalCache, threshold_percent: float | None, probe: Probe, needed_bytes: int) -> None:
    """Remove snapshots until `needed_bytes` more, and what other fetches of this node have to come, leave the disk
    below the threshold, or nothing is left that may go. Raises FetchFailed, and removes nothing, if they would not fit
    even then.
    """
    with _sole_removal(cache):
        going = cache.candidates() if threshold_percent is not None else []
        others_bytes = cache.outstanding_bytes()
        needed = needed_bytes + others_bytes
        free = probe(cache.folder).free
        if needed + SPARE_BYTES > free + sum(each.bytes for each in going):
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
        if needed + SPARE_BYTES > (free := probe(cache.folder).free):  # others wrote meanwhile
            raise _no_room(cache, threshold_percent, needed, others_bytes, free)


def relieve(cache: LocalCache, threshold_percent: float, probe: Probe) -> bool:
    """Remove snapshots while the disk is above the threshold and there are some that may go. Returns whether it is
    below it now.
    """

    def is_above() -> bool:
        used, free = probe(cache.folder)
        return 100 * used > threshold_percent * (used + free)

    if is_above():
        with _sole_removal(cache):
            _remove_while(is_above, cache, cache.candidates(), f"the disk is above {threshold_percent:g} %")
    return not is_above()


class Watch:
    """A thread that calls `look` every LOOK_S until it is closed. `look` returns whether all is well; a warning is
    logged when it is not any more.
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
                _logger.warning("the disk of %s cannot be looked at: %s", self._folder, error)
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
        why = error.strerror or type(error).__name__  # without the path, which has its name
        _logger.warning("%s could not be removed from the local cache: %s", name, why)
        return False


def _no_room(
    cache: LocalCache, threshold_percent: float | None, needed_bytes: int, others_bytes: int, free: int
) -> FetchFailed:
    """Of a class that is tried again later: room may come. `others_bytes`: the part of `needed_bytes` that other
    fetches need.
    """
    others = f" ({others_bytes / 2**20:.1f} of them by other fetches)" if others_bytes else ""
    needs = (
        f"no space on the disk of {cache.folder}: {needed_bytes / 2**20:.1f} MiB are needed{others}, {free / 2**20:.1f}"
        " are free"
    )
    if threshold_percent is None:
        return FetchFailed("NETWORK", f"{needs}; make room there, or set SIE_DISK_CACHE_ENABLED=true")
    return FetchFailed("NETWORK", f"{needs}, and what may be removed there is too little; make room there")


def _sole_removal(cache: LocalCache) -> Lock:
    """One process of the node at a time: two that look at the same disk would remove twice as much. One that hangs is
    not waited for, nor does it matter more than room that the lock's file is another user's or has no room itself.
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
