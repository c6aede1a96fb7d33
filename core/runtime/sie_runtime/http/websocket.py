"""Websockets on which only the server sends: at most one text frame per interval, to each connected client.

    upgrade ──► allowed? ──no──► a plain HTTP response
                   └─► accept ──► a frame at once ──► the next frame an interval later ──► ...

There is no queue of frames for a slow client: the next frame is built only after the previous frame was sent, and the
frames in between are skipped. A client is disconnected if the send buffer of its connection stays full for PATIENCE_S.
Messages of clients are read slowly and discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.datastructures import Headers
from websockets.frames import Frame
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from sie_contracts.errors import InternalFailure, InvalidInput, ResourceExhausted
from sie_runtime.http.asgi import FAILED, REQUEST_ID, Receive, Scope, Send, common_headers, refusal, uuid7

PATIENCE_S = 10.0
# A client's input is handled INPUT_BYTES at a time, with pauses of INPUT_PAUSE_S. One read of a connection may return
# tens of thousands of empty frames, and other clients would wait until all of them are handled.
INPUT_BYTES, INPUT_PAUSE_S = 1024, 0.1
GOING_AWAY, TRY_AGAIN_LATER = 1001, 1013  # close codes, from RFC 6455 and IANA's registry
_logger = logging.getLogger("sie.websocket")


class _Handshake(ServerProtocol):
    """Handshake of a websocket. All its replies have the headers that every reply of SIE has. If the websockets library
    itself refuses the handshake, the reply also has SIE's error body.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_size=max_bytes, logger=logging.getLogger("uvicorn.error"))
        self.scope: Scope = {REQUEST_ID: uuid7(), "headers": ()}

    def begin(self, scope: Scope) -> None:
        """Use the `scope` of the application for the headers of replies, and store the request's id in this `scope`."""
        scope[REQUEST_ID] = self.scope[REQUEST_ID]
        self.scope = scope

    def accept(self, request: Request) -> Response:
        self.scope["headers"] = [
            (name.lower().encode(), value.encode(errors="surrogateescape"))
            for name, value in request.headers.raw_items()
        ]
        return super().accept(request)

    def reject(self, status: Any, text: str) -> Response:
        plain = super().reject(status, "")
        is_refusal = plain.status_code < InternalFailure.status
        error = InvalidInput(text.strip(), reason="malformed") if is_refusal else InternalFailure(FAILED)
        body, own = refusal(error, self.scope[REQUEST_ID])
        headers = {**dict(plain.headers.raw_items()), **own, "Content-Type": "application/json"}
        headers["Content-Length"] = str(len(body))
        return Response(plain.status_code, plain.reason_phrase, Headers(headers), body)

    def send_response(self, response: Response) -> None:
        sent = [(name.lower().encode(), value.encode()) for name, value in response.headers.raw_items()]
        for name, value in common_headers(self.scope, sent)[len(sent) :]:
            response.headers[name.decode()] = value.decode("latin-1")
        super().send_response(response)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's websocket protocol with four changes. At the end of the server, clients get close code 1001. The
    application can disconnect a client. `_Handshake` handles every handshake. Messages of clients are read slowly and
    discarded.
    """

    scope: Any
    _unread = b""  # input that is not handled yet
    _input_timer: asyncio.TimerHandle | None = None  # no input is read while this timer runs

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self.conn = self._handshake = _Handshake(config.ws_max_size)

    def data_received(self, data: bytes) -> None:
        if self.handshake_initiated:
            self._unread += data
            if self._input_timer is None:
                self._handle_input()
            return
        super().data_received(data)
        # the whole head has arrived, but could not be parsed: uvicorn would send no reply
        if not self.handshake_initiated:
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def _handle_input(self) -> None:
        """Handle the next INPUT_BYTES of the input, and read no more for INPUT_PAUSE_S."""
        self._input_timer = None
        if self.transport.is_closing():
            return
        if not self._unread:
            self.transport.resume_reading()
            return
        piece, self._unread = self._unread[:INPUT_BYTES], self._unread[INPUT_BYTES:]
        self.transport.pause_reading()
        self._input_timer = self.loop.call_later(INPUT_PAUSE_S, self._handle_input)
        super().data_received(piece)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._input_timer is not None:
            self._input_timer.cancel()
        super().connection_lost(exc)

    def handle_text(self, event: Frame) -> None:
        """Discard a part of a message. uvicorn would store the parts until the message ends."""

    handle_bytes = handle_cont = handle_text

    async def run_asgi(self) -> None:
        extensions: dict[str, Any] = self.scope["extensions"]
        extensions["abort"] = self.transport.abort
        self._handshake.begin(self.scope)
        await super().run_asgi()

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            self.handshake_complete = True  # else uvicorn would log a refused handshake as an error

    def shutdown(self) -> None:
        if not self.handshake_complete or self.close_sent:
            super().shutdown()
            return
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": GOING_AWAY})
        self.conn.send_close(GOING_AWAY)
        self.close_sent = True
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.writable.is_set():
            self.transport.close()
        # a client that does not read is disconnected at once: its unsent frames would delay the end of the server
        else:
            self.transport.abort()


class Seats:
    """Limits on open websockets: `most` in total, and a quarter of `most` for each client address and for each key.
    `where`: name of the component in the error message, for example "gateway".
    """

    def __init__(self, most: int, where: str) -> None:
        self._most = most
        self._most_each = max(1, most // 4)
        self._where = where
        self._held: Counter[str] = Counter()
        self.taken = 0

    @contextlib.contextmanager
    def seat(self, scope: Scope, key: str = "") -> Iterator[None]:
        """Context manager that counts one open websocket. `key`: id of the client's API key; if empty, no limit per key
        applies. Raises ResourceExhausted above a limit.
        """
        if self.taken >= self._most:
            raise ResourceExhausted(f"{self._most} websockets are open, the limit of this {self._where}")
        holders = [holder for holder in (_network((scope.get("client") or ("",))[0]), key and f"key {key}") if holder]
        if any(self._held[holder] >= self._most_each for holder in holders):
            raise ResourceExhausted(
                f"{self._most_each} websockets of this client are open, the limit for one address and for one key"
            )
        self.taken += 1
        self._held.update(holders)
        try:
            yield
        finally:
            self.taken -= 1
            self._held.subtract(holders)
            self._held = +self._held


def _network(address: str) -> str:
    """Return the part of an address that identifies a client: an IPv4 address, or the first 64 bits of an IPv6 address,
    because a host usually has a whole /64 network. All loopback addresses are one client.
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    if ip.is_loopback:
        return "loopback"
    return str(ipaddress.ip_network((ip, 64), strict=False)) if ip.version == 6 else str(ip)


