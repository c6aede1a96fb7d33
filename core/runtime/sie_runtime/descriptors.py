"""Limit on open files of a process, and the number of connections that clients may use."""

from __future__ import annotations

import functools
import resource

MAX_FILES = 1 << 16
SPARE_FILES = 256  # number of descriptors that are reserved for uses other than connections of clients


def raise_limit() -> float:
    """Raise this process's soft limit on open files, to MAX_FILES at most. Returns the new limit; infinity if the
    system has no limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return float("inf") if soft == resource.RLIM_INFINITY else soft


@functools.cache
def max_connections() -> int:
    """Return the maximum number of client connections: the limit on open files, at most MAX_FILES, minus
    SPARE_FILES.
    """
    return max(1, int(min(raise_limit(), MAX_FILES)) - SPARE_FILES)
