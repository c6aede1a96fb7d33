"""Files that are written completely or not at all, even if the power fails."""

from __future__ import annotations

import os
from pathlib import Path

PART = ".part"  # suffix of a file that is not complete yet


def write(path: Path, data: bytes) -> None:
    """Write a file; an existing one is replaced as a whole. Raises OSError."""
    growing = path.with_name(path.name + PART)
    with growing.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(growing, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names of the files in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
