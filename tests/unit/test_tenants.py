"""Isolation of tenants: every route, by id, by list or by cross reference, with each credential, on one key's objects.

A new route without a row here fails.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import of_extras
import pytest
from inprocess import GatewayProcess, InProcess, until_told
from websockets.asyncio.client import connect

from sie_contracts.wire import messages, topology
from sie_contracts.wire.heartbeats import Heartbeat
from sie_gateway.fleet.pool_rules import HIDDEN, MAX_RESERVATIONS_OF_A_KEY
from sie_gateway.http.routes import ROUTES
from sie_runtime import keys
from sie_runtime.http.routes import ANY, OPEN

MARK = "of-tenant-a-9f3c"  # in every name that A gives
MODEL, POOL = f"model-{MARK}", f"pool-{MARK}"
ADMIN, STATIC = "admin-token-of-a-test", "static-token-of-a-test"
DEFAULT = ("infer", "read", "pools")
EXTRAS = of_extras.modules("routes")

# Routes of one object of A. A and an administrator reach the object, everybody else gets 404.
OWNED = """
    GET    /v1/pools/{name}
    POST   /v1/pools/{name}/renew
    DELETE /v1/pools/{name}
"""
# Routes that show the objects of A to A, and leave them out for everybody else.
SHOWS = """
    GET    /v1/pools /health /v1/pools/assignments /v1/scaling/{lane} /ws/cluster-status
"""
# Routes that return nothing of a tenant, except what is in the body of the request.
SILENT = """
    POST   /v1/encode/{model:path} /v1/score/{model:path} /v1/extract/{model:path}
    POST   /v1/embeddings /embeddings /v1/multi-vector /pooling
    POST   /v1/rerank /v2/rerank /v1/ranking /v1/score /score /v1/reranking /reranking
    GET    /v1/models /v1/models/{model:path}
    POST   /v1/models/{model:path}/load /v1/models/{model:path}/unload
    POST   /v1/pools
    GET    /v1/configs/models /v1/configs/models/{id:path} /v1/configs/models/{id:path}/status
    GET    /v1/configs/models/{id:path}/history /v1/configs/bundles /v1/configs/bundles/{id:path}
    GET    /v1/configs/epoch /v1/configs/export
    POST   /v1/configs/resolve /v1/configs/models /v1/configs/models/{id:path}/rollback
    PUT    /v1/configs/models/{id:path}
    PATCH  /v1/configs/models/{id:path}
    DELETE /v1/configs/models/{id:path}
    GET    /v1/whoami /ws/status
    GET    /docs /docs/static/{file} /openapi.json /metrics
    GET    /v1/dead-letters /v1/dead-letters/{letter}
    POST   /v1/dead-letters/replay /v1/dead-letters/{letter}/replay
    DELETE /v1/dead-letters /v1/dead-letters/{letter}
    GET    /healthz /livez /ping /readyz
"""


OWNED, SHOWS, SILENT = (
    text + of_extras.routes(name) for name, text in (("OWNED", OWNED), ("SHOWS", SHOWS), ("SILENT", SILENT))
)
# Routes of an object of A that may refuse A too, because the object is not finished.
UNFINISHED = of_extras.routes("UNFINISHED")


def rows(text: str) -> set[tuple[str, str]]:
    return {(line.split()[0], path) for line in text.strip().splitlines() for path in line.split()[1:]}


class Tenant:
    """Objects of tenant A by the placeholder of a path, and calls of routes."""

    def __init__(self, gateway: GatewayProcess, tokens: dict[str, str]) -> None:
        self.gateway, self.tokens = gateway, tokens
        self.ids = {"{name}": POOL, "{lane}": f"{POOL}.l4.default", "{model:path}": f"{MODEL[:-1]}", "{id:path}": "x"}
        # bodies of requests that name A's objects
        self.bodies: dict[str, dict[str, Any]] = {"/v1/pools": {"json": {"name": POOL, "gpus": {"l4": 1}}}}
        self.names = [MODEL]  # that A gives, and that nobody else may see

    async def send(self, caller: str, method: str, path: str, **more: Any) -> httpx.Response:
        token = self.tokens[caller]
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return await self.gateway.client.request(method, path, headers=headers, **more)

    async def made(self, method: str, path: str, **more: Any) -> Any:
        answer = await self.send("A", method, path, **more)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    async def call(self, caller: str, method: str, row: str) -> httpx.Response:
        path = row
        for placeholder, value in self.ids.items():
            path = path.replace(placeholder, value)
        query = {"worker": self.ids["w0"]} if row == "/v1/pools/assignments" else {}
        more: dict[str, Any] = self.bodies.get(row, {"json": {"model": MODEL[:-1], "inputs": "x", "items": ["x"]}})
        return await self.send(caller, method, path, params=query, **(more if method != "GET" else {}))

    async def frame(self, caller: str) -> str:
        """Return the first frame of the cluster's websocket."""
        url = f"{self.gateway.url.replace('http', 'ws')}/ws/cluster-status"
        headers = {"authorization": f"Bearer {self.tokens[caller]}"}
        async with connect(url, additional_headers=headers, proxy=None) as socket:
            return str(await socket.recv())


