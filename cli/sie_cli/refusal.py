"""Errors that end a command which cannot be done: one line and a status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from sie_cli.display import printable
from sie_contracts.errors import SIEError

MAX_CHARS = 20_000  # of a refusal


class CommandRefused(click.ClickException):
    """Refusal of a command; the message says what to do next. Status 1."""

    def format_message(self) -> str:
        """Format the message, parts of which servers and files wrote, for a terminal."""
        return printable(self.message[:MAX_CHARS], lines=True)


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
