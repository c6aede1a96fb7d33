"""`/v1/dead-letters`: dead letters are listed without their inputs, replayed and removed."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock, patch

import pytest
from direct import DeadlyAdapter
from fake_adapter import toy_entry
from inprocess import GatewayProcess, InProcess, until, until_told

from sie_broker import Broker
from sie_contracts.errors import ErrorInfo
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import DeadLetter, Input, RunOptions, WorkItem
from sie_contracts.wire.topology import Lane
from sie_gateway.inference.fragments import Fragments, InboxFull
from sie_gateway.operations import dead_letters

ADMIN, USER = "admin-token-of-a-test", "user-token-of-a-test"
SECRET = "canary-41: a text that no answer may hold"
PATH = "/v1/dead-letters"
LANE = Lane("_default", "_default", "default")


@pytest.fixture
async def gateway(cluster: InProcess) -> GatewayProcess:
    return await cluster.gateway(SIE_AUTH_MODE="static", SIE_ADMIN_TOKEN=ADMIN, SIE_AUTH_TOKEN=USER)


@pytest.fixture
async def adapter(cluster: InProcess) -> DeadlyAdapter:
    adapter = DeadlyAdapter(cluster.folder / "deadly.sock", SECRET)
    await adapter.start()
    cluster.adapters.append(adapter)
    return adapter


async def ask(
    gateway: GatewayProcess, method: str, path: str = "", token: str = ADMIN, status: int = 200, **query: Any
) -> Any:
    """Return the answer to a call of an administrator. Check that it has no input."""
    headers = {"authorization": f"Bearer {token}"}
    answer = await gateway.client.request(method, PATH + path, headers=headers, params=query)
    assert answer.status_code == status, answer.text
    assert "canary" not in answer.text
    return answer.json()


async def write(broker: Broker, name: str, *, model: str = "toy/one", code: str = "NOT_READY", **more: Any) -> None:
    """Write a dead letter as a worker does."""
    item = WorkItem(
        f"r-{name}", 0, model, toy_entry().revision, "encode", (Input(SECRET),), RunOptions(), "inbox", 1000
    )
    subject = more.get("subject", topology.work_subject(LANE, "interactive", model))
    data = more.get("item", messages.encode(item))
    letter = DeadLetter(name, subject, data, ErrorInfo(code, "why", "unknown_model"), ("w7",), 5, 0, 1_790_000_000.0)
    await broker.publish(topology.dead_letter_subject("_default"), messages.encode(letter), name)


async def test_work_that_was_given_up_is_told_run_again_and_answered(
    cluster: InProcess, gateway: GatewayProcess, adapter: DeadlyAdapter, caplog: pytest.LogCaptureFixture
) -> None:
    """An input ends two adapters, and its work becomes a dead letter. Administrators see it without the input. While
    the fault is there, a replay fails and the letter stays. Without the fault, a replay is answered and removes the
    letter.
    """
    caplog.set_level("INFO", "sie.gateway.dead_letters")
    sidecar = await cluster.sidecar(adapter)
    headers = {"authorization": f"Bearer {USER}"}
    body = {"items": ["before", SECRET]}
    given_up = await gateway.client.post("/v1/encode/toy/one", json=body, headers=headers)
    assert "poison" in given_up.text

    async def listed() -> Any:
        report = await ask(gateway, "GET")
        return report if report["letters"] else None

    listing = await until_told(listed, "a dead letter")
    (letter,) = listing["letters"]
    assert (listing["total"], listing["examined"], listing["next"]) == (1, 1, None)
    assert listing["counts"] == [{"code": "INFERENCE_ERROR", "reason": "poison", "count": 1}]
    assert (letter["model"], letter["lane"], letter["inputs"], letter["deaths"]) == ("toy/one", str(LANE), 2, 3)
    assert (letter["workers"], letter["request"]) == ([sidecar.worker], given_up.headers["x-sie-request-id"])
    name = letter["id"]
    assert await ask(gateway, "GET", f"/{name}") == letter

    failed = await ask(gateway, "POST", f"/{name}/replay", timeout_s=20)
    assert (failed["state"], failed["removed"], failed["inputs"]) == ("failed", False, 2)
    assert failed["errors"] == [{"code": "INFERENCE_ERROR", "reason": "poison", "count": 1}]
    assert len(adapter.deaths) == 6
    assert await ask(gateway, "GET", f"/{name}") == letter

    adapter.deadly.clear()
    done = await ask(gateway, "POST", f"/{name}/replay", timeout_s=20)
    assert done == {"id": name, "state": "answered", "removed": True, "inputs": 2, "errors": []}
    await ask(gateway, "GET", f"/{name}", status=404)
    assert "admin ran dead letter" in caplog.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "/abc"),
        ("POST", "/abc/replay"),
        ("POST", "/replay"),
        ("DELETE", "/abc"),
        ("DELETE", ""),
    ],
)
async def test_only_administrators_may(cluster: InProcess, gateway: GatewayProcess, method: str, path: str) -> None:
    await write(cluster.server.connect("worker"), "abc")
    refusal = await ask(gateway, method, path, USER, 403)
    assert refusal["code"] == "PERMISSION_DENIED"
    await ask(gateway, method, path, "wrong", 401)
    assert (await ask(gateway, "GET"))["total"] == 1


async def test_a_list_has_pages_and_filters_and_counts(cluster: InProcess, gateway: GatewayProcess) -> None:
    broker = cluster.server.connect("worker")
    for number in range(1, 8):
        await write(broker, f"{number}", code="NOT_READY" if number % 2 else "INFERENCE_ERROR")
    await write(broker, "8", model="toy/other")
    await write(broker, "9", item=b"\xc1", subject="nonsense")

    async def ids(**query: Any) -> tuple[list[str], int | None]:
        report = await ask(gateway, "GET", **query)
        return [letter["id"] for letter in report["letters"]], report["next"]

    assert await ids() == (list("987654321"), None)
    assert await ids(limit=4) == (list("9876"), 6)
    assert await ids(limit=5, before=6) == (list("54321"), None)
    assert await ids(code="INFERENCE_ERROR", limit=2) == (list("64"), 4)
    assert await ids(code="INFERENCE_ERROR", limit=2, before=4) == (["2"], None)
    assert await ids(model="toy/other", lane=str(LANE), reason="unknown_model") == (["8"], None)
    listing = await ask(gateway, "GET", limit=1)
    assert [(tally["code"], tally["count"]) for tally in listing["counts"]] == [
        ("NOT_READY", 6),
        ("INFERENCE_ERROR", 3),
    ]
    (broken,) = listing["letters"]
    assert (broken["is_readable"], broken["inputs"], broken["lane"], broken["model"]) == (False, None, "", "")
    with patch.object(dead_letters, "EXAMINED", 3):
        assert await ids() == (list("987"), 7)
        assert await ids(before=7, code="INFERENCE_ERROR") == (list("64"), 4)
        assert await ids(before=2) == (["1"], None)


async def test_letters_that_fit_are_run_again_the_oldest_first(cluster: InProcess, gateway: GatewayProcess) -> None:
    broker = cluster.server.connect("worker")
    for number in range(1, 7):
        await write(broker, f"{number}")
    await write(broker, "a1", model="toy/other")
    await write(broker, "a2", item=b"\xc1")
    await cluster.sidecar()
    query: dict[str, Any] = {"model": "toy/one", "timeout_s": 20}
    replay = await ask(gateway, "POST", "/replay", limit=5, **query)
    assert [(letter["id"], letter["state"]) for letter in replay["replayed"]] == [
        (f"{sequence}", "answered") for sequence in range(1, 6)
    ]
    assert replay["next"] == 5
    replay = await ask(gateway, "POST", "/replay", after=5, **query)
    assert [(letter["id"], letter["removed"]) for letter in replay["replayed"]] == [("6", True)]
    assert replay["next"] is None
    assert [letter["id"] for letter in (await ask(gateway, "GET"))["letters"]] == ["a2", "a1"]
    await write(broker, "a3", subject="sie.config.models.default")
    for name in ("a2", "a3"):
        replay = await ask(gateway, "POST", f"/{name}/replay")
        assert (replay["state"], replay["removed"]) == ("unreadable", False)


async def test_without_an_answer_a_letter_is_kept(cluster: InProcess, gateway: GatewayProcess) -> None:
    """One letter has no worker. The pool of the other one has ended."""
    broker = cluster.server.connect("worker")
    await write(broker, "a")
    ended_lane = Lane("team", "_default", "default")
    await write(broker, "b", subject=topology.work_subject(ended_lane, "interactive", "toy/one"))
    assert (await ask(gateway, "POST", "/a/replay", timeout_s=1))["state"] == "waiting"
    replay = await ask(gateway, "POST", "/replay", timeout_s=1)
    assert [(letter["id"], letter["state"]) for letter in replay["replayed"]] == [
        ("a", "waiting"),
        ("b", "unavailable"),
    ]
    assert (await ask(gateway, "GET"))["total"] == 2
    stream = cluster.server.streams[topology.stream_name("_default")]
    await until(lambda: stream.state().messages == 2, "the work, which is published")


async def test_a_result_without_room_fails_its_letter_and_no_other(
    cluster: InProcess, gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = cluster.server.connect("worker")
    for name in ("a", "b"):
        await write(broker, name)
    monkeypatch.setattr(Fragments, "add", Mock(side_effect=InboxFull("no room")))
    replay = asyncio.create_task(ask(gateway, "POST", "/replay", timeout_s=1))
    stream = cluster.server.streams[topology.stream_name("_default")]
    await until(lambda: stream.state().messages == 2, "the work of both letters")
    work = [messages.decode_work(message.data) for message in stream.messages.values()]
    large = next(item for item in work if item.request.startswith("r-a-"))
    part = messages.Fragment(large.request, large.chunk, large.attempt, 0, 2, "", b"part")
    await cluster.send(large.reply, messages.encode(part))
    replayed = (await replay)["replayed"]
    assert [(letter["id"], letter["state"]) for letter in replayed] == [("a", "failed"), ("b", "waiting")]
    assert [error["code"] for error in replayed[0]["errors"]] == ["RESOURCE_EXHAUSTED"]
    await broker.close()


async def test_a_purge_forgets_what_is_named_and_nothing_else(cluster: InProcess, gateway: GatewayProcess) -> None:
    broker = cluster.server.connect("worker")
    for name, model in (("a", "toy/one"), ("b", "toy/other"), ("c", "toy/one"), ("d", "toy/other")):
        await write(broker, name, model=model)
    assert await ask(gateway, "DELETE", "/a") == {"removed": 1, "complete": True}
    await ask(gateway, "DELETE", "/a", status=404)
    for refused, param in (({}, "all"), ({"modle": "toy/one"}, "modle"), ({"all": "true", "model": "x"}, "all")):
        assert (await ask(gateway, "DELETE", status=400, **refused))["error"]["param"] == param
    assert await ask(gateway, "DELETE", model="toy/other") == {"removed": 2, "complete": True}
    assert [letter["id"] for letter in (await ask(gateway, "GET"))["letters"]] == ["c"]
    assert await ask(gateway, "DELETE", all="true") == {"removed": 1, "complete": True}
    assert (await ask(gateway, "GET"))["total"] == 0


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("", {"limit": "0"}, "limit"),
        ("", {"before": "-1"}, "before"),
        ("", {"after": "1"}, "after"),
        ("", {"pool": "other"}, "pool"),
        ("/abc", {"pool": "../x"}, "pool"),
    ],
)
async def test_what_is_asked_wrongly_is_refused(
    gateway: GatewayProcess, path: str, query: dict[str, str], param: str
) -> None:
    refusal = await ask(gateway, "GET", path, status=404 if param == "pool" else 400, **query)
    assert refusal["error"]["param"] == param


async def test_without_a_broker_it_is_said_soon(cluster: InProcess, gateway: GatewayProcess) -> None:
    cluster.server.disconnect()
    try:
        with patch.object(dead_letters, "LOOK_S", 0.2):
            for method, path in (("GET", ""), ("GET", "/abc"), ("DELETE", "/abc"), ("POST", "/abc/replay")):
                assert (await ask(gateway, method, path, status=503))["code"] == "QUEUE_UNAVAILABLE"
    finally:
        cluster.server.reconnect()
