"""Replies to a process of the cluster from a server that sends a byte now and then: each ends at its limit of time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sie_contracts.settings import Settings
from sie_gateway.fleet import workers
from sie_runtime import feed
from sie_sidecar import pool_membership

LIMIT_S = 0.3
PAUSE_S = 0.05  # seconds between two bytes, much less than the limit of a read


@contextlib.asynccontextmanager
async def dripping(*complete: bytes) -> AsyncIterator[str]:
    """Yield the URL of a server. It sends each `complete` body once, and then replies whose headers never end."""
    bodies = list(complete)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            if bodies:
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + bodies.pop(0))
                await writer.drain()
                return
            writer.write(b"HTTP/1.1 200 OK\r\nx: ")
            while not reader.at_eof():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(PAUSE_S)

    replies: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(
        lambda *streams: replies.append(asyncio.create_task(drip(*streams))), "127.0.0.1", 0
    )
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*replies)  # they end when the client has closed its connection


async def test_a_request_for_the_pool_of_a_worker_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_membership, "ANSWER_WITHIN_S", LIMIT_S)
    async with dripping() as url, asyncio.timeout(10.0):
        membership = pool_membership.PoolMembership(url, None, "w", "p")
        assert await membership._request_pool(url) == "TimeoutError"
        await membership._client.aclose()


@pytest.mark.parametrize(("limit", "complete"), [("LIST_S", ()), ("WATCH_LATE_S", (b'{"items": []}',))])
async def test_a_list_and_a_watch_of_endpoints_end(
    limit: str, complete: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    errors: asyncio.Queue[BaseException] = asyncio.Queue()
    monkeypatch.setattr(workers, "WATCH_S", 0)
    monkeypatch.setattr(workers, limit, LIMIT_S)
    monkeypatch.setattr(workers.Trouble, "met", lambda _, error: errors.put_nowait(error))
    (tmp_path / "token").write_text("t")
    async with dripping(*complete) as url, asyncio.timeout(10.0):
        running = asyncio.create_task(workers.Endpoints(Settings(), api=url, account=tmp_path).run(lambda _: None))
        assert isinstance(await errors.get(), TimeoutError)
        running.cancel()
        await asyncio.wait([running])


async def test_a_read_of_the_catalogue_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "READ_S", LIMIT_S)
    async with dripping() as url, asyncio.timeout(10.0):
        source = feed.HttpConfigSource(url, None)
        with pytest.raises(feed.ConfigUnavailable, match=r"no reply \(TimeoutError\)"):
            await source.export()
        await source.close()
