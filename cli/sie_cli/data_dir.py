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
from sie_contracts.wire.ownership import distrusted

MAX_SOCKET_BYTES = 100  # of the path of a socket, which the kernel bounds (unix(7))
_LONGEST = "worker-999.sock"


def default_data_dir() -> Path:
    """`sie` in the folder for a user's data (XDG Base Directory Specification)."""
    named = os.environ.get("XDG_DATA_HOME", "")
    base = named if os.path.isabs(named) else os.path.expanduser("~/.local/share")
    return Path(base) / "sie"


def sockets_folder(data_dir: Path) -> Path:
    """`run` in the data directory; where its path is too long for a socket's, one of its own in the directory for
    temporary files.
    """
    own = data_dir / "run"
    if len(os.fsencode(own / _LONGEST)) <= MAX_SOCKET_BYTES:
        return own
    return Path(tempfile.gettempdir(), f"sie-{hashlib.blake2b(os.fsencode(data_dir), digest_size=8).hexdigest()}")


def socket_path(data_dir: Path, worker: int) -> Path:
    return sockets_folder(data_dir) / f"worker-{worker}.sock"


def private_folder(path: Path) -> Path:
    """Make a folder that this user alone may use, or take the one that is there. Raises SettingError for what is not
    ours, OSError.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise SettingError("--data-dir", f"{path} is no folder of this user: remove it, or name another data directory")
    path.chmod(0o700)
    return path


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class InUse(SettingError):
    """Data directory in use by another `sie serve`, which serves at `url`."""

    def __init__(self, data_dir: Path, url: str = "") -> None:
        at = f" at {url}" if url else ""
        super().__init__("--data-dir", f"{data_dir} is in use by another sie serve{at}; name another one")
        self.data_dir = data_dir


class DataDir:
    """The data directory, held by one `sie serve` at a time. What it holds is private to its user."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: TextIO | None = None

    def __enter__(self) -> DataDir:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # one that was there keeps its mode, what is in it is private in any case
            self._path.mkdir(mode=0o700, exist_ok=True)
            if why := distrusted(self._path):
                raise SettingError(
                    "--data-dir", f"{self._path}: {why}; name another one, or make it yours and `chmod o-w` it"
                )
            sockets = sockets_folder(self._path)
            try:
                private_folder(sockets)
            except SettingError:  # anybody may write where temporary files are
                raise SettingError(
                    "--data-dir", f"{sockets}, for sockets, is another user's; name a directory with a shorter path"
                ) from None
            self._lock = open(self._path / "lock", "w", opener=_private)  # else another user could hold it
            os.fchmod(self._lock.fileno(), 0o600)
        except OSError as error:
            raise SettingError("--data-dir", f"{self._path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise InUse(self._path) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()
        if (sockets := sockets_folder(self._path)).parent != self._path:
            with contextlib.suppress(OSError):  # a process that was killed has left its socket
                sockets.rmdir()
