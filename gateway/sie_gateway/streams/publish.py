"""Publishing of work: the streams, their durable consumers (for one model, or for all models of a slot), acknowledged
messages, and the withdrawal of messages.

Each model has its own consumer for its work of a lane and priority. The number of consumers of a stream is limited. At
this limit, a hash assigns further models to 16 slots, and the models of a slot share one consumer.
Consumers are created when a request needs them, and deleted when they are unused:

    publish ──► route: the model's own consumer, or the consumer of its slot; needed until the deadline of the request
            ──► message, acknowledged ──► StreamPosition ──► withdraw: the message is removed if its request has ended

    every 10 s, after a reconnect ──► missing consumers of open requests and of subjects with messages are created
    after a notice of a deletion ──► the consumer is created again if an open request needs it
    one gateway, every minute ──► consumers unused for an hour (5 min if the limit is near) are deleted
                              ──► missing consumers of subjects with messages are created again

A gateway may delete a consumer while another gateway publishes messages for it. These messages stay in the stream. Each
of three checks creates the consumer again: the deleting gateway looks for messages after the deletion, the publishing
gateway gets the notice of the deletion, and every gateway looks for messages every 10 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from sie_broker import (
    Administration,
    Broker,
    BrokerError,
    BrokerUnavailable,
    ConsumerState,
    PayloadTooBig,
    StreamFull,
    Subscription,
    TopologyMismatch,
    UnsafeUpdate,
)
from sie_broker.independent import independently
from sie_broker.record import LeaderLease, leases_of
from sie_contracts.errors import GatewayTimeout, PayloadTooLarge, PoolNotFound, QueueFull, QueueUnavailable
from sie_contracts.settings import SettingError, Settings
from sie_contracts.wire import messages, topology
from sie_contracts.wire.messages import CancelRequests, Input, WorkItem
from sie_contracts.wire.topology import ConsumerSpec, Lane
from sie_gateway.metrics import Metrics
from sie_gateway.streams.offload import PUT_TIMEOUT_S, Offload
from sie_gateway.streams.shared import SharedTasks
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Stop, Tasks, Trouble

ROUND_S = 10.0
SWEEP_S = 60.0
IDLE_S = 3600.0
# When a stream has nearly as many consumers as allowed, a gateway may delete a consumer after this number of seconds
# without a message. Nearly all requests end sooner; the gateway of a longer request creates its consumer again.
CROWDED_IDLE_S = 300.0
_AT_ONCE = 16
_ATTEMPTS = 3
_consumers_logger = logging.getLogger("sie.gateway.consumers")


class WorkRoute(NamedTuple):
    """Subject under which a model's work is published, and the consumer that delivers it."""

    subject: str
    consumer: ConsumerSpec


class Rest(NamedTuple):
    """Record of how long a consumer has been unused. `delivered`: number of messages delivered so far. `since_s`: time,
    by the gateway's clock, since which the consumer has been unused.
    """

    delivered: int
    since_s: float


@functools.lru_cache(4096)
def _routes(lane: Lane, priority: str, model: str, ack_wait_s: float) -> tuple[WorkRoute, WorkRoute]:
    """Return two routes: one to the model's own consumer, and one to the consumer that it shares with other models."""
    own, shared = topology.work_subject(lane, priority, model), topology.slot_subject(lane, priority, model)
    return WorkRoute(own, topology.consumer_of(own, ack_wait_s)), WorkRoute(
        shared, topology.consumer_of(shared, ack_wait_s)
    )


def rests(before: Mapping[str, Rest], states: Iterable[ConsumerState], now_s: float) -> dict[str, Rest]:
    """Return name of a consumer -> `Rest`. A consumer is unused if it has delivered nothing since the previous call,
    and has no waiting or leased message. A consumer in use gets `now_s` as `since_s`. `before`: result of the previous
    call, which the caller keeps because the broker does not store these times.
    """
    resting = {}
    for state in states:
        rest = before.get(state.name)
        still = rest is not None and rest.delivered == state.delivered and not state.waiting and not state.leased
        resting[state.name] = rest if rest is not None and still else Rest(state.delivered, now_s)
    return resting


