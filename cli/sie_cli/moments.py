"""Times on the command line: parse them and format them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import NamedTuple

import click

FAR = "after the year 9999"
_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


class Deadline(NamedTuple):
    """Time in seconds since 1970, or, if `is_span`, a duration in seconds. `text`: the user's text, for errors."""

    text: str
    seconds: float
    is_span: bool

    @classmethod
    def parse(cls, text: str) -> Deadline:
        """Parse a duration such as 12h, or a date or time (UTC if it has no zone). Raises BadParameter."""
        span = re.fullmatch(r"(\d{1,6})([mhdw])", text.strip().lower())
        if span is not None:
            return cls(text[:40], int(span[1]) * _UNITS[span[2]], is_span=True)
        try:
            at = datetime.fromisoformat(text.strip())
        except ValueError as error:
            raise click.BadParameter(
                f"{text[:40]}: expected 30m, 12h, 90d, 4w, or a date such as 2030-01-31"
            ) from error
        at_s = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
        return cls(text[:40], at_s, is_span=False)

    def after(self, now_s: float) -> float:
        """Return the time in seconds since 1970. Raises BadParameter if it is not after `now_s`."""
        at_s = now_s + self.seconds if self.is_span else self.seconds
        if at_s <= now_s:
            raise click.BadParameter(f"{self.text}: is in the past")
        return at_s


def moment(at_s: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """Format a time in UTC, by default as date, hour and minute. Return FAR for a number too large for a date, such as
    a time in milliseconds.
    """
    try:
        return datetime.fromtimestamp(at_s, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return FAR


def local(at_s: float, now_s: float) -> str:
    """Format a time in the time zone of this machine, without the date if this is the date of `now_s`. Return FAR for a
    number too large for a date.
    """
    try:
        at, now = (datetime.fromtimestamp(time_s).astimezone() for time_s in (at_s, now_s))
    except (ValueError, OverflowError, OSError):
        return FAR
    return at.strftime("%H:%M" if at.date() == now.date() else "%Y-%m-%d %H:%M")


def span(seconds: float) -> str:
    """Format a duration in days if it has at least two days, else in h if it has at least two hours, else in min if it
    has at least two minutes, else in seconds.
    """
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
