"""Data directory of `sie serve`: its lock, and the sockets of its workers."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sie_cli.access import FILE, LOCK
from sie_contracts.settings import SettingError
from sie_contracts.wire.ownership import distrusted

# largest length of a socket's path in bytes; for a longer path, `sockets_folder` returns another folder. The kernel
# allows a few bytes more (unix(7))
MAX_SOCKET_BYTES = 100
_LONGEST = "worker-999.sock"


def default_data_dir() -> Path:
    """Return the folder `sie` in the user's folder for data (XDG Base Directory Specification)."""
    named = os.environ.get("XDG_DATA_HOME", "")
    base = named if os.path.isabs(named) else os.path.expanduser("~/.local/share")
    return Path(base) / "sie"


def sockets_folder(data_dir: Path) -> Path:
    """Return the folder for sockets: `run` in the data directory. If its path is too long for a socket, return a folder
    in the directory for temporary files.
    """
    own = data_dir / "run"
    if len(os.fsencode(own / _LONGEST)) <= MAX_SOCKET_BYTES:
        return own
    return Path(tempfile.gettempdir(), f"sie-{hashlib.blake2b(os.fsencode(data_dir), digest_size=8).hexdigest()}")


def socket_path(data_dir: Path, worker: int) -> Path:
    return sockets_folder(data_dir) / f"worker-{worker}.sock"


def private_folder(path: Path) -> Path:
    """Create a folder that only this user may use, or accept an existing folder. Raises SettingError if the path is a
    link to a folder, or a folder of another user. Raises OSError, also if the path is a file.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise SettingError("--data-dir", f"{path} is no folder of this user: remove it, or name another data directory")
    path.chmod(0o700)
    return path


class InUse(SettingError):
    """Raised if another `sie serve` uses the data directory; `url` is the address of its gateway."""

    def __init__(self, data_dir: Path, url: str = "") -> None:
        at = f" at {url}" if url else ""
        message = (
            f"a `sie serve` runs{at} with {data_dir}: `sie run MODEL TEXT` and `sie pull MODEL` add a model to it; a "
            "second server needs another --data-dir and another --port"
        )
        super().__init__("--data-dir", message)
        self.data_dir = data_dir


@contextlib.contextmanager
def locked_data_dir(path: Path) -> Iterator[None]:
    """Create a data directory if necessary, and lock it for one `sie serve`. Its contents are private to the user.
    Raises SettingError, and InUse if another `sie serve` has the lock.
    """
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # an existing folder keeps its mode, because each file and folder in it is created as private
            path.mkdir(mode=0o700, exist_ok=True)
            if why := distrusted(path):
                raise SettingError(
                    "--data-dir", f"{path}: {why}; name another folder, or `chown` and `chmod o-w` this one"
                )
            # with mode 0600, no other user can open the file and lock it
            lock = held.enter_context(open(path / LOCK, "w", opener=lambda name, flags: os.open(name, flags, 0o600)))
            os.fchmod(lock.fileno(), 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InUse(path) from error
            # Remove the file of a killed `sie serve`. Other programs may use the addresses in the file by now, and
            # commands would send credentials to them.
            (path / FILE).unlink(missing_ok=True)
            sockets = sockets_folder(path)
            try:
                private_folder(sockets)
            except SettingError:
                # the folder is in the directory for temporary files, where another user may have created it first
                raise SettingError(
                    "--data-dir",
                    f"another user owns {sockets}: name a data directory with a path short enough for its own sockets",
                ) from None
        except OSError as error:
            raise SettingError("--data-dir", f"{path}: {error.strerror}") from error
        try:
            yield
        finally:
            # remove the sockets' folder before the lock is released: afterwards the next `sie serve` may use this
            # folder
            if sockets.parent != path:
                with contextlib.suppress(OSError):  # rmdir fails if a killed process has left its socket in the folder
                    sockets.rmdir()
