"""Frames over a websocket, on a server with nothing else: their interval, slow readers, and the end of the server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import AsyncIterator

import pytest
from inprocess import closing_code, until
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.asyncio.client import connect

from sie_runtime.http.asgi import Receive, Scope, Send
from sie_runtime.http.server import HttpServer
from sie_runtime.http.websocket import INPUT_BYTES, ViewerFrames, WebSocketProtocol


@contextlib.asynccontextmanager
async def served(frames: ViewerFrames) -> AsyncIterator[int]:
    """Run a server that shows these frames to everybody. Yield its port."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await frames.show(scope, receive, send)

    server = HttpServer(app, "127.0.0.1", 0, setting="--port", websockets=WebSocketProtocol)
    await server.start()
    try:
        yield server.port
    finally:
        await asyncio.wait_for(server.stop(), 10)


async def test_the_first_frame_comes_at_once_and_the_others_at_the_interval() -> None:
    count = 0

    def make() -> str:
        nonlocal count
        count += 1
        return str(count)

    loop = asyncio.get_running_loop()
    interval_s = 0.3
    async with (
        served(ViewerFrames(make, interval_s)) as port,
        connect(f"ws://127.0.0.1:{port}/", proxy=None) as looking,
    ):
        at_s = []
        for _ in range(4):
            await looking.recv()
            at_s.append(loop.time())
        # a second client gets a frame that was made before, and what it sends is ignored
        async with connect(f"ws://127.0.0.1:{port}/", proxy=None) as second_peer:
            await second_peer.send("x" * 4000)
            assert int(await second_peer.recv()) <= count
    assert all(later - earlier >= 0.8 * interval_s for earlier, later in itertools.pairwise(at_s))
    assert count <= 6


async def deaf(port: int) -> socket.socket:
    """Return the socket of a client that sends a handshake and never reads."""
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.setblocking(False)
    head = (
        "GET / HTTP/1.1",
        "Host: localhost",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "",
        "",
    )
    loop = asyncio.get_running_loop()
    await loop.sock_connect(slow, ("127.0.0.1", port))
    await loop.sock_sendall(slow, "\r\n".join(head).encode())
    return slow


async def test_a_peer_that_does_not_read_is_sent_nothing_more_and_then_cut_off() -> None:
    """The bytes that wait for the peer stay below the buffers of one connection, whatever the number of frames."""
    count = 0
    text = "x" * (256 << 10)

    def make() -> str:
        nonlocal count
        count += 1
        return f"{count} {text}"

    frames = ViewerFrames(make, 0.001, patience_s=0.5)
    async with served(frames) as port:
        slow = await deaf(port)
        await until(lambda: frames.looking == 1, "the socket is accepted")
        await until(lambda: frames.looking == 0, "the slow peer is cut off")
        assert count < 200, "frames that nobody reads are not made"  # 50 MiB: above what any kernel buffers here
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(slow, 1 << 20), 10):
                pass
        slow.close()
        # other clients are not affected
        async with connect(f"ws://127.0.0.1:{port}/", proxy=None, max_size=None, close_timeout=0.1) as quick:
            assert str(await quick.recv()).endswith(text)


async def test_a_client_that_sends_without_end_delays_nobody_and_fills_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The frames are empty pings, messages that are not UTF-8, and parts of a message that never ends. The server
    handles few of them at a time.
    """
    frames = ViewerFrames(lambda: str(time.monotonic()), 0.05)
    loop = asyncio.get_running_loop()
    handled_bytes: dict[object, list[int]] = {}
    handle = WebSocketsSansIOProtocol.data_received

    def count_bytes(protocol: WebSocketsSansIOProtocol, data: bytes) -> None:
        if protocol.handshake_initiated:
            handled_bytes.setdefault(protocol, []).append(len(data))
        handle(protocol, data)

    monkeypatch.setattr(WebSocketsSansIOProtocol, "data_received", count_bytes)
    async with served(frames) as port:
        talkers = [await deaf(port) for _ in range(3)]
        await until(lambda: frames.looking == 3, "the sockets are accepted")
        key = b"\0\0\0\0"
        pings, texts = b"\x89\x80" + key, b"\x81\x81" + key + b"\xff"
        parts = b"\x00\x80" + key
        sending = [
            asyncio.create_task(loop.sock_sendall(talker, first + more * 500_000))
            for talker, first, more in zip(talkers, (b"", b"", b"\x01\x80" + key), (pings, texts, parts), strict=True)
        ]
        # others are served meanwhile
        async with connect(f"ws://127.0.0.1:{port}/", proxy=None) as looking:
            for _ in range(20):
                await looking.recv()
        assert frames.looking == 3, "the talkers are still connected"
        for task, talker in zip(sending, talkers, strict=True):
            task.cancel()
            talker.close()
    assert len(handled_bytes) >= 3
    assert max(itertools.chain(*handled_bytes.values())) <= INPUT_BYTES


async def test_a_server_that_ends_says_that_it_goes_away_and_waits_for_no_slow_reader() -> None:
    """A client that reads gets close code 1001. A client that does not read is cut off; else the server would wait 5 s
    for its connection to close.
    """
    count = 0

    def make() -> str:
        nonlocal count
        count += 1
        return f"{count:0{256 << 10}}"

    big, small = ViewerFrames(make, 0.001, patience_s=60), ViewerFrames(lambda: str(time.monotonic()), 0.05)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await (small if scope["path"] == "/small" else big).show(scope, receive, send)

    server = HttpServer(app, "127.0.0.1", 0, setting="--port", websockets=WebSocketProtocol)
    await server.start()
    slow = await deaf(server.port)
    before = -1
    while before != count or not count:  # until its buffers are full
        before = count
        await asyncio.sleep(0.1)
    quick = await connect(f"ws://127.0.0.1:{server.port}/small", proxy=None)
    await quick.recv()
    reader = asyncio.create_task(closing_code(quick))
    await asyncio.wait_for(server.stop(), 4)
    assert await asyncio.wait_for(reader, 10) == 1001
    assert not big.looking
    assert not small.looking
    slow.close()
