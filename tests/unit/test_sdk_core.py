"""The client without I/O: retries, patience, typed errors, all driven by hand."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

import sie_sdk
from sie_contracts import arrays, errors
from sie_sdk import core
from sie_sdk.core import Pause, Plan, Policy, Received, Send, Session, TransportFailed


def refused(code: str, status: int, *, retryable: bool, retry_after_s: int | None = None) -> Received:
    headers = {"x-should-retry": str(retryable).lower(), **({"retry-after": str(retry_after_s)} if retry_after_s else {})}
    body = {"error": {"code": code, "message": "no", "request_id": "r1", "suggestions": ["a"]}}
    return Received(status, headers, json.dumps(body).encode())


def answered(count: int) -> Received:
    slots = [{"dense": {"dims": 2, "dtype": "float32", "values": arrays.pack(np.array([n, 1], np.float32))}} for n in range(count)]
    body = {"model": "m", "items": slots, "timing": {"total_ms": 1.0}, "usage": {"prompt_tokens": 3}, "fingerprint": "f"}
    return Received(200, {"x-sie-request-id": "r2"}, msgspec.msgpack.encode(body))


def plan(items: list[str], policy: Policy | None = None) -> Plan[list[sie_sdk.EncodeResult]]:
    return core.encode("org/model:fast", items, {}, Session("secret", 2.5, policy or Policy()))


def test_a_request_carries_key_deadline_and_an_escaped_model() -> None:
    step = next(plan(["a"]))
    assert isinstance(step, Send)
    assert step.path == "/v1/encode/org/model:fast"
    assert step.headers["authorization"] == "Bearer secret"
    assert step.headers["x-sie-timeout-ms"] == "2500"
    assert msgspec.msgpack.decode(step.body) == {"items": ["a"], "params": {}}


def test_results_are_writable_arrays_with_timing() -> None:
    steps = plan(["a", "b"])
    next(steps)
    with pytest.raises(StopIteration) as end:
        steps.send(answered(2))
    first, second = end.value.value
    second["dense"][0] = 9
    assert (first["dense"].dtype, second["dense"].tolist()) == (np.float32, [9, 1])
    assert (first["timing"], first["fingerprint"], first["request_id"]) == ({"total_ms": 1.0}, "f", "r2")


def test_long_lists_are_sent_in_parts_and_come_back_as_one() -> None:
    """E19"""
    steps = plan(["x"] * (core.MAX_ITEMS + 3))
    sizes = [len(msgspec.msgpack.decode(next(steps).body)["items"])]  # type: ignore[union-attr]
    sizes.append(len(msgspec.msgpack.decode(steps.send(answered(sizes[0])).body)["items"]))  # type: ignore[union-attr]
    with pytest.raises(StopIteration) as end:
        steps.send(answered(sizes[1]))
    assert sizes == [core.MAX_ITEMS, 3]
    assert len(end.value.value) == core.MAX_ITEMS + 3


def test_a_retryable_error_is_waited_out_as_long_as_the_server_says() -> None:
    steps = plan(["a"])
    next(steps)
    pause = steps.send(refused("QUEUE_FULL", 503, retryable=True, retry_after_s=4))
    assert isinstance(pause, Pause)
    assert 3.0 <= pause.seconds <= 5.0
    assert isinstance(steps.send(None), Send)
    with pytest.raises(StopIteration):
        steps.send(answered(1))


def test_patience_ends_with_the_class_of_the_last_cause() -> None:
    steps = plan(["a"], Policy(capacity_budget_s=6))
    next(steps)
    steps.send(refused("MODEL_LOADING", 503, retryable=True, retry_after_s=4))
    steps.send(None)
    with pytest.raises(sie_sdk.ModelLoadingError, match="MODEL_LOADING") as caught:
        steps.send(refused("MODEL_LOADING", 503, retryable=True, retry_after_s=4))
    assert (caught.value.code, caught.value.status, caught.value.request_id) == ("MODEL_LOADING", 503, "r1")


def test_not_waiting_for_capacity_waits_for_nothing() -> None:
    steps = plan(["a"], Policy(wait_for_capacity=False))
    next(steps)
    with pytest.raises(sie_sdk.QueueFullError):
        steps.send(refused("QUEUE_FULL", 503, retryable=True, retry_after_s=1))


def test_time_spent_waiting_for_answers_counts_against_patience() -> None:
    steps = plan(["a"], Policy(connection_budget_s=120))
    next(steps)
    with pytest.raises(sie_sdk.SIEConnectionError):
        steps.send(TransportFailed(TimeoutError("read"), elapsed_s=150))


def test_what_can_never_be_sent_is_not_tried_again() -> None:
    """E3"""
    steps = plan(["a"])
    next(steps)
    with pytest.raises(sie_sdk.SIEConnectionError):
        steps.send(TransportFailed(ValueError("no scheme"), is_permanent=True))
    with pytest.raises(sie_sdk.RequestError):
        next(plan([object()]))  # type: ignore[list-item]
    with sie_sdk.SIEClient("no-scheme") as client, pytest.raises(sie_sdk.SIEConnectionError, match="UnsupportedProtocol"):
        client.encode("m", "text")


def test_a_broken_connection_is_tried_again_and_then_named() -> None:
    """E3: a wrong host ends in a connection error that names its cause."""
    steps = plan(["a"], Policy(connection_budget_s=0.5))
    next(steps)
    with pytest.raises(sie_sdk.SIEConnectionError, match="ConnectionRefusedError") as caught:
        steps.send(TransportFailed(ConnectionRefusedError("nobody there")))
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("MODEL_NOT_FOUND", 404, sie_sdk.ModelNotFoundError),
        ("INVALID_INPUT", 400, sie_sdk.RequestError),
        ("UNAUTHENTICATED", 401, sie_sdk.AuthenticationError),
        ("PERMISSION_DENIED", 403, sie_sdk.AuthenticationError),
        ("INFERENCE_ERROR", 500, sie_sdk.ServerError),
        ("MODEL_LOAD_FAILED", 502, sie_sdk.ModelLoadFailedError),
        ("LORA_LOADING", 503, sie_sdk.LoraLoadingError),
        ("LORA_LOAD_FAILED", 502, sie_sdk.LoraLoadFailedError),
        ("UNHEARD_OF", 500, sie_sdk.ServerError),
        ("GATEWAY_TIMEOUT", 504, sie_sdk.RequestTimeoutError),
        ("SOMETHING_NEW", 418, sie_sdk.RequestError),
    ],
)
def test_each_code_has_its_class(code: str, status: int, kind: type[sie_sdk.SIEError]) -> None:
    steps = plan(["a"])
    next(steps)
    with pytest.raises(kind) as caught:
        steps.send(refused(code, status, retryable=False))
    assert type(caught.value) is kind
    assert caught.value.details["suggestions"] == ["a"]


@pytest.mark.parametrize("leaf", errors.catalogue())
def test_every_error_of_the_server_has_a_client_class(leaf: type[errors.SIEError]) -> None:
    assert issubclass(sie_sdk.errors.error_class(leaf.code, leaf.status), sie_sdk.SIEError)


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"items": [{"dense": 3}]})])
def test_an_unreadable_reply_is_a_server_error(body: bytes) -> None:
    """No codec error leaves the client."""
    steps = plan(["a"])
    next(steps)
    with pytest.raises(sie_sdk.ServerError, match="could not be read"):
        steps.send(Received(200, {}, body))


def provisioning() -> Received:
    """What the gateway answers, word for word: no error map, its code in a header."""
    body = {"status": "provisioning", "gpu": "l4", "bundle": "default", "estimated_wait_s": 41.5, "message": "no worker is ready yet"}
    headers = {"retry-after": "5", "x-should-retry": "true", "x-sie-error-code": "PROVISIONING", "x-sie-request-id": "r3"}
    return Received(202, headers, json.dumps(body).encode())


def test_a_lane_that_starts_is_waited_for_and_then_named() -> None:
    steps = plan(["a"], Policy(capacity_budget_s=8))
    next(steps)
    pause = steps.send(provisioning())
    assert isinstance(pause, Pause)
    assert (3.75 <= pause.seconds <= 6.25, pause.cause) == (True, "PROVISIONING")
    steps.send(None)
    with pytest.raises(sie_sdk.ProvisioningError, match="PROVISIONING: no worker is ready yet") as caught:
        steps.send(provisioning())
    error = caught.value
    assert (error.code, error.status, error.request_id, error.details["estimated_wait_s"]) == ("PROVISIONING", 202, "r3", 41.5)


def test_an_unreadable_error_still_has_its_status() -> None:
    steps = plan(["a"])
    next(steps)
    with pytest.raises(sie_sdk.ServerError, match="502") as caught:
        steps.send(Received(502, {}, b"<html>bad gateway</html>"))
    assert caught.value.status == 502


SHARED = {
    "model": "m",
    "timing": {"total_ms": 1.0},
    "usage": {"prompt_tokens": 3, "total_tokens": 3, "truncated_items": []},
    "fingerprint": "f",
}


def replied(**body: object) -> Received:
    return Received(200, {"x-sie-request-id": "r2"}, msgspec.msgpack.encode({**SHARED, **body}))


def outcome(steps: Plan[object], *replies: Received) -> tuple[list[dict[str, object]], object]:
    """What a plan sends, answered with `replies`, and what it returns."""
    sent = []
    step = next(steps)
    for reply in replies:
        assert isinstance(step, Send)
        sent.append({"path": step.path, **msgspec.msgpack.decode(step.body)})
        try:
            step = steps.send(reply)  # type: ignore[assignment]
        except StopIteration as end:
            return sent, end.value
    raise AssertionError("it wants more")


def test_parameters_are_passed_on_as_they_are() -> None:
    given = {"output_types": ["dense"], "muvera": {"seed": 7}, "lora_id": "org/lora", "options": {"pooling": "cls"}, "truncate": False}
    (sent,), _ = outcome(core.encode("m", ["a"], given, Session()), answered(1))
    assert sent == {"path": "/v1/encode/m", "items": ["a"], "params": given}


def test_every_output_is_an_array_that_outputs_describes() -> None:
    slot = {
        "id": "a",
        "dense": {"dims": 2, "dtype": "int8", "values": arrays.pack(np.array([127, -3], np.int8)), "scale": 0.25, "source": "muvera"},
        "sparse": {
            "dims": 9, "dtype": "float32",
            "indices": arrays.pack(np.array([1, 8], np.int32)), "values": arrays.pack(np.ones(2, np.float32)),
        },
        "multivector": {"token_dims": 2, "num_tokens": 3, "dtype": "float16", "values": arrays.pack(np.zeros((3, 2), np.float16))},
    }  # fmt: skip
    _, results = outcome(core.encode("m", ["a"], {}, Session()), replied(items=[slot], muvera={"seed": 42}, warnings=["w"]))
    (result,) = results  # type: ignore[misc]
    assert result["dense"].tolist() == [127, -3]
    assert result["sparse"]["indices"].dtype == np.int32
    assert result["multivector"].shape == (3, 2)
    for array in (result["dense"], result["multivector"], *result["sparse"].values()):
        assert array.flags.writeable
    assert result["outputs"] == {
        "dense": {"dims": 2, "dtype": "int8", "scale": 0.25, "source": "muvera"},
        "sparse": {"dims": 9, "dtype": "float32"},
        "multivector": {"token_dims": 2, "num_tokens": 3, "dtype": "float16"},
    }
    assert (result["id"], result["muvera"], result["warnings"]) == ("a", {"seed": 42}, ["w"])


def test_an_item_that_failed_carries_its_error_and_no_output() -> None:
    _, results = outcome(core.encode("m", ["a"], {}, Session()), replied(items=[{"error": {"code": "INVALID_INPUT"}}]))
    assert results[0]["error"] == {"code": "INVALID_INPUT"}  # type: ignore[index]
    assert results[0]["outputs"] == {}  # type: ignore[index]


def entry(item_id: str, score: float | None, rank: int) -> dict[str, object]:
    return {"item_id": item_id, "score": score, "rank": rank}


def test_scores_come_back_as_the_server_ordered_them() -> None:
    entries = [entry("b", 0.9, 0), entry("item-0", 0.5, 1)]
    steps = core.score("m", {"id": "q", "text": "who"}, ["x", {"id": "b", "text": "y"}], {"lora_id": "l"}, Session())
    (sent,), result = outcome(steps, replied(query_id="q", scores=entries))
    assert sent == {
        "path": "/v1/score/m", "query": {"id": "q", "text": "who"}, "items": ["x", {"id": "b", "text": "y"}], "params": {"lora_id": "l"},
    }  # fmt: skip
    assert result == {**SHARED, "query_id": "q", "scores": entries, "request_id": "r2"}


def test_scores_of_a_long_list_are_ranked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """E19: replies are sorted and ids may be given twice, so each entry is found by its place; ties stay in order, failures are last."""
    monkeypatch.setattr(core, "MAX_ITEMS", 3)
    items: list[object] = ["a", {"id": "twin", "text": "b"}, "c", {"id": "twin", "text": "d"}, {"id": "item-0", "metadata": {"n": 1}}]
    first = [entry("2", 0.5, 0), entry("0", 0.25, 1), {**entry("1", None, 2), "error": {"code": "X"}}]
    second = [entry("4", 0.75, 0), entry("3", 0.5, 1)]
    usages = [
        {"prompt_tokens": 4, "total_tokens": 4, "truncated_items": [2]},
        {"prompt_tokens": 2, "total_tokens": 2, "truncated_items": [0]},
    ]
    steps = core.score("m", "q", items, {}, Session())  # type: ignore[arg-type]
    sent, result = outcome(steps, replied(scores=first, usage=usages[0]), replied(scores=second, usage=usages[1]))
    assert [[item["id"] for item in each["items"]] for each in sent] == [["0", "1", "2"], ["3", "4"]]  # type: ignore[attr-defined]
    assert [each["query"] for each in sent] == ["q", "q"]
    assert [(each["item_id"], each["score"], each["rank"]) for each in result["scores"]] == [  # type: ignore[index]
        ("item-0", 0.75, 0), ("item-2", 0.5, 1), ("twin", 0.5, 2), ("item-0", 0.25, 3), ("twin", None, 4),
    ]  # fmt: skip
    assert result["usage"] == {"prompt_tokens": 6, "total_tokens": 6, "truncated_items": [2, 3]}  # type: ignore[index]


def test_extractions_of_a_long_list_are_numbered_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """E19"""
    monkeypatch.setattr(core, "MAX_ITEMS", 2)
    slots = [[{"id": "item-0", "entities": []}, {"id": "x", "entities": []}], [{"id": "item-0", "entities": [{"label": "person"}]}]]
    steps = core.extract("m", ["a", {"id": "x", "text": "b"}, "c"], {"labels": ["person"], "threshold": 0.4}, Session())
    sent, results = outcome(steps, *(replied(items=part) for part in slots))
    assert [each["params"] for each in sent] == [{"labels": ["person"], "threshold": 0.4}] * 2
    assert [each["id"] for each in results] == ["item-0", "x", "item-2"]  # type: ignore[attr-defined]
    assert results[2]["entities"] == [{"label": "person"}]  # type: ignore[index]


def test_an_empty_list_needs_no_request_but_a_score_is_the_server_s_to_refuse() -> None:
    for plan in (core.encode("m", [], {}, Session()), core.extract("m", [], {}, Session())):
        with pytest.raises(StopIteration) as end:
            next(plan)
        assert end.value.value == []
    assert isinstance(next(core.score("m", "q", [], {}, Session())), Send)


@pytest.mark.parametrize("body", [{}, {"items": 3}, {"items": [3]}, {"scores": [{}]}, {"scores": None}])
def test_an_unreadable_score_or_extraction_is_a_server_error(monkeypatch: pytest.MonkeyPatch, body: dict[str, object]) -> None:
    monkeypatch.setattr(core, "MAX_ITEMS", 1)
    for steps in (core.score("m", "q", ["a", "b"], {}, Session()), core.extract("m", ["a"], {}, Session())):
        with pytest.raises(sie_sdk.ServerError, match="could not be read"):
            outcome(steps, *[replied(**body)] * 2)


def test_items_that_are_neither_text_nor_map_are_refused_before_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "MAX_ITEMS", 1)
    with pytest.raises(sie_sdk.RequestError, match="got int"):
        next(core.score("m", "q", ["a", 5], {}, Session()))  # type: ignore[list-item]
    with pytest.raises(sie_sdk.RequestError):
        next(core.extract("m", ["a"], {"threshold": object()}, Session()))
