"""HTTP connections: trailers, slow bodies, answers before the end of a body, clients that leave. The tests run
on uvloop, which our processes use.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import struct
from collections.abc import AsyncIterator

import pytest
import uvloop
from body_times import TIME_S, BodyTime, body_times
from inprocess import until

from sie_runtime.http import protocol
from sie_runtime.http.asgi import Receive, Scope, Send, headers_of, reply
from sie_runtime.http.protocol import MAX_PIPELINED, PIECES_AT_ONCE
from sie_runtime.http.server import HttpServer
from sie_runtime.http.websocket import WebSocketProtocol

END_S = 30.0
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


class Server:
    """A server that answers /read with the body and headers of the request, /early before it reads the body, and /slow
    when `go_on` is set.
    """

    def __init__(self) -> None:
        self.go_on, self.entered, self.gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.http = HttpServer(self._answer, "127.0.0.1", 0, setting="--port")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/early":
            await reply(send, 401, b"early")
            return
        if scope["path"] == "/large":
            await self._large(receive, send)
            return
        if scope["path"] == "/late":
            self.entered.set()
            await self.go_on.wait()
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        else:
            self.gone.set()
            return
        if scope["path"] == "/slow":
            await self._slow(receive)
        await reply(send, 200, json.dumps({"body": body.decode(), "headers": headers_of(scope)}).encode())

    async def _large(self, receive: Receive, send: Send) -> None:
        """Send more than the socket buffers hold, in pieces."""
        await receive()  # the body, which is empty
        watched = asyncio.create_task(self._watch(receive))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (64 << 20))]})
        for _ in range(64):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        await watched

    async def _slow(self, receive: Receive) -> None:
        self.entered.set()
        watched = asyncio.create_task(self._watch(receive))
        await self.go_on.wait()
        watched.cancel()

    async def _watch(self, receive: Receive) -> None:
        if (await receive())["type"] == "http.disconnect":
            self.gone.set()
            self.go_on.set()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, asyncio.StreamReader, asyncio.StreamWriter]]:
    server = Server()
    await server.http.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.http.port)
    try:
        async with asyncio.timeout(END_S):
            yield server, reader, writer
    finally:
        writer.close()
        await server.http.stop()


def ask(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: localhost", *headers, "", ""]).encode()


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    return head, await reader.readexactly(length)


# trailers


@pytest.mark.parametrize("pieces", [1, 1000], ids=["at once", "byte by byte"])
def test_trailers_are_dropped(pieces: int) -> None:
    """Trailers may arrive in the packet of the head, before the application reads the headers."""

    async def scenario() -> None:
        async with serving() as (_, reader, writer):
            for _ in range(2):
                sent = (
                    ask("/read", method="POST")[:-2]
                    + CHUNKED
                    + b"3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\nhost: y\r\n\r\n"
                )
                size = max(1, len(sent) // pieces)
                for start in range(0, len(sent), size):
                    writer.write(sent[start : start + size])
                    await asyncio.sleep(0)
                head, body = await answer(reader)
                assert head.startswith(b"HTTP/1.1 200 ")
                assert json.loads(body) == {
                    "body": "abc",
                    "headers": {"host": "localhost", "transfer-encoding": "chunked"},
                }

    uvloop.run(scenario())


@pytest.mark.parametrize(
    ("chunks", "endless", "piece"),
    [
        (b"0\r\n", b"x: " + b"y" * 400_000, 5000),
        (b"3\r\nabc\r\n0\r\n", b"a: b\r\n" * 70_000, 1 << 20),
        (b"3;", b"y" * 400_000, 5000),
    ],
    ids=["no body", "a body", "an extension of a chunk"],
)
def test_trailers_and_extensions_of_chunks_have_a_limit(chunks: bytes, endless: bytes, piece: int) -> None:
    async def scenario() -> None:
        async with serving() as (_, reader, writer):
            sent = ask("/read", method="POST")[:-2] + CHUNKED + chunks + endless
            for start in range(0, len(sent), piece):
                writer.write(sent[start : start + piece])
                await asyncio.sleep(0)
            head, body = await answer(reader)
            assert head.startswith(b"HTTP/1.1 400 ")
            assert b"connection: close" in head
            assert b"larger than 65536 bytes" in body or b"no HTTP/1.1" in body, body
            assert await reader.read() == b""

    uvloop.run(scenario())


def test_chunks_of_one_byte_leave_other_connections_their_turn() -> None:
    """One turn of the event loop parses only some of the chunks that have arrived."""

    async def scenario() -> None:
        async with serving() as (server, reader, writer):
            writer.write(ask("/read", method="POST")[:-2] + CHUNKED)
            (connection,) = await until(lambda: server.http._state.connections, "the server has the connection")
            writer.write(b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n")
            answered, counts = asyncio.create_task(answer(reader)), []
            while not answered.done():
                counts.append(connection._body_pieces)
                await asyncio.sleep(0)
            assert json.loads((await answered)[1])["body"] == "a" * 100_000
            assert max(more - count for count, more in itertools.pairwise(counts)) < 4 * PIECES_AT_ONCE

    uvloop.run(scenario())


# slow bodies


RATE = protocol.MIN_RATE
LENGTH = "content-length: 1000000"


@pytest.mark.parametrize("headers", [(LENGTH,), ("transfer-encoding: chunked",)], ids=["a length", "chunks"])
def test_a_body_that_comes_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch, headers: tuple[str, ...]) -> None:
    """The client sends single bytes. It gets the reason, and its connection ends. The handler gets a disconnect."""
    monkeypatch.setattr(protocol, "RATE_S", 0.2)

    async def scenario() -> None:
        async with serving() as (server, reader, writer):
            writer.write(ask("/read", *headers, method="POST"))

            answered = asyncio.create_task(answer(reader))
            while not answered.done():
                writer.write(b"x" if headers == (LENGTH,) else b"1\r\nx\r\n")
                await asyncio.wait([answered], timeout=0.02)
            head, body = await answered
            assert (head.split(b" ")[1], json.loads(body)["error"]["reason"]) == (b"504", "slow_body")
            assert f"{RATE} bytes a second" in json.loads(body)["error"]["message"]
            assert "SIE_MIN_BODY_RATE" in json.loads(body)["error"]["message"]
            await server.gone.wait()
            assert await reader.read() == b""

    uvloop.run(scenario())


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[BodyTime]:
    return body_times(monkeypatch)


def test_a_body_that_comes_at_the_least_rate_is_read_however_long_it_takes(times: list[BodyTime]) -> None:
    """The next request of the connection is timed separately."""
    least = int(RATE * TIME_S)  # bytes in TIME_S

    async def scenario() -> None:
        async with serving() as (_, reader, writer):
            for _ in range(2):
                times.clear()
                writer.write(ask("/read", f"content-length: {6 * least}", method="POST"))
                for number in range(6):
                    await until(lambda: len(times) == number + 1, "the rate is measured")  # noqa: B023  awaited at once
                    writer.write(b"x" * least)
                    await until(
                        lambda: times[-1].is_cancelled or times[-1].read_bytes == least, "what was sent is read"
                    )
                    if number < 5:
                        times[-1].end()
                head, body = await answer(reader)
                assert (head.split(b" ")[1], len(json.loads(body)["body"])) == (b"200", 6 * least)
                writer.write(ask("/read", "content-length: 2", method="POST") + b"x")
                await until(lambda: len(times) == 7, "the rate of the next body is measured")
                assert (times[5].is_cancelled, times[6].is_cancelled) == (True, False)
                writer.write(b"x")
                assert (await answer(reader))[0].split(b" ")[1] == b"200"

    uvloop.run(scenario())


@pytest.mark.parametrize("headers", [(), ("expect: 100-continue",)], ids=["sent", "asked before"])
def test_nobody_is_slow_while_the_server_does_not_read(times: list[BodyTime], headers: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with serving() as (server, reader, writer):
            writer.write(ask("/late", "content-length: 200000", *headers, method="POST"))
            if not headers:
                writer.write(b"x" * 150_000)
            await server.entered.wait()
            (connection,) = server.http._state.connections
            await until(lambda: headers or connection.flow.read_paused, "the server does not read")
            for number in range(3):
                await until(lambda: len(times) == number + 1, "the rate is measured")  # noqa: B023  awaited at once
                times[-1].end()
            server.go_on.set()
            if headers:
                assert b" 100 " in await reader.readuntil(b"\r\n\r\n")
                writer.write(b"x" * 150_000)
            writer.write(b"x" * 50_000)
            head, body = await answer(reader)
            assert (head.split(b" ")[1], len(json.loads(body)["body"])) == (b"200", 200_000)

    uvloop.run(scenario())


def test_a_response_that_is_read_too_slowly_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads single bytes does not keep its response alive."""
    monkeypatch.setattr(protocol, "WRITE_S", 0.3)

    async def scenario() -> None:
        async with serving() as (server, _, _):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(client, ("127.0.0.1", server.http.port))
                await loop.sock_sendall(client, ask("/large"))
                disconnect = asyncio.create_task(server.gone.wait())
                while not disconnect.done():
                    with contextlib.suppress(ConnectionResetError):
                        await loop.sock_recv(client, 1)
                    await asyncio.wait([disconnect], timeout=0.05)

    uvloop.run(scenario())


