"""One HTTP/1.1 connection: uvicorn's protocol, with limits on incomplete, slow and large requests.

    head ──► body ──► trailers, which are dropped
    response before the end of the body ──► no further request; input is discarded for at most LINGER_S
    client closes its sending side ──► it counts as disconnected (uvicorn's `eof_received`)

The head and the trailers of a request have together at most MAX_HEAD_BYTES. The same limit applies to the chunk headers
between two pieces of a body. A head must be complete within HEAD_S. A client must send a body and read a response at
least at the minimum rate of the server; time in which the server does not read the body is not counted.
`checked_target` has the rules of RFC 9110 and 9112 for a head: its target, `Host`, transfer codings, and headers that
may occur only once. `Protocol._refuse` sends an error body only if the client cannot take this body for the response to
another request.

`Guarded` checks the host name of a request, and which web page sent it. A web page can make a browser send requests to
any address that the browser reaches. So a page of another site could send a form to this machine, or point its own host
name to this machine (DNS rebinding). But the browser names the origin of the page in headers that no page can change:

    Host is a name of this listener ──► GET, HEAD, OPTIONS ───────────────────────────────────────────► application
                                    └─► any other method, or a websocket: Origin and Sec-Fetch-Site
                                        show a page of this server, of SIE_ALLOWED_HOSTS or of
                                        SIE_CORS_ORIGINS, or no web page at all (curl) ───────────────► application

GET, HEAD and OPTIONS change nothing, and only pages of SIE_CORS_ORIGINS get CORS headers: the browser hides the reply
from pages of other origins.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import re
import select
import socket
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from sie_contracts.errors import (
    GatewayTimeout,
    InternalFailure,
    InvalidInput,
    PermissionDenied,
    QueueFull,
    SIEError,
    UnsupportedMediaType,
)
from sie_contracts.loopback import is_loopback
from sie_runtime.descriptors import max_connections
from sie_runtime.http.asgi import (
    BODY_ARRIVED,
    FAILED,
    FIRST_BYTE,
    INCOMPRESSIBLE,
    REQUEST_ID,
    App,
    Receive,
    Scope,
    Send,
    common_headers,
    refusal,
    refuse,
    refuse_upgrade,
    reply_to_options,
    uuid7,
)
from sie_runtime.http.coding import CompressedReply
from sie_runtime.http.refusals import Refusals

MAX_HEAD_BYTES = 64 << 10  # largest number of bytes of a request line with all headers and trailers
HEAD_S = 10.0
MIN_RATE = 4096  # lowest rate at which a client must send a body or read a response, in bytes per second
RATE_S = 15.0  # seconds over which the rate of a body is measured
# Number of bytes of a slice of received input. The parser gets the input of a chunked body slice by slice. Of any other
# input, it first gets one slice, then all remaining bytes together. If the parser finds no bytes of a body in a slice,
# the whole slice counts towards MAX_HEAD_BYTES.
SLICE_BYTES = 4 << 10
# Number of pieces of a body that are parsed before the event loop serves other connections. One read of a connection
# may return tens of thousands of chunks of one byte.
PIECES_AT_ONCE = 512
WRITE_S = 60.0  # seconds over which the rate of a client that reads a response is measured
# seconds for which a connection stays open after a response to a client that still sends: an immediate close would
# discard the response
LINGER_S = 5.0
MAX_PIPELINED = 128  # largest number of unanswered requests of one connection; a further one closes the connection
_FRAMING = frozenset((b"connection", b"transfer-encoding", b"upgrade"))
_BODY_FRAMING = (b"content-length", b"transfer-encoding")
_NAME_BYTES = b"abcdefghijklmnopqrstuvwxyz0123456789-"
_CONTROL_BYTES = bytes([*range(0x09), *range(0x0A, 0x20), 0x7F])  # control characters except the tab
_HEAD_TOO_LARGE = f"the head of this request, its trailers included, is larger than {MAX_HEAD_BYTES} bytes"


def _head(status: int, headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, int] | None:
    """Return (bytes of the head, length of the body) of a response; None if uvicorn must send the response itself,
    because the headers are unusual.
    """
    header_values = dict(headers)
    length = header_values.get(b"content-length", b"")
    if not length.isdigit() or not _FRAMING.isdisjoint(header_values):
        return None
    lines = list(map(b": ".join, headers))
    text = b"".join(lines)
    # A header is unusual if its name has a byte that is not in _NAME_BYTES, or if it has a control character.
    # `translate` finds these bytes twice as fast as a regular expression.
    if b"".join(header_values).translate(None, _NAME_BYTES) or len(text.translate(None, _CONTROL_BYTES)) < len(text):
        return None
    return STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n", int(length)


def _malformed(message: str) -> InvalidInput:
    return InvalidInput(message, reason="malformed")


class SharedState(ServerState):
    """State that all connections of a server share. `min_rate`: lowest rate at which a client must send a body and read
    a response, in bytes per second. 0: a body may come at any rate, and a client need only read one byte of a response
    in WRITE_S. `leaving`: if true, each connection is closed after its next response.
    """

    def __init__(self, refusals: Refusals | None = None, min_rate: int = MIN_RATE) -> None:
        super().__init__()
        self.refusals = refusals or Refusals()
        self.min_rate = min_rate
        self.leaving = False

    def leave(self) -> None:
        self.leaving = True


class _Cycle(RequestResponseCycle):
    """Sends the head and the body of a response by one write, if the body has one piece and a known length. uvicorn
    would send two writes, which takes 20 us of the 335 us of a request (bench/results/queue.md).

    uvicorn sends all other responses (no length, HEAD, a connection that closes, unusual headers). HTTP/1.0 has no
    chunks, so the end of the connection marks the end of a response of unknown length.
    """

    server_state: SharedState
    scope: Any
    _begun: tuple[bytes, int] | None = None
    _ends_by_close = False
    _compressed: CompressedReply | None = None

    async def send_500_response(self) -> None:
        await refuse(self.scope, self.write, InternalFailure(FAILED))

    async def send(self, message: Any) -> None:
        if self._compressed is None and not self.response_started and not self.scope.get(INCOMPRESSIBLE):
            self._compressed = CompressedReply(self.scope, self.write)
        await (self.write if self._compressed is None else self._compressed.send)(message)

    async def write(self, message: Any) -> None:
        """Send an ASGI message without compression. A response gets the headers that every reply has."""
        if not self.response_started:
            if message["type"] == "http.response.start":
                message = {**message, "headers": common_headers(self.scope, message.get("headers", ()))}
            if self.more_body or self.server_state.leaving:
                self.keep_alive = False  # uvicorn sends `connection: close` if keep_alive is false
            if message["type"] == "http.response.start" and self.keep_alive and self.scope["method"] != "HEAD":
                self._begun = _head(message["status"], message["headers"])
            elif message["type"] == "http.response.start" and self.scope["http_version"] != "1.1":
                self._ends_by_close = not any(name == b"content-length" for name, _ in message["headers"])
                if self._ends_by_close:
                    self.chunked_encoding = False  # uvicorn would send chunks, which HTTP/1.0 lacks
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
        elif self._ends_by_close:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)

    def abandon(self) -> None:
        """Treat the client as disconnected, so that the application stops."""
        self.disconnected = True
        self.message_event.set()


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on slow, incomplete and large requests. It replaces uvicorn's class of the request
    cycle by `_Cycle`, because uvicorn has no option for this. To save time, a head that arrives in one piece starts no
    timer.
    """

    server_state: SharedState
    cycle: _Cycle  # the newest request
    _oldest: _Cycle  # the oldest request without a complete response: the request that is served now
    _in_head = False
    # Number of bytes of an incomplete head, without the piece of input in which the head begins. `on_message_begin`
    # sets the number to minus the size of this piece. After the piece is parsed, its size is added, which gives 0.
    _head_bytes = 0
    _piece_bytes = 0
    _is_chunked = False
    _has_body = False  # whether the last piece of input had bytes of a body
    _idle_bytes = 0  # bytes of chunk headers and trailers that have arrived since the last bytes of a body
    _body_bytes = 0  # bytes of request bodies that this connection has received
    _body_pieces = 0  # number of calls of `on_body` on this connection
    _unread: bytes | None = None  # input that is not parsed yet; None if there is no such input
    _was_paused = False  # whether the server has stopped reading at any time since the rate was last measured
    _trailer_bytes = 0  # 0 before the first trailer; then the bytes of the head and all trailers, which share one limit
    _fault: SIEError | None = None  # error for the client, set by `_stop`
    # true while a new parser reads an artificial head, see `_ignore_upgrade`
    _is_resuming = False
    _is_lingering = False
    _head_timer: asyncio.TimerHandle | None = None
    _body_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # transport for responses; if the client is still sending, `close` first lets the client read the response
        self._outlet = SimpleNamespace(write=transport.write, is_closing=transport.is_closing, close=self._end)
        if len(self.connections) > max_connections():
            self._refuse(QueueFull("this process has the maximum number of connections"), "connections")
        else:
            self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.pipeline:  # uvicorn informs only the newest request, not the oldest, that the client has disconnected
            self._oldest.abandon()
        # uvicorn leaves the keep-alive timer running if the connection is lost with an exception
        self._unset_keepalive_if_required()
        for timer in (self._head_timer, self._body_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse the input. After PIECES_AT_ONCE pieces of a body, leave the rest to `_parse_unread`."""
        if self._unread is not None:  # the earlier input is not parsed yet, although the application resumed reading
            self._unread += data
            self.transport.pause_reading()
            return
        begin, most_pieces = 0, self._body_pieces + PIECES_AT_ONCE
        while begin < len(data):
            end = begin + SLICE_BYTES if not begin or self._is_chunked else len(data)
            if not self._read(data[begin:end]):
                return
            begin = end
            if self._body_pieces > most_pieces:
                self._unread = data[begin:]
                self.transport.pause_reading()
                self.loop.call_soon(self._parse_unread)
                return

    def _parse_unread(self) -> None:
        if self._unread is None or self.transport.is_closing():
            return
        data, self._unread = self._unread, None
        self.data_received(data)
        if self._unread is None and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _read(self, data: bytes) -> bool:
        """Parse a piece of the input. Returns False if later input must not be parsed."""
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
        except httptools.HttpParserError as error:
            # the parser's reason is a fixed text, such as `Duplicate Content-Length`
            reason = "" if isinstance(error, httptools.HttpParserCallbackError) else f": {error}"
            self._refuse(self._fault or _malformed(f"this is no HTTP/1.1 request{reason}"))
            return False
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_malformed(_HEAD_TOO_LARGE))
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_S, self._head_late)
        elif self.cycle is None or self.cycle.response_complete:
            self._rest()
        elif self.cycle.more_body:
            self._idle_bytes = 0 if self._has_body else self._idle_bytes + len(data)
            if self._idle_bytes > MAX_HEAD_BYTES:
                self._refuse(_malformed(_HEAD_TOO_LARGE))
            elif self._body_timer is None and self.server_state.min_rate:
                self._watch_body()
        return True

    def _ignore_upgrade(self, rest: bytes) -> bool:
        """Continue with HTTP/1.1 after a head that offers an upgrade to an unsupported protocol (RFC 9110, 7.8).
        `rest`: input after the head. Returns the same as `_read`.

        The parser stops after such a head and would skip the body. So a new parser first reads a short artificial head
        with the same Content-Length or Transfer-Encoding, with callbacks switched off. Then it reads `rest`.
        """
        framing = [pair for pair in self.headers if pair[0] in _BODY_FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        if framing:
            self._is_resuming, url = True, self.url
            lines = b"".join(b"%b: %b\r\n" % pair for pair in framing)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + lines + b"\r\n")
            self._is_resuming, self.url = False, url
        if rest:
            return self._read(rest)
        if self.cycle.more_body and self._body_timer is None and self.server_state.min_rate:
            self._watch_body()
        return True

    def on_message_begin(self) -> None:
        if self._is_resuming:
            return
        super().on_message_begin()
        self.scope[FIRST_BYTE] = time.perf_counter()  # type: ignore[literal-required]
        self.scope[REQUEST_ID] = uuid7()  # type: ignore[literal-required]
        self._in_head, self._head_bytes = True, -self._piece_bytes
        self._idle_bytes = self._trailer_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(_malformed(f"more than {MAX_PIPELINED} requests were sent before earlier ones were answered"))

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
            self._stop(_malformed(_HEAD_TOO_LARGE))

    def on_headers_complete(self) -> None:
        if self._is_resuming:
            return
        self._in_head = False
        if self._head_timer is not None:
            self._head_done()
        # to save time, the size is computed only if the head came in several pieces, or in a piece above the limit
        if (self._piece_bytes > MAX_HEAD_BYTES or self._head_bytes >= 0) and self._head_size() > MAX_HEAD_BYTES:
            self._stop(_malformed(_HEAD_TOO_LARGE))
        try:
            self.url = checked_target(
                self.parser.get_method().decode(), self.url, self.parser.get_http_version(), self.headers
            )
        except SIEError as error:
            self._stop(error)
        self._is_chunked = b"transfer-encoding" in dict(self.headers)
        # HTTP/1.0 has no interim responses: an Expect header is ignored (RFC 9110, 10.1.1)
        self.expect_100_continue &= self.parser.get_http_version() == "1.1"
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.__class__ = _Cycle
            self.cycle.server_state = self.server_state
            self.cycle.transport = self._outlet  # type: ignore[assignment]
            if not self.pipeline:
                self._oldest = self.cycle

    def _should_upgrade(self) -> bool:
        """Return whether to switch to a websocket. The server ignores an upgrade while an earlier request has no
        complete response (RFC 9110, 7.8), because the websocket would begin before the end of that response. It also
        ignores an upgrade while responses are unread: the websocket would not notice that the client does not read.
        """
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and not self.flow.write_paused and super()._should_upgrade()

    def on_body(self, body: bytes) -> None:
        self._has_body = True
        self._body_bytes += len(body)
        self._body_pieces += 1
        super().on_body(body)
        self._was_paused |= self.flow.read_paused

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and not dict(self.headers).keys().isdisjoint(_BODY_FRAMING):
            return  # this parser skips the body after an upgrade header; `_ignore_upgrade` parses the body later
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        self.scope[BODY_ARRIVED] = True  # type: ignore[literal-required]
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if not self._is_lingering:
            if self.pipeline:
                self._oldest = self.pipeline[-1][0]  # type: ignore[assignment]
            super().on_response_complete()

    def _head_size(self) -> int:
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _stop(self, error: SIEError) -> None:
        """Stop the parser from inside one of its callbacks. The client gets `error`."""
        self._fault = error
        raise error

    def _head_done(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_body(self) -> None:
        self._body_timer = self.loop.call_later(RATE_S, self._body_late, self._body_bytes)

    def _body_late(self, before_bytes: int) -> None:
        """Refuse a request if its body arrived more slowly than the minimum rate in the last RATE_S seconds."""
        self._body_timer = None
        cycle = self.cycle
        if self._is_lingering or not cycle.more_body:
            return
        was_unread = self._was_paused or self.flow.read_paused or cycle.waiting_for_100_continue
        self._was_paused, rate = False, self.server_state.min_rate
        if was_unread or cycle.response_complete or self._body_bytes - before_bytes >= rate * RATE_S:
            self._watch_body()
            return
        message = (
            f"for {RATE_S:g} s the body came slower than {rate} bytes a second, the least that SIE_MIN_BODY_RATE allows"
        )
        self._refuse(GatewayTimeout(message, reason="slow_body", param="body"), "slow")

    def _head_late(self) -> None:
        self._refuse(_malformed(f"the head of this request was not complete within {HEAD_S:g} s"))

    def _rest(self) -> None:
        """Start the keep-alive timer; called while no request is being received or answered."""
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _refuse(self, error: SIEError, reason: str = "malformed") -> None:
        """Send an error and close the connection, because its input is malformed or too slow, or because there are too
        many connections. The error follows the responses to earlier requests. Send no error if the response to the
        newest request has begun, or if this request was read completely and awaits its response: the client would take
        the error for this response.
        """
        self.server_state.refusals.note(reason, error.message)
        self._head_done()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False
            return
        if self.pipeline and self.pipeline[0][0] is cycle:  # earlier requests have no complete response yet

            async def refused(scope: Any, receive: Any, send: Any) -> None:
                await refuse(scope, send, error)

            self.pipeline[0] = (cycle, refused)
            return
        if cycle is None or cycle.response_complete or not cycle.response_started:
            scope: Any = cycle.scope if cycle is not None and not cycle.response_complete else {"headers": ()}
            scope.setdefault(REQUEST_ID, uuid7())
            body, own = refusal(error, scope[REQUEST_ID])
            headers = [(name.lower().encode(), value.encode()) for name, value in own.items()]
            lines = [b"%b: %b\r\n" % pair for pair in common_headers(scope, headers)]
            lines += [
                b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body),
                body,
            ]
            self.transport.write(STATUS_LINE[error.status] + b"".join(lines))
        self._linger()
        if cycle is not None and not cycle.response_complete:
            cycle.abandon()

    def _end(self) -> None:
        """Close the connection after a response. If the client still sends data, let it read the response first."""
        if self.cycle.more_body:
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Stop sending. Read and discard input until the client closes the connection, for at most LINGER_S."""
        if self._is_lingering or self.transport.is_closing():
            return
        self._is_lingering = True
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def shutdown(self) -> None:
        """Close an idle connection now if it has no unread input, any other connection after its next response."""
        if not self._is_lingering and not self.arriving:
            super().shutdown()

    @property
    def arriving(self) -> bool:
        """Return whether a request is arriving: its head is incomplete, or some received bytes are not parsed yet."""
        if (
            self.transport.is_closing()
            or self._is_lingering
            or (self.cycle is not None and not self.cycle.response_complete)
        ):
            return False
        waiting = select.poll()
        waiting.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return self._in_head or bool(self._unread) or bool(waiting.poll(0))

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


Headers = list[tuple[bytes, bytes]]
# headers of which this server reads one value, in addition to all headers that begin with _OWN. Which of two values
# counts would depend on the reader, and a proxy in front may read the other one. The parser refuses a second
# Content-Length.
SINGLE = frozenset(
    {
        b"authorization",
        b"content-type",
        b"host",
        b"idempotency-key",
        b"if-match",
        b"mcp-session-id",
        b"origin",
        b"sec-fetch-site",
    }
)
_OWN = b"x-sie-"
WHOLE_SERVER = "*"  # target of an OPTIONS that asks about the server, not about a path
_VERSIONS = ("1.1", "1.0")
_AUTHORITY = re.compile(rb"(?:\[[0-9a-f:.]+\]|[a-z0-9._~!$&'()*+,;=%-]+)(?::[0-9]*)?", re.IGNORECASE)
_ABSOLUTE = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE | re.DOTALL)


