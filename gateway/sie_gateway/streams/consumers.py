"""Durable consumers of the work streams: which consumer takes a request's work, when it is created, and when it is
deleted.

    publish ──► route: the model's own consumer, or that of its slot ──► held until the request's deadline ──► ensured
    a deletion notice, a reconnect, every 10 s ──► held consumers are ensured again, and consumers of subjects with
                                                   messages are created
    one gateway, every minute ──► consumers at rest for an hour are deleted ──► subjects are counted, consumers of
                                                   subjects with messages are created again

A deletion can happen while a publish still relies on the consumer. No message is lost: it is in the stream, and three
mechanisms create its consumer again, each independent of the others: the count after the deletion, the publisher that
gets the notice, and the next round.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from sie_broker import Administration, Broker, BrokerError, ConsumerState, Subscription
from sie_broker.independent import independently
from sie_broker.record import LeaderLease, leases_of
from sie_contracts.errors import PoolNotFound
from sie_contracts.settings import Settings
from sie_contracts.wire import topology
from sie_contracts.wire.topology import ConsumerSpec, Lane
from sie_gateway.streams.shared import SharedTasks
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Stop, Trouble

ROUND_S = 10.0
SWEEP_S = 60.0
IDLE_S = 3600.0
# seconds; longer than the budget of nearly every request, whose gateway would create the consumer again
CROWDED_IDLE_S = 300.0
_AT_ONCE = 16
_ATTEMPTS = 3
_logger = logging.getLogger("sie.gateway.consumers")


class WorkRoute(NamedTuple):
    """Subject to which a model's work is published, and the consumer that serves it."""

    subject: str
    consumer: ConsumerSpec


class Rest(NamedTuple):
    """Rest of a consumer: it has delivered no message since `since_s`, and `delivered` messages before."""

    delivered: int
    since_s: float


@functools.lru_cache(4096)
def _routes(lane: Lane, priority: str, model: str, ack_wait_s: float) -> tuple[WorkRoute, WorkRoute]:
    """Return the route by the model's own consumer, and the route by its slot."""
    own, shared = topology.work_subject(lane, priority, model), topology.slot_subject(lane, priority, model)
    return WorkRoute(own, topology.consumer_of(own, ack_wait_s)), WorkRoute(
        shared, topology.consumer_of(shared, ack_wait_s)
    )


def rests(before: Mapping[str, Rest], states: Iterable[ConsumerState], now_s: float) -> dict[str, Rest]:
    """Return since when each consumer has been at rest, as far as this gateway has seen: no message delivered, waiting
    or leased. For a busy consumer the rest begins now.
    """
    resting = {}
    for state in states:
        rest = before.get(state.name)
        still = rest is not None and rest.delivered == state.delivered and not state.waiting and not state.leased
        resting[state.name] = rest if rest is not None and still else Rest(state.delivered, now_s)
    return resting


