"""The data directory of `sie serve`: who holds it, and where the sockets of its workers are."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import TextIO

from sie_contracts.settings import SettingError

MOST_SOCKET_BYTES = 100  # of the path of a socket, which the kernel bounds (unix(7))
_LONGEST = "worker-999.sock"


def default_data_dir() -> Path:
    base = os.path.expanduser("~/.local/share")
    return Path(base) / "sie"


def sockets_folder(data_dir: Path) -> Path:
    """`run` in the data directory; where its path is too long for a socket's, one of its own in the directory for temporary files."""
    own = data_dir / "run"
    if len(os.fsencode(own / _LONGEST)) <= MOST_SOCKET_BYTES:
        return own
    return Path(tempfile.gettempdir(), f"sie-{hashlib.blake2b(os.fsencode(data_dir), digest_size=8).hexdigest()}")


def socket_path(data_dir: Path, worker: int) -> Path:
    return sockets_folder(data_dir) / f"worker-{worker}.sock"


class DataDir:
    """The data directory, held by one `sie serve` at a time. The folder of its sockets is private to its user."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: TextIO | None = None

    def __enter__(self) -> DataDir:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.mkdir(mode=0o700, exist_ok=True)  # one that was there keeps its mode: it may be anything
            sockets = sockets_folder(self._path)
            sockets.mkdir(mode=0o700, exist_ok=True)
            found = sockets.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():  # anybody may write where temporary files are
                raise SettingError("--data-dir", f"{sockets}, for sockets, is another user's; name a directory with a shorter path")
            sockets.chmod(0o700)
            self._lock = (self._path / "lock").open("w")
        except OSError as error:
            raise SettingError("--data-dir", f"{self._path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise SettingError("--data-dir", f"{self._path} is in use by another sie serve; name another one") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()
        if (sockets := sockets_folder(self._path)).parent != self._path:
            with contextlib.suppress(OSError):  # a process that was killed has left its socket
                sockets.rmdir()