def beat(worker: str, pool: str = "_default") -> bytes:
    return messages.encode(Heartbeat(worker, pool, "l4", "default", ready=True, version="1", own_pool="_default"))


@pytest.fixture
async def tenant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Tenant]:
    """Yield A with a reservation that a worker serves, objects of extras, and a request for an unknown model."""
    caplog.set_level(logging.INFO, "sie")
    async with InProcess(tmp_path) as cluster:
        tokens = {"": "", "static": STATIC, "admin": ADMIN}
        buckets = await keys.KeyBuckets.open(cluster.server.connect("operator"), 1)
        for caller, scopes in (("A", DEFAULT), ("B", DEFAULT), ("R", ("read",))):
            key, tokens[caller] = keys.create(caller, scopes, now_s=time.time())
            await buckets.write(key, 0)
        gateway = await cluster.gateway(
            SIE_AUTH_MODE="token",
            SIE_AUTH_TOKEN=STATIC,
            SIE_ADMIN_TOKEN=ADMIN,
            SIE_PAYLOAD_STORE_URL=str(tmp_path / "payloads"),
            SIE_GATEWAY_CONFIGURED_GPUS="l4",
            SIE_HEARTBEAT_TIMEOUT_MS="600000",
            **{name: value for module in EXTRAS for name, value in getattr(module, "SETTINGS", {}).items()},
        )
        tenant = Tenant(gateway, tokens)
        for worker in ("w0", "w1"):
            await cluster.send(f"{topology.HEALTH_SUBJECT}.{worker}", beat(worker))

        async def heard() -> bool:
            return len((await tenant.send("admin", "GET", "/health")).json()["workers"]) == 2

        await until_told(heard, "the workers are heard")
        await tenant.made("POST", "/v1/pools", **tenant.bodies["/v1/pools"])

        async def assigned() -> bool:
            answers = [
                await tenant.send("A", "GET", "/v1/pools/assignments", params={"worker": worker})
                for worker in ("w0", "w1")
            ]
            return [POOL] in [answer.json()["pools"] for answer in answers]

        await until_told(assigned, "a worker is assigned")
        first = await tenant.send("A", "GET", "/v1/pools/assignments", params={"worker": "w0"})
        worker = "w0" if first.json()["pools"] == [POOL] else "w1"
        tenant.ids["w0"] = worker
        await cluster.send(f"{topology.HEALTH_SUBJECT}.{worker}", beat(worker, POOL))
        for module in EXTRAS:
            if (make := getattr(module, "make", None)) is not None:
                await make(tenant)
        answer = await tenant.send("A", "POST", f"/v1/encode/{MODEL}", json={"items": ["x"]})
        assert answer.status_code == 404
        tenant.ids["{request}"] = answer.headers["x-sie-request-id"]
        yield tenant


def test_every_route_has_one_row() -> None:
    kinds = [rows(text) for text in (OWNED, SHOWS, SILENT)]
    assert set().union(*kinds) == {(route.method, route.path) for route in ROUTES}, (
        "rows of the core are above, those of an extra in its tests/*_routes.py: see of_extras"
    )
    assert sum(map(len, kinds)) == len(ROUTES)


