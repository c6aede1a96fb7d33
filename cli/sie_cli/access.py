"""The file in which a `sie serve` tells the commands of its user its addresses and passwords.

    sie serve ──► DATA_DIR/access.json (mode 0600) ──► Cluster of `sie keys`, `sie dlq`, `sie models`, ...

It is written at each start and removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sie_contracts.settings import SettingError

FILE = "access.json"
OPERATOR = "operator"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """The addresses and credentials that `sie serve` leaves to the commands of its user. An address is empty where this
    start has no such process.
    """

    gateway_url: str
    config_url: str = ""
    broker_url: str = ""  # without a user
    broker_monitor_url: str = ""  # with a path that nobody guesses: the server's monitor knows no passwords
    operator_password: str = ""
    admin_token: str = ""
    metrics_urls: tuple[str, ...] = ()  # of gateways, then of workers, without a path: metrics and probes
    models_dir: str = ""  # the folder or bucket whose models it serves
    unread_stream: str = ""  # whose files its broker began to read and has not read to the end, while that lasts long

    def __repr__(self) -> str:
        return (
            f"Access(gateway_url={self.gateway_url!r}, config_url={self.config_url!r}, broker_url={self.broker_url!r})"
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that its owner alone may read, as a whole: nobody ever sees half of it, or follows a link to another
    file.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def publish(data_dir: Path, access: Access) -> None:
    """Write the file of this start."""
    write_private(data_dir / FILE, msgspec.json.format(msgspec.json.encode(access)))


@contextlib.contextmanager
def published(data_dir: Path, access: Access) -> Iterator[None]:
    """Keep the file of this start for as long as the context lasts."""
    publish(data_dir, access)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (data_dir / FILE).unlink()


def read(data_dir: Path) -> Access | None:
    """Read the file that the `sie serve` of this data directory wrote; None where none runs. Raises SettingError for a
    file that cannot be used.
    """
    path = data_dir / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Access)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SettingError("--data-dir", f"{path}: {error.strerror}; run this as the user of `sie serve`") from error
    except msgspec.DecodeError as error:
        raise SettingError("--data-dir", f"{path} was not written by this version of `sie serve`") from error


def as_operator(broker_url: str) -> str:
    """The broker's address with the user of people's commands."""
    return broker_url.replace("://", f"://{OPERATOR}@", 1)
