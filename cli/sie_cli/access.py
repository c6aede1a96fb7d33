"""File with the addresses and passwords of a running `sie serve`. Other `sie` commands of the same user read the file.

sie serve ──► DATA_DIR/access.json (mode 0600) ──► Cluster of `sie keys`, `sie dlq`, `sie models`, ...
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sie_contracts.errors import UNDECODABLE
from sie_contracts.settings import SettingError
from sie_store import durable

FILE, LOCK = "access.json", "lock"
OPERATOR = "operator"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and credentials that `sie serve` writes for other commands. The address of a process is empty if this
    `sie serve` did not start that process.
    """

    gateway_url: str
    config_url: str = ""
    broker_url: str = ""  # URL without user and password
    broker_monitor_url: str = ""  # URL with a secret path, because the monitor of the broker has no passwords
    operator_password: str = ""
    admin_token: str = ""
    metrics_urls: tuple[str, ...] = ()  # base URLs of the metrics and probes of each gateway, then of each worker
    models_dir: str = ""  # folder or bucket of the served models
    # during a long start of the broker, the name of the stream whose files the broker reads; empty for a ready broker
    unread_stream: str = ""

    def __repr__(self) -> str:
        return (
            f"Access(gateway_url={self.gateway_url!r}, config_url={self.config_url!r}, broker_url={self.broker_url!r})"
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read. The write is atomic, also if the power fails. A link at `path` is
    replaced, not followed.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    durable.write_through(Path(temporary), path, content)


def publish(data_dir: Path, access: Access) -> None:
    write_private(data_dir / FILE, msgspec.json.format(msgspec.json.encode(access)))


@contextlib.contextmanager
def published(data_dir: Path, access: Access) -> Iterator[None]:
    publish(data_dir, access)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (data_dir / FILE).unlink()


def read(data_dir: Path) -> Access | None:
    """Read the access file in a data directory. Return None if there is no file. Also return None if no process has
    locked the lock file: then the `sie serve` that wrote the access file was killed. Raises SettingError for a file
    that cannot be used.
    """
    path = data_dir / FILE
    try:
        if path.exists() and _is_unlocked(data_dir / LOCK):
            return None
        return msgspec.json.decode(path.read_bytes(), type=Access)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SettingError("--data-dir", f"{path}: {error.strerror}; run this as the user of `sie serve`") from error
    except UNDECODABLE as error:
        raise SettingError(
            "--data-dir",
            f"{path} was not written by this version of `sie`: restart `sie serve`, or use the `sie` that wrote it",
        ) from error


def _is_unlocked(lock: Path) -> bool:
    """Return whether the lock file exists and no process has locked it. An unreadable lock file counts as locked."""
    try:
        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def as_operator(broker_url: str) -> str:
    return broker_url.replace("://", f"://{OPERATOR}@", 1)
