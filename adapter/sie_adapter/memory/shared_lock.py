"""Lock that several threads can hold together, or one thread alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Share:
    """Shared hold of a lock. `was_alone` is set when the hold ends: True if no other hold overlapped with it."""

    was_alone = True


class SharedLock:
    """Lock with shared holders or one exclusive holder. While an exclusive hold is requested, no shared hold begins."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shares = 0
        self._taken = 0  # number of shared holds that have begun; if it grows during a hold, this hold is not alone
        self._is_exclusive = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[Share]:
        share = Share()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive)
            earlier = self._shares
            self._shares += 1
            self._taken += 1
            number = self._taken
        try:
            yield share
        finally:
            with self._changed:
                share.was_alone = not earlier and self._taken == number
                self._shares -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive)
            self._is_exclusive = True
            self._changed.wait_for(lambda: not self._shares)
        try:
            yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()
