"""Display of numbers, tables and transfers to people."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

MAX_LINE = 2_000  # largest number of characters of a line of untrusted text; `printable` cuts off the rest


def size(count: float) -> str:
    """Format a number of bytes, in powers of 1,024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def rounded_size(count: int) -> str:
    """Format an estimate of bytes with two significant digits, in powers of 1,000 as the Hugging Face hub shows sizes;
    `-` for 0.
    """
    if count <= 0:
        return "-"
    rounded = float(f"{count:.2g}")
    power = min(3, int(math.log10(rounded)) // 3)
    return f"{rounded / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def counted(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def printable(text: str, *, lines: bool = False) -> str:
    """Replace each unprintable character of an untrusted text by a space or `?`, and cut the text to MAX_LINE. `lines`:
    keep line breaks and the whole text.
    """
    return "".join(
        letter if letter.isprintable() or (lines and letter == "\n") else " " if letter.isspace() else "?"
        for letter in (text if lines else text[:MAX_LINE])
    )


def problem(error: Mapping[str, Any]) -> str:
    """Return the code and the message of an error in a reply. The text lacks what is missing or null."""
    return ": ".join(str(error[name]) for name in ("code", "message") if error.get(name))


def document(value: Any, indent: int = 2) -> str:
    """Return a value as JSON for a terminal, with unprintable characters escaped. Arrays of numpy become lists.
    `indent`: -1 for one line.
    """
    encoded = msgspec.json.encode(value, enc_hook=lambda array: array.tolist())
    text = msgspec.json.format(encoded, indent=indent).decode()
    return re.sub(r"[^ -~]", lambda match: _escaped(match[0]), text)


def _escaped(letter: str) -> str:
    if letter.isprintable() or letter == "\n":
        return letter
    units = letter.encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def table(rows: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Print rows in aligned columns. The first row is the header. Unprintable characters are replaced. `err`: print to
    standard error.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip(), err=err)


def transfers() -> Progress:
    """Return a context manager with progress bars that count bytes. Standard error shows them if it is a terminal."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    return _bars(DownloadColumn(binary_units=True), TransferSpeedColumn())


def items() -> Progress:
    """Return a context manager with progress bars that count items. Standard error shows them if it is a terminal."""
    from rich.progress import MofNCompleteColumn

    return _bars(MofNCompleteColumn())


def _bars(*amounts: ProgressColumn) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), *amounts, TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
