"""Folders that are made once in a run of the tests, whichever of its processes wants them first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, which `make` fills. Another process waits until it is whole. To be read only.

    If `make` raises, the next one that wants the folder tries again.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # each worker has a folder of its own in it
    folder, growing = shared / name, shared / f"{name}.{os.getpid()}"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            growing.mkdir(exist_ok=True)
            make(growing)
            growing.rename(folder)
    return folder
