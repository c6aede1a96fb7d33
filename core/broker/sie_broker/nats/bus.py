"""Core NATS: messages that are delivered at most once."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

from nats.errors import BadSubjectError
from nats.errors import Error as NatsError

from sie_broker import BrokerError, BrokerUnavailable, CoreMessage, NoResponder, Subscription
from sie_broker.limits import API_TIMEOUT_S, HELD_BYTES, HELD_MESSAGES, STOP_TIMEOUT_S
from sie_broker.nats.api import is_no_responder
from sie_broker.nats.connection import NatsConnection
from sie_broker.tasks import guarded

log = logging.getLogger("sie.broker")


def _pattern(subject: str) -> re.Pattern[str]:
    """Return a pattern of the subjects that a subscription is for.

    A user that may pull from a stream chooses the subject on which the deliveries arrive, and no permission checks that
    choice. A delivery keeps the subject of its first publish. So the pattern tells such a delivery from a message that
    was published on a subject of this subscription.
    """
    wild = {"*": r"[^.]+", ">": ".+"}
    return re.compile(r"\.".join(wild.get(part) or re.escape(part) for part in subject.split(".")))


class NatsBus(NatsConnection):
    """Implementation of the protocol `Bus`."""

    async def send(self, subject: str, data: bytes, reply: str = "") -> None:
        await self.post(subject, data, reply)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        answer = await self.roundtrip(subject, data, timeout_s)
        if is_no_responder(answer):
            raise NoResponder(f"nobody listens on {subject}")
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
                    "%s: a delivery of %s arrived on %s and was dropped", self.name, message.subject[:200], subject
                )
                return
            await guarded(handler_name, handler(CoreMessage(message.subject, message.data, message.reply)))

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
            raise ValueError(f"{subject!r} is not a subject") from None
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
        """End a subscription of the client. Messages that the broker sent before it received the UNSUB are handled
        first, for at most STOP_TIMEOUT_S seconds.
        """
        # At the time-out the task is not cancelled: the client does not survive a cancelled flush (nats-py 2.16).
        self._droppers.pop(subscription, None)
        task = self.own(self._drained(subscription), "drain")
        await asyncio.wait({task}, timeout=STOP_TIMEOUT_S)
        if not task.done():
            log.warning("%s: a subscription was not drained within %s s", self.name, STOP_TIMEOUT_S)

    async def _drained(self, subscription: Any) -> None:
        # The client's own drain lets its PING overtake its UNSUB and drops the messages that arrive in between: under
        # load, 4 messages of a credit of 16 (nats-py 2.16). So this UNSUB is sent first. The echo of `flush` comes back
        # behind every message that the broker sent on the subscription.
        try:
            await self._client._send_unsubscribe(subscription._id)
            await self.flush()
        except BrokerUnavailable as error:
            log.info("%s: a subscription ended because its connection was lost: %s", self.name, error)
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
