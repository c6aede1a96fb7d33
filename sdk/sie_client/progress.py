"""Progress of a call for its user: log lines about waits, a bar on a terminal, and calls of `on_progress`."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from sie_client.core import HttpAnswer, Pause, Session
from sie_client.types import Progress

LOG_EVERY_S = 60.0
BAR_AFTER_S = 1.0  # seconds until the bar appears, so that short calls show no bar
DRAW_EVERY_S = 0.1
NOTEBOOK_STREAM = "ipykernel.iostream"  # module of the class of `sys.stderr` in a Jupyter notebook
TIMED_OUT = "GATEWAY_TIMEOUT"  # error code of a request that exceeded its deadline; `_log` has a special text for it
_logger = logging.getLogger("sie_client")


class Meter:
    """Progress of one call. Thread-safe. `total`: number of items; None if unknown, 0 for a call without items.

    Waits are logged as warnings of `sie_client`, at most one per minute. A call of several items gets a bar, one line
    on standard error, if some items have no result after BAR_AFTER_S. The end of the meter's `with` block draws the bar
    for the last time and adds a line break. The callback `on_progress` is called only in calls with items.
    """

    def __init__(
        self,
        session: Session,
        total: int | None = 0,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        address: str = "",
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._callback = session.on_progress
        is_long = total is None or total > 1
        self._is_counted = total is None or total > 0
        self._has_bar = is_long and (self._is_shown_live() if session.progress is None else session.progress)
        self._clock = clock
        self._address = f" at {address}" if address else ""
        # reentrant, because `on_progress` is called while the lock is held, and may cause another update
        self._lock = threading.RLock()
        self._started_s = clock()
        self._logged_s: float | None = None
        self._drawn_s = 0.0
        self._width = 0  # characters of the bar's line on the screen, 0 if there is no bar
        self._latest = Progress(0, total or 0)

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._width:
                self._draw(self._clock())
                self._write("\n")

    def _is_shown_live(self) -> bool:
        """Return True if the stream is a terminal or the output of a notebook, where a line can be overwritten."""
        try:
            return self._stream.isatty() or type(self._stream).__module__ == NOTEBOOK_STREAM
        except (AttributeError, ValueError):  # the stream is missing or closed
            return False

    def update(self, step: Pause | HttpAnswer) -> None:
        """Record more answered items or the start of a wait. Redraw the bar, log the wait, and call `on_progress`."""
        with self._lock:
            done, total = self._latest.done, self._latest.total
            now_s = self._clock()
            if isinstance(step, HttpAnswer):
                self._latest = Progress(done + step.items, total)
            elif step.cause:
                self._latest = Progress(done, total, step.cause, step.remaining_s)
                self._log(step, now_s)
            else:
                return
            is_due = now_s - self._started_s >= BAR_AFTER_S and now_s - self._drawn_s >= DRAW_EVERY_S
            if self._has_bar and is_due and (self._width or not total or self._latest.done < total):
                self._draw(now_s)
            if self._callback is not None and self._is_counted:
                self._callback(self._latest)

    def _log(self, pause: Pause, now_s: float) -> None:
        if self._logged_s is not None and now_s - self._logged_s < LOG_EVERY_S:
            return
        self._logged_s = now_s
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0
        if pause.cause == TIMED_OUT:
            _logger.warning(
                "a request exceeded its deadline%s and is sent again in %.1f s. To avoid this, raise timeout_s or "
                "lower part_tokens. The call fails if no request is answered within %.0f s",
                self._address,
                pause.seconds,
                pause.remaining_s,
            )
            return
        _logger.warning(
            "waiting for %s%s%s: next attempt in %.1f s, the call waits at most %.0f s more",
            pause.cause,
            self._address,
            f" ({pause.error})" if pause.error else "",
            pause.seconds,
            pause.remaining_s,
        )

    def _draw(self, now_s: float) -> None:
        text, columns = self._latest, shutil.get_terminal_size().columns - 1
        counts = f"{text.done:,}/{text.total:,} " if text.total else f"{text.done:,} "
        rate = text.done / max(now_s - self._started_s, 1e-3)
        if text.cause == TIMED_OUT:
            rest = f" {rate:,.0f}/s, a slow part is sent again"
        elif text.cause:
            rest = f" waiting for {text.cause}, fails in {text.remaining_s:.0f} s"
        elif text.done < text.total:
            left_s = (text.total - text.done) / rate if rate else 0.0
            rest = f" {rate:,.0f}/s, {left_s:,.0f} s left"
        else:
            rest = f" {rate:,.0f}/s"
        if not text.total:
            self._show(f"{counts}done{rest}"[:columns], now_s)
            return
        room = max(10, min(40, columns - len(counts) - len(rest) - 2))
        filled = room * text.done // text.total
        self._show(f"{counts}[{'#' * filled}{'.' * (room - filled)}]{rest}"[:columns], now_s)

    def _show(self, line: str, now_s: float) -> None:
        self._write("\r" + line.ljust(self._width))
        self._width, self._drawn_s = len(line), now_s

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        # the stream is missing or closed, or cannot show these characters: go on without a bar
        except (AttributeError, OSError, ValueError):
            self._has_bar = False