# answered before the body ended


@pytest.mark.parametrize("rest", [b"z" * 1_000_000, b"z" * 999_999], ids=["all of the body", "less"])
def test_an_answer_before_the_end_of_the_body_is_the_last_and_arrives(rest: bytes) -> None:
    """The client announces a body, is answered, and sends the body before it reads. It gets the answer and no reset."""

    async def scenario() -> None:
        async with serving() as (_, reader, writer):
            writer.write(ask("/early", "content-length: 1000000", method="POST"))
            await asyncio.sleep(0.05)  # the answer has been sent by now
            writer.write(rest + ask("/read"))
            await writer.drain()
            head, body = await answer(reader)
            assert (head.split(b" ")[1], body) == (b"401", b"early")
            assert b"connection: close" in head
            assert await reader.read() == b""

    uvloop.run(scenario())


def test_an_answered_connection_on_which_a_body_never_ends_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.3)

    async def scenario() -> None:
        async with serving() as (_, reader, writer):
            writer.write(ask("/early", method="POST")[:-2] + CHUNKED)
            assert (await answer(reader))[1] == b"early"
            assert await reader.read() == b"", "it sends no more"
            with contextlib.suppress(ConnectionError):
                while True:  # until the connection is reset
                    writer.write(b"4\r\nabcd\r\n" * 1000)
                    await writer.drain()

    uvloop.run(scenario())


