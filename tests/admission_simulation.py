"""A simulation of clients, the real Admission of gateways, and workers whose device is a clock, in virtual time. It
shows which requests a rule refuses, and whether the refusals are right.

    clients ──► Rule (Admission, or the rule before it) ──► queue ──► workers: a batch takes a + b x tokens ──► results
    ──► Rule

For a refused request, `true_end_s` computes when it would have been answered: after all work that was ahead of it and
all work of clients with an earlier promised turn, by the true times of the device, with later stalls. A refusal is
false if that answer would have come within the budget, with SPARE and a batch to spare.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from inprocess import settings_of

from sie_contracts.errors import QueueFull
from sie_contracts.models.costs import BatchTimes
from sie_contracts.wire import heartbeats, messages
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.messages import BatchNote, Ok, Stages, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.admission import Admission
from sie_gateway.admission.model_queue import ModelQueue
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.streams.backlog import Backlog
from sie_sidecar.batch import TIMES_OVER, Ask, Rate, fitting

LANE = Lane("_default", "_default", "default")
MODEL = "toy/one"
WAY_S = 0.001  # the time of a message, each way
COALESCE_S = 0.005  # an idle worker waits so long for a batch to fill
LATE_S = 0.25  # a worker still begins work that is late by so much
SPARE = 0.1  # a share of a budget
BEAT_S = 1.0
STALL_S, SLOWER = 6.0, 10.0
SEEN = 2  # slow batches after which a slow-down can be known, because one alone may be a stall
BATCHES = 2.0  # must fit into a budget: the batch that runs when a request comes, and its own


@dataclass(frozen=True)
class Case:
    """One cell of the matrix.

    `start`: "cold"; "tiny", one small request comes before; "stall", after a third of the time or of the requests
    nothing runs for 6 s; "slow", from then on the device takes ten times as long. `load`: "closed", each client sends a
    request after each answer; "open", requests come at ten times the capacity; "burst", each client sends one request.
    A refused client comes again after its Retry-After.
    """

    batch_s: float
    token_s: float
    clients: int
    budget_s: float
    start: str = "cold"
    load: str = "closed"
    tokens: int = 8
    workers: int = 1
    gateways: int = 1
    batch_cost: int = 4096
    batch_items: int = 64
    seconds: float = 30.0
    requests: int = 4000  # the run ends after so many at the latest
    seed: int = 1

    @property
    def slowest(self) -> float:
        return SLOWER if self.start == "slow" else 1.0

    def full_tokens(self, factor: float = 1.0) -> float:
        """Return the tokens of the largest batch of which BATCHES fit into the budget on a device that takes `factor`
        times as long. May be below 0.
        """
        by_time = (self.budget_s / BATCHES / factor - self.batch_s) / self.token_s
        return min(self.batch_cost, self.batch_items * self.tokens, by_time)

    @property
    def is_possible(self) -> bool:
        """Return True if a device under load can answer: a batch of one request ends within half of the budget."""
        return self.full_tokens(self.slowest) >= self.tokens

    def full_s(self, factor: float = 1.0) -> float:
        """Return the seconds that the largest such batch takes."""
        return factor * (self.batch_s + self.token_s * max(self.tokens, self.full_tokens(factor)))

    def capacity(self) -> float:
        """Return the requests a second that the workers can answer within the budget."""
        return self.workers * max(1.0, self.full_tokens() / self.tokens) / self.full_s()


@dataclass
class Try:
    at_s: float
    tokens: int
    deadline_s: float
    client: int
    is_return: bool
    end_s: float = 0.0
    outcome: str = ""  # answered, late, refused, shed
    would_s: float = math.inf  # for a refused request: the time that its answer would have taken
    retry_s: int = 0
    told_s: float = -math.inf  # for a returning request: when its Retry-After was sent


@dataclass
class Report:
    case: Case
    tries: list[Try] = field(default_factory=list)
    capacity: float = 0.0  # requests a second
    busy_s: float = 0.0
    seconds: float = 0.0
    phases: list[tuple[float, float]] = field(default_factory=list)  # the onsets
    stall: tuple[float, float] = (math.inf, math.inf)
    # from, until: a gateway could not know of the stall or the slow-down when these requests came
    struck: tuple[float, float] = (
        math.inf,
        math.inf,
    )
    begun_s: float = math.inf  # the begin of the stall or the slow-down
    # when a gateway can know of it: a stall after a usual batch, a slow-down after SEEN slow batches
    known_s: float = math.inf

    def is_onset(self, at_s: float) -> bool:
        return any(begin_s <= at_s < end_s for begin_s, end_s in self.phases)

    def of(self, outcome: str) -> list[Try]:
        return [attempt for attempt in self.tries if attempt.outcome == outcome]

    @property
    def false(self) -> int:
        """Return the number of false refusals: the answer would have been in time with SPARE and a batch to spare."""
        case = self.case
        spare_s = SPARE * case.budget_s + case.full_s()
        refusals = [
            attempt for attempt in self._refused() if attempt.would_s + spare_s <= attempt.deadline_s - attempt.at_s
        ]
        return sum(not self._is_in_stall(attempt) for attempt in refusals)

    def _refused(self) -> list[Try]:
        return self.of("refused") + self.of("shed")

    def _is_in_stall(self, attempt: Try) -> bool:
        """Return True if the device had stood still for the request's whole budget at the refusal. A gateway could not
        know that the stall ends in time.
        """
        return self.stall[0] + (attempt.deadline_s - attempt.at_s) <= attempt.end_s < self.stall[1]

    def late(self, *, onset: bool) -> tuple[int, int]:
        accepted = [
            attempt
            for attempt in self._accepted()
            if self.is_onset(attempt.at_s) == onset and not self.is_struck(attempt)
        ]
        return sum(attempt.outcome == "late" for attempt in accepted), len(accepted)

    def is_struck(self, attempt: Try) -> bool:
        """Return True if the request is late and came before a gateway could know of the stall or slow-down."""
        return attempt.outcome == "late" and self.struck[0] <= attempt.at_s <= self.struck[1]

    def lost(self) -> int:
        """Return the number of late requests that were struck, and of refusals in a stall that ended in time."""
        refused = [
            attempt
            for attempt in self._refused()
            if self._is_in_stall(attempt) and attempt.would_s <= attempt.deadline_s - attempt.at_s
        ]
        return sum(self.is_struck(attempt) for attempt in self._accepted()) + len(refused)

    def _accepted(self) -> list[Try]:
        return [attempt for attempt in self.tries if attempt.outcome in ("answered", "late", "shed")]

    def returns(self, *, foreseen: bool = True) -> tuple[int, int]:
        """Return how many returning requests were answered in time, and how many returned. Without `foreseen`, only
        those count that were refused before the stall or the slow-down could be known, and that it met.
        """
        attempts = [
            attempt
            for attempt in self.tries
            if attempt.is_return and attempt.outcome and self._is_foreseen(attempt) == foreseen
        ]
        return sum(attempt.outcome == "answered" for attempt in attempts), len(attempts)

    def _is_foreseen(self, attempt: Try) -> bool:
        return attempt.end_s < self.begun_s or attempt.told_s > self.known_s

    def goodput(self) -> float:
        """Return the share of answers in time in what the device can do, from the end of the first onset on."""
        begin_s = self.phases[0][1] if self.phases else 0.0
        done = sum(attempt.outcome == "answered" and begin_s <= attempt.end_s <= self.seconds for attempt in self.tries)
        return done / (self.capacity * (self.seconds - begin_s)) if self.seconds > begin_s else math.nan


class Device:
    """A worker. It forms its next batch from all waiting work when the one before ends."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.batches = 0
        self.running: tuple[float, list[Job]] | None = None
        self.rate = Rate()  # the rate in its heartbeats
        self.times = BatchTimes(TIMES_OVER)

    def take(self) -> None:
        world, case = self.world, self.world.case
        if self.running is not None:
            return
        batch: list[Job] = []
        tokens = 0
        for job in world.queue:
            if job.withdrawn or world.now_s > job.one.deadline_s + LATE_S:
                continue
            if len(batch) == case.batch_items or (batch and tokens + job.one.tokens > case.batch_cost):
                break
            batch.append(job)
            tokens += job.one.tokens
        asks = [Ask(job.one.tokens, job.one.deadline_s - world.now_s, case.budget_s) for job in batch]
        batch = batch[: fitting(asks, self.times)]
        tokens = sum(job.one.tokens for job in batch)
        last = batch[-1] if batch else None
        while world.queue and world.queue.popleft() is not last:
            pass
        if batch:
            self.batches += 1
            end_s, name = world.worked(world.now_s, case.batch_s + case.token_s * tokens), str(self.batches)
            self.running = end_s, batch
            self.rate.sent(world.now_s)
            seconds = end_s - world.now_s
            world.at(end_s, lambda: self.ran(batch, tokens, seconds, name))

    def ran(self, batch: list[Job], tokens: int, seconds: float, name: str) -> None:
        world = self.world
        world.see_slow(world.now_s - seconds)
        self.times.note(tokens, seconds)
        world.busy_s += seconds
        self.running = None
        self.rate.ended(tokens, world.now_s)
        note = BatchNote(name, len(batch), len(batch), tokens)
        for job in batch:
            result = WorkResult(
                job.name,
                0,
                self.name,
                (Ok({}, job.one.tokens),),
                stages=Stages(inference_ms=seconds * 1000),
                batch=note,
            )
            world.at(world.now_s + WAY_S, lambda job=job, result=result: world.answered(job, result))
        self.take()


