"""Limit on the open files of a process, and the number of client connections that this limit allows."""

from __future__ import annotations

import functools
import resource

MAX_FILES = 1 << 16
SPARE_FILES = 256  # number of open files that are reserved for everything except client connections


def raise_limit() -> float:
    """Raise the soft limit on open files to at most MAX_FILES. Returns the soft limit; infinity if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    return float("inf") if soft == resource.RLIM_INFINITY else soft


@functools.cache
def max_connections() -> int:
    """Return the largest number of client connections: the limit on open files (MAX_FILES at most) minus SPARE_FILES,
    but at least 1.
    """
    return max(1, int(min(raise_limit(), MAX_FILES)) - SPARE_FILES)
