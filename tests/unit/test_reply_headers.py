"""Every reply of every listener has its ids, the version of the server, and the headers that keep a browser from
running, framing or guessing what is in it.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re

import httpx
from inprocess import InProcess, settings_of

from sie_config_service.app import create_app as create_config_app
from sie_config_service.routes import ROUTES as CONFIG_ROUTES
from sie_config_service.state import ConfigService
from sie_contracts import __version__
from sie_contracts.sdk_versions import SERVER_VERSION
from sie_gateway.http.routes import ROUTES
from sie_runtime.http.asgi import Receive, Scope, Send
from sie_runtime.http.server import HttpServer
from sie_runtime.http.websocket import WebSocketProtocol

_PLACEHOLDER = re.compile(r"\{[^}]*\}")
_UUID7 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
CONFIG_PATHS = ("/healthz", "/readyz", "/metrics", "/v1/configs/models", "/v1/none", "/docs", "/openapi.json")


def check(answer: httpx.Response) -> None:
    summary = f"{answer.request.method} {answer.request.url.path} {answer.status_code} {answer.headers}"
    ids = [answer.headers.get_list(name) for name in ("x-sie-request-id", "x-request-id")]
    assert [len(values) for values in ids] == [1, 1], summary
    assert _UUID7.fullmatch(ids[0][0]), summary
    assert ids[1][0] == answer.request.headers.get("x-request-id", ids[0][0]), summary
    assert answer.headers.get_list("x-sie-version") == [__version__], summary
    assert answer.headers.get_list("x-sie-server-version") == [SERVER_VERSION], summary
    if "x-sie-error-code" in answer.headers and answer.content[:1] == b"{":
        error = answer.json()["error"]
        assert not isinstance(error, dict) or error.get("request_id", ids[0][0]) == ids[0][0], summary
    assert answer.headers["x-content-type-options"] == "nosniff", summary
    assert answer.headers["referrer-policy"] == "no-referrer", summary
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; "), summary
    for rule in ("frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"):
        assert rule in policy, summary
    assert len(answer.headers.get_list("content-security-policy")) == 1, summary
    assert len(re.findall("script-src[^;]*unsafe", policy)) == 0, summary
    if "text/html" not in answer.headers.get("content-type", ""):
        return
    for script in re.findall("<script>(.*?)</script>", answer.text, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy, summary


async def test_every_route_of_a_gateway_and_what_is_none(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_GATEWAY_API_METRICS="true", SIE_LOAD_HOLD_S="0")
    statuses = set()
    for route in ROUTES:
        for sent in {route.method, "GET", "OPTIONS"}:
            answer = await gateway.client.request(sent, _PLACEHOLDER.sub("x", route.path), content=b"{")
            check(answer)
            statuses.add(answer.status_code)
    assert "'sha256-" in (await gateway.client.get("/docs")).headers["content-security-policy"]
    for place in ("/none", "/docs", "/docs/static/swagger-ui.css", "/"):
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


async def test_the_id_of_a_client_comes_back_beside_ours(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    for path in ("/healthz", "/v1/models", "/none"):
        check(await gateway.client.get(path, headers={"x-request-id": "mine"}))
    for sent in ("x" * 129, "\x07"):
        answer = await gateway.client.get("/healthz", headers={"x-request-id": sent})
        assert answer.headers["x-request-id"] == answer.headers["x-sie-request-id"]


async def test_preflights_of_pages_that_may_call(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_CORS_ORIGINS="https://page.example")
    for origin, status in (("https://page.example", 200), ("https://evil.example", 400)):
        headers = {"origin": origin, "access-control-request-method": "POST"}
        answer = await gateway.client.options("/v1/encode/toy/one", headers=headers)
        assert answer.status_code == status
        check(answer)


async def test_an_application_that_fails_and_answers_to_handshakes() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/accepted":
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": 1000})
        elif scope["path"] == "/refused":
            await send({"type": "websocket.http.response.start", "status": 403, "headers": [(b"content-length", b"0")]})
            await send({"type": "websocket.http.response.body", "body": b""})
        else:
            raise RuntimeError("before the head")

    server = HttpServer(app, "127.0.0.1", 0, setting="--port", websockets=WebSocketProtocol)
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        for path, status, headers in (
            ("/", 500, {}),
            ("/", 500, upgrade),
            ("/refused", 403, upgrade),
            ("/foreign", 403, upgrade | {"host": "evil.example"}),
            ("/", 400, upgrade | {"sec-websocket-version": "8", "x-request-id": "mine"}),
            ("/", 400, {name: upgrade[name] for name in ("connection", "upgrade")}),
            ("/", 431, upgrade | {f"x-{number}": "" for number in range(200)}),
        ):
            answer = await client.get(path, headers=headers)
            assert answer.status_code == status
            check(answer)
            if path != "/refused":
                assert answer.json()["error"]["request_id"] == answer.headers["x-sie-request-id"]
                assert answer.headers["x-sie-error-code"] == answer.json()["error"]["code"]
                assert answer.headers["x-should-retry"] == "false"
        async with client.stream("GET", "/accepted", headers=upgrade) as answer:
            assert answer.status_code == 101
            await answer.aread()
            check(answer)
    await server.stop()
