"""Inputs of a question: arguments become texts and files, each with a name by which the answer speaks of it."""

from __future__ import annotations

import mimetypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sie_cli.display import printable
from sie_cli.refusal import CommandRefused

if TYPE_CHECKING:
    from sie_client.types import Item

STDIN, FILE = "-", "@"


@dataclass(frozen=True)
class QuestionInput:
    """`text` as it was given; empty of a file."""

    item: Item
    text: str = ""
    file: str = ""

    @property
    def label(self) -> str:
        """One line for a table."""
        return printable(" ".join(self.text.split()) if self.text else f"{FILE}{self.file}")


def read(arguments: Sequence[str], query: str | None) -> tuple[tuple[QuestionInput, ...], QuestionInput | None]:
    """The inputs, and the query if there is one. Raises CommandRefused."""
    if not arguments:
        raise CommandRefused(
            'nothing to try: give a text, as in `sie try MODEL "a text"`; - reads one from standard input, @FILE names '
            "a file"
        )
    if [*arguments, query].count(STDIN) > 1:
        raise CommandRefused(f"{STDIN} stands for standard input, which can be read only once")
    inputs = tuple(_input(argument, f"text {number}") for number, argument in enumerate(arguments, 1))
    return inputs, None if query is None else _input(query, "--query")


def _input(argument: str, name: str) -> QuestionInput:
    if argument == STDIN:
        return _text(_standard_input(), "standard input")
    if argument.startswith(FILE * 2):
        return _text(argument[1:], name)
    if argument.startswith(FILE):
        return _file(argument[1:])
    return _text(argument, name)


def _text(text: str, name: str) -> QuestionInput:
    if not text.strip():
        raise CommandRefused(f"{name} is empty: there is nothing to ask the model")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CommandRefused(f"{name} is not valid UTF-8") from error
    return QuestionInput({"text": text}, text)


def _standard_input() -> str:
    """All of it as one text, without the line break at its end."""
    try:
        return sys.stdin.buffer.read().decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise CommandRefused(f"standard input is no text in UTF-8 ({error}): give a file as @FILE") from error


def _file(name: str) -> QuestionInput:
    """An image, a sound or a document, by the name's ending. The client reads it."""
    path = Path(name)
    if not path.is_file():
        raise CommandRefused(
            f"there is no file {printable(name) or '(no name)'}; a text that begins with {FILE} is written {FILE * 2}"
        )
    kind = (mimetypes.guess_type(path.name)[0] or "").partition("/")[0]
    item: Item = {"images": [path]} if kind == "image" else {"audio": path} if kind == "audio" else {"document": path}
    return QuestionInput(item, file=name)
