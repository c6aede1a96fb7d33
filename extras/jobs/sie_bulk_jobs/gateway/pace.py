"""Rate of a job, forecast of its end, workers that its deadline needs, and its windows (times of day at which it may
run).
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import zoneinfo
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sie_bulk_jobs.records import JobRecord
from sie_contracts.api.jobs import Forecast
from sie_contracts.errors import InvalidInput

STEP_S = 5.0
STEPS = 60  # the rate is measured over this number of steps, each STEP_S seconds: over five minutes
MIN_S = 2 * STEP_S  # seconds of progress before a rate is known
MIN_SPREAD = 0.02
# `workers_needed` plans at least this number of seconds for the remaining rows, even if the deadline is earlier: new
# workers take about this long to start
MIN_LEFT_S = 300.0


class JobPace:
    """Meter of the rows per second of a job in the last minutes, and of the variation of this rate."""

    def __init__(self) -> None:
        # pairs: time in seconds, and number of rows done at that time
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS + 1)

    def note(self, now_s: float, done: int) -> None:
        """Record the number of rows done by now. Before a pause of the job, call `rest`, so that the time of the pause
        does not count for the rate.
        """
        if not self._steps or now_s - self._steps[-1][0] >= STEP_S:
            self._steps.append((now_s, done))

    def rest(self) -> None:
        self._steps.clear()

    @property
    def rate(self) -> float:
        """Return the number of rows that are done per second; 0 while the rate is not known."""
        if len(self._steps) < 2:
            return 0.0
        (begin_s, first), (end_s, last) = self._steps[0], self._steps[-1]
        return (last - first) / (end_s - begin_s) if end_s - begin_s >= MIN_S else 0.0

    @property
    def spread(self) -> float:
        """Return the standard error of the rate, divided by the rate; 1 while the rate is unknown."""
        steps = list(self._steps)
        rates = [(b - a) / (t - s) for (s, a), (t, b) in itertools.pairwise(steps)]
        if len(rates) < 2 or not (mean := statistics.fmean(rates)):
            return 1.0
        return max(MIN_SPREAD, statistics.stdev(rates) / math.sqrt(len(rates)) / mean)


def forecast(job: JobRecord, workers: int, now_s: float) -> Forecast | None:
    """Forecast the end of a running job; None while its rows are not counted or its rate is unknown.

    `plus_minus_s` is the error of `done_at` if the rate is wrong by two standard errors. `workers_needed` assumes that
    all workers are equally fast.
    """
    if job.state != "running" or job.rows is None or job.rows_per_s <= 0:
        return None
    rest = max(0, job.rows - job.done)
    left_s = rest / job.rows_per_s
    return Forecast(
        done_at=round(now_s + left_s, 1),
        plus_minus_s=round(2 * job.spread * left_s, 1),
        rows_per_s=round(job.rows_per_s, 2),
        workers=workers,
        workers_needed=workers_needed(job, workers, now_s),
    )


def workers_needed(job: JobRecord, workers: int, now_s: float) -> int | None:
    """Return how many workers can end the job by its deadline, or within MIN_LEFT_S if the deadline is earlier. Return
    None if the job has no deadline or no known rate. Also return None if more workers cannot help, because the job does
    not run or limits its tokens per second.
    """
    request = job.request
    if request is None or not request.deadline or request.tokens_per_s:
        return None
    if job.state != "running" or job.rows is None or job.rows_per_s <= 0:
        return None
    rate = (job.rows - job.done) / max(MIN_LEFT_S, request.deadline - now_s)
    return max(1, math.ceil(rate / job.rows_per_s * max(1, workers) - 0.01))


DAY_MINUTES = 24 * 60
_WINDOW = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")


def zone(name: str) -> zoneinfo.ZoneInfo:
    """Return a time zone of the IANA database. Raises InvalidInput."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        message = "expected a name of the IANA database, such as Europe/Zurich or UTC"
        raise InvalidInput.at("time_zone", message) from error


def check(windows: Sequence[str]) -> None:
    """Raise InvalidInput if a window does not have the form 22:00-06:00."""
    for number, window in enumerate(windows):
        if not _WINDOW.fullmatch(window):
            raise InvalidInput.at(f"windows[{number}]", "expected two times of the day, such as 22:00-06:00")


def opens_in_s(windows: Sequence[str], time_zone: str, now_s: float) -> float:
    """Return the seconds until the job may run: 0 inside a window, and for a job without windows.

    A window such as `22:00-06:00` is in the local time of `time_zone`. A window whose end is before its start includes
    midnight. A window with two equal times is a whole day. Raises InvalidInput for an unknown zone.
    """
    if not windows:
        return 0.0
    now = datetime.fromtimestamp(now_s, zone(time_zone))
    minute = 60 * now.hour + now.minute
    spans = [tuple(_minute(end) for end in window.split("-")) for window in windows]
    if any((minute - start) % DAY_MINUTES < ((end - start) % DAY_MINUTES or DAY_MINUTES) for start, end in spans):
        return 0.0
    return min(_until(now, start) for start, _ in spans)


def _minute(text: str) -> int:
    hours, _, minutes = text.partition(":")
    return 60 * int(hours) + int(minutes)


def _until(now: datetime, start: int) -> float:
    """Return the seconds until the local clock next shows this minute of the day, across changes of summer time."""
    at = now.replace(hour=start // 60, minute=start % 60, second=0, microsecond=0)
    if at <= now:
        at += timedelta(days=1)
    return (at.astimezone(UTC) - now.astimezone(UTC)).total_seconds()
