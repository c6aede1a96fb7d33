"""File locks between the processes of a node: a shared lock for each process that uses a snapshot, an exclusive lock
for the process that fetches or removes it.

The kernel releases a lock when its process ends, for any reason. Threads of one process exclude each other too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


class Lock:
    """Lock that is held until `close`, or until the object is destroyed. Only the holder of the exclusive lock may
    remove the lock's file. `try_lock` never returns the lock of a removed file.
    """

    def __init__(self, descriptor: int | None, *, is_use: bool = False) -> None:
        """Hold the lock on `descriptor`; None creates an object without a lock. With `is_use`, the file's mtime is set
        when the lock begins and ends, so that it shows the last use.
        """
        self._descriptor = descriptor
        self._is_use = is_use
        self._touch()

    def write(self, data: bytes) -> None:
        """Write a note into the lock's file, for processes that wait for the lock. Errors (a full disk, a file of
        another user) are ignored, because these processes only report the note as progress.
        """
        if self._descriptor is None:
            return
        try:
            os.pwrite(self._descriptor, data, 0)
            os.ftruncate(self._descriptor, len(data))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, 0)  # an empty note reports no progress, an old one would be wrong

    def _touch(self) -> None:
        if self._descriptor is not None and self._is_use:
            with contextlib.suppress(OSError):  # utime fails on a file of another user
                os.utime(self._descriptor)

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        self._touch()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def try_lock(path: Path, *, shared: bool, is_use: bool = False) -> Lock | None:
    """Acquire the lock at `path` without waiting. Return None if another lock excludes it, or if its file was removed
    meanwhile. Raises OSError.

    A file that this process may not write to is opened for reading; a network file system may refuse an exclusive lock
    on such a file. If this process may neither open nor create the file, `shared` gives a Lock that locks nothing, so
    that a snapshot in a read-only folder can be used.
    """
    refused: OSError | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except FileNotFoundError:  # the holder of the exclusive lock has removed the folder
        return None
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        refused = error
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            if shared:
                return Lock(None)
            raise refused from None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise (refused or error) from None
    lock = Lock(descriptor, is_use=is_use)
    try:
        is_there = os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        is_there = False
    return lock if is_there else None
