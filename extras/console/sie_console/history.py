"""Requests of one gateway in the last hour, to find out why requests are slow.

 a request ends ──► counts of its 10 seconds: requests, errors by code, a histogram of each stage
                └──► records of its minute, if it failed or was one of the slowest, and was not refused

`RequestHistory` has counts, errors and stage latencies of each STEP_S seconds, and records of the slowest requests.
`LogTail` stores the newest log lines with a request id, so that a user can read the lines of a request.

The numbers of counts, records and lines are limited. A record has no input of the request and no API key, but its error
message may quote a number or the name of a model from the body.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import itertools
import logging
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sie_contracts.stages import STAGES
from sie_gateway.admission.grant import Grant
from sie_gateway.inference.call import REFUSED

if TYPE_CHECKING:
    from sie_gateway.inference.call import Call

STEP_S = 10
STEPS = 360
MINUTE_S = 60
# largest numbers of records of one API key in one minute: of its slowest requests, and of its last failed requests
SLOWEST, FAILED = 5, 5
MAX_OWNERS = 8  # largest number of API keys with separate records in one minute; all further keys share one list
MAX_TEXT = 300  # largest number of stored characters of an error message, and of the name of an unknown model
MAX_CHUNKS = 32  # largest number of chunks (parts of a request, one per message) in a record
STAGES_TOLD = (*STAGES, "total_time")
# upper bounds of the latency histograms in ms: each is 1.2 times the previous bound, so a quantile between the first
# and the last bound is at most 20 % too high
BOUNDS_MS = tuple(0.05 * 1.2**step for step in range(80))
_of_stages = itemgetter(*STAGES_TOLD)


class Note(NamedTuple):
    """Record of a request that has ended."""

    total_ms: float
    number: int  # serial number: orders notes with equal times, because the heap cannot compare `fields`
    fields: dict[str, Any]
    owner: str  # id of the API key that sent the request


@dataclass
class _HistoryBucket:
    """Counts of the requests in a step of STEP_S seconds. `at`: start of the step, in seconds since 1970."""

    at: int
    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    ran: int = 0  # number of requests that a worker answered; only these have stage latencies
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
    slowest: list[Note] = field(default_factory=list)  # min-heap by total time
    failed: deque[Note] = field(default_factory=lambda: deque(maxlen=FAILED))


@dataclass
class _Minute:
    at: int
    owners: dict[str, _SlowestNotes] = field(default_factory=dict)
    remaining: _SlowestNotes = field(default_factory=_SlowestNotes)

    def places(self, owner: str) -> _SlowestNotes:
        """Return the records of an API key. Each of the first MAX_OWNERS keys of a minute has records of its own, which
        no other key displaces. All further keys share `remaining`.
        """
        if owner not in self.owners:
            if len(self.owners) >= MAX_OWNERS:
                return self.remaining
            self.owners[owner] = _SlowestNotes()
        return self.owners[owner]


class RequestHistory:
    """History of the last hour, used only by the gateway's event loop. `clock` returns seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._steps: deque[_HistoryBucket] = deque(maxlen=STEPS)
        self._minutes: deque[_Minute] = deque(maxlen=STEPS * STEP_S // MINUTE_S)
        self._numbers = itertools.count()

    def ended(self, call: Call, endpoint: str, status: int, seconds: float) -> None:
        """Count an ended inference request, and record a slow or failed request. `seconds`: time from the arrival of
        the headers to the end of the reply.
        """
        now_s = self._clock()
        times_ms = None
        if call.finished is not None:
            timing = call.finished.reported_times or call.finished.timing(call.received_s)
            times_ms = _of_stages(timing)
        code = call.code if status >= 400 else ""
        self._step(now_s).count(code, times_ms)
        # do not record refused requests: during overload they would displace the records of requests that ran
        if code in REFUSED:
            return
        places, total_ms = self._minute(now_s).places(call.grant.key), 1000 * seconds
        is_slow = len(places.slowest) < SLOWEST or total_ms > places.slowest[0].total_ms
        if not (is_slow or code):
            return
        note = Note(total_ms, next(self._numbers), _fields(call, endpoint, status, total_ms, now_s), call.grant.key)
        if code:
            places.failed.append(note)
        if is_slow:
            (heapq.heappush if len(places.slowest) < SLOWEST else heapq.heappushpop)(places.slowest, note)

    def _step(self, now_s: float) -> _HistoryBucket:
        at = int(now_s) // STEP_S * STEP_S
        # if the clock was set back, count the request in the newest step
        if not self._steps or self._steps[-1].at < at:
            self._steps.append(_HistoryBucket(at))
        return self._steps[-1]

    def _minute(self, now_s: float) -> _Minute:
        at = int(now_s) // MINUTE_S * MINUTE_S
        if not self._minutes or self._minutes[-1].at < at:
            self._minutes.append(_Minute(at))
        return self._minutes[-1]

    def since(self, since_s: float = 0.0, step_s: int = STEP_S) -> dict[str, Any]:
        """Return the counts of each step of `step_s` seconds (a multiple of STEP_S), oldest first, from `since_s`
        (seconds since 1970) on, but at most of the last hour. Steps without a request are omitted.
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
        """Return (number of requests, error code -> number of requests with this code) of the last `seconds`
        seconds.
        """
        first = self._clock() - seconds
        recent = [step for step in reversed(self._steps) if step.at + STEP_S > first]
        return sum(step.requests for step in recent), sum((step.errors for step in recent), Counter())

    def requests(self, most: int, grant: Grant) -> list[dict[str, Any]]:
        """Return at most `most` recorded requests of the last hour that a credential may see, the slowest first."""
        notes = {note.number: note for note in self._notes(grant)}
        return [note.fields for note in sorted(notes.values(), reverse=True, key=lambda note: note[:2])[:most]]

    def find(self, request_id: str, grant: Grant) -> dict[str, Any] | None:
        """Return the record with this X-SIE-Request-ID, or None if the credential may see no such record."""
        return next((note.fields for note in self._notes(grant) if note.fields["id"] == request_id), None)

    def _notes(self, grant: Grant) -> Iterator[Note]:
        oldest_s = self._clock() - STEPS * STEP_S
        for minute in self._minutes:
            if minute.at + MINUTE_S > oldest_s:
                for places in (*minute.owners.values(), minute.remaining):
                    yield from (note for note in (*places.slowest, *places.failed) if grant.owns(note.owner))


def quantile(counts: array[int], share: float) -> float:
    """Return the upper bound in ms of the bucket with the quantile `share` (0.5: median) of the latencies in `counts`;
    the last bound if the quantile is above all bounds.
    """
    rank = share * sum(counts)
    for bound, below in zip(BOUNDS_MS, itertools.accumulate(counts), strict=False):
        if below >= rank:
            return round(bound, 3)
    return round(BOUNDS_MS[-1], 3)


def _joined(at: int, steps: list[_HistoryBucket]) -> dict[str, Any]:
    """Add up the counts of `steps`, and compute the median and 99th percentile of each stage of STAGES_TOLD, in ms."""
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
    """Return the record of a request. The record contains none of the request's inputs."""
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
    """Return the model's name in the catalogue, or the requested name if no such model exists."""
    return call.resolved.canonical if call.resolved is not None else (call.model or "")[:MAX_TEXT]


MAX_LINES = 5_000
# largest number of requests whose API key is stored; only administrators can read the lines of older requests
MAX_REQUESTS = 20_000
MAX_CHARS = 500  # largest number of characters of a line


class TailLine(NamedTuple):
    """Line of the log. `at`: seconds since 1970."""

    request: str
    at: float
    level: str
    logger: str
    message: str


class LogTail(logging.Handler):
    """Log handler that stores the newest log lines that have a request id, from all loggers below `sie`. Any thread may
    call `emit`. Only the gateway's event loop may call the other methods.
    """

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[TailLine] = deque(maxlen=MAX_LINES)
        self._owners: OrderedDict[str, str] = OrderedDict()  # request id -> API key, the oldest request first

    def admitted(self, call: Call) -> None:
        """Store which API key sent a request."""
        if len(self._owners) >= MAX_REQUESTS:
            self._owners.popitem(last=False)  # a plain dict would look for its first entry among the deleted ones
        self._owners[call.id] = call.grant.key

    def emit(self, record: logging.LogRecord) -> None:
        """Store a line if it has a request id. `logging` calls this method under the handler's lock."""
        request = getattr(record, "request_id", None)
        if request:
            message = record.getMessage()[:MAX_CHARS]
            self._lines.append(TailLine(str(request), record.created, record.levelname, record.name, message))

    def lines_of(self, request: str, grant: Grant) -> list[dict[str, Any]]:
        """Return the log lines of a request, oldest first; none if the credential may not see the request."""
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
        """Receive the lines of all loggers below `sie` while the context is open."""
        logger = logging.getLogger("sie")
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
