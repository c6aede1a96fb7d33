"""How a response leaves a process: one write where its length is known, and everything that uvicorn promises elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.selector_events import _SelectorSocketTransport
from collections.abc import AsyncIterator

import pytest

from sie_contracts.runtime.http import App, HttpServer, Receive, Scope, Send, reply

STREAMED = b"x" * 40_000


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Each path is a kind of response."""
    start = {"type": "http.response.start", "status": 200}
    length = [(b"content-length", b"10")]
    match scope["path"]:
        case "/whole":
            await reply(send, 200, b"0123456789", extra={"X-Made": "yes"})
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
async def connected(application: App = app) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, HttpServer]]:
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
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        return head, await reader.readexactly(length)


def ask(path: str, method: str = "GET", *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


async def test_a_response_of_known_length_is_one_write_and_the_connection_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write of this loop's transports is looked at; the client's own are left out."""
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
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: 10\r\nx-made: yes\r\n\r\n0123456789"
    assert written == [whole] * 3


@pytest.mark.parametrize("path", ["/whole", "/pieces", "/close"])
async def test_bodies_arrive_whole(path: str) -> None:
    async with connected() as (reader, writer, _):
        writer.write(ask(path))
        assert (await response(reader))[1] == b"0123456789"


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with connected() as (reader, writer, _):
        writer.write(ask("/pieces") + ask("/empty") + ask("/whole"))
        assert [(await response(reader))[1] for _ in range(3)] == [b"0123456789", b"", b"0123456789"]


async def test_a_body_of_unknown_length_is_chunked() -> None:
    async with connected() as (reader, writer, _):
        writer.write(ask("/chunked"))
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readuntil(b"0\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert body == b"9c40\r\n" + STREAMED + b"\r\n0\r\n\r\n"


async def test_head_has_the_length_and_no_body() -> None:
    async with connected() as (reader, writer, _):
        writer.write(ask("/whole", "HEAD") + ask("/empty"))
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 10" in head
        assert (await response(reader))[1] == b""


@pytest.mark.parametrize("closing", [ask("/whole", "GET", "connection: close"), b"GET /whole HTTP/1.0\r\n\r\n", ask("/close")])
async def test_a_connection_that_is_to_close_says_so_and_closes(closing: bytes) -> None:
    async with connected() as (reader, writer, _):
        writer.write(closing)
        head, _ = await response(reader)
        assert b"connection: close" in head
        async with asyncio.timeout(5):
            assert await reader.read() == b""


@pytest.mark.parametrize("path", ["/short", "/fails", "/split"])
async def test_what_cannot_be_sent_rightly_closes_the_connection(path: str) -> None:
    """A body of another length than promised, a failure after the head, a header that would be two."""
    async with connected() as (reader, writer, _):
        writer.write(ask(path))
        async with asyncio.timeout(5):
            arrived = await reader.read()
        assert b"x-forged" not in arrived
        assert b"0123456789" not in arrived


async def test_a_drain_ends_a_kept_connection_after_its_response() -> None:
    """1. a request runs; 2. the server is told to stop; 3. the response arrives whole and the connection closes."""
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        entered.set()
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async with connected(slow) as (reader, writer, server):
        writer.write(ask("/"))
        async with asyncio.timeout(5):
            await entered.wait()
            stopping = asyncio.create_task(server.stop())
            await asyncio.sleep(0.2)  # uvicorn looks at its flag ten times a second
            go_on.set()
            assert (await response(reader))[1] == b"ok"
            assert await reader.read() == b""
            await stopping
