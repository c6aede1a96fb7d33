"""The client without I/O: a call is a generator that yields what to send or how long to wait, and is sent what came back.

    encode(...) ──yields──► Send ──► shell does the HTTP ──Received | TransportFailed──► generator
                └─yields──► Pause ──► shell sleeps
                └─returns─► results

The sync and the async client are shells around the same generators, so they cannot drift apart.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from sie_contracts import __version__, arrays
from sie_sdk.errors import RequestError, ServerError, SIEConnectionError, SIEError, error_class
from sie_sdk.types import EncodeResult, Item

MAX_ITEMS = 2048
CONNECTION_BUDGET_S = 120.0
CAPACITY_BUDGET_S = 900.0
CONNECTION_PAUSE_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class Send:
    """An HTTP request, relative to the base URL."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class Pause:
    """Wait this long, then go on. `cause` says why, for a log."""

    seconds: float
    cause: str


@dataclass(frozen=True)
class Received:
    """A response, and how long it took."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class TransportFailed:
    """No response. The request may have run: inference has no side effects, so it is sent again, unless it can never be sent."""

    cause: Exception
    elapsed_s: float = 0.0
    is_permanent: bool = False


Plan = Generator[Send | Pause, Received | TransportFailed | None, T]


@dataclass(frozen=True)
class Policy:
    """How long a call is willing to wait. `wait_for_capacity` False waits for nothing."""

    wait_for_capacity: bool = True
    connection_budget_s: float = CONNECTION_BUDGET_S
    capacity_budget_s: float = CAPACITY_BUDGET_S


def _headers(api_key: str | None, timeout_s: float | None) -> dict[str, str]:
    headers = {"accept": "application/msgpack", "content-type": "application/msgpack", "x-sie-sdk-version": __version__}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    if timeout_s is not None:
        headers["x-sie-timeout-ms"] = str(max(1, min(600_000, round(timeout_s * 1000))))
    return headers


def call(request: Send, policy: Policy) -> Plan[Received]:
    """Send until it succeeds, fails for good, or the policy's patience ends. Raises SIEError."""
    waited_s = 0.0
    while True:
        answer = yield request
        if isinstance(answer, Received) and answer.status == 200:
            return answer
        if isinstance(answer, TransportFailed):
            failure: SIEError = SIEConnectionError(f"{type(answer.cause).__name__}: {answer.cause}")
            failure.__cause__ = answer.cause
            pause_s, budget_s, may_retry = CONNECTION_PAUSE_S, policy.connection_budget_s, not answer.is_permanent
        else:
            assert answer is not None
            failure = failure_of(answer)
            pause_s = _retry_after_s(answer)
            budget_s, may_retry = policy.capacity_budget_s, answer.headers.get("x-should-retry", "") == "true"
        waited_s += answer.elapsed_s
        pause_s *= random.uniform(0.75, 1.25)  # noqa: S311  spreads clients, guards nothing
        if not (may_retry and policy.wait_for_capacity) or waited_s + pause_s > budget_s:
            raise failure
        waited_s += pause_s
        yield Pause(pause_s, failure.code or "connection")


def _retry_after_s(answer: Received) -> float:
    try:
        return max(0.1, float(answer.headers.get("retry-after", "5")))
    except ValueError:
        return 5.0


def failure_of(answer: Received) -> SIEError:
    """The exception for a response that is not a success."""
    try:
        body = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, RecursionError):
        body = None
    inner = body.get("error") if isinstance(body, dict) else None
    details: dict[str, Any] = dict(inner) if isinstance(inner, dict) else {}
    if isinstance(body, dict) and isinstance(body.get("errors"), list):
        details["errors"] = body["errors"]
    code = str(details.get("code", ""))
    request_id = str(details.get("request_id", answer.headers.get("x-sie-request-id", "")))
    message = str(details.get("message", f"status {answer.status} with an unreadable body"))
    return error_class(code, answer.status)(
        f"{code or answer.status}: {message}", code=code, status=answer.status, request_id=request_id, details=details
    )


def encode(
    model: str,
    items: Sequence[Item | str],
    *,
    params: Mapping[str, Any],
    api_key: str | None,
    timeout_s: float | None,
    policy: Policy,
) -> Plan[list[EncodeResult]]:
    """`POST /v1/encode/{model}`, in requests of at most MAX_ITEMS items; results in input order."""
    path = "/v1/encode/" + quote(model, safe="/:@")
    headers = _headers(api_key, timeout_s)
    results: list[EncodeResult] = []
    for start in range(0, len(items), MAX_ITEMS):
        try:
            body = msgspec.msgpack.encode({"items": list(items[start : start + MAX_ITEMS]), "params": dict(params)})
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"items {start} to {start + MAX_ITEMS}: {error}") from error
        answer = yield from call(Send("POST", path, headers, body), policy)
        results += _encode_results(answer)
    return results


def _encode_results(answer: Received) -> list[EncodeResult]:
    request_id = answer.headers.get("x-sie-request-id", "")
    try:
        body = arrays.unpack(arrays.decode_msgpack(answer.body))
        found: list[EncodeResult] = []
        for slot in body["items"]:
            result: dict[str, Any] = {name: value for name, value in slot.items() if name != "dense"}
            if "dense" in slot:
                result["dense"] = slot["dense"]["values"]
            result.setdefault("timing", body["timing"])
            result |= {"usage": body["usage"], "fingerprint": body["fingerprint"], "model": body["model"], "request_id": request_id}
            found.append(result)  # type: ignore[arg-type]  # built key by key from the reply
        return found
    except (ValueError, KeyError, TypeError, msgspec.DecodeError, RecursionError) as error:
        raise ServerError(f"the server's reply could not be read: {error}", status=answer.status, request_id=request_id) from error


def get_json(path: str, *, api_key: str | None, policy: Policy) -> Plan[Any]:
    """A GET whose reply is JSON."""
    headers = {name: value for name, value in _headers(api_key, None).items() if name != "content-type"}
    answer = yield from call(Send("GET", path, {**headers, "accept": "application/json"}), policy)
    try:
        return msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ServerError(f"the server's reply could not be read: {error}", status=answer.status) from error
