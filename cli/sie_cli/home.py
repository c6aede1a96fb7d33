"""Home folder for a user who has none. A container often runs under a user id that has no name and no home folder. But
torch needs a name, and libraries of Hugging Face need a folder. So `settle` sets both in the environment, and child
processes inherit both.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from sie_cli.data_dir import private_folder
from sie_contracts.settings import SettingError


def settle(environ: MutableMapping[str, str]) -> None:
    """Set HOME if it is unset or this user cannot use it, and USER if the user has no name. HOME becomes the folder in
    the user database, else a private folder `sie-UID` in the directory for temporary files. Raises SettingError if
    `sie-UID` belongs to another user or is a link.
    """
    user: pwd.struct_passwd | None = None
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.geteuid())
    if user is None and not (environ.get("LOGNAME") or environ.get("USER")):
        environ["USER"] = f"uid-{os.geteuid()}"
    named = environ.get("HOME", "")
    if _is_usable(named):
        return
    if user is not None and _is_usable(user.pw_dir):
        environ["HOME"] = user.pw_dir
        return
    folder = _temporary()
    environ["HOME"] = str(folder)
    try:
        private_folder(folder)
    except SettingError:
        why = f"{named or 'unset'}, and {folder} belongs to another user: name a folder where this user may write"
        raise SettingError("HOME", why) from None
    except OSError:  # no folder is writable; each command that needs a folder reports which setting to change
        return
    state = "is unset" if not named else f"is {named}, where this user may not write"
    sys.stderr.write(f"HOME {state}: data and caches are in {folder}, until this folder is cleared\n")


def _is_usable(home: str) -> bool:
    """Return whether the user may enter this folder, or can create it. A read-only folder is usable, because writable
    volumes may be mounted below it. The folder / is usable only if the user may write there, because containers set
    HOME=/ for unknown users.
    """
    if not os.path.isabs(home):
        return False
    place = Path(home)
    if place.is_dir() and place != Path("/"):
        return os.access(place, os.X_OK)
    while not os.path.exists(place):
        place = place.parent
    return place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def _temporary() -> Path:
    try:
        parent = tempfile.gettempdir()
    except FileNotFoundError:  # no folder for temporary files is writable
        parent = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 only a name: no file is written there
    return Path(parent, f"sie-{os.geteuid()}")
