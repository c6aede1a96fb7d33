"""Errors that end a command which cannot be done: one line and a status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from sie_contracts.errors import SIEError


class CommandRefused(click.ClickException):
    """Refusal of a command; the message says what to do next. Status 1."""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Convert faults of a model or a file to CommandRefused."""
    try:
        yield
    except SIEError as error:
        raise CommandRefused(error.message) from error
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise CommandRefused(f"{name}{error.strerror or error}") from error
