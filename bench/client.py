"""A load generator that costs little: prebuilt requests over keep-alive connections, replies cut by their length and not parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import cast


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with one request in progress."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._done: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._buffer[:head_end]).lower()
        start = head.index(b"content-length:") + 15
        length = int(head[start : head.find(b"\r\n", start) if b"\r\n" in head[start:] else len(head)])
        if len(self._buffer) >= head_end + 4 + length and self._done is not None:
            body = bytes(self._buffer[head_end + 4 : head_end + 4 + length])
            self._buffer.clear()
            self._done.set_result((int(head[9:12]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the server closed the connection"))

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Status and body."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(host: str, port: int) -> Connection:
    _, protocol = await asyncio.get_running_loop().create_connection(Connection, host, port)
    return protocol


def request(path: str, body: bytes, content_type: str = "application/msgpack") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: bench", f"content-type: {content_type}", f"accept: {content_type}"]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


async def closed_loop(host: str, port: int, requests: Sequence[bytes], *, clients: int, seconds: float) -> tuple[int, float, list[float]]:
    """Each client sends its next request when the last was answered. Returns (answered, seconds taken, latencies); raises on any error."""
    latencies: list[float] = []
    end_s = time.perf_counter() + seconds
    turn = 0

    async def client() -> None:
        nonlocal turn
        connection = await connect(host, port)
        while time.perf_counter() < end_s:
            turn += 1
            started_s = time.perf_counter()
            status, body = await connection.send(requests[turn % len(requests)])
            latencies.append(time.perf_counter() - started_s)
            if status != 200:
                raise RuntimeError(f"status {status}: {body[:200]!r}")
        connection.close()

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return len(latencies), time.perf_counter() - started_s, latencies
