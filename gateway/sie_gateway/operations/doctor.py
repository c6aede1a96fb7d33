"""`sie doctor`, run by a gateway for whoever looks at its page: a process of its own, with the settings of the gateway.

Its checks connect to the broker, look at ports and start helpers: none of that belongs on the event loop that answers
requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from sie_contracts.errors import NotFound, NotReady

LIMIT_S = 40.0  # above that of its slowest check
FRESH_S = 5.0  # a report is told again for so long
MAX_BYTES = 1 << 20
_logger = logging.getLogger("sie.gateway.doctor")


class Doctor:
    """One examination at a time; who asks meanwhile waits for its report."""

    def __init__(self, host: str, port: int, data_dir: Path | None) -> None:
        """`data_dir`: of the `sie serve` that this gateway is a part of; without one the cluster is what is found from
        the gateway at `host` and `port`.
        """
        self._options = ("--data-dir", str(data_dir)) if data_dir is not None else ()
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        self._environ = {} if data_dir is not None else {"SIE_GATEWAY_URL": f"http://{_bracketed(here)}:{port}"}
        self._running = asyncio.Lock()
        self._last: dict[str, Any] = {}
        self._at_s = -FRESH_S

    async def report(self) -> dict[str, Any]:
        """The document of `sie doctor --json`. Raises NotFound where the command is not installed, NotReady where it
        came to no end.
        """
        if importlib.util.find_spec("sie_cli") is None:
            raise NotFound("this gateway has no command line: install the extra `cli` beside it, or run sie doctor")
        async with self._running:
            if time.monotonic() - self._at_s >= FRESH_S:
                self._last = await self._examined()
                self._at_s = time.monotonic()
        return self._last

    async def _examined(self) -> dict[str, Any]:
        argv = (sys.executable, "-m", "sie_cli", "doctor", "--json", *self._options)
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=pipe,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **self._environ},
        )
        assert child.stdout is not None
        try:
            async with asyncio.timeout(LIMIT_S):
                output = await _all(child.stdout)
                await child.wait()
            report = msgspec.json.decode(output, type=dict[str, Any])
        except (TimeoutError, msgspec.DecodeError) as error:
            _logger.warning("sie doctor told nothing: %s", type(error).__name__)
            raise NotReady("sie doctor came to no end; run it in a terminal to see why") from error
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        return report


async def _all(stream: asyncio.StreamReader) -> bytes:
    """Up to MAX_BYTES, which no report has."""
    output = bytearray()
    while len(output) < MAX_BYTES and (part := await stream.read(1 << 16)):
        output += part
    return bytes(output)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
