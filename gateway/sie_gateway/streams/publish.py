"""Chunks that no message can hold go through the payload store, and what nobody can need there any more is removed.

chunk over the inline limit ──► Payload of its inputs and query ──put──► key ──► the same chunk, with the key in their
place
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from sie_broker import Broker, BrokerError, BrokerUnavailable, PayloadTooBig, StreamFull, TopologyMismatch
from sie_broker.independent import independently
from sie_contracts.errors import PayloadTooLarge, PoolNotFound, QueueFull, QueueUnavailable
from sie_contracts.settings import SettingError, Settings
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import CancelRequests, Input, Payload, WorkItem
from sie_contracts.wire.topology import ConsumerSpec, Lane
from sie_gateway.metrics import Metrics
from sie_gateway.streams.consumers import WorkConsumers
from sie_gateway.streams.shared import SharedTasks
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Stop, Tasks
from sie_store.object_stores import StoreError, StoreFull
from sie_store.payloads import PayloadStore

TTL_MARGIN_S = 3600
PUT_TIMEOUT_S = 30.0
SWEEP_TIMEOUT_S = 120.0
LONGEST_PAUSE_S = 600.0


def life_s(settings: Settings, max_age_s: float) -> int:
    """How long an object lives, seconds: longer than any message that may name it. Raises SettingError."""
    ttl_s = settings.payload_ttl_s
    if ttl_s is None:
        return int(max_age_s) + TTL_MARGIN_S
    if ttl_s <= max_age_s:
        message = (
            f"got {ttl_s}, work may be delivered again for {max_age_s:.0f} s: an object must live longer than its "
            "message"
        )
        raise SettingError("SIE_PAYLOAD_TTL_S", message)
    return ttl_s


class Offload:
    """The writing side of the payload store. `wall_clock`: seconds since 1970."""

    def __init__(
        self, store: PayloadStore, life_s: int, metrics: Metrics, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._life_s = life_s
        self._metrics = metrics
        self._wall_clock = wall_clock

    async def stored(self, item: WorkItem, timeout_s: float) -> WorkItem:
        """The same work with its inputs and query in the store. Raises QueueUnavailable."""
        data = await asyncio.to_thread(messages.encode_in_pieces, Payload(item.inputs, item.query))
        try:
            key = await self._store.put(data, period=int(self._wall_clock() // self._life_s), timeout_s=timeout_s)
        except StoreError as error:
            _logger.warning("request %s: %d bytes of input could not be stored: %s", item.request, len(data), error)
            if isinstance(error, StoreFull):
                message = "the payload store, which holds large inputs, has no room left: send fewer items in a request"
                raise QueueUnavailable(message, reason="store_full") from error
            raise QueueUnavailable("the payload store, which holds large inputs, could not be written") from error
        self._metrics.payload_offloads.inc()
        return msgspec.structs.replace(item, inputs=(), query=None, payload=key, count=len(item.inputs))

    async def sweep(self) -> int:
        """Remove what outlived every message that could name it. Several gateways may do so at once.
        Raises StoreError.
        """
        return await self._store.sweep(older_than_s=self._life_s, now_s=self._wall_clock(), timeout_s=SWEEP_TIMEOUT_S)

    async def run(self, stop: Stop) -> None:
        """Sweep ten times in a lifetime at least, at moments that differ between gateways."""
        pause_s = min(LONGEST_PAUSE_S, self._life_s / 10)
        while not await stop.wait_for(pause_s * random.uniform(0.5, 1.0)):  # noqa: S311  no secret
            try:
                removed = await self.sweep()
            except StoreError as error:
                _logger.warning("the payload store could not be cleaned up: %s", error)
            else:
                if removed:
                    _logger.info("%d payloads were removed after %d s", removed, self._life_s)


PUBLISH_TIMEOUT_S = 2.0
PUBLISHES_AT_ONCE = 64
PUBLISH_PATIENCE_S = 10.0
LAST_ATTEMPT_S = 0.1  # that the last attempt may outlast its time, so that it ends in its own words
UNDO_S = 2.0
LOAD_CEILING_S = 600.0
HEADROOM_BYTES = 16 << 10  # of a message, for everything that is not input
HEADER_BYTES = 256  # of a publish: its message id
# a result of one input of the widest model, and a worker's heartbeat with a few hundred models
MIN_PAYLOAD_BYTES = 64 << 10
_logger = logging.getLogger("sie.gateway.queue")


def work_spec(settings: Settings, pool: str, *, reserved: bool = False) -> topology.StreamSpec:
    """The work stream of a pool, as these settings want it. `reserved`: it is that of a reservation."""
    max_bytes = topology.reservation_bytes(settings.queue_max_bytes) if reserved else settings.queue_max_bytes
    return topology.work_stream(
        pool,
        storage=settings.stream_storage,
        replicas=settings.stream_replicas,
        max_bytes=max_bytes,
        max_age_s=settings.gateway_request_timeout + LOAD_CEILING_S,
        max_per_subject=topology.per_subject_limit(max_bytes),
    )


class StreamPosition(NamedTuple):
    """Place of a message in a stream. A stream that was lost and created again counts from 1 again: there the sequence
    is somebody else's message.
    """

    created: str  # of the stream, as the broker tells it
    sequence: int


class WorkQueue:
    """The gateway says what streams and consumers there are; everybody else verifies. Raises SettingError."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        metrics: Metrics,
        on_lost: Callable[[], None],
        offload: Offload | None = None,
        *,
        on_publish: Callable[[Lane, Sequence[WorkItem]], object] = lambda lane, items: None,
        serves: Callable[[str], bool] = lambda pool: True,
        is_reservation: Callable[[str], bool] = lambda pool: False,
    ) -> None:
        """`on_lost` is called when a stream turns out to have been lost with the work in it, `on_publish` with the work
        items of a request before they are published. `offload` takes what no message can hold. `serves` says whether a
        pool is there, `is_reservation` whether it is a reservation.
        """
        self._broker = broker
        self._settings = settings
        self._metrics = metrics
        self._on_lost = on_lost
        self._offload = offload
        self._on_publish = on_publish
        self._serves = serves
        self._is_reservation = is_reservation
        self._created: dict[str, str] = {}  # stream name -> when the broker created it
        self._undoing = Tasks(_logger, lambda: None)  # each is bounded by the time-outs of its questions
        self._ensuring = SharedTasks()
        self.consumers = WorkConsumers(broker, settings)
        inline_bytes, limit = settings.inline_payload_bytes, broker.max_payload - HEADROOM_BYTES
        if broker.max_payload < MIN_PAYLOAD_BYTES:
            raise SettingError("SIE_NATS_URL", _too_small(broker.max_payload))
        if inline_bytes is not None and inline_bytes > limit:
            leaves = f"the broker's max_payload {broker.max_payload} leaves {limit} for input"
            raise SettingError("SIE_INLINE_PAYLOAD_BYTES", f"got {inline_bytes}, {leaves}")

    @property
    def payload_bytes(self) -> int:
        """Bytes of input in one message at most. The broker's own limit is read again with every connection."""
        limit = max(1, self._broker.max_payload - HEADROOM_BYTES)
        return min(limit, self._settings.inline_payload_bytes or limit)

    @property
    def result_bytes(self) -> int:
        """Bytes of results that fit one message, beside what is not results. An input with more comes back in parts."""
        return max(1, self._broker.max_payload - HEADROOM_BYTES)

    @property
    def holds_any_size(self) -> bool:
        """Whether inputs that no message can hold go through the payload store."""
        return self._offload is not None

    async def ensure_pool(self, pool: str) -> None:
        """Create or verify the pool's stream. If it is another one than this gateway knew, what was in it is lost, and
        told so.

        All requests that meet a broker which does not answer come here between their attempts: they share one.
        Raises PoolNotFound for a reservation that has ended, BrokerError.
        """
        name = topology.stream_name(pool)
        try:
            await self._ensuring.run(pool, functools.partial(self._ensure_pool, pool))
        except BrokerError as error:
            self._broker.troubles[name] = str(error)
            raise
        self._broker.troubles.pop(name, None)

    async def ensure_pools(self, pools: Iterable[str]) -> None:
        """Ensure each pool, without those that have ended. Raises BrokerError."""

        async def ensure(pool: str) -> None:
            with contextlib.suppress(PoolNotFound):
                await self.ensure_pool(pool)

        await independently(functools.partial(ensure, pool) for pool in pools)

    async def _ensure_pool(self, pool: str) -> None:
        self._require(pool)
        reserved = self._is_reservation(pool)
        if not reserved:  # its dead letters outlive a reservation, so its workers put them to those of their own pool
            await self._ensure_dead_letters(pool)
        spec = work_spec(self._settings, pool, reserved=reserved)
        state = await self._broker.ensure_stream(spec, owner=True)
        if not self._serves(pool):  # it ended meanwhile, and may have been removed before this made it again
            await self._broker.delete_stream(spec.name)
            self._require(pool)
        before = self._created.get(spec.name)
        self._created[spec.name] = state.created
        if before is not None and before != state.created:
            self.consumers.stream_recreated(pool)
            self._on_lost()
        await self.consumers.follow(pool)

    def _require(self, pool: str) -> None:
        if not self._serves(pool):
            raise PoolNotFound(f"there is no pool {pool!r} any more: its lease is over", param="X-SIE-Pool")

    async def forget_pool(self, pool: str) -> None:
        """A reservation has ended."""
        self._created.pop(topology.stream_name(pool), None)
        self._broker.troubles.pop(topology.stream_name(pool), None)
        await self.consumers.unfollow(pool)

    async def remove_pool(self, pool: str) -> None:
        """Remove the stream of a reservation that has ended, with what waits in it. Raises BrokerError."""
        await self.forget_pool(pool)
        await self._broker.delete_stream(topology.stream_name(pool))

    async def _ensure_dead_letters(self, pool: str) -> None:
        """Ensure what workers need before they find the pool's stream: the stream of dead letters, and the marks of
        poison.
        """
        replicas, queue_bytes = self._settings.stream_replicas, self._settings.queue_max_bytes
        spec = topology.dead_letter_stream(pool, storage="file", replicas=replicas, queue_bytes=queue_bytes)
        try:
            await self._broker.ensure_stream(spec, owner=True)
        except TopologyMismatch as error:  # its letters are kept all the same
            _logger.error("%s", error)
        await self._broker.key_value(
            topology.POISON_BUCKET, storage="file", replicas=replicas, max_age_s=topology.POISON_LIFETIME_S
        )

    async def reverify(self) -> bool:
        """After a reconnect: make sure of every stream, and of the consumers of what is open. Raises BrokerError."""
        if self._broker.max_payload < MIN_PAYLOAD_BYTES:
            _logger.error("%s", _too_small(self._broker.max_payload))
        pools = [name.removeprefix("WORK_") for name in self._created]
        await independently((functools.partial(self.ensure_pools, pools), self.consumers.reverify))
        return True

    async def publish(self, lane: Lane, items: Sequence[WorkItem], deadline_s: float) -> list[StreamPosition]:
        """Store all chunks of a request, or none: when one cannot be stored the others are removed. Returns where they
        lie.

        A message is kept also before its consumer exists, so both are made at once. Raises QueueFull, QueueUnavailable.
        """
        first = items[0]
        self._on_publish(lane, items)
        started_s = time.perf_counter()
        if not self.consumers.follows(lane.pool):
            await self._with_patience(functools.partial(self.ensure_pool, lane.pool), lane.pool, deadline_s)
        subject, spec = self.consumers.route(lane, first.priority, first.model, deadline_s)
        if len(items) == 1 and self.consumers.is_verified(spec):  # nearly every request: no task, no turn
            stored = [await self._publish_one(lane, subject, first, deadline_s)]
        else:
            stored = await self._publish_all(lane, subject, spec, items, deadline_s)
        self._metrics.publish.labels(first.operation).observe(time.perf_counter() - started_s)
        return stored

    async def _publish_all(
        self, lane: Lane, subject: str, spec: ConsumerSpec, items: Sequence[WorkItem], deadline_s: float
    ) -> list[StreamPosition]:
        turns = asyncio.Semaphore(PUBLISHES_AT_ONCE)  # the messages of a large request are not all in memory at once

        async def in_turn(item: WorkItem) -> StreamPosition:
            async with turns:
                return await self._publish_one(lane, subject, item, deadline_s)

        tasks = [asyncio.ensure_future(in_turn(item)) for item in items]
        ensure = functools.partial(self.consumers.ensure, spec)
        consumer = (
            []
            if self.consumers.is_verified(spec)
            else [asyncio.ensure_future(self._with_patience(ensure, lane.pool, deadline_s))]
        )
        try:
            stored = await asyncio.gather(*tasks)
            await asyncio.gather(*consumer)
        except BaseException:
            self.undo(self._publish_undone(lane.pool, [*tasks, *consumer], items[0].request))
            raise
        return stored

    def undo(self, work: Coroutine[Any, Any, None]) -> None:
        """Have this done beside everything else: the answer of a request that failed does not wait for it."""
        self._undoing.start(work, "undo")

    async def close(self) -> None:
        """Wait for what is being undone, for UNDO_S at most."""
        if not await self._undoing.settle(UNDO_S):
            _logger.warning("the messages of %d requests that nobody awaits are left in the queue", len(self._undoing))
        await self._undoing.cancel()
        await self._ensuring.stop()
        await self.consumers.close()

    async def _publish_undone(self, pool: str, tasks: Sequence[asyncio.Future[Any]], request: str) -> None:
        for task in tasks:
            task.cancel()
        settled = await asyncio.gather(*tasks, return_exceptions=True)
        await self.withdraw(pool, [stored for stored in settled if isinstance(stored, StreamPosition)], request)

    async def _publish_one(self, lane: Lane, subject: str, item: WorkItem, deadline_s: float) -> StreamPosition:
        """Store one message. Cancelled, it takes back what may have been stored; elsewhere the budget in the message
        ends it.
        """
        message_id = f"{item.request}.{item.chunk}.{item.attempt}"
        stored, tried = StreamPosition("", 0), False
        data = b""
        # large inputs are not made a message first: that would hold the event loop
        is_large = self._offload is not None and _least_bytes(item) > self.payload_bytes
        if not is_large:
            data = messages.encode(item)
        if self._offload is not None and (
            is_large or (len(data) > self.payload_bytes and self._is_too_large(item, len(data)))
        ):
            data = messages.encode(await self._offload.stored(item, _bounded(PUT_TIMEOUT_S, deadline_s)))

        async def attempt() -> None:
            nonlocal stored, tried
            tried, created = True, self._created_of(lane.pool)
            failpoint("publish.before_publish")
            try:
                published = await self._broker.publish(
                    subject, data, message_id, _bounded(PUBLISH_TIMEOUT_S, deadline_s)
                )
            except BrokerError:
                self._metrics.ack_failures.inc()
                raise
            stored = StreamPosition(created, published.sequence)
            failpoint("publish.published")

        try:
            await self._with_patience(attempt, lane.pool, deadline_s)
        except asyncio.CancelledError:
            if tried:
                self.undo(self._take_back(lane.pool, subject, data, message_id, item.request))
            raise
        return stored

    def _created_of(self, pool: str) -> str:
        return self._created.get(topology.stream_name(pool), "")

    async def _take_back(self, pool: str, subject: str, data: bytes, message_id: str, request: str) -> None:
        """Withdraw what may be stored or not: the same message id again is answered with its sequence."""
        with contextlib.suppress(BrokerError):  # then its age limit removes it
            created = self._created_of(pool)
            sequence = (await self._broker.publish(subject, data, message_id, PUBLISH_TIMEOUT_S)).sequence
            await self.withdraw(pool, [StreamPosition(created, sequence)], request)

    def _is_too_large(self, item: WorkItem, message_bytes: int) -> bool:
        """Whether its inputs pass the inline limit, or all of it what the broker takes."""
        if message_bytes > self._broker.max_payload - HEADER_BYTES:
            return True
        return sum(entry.nbytes for entry in _inputs(item)) > self.payload_bytes

    async def _with_patience(self, attempt: Callable[[], Awaitable[None]], pool: str, deadline_s: float) -> None:
        """Try again while the broker is away, for at most PUBLISH_PATIENCE_S and the request's budget.

        A broker that is there and does not answer may have lost the stream, so that is made sure of between attempts.
        """
        end_s = min(time.perf_counter() + PUBLISH_PATIENCE_S, deadline_s)
        try:
            async with asyncio.timeout(max(0.0, end_s - time.perf_counter()) + LAST_ATTEMPT_S):
                await self._patiently(attempt, pool, end_s)
        except TimeoutError as error:
            raise QueueUnavailable("the broker did not answer in time") from error

    async def _patiently(self, attempt: Callable[[], Awaitable[None]], pool: str, end_s: float) -> None:
        while True:
            try:
                await attempt()
            except StreamFull as error:
                raise QueueFull(f"the queue is full: {error}") from error
            except TopologyMismatch as error:
                _logger.error("%s", error)
                raise QueueUnavailable(
                    f"the queue is set up differently from what this gateway needs: {error}"
                ) from error
            except PayloadTooBig as error:
                raise PayloadTooLarge(
                    f"one message of this request is too large for the broker: {error}", param="body"
                ) from error
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

    async def withdraw(self, pool: str, stored: Sequence[StreamPosition], request: str = "") -> None:
        """Remove messages that nobody awaits any more, waiting or leased; what the broker cannot remove now its age
        limit will.

        What lay in a stream that was lost since is gone with it, and its sequences are left alone. With `request`,
        workers are told as well, and then: one that has room before the rest is gone would take more of it.
        """
        if stored and self._serves(pool):
            try:
                await self._remove(topology.stream_name(pool), stored)
            except BrokerError as error:
                _logger.warning("of %d withdrawn messages not all could be removed: %s", len(stored), error)
        if request:
            failpoint("publish.before_cancel")
            try:
                await self._broker.send(topology.cancel_subject(pool), messages.encode(CancelRequests((request,))))
            except BrokerError as error:
                _logger.info("request %s: its workers were not told that nobody waits: %s", request, error)

    async def _remove(self, stream: str, stored: Sequence[StreamPosition]) -> None:
        """Raises BrokerError."""
        for start in range(0, len(stored), PUBLISHES_AT_ONCE):
            created = (await self._broker.stream_state(stream)).created  # a lost stream may not be known yet
            piece = stored[start : start + PUBLISHES_AT_ONCE]
            removals = [
                self._broker.delete(stream, message.sequence) for message in piece if message.created == created
            ]
            for outcome in await asyncio.gather(*removals, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome


def _inputs(item: WorkItem) -> Sequence[Input]:
    return (*item.inputs, item.query) if item.query else item.inputs


def _least_bytes(item: WorkItem) -> int:
    return sum(entry.least_bytes for entry in _inputs(item))


def _bounded(timeout_s: float, deadline_s: float) -> float:
    """A time-out that does not outlast the request's deadline."""
    return max(0.05, min(timeout_s, deadline_s - time.perf_counter()))


def _too_small(max_payload: int) -> str:
    return (
        f"the broker's max_payload of {max_payload} bytes is too small: its configuration must say at least "
        f"{MIN_PAYLOAD_BYTES}"
    )
