"""Dead letters and the caller's own scopes over HTTP."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from msgspec import Struct

from sie_contracts.api.shapes import MINI

State = Literal["answered", "failed", "waiting", "unavailable", "unreadable"]


class Whoami(Struct, kw_only=True):
    """What the caller's credential may do. `name`: how metrics name the credential, never a part of it; without one
    `anonymous`, whose scopes are what nobody needs a token for. `auth_mode`: none, static or token.
    """

    EXAMPLE: ClassVar[Any] = {"name": "static-1", "scopes": ["infer", "read", "pools"], "auth_mode": "static"}

    name: str
    scopes: list[str]
    auth_mode: str


class DeadLetterInfo(Struct, kw_only=True):
    """A dead letter without its inputs.

    `at` is when the work was given up, seconds since the epoch. `deliveries`: how often it went to a worker. `deaths`:
    adapters that it ended. `workers`: the last that had it. Of work that nobody can read, `is_readable` is false, and
    nothing is known of its request and model. `sequence` grows from one letter of a pool to the next.
    """

    EXAMPLE: ClassVar[Any] = {
        "id": "3f1c0a9be274",
        "sequence": 17,
        "at": 1790000000.0,
        "pool": "_default",
        "lane": "_default.l4.default",
        "code": "INFERENCE_ERROR",
        "reason": "poison",
        "message": "this input ended the inference process twice",
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
        "deaths": 2,
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
    """How many have an error."""

    code: str
    reason: str
    count: int


class DeadLetterPage(Struct, kw_only=True):
    """Dead letters of a pool, the newest first. `total`: all of the pool. `counts`: by error, over those that fit the
    filter among the `examined` newest. `next`: the `before` of the next page; null at the end.
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
    """What came of a letter that was run again. Only one that was `answered` in full is removed.

    `failed`: some inputs have no value, `errors` counts why. `waiting`: no answer in time; the work runs if a worker
    comes within its budget, and nobody gets its result. `unavailable`: the broker refused, as for the pool of a
    reservation that ended. `unreadable`: nobody can read the work, so nothing was published.
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
    """Several letters, the oldest first. `next`: the `after` with which to go on; null where no more fit."""

    EXAMPLE: ClassVar[Any] = {"replayed": [Replayed.EXAMPLE], "next": None}

    replayed: list[Replayed]
    next: int | None


class Purged(Struct, kw_only=True):
    """How many letters were removed for ever. `complete` is false where time ran out before all that fit were met."""

    EXAMPLE: ClassVar[Any] = {"removed": 1, "complete": True}

    removed: int
    complete: bool
