"""Inbox of results. One subscription per gateway; it only decodes, hands over and confirms.

    result ───────────────────────────────► its request's Collector ──► first outcome of a chunk wins ──► confirmation:
    the sidecar acks part of one ──► kept until all are there ──► digest checked in a thread ──┘

A request has an address of its own below the inbox's subject, so that also a message that the client library drops
names its request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from sie_broker import BrokerError, Bus, CoreMessage, Subscription
from sie_contracts.errors import InternalFailure, ResourceExhausted, SIEError
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Confirmation, Fragment, WorkResult
from sie_gateway.metrics import Metrics
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Tasks

HELD_MESSAGES = 1 << 16  # between the connection and this loop: more than ten seconds of results at 5,000 a second
HELD_BYTES = 256 << 20
MAX_HELD_BYTES = 512 << 20  # of results of which parts are missing
MAX_REQUEST_BYTES = 256 << 20
MAX_PARTS = 1 << 16
MAX_SILENCE_S = 30.0  # several times what a worker waits for a confirmation
_SLOT_BYTES = 64  # of the list, and of the object around a part
CHECKING_THREADS = 2
Verdict = Literal["taken", "duplicate", "unknown", "part"]
_CONFIRMATIONS: dict[Verdict, bytes] = {
    "taken": messages.encode(Confirmation("taken")),
    "duplicate": messages.encode(Confirmation("duplicate")),
    "unknown": messages.encode(Confirmation("unknown")),
    "part": messages.encode(Confirmation("part")),
}
_logger = logging.getLogger("sie.gateway.inbox")


class OutcomeCollector:
    """The outcomes of one request, by chunk. Complete when each chunk has its first terminal result."""

    def __init__(self, request: str, chunks: int, pool: str = "") -> None:
        self.request = request
        self.pool = pool
        self.results: list[WorkResult | None] = [None] * chunks
        self.missing = chunks
        self.arrivals_s = [0.0] * chunks  # when the result of each was taken
        self.on_taken: Callable[[WorkResult], None] | None = None  # called with each result that was taken
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def awaits(self, chunk: int) -> bool:
        """Whether that chunk exists and has no result yet."""
        return 0 <= chunk < len(self.results) and self.results[chunk] is None

    def offer(self, result: WorkResult) -> bool:
        """Take a result; false if its chunk has one already, or does not exist."""
        if not self.awaits(result.chunk):
            return False
        self.results[result.chunk] = result
        self.missing -= 1
        self.arrivals_s[result.chunk] = time.perf_counter()
        if self.on_taken is not None:
            self.on_taken(result)
        if not self.missing and not self._done.done():
            self._done.set_result(None)
        return True

    def fail(self, error: Exception) -> None:
        """End the request with an error, unless it is complete."""
        if not self._done.done():
            self._done.set_exception(error)

    async def wait(self, timeout_s: float) -> None:
        """Until complete. Raises TimeoutError, or the error given to `fail`."""
        done, _ = await asyncio.wait((self._done,), timeout=timeout_s)
        if not done:
            raise TimeoutError
        self._done.result()

    def close(self) -> None:
        if self._done.done() and not self._done.cancelled():
            self._done.exception()  # read, so that a failure after a time-out is not reported as lost
        else:
            self._done.cancel()


class InboxFull(Exception):
    """A part that would pass a bound of this gateway."""


@dataclass
class Assembly:
    """One encoded result, as far as it has come. Two attempts at a chunk differ in their digests and are two
    assemblies.
    """

    request: str
    chunk: int
    digest: str
    parts: list[bytes | None]
    touched_s: float
    missing: int
    held_bytes: int = 0
    checking: bool = False

    @property
    def key(self) -> tuple[str, int, str]:
        return self.request, self.chunk, self.digest


@dataclass
class Fragments:
    """All unfinished results of a gateway. `held_bytes` is what they hold now. Pure: time is an argument.

    Each request, and all of them together, hold so many bytes at most. An assembly that has had no part for
    `silence_s` is dropped where its room is needed: its sender learns that parts are missing when it sends the last
    one, and sends them again.
    """

    max_bytes: int = MAX_HELD_BYTES
    max_request_bytes: int = MAX_REQUEST_BYTES
    silence_s: float = MAX_SILENCE_S
    held_bytes: int = 0
    # the one that has waited longest for a part is first
    _all: dict[tuple[str, int, str], Assembly] = field(default_factory=dict)
    _requests: dict[str, set[tuple[str, int, str]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, part: Fragment, now_s: float) -> Assembly:
        """Keep a part, once. Raises InboxFull, and ValueError for one that is no part of anything."""
        if not (0 <= part.index < part.count <= MAX_PARTS and part.data):
            raise ValueError(f"part {part.index} of {part.count} with {len(part.data)} bytes")
        key = (part.request, part.chunk, part.digest)
        assembly = self._all.pop(key, None)
        if assembly is not None and len(assembly.parts) != part.count:  # sent again for a broker that takes other sizes
            self._all[key] = assembly
            self.drop(assembly)
            assembly = None
        if assembly is None:
            self._expire(now_s)
            assembly = Assembly(part.request, part.chunk, part.digest, [None] * part.count, now_s, part.count)
            self._requests.setdefault(part.request, set()).add(key)
        self._all[key] = assembly
        assembly.touched_s = now_s
        if assembly.parts[part.index] is None:
            size = len(part.data) + _SLOT_BYTES
            self._find_room(assembly, size, now_s)
            assembly.parts[part.index] = part.data
            assembly.missing -= 1
            assembly.held_bytes += size
            self.held_bytes += size
        return assembly

    def _find_room(self, keep: Assembly, size: int, now_s: float) -> None:
        held = sum(self._all[key].held_bytes for key in self._requests[keep.request])
        if held + size > self.max_request_bytes:
            raise InboxFull(f"parts of the results of one request pass {self.max_request_bytes >> 20} MiB")
        if self.held_bytes + size > self.max_bytes:
            self._expire(now_s)
        if self.held_bytes + size > self.max_bytes:
            raise InboxFull(f"this gateway holds {self.held_bytes >> 20} MiB of unfinished results")

    def _expire(self, now_s: float) -> None:
        while self._all:
            oldest = next(iter(self._all.values()))
            if oldest.checking or now_s - oldest.touched_s < self.silence_s:
                return
            self.drop(oldest)

    def drop(self, assembly: Assembly) -> None:
        """Forget an assembly, whole or not."""
        if self._all.pop(assembly.key, None) is not assembly:
            return
        self.held_bytes -= assembly.held_bytes
        keys = self._requests[assembly.request]
        keys.discard(assembly.key)
        if not keys:
            del self._requests[assembly.request]

    def drop_request(self, request: str) -> None:
        """Forget all parts of a request that ended."""
        for key in tuple(self._requests.get(request, ())):
            self.drop(self._all[key])


class ResultInbox:
    """All open requests of this gateway. The subject holds 122 random bits: nobody who was not told can send here."""

    def __init__(
        self,
        bus: Bus,
        metrics: Metrics,
        fragments: Fragments | None = None,
        *,
        on_late: Callable[[WorkResult], None] = lambda result: None,
    ) -> None:
        """`on_late` is called with each result whose request is over."""
        self.subject = f"sie.result.{uuid.uuid4().hex}"
        self._on_late = on_late
        self._bus = bus
        self._metrics = metrics
        self._open: dict[str, OutcomeCollector] = {}
        self._subscription: Subscription | None = None
        self._fragments = Fragments() if fragments is None else fragments
        self._checks = Tasks(_logger, lambda: None)  # each answers for its own failure
        self._pool = ThreadPoolExecutor(CHECKING_THREADS, "results")

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(
            f"{self.subject}.*",
            self._on_result,
            held_messages=HELD_MESSAGES,
            held_bytes=HELD_BYTES,
            on_dropped=self._on_dropped,
        )

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()
        await self._checks.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def address(self, request: str) -> str:
        """Subject to which results of this request are sent."""
        return f"{self.subject}.{request}"

    def open(self, request: str, chunks: int, pool: str = "") -> OutcomeCollector:
        collector = self._open[request] = OutcomeCollector(request, chunks, pool)
        return collector

    def close(self, collector: OutcomeCollector) -> None:
        self._open.pop(collector.request, None)
        self._fragments.drop_request(collector.request)
        collector.close()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def unfinished_bytes(self) -> int:
        """Bytes that parts of incomplete results hold."""
        return self._fragments.held_bytes

    def fail_pool(self, pool: str, error: SIEError) -> None:
        """End the open requests of a pool that is there no more."""
        for collector in list(self._open.values()):
            if collector.pool == pool:
                collector.fail(error)

    def fail_all(self, error: SIEError) -> None:
        for collector in list(self._open.values()):
            collector.fail(error)

    def _on_dropped(self, subject: str) -> None:
        """The client library had no room for a message. Its sender would send it again, into the same overload."""
        self._metrics.inbox_dropped.inc()
        collector = self._open.get(subject.rpartition(".")[2])
        if collector is not None:
            collector.fail(ResourceExhausted("this gateway could not take in a result of this request in time"))

    async def _on_result(self, message: CoreMessage) -> None:
        try:
            decoded = messages.decode_result_or_fragment(message.data)
        except msgspec.DecodeError as error:
            self._metrics.outcomes.labels("undecodable").inc()
            _logger.error("a result could not be read: %s", error)
            return
        verdict = self._keep(decoded, message.reply) if isinstance(decoded, Fragment) else self._offer(decoded)
        if verdict is not None and message.reply:
            failpoint("inbox.before_confirm")
            await self._bus.send(message.reply, _CONFIRMATIONS[verdict])

    def _offer(self, result: WorkResult) -> Verdict:
        collector = self._open.get(result.request)
        verdict: Verdict = "unknown" if collector is None else "taken" if collector.offer(result) else "duplicate"
        self._metrics.outcomes.labels(verdict).inc()
        if verdict == "unknown":
            self._on_late(result)
        if verdict == "taken":
            self._metrics.deliveries.observe(result.batch.deliveries)
        return verdict

    # results in parts

    def _keep(self, part: Fragment, reply: str) -> Verdict | None:
        """Verdict on a part; None while the digest of the whole is checked."""
        collector = self._open.get(part.request)
        if collector is None:
            return "unknown"
        if not collector.awaits(part.chunk):
            return "duplicate"
        try:
            assembly = self._fragments.add(part, time.monotonic())
        except ValueError as error:
            self._metrics.outcomes.labels("undecodable").inc()
            _logger.error("request %s: what was sent is no part of a result: %s", part.request, error)
            return "unknown"
        except InboxFull as error:
            self._metrics.outcomes.labels("no_room").inc()
            self._fragments.drop_request(part.request)
            collector.fail(
                ResourceExhausted(
                    f"the results of this request have no room: {error}; send fewer inputs or ask for less"
                )
            )
            return "unknown"
        if assembly.missing:
            return "part"
        if not assembly.checking:
            assembly.checking = True
            self._checks.start(self._check(assembly, reply), "check of a result")
        return None

    async def _check(self, assembly: Assembly, reply: str) -> None:
        """Hand over a whole result, or have it sent again: its last part is then confirmed as one of a result that is
        not whole.
        """
        try:
            parts = [part for part in assembly.parts if part is not None]
            result = await asyncio.get_running_loop().run_in_executor(self._pool, put_together, parts, assembly.digest)
            if (result.request, result.chunk) != (assembly.request, assembly.chunk):
                raise Damaged("it belongs to another request")
            verdict = self._offer(result)
            failpoint("inbox.assembled")
        except Damaged as error:
            self._metrics.outcomes.labels("damaged").inc()
            _logger.error(
                "request %s: a result of %d parts is damaged: %s", assembly.request, len(assembly.parts), error
            )
            verdict = "part"
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("a result could not be put together")
            collector = self._open.get(assembly.request)
            if collector is not None:
                collector.fail(InternalFailure("the gateway failed while taking in a result"))
            verdict = "unknown"
        finally:
            self._fragments.drop(assembly)
        if reply:
            try:
                await self._bus.send(reply, _CONFIRMATIONS[verdict])
            except BrokerError as error:  # then the last part comes again, and is told to be a duplicate
                _logger.warning("a result could not be confirmed: %s", error)


class Damaged(Exception):
    """Parts that do not make up the result that was sent."""


def put_together(parts: Sequence[bytes], digest: str) -> WorkResult:
    """The result that these parts are, in order. Raises Damaged."""
    data = b"".join(parts)
    if hashlib.sha256(data).hexdigest() != digest:
        raise Damaged("its digest differs")
    try:
        return messages.decode_result(data)
    except msgspec.DecodeError as error:
        raise Damaged(f"it cannot be read: {error}") from error
