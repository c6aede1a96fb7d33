"""Deterministic replay of a trace through the scheduler, in virtual time.

    request ─► chunks ─► queue of (model, priority) ─► a worker with credit ─► gathered ─► tokenised ─► batches ─►
    device ─► answered

Credit is the number of messages that a worker has requested from the broker. The quantum is the time to wait for more
messages. The code of the cluster computes chunks, credit, batches and the quantum: `chunk` of the gateway, `batch` and
`sizing` of the sidecar. The device, the tokenizer and the network are formulas of `Machine`. HTTP, loads of models and
failures are not simulated.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from sie_cli.replay.trace import TraceError, TraceRequest
from sie_contracts.settings import Settings
from sie_gateway.inference import chunk
from sie_sidecar.batching.batch import (
    Batch,
    BatchEntry,
    BatchKey,
    BatchLimits,
    DeviceLoad,
    Load,
    Waiting,
    WaitUntil,
    credit,
    next_batch,
)
from sie_sidecar.batching.sizing import Quantum

ACTIVE_S = 1.0  # for this number of seconds after its last delivery, a consumer gets a share of the worker's credit
NO_LIMIT = 1 << 60
MAX_DEVICES = 1024


@dataclass(frozen=True)
class ReplayPlan:
    """Settings to try: workers, lanes per worker (batches that a device runs at the same time), and batching."""

    workers: float = 1
    lanes: float = 1
    max_wait_ms: float = 5
    max_batch_cost: float = 16384
    max_batch_requests: float = 12
    pipeline_depth: float = 2
    bulk_max_overtakes: float = 4
    chunk_cost: float = 4096
    min_quantum_ms: float = 2
    max_quantum_ms: float = 15
    target_p50_ms: float = 50

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(
            int(self.max_batch_cost),
            int(self.max_batch_requests),
            self.max_wait_ms / 1000,
            int(self.bulk_max_overtakes),
        )

    @property
    def depth(self) -> int:
        """Return the number of batches that may be at the adapter at the same time."""
        return int(self.lanes) + int(self.pipeline_depth) - 1

    def check(self) -> None:
        """Raise TraceError if a value is outside its range."""
        whole = ("workers", "lanes", "max_batch_cost", "max_batch_requests", "pipeline_depth", "chunk_cost")
        for name in (limit.name for limit in fields(self)):
            value = getattr(self, name)
            if value < (1 if name in whole else 0):
                raise TraceError(f"{name}={value:g} is too small")
            if name in ("workers", "lanes") and value > MAX_DEVICES:
                raise TraceError(f"{name}={value:g}: at most {MAX_DEVICES} are supported")
        if self.min_quantum_ms > self.max_quantum_ms:
            raise TraceError(f"min_quantum_ms={self.min_quantum_ms:g} is above max_quantum_ms={self.max_quantum_ms:g}")
        if not self.target_p50_ms:
            raise TraceError("target_p50_ms must be above 0")


def plan_of(settings: Settings) -> ReplayPlan:
    """Return the plan for one worker with one lane, with the batching settings of `settings`."""
    return ReplayPlan(
        max_wait_ms=settings.batcher_coalesce_ms,
        max_batch_cost=settings.max_batch_cost,
        max_batch_requests=settings.batcher_max_batch_requests,
        pipeline_depth=settings.rust_pipeline_depth,
        bulk_max_overtakes=settings.bulk_max_overtakes,
        chunk_cost=settings.chunk_cost,
        min_quantum_ms=settings.adaptive_min_quantum_ms,
        max_quantum_ms=settings.adaptive_max_quantum_ms,
        target_p50_ms=settings.adaptive_target_p50_ms,
    )


@dataclass(frozen=True)
class Machine:
    """Durations of a machine, in seconds. A batch takes base_s + token_s * tokens + square_s * squares, where
    `squares` is the sum of the squared lengths of the batch's inputs, with each length in tokens.

    A worker tokenises on one thread, which takes `call_s` per call and `read_s` per token. A worker takes
    `delivery_s` to receive a message.
    """

    base_s: float
    token_s: float
    square_s: float = 0.0
    call_s: float = 0.0
    read_s: float = 0.0
    delivery_s: float = 0.0

    def batch_s(self, tokens: int, attention: int) -> float:
        return self.base_s + self.token_s * tokens + self.square_s * attention


@dataclass
class ReplayReport:
    """Result of a replay. For each request, `latency_s`: time from its arrival to its answer; `wait_s`: time from its
    arrival to the start of its last batch. `device_s`: busy time, summed over the lanes. `host_s`: time spent on
    tokenising. `end_s`: time of the last answer.
    """

    latency_s: list[float]
    wait_s: list[float]
    device_s: float = 0.0
    host_s: float = 0.0
    end_s: float = 0.0
    batches: int = 0
    items: int = 0
    tokens: int = 0
    calls: int = 0


@dataclass
class _ReplayItem:
    """Chunk (the part of a request that one message carries), from its arrival to its answer."""

    request: int
    key: BatchKey
    bulk: bool
    cost: int
    attention: int
    delivered_s: float = 0.0
    pending: int = 0


@dataclass
class _ReplayConsumer:
    """Queue of one model and priority. `turns`: the workers, in the order in which they get the next messages."""

    items: deque[_ReplayItem] = field(default_factory=deque)
    turns: deque[_ReplayWorker] = field(default_factory=deque)


@dataclass
class _Feed:
    credit: int = 0  # number of messages that the worker has requested and the broker has not sent
    on_way: int = 0  # number of messages that the broker has sent and the worker has not received
    mean_cost: float = 0.0
    pending: int = 0  # messages that were left at the broker when it sent the newest message that has arrived
    delivered_s: float = -1e9

    @property
    def outstanding(self) -> int:
        """Return the number of messages that the worker has requested and not received yet."""
        return self.credit + self.on_way


class Replay:
    """Simulation of one trace. `now_s`: the virtual time. Events of equal time run in the order in which they were
    added. The constructor raises TraceError for an invalid plan.
    """

    def __init__(self, requests: Sequence[TraceRequest], plan: ReplayPlan, machine: Machine) -> None:
        plan.check()
        self.plan, self.machine = plan, machine
        self.now_s = 0.0
        self.consumers: dict[tuple[str, bool], _ReplayConsumer] = {}
        self.workers = [_ReplayWorker(self) for _ in range(int(plan.workers))]
        self.report = ReplayReport([0.0] * len(requests), [0.0] * len(requests))
        self._requests = requests
        self._left = [0] * len(requests)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, when_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(when_s, self.now_s), next(self._numbers), event))

    def run(self) -> ReplayReport:
        for index, request in enumerate(self._requests):
            self.at(request.at, lambda index=index: self._arrive(index))  # type: ignore[misc]
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        assert not any(self._left), "every chunk was answered"
        return self.report

    def _arrive(self, index: int) -> None:
        request = self._requests[index]
        name = (request.model, request.priority == "bulk")
        if name not in self.consumers:
            self.consumers[name] = _ReplayConsumer(turns=deque(self.workers))
            for worker in self.workers:
                worker.follow(name)
        sizes = [max(0, tokens - chunk.SPECIAL_TOKENS) * chunk.BYTES_PER_TOKEN for tokens in request.tokens]
        limits = chunk.ChunkLimits(int(self.plan.chunk_cost), NO_LIMIT, NO_LIMIT)
        for part in chunk.split(sizes, max_tokens=NO_LIMIT, item_result_bytes=0, limits=limits):
            lengths = request.tokens[part.start : part.stop]
            key = BatchKey(request.model, "", "encode", "", request.lora)
            self.consumers[name].items.append(
                _ReplayItem(index, key, name[1], sum(lengths), sum(length**2 for length in lengths))
            )
            self._left[index] += 1
        self.deliver(name)

    def deliver(self, name: tuple[str, bool]) -> None:
        """Send each waiting message to the first worker in `turns` that has credit, and move this worker to the end of
        `turns`. Stop if no worker has credit.
        """
        consumer = self.consumers[name]
        while consumer.items:
            worker = next((worker for worker in consumer.turns if worker.feeds[name].credit), None)
            if worker is None:
                return
            consumer.turns.remove(worker)
            consumer.turns.append(worker)
            item = consumer.items.popleft()
            item.pending = len(consumer.items)
            worker.send(name, item)

    def answered(self, batch: Batch[_ReplayItem], started_s: float, ended_s: float) -> None:
        report = self.report
        report.device_s += ended_s - started_s
        report.batches += 1
        report.items += len(batch.entries)
        report.tokens += batch.cost
        report.end_s = max(report.end_s, ended_s)
        for item in (entry.work for entry in batch.entries):
            self._left[item.request] -= 1
            report.wait_s[item.request] = max(report.wait_s[item.request], started_s - self._requests[item.request].at)
            report.latency_s[item.request] = max(
                report.latency_s[item.request], ended_s - self._requests[item.request].at
            )


class _ReplayWorker:
    def __init__(self, replay: Replay) -> None:
        plan = replay.plan
        self._replay = replay
        self._limits = plan.limits
        self._quantum = Quantum(plan.min_quantum_ms / 1000, plan.max_quantum_ms / 1000, plan.target_p50_ms / 1000)
        self.feeds: dict[tuple[str, bool], _Feed] = {}
        # consumers that delivered a message in the last ACTIVE_S
        self._active: dict[tuple[str, bool], _Feed] = {}
        self._arrived: list[_ReplayItem] = []
        self._waiting: Waiting[_ReplayItem] = Waiting()
        self._lanes = [0.0] * int(plan.lanes)  # for each lane, the time at which its batch ends
        # arrival times of the first and the last message since the last tokenising
        self._began_s = self._last_s = 0.0
        # time at which the newest message arrives; the next message arrives later, because the worker receives one
        # message after the other
        self._wire_s = 0.0
        self._tokenising = False
        self._held = ([0, 0], [0, 0])  # [tokens, chunks] at this worker: of priority interactive, then of bulk
        self._sent = 0
        self._wake_s = -1.0

    def follow(self, name: tuple[str, bool]) -> None:
        """Add a consumer, and request one message from it."""
        self.feeds[name] = _Feed(credit=1)

    def _refill(self) -> None:
        """Set the number of messages that the worker requests from each active consumer, by the rules of the module
        sie_sidecar.intake.pull.
        """
        now_s, lanes = self._replay.now_s, len(self._lanes)
        (cost, items), (bulk_cost, bulk_items) = self._held
        loads = Load(cost, items, lanes), Load(cost + bulk_cost, items + bulk_items, lanes)
        for name in list(self._active):
            feed, target = self.feeds[name], 1
            if now_s - feed.delivered_s >= ACTIVE_S:
                self._active.pop(name, None)
            else:
                whole = credit(loads[name[1]], feed.mean_cost, self._limits)
                target = min(whole, max(1, whole // len(self._active)))
            if target == 0 or feed.outstanding <= target // 2:
                feed.credit = max(0, target - feed.on_way)
                self._replay.deliver(name)

    def send(self, name: tuple[str, bool], item: _ReplayItem) -> None:
        feed = self.feeds[name]
        feed.credit -= 1
        feed.on_way += 1
        self._wire_s = max(self._wire_s, self._replay.now_s) + self._replay.machine.delivery_s
        self._replay.at(self._wire_s, lambda: self._on_delivery(name, item))

    def _on_delivery(self, name: tuple[str, bool], item: _ReplayItem) -> None:
        feed, now_s = self.feeds[name], self._replay.now_s
        feed.on_way -= 1
        self._active[name] = feed
        feed.mean_cost = item.cost if not feed.mean_cost else 0.9 * feed.mean_cost + 0.1 * item.cost
        feed.pending, feed.delivered_s, item.delivered_s = item.pending, now_s, now_s
        self._hold(item, 1)
        if not self._arrived:
            self._began_s = now_s
        self._arrived.append(item)
        self._last_s = now_s
        self._gather()

    def _hold(self, item: _ReplayItem, sign: int) -> None:
        load = self._held[item.bulk]
        load[0] += sign * item.cost
        load[1] += sign

    def _is_more_coming(self) -> bool:
        if len(self._arrived) >= self._limits.requests or sum(item.cost for item in self._arrived) >= self._limits.cost:
            return False
        pending = {(item.key.residency, item.bulk): item.pending for item in self._arrived}
        return any(pending.values()) and self._has_pending()

    def _has_pending(self) -> bool:
        return any(feed.pending and feed.outstanding for feed in self._active.values())

    def _gather(self) -> None:
        """Tokenise the messages that have arrived. If the tokenizer is busy, do nothing: `_tokenised` calls this again.
        If more messages are on their way, wait for them until the quantum ends.
        """
        if not self._arrived or self._tokenising:
            return
        until_s = self._quantum.until_s(self._began_s, self._last_s)
        if until_s > self._replay.now_s and self._is_more_coming():
            self._replay.at(until_s, self._gather)
            return
        group, self._arrived = self._arrived, []
        machine, report = self._replay.machine, self._replay.report
        spent_s = machine.call_s + machine.read_s * sum(item.cost for item in group)
        report.calls += 1
        report.host_s += spent_s
        self._tokenising = True
        self._replay.at(self._replay.now_s + spent_s, lambda: self._tokenised(group))
        self._refill()

    def _tokenised(self, group: list[_ReplayItem]) -> None:
        self._tokenising = False
        for item in group:
            self._waiting.add(BatchEntry(item.key, item.cost, self._replay.now_s, item, item.bulk))
        self._gather()
        self._dispatch()

    def _dispatch(self) -> None:
        replay = self._replay
        while True:
            more = bool(self._arrived) or self._tokenising or self._has_pending()
            device = DeviceLoad(self._sent, len(self._lanes), replay.plan.depth, more)
            action = next_batch(self._waiting, replay.now_s, self._limits, device)
            if not isinstance(action, Batch):
                break
            self._start(action)
        if isinstance(action, WaitUntil) and not replay.now_s < self._wake_s <= action.until_s:
            self._wake_s = action.until_s
            replay.at(action.until_s, self._dispatch)

    def _start(self, batch: Batch[_ReplayItem]) -> None:
        self._sent += 1
        for entry in batch.entries:
            self._hold(entry.work, -1)
        lane = min(range(len(self._lanes)), key=self._lanes.__getitem__)
        started_s = max(self._replay.now_s, self._lanes[lane])
        ended_s = started_s + self._replay.machine.batch_s(
            batch.cost, sum(entry.work.attention for entry in batch.entries)
        )
        self._lanes[lane] = ended_s
        self._replay.at(ended_s, lambda: self._ended(batch, started_s, ended_s))
        self._refill()

    def _ended(self, batch: Batch[_ReplayItem], started_s: float, ended_s: float) -> None:
        self._sent -= 1
        self._replay.answered(batch, started_s, ended_s)
        for entry in batch.entries:
            self._quantum.answered(ended_s - entry.work.delivered_s, ended_s)
        self._dispatch()
