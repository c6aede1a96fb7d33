"""Images in the API formats of other servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from image_items import OF_PARTS, PARTS, SEEN, A, B, Worker, b64, post, running, uri, vector_of
from inprocess import GatewayProcess

from sie_contracts.wire.messages import Input

pytestmark = pytest.mark.usefixtures("sample_families")
OTHERS: list[tuple[str, dict[str, Any], list[Input]]] = [
    ("/v2/embed", {"images": [uri(A), b64(B)], "input_type": "image"}, [Input(images=(A,)), Input(images=(B,))]),
    ("/v1/embed", {"images": [uri(A)]}, [Input(images=(A,))]),
    (
        "/v2/embed",
        {"inputs": [{"content": PARTS}, {"content": PARTS[:1]}], "input_type": "search_document"},
        [OF_PARTS, Input("one")],
    ),
    (
        "/rerank",
        {"query": "q", "documents": ["a", {"text": "b"}, {"image": b64(A)}, {"text": "c", "image": uri(B)}]},
        [Input("a"), Input("b"), Input(images=(A,)), Input("c", images=(B,))],
    ),
]
FAULTY: list[tuple[str, dict[str, Any], str]] = [
    ("/v2/embed", {"images": ["?"], "input_type": "image"}, "images[0]"),
    (
        "/v2/embed",
        {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "?"}}]}], "input_type": "image"},
        "inputs[0].content[0].image_url.url",
    ),
]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[GatewayProcess, Worker]]:
    async with running(tmp_path) as processes:
        yield processes


async def test_each_route_makes_the_one_native_form(place: tuple[GatewayProcess, Worker]) -> None:
    gateway, worker = place
    for path, body, expected in OTHERS:
        worker.items.clear()
        answer = await post(gateway, path, {"model": "toy/shown" if "rerank" in path else SEEN, **body})
        assert answer.status_code == 200, (path, answer.text)
        assert worker.inputs == expected, path
        for data in (A, B):
            assert b64(data)[:40] not in answer.text


async def test_a_route_without_slots_fails_and_names_the_field(place: tuple[GatewayProcess, Worker]) -> None:
    gateway, _ = place
    for path, body, param in FAULTY:
        answer = await post(gateway, path, {"model": SEEN, **body})
        error = answer.json()["error"]
        assert (answer.status_code, error["reason"], error["param"]) == (400, "invalid_media", param), (path, body)
        assert answer.json()["errors"][0]["message"] == error["message"]


async def test_cohere_is_told_of_its_images(place: tuple[GatewayProcess, Worker]) -> None:
    gateway, _ = place
    body = {"model": SEEN, "input_type": "image", "images": [uri(A), uri(B)]}
    reply = (await post(gateway, "/v2/embed", body)).json()
    assert reply["images"] == [
        {"width": 5, "height": 3, "format": "png", "bit_depth": 24},
        {"width": 8, "height": 2, "format": "jpeg", "bit_depth": 24},
    ]
    assert (reply["texts"], reply["meta"]["billed_units"]) == ([], {"images": 2})
    assert reply["embeddings"]["float"] == [vector_of(Input(images=(data,))).tolist() for data in (A, B)]
    unknown = (await post(gateway, "/v2/embed", {**body, "images": [uri(A), uri(b"?")]})).json()
    assert "images" not in unknown
    parts = {"model": SEEN, "input_type": "search_document", "inputs": [{"content": PARTS}]}
    mixed = (await post(gateway, "/v2/embed", parts)).json()
    assert (mixed["texts"], set(mixed["meta"]["billed_units"])) == (["one\ntwo"], {"images", "input_tokens"})
    assert len(mixed["images"]) == 2
