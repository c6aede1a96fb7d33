"""Deliveries of a stream, and the pull requests for them: how many are open at each consumer, and which were lost."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from nats.errors import Error as NatsError

from sie_broker import BrokerUnavailable
from sie_broker.nats.api import nanoseconds
from sie_broker.nats.bus import NatsBus
from sie_broker.nats.connection import NatsConnection
from sie_broker.nats.transport import FIRST_RETRY_S, MAX_RETRY_S

log = logging.getLogger("sie.broker")

PULL_EXPIRES_S = 5.0  # at most
# A holder that stops reads nothing and closes nothing, and its open pulls take deliveries until they expire: each waits
# for the ack wait then. So a pull for several deliveries of work expires early. It expires before the ack wait (3 s at
# least) in any case, so that no delivery comes to the stopped holder a second time. One for a single delivery may wait
# longer: there is one for each quiet model.
WORK_EXPIRES_S = 1.0
# Pulls expire at whole ticks, so that those of many consumers are renewed in one turn of the loop: 200 that each woke
# it cost 1.5 % of a core, together 0.1 % (nats-server 2.15, 2 cores).
_TICK_S = 1.0
# A server ends a connection that has 64 MiB unsent (its `max_pending`), so a pull for several deliveries is bounded by
# bytes too. It must not be below the largest message with its subjects, which the server counts as well.
PULL_BYTES = 4 << 20
_SUBJECT_BYTES = 64 << 10
_PULL_LATE_S = 1.0  # the broker answers an expired pull within milliseconds: a silent one is lost
_LOG_EVERY_S = 10.0  # between log lines about consumers that a restarted broker does not have yet
_SWEEP_S = 0.25  # between searches for late pulls: timers must not grow with the message rate


def parse_reply(reply: str) -> list[str]:
    """Consumer, deliveries, sequence, consumer sequence, time and pending of
    `$JS.ACK[.domain.account].stream.consumer.…`, which has 9 or from 11 tokens. Raises ValueError for what is no ack
    subject.
    """
    tokens = reply.split(".")
    at = 3 if len(tokens) == 9 else 5
    if tokens[:2] != ["$JS", "ACK"] or len(tokens) < at + 6:
        raise ValueError(f"{reply[:70]!r} is not an ack subject")
    return tokens[at : at + 6]


class NatsDelivery:
    """A leased message. Its facts are read from the ack subject."""

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
        """Raises ValueError for a message that no consumer sent."""
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
    """The open pulls of one consumer.

    `issued` counts every delivery that was ever asked for. `settled` counts those that came or that the broker gave
    back. The difference may still come. The broker fills several pulls of a consumer in turns, so a delivery cannot be
    assigned to one of them; the sums are exact.
    """

    __slots__ = ("consumer", "index", "issued", "retry", "retry_s", "settled", "single", "wanted", "written_off")

    def __init__(self, consumer: str, index: int) -> None:
        self.consumer = consumer
        self.index = index
        self.wanted = 0
        self.issued = 0
        self.settled = 0
        self.single = (
            False  # the next message is above the bytes of a pull, but a pull for one message has no such bound
        )
        self.written_off = 0  # statuses of pulls issued up to here are ignored: they were written off
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
    """The open pulls of one connection on the consumers of a stream. One task issues them; one timer looks for pulls
    that the broker did not end.

    `on_break` is called when deliveries may have been lost on the way or a consumer is gone. A queue needs no such
    call, since the ack wait covers it; a watch does.
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
        """`expires_s`: of pulls for more than one delivery."""
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
        entry.wanted = max(0, credit)
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
        """Forget everything, and send nothing to the broker."""
        self._stopping = True
        for entry in self._credits.values():
            if entry.retry is not None:
                entry.retry.cancel()
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._credits.clear()
        self._by_index.clear()
        self._bus.forget(self)

    async def retire(self) -> None:
        """Leave the inbox: deliveries for it may be lost from now on. What has arrived on it is handled before this
        returns.
        """
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            for _ in range(10):
                if subscription.pending_msgs:
                    await asyncio.sleep(0)  # the handler does not block: one turn of the loop handles what has arrived
            try:
                await subscription.unsubscribe()
            except NatsError as error:
                log.info("an inbox of pulls ended with its connection: %s", error)
        for entry in list(self._credits.values()):
            entry.write_off(entry.issued)
            self._consider(entry)
        self._ages.clear()
        if self._on_break is not None:
            self._on_break()

    def wake(self) -> None:
        self._wake.set()

    # ---- asking

    def _consider(self, entry: _PullCredit) -> None:
        if entry.wanted > entry.open:
            self._dirty[entry] = None
            self._wake.set()
        elif not entry.wanted and not entry.open and entry.retry is None:
            self._credits.pop(entry.consumer, None)
            self._by_index.pop(entry.index, None)

    def _renew(self, entry: _PullCredit) -> None:
        # The many small pulls that top-ups leave become one again. Renewed each for itself, those of 200 consumers with
        # a credit of 16 cost 5 % of an idle core.
        if entry.open * 2 < entry.wanted or not entry.open:
            self._consider(entry)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._stopping:
                return
            if self._silent >= 2:
                log.warning("pulls on %s receive neither messages nor statuses: opening a new inbox", self._stream)
                self._silent = 0
                await self.retire()
            if not self._bus.live:
                continue  # the next connection wakes this task
            try:
                await self._issue()
            except (BrokerUnavailable, NatsError) as error:
                log.info("pulls on %s wait for a connection: %s", self._stream, error)
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
            missing = entry.wanted - entry.open
            if missing <= 0 or entry.retry is not None:
                continue
            if self._stopping or self._subscription is not subscription:
                return  # retired meanwhile: everything is asked for again on the next inbox
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
        """Ask again for deliveries that a pull past its expiry neither brought nor gave back."""
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

    # ---- receiving

    async def _arrived(self, message: Any) -> None:
        self._silent = 0
        if not message.reply:
            self._ended(message.subject[len(self._inbox) :], message.headers or {})
            return
        try:
            delivery = NatsDelivery(self._bus, message)
        except ValueError as error:
            log.error("pulls on %s: %s", self._stream, error)
            return
        entry = self._credits.get(delivery.consumer)
        if entry is not None:
            entry.settle(1)
            entry.wanted = max(0, entry.wanted - 1)
            entry.retry_s = 0.0
            self._consider(entry)
        try:
            self._handler(delivery)
        except Exception:
            log.exception("pulls on %s: the handler failed", self._stream)

    def _ended(self, token: str, headers: dict[str, str]) -> None:
        """A pull ended: 408 expired, 404 no messages, 409 the consumer is gone or moves, or the pull's bytes are used
        up, 503 nobody serves it. 100 is a heartbeat.
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
        if reason == "Batch Completed":  # said of a pull with a bound in bytes only
            return
        left = headers.get("Nats-Pending-Messages")
        if left is not None:
            entry.settle(int(left))
        elif status == "409" and ("Deleted" in reason or "Leadership" in reason):
            # every pull of the consumer ended, and no status says how many deliveries were left
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
            log.warning("pulls on %s: %s: %s; trying again until it is there", self._stream, entry.consumer, reason)
        entry.retry_s = min(MAX_RETRY_S, max(FIRST_RETRY_S, entry.retry_s * 2))
        if entry.retry is None:
            entry.retry = asyncio.get_running_loop().call_later(entry.retry_s, self._retry, entry)
        if self._on_break is not None:
            self._on_break()

    def _retry(self, entry: _PullCredit) -> None:
        entry.retry = None
        self._consider(entry)
