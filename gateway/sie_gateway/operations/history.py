"""Log and history of the inference requests of a gateway. The history covers the last hour: counts, errors and latency
by stage for each step of time, and full records of the slowest requests. People use it to find out why requests are
slow.

The log has one line for each inference request. There is an exception for requests that were refused before they ran:
only the first ones of each interval have a line, and one more line counts the rest. So overload does not flood the log.
Model and request id are fields of the log record.

    encode 200 in 9.3 ms items=3 tokens=24 queue_time=2.104 load_time=0.0 ... unattributed_time=1.088
    512 more requests were refused in 10 s: encode 503 code=QUEUE_FULL 500, score 503 code=QUEUE_FULL 12

`LogTail` holds the newest log lines that have a request id, so that a user can find the lines of a request.

    a request ends ──► its step of 10 s: requests, errors by code, a histogram of each stage
                  └──► full records of the slowest and the last failed requests of its minute

The numbers of steps and of recorded requests are limited. No part of a body or of a credential is stored.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import heapq
import itertools
import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sie_contracts.stages import STAGES
from sie_gateway.admission.grant import Grant

if TYPE_CHECKING:
    from sie_gateway.inference.call import Call

REFUSED = frozenset({"QUEUE_FULL", "RATE_LIMITED"})  # codes of requests that were refused before they ran
INTERVAL_S = 10.0
MAX_REFUSED_LINES = 20  # largest number of log lines of refused requests in an interval
STEP_S = 10
STEPS = 360
MINUTE_S = 60
SLOWEST, FAILED = 5, 5  # numbers of slow and of failed requests that are recorded in full, for each minute and key
MAX_OWNERS = 8  # keys of a minute with separate lists of requests; the requests of further keys are in one common list
MAX_TEXT = 300  # characters of a message, and of the name of an unknown model
MAX_CHUNKS = 32  # largest number of chunks in the record of a request
STAGES_TOLD = (*STAGES, "total_time")
# upper bounds in ms: each bound is a fifth larger than the one before, so a quantile is at most a fifth too large
BOUNDS_MS = tuple(0.05 * 1.2**step for step in range(80))
_of_stages = itemgetter(*STAGES_TOLD)
_of_logged = itemgetter(*STAGES)
_LOGGED = " ".join(f"{name}=%s" for name in STAGES)
_logger = logging.getLogger("sie.gateway")


class Note(NamedTuple):
    """Record of a request that has ended."""

    total_ms: float
    number: int  # gives notes of equal time an order, so that `fields` are never compared
    fields: dict[str, Any]
    owner: str  # key of the request's credential


@dataclass
class _HistoryBucket:
    """Counts of one step: STEP_S seconds, beginning at `at`, in seconds since the epoch."""

    at: int
    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ran: int = 0  # requests that a worker answered: only these requests have stages
    stages: tuple[array[int], ...] = ()

    def count(self, code: str, times_ms: tuple[float, ...] | None) -> None:
        self.requests += 1
        if code:
            self.errors[code] += 1
        if times_ms is None:
            return
        if not self.ran:
            self.stages = tuple(array("I", bytes(4 * (len(BOUNDS_MS) + 1))) for _ in STAGES_TOLD)
        self.ran += 1
        for counts, value in zip(self.stages, times_ms, strict=True):
            counts[bisect.bisect_left(BOUNDS_MS, value)] += 1


@dataclass
class _SlowestNotes:
    slowest: list[Note] = field(default_factory=list)  # heap of the slowest requests
    failed: deque[Note] = field(default_factory=lambda: deque(maxlen=FAILED))


@dataclass
class _Minute:
    at: int
    owners: dict[str, _SlowestNotes] = field(default_factory=dict)
    remaining: _SlowestNotes = field(default_factory=_SlowestNotes)

    def places(self, owner: str) -> _SlowestNotes:
        """Return the notes of a key. They are separate, so that the requests of one key do not displace the notes of
        another key.
        """
        if owner not in self.owners and len(self.owners) >= MAX_OWNERS:
            return self.remaining
        return self.owners.setdefault(owner, _SlowestNotes())


class RequestHistory:
    """History of the last hour. Only the gateway's event loop uses it. `clock` returns seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._steps: deque[_HistoryBucket] = deque(maxlen=STEPS)
        self._minutes: deque[_Minute] = deque(maxlen=STEPS * STEP_S // MINUTE_S)
        self._numbers = itertools.count()

    def ended(self, call: Call, endpoint: str, status: int, seconds: float) -> None:
        """Record an inference request that was answered, `seconds` after its head arrived."""
        now_s = self._clock()
        times_ms = None
        if call.finished is not None:
            timing = call.finished.reported_times or call.finished.timing(call.received_s)
            times_ms = _of_stages(timing)
        code = call.code if status >= 400 else ""
        self._step(now_s).count(code, times_ms)
        # refused requests are only counted: in overload, their notes would displace the notes of requests that ran
        if code in REFUSED:
            return
        places, total_ms = self._minute(now_s).places(call.key), 1000 * seconds
        is_slow = len(places.slowest) < SLOWEST or total_ms > places.slowest[0].total_ms
        if not (is_slow or code):
            return
        note = Note(total_ms, next(self._numbers), _fields(call, endpoint, status, total_ms, now_s), call.key)
        if code:
            places.failed.append(note)
        if is_slow:
            (heapq.heappush if len(places.slowest) < SLOWEST else heapq.heappushpop)(places.slowest, note)

    def _step(self, now_s: float) -> _HistoryBucket:
        at = int(now_s) // STEP_S * STEP_S
        if not self._steps or self._steps[-1].at < at:  # if the clock was set back, the last step continues
            self._steps.append(_HistoryBucket(at))
        return self._steps[-1]

    def _minute(self, now_s: float) -> _Minute:
        at = int(now_s) // MINUTE_S * MINUTE_S
        if not self._minutes or self._minutes[-1].at < at:
            self._minutes.append(_Minute(at))
        return self._minutes[-1]

    def since(self, since_s: float = 0.0, step_s: int = STEP_S) -> dict[str, Any]:
        """Return the steps that end after `since_s`, at most an hour old, the oldest first. Steps without a request are
        left out. If `step_s`, a multiple of STEP_S, is longer than a step, several steps are joined to one.
        """
        now_s = self._clock()
        first = max(since_s, now_s - STEPS * STEP_S)
        recent = (step for step in self._steps if step.at + STEP_S > first)
        joined = (_joined(at, list(steps)) for at, steps in itertools.groupby(recent, lambda step: step.at // step_s))
        return {
            "now": round(now_s, 3),
            "step_s": step_s,
            "stages": list(STAGES_TOLD),
            "steps": [{**entry, "at": entry["at"] * step_s} for entry in joined],
        }

    def counted(self, seconds: float) -> tuple[int, Counter[str]]:
        """Count the requests of the last `seconds`, and their errors by code."""
        first = self._clock() - seconds
        recent = [step for step in reversed(self._steps) if step.at + STEP_S > first]
        return sum(step.requests for step in recent), sum((step.errors for step in recent), Counter())

    def requests(self, most: int, grant: Grant) -> list[dict[str, Any]]:
        """Return at most `most` recorded requests of the last hour that a credential may see, the slowest first."""
        notes = {note.number: note for note in self._notes(grant)}
        return [note.fields for note in sorted(notes.values(), reverse=True, key=lambda note: note[:2])[:most]]

    def find(self, request_id: str, grant: Grant) -> dict[str, Any] | None:
        """Return the description of a request by its X-SIE-Request-ID; None if there is none, or if the credential may
        not see it.
        """
        return next((note.fields for note in self._notes(grant) if note.fields["id"] == request_id), None)

    def _notes(self, grant: Grant) -> Iterator[Note]:
        oldest_s = self._clock() - STEPS * STEP_S
        for minute in self._minutes:
            if minute.at + MINUTE_S > oldest_s:
                for places in (*minute.owners.values(), minute.remaining):
                    yield from (note for note in (*places.slowest, *places.failed) if grant.owns(note.owner))


def quantile(counts: array[int], share: float) -> float:
    """Return the upper bound in ms of `share` of the observations. A value above all bounds counts as the last
    bound.
    """
    rank = share * sum(counts)
    for bound, below in zip(BOUNDS_MS, itertools.accumulate(counts), strict=False):
        if below >= rank:
            return round(bound, 3)
    return round(BOUNDS_MS[-1], 3)


def _joined(at: int, steps: list[_HistoryBucket]) -> dict[str, Any]:
    """Join several steps to one, with the median and the 99th percentile of each stage in ms, in the order of
    STAGES_TOLD.
    """
    errors: Counter[str] = Counter()
    for step in steps:
        errors.update(step.errors)
    joined: dict[str, Any] = {"at": at, "requests": sum(step.requests for step in steps), "errors": dict(errors)}
    ran = [step.stages for step in steps if step.ran]
    if ran:
        sums = [array("I", map(sum, zip(*of_stage, strict=True))) for of_stage in zip(*ran, strict=True)]
        joined["p50_ms"] = [quantile(counts, 0.5) for counts in sums]
        joined["p99_ms"] = [quantile(counts, 0.99) for counts in sums]
    return joined


def _fields(call: Call, endpoint: str, status: int, total_ms: float, now_s: float) -> dict[str, Any]:
    """Describe a request without its inputs."""
    finished, request = call.finished, call.infer_request
    fields: dict[str, Any] = {
        "id": call.id,
        "at": round(now_s - total_ms / 1000, 3),
        "endpoint": endpoint,
        "status": status,
        "code": call.code,
        "model": call.labels.get("model") or _model_of(call),
        "total_ms": round(total_ms, 3),
        "items": len(request.items) if request is not None else 0,
        "trace_id": call.span.trace_id if call.span is not None else "",
    }
    if call.message:
        fields["message"] = call.message[:MAX_TEXT]
    if finished is not None:
        fields["lane"], fields["priority"] = str(finished.request.lane), finished.request.priority
        fields["tokens"] = finished.usage["total_tokens"]
        fields["truncated"] = len(finished.usage["truncated_items"])
        fields["timing"] = {name: finished.reported_times[name] for name in STAGES_TOLD}
        fields["chunks"] = [
            {
                "worker": result.worker,
                "chunk": result.chunk,
                "batch": msgspec.to_builtins(result.batch),
                "stages": msgspec.to_builtins(result.stages),
            }
            for result in finished.worker_results[:MAX_CHUNKS]
        ]
    return fields


def _model_of(call: Call) -> str:
    """Return the requested model name, also if no such model exists."""
    return call.resolved.canonical if call.resolved is not None else (call.model or "")[:MAX_TEXT]


class RequestLogger:
    """Logger of answered requests. Only the gateway's event loop uses it."""

    def __init__(self) -> None:
        self._told = 0  # log lines of refused requests in this interval
        self._left_out: Counter[str] = Counter()  # by endpoint, status and code; all three are from fixed sets
        self._timer: asyncio.TimerHandle | None = None  # set while an interval runs

    def ended(self, call: Call, endpoint: str, status: int, seconds: float) -> None:
        """Log a request whose answer was sent. After MAX_REFUSED_LINES lines, a refused request is only counted."""
        if call.code in REFUSED:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._summarise)
            self._told += 1
            if self._told > MAX_REFUSED_LINES:
                self._left_out[f"{endpoint} {status} code={call.code}"] += 1
                return
        log_request(call, endpoint, status, seconds)

    def _summarise(self) -> None:
        left_out, self._left_out, self._told, self._timer = self._left_out, Counter(), 0, None
        if left_out:
            kinds = ", ".join(f"{kind} {count}" for kind, count in left_out.most_common())
            _logger.info("%d more requests were refused in %.0f s: %s", left_out.total(), INTERVAL_S, kinds)


def log_request(call: Call, endpoint: str, status: int, seconds: float) -> None:
    """Log a request whose answer was sent, `seconds` after its head arrived. If the request ran, the line has its
    stages, its tokens, and the worker of the chunk that finished last.
    """
    if not _logger.isEnabledFor(logging.INFO):
        return
    words = [f"{endpoint} {status} in {seconds * 1000:.1f} ms"]
    if call.code:
        words.append(f"code={call.code}")
    if call.infer_request is not None:
        words.append(f"items={len(call.infer_request.items)}")
    if call.finished is not None:
        words.append(f"tokens={call.finished.usage['total_tokens']}")
        words.append(_LOGGED % _of_logged(call.finished.reported_times or call.finished.timing(call.received_s)))
    model = call.labels.get("model") or (call.resolved.canonical if call.resolved is not None else None)
    last = call.finished.last if call.finished is not None else None
    extra = {
        "request_id": call.id,
        "model": model,
        "latency_ms": round(seconds * 1000, 2),
        "worker": last.worker if last is not None else None,
        "key": call.grant.name if call.grant.key else None,
    }
    _logger.info(" ".join(words), extra=extra)


MAX_LINES = 5_000
MAX_REQUESTS = 20_000  # newest requests with a known owner; only an administrator may see the lines of older requests
MAX_CHARS = 500  # characters of a line


class TailLine(NamedTuple):
    """Line of the log. `at`: seconds since the epoch."""

    request: str
    at: float
    level: str
    logger: str
    message: str


class LogTail(logging.Handler):
    """Log handler that stores the newest lines of loggers below `sie` that have a request id. Any thread may call
    `emit`. Only the gateway's event loop calls the other methods.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[TailLine] = deque(maxlen=MAX_LINES)
        self._owners: dict[str, str] = {}  # owner of each request, by request id, the oldest first

    def admitted(self, request: str, owner: str) -> None:
        """Record the key of a request that was admitted."""
        if len(self._owners) >= MAX_REQUESTS:
            del self._owners[next(iter(self._owners))]
        self._owners[request] = owner

    def emit(self, record: logging.LogRecord) -> None:
        """Store a line that has a request id. `logging` holds the lock of the handler during the call."""
        request = getattr(record, "request_id", None)
        if request:
            message = record.getMessage()[:MAX_CHARS]
            self._lines.append(TailLine(str(request), record.created, record.levelname, record.name, message))

    def lines_of(self, request: str, grant: Grant) -> list[dict[str, Any]]:
        """Return the lines of a request, the oldest first; no lines if the credential may not see the request."""
        if "admin" not in grant.scopes and grant.key and self._owners.get(request) != grant.key:
            return []
        with self.lock or contextlib.nullcontext():
            lines = [line for line in self._lines if line.request == request]
        return [
            {"at": round(line.at, 3), "level": line.level, "logger": line.logger, "message": line.message}
            for line in lines
        ]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Store log lines while the context is open."""
        logger = logging.getLogger("sie")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
