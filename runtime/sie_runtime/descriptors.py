"""The open files that a process may have, and how many of them are left to its clients."""

from __future__ import annotations

import functools
import resource

MAX_FILES = 1 << 16
SPARE_FILES = 256  # for everything but clients


def raise_limit() -> float:
    """Raise this process's soft limit on open files as far as may be, MAX_FILES at most; what it is then, infinite
    without one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return float("inf") if soft == resource.RLIM_INFINITY else soft


@functools.cache
def max_connections() -> int:
    """How many clients may be connected: the open files of this process, MAX_FILES at most, less SPARE_FILES."""
    return max(1, int(min(raise_limit(), MAX_FILES)) - SPARE_FILES)
