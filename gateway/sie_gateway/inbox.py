"""Where results come back. One subscription per gateway; it decodes, hands over and confirms, and does nothing else.

    result ──► its request's Collector ──► first outcome of a chunk wins ──► confirmation to the sidecar ──► the sidecar acks
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

import msgspec

from sie_contracts import messages
from sie_contracts.broker import Broker, CoreMessage, Subscription
from sie_contracts.errors import SIEError
from sie_contracts.messages import Confirmation, WorkResult
from sie_gateway.metrics import Metrics

_UNKNOWN, _TAKEN, _DUPLICATE = Confirmation("unknown"), Confirmation("taken"), Confirmation("duplicate")
_logger = logging.getLogger("sie.gateway.inbox")


class Collector:
    """The outcomes of one request, by chunk. Complete when each chunk has its first terminal result."""

    def __init__(self, request: str, chunks: int) -> None:
        self.request = request
        self.results: list[WorkResult | None] = [None] * chunks
        self.missing = chunks
        self.last_arrival_s = 0.0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def offer(self, result: WorkResult) -> bool:
        """Take a result; false if its chunk has one already, or does not exist."""
        if not 0 <= result.chunk < len(self.results) or self.results[result.chunk] is not None:
            return False
        self.results[result.chunk] = result
        self.missing -= 1
        self.last_arrival_s = time.perf_counter()
        if not self.missing and not self._done.done():
            self._done.set_result(None)
        return True

    def fail(self, error: SIEError) -> None:
        """End the request with an error, unless it is complete."""
        if not self._done.done():
            self._done.set_exception(error)

    async def wait(self, timeout_s: float) -> None:
        """Until complete. Raises TimeoutError, or the error given to `fail`."""
        await asyncio.wait_for(asyncio.shield(self._done), timeout_s)

    def close(self) -> None:
        if self._done.done() and not self._done.cancelled():
            self._done.exception()  # read, so that a failure after a time-out is not reported as lost
        else:
            self._done.cancel()


class Inbox:
    """All open requests of this gateway. The subject holds 122 random bits: nobody who was not told can send here."""

    def __init__(self, broker: Broker, metrics: Metrics) -> None:
        self.subject = f"sie.result.{uuid.uuid4().hex}"
        self._broker = broker
        self._metrics = metrics
        self._open: dict[str, Collector] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._broker.subscribe(self.subject, self._on_result)

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()

    def open(self, request: str, chunks: int) -> Collector:
        collector = self._open[request] = Collector(request, chunks)
        return collector

    def close(self, collector: Collector) -> None:
        self._open.pop(collector.request, None)
        collector.close()

    def __len__(self) -> int:
        return len(self._open)

    def fail_all(self, error: SIEError) -> None:
        for collector in list(self._open.values()):
            collector.fail(error)

    async def _on_result(self, message: CoreMessage) -> None:
        try:
            result = messages.decode_result(message.data)
        except msgspec.DecodeError as error:
            self._metrics.outcomes.labels("undecodable").inc()
            _logger.error("a result could not be read: %s", error)
            return
        collector = self._open.get(result.request)
        confirmation = _UNKNOWN if collector is None else _TAKEN if collector.offer(result) else _DUPLICATE
        self._metrics.outcomes.labels(confirmation.verdict).inc()
        if confirmation is _TAKEN:
            self._metrics.deliveries.observe(result.batch.deliveries)
        if message.reply:
            await self._broker.send(message.reply, messages.encode(confirmation))
