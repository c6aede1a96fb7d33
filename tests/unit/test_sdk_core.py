"""The client without I/O: retries, patience, typed errors, all driven by hand."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

import sie_sdk
from sie_contracts import arrays, errors
from sie_sdk import core
from sie_sdk.core import Pause, Policy, Received, Send, TransportFailed


def refused(code: str, status: int, *, retryable: bool, retry_after_s: int | None = None) -> Received:
    headers = {"x-should-retry": str(retryable).lower(), **({"retry-after": str(retry_after_s)} if retry_after_s else {})}
    body = {"error": {"code": code, "message": "no", "request_id": "r1", "suggestions": ["a"]}}
    return Received(status, headers, json.dumps(body).encode())


def answered(count: int) -> Received:
    slots = [{"dense": {"dims": 2, "dtype": "float32", "values": arrays.pack(np.array([n, 1], np.float32))}} for n in range(count)]
    body = {"model": "m", "items": slots, "timing": {"total_ms": 1.0}, "usage": {"prompt_tokens": 3}, "fingerprint": "f"}
    return Received(200, {"x-sie-request-id": "r2"}, msgspec.msgpack.encode(body))


def plan(items: list[str], policy: Policy | None = None) -> core.Plan[list[sie_sdk.EncodeResult]]:
    return core.encode("org/model:fast", items, params={}, api_key="secret", timeout_s=2.5, policy=policy or Policy())


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
        ("MODEL_LOAD_FAILED", 502, sie_sdk.ServerError),
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


def test_an_unreadable_error_still_has_its_status() -> None:
    steps = plan(["a"])
    next(steps)
    with pytest.raises(sie_sdk.ServerError, match="502") as caught:
        steps.send(Received(502, {}, b"<html>bad gateway</html>"))
    assert caught.value.status == 502
