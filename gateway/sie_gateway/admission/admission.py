"""Entry of requests into the queue. The gateway refuses a request if its expected wait is too long (`model_queue`,
`retry_slots`). Each key may have only a limited number of tokens in the queue: the key's window (`KeyWindow`).

    chunks ──► will the response be too late? ──► queue has space: permits at once
                        │ yes                 └─► no space: wait for results and for the key's next permit
                        ▼                              └─► response would be late now: QUEUE_FULL
                   QUEUE_FULL with the time to try again

A permit allows one chunk of a request to be in the queue. The gateway releases a permit once: when the result of the
chunk arrives, or when the request ends.

`Peers` are the gateways of this installation, known by their announcements. Each of n gateways uses 1/n of a key's
window. To predict a wait, a gateway also counts the work that the other gateways have in the queue.

    each second, every gateway ──► sie.gateway.{id} ──► every gateway, the sender included
                                       └── five times a second while there are other gateways and the sender has
                                           something to announce: work in the queue, or retry times of refused clients

For its own traffic and its own rate of responses, a gateway uses its last announcement, like the other gateways do. So
all gateways compute with equal figures.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import heapq
import logging
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sie_broker import BrokerError, Bus, CoreMessage
from sie_contracts.errors import UNDECODABLE, QueueFull
from sie_contracts.models.costs import ImageCost
from sie_contracts.settings import Settings, default_worker_id
from sie_contracts.wire import heartbeats, messages, topology
from sie_contracts.wire.heartbeats import AnswerErasure, GatewayBeat, LaneTraffic, QueuedWork
from sie_contracts.wire.messages import PRIORITIES, Priority, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.model_queue import (
    LOOK_S,
    KeyWindow,
    ModelQueue,
    SharedLimit,
    Shares,
    Ticket,
    WaitRefusal,
    bound,
)
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.metrics import Metrics
from sie_gateway.streams.backlog import Backlog
from sie_runtime.http.routes import bearer
from sie_runtime.process import Stop

EVERY_S = 1.0  # seconds between announcements of this gateway while it announces no queued work and no retry times
BUSY_S = 0.2  # seconds between announcements while this gateway has queued work or retry times to announce
SILENT_S = 5.0  # seconds without an announcement after which a gateway does not count as live
HALF_LIFE_S = 60.0  # seconds after which a published message counts half in the mean cost (`mean_cost`)
RATE_S = 10.0  # time constant, in seconds, of the moving average `_LaneFlow.rate` of tokens per second
QPS_S = 10.0  # number of seconds over which responses per second are averaged
MAX_BEATS = round(QPS_S / BUSY_S)  # largest number of announcements over which responses are averaged
# A `_LaneFlow` is dropped when its count of messages, which halves every HALF_LIFE_S seconds, is below this number. A
# count of ten falls below it in ten half-lives.
_MIN_MESSAGES = 0.01
_peers_logger = logging.getLogger("sie.gateway.peers")


def mean_cost(traffic: list[LaneTraffic]) -> float:
    """Return the mean number of tokens in a message; 0.0 if no gateway has sent a message lately."""
    count = sum(flow.messages for flow in traffic)
    return sum(flow.tokens for flow in traffic) / count if count else 0.0


@functools.lru_cache(1024)
def _flow_name(lane: Lane, priority: Priority) -> str:
    return f"{lane}.{priority}"


@dataclass(slots=True, eq=False)
class _LaneFlow:
    """Messages and tokens that this gateway published to one lane (pool, machine profile and bundle) and priority. Both
    numbers halve every HALF_LIFE_S seconds. `fresh`: tokens since the last announcement. `rate`: moving average of the
    tokens per second.
    """

    messages: float = 0.0
    tokens: float = 0.0
    rate: float = 0.0
    fresh: int = 0

    def age(self, seconds: float) -> None:
        left = 0.5 ** (seconds / HALF_LIFE_S)
        self.messages *= left
        self.tokens *= left
        self.rate += (self.fresh / seconds - self.rate) * min(1.0, seconds / RATE_S)
        self.fresh = 0


class Peers:
    """Gateways of this installation, this one included. Three functions return figures that this gateway announces:
    `waiting`, the tokens that wait in this gateway, by lane and priority; `epoch`, the epoch (version) of its
    catalogue; `queued`, its work in the queue and the retry times of its refused clients.
    """

    def __init__(
        self,
        bus: Bus,
        waiting: Callable[[], Mapping[tuple[Lane, Priority], int]],
        clock: Callable[[], float] = time.monotonic,
        *,
        epoch: Callable[[], str] = str,
        queued: Callable[[], tuple[QueuedWork, ...]] = tuple,
    ) -> None:
        self.id = f"{default_worker_id()}-{uuid.uuid4().hex[:12]}"
        self._epoch = epoch
        self._queued = queued
        self._bus = bus
        self._waiting = waiting
        self._clock = clock
        self._flows: dict[tuple[Lane, Priority], _LaneFlow] = {}
        self._heard: dict[str, tuple[float, GatewayBeat]] = {}
        self._aged_s = clock()
        self._answered = 0
        # for each announcement: (number of responses since the previous announcement, seconds since that announcement)
        self._answers: deque[tuple[int, float]] = deque(maxlen=MAX_BEATS)
        self.listeners: list[Callable[[GatewayBeat], None]] = []  # called with each announcement of other gateways
        self._erasures = 0  # number of erasures of cached answers that this gateway has announced
        self._is_busy = False  # true if the last announcement had queued work or retry times

    async def start(self) -> None:
        await self._bus.subscribe(f"{topology.GATEWAY_SUBJECT}.*", self._on_beat)

    async def run(self, stop: Stop) -> None:
        """Announce this gateway until `stop`, then announce that it leaves."""
        while not await stop.wait_for(self.pause_s()):
            await self._send(self.beat())
        await self._send(GatewayBeat(self.id, leaving=True, erasures=self._erasures))

    def pause_s(self) -> float:
        return BUSY_S if self._is_busy else EVERY_S

    async def announce(self, erasure: AnswerErasure) -> None:
        """Announce which cached answers the other gateways must erase. Each announcement contains the number of
        erasures that this gateway has announced, so that another gateway can see that it has missed an erasure. Raises
        BrokerError.
        """
        self._erasures += 1
        beat = msgspec.structs.replace(self.beat(), erasure=erasure)
        await self._bus.send(topology.gateway_subject(self.id), messages.encode(beat))

    async def _send(self, beat: GatewayBeat) -> None:
        try:
            await self._bus.send(topology.gateway_subject(self.id), messages.encode(beat))
        except BrokerError as error:
            # level info is enough: other modules warn that the broker is unreachable
            _peers_logger.info("the announcement of this gateway was not sent: %s", error)

    def sent(self, lane: Lane, priority: Priority, count: int, cost: int) -> None:
        """Count `count` messages, with `cost` tokens in total, which this gateway published to the lane."""
        flow = self._flows.get((lane, priority))
        if flow is None:
            flow = self._flows[lane, priority] = _LaneFlow()
        flow.messages += count
        flow.tokens += cost
        flow.fresh += cost

    def answered(self) -> None:
        """Count a response to an inference request, of any status."""
        self._answered += 1

    def qps(self) -> float:
        """Return the inference requests per second that all live gateways answer."""
        return sum(beat.qps for beat in self._live())

    def beat(self) -> GatewayBeat:
        now_s = self._clock()
        seconds, self._aged_s = max(1e-3, now_s - self._aged_s), now_s
        for flow in self._flows.values():
            flow.age(seconds)
        self._flows = {key: flow for key, flow in self._flows.items() if flow.messages > _MIN_MESSAGES}
        waiting = self._waiting()
        traffic = {}
        for key in {**self._flows, **waiting}:
            flow = self._flows.get(key) or _LaneFlow()
            traffic[_flow_name(*key)] = LaneTraffic(flow.messages, flow.tokens, flow.rate, waiting.get(key, 0))
        self._answers.append((self._answered, seconds))
        self._answered = 0
        while len(self._answers) > 1 and sum(took_s for _, took_s in self._answers) > QPS_S:
            self._answers.popleft()
        qps = sum(count for count, _ in self._answers) / sum(took_s for _, took_s in self._answers)
        queued = self._queued() if self.count() > 1 else ()
        self._is_busy = bool(queued)
        return GatewayBeat(
            self.id,
            traffic=traffic,
            qps=round(qps, 3),
            config_epoch=self._epoch(),
            queued=queued,
            erasures=self._erasures,
        )

    async def _on_beat(self, message: CoreMessage) -> None:
        try:
            beat = heartbeats.decode_gateway(message.data)
        except UNDECODABLE as error:
            _peers_logger.warning(
                "an announcement of another gateway's work could not be decoded and is ignored: %s", error
            )
            return
        self.note(beat)

    def note(self, beat: GatewayBeat) -> None:
        now_s = self._clock()
        self._heard = {name: entry for name, entry in self._heard.items() if now_s - entry[0] < SILENT_S}
        if beat.leaving:
            self._heard.pop(beat.gateway, None)
        else:
            self._heard[beat.gateway] = (now_s, beat)
        if beat.gateway != self.id:
            for listener in self.listeners:
                listener(beat)

    def _live(self) -> list[GatewayBeat]:
        now_s = self._clock()
        return [beat for seen_s, beat in self._heard.values() if now_s - seen_s < SILENT_S]

    def count(self) -> int:
        """Return the number of live gateways, this one included."""
        return max(1, len({self.id, *(beat.gateway for beat in self._live())}))

    def epochs(self) -> dict[str, str]:
        """Return the epoch (version) of the catalogue of each live gateway, by id of the gateway. For this gateway, it
        is the present epoch; for another gateway, the epoch that this other gateway announced last.
        """
        return {**{beat.gateway: beat.config_epoch for beat in self._live()}, self.id: self._epoch()}

    def traffic(self, lane: Lane, priority: Priority) -> list[LaneTraffic]:
        """Return what live gateways announced about their traffic in a lane (pool, machine profile and bundle) and
        priority: one entry for each gateway with such traffic.
        """
        name = _flow_name(lane, priority)
        return [flow for beat in self._live() if (flow := beat.traffic.get(name)) is not None]


# largest number of bytes of inputs that wait in this gateway for a permit; while no inputs wait, a request of any size
# is admitted
MAX_WAITING_BYTES = 256 << 20
# Limit on the work in the queue for a model that no worker has loaded, in chunks of SIE_CHUNK_COST tokens. The first
# chunk makes a worker load the model. The second chunk is in the queue when the worker forms its first batch.
COLD_CHUNKS = 2
MAX_GONE = 4096  # largest number of ended requests whose late results are used to measure the speed of a queue
SWEEP_S = 1.0  # seconds between two calls of `Admission.sweep`
# largest number of queues (model and priority) in an announcement; the queues with the most work are announced
MAX_TOLD = 256
# Largest number of retry times of refused clients in an announcement: those that this gateway gave out, and those at
# which a client came again (`RetrySlots`). At 34 bytes each, they fit into 64 KiB, the smallest message limit of a
# broker.
MAX_TOLD_TURNS = 1000
UNUSED_S = 60.0  # seconds without a request after which the `ModelQueue` of a model is dropped


def key_of(authorization: str) -> str:
    """Return the name by which this process knows an API key: a digest of the token, so that the token is not stored.
    `authorization` is the header of a request whose bearer token was accepted.
    """
    return hashlib.blake2b(bearer(authorization).encode(), digest_size=16).hexdigest()


class Permits(Ticket, eq=False, kw_only=True):
    """Permits of one request. A permit lets one chunk of the request into `queue`, which is the queue of the request's
    model. `is_cold`: true if no worker had the model loaded when the request arrived. `estimates`: estimated tokens of
    each chunk. `size_bytes`: bytes of the inputs, which `Admission` counts while chunks wait.
    """

    admission: Admission
    queue: ModelQueue
    estimates: Sequence[int]
    size_bytes: int
    is_cold: bool
    # called if the gateway refuses this request after its admission, because its response would be late
    on_refused: Callable[[QueueFull], None] | None = None
    granted: list[int] = msgspec.field(default_factory=list)  # chunks with a permit that `pop` has not returned
    wake: asyncio.Event | None = None

    @property
    def complete(self) -> bool:
        """Return True if every chunk has got its permit and was returned by `pop` or `more`."""
        return not self.waiting and not self.granted

    def pop(self) -> list[int]:
        """Return the chunks that may be published now. No chunk is returned twice."""
        granted, self.granted = self.granted, []
        return granted

    async def more(self) -> list[int]:
        """Wait until a further chunk has a permit, then return the chunks like `pop`."""
        while not self.granted:
            self.wake = asyncio.Event()
            await self.wake.wait()
        return self.pop()

    def grant(self, chunk: int) -> None:
        self.granted.append(chunk)
        if self.wake is not None:
            self.wake.set()

    def result_arrived(self, result: WorkResult) -> None:
        """Release the permit of a chunk whose result has arrived: the chunk has left the queue."""
        admission, queue, window = self.admission, self.queue, self.queue.window
        now_s = admission.clock()
        queue.answered(self, result, self.estimates[result.chunk], now_s)
        if window.give_back(self, result.chunk):
            queue.freed(now_s, is_result=True)
            if admission.pending_queues:
                admission.pump_beside(queue)
        if (window.items or window.flows) and now_s - queue.shed_s > LOOK_S:
            admission.refuse_late(queue)


class Admission:
    """Admission of requests into the queues of all models. Only the gateway's event loop uses it. Every method except
    `run` returns without waiting. In its methods, `residency` is the name of the model, or the name of the profile if
    the profile has weights of its own.
    """

    def __init__(
        self,
        settings: Settings,
        broker: Bus,
        fleet: Fleet,
        backlog: Backlog,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        *,
        epoch: Callable[[], str] = str,
    ) -> None:
        """`epoch` returns the epoch (version) of the catalogue that this gateway uses."""
        self._settings = settings
        self._fleet = fleet
        self._backlog = backlog
        self._metrics = metrics
        self.clock = clock
        self.peers = Peers(broker, self.waiting, clock, epoch=epoch, queued=self.queued)
        self.peers.listeners.append(self.peer_announced)
        # by lane and priority, the tokens in the queue of each key; no request can name a new lane or priority, so the
        # dict cannot grow without limit
        self._shares: dict[tuple[Lane, Priority], Shares] = {}
        self._queues: dict[tuple[Lane, Priority, str], ModelQueue] = {}  # queues by lane, priority and residency
        self._open: set[Ticket] = set()  # admitted requests that have not ended
        # requests that ended before all their results arrived, by id: their late results are used to measure the
        # queue's speed
        self._gone: dict[str, tuple[ModelQueue, Ticket]] = {}
        self._queueing: dict[Ticket, Permits] = {}  # open requests that wait for a permit
        # queues in which requests wait for a permit, in the order in which they began to wait; the values are unused
        self.pending_queues: dict[ModelQueue, None] = {}
        self._waiting = SharedLimit(MAX_WAITING_BYTES)  # bytes of inputs whose chunks wait for a permit
        fleet.listeners.append(self.pump)

    async def run(self, stop: Stop) -> None:
        while not await stop.wait_for(SWEEP_S):
            self.sweep()

    def sweep(self) -> None:
        """Do the work that depends on time: drop unused queues, grant permits, refuse admitted requests that would be
        late.
        """
        now_s = self.clock()
        self._queues = {
            name: queue
            for name, queue in self._queues.items()
            if not queue.window.idle or now_s - queue.used_s < UNUSED_S or queue.turns.promised(now_s)
        }
        self.pump()
        for queue in [queue for queue in self._queues.values() if queue.entered]:
            self.refuse_late(queue)

    # ---- refusal

    def check(
        self,
        key: str,
        lane: Lane,
        priority: Priority,
        residency: str,
        cost: int,
        budget_s: float,
        client: Callable[[], bytes] = bytes,
        squares: int = 0,
    ) -> None:
        """Raise QueueFull if the response to a request would be ready later than `budget_s` seconds from now.

        `cost`: estimated tokens of the request. `squares`: sum of the squared token counts of its sequences (attention
        takes quadratic time). `client` returns a digest of the client and the request, which identifies the client's
        next attempt; the digest is empty if the client is unknown.
        """
        now_s = self.clock()
        queue = self._queue(lane, priority, residency)
        if queue.window.idle:
            return
        self._refresh(queue, now_s)
        self.refuse_late(queue)
        ((time_cost,), _) = queue.weighed([cost], [squares])
        refusal = queue.judge(now_s, key, time_cost, budget_s, client)
        if refusal is not None:
            self._count_refusal(queue, "stalled" if refusal.is_stalled else "wait")
            raise self._late(queue, refusal, time_cost, budget_s, client)

    def _late(
        self, queue: ModelQueue, refusal: WaitRefusal, tokens: float, budget_s: float, client: Callable[[], bytes]
    ) -> QueueFull:
        retry_s = queue.turns.book(self.clock(), client(), tokens, refusal.turn_s, refusal.room)
        message = (
            f"the wait may take {refusal.wait_s:.1f} s, as work is queued or reserved for clients that were refused "
            f"earlier; the request has {budget_s:.1f} s left"
        )
        if refusal.is_stalled:
            message = (
                f"the queue stands still: the wait may take {refusal.wait_s:.1f} s; "
                f"the request has {budget_s:.1f} s left"
            )
        return QueueFull(message, retry_after_s=retry_s, extras={"queue_depth": self.queue_depth(queue.lane)})

    def _count_refusal(self, queue: ModelQueue, reason: str) -> None:
        self._metrics.rejected.labels(queue.lane.machine_profile, queue.lane.bundle, reason).inc()

    def expected_s(self, lane: Lane, priority: Priority) -> float | None:
        """Return the longest expected wait, in seconds, of this gateway's queues in the lane (pool, machine profile and
        bundle) and priority. Return None if the wait of a queue with work is unknown, or if the lane has no healthy
        worker. Return 0.0 if no queue has work.
        """
        if not self._fleet.of_lane(lane):
            return None
        longest_s, now_s = 0.0, self.clock()
        for queue in self._queues.values():
            if queue.lane == lane and queue.priority == priority and (ahead := queue.window.ahead("", 0.0)):
                wait = queue.wait(now_s, ahead, 0.0)
                if not wait.evidence:
                    return None
                longest_s = max(longest_s, wait.likely_s + wait.stalled_s)
        return longest_s

    def refuse_late(self, queue: ModelQueue) -> None:
        """Refuse admitted requests whose responses would miss their deadlines, so that the work of these requests
        leaves the queue before they time out. Do nothing if the last check was less than LOOK_S seconds ago, or while
        results of a long batch arrive: chunks that have run, but have no result yet, would count as waiting work.
        """
        now_s = self.clock()
        if now_s - queue.shed_s <= LOOK_S or not queue.throughput.is_settled(now_s, LOOK_S):
            return
        queue.shed_s = now_s
        for ticket, refusal, cost in queue.shed(now_s):
            if isinstance(ticket, Permits) and ticket in self._open and ticket.on_refused is not None:
                self._count_refusal(queue, "late")
                ticket.on_refused(self._late(queue, refusal, cost, ticket.deadline_s - now_s, ticket.client))

    def queue_depth(self, lane: Lane) -> int:
        """Return the number of queued messages of a lane (pool, machine profile and bundle). For each priority, count
        the messages in the broker's last report, or the messages of this gateway if they are more.
        """
        own = dict.fromkeys(PRIORITIES, 0)
        for queue in self._queues.values():
            if queue.lane == lane:
                own[queue.priority] += queue.window.items
        return sum(max(self._backlog.messages(lane, priority) or 0, own[priority]) for priority in PRIORITIES)

    def waiting(self) -> Mapping[tuple[Lane, Priority], int]:
        """Return the tokens of chunks that wait in this gateway for a permit, by lane and priority."""
        tokens: dict[tuple[Lane, Priority], int] = {}
        for queue in self._queues.values():
            if queue.window.flows:
                name = queue.lane, queue.priority
                tokens[name] = tokens.get(name, 0) + sum(queue.window.waiting_tokens().values())
        return tokens

    def queued(self) -> tuple[QueuedWork, ...]:
        """Return what this gateway announces to the other gateways: its work in the queue, and the retry times of its
        refused clients.
        """
        now_s, left = self.clock(), MAX_TOLD_TURNS
        announced: list[QueuedWork] = []
        for queue in heapq.nlargest(MAX_TOLD, self._queues.values(), key=lambda queue: queue.window.cost):
            news = queue.news(now_s, left)
            if news is not None:
                announced.append(news)
                left -= len(news.turns) + len(news.claimed)
        return tuple(announced)

    def peer_announced(self, beat: GatewayBeat) -> None:
        """Record the work, and the retry times of refused clients, that another gateway announces."""
        now_s = self.clock()
        for queued in beat.queued:
            lane = Lane(queued.pool, queued.machine_profile, queued.bundle)
            if queued.turns or (lane, queued.priority, queued.residency) in self._queues:
                queue = self._queue(lane, queued.priority, queued.residency)
                queue.used_s = now_s
                queue.peer_announced(beat.gateway, queued, now_s)

    def chunk_cost(self, lane: Lane, priority: Priority, residency: str) -> int:
        """Return the limit of a chunk's estimated tokens. The limit is SIE_CHUNK_COST, or less if the results of this
        model had more tokens than estimated.
        """
        queue = self._queues.get((lane, priority, residency))
        return max(1, int(self._settings.chunk_cost / max(1.0, queue.scale if queue is not None else 1.0)))

    def image_cost(self, residency: str) -> ImageCost:
        return self._fleet.image_cost(residency)

    # ---- permits

    def admit(
        self,
        key: str,
        lane: Lane,
        priority: Priority,
        residency: str,
        costs: Sequence[int],
        size_bytes: int,
        budget_s: float = math.inf,
        client: Callable[[], bytes] = bytes,
        request: str = "",
        squares: Sequence[int] = (),
        *,
        judge: bool = False,
    ) -> Permits:
        """Admit a request and return its permits. Chunks that may enter the queue now get a permit at once, the other
        chunks get it later. `costs`: estimated tokens of each chunk. `request`: id of the request, which its results
        contain. `squares`: for each chunk, the sum of the squared token counts of its rows. `judge`: also refuse a
        request whose response would be late (`check`). No wait is predicted while the queue of the model is idle.

        Raises QueueFull if the inputs of this request and the inputs that wait in this gateway have together more than
        MAX_WAITING_BYTES. Also raises QueueFull if little of MAX_WAITING_BYTES would be left and this key already uses
        its share (`SharedLimit`). There is no limit while no inputs wait, and for a request of one chunk that gets a
        permit at once.
        """
        now_s = self.clock()
        queue = self._queues.get((lane, priority, residency)) or self._queue(lane, priority, residency)
        window = queue.window
        if judge and (window.items or window.flows):
            self.check(key, lane, priority, residency, sum(costs), budget_s, client, sum(squares))
        queue.used_s = now_s
        window.shares.seen_s[key] = now_s
        self._refresh(queue, now_s)
        permits = Permits(
            key,
            *queue.weighed(costs, squares or [0] * len(costs)),
            queue.scale or 1.0,
            request,
            client,
            budget_s,
            now_s + budget_s,
            admission=self,
            queue=queue,
            estimates=costs,
            size_bytes=size_bytes,
            is_cold=not queue.hosts,
        )
        is_small = len(costs) == 1 and window.fits_now(permits, queue.bound, queue.key_limit)
        waiting = self._waiting
        if not is_small and waiting.used and not waiting.accepts(key, size_bytes, now_s):
            message = f"the inputs that wait in this gateway take {waiting.usage(key)}"
            wait = queue.wait(now_s, window.ahead(key, 0.0), 0.0)
            retry_s = queue.turns.book(now_s, client(), permits.cost, wait.likely_s)
            self._count_refusal(queue, "gateway_full")
            raise QueueFull(message, retry_after_s=retry_s, extras={"queue_depth": self.queue_depth(lane)})
        queue.entered[permits] = None
        self._open.add(permits)
        if is_small:
            window.admit(permits)
            queue.queued(permits, 0, now_s)
            permits.granted.append(0)
            return permits
        window.join(permits)
        self._queueing[permits] = permits
        self.pending_queues[queue] = None
        waiting.use(key, size_bytes)
        self._pump(queue)
        return permits

    def answered_late(self, result: WorkResult) -> None:
        """Measure the speed of the queue by a result that arrived after its request had ended (`_gone`)."""
        entry = self._gone.get(result.request)
        if entry is not None:
            queue, ticket = entry
            queue.left(ticket, result, self.clock())
            queue.freed(self.clock(), is_result=True)

    def _queue(self, lane: Lane, priority: Priority, residency: str) -> ModelQueue:
        queue = self._queues.get((lane, priority, residency))
        if queue is None:
            shares = self._shares.setdefault((lane, priority), Shares())
            queue = ModelQueue(lane, priority, residency, KeyWindow(shares, self._settings.chunk_cost))
            self._queues[lane, priority, residency] = queue
        return queue

    def _refresh(self, queue: ModelQueue, now_s: float) -> None:
        """Update the hosts of a queue (workers that have the model loaded) and its limits, if a heartbeat has arrived
        or SWEEP_S seconds have passed since the last update.
        """
        if queue.version == self._fleet.version and now_s < queue.until_s:
            return
        queue.version, queue.until_s = self._fleet.version, now_s + SWEEP_S
        queue.hosted_by(self._fleet.hosts(queue.lane, queue.residency))
        queue.gateways = self.peers.count()
        queue.key_limit = self._settings.key_window_tokens / queue.gateways
        queue.crossover_tokens = self._fleet.crossover_tokens(queue.residency)
        queue.bound = bound(
            queue.hosts,
            cold_tokens=COLD_CHUNKS * self._settings.chunk_cost,
            contested=queue.window.shares.contested(now_s),
            mean_cost=mean_cost(self.peers.traffic(queue.lane, queue.priority)),
            fixed_tokens=queue.batches.fixed_tokens() / queue.window.stretch(),
            replicas=queue.gateways,
        )

    def pump(self) -> None:
        """Grant the permits that are possible now, for every model."""
        self._pump_all(list(self.pending_queues))

    def _pump_all(self, queues: Sequence[ModelQueue]) -> None:
        """Grant permits until none is possible. A permit in one queue may make a permit in another queue possible."""
        has_granted = True
        while has_granted:
            granted = [self._pump(queue) for queue in queues]
            has_granted = len(queues) > 1 and any(granted)

    def _pump(self, queue: ModelQueue) -> bool:
        """Grant the permits of this queue that are possible now. Return True if a permit was granted."""
        now_s = self.clock()
        self._refresh(queue, now_s)
        granted = queue.window.grant(queue.bound, queue.key_limit)
        for ticket, chunk in granted:
            queue.queued(ticket, chunk, now_s)
            self._queueing[ticket].grant(chunk)
        for ticket in {ticket for ticket, _ in granted if not ticket.waiting}:
            self._waiting.use(ticket.key, -self._queueing.pop(ticket).size_bytes)
        if not queue.window.flows:
            self.pending_queues.pop(queue, None)
        return bool(granted)

    def pump_beside(self, queue: ModelQueue) -> None:
        """Grant permits after work left `queue`, also in the other queues of its lane and priority, because a key has
        one limit of tokens for all these queues.
        """
        self._pump_all([other for other in self.pending_queues if other.window.shares is queue.window.shares])

    def end(self, permits: Permits) -> None:
        """End a request: release its permits, and remove its waiting chunks."""
        queue = permits.queue
        self._open.discard(permits)
        # a request of `_gone` refers neither to the body, as the function `client` does, nor to the results
        permits.client, permits.on_refused = bytes, None
        if permits.queued_s:
            queue.ended(permits)
            self._gone[permits.request] = queue, permits
            while len(self._gone) > MAX_GONE:
                del self._gone[next(iter(self._gone))]
        del queue.entered[permits]
        if self._queueing.pop(permits, None) is not None:
            self._waiting.use(permits.key, -permits.size_bytes)
        if permits.held or permits.next < len(permits.costs):
            queue.window.leave(permits)
            queue.freed(self.clock(), is_result=False)
            if self.pending_queues:
                self.pump_beside(queue)
        if not queue.window.flows:
            self.pending_queues.pop(queue, None)

    def drop_pool(self, pool: str) -> None:
        """Drop the idle queues of a deleted pool, and those `Shares` (tokens by key) of the pool that no queue uses."""
        self._queues = {
            name: queue for name, queue in self._queues.items() if name[0].pool != pool or not queue.window.idle
        }
        used = {queue.window.shares for queue in self._queues.values()}
        self._shares = {name: shares for name, shares in self._shares.items() if name[0].pool != pool or shares in used}

    def occupied(self) -> tuple[int, int, int]:
        """Return (tokens with a permit for the queue, messages with a permit, bytes of inputs that wait in this gateway
        for a permit). All three numbers are zero if no request is open.
        """
        windows = [queue.window for queue in self._queues.values()]
        return sum(window.tokens for window in windows), sum(window.items for window in windows), self._waiting.used
