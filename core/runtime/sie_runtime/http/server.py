"""HTTP server with uvicorn, and the probes of every process. `HttpServer` binds the port itself, so that a failure
names the setting. The process, not uvicorn, handles signals and decides when the server ends.

    request ──► Protocol, which limits a connection ──► Guarded, which refuses other sites' pages ──► the application
    shutdown: leave(): each connection closes after its response ──► hang_up(): idle connections close ──► stop()
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import uvicorn
from prometheus_client.exposition import choose_encoder

from sie_contracts.errors import MethodNotAllowed, NotFound
from sie_contracts.settings import SettingError
from sie_runtime.http.asgi import App, Receive, Scope, Send, accept_weights, headers_of, refuse, reply, reply_to_options
from sie_runtime.http.protocol import MIN_RATE, Guarded, HostNames, Protocol, SharedState
from sie_runtime.http.refusals import Refusals
from sie_runtime.metrics import Registry

# largest number of bytes of a websocket message from a client; the server needs no messages and discards them
WEBSOCKET_MESSAGE_BYTES = 4096
# seconds that an idle connection stays open: longer than the idle timeout of common load balancers. So a load balancer
# closes the connection first, and does not send a request on a connection that the server is closing.
KEEP_ALIVE_S = 120
STOP_S = 5.0
LOOK_S = 0.005  # seconds between two looks at the connections of a server that stops
# largest number of iterations of the event loop in which `hang_up` waits for requests that have already arrived
MAX_TURNS = 100
_ALIVE = ("/healthz", "/livez", "/ping")
_PROBE_METHODS = "GET, HEAD, OPTIONS"


class _Server(uvicorn.Server):
    """uvicorn's server, which ends when `end` is called. uvicorn's own loop is replaced, because that loop wakes up ten
    times per second to check whether to end, and to update its Date header; `common_headers` has another one. So is its
    shutdown, which takes at least a tenth of a second.
    """

    def __init__(self, config: uvicorn.Config, state: SharedState) -> None:
        super().__init__(config)
        self.server_state = state
        self._ending = asyncio.Event()
        self._within_s = STOP_S

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._within_s):
                while self.server_state.connections or self.server_state.tasks:  # noqa: ASYNC110  uvicorn keeps them
                    await asyncio.sleep(LOOK_S)
        for task in self.server_state.tasks:
            task.cancel()

    def end(self, within_s: float) -> None:
        """Stop listening. Requests that still run after `within_s` are cancelled."""
        self._within_s = within_s
        self._ending.set()


class HttpServer:
    """HTTP server that has bound its port. `start` accepts connections, `stop` ends it."""

    def __init__(
        self,
        app: App,
        host: str,
        port: int,
        *,
        setting: str,
        websockets: type[asyncio.Protocol] | None = None,
        allowed_hosts: Sequence[str] | None = None,
        cors_origins: Sequence[str] = (),
        refused: Callable[[str], object] | None = None,
        min_rate: int = MIN_RATE,
    ) -> None:
        """Bind the port. Raises SettingError, which names `setting`, if this fails.

        `websockets`: class of the websocket protocol; if None, the server ignores a request's upgrade and answers it as
        plain HTTP. `allowed_hosts` and `cors_origins`: see `HostNames`. `refused`: called with the reason, one of
        `refusals.REFUSED`, for each request that this server itself refuses or breaks off. `min_rate`: see
        `SharedState`.
        """
        try:
            self._socket = _listen(host, port)
        except OSError as error:
            raise SettingError(setting, f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        self.port: int = self._socket.getsockname()[1]
        refusals = Refusals(refused)
        config = uvicorn.Config(
            Guarded(app, HostNames(host, allowed_hosts, cors_origins), refusals),
            interface="asgi3",
            loop="none",
            http=Protocol,
            ws=websockets or "none",
            ws_per_message_deflate=False,
            ws_max_size=WEBSOCKET_MESSAGE_BYTES,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._state = SharedState(refusals, min_rate)
        self._server = _Server(config, self._state)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name=f"http:{self.port}")

    def leave(self) -> None:
        """Close each connection after its next response. New connections are still accepted."""
        self._state.leave()

    async def hang_up(self) -> None:
        """Call `leave`, close idle connections, and close websockets with code 1001 (going away). Requests that have
        already arrived are still answered, and new connections are still accepted.
        """
        self.leave()
        for connection in list(self._state.connections):
            connection.shutdown()
        for _ in range(MAX_TURNS):
            await asyncio.sleep(0)
            if not any(
                isinstance(connection, Protocol) and connection.arriving for connection in self._state.connections
            ):
                break
        await asyncio.sleep(0)  # the event loop starts the tasks of the requests that arrived last

    async def stop(self, within_s: float = STOP_S) -> None:
        """Stop listening. Wait at most `within_s` for running requests and for clients that read responses."""
        self.leave()
        self._server.end(within_s)
        if self._task is not None:
            await self._task
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only for sockets with an explicit IPPROTO_TCP
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def accepts_json(accept: str) -> bool:
    """Return whether an Accept header names application/json. `*/*` does not count: curl sends `*/*`, and people who
    use curl prefer plain text.
    """
    return accept_weights(accept).get("application/json", 0.0) > 0.0


def scrape(registry: Registry, accept: str) -> tuple[bytes, str]:
    """Return (metrics, content type): OpenMetrics with exemplars if the Accept header names this format, else the plain
    text format of Prometheus. Before it returns, it calls `registry.scraped`.
    """
    encode, content_type = choose_encoder(accept)
    text = encode(registry)
    registry.scraped()
    return text, content_type


def probes(
    not_ready: Callable[[], str | None],
    registry: Registry | None,
    details: Callable[[], Mapping[str, Any]] | None = None,
) -> App:
    """Return an application with the probes `/healthz`, `/livez`, `/ping` and `/readyz` and, if there is a registry,
    `/metrics`. `not_ready` returns why the process is not ready; None if it is ready.

    `/readyz` replies in JSON if the Accept header names JSON. `details`: further members of the JSON.
    """
    paths = {*_ALIVE, "/readyz", *(["/metrics"] if registry is not None else [])}

    async def readyz(scope: Scope, send: Send) -> None:
        reason = not_ready()
        status = 503 if reason else 200
        if not accepts_json(headers_of(scope).get("accept", "")):
            await reply(send, status, f"not ready: {reason}".encode() if reason else b"ok")
            return
        content: dict[str, Any] = {"status": "not ready" if reason else "ready"}
        if reason:
            content["reason"] = reason
        if details is not None:
            content.update(details())
        await reply(send, status, msgspec.json.encode(content), "application/json")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path not in paths:
            await refuse(scope, send, NotFound("no such path"))
        elif method == "OPTIONS":
            await reply_to_options(send, _PROBE_METHODS)
        elif method not in ("GET", "HEAD"):
            await refuse(scope, send, MethodNotAllowed(f"this path takes {_PROBE_METHODS}", allow=_PROBE_METHODS))
        elif path in _ALIVE:
            await reply(send, 200, b"ok")
        elif path == "/readyz":
            await readyz(scope, send)
        elif registry is not None:
            text, content_type = scrape(registry, headers_of(scope).get("accept", ""))
            await reply(send, 200, text, content_type)

    return app
