"""HTTP/1.1 connection: uvicorn's protocol, with limits on slow, unfinished and large requests.

    head ──► body ──► trailers, which are dropped
    answered before its body ended ──► the last response of the connection: it says so; then the server stops sending
    and discards input until the client closes
    the client closed its side after a whole request ──► answered if the client still reads

A head, chunk headers and trailers included, may have MAX_HEAD_BYTES and must be complete within HEAD_S. A body must
arrive at the minimum rate of its server or faster, except while the server does not read. A client must read a response
at this rate. A request that never reaches an application is answered in the common error envelope.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from sie_contracts.errors import GatewayTimeout, InternalFailure, InvalidInput, QueueFull, SIEError
from sie_runtime.descriptors import max_connections
from sie_runtime.http.asgi import FIRST_BYTE, SECURITY_HEADERS, refusal, refuse, secured
from sie_runtime.http.refusals import Refusals

MAX_HEAD_BYTES = 64 << 10  # bytes of a request line with its headers and trailers
HEAD_S = 10.0
MIN_RATE = 4096  # bytes of a body per second
RATE_S = 15.0  # period over which the rate of a body is measured
SLICE_BYTES = 16 << 10  # bytes of a chunked body parsed at once, so that a slice of a long chunk header has no body
WRITE_S = 60.0
LINGER_S = 5.0  # time for a client that still sends to read its response: a reset would discard it
HALF_CLOSED_S = 1.0  # age of a request at which a test begins whether a half-closed client still reads
MIN_ASK_S, MAX_ASK_S = 0.001, 1.0  # seconds between checks for the result of this test
MAX_PIPELINED = 128  # requests that a client may send before earlier ones were answered
_FRAMING = frozenset((b"connection", b"transfer-encoding", b"upgrade"))
_NO_NAME = re.compile(rb"[^a-z0-9-]")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_HEAD_TOO_LARGE = f"the head of this request, its trailers included, is larger than {MAX_HEAD_BYTES} bytes"


def _head(status: int, headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, int] | None:
    """Return the bytes of a head and the length of its body; None for a head that uvicorn has to handle itself."""
    header_values = dict(headers)
    length = header_values.get(b"content-length", b"")
    if not length.isdigit() or not _FRAMING.isdisjoint(header_values) or _NO_NAME.search(b"".join(header_values)):
        return None
    lines = [b"%b: %b" % pair for pair in headers]
    if _CONTROL.search(b"".join(lines)):
        return None
    return STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n", int(length)


class SharedState(ServerState):
    """State that the connections of a server share. `min_rate`: bytes per second at which a client must send a body and
    read a response. `leaving`: each response is the last of its connection.
    """

    def __init__(self, refusals: Refusals | None = None, min_rate: int = MIN_RATE) -> None:
        super().__init__()
        self.refusals = refusals or Refusals()
        self.min_rate = min_rate
        self.leaving = False

    def leave(self) -> None:
        self.leaving = True


class _Outlet:
    """Transport that a response to one request uses. If the client still sends, `close` waits until the client has read
    the response.
    """

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class _Cycle(RequestResponseCycle):
    """Sends a response of known length in one write. uvicorn writes the head and then the body, which takes 20 us of
    the 335 us of a request (bench/results/queue.md).

    Other responses (no length, HEAD, a connection that closes, unusual headers) are left to uvicorn.
    """

    server_state: SharedState
    _begun: tuple[bytes, int] | None = None

    async def send_500_response(self) -> None:
        await refuse(self.send, InternalFailure("the server failed; its log has the details"))

    async def send(self, message: Any) -> None:
        if not self.response_started:
            if message["type"] == "http.response.start":
                message = {**message, "headers": secured(message.get("headers", ()))}
            if self.more_body or self.server_state.leaving:
                self.keep_alive = False  # uvicorn then sends `connection: close`
            if message["type"] == "http.response.start" and self.keep_alive and self.scope["method"] != "HEAD":
                self._begun = _head(message["status"], message["headers"])
            if self._begun is None:
                await super().send(message)
            else:
                self.response_started, self.waiting_for_100_continue = True, False
            return
        if self._begun is not None:
            (head, length), self._begun = self._begun, None
            if self.flow.write_paused and not self.disconnected:
                await self.flow.drain()
            if self.disconnected:
                return
            body = message.get("body", b"")
            if not message.get("more_body") and len(body) == length:
                self.transport.write(head + body)
                self.response_complete = True
                self.message_event.set()
                if not self.keep_alive:
                    self.transport.close()
                self.on_response()
                return
            self.transport.write(head)
            self.chunked_encoding, self.expected_content_length = False, length
        await super().send(message)

    def abandon(self) -> None:
        """Mark the client as disconnected."""
        self.disconnected = True
        self.message_event.set()


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on slow, unfinished and large requests. It also replaces uvicorn's cycle by
    `_Cycle`, for which uvicorn has no option.

    A head that arrives in one piece needs no timer.
    """

    server_state: SharedState
    cycle: _Cycle
    _in_head = False
    _head_bytes = 0  # bytes of an incomplete head, without the piece in which it began
    _piece_bytes = 0
    _is_chunked = False
    _has_body = False  # True: the last piece had bytes of a body
    _idle_bytes = 0  # bytes of chunk headers and trailers since the last bytes of a body
    _body_bytes = 0  # bytes of all bodies of this connection
    _was_paused = False  # True: the server has paused reading since the rate was last measured
    _trailer_bytes = 0  # bytes of trailers and of the head before them; 0 without a trailer
    _begun_s = 0.0
    _why = ""
    _is_resuming = False  # True: a new parser reads the framing of a request whose head is known
    _is_lingering = False
    _is_asked = False
    _head_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _last_timer: asyncio.TimerHandle | None = None  # timer of a connection that lingers or is half closed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._outlet = _Outlet(transport, self._end)
        if len(self.connections) > max_connections():
            self._refuse(QueueFull("this process has reached its limit of connections"), "connections")
        else:
            self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn lets the timer fire after the connection was lost
        for timer in (self._head_timer, self._body_timer, self._write_timer, self._last_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        begin = 0
        while begin < len(data):
            end = begin + SLICE_BYTES if not begin or self._is_chunked else len(data)
            if not self._read(data[begin:end]):
                return
            begin = end

    def _read(self, data: bytes) -> bool:
        """Parse a piece of the input. Returns False if the input after it must not be parsed."""
        if self._is_lingering:
            return False
        self._unset_keepalive_if_required()
        self._piece_bytes, self._has_body = len(data), False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as stop:
            self._head_done()
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                return self._ignore_upgrade(data[stop.args[0] :])
            return False
        except httptools.HttpParserError:
            self._refuse(InvalidInput(self._why or "this is no HTTP/1.1 request", reason="malformed"))
            return False
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(InvalidInput(_HEAD_TOO_LARGE, reason="malformed"))
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_S, self._head_late)
        elif self.cycle is None or self.cycle.response_complete:
            self._rest()
        elif self.cycle.more_body:
            self._idle_bytes = 0 if self._has_body else self._idle_bytes + len(data)
            if self._idle_bytes > MAX_HEAD_BYTES:
                self._refuse(InvalidInput(_HEAD_TOO_LARGE, reason="malformed"))
            elif self._body_timer is None and self.server_state.min_rate:
                self._watch_body()
        return True

    def _ignore_upgrade(self, rest: bytes) -> bool:
        """Continue in HTTP/1.1 after a head that offers a protocol which is not served (RFC 9110, 7.8). Returns the
        same as `_read`.

        The parser stops at such a head and skips its body. So a new parser continues from there: it reads a head with
        the framing of the request, during which callbacks do nothing, and then `rest`.
        """
        framing = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        if framing:
            self._is_resuming = True
            lines = b"".join(b"%b: %b\r\n" % pair for pair in framing)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
            self._is_resuming = False
        if rest:
            return self._read(rest)
        if self.cycle.more_body and self._body_timer is None and self.server_state.min_rate:
            self._watch_body()
        return True

    def on_url(self, url: bytes) -> None:
        if not self._is_resuming:
            super().on_url(url)

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        super().on_message_begin()
        self.scope[FIRST_BYTE] = time.perf_counter()  # type: ignore[literal-required]
        self._in_head, self._head_bytes, self._begun_s = True, -self._piece_bytes, self.loop.time()
        self._idle_bytes = self._trailer_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(f"more than {MAX_PIPELINED} requests are sent ahead of their answers")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_resuming:
            return
        if self._in_head:
            super().on_header(name, value)
            return
        if not self._trailer_bytes:
            self._trailer_bytes = self._head_size()
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > MAX_HEAD_BYTES:
            self._stop(_HEAD_TOO_LARGE)

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            return
        self._head_done()
        if (
            self._piece_bytes > MAX_HEAD_BYTES or self._head_bytes >= 0  # the head came in several pieces
        ) and self._head_size() > MAX_HEAD_BYTES:  # a smaller head in one piece is never too large
            self._stop(_HEAD_TOO_LARGE)
        self._is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.__class__ = _Cycle
            self.cycle.server_state = self.server_state
            self.cycle.transport = self._outlet  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        self._body_bytes += len(body)
        super().on_body(body)
        self._was_paused |= self.flow.read_paused

    def on_message_complete(self) -> None:
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers)
        if has_body and self.parser.should_upgrade():
            return  # the body is not read yet
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self._is_lingering:
            super().on_response_complete()

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _stop(self, why: str) -> None:
        """Stop parsing from within a callback of the parser."""
        self._why = why
        raise ValueError(why)

    def _head_done(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_body(self) -> None:
        self._body_timer = self.loop.call_later(RATE_S, self._body_late, self._body_bytes)

    def _body_late(self, before_bytes: int) -> None:
        """Refuse a request if its body came slower than the minimum rate in the last RATE_S."""
        self._body_timer = None
        cycle = self.cycle
        if self._is_lingering or not cycle.more_body:
            return
        is_ours = self._was_paused or self.flow.read_paused or cycle.waiting_for_100_continue
        self._was_paused, rate = False, self.server_state.min_rate
        if is_ours or cycle.response_complete or self._body_bytes - before_bytes >= rate * RATE_S:
            self._watch_body()
            return
        message = (
            f"the body came slower than {rate} bytes a second for {RATE_S:g} s, the least that SIE_MIN_BODY_RATE allows"
        )
        self._refuse(GatewayTimeout(message, reason="slow_body", param="body"), "slow")

    def _head_late(self) -> None:
        self._refuse(InvalidInput(f"the head of this request was not complete within {HEAD_S:g} s", reason="malformed"))

    def _rest(self) -> None:
        """Start the keep-alive timer, because no request is open now."""
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _refuse(self, error: SIEError, reason: str = "malformed") -> None:
        """Answer a request that cannot be read, and close. If an earlier request is still being answered, nothing is
        sent: the client would take the refusal for the answer to the earlier request.
        """
        self.server_state.refusals.note(reason, error.message)
        self._head_done()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False
            return
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body, headers = refusal(error)
            lines = [f"{name.lower()}: {value}\r\n".encode() for name, value in headers.items()]
            lines += [b"%b: %b\r\n" % pair for pair in SECURITY_HEADERS]
            lines += [
                b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body),
                body,
            ]
            self.transport.write(STATUS_LINE[error.status] + b"".join(lines))
        self._linger()
        if cycle is not None and not cycle.response_complete:
            cycle.abandon()

    def _end(self) -> None:
        """Close the connection after a response; if the client still sends, linger."""
        if self.cycle.more_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Stop sending, and discard input until the client closes, for at most LINGER_S."""
        if self._is_lingering or self.transport.is_closing():
            return
        self._is_lingering = True
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._last_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Handle the end of the client's input. The client may still read, or it may be gone: both look the same
        here.
        """
        cycle = self.cycle
        if self._is_lingering or cycle is None or cycle.response_complete or cycle.more_body:
            return None  # None closes the connection
        self._head_done()
        cycle.keep_alive = False
        if cycle.scope["http_version"] == "1.1":  # older versions have no interim responses
            wait_s = self._begun_s + HALF_CLOSED_S - self.loop.time()
            if wait_s > 0:
                self._last_timer = self.loop.call_later(wait_s, self._ask, MIN_ASK_S)
            else:
                self._ask(MIN_ASK_S)
        return True

    def _ask(self, next_s: float) -> None:
        """Find out whether a client that sends no more still reads: a client that is gone answers an interim response
        with a reset.
        """
        if self.transport.is_closing() or self.cycle.response_started:
            return
        descriptor: int = self.transport.get_extra_info("socket").fileno()
        if not self._is_asked and not self.pipeline and not self.transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # the connection may be broken: `poll` below finds that
                # written to the socket at once: a client that is gone may reconnect in a moment
                os.write(descriptor, b"HTTP/1.1 100 Continue\r\n\r\n")
            self._is_asked = True
        poll = select.poll()
        poll.register(descriptor, 0)  # 0: report only errors and resets
        if poll.poll(0):
            self.transport.abort()
            return
        self._last_timer = self.loop.call_later(next_s, self._ask, min(2 * next_s, MAX_ASK_S))

    def shutdown(self) -> None:
        """Shut down as uvicorn does, but not while input that has arrived is still unread: its client assumes that the
        request was accepted.
        """
        if not self._is_lingering and not self.arriving:
            super().shutdown()

    @property
    def arriving(self) -> bool:
        """Return whether a request has arrived that was not begun, or whose head is not complete."""
        if (
            self.transport.is_closing()
            or self._is_lingering
            or (self.cycle is not None and not self.cycle.response_complete)
        ):
            return False
        waiting = select.poll()
        waiting.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return self._in_head or bool(waiting.poll(0))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_writes(self) -> None:
        self._write_timer = self.loop.call_later(WRITE_S, self._write_late, self.transport.get_write_buffer_size())

    def _write_late(self, before_bytes: int) -> None:
        read_bytes = before_bytes - self.transport.get_write_buffer_size()
        if read_bytes > 0 and read_bytes >= self.server_state.min_rate * WRITE_S:
            self._watch_writes()
        else:
            self.server_state.refusals.note("unread", "a response that its client did not read")
            self.transport.abort()
