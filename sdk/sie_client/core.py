"""The client without I/O. A call is a plan: a generator that yields steps. A driver executes each step and sends its
result back into the generator.

    Send ──► HTTP request ──► Received | TransportFailed
    Pause ──► sleep                   BlockingWork ──► call of a function that may take long or read files
    Together ──► several plans, a limited number at a time ──► their results, in the order of the plans
    HttpAnswer (more items were answered) ──► progress of the call is reported

The blocking client and the asyncio client are two drivers of the same plans, so they behave in the same way.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from sie_client.errors import NotFoundError, ServerError, SIEConnectionError, SIEError, error_class, invalid
from sie_client.types import Progress
from sie_contracts import __version__, url_names
from sie_contracts.errors import UNDECODABLE

CONNECTION_BUDGET_S = 120.0
# seconds of retries if a port of this machine refuses connections and no server has answered on this port before
NOBODY_BUDGET_S = 5.0
CAPACITY_BUDGET_S = 900.0
PART_TOKENS = 16_384
CONCURRENCY = 8
SERVER_DEADLINE_S = 120.0
CONTROL_S = 30.0  # seconds that the answer to a request of `json_call` and `delete_call` may take
# seconds that the client waits longer than the server's deadline, so that the server's error arrives first
GRACE_S = 30.0
CONNECTION_PAUSE_S, MAX_CONNECTION_PAUSE_S = 1.0, 5.0
MAX_COSTLY_PAUSE_S = 30.0
HEDGE_SHARE, MAX_HEDGES = 0.2, 10.0
MAX_TOLD = 256
_logger = logging.getLogger("sie_client")

D = TypeVar("D")
T = TypeVar("T")


@dataclass(frozen=True)
class UploadStream:
    """Request body of `size_bytes` that is never completely in memory. Each attempt to send the body calls `pieces`
    again. The next piece may take long to read, and the read may raise SIEError.
    """

    pieces: Callable[[], Generator[bytes]]
    size_bytes: int


class BodySink(Protocol):
    """Receiver of the body of a successful response, such as a file. Its methods may block, and may raise SIEError."""

    def begin(self) -> None:
        """Prepare for the first piece of an attempt. Discard the pieces of an earlier, failed attempt."""

    def write(self, piece: bytes) -> None:
        """Receive the next piece of the body."""


@dataclass(frozen=True)
class Send:
    """Step to send an HTTP request. `path`: relative to the base URL. `within_s`: the attempt fails if no byte of the
    response arrives for this number of seconds. `hedge_after_s`: after this number of seconds without a response, the
    driver may send a second copy of the request, and uses the first successful response; None: no copy. `sink`: gets
    the body of a successful response; `Received.body` is then empty. `may_repeat`: after a broken connection or the
    error of a proxy, SIE may have run the request; `call` sends it again only if `may_repeat()` returns True.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | UploadStream = b""
    within_s: float = SERVER_DEADLINE_S + GRACE_S
    hedge_after_s: float | None = None
    sink: BodySink | None = None
    may_repeat: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Pause:
    """Step to wait for `seconds`. `cause`: the reason for the user's log, such as an error code; empty for a pause
    without an error. `error`: text of the error before the pause, if `cause` is no error code. `remaining_s`: seconds
    that the call may wait after this pause.
    """

    seconds: float
    cause: str = ""
    remaining_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class BlockingWork:
    """Step to call `function`, which may block; the asyncio driver uses a thread. The result is the return value."""

    function: Callable[[], Any]


@dataclass(frozen=True)
class HttpAnswer:
    """Step to report progress: `items` more items of the call were answered."""

    items: int


@dataclass(frozen=True)
class Together:
    """Step to run plans, at most `concurrency` at a time. The result of the step is the list of the plans' results, in
    the order of `plans`. If one plan raises an exception, all others are stopped. The iterator `plans` may block, for
    example to read files.
    """

    plans: Iterator[Plan[Any]]
    concurrency: int


@dataclass(frozen=True)
class Received:
    """An HTTP response, and the seconds until it arrived. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class TransportFailed:
    """Failure of a request: no response arrived. The server may nevertheless have run the request. If `is_permanent`,
    another attempt is useless. `address`: the server's address. `is_nobody`: a port of this machine refused the
    connection, and no server has answered on this port before.
    """

    cause: Exception
    elapsed_s: float = 0.0
    is_permanent: bool = False
    address: str = ""
    is_nobody: bool = False


Answer: TypeAlias = "Received | TransportFailed"
Step: TypeAlias = "Send | Pause | BlockingWork | HttpAnswer | Together"
Plan: TypeAlias = "Generator[Step, Any, T]"


class Patience:
    """Sign of progress that all requests of a call share. Each success puts a new object into `mark`. A request that
    fails and finds a new object there counts its waiting time from 0 again, because the server works.
    """

    def __init__(self) -> None:
        self.mark = object()


class LoggedWarnings:
    """Warnings of the server that a client has already logged. Each text is logged once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def warn(self, warnings: object) -> None:
        """Log the warnings that are new. After MAX_TOLD different warnings, log no more."""
        for warning in warnings if isinstance(warnings, list) else ():
            with self._lock:
                is_new = str(warning) not in self._logged and len(self._logged) < MAX_TOLD
                if is_new:
                    self._logged.add(str(warning))
            if is_new:
                _logger.warning("the server warns: %s", warning)


