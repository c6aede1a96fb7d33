"""Clients of a simulation, each of which sends one HTTP request to the application of a gateway."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import orjson

from sie_runtime.http.asgi import REQUEST_ID, uuid7

if TYPE_CHECKING:
    from simulation.world import Process, World

Mode = Literal["interactive", "bulk"]


@dataclass(frozen=True)
class Asked:
    """A request. `patient`: its deadline is so late that only a refusal may take the place of its answer. `leaves_s`:
    when the client disconnects.
    """

    at_s: float
    texts: list[str]
    model: str
    lora: str
    mode: Mode
    budget_s: float
    patient: bool
    leaves_s: float | None
    key: str


@dataclass(frozen=True)
class Answered:
    """An answer. `status` 0: the connection was refused, or closed without an answer. `left`: the client left
    before.
    """

    status: int
    code: str
    body: dict[str, Any]
    headers: dict[str, str]
    took_s: float
    left: bool = False


class Client:
    """One HTTP POST to `path` of a gateway, by a client that disconnects after `leaves_s`."""

    def __init__(
        self,
        world: World,
        gateway: Process | None,
        path: str,
        headers: dict[str, str],
        body: dict[str, Any],
        leaves_s: float | None = None,
    ) -> None:
        self._world, self._gateway, self._path, self._leaves_s = world, gateway, path, leaves_s
        self._request_headers, self._body = {"content-type": "application/json", **headers}, orjson.dumps(body)
        self._gone = asyncio.Event()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._body_read = False

    @classmethod
    def for_request(cls, world: World, request: Asked, gateway: Process | None) -> Client:
        headers = {
            "authorization": f"Bearer {request.key}",
            "x-sie-priority": request.mode,
            "x-sie-timeout-ms": str(int(request.budget_s * 1000)),
        }
        params = {"lora_id": request.lora} if request.lora else {}
        body = {"items": request.texts, "params": params}
        return cls(world, gateway, f"/v1/encode/{request.model}", headers, body, request.leaves_s)

    async def run(self) -> Answered:
        """Send the request once. A connection to a gateway that does not listen yet waits until it does."""
        world, gateway, start_s = self._world, self._gateway, self._world.loop.now_s
        if gateway is not None:
            await world.until_bound(gateway)
        if gateway is None or gateway.scope.dead or gateway.server is None or not gateway.server.listening:
            return Answered(0, "refused", {}, {}, 0.0)
        start_s = world.loop.now_s
        task = world.spawn(gateway.scope, gateway.server.app(self._scope(), self._receive, self._send), "a request")
        gateway.asked.append(task)
        done, _ = await asyncio.wait({task}, timeout=self._leaves_s)
        if not done:
            self._gone.set()
            world.log("client leaves")
            await asyncio.wait({task})
        gateway.asked.remove(task)
        took_s = world.loop.now_s - start_s
        if task.cancelled() or not self._status:
            if not task.cancelled() and task.exception() is not None:
                world.violate(f"a request ended in {task.exception()!r}")
            return Answered(0, "closed", {}, {}, took_s, left=not done)
        body = orjson.loads(b"".join(self._pieces))
        code = self._headers.get("x-sie-error-code", "")
        return Answered(self._status, code, body, self._headers, took_s, left=not done)

    def _scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            REQUEST_ID: uuid7(),
            "method": "POST",
            "path": self._path,
            "raw_path": b"",
            "query_string": b"",
            "scheme": "http",
            "http_version": "1.1",
            "headers": [(name.encode(), value.encode()) for name, value in self._request_headers.items()],
            "root_path": "",
            "client": ("sim", 1),
            "server": ("sim", 1),
        }

    async def _receive(self) -> dict[str, Any]:
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        elif message["type"] == "http.response.body":
            self._pieces.append(message.get("body", b""))