@dataclass(eq=False)
class Job:
    one: Try
    permits: Any = None
    gateway: int = 0
    name: str = ""
    withdrawn: bool = False
    then: Callable[[Try], None] = print


class Before(Admission):
    """A simpler rule for comparison, without turns. It divides all work that is ahead, and a full batch of every
    worker, by the reported rates of the workers, or by the rates of full batches at the times of the last ones.
    """

    def check(
        self, key: str, lane: Lane, priority: Any, residency: str, cost: int, budget_s: float, client: Any = bytes
    ) -> None:
        queue = self._queue(lane, priority, residency)
        ahead = queue.window.ahead(key, cost)
        self._refresh(queue, self.clock())
        if not ahead or not queue.hosts:
            return
        rate = 0.0
        for host in queue.hosts:
            full = min(host.batch_cost, host.credit_items * host.batch_cost / host.credit_cost * cost)
            full_s = self._batch_s(queue, full)
            rate += max(host.rate, full / full_s) if full_s else 0.0
        wait_s = (ahead + max(cost, sum(host.batch_cost for host in queue.hosts))) / rate if rate else 0.0
        if 1.2 * wait_s > budget_s:
            raise QueueFull("", retry_after_s=max(1, min(5, math.ceil(wait_s - budget_s))))

    def _batch_s(self, queue: ModelQueue, full: float) -> float:
        batches = queue.batches
        if not batches._n:
            return 0.0
        line = batches.line()
        if line is None:
            return batches._y / batches._n * full / max(full, batches._x / batches._n)
        return line[0] + line[1] * full

    def refuse_late(self, queue: ModelQueue) -> None:
        pass


