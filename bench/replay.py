"""Prediction of latency under other settings: generated requests run through the scheduler, in virtual time.

    request ─► chunks ─► queue of (model, priority) ─► a worker with credit ─► gathered ─► tokenised ─► batches ─►
    device ─► answered

Credit is the number of messages that a worker has requested from the broker. The quantum is the time to wait for more
messages. The code of the cluster computes chunks, credit, batches and the quantum: `runner.split` of the gateway,
`batch` of the sidecar. The device, the tokenizer and the network are formulas of `Machine`. HTTP, loads of models,
placement and failures are not simulated.

    python bench/replay.py poisson:rate=200,length=64,seconds=30 --device base_ms=2,token_us=20
    python bench/replay.py poisson:rate=200,length=64 --device base_ms=2 --what-if max_wait_ms=4,workers=3

The first column of the table is for the defaults of SIE with the changes of --base, the others are for each --what-if.
`bench/results/replay.md` has what it showed.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

from sie_contracts.settings import Settings, load
from sie_contracts.wire.messages import Priority
from sie_gateway.inference import runner
from sie_sidecar.batch import (
    Batch,
    BatchKey,
    BatchLimits,
    DeviceLoad,
    Load,
    Quantum,
    Queued,
    Waiting,
    WaitUntil,
    credit,
    next_batch,
)

ACTIVE_S = 1.0  # for this number of seconds after its last delivery, a consumer gets a share of the worker's credit
NO_LIMIT = 1 << 60
MAX_TOKENS = 512  # largest number of tokens of a generated input; larger random numbers become this number
DEVICE = {"base_ms": 1e3, "token_us": 1e6, "square_ns": 1e9}  # parameter -> number of its units in a second
HOST = {"call_us": 1e6, "read_us": 1e6, "delivery_us": 1e6}
# Durations of a worker in microseconds, measured on two cores of an EPYC with Python 3.11 and the tokenizer of
# all-MiniLM-L6-v2. `call_us` is the difference in processor time between 400 deliveries in 400 calls and in 12 calls.
HOST_DEFAULT = "call_us=55,read_us=1.8,delivery_us=25"


@dataclass(frozen=True)
class Request:
    """Request that arrives `at` seconds after the first one. `tokens`: one number for each input."""

    at: float
    tokens: tuple[int, ...]
    model: str = "model"
    priority: Priority = "interactive"


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


@dataclass(eq=False)
class _ReplayItem(Queued):
    """Chunk (the part of a request that one message carries), from its arrival to its answer."""

    request: int
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
    """Simulation of requests. `now_s`: the virtual time. Events of equal time run in the order in which they were
    added.
    """

    def __init__(self, requests: Sequence[Request], plan: ReplayPlan, machine: Machine) -> None:
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
        sizes = [max(0, tokens - runner.SPECIAL_TOKENS) * runner.BYTES_PER_TOKEN for tokens in request.tokens]
        limits = runner.ChunkLimits(int(self.plan.chunk_cost), NO_LIMIT, NO_LIMIT)
        for part in runner.split(sizes, max_tokens=NO_LIMIT, item_result_bytes=0, limits=limits):
            lengths = request.tokens[part.start : part.stop]
            key = BatchKey(request.model, "", "encode", "", "")
            self.consumers[name].items.append(
                _ReplayItem(index, sum(length**2 for length in lengths), key=key, bulk=name[1], cost=sum(lengths))
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
        for item in batch.entries:
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
        sie_sidecar.intake.
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
            item.arrived_s = self._replay.now_s
            self._waiting.add(item)
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
        for item in batch.entries:
            self._hold(item, -1)
        lane = min(range(len(self._lanes)), key=self._lanes.__getitem__)
        started_s = max(self._replay.now_s, self._lanes[lane])
        ended_s = started_s + self._replay.machine.batch_s(batch.cost, sum(item.attention for item in batch.entries))
        self._lanes[lane] = ended_s
        self._replay.at(ended_s, lambda: self._ended(batch, started_s, ended_s))
        self._refill()

    def _ended(self, batch: Batch[_ReplayItem], started_s: float, ended_s: float) -> None:
        self._sent -= 1
        self._replay.answered(batch, started_s, ended_s)
        for item in batch.entries:
            self._quantum.answered(ended_s - item.delivered_s, ended_s)
        self._dispatch()


def numbers(text: str, names: Sequence[str]) -> dict[str, float]:
    """Parse `a=1,b=2.5` to numbers by name. Raises ValueError for unknown names and invalid numbers."""
    values = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in names:
            raise ValueError(f"{name!r} is unknown, expected one of {', '.join(names)}")
        values[name] = float(value)
    return values


def generate(spec: str) -> list[Request]:
    """Generate requests from `poisson:rate=200,length=64,...`, the first at time 0. Raises ValueError.

    `rate`: requests per second, for `seconds` seconds. `burst`: requests that arrive together. `inputs`: inputs of each
    request. `length`: mean tokens of an input, log-normal with `spread` as its sigma (0: all equal), at most 512.
    `bulk`: share of requests with priority bulk. `models`: number of models. `seed`: seed of the random numbers.
    """
    kind, _, rest = spec.partition(":")
    if kind != "poisson":
        raise ValueError(f"{kind!r}: expected poisson:name=number,...")
    parameters = {
        "rate": 100.0,
        "length": 64.0,
        "seconds": 10.0,
        "burst": 1.0,
        "inputs": 1.0,
        "spread": 0.8,
        "bulk": 0.0,
        "models": 1.0,
        "seed": 1.0,
    }
    parameters.update(numbers(rest, tuple(parameters)))
    chance, sigma = random.Random(int(parameters["seed"])), parameters["spread"]
    middle = math.log(parameters["length"]) - sigma * sigma / 2
    requests: list[Request] = []
    at_s = 0.0
    while at_s < parameters["seconds"]:
        for _ in range(int(parameters["burst"])):
            tokens = tuple(
                min(MAX_TOKENS, max(1, round(chance.lognormvariate(middle, sigma))))
                for _ in range(int(parameters["inputs"]))
            )
            priority: Priority = "bulk" if chance.random() < parameters["bulk"] else "interactive"
            requests.append(
                Request(round(at_s, 6), tokens, f"model-{chance.randrange(int(parameters['models']))}", priority)
            )
        at_s += chance.expovariate(parameters["rate"] / parameters["burst"])
    return requests


def table(reports: dict[str, ReplayReport], plans: dict[str, ReplayPlan]) -> str:
    columns = [["", *_CELLS]]
    for name, report in reports.items():
        columns.append([name, *(cell(report, plans[name]) for cell in _CELLS.values())])
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(
            [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        ).rstrip()
        for first, *rest in rows
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest of the sorted `values` that is at least as large as `percent` % of them."""
    return values[min(len(values), max(1, math.ceil(percent / 100 * len(values)))) - 1]


