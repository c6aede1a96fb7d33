"""The client without I/O: a call is a generator, a plan, that yields what it wants done and is sent what came of it.

    Send ──► the shell does the HTTP ──► Received | TransportFailed
    Pause ──► the shell sleeps       Work ──► the shell runs a function that may take long or read files
    Together ──► the shell runs further plans, so many at a time ──► their results in order
    Answered ──► the shell tells the user how far the call has come

The sync and the async client are shells around the same plans, so they cannot drift apart.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

from sie_client.errors import InvalidInputError, ServerError, SIEConnectionError, SIEError, error_class
from sie_client.types import Progress
from sie_contracts import __version__

CONNECTION_BUDGET_S = 120.0
# for a port of this machine that refuses, where no server was yet: one that is forgotten, not one that restarts
NOBODY_BUDGET_S = 5.0
CAPACITY_BUDGET_S = 900.0
PART_TOKENS = 16_384
CONCURRENCY = 8
SERVER_DEADLINE_S = 120.0
CONTROL_S = 30.0  # for what is not inference
GRACE_S = 30.0  # above the server's own deadline, so that its answer wins
CONNECTION_PAUSE_S, MAX_CONNECTION_PAUSE_S = 1.0, 5.0
MAX_COSTLY_PAUSE_S = 30.0
HEDGE_SHARE, MAX_HEDGES = 0.2, 10.0
MAX_TOLD = 256
_logger = logging.getLogger("sie_client")

T = TypeVar("T")


@dataclass(frozen=True)
class UploadStream:
    """A body of `size_bytes` that is never whole in memory. `pieces` begins it anew for each attempt; each piece may
    take long, and may raise SIEError.
    """

    pieces: Callable[[], Generator[bytes]]
    size_bytes: int


class BodySink(Protocol):
    """Takes the body of a success piece by piece. Its methods may take long, and may raise SIEError."""

    def begin(self) -> None:
        """A new attempt: what an earlier one wrote does not count."""

    def write(self, piece: bytes) -> None:
        """The next piece."""


@dataclass(frozen=True)
class Send:
    """An HTTP request, relative to the base URL. No answer within `within_s` is none; a second copy may go after
    `hedge_after_s`. With a `sink` the body of a success goes there, and that of `Received` is empty.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | UploadStream = b""
    within_s: float = SERVER_DEADLINE_S + GRACE_S
    hedge_after_s: float | None = None
    sink: BodySink | None = None


@dataclass(frozen=True)
class Pause:
    """Wait this long, then go on. `cause` says why, for a log, `error` in words, and `remaining_s` how much patience
    is left; no cause: nothing is wrong.
    """

    seconds: float
    cause: str = ""
    remaining_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class BlockingWork:
    """Call this where it holds up nobody else; the reply is what it returns."""

    function: Callable[[], Any]


@dataclass(frozen=True)
class HttpAnswer:
    """So many more items of the call have their answer."""

    items: int


@dataclass(frozen=True)
class Together:
    """Run these plans, so many at a time; the reply is the list of their results, in order. What one raises ends all of
    them.

    Taking the next plan may take long or read files, as `Work` does.
    """

    plans: Iterator[Plan[Any]]
    concurrency: int


@dataclass(frozen=True)
class Received:
    """A response, and how long it took. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class TransportFailed:
    """No response. The request may have run: inference has no side effects, so it is sent again, unless it can never be
    sent.

    `address`: whose answer it would have been. `is_nobody`: a port of this machine refuses, and has never answered.
    """

    cause: Exception
    elapsed_s: float = 0.0
    is_permanent: bool = False
    address: str = ""
    is_nobody: bool = False


Step: TypeAlias = "Send | Pause | BlockingWork | HttpAnswer | Together"
Plan: TypeAlias = "Generator[Step, Any, T]"


@dataclass(frozen=True)
class Policy:
    """How long a call is willing to wait. `wait_for_capacity` False waits for nothing. `connection_budget_s` None: as
    long as is usual.
    """

    wait_for_capacity: bool = True
    connection_budget_s: float | None = None
    capacity_budget_s: float = CAPACITY_BUDGET_S


class Patience:
    """A policy, shared by the parts of a call: an answer to any of them renews what the others have left."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.mark = object()  # another one after each answer

    def renew(self) -> None:
        self.mark = object()


class LoggedWarnings:
    """The server's warnings that a client has logged: each once, however many replies have it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def warn(self, warnings: object) -> None:
        """Log those that are new; past MAX_TOLD different ones no more."""
        for warning in warnings if isinstance(warnings, list) else ():
            with self._lock:
                is_new = str(warning) not in self._logged and len(self._logged) < MAX_TOLD
                self._logged.add(str(warning))
            if is_new:
                _logger.warning("the server warns: %s", warning)


class Hedges:
    """How many second copies may go: one, and one for each five requests, so that hedging cannot double a load that is
    already too high.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = 1.0

    def sent(self) -> None:
        with self._lock:
            self._tokens = min(MAX_HEDGES, self._tokens + HEDGE_SHARE)

    def acquire(self) -> bool:
        """Whether one may go now."""
        with self._lock:
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True