async def test_nobody_but_its_owner_and_an_administrator_sees_or_changes_what_a_key_made(tenant: Tenant) -> None:
    scopes = {"A": DEFAULT, "B": DEFAULT, "static": DEFAULT, "R": ("read",), "": ()}
    outsiders = ("B", "static", "R", "")
    made = {part for _, path in rows(OWNED) for part in re.findall(r"\{\w+\}", path)}
    secrets = [tenant.ids[part] for part in sorted(made | {"{request}"})]
    # A comes first: few failed requests of a minute are kept, and the calls of others below fail
    for caller in ("A", "admin"):
        for row in sorted(rows(SHOWS) | rows(OWNED)):
            if row[0] == "GET" and not row[1].startswith("/ws/"):
                answer = await tenant.call(caller, *row)
                assert answer.status_code in ((200, 404, 409) if row in rows(UNFINISHED) else (200,)), (
                    caller,
                    row,
                    answer.text,
                )
                if row in rows(SHOWS) - {("GET", "/v1/pools/assignments")}:
                    text = answer.text
                    assert MARK in text or any(secret in text for secret in secrets) or "code=" in text, (
                        "it shows no object of A: if it never does, its row belongs to SILENT",
                        caller,
                        row,
                        text,
                    )
    count = 0
    for route in ROUTES:
        row = (route.method, route.path)
        if route.path.startswith("/ws/"):
            continue
        for caller in outsiders:
            answer = await tenant.call(caller, *row)
            count += 1
            if route.scope not in (OPEN, ANY) and route.scope not in scopes[caller]:
                assert answer.status_code == (403 if caller else 401), (caller, row, answer.text)
            elif row in rows(OWNED):
                assert answer.status_code == 404, (caller, row, answer.text)
            if row in rows(OWNED) or route.path in tenant.bodies:
                # an error may repeat an id that the caller wrote
                assert not any(name in answer.text for name in tenant.names), (caller, row, answer.text)
            elif row not in rows(SHOWS) or answer.status_code < 400:
                text = answer.text.replace(tenant.ids["{request}"], "") if "{request}" in route.path else answer.text
                assert not any(secret in text for secret in (*secrets, *tenant.names)), (caller, row, answer.text)
    assert count > 3 * len(ROUTES)
    for body in tenant.bodies:
        answer = await tenant.call("B", "POST", body)
        assert answer.status_code in (400, 404, 409), answer.text
        assert "spec" not in answer.text
    for caller, is_seen in (("A", True), ("admin", True), ("B", False), ("R", False), ("static", False)):
        frame = await tenant.frame(caller)
        assert (POOL in frame, HIDDEN in frame) == (is_seen, not is_seen), (caller, frame)
    for method, path in (("POST", "/v1/pools/{name}/renew"), ("DELETE", "/v1/pools/{name}")):
        assert (await tenant.call("A", method, path)).status_code == 200


async def test_an_administrator_ends_the_reservation_of_a_key_and_a_key_has_a_bound(tenant: Tenant) -> None:
    assert (await tenant.call("admin", "DELETE", "/v1/pools/{name}")).status_code == 200
    for number in range(MAX_RESERVATIONS_OF_A_KEY):
        await tenant.made("POST", "/v1/pools", json={"name": f"p{number}", "gpus": {"l4": 1}})
    answer = await tenant.send("A", "POST", "/v1/pools", json={"name": "more", "gpus": {"l4": 1}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "POOL_OPERATION_FORBIDDEN")
    assert f"the limit is {MAX_RESERVATIONS_OF_A_KEY}" in answer.json()["error"]["message"]
    answer = await tenant.send("B", "POST", "/v1/pools", json={"name": "more", "gpus": {"l4": 1}})
    assert answer.status_code == 201, answer.text


async def test_without_authentication_there_is_one_owner(tmp_path: Path) -> None:
    async with InProcess(tmp_path) as cluster:
        gateway = await cluster.gateway(SIE_ADMIN_TOKEN=ADMIN, SIE_GATEWAY_CONFIGURED_GPUS="l4")
        by = {"authorization": f"Bearer {ADMIN}"}
        body = {"name": "team", "gpus": {"l4": 1}}
        assert (await gateway.client.post("/v1/pools", json=body, headers=by)).status_code == 201
        shown = (await gateway.client.get("/v1/pools")).json()["pools"]
        assert "team" in [pool["name"] for pool in shown]
        assert (await gateway.client.delete("/v1/pools/team")).status_code == 200
