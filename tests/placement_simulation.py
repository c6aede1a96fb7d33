"""A lane of workers under virtual time, which compares the placement table with "any worker takes any model".

    Poisson arrivals, Zipf models ──► stream (first in, first out) ──► workers: one device, `slots` models, loads beside
    passes ──► latency

With the table, the code of the product decides: `Planner` computes from heartbeats, which come late and get lost, and
`role` says what a worker pulls. Without it every worker pulls everything. Both evict the least recently used model;
with the table, models that are placed elsewhere are evicted first. A model with work in hand is never evicted. The work
of a dead worker comes back after the ack wait.

    .venv/bin/python tests/placement_simulation.py     all cases, at full length, as a Markdown table
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.records import Placement
from sie_gateway.fleet.placement import EVERY_S
from sie_gateway.fleet.planner import ModelBacklog, Planner
from sie_sidecar.intake import AHEAD_AGAIN_S, role

TOKENS = 100  # tokens of each request
PASS_S = 0.05  # device time of each request; there are no batches, so 20 workers answer 400 a second
HELD = 24  # the most requests that a worker has in hand: two batches of SIE_BATCHER_MAX_BATCH_REQUESTS
BEAT_S = 5.0
BEAT_TIMEOUT_S = 15.0
FORGOTTEN_S = 150.0
ACK_WAIT_S = 10.0
ADOPT_AFTER_S = 2.0
RATE_OVER_S = 10.0


@dataclass(frozen=True)
class Case:
    """One run. `load` is the part of all workers' time that the traffic needs. Figures are of arrivals after
    `warm_s`.
    """

    name: str
    load: float
    slots: int = 14
    models: int = 200
    workers: int = 20
    zipf: float = 1.1
    load_s: float = 5.0
    # without a cold start, loads are quick in the first half of the warm-up, so that both rules begin with loaded
    # models
    cold: bool = False
    killed: int = 0
    # the number of restarts, one each `restart_every_s`: a worker drains, and is back after `restart_s` without models
    restarted: int = 0
    restart_every_s: float = 0.05
    restart_s: float = 10.0
    known: bool = False  # from the start all models are in the table and loaded
    gap_s: float = 0.0  # the least time between two plans for models without a host
    beat_loss: float = 0.0
    warm_s: float = 60.0
    measured_s: float = 60.0
    seed: int = 1


@dataclass(frozen=True)
class Figures:
    loads_per_min: float
    p50_s: float
    p99_s: float
    answered: int
    unanswered: int


@dataclass
class _Worker:
    name: str
    alive: bool = True
    leaving: bool = False
    resident: dict[int, float] = field(default_factory=dict)  # model -> time of its last use
    loading: int | None = None
    wants: deque[int] = field(default_factory=deque)  # loads that wait for their turn or for room
    ready: deque[tuple[float, int]] = field(default_factory=deque)  # requests of resident models
    parked: dict[int, deque[tuple[float, int]]] = field(default_factory=dict)  # requests of models that are not loaded
    running: tuple[float, int] | None = None
    held: dict[int, int] = field(default_factory=dict)
    in_hand: int = 0
    ahead_s: dict[int, float] = field(default_factory=dict)
    rate: dict[int, tuple[float, float]] = field(default_factory=dict)  # tokens a second, and the time of this value

    def came_in(self, model: int, now_s: float) -> None:
        self.rate[model] = (self.cost_rate(model, now_s) + TOKENS / RATE_OVER_S, now_s)

    def cost_rate(self, model: int, now_s: float) -> float:
        rate, at_s = self.rate.get(model, (0.0, now_s))
        return rate * float(np.exp((at_s - now_s) / RATE_OVER_S))


class Simulation:
    """One case with the table or without it. `run` returns its figures."""

    def __init__(self, case: Case, *, table: bool) -> None:
        self._case = case
        self._random = np.random.default_rng(case.seed)
        self._events: list[tuple[float, int, str, object]] = []
        self._numbers = count()
        self._now_s = 0.0
        self._end_s = case.warm_s + case.measured_s
        self._workers = [_Worker(f"w{number:02}") for number in range(case.workers)]
        self._names = [f"m{number:03}" for number in range(case.models)]
        self._index = {name: number for number, name in enumerate(self._names)}
        self._waiting: dict[int, deque[float]] = {}  # by model: times of arrival
        self._leased: dict[int, dict[float, int]] = {model: {} for model in range(case.models)}
        self._by_table = table
        self._looks_soon = False
        self._planner = Planner(ADOPT_AFTER_S)
        self._table: Placement | None = None
        self._placed: dict[str, set[int]] = {worker.name: set() for worker in self._workers}  # by the table
        self._beats: dict[str, tuple[float, Heartbeat]] = {}
        self._loads = 0
        self._latencies: list[float] = []
        self._unanswered = 0

    def run(self) -> Figures:
        case = self._case
        arrivals = self._arrivals()
        self._at(*next(arrivals))
        for number, worker in enumerate(self._workers):
            self._send_beat(worker)
            self._at(BEAT_S * number / case.workers, "beat", worker)
        if self._by_table:
            if case.known:
                self._begin_placed()
            self._at(0.0, "look", None)
        for number, worker in enumerate(self._workers[: case.restarted]):
            self._at(case.warm_s + number * case.restart_every_s, "leave", worker)
        for worker in self._workers[: case.killed]:
            self._at(case.warm_s + 1.0, "kill", worker)
        while self._events and self._events[0][0] < self._end_s:
            self._now_s, _, kind, argument = heapq.heappop(self._events)
            if kind == "arrival":
                self._arrive(argument)  # type: ignore[arg-type]
                self._at(*next(arrivals))
            else:
                getattr(self, f"_{kind}")(argument)
        open_s = [arrived_s for waiting in self._waiting.values() for arrived_s in waiting]
        open_s += [arrived_s for leased in self._leased.values() for arrived_s in leased]
        late = [self._end_s - arrived_s for arrived_s in open_s if arrived_s >= case.warm_s]
        times = np.array(self._latencies + late)
        p50_s, p99_s = np.quantile(times, (0.5, 0.99))
        return Figures(self._loads * 60 / case.measured_s, float(p50_s), float(p99_s), len(self._latencies), len(late))

    def _at(self, at_s: float, kind: str, argument: object) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), kind, argument))

    def _arrivals(self) -> Iterator[tuple[float, str, int]]:
        case = self._case
        weights = np.arange(1, case.models + 1) ** -case.zipf
        rate = case.load * case.workers / PASS_S
        at_s = 0.0
        while True:
            gaps = self._random.exponential(1 / rate, 4096)
            models = self._random.choice(case.models, 4096, p=weights / weights.sum())
            for gap, model in zip(gaps, models, strict=True):
                at_s += gap
                yield at_s, "arrival", int(model)

    # the stream

    def _arrive(self, model: int) -> None:
        self._waiting.setdefault(model, deque()).append(self._now_s)
        if self._by_table:
            name = self._names[model]
            self._planner.note({name: (1, 1, TOKENS)})
            if self._table is None or not self._has_host(name):
                self._plan_soon()
            hosts = self._table.hosts.get(name, ()) if self._table else ()
            able = [self._workers[int(host[1:])] for host in hosts]
        else:
            able = self._workers
        open_for = [worker for worker in able if self._may_pull(worker, model)]
        if open_for:
            self._pull(open_for[int(self._random.integers(len(open_for)))], model)

    def _role(self, worker: _Worker, model: int) -> str:
        if not self._by_table:
            return "pull"
        hosts = self._table.hosts.get(self._names[model], ()) if self._table else ()
        return role(
            hosts, worker.name, loaded=model in worker.resident, held=worker.held.get(model, 0) > 0, waits=False
        )

    def _may_pull(self, worker: _Worker, model: int) -> bool:
        return (
            worker.alive
            and not worker.leaving
            and worker.in_hand < HELD
            and self._role(worker, model) in ("pull", "probe")
        )

    def _pull(self, worker: _Worker, model: int) -> None:
        arrived_s = self._waiting[model].popleft()
        if not self._waiting[model]:
            del self._waiting[model]
        self._leased[model][arrived_s] = 1
        worker.in_hand += 1
        worker.held[model] = worker.held.get(model, 0) + 1
        worker.came_in(model, self._now_s)
        if model in worker.resident:
            worker.ready.append((arrived_s, model))
            self._start(worker)
        else:
            worker.parked.setdefault(model, deque()).append((arrived_s, model))
            self._want(worker, model)

    def _pull_more(self, worker: _Worker) -> None:
        """Pull the oldest work that this worker may have, while it has room."""
        while worker.alive and worker.in_hand < HELD:
            # with the table only a host pulls, and a worker hosts a dozen of 10,000 models
            some = self._placed[worker.name] & self._waiting.keys() if self._by_table else self._waiting
            models = [model for model in some if self._may_pull(worker, model)]
            if not models:
                return
            self._pull(worker, min(models, key=lambda model: self._waiting[model][0]))

    # the worker

    def _want(self, worker: _Worker, model: int) -> None:
        if model != worker.loading and model not in worker.wants and model not in worker.resident:
            worker.wants.append(model)
            self._load(worker)

    def _load(self, worker: _Worker) -> None:
        if worker.loading is not None or not worker.wants or not worker.alive:
            return
        if len(worker.resident) >= self._case.slots:
            idle = [model for model in worker.resident if not worker.held.get(model)]
            if not idle:
                return  # each answer tries again
            del worker.resident[min(idle, key=lambda model: (self._is_placed(worker, model), worker.resident[model]))]
        worker.loading = worker.wants.popleft()
        self._loads += self._now_s >= self._case.warm_s
        quick = not self._case.cold and self._now_s < self._case.warm_s / 2
        self._at(self._now_s + (0.05 if quick else self._case.load_s), "loaded", (worker, worker.loading))
        self._send_beat(worker)

    def _is_placed(self, worker: _Worker, model: int) -> bool:
        return self._table is not None and worker.name in self._table.hosts.get(self._names[model], ())

    def _loaded(self, pair: tuple[_Worker, int]) -> None:
        worker, model = pair
        if not worker.alive or worker.loading != model:
            return
        worker.loading = None
        worker.resident[model] = self._now_s
        worker.ready.extend(worker.parked.pop(model, ()))
        self._send_beat(worker)
        self._start(worker)
        self._load(worker)
        self._pull_more(worker)

    def _start(self, worker: _Worker) -> None:
        if worker.running is None and worker.ready:
            worker.running = worker.ready.popleft()
            self._at(self._now_s + PASS_S, "answer", (worker, worker.running))

    def _answer(self, pair: tuple[_Worker, tuple[float, int]]) -> None:
        worker, (arrived_s, model) = pair
        if not worker.alive:
            return
        del self._leased[model][arrived_s]
        if arrived_s >= self._case.warm_s:
            self._latencies.append(self._now_s - arrived_s)
        worker.running = None
        worker.in_hand -= 1
        worker.held[model] -= 1
        worker.resident[model] = self._now_s
        self._start(worker)
        self._load(worker)
        self._pull_more(worker)

    def _leave(self, worker: _Worker) -> None:
        """Let a worker finish the work that it has begun, and give back work that waits for a load."""
        worker.leaving = True
        self._beats.pop(worker.name, None)
        back = [request for parked in worker.parked.values() for request in parked]
        for _, model in back:
            worker.in_hand -= 1
            worker.held[model] -= 1
        worker.parked.clear()
        worker.wants.clear()
        worker.loading = None
        self._again(back)
        self._at(self._now_s + self._case.restart_s, "return", worker)

    def _return(self, worker: _Worker) -> None:
        worker.leaving = False
        worker.resident.clear()
        worker.ahead_s.clear()
        self._send_beat(worker)

    def _kill(self, worker: _Worker) -> None:
        worker.alive = False
        lost = [*worker.ready, *(request for parked in worker.parked.values() for request in parked)]
        lost += [worker.running] if worker.running else []
        self._at(self._now_s + ACK_WAIT_S, "again", lost)

    def _again(self, lost: list[tuple[float, int]]) -> None:
        for arrived_s, model in lost:
            del self._leased[model][arrived_s]
            self._waiting.setdefault(model, deque()).appendleft(arrived_s)
        for worker in self._workers:
            self._pull_more(worker)

    def _beat(self, worker: _Worker) -> None:
        if worker.alive:
            self._send_beat(worker)
            self._at(self._now_s + BEAT_S, "beat", worker)

    def _send_beat(self, worker: _Worker) -> None:
        if not self._by_table or worker.leaving or self._random.random() < self._case.beat_loss:
            return
        statuses = [
            ModelStatus(
                self._names[model], "loaded", load_s=self._case.load_s, cost_rate=worker.cost_rate(model, self._now_s)
            )
            for model in worker.resident
        ]
        if worker.loading is not None:
            statuses.append(ModelStatus(self._names[worker.loading], "loading"))
        beat = Heartbeat(
            worker.name,
            "_default",
            "l4",
            "default",
            True,
            "",
            models=tuple(statuses),
            slots=self._case.slots,
            rate=TOKENS / PASS_S,
        )
        self._beats[worker.name] = (self._now_s, beat)

    # the gateway

    def _look(self, _: object) -> None:
        self._plan()
        self._at(self._now_s + EVERY_S, "look", None)

    def _begin_placed(self) -> None:
        for name in self._names:
            self._planner.note({name: (1, 1, TOKENS)})
        self._plan()
        assert self._table is not None
        for name, hosts in self._table.hosts.items():
            for host in hosts:
                self._workers[int(host[1:])].resident[self._index[name]] = 0.0
        for worker in self._workers:
            self._send_beat(worker)

    def _has_host(self, name: str) -> bool:
        """Return True if the table names a worker for the model that has not left."""
        hosts = self._table.hosts.get(name, ()) if self._table else ()
        return bool(hosts) and (not self._case.restarted or any(host in self._beats for host in hosts))

    def _plan_soon(self) -> None:
        if not self._case.gap_s:
            self._plan()
        elif not self._looks_soon:
            self._looks_soon = True
            self._at(self._now_s + self._case.gap_s, "plan", None)

    def _plan(self, _: object = None) -> None:
        self._looks_soon = False
        now_s = self._now_s
        live = [beat for seen_s, beat in self._beats.values() if now_s - seen_s < BEAT_TIMEOUT_S]
        silent = [beat for seen_s, beat in self._beats.values() if BEAT_TIMEOUT_S <= now_s - seen_s < FORGOTTEN_S]
        backlog: dict[str, ModelBacklog] = {}
        for model in {*self._waiting, *(model for model, leased in self._leased.items() if leased)}:
            waiting, leased = self._waiting.get(model, ()), self._leased[model]
            oldest_s = min([*leased, *([waiting[0]] if waiting else [])])
            backlog[self._names[model]] = ModelBacklog(len(waiting) + len(leased), now_s - oldest_s)
        placement = self._planner.step(self._table, live, silent, backlog, now_s)
        if placement is None:
            return
        before, self._table = self._table, placement
        self._note_placed(before.hosts if before else {}, placement.hosts)
        for name, hosts in placement.hosts.items():
            if len(hosts) > 1 or before is None or before.hosts.get(name) != hosts:
                for host in hosts:
                    self._load_ahead(self._workers[int(host[1:])], self._index[name])
        if self._waiting:
            for worker in self._workers:
                self._pull_more(worker)

    def _note_placed(self, before: Mapping[str, tuple[str, ...]], after: Mapping[str, tuple[str, ...]]) -> None:
        for name in before.keys() | after.keys():
            old, new = before.get(name, ()), after.get(name, ())
            if old is not new and old != new:
                for host in old:
                    self._placed[host].discard(self._index[name])
                for host in new:
                    self._placed[host].add(self._index[name])

    def _load_ahead(self, worker: _Worker, model: int) -> None:
        if not worker.alive or worker.leaving or self._role(worker, model) != "ahead":
            return
        if self._now_s - worker.ahead_s.get(model, -AHEAD_AGAIN_S) >= AHEAD_AGAIN_S:
            worker.ahead_s[model] = self._now_s
            self._want(worker, model)


def cases(*, measured_s: float) -> list[Case]:
    """Return the six cases in which the table must be better."""
    return [
        Case("36 % load", 0.36, measured_s=measured_s),
        Case("56 % load", 0.56, measured_s=measured_s),
        Case("56 %, cold start", 0.56, cold=True, warm_s=0.0, measured_s=measured_s),
        Case("56 %, three workers killed", 0.56, killed=3, measured_s=measured_s),
        Case("56 %, 40 % of heartbeats lost", 0.56, beat_loss=0.4, measured_s=measured_s),
        Case("56 %, 160 slots for 200 models", 0.56, slots=8, measured_s=measured_s),
    ]


def large(*, measured_s: float, load: float, restarted: int) -> Case:
    """Return a case of 1,000 workers and 10,000 models, with a rolling restart of workers in the measured time."""
    return Case(
        f"{load:.0%}, 1,000 workers, 10,000 models, {restarted} restarted",
        load,
        models=10_000,
        workers=1000,
        known=True,
        gap_s=0.02,
        warm_s=20.0,
        measured_s=measured_s,
        restarted=restarted,
        restart_every_s=0.8 * measured_s / max(1, restarted),
        restart_s=5.0,
    )


def main() -> None:
    print("| case | loads/min, table | loads/min, any | p50, table | p50, any | p99, table | p99, any |")
    print("|---|---|---|---|---|---|---|")
    for case in cases(measured_s=300.0):
        ours, theirs = Simulation(case, table=True).run(), Simulation(case, table=False).run()
        row = [f"{ours.loads_per_min:.1f}", f"{theirs.loads_per_min:.0f}"]
        row += [f"{time_s:.2f} s" for time_s in (ours.p50_s, theirs.p50_s, ours.p99_s, theirs.p99_s)]
        print(f"| {case.name} | {' | '.join(row)} |", flush=True)
    print(
        "\n| case, with the table | loads/min | p50 | p99 | processor time of a simulated second "
        "|\n|---|---|---|---|---|"
    )
    runs = ((0.03, 0, 60.0), (0.03, 1000, 60.0), (0.36, 0, 60.0), (0.36, 1000, 60.0), (0.36, 1000, 300.0))
    for load, restarted, measured_s in runs:
        case, before_s = large(measured_s=measured_s, load=load, restarted=restarted), time.process_time()
        result = Simulation(case, table=True).run()
        took_s = (time.process_time() - before_s) / (case.warm_s + case.measured_s)
        figures = f"{result.loads_per_min:.0f} | {result.p50_s:.2f} s | {result.p99_s:.2f} s | {took_s:.2f} s"
        print(f"| {case.name}, {measured_s:.0f} s | {figures} |", flush=True)


if __name__ == "__main__":
    main()
