"""Objects of a call: the HTTP request, its body, and the reply.

    Call ──► BodyReader: the bytes, within limits of size, memory and speed ──► decode: plain values
    ──► InferRequest of `results` ──► EncodedReply

The gateway counts the memory of a body when its bytes arrive, not when Content-Length announces them, so a client
cannot occupy memory by announcements. The gateway counts the values of a body of more than `plain.SMALL_BYTES` before
it decodes them. FREE_BYTES of each body are not counted, so small requests are admitted even while large bodies occupy
all memory. While small requests are in progress, large bodies are read at a limited speed, so that the event loop has
time for the small requests. Large bodies are decoded in a thread.

When a call has ended, `RequestListeners` hear of it. The first is the log. It has one line for each request, but in
INTERVAL_S seconds at most MAX_REFUSED_LINES lines for requests that the gateway refused for overload or a rate limit.
One more line counts the other refused requests:

 encode 200 in 9.3 ms items=3 tokens=24 queue_time=2.104 load_time=0.0 ... unattributed_time=1.088
 512 more requests were refused in 10 s: encode 503 code=QUEUE_FULL 500, score 503 code=QUEUE_FULL 12
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from sie_contracts.body_values import VALUE_BYTES
from sie_contracts.errors import FAMILIES, GatewayTimeout, InvalidInput, PayloadTooLarge, QueueFull, SIEError
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import ModelEntry
from sie_contracts.sdk_versions import NATIVE, Dialect
from sie_contracts.settings import Settings
from sie_contracts.stages import STAGES
from sie_contracts.wire.trace_context import NONE, Context
from sie_gateway.admission.grant import ANYBODY, Charge, Grant
from sie_gateway.admission.model_queue import SharedLimit
from sie_gateway.admission.slots import KeyTurns
from sie_gateway.inference import body as bodies
from sie_runtime import control_group
from sie_runtime.http.asgi import Body, Receive

if TYPE_CHECKING:
    from sie_gateway.inference.results import InferRequest, RequestResult
    from sie_runtime.spans import Span

ROUTE_KEY = "X-SIE-Route-Key"
CACHE = "X-SIE-Cache"
MAX_KEY_CHARS = 128
ErrorShape = Callable[[SIEError, str, list[dict[str, Any]] | None], tuple[int, dict[str, Any]]]
"""Function that converts an error for the clients of an API. Arguments: the error, the request id, and the failures of
single inputs. Returns the HTTP status, and the JSON body in the format of the API.
"""


native_shape: ErrorShape = FAMILIES["native"]


class Call(msgspec.Struct):
    """HTTP request with the data that the gateway collects about it. `labels`: label values for metrics and logs."""

    id: str
    received_s: float
    headers: Mapping[str, str]
    labels: dict[str, str] = {}
    path: str = ""
    receive: Receive | None = None  # ASGI receive of the connection; it also reports that the client has disconnected
    grant: Grant = ANYBODY  # rights of the request's credential
    # part of the API key's quota that this request uses; None if the key has no quota
    charge: Charge | None = None
    shape: ErrorShape = native_shape
    dialect: Dialect = NATIVE
    budget_s: float = 0.0  # seconds from `received_s` to the deadline
    model: str | None = None  # name of the model in the path of the request; None if the path names no model
    resolved: Resolved | None = None  # entry and profile of the model; None until the name is resolved
    client: str = ""  # address of the client
    body: bytes = b""  # body of an inference request
    # reader of the body; None for routes without inference, and for calls without an HTTP connection (batch lines)
    reader: BodyReader | None = None
    infer_request: InferRequest | None = None  # request to the model at the last attempt
    attempt: int = 0  # number of earlier attempts of this call
    finished: RequestResult | None = None  # result of the last attempt
    code: str = ""  # code of the error in the reply
    message: str = ""  # message of the error in the reply
    # trace context for the workers: that of the gateway's span, or the client's if this gateway does not trace
    context: Context = NONE
    span: Span | None = None  # None if this gateway does not trace

    def follow(self, previous: Call) -> None:
        """Take over the run of the call `previous`, whose client disconnected and repeats the request with this call.
        The logs, metrics and errors of this call then describe the run of `previous`.
        """
        self.labels.update(previous.labels)
        self.shape, self.infer_request, self.finished = previous.shape, previous.infer_request, previous.finished
        if self.span is not None and previous.span is not None:
            self.span.lead_to(previous.span)

    def again(self) -> None:
        """Prepare another attempt: give its work a new id, and refund the charge of the previous attempt."""
        self.attempt += 1
        if self.charge is not None:
            self.charge.refund()

    @property
    def is_msgpack(self) -> bool:
        """Return True if the body is msgpack, False if it is JSON or a form."""
        return "msgpack" in self.headers.get("content-type", "").partition(";")[0].lower()

    @property
    def explains(self) -> bool:
        """Return True if the client requests the time of each stage."""
        return self.headers.get("x-sie-explain") == "1"

    def digest(self) -> bytes:
        """Return a digest that identifies a repeated request of the same client."""
        parts = (
            self.grant.key,
            self.client,
            self.path,
            self.headers.get("x-sie-timeout-ms", ""),
            self.headers.get("x-sie-priority", ""),
        )
        return hashlib.blake2b("\0".join(parts).encode() + b"\0" + self.body, digest_size=16).digest()

    @property
    def work_id(self) -> str:
        """Return the id of this attempt's work. Each attempt has a new id, so that the gateway accepts no late result
        of an earlier attempt.
        """
        return f"{self.id}-{self.attempt}" if self.attempt else self.id


def route_key(call: Call | None) -> str:
    """Return the key that selects the target of an alias: X-SIE-Route-Key if the client sent it, else the API key if
    the call has one, else the client's address. Calls with the same key get the same target.

    A key from the header selects the same target for all clients, so the writer and the readers of an index can use the
    same model. If `call` is None, the key is empty and selects the target with the largest weight.
    """
    if call is None:
        return ""
    named = call.headers.get("x-sie-route-key", "")
    if not named:
        return f"key {call.grant.key}" if call.grant.key else f"client {call.client}"
    return f"named {named}"


def cache_mode(headers: Mapping[str, str]) -> str:
    """Return the value of X-SIE-Cache; empty if the client has not sent it. Raises InvalidInput."""
    mode = headers.get("x-sie-cache", "")
    if mode not in ("", "no-store", "only"):
        raise InvalidInput.at(CACHE, "expected no-store or only")
    return mode


class EncodedReply(msgspec.Struct, frozen=True):
    """Reply to a request that succeeded. `body`: bytes, or an iterable of bytes that can be iterated again."""

    body: Body
    content_type: str
    headers: dict[str, str]
    status: int = 200


class ClientGone(Exception):
    """Raised if the client has disconnected, so that no client would read the reply."""


class EntryChanged(Exception):
    """Raised if the request was parsed with one entry of the model, and the catalogue or a worker has another entry.
    The gateway then parses the request again.
    """

    def __init__(self, entry: ModelEntry) -> None:
        """`entry` is the model's entry with which the request was parsed."""
        super().__init__(entry.id)
        self.entry = entry


