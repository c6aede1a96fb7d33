"""Publishes messages with an acknowledgement, pulls messages, and sends requests to the JetStream API.

    publish ──► Ack of the stream: sequence, duplicate
    NatsPulls ──pull requests, by credit──► consumer ──► NatsDelivery ──► ack

The credit of a consumer is the number of deliveries that this process still accepts from it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from nats.errors import Error as NatsError

from sie_broker import BrokerError, BrokerUnavailable, Delivery, NotPermitted, Published, Pulls, StreamState
from sie_broker.limits import API_TIMEOUT_S
from sie_broker.nats.api import (
    NO_CONSUMER,
    NO_STREAM,
    STREAM_EXISTS,
    ApiError,
    ApiReply,
    Refusal,
    StreamInfo,
    error_of,
    nanoseconds,
    state_of,
)
from sie_broker.nats.connection import NatsBus, NatsConnection, is_no_responder
from sie_broker.nats.transport import FIRST_RETRY_S, MAX_RETRY_S
from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire import messages
from sie_contracts.wire.records import StreamRequest
from sie_contracts.wire.topology import streams_subject

log = logging.getLogger("sie.broker")

PULL_EXPIRES_S = 5.0  # largest number of seconds until a pull request expires
# Seconds until a pull for several messages of a work stream expires. If a process hangs, its connection stays open, and
# the broker still sends messages for its open pulls. After the ack wait (at least 3 s), the broker delivers these
# messages again. If a pull were open at that time, it could get a message that the process already has. So a pull
# expires before the ack wait ends. A pull for a single message ends when this message is delivered, so it may last
# PULL_EXPIRES_S. Each idle model has a pull for a single message. The longer it lasts, the less its renewal costs.
WORK_EXPIRES_S = 1.0
# Pulls expire at multiples of this time, in seconds, so that one iteration of the event loop renews the pulls of many
# consumers. Pulls that last less than 2 s expire at multiples of half their duration. 200 pulls that expire one by one
# cost 1.5 % of a core, pulls that expire together 0.1 % (nats-server 2.15, 2 cores).
_TICK_S = 1.0
# Byte limit of a pull for several messages, because a server closes a connection with 64 MiB of unsent data
# (`max_pending`). `_issue` raises the limit if a single message may be larger, and adds _SUBJECT_BYTES, because the
# server also counts the subjects of a message.
PULL_BYTES = 4 << 20
_SUBJECT_BYTES = 64 << 10
# seconds from the expiry of a pull until it counts as lost; the broker reports an expired pull within milliseconds
_PULL_LATE_S = 1.0
# seconds between two log lines about refused pulls; a broker may refuse many, for example if a restart lost consumers
_LOG_EVERY_S = 10.0
# smallest number of seconds between two searches for lost pulls
_SWEEP_S = 0.25


def parse_reply(reply: str) -> list[str]:
    """Return [consumer, deliveries, sequence, consumer sequence, time in ns, pending] of an ack subject. The subject
    `$JS.ACK[.domain.account].stream.consumer.…` has 9 tokens or at least 11. Raises ValueError for any other subject.
    """
    tokens = reply.split(".")
    at = 3 if len(tokens) == 9 else 5
    if tokens[:2] != ["$JS", "ACK"] or len(tokens) < at + 6:
        raise ValueError(f"{reply[:70]!r} is not an ack subject")
    return tokens[at : at + 6]


class NatsDelivery:
    """Leased message. Its sequence, time and counts are read from the ack subject."""

    __slots__ = (
        "_connection",
        "consumer",
        "consumer_sequence",
        "data",
        "delivered",
        "headers",
        "pending",
        "reply",
        "sent_s",
        "sequence",
        "subject",
    )

    def __init__(self, connection: NatsConnection, message: Any) -> None:
        self.consumer, *numbers = parse_reply(message.reply)
        self.delivered, self.sequence, self.consumer_sequence, sent_ns, self.pending = map(int, numbers)
        self.sent_s = sent_ns / 1e9
        self._connection = connection
        self.reply: str = message.reply
        self.data: bytes = message.data
        self.subject: str = message.subject
        self.headers: dict[str, str] | None = message.headers

    async def ack(self) -> None:
        await self._connection.acknowledge(self.reply)

    async def nak(self, delay_s: float = 0.0) -> None:
        await self._connection.post(self.reply, b'-NAK {"delay":%d}' % nanoseconds(delay_s) if delay_s > 0 else b"-NAK")

    async def in_progress(self) -> None:
        await self._connection.post(self.reply, b"+WPI")

    async def term(self, reason: str) -> None:
        await self._connection.post(self.reply, b"+TERM " + reason.encode())


class _PullCredit:
    """Counts of the open pulls of one consumer.

    `issued`: number of deliveries that were ever requested. `settled`: number of requested deliveries that arrived,
    that the broker reported as not delivered, or that count as lost. All other deliveries may still arrive. The counts
    are sums over all pulls, because a delivery does not show to which open pull of the consumer it belongs.
    """

    __slots__ = ("consumer", "credit", "index", "issued", "retry", "retry_s", "settled", "single", "written_off")

    def __init__(self, consumer: str, index: int) -> None:
        self.consumer = consumer
        self.index = index
        self.credit = 0
        self.issued = 0
        self.settled = 0
        # True if the next message exceeds the byte limit; the next pull then requests one delivery, without a limit
        self.single = False
        # value of `issued` when pulls were last counted as lost; status messages of those pulls are ignored
        self.written_off = 0
        self.retry: asyncio.TimerHandle | None = None
        self.retry_s = 0.0

    @property
    def open(self) -> int:
        return self.issued - self.settled

    def settle(self, count: int) -> None:
        self.settled = min(self.issued, self.settled + count)

    def write_off(self, issued: int) -> None:
        self.settled = max(self.settled, issued)
        self.written_off = issued


def _expiry(now_s: float, longest_s: float) -> float:
    tick_s = min(_TICK_S, longest_s / 2)
    return (now_s + longest_s) // tick_s * tick_s


class NatsPulls:
    """Pull requests from one connection to the consumers of a stream. One task sends the requests. One timer finds lost
    pulls: pulls whose end the broker did not report.

    `on_break` is called when deliveries may be lost, or when a consumer no longer exists. Only reads and watches of a
    bucket need this call: a queue delivers lost messages again after the ack wait.
    """

    def __init__(
        self,
        bus: NatsBus,
        client: Any,
        stream: str,
        handler: Callable[[NatsDelivery], None],
        on_break: Callable[[], None] | None = None,
        expires_s: float = PULL_EXPIRES_S,
    ) -> None:
        self._bus = bus
        self._expires_s = expires_s
        self._client = client
        self._stream = stream
        self._handler = handler
        self._on_break = on_break
        self._credits: dict[str, _PullCredit] = {}
        self._by_index: dict[int, _PullCredit] = {}
        self._next_index = 0
        self._dirty: dict[_PullCredit, None] = {}
        self._ages: deque[tuple[float, _PullCredit, int]] = deque()
        self._watchdog: asyncio.TimerHandle | None = None
        self._silent = 0
        self._logged_s = -_LOG_EVERY_S
        self._inbox = ""
        self._subscription: Any = None
        self._stopping = False
        self._wake = asyncio.Event()
        self._task = bus.own(self._run(), f"pulls on {stream}")

    def want(self, consumer: str, credit: int) -> None:
        if self._stopping:
            return
        entry = self._credits.get(consumer)
        if entry is None:
            if credit <= 0:
                return
            entry = _PullCredit(consumer, self._next_index)
            self._next_index += 1
            self._credits[consumer] = self._by_index[entry.index] = entry
        entry.credit = max(0, credit)
        self._consider(entry)

    def outstanding(self, consumer: str) -> int:
        entry = self._credits.get(consumer)
        return entry.open if entry is not None else 0

    async def stop(self) -> None:
        self._stopping = True
        subscription, self._subscription = self._subscription, None
        try:
            if subscription is not None:
                await self._bus.drain(subscription)
        finally:
            self.abandon()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def abandon(self) -> None:
        """Discard all open pull requests without sending a message to the broker."""
        self._stopping = True
        for entry in self._credits.values():
            if entry.retry is not None:
                entry.retry.cancel()
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._credits.clear()
        self._by_index.clear()
        self._bus.remove(self)

    async def retire(self) -> None:
        """End the inbox (reply subject of the pulls) after the deliveries that have arrived on it are handled. Later
        deliveries may be lost.
        """
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            for _ in range(10):
                if subscription.pending_msgs:
                    await asyncio.sleep(0)  # one iteration of the event loop handles all arrived deliveries
            try:
                await subscription.unsubscribe()
            except NatsError as error:
                log.info("an inbox for deliveries was lost with its connection: %s", error)
        for entry in list(self._credits.values()):
            entry.write_off(entry.issued)
            self._consider(entry)
        self._ages.clear()
        if self._on_break is not None:
            self._on_break()

    def wake(self) -> None:
        self._wake.set()

    def _consider(self, entry: _PullCredit) -> None:
        if entry.credit > entry.open:
            self._dirty[entry] = None
            self._wake.set()
        elif not entry.credit and not entry.open and entry.retry is None:
            self._credits.pop(entry.consumer, None)
            self._by_index.pop(entry.index, None)

    def _renew(self, entry: _PullCredit) -> None:
        # Each increase of the credit opens a separate small pull. To renew each small pull would cost 5 % of a core
        # for 200 idle consumers with a credit of 16. So this method waits until less than half of the credit is
        # requested. One large pull then replaces the small pulls.
        if entry.open * 2 < entry.credit or not entry.open:
            self._consider(entry)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._stopping:
                return
            if self._silent >= 2:
                log.warning("pulls on stream %s get no messages and no status: a new inbox is opened", self._stream)
                self._silent = 0
                await self.retire()
            if not self._bus.live:
                continue  # the reconnect wakes this task
            try:
                await self._issue()
            except (BrokerUnavailable, NatsError) as error:
                log.info("pulls on stream %s wait for a connection: %s", self._stream, error)
                self._dirty = dict.fromkeys(self._credits.values())

    async def _issue(self) -> None:
        if self._subscription is None:
            self._inbox = f"{self._client.new_inbox()}."
            self._subscription = await self._client.subscribe(
                f"{self._inbox}*", cb=self._arrived, pending_msgs_limit=0, pending_bytes_limit=0
            )
        subscription = self._subscription
        dirty, self._dirty = self._dirty, {}
        now_s = asyncio.get_running_loop().time()
        for entry in dirty:
            missing = entry.credit - entry.open
            if missing <= 0 or entry.retry is not None:
                continue
            if self._stopping or self._subscription is not subscription:
                # Another task has ended the inbox. The next call requests all missing deliveries on a new inbox.
                return
            if entry.single:
                missing, entry.single = 1, False
            entry.issued += missing
            expires_s = _expiry(now_s, PULL_EXPIRES_S if missing == 1 else self._expires_s)
            self._expect(expires_s + _PULL_LATE_S, entry)
            body = b'{"batch":%d,"expires":%d' % (missing, (expires_s - now_s) * 1e9)
            if missing > 1:
                body += b',"max_bytes":%d' % (max(PULL_BYTES, self._bus.max_payload) + _SUBJECT_BYTES)
            body += b"}"
            reply = f"{self._inbox}{entry.index}_{entry.issued}_{missing}"
            try:
                await self._bus.post(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{entry.consumer}", body, reply)
            except BrokerUnavailable:
                entry.settle(missing)
                raise

    def _expect(self, deadline_s: float, entry: _PullCredit) -> None:
        ages = self._ages
        while ages and ages[0][1].settled >= ages[0][2]:
            ages.popleft()
        ages.append((deadline_s, entry, entry.issued))
        if self._watchdog is None:
            self._watchdog = asyncio.get_running_loop().call_at(deadline_s, self._sweep)

    def _sweep(self) -> None:
        """Count an expired pull as lost if its messages neither arrived nor were reported as undelivered."""
        loop = asyncio.get_running_loop()
        self._watchdog = None
        ages = self._ages
        lost = False
        while ages and (ages[0][1].settled >= ages[0][2] or ages[0][0] <= loop.time()):
            _, entry, issued = ages.popleft()
            if entry.settled < issued:
                lost = True
                entry.write_off(issued)
                self._consider(entry)
        if ages:
            self._watchdog = loop.call_at(max(ages[0][0], loop.time() + _SWEEP_S), self._sweep)
        if lost:
            self._silent += 1
            self._wake.set()

    async def _arrived(self, message: Any) -> None:
        self._silent = 0
        if not message.reply:
            self._ended(message.subject[len(self._inbox) :], message.headers or {})
            return
        try:
            delivery = NatsDelivery(self._bus, message)
        except ValueError as error:
            log.error("pulls on stream %s: a message was ignored: %s", self._stream, error)
            return
        entry = self._credits.get(delivery.consumer)
        if entry is not None:
            entry.settle(1)
            entry.credit = max(0, entry.credit - 1)
            entry.retry_s = 0.0
            self._consider(entry)
        try:
            self._handler(delivery)
        except Exception:
            log.exception("pulls on stream %s: the handler of a delivery failed", self._stream)

    def _ended(self, token: str, headers: dict[str, str]) -> None:
        """Handle the status message of a pull. 408: the pull expired. 404: there are no messages. 409: the consumer was
        deleted, its leader changed, or the byte limit is reached. 503: no server has the consumer. 100: a heartbeat.
        """
        parts = token.split("_")
        status = headers.get("Status", "")
        if len(parts) != 3 or status == "100":
            return
        index, issued, requested = map(int, parts)
        entry = self._by_index.get(index)
        if entry is None or issued <= entry.written_off:
            return
        reason = headers.get("Description", "").strip()
        if reason == "Batch Completed":  # a pull with a byte limit gets this status after its last delivery
            return
        left = headers.get("Nats-Pending-Messages")
        if left is not None:
            entry.settle(int(left))
        elif status == "409" and ("Deleted" in reason or "Leadership" in reason):
            # all pulls of the consumer have ended, and the status does not report the number of missing deliveries
            entry.write_off(issued)
        else:
            entry.settle(requested)
        if "Exceeds MaxBytes" in reason:
            entry.single = left is not None and int(left) == requested
            self._consider(entry)
        elif status in ("404", "408") or "Leadership" in reason:
            entry.retry_s = 0.0
            self._renew(entry)
        else:
            self._retry_later(entry, f"{status} {reason if status != '503' else 'no such consumer'}")

    def _retry_later(self, entry: _PullCredit, reason: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if not entry.retry_s and now_s >= self._logged_s + _LOG_EVERY_S:
            self._logged_s = now_s
            log.warning("pull on stream %s, consumer %s, is sent again: %s", self._stream, entry.consumer, reason)
        entry.retry_s = min(MAX_RETRY_S, max(FIRST_RETRY_S, entry.retry_s * 2))
        if entry.retry is None:
            entry.retry = asyncio.get_running_loop().call_later(entry.retry_s, self._retry, entry)
        if self._on_break is not None:
            self._on_break()

    def _retry(self, entry: _PullCredit) -> None:
        entry.retry = None
        self._consider(entry)


_OWNER_RETRY_S = 0.05  # seconds between two requests to the owner of streams
# Largest number of buckets that a connection reads at the same time. Each read has at most one open pull, so the unsent
# bytes of these reads stay far below the server's limit for a connection.
_READS_AT_ONCE = 2
_T = TypeVar("_T")


class Ack(msgspec.Struct):
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


_decode_ack = msgspec.json.Decoder(Ack).decode


def publish_ack(subject: str, answer: Any) -> Ack:
    if is_no_responder(answer):
        raise BrokerUnavailable(f"no stream stores messages of {subject}")
    try:
        ack = _decode_ack(answer.data)
    except UNDECODABLE as error:
        raise BrokerError(f"{subject}: the reply is no acknowledgement of a stream: {error}") from error
    if ack.error is not None:
        raise error_of(subject, ack.error)
    return ack


class JetStream(NatsBus):
    """Calls to JetStream that NatsQueue, NatsAdministration and NatsStore share."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.reading = asyncio.Semaphore(_READS_AT_ONCE)

    async def publish(self, subject: str, data: bytes, message_id: str, timeout_s: float = 2.0) -> Published:
        answer = await self.roundtrip(subject, data, timeout_s, {"Nats-Msg-Id": message_id})
        ack = publish_ack(subject, answer)
        return Published(ack.seq, ack.duplicate)

    def pulls(self, stream: str, handler: Callable[[Delivery], None]) -> Pulls:
        return self.open_pulls(stream, handler, expires_s=WORK_EXPIRES_S)

    async def api(self, verb: str, body: object, kind: type[_T]) -> _T:
        """Send one request to the JetStream API and return its decoded reply. Raises BrokerUnavailable, and BrokerError
        for an error code or a reply that cannot be decoded.
        """
        answer = await self.roundtrip(f"$JS.API.{verb}", msgspec.json.encode(body), API_TIMEOUT_S)
        if is_no_responder(answer):
            raise BrokerUnavailable(f"{verb}: the broker has no JetStream")
        try:
            error = msgspec.json.decode(answer.data, type=ApiReply).error
            if error is not None:
                raise error_of(verb, error)
            return msgspec.json.decode(answer.data, type=kind)
        except UNDECODABLE as error:
            raise BrokerError(f"{verb}: the broker's reply cannot be decoded: {error}") from error

    async def find(self, verb: str, body: object, kind: type[_T], *absent: int) -> _T | None:
        """Send a request like `api`, but return None if its error code is in `absent`."""
        try:
            return await self.api(verb, body, kind)
        except Refusal as refusal:
            if refusal.number in absent:
                return None
            raise

    async def stream_info(self, stream: str) -> StreamInfo | None:
        return await self.find(f"STREAM.INFO.{stream}", {}, StreamInfo, NO_STREAM)

    async def stream_state(self, stream: str) -> StreamState:
        info = await self.stream_info(stream)
        if info is None:
            raise BrokerError(f"there is no stream {stream}")
        return state_of(info)

    async def create_stream(self, request: StreamRequest, config: dict[str, Any]) -> StreamInfo | None:
        """Return the stream. If it does not exist, the owner of streams creates it from `request`. If no owner is
        connected, or this process is the owner, this process creates it from `config`, with the same settings.
        Concurrent callers get the same stream. Return None if the stream was deleted after its creation.
        """
        name = request.name
        info = await self.stream_info(name)
        if info is None and not await self.ask_owner(request):
            try:
                info = await self.find(f"STREAM.CREATE.{name}", config, StreamInfo, STREAM_EXISTS)
            except NotPermitted as error:
                raise BrokerUnavailable(
                    f"{name} does not exist, and the config service, which creates streams, does not reply: {error}"
                ) from error
        return info or await self.stream_info(name)

    async def ask_owner(self, request: StreamRequest) -> bool:
        """Ask the owner of streams to create or update a stream. Return False if this process must do this itself,
        because it is the owner, or no owner connects until `owner_until_s`. Raises BrokerError.
        """
        if self.owns_streams:
            return False
        while is_no_responder(
            answer := await self.roundtrip(streams_subject(request.name), messages.encode(request), API_TIMEOUT_S)
        ):
            if time.monotonic() >= self.owner_until_s:
                return False
            await asyncio.sleep(_OWNER_RETRY_S)
        if answer.data:
            raise BrokerError(f"the config service did not create or update {request.name}: {answer.data.decode()}")
        return True

    async def delete_consumer(self, stream: str, name: str) -> bool:
        return await self.find(f"CONSUMER.DELETE.{stream}.{name}", {}, ApiReply, NO_CONSUMER, NO_STREAM) is not None

    def open_pulls(
        self,
        stream: str,
        handler: Callable[[NatsDelivery], None],
        on_break: Callable[[], None] | None = None,
        expires_s: float = PULL_EXPIRES_S,
    ) -> NatsPulls:
        pulls = NatsPulls(self, self._client, stream, handler, on_break, expires_s)
        self._inboxes.add(pulls)
        return pulls
