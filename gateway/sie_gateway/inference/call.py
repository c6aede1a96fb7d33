"""A call as every route sees it: what the edge knows of the request, its body, what a model is to do, what goes back.

    Call ──► BodyReader: the bytes, within size, memory and pace ──► decode: plain values ──► InferRequest
    ──► EncodedReply

Bodies count in bytes when they have arrived, not when they are announced, so announcing many costs a gateway nothing.
Values count before they are decoded. The first bytes of each body do not count: what is small is let in also while
somebody's large bodies take all the room. And what is small does not wait for them: while such requests are in
progress, large bodies are read at a pace that leaves the event loop to them. Large bodies are decoded beside it.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from sie_contracts import plain
from sie_contracts.body_values import VALUE_BYTES
from sie_contracts.errors import GatewayTimeout, InvalidInput, PayloadTooLarge, QueueFull, SIEError, envelope
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.options import Side
from sie_contracts.sdk_versions import NATIVE, Dialect
from sie_contracts.settings import Settings
from sie_contracts.wire.messages import Operation, Priority, RunOptions
from sie_contracts.wire.trace_context import NONE, Context
from sie_gateway.admission.grant import ANYBODY, Charge, Grant
from sie_gateway.inference import body as bodies
from sie_gateway.inference.reattach import ClientGone
from sie_runtime import control_group
from sie_runtime.http.server import Body, Receive

if TYPE_CHECKING:
    from sie_gateway.inference.body import RequestItem
    from sie_gateway.inference.results import RequestResult
    from sie_runtime.spans import Span

ROUTE_KEY = "X-SIE-Route-Key"
MAX_KEY_CHARS = 128
_ROUTE_KEY_HEADER = ROUTE_KEY.lower()
ErrorShape = Callable[[SIEError, str, list[dict[str, Any]] | None], tuple[int, dict[str, Any]]]
"""The status and the JSON body of an error, of a request id and of the failures of single inputs, as a client family
reads them.
"""


def family(name: str) -> ErrorShape:
    """Errors with their own status, and the body that a family of `errors.FAMILIES` reads."""

    def shape(error: SIEError, request_id: str, errors: list[dict[str, Any]] | None) -> tuple[int, dict[str, Any]]:
        return error.status, envelope(error, request_id, errors, name)

    return shape


native_shape = family("native")


@dataclass
class Call:
    """One HTTP request: what the edge knows of it. `labels` are filled in as the request is understood, for metrics and
    logs.
    """

    id: str
    received_s: float
    headers: Mapping[str, str]
    labels: dict[str, str] = field(default_factory=dict)
    path: str = ""
    receive: Receive | None = None  # tells when the client goes away
    grant: Grant = ANYBODY  # what its credential is let in with
    charge: Charge | None = None  # the tokens that it uses of its key's quota, if that has one
    shape: ErrorShape = native_shape
    dialect: Dialect = NATIVE
    budget_s: float = 0.0  # from received_s on
    model: str | None = None  # the name of a model that the path has; None where the body names it
    resolved: Resolved | None = None  # the model of that name
    client: str = ""  # its address
    body: bytes = b""  # of an inference request
    reader: BodyReader | None = None  # of its body, where a connection brought it
    infer_request: InferRequest | None = None  # the last one that was understood
    attempt: int = 0  # how often it began anew because the model's entry changed
    finished: RequestResult | None = None  # what ran last
    code: str = ""  # of the error that it was answered with
    message: str = ""  # of that error
    context: Context = NONE  # of its trace, which its work carries on: our span's, or else its client's
    span: Span | None = None  # where this gateway traces

    def follow(self, previous: Call) -> None:
        """Be answered with the run of another call, by the same request: all that is told of that one is
        told of this.
        """
        self.labels.update(previous.labels)
        self.shape, self.infer_request, self.finished = previous.shape, previous.infer_request, previous.finished
        if self.span is not None and previous.span is not None:
            self.span.lead_to(previous.span)

    def again(self) -> None:
        """Begin anew, with other work: that of before is given back."""
        self.attempt += 1
        if self.charge is not None:
            self.charge.refund()

    @property
    def explains(self) -> bool:
        """Whether the client asks where the time was spent."""
        return self.headers.get("x-sie-explain") == "1"

    def digest(self) -> bytes:
        """Digest by which a repeated request of the same client is recognised."""
        parts = (
            self.key,
            self.client,
            self.path,
            self.headers.get("x-sie-timeout-ms", ""),
            self.headers.get("x-sie-priority", ""),
        )
        return hashlib.blake2b("\0".join(parts).encode() + b"\0" + self.body, digest_size=16).digest()

    @property
    def work_id(self) -> str:
        """Id of its work: a new id at each attempt, so that no result of an earlier attempt counts."""
        return f"{self.id}-{self.attempt}" if self.attempt else self.id

    @property
    def key(self) -> str:
        """Whose turn it takes among others: one name per credential, the same for all who need none."""
        return self.grant.key


def route_key(call: Call | None) -> str:
    """The key by which calls get the same target of an alias: X-SIE-Route-Key, else the API key, else the client's
    address.

    A named one counts whoever sends it, so the writer and the readers of an index can agree on one. Empty for nobody's
    call, which gets the heaviest target. Raises InvalidInput.
    """
    if call is None:
        return ""
    named = call.headers.get(_ROUTE_KEY_HEADER, "")
    if not named:
        return f"key {call.key}" if call.key else f"client {call.client}"
    if len(named) > MAX_KEY_CHARS or not (named.isascii() and named.isprintable()):
        message = (
            f"{ROUTE_KEY}: expected at most {MAX_KEY_CHARS} printable ASCII characters, got {len(named)} characters"
        )
        raise InvalidInput(message, reason="schema", param=ROUTE_KEY)
    return f"named {named}"


@dataclass(frozen=True)
class EncodedReply:
    """A success, or what a client that waits for capacity takes for "not yet". A body in pieces may be read more than
    once.
    """

    body: Body
    content_type: str
    headers: dict[str, str]
    status: int = 200


@dataclass(frozen=True)
class InferRequest:
    """A request to a model, independent of the client's API. `parameters` is a map as a native body has it (contract
    5).

    `run` stands for all parameters where the operation takes none of a model's. `side` is that of texts whose side no
    parameter names: none on the routes of other servers, which then give what the model's own library gives.
    """

    operation: Operation
    resolved: Resolved
    items: tuple[RequestItem, ...]
    parameters: Mapping[str, Any]
    query: RequestItem | None = None
    priority: Priority | None = None  # what the body says; a header comes first
    run: RunOptions | None = None
    side: Side = "document"


class EntryChanged(Exception):
    """Gateway and workers do not know the same entry of the model: what was asked must be understood
    anew, all of it.
    """

    def __init__(self, entry: ModelEntry) -> None:
        """`entry` is the model's as it was understood."""
        super().__init__(entry.id)
        self.entry = entry


