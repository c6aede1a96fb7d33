"""Status of the cluster over a websocket, with the package `websockets` (`pip install 'sie-cluster[watch]'`).

The client opens a connection with the same retries and waits as for an HTTP request (`core.call`); the first frame
counts as the response. If the connection breaks, the client opens a new one; frames that the server sent meanwhile are
lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from sie_client.core import Answer, Received, Send, Session, reading
from sie_client.errors import RequestError
from sie_client.transport import failed
from sie_contracts.loopback import is_local

CLUSTER_STATUS = "/ws/cluster-status"
AGAIN_AFTER_S = 1.0  # seconds from the loss of a connection to the next attempt
# seconds without a frame after which a connection counts as broken; the server sends a frame every second
SILENCE_S = 30.0
CLOSE_S = 2.0
MAX_FRAME_BYTES = 64 << 20
MISSING = "watch needs the package websockets: pip install 'sie-cluster[watch]'"


def request(path: str, session: Session) -> Send:
    return Send("GET", path, session.sent_headers())


def decoded(frame: bytes) -> dict[str, Any]:
    """Decode a frame. Raises ServerError if the frame is not a JSON object."""
    with reading({}):
        return msgspec.json.decode(frame, type=dict[str, Any])


class _Url:
    """Address of a websocket. `has_answered`: True if the server has answered a request of the client."""

    def __init__(self, base_url: str, *, has_answered: bool = False) -> None:
        self._url, self._has_answered = base_url, has_answered
        self._base = "ws" + base_url[4:] if base_url.startswith("http") else base_url
        self._is_local = is_local(base_url)

    def _options(self, request: Send) -> dict[str, Any]:
        from websockets.version import version

        return {
            "uri": self._base + request.path,
            "additional_headers": dict(request.headers),
            "max_size": MAX_FRAME_BYTES,
            "open_timeout": SILENCE_S,
            "close_timeout": CLOSE_S,
            # use no proxy for a server on this machine; version 14 of websockets lacks this parameter and uses no proxy
            **({"proxy": None} if self._is_local and not version.startswith("14.") else {}),
        }

    def _refusal(self, error: Exception, started_s: float) -> Answer:
        """Convert an exception of a connection to a response or TransportFailed. Raises unexpected exceptions again."""
        from websockets.exceptions import InvalidStatus, InvalidURI, WebSocketException

        elapsed_s = time.monotonic() - started_s
        if isinstance(error, InvalidStatus):
            self._has_answered = True
            headers: Mapping[str, str] = {name.lower(): value for name, value in error.response.headers.raw_items()}
            return Received(error.response.status_code, headers, bytes(error.response.body or b""), elapsed_s)
        if isinstance(error, OSError | WebSocketException | ValueError | EOFError):
            failure = failed(error, started_s, self._url, has_answered=self._has_answered)
            return replace(failure, is_permanent=failure.is_permanent or isinstance(error, InvalidURI))
        raise error


class StatusSocket(_Url):
    """Websocket connection for the blocking client."""

    def __init__(self, base_url: str, *, has_answered: bool = False) -> None:
        super().__init__(base_url, has_answered=has_answered)
        self._open = contextlib.ExitStack()
        self._connection: Any = None

    def open(self, request: Send) -> Answer:
        """Connect, wait for the first frame, and return this frame as the body of a response."""
        try:
            from websockets.sync.client import connect
        except ImportError as error:
            raise RequestError(MISSING) from error
        started_s = time.monotonic()
        try:
            self._connection = self._open.enter_context(connect(**self._options(request)))
            frame = bytes(self._connection.recv(timeout=SILENCE_S, decode=False))
            self._has_answered = True
            return Received(200, {}, frame, time.monotonic() - started_s)
        except Exception as error:  # noqa: BLE001  _refusal raises an unexpected error again
            self.close()
            return self._refusal(error, started_s)

    def next(self) -> bytes | None:
        """Return the next frame. If the connection breaks, or sends nothing for SILENCE_S, close it and return None."""
        try:
            return bytes(self._connection.recv(timeout=SILENCE_S, decode=False))
        except Exception as error:  # noqa: BLE001  _refusal raises an unexpected error again
            self.close()
            self._refusal(error, 0.0)
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._open.close()


class AsyncStatusSocket(_Url):
    """Websocket connection for the asyncio client."""

    _connection: Any = None

    async def open(self, request: Send) -> Answer:
        try:
            from websockets.asyncio.client import connect
        except ImportError as error:
            raise RequestError(MISSING) from error
        started_s = time.monotonic()
        try:
            self._connection = await connect(**self._options(request))
            frame = await self._recv()
            self._has_answered = True
            return Received(200, {}, frame, time.monotonic() - started_s)
        except Exception as error:  # noqa: BLE001  _refusal raises an unexpected error again
            await self.aclose()
            return self._refusal(error, started_s)

    async def _recv(self) -> bytes:
        receiving = asyncio.ensure_future(self._connection.recv(decode=False))
        try:
            # not asyncio.wait_for: before Python 3.12, it loses a cancellation that arrives together with a frame
            await asyncio.wait({receiving}, timeout=SILENCE_S)
            if not receiving.done():
                raise OSError(f"no frame within {SILENCE_S:g} s")
            return bytes(receiving.result())
        finally:
            receiving.cancel()

    async def next(self) -> bytes | None:
        try:
            return await self._recv()
        except Exception as error:  # noqa: BLE001  _refusal raises an unexpected error again
            await self.aclose()
            self._refusal(error, 0.0)
            return None

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                await connection.close()
