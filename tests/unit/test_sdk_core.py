"""The client without I/O: retries, patience, typed errors, all driven by hand."""

from __future__ import annotations

import asyncio
import json
import ssl
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from public_certificates import certified

import sie_client
from sie_client import SIEClient, verbs
from sie_client.core import (
    BlockingWork,
    Hedges,
    HttpAnswer,
    Pause,
    Plan,
    Received,
    Send,
    Session,
    Together,
    TransportFailed,
)
from sie_contracts import arrays, errors


def provisioning() -> Received:
    error = {
        "code": "PROVISIONING",
        "message": "no worker is ready yet",
        "retryable": True,
        "request_id": "r3",
        "gpu": "l4",
        "bundle": "default",
        "estimated_wait_s": 41.5,
    }
    headers = {"retry-after": "5", "x-should-retry": "true", "x-sie-error-code": "PROVISIONING"}
    return Received(503, headers, json.dumps({"error": error}).encode())


def refused(code: str, status: int, *, retryable: bool, retry_after_s: int | None = None) -> Received:
    headers = {
        "x-should-retry": str(retryable).lower(),
        **({"retry-after": str(retry_after_s)} if retry_after_s else {}),
    }
    body = {"error": {"code": code, "message": "no", "request_id": "r1", "suggestions": ["a"]}}
    return Received(status, headers, json.dumps(body).encode())


def answered(count: int) -> Received:
    slots = [
        {"dense": {"dims": 2, "dtype": "float32", "values": arrays.pack(np.array([n, 1], np.float32))}}
        for n in range(count)
    ]
    return replied(items=slots)


SHARED = {
    "model": "m",
    "timing": {"total_ms": 1.0},
    "usage": {"prompt_tokens": 3, "total_tokens": 3, "truncated_items": []},
    "fingerprint": "f",
}


def replied(**body: object) -> Received:
    return Received(200, {"x-sie-request-id": "r2"}, msgspec.msgpack.encode({**SHARED, **body}))


def plan(items: list[str], **options: object) -> Plan[list[sie_client.EncodeResult]]:
    session = Session.from_options({"api_key": "secret", "timeout_s": 2.5})
    return verbs.encode("org/model:fast", items, options, session)


def outcome(steps: Plan[object], *replies: Received) -> tuple[list[dict[str, object]], object]:
    """Return the requests of a plan, answered with `replies` in order, and its result. Parts run one after the other,
    and blocking work runs at once.
    """
    answers, sent = iter(replies), []

    def drive(steps: Plan[object]) -> object:
        reply: object = None
        while True:
            try:
                step = steps.send(reply)
            except StopIteration as end:
                return end.value
            reply = None
            if isinstance(step, Send):
                sent.append({"path": step.path, **msgspec.msgpack.decode(step.body)})
                reply = next(answers)
            elif isinstance(step, Together):
                reply = [drive(sub_plan) for sub_plan in step.plans]
            elif isinstance(step, BlockingWork):
                reply = step.function()
            else:
                assert isinstance(step, HttpAnswer)

    result = drive(steps)
    assert next(answers, None) is None, "it wants fewer"
    return sent, result


def test_a_request_carries_key_deadline_lane_and_an_escaped_model() -> None:
    options = {
        "gpu": "eval/l4",
        "pool": "eval",
        "priority": "bulk",
        "explain": True,
        "strict": True,
        "headers": {"X-Request-ID": "mine"},
    }
    step = next(plan(["a"], **options))
    assert isinstance(step, Send)
    assert step.path == "/v1/encode/org/model:fast"
    assert dict(step.headers) == {
        "accept": "application/msgpack",
        "content-type": "application/msgpack",
        "x-sie-client-version": sie_client.__version__,
        "authorization": "Bearer secret",
        "x-sie-timeout-ms": "2500",
        "x-sie-machine-profile": "eval/l4",
        "x-sie-pool": "eval",
        "x-sie-priority": "bulk",
        "x-sie-explain": "1",
        "x-sie-strict": "true",
        "x-request-id": "mine",
    }
    assert msgspec.msgpack.decode(step.body) == {"items": ["a"], "params": {}}


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": "urgent"},
        {"concurrency": 0},
        {"concurrency": 2.5},
        {"part_tokens": float("nan")},
        {"timeout_s": -1},
        {"headers": {"x-a": "b\r\nc: d"}},
        {"api_key": "secret\nkey"},
        {"hedge_after_s": "1"},
        {"pool": "ü"},
    ],
)
def test_options_that_cannot_be_meant_are_named_and_secrets_are_not(wrong: dict[str, object]) -> None:
    with pytest.raises(sie_client.InvalidInputError) as caught:
        Session.from_options(wrong)
    (name,) = wrong
    assert {"headers": "x-a", "api_key": "authorization", "pool": "x-sie-pool"}.get(name, name) in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(Session.from_options({"api_key": "secret", "headers": {"cookie": "secret"}}))
    with pytest.raises(TypeError, match="colour"):
        Session.from_options({"colour": "red"})