MAX_HELD_BYTES = 1 << 30
COPIES = 3  # of a byte of a body while its request runs: as it came, decoded, and in a message of the queue
FREE_BYTES = COPIES * (256 << 10)  # of each body in memory; SIE_MAX_CONCURRENT_REQUESTS of them at most
PACE_BYTES_S = 128 << 20  # of large bodies in all while small ones are served: a third of what a core receives
PACE_STEP_S = 0.002  # that a body may be ahead of it
CONTROL_BYTES = 1 << 20  # of a body that is no inference
CONTROL_S = 30.0


def body_memory(settings: Settings) -> int:
    """SIE_BODY_MEMORY_BYTES. By default half of what the control group leaves this process, MAX_HELD_BYTES at most."""
    if settings.body_memory_bytes is not None:
        return settings.body_memory_bytes
    limit = control_group.memory_limit()
    return MAX_HELD_BYTES if limit is None else min(MAX_HELD_BYTES, limit // 2)


class BodyIntake:
    """All bodies of a gateway, `max_bytes` of memory. One more always may be read if no other counts, so the budget is
    no limit on one body.
    """

    def __init__(self, max_bytes: int = MAX_HELD_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.held_bytes = 0
        self.max_bytes = max_bytes
        self.small = 0  # requests in progress whose bodies do not count
        self._paced_until_s = 0.0

    def count_small(self, more: int) -> None:
        """Count so many more requests whose bodies do not count, or fewer."""
        self.small += more

    def hold(self, more_bytes: int) -> None:
        """Count so many more, or fewer."""
        self.held_bytes += more_bytes

    def reader(self, headers: Mapping[str, str], receive: Receive, limit: int) -> BodyReader:
        """Reads one body of at most `limit` bytes. What it holds counts until `close`. PayloadTooLarge if it is
        announced as larger.
        """
        check_length(headers, limit)
        return BodyReader(self, receive, limit)

    def paced(self, receive: Receive) -> Receive:
        """`receive` of a body that has no reader, at the pace of all of them once it is large."""
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
        """So many bytes of a large body have come: wait until more may."""
        if not self.small:
            return
        now_s = self._clock()
        self._paced_until_s = max(self._paced_until_s, now_s) + size / PACE_BYTES_S
        if (ahead_s := self._paced_until_s - now_s) > PACE_STEP_S:
            await asyncio.sleep(ahead_s)


class BodyReader:
    """One body."""

    def __init__(self, intake: BodyIntake, receive: Receive, limit: int) -> None:
        self._intake = intake
        self._receive = receive
        self._limit = limit
        self._size = self._values = 0
        self._counted = 0
        self._is_small = True
        intake.count_small(1)

    async def read(self) -> bytes:
        """The whole body. Raises PayloadTooLarge, QueueFull, ClientGone."""
        body = io.BytesIO()  # gives its own memory away in the end, where pieces that are joined exist twice
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
            self._count()
            if not (size > len(piece) or message.get("more_body")):
                return piece
            body.write(piece)
            if not message.get("more_body"):
                return body.getvalue()
            if self._counted:
                await self._intake.turn(len(piece))

    def count_values(self, values: int) -> None:
        """It is about to be decoded to so many. Raises QueueFull."""
        self._values = values
        self._count()

    def _count(self) -> None:
        more = max(0, COPIES * self._size + VALUE_BYTES * self._values - FREE_BYTES) - self._counted
        if more <= 0:
            return
        intake = self._intake
        held_elsewhere = intake.held_bytes - self._counted
        if held_elsewhere and intake.held_bytes + more > intake.max_bytes:
            held, most = intake.held_bytes >> 20, intake.max_bytes >> 20
            raise QueueFull(
                f"body: the bodies in this gateway take {held} MiB of memory, {most} are allowed "
                "(SIE_BODY_MEMORY_BYTES)",
                param="body",
                retry_after_s=2,
            )
        self._leave_small()
        intake.hold(more)
        self._counted += more

    def _leave_small(self) -> None:
        self._intake.count_small(-self._is_small)
        self._is_small = False

    def close(self) -> None:
        """The body is not held any more."""
        self._leave_small()
        self._intake.hold(-self._counted)
        self._counted = 0


def check_length(headers: Mapping[str, str], limit: int) -> None:
    """Raise PayloadTooLarge for a body that is announced as larger than `limit` bytes."""
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
        raise _too_large(f"{declared[:18]} bytes, at most {limit}", limit)


def bounded(receive: Receive, *, limit: int = CONTROL_BYTES, within_s: float = CONTROL_S) -> Receive:
    """`receive` for routes that read bodies themselves: PayloadTooLarge past `limit` bytes, GatewayTimeout for one that
    is not complete in `within_s` from its first look on.
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


async def beside(body: bytes, work: Callable[[], T]) -> T:
    """Run `work` on a body, in a thread if it is large."""
    return work() if len(body) <= LARGE_BYTES else await asyncio.to_thread(work)


async def decode_body(call: Call, body: bytes, *, msgpack: bool = False) -> Mapping[str, Any]:
    """The top-level map of a request body. Raises InvalidInput with reason malformed, too_many_values or schema, and
    QueueFull.
    """
    if len(body) <= plain.SMALL_BYTES:
        return bodies.decode(body, msgpack=msgpack)
    values = await beside(body, lambda: bodies.count(body, msgpack=msgpack))
    if call.reader is not None:
        call.reader.count_values(values)
    return await beside(body, lambda: bodies.decode(body, msgpack=msgpack))