def given_up(resting: Mapping[str, Rest], now_s: float, limit: int, idle_s: float) -> list[str]:
    """Return the names of the consumers to delete: first all consumers that are unused for `idle_s` seconds. If more
    than 15/16 of `limit` consumers of single models remain, also delete the surplus, longest unused first, but never a
    consumer that was used in the last CROWDED_IDLE_S seconds.
    """
    order = sorted(resting, key=lambda name: resting[name].since_s)
    idle = [name for name in order if now_s - resting[name].since_s >= idle_s]
    own = [name for name in order if not topology.is_slot(name)]
    crowd = len(own) - (limit - limit // 16) - sum(1 for name in idle if not topology.is_slot(name))
    unused = [
        name for name in own if name not in set(idle) and now_s - resting[name].since_s >= min(CROWDED_IDLE_S, idle_s)
    ]
    return idle + unused[: max(0, crowd)]


class StreamConsumers:
    """Consumers of one stream: existing consumers, and consumers that open requests of this gateway need. At most
    `limit` consumers belong to single models. Two gateways together may exceed the limit: each may create a consumer
    before the notice of the other gateway's consumer arrives.
    """

    def __init__(
        self, broker: Administration, stream: str, limit: int, idle_s: float, clock: Callable[[], float]
    ) -> None:
        self._broker = broker
        self._stream = stream
        self._limit = limit
        self._idle_s = idle_s
        self._clock = clock
        self._own: set[str] = set()
        # names of consumers with the settings of their specs at the last check, and no notice of their deletion since
        self.verified: set[str] = set()
        self._held: dict[str, tuple[ConsumerSpec, float]] = {}
        self._ensuring = SharedTasks()
        # names of consumers whose deletion was reported while `_make` created them; `_make` creates them once more
        self._stale: set[str] = set()
        self._rests: dict[str, Rest] = {}
        self._watch: Subscription | None = None

    async def start(self) -> None:
        """Subscribe to notices about created and deleted consumers, and list the consumers. Raises BrokerError."""
        watch = await self._broker.watch_consumers(self._stream, self._on_consumer)
        try:
            self._own |= {name for name in await self._broker.consumers(self._stream) if not topology.is_slot(name)}
        except BaseException:
            await watch.stop()
            raise
        self._watch = watch

    def route(self, own: WorkRoute, shared: WorkRoute, deadline_s: float) -> WorkRoute:
        """Return the route for a request's work, and record that the route's consumer is needed until `deadline_s`."""
        name = own.consumer.name
        route = own if name in self._own or len(self._own) < self._limit else shared
        if route is own:
            # add the name before the consumer exists, so that the next requests respect `_limit`; if the creation
            # fails, the next refresh removes the name
            self._own.add(name)
        spec = route.consumer
        held = self._held.get(spec.name)
        self._held[spec.name] = (spec, deadline_s if held is None else max(deadline_s, held[1]))
        return route

    async def ensure(self, spec: ConsumerSpec) -> None:
        """Create the consumer, or check that the existing consumer has the settings of `spec`. Raises TopologyMismatch,
        BrokerError.
        """
        if spec.name not in self.verified:
            await self._ensuring.run(spec.name, functools.partial(self._make, spec))

    async def _make(self, spec: ConsumerSpec) -> None:
        for _ in range(_ATTEMPTS):
            self._stale.discard(spec.name)
            await self._broker.ensure_consumer(spec)
            failpoint("gateway.consumer_ensured")
            if spec.name not in self._stale:
                self.verified.add(spec.name)
                return

    async def _on_consumer(self, name: str, exists: bool) -> None:
        if exists:
            if not topology.is_slot(name):
                self._own.add(name)
            return
        self._own.discard(name)
        self.verified.discard(name)
        if name in self._ensuring:
            self._stale.add(name)
        if (spec := self._needed(name)) is not None:
            # create it in the background; if the creation fails, the next refresh tries again
            self._ensuring.begin(spec.name, functools.partial(self._make, spec))

    def _needed(self, name: str) -> ConsumerSpec | None:
        """Return the spec of this consumer if an open request of this gateway needs it, else None."""
        held = self._held.get(name)
        return held[0] if held is not None and held[1] > self._clock() else None

    def discard_verified(self) -> None:
        """Mark all consumers as unchecked, because notices of deletions may be lost. Their next use checks them."""
        self.verified.clear()
        self._stale.update(self._ensuring)

    async def refresh(self, ack_wait_s: float) -> None:
        """Create the missing consumers of open requests and of subjects with messages. Raises BrokerError."""
        now_s = self._clock()
        self._held = {name: held for name, held in self._held.items() if held[1] > now_s}
        verified = set(self.verified)
        names = set(await self._broker.consumers(self._stream))
        lost = verified - names
        self.verified -= lost
        self._own = {name for name in (*names, *self._ensuring) if not topology.is_slot(name)}
        missing = {name: spec for name, (spec, _) in self._held.items() if name not in self.verified}
        for subject in await self._broker.subject_counts(self._stream, ">"):
            try:
                spec = topology.consumer_of(subject, ack_wait_s)
            except ValueError as error:
                _consumers_logger.error("stream %s has messages that no worker will get: %s", self._stream, error)
                continue
            if spec.name not in names:
                missing.setdefault(spec.name, spec)
        turns = asyncio.Semaphore(_AT_ONCE)

        async def ensure_one(spec: ConsumerSpec) -> None:
            async with turns:
                await self.ensure(spec)

        outcomes = await asyncio.gather(*map(ensure_one, missing.values()), return_exceptions=True)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failed:
            _consumers_logger.warning(
                "%d of %d missing consumers of stream %s could not be created: %s",
                len(failed),
                len(missing),
                self._stream,
                failed[0],
            )

    async def sweep(self, ack_wait_s: float) -> int:
        """Delete unused consumers, and return their number. If messages for a deleted consumer have arrived, create
        this consumer again. Raises BrokerError: after that, the next refresh of any gateway creates the missing
        consumers.
        """
        now_s = self._clock()
        self._rests = rests(self._rests, await self._broker.consumer_states(self._stream), now_s)
        unused = [
            name for name in given_up(self._rests, now_s, self._limit, self._idle_s) if self._needed(name) is None
        ]
        for name in unused:
            await self._broker.delete_consumer(self._stream, name)
            failpoint("gateway.consumer_deleted")
            self._rests.pop(name, None)
            self.verified.discard(name)
        if unused:
            _consumers_logger.info("stream %s: %d unused consumers were deleted", self._stream, len(unused))
            await self.refresh(ack_wait_s)
        return len(unused)

    async def stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.stop()
        await self._ensuring.stop()


class WorkConsumers:
    """Consumers of the streams of all pools that this gateway serves."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`idle_s`: seconds without a message until a consumer is deleted. `clock`: clock of request deadlines."""
        self._broker = broker
        self._settings = settings
        self._ack_wait_s = float(settings.ack_wait_s)
        self._idle_s = idle_s
        self._clock = clock
        self.streams: dict[str, StreamConsumers] = {}  # by pool: consumers of the pool's stream
        self._following = asyncio.Lock()  # so that two calls of `follow` do not both subscribe to a pool's notices
        leases = leases_of(broker, storage=settings.stream_storage, replicas=settings.stream_replicas)
        self._lease = LeaderLease(leases, "consumers")
        self._swept_s = -SWEEP_S

    async def follow(self, pool: str) -> StreamConsumers:
        """Begin to manage the consumers of a pool's existing stream, and return these consumers. Raises BrokerError."""
        async with self._following:
            if pool not in self.streams:
                limit = topology.own_consumers(self._settings.stream_replicas)
                stream = StreamConsumers(self._broker, topology.stream_name(pool), limit, self._idle_s, self._clock)
                await stream.start()
                self.streams[pool] = stream
        return self.streams[pool]

    def stream(self, pool: str) -> StreamConsumers:
        """Return the consumers of a pool's stream. Raises PoolNotFound for a removed pool."""
        stream = self.streams.get(pool)
        if stream is None:
            raise PoolNotFound(f"the pool {pool!r} does not exist any more, because its reservation has ended")
        return stream

    async def unfollow(self, pool: str) -> None:
        async with self._following:
            stream = self.streams.pop(pool, None)
        if stream is not None:
            await stream.stop()

    async def ensure(self, pool: str, spec: ConsumerSpec) -> None:
        """Create or check the consumer. Raises PoolNotFound for a removed pool, TopologyMismatch, BrokerError."""
        await self.stream(pool).ensure(spec)

    def stream_recreated(self, pool: str) -> None:
        """Mark the consumers of a pool as unchecked: the new stream of the pool has no consumers yet."""
        if (stream := self.streams.get(pool)) is not None:
            stream.discard_verified()

    async def reverify(self) -> None:
        """Check every consumer again after a reconnect: notices of deletions may be missing. Raises BrokerError."""
        for stream in self.streams.values():
            stream.discard_verified()
        await self._refresh()

    async def _refresh(self) -> None:
        await independently(
            functools.partial(stream.refresh, self._ack_wait_s) for stream in list(self.streams.values())
        )

    async def run(self, stop: Stop) -> None:
        """Create missing consumers every ROUND_S until `stop`. The leading gateway also deletes unused consumers."""
        trouble, pause_s = Trouble(_consumers_logger, "not every consumer could be checked"), 0.0
        while not await stop.wait_for(pause_s):
            pause_s = ROUND_S
            with trouble.logged(BrokerError):
                await independently((self._refresh, self.take_turn))

    async def close(self) -> None:
        for stream in self.streams.values():
            await stream.stop()

    async def take_turn(self) -> int:
        """Delete unused consumers and return their number, if this gateway holds the lease and its last deletion was at
        least SWEEP_S seconds ago. Raises BrokerError.
        """
        if not await self._lease.acquire() or self._clock() - self._swept_s < SWEEP_S:
            return 0
        self._swept_s = self._clock()
        failpoint("gateway.leader_lease_held")
        sweeps = (functools.partial(stream.sweep, self._ack_wait_s) for stream in list(self.streams.values()))
        return sum(await independently(sweeps))


_T = TypeVar("_T")
PUBLISH_TIMEOUT_S = 2.0
LEAST_TIMEOUT_S = 0.05  # shortest time limit of a call of the broker, even after the deadline of the request
PUBLISHES_AT_ONCE = 64
PUBLISH_PATIENCE_S = 10.0
# seconds that the last attempt may take beyond PUBLISH_PATIENCE_S, so that the request gets the error of this attempt
# instead of a time-out
LAST_ATTEMPT_S = 0.1
UNDO_S = 2.0
LOAD_CEILING_S = 600.0
HEADROOM_BYTES = 16 << 10  # bytes reserved in a message for all fields except the inputs
# a message has at most the broker's max_payload minus this number of bytes. They are reserved for the NATS headers when
# the message is published, and for the error and ids in a dead letter that contains the message.
ENVELOPE_BYTES = 4 << 10
# smallest max_payload of a broker that SIE accepts: large enough for the result of one input of the widest model, and
# for the heartbeat of a worker with a few hundred models
MIN_PAYLOAD_BYTES = 64 << 10
_logger = logging.getLogger("sie.gateway.queue")


def work_spec(settings: Settings, pool: str, *, reserved: bool = False) -> topology.StreamSpec:
    """Return the spec of a pool's work stream. `reserved`: the pool is a reservation, whose stream is smaller."""
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
    """Position of a message in a stream. A recreated stream has a new `created` and starts at sequence 1 again."""

    created: str  # time at which the broker created the stream, in the broker's format
    sequence: int


class MessageLimits(NamedTuple):
    """Largest numbers of bytes in a message: of inputs, and of results. A larger result of one input takes several
    messages. `any_size`: a payload store takes the inputs that are too large for a message.
    """

    payload_bytes: int
    result_bytes: int
    any_size: bool


class WorkQueue:
    """Work streams of the pools. The gateway creates these streams and their consumers; workers only check them. If the
    broker has users, the gateway's user may not create streams: the gateway then asks the config service to do so.
    """

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        metrics: Metrics,
        on_lost: Callable[[str], None],
        offload: Offload | None = None,
        *,
        on_publish: Callable[[Lane, Sequence[WorkItem]], object] = lambda lane, items: None,
        serves: Callable[[str], bool] = lambda pool: True,
        is_reservation: Callable[[str], bool] = lambda pool: False,
    ) -> None:
        """`on_lost` is called with a pool whose stream and work the broker has lost; `on_publish`, with work items
        before they are published. `offload` stores inputs that are too large for a message. `serves(pool)` is True for
        an existing pool, `is_reservation(pool)` for a reservation. Raises SettingError if a limit of the broker is too
        low.
        """
        self._broker = broker
        self._settings = settings
        self._ack_wait_s = float(settings.ack_wait_s)
        self._metrics = metrics
        self._on_lost = on_lost
        self._offload = offload
        self._on_publish = on_publish
        self._serves = serves
        self._is_reservation = is_reservation
        # pool -> creation time of the pool's stream; a new creation time means that the broker has lost the stream
        self._created: dict[str, str] = {}
        # tasks that withdraw messages; a failed task does not end the gateway, because the stream's age limit also
        # removes the messages
        self._undoing = Tasks(_logger, lambda: None)
        self._ensuring = SharedTasks()
        self.consumers = WorkConsumers(broker, settings)
        inline_bytes, limit = settings.inline_payload_bytes, broker.max_payload - HEADROOM_BYTES
        if broker.max_payload < MIN_PAYLOAD_BYTES:
            raise SettingError("SIE_NATS_URL", _too_small(broker.max_payload))
        if inline_bytes is not None and inline_bytes > limit:
            leaves = f"the broker's max_payload {broker.max_payload} leaves {limit} bytes for input"
            raise SettingError("SIE_INLINE_PAYLOAD_BYTES", f"got {inline_bytes}, {leaves}")

    def limits(self) -> MessageLimits:
        """Return the limits of messages. They may change when the gateway connects to the broker again."""
        result_bytes = max(1, self._broker.max_payload - HEADROOM_BYTES)
        payload_bytes = min(result_bytes, self._settings.inline_payload_bytes or result_bytes)
        return MessageLimits(payload_bytes, result_bytes, self._offload is not None)

    async def ensure_pool(self, pool: str) -> None:
        """Create the pool's stream, or check the existing stream. Call `on_lost` if the stream was created again since
        the previous `ensure_pool`. Concurrent calls share one call to the broker. Raises PoolNotFound for a reservation
        that has ended, BrokerError.
        """
        name = topology.stream_name(pool)
        try:
            await self._ensuring.run(pool, functools.partial(self._ensure_pool, pool))
        except BrokerError as error:
            self._broker.troubles[name] = str(error)
            raise
        self._broker.troubles.pop(name, None)

    async def ensure_pools(self, pools: Iterable[str]) -> None:
        """Call `ensure_pool` for each pool; ignore reservations that have ended. Raises BrokerError."""

        async def ensure(pool: str) -> None:
            with contextlib.suppress(PoolNotFound):
                await self.ensure_pool(pool)

        await independently(functools.partial(ensure, pool) for pool in pools)

    async def _ensure_pool(self, pool: str) -> None:
        self._require(pool)
        reserved = self._is_reservation(pool)
        # a reservation has no stream of dead letters: its workers write dead letters to the pool of their settings,
        # which remains after the end of the reservation
        if not reserved:
            await self._ensure_dead_letters(pool)
        spec = work_spec(self._settings, pool, reserved=reserved)
        state = await self._broker.ensure_stream(spec)
        # if the reservation ended during this call, `ensure_stream` may have recreated the removed stream
        if not self._serves(pool):
            await self._broker.delete_stream(spec.name)
            self._require(pool)
        before = self._created.get(pool)
        self._created[pool] = state.created
        if before is not None and before != state.created:
            self.consumers.stream_recreated(pool)
            self._on_lost(pool)
        await self.consumers.follow(pool)

    def _require(self, pool: str) -> None:
        if not self._serves(pool):
            raise PoolNotFound(
                f"the pool {pool!r} does not exist any more, because its reservation has ended", param="X-SIE-Pool"
            )

    async def forget_pool(self, pool: str) -> None:
        """Discard this gateway's state of an ended reservation's pool, and stop managing the pool's consumers."""
        self._created.pop(pool, None)
        self._broker.troubles.pop(topology.stream_name(pool), None)
        await self.consumers.unfollow(pool)

    async def remove_pool(self, pool: str) -> None:
        """Delete the stream of an ended reservation, with the messages in it. Raises BrokerError."""
        await self.forget_pool(pool)
        await self._broker.delete_stream(topology.stream_name(pool))

    async def _ensure_dead_letters(self, pool: str) -> None:
        """Create the stream of dead letters, and the bucket with the records of inputs that crash adapters."""
        replicas, queue_bytes = self._settings.stream_replicas, self._settings.queue_max_bytes
        spec = topology.dead_letter_stream(pool, replicas=replicas, queue_bytes=queue_bytes)
        try:
            await self._broker.ensure_stream(spec)
        except (TopologyMismatch, UnsafeUpdate) as error:
            # only logged, because a stream with other settings also stores dead letters
            _logger.error("%s", error)
        await self._broker.key_value(
            topology.POISON_BUCKET, storage="file", replicas=replicas, max_age_s=topology.POISON_LIFETIME_S
        )

    async def reverify(self) -> None:
        """After a reconnect, check every stream, and the consumers of open requests. Raises BrokerError."""
        if self._broker.max_payload < MIN_PAYLOAD_BYTES:
            _logger.error("%s", _too_small(self._broker.max_payload))
        pools = list(self._created)
        await independently((functools.partial(self.ensure_pools, pools), self.consumers.reverify))

    async def publish(self, lane: Lane, items: Sequence[WorkItem], deadline_s: float) -> list[StreamPosition]:
        """Publish the chunks of one request and return their positions. If the broker does not store a chunk, remove
        the stored chunks. Create the consumer at the same time if it is missing: a stream stores messages even before
        the consumer exists. Raises QueueFull, QueueUnavailable, GatewayTimeout, PayloadTooLarge,
        PoolNotFound.
        """
        first, stream = items[0], self.consumers.streams.get(lane.pool)
        if stream is None:
            self._require(lane.pool)  # publish nothing for an ended reservation: nobody would remove it
        self._on_publish(lane, items)
        started_s = time.perf_counter()
        if stream is None:
            await self._with_patience(functools.partial(self.ensure_pool, lane.pool), lane.pool, deadline_s)
            stream = self.consumers.stream(lane.pool)
        routes = _routes(lane, first.priority, first.model, self._ack_wait_s)
        subject, spec = stream.route(*routes, deadline_s)
        # the usual case, one chunk and a verified consumer, needs no task and no semaphore
        if len(items) == 1 and spec.name in stream.verified:
            stored = [await self._publish_one(lane, subject, first, deadline_s)]
        else:
            is_verified = spec.name in stream.verified
            stored = await self._publish_all(lane, subject, spec, items, deadline_s, is_verified=is_verified)
        self._metrics.publish[first.operation].observe(time.perf_counter() - started_s)
        return stored

    async def _publish_all(
        self,
        lane: Lane,
        subject: str,
        spec: ConsumerSpec,
        items: Sequence[WorkItem],
        deadline_s: float,
        *,
        is_verified: bool,
    ) -> list[StreamPosition]:
        # limits the number of messages of a large request that are in memory at the same time
        turns = asyncio.Semaphore(PUBLISHES_AT_ONCE)

        async def in_turn(item: WorkItem) -> StreamPosition:
            async with turns:
                return await self._publish_one(lane, subject, item, deadline_s)

        tasks = [asyncio.ensure_future(in_turn(item)) for item in items]
        ensure = functools.partial(self.consumers.ensure, lane.pool, spec)
        consumer = [] if is_verified else [asyncio.ensure_future(self._with_patience(ensure, lane.pool, deadline_s))]
        try:
            stored = await asyncio.gather(*tasks)
            await asyncio.gather(*consumer)
        except BaseException:
            self.undo(self._publish_undone(lane.pool, [*tasks, *consumer], items[0].request))
            raise
        return stored

    def undo(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` (a clean-up after a failed request) in the background, so that the reply does not wait for it."""
        self._undoing.start(work, "undo")

    async def close(self) -> None:
        """Wait at most UNDO_S seconds for running clean-ups (see `undo`), cancel the rest, and stop the consumers."""
        if not await self._undoing.settle(UNDO_S):
            _logger.warning(
                "%d removals of messages of ended requests were cut short by the shutdown", len(self._undoing)
            )
        await self._undoing.cancel()
        await self._ensuring.stop()
        await self.consumers.close()

    async def _publish_undone(self, pool: str, tasks: Sequence[asyncio.Future[Any]], request: str) -> None:
        for task in tasks:
            task.cancel()
        settled = await asyncio.gather(*tasks, return_exceptions=True)
        await self.withdraw(pool, [stored for stored in settled if isinstance(stored, StreamPosition)], request)

    async def _publish_one(self, lane: Lane, subject: str, item: WorkItem, deadline_s: float) -> StreamPosition:
        """Publish one message and return its position. If the caller cancels this call, withdraw the message, because
        the broker may have stored it. After an error, withdraw nothing: if the broker has stored the message, workers
        drop it after its time limit.
        """
        message_id = f"{item.request}.{item.chunk}.{item.attempt}"
        if self._offload is None:
            data = messages.encode(item)
        else:
            # large inputs are not encoded here, because encoding would block the event loop; `Offload.stored` uses a
            # thread
            limit = self.limits().payload_bytes
            is_large = sum(entry.least_bytes for entry in _inputs(item)) > limit
            data = b"" if is_large else messages.encode(item)
            if is_large or (len(data) > limit and self._is_too_large(item, len(data), limit)):
                data = messages.encode(await self._offload.stored(item, _bounded(PUT_TIMEOUT_S, deadline_s)))
        began_s = time.perf_counter()
        try:
            try:  # the usual case, an answer to the first attempt, needs no time limit beside that of `Broker.publish`
                return await self._store(lane.pool, subject, data, message_id, deadline_s)
            except BrokerError as error:
                attempt = functools.partial(self._store, lane.pool, subject, data, message_id, deadline_s)
                return await self._with_patience(attempt, lane.pool, deadline_s, began_s, error)
        except asyncio.CancelledError:
            self.undo(self._take_back(lane.pool, subject, data, message_id, item.request))
            raise

    async def _store(self, pool: str, subject: str, data: bytes, message_id: str, deadline_s: float) -> StreamPosition:
        created = self._created.get(pool, "")
        failpoint("publish.before_publish")
        timeout_s = max(LEAST_TIMEOUT_S, min(PUBLISH_TIMEOUT_S, deadline_s - time.perf_counter()))
        try:
            published = await self._broker.publish(subject, data, message_id, timeout_s)
        except BrokerError:
            self._metrics.ack_failures.inc()
            raise
        failpoint("publish.published")
        return StreamPosition(created, published.sequence)

    async def _take_back(self, pool: str, subject: str, data: bytes, message_id: str, request: str) -> None:
        """Withdraw a message that the broker may have stored. Publish the message again with the same message id to
        learn its sequence number: the broker then returns the number of the stored message.
        """
        with contextlib.suppress(BrokerError):  # after an error, the age limit of the stream removes the message
            created = self._created.get(pool, "")
            sequence = (await self._broker.publish(subject, data, message_id, PUBLISH_TIMEOUT_S)).sequence
            await self.withdraw(pool, [StreamPosition(created, sequence)], request)

    def _is_too_large(self, item: WorkItem, message_bytes: int, limit: int) -> bool:
        """Return True if the inputs exceed `limit`, or a dead letter of the item exceeds the broker's limit."""
        if message_bytes > self._broker.max_payload - ENVELOPE_BYTES:
            return True
        return sum(entry.nbytes for entry in _inputs(item)) > limit

    async def _with_patience(
        self,
        attempt: Callable[[], Awaitable[_T]],
        pool: str,
        deadline_s: float,
        began_s: float | None = None,
        failed: BrokerError | None = None,
    ) -> _T:
        """Call `attempt` again and again until the broker replies, and return its result. `failed`: the error of an
        attempt that began at `began_s`. Stop PUBLISH_PATIENCE_S seconds after the first attempt began, or earlier at
        `deadline_s`; the last attempt may take LAST_ATTEMPT_S seconds more. After an attempt without a connection,
        create the pool's stream again if the broker has lost it.

        Raises GatewayTimeout if the budget ended while the gateway had a connection: an attempt that the deadline cut
        short says nothing about the broker.
        """
        now_s = time.perf_counter()
        end_s = min((now_s if began_s is None else began_s) + PUBLISH_PATIENCE_S, deadline_s)
        try:
            async with asyncio.timeout(max(0.0, end_s - now_s) + LAST_ATTEMPT_S):
                return await self._patiently(attempt, pool, end_s, failed)
        except (TimeoutError, BrokerUnavailable) as error:
            if not self._broker.connected:
                raise QueueUnavailable("the gateway has no connection to the broker: try again") from error
            if end_s == deadline_s:
                message = "the budget of this request ended before the broker had stored its work"
                raise GatewayTimeout(message) from error
            raise QueueUnavailable("the broker did not store the work of this request in time: try again") from error

    async def _patiently(
        self, attempt: Callable[[], Awaitable[_T]], pool: str, end_s: float, failed: BrokerError | None
    ) -> _T:
        while True:
            try:
                if failed is not None:
                    raise failed
                return await attempt()
            except StreamFull as error:
                raise QueueFull(f"the queue is full: {error}") from error
            except TopologyMismatch as error:
                _logger.error("%s", error)
                raise QueueUnavailable(
                    f"a stream or consumer of the queue has other settings than this gateway requires: {error}"
                ) from error
            except PayloadTooBig as error:
                raise PayloadTooLarge(
                    f"one message of this request is too large for the broker: {error}", param="body"
                ) from error
            except BrokerUnavailable:
                if time.perf_counter() + 0.1 >= end_s:
                    raise
                failed = None
                # the client library reconnects during this pause
                await asyncio.sleep(0.1)
                if self._broker.connected:
                    with contextlib.suppress(BrokerError):  # if this fails, the next attempt reports the error
                        await self.ensure_pool(pool)
            except BrokerError as error:
                raise QueueUnavailable(f"the broker did not accept the work of this request: {error}") from error

    async def withdraw(self, pool: str, stored: Sequence[StreamPosition], request: str = "") -> None:
        """Remove the waiting and leased messages of an ended request. If the stream was lost and created again, ignore
        positions in the lost stream. If the broker fails, the age limit of the stream removes the messages later.

        If `request` is set, send a cancellation of this request to the workers after the removal. An earlier
        cancellation would let a worker drop its messages of the request and pull further messages of the request.
        """
        if stored and self._serves(pool):
            try:
                await self._remove(topology.stream_name(pool), stored)
            except BrokerError as error:
                _logger.warning(
                    "request %s has ended, but some of its %d messages could not be removed: %s",
                    request,
                    len(stored),
                    error,
                )
        if request:
            failpoint("publish.before_cancel")
            try:
                await self._broker.send(topology.cancel_subject(pool), messages.encode(CancelRequests((request,))))
            except BrokerError as error:
                _logger.info("request %s: its cancellation could not be sent to the workers: %s", request, error)

    async def _remove(self, stream: str, stored: Sequence[StreamPosition]) -> None:
        """Delete messages from the stream, except messages of an earlier stream of this name. Raises BrokerError."""
        for start in range(0, len(stored), PUBLISHES_AT_ONCE):
            # read the creation time before each group of deletions: the broker may have recreated a lost stream
            created = (await self._broker.stream_state(stream)).created
            piece = stored[start : start + PUBLISHES_AT_ONCE]
            removals = [
                self._broker.delete(stream, message.sequence) for message in piece if message.created == created
            ]
            for outcome in await asyncio.gather(*removals, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome


def _inputs(item: WorkItem) -> Sequence[Input]:
    return (*item.inputs, item.query) if item.query else item.inputs


def _bounded(timeout_s: float, deadline_s: float) -> float:
    """Return `timeout_s`, or less if the deadline is earlier, but at least LEAST_TIMEOUT_S."""
    return max(LEAST_TIMEOUT_S, min(timeout_s, deadline_s - time.perf_counter()))


def _too_small(max_payload: int) -> str:
    return (
        f"the broker's max_payload of {max_payload} bytes is too small: its configuration must say at least "
        f"{MIN_PAYLOAD_BYTES}"
    )