class ViewerFrames:
    """Sends text frames to the websockets of one page, to each websocket at most one frame per `interval_s` (seconds).
    All websockets share a frame. A new frame is built if the shared frame is at least half of this interval old.
    """

    def __init__(self, make: Callable[[], str | None], interval_s: float, *, patience_s: float = PATIENCE_S) -> None:
        """`make` builds a frame. If it returns the same object as before, a websocket that has this frame gets nothing.
        If it returns None, each websocket is closed with code 1013.
        """
        self._make = make
        self._interval_s = interval_s
        self._patience_s = patience_s
        self._last: str | None = None
        self._made_s = float("-inf")
        self.looking = 0
        self.looked = asyncio.Event()  # set while at least one viewer is connected

    async def show(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept the websocket of an authorised client, and send frames until the websocket ends."""
        await receive()  # the first message is always websocket.connect, and its contents are not needed
        disconnect = asyncio.create_task(_disconnected(receive))
        self.looking += 1
        self.looked.set()
        try:
            await send({"type": "websocket.accept"})
            sent: str | None = None
            while not disconnect.done():
                frame = self._frame()
                async with asyncio.timeout(self._patience_s):  # `send` waits until the connection's buffer has space
                    if frame is None:
                        await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
                        return
                    if frame is not sent:
                        await send({"type": "websocket.send", "text": frame})
                sent = frame
                await asyncio.wait({disconnect}, timeout=self._interval_s)
        except TimeoutError:
            _logger.info("a websocket is disconnected: its client has not read for %g s", self._patience_s)
            scope["extensions"]["abort"]()
        except OSError:
            pass  # the client has disconnected
        finally:
            self.looking -= 1
            if not self.looking:
                self.looked.clear()
            disconnect.cancel()

    def _frame(self) -> str | None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._made_s >= self._interval_s / 2:
            self._last, self._made_s = self._make(), now_s
        return self._last


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "websocket.disconnect":
        pass
