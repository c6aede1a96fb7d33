"""Codings and types of bodies: gzip of requests and of replies."""

from __future__ import annotations

import asyncio
import gzip
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from inprocess import InProcess, settings_of, toy_entry

from sie_config_service.app import create_app
from sie_config_service.state import ConfigService
from sie_contracts.errors import InvalidInput, PayloadTooLarge, UnsupportedMediaType
from sie_gateway.inference.call import BodyIntake, BodyReader, bounded
from sie_runtime.http import coding
from sie_runtime.http.asgi import INCOMPRESSIBLE, Receive, Scope, Send, reply
from sie_runtime.http.coding import GZIP_OVER, INLINE_BYTES, MAX_MEMBERS, accepts_gzip, decoded
from sie_runtime.http.routes import JSON, MSGPACK, YAML, check_type, plain_path
from sie_runtime.http.server import HttpServer

MIB = 1 << 20
GZIP = {"content-encoding": "gzip"}
TEXT = b'{"items": ["a"]}'


def sending(data: bytes, step: int = 1 << 16) -> Receive:
    """Return the `receive` of a client that sends `data` in pieces of `step` bytes and then closes the connection."""

    def messages() -> Iterator[MutableMapping[str, Any]]:
        for start in range(0, max(1, len(data)), step):
            yield {"type": "http.request", "body": data[start : start + step], "more_body": start + step < len(data)}
        yield {"type": "http.disconnect"}

    left = messages()

    async def receive() -> MutableMapping[str, Any]:
        return next(left)

    return receive


async def read(data: bytes, step: int = 1 << 16, limit: int = 8 * MIB) -> bytes:
    receive = decoded("POST", GZIP, sending(data, step))
    body = await BodyReader(BodyIntake(), "", receive, limit).read()
    assert (await receive())["type"] == "http.disconnect"
    return body


@pytest.mark.parametrize("step", [1, 7, 1 << 16])
@pytest.mark.parametrize("content", [b"", TEXT, TEXT * 1000], ids=["empty", "short", "long"])
async def test_a_gzipped_body_is_read_whatever_its_pieces_and_members(content: bytes, step: int) -> None:
    assert await read(gzip.compress(content), step) == content
    assert await read(gzip.compress(content) + gzip.compress(b"") + gzip.compress(content), step) == content * 2