def checked_target(method: str, target: bytes, version: str, headers: Headers) -> bytes:
    """Check a head. Return its target as a path with a query, or WHOLE_SERVER. If the target is an absolute URL, its
    host replaces `Host` in `headers` (RFC 9112, 3.2.2). `headers` has names in lower case.

    Raises InvalidInput, which names the header, and UnsupportedMediaType for a transfer coding except chunked.
    """
    if version not in _VERSIONS:
        raise _faulty("version", "expected HTTP/1.1 or HTTP/1.0")
    values = dict(headers)
    if len(values) < len(headers):
        _check_repeated(headers)
    host = values.get(b"host")
    if host is None and version == "1.1":
        raise _faulty("Host", "missing, and HTTP/1.1 requires it")
    if host and not _AUTHORITY.fullmatch(host):
        raise _faulty("Host", "expected a host name, with or without a port")
    if b"transfer-encoding" in values:
        _check_codings(version, headers)
    if target.startswith(b"/") and b"#" not in target:
        return target
    if target == WHOLE_SERVER.encode() and method == "OPTIONS":
        return target
    url = _ABSOLUTE.fullmatch(target)
    if url is None or b"#" in target or not _AUTHORITY.fullmatch(url[1]):
        raise _faulty("target", "expected a path such as /v1/models, or a URL with http:// and no fragment")
    headers[:] = [(b"host", url[1]), *(pair for pair in headers if pair[0] != b"host")]
    return url[2] if url[2].startswith(b"/") else b"/" + url[2]


