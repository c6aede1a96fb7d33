"""Who loads beside whom: all at the same time, or one alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Company:
    """Of one load. `met`: whether another one ran at any time while it did, known when it has ended."""

    met = False


class Turns:
    """Of the loads of one process. May be used from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._begun = 0
        self._is_one_alone = False

    @contextlib.contextmanager
    def beside_others(self) -> Iterator[Company]:
        """Waits for one that is alone, and for those that wait to be."""
        company = Company()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_one_alone)
            company.met = self._running > 0
            self._running += 1
            self._begun += 1
            begun = self._begun
        try:
            yield company
        finally:
            with self._changed:
                company.met = company.met or self._begun != begun
                self._running -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Waits for all that run now. Those that come later wait for this one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_one_alone)
            self._is_one_alone = True
            self._changed.wait_for(lambda: not self._running)
        try:
            yield
        finally:
            with self._changed:
                self._is_one_alone = False
                self._changed.notify_all()
