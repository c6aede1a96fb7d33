"""Every reply of every listener has the headers that keep a browser from running, framing or guessing what is in it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from inprocess import InProcess, settings_of

from sie_config_service.app import create_app as create_config_app
from sie_config_service.routes import ROUTES as CONFIG_ROUTES
from sie_config_service.state import ConfigService
from sie_gateway.http.routes import ROUTES
from sie_runtime.http.server import HttpServer

_PLACEHOLDER = re.compile(r"\{[^}]*\}")
CONFIG_PATHS = ("/healthz", "/readyz", "/metrics", "/v1/configs/models", "/v1/none", "/docs", "/openapi.json")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as cluster:
        yield cluster


def check(answer: httpx.Response) -> None:
    told = f"{answer.request.method} {answer.request.url.path} {answer.status_code} {answer.headers}"
    assert answer.headers["x-content-type-options"] == "nosniff", told
    assert answer.headers["referrer-policy"] == "no-referrer", told
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; "), told
    for rule in ("frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"):
        assert rule in policy, told
    assert len(answer.headers.get_list("content-security-policy")) == 1, told
    assert len(re.findall("script-src[^;]*unsafe", policy)) == 0, told
    if "text/html" not in answer.headers.get("content-type", ""):
        return
    for script in re.findall("<script>(.*?)</script>", answer.text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy, told


async def test_every_route_of_a_gateway_and_what_is_none(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_GATEWAY_API_METRICS="true", SIE_LOAD_HOLD_S="0")
    statuses = set()
    for route in ROUTES:
        for sent in {route.method, "GET", "OPTIONS"}:
            answer = await gateway.client.request(sent, _PLACEHOLDER.sub("x", route.path), content=b"{")
            check(answer)
            statuses.add(answer.status_code)
    assert "'sha256-" in (await gateway.client.get("/docs")).headers["content-security-policy"]
    for place in ("/none", "/docs", "/docs/static/swagger-ui.css", "/", "/console/main.js"):
        check(await gateway.client.get(place))
    for place in ("/metrics", "/readyz", "/none"):
        check(await gateway.get(place))
    assert {200, 400, 404} <= statuses


async def test_what_is_refused_before_any_route(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    check(await gateway.client.get("/v1/models", headers={"host": "evil.example"}))
    check(await gateway.client.post("/v1/encode/toy/one", headers={"origin": "https://evil.example"}))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(b"no request\r\n\r\n")
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    lines = [line.partition(": ")[::2] for line in head.splitlines()[1:] if line]
    check(httpx.Response(400, headers=lines, request=httpx.Request("GET", gateway.url)))
    writer.close()


async def test_every_route_of_the_config_service() -> None:
    server = HttpServer(create_config_app(ConfigService(settings_of())), "127.0.0.1", 0, setting="--port")
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
        for path in (*CONFIG_PATHS, *(_PLACEHOLDER.sub("x", route.path) for route in CONFIG_ROUTES)):
            check(await client.get(path))
    await server.stop()