def given_up(resting: Mapping[str, Rest], now_s: float, limit: int, idle_s: float) -> list[str]:
    """Return the consumers to delete. These are consumers at rest for `idle_s`. If more than 15/16 of the `limit` of
    models still have an own consumer, also the models' consumers that rested longest, until 15/16 are left: so a busy
    model of a slot can get its own consumer.
    """
    order = sorted(resting, key=lambda name: resting[name].since_s)
    idle = [name for name in order if now_s - resting[name].since_s >= idle_s]
    own = [name for name in order if not topology.is_slot(name)]
    crowd = len(own) - (limit - limit // 16) - sum(1 for name in idle if not topology.is_slot(name))
    tired = [
        name for name in own if name not in set(idle) and now_s - resting[name].since_s >= min(CROWDED_IDLE_S, idle_s)
    ]
    return idle + tired[: max(0, crowd)]


class StreamConsumers:
    """Consumers of one stream that this gateway knows, and the consumers that it needs.

    `own` is bounded by `limit`. Each gateway counts for itself, so several that take the last places at once may exceed
    it. `verified` is bounded by the existing consumers, and `held` by the routes of requests within their budgets.
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
        self._verified: set[str] = set()
        self._held: dict[str, tuple[ConsumerSpec, float]] = {}
        self._ensuring = SharedTasks()
        self._stale: set[str] = set()  # names of consumers that were deleted while they were ensured
        self._rests: dict[str, Rest] = {}
        self._watch: Subscription | None = None

    async def start(self) -> None:
        """Watch for changes of consumers, and read the existing ones. Raises BrokerError."""
        watch = await self._broker.watch_consumers(self._stream, self._on_consumer)
        try:
            self._own |= {name for name in await self._broker.consumers(self._stream) if not topology.is_slot(name)}
        except BaseException:
            await watch.stop()
            raise
        self._watch = watch

    def route(self, own: WorkRoute, shared: WorkRoute, deadline_s: float) -> WorkRoute:
        """Return the route of a request, and hold its consumer until `deadline_s` of this object's clock."""
        name = own.consumer.name
        route = own if name in self._own or len(self._own) < self._limit else shared
        if route is own:
            # the place is taken at once; the next round frees places of consumers that were not created
            self._own.add(name)
        spec = route.consumer
        held = self._held.get(spec.name)
        self._held[spec.name] = (spec, deadline_s if held is None else max(deadline_s, held[1]))
        return route

    def is_verified(self, spec: ConsumerSpec) -> bool:
        """Return True if the consumer existed with the right settings at its last check or notice."""
        return spec.name in self._verified

    async def ensure(self, spec: ConsumerSpec) -> None:
        """Create the consumer, or compare its settings. Raises TopologyMismatch, BrokerError."""
        if not self.is_verified(spec):
            await self._ensuring.run(spec.name, functools.partial(self._make, spec))

    async def _make(self, spec: ConsumerSpec) -> None:
        for _ in range(_ATTEMPTS):
            self._stale.discard(spec.name)
            await self._broker.ensure_consumer(spec)
            failpoint("gateway.consumer_ensured")
            if spec.name not in self._stale:
                self._verified.add(spec.name)
                return

    async def _on_consumer(self, name: str, exists: bool) -> None:
        if exists:
            if not topology.is_slot(name):
                self._own.add(name)
            return
        self._own.discard(name)
        self._verified.discard(name)
        if name in self._ensuring:
            self._stale.add(name)
        if (spec := self._needed(name)) is not None:
            # if this fails, the next round tries again
            self._ensuring.begin(spec.name, functools.partial(self._make, spec))

    def _needed(self, name: str) -> ConsumerSpec | None:
        """Return the consumer of this name if an open request of this gateway relies on it, else None."""
        held = self._held.get(name)
        return held[0] if held is not None and held[1] > self._clock() else None

    def discard_verified(self) -> None:
        """Discard the verified consumers after a reconnect, or when the stream was created again."""
        self._verified.clear()
        self._stale.update(self._ensuring)

    async def refresh(self, ack_wait_s: float) -> None:
        """Ensure the held consumers, and the consumers of subjects that have messages. This also covers missed notices.
        Raises BrokerError.
        """
        now_s = self._clock()
        self._held = {name: held for name, held in self._held.items() if held[1] > now_s}
        verified = set(self._verified)
        names = set(await self._broker.consumers(self._stream))
        lost = verified - names
        self._verified -= lost
        self._own = {name for name in names if not topology.is_slot(name)} | {
            name for name in self._ensuring if not topology.is_slot(name)
        }
        missing = {name: spec for name, (spec, _) in self._held.items() if name not in self._verified}
        for subject in await self._broker.subject_counts(self._stream, ">"):
            try:
                spec = topology.consumer_of(subject, ack_wait_s)
            except ValueError as error:
                _logger.error("%s holds messages that no worker will get: %s", self._stream, error)
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
            _logger.warning(
                "%d of %d consumers of %s could not be ensured: %s", len(failed), len(missing), self._stream, failed[0]
            )

    async def sweep(self, ack_wait_s: float) -> int:
        """Delete the unused consumers, then create again those that are needed after all. Return the number of
        deletions.

        Raises BrokerError. The next round of any gateway then checks the consumers that were deleted before.
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
            self._verified.discard(name)
        if unused:
            _logger.info("%s: %d consumers at rest were deleted", self._stream, len(unused))
            await self.refresh(ack_wait_s)
        return len(unused)

    async def stop(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            await watch.stop()
        await self._ensuring.stop()


class WorkConsumers:
    """Consumers of all pools of this gateway."""

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`clock` is the clock of the deadlines. `idle_s` is the rest after which a consumer is deleted."""
        self._broker = broker
        self._settings = settings
        self._ack_wait_s = float(settings.ack_wait_s)
        self._idle_s = idle_s
        self._clock = clock
        self._streams: dict[str, StreamConsumers] = {}  # by pool
        self._following = asyncio.Lock()  # only one `follow` or `unfollow` runs at a time
        leases = leases_of(broker, storage=settings.stream_storage, replicas=settings.stream_replicas)
        self._lease = LeaderLease(leases, "consumers")
        self._swept_s = -SWEEP_S

    async def follow(self, pool: str) -> StreamConsumers:
        """Start to follow the consumers of a pool's stream, which must exist. Raises BrokerError."""
        async with self._following:
            if pool not in self._streams:
                limit = topology.own_consumers(self._settings.stream_replicas)
                stream = StreamConsumers(self._broker, topology.stream_name(pool), limit, self._idle_s, self._clock)
                await stream.start()
                self._streams[pool] = stream
        return self._streams[pool]

    def route(self, lane: Lane, priority: str, model: str, deadline_s: float) -> WorkRoute:
        """Return the route of a request's work. Raises KeyError for a pool that is not followed."""
        own, shared = _routes(lane, priority, model, self._ack_wait_s)
        return self._streams[lane.pool].route(own, shared, deadline_s)

    def follows(self, pool: str) -> bool:
        return pool in self._streams

    async def unfollow(self, pool: str) -> None:
        """Stop to follow a pool that was removed."""
        async with self._following:
            stream = self._streams.pop(pool, None)
        if stream is not None:
            await stream.stop()

    def is_verified(self, pool: str, spec: ConsumerSpec) -> bool:
        return pool in self._streams and self._streams[pool].is_verified(spec)

    async def ensure(self, pool: str, spec: ConsumerSpec) -> None:
        """Create the consumer, or compare its settings. Raises PoolNotFound for a pool that is no longer followed,
        TopologyMismatch, BrokerError.
        """
        stream = self._streams.get(pool)
        if stream is None:
            raise PoolNotFound("the pool of this request has ended")
        await stream.ensure(spec)

    def stream_recreated(self, pool: str) -> None:
        """Discard the verified consumers of a pool whose stream was created again."""
        if (stream := self._streams.get(pool)) is not None:
            stream.discard_verified()

    async def reverify(self) -> None:
        """Verify all consumers again after a reconnect, when notices may have been missed. Raises BrokerError."""
        for stream in self._streams.values():
            stream.discard_verified()
        await self._refresh()

    async def _refresh(self) -> None:
        await independently(
            functools.partial(stream.refresh, self._ack_wait_s) for stream in list(self._streams.values())
        )

    async def run(self, stop: Stop) -> None:
        """Keep the needed consumers. While this gateway is the leader, also delete the unused ones."""
        trouble, pause_s = Trouble(_logger, "not every consumer could be checked"), 0.0
        while not await stop.wait_for(pause_s):
            pause_s = ROUND_S
            try:
                await independently((self._refresh, self.take_turn))
                trouble.passed()
            except BrokerError as error:
                trouble.met(error)

    async def close(self) -> None:
        for stream in self._streams.values():
            await stream.stop()

    async def take_turn(self) -> int:
        """Sweep if a sweep is due and this gateway is the leader. Return the number of deleted consumers. Raises
        BrokerError.
        """
        if not await self._lease.acquire() or self._clock() - self._swept_s < SWEEP_S:
            return 0
        self._swept_s = self._clock()
        failpoint("gateway.leader_lease_held")
        sweeps = (functools.partial(stream.sweep, self._ack_wait_s) for stream in list(self._streams.values()))
        return sum(await independently(sweeps))
