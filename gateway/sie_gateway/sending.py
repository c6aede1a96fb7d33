"""The chunks of one request on their way into the queue, as their permits come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sie_contracts.errors import InternalFailure, SIEError
from sie_contracts.messages import Priority, WorkItem
from sie_contracts.topology import Lane
from sie_gateway.admission import Permits
from sie_gateway.inbox import Collector
from sie_gateway.peers import Peers
from sie_gateway.queue import Stored, WorkQueue
from sie_runtime.failpoints import failpoint

_logger = logging.getLogger("sie.gateway.sending")


class Sending:
    """`build` makes the message of a chunk when it is its turn, so that its budget is what is left then."""

    def __init__(
        self,
        queue: WorkQueue,
        peers: Peers,
        lane: Lane,
        priority: Priority,
        permits: Permits,
        build: Callable[[int], WorkItem],
        collector: Collector,
        deadline_s: float,
    ) -> None:
        self._queue = queue
        self._peers = peers
        self._lane = lane
        self._priority = priority
        self._permits = permits
        self._build = build
        self._collector = collector
        self._deadline_s = deadline_s
        self._stored: dict[int, Stored] = {}
        self._rest: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Publish what may go now, and have the rest follow by itself. Raises SIEError; a later failure fails the
        collector.
        """
        granted = self._permits.take()
        if granted:
            await self._publish(granted)
        if not self._permits.complete:
            self._rest = asyncio.create_task(self._follow(), name="publishing")

    async def _publish(self, chunks: list[int]) -> None:
        failpoint("gateway.before_publish")
        work = [self._build(chunk) for chunk in chunks]
        stored = await self._queue.publish(self._lane, work, self._deadline_s)
        self._stored.update(zip(chunks, stored, strict=True))
        failpoint("gateway.published")
        self._peers.sent(self._lane, self._priority, len(work), self._permits.tokens(chunks))

    async def _follow(self) -> None:
        try:
            while not self._permits.complete:
                await self._publish(await self._permits.more())
        except SIEError as error:
            self._collector.fail(error)
        except Exception:  # the root of a task: its request must hear of it
            _logger.exception("request %s could not be published", self._collector.request)
            self._collector.fail(InternalFailure("the gateway failed while it queued this request"))

    async def finish(self) -> None:
        """Return when the last message is stored: a result may come before the broker's acknowledgement."""
        if self._rest is not None:
            await self._rest

    async def end(self) -> None:
        """Publish nothing more."""
        if self._rest is not None:
            self._rest.cancel()
            await asyncio.gather(self._rest, return_exceptions=True)

    async def withdraw(self) -> None:
        """End, and remove from the queue what has no result."""
        await self.end()
        failpoint("gateway.before_withdraw")
        results, request = self._collector.results, self._collector.request
        missing = [stored for chunk, stored in self._stored.items() if results[chunk] is None]
        await self._queue.withdraw(self._lane.pool, missing, request if missing else "")
