"""Errors that end a command with one line and an exit status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from sie_cli.display import printable
from sie_contracts.errors import SIEError

MAX_CHARS = 20_000  # largest number of characters of an error message; the rest is cut off
INTERRUPTED = 130  # exit status of a command that Ctrl-C ended (128 + SIGINT)


class CommandRefused(click.ClickException):
    def format_message(self) -> str:
        """Format the message. Each line is made printable, because it may have text from servers and files."""
        return "\n".join(map(printable, self.message[:MAX_CHARS].split("\n")))


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Convert an SIEError or OSError to CommandRefused."""
    try:
        yield
    except SIEError as error:
        raise CommandRefused(error.message) from error
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise CommandRefused(f"{name}{error.strerror or error}") from error
