"""Files that are complete or absent, even after a loss of power."""

from __future__ import annotations

import os
from pathlib import Path

PART = ".part"  # suffix of an incomplete file


def write(path: Path, data: bytes) -> None:
    """Write `data` to a file at `path`, which replaces an existing file. Raises OSError."""
    growing = path.with_name(path.name + PART)
    with growing.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(growing, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the present names of the files in a folder are on the disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
