"""What is said of a file that cannot be used, whatever kind of file it is."""

from __future__ import annotations

from typing import Literal, get_args

from sie_contracts.errors import InvalidInput

Cause = Literal["too_large", "undecodable", "aspect", "timeout"]


def fault(cause: Cause, what: str) -> InvalidInput:
    """The error of a file that cannot be used; its message begins with the cause."""
    return InvalidInput(f"{cause}: {what}", reason="invalid_media")


def cause_of(error: InvalidInput) -> tuple[Cause, str]:
    """What `fault` was given."""
    found, _, what = error.message.partition(": ")
    return next(cause for cause in get_args(Cause) if cause == found), what
