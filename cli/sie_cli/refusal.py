"""Refusals of commands: one line and an exit status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from sie_cli.display import printable
from sie_contracts.errors import SIEError

MAX_CHARS = 20_000  # largest number of characters of a refusal
INTERRUPTED = 130  # status of a shell after Ctrl-C


class CommandRefused(click.ClickException):
    """Refusal of a command with status 1. The message names the next step."""

    def format_message(self) -> str:
        """Format a message for a terminal. Control characters are replaced, because parts of it are from servers and
        files.
        """
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
