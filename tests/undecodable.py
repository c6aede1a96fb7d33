"""Bytes that no decoder accepts, for readers of messages and files: cut off, not UTF-8, or nested too deeply."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

FAULTS = ("cut off", "not UTF-8", "nested")
MARK = "stranger"
DEPTH = 5000
json, msgpack = msgspec.json.encode, msgspec.msgpack.encode


def of_file(read: Callable[[Path], Any], name: str) -> Callable[[bytes, Path], Any]:
    """Return a reader of a file with this name."""

    def reader(data: bytes, folder: Path) -> Any:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return reader


def damages_of(sample: dict[str, Any], encode: Callable[[Any], bytes]) -> dict[str, bytes]:
    """Return the message in three forms that its decoder refuses, each with another exception."""
    deep = b"[" * DEPTH + b"]" * DEPTH if encode is json else b"\x91" * DEPTH + b"\xc0"
    return {
        "cut off": encode(sample)[:-1],
        "not UTF-8": encode(sample).replace(MARK.encode(), b"\xff" * len(MARK)),
        "nested": encode({"unknown": msgspec.Raw(deep), **sample}),
    }


def check(read: Callable[[], Any], error: type[Exception] | None) -> None:
    async def run() -> None:
        answer = read()
        if inspect.isawaitable(answer):
            await answer

    if error is None:
        asyncio.run(run())
        return
    with pytest.raises(error):
        asyncio.run(run())
