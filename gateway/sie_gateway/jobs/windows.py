"""Times of the day at which a job may work. Pure."""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from sie_contracts.errors import InvalidInput

DAY_MINUTES = 24 * 60
_WINDOW = re.compile(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d")


def zone(name: str) -> zoneinfo.ZoneInfo:
    """A time zone of the IANA database. Raises InvalidInput."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        message = "time_zone: expected a name of the IANA database, such as Europe/Zurich or UTC"
        raise InvalidInput(message, reason="schema", param="time_zone") from error


def check(windows: Sequence[str]) -> None:
    """Raises InvalidInput."""
    for number, window in enumerate(windows):
        if not _WINDOW.fullmatch(window):
            message = f"windows[{number}]: expected two times of the day, such as 22:00-06:00"
            raise InvalidInput(message, reason="schema", param=f"windows[{number}]")


def opens_in_s(windows: Sequence[str], time_zone: str, now_s: float) -> float:
    """Seconds until the job may work: 0 inside a window, and where it has none.

    A window such as `22:00-06:00` begins and ends by the clocks of its zone, and goes past midnight where its end is
    before its begin. Equal ends are a whole day. Raises InvalidInput for a zone that there is not.
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
    """Seconds until the clock next shows this minute of the day. A change of clocks between is part of it."""
    at = now.replace(hour=start // 60, minute=start % 60, second=0, microsecond=0)
    if at <= now:
        at += timedelta(days=1)
    return (at.astimezone(UTC) - now.astimezone(UTC)).total_seconds()
