"""Route `/v1/doctor`: runs of `sie doctor` beside a gateway. Each run is a separate process with the settings of the
gateway: its checks connect to the broker, test ports and start helper processes, which would block the gateway's event
loop.
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
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sie_contracts.errors import UNDECODABLE, NotFound, NotReady
from sie_gateway.http.route_kinds import control
from sie_gateway.operations.handlers import json_response
from sie_gateway.plugin import Plugin, PluginContext, Service
from sie_ops.doctor.report import DoctorReport

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

LIMIT_S = 75.0  # time limit in seconds for one run of `sie doctor`; its slowest check, `gpu`, may take 61 s
FRESH_S = 5.0  # for this number of seconds after a run, requests get its report
MAX_BYTES = 1 << 20
_logger = logging.getLogger("sie.gateway.doctor")


class Doctor(Service):
    """Runner of `sie doctor`, one run at a time. Requests that arrive during a run get the report of this run."""

    def __init__(self, host: str, port: int, data_dir: Path | None) -> None:
        """`data_dir`: data folder of a `sie serve`, whose cluster the runs check. If `data_dir` is None, the runs check
        the cluster behind the gateway at `host` and `port`.
        """
        self._options = ("--data-dir", str(data_dir)) if data_dir is not None else ()
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        netloc = f"[{here}]:{port}" if ":" in here else f"{here}:{port}"
        self._environ = {} if data_dir is not None else {"SIE_GATEWAY_URL": f"http://{netloc}"}
        self._running = asyncio.Lock()
        self._last: dict[str, Any] | NotReady = {}
        self._at_s = -FRESH_S

    @classmethod
    def build(cls, context: PluginContext) -> Doctor:
        return cls(context.host, context.port, context.data_dir)

    async def report(self) -> dict[str, Any]:
        """Return the JSON report. Raises NotFound if the command `sie` is not installed, NotReady if the run fails."""
        if importlib.util.find_spec("sie_cli") is None:
            raise NotFound(
                "the command `sie` is not installed beside this gateway: install the extra `cli`, or run `sie doctor`"
                " elsewhere"
            )
        async with self._running:
            if time.monotonic() - self._at_s >= FRESH_S:
                try:
                    self._last = await self._examined()
                except NotReady as error:  # stored, so that waiting requests start no new run
                    self._last = error
                self._at_s = time.monotonic()
            last = self._last
        if isinstance(last, NotReady):
            raise NotReady(last.message) from last
        return last

    async def _examined(self) -> dict[str, Any]:
        argv = (sys.executable, "-m", "sie_cli", "doctor", "--json", *self._options)
        pipe = asyncio.subprocess.PIPE
        try:
            child = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe,
                stderr=asyncio.subprocess.DEVNULL,
                env={**os.environ, **self._environ},
            )
        except OSError as error:
            raise NotReady(f"sie doctor cannot be started: {error}") from error
        assert child.stdout is not None
        try:
            async with asyncio.timeout(LIMIT_S):
                output = await _all(child.stdout)
                await child.wait()
            report = msgspec.json.decode(output, type=dict[str, Any])
        except (TimeoutError, *UNDECODABLE) as error:
            _logger.warning("sie doctor ended without a readable report: %s", type(error).__name__)
            raise NotReady("sie doctor ended without a readable report; run it in a terminal to see why") from error
        finally:
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        return report


async def _all(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end, or to MAX_BYTES, which is more than any report has."""
    output = bytearray()
    while len(output) < MAX_BYTES and (part := await stream.read(1 << 16)):
        output += part
    return bytes(output)


async def _report(gateway: Gateway, _request: Request) -> Response:
    return json_response(await gateway.service(Doctor).report())


PLUGIN = Plugin(
    routes=(
        control(
            "GET",
            "/v1/doctor",
            "other",
            _report,
            (
                "Operations",
                "The report of `sie doctor`; needs no token if auth mode is none and the gateway listens only on "
                "loopback",
            ),
            DoctorReport,
            scope="admin",
            local=True,
        ),
    ),
    build=Doctor.build,
)
