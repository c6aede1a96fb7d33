"""Errors for images, sounds and documents that cannot be used."""

from __future__ import annotations

from typing import Literal, get_args

from sie_contracts.errors import InvalidInput

Cause = Literal["too_large", "undecodable", "aspect", "timeout"]


def fault(cause: Cause, message: str) -> InvalidInput:
    """Return the error for a file that cannot be used. The message of the error begins with `cause`."""
    return InvalidInput(f"{cause}: {message}", reason="invalid_media")


def cause_of(error: InvalidInput) -> tuple[Cause, str]:
    """Return (cause, rest of the message) of an error that `fault` built."""
    prefix, _, message = error.message.partition(": ")
    return next(cause for cause in get_args(Cause) if cause == prefix), message
