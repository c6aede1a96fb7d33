"""uvicorn inside a process of ours: we bind, we own the signals, we decide when it ends. And the probes that every process has.

A connection may hold this much and no more: a head of MAX_HEAD_BYTES that is complete within HEAD_S, a response whose client reads some of
it within WRITE_S, silence for KEEP_ALIVE_S. What never reaches an application is answered in the envelope of all other errors.

    leave ──► each response is the last of its connection, and says so ──► hang_up: what is idle is closed ──► stop
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import re
import resource
import secrets
import select
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import httptools
import msgspec
import uvicorn
from prometheus_client.exposition import choose_encoder
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from sie_contracts import __version__
from sie_contracts.errors import InternalFailure, InvalidInput, NotFound, QueueFull, SIEError, envelope
from sie_contracts.runtime.metrics import Registry
from sie_contracts.settings import SettingError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Body = bytes | Iterable[bytes | memoryview]

WEBSOCKET_MESSAGE_BYTES = 4096  # of what a peer sends: nobody reads it
KEEP_ALIVE_S = 120  # above the idle time-out of common load balancers, so that they close first
MAX_HEAD_BYTES = 64 << 10  # of a request line with its headers
MOST_ID_CHARS = 128
HEAD_S = 10.0
WRITE_S = 60.0
STOP_S = 5.0
TELL_S = 10.0  # between lines in the log about what is refused here
MAX_FILES = 1 << 16
SPARE_FILES = 256  # for everything but clients
MOST_TURNS = 100  # of the event loop, for requests that arrive while connections are closed
_FRAMING = frozenset((b"connection", b"transfer-encoding", b"upgrade"))
_NO_NAME = re.compile(rb"[^a-z0-9-]")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_HEAD_TOO_LARGE = f"the head of this request is larger than {MAX_HEAD_BYTES} bytes"
_logger = logging.getLogger("sie.http")


def uuid7() -> str:
    """A time-ordered UUID (RFC 9562, version 7), as text."""
    chance = secrets.randbits(74)
    value = (time.time_ns() // 1_000_000 << 80) | (0x7 << 76) | (chance >> 62 << 64) | (0b10 << 62) | (chance & (1 << 62) - 1)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def refusal(error: SIEError) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an error that no application answers."""
    request_id = uuid7()
    headers = {
        "X-SIE-Request-ID": request_id, "X-Request-ID": request_id, "X-SIE-Version": __version__, "X-SIE-Error-Code": error.code,
        "x-should-retry": "true" if error.retryable else "false",
    }  # fmt: skip
    if error.retryable:
        headers["Retry-After"] = str(max(1, error.retry_after_s))
    return msgspec.json.encode(envelope(error, request_id)), headers


class _Refusals:
    """Counts what is refused below any application, in one line each TELL_S: whoever sends garbage must not fill the log."""

    def __init__(self) -> None:
        self._count = 0
        self._told_s = -TELL_S

    def note(self, message: str) -> None:
        self._count += 1
        now_s = time.monotonic()
        if now_s - self._told_s >= TELL_S:
            _logger.info("%d requests were refused before they reached a route, the last one: %s", self._count, message)
            self._count, self._told_s = 0, now_s


_refusals = _Refusals()


def _head(status: int, headers: Sequence[tuple[bytes, bytes]]) -> tuple[bytes, int] | None:
    """The bytes of a head and the length of the body it promises; None for one that uvicorn has to look at itself."""
    found = dict(headers)
    length = found.get(b"content-length", b"")
    if not length.isdigit() or not _FRAMING.isdisjoint(found) or _NO_NAME.search(b"".join(found)):
        return None
    lines = [b"%b: %b" % pair for pair in headers]
    if _CONTROL.search(b"".join(lines)):
        return None
    return STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n", int(length)


class _State(ServerState):
    """What the connections of a server share."""

    leaving = False


