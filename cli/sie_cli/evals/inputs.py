"""Inputs that a task gives to a source: a text, or an image of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sie_cli.refusal import CommandRefused

if TYPE_CHECKING:
    from sie_client.types import Item


class ImagePath(str):
    """An image, by the path of its file."""

    @property
    def path(self) -> Path:
        return Path(self)


def item(text: str) -> str | Item:
    """Convert an input to the form that a client of a cluster takes."""
    return {"images": [text.path]} if isinstance(text, ImagePath) else text


def key(text: str) -> str:
    """Return the key of an input. Each text has its own; a file that was written again has a new one."""
    if not isinstance(text, ImagePath):
        return text
    status = text.path.stat()
    return f"image {text} {status.st_size} {status.st_mtime_ns}"


def only_texts(name: str, inputs: Sequence[str]) -> None:
    """Raises CommandRefused for a source that takes no images."""
    if picture := next((text for text in inputs if isinstance(text, ImagePath)), None):
        raise CommandRefused(f"{name} takes texts alone, and the task has images, such as {picture}")
