"""Attacks on a real `sie serve` without tokens, as it runs on a laptop: by a foreign page in a browser, and by anything
that reaches its ports. The attacks go to the listeners of all processes, and each test ends with an ordinary request.

Another local user is in test_local_users.py, tokens are in test_security.py, malformed bodies in test_fuzz.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import fuzz
import httpx
import psutil
import pytest
import shared
from cluster import MODEL, Cluster
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

ENCODE = f"/v1/encode/{MODEL}"
GROWTH_BYTES = 24 << 20
SENT_BYTES = 24 << 20  # trailers of each connection at most: the server closes long before
FOREIGN = (
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
)
REBOUND = ("evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1")
CHANGING = (  # one route of each kind that changes or computes
    ("POST", ENCODE),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/pools"),
    ("POST", "/v1/pools/mine/renew"),
    ("DELETE", "/v1/pools/mine"),
    ("POST", "/v1/configs/resolve"),
    ("POST", "/v1/configs/models"),
    ("PUT", "/v1/configs/models/a"),
    ("PATCH", "/v1/configs/models/a"),
    ("DELETE", "/v1/configs/models/a"),
)


pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def cluster(open_cluster: Cluster) -> Cluster:
    return open_cluster


@pytest.fixture(autouse=True)
def is_unhurt(cluster: Cluster) -> Iterator[None]:
    yield
    assert cluster.encode(["Hello"]).status_code == 200


def listeners(cluster: Cluster) -> dict[str, tuple[int, str]]:
    """Return port and role of each HTTP listener, by its name."""
    metrics = [line.partition("metrics on ")[2] for line in cluster.lines if "gateway listening" in line]
    config = urlsplit(str(cluster.health()["config_url"])).port
    assert config is not None
    return {
        "api": (cluster.port, "gateway"),
        "metrics": (int(metrics[-1]), "gateway"),
        "worker": (cluster.worker_port, "sidecar"),
        "config": (config, "config"),
    }


LISTENERS = ("api", "metrics", "worker", "config")


def rss_bytes(cluster: Cluster, role: str) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in cluster.pids(role))


def arrived(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes."""
    reply = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            reply += piece
    return reply


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *lines, "", ""]).encode()


# trailers


ENDLESS = {"a value": (b"x: ", b"y" * 65536), "many": (b"", b"a: b\r\n" * 10_000), "a name": (b"", b"y" * 65536)}


