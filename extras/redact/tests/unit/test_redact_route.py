"""`POST /v1/redact/{model}`: its refusals, the options that the model gets, and the reply that its entities make."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from fake_adapter import toy_entry
from inprocess import GatewayProcess, InProcess, until
from redaction_texts import CARD, EMAIL, PHONE

from sie_client import InvalidInputError, SIEAsyncClient, restore
from sie_contracts.errors import InferenceFailed
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Failed, Ok, Outcome, RunOptions, WorkResult
from sie_gateway.admission.slots import KeyTurns
from sie_redact import redact

STREAM = "WORK__default"
LABELLED, FIXED = "toy/find", "toy/kinds"
SECRET = "secret-key-of-a-test"
PERSON = {"text": "Ada", "label": "person", "score": 0.97, "start": 0, "end": 3}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as cluster:
        strict = {"strict": {"run": {"parameters": {"threshold": 0.9}}}}
        cluster.source.put(toy_entry(LABELLED, outputs={"entities": 0}, family="gliner", profiles=strict))
        cluster.source.put(toy_entry(FIXED, outputs={"entities": 0}, family="token-classifier"))
        cluster.source.put(toy_entry("toy/classes", outputs={"classifications": 0}))
        cluster.source.put(toy_entry("toy/relations", outputs={"relations": 0}, family="glirel"))
        cluster.source.put(toy_entry("toy/reader", outputs={"entities": 0}, family="document-reader", inputs=["image"]))
        yield cluster


@pytest.fixture
async def gateway(cluster: InProcess) -> GatewayProcess:
    return await cluster.gateway()


async def post(gateway: GatewayProcess, model: str, body: Any, **headers: str) -> httpx.Response:
    return await gateway.client.post(f"/v1/redact/{model}", content=json.dumps(body).encode(), headers=headers)


async def message_of(cluster: InProcess, sequence: int) -> Any:
    """Return the stream of work once it has had this many messages."""

    def stream() -> Any:
        work = cluster.server.streams.get(STREAM)
        return work if work is not None and work.last_sequence >= sequence else None

    return await until(stream, "a message")


async def work_options(cluster: InProcess, *outcomes: Outcome, sequence: int = 1) -> RunOptions:
    """Answer a message of the stream with these outcomes. Return the options that it had."""
    stream = await message_of(cluster, sequence)
    item = messages.decode_work(stream.messages[sequence].data)
    result = WorkResult(item.request, item.chunk, "w0", outcomes, b"", revision="local", fingerprint="f")
    await cluster.send(item.reply, messages.encode(result))
    return item.options


def entities(*listed: dict[str, Any], truncated: bool = False) -> Ok:
    return Ok({}, 3, data={"entities": list(listed)}, truncated=truncated)


REFUSED: list[tuple[Any, str, str]] = [
    ({"items": ["a"]}, "labels_required", "kinds"),
    ({"items": ["a"], "kinds": []}, "empty_items", "kinds"),
    ({"items": ["a"], "kinds": "person"}, "schema", "kinds"),
    ({"items": ["a"], "kinds": ["person", " "]}, "schema", "kinds[1]"),
    ({"items": ["a"], "kinds": ["p" * 1001]}, "schema", "kinds[0]"),
    ({"items": ["a"], "kinds": ["a"] * 1001}, "too_many_items", "kinds"),
    ({"items": ["a"], "params": {"labels": ["person"]}}, "schema", "labels"),
    ({"items": ["a"], "labels": ["person"], "kinds": ["person"]}, "schema", "labels"),
    ({"items": ["a"], "kinds": ["person"], "options": {"labels": ["a"]}}, "schema", "labels"),
    ({"items": ["a"], "kinds": ["person"], "models": "toy/kinds"}, "schema", "models"),
    ({"items": ["a"], "kinds": ["person"], "models": []}, "empty_items", "models"),
    ({"items": ["a"], "kinds": ["person"], "models": ["toy/kinds", 3]}, "schema", "models[1]"),
    ({"items": ["a"], "kinds": ["person"], "models": ["a", "b", "c", "d"]}, "too_many_items", "models"),
    ({"items": ["a"], "kinds": ["person"], "models": ["toy/kinds", "toy/find"]}, "schema", "models[1]"),
    ({"items": ["a"], "kinds": ["person"], "models": ["toy/classes"]}, "unsupported_task", "models[0]"),
    ({"items": ["a"], "kinds": ["person"], "models": ["../x"]}, "schema", "models[0]"),
    ({"items": ["a"], "kinds": ["person"], "style": "blank"}, "schema", "style"),
    ({"items": ["a"], "kinds": ["person"], "style": 3}, "schema", "style"),
    ({"items": ["a"], "kinds": ["person"], "style": "hash", "key": "short"}, "schema", "key"),
    ({"items": ["a"], "kinds": ["person"], "style": "hash", "key": 3}, "schema", "key"),
    ({"items": ["a"], "kinds": ["person"], "style": "mask", "key": SECRET}, "schema", "key"),
    ({"items": ["a"], "kinds": ["person"], "region": "us"}, "schema", "region"),
    ({"items": ["a"], "kinds": ["person"], "region": "XX"}, "schema", "region"),
    ({"items": ["a"], "kinds": ["person"], "offsets": "bytes"}, "schema", "offsets"),
    ({"items": ["a"], "kinds": ["person"], "restorable": "no"}, "schema", "restorable"),
    ({"items": ["a"], "kinds": ["person"], "truncate": "END"}, "schema", "truncate"),
    ({"items": ["a"], "kinds": ["person"], "params": {"truncate": True}}, "schema", "truncate"),
    ({"items": ["a"], "kinds": ["person"], "params": []}, "schema", "params"),
    ({"items": ["a"], "kinds": ["person"], "threshold": 2}, "schema", "threshold"),
    ({"items": [], "kinds": ["person"]}, "empty_items", "items"),
    ({"items": ["a", {"text": None, "id": "x"}], "kinds": ["person"]}, "unsupported_modality", "items[1]"),
    ({"items": [{"text": "a", "images": ["aGk="]}], "kinds": ["person"]}, "unsupported_modality", "items[0]"),
    ({"items": ["a" * (redact.MAX_TEXT + 1)], "kinds": ["person"]}, "too_long", "items[0].text"),
    (["a"], "schema", "body"),
]


@pytest.mark.parametrize(("body", "reason", "param"), REFUSED)
async def test_redact_refuses_a_wrong_field_by_its_path(
    gateway: GatewayProcess, body: Any, reason: str, param: str
) -> None:
    answer = await post(gateway, LABELLED, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["reason"], error["param"]) == (400, reason, param), error
    assert SECRET not in answer.text


@pytest.mark.parametrize("model", ["toy/one", "toy/classes", "toy/relations", "toy/reader"])
async def test_redact_refuses_a_model_without_spans_by_its_name(gateway: GatewayProcess, model: str) -> None:
    answer = await post(gateway, model, {"items": ["a"], "kinds": ["person"]})
    error = answer.json()["error"]
    assert (answer.status_code, error["reason"], error["param"]) == (400, "unsupported_task", "model")
    assert error["message"].startswith(f"{model} gives no entities with their places in a text; use POST /v1/")


async def test_redacted_text_and_map_restore_the_text(cluster: InProcess, gateway: GatewayProcess) -> None:
    text = f"Ada, {PHONE}, 👩 {EMAIL}"
    body = {
        "items": [{"id": "x", "text": text, "metadata": {"page": 1}}],
        "params": {"kinds": ["person", "e-mail"], "style": "tag", "threshold": 0.4},
    }
    reply = asyncio.create_task(post(gateway, LABELLED, body))
    options = await work_options(cluster, entities(PERSON))
    assert (options.labels, options.truncate, options.parameters["threshold"]) == (("person", "e-mail"), "NONE", 0.4)
    (slot,) = (await reply).json()["items"]
    assert slot["text"] == f"[PERSON_1], {PHONE}, 👩 [E_MAIL_1]"
    assert (slot["id"], slot["metadata"]) == ("x", {"page": 1})
    assert restore(slot["text"], slot["map"]) == text
    at = text.index(EMAIL)
    assert slot["spans"] == [
        {"start": 0, "end": 3, "kind": "person", "score": 0.97, "source": "model"},
        {"start": at, "end": at + len(EMAIL), "kind": "e-mail", "score": None, "source": "pattern"},
    ]


async def test_model_with_its_own_kinds_redacts_all_of_them_with_a_warning(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    text = f"Ada {EMAIL} {CARD}"
    reply = asyncio.create_task(post(gateway, FIXED, {"items": [text], "kinds": ["email"]}))
    options = await work_options(cluster, entities(PERSON))
    answer = (await reply).json()
    assert options.labels == ()
    assert answer["items"][0]["text"] == f"***** ***** {CARD}"
    assert any(warning.startswith("kinds: selects only patterns;") for warning in answer["warnings"])
    reply = asyncio.create_task(post(gateway, FIXED, {"items": [text]}))
    await work_options(cluster, entities(PERSON), sequence=2)
    answer = (await reply).json()
    assert answer["items"][0]["text"] == "***** ***** *****"
    assert "warnings" not in answer


async def test_what_any_of_several_models_finds_is_replaced(
    cluster: InProcess, gateway: GatewayProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    text = f"Ada Lovelace, {EMAIL}"
    body = {"items": [text], "kinds": ["person", "email"], "models": [FIXED], "style": "tag", "threshold": 0.4}
    reply = asyncio.create_task(post(gateway, LABELLED, body))
    first = await work_options(cluster, entities(PERSON))
    name = {"text": "Lovelace", "label": "surname", "score": 0.6, "start": 4, "end": 12}
    second = await work_options(cluster, entities(name, {**name, "label": "name", "start": 0}), sequence=2)
    assert (first.labels, second.labels) == (("person", "email"), ())
    assert (first.parameters["threshold"], second.parameters["threshold"]) == (0.4, 0.4)
    answer = await reply
    reply_body = answer.json()
    (slot,) = reply_body["items"]
    assert slot["text"] == "[NAME_1], [EMAIL_1]"
    assert slot["usage"]["total_tokens"] == reply_body["usage"]["total_tokens"] == 6
    assert answer.headers["x-sie-units-input-tokens"] == "6"
    assert any(" tokens=6 " in record.getMessage() for record in caplog.records)
    assert reply_body["model"] == LABELLED
    assert reply_body["warnings"] == [
        f"kinds: selects only patterns; {FIXED} has kinds of its own, and all of them are redacted"
    ]
    assert restore(slot["text"], slot["map"]) == text


async def test_text_that_fails_with_one_of_several_models_has_no_text(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    """Otherwise a failure would mean less redaction, and the client would not know."""
    failed = Failed(InferenceFailed("not finite", reason="non_finite").info())
    body = {"items": ["Ada met", "Bob met"], "kinds": ["person"], "models": [FIXED]}
    reply = asyncio.create_task(post(gateway, LABELLED, body))
    await work_options(cluster, entities(PERSON), entities())
    await work_options(cluster, failed, entities(), sequence=2)
    answer = await reply
    first, second = answer.json()["items"]
    assert first["error"]["code"] == "INFERENCE_ERROR"
    assert not first.keys() & {"text", "spans", "map"}
    assert second["text"] == "Bob met"
    assert answer.headers["x-sie-failed-items"] == "1"
    for number, outcome in ((3, failed), (5, entities(truncated=True))):
        reply = asyncio.create_task(post(gateway, LABELLED, {**body, "items": ["Ada met"]}))
        await work_options(cluster, entities(PERSON), sequence=number)
        await work_options(cluster, outcome, sequence=number + 1)
        answer = await reply
        assert answer.status_code in (400, 500)
        assert "met" not in answer.text


async def test_further_model_that_is_unknown_is_refused_before_any_work(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    answer = await post(gateway, LABELLED, {"items": ["Ada"], "kinds": ["person"], "models": ["toy/none"]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "MODEL_NOT_FOUND")
    answer = await post(gateway, FIXED, {"items": ["Ada"], "models": [LABELLED]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "kinds"), "the further model needs labels"
    assert cluster.server.streams[STREAM].last_sequence == 0


@pytest.mark.parametrize(
    ("outcome", "status", "reason"),
    [
        (entities(PERSON, truncated=True), 400, "input_too_long"),
        (entities({**PERSON, "start": None, "end": None}), 500, None),
        (Ok({}, 3, data={"classifications": []}), 500, None),
        (Ok({}, 3), 500, None),
        (entities({**PERSON, "end": 99}), 500, None),
    ],
)
async def test_text_that_cannot_be_redacted_whole_is_not_answered(
    cluster: InProcess, gateway: GatewayProcess, outcome: Ok, status: int, reason: str | None
) -> None:
    reply = asyncio.create_task(post(gateway, LABELLED, {"items": ["Ada met Bob"], "kinds": ["person"]}))
    await work_options(cluster, outcome)
    answer = await reply
    assert (answer.status_code, answer.json()["error"].get("reason")) == (status, reason), answer.text
    assert "Ada" not in answer.text


async def test_hash_of_a_value_is_equal_under_one_key_only(cluster: InProcess, gateway: GatewayProcess) -> None:
    texts: list[set[str]] = []
    for number, key in enumerate(({"key": SECRET}, {"key": SECRET}, {"key": SECRET * 2}, {}, {}), 1):
        body = {"items": [PHONE, PHONE], "params": {"kinds": ["phone"], "style": "hash", **key}}
        reply = asyncio.create_task(post(gateway, LABELLED, body))
        await work_options(cluster, entities(), entities(), sequence=number)
        texts.append({slot["text"] for slot in (await reply).json()["items"]})
    assert [len(text) for text in texts] == [1] * 5
    assert texts[0] == texts[1]
    assert len({frozenset(text) for text in texts}) == 4


async def test_msgpack_and_json_have_the_same_slots(cluster: InProcess, gateway: GatewayProcess) -> None:
    body = {"items": [f"Ada {EMAIL}"], "params": {"kinds": ["person", "email"], "style": "tag"}}
    slots = []
    for number, kind in enumerate(("json", "msgpack"), 1):
        encode = msgspec.msgpack.encode if kind == "msgpack" else msgspec.json.encode
        request = gateway.client.post(
            f"/v1/redact/{LABELLED}", content=encode(body), headers={"content-type": f"application/{kind}"}
        )
        reply = asyncio.create_task(request)
        await work_options(cluster, entities(PERSON), sequence=number)
        answer = await reply
        decode = msgspec.msgpack.decode if kind == "msgpack" else msgspec.json.decode
        slots.append(decode(answer.content)["items"])
    assert slots[0] == slots[1]


async def test_values_kinds_and_keys_are_in_no_log(
    cluster: InProcess, gateway: GatewayProcess, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"items": [f"Ada {EMAIL}"], "params": {"kinds": ["rare kind", "email"], "style": "hash", "key": SECRET}}
    reply = asyncio.create_task(post(gateway, LABELLED, body))
    await work_options(cluster, entities(PERSON))
    assert (await reply).status_code == 200
    metrics = (await gateway.get("/metrics")).text
    assert 'endpoint="redact"' in metrics
    for value in ("Ada", EMAIL, "rare kind", SECRET):
        assert value not in caplog.text
        assert value not in metrics


async def test_answer_that_is_not_restorable_has_no_value(cluster: InProcess, gateway: GatewayProcess) -> None:
    body = {"items": [f"Ada {EMAIL}"], "kinds": ["person", "email"], "restorable": False}
    reply = asyncio.create_task(post(gateway, LABELLED, body))
    await work_options(cluster, entities(PERSON))
    answer = await reply
    (slot,) = answer.json()["items"]
    assert slot["text"] == "***** *****"
    assert slot.keys() == {"id", "text", "spans", "usage"}
    assert "Ada" not in answer.text
    assert EMAIL not in answer.text


async def test_long_texts_are_redacted_in_one_thread_and_a_request_out_of_time_ends_without_it(
    cluster: InProcess, gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, counts, released = threading.Semaphore(1), [], threading.Event()
    real = redact._redacted

    def slow(*arguments: Any) -> dict[str, Any]:
        counts.append(running.acquire(blocking=False))
        try:
            assert released.wait(20)
            return real(*arguments)
        finally:
            running.release()

    monkeypatch.setattr(redact, "_redacted", slow)
    text = f"{'a ' * redact._ASIDE}{EMAIL}"
    body = {"items": [text], "kinds": ["email"]}
    first = asyncio.create_task(post(gateway, LABELLED, body))
    await work_options(cluster, entities())
    await until(lambda: counts, "the first text")
    late = asyncio.create_task(post(gateway, LABELLED, body, **{"x-sie-timeout-ms": "1500"}))
    await work_options(cluster, entities(), sequence=2)
    second = asyncio.create_task(post(gateway, LABELLED, body))
    await work_options(cluster, entities(), sequence=3)
    answer = await late
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "GATEWAY_TIMEOUT")
    assert counts == [True]
    released.set()
    for reply in (first, second):
        (slot,) = (await reply).json()["items"]
        assert slot["text"] == text.replace(EMAIL, "*****")
    assert counts == [True, True]


async def test_redaction_out_of_time_ends_its_work_and_the_thread_serves_others(
    cluster: InProcess, gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search of the first request would never end by itself."""
    ended = threading.Event()

    def endless(text: str, patterns: Any, region: str, proceed: Callable[[], None]) -> Iterator[tuple[str, int, int]]:
        while text.startswith("endless"):
            try:
                proceed()
            except InterruptedError:
                ended.set()
                raise
        yield from ()

    monkeypatch.setattr(redact, "ranges_of", endless)
    late = asyncio.create_task(
        post(gateway, FIXED, {"items": ["endless " * redact._ASIDE]}, **{"x-sie-timeout-ms": "1500"})
    )
    await work_options(cluster, entities())
    assert (await late).status_code == 504
    reply = asyncio.create_task(post(gateway, FIXED, {"items": ["a " * redact._ASIDE]}))
    await work_options(cluster, entities(), sequence=2)
    assert (await reply).status_code == 200
    assert ended.is_set()


