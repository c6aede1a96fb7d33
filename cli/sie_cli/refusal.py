"""Errors that end a command with one line and an exit status."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from sie_cli.display import printable
from sie_contracts.errors import SIEError

MAX_CHARS = 20_000  # limit of the characters of an error message
INTERRUPTED = 130  # exit status of a shell command after Ctrl-C


class CommandRefused(click.ClickException):
    """Error that ends a command with status 1. Its message names the next step."""

    def format_message(self) -> str:
        """Format a message for a terminal. Control characters are replaced, because servers and files supply parts of
        it.
        """
        return printable(self.message[:MAX_CHARS], lines=True)


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raise CommandRefused for an error of a model (SIEError) or of a file (OSError) in the context."""
    try:
        yield
    except SIEError as error:
        raise CommandRefused(error.message) from error
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise CommandRefused(f"{name}{error.strerror or error}") from error
