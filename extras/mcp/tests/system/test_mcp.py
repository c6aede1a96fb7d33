"""`sie mcp` as the process that an agent starts, by the client of the package `mcp`: real models over stdio and HTTP,
collections in PostgreSQL and in Qdrant's engine, and refusals over stdio.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import httpx2
import numpy as np
import pytest
import shared
import yaml
from cluster import SIE, Cluster, free_ports, until
from databases import with_extension
from inprocess import InProcess, inference_of
from inprocess import until as in_process_until
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_fixtures import DENSE, FIND, HELD, MARKDOWN, PARSE, RANK, Worker, served, started
from postgres_server import PostgresServer
from qdrant_server import QdrantServer
from zygote import end_with_parent

from sie_broker import Write
from sie_bulk_jobs.sinks.opening import opened
from sie_bulk_jobs.sinks.sink import SinkRows
from sie_client import SIEClient
from sie_runtime import keys as records

pytestmark = [shared.OPEN, pytest.mark.timeout(300)]

ENCODER = "test/mini"
TEXTS = ["Ada Lovelace wrote the first program.", "Bread is baked in an oven.", "Paris is in France."]
SETTINGS: dict[str, Any] = {
    "models": {"encode": ENCODER, "rerank": "test/cross", "extract": "test/gliner", "redact": "test/gliner"},
    "collections": {
        name: {
            "store": name,
            "collection": "texts",
            "model": ENCODER,
            "description": f"Sentences in {name}",
            "fields": ["body"],
            "keys": ["*"],
        }
        for name in ("postgres", "qdrant")
    },
}
TOY: dict[str, Any] = {"models": {"encode": DENSE, "rerank": RANK, "extract": FIND, "redact": FIND, "parse": PARSE}}


@pytest.fixture(scope="module")
def stores(open_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The value of SIE_JOBS_SINKS; both databases hold TEXTS."""
    postgres, qdrant = PostgresServer(), QdrantServer(tmp_path_factory.mktemp("qdrant"))
    try:
        postgres.begin()
        asyncio.run(with_extension(postgres))
        qdrant.start()
        with SIEClient(open_cluster.url) as client:
            for model in ("test/cross", "test/gliner"):
                client.wait_for_capacity(model)
            vectors = client.embed(ENCODER, TEXTS)
        payloads = [{"body": text, "private": "not for agents"} for text in TEXTS]
        ids = [f"row-{number}" for number in range(len(TEXTS))]
        urls = {"postgres": postgres.url(), "qdrant": qdrant.url}

        async def write() -> None:
            for url in urls.values():
                sink = opened(url, "SIE_JOBS_SINKS")
                await sink.prepare("texts", {"dense": vectors.shape[1]}, {})
                await sink.upsert(SinkRows(ids, vectors.astype(np.float32), payloads))
                await sink.close()

        asyncio.run(write())
        yield ",".join(f"{name}={url}" for name, url in urls.items())
    finally:
        qdrant.kill()
        postgres.remove()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mcp") / "mcp.yaml"
    path.write_text(yaml.safe_dump(SETTINGS))
    return path


@contextlib.asynccontextmanager
async def over_stdio(*arguments: str, **environ: str) -> AsyncIterator[Client]:
    parameters = StdioServerParameters(command=SIE, args=["mcp", *arguments], env=dict(environ))
    async with Client(stdio_client(parameters, sys.__stderr__), mode="auto") as client:
        yield client


@pytest.fixture(scope="module")
def address(open_cluster: Cluster, stores: str, settings: Path) -> Iterator[str]:
    """The address of a `sie mcp --http` in front of the open cluster."""
    (port,) = free_ports(1)
    argv = [SIE, "mcp", "--http", "--port", str(port), "--url", open_cluster.url, "--config", str(settings)]
    process = subprocess.Popen(
        [*argv, "--timeout-s", "5"],
        env={**os.environ, "SIE_JOBS_SINKS": stores},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=end_with_parent,
    )

    def is_ready() -> bool:
        assert process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False, timeout=60).status_code == 200
        return False

    try:
        until(is_ready, 60, "sie mcp is ready")
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


@contextlib.asynccontextmanager
async def connected(
    transport: str, address: str, cluster: Cluster, stores: str, settings: Path
) -> AsyncIterator[Client]:
    """Connect a client over stdio, or over HTTP in one of the two kinds of revisions of the protocol."""
    if transport == "stdio":
        options = ("--url", cluster.url, "--config", str(settings), "--timeout-s", "5")
        async with over_stdio(*options, SIE_JOBS_SINKS=stores) as client:
            yield client
        return
    async with (
        httpx2.AsyncClient(timeout=60, trust_env=False) as http,
        Client(streamable_http_client(address, http_client=http), mode=transport) as client,
    ):
        yield client


