"""uvicorn inside a process of ours: we bind, we own the signals, we decide when it ends. And the probes that every process has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from sie_contracts.settings import SettingError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KEEP_ALIVE_S = 120  # above the idle time-out of common load balancers, so that they close first
_FRAMING = frozenset((b"connection", b"transfer-encoding", b"upgrade"))
_NO_NAME = re.compile(rb"[^a-z0-9-]")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_logger = logging.getLogger("sie.http")


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


class _Cycle(RequestResponseCycle):
    """A response of known length leaves in one write, where uvicorn writes its head and then its body: 20 us of a request's
    335 (bench/results/queue.md).

    What is unusual (no length, HEAD, a connection that closes, odd headers) is left to uvicorn.
    """

    _begun: tuple[bytes, int] | None = None

    async def send(self, message: Any) -> None:
        if not self.response_started:
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
    """uvicorn's protocol with `_Cycle` for its cycle, which it offers no way to name."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.__class__ = _Cycle


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A listening HTTP server. `setting` is blamed when the port cannot be had."""

    def __init__(self, app: App, host: str, port: int, *, setting: str, root_path: str = "") -> None:
        try:
            self._socket = _listen(host, port)
        except OSError as error:
            raise SettingError(setting, f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app, loop="none", http=_Protocol, ws="none", lifespan="off", log_config=None, access_log=False, root_path=root_path,
            timeout_keep_alive=KEEP_ALIVE_S, proxy_headers=False, server_header=False, date_header=False, timeout_graceful_shutdown=5,
        )  # fmt: skip
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name=f"http:{self.port}")

    async def stop(self) -> None:
        """Close keep-alive connections, wait at most 5 s for running requests, stop listening."""
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


async def reply(
    send: Send, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8", extra: Mapping[str, str] | None = None
) -> None:
    """One complete response."""
    headers = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body))]
    if extra:
        headers += [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in extra.items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def probes(not_ready: Callable[[], str | None], registry: CollectorRegistry | None) -> App:
    """`/healthz`, `/readyz` and, with a registry, `/metrics`. `not_ready` gives the reason, or None when ready."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path in ("/healthz", "/livez", "/ping"):
            await reply(send, 200, b"ok")
        elif path == "/readyz":
            reason = not_ready()
            await reply(send, 503 if reason else 200, f"not ready: {reason}".encode() if reason else b"ok")
        elif path == "/metrics" and registry is not None:
            await reply(send, 200, generate_latest(registry), METRICS_TYPE)
        else:
            await reply(send, 404, b"not found")

    return app