def _check_repeated(headers: Headers) -> None:
    met = set[bytes]()
    for name, _ in headers:
        if name in met and (name in SINGLE or name.startswith(_OWN)):
            raise _faulty(name.decode("latin-1").title(), "expected once, this head has it several times")
        met.add(name)


def _check_codings(version: str, headers: Headers) -> None:
    if version != "1.1":
        raise _faulty("Transfer-Encoding", "HTTP/1.0 has no transfer codings")
    values = b",".join(value for name, value in headers if name == b"transfer-encoding").lower().split(b",")
    codings = [coding for value in values if (coding := value.strip())]
    if codings.count(b"chunked") != 1 or codings[-1] != b"chunked":
        raise _faulty("Transfer-Encoding", "expected chunked once, at the end")
    if len(codings) > 1:
        raise UnsupportedMediaType(
            "Transfer-Encoding: expected chunked alone; a gzip body is announced in Content-Encoding",
            reason="transfer_encoding",
            param="Transfer-Encoding",
            status=501,
        )


def _faulty(param: str, message: str) -> InvalidInput:
    return InvalidInput.at(param, message, reason="malformed")


_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN_SITES = frozenset({b"cross-site", b"same-site"})
# ends of names that do not exist in public DNS, so that no foreign web page can have such a name as its host
_CLUSTER_NAMES = (".svc", ".cluster.local")
_ANY = "*"
# largest number of bytes of a Host header whose check is cached. A longer header is no DNS name, and a cache of long
# headers would fill memory.
_MAX_CACHED_HOST = 255