def send_endless(port: int, path: str, beginning: bytes, piece: bytes, closed: list[str]) -> None:
    """Send trailers without an end. Append the path to `closed` when the server has closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head(path, "transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\n" + beginning)
        with contextlib.suppress(ConnectionError):
            for _ in range(SENT_BYTES // len(piece)):
                connection.sendall(piece)
        arrived(connection)
    closed.append(path)


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize("listener", LISTENERS)
def test_trailers_without_an_end_cost_nothing(cluster: Cluster, listener: str, kind: str) -> None:
    """Four connections send at once, to routes that read a body and to routes that do not."""
    port, role = listeners(cluster)[listener]
    before = rss_bytes(cluster, role)
    closed: list[str] = []
    paths = (ENCODE, "/healthz", "/v1/configs/resolve", "/none")
    senders = [threading.Thread(target=send_endless, args=(port, path, *ENDLESS[kind], closed)) for path in paths]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join(90)
    assert sorted(closed) == sorted(paths)
    assert rss_bytes(cluster, role) - before < GROWTH_BYTES


def test_trailers_are_no_headers(cluster: Cluster) -> None:
    """Read as headers, these trailers would give 404 for the unknown pool or 504 for the budget of 1 ms."""
    body = json.dumps({"items": ["a"]}).encode()
    with socket.create_connection(("127.0.0.1", cluster.port), timeout=60) as connection:
        connection.sendall(
            head(ENCODE, "transfer-encoding: chunked", "connection: close") + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
        )
        connection.sendall(
            b"X-SIE-Pool: none\r\nX-SIE-Timeout-Ms: 1\r\nAuthorization: Bearer x\r\nOrigin: https://evil.example\r\n\r\n"
        )
        assert arrived(connection).startswith(b"HTTP/1.1 200 ")


def test_an_answer_before_the_body_ends_the_connection(cluster: Cluster) -> None:
    with socket.create_connection(("127.0.0.1", cluster.port), timeout=60) as connection:
        connection.sendall(head("/v1/encode/none/none", "content-length: 1000000"))
        reply = arrived(connection)
        assert reply.startswith(b"HTTP/1.1 404 ")
        assert b"connection: close" in reply


# browsers


@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda foreign: next(iter(foreign.values())))
def test_a_foreign_page_changes_and_computes_nothing(cluster: Cluster, foreign: dict[str, str]) -> None:
    """The page sends a form or a fetch without CORS: any method, with text/plain. The origin is checked before all
    else, on every listener.
    """
    for listener, (port, _) in listeners(cluster).items():
        for method, path in CHANGING:
            answer = httpx.request(
                method,
                f"http://127.0.0.1:{port}{path}",
                content='{"items": ["a"], "name": "mine", "gpus": {"cpu": 1}}',
                headers={**foreign, "content-type": "text/plain"},
                timeout=60,
            )
            assert (answer.status_code, answer.json()["error"]["reason"]) == (403, "origin"), (listener, method, path)
            assert "access-control-allow-origin" not in answer.headers
    assert [pool["name"] for pool in httpx.get(f"{cluster.url}/v1/pools", timeout=60).json()["pools"]] == ["default"]


def test_its_own_pages_and_programs_are_let_in(cluster: Cluster) -> None:
    """curl as in the README is let in too: it sends the content type of a form."""
    body = '{"items": [{"text": "What is deep learning?"}]}'
    form = {"content-type": "application/x-www-form-urlencoded"}
    for own in (form, form | {"origin": cluster.url}, form | {"origin": cluster.url, "sec-fetch-site": "same-origin"}):
        assert httpx.post(cluster.url + ENCODE, content=body, headers=own, timeout=60).status_code == 200, own


@pytest.mark.parametrize("host", REBOUND)
def test_a_name_that_was_turned_to_this_machine_opens_nothing(cluster: Cluster, host: str) -> None:
    """DNS rebinding: to the browser the page and this server are one origin."""
    for listener, (port, _) in listeners(cluster).items():
        for method, path in (
            ("GET", "/"),
            ("GET", "/healthz"),
            ("GET", "/metrics"),
            ("GET", "/v1/models"),
            ("POST", ENCODE),
        ):
            headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
            answer = httpx.request(method, f"http://127.0.0.1:{port}{path}", headers=headers, timeout=60)
            assert (answer.status_code, answer.json()["error"]["reason"]) == (403, "host"), (listener, path)
            assert "evil" not in answer.text


@pytest.mark.parametrize(
    "headers",
    [*FOREIGN, *({"host": host} for host in REBOUND), {"host": "evil.example", "origin": "http://evil.example"}],
    ids=lambda headers: next(iter(headers.values())),
)
def test_no_foreign_page_looks_through_a_websocket(cluster: Cluster, headers: dict[str, str]) -> None:
    for port, path in (
        (cluster.port, "/ws/cluster-status"),
        (cluster.port, "/ws/status"),
        (cluster.worker_port, "/ws/status"),
    ):
        host = headers.get("host", f"127.0.0.1:{port}")
        lines = [f"{name}: {value}" for name, value in headers.items() if name != "host"]
        request_lines = [
            f"GET {path} HTTP/1.1",
            f"host: {host}",
            *lines,
            "upgrade: websocket",
            "connection: upgrade",
            "sec-websocket-version: 13",
            "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
            "",
            "",
        ]
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall("\r\n".join(request_lines).encode())
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 403 "), (port, path)


def test_nobody_takes_the_only_worker(cluster: Cluster) -> None:
    """A program without the scope admin can create a pool, but the pool gets no worker."""
    answer = httpx.post(
        f"{cluster.url}/v1/pools", content='{"name": "mine", "gpus": {"cpu": 1}, "ttl_seconds": 3600}', timeout=60
    )
    assert answer.status_code == 201
    try:
        for _ in range(20):  # longer than workers take to learn their pools
            assert cluster.encode(["Hello"]).status_code == 200
            time.sleep(0.3)
        status = httpx.get(f"{cluster.url}/v1/pools/mine", timeout=60).json()["status"]
        assert (status["state"], status["assigned_workers"]) == ("pending", [])
        assert "from all other clients" in status["reason"]
    finally:
        httpx.delete(f"{cluster.url}/v1/pools/mine", timeout=30)


# connections


def test_one_client_cannot_take_all_status_sockets(cluster: Cluster) -> None:
    with contextlib.ExitStack() as held:
        opened = 0
        statuses: Counter[int] = Counter()
        for _ in range(200):
            try:
                held.enter_context(connect(cluster.url.replace("http", "ws") + "/ws/cluster-status"))
                opened += 1
            except InvalidStatus as refused:
                statuses[refused.response.status_code] += 1
        assert (opened, dict(statuses)) == (32, {503: 168})
        assert httpx.get(f"{cluster.url}/health", timeout=60).status_code == 200


def test_slow_connections(cluster: Cluster) -> None:
    """300 connections send heads, bodies and trailers byte by byte. Complete requests are answered meanwhile."""
    body = json.dumps({"items": ["a"]}).encode()
    with contextlib.ExitStack() as held:
        beginnings = (
            b"POST " + ENCODE.encode(),
            head(ENCODE, "content-length: 100") + b"{",
            head(ENCODE, "transfer-encoding: chunked") + b"1\r\n{\r\n0\r\nx: ",
            head("/none", "transfer-encoding: chunked") + b"5;x",
        )
        slow = [
            held.enter_context(socket.create_connection(("127.0.0.1", cluster.port), timeout=60)) for _ in range(300)
        ]
        for number, connection in enumerate(slow):
            connection.sendall(beginnings[number % len(beginnings)])
        for _ in range(3):
            for connection in slow:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"y")
            with socket.create_connection(("127.0.0.1", cluster.port), timeout=60) as connection:
                connection.sendall(head(ENCODE, f"content-length: {len(body)}", "connection: close") + body)
                reply = arrived(connection)
                assert reply.startswith(b"HTTP/1.1 200 "), reply[:200]
                assert b'"dense"' in reply


# bodies


def test_values_that_only_msgpack_has_before_a_real_model(cluster: Cluster) -> None:
    """Each value is sent as an item, a text, a parameter and an option of the real model: a body that passes reaches
    workers.
    """
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for odd in fuzz.ONLY_MSGPACK:
            bodies: tuple[Any, ...] = (
                {"items": odd},
                {"items": [odd]},
                {"items": [{"text": odd}]},
                {"items": ["a"], "params": odd},
                {"items": ["a"], "muvera": odd},
                {"items": ["a"], "params": {"options": {"x": odd}}},
                {"items": [{"text": "a", "metadata": odd}]},
                {"items": [{"text": "a", "multivector": odd}]},
                {"items": ["a"], "labels": odd},
                odd,
            )
            for body in bodies:
                case = fuzz.packed(ENCODE, body)
                answer = client.post(case.path, content=case.body, headers=case.headers)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                assert answer.status_code < 500, (case, answer.text[:300])
    assert statuses.get(400, 0) > 50, statuses
