"""Counts and logs requests that the HTTP server itself refuses or breaks off."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

TELL_S = 10.0  # smallest number of seconds between two log lines about refused requests
# reasons why the HTTP server refuses a request; `unread` is the reason why the server breaks off a response
REFUSED = ("host", "origin", "malformed", "connections", "slow", "unread")
_logger = logging.getLogger("sie.http")


class Refusals:
    """Counts refused requests. `count` is called with the reason, one of REFUSED. At most one line per TELL_S seconds
    is logged, so that invalid requests cannot fill the log.
    """

    def __init__(self, count: Callable[[str], object] | None = None) -> None:
        self._tally = count
        self._count = 0
        self._logged_s = -TELL_S

    def note(self, reason: str, message: str) -> None:
        if self._tally is not None:
            self._tally(reason)
        self._count += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= TELL_S:
            _logger.info("the HTTP server refused or broke off %d requests, the last one: %s", self._count, message)
            self._count, self._logged_s = 0, now_s
