"""Check whether another user can write to a folder from which SIE reads code or data."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def distrusted(folder: Path) -> str:
    """Return the reason why another user may have written to `folder`; empty if the folder belongs to this user or root
    and not every user can write there. Write access of the folder's group is accepted. Raises OSError.
    """
    status = folder.stat()
    if is_open(folder):
        return f"every user of this machine may write there (mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (uid {status.st_uid})"
    return ""


def is_open(folder: Path) -> bool:
    """Return whether every user can write to the folder. On a read-only file system, such as a mounted ConfigMap, no
    user can write, although the mode of a folder often allows it. Raises OSError.
    """
    return bool(folder.stat().st_mode & stat.S_IWOTH) and not os.statvfs(folder).f_flag & os.ST_RDONLY
