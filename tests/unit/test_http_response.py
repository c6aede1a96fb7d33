"""Responses of the HTTP server: one write if the length is known, otherwise the behaviour of uvicorn. Limits of what
a client may leave open: a head that never ends, a response that is not read, bytes that are not HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
from asyncio.selector_events import _SelectorSocketTransport
from collections.abc import AsyncIterator

import pytest

from sie_runtime.http import protocol
from sie_runtime.http.asgi import REQUEST_ID, App, Receive, Scope, Send, common_headers, reply
from sie_runtime.http.protocol import MAX_HEAD_BYTES
from sie_runtime.http.server import HttpServer

_ID = re.compile(rb"(?<=request-)id: [0-9a-f-]{36}")
STREAMED = b"x" * 40_000
COMMON = b"".join(
    b"%b: %b\r\n" % pair for pair in common_headers({REQUEST_ID: "ID", "headers": ()})
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
    assert [_ID.sub(b"id: ID", reply) for reply in written] == [whole] * 3


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


async def test_an_expectation_in_http_1_0_is_ignored() -> None:
    async with connected() as (reader, writer, _):
        writer.write(b"POST /echo HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nab")
        head, body = await response(reader)
        assert (head.split(b"\r\n")[0], body) == (b"HTTP/1.1 200 OK", b"ab")


async def test_head_has_the_length_and_no_body() -> None:
    async with connected() as (reader, writer, _):
        writer.write(ask("/whole", "HEAD") + ask("/empty"))
        async with asyncio.timeout(30):
            head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 10" in head
        assert (await response(reader))[1] == b""


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


NO_HTTP = {
    "text": b"hello\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + b"\0" * 100,
    "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a space in a name": ask("/whole", "GET", "bad name: x"),
    "nul in a value": ask("/whole", "GET", "x: a\0b"),
    "bare line feed in a value": b"GET /whole HTTP/1.1\r\nhost: localhost\r\nx: a\rb\r\n\r\n",
    "two lengths": ask("/whole", "POST", "content-length: 3", "content-length: 4") + b"abcd",
    "length and chunks": ask("/whole", "POST", "content-length: 4", "transfer-encoding: chunked") + b"0\r\n\r\n",
    "a length that is none": ask("/whole", "POST", "content-length: +4") + b"abcd",
    "a chunk that is none": ask("/echo", "POST", "transfer-encoding: chunked") + b"zz\r\nabc\r\n",
    "no path": b"GET whole HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "a path of other bytes": b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "connect": b"CONNECT somewhere:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
}


async def patient(scope: Scope, receive: Receive, send: Send) -> None:
    """Read the body before the response."""
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.request":
        await app(scope, receive, send)


async def test_what_is_no_http_gets_the_envelope_and_a_closed_connection() -> None:
    """The answer is no plain text, and repeats nothing of the request."""
    async with connected(patient) as (_, _, server):
        for name, sent in NO_HTTP.items():
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(ask("/whole"))
            assert (await response(reader))[1] == b"0123456789", name
            writer.write(sent)
            assert (await refused(reader))["message"] == "this is no HTTP/1.1 request", name
            writer.close()


async def test_a_fault_of_ours_gets_the_envelope_and_the_connection_stays() -> None:
    async with connected() as (reader, writer, _):
        writer.write(ask("/raises"))
        head, body = await response(reader)
        assert (b" 500 " in head, json.loads(body)["code"]) == (True, "INTERNAL_ERROR")
        assert b"before the head" not in body
        writer.write(ask("/whole"))
        assert (await response(reader))[1] == b"0123456789"


async def test_what_follows_a_running_request_never_stands_for_its_answer() -> None:
    """Garbage follows a running request. The request gets its own answer, and the connection closes."""
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await reply(send, 200, b"mine")

    async with connected(slow) as (reader, writer, _):
        writer.write(ask("/"))
        await writer.drain()
        writer.write(b"garbage\r\n\r\n")
        await asyncio.sleep(0.05)
        go_on.set()
        head, body = await response(reader)
        assert (b" 200 " in head, body) == (True, b"mine")
        async with asyncio.timeout(30):
            assert await reader.read() == b""


@pytest.mark.parametrize("piece", [1 << 20, 5000])
@pytest.mark.parametrize(
    "endless",
    [
        b"GET /whole HTTP/1.1\r\nx: " + b"y" * 400_000,
        b"GET /" + b"y" * 400_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 70_000,
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


async def test_a_response_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads nothing of 16 MiB is disconnected. A client that reads slowly gets all of them."""
    monkeypatch.setattr(protocol, "WRITE_S", 1.0)
    async with connected() as (reader, writer, server):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(ask("/large"))
        slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", server.port)
        slow_writer.write(ask("/large"))
        size, head = 0, b""
        async with asyncio.timeout(60):
            while size < LARGE:
                piece = await slow_reader.read(1 << 20)
                assert piece, "it was cut"
                head = head or piece[:200]
                size += len(piece)
                await asyncio.sleep(0.02)
        assert b" 200 " in head
        slow_writer.close()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(30):
            arrived = 0
            with contextlib.suppress(ConnectionError):
                while piece := await reader.read(1 << 20):
                    arrived += len(piece)
        assert arrived < LARGE


@pytest.mark.parametrize("pieces", [1, 2, 40], ids=["in one piece", "head, then body", "byte by byte"])
@pytest.mark.parametrize("framing", ["content-length", "chunked", "empty"])
async def test_an_upgrade_that_is_not_served_is_ignored(framing: str, pieces: int) -> None:
    """The JDK's client offers h2c with each first request. The connection stays open for the next one."""
    content = b"" if framing == "empty" else b"what the body holds"
    head, body = {
        "content-length": (b"content-length: %d" % len(content), content),
        "chunked": (b"transfer-encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)),
        "empty": (b"content-length: 0", b""),
    }[framing]
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB"
    start = b"POST /echo HTTP/1.1\r\nhost: localhost\r\n%b\r\n%b\r\n\r\n" % (offer, head)
    async with connected() as (reader, writer, _):
        for _ in range(2):
            parts = {1: [start + body], 2: [start, body]}.get(pieces, [bytes([byte]) for byte in start + body])
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            assert (await response(reader))[1] == content
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


async def test_garbage_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with connected() as (_, _, server):
        for _ in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"secret-garbage\r\n\r\n")
            await refused(reader)
            writer.close()
    assert sum("refused" in record.getMessage() for record in caplog.records) <= 1
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 0
    assert "secret" not in caplog.text


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
