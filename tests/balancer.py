"""A load balancer over HTTP, like an ingress or a mesh. It probes backends, sends requests to ready ones in turn, and
passes answers on. It sends no request twice.

    client ──► Balancer ──► backends that are ready and not ending
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from sie_runtime.http.asgi import Receive, Scope, Send, reply
from sie_runtime.http.server import HttpServer

PROBE_S = 0.5
FAILURES = 3  # failed probes in a row, as in the chart
TIMEOUT_S = 90.0
_HOP = {"host", "connection", "keep-alive", "content-length", "transfer-encoding", "content-encoding", "content-type"}


@dataclass(frozen=True)
class Answer:
    """The answer to one request, and its backend. `status` is 0 if no answer came."""

    at_s: float
    backend: str
    method: str
    path: str
    status: int
    workers: str
    text: str  # the body of a refusal


@dataclass
class _Backend:
    name: str
    url: str
    probe: str
    client: httpx.AsyncClient = field(default_factory=lambda: httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False))
    failures: int = 0


class Balancer:
    """A balancer on a free loopback port. It runs within an async context manager."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self._backends: dict[str, _Backend] = {}
        self._gone: list[_Backend] = []
        self._turns = itertools.count()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self._forward(scope, receive, send)  # uvicorn takes a bound method for an ASGI 2 application

        self._server = HttpServer(app, "127.0.0.1", 0, setting="port")
        self.url = f"http://127.0.0.1:{self._server.port}"

    async def __aenter__(self) -> Balancer:
        await self._server.start()
        self._probing = asyncio.create_task(self._probe())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._probing.cancel()
        await asyncio.gather(self._probing, return_exceptions=True)
        await self._server.stop()
        for backend in [*self._backends.values(), *self._gone]:
            await backend.client.aclose()

    @property
    def backends(self) -> dict[str, str]:
        """Return the addresses of the backends by name."""
        return {backend.name: backend.url for backend in self._backends.values()}

    def add(self, name: str, url: str, probe: str) -> None:
        """Add a backend that is ready."""
        self._backends[name] = _Backend(name, url, probe)

    def remove(self, name: str) -> None:
        """Remove a backend that will end. Running requests to it go on."""
        self._gone.append(self._backends.pop(name))

    async def _probe(self) -> None:
        async with httpx.AsyncClient(timeout=3.0, trust_env=False) as client:
            while True:
                for backend in [*self._backends.values()]:
                    ready = False
                    with contextlib.suppress(httpx.TransportError):
                        ready = (await client.get(backend.probe)).status_code == 200
                    backend.failures = 0 if ready else backend.failures + 1
                await asyncio.sleep(PROBE_S)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path, query = scope["method"], scope["path"], scope["query_string"].decode("latin-1")
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        ready = [backend for backend in self._backends.values() if backend.failures < FAILURES]
        if not ready:
            self._note("", method, path, 503, text="no backend is ready")
            await reply(send, 503, b"no backend is ready")
            return
        backend = ready[next(self._turns) % len(ready)]
        pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        headers = [(name, value) for name, value in pairs if name not in _HOP or name == "content-type"]
        try:
            answer = await backend.client.request(method, f"{backend.url}{path}?{query}", content=body, headers=headers)
        except httpx.HTTPError as error:
            self._note(backend.name, method, path, 0, text=f"{type(error).__name__}: {error}")
            await reply(send, 502, b"the backend did not answer")
            return
        text = answer.text if answer.status_code >= 400 else ""
        self._note(backend.name, method, path, answer.status_code, answer.headers.get("x-sie-worker", ""), text)
        extra = {name: value for name, value in answer.headers.items() if name not in _HOP}
        await reply(send, answer.status_code, answer.content, answer.headers.get("content-type", "text/plain"), extra)

    def _note(self, backend: str, method: str, path: str, status: int, workers: str = "", text: str = "") -> None:
        self.answers.append(Answer(time.monotonic(), backend, method, path, status, workers, text))