class Hedges:
    """Permits for second copies of slow requests (`Send.hedge_after_s`). A session begins with one permit, gets one
    more for every five requests, and has at most MAX_HEDGES. So second copies add at most a fifth to the server's load.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = 1.0

    def sent(self) -> None:
        with self._lock:
            self._tokens = min(MAX_HEDGES, self._tokens + HEDGE_SHARE)

    def acquire(self) -> bool:
        """Take a permit to send a second copy of a request. Return False if there is no permit."""
        with self._lock:
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True


@dataclass(frozen=True)
class Session:
    """Options and shared state of a client or of a call. Raises InvalidInputError for an invalid option."""

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
                raise invalid(f"{name}: expected {expected} of at least {least}, got {value!r}")
        if self.priority not in (None, "interactive", "bulk"):
            raise invalid(f"priority: expected interactive or bulk, got {self.priority!r}")
        for name, value in self.sent_headers().items():
            if not (isinstance(value, str) and value.isascii() and value.isprintable() and name.isascii()):
                raise invalid(f"header {name}: expected printable ASCII in one line")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Session:
        """Return a session with these options; None means the default. Raises TypeError for an unknown option."""
        session, rest = cls().for_call(options)
        if rest:
            raise TypeError(f"unexpected options: {', '.join(sorted(rest))}")
        return session

    def for_call(self, options: Mapping[str, Any]) -> tuple[Session, dict[str, Any]]:
        """Return a session with the options of one call, and the other entries of `options`: the call's parameters."""
        own = {name: value for name, value in options.items() if name in _OPTIONS and value is not None}
        return replace(self, **own) if own else self, {
            name: value for name, value in options.items() if name not in _OPTIONS
        }

    @property
    def within_s(self) -> float:
        """Return how many seconds the client waits for the answer to a request: the server's deadline and GRACE_S."""
        return max(SERVER_DEADLINE_S, self.timeout_s or 0.0) + GRACE_S

    def sent_headers(self) -> dict[str, str]:
        """Return the headers that every request has, except the headers for the format of the body."""
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


class Calls(Generic[D]):
    """Group of methods of a client, such as `jobs`. `driver`: driver that runs the plans of these methods."""

    def __init__(self, driver: D, session: Session) -> None:
        self._driver = driver
        self._session = session


_LEAST: dict[str, tuple[type[int] | type[float], float]] = {
    "timeout_s": (float, 0.001),
    "connection_budget_s": (float, 0),
    "capacity_budget_s": (float, 0),
    "hedge_after_s": (float, 0),
    "part_tokens": (int, 1),
    "concurrency": (int, 1),
}
_OPTIONS = frozenset(field.name for field in fields(Session)) - {"hedges", "warnings"}


def call(request: Send, session: Session, patience: Patience | None = None) -> Plan[Received]:
    """Send a request until an attempt succeeds, a retry is useless or not allowed, or no waiting time is left. Raises
    the SIEError of the last attempt. Its `__cause__` is the exception of the HTTP client, or without one, the
    error of the previous attempt.
    """
    patience = patience or Patience()
    mark = patience.mark
    # seconds and number of attempts, for `is_away` True (the connection failed) and False (no capacity)
    waited_s, tries = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    previous: SIEError | None = None
    while True:
        answer: Answer = yield request
        if isinstance(answer, Received) and 200 <= answer.status < 300:
            patience.mark = object()
            return answer
        failure, min_s, max_s, is_away = _judged(answer)
        if mark is not patience.mark:
            mark, waited_s = patience.mark, dict.fromkeys(waited_s, 0.0)
        waited_s[is_away] += answer.elapsed_s
        budget_s = _connection_budget_s(session, answer) if is_away else session.capacity_budget_s
        pause_s = min(max_s, min_s * 2 ** min(tries[is_away], 10)) * random.uniform(0.75, 1.25)  # noqa: S311  spreads attempts
        tries[is_away] += 1
        remaining_s = budget_s - waited_s[is_away]
        is_final = is_away and not request.may_repeat()
        failure.may_have_run = tries[True] > 0
        if is_final or not (failure.retryable and session.wait_for_capacity) or not pause_s <= remaining_s:
            if previous is not None:
                failure.args = (f"{failure} (attempt {sum(tries.values())}, after {sum(waited_s.values()):.0f} s)",)
            raise failure from failure.__cause__ or previous
        waited_s[is_away] += pause_s
        previous = failure
        error = "" if failure.code else _in_a_line(answer)
        yield Pause(pause_s, failure.code or "connection", remaining_s - pause_s, error)