@pytest.mark.parametrize("transport", ["stdio", "legacy"])
async def test_every_tool_is_listed_and_called_over_both_transports(
    transport: str, address: str, open_cluster: Cluster, stores: str, settings: Path
) -> None:
    async with connected(transport, address, open_cluster, stores, settings) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}

        async def call(tool: str, **arguments: Any) -> dict[str, Any]:
            names.remove(tool)
            answer = await client.call_tool(tool, arguments)
            assert not answer.is_error, answer.content
            content: dict[str, Any] = answer.structured_content
            return content

        vectors = await call("encode", texts=TEXTS)
        assert (vectors["count"], vectors["dimensions"]) == (3, 384)
        similar = await call("similarity", query="Who made software?", reference=vectors["vectors"]["reference"])
        assert similar["results"][0]["index"] == 0
        assert len((await call("rerank", query="a", documents=TEXTS))["results"]) == 3
        assert "results" in await call("extract", texts=TEXTS, labels=["person"])
        redacted = await call("redact", texts=["Mail ada@example.org"], kinds=["email"])
        assert redacted["results"][0]["text"] == "Mail [EMAIL_1]"
        listed = await call("list_collections")
        assert [entry["name"] for entry in listed["collections"]] == ["postgres", "qdrant"]
        for name in ("postgres", "qdrant"):
            names.add("search")
            hits = await call("search", collection=name, query="Who wrote a program?", top_n=2)
            assert hits["results"][0]["id"] == "row-0"
            assert hits["results"][0]["fields"] == {"body": TEXTS[0]}
            assert hits["results"][0]["score"] > hits["results"][1]["score"]
        pages = (await call("list_models", task="encode"))["pages"]
        listings = [
            (await client.call_tool("list_models", {"task": "encode", "page": page})).structured_content
            for page in range(1, pages + 1)
        ]
        assert [model["id"] for listing in listings for model in listing["models"]].count(ENCODER) == 1
        page = await call("read_result", reference=vectors["vectors"]["reference"], page=2)
        assert len(json.loads(page["text"].splitlines()[0])) == 384
        # no worker of this cluster parses documents
        parsed = await client.call_tool("parse_document", {"data": "JVBERi0=", "model": "docling"})
        assert parsed.is_error
        assert parsed.content[0].text.startswith(
            ("The model is not ready yet: ", "The call took longer than a call may take")
        )
        names.remove("parse_document")
        assert not names


async def test_a_collection_that_is_not_configured_cannot_be_named(
    address: str, open_cluster: Cluster, stores: str, settings: Path
) -> None:
    async with connected("auto", address, open_cluster, stores, settings) as client:
        for name in ("texts", "postgres.texts", 'postgres"; DROP TABLE texts; --'):
            answer = await client.call_tool("search", {"collection": name, "query": "a"})
            assert answer.is_error
            assert answer.content[0].text.endswith("It may use: postgres, qdrant.")


@contextlib.asynccontextmanager
async def toy(tmp_path: Path, *scopes: str) -> AsyncIterator[tuple[InProcess, Any, Worker, str, str]]:
    """A gateway in this process with a worker that answers, a key with these scopes, and a file of settings."""
    path = tmp_path / "mcp.yaml"
    path.write_text(yaml.safe_dump(TOY))
    async with InProcess(tmp_path, *served()) as cluster:
        bucket = await records.bucket_of(cluster.server.connect("operator"), 1).open()
        key, token = records.create("agent", scopes, now_s=time.time())
        await bucket.write([Write(key.id, records.encode(key))])
        gateway, worker = await cluster.gateway(SIE_AUTH_MODE="token"), Worker(cluster)
        working = asyncio.create_task(worker.run())
        try:
            yield cluster, gateway, worker, token, str(path)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def test_over_stdio_a_document_is_read_by_path_and_in_pages(tmp_path: Path) -> None:
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.pdf").write_bytes(b"%PDF-1.7")
    (tmp_path / "secret.pdf").write_bytes(b"%PDF-1.7")
    with (folder / "large.pdf").open("wb") as large:
        large.truncate((64 << 20) + 1)
    async with toy(tmp_path, "infer", "read") as (_, gateway, _worker, token, path):
        options = ("--url", gateway.url, "--config", path, "--documents", str(folder))
        async with over_stdio(*options, SIE_API_KEY=token) as client:
            answer = await client.call_tool("parse_document", {"path": "a.pdf"})
            assert not answer.is_error, answer.content
            more = answer.structured_content["more"]
            pages = [
                (await client.call_tool("read_result", {"reference": more["reference"], "page": number}))
                for number in range(1, more["pages"] + 1)
            ]
            assert "".join(page.structured_content["text"] for page in pages) == MARKDOWN
            oversized = await client.call_tool("parse_document", {"path": "large.pdf"})
            assert "at most 67108864 are accepted: split the document." in oversized.content[0].text
            outside = await client.call_tool("parse_document", {"path": "../secret.pdf"})
            assert "There is no such file in the folder of documents" in outside.content[0].text


async def test_over_stdio_a_cancelled_call_is_cancelled_at_the_gateway(tmp_path: Path) -> None:
    async with toy(tmp_path, "infer", "read") as (_, gateway, worker, token, path):
        inference = inference_of(gateway)
        async with over_stdio("--url", gateway.url, "--config", path, SIE_API_KEY=token) as client:
            arguments = {"query": "q", "documents": ["d"], "model": HELD}
            call = asyncio.create_task(client.call_tool("rerank", arguments))
            await started(worker, HELD)
            call.cancel()
            await in_process_until(lambda: not inference.slots.used, "the gateway has given the request up")
            await asyncio.gather(call, return_exceptions=True)
            answer = await client.call_tool("rerank", {"query": "q", "documents": ["d"]})
            assert not answer.is_error


def test_the_process_ends_with_its_input_and_on_a_signal() -> None:
    for end in ("input", "signal"):
        process = subprocess.Popen(
            [SIE, "mcp", "--url", "http://127.0.0.1:1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=end_with_parent,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        hello = {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "initialize",
            "params": {
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "a", "version": "1"},
            },
        }
        process.stdin.write(json.dumps(hello) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["result"]["serverInfo"]["name"] == "sie"
        if end == "signal":
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output, "Traceback" in errors) == (0, "", False)
