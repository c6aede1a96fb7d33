"""What is refused below any application: counted by its reason, and told in the log now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

TELL_S = 10.0  # between lines in the log about what is refused here
# the reasons for which something is refused below any application
REFUSED = (
    "host",
    "origin",
    "malformed",
    "connections",
    "unread",
)
_logger = logging.getLogger("sie.http")


class Refusals:
    """What is refused below any application: each one is counted by its reason, and the log has one line each TELL_S,
    since whoever sends garbage must not fill it. `count` is called with one of REFUSED.
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