class HostNames:
    """Host names by which clients may address a listener. `allowed`: SIE_ALLOWED_HOSTS. If `allowed` is None, a
    listener on a loopback address accepts only names of loopback addresses and the host name of this machine; any other
    listener accepts every name.
    """

    def __init__(self, address: str, allowed: Sequence[str] | None, cors_origins: Sequence[str] = ()) -> None:
        """`cors_origins`: origins in SIE_CORS_ORIGINS; their pages have the same rights as pages of this server."""
        self._origins = frozenset(origin.encode("latin-1") for origin in cors_origins)
        self._is_loopback = is_loopback(address)
        self._address = address
        self._allowed = [name.strip().lower() for name in allowed or ()]
        self._is_any = _ANY in self._allowed or (allowed is None and not self._is_loopback)
        self._cached = functools.lru_cache(1024)(self._has)

    def _has(self, host: bytes) -> bool:
        """Return whether `host`, a Host header with or without a port, is a name of this listener."""
        name, port = parts(host.decode("latin-1").lower())
        return self._is_any or self._is_own(name) or any(matches(host, name, port) for host in self._allowed)

    def _is_own(self, name: str) -> bool:
        """Return whether a host name is allowed even if SIE_ALLOWED_HOSTS does not list the name, because no foreign
        site can point this name to this machine in DNS (DNS rebinding).
        """
        if name in (self._address, "localhost") or name.endswith(".localhost"):
            return True
        if self._is_loopback:
            return is_loopback(name) or name == socket.gethostname().lower()
        return _is_address(name) or "." not in name or name.endswith(_CLUSTER_NAMES)

    def is_own_page(self, origin: bytes, scope: Mapping[str, Any], host: bytes) -> bool:
        """Return whether a page of `origin` may send requests that change or compute something. The origin's host must
        be the host of the request or an allowed host, or SIE_CORS_ORIGINS must list the origin. A page of https at the
        port of a listener on loopback is not its own, because the listener itself speaks http at this port.
        """
        if origin in self._origins:
            return True
        scheme, _, page_host = origin.decode("latin-1").lower().partition("://")
        if scheme not in ("http", "https"):
            return False
        name, port = parts(page_host)
        if page_host == host.decode("latin-1").lower():
            _, own_port = scope.get("server") or ("", None)
            if scheme == "http" or not self._is_loopback or (port or "443") != str(own_port):
                return True
        return any(matches(host, name, port) for host in self._allowed if host != _ANY)

    def check(self, scope: Scope) -> None:
        """Raise PermissionDenied for a foreign host name, and for a request by which a foreign page would change or
        compute something.
        """
        headers = dict(scope["headers"])  # each of these headers occurs only once (`checked_target`)
        host, origin = headers.get(b"host", b""), headers.get(b"origin")
        if host and not (self._cached if len(host) <= _MAX_CACHED_HOST else self._has)(host):
            raise PermissionDenied(
                "Host: not a name of this server; SIE_ALLOWED_HOSTS lists the additional names of a server",
                reason="host",
                param="Host",
            )
        if scope["type"] == "http" and scope["method"] in _READING:
            return
        if origin is not None and not self.is_own_page(origin, scope, host):
            raise PermissionDenied(
                "Origin: a page of this origin may send only GET, HEAD and OPTIONS; SIE_CORS_ORIGINS lists the "
                "origins whose pages may send all requests, SIE_ALLOWED_HOSTS the additional names of this server",
                reason="origin",
                param="Origin",
            )
        if origin is None and headers.get(b"sec-fetch-site") in _FOREIGN_SITES:
            raise PermissionDenied(
                "Sec-Fetch-Site: a page of another site may send only GET, HEAD and OPTIONS", reason="origin"
            )