def _in_a_line(answer: Answer) -> str:
    """Return a one-line description of a failed attempt for which the server sent no error code."""
    if isinstance(answer, Received):
        return f"HTTP {answer.status}"
    return " ".join(f"{type(answer.cause).__name__}: {answer.cause}".split())[:MAX_ERROR]


def _connection_budget_s(session: Session, answer: Answer) -> float:
    if session.connection_budget_s is not None:
        return session.connection_budget_s
    return NOBODY_BUDGET_S if isinstance(answer, TransportFailed) and answer.is_nobody else CONNECTION_BUDGET_S


_OF_PROXIES = (502, 503, 504)
MAX_ERROR = 200  # largest number of characters of a library's error text that are logged
# Error codes after which the device may have computed results that nobody received. To waste less work of the device,
# the pauses between attempts grow to MAX_COSTLY_PAUSE_S; after other errors of the server the pauses stay equal.
_COSTLY = frozenset({"GATEWAY_TIMEOUT", "RESOURCE_EXHAUSTED"})


def _judged(answer: Answer) -> tuple[SIEError, float, float, bool]:
    """Return four values for a failed attempt: its exception, the shortest and the longest pause before the next
    attempt in seconds, and whether the connection failed (False if the server answered with an error).
    """
    if isinstance(answer, TransportFailed):
        where = f"no answer from {answer.address}: " if answer.address else ""
        message = f"{where}{type(answer.cause).__name__}: {answer.cause}"
        if answer.is_nobody:
            message = f"no server at {answer.address}: the connection is refused; `sie serve` starts one"
        failure: SIEError = SIEConnectionError(message, retryable=not answer.is_permanent)
        failure.__cause__ = answer.cause
        return failure, CONNECTION_PAUSE_S, MAX_CONNECTION_PAUSE_S, True
    failure = failure_of(answer)
    # a 502, 503 or 504 without an error code of SIE comes from a proxy that cannot reach SIE: a failed connection
    if not failure.code and answer.status in _OF_PROXIES:
        failure.retryable = True
        return failure, CONNECTION_PAUSE_S, MAX_CONNECTION_PAUSE_S, True
    pause_s = _retry_after_s(answer)
    return failure, pause_s, max(pause_s, MAX_COSTLY_PAUSE_S if failure.code in _COSTLY else 0.0), False


def _retry_after_s(answer: Received) -> float:
    try:
        pause_s = float(answer.headers.get("retry-after", "5"))
    except ValueError:
        return 5.0
    return max(0.1, pause_s) if math.isfinite(pause_s) else 5.0


def failure_of(answer: Received) -> SIEError:
    """Return the exception for a response that is not a success."""
    try:
        body = msgspec.json.decode(answer.body)
    except UNDECODABLE:
        body = None
    document: dict[str, Any] = body if isinstance(body, dict) else {}
    inner = document.get("error")
    details = dict(inner) if isinstance(inner, dict) else {}
    if isinstance(document.get("errors"), list):
        details["errors"] = document["errors"]
    # prefer the header: on the routes of another API (such as OpenAI), the body has the error code of that API
    code = answer.headers.get("x-sie-error-code") or details.get("code")
    code = code if isinstance(code, str) else ""  # the code of a proxy may be a number
    request_id = str(details.get("request_id") or answer.headers.get("x-sie-request-id", ""))
    message = str(details.get("message") or f"status {answer.status} without an error of SIE: is the base URL right?")
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
    """Context manager: exceptions while a reply is read, for example for a missing field, become ServerError."""
    try:
        yield
    except (*UNDECODABLE, LookupError, TypeError, AttributeError) as error:
        request_id = headers.get("x-sie-request-id", "")
        raise ServerError(
            f"the server's reply could not be read: {error}", status=200, request_id=request_id
        ) from error


def quoted(name: str, argument: str) -> str:
    """Return a name escaped for a URL path. Raises InvalidInputError that names `argument` if the name is invalid."""
    try:
        return url_names.quoted(name, argument)
    except ValueError as error:
        raise invalid(str(error)) from error


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
    """Send `body` as JSON, unless it is None. Return the JSON reply as `type`. Raises the errors of `call`,
    InvalidInputError if `body` cannot be encoded, and ServerError if the reply is not valid JSON of this type.
    """
    headers = {**session.sent_headers(), "accept": "application/json", **(headers or {})}
    sent = b""
    if body is not None:
        headers["content-type"] = "application/json"
        try:
            sent = msgspec.json.encode(body)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise invalid(f"body: {error}") from error
    answer = yield from call(Send(method, path, headers, sent, within_s), session)
    with reading(answer.headers):
        return msgspec.json.decode(answer.body, type=type)


def delete_call(path: str, session: Session, within_s: float = CONTROL_S, *, type: Any = Any) -> Plan[None]:
    """Send a DELETE. Raises NotFoundError if the object does not exist, except if an earlier attempt got no response:
    that attempt may have deleted the object.
    """
    try:
        yield from json_call("DELETE", path, session, within_s=within_s, type=type)
    except NotFoundError as error:
        if not error.may_have_run:
            raise
