"""Opens and restores the connection to a NATS server or cluster, assigns replies to requests, publishes messages with
an acknowledgement, pulls messages, and sends requests to the JetStream API.

    publish ──► Ack of the stream: sequence, duplicate
    NatsPulls ──pull requests, by credit──► consumer ──► NatsDelivery ──► ack

The credit of a consumer is the number of deliveries that this process still accepts from it. `NatsBus` adds messages of
core NATS, which are not stored and are delivered at most once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from nats.aio.client import Client
from nats.errors import BadSubjectError, SlowConsumerError, UnexpectedEOF
from nats.errors import Error as NatsError

from sie_broker import (
    BrokerError,
    BrokerUnavailable,
    CoreMessage,
    Delivery,
    NoResponder,
    NotPermitted,
    PayloadTooBig,
    Published,
    Pulls,
    StreamState,
    Subscription,
)
from sie_broker.limits import API_TIMEOUT_S, HELD_BYTES, HELD_MESSAGES, STOP_TIMEOUT_S
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
from sie_broker.nats.transport import FIRST_RETRY_S, HANG_UP_S, MAX_RETRY_S, Transport, inbox_prefix, split
from sie_broker.tasks import ConnectionState, expire, log_failure
from sie_contracts.errors import UNDECODABLE
from sie_contracts.wire import messages
from sie_contracts.wire.records import StreamRequest
from sie_contracts.wire.topology import streams_subject

if TYPE_CHECKING:
    from sie_contracts.settings import Secret

log = logging.getLogger("sie.broker")

_CLOSE_TIMEOUT_S = 2.0
# Seconds after the connection came up during which a process waits for the owner of streams. On a broker with users,
# only the owner may create streams, and it may connect a moment later than this process.
OWNER_WITHIN_S = 2.0
PING_S = 5.0  # seconds between two pings; a connection counts as lost if two pings have no reply
_PERMISSION = re.compile(r"permissions violation for publish to \\?\"([^\"\\]+)", re.IGNORECASE)

# Bytes of the client's send buffer. While the buffer is full, a publisher waits. This is rare, because the buffer is
# larger than any burst within one iteration of the event loop.
_SEND_BUFFER_BYTES = 64 << 20

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


class PullInbox(Protocol):
    """Inbox (reply subject) with its open pull requests. The connection to the broker calls these methods. When the
    connection is lost, the inbox is lost too.
    """

    def abandon(self) -> None:
        """Discard all pulls, and send nothing to the broker. `close` of the connection calls this method."""

    async def retire(self) -> None:
        """End the inbox. Called when the connection is lost."""

    def wake(self) -> None:
        """Send the pull requests again. Called after a reconnect."""


class Answers:
    """Requests in flight, by token. The token is the last part of the reply subject. All replies arrive on `inbox`."""

    def __init__(self, inbox: str) -> None:
        self.inbox = inbox
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._subjects: dict[str, str] = {}
        self._token = 0

    def expect(self, subject: str) -> tuple[str, asyncio.Future[Any]]:
        """Return a new token and the future for its reply. The caller must pass the token to `remove` afterwards."""
        self._token += 1
        token = str(self._token)
        answer = self._waiting[token] = asyncio.get_running_loop().create_future()
        self._subjects[token] = subject
        return token, answer

    def remove(self, token: str) -> None:
        del self._waiting[token], self._subjects[token]

    def refused(self, subject: str) -> bool:
        """Raise NotPermitted in all requests in flight on `subject`, because the broker has reported that this user may
        not publish to it. Return whether any request was in flight.
        """
        tokens = [token for token, subscribed in self._subjects.items() if subscribed.lower() == subject.lower()]
        for token in tokens:
            if not self._waiting[token].done():
                reason = f"this user of the broker may not publish to {self._subjects[token]}"
                self._waiting[token].set_exception(NotPermitted(reason))
        return bool(tokens)

    async def arrived(self, message: Any) -> None:
        skip = len(self.inbox)
        answer = self._waiting.get(message.subject[skip:])
        if answer is None and message.reply:
            # `flush` sends a message to the inbox of this process itself. The subject of this message ends with `echo`,
            # and its reply subject ends with the token.
            answer = self._waiting.get(message.reply[skip:])
        if answer is not None and not answer.done():
            answer.set_result(message)

    def fail(self, reason: str) -> None:
        """Raise BrokerUnavailable in all requests in flight."""
        for answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(BrokerUnavailable(reason))


class NatsConnection(ConnectionState):
    """Connection to a NATS server or cluster. Call `open` before any other method."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.max_payload = 0
        self.owns_streams = False
        # until this monotonic time, `ask_owner` waits for the owner of streams to connect
        self.owner_until_s = 0.0
        self._has_user = False
        self._client: Any = Client()
        self._transport = Transport()
        self._client._transport = self._transport
        self._opened = False  # True after the first success of `open`
        self._failed_attempts = 0
        self._dropped = 0
        # client's subscription -> callback for a dropped message
        self._droppers: dict[Any, Callable[[str], None]] = {}
        self._answers = Answers("")
        # open pulls, whose methods are called when the connection is lost, restored or closed
        self._inboxes: set[PullInbox] = set()

    async def open(self, url: str, timeout_s: float, password: Secret | None = None, user: str = "") -> None:
        """Connect to a server, as described in `sie_broker.nats.connect`."""
        servers, credentials = split(url, password)
        if user and password is not None:
            credentials = {"user": user, "password": password.reveal()}
        self._has_user = "user" in credentials
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        reason: Exception | None = None
        while True:
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._attempt(servers, credentials)
                break
            except (TimeoutError, NatsError, OSError) as error:
                last = self._client.last_error
                if reason is None or last or not isinstance(error, TimeoutError):
                    # The deadline may interrupt the last attempt. An earlier error then says more than the time-out,
                    # so `reason` stays the earlier error.
                    reason = last or error
                await self._hang_up()
                if loop.time() + FIRST_RETRY_S >= deadline_s:
                    where, cause = ", ".join(servers), str(reason) or type(reason).__name__
                    message = f"{self.name}: no broker at {where} within {timeout_s:g} s ({cause})"
                    raise BrokerUnavailable(message) from None
            except asyncio.CancelledError:
                await self._hang_up()
                raise
            await asyncio.sleep(FIRST_RETRY_S)
        self._opened = True
        self._came_up()

    async def _attempt(self, servers: list[str], credentials: dict[str, str]) -> None:
        """Try once to connect. During this attempt, the client's own retries are off, because a cancellation would not
        end them (nats-py 2.16).
        """
        self._client = Client()
        self._client._transport = self._transport = Transport()
        await self._client.connect(
            servers=servers,
            name=self.name,
            error_cb=self._on_error,
            disconnected_cb=self._on_lost,
            reconnected_cb=self._on_back,
            closed_cb=self._on_closed,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=FIRST_RETRY_S,
            connect_timeout=2,
            ping_interval=PING_S,
            max_outstanding_pings=2,
            pending_size=_SEND_BUFFER_BYTES,
            flush_timeout=2.0,
            inbox_prefix=inbox_prefix(credentials),
            **credentials,
        )
        self._client.options |= {"allow_reconnect": True, "max_reconnect_attempts": -1}
        answers = self._answers = Answers(f"{self._client.new_inbox()}.")
        await self._client.subscribe(
            f"{answers.inbox}*", cb=answers.arrived, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def _hang_up(self) -> None:
        """Close the connection. Abort the transport if the peer does not read the buffered bytes within HANG_UP_S."""
        closing = asyncio.get_running_loop().create_task(self._client.close())
        await asyncio.wait({closing}, timeout=HANG_UP_S)
        self._transport.abort()
        await asyncio.wait({closing}, timeout=HANG_UP_S)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await self._transport.wait_closed()

    async def close(self) -> None:
        """Send the buffered messages, close the connection, and stop its tasks. The caller must first call `stop` of
        pulls and watches, because the close discards their arrived messages.
        """
        if self._live:
            try:
                await self.flush(_CLOSE_TIMEOUT_S)
            except BrokerError as error:
                log.warning(
                    "%s: the connection was closed, but the last messages may not have been sent: %s", self.name, error
                )
        self._closed = True
        self._live = False
        self._up.set()
        for inbox in list(self._inboxes):
            inbox.abandon()
        await self._cancel_tasks()
        await self._hang_up()
        self._answers.fail(f"{self.name}: the connection was closed")

    @property
    def live(self) -> bool:
        return bool(self._live and self._client.is_connected)

    @property
    def server(self) -> tuple[str, bool]:
        """Return (version of the server, whether it has JetStream), from the server's first message."""
        info = self._client._server_info
        return str(info.get("version", "")), bool(info.get("jetstream"))

    def remove(self, inbox: PullInbox) -> None:
        self._inboxes.discard(inbox)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, SlowConsumerError):
            self._dropped += 1
            if self._dropped == 1 or self._dropped % 1000 == 0:
                log.error(
                    "%s: %d messages were dropped, because their handler is too slow; the last was on subject %s",
                    self.name,
                    self._dropped,
                    error.subject,
                )
            dropper = self._droppers.get(error.sub)
            if dropper is not None:
                dropper(error.subject)
            return
        refused = _PERMISSION.search(str(error))
        if refused is not None and self._answers.refused(refused[1]):
            return
        if self.live:
            is_eof = isinstance(error, UnexpectedEOF)
            reason = "the broker closed the connection; the broker's log has the reason" if is_eof else repr(error)
            log.warning("%s: %s", self.name, reason)
            return
        self._failed_attempts += 1
        self._client.options["reconnect_time_wait"] = min(1.0, FIRST_RETRY_S * 1.2 ** min(self._failed_attempts, 20))
        if self._failed_attempts == 1 and not self._closed:
            # at the start of a cluster, the broker often starts a moment later than its clients
            level, action = (logging.WARNING, "reconnecting") if self._opened else (logging.INFO, "connecting")
            log.log(level, "%s: %s to the broker failed, further attempts follow: %r", self.name, action, error)

    async def _on_lost(self) -> None:
        if not self._live:
            return
        self._live = False
        self._up.clear()
        log.warning("%s: connection lost", self.name)
        self._answers.fail(f"{self.name}: the connection was lost before the reply arrived")
        for inbox in list(self._inboxes):
            await inbox.retire()

    async def _on_back(self) -> None:
        log.warning(
            "%s: the connection to the broker is restored after %d failed attempts", self.name, self._failed_attempts
        )
        self._client.options["reconnect_time_wait"] = FIRST_RETRY_S
        self._came_up()
        for inbox in self._inboxes:
            inbox.wake()
        self._reconnected.set()

    def _came_up(self) -> None:
        self._failed_attempts = 0
        self.max_payload = self._client.max_payload
        self.owner_until_s = time.monotonic() + OWNER_WITHIN_S if self._has_user else 0.0
        self._live = True
        self._up.set()

    async def _on_closed(self) -> None:
        if self._opened and not self._closed:  # before the first connection, `open` raises the error to its caller
            log.critical("%s: the connection is closed and is not restored: %s", self.name, self._client.last_error)
            self._closed = True
            self._up.set()

    async def flush(self, timeout_s: float = 2.0) -> None:
        # The client's own flush is not used: after its time-out, the client's reader would end (nats-py 2.16).
        await self.roundtrip(f"{self._answers.inbox}echo", b"", timeout_s)

    async def post(self, subject: str, data: bytes, reply: str = "", headers: dict[str, str] | None = None) -> None:
        """Send a message now. Raises BrokerUnavailable without a connection, because the message may be outdated after
        the reconnect. Raises PayloadTooBig, and ValueError for an invalid subject.
        """
        if not self._live:
            raise BrokerUnavailable(f"{self.name}: no connection to the broker")
        _check_size(self.max_payload, data, headers)
        try:
            await self._client.publish(subject, data, reply, headers)
        except BadSubjectError:
            raise ValueError(f"{subject!r} is not a subject: expected words joined by dots, without blanks") from None
        except NatsError as error:
            raise BrokerUnavailable(f"{self.name}: {error}") from error

    async def acknowledge(self, reply: str) -> None:
        """Send an ack. Without a connection, send it after the reconnect: a late ack still removes the message."""
        if self._closed:
            raise BrokerUnavailable(f"{self.name}: the connection to the broker is closed")
        try:
            await self._client.publish(reply, b"+ACK")
        except NatsError as error:
            raise BrokerUnavailable(f"{self.name}: {error}") from error

    async def roundtrip(
        self, subject: str, data: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Any:
        """Send a message with a reply subject. Return the first message on the reply subject, which may be a status
        message. Raises PayloadTooBig, BrokerUnavailable.
        """
        if not self._live:
            timeout_s = await self.reach(timeout_s)
        answers = self._answers
        token, answer = answers.expect(subject)
        timer = asyncio.get_running_loop().call_later(timeout_s, expire, answer, subject, timeout_s)
        try:
            await self.post(subject, data, answers.inbox + token, headers)
            return await answer
        finally:
            timer.cancel()
            answers.remove(token)


def _check_size(limit: int, data: bytes, headers: dict[str, str] | None) -> None:
    # a larger message is refused before it is sent, because the server would close the connection
    size = len(data)
    if headers is not None:
        size += 12 + sum(len(key) + len(value.encode()) + 4 for key, value in headers.items())
    if size > limit:
        raise PayloadTooBig(f"a message of {size} bytes is above the broker's max_payload of {limit}")


def is_no_responder(answer: Any) -> bool:
    return answer.headers is not None and not answer.data and answer.headers.get("Status") == "503"


def _pattern(subject: str) -> re.Pattern[str]:
    """Return a pattern for the subjects of a subscription. The subscription drops messages with any other subject.

    A broker user that pulls from a stream chooses the subject to which the broker sends the deliveries. No permission
    limits this choice, so the user could direct stored messages to this subscription. Such a delivery keeps the subject
    of its stored message, which the pattern does not match.
    """
    wild = {"*": r"[^.]+", ">": ".+"}
    return re.compile(r"\.".join(wild.get(part) or re.escape(part) for part in subject.split(".")))


class NatsBus(NatsConnection):
    """Bus over core NATS, which does not store messages."""

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        await self.post(subject, data, reply)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        answer = await self.roundtrip(subject, data, timeout_s)
        if is_no_responder(answer):
            raise NoResponder(f"{subject} has no subscriber")
        return bytes(answer.data)

    async def subscribe(
        self,
        subject: str,
        handler: Callable[[CoreMessage], Awaitable[None]],
        queue: str = "",
        *,
        held_messages: int | None = None,
        held_bytes: int | None = None,
        on_dropped: Callable[[str], None] | None = None,
    ) -> Subscription:
        handler_name = f"{self.name}: the handler of {subject}"

        pattern = _pattern(subject)

        async def arrived(message: Any) -> None:
            if pattern.fullmatch(message.subject) is None:
                log.error(
                    "%s: a message published to %s arrived on the subscription %s and was dropped",
                    self.name,
                    message.subject[:200],
                    subject,
                )
                return
            try:
                await handler(CoreMessage(message.subject, message.data, message.reply))
            except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001 `log_failure` logs each exception
                log_failure(handler_name, error)

        await self.reach(API_TIMEOUT_S)
        try:
            subscription = await self._client.subscribe(
                subject,
                queue,
                cb=arrived,
                pending_msgs_limit=held_messages or HELD_MESSAGES,
                pending_bytes_limit=held_bytes or HELD_BYTES,
            )
        except BadSubjectError:
            raise ValueError(f"{subject!r} is not a subject: expected words joined by dots, without blanks") from None
        except NatsError as error:
            raise BrokerUnavailable(f"{self.name}: {error}") from error
        if on_dropped is not None:
            self._droppers[subscription] = on_dropped
        try:
            await self.flush()
        except BrokerError:
            await self.drain(subscription)
            raise
        return _NatsSubscription(self, subscription)

    async def drain(self, subscription: Any) -> None:
        """End a subscription of the client. The broker may send messages until it receives the UNSUB. Wait at most
        STOP_TIMEOUT_S seconds until these messages are handled.
        """
        # The task is not cancelled at the time-out, because a cancelled flush ends the client's reader (nats-py 2.16).
        self._droppers.pop(subscription, None)
        task = self.own(self._drained(subscription), "drain")
        await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
        if not task.done():
            log.warning("%s: a subscription was not drained within %s s", self.name, STOP_TIMEOUT_S)

    async def _drained(self, subscription: Any) -> None:
        # The client's own drain sends a PING before the UNSUB, and drops messages that arrive between PONG and UNSUB
        # (under load 4 of 16 messages; nats-py 2.16). So the UNSUB is sent here first. The reply to `flush` then
        # arrives after all messages that the broker has sent on the subscription.
        try:
            await self._client._send_unsubscribe(subscription._id)
            await self.flush()
        except BrokerUnavailable as error:
            log.info("%s: the broker did not confirm the end of a subscription: %s", self.name, error)
        try:
            await subscription.drain()
        except NatsError as error:
            log.info("%s: a subscription had already ended: %s", self.name, error)


class _NatsSubscription:
    def __init__(self, bus: NatsBus, subscription: Any) -> None:
        self._bus = bus
        self._subscription = subscription

    async def stop(self) -> None:
        await self._bus.drain(self._subscription)


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
