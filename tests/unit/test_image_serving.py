"""Images through a gateway and a sidecar with an image worker: concurrency, costs and warnings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_adapter import IMAGES, toy_entry
from image_files import encoded, picture, several
from inprocess import GatewayProcess, InProcess, SidecarProcess, until

from sie_contracts.models.costs import IMAGE_TOKENS
from sie_contracts.wire.heartbeats import ModelStatus

MODEL = "toy/seen"
GOOD = encoded(picture())


@asynccontextmanager
async def running(folder: Path, **environ: str) -> AsyncIterator[tuple[InProcess, GatewayProcess, SidecarProcess]]:
    async with InProcess(folder, toy_entry(MODEL, inputs=["text", "image"])) as cluster:
        gateway = await cluster.gateway(**environ)
        yield cluster, gateway, await cluster.sidecar(SIE_IMAGE_WORKERS="1", **environ)


async def encode(gateway: GatewayProcess, *inputs: bytes | str, **headers: str) -> dict[str, Any]:
    items = [
        content if isinstance(content, str) else {"images": [base64.b64encode(content).decode()]} for content in inputs
    ]
    answer = await gateway.client.post(f"/v1/encode/{MODEL}", json={"items": items}, headers=headers)
    assert answer.status_code == 200, answer.text
    reply: dict[str, Any] = answer.json()
    return reply


def priced(cluster: InProcess) -> ModelStatus | None:
    """Return the status of a model whose worker reports the cost of an image."""
    beat = cluster.last_beat("")
    return next((model for model in beat.models if model.image_tokens), None) if beat is not None else None


async def test_images_are_decoded_while_the_device_runs_a_batch(tmp_path: Path) -> None:
    """The next image becomes pixels before the running batch has ended."""
    async with running(tmp_path) as (cluster, gateway, sidecar):
        (adapter,) = cluster.adapters
        adapter.hold_batches = True
        first = asyncio.create_task(encode(gateway, GOOD))
        await adapter.until(lambda it: it.running == 1, "the first batch runs")
        second = asyncio.create_task(encode(gateway, encoded(picture(80, 50, 1))))
        async with asyncio.timeout(30):
            while await sidecar.metric("sie_images_total", result="prepared") < 2:
                pass  # the scrape yields to the event loop
        assert not first.done()
        assert len(adapter.batches) <= adapter.lanes + 1
        adapter.let_go()
        for done in await asyncio.gather(first, second):
            assert "dense" in done["items"][0]


async def test_an_image_counts_as_what_a_worker_says_that_it_costs(tmp_path: Path) -> None:
    """Requests are split by the estimate until a worker has loaded the model, and then by the cost that it reports."""
    async with running(tmp_path, SIE_CHUNK_COST="60") as (cluster, gateway, _):
        before = await encode(gateway, *(GOOD for _ in range(12)), **{"x-sie-explain": "1"})
        assert len(before["explain"]) == 12, f"{IMAGE_TOKENS} tokens each"
        status = await until(lambda: priced(cluster), "a heartbeat that says what an image costs")
        assert (status.model, status.image_tokens, status.image_vectors) == (MODEL, IMAGES.tokens, 0)
        after = await encode(gateway, *(GOOD for _ in range(12)), **{"x-sie-explain": "1"})
        assert len(after["explain"]) == 3, "11 tokens each, with those that any row has"
        assert after["usage"]["images"] == 12
        assert "images" not in (await encode(gateway, "a text"))["usage"]


async def test_a_batch_of_images_of_one_size_is_bounded_by_their_number(tmp_path: Path) -> None:
    """Eight images with more tokens than the bound of a batch run together, and `explain` counts their tokens."""
    async with running(tmp_path, SIE_MAX_BATCH_COST="60") as (cluster, gateway, sidecar):
        (adapter,) = cluster.adapters
        await encode(gateway, GOOD)
        await until(lambda: priced(cluster), "a heartbeat that says what an image costs")
        answer = await encode(gateway, *[GOOD] * 8, **{"x-sie-explain": "1"})
        assert len(adapter.batches) == 2
        assert answer["explain"][0]["batch"]["tokens"] == 8 * IMAGES.tokens
        assert await sidecar.metric("sie_batch_fill_ratio_sum") == pytest.approx((1 + 8) / 60)


async def test_equal_images_have_equal_keys_at_the_device_if_one_credential_sent_them(tmp_path: Path) -> None:
    """The outputs of a page are reused only for later requests with the same credential."""
    different_image = encoded(picture(80, 50, 1))
    async with running(tmp_path, SIE_AUTH_MODE="static", SIE_AUTH_TOKENS="key-a,key-b") as (cluster, gateway, _):
        keys = []
        for token, images in (("key-a", (GOOD, GOOD, different_image)), ("key-a", (GOOD,)), ("key-b", (GOOD,))):
            await encode(gateway, *images, authorization=f"Bearer {token}")
            sent = cluster.adapters[0].batches[-1].image_keys
            keys.append([sent[place : place + 16] for place in range(0, len(sent), 16)])
        (first, again, different_key), (later,), (foreign_key,) = keys
        assert first == again == later != different_key
        assert foreign_key not in (first, different_key)
        assert all(map(any, (first, different_key, foreign_key)))


async def test_a_file_of_several_images_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, gateway, _):
        animated = several("GIF", "red", "blue")
        reply = await encode(gateway, GOOD, animated, "a text", several("TIFF", "red", "blue"))
        assert reply["warnings"] == [
            "images: 2 of 4 inputs have a file of several images, of which only the first was read"
        ]
        assert "warnings" not in await encode(gateway, GOOD, "a text")
