"""Requests of the page that a gateway forwards to the config service."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_adapter import toy_entry
from inprocess import InProcess, free_port
from starlette.requests import Request

from sie_console import config_forward
from sie_contracts.errors import NotReady
from sie_contracts.settings import Settings

LIMIT_S = 0.3
PAUSE_S = 0.05  # seconds between two bytes, much less than the limit of a read


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry()) as cluster:
        yield cluster


async def test_a_forwarded_header_has_the_bytes_of_the_caller(cluster: InProcess) -> None:
    """A header may have bytes outside of ASCII, here in an ETag."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 412 Precondition Failed\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        token = "admin-token-of-a-test"
        gateway = await cluster.gateway(SIE_CONFIG_SERVICE_URL=f"http://127.0.0.1:{port}", SIE_ADMIN_TOKEN=token)
        headers = {"if-match": '"é"'.encode(), "authorization": f"Bearer {token}".encode()}
        reply = await gateway.client.delete("/console/configs/toy/one", headers=headers)
    assert reply.status_code == 412
    assert '\r\nif-match: "é"\r\n'.encode() in heads[0].replace(b"If-Match", b"if-match")


@pytest.mark.parametrize("target", [f"toy/one/history?a={'(' * 25_000}", f"{'(' * 25_000}/history"])
async def test_a_path_or_query_that_is_too_long_to_forward_is_refused(cluster: InProcess, target: str) -> None:
    """The gateway accepts its length, but each character is three when it is escaped."""
    gateway = await cluster.gateway(SIE_CONFIG_SERVICE_URL=f"http://127.0.0.1:{free_port()}")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(f"GET /console/configs/{target} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    error = json.loads(body)["error"]
    assert (head.split()[1], error["code"], error["reason"]) == (b"400", "INVALID_INPUT", "malformed")
    assert "cannot be forwarded" in error["message"]


async def test_a_forwarded_request_ends_though_its_reply_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_forward, "LIMIT_S", LIMIT_S)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nx: ")
            while not reader.at_eof():
                writer.write(b"x")
                await asyncio.sleep(PAUSE_S)

    async def no_body() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "headers": [], "query_string": b"", "path": "/", "path_params": {}}
    async with await asyncio.start_server(drip, "127.0.0.1", 0) as server, asyncio.timeout(10.0):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        gateway: Any = SimpleNamespace(settings=Settings(config_service_url=url))
        with pytest.raises(NotReady, match="the config service does not answer"):
            await config_forward.forward(gateway, Request(scope, receive=no_body))
