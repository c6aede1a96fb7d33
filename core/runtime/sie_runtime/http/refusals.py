"""Counts and logs requests that are refused before they reach an application."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

TELL_S = 10.0  # smallest number of seconds between two log lines about refused requests
# reasons why a request is refused before it reaches an application
REFUSED = (
    "host",
    "origin",
    "malformed",
    "connections",
    "slow",
    "unread",
)
_logger = logging.getLogger("sie.http")


class Refusals:
    """Counts refused requests. `count` is called with the reason, one of REFUSED. At most one line per TELL_S seconds
    is logged, so that invalid requests cannot fill the log.
    """

    def __init__(self, count: Callable[[str], object] | None = None) -> None:
        self._tally = count
        self._count = 0
        self._told_s = -TELL_S

    def note(self, reason: str, message: str) -> None:
        if self._tally is not None:
            self._tally(reason)
        self._count += 1
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_S:
            _logger.info("%d requests were refused before they reached a route, the last one: %s", self._count, message)
            self._count, self._told_s = 0, now_s
