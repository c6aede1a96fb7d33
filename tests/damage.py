"""Damage to the files of the broker's streams, as by disks and people, while the broker is stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path


def folder_of(store: Path, stream: str) -> Path:
    """Return the folder of a stream below the broker's `store_dir`."""
    (folder,) = (store / "jetstream").glob(f"*/streams/{stream}")
    return folder


def streams_of(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "jetstream").glob("*/streams/*"))


def newest_block(stream: Path) -> Path:
    return max((stream / "msgs").glob("*.blk"), key=lambda path: int(path.stem))


def cut(stream: Path) -> None:
    """Cut the newest block to two thirds."""
    block = newest_block(stream)
    content = block.read_bytes()
    block.write_bytes(content[: len(content) * 2 // 3])


def flip(stream: Path) -> None:
    """Change bytes throughout the last two thirds of the newest block."""
    block = newest_block(stream)
    content = bytearray(block.read_bytes())
    for place in range(len(content) // 3, len(content), max(1, len(content) // 20)):
        content[place] ^= 0xFF
    block.write_bytes(content)


def remove_block(stream: Path) -> None:
    newest_block(stream).unlink()


def remove(stream: Path) -> None:
    shutil.rmtree(stream)


DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "cut": cut,
    "flipped": flip,
    "no-block": remove_block,
    "removed": remove,
}
