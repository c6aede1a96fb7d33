"""The client without I/O: a call is a generator that yields what to send or how long to wait, and is sent what came back.

    encode | score | extract ──yields──► Send ──► shell does the HTTP ──Received | TransportFailed──► generator
                             └─yields──► Pause ──► shell sleeps
                             └─returns─► results

The sync and the async client are shells around the same generators, so they cannot drift apart.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import quote

import msgspec

from sie_contracts import __version__, arrays
from sie_sdk.errors import RequestError, ServerError, SIEConnectionError, SIEError, error_class
from sie_sdk.types import EncodeResult, ExtractResult, Item, ScoreResult

MAX_ITEMS = 2048
OUTPUTS = ("dense", "sparse", "multivector")
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
    told: dict[str, Any] = body if isinstance(body, dict) else {}
    inner = told.get("error")
    # a 202 says "not yet" in the body itself, with its code in a header alone
    details = dict(inner) if isinstance(inner, dict) else dict(told) if answer.status < 400 else {}
    if isinstance(told.get("errors"), list):
        details["errors"] = told["errors"]
    code = str(details.get("code", answer.headers.get("x-sie-error-code", "")))
    request_id = str(details.get("request_id", answer.headers.get("x-sie-request-id", "")))
    message = str(details.get("message", f"status {answer.status} with an unreadable body"))
    return error_class(code, answer.status)(
        f"{code or answer.status}: {message}", code=code, status=answer.status, request_id=request_id, details=details
    )


@dataclass(frozen=True)
class Session:
    """What all calls of a client share."""

    api_key: str | None = None
    timeout_s: float | None = None
    policy: Policy = Policy()


class _Part(NamedTuple):
    """The reply to one request of a call: that of the items from `start` on. `shared` belongs to each of its results."""

    start: int
    body: dict[str, Any]
    shared: dict[str, Any]


def encode(model: str, items: Sequence[Item | str], params: Mapping[str, Any], session: Session) -> Plan[list[EncodeResult]]:
    """`POST /v1/encode/{model}`; results in input order."""
    results: list[Any] = []
    for part in (yield from _ask("encode", model, items, {"params": dict(params)}, session)) if items else ():
        with _reading(part.shared["request_id"]):
            results += [_encoded(slot, part.shared) for slot in part.body["items"]]
    return results


def score(model: str, query: Item | str, items: Sequence[Item | str], params: Mapping[str, Any], session: Session) -> Plan[ScoreResult]:
    """`POST /v1/score/{model}`; entries of all items together, best first, failed ones last."""
    is_split = len(items) > MAX_ITEMS
    # ids may be given twice, and replies are sorted: places tell which entry is whose
    sent = [{**_mapped(item), "id": str(place)} for place, item in enumerate(items)] if is_split else items
    parts = yield from _ask("score", model, sent, {"query": query, "params": dict(params)}, session)
    with _reading(parts[-1].shared["request_id"]):
        if not is_split:
            return cast("ScoreResult", {**parts[0].body, **parts[0].shared})
        entries = [entry for part in parts for entry in part.body["scores"]]
        entries.sort(key=lambda entry: (entry["score"] is None, -(entry["score"] or 0.0), int(entry["item_id"])))
        for rank, entry in enumerate(entries):
            place = int(entry["item_id"])
            own = _mapped(items[place]).get("id")
            entry |= {"rank": rank, "item_id": f"item-{place}" if own is None else own}
        usages = [(part.start, part.body["usage"]) for part in parts]
        usage: dict[str, Any] = {name: sum(each[name] for _, each in usages) for name in ("prompt_tokens", "total_tokens")}
        usage["truncated_items"] = [start + index for start, each in usages for index in each["truncated_items"]]
        return cast("ScoreResult", {**parts[-1].body, **parts[-1].shared, "scores": entries, "usage": usage})


def extract(model: str, items: Sequence[Item | str], params: Mapping[str, Any], session: Session) -> Plan[list[ExtractResult]]:
    """`POST /v1/extract/{model}`; results in input order."""
    results: list[Any] = []
    for part in (yield from _ask("extract", model, items, {"params": dict(params)}, session)) if items else ():
        with _reading(part.shared["request_id"]):
            for index, slot in enumerate(part.body["items"], part.start):
                own = _mapped(items[index]).get("id")
                results.append({**slot, "id": f"item-{index}" if own is None else own, **part.shared})
    return results


def _mapped(item: Item | str) -> Item:
    if isinstance(item, str):
        return {"text": item}
    if not isinstance(item, dict):
        raise RequestError(f"items: expected maps and strings, got {type(item).__name__}")
    return item


def _ask(verb: str, model: str, items: Sequence[Any], fixed: Mapping[str, Any], session: Session) -> Plan[list[_Part]]:
    """Requests of at most MAX_ITEMS items, one after the other."""
    path = f"/v1/{verb}/" + quote(model, safe="/:@")
    headers = _headers(session.api_key, session.timeout_s)
    parts: list[_Part] = []
    for start in range(0, max(1, len(items)), MAX_ITEMS):
        try:
            body = msgspec.msgpack.encode({"items": list(items[start : start + MAX_ITEMS]), **fixed})
        except (TypeError, ValueError, OverflowError) as error:
            raise RequestError(f"items {start} to {start + MAX_ITEMS}, or a parameter: {error}") from error
        answer = yield from call(Send("POST", path, headers, body), session.policy)
        request_id = answer.headers.get("x-sie-request-id", "")
        with _reading(request_id):
            reply = arrays.unpack(arrays.decode_msgpack(answer.body))
            shared = {name: reply[name] for name in ("model", "timing", "usage", "fingerprint")}
            shared |= {name: reply[name] for name in ("muvera", "warnings", "explain") if name in reply}
            parts.append(_Part(start, reply, {**shared, "request_id": request_id}))
    return parts


@contextlib.contextmanager
def _reading(request_id: str) -> Iterator[None]:
    """What a reply should have and has not is the server's fault."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, msgspec.DecodeError, RecursionError) as error:
        raise ServerError(f"the server's reply could not be read: {error}", status=200, request_id=request_id) from error


def _encoded(slot: dict[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a slot by name, what describes them under `outputs`."""
    result = {**shared, **{name: value for name, value in slot.items() if name not in OUTPUTS}}
    result["outputs"] = {}
    for name in OUTPUTS:
        if name in slot:
            found = dict(slot[name])
            result[name] = {key: found.pop(key) for key in ("indices", "values")} if name == "sparse" else found.pop("values")
            result["outputs"][name] = found
    return result


def get_json(path: str, session: Session) -> Plan[Any]:
    """A GET whose reply is JSON."""
    headers = {name: value for name, value in _headers(session.api_key, None).items() if name != "content-type"}
    answer = yield from call(Send("GET", path, {**headers, "accept": "application/json"}), session.policy)
    try:
        return msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ServerError(f"the server's reply could not be read: {error}", status=answer.status) from error