def test_parts_are_bounded_by_tokens_and_one_item_may_be_more() -> None:
    texts = ["a" * 40, "b" * 40, "c" * 400, "d" * 4, "ü" * 20]  # 12, 12, 102, 3 and 12 estimated tokens
    sent, _ = outcome(plan(texts, part_tokens=24), answered(2), answered(1), answered(2))
    assert [request["items"] for request in sent] == [texts[:2], texts[2:3], texts[3:]]


def test_no_part_is_larger_than_a_body_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "PART_BYTES", 100)
    items = [{"document": b"%PDF-" + b"x" * 45}] * 5
    sent, _ = outcome(verbs.extract("m", items, {}, Session()), *(replied(items=[{}] * count) for count in (2, 2, 1)))  # type: ignore[arg-type]
    assert [len(request["items"]) for request in sent] == [2, 2, 1]  # type: ignore[arg-type]


def test_a_retryable_error_is_waited_out_as_long_as_the_server_says() -> None:
    steps = plan(["a"])
    next(steps)
    pause = steps.send(refused("QUEUE_FULL", 503, retryable=True, retry_after_s=4))
    assert isinstance(pause, Pause)
    assert 3.0 <= pause.seconds <= 5.0
    assert isinstance(steps.send(None), Send)
    assert steps.send(answered(1)) == HttpAnswer(1)


def test_patience_ends_with_the_class_of_the_last_cause() -> None:
    steps = plan(["a"], capacity_budget_s=6)
    next(steps)
    steps.send(refused("MODEL_LOADING", 503, retryable=True, retry_after_s=4))
    steps.send(None)
    with pytest.raises(sie_client.ModelLoadingError, match="MODEL_LOADING") as caught:
        steps.send(refused("MODEL_LOADING", 503, retryable=True, retry_after_s=4))
    assert (caught.value.code, caught.value.status, caught.value.request_id) == ("MODEL_LOADING", 503, "r1")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (refused("INFERENCE_ERROR", 500, retryable=False), sie_client.InferenceError),
        (refused("MODEL_LOAD_FAILED", 502, retryable=False), sie_client.ModelLoadFailedError),
        (refused("BUNDLE_CONFLICT", 409, retryable=False), sie_client.BundleConflictError),
        (Received(500, {}, b"oops"), sie_client.ServerError),
        (Received(301, {"location": "https://x"}, b""), sie_client.ServerError),
    ],
)
def test_only_what_the_server_calls_retryable_is_sent_again(answer: Received, kind: type[sie_client.SIEError]) -> None:
    steps = plan(["a"])
    next(steps)
    with pytest.raises(kind):
        steps.send(answer)


def test_a_proxy_with_nobody_behind_it_is_a_connection_that_failed() -> None:
    """While a gateway behind a load balancer restarts, the balancer answers in its place."""
    steps = plan(["a"], connection_budget_s=1.3)
    next(steps)
    pause = steps.send(Received(503, {"retry-after": "600"}, b"<html>no upstream</html>"))
    assert isinstance(pause, Pause)
    assert pause.seconds <= 1.25
    next(steps)
    with pytest.raises(sie_client.ServerError, match="503"):
        steps.send(Received(503, {}, b""))


def test_what_costs_the_device_its_time_is_repeated_ever_more_slowly() -> None:
    steps = plan(["a"])
    pauses = []
    for _ in range(5):
        assert isinstance(next(steps), Send)
        pause = steps.send(refused("GATEWAY_TIMEOUT", 504, retryable=True, retry_after_s=5))
        assert isinstance(pause, Pause)
        pauses.append(pause.seconds)
    for pause_s, expected_s in zip(pauses, (5, 10, 20, 30, 30), strict=True):
        assert 0.75 * expected_s <= pause_s <= 1.25 * expected_s


