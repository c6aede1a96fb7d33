"""`POST /v1/extract` as NeMo Guardrails sends it: the options for the model, the answers, the refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_adapter import toy_entry
from inprocess import GatewayProcess, InProcess, until

from sie_contracts.wire import messages
from sie_contracts.wire.messages import Ok, Outcome, RunOptions, WorkResult

STREAM = "WORK__default"
TEXT = "Ada Lovelace met 👩 José\u0301 in Paris."
# the body that the client sends with the defaults of its configuration
BODY = {"text": TEXT, "threshold": 0.5, "chunk_length": 384, "overlap": 128, "flat_ner": False}
LABELS = ["person", "city"]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as cluster:
        cluster.source.put(toy_entry("toy/find", outputs={"entities": 0}, family="gliner"))
        cluster.source.put(toy_entry("toy/kinds", outputs={"entities": 0}, family="token-classifier"))
        yield cluster


async def post(gateway: GatewayProcess, body: Any) -> httpx.Response:
    return await gateway.client.post("/v1/extract", content=json.dumps(body).encode())


async def answered(cluster: InProcess, outcome: Outcome) -> RunOptions:
    """Answer the first message of the stream with this outcome. Return the options of the message."""

    def work() -> Any:
        stream = cluster.server.streams.get(STREAM)
        return stream.messages[1].data if stream is not None and stream.last_sequence else None

    item = messages.decode_work(await until(work, "a message"))
    result = WorkResult(item.request, item.chunk, "w0", (outcome,), b"", revision="local", fingerprint="f")
    await cluster.send(item.reply, messages.encode(result))
    return item.options


def entity(start: int, end: int, label: str, score: float = 0.9) -> dict[str, Any]:
    return {"text": TEXT[start:end], "label": label, "score": score, "start": start, "end": end}


async def test_extract_answers_in_the_format_of_the_client(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_DEFAULT_MODELS="redact=toy/find")
    reply = asyncio.create_task(post(gateway, {**BODY, "labels": LABELS}))
    place = TEXT.index("José")
    listed = [
        entity(0, 12, "person"),
        entity(place, place + 4, "person", 0.7),
        entity(TEXT.index("Paris"), TEXT.index("Paris") + 5, "city"),
    ]
    options = await answered(cluster, Ok({}, 3, data={"entities": listed}))
    assert (options.labels, options.truncate) == (("person", "city"), "NONE")
    assert (options.parameters["threshold"], options.parameters["flat_ner"]) == (0.5, False)
    body = (await reply).json()
    values = [TEXT[row["start_position"] : row["end_position"]] for row in body["entities"]]
    assert [row["value"] for row in body["entities"]] == values == ["Ada Lovelace", "José\u0301", "Paris"]
    assert [row["suggested_label"] for row in body["entities"]] == ["person", "person", "city"]
    assert [row["score"] for row in body["entities"]] == [0.9, 0.7, 0.9]
    assert body["total_entities"] == 3
    assert body["tagged_text"] == "[Ada Lovelace](person) met 👩 [José\u0301](person) in [Paris](city)."


async def test_nested_entities_become_one_so_that_the_client_masks_the_right_characters(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    reply = asyncio.create_task(post(gateway, {**BODY, "model": "toy/find", "labels": LABELS}))
    await answered(cluster, Ok({}, 3, data={"entities": [entity(0, 12, "person"), entity(4, 15, "city", 0.4)]}))
    body = (await reply).json()
    assert [(row["value"], row["suggested_label"]) for row in body["entities"]] == [("Ada Lovelace me", "person")]
    assert body["tagged_text"] == f"[Ada Lovelace me](person){TEXT[15:]}"


async def test_a_model_without_nested_entities_is_not_asked_for_them(cluster: InProcess) -> None:
    """The client always sends `flat_ner`, even for a model that has no such option."""
    gateway = await cluster.gateway()
    reply = asyncio.create_task(post(gateway, {**BODY, "model": "toy/kinds"}))
    options = await answered(cluster, Ok({}, 3, data={"entities": []}))
    assert "flat_ner" not in options.parameters
    body = (await reply).json()
    assert (body["total_entities"], body["tagged_text"], body.get("warnings")) == (0, TEXT, None)


@pytest.mark.parametrize(
    ("outcome", "status", "reason"),
    [
        (Ok({}, 3, data={"entities": []}, truncated=True), 400, "input_too_long"),
        (Ok({}, 3, data={"entities": [{"text": "x", "label": "a", "score": 1.0}]}), 500, None),
        (Ok({}, 3, data={}), 500, None),
    ],
)
async def test_a_text_that_was_not_read_whole_is_never_answered_as_clean(
    cluster: InProcess, outcome: Outcome, status: int, reason: str | None
) -> None:
    gateway = await cluster.gateway()
    reply = asyncio.create_task(post(gateway, {**BODY, "model": "toy/find", "labels": LABELS}))
    await answered(cluster, outcome)
    answer = await reply
    assert (answer.status_code, answer.json()["error"].get("reason")) == (status, reason)
    assert "Ada" not in answer.text


@pytest.mark.parametrize(
    ("more", "reason", "param"),
    [
        ({}, "labels_required", "labels"),
        ({"labels": "person"}, "schema", "labels"),
        ({"labels": LABELS, "text": 3}, "schema", "text"),
        ({"labels": LABELS, "text": None}, "schema", "text"),
        ({"labels": LABELS, "threshold": 2}, "schema", "threshold"),
        ({"labels": LABELS, "flat_ner": "no"}, "schema", "flat_ner"),
        ({"labels": LABELS, "chunk_length": -1}, "schema", "chunk_length"),
        ({"labels": LABELS, "overlap": "x"}, "schema", "overlap"),
        ({"labels": LABELS, "model": "toy/one"}, "unsupported_task", "model"),
        ({"labels": LABELS, "model": None}, "model_required", "model"),
    ],
)
async def test_extract_refuses_a_wrong_field_by_its_name(
    cluster: InProcess, more: dict[str, Any], reason: str, param: str
) -> None:
    gateway = await cluster.gateway()
    answer = await post(gateway, {**BODY, "model": "toy/find", **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["reason"], error["param"]) == (400, reason, param), error
    assert "Ada" not in answer.text
