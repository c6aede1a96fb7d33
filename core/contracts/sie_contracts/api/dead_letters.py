"""Replies about dead letters, which are messages that workers failed to process, and about the caller's credential."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from msgspec import Struct

from sie_contracts.api.shapes import MINI

State = Literal["answered", "failed", "waiting", "unavailable", "unreadable"]


class Whoami(Struct, kw_only=True):
    """Scopes of the caller's credential. `name`: the name of the credential in metrics, which does not contain any part
    of the token. Without a credential the name is `anonymous`, and the scopes are those that need no token.
    `auth_mode`: `none`, `static` or `token`.
    """

    EXAMPLE: ClassVar[Any] = {"name": "static-1", "scopes": ["infer", "read", "pools"], "auth_mode": "static"}

    name: str
    scopes: list[str]
    auth_mode: str


class DeadLetterInfo(Struct, kw_only=True):
    """A dead letter without its inputs: a message whose work was given up.

    `at`: time at which the work was given up, in seconds since 1970. `deliveries`: number of deliveries to workers.
    `deaths`: number of adapter processes that died while they ran one of its inputs, for this or another request.
    `workers`: the last workers that received the message. If the message cannot be decoded, `is_readable` is false, and
    its request and model are not known. `sequence`: number of the letter in its pool; a later letter has a larger
    number.
    """

    EXAMPLE: ClassVar[Any] = {
        "id": "3f1c0a9be274",
        "sequence": 17,
        "at": 1790000000.0,
        "pool": "_default",
        "lane": "_default.l4.default",
        "code": "INFERENCE_ERROR",
        "reason": "poison",
        "message": "the inference process ended twice while this input ran alone, so it is not run again",
        "is_readable": True,
        "request": "0192f0c1-7d3e-7000-8000-000000000000",
        "model": MINI,
        "profile": "default",
        "revision": "c9745ed1d9f207416be6d2e6f8de32d1f16199bf",
        "operation": "encode",
        "priority": "interactive",
        "inputs": 1,
        "attempt": 0,
        "deliveries": 1,
        "deaths": 3,
        "workers": ["w0", "w1"],
        "bytes": 412,
    }

    id: str
    sequence: int
    at: float
    pool: str
    lane: str
    code: str
    reason: str
    message: str
    is_readable: bool
    request: str
    model: str
    profile: str
    revision: str
    operation: str
    priority: str
    inputs: int | None
    attempt: int
    deliveries: int
    deaths: int
    workers: list[str]
    bytes: int


class DeadLetterCount(Struct, kw_only=True):
    """Number of dead letters with the same error code and reason."""

    code: str
    reason: str
    count: int


class DeadLetterPage(Struct, kw_only=True):
    """Dead letters of a pool, newest first. `total`: number of all letters of the pool. `counts`: number of letters by
    error, among the `examined` newest letters that fit the filter. `next`: value of `before` for the next page; null at
    the end.
    """

    EXAMPLE: ClassVar[Any] = {
        "pool": "_default",
        "pools": ["_default"],
        "total": 1,
        "examined": 1,
        "counts": [{"code": "INFERENCE_ERROR", "reason": "poison", "count": 1}],
        "letters": [DeadLetterInfo.EXAMPLE],
        "next": None,
    }

    pool: str
    pools: list[str]
    total: int
    examined: int
    counts: list[DeadLetterCount]
    letters: list[DeadLetterInfo]
    next: int | None


class Replayed(Struct, kw_only=True):
    """Result of running the work of a dead letter again. The letter is removed only if all its inputs were answered.

    Values of `state`: `answered`: all inputs have a value. `failed`: some inputs have no value; `errors` counts the
    reasons. `waiting`: no answer came in time. A worker may still run the work within its time budget, but the result
    is dropped. `unavailable`: the broker refused the message, for example because the reservation of its pool has
    ended. `unreadable`: the message cannot be decoded, so nothing was published.
    """

    EXAMPLE: ClassVar[Any] = {
        "id": "3f1c0a9be274",
        "state": "answered",
        "removed": True,
        "inputs": 1,
        "errors": [],
    }

    id: str
    state: State
    removed: bool
    inputs: int | None
    errors: list[DeadLetterCount]


class ReplayedAll(Struct, kw_only=True):
    """Results of running several dead letters again, oldest first. `next`: value of `after` for the next request; null
    if no more letters match the filter.
    """

    EXAMPLE: ClassVar[Any] = {"replayed": [Replayed.EXAMPLE], "next": None}

    replayed: list[Replayed]
    next: int | None


class Purged(Struct, kw_only=True):
    """Number of letters that were deleted. `complete` is false if the time limit was reached before all matching
    letters were deleted.
    """

    EXAMPLE: ClassVar[Any] = {"removed": 1, "complete": True}

    removed: int
    complete: bool