def test_what_can_never_be_sent_is_not_tried_again() -> None:
    steps = plan(["a"])
    next(steps)
    with pytest.raises(sie_client.SIEConnectionError):
        steps.send(TransportFailed(ValueError("no scheme"), is_permanent=True))
    with pytest.raises(sie_client.RequestError):
        next(plan([object()]))  # type: ignore[list-item]
    with (
        sie_client.SIEClient("http://:80") as client,
        pytest.raises(sie_client.SIEConnectionError, match="UnsupportedProtocol"),
    ):
        client.encode("m", "text")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("MODEL_NOT_FOUND", 404, sie_client.ModelNotFoundError),
        ("UNHEARD_OF", 500, sie_client.ServerError),
        ("SOMETHING_NEW", 418, sie_client.RequestError),
        ("SOMETHING_NEW", 404, sie_client.NotFoundError),
        ("SOMETHING_NEW", 429, sie_client.RateLimitedError),
        ("SOMETHING_NEW", 301, sie_client.ServerError),
    ],
)
def test_an_answer_has_the_class_of_its_code_else_of_its_status(
    code: str, status: int, kind: type[sie_client.SIEError]
) -> None:
    steps = plan(["a"])
    next(steps)
    with pytest.raises(kind) as caught:
        steps.send(refused(code, status, retryable=False))
    assert type(caught.value) is kind
    assert caught.value.details["suggestions"] == ["a"]


@pytest.mark.parametrize("leaf", errors.catalogue(), ids=lambda leaf: leaf.code)
def test_every_error_of_the_server_has_a_class_of_its_own_that_tells_all_of_it(leaf: type[errors.SIEError]) -> None:
    """The error has the code, status, reason, parameter, request id and details of the server's answer."""
    error = leaf("why", reason="a_reason", param="items[3].text", extras={"limit": 7})
    body = errors.envelope(error, "r9", [{"index": 0, "code": leaf.code}])
    headers = {"x-sie-error-code": leaf.code, "x-should-retry": str(error.retryable).lower(), "retry-after": "1"}
    steps = plan(["a"], wait_for_capacity=False)
    next(steps)
    with pytest.raises(sie_client.SIEError, match=f"{leaf.code}: why") as caught:
        steps.send(Received(error.status, headers, json.dumps(body).encode()))
    client_error = caught.value
    assert type(client_error) is sie_client.errors.codes()[leaf.code]
    assert (
        client_error.code,
        client_error.status,
        client_error.reason,
        client_error.param,
        client_error.request_id,
        client_error.retryable,
    ) == (leaf.code, error.status, "a_reason", "items[3].text", "r9", error.retryable)
    assert (client_error.details["limit"], client_error.details["errors"]) == (7, [{"index": 0, "code": leaf.code}])


def failed(count: int) -> Received:
    """Return the response to a request of which all items failed."""
    fault = {"code": "INVALID_INPUT", "message": "too long", "retryable": False}
    document = {"error": {**fault, "request_id": "r3"}, "errors": [{"index": n, **fault} for n in range(count)]}
    return Received(400, {}, json.dumps(document).encode())


@pytest.mark.parametrize("verb", ["encode", "extract", "redact"])
@pytest.mark.parametrize("first", [True, False])
def test_a_part_of_which_all_items_fail_leaves_the_results_of_the_other_parts(
    verb: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "MAX_ITEMS", 2)
    items: list[Any] = [{"id": "a", "text": "a"}, "b", {"id": "c", "text": "c", "metadata": {"n": 1}}]
    steps = {
        "encode": lambda: verbs.encode("m", items, {}, Session()),
        "extract": lambda: verbs.extract("m", items, {"labels": ["x"]}, Session()),
        "redact": lambda: verbs.redact("m", items, None, {}, Session()),
    }[verb]()
    usage = {"prompt_tokens": 1, "total_tokens": 1, "truncated": False}
    whole = replied(items=[{"usage": usage}] * (1 if first else 2))
    _, results = outcome(steps, *((failed(2), whole) if first else (whole, failed(1))))
    failures = results[:2] if first else results[2:]  # type: ignore[index]
    assert ["error" in result for result in results] == ([True, True, False] if first else [False, False, True])  # type: ignore[attr-defined]
    for result in failures:
        assert result["error"] == {"code": "INVALID_INPUT", "message": "too long", "retryable": False}
        assert (result["request_id"], result["model"], result["fingerprint"]) == ("r3", "m", "f")
        assert result["usage"] == {"prompt_tokens": 0, "total_tokens": 0, "truncated": False}
    assert failures[0].get("id") == ("a" if first else "c")
    assert first or failures[0]["metadata"] == {"n": 1}
    assert {"encode": failures[0].get("outputs") == {}, "extract": failures[0].get("entities") == []}.get(verb, True)
    assert results.usage == {"prompt_tokens": 3, "total_tokens": 3, "truncated_items": []}  # type: ignore[attr-defined]


