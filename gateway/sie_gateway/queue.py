"""Work into the queue: streams and consumers exist before they are needed, every publish is acknowledged, what nobody awaits is removed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from sie_contracts import messages, topology
from sie_contracts.broker import Broker, BrokerError, BrokerUnavailable, PayloadTooBig, StreamFull, TopologyMismatch
from sie_contracts.errors import PayloadTooLarge, QueueFull, QueueUnavailable
from sie_contracts.messages import WorkItem
from sie_contracts.settings import SettingError, Settings
from sie_contracts.topology import Lane
from sie_gateway.metrics import Metrics

PUBLISH_TIMEOUT_S = 2.0
PUBLISHES_AT_ONCE = 64
PUBLISH_PATIENCE_S = 10.0
LOAD_CEILING_S = 600.0
HEADROOM_BYTES = 16 << 10  # of a message, for everything that is not input
_logger = logging.getLogger("sie.gateway.queue")


class WorkQueue:
    """The gateway owns the topology: it creates streams and consumers; everybody else verifies. Raises SettingError."""

    def __init__(self, broker: Broker, settings: Settings, metrics: Metrics, on_lost: Callable[[], None]) -> None:
        """`on_lost` is called when a stream turns out to have been lost with the work in it."""
        self._broker = broker
        self._settings = settings
        self._metrics = metrics
        self._on_lost = on_lost
        self._created: dict[str, str] = {}  # stream name -> when the broker created it
        self._ensured: dict[str, asyncio.Task[None]] = {}
        self.payload_bytes = broker.max_payload - HEADROOM_BYTES
        wanted = settings.inline_payload_bytes
        if wanted is not None:
            if wanted > self.payload_bytes:
                limit = f"the broker's max_payload {broker.max_payload} leaves {self.payload_bytes} for input"
                raise SettingError("SIE_INLINE_PAYLOAD_BYTES", f"got {wanted}, {limit}")
            self.payload_bytes = wanted

    def _spec(self, pool: str) -> topology.StreamSpec:
        settings = self._settings
        return topology.work_stream(
            pool, storage=settings.stream_storage, replicas=settings.stream_replicas, max_bytes=settings.queue_max_bytes,
            max_age_s=settings.gateway_request_timeout + LOAD_CEILING_S,
        )  # fmt: skip

    async def ensure_pool(self, pool: str) -> None:
        """Create or verify the pool's stream. If it is another one than this gateway knew, what was in it is lost, and told so."""
        spec = self._spec(pool)
        state = await self._broker.ensure_stream(spec, owner=True)
        before = self._created.get(spec.name)
        self._created[spec.name] = state.created
        if before is not None and before != state.created:
            self._ensured.clear()
            self._on_lost()

    async def reverify(self) -> bool:
        """After a reconnect: forget which consumers exist and make sure of every stream. Raises BrokerError."""
        self._ensured.clear()
        for name in list(self._created):
            await self.ensure_pool(name.removeprefix("WORK_"))
        return True

    async def _ensure_consumer(self, lane: Lane, priority: str, model: str) -> None:
        spec = topology.work_consumer(lane, priority, model, float(self._settings.ack_wait_s))
        task = self._ensured.get(spec.name)
        if task is None or (task.done() and task.exception() is not None):
            task = self._ensured[spec.name] = asyncio.create_task(self._broker.ensure_consumer(spec), name=f"ensure:{spec.name}")
        await asyncio.shield(task)

    async def publish(self, lane: Lane, items: Sequence[WorkItem], deadline_s: float) -> list[int]:
        """Store all chunks of a request, or none: when one cannot be stored the others are removed. Returns their sequences.

        A message is kept also before its consumer exists, so both are made at once. Raises QueueFull, QueueUnavailable.
        """
        first = items[0]
        started_s = time.perf_counter()
        turns = asyncio.Semaphore(PUBLISHES_AT_ONCE)
        tasks = [asyncio.ensure_future(self._publish_one(lane, item, deadline_s, turns)) for item in items]
        ensure = functools.partial(self._ensure_consumer, lane, first.priority, first.model)
        consumer = asyncio.ensure_future(self._with_patience(ensure, lane.pool, deadline_s))
        try:
            sequences = await asyncio.gather(*tasks)
            await consumer
        except BaseException:
            consumer.cancel()
            settled = await asyncio.gather(*tasks, consumer, return_exceptions=True)
            await self.withdraw(lane.pool, [sequence for sequence in settled if isinstance(sequence, int)])
            raise
        self._metrics.publish.labels(first.operation).observe(time.perf_counter() - started_s)
        return sequences

    async def _publish_one(self, lane: Lane, item: WorkItem, deadline_s: float, turns: asyncio.Semaphore) -> int:
        subject = topology.work_subject(lane, item.priority, item.model)
        message_id = f"{item.request}.{item.chunk}.{item.attempt}"
        sequence = 0
        async with turns:  # the messages of a large request are not all in memory at once
            data = messages.encode(item)

            async def attempt() -> None:
                nonlocal sequence
                sequence = (await self._broker.publish(subject, data, message_id, _bounded(PUBLISH_TIMEOUT_S, deadline_s))).sequence

            await self._with_patience(attempt, lane.pool, deadline_s)
        return sequence

    async def _with_patience(self, attempt: Callable[[], Awaitable[None]], pool: str, deadline_s: float) -> None:
        """Try again while the broker is away, for at most PUBLISH_PATIENCE_S and the request's budget.

        A broker that is there and does not answer may have lost the stream, so that is made sure of between attempts.
        """
        end_s = min(time.perf_counter() + PUBLISH_PATIENCE_S, deadline_s)
        while True:
            try:
                await attempt()
            except StreamFull as error:
                raise QueueFull(f"the queue is full: {error}") from error
            except TopologyMismatch as error:
                _logger.error("%s", error)
                raise QueueUnavailable(f"the queue is set up differently from what this gateway needs: {error}") from error
            except PayloadTooBig as error:
                raise PayloadTooLarge(f"one message of this request is too large for the broker: {error}", param="body") from error
            except BrokerUnavailable as error:
                if time.perf_counter() + 0.1 >= end_s:
                    raise QueueUnavailable("the broker could not be reached") from error
                await asyncio.sleep(0.1)  # a pause between attempts; the broker's client reconnects on its own
                if self._broker.connected:
                    with contextlib.suppress(BrokerError):  # then the next attempt fails in its own words
                        await self.ensure_pool(pool)
            except BrokerError as error:
                raise QueueUnavailable(f"the broker refused: {error}") from error
            else:
                return

    async def withdraw(self, pool: str, sequences: Sequence[int]) -> None:
        """Remove messages that nobody awaits any more, waiting or leased; what the broker cannot remove now its age limit will."""
        stream = topology.stream_name(pool)
        outcomes = await asyncio.gather(*(self._broker.delete(stream, sequence) for sequence in sequences), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failed:
            _logger.warning("%d withdrawn messages could not be removed: %s", len(failed), failed[0])


def _bounded(timeout_s: float, deadline_s: float) -> float:
    """A time-out that does not outlast the request's deadline."""
    return max(0.05, min(timeout_s, deadline_s - time.perf_counter()))
