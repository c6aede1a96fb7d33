"""The config service's API over a broker in memory, without a process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

import httpx
from inprocess import settings_of

from sie_broker import CoreMessage
from sie_broker.memory import MemoryServer
from sie_config_service.app import create_app
from sie_config_service.state import ConfigService
from sie_config_service.store import CatalogueStore, open_store
from sie_contracts.models.bundles import BundleEntry
from sie_contracts.models.trust import Allowed, Trust
from sie_contracts.wire import configs
from sie_contracts.wire.configs import ConfigDelta
from sie_runtime.http.asgi import REQUEST_ID, App, Receive, Scope, Send, uuid7

ADMIN = "admin-token-of-a-test"


def listened(app: App) -> App:
    """Return `app` with an id in each request, which a listener adds."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, REQUEST_ID: uuid7()}, receive, send)

    return serve


def anything() -> Trust:
    """Return the trust of an operator who allows all that an entry asks for."""
    return Trust(Allowed(code=True, paths=("/",)), (), list)


class Api:
    """One replica, a client of it with the token ADMIN, and the deltas that it sends on `subject`."""

    def __init__(self, server: MemoryServer, bundles: Mapping[str, BundleEntry], subject: str, **environ: str) -> None:
        self.server = server
        self.service = ConfigService(settings_of(**environ))
        transport = httpx.ASGITransport(listened(create_app(self.service)))
        self.client = httpx.AsyncClient(
            transport=transport, base_url="http://config", headers={"Authorization": f"Bearer {ADMIN}"}
        )
        self.deltas: list[ConfigDelta] = []
        self._bundles = bundles
        self._subject = subject
        self.trust: Trust | None = None  # anything is allowed

    async def start(self) -> Self:
        self.broker = self.server.connect("sie-config")
        store = await open_store(self.broker, settings_of())
        await store.seed_bundles(self._bundles)
        self.service.begin(store, self.trust or anything())

        async def heard(message: CoreMessage) -> None:
            self.deltas.append(configs.decode_delta(message.data))

        await self.server.connect("listener").subscribe(self._subject, heard)
        return self

    @property
    def store(self) -> CatalogueStore:
        return self.service.require()

    async def call(self, method: str, path: str, body: Any = None, status: int = 200, **headers: str) -> dict[str, Any]:
        """Send a request, check the status of its answer, and return its JSON."""
        extra_headers = {name.replace("_", "-"): value for name, value in headers.items()}
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        answer = await self.client.request(
            method, path, content=content, headers={"Content-Type": "application/json", **extra_headers}
        )
        assert answer.status_code == status, answer.text
        reply: dict[str, Any] = answer.json()
        return reply