def test_a_list_of_which_all_items_fail_or_that_may_have_no_failure_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "MAX_ITEMS", 2)
    for options, first in (({}, failed(2)), ({"on_item_error": "fail"}, answered(2))):
        with pytest.raises(sie_client.InvalidInputError):
            outcome(plan(["a", "b", "c"], **options), first, failed(1))


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", msgspec.msgpack.encode([1]), msgspec.msgpack.encode({"items": [{"dense": 3}]})]
)
def test_an_unreadable_reply_is_a_server_error(body: bytes) -> None:
    """No codec error leaves the client."""
    steps = plan(["a"])
    next(steps)
    with pytest.raises(sie_client.ServerError, match="could not be read"):
        steps.send(Received(200, {}, body))


def test_every_output_is_an_array_that_outputs_describes() -> None:
    slot = {
        "id": "a",
        "dense": {
            "dims": 2,
            "dtype": "int8",
            "values": arrays.pack(np.array([127, -3], np.int8)),
            "scale": 0.25,
            "source": "muvera",
        },
        "sparse": {
            "dims": 9,
            "dtype": "float32",
            "indices": arrays.pack(np.array([1, 8], np.int32)),
            "values": arrays.pack(np.ones(2, np.float32)),
        },
        "multivector": {
            "token_dims": 2,
            "num_tokens": 3,
            "dtype": "float16",
            "values": arrays.pack(np.zeros((3, 2), np.float16)),
        },
    }
    _, results = outcome(
        verbs.encode("m", ["a"], {}, Session()), replied(items=[slot], muvera={"seed": 42}, warnings=["w"])
    )
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


def entry(item_id: str, score: float | None, rank: int) -> dict[str, object]:
    return {"item_id": item_id, "score": score, "rank": rank}


