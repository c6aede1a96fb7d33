"""Progress of a fetch of weights. It is reported to a callback, logged every few seconds, and read by any thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sie_contracts.wire.heartbeats import Fetched

_logger = logging.getLogger("sie.store")

LOG_EVERY_S = 5.0
STEP_EVERY_S = 1.0


class FetchProgress:
    """Progress of one fetch. Every method may be called from any thread. `label` names the fetch in the log; `clock` is
    in seconds.

    `expect` calls `on_expect` with the number of missing bytes, then `on_step` with the progress. `on_expect` may raise
    FetchFailed. Later, `add` and `touch` call `on_step` at most once per second.
    """

    def __init__(self, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.label = label
        self._clock = clock
        self._lock = threading.Lock()
        self._total_bytes = 0
        self._had_bytes = 0
        self._arrived_bytes = 0
        self._followed_per_s = 0.0
        self._started_s = self._logged_s = clock()
        self._stepped_s = -STEP_EVERY_S  # time of the last call of `on_step`; the first call is due at once
        self.on_expect: Callable[[int], None] = lambda _: None
        self.on_step: Callable[[Fetched], None] = lambda _: None

    def expect(self, total_bytes: int, had_bytes: int = 0) -> None:
        """Set the number of bytes of the whole snapshot, and the number of bytes that are already stored. Calls
        `on_expect`, which frees space for the missing bytes. Raises FetchFailed.
        """
        with self._lock:
            self._total_bytes, self._had_bytes, self._stepped_s = total_bytes, had_bytes, -STEP_EVERY_S
            self._started_s, self._arrived_bytes = self._clock(), 0
        self.on_expect(total_bytes - had_bytes)
        self.add(0)

    def touch(self, _: int = 0) -> None:
        """Record that work continues without new bytes: a file is being checked."""
        self.add(0)

    def follow(self, fetched: Fetched) -> None:
        """Set the figures to those of another process that fetches this snapshot; `state` returns these figures."""
        with self._lock:
            self._total_bytes, self._had_bytes, self._followed_per_s = (
                fetched.total_bytes,
                fetched.done_bytes,
                fetched.bytes_per_s,
            )

    def add(self, count: int) -> None:
        """Add `count` received bytes. A negative `count` subtracts bytes that must be fetched again."""
        with self._lock:
            self._arrived_bytes += count
            now_s = self._clock()
            steps, logs = now_s - self._stepped_s >= STEP_EVERY_S, now_s - self._logged_s >= LOG_EVERY_S
            if not steps and not logs:
                return
            self._stepped_s = now_s if steps else self._stepped_s
            self._logged_s = now_s if logs else self._logged_s
            summary, state = self._summary(now_s), self._state(now_s)
        if steps:
            self.on_step(state)
        if logs:
            _logger.info("fetching %s: %s", self.label, summary)

    def end(self) -> None:
        with self._lock:
            summary = self._summary(self._clock())
        _logger.info("fetched %s: %s", self.label, summary)

    def state(self) -> Fetched:
        """Return the number of stored bytes, the number of bytes of the whole snapshot, and the bytes per second."""
        with self._lock:
            return self._state(self._clock())

    def _state(self, now_s: float) -> Fetched:
        rate = self._rate(now_s) if self._arrived_bytes else self._followed_per_s
        return Fetched(self._had_bytes + self._arrived_bytes, self._total_bytes, round(rate, 1))

    def _rate(self, now_s: float) -> float:
        passed_s = now_s - self._started_s
        return self._arrived_bytes / passed_s if passed_s > 0 else 0.0

    def _summary(self, now_s: float) -> str:
        done, total = self._had_bytes + self._arrived_bytes, self._total_bytes
        share = f"{100 * done / total:.0f} %, " if total else ""
        return f"{share}{done / 2**20:.1f} of {total / 2**20:.1f} MiB, {self._rate(now_s) / 2**20:.1f} MiB/s"
