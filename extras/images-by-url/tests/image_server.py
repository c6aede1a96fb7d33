"""A web server with images on loopback, and a network on which host names have public addresses. The gateway checks
those addresses, and all connections lead to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpcore

from sie_images_by_url.fetcher import Network

PUBLIC = "93.184.216.34"  # a public address, to which no test connects


@dataclass
class ImageServer:
    """A server that sends the bytes of `answers` for a path and closes the connection. It never answers another path.
    `asked` has the heads of all requests.
    """

    answers: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    port: int = 0

    async def __aenter__(self) -> ImageServer:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, tls: ssl.SSLContext | None = None) -> ImageServer:
        self._open: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError, EOFError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.asked.append(head)
            answer = self.answers.get(head.split(" ")[1])
            if answer is None:
                await reader.read()  # until the other side leaves
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()
        self._open.discard(writer)


def answer(body: bytes = b"", status: int = 200, **headers: str) -> bytes:
    """Return an HTTP answer, with the length of the body unless the headers give another."""
    fields = {"content_length": str(len(body)), **headers}
    lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Connections(httpcore.AsyncNetworkBackend):
    """A network backend that connects every address to the server. `made` has the addresses. Those of `dead` refuse."""

    def __init__(self, server: ImageServer, dead: Iterable[str] = ()) -> None:
        self.made: list[tuple[str, int]] = []
        self._server = server
        self._dead = set(dead)
        self._real = httpcore.AnyIOBackend()

    async def connect_tcp(self, host: str, port: int, *_: Any, **options: Any) -> httpcore.AsyncNetworkStream:
        self.made.append((host, port))
        if host in self._dead:
            raise httpcore.ConnectError
        return await self._real.connect_tcp("127.0.0.1", self._server.port, **options)


def network(
    server: ImageServer,
    hosts: Mapping[str, Sequence[str]] | None = None,
    dead: Iterable[str] = (),
    tls: ssl.SSLContext | None = None,
) -> tuple[Network, Connections]:
    """Return a network on which `hosts` have these addresses and other hosts have PUBLIC, and its connections."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        addresses = (hosts or {}).get(host, (PUBLIC,))
        if not addresses:
            raise OSError("no such host")
        return addresses

    connections = Connections(server, dead)
    return Network(resolve, connections, lambda: tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)), connections