@dataclass(frozen=True)
class Session:
    """State that all calls of a client share; `for_call` returns a copy with the options of one call. Raises
    InvalidInputError.
    """

    api_key: str | None = field(default=None, repr=False)
    gpu: str | None = None
    pool: str | None = None
    priority: str | None = None
    timeout_s: float | None = None
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    explain: bool = False
    strict: bool = False
    wait_for_capacity: bool = True
    connection_budget_s: float | None = None
    capacity_budget_s: float = CAPACITY_BUDGET_S
    part_tokens: int = PART_TOKENS
    concurrency: int = CONCURRENCY
    hedge_after_s: float | None = None
    progress: bool | None = None
    on_progress: Callable[[Progress], None] | None = None
    hedges: Hedges = field(default_factory=Hedges, repr=False, compare=False)
    warnings: LoggedWarnings = field(default_factory=lambda: LoggedWarnings(), repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, (kind, least) in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | kind) and math.isfinite(value) and value >= least):
                expected = "a whole number" if kind is int else "a number"
                raise InvalidInputError(
                    f"{name}: expected {expected} of at least {least}, got {value!r}", code="INVALID_INPUT"
                )
        if self.priority not in (None, "interactive", "bulk"):
            raise InvalidInputError(
                f"priority: expected interactive or bulk, got {self.priority!r}", code="INVALID_INPUT"
            )
        for name, value in self.sent_headers().items():
            if not (isinstance(value, str) and value.isascii() and value.isprintable() and name.isascii()):
                raise InvalidInputError(f"header {name}: expected printable ASCII in one line", code="INVALID_INPUT")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Session:
        """A session with these options; None means the default. Raises TypeError for a name that is none of them."""
        session, rest = cls().for_call(options)
        if rest:
            raise TypeError(f"unexpected options: {', '.join(sorted(rest))}")
        return session

    def for_call(self, options: Mapping[str, Any]) -> tuple[Session, dict[str, Any]]:
        """The session of one call, and those of its parameters that go to the server."""
        own = {name: value for name, value in options.items() if name in _OPTIONS and value is not None}
        return replace(self, **own) if own else self, {
            name: value for name, value in options.items() if name not in _OPTIONS
        }

    @property
    def policy(self) -> Policy:
        return Policy(self.wait_for_capacity, self.connection_budget_s, self.capacity_budget_s)

    @property
    def within_s(self) -> float:
        """How long an answer may take."""
        return max(SERVER_DEADLINE_S, self.timeout_s or 0.0) + GRACE_S

    def sent_headers(self) -> dict[str, str]:
        """Headers of every request, without those of the format of its body."""
        headers = {"x-sie-client-version": __version__}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key.strip()}"
        if self.timeout_s is not None:
            headers["x-sie-timeout-ms"] = str(max(1, min(600_000, round(self.timeout_s * 1000))))
        named = {
            "x-sie-machine-profile": self.gpu,
            "x-sie-pool": self.pool,
            "x-sie-priority": self.priority,
            "x-sie-explain": "1" if self.explain else None,
            "x-sie-strict": "true" if self.strict else None,
        }
        headers |= {name: value for name, value in named.items() if value}
        return {**headers, **{name.lower(): value for name, value in (self.headers or {}).items()}}


_LEAST: dict[str, tuple[type[int] | type[float], float]] = {
    "timeout_s": (float, 0.001),
    "connection_budget_s": (float, 0),
    "capacity_budget_s": (float, 0),
    "hedge_after_s": (float, 0),
    "part_tokens": (int, 1),
    "concurrency": (int, 1),
}
_OPTIONS = frozenset(field.name for field in fields(Session)) - {"hedges", "warnings"}


def call(request: Send, policy: Policy, patience: Patience | None = None) -> Plan[Received]:
    """Send until it succeeds, fails for good, or patience ends. Raises SIEError: that of the last attempt, chained to
    the one before.
    """
    patience = patience or Patience(policy)
    mark = patience.mark
    waited_s, tries = {True: 0.0, False: 0.0}, {True: 0, False: 0}  # for a connection, for capacity
    previous: SIEError | None = None
    while True:
        answer: Received | TransportFailed = yield request
        if isinstance(answer, Received) and 200 <= answer.status < 300:
            patience.renew()
            return answer
        failure, min_s, max_s, is_away = _judged(answer)
        if mark is not patience.mark:
            mark, waited_s = patience.mark, dict.fromkeys(waited_s, 0.0)
        waited_s[is_away] += answer.elapsed_s
        budget_s = _connection_budget_s(policy, answer) if is_away else policy.capacity_budget_s
        pause_s = min(max_s, min_s * 2 ** min(tries[is_away], 10)) * random.uniform(0.75, 1.25)  # noqa: S311  spreads clients
        tries[is_away] += 1
        remaining_s = budget_s - waited_s[is_away]
        if not (failure.retryable and policy.wait_for_capacity) or not pause_s <= remaining_s:
            if previous is not None:
                failure.args = (f"{failure} (attempt {sum(tries.values())}, after {sum(waited_s.values()):.0f} s)",)
            raise failure from failure.__cause__ or previous
        waited_s[is_away] += pause_s
        previous = failure
        error = "" if failure.code else _in_a_line(answer)
        yield Pause(pause_s, failure.code or "connection", remaining_s - pause_s, error)


