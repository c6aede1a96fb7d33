"""A gateway and `sie mcp` in the event loop of a test. The test is the worker, and the client is that of the package
`mcp`.

    Client ──HTTP──► sie mcp ──► gateway ──► MemoryServer ──► Worker, which answers each message
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np
from fake_adapter import WIDTH, ids_of, toy_entry, vector_of
from inprocess import GatewayProcess, InProcess, until, until_told
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from sie_cli.serve.ports import free_port
from sie_contracts.settings import Secret
from sie_contracts.wire import messages
from sie_contracts.wire.messages import ArraySlice, Ok, WorkItem, WorkResult
from sie_mcp_server.callers import KeyNames
from sie_mcp_server.config import McpConfig
from sie_mcp_server.http import caller_of, serve
from sie_mcp_server.results import ResultStore
from sie_mcp_server.server import AgentServer
from sie_mcp_server.tools import AgentTools
from sie_runtime.process import Stop

DENSE, RANK, FIND, PARSE, HELD = "toy/one", "toy/rank", "toy/find", "toy/parse", "toy/held"
MARKDOWN = "\n".join(f"## Section {number}\n\nA line of the document." for number in range(600))


def served() -> list[Any]:
    """Return the models of the gateway. `Worker` does not answer work of HELD, which a test answers itself."""
    return [
        toy_entry(DENSE),
        toy_entry(RANK, outputs={"score": 0}, family="cross-encoder"),
        toy_entry(FIND, outputs={"entities": 0}, family="gliner"),
        toy_entry(PARSE, outputs={"data": 0}, family="docling", inputs=["document"]),
        toy_entry(HELD, outputs={"score": 0}, family="cross-encoder"),
    ]


def answered(item: WorkItem) -> tuple[list[Ok], bytes]:
    """Return the outcomes of a work item, and their arrays."""
    if item.model == DENSE:
        vectors = [vector_of(ids_of(entry.text or "")) for entry in item.inputs]
        slices = [ArraySlice("<f4", (WIDTH,), 4 * WIDTH * number) for number in range(len(vectors))]
        return [Ok({"dense": entry}, 3) for entry in slices], np.concatenate(vectors).astype("<f4").tobytes()
    if item.model in (RANK, HELD):
        return [Ok({}, 3, score=float(len(entry.text or ""))) for entry in item.inputs], b""
    if item.model == FIND:
        outcomes = []
        for entry in item.inputs:
            text = entry.text or ""
            starts = [place for place in range(len(text)) if text.startswith("Ada", place)]
            entities = [{"text": "Ada", "label": "person", "score": 0.9, "start": at, "end": at + 3} for at in starts]
            outcomes.append(Ok({}, 3, data={"entities": entities}))
        return outcomes, b""
    (entry,) = item.inputs
    assert entry.document is not None
    data = {"markdown": MARKDOWN, "text": MARKDOWN, "document": {}, "format": "pdf", "pages": 7, "is_complete": True}
    return [Ok({}, 3, data={"data": data})], b""


@dataclass
class Worker:
    """A worker that answers the messages of the gateway."""

    cluster: InProcess
    items: list[WorkItem] = field(default_factory=list)

    async def answer(self, item: WorkItem) -> None:
        outcomes, block = answered(item)
        result = WorkResult(item.request, item.chunk, "w0", tuple(outcomes), block, revision="local", fingerprint="f")
        await self.cluster.send(item.reply, messages.encode(result))

    async def run(self) -> None:
        done: dict[str, int] = {}
        while True:
            for name, stream in list(self.cluster.server.streams.items()):
                if not name.startswith("WORK_"):
                    continue
                for sequence in sorted(number for number in stream.messages if number > done.get(name, 0)):
                    done[name] = sequence
                    item = messages.decode_work(stream.messages[sequence].data)
                    self.items.append(item)
                    if item.model != HELD:
                        await self.answer(item)
            await asyncio.sleep(0.005)


@dataclass
class Door:
    """A running `sie mcp --http`."""

    url: str
    gateway: GatewayProcess
    worker: Worker
    stop: Stop

    @contextlib.asynccontextmanager
    async def client(self, key: str = "", mode: str = "auto") -> AsyncIterator[Client]:
        """Open a client with this API key. `mode` legacy is for the protocol revisions with sessions."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=30, trust_env=False) as http,
            Client(streamable_http_client(self.url, http_client=http), mode=mode) as client,
        ):
            yield client


@contextlib.asynccontextmanager
async def door(
    cluster: InProcess,
    gateway: GatewayProcess,
    config: McpConfig | None = None,
    stores: dict[str, str] | None = None,
    *,
    timeout_s: float = 30.0,
) -> AsyncIterator[Door]:
    """Run `sie mcp --http` and a worker."""
    stop, port, worker = Stop(), free_port(), Worker(cluster)
    secrets = {name: Secret(url) for name, url in (stores or {}).items()}
    tools = AgentTools(gateway.url, config or McpConfig(), secrets, ResultStore(), timeout_s=timeout_s)
    keys = KeyNames(gateway.url)
    working = asyncio.create_task(worker.run())
    serving = asyncio.create_task(
        serve(
            AgentServer(tools, caller_of),
            keys,
            stop,
            host="127.0.0.1",
            port=port,
            allowed_hosts=None,
            lame_duck_s=0.0,
            drain_s=timeout_s,
        )
    )
    url = f"http://127.0.0.1:{port}"

    async def is_ready() -> bool:
        assert not serving.done(), serving.exception()
        async with httpx2.AsyncClient(trust_env=False) as client:
            with contextlib.suppress(httpx2.TransportError):
                return (await client.get(f"{url}/readyz")).status_code == 200
        return False

    try:
        await until_told(is_ready, "sie mcp is ready")
        yield Door(f"{url}/mcp", gateway, worker, stop)
    finally:
        stop.request()
        assert await asyncio.wait_for(serving, 20) == 0
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await keys.close()
        await tools.close()


async def started(worker: Worker, model: str) -> None:
    """Wait until the worker has a work item of this model."""
    await until(lambda: any(item.model == model for item in worker.items), f"work of {model}")
