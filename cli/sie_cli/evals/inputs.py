"""What a task gives a source: a text, or an image of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sie_cli.refusal import Refused

if TYPE_CHECKING:
    from sie_client.types import Item


class Picture(str):
    """An image, by the path of its file."""

    @property
    def path(self) -> Path:
        return Path(self)


def item(given: str) -> str | Item:
    """As a client of a cluster takes it."""
    return {"images": [given.path]} if isinstance(given, Picture) else given


def key(given: str) -> str:
    """What tells it from every other one. A file that was written again is another one."""
    if not isinstance(given, Picture):
        return given
    found = given.path.stat()
    return f"image {given} {found.st_size} {found.st_mtime_ns}"


def only_texts(name: str, given: Sequence[str]) -> None:
    """Raises Refused for a source that takes no images."""
    if picture := next((each for each in given if isinstance(each, Picture)), None):
        raise Refused(f"{name} takes texts alone, and the task has images, such as {picture}")
