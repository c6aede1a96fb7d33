"""Opens and restores the connection to a NATS server or cluster, and assigns replies to requests. `NatsBus` adds
messages of core NATS, which are not stored and are delivered at most once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from nats.aio.client import Client
from nats.errors import BadSubjectError, SlowConsumerError, UnexpectedEOF
from nats.errors import Error as NatsError

from sie_broker import (
    BrokerError,
    BrokerUnavailable,
    CoreMessage,
    NoResponder,
    NotPermitted,
    PayloadTooBig,
    Subscription,
)
from sie_broker.limits import API_TIMEOUT_S, HELD_BYTES, HELD_MESSAGES, STOP_TIMEOUT_S
from sie_broker.nats.transport import FIRST_RETRY_S, HANG_UP_S, Transport, inbox_prefix, split
from sie_broker.tasks import ConnectionState, expire, log_failure

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