async def test_a_large_body_is_decompressed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[int, int] = {}
    inflate = coding._Gunzipped._inflate

    def watched(self: Any, most: int, *, members: int) -> bytes:
        piece = inflate(self, most, members=members)
        threads[threading.get_ident()] = max(len(piece), threads.get(threading.get_ident(), 0))
        return piece

    monkeypatch.setattr(coding._Gunzipped, "_inflate", watched)
    content = bytes(range(256)) * (8 * MIB // 256)
    assert await read(gzip.compress(content, 1)) == content
    assert threads.pop(threading.get_ident()) <= INLINE_BYTES
    assert max(threads.values()) > INLINE_BYTES


WHOLE = gzip.compress(TEXT)
BROKEN = {
    "nothing": b"",
    "truncated in its trailer": WHOLE[:-1],
    "a second member truncated": WHOLE + WHOLE[:12],
    "plain": TEXT,
    "another checksum": WHOLE[:-8] + bytes(8),
    "garbage behind": WHOLE + b"garbage",
    "too many members": gzip.compress(b"") * (MAX_MEMBERS + 1),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_is_no_gzip_is_malformed(name: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await read(BROKEN[name], 1000)
    assert (caught.value.reason, caught.value.param) == ("malformed", "body")


@pytest.mark.parametrize("is_control", [False, True])
async def test_a_bomb_costs_no_more_than_the_limit_on_a_body(is_control: bool) -> None:
    bomb = gzip.compress(bytes(256 * MIB))
    assert len(bomb) < MIB
    receive = decoded("POST", GZIP, sending(bomb))
    receive = bounded(receive, limit=4 * MIB) if is_control else receive
    reader = BodyReader(BodyIntake(), "", receive, 1 << 30 if is_control else 4 * MIB)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge):
            await reader.read()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 12 * MIB


@pytest.mark.parametrize("named", ["br", "deflate", "zstd", "gzip, gzip", "gzip, br", "compress", "gzip;q=1"])
def test_another_coding_is_refused_before_a_body_is_read(named: str) -> None:
    with pytest.raises(UnsupportedMediaType) as caught:
        decoded("POST", {"content-encoding": named}, sending(b""))
    assert (caught.value.reason, caught.value.param) == ("content_encoding", "Content-Encoding")


@pytest.mark.parametrize("named", ["", "identity", "Identity, identity", " , "])
def test_a_body_without_a_coding_is_passed_as_it_is(named: str) -> None:
    receive = sending(TEXT)
    assert decoded("POST", {"content-encoding": named}, receive) is receive
    assert decoded("GET", {"content-encoding": "br"}, receive) is receive  # it has no body


@pytest.mark.parametrize("named", ["x-gzip", "GZIP", "identity, gzip", "gzip,"])
def test_gzip_has_several_spellings(named: str) -> None:
    receive = sending(WHOLE)
    assert decoded("POST", {"content-encoding": named}, receive) is not receive


TYPES = [
    ("application/json; charset=utf-8", True, True),
    ("application/merge-patch+json", True, True),
    ("", True, True),
    ("text/plain", True, True),
    ("application/x-www-form-urlencoded", True, True),  # the default of curl -d
    ("application/msgpack", True, False),
    ("application/vnd.msgpack", True, False),
    ("application/x-yaml", False, True),
    ("application/xml", False, False),
    ("multipart/form-data; boundary=x", False, False),
    ("application/vnd.apache.arrow.stream", False, False),
]


@pytest.mark.parametrize(("kind", "is_msgpack_route", "is_yaml_route"), TYPES)
def test_a_type_that_a_route_does_not_take_is_refused(kind: str, is_msgpack_route: bool, is_yaml_route: bool) -> None:
    for media, passes in (((JSON, MSGPACK), is_msgpack_route), ((JSON, YAML), is_yaml_route)):
        if passes:
            check_type({"content-type": kind}, media)
        else:
            with pytest.raises(UnsupportedMediaType, match=media[1]) as caught:
                check_type({"content-type": kind}, media)
            assert (caught.value.reason, caught.value.param) == ("content_type", "Content-Type")


ACCEPTED = {
    "gzip": True,
    "x-gzip": True,
    "*": True,
    "br, gzip;q=0.5": True,
    "*;q=0, gzip": True,
    "": False,
    "identity": False,
    "gzip;q=0": False,
    "gzip; q=0.000, *": False,
    "*;q=0": False,
    "gzip;q=-1": False,
    "gzipped": False,
}


def test_whether_a_client_takes_gzip() -> None:
    assert {accepted: accepts_gzip(accepted) for accepted in ACCEPTED} == ACCEPTED


LONG = b'{"a": "b"}' * 1000


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI application with another reply for each path."""
    more = {"/vary": {"Vary": "Origin"}, "/etag": {"ETag": '"1"'}, "/coded": {"Content-Encoding": "br"}}
    path = scope["path"]
    if path == "/vectors":
        scope[INCOMPRESSIBLE] = True
    body: Any = {"/pieces": [LONG, LONG], "/large": LONG * 100, "/limit": b"x" * GZIP_OVER}.get(path, LONG)
    kind = {"/binary": "application/msgpack", "/text": "text/plain; charset=utf-8"}.get(path, "application/json")
    await reply(send, 206 if path == "/part" else 200, body, kind, more.get(path))


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    server = HttpServer(app, "127.0.0.1", 0, setting="--port")
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
        client.headers["accept-encoding"] = "gzip"
        yield client
    await server.stop()


REPLIES = [
    ("/plain", True, "Accept-Encoding"),
    ("/text", True, "Accept-Encoding"),
    ("/large", True, "Accept-Encoding"),
    ("/pieces", True, "Accept-Encoding"),
    ("/vary", True, "Origin, Accept-Encoding"),
    ("/limit", False, "Accept-Encoding"),
    ("/etag", False, "Accept-Encoding"),
    ("/coded", False, "Accept-Encoding"),
    ("/part", False, "Accept-Encoding"),
    ("/binary", False, None),
    ("/vectors", False, None),
]


async def test_replies_are_compressed_where_it_pays_and_say_that_they_vary() -> None:
    async with serving(application) as client:
        for path, is_compressed, vary in REPLIES:
            async with client.stream("GET", path) as answer:
                raw = b"".join([piece async for piece in answer.aiter_raw()])
            async with client.stream("GET", path, headers={"accept-encoding": "identity"}) as answer_plain:
                plain = b"".join([piece async for piece in answer_plain.aiter_raw()])
            assert answer.headers.get("vary") == answer_plain.headers.get("vary") == vary, path
            assert (answer.headers.get("content-encoding") == "gzip") == is_compressed, path
            assert (gzip.decompress(raw) if is_compressed else raw) == plain, path
            assert len(raw) < len(plain) / 4 or not is_compressed, path
            if path != "/pieces":
                assert answer.headers["content-length"] == str(len(raw)), path


async def test_every_listener_of_a_gateway_decodes_and_compresses(tmp_path: Any) -> None:
    async with InProcess(tmp_path, *(toy_entry(f"toy/{number}") for number in range(20))) as cluster:
        gateway = await cluster.gateway()
        await cluster.sidecar()
        assert (await gateway.encode("a", model="toy/1")).status_code == 200
        body = {"items": [f"text {number}" for number in range(500)]}
        plain = msgspec.json.encode(body)
        for path in ("/v1/encode/toy/1", "//v1//encode/toy/1/"):
            answer = await gateway.client.post(f"{gateway.url}{path}", content=gzip.compress(plain), headers=GZIP)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["items"]) == 500
            assert "content-encoding" not in answer.headers  # vectors are not compressed
        pool = gzip.compress(msgspec.json.encode({"name": "mine", "gpus": "all"}))
        refused = await gateway.client.post("/v1/pools", content=pool, headers=GZIP)
        assert refused.json()["error"]["param"] == "gpus"  # the body was read
        for path in ("/v1/models", "/openapi.json"):
            response = await gateway.client.get(path)
            assert (response.status_code, response.headers.get("content-encoding")) == (200, "gzip"), path
        metrics = await gateway.client.get(f"{gateway.side_url}/metrics")
        assert (metrics.headers["content-encoding"], metrics.headers["vary"]) == ("gzip", "Accept-Encoding")


async def test_the_config_service_decodes_and_refuses_in_its_envelope() -> None:
    async with serving(create_app(ConfigService(settings_of(SIE_ADMIN_TOKEN="a")))) as client:
        client.headers["authorization"] = "Bearer a"
        path = "/v1/configs/resolve"
        for headers, data, status, reason in (
            ({"content-encoding": "br"}, b"{}", 415, "content_encoding"),
            ({"content-type": "application/xml"}, b"<a/>", 415, "content_type"),
            (GZIP, WHOLE[:-1], 400, "malformed"),
            (GZIP, gzip.compress(bytes(2 * MIB)), 413, None),
        ):
            answer = await client.post(path, content=data, headers=headers)
            assert (answer.status_code, answer.json()["error"].get("reason")) == (status, reason)
            assert (answer.headers.get("accept-encoding") == "gzip") == (reason == "content_encoding")


PATHS = {
    "/v1/models": "/v1/models",
    "/v1/models/": "/v1/models",
    "//v1///models//": "/v1/models",
    "/": "/",
    "//": "/",
    "": "",
    "*": "*",
}


def test_slashes_that_say_nothing_and_an_escaped_one_that_belongs_to_a_name() -> None:
    assert {path: plain_path(path) for path in PATHS} == PATHS
    assert plain_path("/v1/models//", b"/v1/models/%2F") == "/v1/models//"


@pytest.mark.parametrize("path", ["//v1/models", "/v1//models/"])
async def test_doubled_slashes_need_the_same_key(tmp_path: Any, path: str) -> None:
    async with InProcess(tmp_path, toy_entry("toy/one")) as cluster:
        gateway = await cluster.gateway(SIE_AUTH_MODE="static", SIE_AUTH_TOKEN="right")
        plain, doubled = await asyncio.gather(
            gateway.client.get(plain_path(path)), gateway.client.get(f"{gateway.url}{path}")
        )
        assert doubled.status_code == plain.status_code == 401
        client = {"authorization": "Bearer right"}
        plain, doubled = await asyncio.gather(
            gateway.client.get(plain_path(path), headers=client),
            gateway.client.get(f"{gateway.url}{path}", headers=client),
        )
        assert doubled.status_code == plain.status_code
