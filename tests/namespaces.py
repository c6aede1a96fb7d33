"""Namespaces of Linux in which a test runs processes: of process ids and of the network."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def namespace(kind: int, name: str) -> Iterator[None]:
    """Move this thread, or for CLONE_NEWPID its children, into a new namespace until the block ends."""
    before = os.open(f"/proc/thread-self/ns/{name}", os.O_RDONLY)
    try:
        if _LIBC.unshare(kind):
            raise OSError(ctypes.get_errno(), f"no {name} namespace may be made here")
        try:
            yield
        finally:
            assert _LIBC.setns(before, 0) == 0
    finally:
        os.close(before)
