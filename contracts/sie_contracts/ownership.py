"""Whether a folder may be relied on: who writes there decides what runs here, and what is read."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def distrusted(folder: Path) -> str:
    """Why what lies in `folder` may be somebody else's work; empty where only this user or root may put it there.

    Raises OSError for a folder that cannot be looked at.
    """
    found = folder.stat()
    if is_open(folder):
        return f"every user of this machine may write there (mode {stat.S_IMODE(found.st_mode):04o})"
    if found.st_uid not in (0, os.geteuid()):
        return f"it belongs to another user (uid {found.st_uid})"
    return ""


def is_open(folder: Path) -> bool:
    """Whether every user may write there. A mounted ConfigMap or image is open to all by its mode, and nobody can.
    Raises OSError.
    """
    return bool(folder.stat().st_mode & stat.S_IWOTH) and not os.statvfs(folder).f_flag & os.ST_RDONLY
