"""Readiness of `sie serve`: the failed load of a model that the command line names, a full disk."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest

from sie_cli.serve.supervisor import Child, Supervisor


async def test_output_that_cannot_be_handled_ends_the_command(caplog: pytest.LogCaptureFixture) -> None:
    def failing(*_: str) -> None:
        raise ValueError("a fault of this program")

    supervisor, child = Supervisor(failing), Child("adapter", [sys.executable, "-c", "print(1); input()"], os.environ)
    await supervisor.start(child)
    async with asyncio.timeout(30):
        assert "failed, see above" in await supervisor.fatal
    await supervisor.stop([child])
    assert "task output:adapter failed" in caplog.text
