"""Tokens guard the API, and neither tokens nor inputs of clients appear in logs, metrics or errors. Malformed HTTP and
hostile requests get a typed refusal and cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil
import pytest
import shared
from cluster import MODEL, Cluster, until
from websockets.sync.client import connect
from zygote import environ_of

from sie_gateway.http.routes import TABLE
from sie_runtime.http.protocol import HEAD_S

ADMIN, USER = shared.GUARDED_ADMIN, shared.USER
MARK = f"canary{secrets.token_hex(6)}"  # in all that must appear nowhere else
# in names of models, options and pools: errors may say them, logs and metrics may not
NAMED = f"named{secrets.token_hex(6)}"
IDLE, SLOW = 1000, 200
HALVES = shared.PLACES - 8  # clients that send half a body
Json = dict[str, Any]


pytestmark = shared.GUARDED


@pytest.fixture(scope="module")
def cluster(guarded_cluster: Cluster) -> Cluster:
    return guarded_cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, headers={"authorization": f"Bearer {USER}"}, timeout=60) as client:
        yield client


@dataclass
class Crowd:
    """Connections that are open while all tests of this file run: `idle` have asked once, `slow` never finish their
    head.
    """

    idle: list[socket.socket]
    slow: list[socket.socket]
    began_s: float


@pytest.fixture(scope="module", autouse=True)
def crowd(cluster: Cluster) -> Iterator[Crowd]:
    with contextlib.ExitStack() as held:

        def opened(sent: bytes) -> socket.socket:
            connection = held.enter_context(socket.create_connection(("127.0.0.1", cluster.port), timeout=60))
            connection.sendall(sent)
            return connection

        idle = [opened(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n") for _ in range(IDLE)]
        for connection in idle:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        began_s = time.monotonic()
        endless = b"POST /v1/encode/m HTTP/1.1\r\nhost: localhost\r\nx: "
        yield Crowd(idle, [opened(endless + b"y" * number) for number in range(SLOW)], began_s)


def refused(answer: httpx.Response, *codes: str) -> Json:
    """Check a typed refusal, and return its body: one envelope, its code in the header, and nothing that was sent."""
    assert 400 <= answer.status_code < 500 or answer.status_code == 503, f"{answer.status_code} {answer.text[:300]}"
    assert answer.headers["content-type"].startswith("application/json"), answer.text[:300]
    body: Json = answer.json()
    assert MARK not in answer.text
    assert USER not in answer.text
    assert not codes or body["code"] in codes, body
    assert answer.headers["x-sie-error-code"].upper() == body["code"].upper()
    return body


# tokens


def test_static_tokens_open_what_their_scopes_say(cluster: Cluster) -> None:
    """Static tokens are valid beside keys too; here there are no keys."""

    def status(token: str | None) -> int:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return cluster.encode(["Hello"], **headers).status_code

    assert [status(token) for token in (None, "wrong", USER, ADMIN)] == [401, 401, 200, 200]
    answer = cluster.encode(["Hello"])
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{cluster.url}/health", timeout=60).status_code == 401
    assert httpx.get(f"{cluster.url}/readyz", timeout=60).status_code == 200
    metrics = httpx.get(f"{cluster.url}/metrics", headers={"authorization": USER}, timeout=60)
    assert metrics.status_code == 403, "it has a scope of its own"
    export = f"{cluster.access().config_url}/v1/configs/export"
    statuses = [httpx.get(export, headers={"authorization": token}, timeout=60).status_code for token in (USER, ADMIN)]
    assert statuses == [401, 200]


def test_no_process_but_those_that_need_it_has_the_admin_token(cluster: Cluster) -> None:
    """No environment of a worker or the broker has a token, and no command line has one."""
    for role in ("sidecar", "adapter", "nats-server"):
        for pid in cluster.pids(role):
            values = environ_of(pid).values()
            assert ADMIN not in values, role
            assert USER not in values, role
    for role in ("gateway", "config", "sidecar", "adapter", "nats-server"):
        for pid in cluster.pids(role):
            line = " ".join(psutil.Process(pid).cmdline())
            assert ADMIN not in line
            assert USER not in line


# what clients send is seen nowhere else


def encode_of(item: Any, **fields: Any) -> Json:
    return {"items": [item], **fields}


def messages() -> Iterator[tuple[str, str, Any, dict[str, str]]]:
    """Yield name, path, body and headers of valid and invalid requests with the mark in one place each."""
    encode, unknown_path = f"/v1/encode/{MODEL}", f"/v1/encode/{NAMED}/{NAMED}"
    item = {"text": f"{MARK} text", "id": f"{MARK}-id", "metadata": {f"{MARK}-key": [f"{MARK}-value"]}}
    right: list[tuple[str, Any]] = [
        ("all of an item", encode_of(item)),
        ("an instruction", encode_of("a", instruction=f"{MARK} instruction")),
        ("a template", encode_of("a", options={"doc_template": MARK + " {text}"})),
        ("a long text", encode_of(f"{MARK} " * 3000)),
        ("beside other characters", encode_of(f"{MARK}\U0001f600\0\u2028")),
    ]
    wrong: list[tuple[str, Any]] = [
        ("an item that is none", encode_of({MARK: MARK})),
        ("a number for a text", encode_of({"text": {MARK: 1}})),
        ("a text for a list", {"items": MARK}),
        ("too long a text", encode_of(f"{MARK} " * 3000, truncate=False)),
        ("an id that is none", encode_of({"text": "a", "id": {MARK: MARK}})),
        ("an image that is none", encode_of({"images": [{"data": MARK}]})),
        ("a document", encode_of({"document": MARK})),
        ("metadata alone", encode_of({"metadata": {MARK: MARK}})),
        ("a key in place of a list", {MARK: [1]}),
        ("an instruction that is a list", encode_of("a", instruction=[MARK])),
        ("an option that is a map", encode_of("a", options={"pooling": {MARK: MARK}})),
    ]
    for name, body in [*right, *wrong]:
        yield name, encode, body, {}
        yield f"{name}, msgpack", encode, msgspec.msgpack.encode(body), {"content-type": "application/msgpack"}
        yield f"{name}, no such model", unknown_path, body, {}
        yield f"{name}, failing", encode, body, {"x-sie-on-item-error": "fail", "x-sie-strict": "true"}
    yield "one good, one bad", encode, {"items": [MARK, {"id": MARK, "metadata": {"a": MARK}}]}, {}
    yield "a query", f"/v1/score/{MODEL}", {"query": MARK, "items": [{"text": MARK, "id": MARK}]}, {}
    yield (
        "labels",
        f"/v1/extract/{MODEL}",
        {"items": [MARK], "params": {"labels": [MARK], "output_schema": {MARK: MARK}}},
        {},
    )
    yield "an unknown option", encode, encode_of("a", options={NAMED: MARK}), {"x-sie-strict": "true"}
    for name, content in (
        ("cut", b'{"items": ["' + MARK.encode()),
        ("not JSON", MARK.encode()),
        ("NaN", b'{"items": ["' + MARK.encode() + b'", NaN]}'),
        ("no UTF-8", b'{"items": ["' + MARK.encode() + b'\xff"]}'),
        ("twice", b'{"items": ["' + MARK.encode() + b'"]} {}'),
    ):
        yield f"a body that is {name}", encode, content, {}
        yield f"a body that is {name} as msgpack", encode, content, {"content-type": "application/msgpack"}
    for header in (
        "x-sie-timeout-ms",
        "x-sie-priority",
        "traceparent",
        "tracestate",
        "accept",
        "content-type",
        "idempotency-key",
        "user-agent",
        "x-sie-sdk-version",
        "x-sie-client-version",
        "x-sie-remote",
        "x-sie-on-item-error",
        "x-sie-explain",
        "cookie",
        "x-forwarded-for",
    ):
        yield f"the header {header}", encode, encode_of("a"), {header: MARK}
    for header in ("x-sie-machine-profile", "x-sie-pool"):
        yield f"the header {header}", encode, encode_of("a"), {header: NAMED}
    for path, body in (
        ("/v1/embeddings", {"model": MODEL, "input": [MARK, ""], "user": MARK}),
        ("/v1/embeddings", {"model": MODEL, "input": MARK}),
        ("/v1/embeddings", {"model": NAMED, "input": MARK}),
        ("/v1/embeddings", {"model": MODEL, "input": {MARK: 1}}),
        ("/v1/rerank", {"model": MODEL, "query": MARK, "documents": [MARK, {"text": MARK}]}),
        ("/v2/rerank", {"model": MODEL, "query": [MARK], "documents": MARK}),
        ("/v2/embed", {"model": MODEL, "input_type": "search_query", "texts": [MARK]}),
        ("/v2/embed", {"model": MODEL, "texts": {MARK: MARK}}),
        ("/embed", {"inputs": MARK}),
        ("/embed", {"inputs": {MARK: MARK}}),
        ("/tokenize", {"inputs": [MARK], "prompt_name": NAMED}),
        ("/rerank", {"query": MARK, "texts": [MARK]}),
        ("/predict", {"inputs": [[MARK, MARK]]}),
        ("/similarity", {"inputs": MARK}),
        ("/classify", {"model": MODEL, "input": [MARK]}),
        ("/decode", {"ids": [MARK]}),
        ("/v1/pools", {"name": f"{MARK} x", "gpus": {MARK: MARK}}),
        ("/v1/configs/resolve", {"model": NAMED, MARK: MARK}),
    ):
        if TABLE.match(path).methods:
            yield f"{path} {list(body)[-1]}", path, body, {}


def test_what_clients_send_is_in_no_log_metric_or_error(cluster: Cluster, client: httpx.Client) -> None:
    """Every place of a request has the mark, in valid and invalid requests; then every sink is searched.

    1. Requests with a mark in one place each are sent; no error says it.
    2. Wrong tokens have the mark.
    3. No process wrote it into its log or shows it in its metrics, its command line, /health, or the frames of its
       websockets.
    """
    statuses = Counter[int]()
    for name, path, body, headers in messages():
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = client.post(path, content=content, headers={"content-type": "application/json", **headers})
        statuses[answer.status_code] += 1
        if answer.status_code >= 400:
            assert MARK not in answer.text, f"{name}: {answer.text[:500]}"
            assert answer.status_code not in (500, 502, 504), f"{name}: {answer.text[:500]}"
        assert USER not in answer.text, name
        assert MARK not in str(answer.headers), name
    assert statuses[200] > 20, statuses
    assert statuses[400] > 40, statuses
    for token in (MARK, f"Bearer {MARK}", f"Basic {MARK}", f"Bearer sie_{MARK}"):
        for path in ("/v1/models", f"/v1/encode/{MODEL}", f"/{MARK}", f"/v1/pools/{MARK}?{MARK}={MARK}"):
            assert MARK not in cluster_call(cluster, path, token).text
    paths = (
        f"models/{NAMED}",
        f"models?task={MARK}&output={MARK}",
        f"scaling/{NAMED}.a.b",
        f"pools/assignments?worker={NAMED}",
        NAMED,
    )
    for path in paths:
        client.get(f"/v1/{path}")
    client.request(f"X{NAMED.upper()}"[:20], "/v1/models")

    until(lambda: all(cluster.said(f"encode {status} in") for status in (200, 400)), 60, "the log of all requests")
    sinks = {"the log": "\n".join(cluster.lines), "/health": client.get("/health").text}
    ports = [
        port for line in cluster.lines if (hit := line.partition("metrics on ")[2]).isdigit() for port in [int(hit)]
    ]
    config = urlsplit(client.get("/health").json()["config_url"])
    sidecar = f"127.0.0.1:{cluster.worker_port}"
    for name, address in (("gateway", f"127.0.0.1:{ports[-1]}"), ("sidecar", sidecar), ("config", config.netloc)):
        sinks[f"metrics of {name}"] = httpx.get(f"http://{address}/metrics", timeout=60).text
        assert "# HELP" in sinks[f"metrics of {name}"]
    for path in ("/ws/cluster-status", "/ws/status"):
        with connect(
            cluster.url.replace("http", "ws") + path, additional_headers={"authorization": f"Bearer {USER}"}
        ) as socket_:
            sinks[path] = "\n".join(str(socket_.recv(timeout=60)) for _ in range(2))
    for role in ("gateway", "config", "sidecar", "adapter", "nats-server"):
        for pid in cluster.pids(role):
            sinks[f"command line of {role}"] = " ".join(psutil.Process(pid).cmdline())
    for sink, text in sinks.items():
        for secret in (MARK, NAMED, NAMED.upper(), USER, ADMIN):
            hit = text.find(secret)
            assert hit < 0, f"{sink}: ...{text[max(0, hit - 200) : hit + 200]}..."


def cluster_call(cluster: Cluster, path: str, token: str) -> httpx.Response:
    return httpx.get(cluster.url + path, headers={"authorization": token}, timeout=10)


# hostile requests


def head(path: str, *headers: str, method: str = "GET") -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: localhost",
        f"authorization: {USER}",
        "connection: close",
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode("latin-1")


def test_headers_make_no_stream(cluster: Cluster, client: httpx.Client) -> None:
    """Pools, machine profiles and bundles that do not exist are refused before anything is made for them."""

    def streams() -> set[str]:
        details = httpx.get(f"{cluster.access().broker_monitor_url}/jsz?streams=true", timeout=60).json()[
            "account_details"
        ]
        return {stream["name"] for account in details for stream in account["stream_detail"]}

    before = streams()
    for number in range(42):
        odd = ("x" * 100, "a.b", "*", ">", "a b", "sie.work.>", f"pool{number}")[number % 7]
        headers = {("x-sie-pool", "x-sie-machine-profile")[number % 2]: f"{odd}{number}"}
        refused(client.post(f"/v1/encode/no/{number}", json={"items": ["a"]}, headers=headers), "MODEL_NOT_FOUND")
        answer = client.post(f"/v1/encode/{MODEL}", json={"items": ["a"]}, headers={"x-sie-pool": f"{odd}{number}"})
        refused(answer, "INVALID_INPUT", "POOL_NOT_FOUND", "PROVISIONING")
    assert streams() == before


def test_nothing_is_unpacked(cluster: Cluster, client: httpx.Client) -> None:
    """A bomb of 512 MiB of zeros costs no more than the largest body; in any coding but gzip it is not read."""
    (pid,) = cluster.pids("gateway")
    before = psutil.Process(pid).memory_info().rss
    zeros = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(zeros.compress(bytes(1 << 24)) for _ in range(32)) + zeros.flush()
    assert len(bomb) < 1 << 20
    for path in (f"/v1/encode/{MODEL}", "/v1/embeddings"):
        for coding, code in (("gzip", "PAYLOAD_TOO_LARGE"), ("deflate", "UNSUPPORTED_MEDIA_TYPE")):
            refused(client.post(path, content=bomb, headers={"content-encoding": coding}), code)
    assert psutil.Process(pid).memory_info().rss - before < 100 << 20


# connections that are held


def test_connections_that_wait_or_never_finish_hold_nobody_up(cluster: Cluster, crowd: Crowd) -> None:
    """All tests of this file run beside these connections. Requests are answered. Heads that never end are closed with
    a 400 after HEAD_S, however much of them came. Connections that have asked and wait still answer.
    """
    for _ in range(10):
        assert cluster.encode(["Hello"], authorization=USER).status_code == 200
    for connection in crowd.slow:
        arrived = b""
        connection.settimeout(HEAD_S + 30)
        while piece := connection.recv(65536):
            arrived += piece
        assert arrived.startswith(b"HTTP/1.1 400 "), arrived[:200]
    assert time.monotonic() - crowd.began_s >= HEAD_S
    for connection in crowd.idle[::20]:
        connection.settimeout(60)
        connection.sendall(head("/v1/models").replace(b"connection: close\r\n", b""))
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


async def test_half_sent_bodies_hold_nobody_up(cluster: Cluster) -> None:
    """Almost as many clients as there are places send half a megabyte of a body and stop. Others are answered. When the
    clients leave, none of their requests stays.
    """
    (pid,) = cluster.pids("gateway")
    before = psutil.Process(pid).memory_info().rss
    writers = []
    for _ in range(HALVES):
        _, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        writer.write(head(f"/v1/encode/{MODEL}", "content-length: 90000000", method="POST") + b"x" * (1 << 19))
        await writer.drain()
        writers.append(writer)
    async with httpx.AsyncClient(base_url=cluster.url, headers={"authorization": USER}, timeout=30) as client:
        for _ in range(10):
            assert (await client.post(f"/v1/encode/{MODEL}", json={"items": ["a"]})).status_code == 200
    held = psutil.Process(pid).memory_info().rss - before
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)  # aborts are sent in the loop's next turn
    assert held < HALVES * (4 << 20), "not what was announced"
    await asyncio.to_thread(
        until, lambda: cluster.gateway_metric("sie_gateway_requests_in_progress") == 0, 60, "they are gone"
    )