class World:
    """One run of a case."""

    def __init__(self, case: Case, rule: Callable[..., Any] = Admission) -> None:
        self.case = case
        self.random = random.Random(case.seed)
        random.seed(case.seed)  # for the jitter in Retry-After
        self.now_s = 100.0
        self.busy_s = 0.0
        self._events: list[tuple[float, int, Callable[[], Any]]] = []
        self._count = 0
        self.queue: deque[Job] = deque()
        self.waiting: list[dict[Job, None]] = [{} for _ in range(case.gateways)]
        self.entered: dict[Job, None] = {}
        self.entered_tokens = 0
        self.stops: list[tuple[float, float, float]] = []  # from, until, factor of slowness: infinite for a stall
        self.report = Report(case)
        self.slow_batches = 0
        settings = settings_of(SIE_HEARTBEAT_TIMEOUT_MS="100000000")
        self.gateways = []
        for number in range(case.gateways):
            fleet = Fleet(Mock(), settings, self.time)
            backlog = Backlog(Mock(), (), self.time)
            admission = rule(settings, Mock(), fleet, backlog, Mock(), clock=self.time)
            self.gateways.append((admission, fleet))
            if case.gateways > 1:
                self.at(self.now_s + number * WAY_S, lambda gateway=admission: self.announce(gateway))
        self.devices = [Device(self, f"w{number}") for number in range(case.workers)]
        self.open = [0] * case.gateways

    def time(self) -> float:
        return self.now_s

    def at(self, due_s: float, action: Callable[[], Any]) -> None:
        self._count += 1
        heapq.heappush(self._events, (due_s, self._count, action))

    def worked(self, begin_s: float, work_s: float) -> float:
        """Return when work of `work_s` is done that begins at `begin_s`."""
        now_s = begin_s
        for from_s, until_s, factor in self.stops:
            if until_s <= now_s:
                continue
            if now_s < from_s:
                if now_s + work_s <= from_s:
                    return now_s + work_s
                work_s -= from_s - now_s
                now_s = from_s
            if factor == math.inf:
                now_s = until_s
            elif now_s + work_s * factor <= until_s:
                return now_s + work_s * factor
            else:
                work_s -= (until_s - now_s) / factor
                now_s = until_s
        return now_s + work_s

    def see_slow(self, begun_s: float) -> None:
        """Count a batch that began at `begun_s` and has ended, if it was slow."""
        report = self.report
        if report.case.start == "slow" and begun_s >= report.begun_s:
            self.slow_batches += 1
            if self.slow_batches == SEEN:
                report.known_s = self.now_s + WAY_S

    def announce(self, admission: Admission) -> None:
        """Deliver the beat of a gateway to the others, one way later."""
        beat = heartbeats.decode_gateway(messages.encode(admission.peers.beat()))
        for peer, _ in self.gateways:
            self.at(self.now_s + WAY_S, lambda receiver=peer: receiver.peers.note(beat))
        self.at(self.now_s + admission.peers.pause_s(), lambda: self.announce(admission))

    def true_end_s(self, tokens: int) -> float:
        """Return when a request that enters now would be answered, after all queued work and all promised turns."""
        running = [
            job.one.tokens
            for device in self.devices
            if device.running
            for job in device.running[1]
            if not job.withdrawn
        ]
        promised = max(self.promised(admission) for admission, _ in self.gateways)
        ahead, count = (
            self.entered_tokens - sum(running) + promised,
            len(self.entered) - len(running) + promised / self.case.tokens,
        )
        return self.end_s(ahead + tokens, count + 1)

    def shed_end_s(self, job: Job) -> float:
        """Return when a request that was let in would be answered."""
        running = {id(running_job) for device in self.devices if device.running for running_job in device.running[1]}
        ahead = [
            queued_job.one.tokens
            for queued_job in itertools.takewhile(lambda candidate: candidate is not job, self.entered)
            if id(queued_job) not in running
        ]
        return self.end_s(sum(ahead) + job.one.tokens, len(ahead) + 1)

    def end_s(self, tokens: float, count: float) -> float:
        """Return when so many tokens and requests are done after the running batches."""
        case = self.case
        batches = math.ceil(
            max(tokens / max(case.tokens, min(case.batch_cost, case.full_tokens())), count / case.batch_items)
        )
        begun_s = min(device.running[0] if device.running else self.now_s for device in self.devices)
        return self.worked(begun_s, (batches * case.batch_s + tokens * case.token_s) / case.workers) + 2 * WAY_S

    def promised(self, admission: Any) -> float:
        return sum(queue.turns.promised(self.now_s) for queue in admission._queues.values())

    # ---- clients

    def ask(
        self,
        client: int,
        *,
        is_return: bool = False,
        token: bytes = b"",
        told_s: float = -math.inf,
        then: Callable[[Try], None],
    ) -> None:
        case = self.case
        tokens = (
            case.tokens if case.tokens < 16 else max(3, int(self.random.lognormvariate(math.log(case.tokens), 0.6)))
        )
        attempt = Try(self.now_s, tokens, self.now_s + case.budget_s, client, is_return, told_s=told_s)
        self.report.tries.append(attempt)
        gateway = self.random.randrange(case.gateways)
        admission = self.gateways[gateway][0]
        try:
            admission.check("key", LANE, "interactive", MODEL, tokens, case.budget_s, lambda: token)
            number = str(len(self.report.tries))
            permits = admission.admit(
                "key", LANE, "interactive", MODEL, [tokens], 100, case.budget_s, lambda: token, number
            )
        except QueueFull as error:
            attempt.outcome, attempt.end_s, attempt.retry_s = "refused", self.now_s, error.retry_after_s
            attempt.would_s = self.true_end_s(tokens) - self.now_s
            then(attempt)
            return
        job = Job(attempt, permits, gateway, number)
        self.entered[job] = None
        self.entered_tokens += tokens

        def refuse(error: QueueFull) -> None:
            attempt.outcome, attempt.end_s, attempt.retry_s = "shed", self.now_s, error.retry_after_s
            attempt.would_s = self.shed_end_s(job) - attempt.at_s
            self.at(self.now_s, lambda: self.close(job, then))

        permits.on_refused = refuse
        self.waiting[gateway][job] = None
        if permits.pop():
            self.publish(job)
        else:
            permits.wake = SimpleNamespace(set=lambda: self.publish(job))  # type: ignore[assignment]
        self.open[gateway] += 1
        job.then = then
        self.at(attempt.deadline_s, lambda: self.timeout(job))

    def publish(self, job: Job) -> None:
        self.waiting[job.gateway].pop(job, None)

        def arrive() -> None:
            self.queue.append(job)
            self.at(self.now_s + COALESCE_S, self.take)

        self.at(self.now_s + WAY_S, arrive)

    def take(self) -> None:
        for device in self.devices:
            device.take()

    def answered(self, job: Job, result: WorkResult) -> None:
        if job.withdrawn:
            self.gateways[job.gateway][0].answered_late(result)
            return
        job.permits.result_arrived(result)
        if not job.one.outcome:
            job.one.outcome, job.one.end_s = "answered", self.now_s
            self.close(job, job.then)

    def timeout(self, job: Job) -> None:
        if not job.one.outcome:
            job.one.outcome, job.one.end_s = "late", self.now_s
            self.close(job, job.then)

    def close(self, job: Job, then: Callable[[Try], None]) -> None:
        if job.withdrawn:
            return
        job.withdrawn = True
        del self.entered[job]
        self.entered_tokens -= job.one.tokens
        self.waiting[job.gateway].pop(job, None)
        self.open[job.gateway] -= 1
        self.gateways[job.gateway][0].end(job.permits)
        then(job.one)

    # ---- the run

    def run(self) -> Report:
        case, report = self.case, self.report
        start_s = self.now_s
        end_s = start_s + case.seconds
        full_s = case.full_s()
        report.capacity = case.capacity()
        onset_s = max(2 * case.budget_s, 10 * full_s, 1.0)
        begin_s = start_s
        if case.start == "tiny":
            self.at(start_s, lambda: self.ask(0, then=lambda attempt: None))
            begin_s = start_s + 2.0 + 2 * (case.batch_s + case.token_s * case.tokens)
        report.phases = [(start_s, begin_s + onset_s)]
        self.beat()
        over = False

        def loop(client: int) -> None:
            def then(attempt: Try) -> None:
                if self.now_s >= end_s or over:
                    return
                if attempt.outcome in ("refused", "shed"):
                    ready_s, told_s = self.now_s + attempt.retry_s + self.random.uniform(0.001, 0.02), self.now_s
                    self.at(
                        ready_s,
                        lambda: self.ask(client, is_return=True, token=b"%d" % client, told_s=told_s, then=then),
                    )
                elif case.load == "closed":
                    self.at(
                        self.now_s + self.random.uniform(0.0, 0.002),
                        lambda: self.ask(client, token=b"%d" % client, then=then),
                    )

            self.ask(client, token=b"%d" % client, then=then)

        if case.load == "open":
            rate = 10 * report.capacity
            number = 0

            def arrive() -> None:
                nonlocal number
                if self.now_s < end_s and not over:
                    number += 1
                    loop(number)
                    self.at(self.now_s + self.random.expovariate(rate), arrive)

            self.at(begin_s, arrive)
        else:
            for client in range(case.clients):
                self.at(begin_s + self.random.uniform(0, 0.002), lambda client=client: loop(client))
        while self._events:
            due_s, _, action = heapq.heappop(self._events)
            if (
                case.start in ("stall", "slow")
                and not self.stops
                and (len(report.tries) >= case.requests / 3 or due_s >= start_s + case.seconds / 3)
            ):
                if case.start == "stall":
                    self.stops = [(self.now_s, self.now_s + STALL_S, math.inf)]
                    report.stall = self.now_s, self.now_s + STALL_S
                    report.phases.append((self.now_s - case.budget_s, self.now_s + STALL_S + onset_s))
                else:
                    self.stops = [(self.now_s, math.inf, SLOWER)]
                    report.phases.append((self.now_s - case.budget_s, self.now_s + onset_s + 10 * SLOWER * full_s))
                report.struck = self.now_s - case.budget_s, self.now_s + full_s
                report.begun_s = self.now_s
                if case.start == "stall":
                    report.known_s = self.now_s + full_s
            if due_s > end_s + 2 * case.budget_s:
                break
            self.now_s = max(self.now_s, due_s)
            if len(report.tries) >= case.requests and not over:
                over, end_s = True, min(end_s, self.now_s)
            action()
            if self.now_s >= end_s and not any(self.open):
                break
        report.seconds = min(end_s, self.now_s)
        report.busy_s = self.busy_s
        return report

    def beat(self) -> None:
        case = self.case
        for admission, fleet in self.gateways:
            for device in self.devices:
                fleet.note(
                    Heartbeat(
                        device.name,
                        "_default",
                        "_default",
                        "default",
                        True,
                        "0",
                        models=(ModelStatus(MODEL, "loaded"),),
                        rate=device.rate.tokens_per_s,
                        credit_cost=3 * case.batch_cost,
                        credit_items=3 * case.batch_items,
                        batch_cost=case.batch_cost,
                        pipeline=1,
                    )
                )
            admission.sweep()
        self.at(self.now_s + BEAT_S, self.beat)