def test_scores_of_a_long_list_are_ranked_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server sorts its replies and ids may repeat, so the client finds each entry by its place. Ties keep their
    order. Failures come last.
    """
    monkeypatch.setattr(verbs, "MAX_ITEMS", 3)
    items: list[object] = [
        "a",
        {"id": "twin", "text": "b"},
        "c",
        {"id": "twin", "text": "d"},
        {"id": "item-0", "metadata": {"n": 1}},
    ]
    first = [entry("2", 0.5, 0), entry("0", 0.25, 1), {**entry("1", None, 2), "error": {"code": "X"}}]
    second = [entry("4", 0.75, 0), entry("3", 0.5, 1)]
    usages = [
        {"prompt_tokens": 4, "total_tokens": 4, "truncated_items": [2]},
        {"prompt_tokens": 2, "total_tokens": 2, "truncated_items": [0]},
    ]
    steps = verbs.score("m", "q", items, {}, Session())  # type: ignore[arg-type]
    sent, result = outcome(steps, replied(scores=first, usage=usages[0]), replied(scores=second, usage=usages[1]))
    assert [[item["id"] for item in request["items"]] for request in sent] == [["0", "1", "2"], ["3", "4"]]  # type: ignore[attr-defined]
    assert [request["query"] for request in sent] == ["q", "q"]
    assert [(row["item_id"], row["score"], row["rank"]) for row in result["scores"]] == [  # type: ignore[index]
        ("item-0", 0.75, 0),
        ("item-2", 0.5, 1),
        ("twin", 0.5, 2),
        ("item-0", 0.25, 3),
        ("twin", None, 4),
    ]
    assert result["usage"] == {"prompt_tokens": 6, "total_tokens": 6, "truncated_items": [2, 3]}  # type: ignore[index]


def test_a_reply_with_fewer_results_than_items_is_refused_not_shifted() -> None:
    with pytest.raises(sie_client.ServerError, match="expected 2 entries, got 1"):
        outcome(plan(["a", "b"]), answered(1))


def test_a_ranking_has_positions_and_documents_and_no_failures() -> None:
    documents = ["a", {"id": "own", "text": "b"}, "c"]
    entries = [entry("2", 0.9, 0), entry("1", 0.5, 1), entry("0", 0.1, 2)]
    steps = verbs.rerank("m", "q", documents, 2, {}, Session())  # type: ignore[arg-type]
    (sent,), ranked = outcome(steps, replied(scores=entries))
    assert sent["params"] == {"on_item_error": "fail"}
    assert ranked == [{"index": 2, "score": 0.9, "document": "c"}, {"index": 1, "score": 0.5, "document": documents[1]}]
    assert outcome(verbs.rerank("m", "q", [], None, {}, Session())) == ([], [])
    with pytest.raises(sie_client.InvalidInputError, match="top_n"):
        next(verbs.rerank("m", "q", ["a"], 0, {}, Session()))


async def test_a_certificate_that_is_not_trusted_ends_at_once(tmp_path: Path) -> None:
    own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    own.load_cert_chain(certified(tmp_path, "localhost"))
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=own) as server:
        url = f"https://localhost:{server.sockets[0].getsockname()[1]}"
        with SIEClient(url) as client, pytest.raises(sie_client.SIEConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.wait_for(asyncio.to_thread(client.encode, "m", "a"), 30)


NOBODY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("verb", "params", "says"),
    [
        ("encode", {"outptu": 1}, "unexpected parameter 'outptu'; did you mean output_"),
        ("encode", {"dimension": 1}, "did you mean dimensions?"),
        ("extract", {"label": ["a"]}, "did you mean labels?"),
        ("score", {"zzz": 1}, "in options={...}"),
    ],
)
def test_a_parameter_that_no_model_takes_is_an_error(verb: str, params: dict[str, Any], says: str) -> None:
    """The client raises the error before it sends anything: no server runs here."""
    with SIEClient(NOBODY) as client, pytest.raises(TypeError) as caught:
        getattr(client, verb)("org/one", *(("q",) if verb == "score" else ()), ["a"], **params)
    assert f"{verb}() got an " in str(caught.value)
    assert says in str(caught.value)


def test_a_quota_is_waited_for_as_the_server_says() -> None:
    steps = plan(["a"])
    next(steps)
    pause = steps.send(refused("RATE_LIMITED", 429, retryable=True, retry_after_s=40))
    assert isinstance(pause, Pause)
    assert (30 <= pause.seconds <= 50, pause.cause, 845 <= pause.remaining_s <= 870) == (True, "RATE_LIMITED", True)


def test_a_lane_that_starts_is_waited_for_and_then_named() -> None:
    steps = plan(["a"], capacity_budget_s=7)
    next(steps)
    pause = steps.send(provisioning())
    assert isinstance(pause, Pause)
    assert (3.75 <= pause.seconds <= 6.25, pause.cause) == (True, "PROVISIONING")
    steps.send(None)
    with pytest.raises(sie_client.ProvisioningError, match="PROVISIONING: no worker is ready yet") as caught:
        steps.send(provisioning())
    error = caught.value
    assert (error.code, error.status, error.request_id, error.details["estimated_wait_s"]) == (
        "PROVISIONING",
        503,
        "r3",
        41.5,
    )


def test_patience_for_a_connection_and_for_capacity_are_two() -> None:
    steps = plan(["a"], connection_budget_s=3, capacity_budget_s=100)
    for _ in range(3):
        next(steps)
        steps.send(refused("MODEL_LOADING", 503, retryable=True, retry_after_s=5))
    next(steps)
    assert isinstance(steps.send(TransportFailed(ConnectionResetError(), elapsed_s=0.0)), Pause)


def test_hedges_are_one_and_then_one_for_each_five_requests() -> None:
    hedges = Hedges()
    assert (hedges.acquire(), hedges.acquire()) == (True, False)
    for _ in range(5):
        assert not hedges.acquire()
        hedges.sent()
    assert (hedges.acquire(), hedges.acquire()) == (True, False)
    for _ in range(1000):
        hedges.sent()
    assert [hedges.acquire() for _ in range(11)] == [True] * 10 + [False]
