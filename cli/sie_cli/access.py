"""How the commands of one user find the `sie serve` of that user: its addresses and passwords, in one file of its data
directory.

    sie serve ── addresses, passwords of this start ──► DATA_DIR/access.json (0600) ──► sie keys, dlq, topology, doctor,
    models, top

The file is written anew at each start and removed at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from sie_cli.data_dir import default_data_dir
from sie_contracts.settings import Loaded, Secret, SettingError, public_url

FILE = "access.json"
SOURCE = "data directory"
OPERATOR = "operator"


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """What `sie serve` tells the commands of its user. An address is empty where this start has no such process."""

    gateway_url: str
    config_url: str = ""
    broker_url: str = ""  # without a user
    broker_monitor_url: str = ""  # with a path that nobody guesses: the server's monitor knows no passwords
    operator_password: str = ""
    admin_token: str = ""
    metrics_urls: tuple[str, ...] = ()  # of gateways, then of workers, without a path: metrics and probes
    models_dir: str = ""  # the folder or bucket whose models it serves

    def __repr__(self) -> str:
        return (
            f"Access(gateway_url={self.gateway_url!r}, config_url={self.config_url!r}, broker_url={self.broker_url!r})"
        )


def write_private(path: Path, text: str) -> None:
    """Write a file that its owner alone may read, as a whole: nobody ever sees half of it, or follows a link to another
    file.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def published(data_dir: Path, access: Access) -> Iterator[None]:
    """Keep the file of this start for as long as the context lasts."""
    path = data_dir / FILE
    write_private(path, msgspec.json.format(msgspec.json.encode(access)).decode())
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def read(data_dir: Path) -> Access | None:
    """What the `sie serve` of this data directory wrote; None where none runs. Raises SettingError for a file that
    cannot be used.
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


def with_access(found: Loaded, data_dir: Path | None, *, required: bool = True) -> Loaded:
    """The settings, with addresses and credentials of the local `sie serve` where nobody gave others.

    An address comes from its flag, then from `data_dir` if that is given, then from the environment, then from the
    default data directory. Credentials belong to an address: those of the file go to the addresses of the file and
    nowhere else. Raises SettingError for a file that cannot be used, if `required` also where `data_dir` has none.
    """
    named = data_dir is not None
    if not named and all(found.sources[name] != "default" for name in _ADDRESSES):
        return found
    access = read(data_dir or default_data_dir())
    if access is None:
        if named and required:
            there = f"there is no {FILE} in it" if data_dir is not None and data_dir.exists() else "it is not there"
            raise SettingError("--data-dir", f"no `sie serve` runs with {data_dir}: {there}")
        return found
    changes: dict[str, object] = {}
    sources = dict(found.sources)
    chosen = {name for name in _ADDRESSES if sources[name] == "flag" or (sources[name] == "environment" and not named)}
    local = {name: getattr(access, address) for name, (_, address) in _ADDRESSES.items()}
    given = {name: getattr(found.settings, field) for name, (field, _) in _ADDRESSES.items()}
    known = {name for name in chosen if public_url(given[name] or "").rstrip("/") in local[name].split(",")}
    is_ours = named or chosen == known  # one address of another cluster: nobody wants the others to be of this one
    for name, (field, _) in _ADDRESSES.items():
        if local[name] and (name in known or (is_ours and name not in chosen)):
            sources[name] = SOURCE
            changes |= {field: given[name] if name in known else local[name], **_credentials(name, access)}
    return dataclasses.replace(found, settings=dataclasses.replace(found.settings, **changes), sources=sources)  # type: ignore[arg-type]


_ADDRESSES: Mapping[str, tuple[str, str]] = {
    "SIE_NATS_URL": ("nats_url", "broker_url"),
    "SIE_CONFIG_SERVICE_URL": ("config_service_url", "config_url"),
    "SIE_GATEWAY_URL": ("gateway_url", "gateway_url"),
}


def _credentials(name: str, access: Access) -> dict[str, object]:
    """The settings that say who asks, for one of the addresses."""
    if name == "SIE_NATS_URL":
        return {"nats_url": as_operator(access.broker_url), "nats_password": Secret(access.operator_password)}
    token = Secret(access.admin_token)
    return {"auth_token": token} if name == "SIE_GATEWAY_URL" else {"admin_token": token, "config_read_token": token}


def as_operator(broker_url: str) -> str:
    """The broker's address with the user of people's commands."""
    return broker_url.replace("://", f"://{OPERATOR}@", 1)