class _Cycle(RequestResponseCycle):
    """A response of known length leaves in one write, where uvicorn writes its head and then its body: 20 us of a request's
    335 (bench/results/queue.md).

    What is unusual (no length, HEAD, a connection that closes, odd headers) is left to uvicorn.
    """

    server_state: _State
    _begun: tuple[bytes, int] | None = None

    async def send_500_response(self) -> None:
        await refuse(self.send, InternalFailure("the server failed; its log has the details"))

    async def send(self, message: Any) -> None:
        if not self.response_started:
            if self.server_state.leaving and not self.more_body:  # to close before a body was read could cost its client the answer
                self.keep_alive = False  # which uvicorn tells
            if message["type"] == "http.response.start" and self.keep_alive and self.scope["method"] != "HEAD":
                self._begun = _head(message["status"], list(message.get("headers", ())))
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


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with `_Cycle` for its cycle, which it offers no way to name, and with bounds on what a client may leave open.

    It needs no timer for a request whose head arrives in one piece.
    """

    server_state: _State
    _in_head = False
    _head_bytes = 0  # of a head that is not complete, without the piece in which it began
    _piece_bytes = 0
    _why = ""
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            self._refuse(QueueFull("this process has as many connections as it may"))
        else:
            self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it to fire where the connection broke
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._piece_bytes = len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._head_done()
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self.cycle.keep_alive = False  # the parser has given up on what follows
            return
        except httptools.HttpParserError:
            self._refuse(InvalidInput(self._why or "this is no HTTP/1.1 request", reason="malformed"))
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(InvalidInput(_HEAD_TOO_LARGE, reason="malformed"))
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_S, self._head_late)
        elif self.cycle is None or self.cycle.response_complete:
            self._rest()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, -self._piece_bytes

    def on_headers_complete(self) -> None:
        self._head_done()
        if self._piece_bytes > MAX_HEAD_BYTES or self._head_bytes > 0:  # else it cannot be too large
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > MAX_HEAD_BYTES:
                self._why = _HEAD_TOO_LARGE
                raise ValueError(self._why)  # the parser's way to stop
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.__class__ = _Cycle
            self.cycle.server_state = self.server_state  # type: ignore[attr-defined]

    def _head_done(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._refuse(InvalidInput(f"the head of this request was not complete within {HEAD_S:g} s", reason="malformed"))

    def _rest(self) -> None:
        """Nothing is asked for now."""
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _refuse(self, error: SIEError) -> None:
        """Answer what cannot be read, and close. What comes behind a request that is still answered stays unanswered: its client would
        take the refusal for the other answer."""
        _refusals.note(error.message)
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
            lines += [b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body), body]
            self.transport.write(STATUS_LINE[error.status] + b"".join(lines))
        self.transport.close()

    def shutdown(self) -> None:
        """uvicorn's, but where something has arrived it is read first: its client believes that it was taken."""
        if not self.arriving:
            super().shutdown()

    @property
    def arriving(self) -> bool:
        """Whether a request has arrived that nobody has begun to read, or its head is not complete."""
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
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
        if self.transport.get_write_buffer_size() < before_bytes:
            self._watch_writes()
        else:
            _refusals.note("a response that its client did not read")
            self.transport.abort()


@functools.cache
def most_connections() -> int:
    """How many clients may be connected: what the system allows this process in open files, raised as far as may be, less SPARE_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, (MAX_FILES if soft == resource.RLIM_INFINITY else soft) - SPARE_FILES)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A listening HTTP server. `setting` is blamed when the port cannot be had."""

    def __init__(
        self, app: App, host: str, port: int, *, setting: str, root_path: str = "", websockets: type[asyncio.Protocol] | None = None
    ) -> None:
        """`websockets`: what speaks them; without it an upgrade is refused."""
        try:
            self._socket = _listen(host, port)
        except OSError as error:
            raise SettingError(setting, f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app, loop="none", http=_Protocol, ws=websockets or "none", ws_per_message_deflate=False, ws_max_size=WEBSOCKET_MESSAGE_BYTES,
            lifespan="off", log_config=None, access_log=False, root_path=root_path,
            timeout_keep_alive=KEEP_ALIVE_S, proxy_headers=False, server_header=False, date_header=False,
        )  # fmt: skip
        self._server = _Server(config)
        self._server.server_state = self._state = _State()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name=f"http:{self.port}")

    def leave(self) -> None:
        """From now on each response is the last of its connection and says so. All else goes on."""
        self._state.leaving = True

    async def hang_up(self) -> None:
        """`leave`, and close what is idle; websockets are told that this server goes away. A request that has arrived is begun before this
        returns, one that was begun is answered, and new connections are taken on."""
        self.leave()
        for connection in list(self._state.connections):
            connection.shutdown()
        for _ in range(MOST_TURNS):
            await asyncio.sleep(0)
            if not any(isinstance(connection, _Protocol) and connection.arriving for connection in self._state.connections):
                break
        await asyncio.sleep(0)  # what was read has its task by now, which begins

    async def stop(self, within_s: float = STOP_S) -> None:
        """Stop listening, hang up, wait at most so long for running requests and for clients that read their answers."""
        self.leave()
        self._server.config.timeout_graceful_shutdown = math.ceil(within_s)
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, so that asyncio sets TCP_NODELAY
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request by their names in lower case; what was sent in several lines is one value, as RFC 9110 joins them."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if len(headers) < len(scope["headers"]):
        lines: dict[str, list[str]] = {name: [] for name in headers}
        for name, value in scope["headers"]:
            lines[name.decode("latin-1")].append(value.decode("latin-1"))
        headers = {name: ", ".join(values) for name, values in lines.items()}
    return headers