def _in_a_line(answer: Received | TransportFailed) -> str:
    """Describe in one line an attempt that failed without a code."""
    if isinstance(answer, Received):
        return f"HTTP {answer.status}"
    return " ".join(f"{type(answer.cause).__name__}: {answer.cause}".split())[:MAX_ERROR]


def _connection_budget_s(policy: Policy, answer: Received | TransportFailed) -> float:
    if policy.connection_budget_s is not None:
        return policy.connection_budget_s
    return NOBODY_BUDGET_S if isinstance(answer, TransportFailed) and answer.is_nobody else CONNECTION_BUDGET_S


_OF_PROXIES = (502, 503, 504)
MAX_ERROR = 200  # characters of a library's text in a line of the log
# what may have cost the device its time is repeated ever more slowly
_COSTLY = frozenset({"GATEWAY_TIMEOUT", "RESOURCE_EXHAUSTED"})


def _judged(answer: Received | TransportFailed) -> tuple[SIEError, float, float, bool]:
    """The exception of an attempt; the first pause and the longest, in seconds; whether nobody was there, rather than
    nobody free.
    """
    if isinstance(answer, TransportFailed):
        where = f"no answer from {answer.address}: " if answer.address else ""
        hint = "; is a server running there? `sie serve` starts one" if answer.is_nobody else ""
        message = f"{where}{type(answer.cause).__name__}: {answer.cause}{hint}"
        failure: SIEError = SIEConnectionError(message, retryable=not answer.is_permanent)
        failure.__cause__ = answer.cause
        return failure, CONNECTION_PAUSE_S, MAX_CONNECTION_PAUSE_S, True
    failure = failure_of(answer)
    if not failure.code and answer.status in _OF_PROXIES:  # a proxy's answer: there is nobody behind it
        failure.retryable = True
        return failure, CONNECTION_PAUSE_S, MAX_CONNECTION_PAUSE_S, True
    told_s = _retry_after_s(answer)
    return failure, told_s, max(told_s, MAX_COSTLY_PAUSE_S if failure.code in _COSTLY else 0.0), False


def _retry_after_s(answer: Received) -> float:
    try:
        told_s = float(answer.headers.get("retry-after", "5"))
    except ValueError:
        return 5.0
    return max(0.1, told_s) if math.isfinite(told_s) else 5.0


def failure_of(answer: Received) -> SIEError:
    """The exception for a response that is not a success."""
    try:
        body = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        body = None
    document: dict[str, Any] = body if isinstance(body, dict) else {}
    inner = document.get("error")
    details = dict(inner) if isinstance(inner, dict) else {}
    if isinstance(document.get("errors"), list):
        details["errors"] = document["errors"]
    # routes in the shape of another API have its code in the body
    code = str(answer.headers.get("x-sie-error-code") or details.get("code", ""))
    request_id = str(details.get("request_id", answer.headers.get("x-sie-request-id", "")))
    message = str(
        details.get("message", f"status {answer.status}, which SIE does not answer with here: is this its base URL?")
    )
    retryable = answer.headers.get("x-should-retry", str(details.get("retryable") is True)).lower() == "true"
    return error_class(code, answer.status)(
        f"{code or answer.status}: {message}",
        code=code,
        status=answer.status,
        request_id=request_id,
        retryable=retryable,
        details=details,
    )


@contextlib.contextmanager
def reading(headers: Mapping[str, str]) -> Iterator[None]:
    """Raise ServerError where a reply lacks what it should have."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, msgspec.DecodeError, RecursionError) as error:
        request_id = headers.get("x-sie-request-id", "")
        raise ServerError(
            f"the server's reply could not be read: {error}", status=200, request_id=request_id
        ) from error


def quoted(name: str) -> str:
    """A model or another name as part of a path. Raises InvalidInputError."""
    try:
        return quote(str(name), safe="/:@")
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            "a name holds a lone surrogate, which is not valid Unicode", code="INVALID_INPUT"
        ) from error


def json_call(
    method: str,
    path: str,
    session: Session,
    body: Any = None,
    within_s: float = CONTROL_S,
    *,
    headers: Mapping[str, str] | None = None,
    type: Any = Any,
) -> Plan[Any]:
    """A call whose body, if any, and reply are JSON. The reply is of this type, or ServerError."""
    headers = {**session.sent_headers(), "accept": "application/json", **(headers or {})}
    sent = b""
    if body is not None:
        headers["content-type"] = "application/json"
        try:
            sent = msgspec.json.encode(body)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidInputError(f"body: {error}", code="INVALID_INPUT") from error
    answer = yield from call(Send(method, path, headers, sent, within_s), session.policy)
    with reading(answer.headers):
        return msgspec.json.decode(answer.body, type=type)