class Guarded:
    """ASGI wrapper of `app` that refuses foreign host names, and requests by which foreign web pages would change or
    compute something.
    """

    def __init__(self, app: App, names: HostNames, refusals: Refusals) -> None:
        self.app = app
        self._names = names
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        try:
            self._names.check(scope)
        except SIEError as error:
            self._refusals.note(error.reason, error.message)
            scope[INCOMPRESSIBLE] = True
            await (refuse if scope["type"] == "http" else refuse_upgrade)(scope, send, error)
            return
        if scope["path"] == WHOLE_SERVER:
            await reply_to_options(send)
        else:
            await self.app(scope, receive, send)


def parts(host: str) -> tuple[str, str]:
    """Return (name, port) of a Host header. The brackets of an IPv6 address, and the final dot of any other name, are
    removed. The port is empty if the header has none.
    """
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        return name, rest.removeprefix(":")
    name, _, port = host.partition(":")
    return name.removesuffix("."), port


def matches(allowed: str, name: str, port: str) -> bool:
    """Return whether a host matches `allowed`, for example `*.example.com`. A port in `allowed` must match too."""
    allowed_name, wanted_port = parts(allowed)
    if wanted_port and wanted_port != port:
        return False
    return name.endswith(allowed_name[1:]) if allowed_name.startswith("*.") else name == allowed_name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