async def test_keys_take_turns_at_a_thread_and_cancelled_work_gives_its_turn_on() -> None:
    turns, done, first = KeyTurns(1), list[str](), threading.Event()

    def work(name: str) -> None:
        assert first.wait(20)
        done.append(name)

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        tasks = {
            name: group.create_task(turns.run(name[0], partial(work, name)))
            for name in ["a0", "a1", "a2", "a3", "b0", "b1", "c0"]
        }
        await asyncio.sleep(0)
        tasks["a1"].cancel()
        await asyncio.sleep(0)
        first.set()
    assert done == ["a0", "a2", "b0", "c0", "a3", "b1"]
    await turns.run("a", first.clear)
    assert not first.is_set()


async def test_client_redacts_a_list_in_parts_under_one_key(cluster: InProcess, gateway: GatewayProcess) -> None:
    async def answer_all() -> None:
        for sequence in itertools.count(1):
            stream = await message_of(cluster, sequence)
            item = messages.decode_work(stream.messages[sequence].data)
            outcomes = tuple(entities(PERSON) for _ in item.inputs)
            result = WorkResult(item.request, item.chunk, "w0", outcomes, b"", revision="local", fingerprint="f")
            await cluster.send(item.reply, messages.encode(result))

    worker = asyncio.create_task(answer_all())
    texts = [f"Ada {number} {EMAIL}" for number in range(6)]
    async with SIEAsyncClient(gateway.url, part_tokens=1) as client:
        results = await client.redact(LABELLED, texts, ["person", "email"], style="hash")
        single = await client.redact(LABELLED, texts[0], ["person", "email"])
    worker.cancel()
    assert [restore(result["text"], result["map"]) for result in results] == texts
    assert len({result["text"].split()[0] for result in results}) == 1
    assert [result["id"] for result in results] == [f"item-{number}" for number in range(6)]
    assert single["text"] == "***** 0 *****"


async def test_client_sends_a_text_as_kinds_unchanged_and_it_is_refused(gateway: GatewayProcess) -> None:
    """A list of the letters of the text would be kinds that find nothing, and the personal data would stay."""
    async with SIEAsyncClient(gateway.url) as client:
        with pytest.raises(InvalidInputError, match="kinds"):
            await client.redact(LABELLED, f"Ada {EMAIL}", "email")