MAX_HELD_BYTES = 1 << 30
# while a request runs, the gateway has this many copies of its body: the received body, the decoded values, the queue
# messages
COPIES = 3
# number of bytes of each body, all copies included, that do not count in SIE_BODY_MEMORY_BYTES;
# SIE_MAX_CONCURRENT_REQUESTS limits the number of bodies, and so the sum of the uncounted bytes
FREE_BYTES = COPIES * (256 << 10)
# While small requests are in progress, the gateway reads at most this number of bytes per second of all large bodies
# together. One core can receive three times as many.
PACE_BYTES_S = 128 << 20
# `BodyIntake.turn` skips waits of at most this number of seconds
PACE_STEP_S = 0.002
CONTROL_BYTES = 1 << 20  # largest number of bytes in the body of a route without inference
CONTROL_S = 30.0


def body_memory(settings: Settings) -> int:
    """Return SIE_BODY_MEMORY_BYTES; by default half of the cgroup's memory limit, at most MAX_HELD_BYTES."""
    if settings.body_memory_bytes is not None:
        return settings.body_memory_bytes
    limit = control_group.memory_limit()
    return MAX_HELD_BYTES if limit is None else min(MAX_HELD_BYTES, limit // 2)


class BodyIntake:
    """Counter of the memory of all request bodies in a gateway. The counted bodies may take at most `max_bytes`
    together. A body that is the only counted one may take more.
    """

    def __init__(self, max_bytes: int = MAX_HELD_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.memory = SharedLimit(max_bytes)
        self.small: set[BodyReader] = set()  # readers whose bodies are not counted in `memory`
        self._paced_until_s = 0.0

    def paced(self, receive: Receive) -> Receive:
        """Return a `receive` with limited speed, for a route that reads its body without BodyReader. While small
        requests are in progress, all large bodies together are read with at most PACE_BYTES_S bytes per second.
        """
        size = 0

        async def receive_paced() -> MutableMapping[str, Any]:
            nonlocal size
            message = await receive()
            more = len(message.get("body", b""))
            size += more
            if COPIES * size > FREE_BYTES:
                await self.turn(more)
            return message

        return receive_paced

    async def turn(self, size: int) -> None:
        """Count `size` received bytes of a large body, then wait until PACE_BYTES_S permits the next read. Do nothing
        while no small request is in progress.
        """
        if not self.small:
            return
        now_s = self.clock()
        self._paced_until_s = max(self._paced_until_s, now_s) + size / PACE_BYTES_S
        if (ahead_s := self._paced_until_s - now_s) > PACE_STEP_S:
            await asyncio.sleep(ahead_s)


class BodyReader:
    """Reader of one request body. Counts the body's memory in `intake`, until `close`."""

    def __init__(
        self, intake: BodyIntake, key: str, receive: Receive, limit: int, *, announced: str = "", is_whole: bool = False
    ) -> None:
        """`limit`: largest number of bytes. `announced`: Content-Length of the client. `is_whole`: the server has
        received the whole body. Raises PayloadTooLarge if the client announces too many bytes.
        """
        if announced:
            check_length(announced, limit)
        self._intake = intake
        self._key = key
        self._receive = receive
        self._limit = limit
        self._size = self._values = 0
        self._counted = 0
        self.is_whole = is_whole
        intake.small.add(self)

    async def read(self) -> bytes:
        """Read the whole body and count its memory. Raises PayloadTooLarge, QueueFull, ClientGone."""
        body = io.BytesIO()  # `getvalue` copies no bytes, unlike the join of a list of pieces
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece: bytes = message.get("body", b"")
            size += len(piece)
            if size > self._limit:
                raise _too_large(f"more than {self._limit} bytes", self._limit)
            self._size = size
            if COPIES * size > FREE_BYTES:
                self._count()
            if not (size > len(piece) or message.get("more_body")):
                return piece
            body.write(piece)
            if not message.get("more_body"):
                return body.getvalue()
            if self._counted:
                await self._intake.turn(len(piece))

    def count_values(self, values: int) -> None:
        """Count the memory of the body's values, before the body is decoded. Raises QueueFull."""
        self._values = values
        self._count()

    def _count(self) -> None:
        more = max(0, COPIES * self._size + VALUE_BYTES * self._values - FREE_BYTES) - self._counted
        if more <= 0:
            return
        memory = self._intake.memory
        if memory.used > self._counted and not memory.accepts(self._key, more, self._intake.clock()):
            held, by_key, most = memory.used >> 20, memory.used_by[self._key] >> 20, memory.total >> 20
            raise QueueFull(
                f"body: the bodies in this gateway take {held} MiB of memory, {by_key} of them of this client's key; "
                f"{most} MiB are allowed (SIE_BODY_MEMORY_BYTES), shared by the active keys",
                param="body",
                retry_after_s=2,
            )
        self._intake.small.discard(self)
        memory.use(self._key, more)
        self._counted += more

    def close(self) -> None:
        self._intake.small.discard(self)
        if self._counted:
            self._intake.memory.use(self._key, -self._counted)
            self._counted = 0


def check_length(declared: str, limit: int) -> None:
    """Raise PayloadTooLarge if Content-Length announces more than `limit` bytes."""
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(f"{declared[:18]} bytes, at most {limit}", limit)


def bounded(receive: Receive, *, limit: int = CONTROL_BYTES, within_s: float = CONTROL_S) -> Receive:
    """Return a `receive` for routes that read their body themselves. The returned function raises PayloadTooLarge above
    `limit` bytes, and GatewayTimeout if the body is not complete `within_s` seconds after the first read.
    """
    size = 0
    until_s: float | None = None
    complete = False

    async def receive_bounded() -> MutableMapping[str, Any]:
        nonlocal size, until_s, complete
        if complete:
            return await receive()
        until_s = asyncio.get_running_loop().time() + within_s if until_s is None else until_s
        try:
            async with asyncio.timeout_at(until_s):
                message = await receive()
        except TimeoutError as error:
            raise GatewayTimeout(f"the body was not complete within {within_s:g} s", param="body") from error
        size += len(message.get("body", b""))
        if size > limit:
            raise _too_large(f"more than {limit} bytes", limit)
        complete = not message.get("more_body", False)
        return message

    return receive_bounded


def _too_large(size: str, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"body: {size}", param="body", extras={"limit": limit})


T = TypeVar("T")
LARGE_BYTES = 256 << 10


async def beside(call: Call, turns: KeyTurns, work: Callable[[], T]) -> T:
    """Return the result of `work`, which reads the body of a call. If the body exceeds LARGE_BYTES, `work` runs in a
    thread.
    """
    return work() if len(call.body) <= LARGE_BYTES else await turns.run(call.grant.key, work)


async def decode_body(call: Call, turns: KeyTurns) -> Mapping[str, Any]:
    """Return the top-level map of a body of more than `plain.SMALL_BYTES`. Raises QueueFull, InvalidInput (malformed,
    too_many_values, schema).
    """
    body, msgpack = call.body, call.is_msgpack
    values = await beside(call, turns, lambda: bodies.count(body, msgpack=msgpack))
    if call.reader is not None:
        call.reader.count_values(values)
    return await beside(call, turns, lambda: bodies.decode(body, msgpack=msgpack))


REFUSED = frozenset({"QUEUE_FULL", "RATE_LIMITED"})  # codes of refusals for overload or a rate limit
INTERVAL_S = 10.0
MAX_REFUSED_LINES = 20  # largest number of log lines for refused requests in INTERVAL_S seconds
_of_logged = itemgetter(*STAGES)
_LOGGED = " ".join(f"{name}=%s" for name in STAGES)
_logger = logging.getLogger("sie.gateway")


@dataclass(frozen=True)
class RequestListeners:
    """Functions that the gateway's event loop calls. `admitted`: for each request with a valid credential, with its
    call. `ended`: for each inference request that has ended, with (call, endpoint, status, seconds from the arrival of
    the headers to the end of the reply).
    """

    admitted: list[Callable[[Call], None]] = field(default_factory=list)
    ended: list[Callable[[Call, str, int, float], None]] = field(default_factory=list)


class RequestLogger:
    """Writer of the log lines of requests. Only the gateway's event loop may call its methods."""

    def __init__(self) -> None:
        self._refused = 0  # number of refused requests in the running interval, logged or not
        # "endpoint status code" -> number of refused requests without a log line; the set of these keys is small
        self._left_out: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None  # ends an interval of INTERVAL_S; None between intervals

    def ended(self, call: Call, endpoint: str, status: int, seconds: float) -> None:
        """Log a request. `seconds`: time from the request's headers to the reply. The line of a request that ran also
        has the latencies of its stages, its number of tokens, and its last worker. After MAX_REFUSED_LINES lines in an
        interval, only count refused requests.
        """
        if call.code in REFUSED:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._summarise)
            self._refused += 1
            if self._refused > MAX_REFUSED_LINES:
                self._left_out[f"{endpoint} {status} code={call.code}"] += 1
                return
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
        # made here, because `Logger.info` first looks for the file and the line of its caller, which no log line has
        record = _logger.makeRecord(_logger.name, logging.INFO, "", 0, " ".join(words), (), None, extra=extra)
        _logger.handle(record)

    def _summarise(self) -> None:
        left_out, self._left_out, self._refused, self._timer = self._left_out, Counter(), 0, None
        if left_out:
            kinds = ", ".join(f"{kind} {count}" for kind, count in left_out.most_common())
            _logger.info("%d more requests were refused in %.0f s: %s", left_out.total(), INTERVAL_S, kinds)
