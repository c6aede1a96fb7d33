"""Replay of dead letters (work that workers gave up): publish the message of a letter again and wait for the result.
Gateways and `sie dlq` use this module.

    letter ──► its poison marks removed ──► message published again ──► all inputs answered ──► letter removed

A poison mark makes workers refuse an input that has crashed an adapter. The letter is removed last, so that it remains
for another attempt if an earlier step fails.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from sie_broker import Broker, Write
from sie_broker.dead_letters import DeadLetterEntry, Letters
from sie_contracts.media.contents import content_keys
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import Failed, WorkItem, WorkResult
from sie_gateway.inference.results import ResultInbox

if TYPE_CHECKING:
    from sie_gateway.metrics import Metrics


class Unreadable(Exception):
    """Raised if a letter cannot be published again: its message or its NATS subject is not that of a work item."""


@dataclass(eq=False)
class Replays:
    """Replay of the dead letters of one pool. `open_replays` creates objects of this class."""

    broker: Broker
    letters: Letters
    inbox: ResultInbox
    ack_wait_s: float
    on_published: Callable[[str, WorkItem], None] | None

    async def run(self, located: DeadLetterEntry, timeout_s: float) -> WorkResult:
        """Publish the work of a letter again and return the result. Remove the letter if no input failed. `timeout_s`:
        seconds to wait for the result, also the time limit of the work. Raises Unreadable, without publishing the work;
        TimeoutError; BrokerError; SIEError if the result arrives but cannot be stored.
        """
        if located.item is None:
            raise Unreadable(f"{located.letter.id}: its message cannot be decoded; nothing was published")
        try:
            spec = topology.consumer_of(located.letter.subject, self.ack_wait_s)
        except ValueError as error:
            raise Unreadable(f"{located.letter.id}: {error}; nothing was published") from error
        await self._forgive(located.item)
        if spec.name not in await self.broker.consumers(spec.stream):
            await self.broker.ensure_consumer(spec)
        request = f"{located.item.request}-{secrets.token_hex(4)}"
        collector = self.inbox.open(request, 1, topology.pool_of(located.letter.subject))
        try:
            item = msgspec.structs.replace(
                located.item,
                request=request,
                chunk=0,
                attempt=located.item.attempt + 1,
                reply=collector.reply,
                budget_ms=round(timeout_s * 1000),
            )
            await self.broker.publish(located.letter.subject, messages.encode(item), f"{request}.0.{item.attempt}")
            if self.on_published is not None:
                self.on_published(located.letter.subject, item)
            await collector.wait(timeout_s)
            (result,) = collector.results
            assert result is not None
            if not any(isinstance(outcome, Failed) for outcome in result.outcomes):
                await self.letters.remove(located)
            return result
        finally:
            self.inbox.close(collector)

    async def _forgive(self, item: WorkItem) -> None:
        """Remove the poison marks (records of crashed adapters) of the work's inputs: workers refuse marked inputs."""
        marks = await self.broker.key_value(topology.POISON_BUCKET, max_age_s=topology.POISON_LIFETIME_S)
        for key in dict.fromkeys(content_keys(item)):
            if await marks.get(key) is not None:
                await marks.write([Write(key, None)])


@contextlib.asynccontextmanager
async def open_replays(
    broker: Broker,
    letters: Letters,
    metrics: Metrics,
    ack_wait_s: float,
    on_published: Callable[[str, WorkItem], None] | None = None,
) -> AsyncIterator[Replays]:
    """Open a Replays. `on_published` gets the subject and the work item after each publish. Raises BrokerError."""
    inbox = ResultInbox(broker, metrics)
    await inbox.start()
    try:
        yield Replays(broker, letters, inbox, ack_wait_s, on_published)
    finally:
        await inbox.stop()