def _ms(values_s: Sequence[float], percent: float) -> str:
    return f"{percentile(sorted(values_s), percent) * 1e3:.2f}"


def _busy(report: ReplayReport, plan: ReplayPlan) -> float:
    return report.device_s / (report.end_s * int(plan.workers) * int(plan.lanes))


_CELLS: dict[str, Callable[[ReplayReport, ReplayPlan], str]] = {
    "latency p50, ms": lambda report, plan: _ms(report.latency_s, 50),
    "latency p90, ms": lambda report, plan: _ms(report.latency_s, 90),
    "latency p99, ms": lambda report, plan: _ms(report.latency_s, 99),
    "longest, ms": lambda report, plan: _ms(report.latency_s, 100),
    "wait for the device p50, ms": lambda report, plan: _ms(report.wait_s, 50),
    "wait for the device p99, ms": lambda report, plan: _ms(report.wait_s, 99),
    "device time, s": lambda report, plan: f"{report.device_s:.3f}",
    "device busy, %": lambda report, plan: f"{100 * _busy(report, plan):.1f}",
    "batches": lambda report, plan: f"{report.batches}",
    "messages a batch": lambda report, plan: f"{report.items / report.batches:.2f}",
    "tokens a batch": lambda report, plan: f"{report.tokens / report.batches:.1f}",
    "tokenise calls": lambda report, plan: f"{report.calls}",
    "tokenising, s": lambda report, plan: f"{report.host_s:.3f}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "arrivals",
        help="poisson:name=number,... with the names rate (requests a second), seconds, "
        "burst (requests that arrive together), inputs (of a request), length (mean tokens of an input, log-normal), "
        "spread (sigma of the lengths), bulk (share of requests with this priority), models, seed",
    )
    parser.add_argument("--device", required=True, help=f"times of a batch: {', '.join(DEVICE)}")
    parser.add_argument("--host", default="", help=f"times of a worker, default {HOST_DEFAULT}")
    names = [limit.name for limit in fields(ReplayPlan)]
    parser.add_argument("--base", default="", help=f"settings of the first column: {', '.join(names)}")
    parser.add_argument("--what-if", action="append", default=[], help="settings of one more column; may be repeated")
    options = parser.parse_args()
    device, host = numbers(options.device, tuple(DEVICE)), numbers(f"{HOST_DEFAULT},{options.host}", tuple(HOST))
    machine = Machine(
        *(device.get(name, 0.0) / unit for name, unit in DEVICE.items()),
        *(host[name] / unit for name, unit in HOST.items()),
    )
    base = replace(plan_of(load(environ={}).settings), **numbers(options.base, names))
    plans = {"base": base, **{text: replace(base, **numbers(text, names)) for text in options.what_if}}
    requests = generate(options.arrivals)
    print(table({name: Replay(requests, plan, machine).run() for name, plan in plans.items()}, plans))


if __name__ == "__main__":
    main()