def test_requests_ahead_of_their_answers_have_a_limit() -> None:
    async def scenario() -> None:
        async with serving() as (server, reader, writer):
            writer.write(ask("/slow"))
            await server.entered.wait()
            writer.write(ask("/read") * (MAX_PIPELINED + 100))
            (connection,) = server.http._state.connections
            await until(lambda: not connection.cycle.keep_alive, "the request that is one too many has been read")
            server.go_on.set()
            answered = (await reader.read()).count(b"HTTP/1.1 200 ")
            assert answered == MAX_PIPELINED + 1

    uvloop.run(scenario())


# clients that leave


@pytest.mark.parametrize("leave", ["close", "write_eof"])
def test_a_client_that_closes_its_sending_side_is_gone_at_once(leave: str) -> None:
    """A closed connection and a half-closed one look the same."""

    async def scenario() -> None:
        async with serving() as (server, reader, writer):
            writer.write(ask("/slow"))
            await server.entered.wait()
            getattr(writer, leave)()
            await server.gone.wait()
            assert await reader.read() == b""

    uvloop.run(scenario())


@pytest.mark.parametrize("is_reset", [False, True], ids=["close", "reset"])
def test_the_request_that_runs_learns_that_its_client_is_gone_if_another_is_pipelined(is_reset: bool) -> None:
    async def scenario() -> None:
        async with serving() as (server, _, writer):
            writer.write(ask("/slow") + ask("/read"))
            await server.entered.wait()
            if is_reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.close()
            await server.gone.wait()

    uvloop.run(scenario())


OFFER = ask(
    "/ws",
    "connection: Upgrade",
    "upgrade: websocket",
    "sec-websocket-version: 13",
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
)


def test_a_websocket_begins_only_when_earlier_requests_are_answered() -> None:
    async def scenario() -> None:
        go_on, kinds = asyncio.Event(), list[str]()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            kinds.append(scope["type"])
            await go_on.wait()
            await reply(send, 200, scope["path"].encode())

        http = HttpServer(app, "127.0.0.1", 0, setting="--port", websockets=WebSocketProtocol)
        await http.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
        try:
            async with asyncio.timeout(END_S):
                writer.write(ask("/first") + OFFER)
                await until(lambda: kinds, "the first request runs")
                go_on.set()
                assert [(await answer(reader))[1] for _ in range(2)] == [b"/first", b"/ws"]
            assert kinds == ["http", "http"]
        finally:
            writer.close()
            await http.stop()

    uvloop.run(scenario())
