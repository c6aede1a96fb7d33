"""Files that are written completely or not at all, even if the power fails."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

PART = ".part"  # suffix of a file that is not complete yet


def write(path: Path, data: bytes) -> None:
    """Write a file, or replace an existing file as a whole. Raises OSError."""
    write_through(path.with_name(path.name + PART), path, data)


def write_through(growing: Path, path: Path, data: bytes) -> None:
    """Write a file under the name `growing` in the same folder, and rename it to `path` when its bytes are on the disk.
    If the write fails, `growing` is removed. Raises OSError.
    """
    try:
        growing.write_bytes(data)
        sync(growing)
        replace(growing, path)
    except BaseException:
        with contextlib.suppress(OSError):
            growing.unlink()
        raise
    sync(path.parent)


def replace(growing: Path, path: Path) -> None:
    """Rename a file to `path`. A file, or a link to a file, that exists at `path` is replaced. Raises OSError, and
    FileExistsError if `path` is a folder, a pipe or a device such as /dev/null, which other programs need.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "is no file that can be replaced", str(path))
    os.replace(growing, path)


def sync(path: Path) -> None:
    """Wait until the bytes of a file, or the names of the files in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