def common_headers(headers: Mapping[str, str], request_id: str, trace_id: str | None) -> list[tuple[bytes, bytes]]:
    """What every reply says of itself. A client's own id comes back where it has at most MOST_ID_CHARS, all of which can be printed."""
    given = headers.get("x-request-id", "")
    client_id = given if 0 < len(given) <= MOST_ID_CHARS and given.isascii() and given.isprintable() else request_id
    return [
        *([(b"x-trace-id", trace_id.encode())] if trace_id else []),
        (b"x-sie-request-id", request_id.encode()),
        (b"x-request-id", client_id.encode()),
        (b"x-sie-version", __version__.encode()),
        (b"x-sie-server-version", __version__.encode()),  # the public SIE clients compare it with their own
    ]


async def reply(
    send: Send, status: int, body: Body, content_type: str = "text/plain; charset=utf-8",
    extra: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """One response. A body in pieces is sent as they are made, each when the client has room for it and others had a turn."""
    headers = [(b"content-type", content_type.encode())]
    if isinstance(body, bytes):
        headers.append((b"content-length", b"%d" % len(body)))
    if extra:
        headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in extra.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    if not isinstance(body, bytes):
        for piece in body:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": body if isinstance(body, bytes) else b""})


async def refuse(send: Send, error: SIEError) -> None:
    """One error as the whole response."""
    body, headers = refusal(error)
    await reply(send, error.status, body, "application/json", headers)


def accepts_json(accept: str) -> bool:
    """Whether an Accept header names JSON itself. A wildcard does not: curl sends one, and people read its output."""
    for part in accept.lower().split(","):
        media, *parameters = (each.strip() for each in part.split(";"))
        if media == "application/json":
            return not any(re.fullmatch(r"q=0(\.0*)?", each) for each in parameters)
    return False


def probes(
    not_ready: Callable[[], str | None], registry: Registry | None, healthy_workers: Callable[[], int] | None = None
) -> App:  # fmt: skip
    """`/healthz`, `/readyz` and, with a registry, `/metrics`. `not_ready` gives the reason, or None when ready.

    `/readyz` answers in JSON where JSON is accepted; `healthy_workers`, of a gateway, is in it.
    """

    async def readyz(scope: Scope, send: Send) -> None:
        reason = not_ready()
        status = 503 if reason else 200
        if not accepts_json(headers_of(scope).get("accept", "")):
            await reply(send, status, f"not ready: {reason}".encode() if reason else b"ok")
            return
        content: dict[str, Any] = {"status": "not ready" if reason else "ready"}
        if reason:
            content["reason"] = reason
        if healthy_workers is not None:
            content["healthy_workers"] = healthy_workers()
        await reply(send, status, msgspec.json.encode(content), "application/json")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path in ("/healthz", "/livez", "/ping"):
            await reply(send, 200, b"ok")
        elif path == "/readyz":
            await readyz(scope, send)
        elif path == "/metrics" and registry is not None:
            # text, or OpenMetrics for those who ask for it: Prometheus does, and finds the exemplars there
            encode, content_type = choose_encoder(dict(scope["headers"]).get(b"accept", b"").decode("latin-1"))
            text = encode(registry)
            registry.scraped()
            await reply(send, 200, text, content_type)
        else:
            await refuse(send, NotFound("no such path"))

    return app
