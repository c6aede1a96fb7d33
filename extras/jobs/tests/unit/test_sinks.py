"""URLs that name a vector database, and the errors for those that do not."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Awaitable, Callable

import pytest

from sie_bulk_jobs.datasets.templates import Template
from sie_bulk_jobs.sinks.live import LiveSource
from sie_bulk_jobs.sinks.opening import opened, opened_live
from sie_bulk_jobs.sinks.pgvector import PgvectorSink
from sie_bulk_jobs.sinks.qdrant import AnswerTooLarge, QdrantSink
from sie_bulk_jobs.sinks.sink import CollectionMismatch, SinkUnsuitable
from sie_contracts.settings import SettingError
from sie_store.object_stores import RetryPolicy, StoreError

SECRET = "s3cr3t"
SOURCE = LiveSource("docs", Template.parsed("{body}", "--text"), {"old": "a", "new": "b"})


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("qdrant://localhost", QdrantSink),
        (f"qdrant://{SECRET}@qdrant.default.svc:6333/", QdrantSink),
        (f"qdrants://{SECRET}%2F@[::1]:443", QdrantSink),
        (f"postgresql://me:{SECRET}@db:5432/vectors?sslmode=verify-full", PgvectorSink),
        ("postgresql://db/vectors", PgvectorSink),
    ],
)
async def test_a_url_names_a_database(url: str, kind: type[object]) -> None:
    sink = opened(url, "SIE_JOBS_SINKS")
    assert isinstance(sink, kind)
    await sink.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        SECRET,
        f"http://{SECRET}@localhost:6333",
        f"qdrant://{SECRET}@",
        f"qdrant://{SECRET}:x@localhost",
        f"qdrant://{SECRET}@localhost/path",
        f"qdrant://{SECRET}@localhost?x=y",
        f"qdrant://{SECRET}@localhost:port",
        f"qdrant://{SECRET}@[localhost",
        f"qdrant://{SECRET}#x@localhost",
        f"qdrant://{SECRET}@a..b",
        f"postgresql://me:{SECRET}@{'a' * 64}/vectors",
        f"qdrant://{SECRET}@ho\x01st",
        f"qdrant://{SECRET}k\u00fcy@localhost",
        f"qdrant://{SECRET}%0A@localhost",
        f"postgresql://me:{SECRET}@db",
        f"postgresql:///{SECRET}",
        f"mysql://me:{SECRET}@db/vectors",
    ],
)
def test_what_names_none_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(SettingError, match=r"^SIE_JOBS_SINKS: ") as refused:
        opened(url, "SIE_JOBS_SINKS")
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None
    with pytest.raises(SettingError, match=r"^SIE_JOBS_SINKS: ") as refused:
        opened_live(url, "SIE_JOBS_SINKS", SOURCE)
    assert SECRET not in str(refused.value)


async def prepared(url: str, patience: RetryPolicy) -> None:
    sink = opened(url, "SIE_JOBS_SINKS", patience)
    try:
        await sink.prepare("rows", {"dense": 2}, {})
    finally:
        await sink.close()


async def opened_alive(url: str, patience: RetryPolicy) -> None:
    live = opened_live(url, "SIE_JOBS_SINKS", SOURCE, patience)
    try:
        await live.open()
    finally:
        await live.close()


async def refused(
    answer: bytes, again: bytes, url: str, use: Callable[[str, RetryPolicy], Awaitable[None]] = prepared
) -> tuple[StoreError, int]:
    """Return the error of a sink whose server sends `answer`, and then `again` until the connection closes. Return
    the number of bytes of `again`, too.
    """
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.read(1)
        writer.write(answer)
        while again and not writer.is_closing():
            writer.write(again)
            sent += len(again)
            try:
                await writer.drain()
            except ConnectionError:
                break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StoreError) as raised:
            await use(url.format(port), RetryPolicy(stall_s=20.0, tries=2, pause_s=0.01))
    return raised.value, sent


def collection(vectors: object) -> bytes:
    return json.dumps({"result": {"config": {"params": {"vectors": vectors}}}}).encode()


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        *((body, SinkUnsuitable) for body in (b"<html>", b"", b"null", b"[]", b'{"result":"\xff"}', b"{}")),
        (b'{"result":' + b"[" * 100_000 + b"]" * 100_000 + b"}", SinkUnsuitable),
        (collection({"size": [2], "distance": "Cosine"}), SinkUnsuitable),
        (collection({"size": 2, "distance": {"a": 1}}), SinkUnsuitable),
        (collection({"size": 2, "distance": "SPAM\n" * 100_000}), SinkUnsuitable),
        (collection({"size": 3, "distance": "Dot"}), CollectionMismatch),
        (collection({"named": {"size": 2, "distance": "Dot"}}), CollectionMismatch),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_answers_that_are_not_qdrant_s_are_named_in_our_words(body: bytes, kind: type[StoreError]) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    error, _ = await refused(head + body, b"", f"qdrant://{SECRET}@127.0.0.1:{{}}")
    assert type(error) is kind
    assert len(str(error)) < 200
    assert SECRET not in str(error)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("1.15.3", r"Qdrant is 1\.15\.3, and a migration.* needs 1\.16 or later"),
        ("0.99.0-dev", r"Qdrant is 0\.99\.0-dev"),
        ("", "its reply has no version"),
        (f"v{SECRET}", "its reply has no version"),
    ],
)
async def test_a_qdrant_that_ignores_the_condition_of_a_write_is_not_migrated(version: str, message: str) -> None:
    body = json.dumps({"title": "qdrant - vector search engine", "version": version}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    error, _ = await refused(head + body, b"", "qdrant://127.0.0.1:{}", opened_alive)
    assert type(error) is SinkUnsuitable
    assert re.search(message, str(error))
    assert SECRET not in str(error)


@pytest.mark.parametrize("encoding", [b"", b"Content-Encoding: gzip\r\n"], ids=["plain", "compressed"])
async def test_an_answer_of_qdrant_has_a_bound(encoding: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + encoding + b"\r\n"
    error, sent = await refused(head, b"100000\r\n" + bytes(1 << 20) + b"\r\n", "qdrant://127.0.0.1:{}")
    assert type(error) is AnswerTooLarge
    assert sent < 64 << 20


def of_postgres(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", len(body) + 4) + body


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"N" + b"R" + struct.pack(">I", 0) + bytes(100),
        b"N" + b"R" + struct.pack(">I", 0xFFFF_FFFF) + bytes(100),
        b"N" + of_postgres(b"R", struct.pack(">I", 99)),
        b"N" + of_postgres(b"E", b"SFATAL\0C\n" + SECRET.encode() * 100 + b"\0M" + SECRET.encode() + b"\0\0"),
    ],
    ids=["http", "length 0", "length -1", "unknown authentication", "another state"],
)
async def test_a_server_that_is_not_postgresql_is_named_in_our_words(answer: bytes) -> None:
    error, _ = await refused(answer, b"", f"postgresql://me:{SECRET}@127.0.0.1:{{}}/vectors")
    assert len(str(error)) < 200
    assert SECRET not in str(error)
