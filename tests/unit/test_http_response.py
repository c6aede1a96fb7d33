"""Responses of the HTTP server: one write if the length is known, otherwise the behaviour of uvicorn. Limits of what
a client may leave open: a head that never ends, a response that is not read, bytes that are not HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from asyncio.selector_events import _SelectorSocketTransport
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import pytest

from sie_runtime.http import protocol
from sie_runtime.http.asgi import REQUEST_ID, App, Receive, Scope, Send, common_headers, reply, uuid7
from sie_runtime.http.protocol import MAX_HEAD_BYTES
from sie_runtime.http.server import HttpServer, probes

_VARYING = re.compile(rb"(?<=request-)id: [0-9a-f-]{36}|date: [^\r]*")
STREAMED = b"x" * 40_000
COMMON = b"".join(
    b"%b: %b\r\n" % pair for pair in common_headers({REQUEST_ID: uuid7(), "headers": ()})
)  # headers of a reply to a request with this id
LARGE = 16 << 20  # more than the socket buffers hold


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Send the kind of response that the path names."""
    start = {"type": "http.response.start", "status": 200}
    length = [(b"content-length", b"10")]
    match scope["path"]:
        case "/whole":
            await reply(send, 200, b"0123456789", extra={"X-Made": "yes"})
        case "/echo":
            body, more = b"", True
            while more:
                message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
            await reply(send, 200, body)
        case "/pieces":
            await send({**start, "headers": length})
            await send({"type": "http.response.body", "body": b"01234", "more_body": True})
            await send({"type": "http.response.body", "body": b"56789"})
        case "/chunked":
            await send({**start, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": STREAMED, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        case "/empty":
            await send({**start, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        case "/short":
            await send({**start, "headers": length})
            await send({"type": "http.response.body", "body": b"0123"})
        case "/large":
            await reply(send, 200, b"x" * (LARGE))
        case "/raises":
            raise RuntimeError("before the head")
        case "/fails":
            await send({**start, "headers": length})
            raise RuntimeError("after the head")
        case "/split":
            await send({**start, "headers": [*length, (b"x-echo", b"a\r\nx-forged: b")]})
            await send({"type": "http.response.body", "body": b"0123456789"})
        case "/close":
            await send({**start, "headers": [*length, (b"connection", b"close")]})
            await send({"type": "http.response.body", "body": b"0123456789"})


@contextlib.asynccontextmanager
async def connected(
    application: App = app,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, HttpServer]]:
    server = HttpServer(application, "127.0.0.1", 0, setting="--port")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer, server
    finally:
        writer.close()
        await server.stop()


async def response(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body of the next response."""
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        return head, await reader.readexactly(length)


def ask(path: str, method: str = "GET", *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


async def test_a_response_of_known_length_is_one_write_and_the_connection_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test records every write of the transports of this loop, except those of the client."""
    written: list[bytes] = []
    genuine = _SelectorSocketTransport.write

    def noted(transport: _SelectorSocketTransport, data: bytes) -> None:
        if not data.startswith(b"GET "):
            written.append(bytes(data))
        genuine(transport, data)

    monkeypatch.setattr(_SelectorSocketTransport, "write", noted)
    async with connected() as (reader, writer, _):
        for _ in range(3):
            writer.write(ask("/whole"))
            await response(reader)
    whole = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 10\r\nx-made:"
        b" yes\r\nvary: Accept-Encoding\r\n" + COMMON + b"\r\n0123456789"
    )
    assert [_VARYING.sub(b"", reply) for reply in written] == [_VARYING.sub(b"", whole)] * 3


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with connected() as (reader, writer, _):
        writer.write(ask("/pieces") + ask("/empty") + ask("/whole"))
        assert [(await response(reader))[1] for _ in range(3)] == [b"0123456789", b"", b"0123456789"]


async def test_a_malformed_body_is_refused_after_the_replies_to_earlier_requests() -> None:
    gate = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/slow":
            await gate.wait()
        await app({**scope, "path": "/whole"}, receive, send)

    async with connected(slow) as (reader, writer, _):
        writer.write(ask("/slow") + ask("/echo", "POST", "transfer-encoding: chunked") + b"ZZ\r\n")
        await writer.drain()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await reader.readexactly(1)
        gate.set()
        head, body = await response(reader)
        assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"0123456789")
        head, _ = await response(reader)
        assert head.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in head
        async with asyncio.timeout(30):
            assert await reader.read() == b""


async def test_a_body_of_unknown_length_is_chunked() -> None:
    async with connected() as (reader, writer, _):
        writer.write(ask("/chunked"))
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readuntil(b"0\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert body == b"9c40\r\n" + STREAMED + b"\r\n0\r\n\r\n"


async def test_a_body_of_unknown_length_for_http_1_0_ends_with_the_connection() -> None:
    """HTTP/1.0 has neither chunks nor interim responses."""
    async with connected() as (reader, writer, _):
        writer.write(b"GET /chunked HTTP/1.0\r\n\r\n")
        async with asyncio.timeout(30):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert body == STREAMED


@pytest.mark.parametrize(
    "closing", [ask("/whole", "GET", "connection: close"), b"GET /whole HTTP/1.0\r\n\r\n", ask("/close")]
)
async def test_a_connection_that_is_to_close_says_so_and_closes(closing: bytes) -> None:
    async with connected() as (reader, writer, _):
        writer.write(closing)
        head, body = await response(reader)
        assert (b"connection: close" in head, body) == (True, b"0123456789")
        async with asyncio.timeout(30):
            assert await reader.read() == b""


@pytest.mark.parametrize("path", ["/short", "/fails", "/split"])
async def test_what_cannot_be_sent_rightly_closes_the_connection(path: str) -> None:
    """The cases are a body of a wrong length, a failure after the head, and a header value with a line break."""
    async with connected() as (reader, writer, _):
        writer.write(ask(path))
        async with asyncio.timeout(30):
            arrived = await reader.read()
        assert b"x-forged" not in arrived
        assert b"0123456789" not in arrived


async def test_a_drain_ends_a_kept_connection_after_its_response() -> None:
    """The server stops while a request runs. The response arrives whole, and the connection closes."""
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        entered.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async with connected(slow) as (reader, writer, server):
        writer.write(ask("/"))
        async with asyncio.timeout(30):
            await entered.wait()
            stopping = asyncio.create_task(server.stop())
            await asyncio.sleep(0)  # the stop has begun now
            go_on.set()
            assert (await response(reader))[1] == b"ok"
            assert await reader.read() == b""
            await stopping


# what a client may leave open


async def refused(reader: asyncio.StreamReader) -> dict[str, object]:
    """Check a refusal that closes its connection, and return its error map."""
    head, body = await response(reader)
    assert b" 400 " in head.splitlines()[0]
    assert b"connection: close" in head
    assert b"x-sie-error-code: INVALID_INPUT" in head
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    envelope = json.loads(body)
    assert envelope["error"] == envelope["detail"]
    assert (envelope["error"]["reason"], envelope["error"]["retryable"]) == ("malformed", False)
    return dict(envelope["error"])


def raw(*lines: str) -> bytes:
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def put(*headers: str, path: str = "/echo") -> bytes:
    return ask(path, "POST", *headers)


CHUNKS, CHUNKED = b"3\r\nabc\r\n0\r\n\r\n", "transfer-encoding: chunked"
UPGRADE = ("upgrade: websocket", "connection: upgrade", "sec-websocket-version: 13")
NO_HTTP = "no HTTP"
# what is sent -> status; and the body of a reply with status 200, the header Allow of 204 and 405, or the faulty part
PROBED: dict[str, tuple[bytes, int, str]] = {
    # what a server takes
    "a path": (ask("/whole"), 200, "0123456789"),
    "a query": (ask("/whole?a=b&c=%2F"), 200, "0123456789"),
    "empty lines before": (b"\r\n\r\n" + ask("/whole"), 200, "0123456789"),
    "HTTP/1.0 without a host": (raw("GET /whole HTTP/1.0"), 200, "0123456789"),
    "an empty host": (raw("GET /whole HTTP/1.1", "host:"), 200, "0123456789"),
    "a listed host": (raw("GET /whole HTTP/1.1", "host: SIE.example.com"), 200, "0123456789"),
    "a length": (put("content-length: 3") + b"abc", 200, "abc"),
    "chunks": (put(CHUNKED) + CHUNKS, 200, "abc"),
    "chunks and trailers": (put(CHUNKED) + b"3;a=b\r\nabc\r\n0\r\nhost: x\r\nhost: y\r\n\r\n", 200, "abc"),
    "an upgrade to nothing known": (
        put("upgrade: h2c", "connection: upgrade", "content-length: 3") + b"abc",
        200,
        "abc",
    ),
    "a URL": (ask("http://localhost/whole?a=b"), 200, "0123456789"),
    "a URL, whose host counts": (raw("GET http://localhost/whole HTTP/1.1", "host: evil.example"), 200, "0123456789"),
    "a URL with a query alone": (ask("http://localhost?a=b"), 404, ""),
    "two slashes are no host": (ask("//evil.example/whole"), 404, ""),
    "the whole server": (ask("*", "OPTIONS"), 204, ""),
    # methods of a probe
    "HEAD": (ask("/healthz", "HEAD"), 200, ""),
    "OPTIONS": (ask("/healthz", "OPTIONS"), 204, "GET, HEAD, OPTIONS"),
    **{
        f"{method} of a probe": (ask(f"/{probe}", method), 405, "GET, HEAD, OPTIONS")
        for method, probe in (
            ("POST", "healthz"),
            ("PUT", "livez"),
            ("DELETE", "ping"),
            ("TRACE", "readyz"),
            ("QUERY", "readyz"),
        )
    },
    # the host
    "no host": (raw("GET /whole HTTP/1.1"), 400, "Host"),
    "no host of a websocket": (raw("GET /whole HTTP/1.1", *UPGRADE), 400, "Host"),
    "two hosts": (ask("/whole", "GET", "host: 127.0.0.1"), 400, "Host"),
    "a host with a space": (raw("GET /whole HTTP/1.1", "host: a b"), 400, "Host"),
    "a foreign host": (raw("GET /whole HTTP/1.1", "host: evil.example"), 403, "Host"),
    "a foreign host of HTTP/1.0": (raw("GET /whole HTTP/1.0", "host: evil.example"), 403, "Host"),
    # the target
    "a URL with a foreign host": (ask("http://evil.example/whole"), 403, "Host"),
    "a URL with a foreign host of a websocket": (ask("http://evil.example/whole", "GET", *UPGRADE), 403, "Host"),
    "a URL with a user": (ask("http://a@localhost/whole"), 400, "target"),
    "a URL without a host": (ask("http:///whole"), 400, "target"),
    "connect": (ask("somewhere:443", "CONNECT"), 400, "target"),
    "the whole server by GET": (ask("*"), 400, "target"),
    "a fragment": (ask("/whole#a"), 400, "target"),
    "a path of other bytes": (b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, NO_HTTP),
    # headers that may occur once
    **{
        f"{name} twice": (put(f"{name}: a", f"{name.lower()}: a", "content-length: 0"), 400, name)
        for name in ("Authorization", "Idempotency-Key", "X-Sie-New")
    },
    "one token, then none": (ask("/whole", "GET", "authorization: a", "authorization:"), 400, "Authorization"),
    # the body
    "two lengths": (put("content-length: 3", "content-length: 4") + b"abcd", 400, NO_HTTP),
    "a length that is none": (put("content-length: +4") + b"abcd", 400, NO_HTTP),
    "length and chunks": (put("content-length: 4", CHUNKED) + b"0\r\n\r\n", 400, NO_HTTP),
    "a chunk that is none": (put(CHUNKED) + b"zz\r\nabc\r\n", 400, NO_HTTP),
    "gzip and chunks": (put("transfer-encoding: gzip, chunked") + CHUNKS, 501, "Transfer-Encoding"),
    "identity and chunks": (put("transfer-encoding: identity, chunked") + CHUNKS, 501, "Transfer-Encoding"),
    "gzip without chunks": (put("transfer-encoding: gzip") + CHUNKS, 400, "Transfer-Encoding"),
    "chunks, then gzip": (put("transfer-encoding: chunked, gzip") + CHUNKS, 400, NO_HTTP),
    "a space before the colon": (put("transfer-encoding : chunked") + CHUNKS, 400, NO_HTTP),
    "chunks of HTTP/1.0": (raw("POST /echo HTTP/1.0", "host: a", CHUNKED) + CHUNKS, 400, "Transfer-Encoding"),
    # what is no HTTP/1.1
    "tls": (bytes.fromhex("16030100c8010000c40303") + b"\0" * 100, 400, NO_HTTP),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, NO_HTTP),
    "HTTP/1.2": (raw("GET /whole HTTP/1.2", "host: localhost"), 400, NO_HTTP),
    "an unknown method": (ask("/whole", "BREW"), 400, NO_HTTP),
    "a folded header": (ask("/whole", "GET", "x: a", " b"), 400, NO_HTTP),
    "nul in a value": (ask("/whole", "GET", "x: a\0b"), 400, NO_HTTP),
    "bare line feeds": (b"GET /whole HTTP/1.1\nhost: localhost\n\n", 400, NO_HTTP),
}


async def patient(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body before the response."""
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.request":
        await app(scope, receive, send)


CODES = {
    400: "INVALID_INPUT",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    501: "UNSUPPORTED_MEDIA_TYPE",
}


async def test_bytes_on_a_socket_get_the_status_of_rfc_9110_and_9112() -> None:
    """A reply has a date. A refused head closes its connection, and its reply repeats nothing of the request."""
    probed = probes(lambda: None, None)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        is_own = scope["path"] in ("/whole", "/echo")
        await (app if is_own else probed)(scope, receive, send)

    server = HttpServer(application, "127.0.0.1", 0, setting="--port", allowed_hosts=["sie.example.com"])
    await server.start()
    got: dict[str, tuple[int, str]] = {}
    try:
        for name, (sent, status, _) in PROBED.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(ask("/whole"))
            assert (await response(reader))[1] == b"0123456789"
            writer.write(sent)
            async with asyncio.timeout(30):
                head = (await reader.readuntil(b"\r\n\r\n")).strip()
                lines = dict(line.split(": ", 1) for line in head.decode().splitlines()[1:])
                has_body = not sent.startswith(b"HEAD ")
                body = await reader.readexactly(int(lines.get("content-length", 0)) * has_body)
            writer.close()
            age = datetime.now(UTC) - parsedate_to_datetime(lines["date"])
            assert (timedelta(0) <= age < timedelta(minutes=1), lines["date"][-4:]) == (True, " GMT"), name
            got[name] = (int(head.split()[1]), body.decode())
            if status == 204:
                assert "content-length" not in lines, name
            if status in (204, 405):
                got[name] = (got[name][0], lines.get("allow", ""))
            elif status != 200:
                error = json.loads(body)["error"]
                got[name] = (
                    got[name][0],
                    NO_HTTP if error["message"].startswith("this is no HTTP/1.1 request: ") else error["param"] or "",
                )
            if status >= 400:
                assert json.loads(body)["error"]["code"] == CODES[status], name
                is_closed = status in (400, 501) or b"HTTP/1.0" in sent
                assert ("connection" in lines) == is_closed, f"{name}: an unclear head ends the connection"
                assert b"evil" not in body, name
    finally:
        await server.stop()
    assert got == {name: (status, expected) for name, (_, status, expected) in PROBED.items()}


@pytest.mark.parametrize(
    ("endless", "piece"),
    [
        (b"GET /whole HTTP/1.1\r\nx: " + b"y" * 400_000, 1 << 20),
        (b"GET /" + b"y" * 400_000, 5000),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 70_000, 5000),
    ],
    ids=["value", "path", "count"],
)
async def test_a_head_that_is_too_large_is_refused_whether_it_ends_or_not(endless: bytes, piece: int) -> None:
    for ending in (b"", b"\r\n\r\n"):
        async with connected() as (reader, writer, _):
            sent = endless + ending
            for start in range(0, len(sent), piece):
                writer.write(sent[start : start + piece])
                await asyncio.sleep(0)
            assert "larger than 65536 bytes" in str((await refused(reader))["message"])


async def test_a_head_of_just_the_allowed_size_passes_and_a_body_is_no_head() -> None:
    async with connected(patient) as (reader, writer, _):
        for _ in range(3):
            writer.write(ask("/whole", "POST", "x: " + "y" * (MAX_HEAD_BYTES - 200), "content-length: 1000000"))
            writer.write(b"z" * 1_000_000)
            assert (await response(reader))[1] == b"0123456789"


@pytest.mark.parametrize("pause_s", [0.0, 0.03])
async def test_a_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, pause_s: float) -> None:
    """The client sends nothing more, or single bytes (slowloris). An idle connection stays open."""
    monkeypatch.setattr(protocol, "HEAD_S", 0.3)
    async with connected() as (reader, writer, server):
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", server.port)
        idle_writer.write(ask("/whole"))
        await response(idle_reader)
        writer.write(ask("/whole"))
        await response(reader)

        async def dripping() -> None:
            for byte in b"GET /whole HTTP/1.1\r\nx: " + b"y" * 1000:
                writer.write(bytes([byte]))
                await asyncio.sleep(pause_s)

        drip = asyncio.create_task(dripping()) if pause_s else None
        if drip is None:
            writer.write(b"GET /whole HT")
        assert "not complete within 0.3 s" in str((await refused(reader))["message"])
        if drip is not None:
            drip.cancel()
        idle_writer.write(ask("/whole"))
        assert (await response(idle_reader))[1] == b"0123456789"
        idle_writer.close()


@pytest.mark.parametrize(
    ("head", "body", "is_dripped"),
    [
        (b"content-length: 3", b"abc", True),
        (b"transfer-encoding: chunked", CHUNKS, False),
        (b"content-length: 0", b"", False),
    ],
)
async def test_an_upgrade_that_is_not_served_is_ignored(head: bytes, body: bytes, is_dripped: bool) -> None:
    """The JDK's client offers h2c with each first request. The connection stays open for the next one."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB"
    sent = b"POST /echo HTTP/1.1\r\nhost: localhost\r\n%b\r\n%b\r\n\r\n%b" % (offer, head, body)
    async with connected() as (reader, writer, _):
        for _ in range(2):
            for part in [bytes([byte]) for byte in sent] if is_dripped else [sent]:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            assert (await response(reader))[1] == (b"abc" if body else b"")
        writer.write(ask("/whole"))
        assert (await response(reader))[1] == b"0123456789"


async def test_one_connection_too_many_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open connections stay open. A connection that closes makes room."""
    monkeypatch.setattr(protocol, "max_connections", lambda: 2)
    async with connected() as (reader, writer, server):
        _, second = await asyncio.open_connection("127.0.0.1", server.port)
        third, refused_writer = await asyncio.open_connection("127.0.0.1", server.port)
        head, body = await response(third)
        assert (b" 503 " in head, b"retry-after: 1" in head, json.loads(body)["code"]) == (True, True, "QUEUE_FULL")
        refused_writer.close()
        writer.write(ask("/whole"))
        assert (await response(reader))[1] == b"0123456789"
        second.close()
        await second.wait_closed()
        fourth, again = await asyncio.open_connection("127.0.0.1", server.port)
        again.write(ask("/whole"))
        assert (await response(fourth))[1] == b"0123456789"
        again.close()


async def is_last(reader: asyncio.StreamReader) -> bool:
    """Check that the next response is whole. Return whether it announces the end of its connection, which then ends."""
    head, body = await response(reader)
    assert body == b"0123456789"
    if b"connection: close" not in head:
        return False
    async with asyncio.timeout(30):
        return await reader.read() == b""


@pytest.mark.parametrize("path", ["/whole", "/pieces"])
async def test_a_server_that_leaves_says_so_in_the_next_response_of_each_connection(path: str) -> None:
    async with connected() as (reader, writer, server):
        writer.write(ask(path))
        assert not await is_last(reader)
        server.leave()
        writer.write(ask(path))
        assert await is_last(reader)
        new_reader, new_writer = await asyncio.open_connection("127.0.0.1", server.port)
        new_writer.write(ask(path))
        assert await is_last(new_reader)
        new_writer.close()


async def test_a_request_that_arrives_as_its_connection_is_closed_is_answered() -> None:
    """The server hangs up while the socket buffer of a connection holds a request that it has not read. The request is
    answered, and the other connection is closed.
    """
    async with connected() as (_, _, server):
        with socket.create_connection(
            ("127.0.0.1", server.port)
        ) as raw:  # what it sends is in the buffer before the loop reads
            raw.setblocking(False)
            idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", server.port)
            idle_writer.write(ask("/whole"))
            assert not await is_last(idle_reader)  # by now both are accepted
            raw.send(ask("/whole"))
            await server.hang_up()
            async with asyncio.timeout(30):
                assert await idle_reader.read() == b""
                received = b""
                while piece := await asyncio.get_running_loop().sock_recv(raw, 1 << 16):
                    received += piece
        assert received.startswith(b"HTTP/1.1 200 OK\r\n")
        assert received.endswith(b"0123456789")
        idle_writer.close()


async def test_a_server_stops_when_its_last_answer_was_read() -> None:
    """A client has read nothing of a large answer when the server stops. The server waits until the client has read all
    of it, and then closes the connection.
    """
    async with connected() as (reader, writer, server):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(ask("/large"))
        second_reader, second_writer = await asyncio.open_connection("127.0.0.1", server.port)
        second_writer.write(ask("/whole"))
        assert not await is_last(second_reader)
        await server.hang_up()
        stopping = asyncio.create_task(server.stop(60))
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        size = 0
        async with asyncio.timeout(60):
            while piece := await reader.read(1 << 20):
                size += len(piece)
                await asyncio.sleep(0.01)
            await stopping
        assert size > LARGE
        second_writer.close()
