"""Images in requests, and a worker that answers requests with images."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from fake_adapter import WIDTH, toy_entry
from inprocess import GatewayProcess, InProcess
from PIL import Image

from sie_contracts.wire import messages
from sie_contracts.wire.messages import ArraySlice, Input, Ok, WorkItem, WorkResult

STREAM = "WORK__default"
SEEN = "toy/seen"


def file(form: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (5, 3), **options: Any) -> bytes:
    written = io.BytesIO()
    Image.new(mode, size, 1).save(written, format=form, **options)
    return written.getvalue()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{b64(data)}"


A, B = file("PNG"), file("JPEG", size=(8, 2))
PARTS = [
    {"type": "text", "text": "one"},
    {"type": "image_url", "image_url": {"url": uri(A)}},
    {"type": "text", "text": "two"},
    {"type": "image_url", "image_url": b64(B)},
]
OF_PARTS = Input("one\ntwo", images=(A, B))


class Worker:
    """A worker that answers the messages of the stream and records them. A vector depends on the bytes of its input."""

    def __init__(self, cluster: InProcess, store: Path) -> None:
        self._cluster = cluster
        self._store = store
        self._done = 0
        self.items: list[WorkItem] = []

    @property
    def inputs(self) -> list[Input]:
        """Return the inputs of all chunks, in the order of their requests."""
        return [model_input for item in sorted(self.items, key=lambda item: item.first) for model_input in item.inputs]

    async def run(self) -> None:
        while True:
            stream = self._cluster.server.streams.get(STREAM)
            for sequence, message in sorted(stream.messages.items()) if stream else ():
                if sequence > self._done:
                    self._done = sequence
                    await self._answer(messages.decode_work(message.data))
            await asyncio.sleep(0.002)

    async def _answer(self, item: WorkItem) -> None:
        if item.payload:
            payload = messages.decode_payload((self._store / item.payload).read_bytes())
            item = msgspec.structs.replace(item, inputs=payload.inputs, query=payload.query)
        self.items.append(item)
        outcomes = tuple(
            Ok({"dense": ArraySlice("<f4", (WIDTH,), 4 * WIDTH * number)}, 3, score=float(number))
            for number, _ in enumerate(item.inputs)
        )
        block = b"".join(vector_of(model_input).tobytes() for model_input in item.inputs)
        result = WorkResult(item.request, item.chunk, "w0", outcomes, block, revision="local", fingerprint="f")
        await self._cluster.send(item.reply, messages.encode(result))


def vector_of(model_input: Input) -> np.ndarray:
    digest = hashlib.sha256(
        (model_input.text or "").encode() + b"|".join(model_input.images) + model_input.audio
    ).digest()
    return np.frombuffer(digest, np.uint8)[:WIDTH].astype(np.float32) + 1


@asynccontextmanager
async def running(folder: Path, **options: Any) -> AsyncIterator[tuple[GatewayProcess, Worker]]:
    both = {"inputs": ["text", "image"]}
    entries = (
        toy_entry(SEEN, inputs=["text", "image", "audio"]),
        toy_entry("toy/dual", family="sample-towers", **both),
        toy_entry("toy/one"),
        toy_entry("toy/shown", outputs={"score": 0}, **both),
        *(toy_entry(f"toy/eye-{number}", **both) for number in range(3)),
    )
    async with InProcess(folder, *entries) as cluster:
        store = folder / "payloads"
        gateway = await cluster.gateway(SIE_PAYLOAD_STORE_URL=str(store), **options)
        worker = Worker(cluster, store)
        task = asyncio.create_task(worker.run())
        try:
            yield gateway, worker
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def post(gateway: GatewayProcess, path: str, body: Any, *, msgpack: bool = False) -> httpx.Response:
    if not msgpack:
        return await gateway.client.post(path, json=body)
    headers = {"content-type": "application/msgpack", "accept": "application/json"}
    return await gateway.client.post(path, content=msgspec.msgpack.encode(body), headers=headers)
