"""Files that are whole or not there, also when the power goes."""

from __future__ import annotations

import os
from pathlib import Path

PART = ".part"  # of a name, until its file is whole


def write(path: Path, data: bytes) -> None:
    """Put `data` in the place of `path`. Raises OSError."""
    growing = path.with_name(path.name + PART)
    with growing.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(growing, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the disk has the folder's present names. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
