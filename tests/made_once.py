"""Folders that are created once in a run of the tests, by the first process that needs them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name`, which `make` fills. Other processes wait until it is complete. Tests only read it.

    If `make` raises, the next process that needs the folder tries again.
    """
    base = factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # the base of a worker is a folder in it
    folder, growing = shared / name, shared / f"{name}.{os.getpid()}"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            growing.mkdir(exist_ok=True)
            make(growing)
            growing.rename(folder)
    return folder
