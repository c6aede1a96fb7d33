"""Who hosts which model of a lane: two pure functions of what workers tell, of the backlog and of the table before.

    demand, rate, age ──replicas──► hosts wanted per model ──place──► the table: model ──► workers

A model is a residency: what a worker loads as one. No clock, no I/O, no randomness: the gateways that compute from equal inputs write
equal tables.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

USED = 0.7  # of a worker's rate is planned with: the rest absorbs bursts
LOWER_AFTER_S = 60.0  # demand that went away for less comes back
HOT = 0.8  # planned use of a worker above which a model is moved off it
MOVE_GAIN = 0.1  # a move must leave the fuller of both workers better by this part of a worker
_LOAD_STEPS = 10  # workers whose planned use differs by less than a tenth count as equal

Table = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Replicas:
    """How many hosts a model is to have. `raised_s`: when it last got one more; `below_s`: since when fewer would do, or None."""

    count: int
    raised_s: float
    below_s: float | None = None


def replicas(
    prev: Replicas | None, demand: float, rate: float, age_s: float, all_resident: bool, now_s: float,
    *, most: int, adopt_after_s: float, load_s: float,
) -> Replicas:  # fmt: skip
    """How many hosts a model is to have.

    `demand`: tokens a second that come in for it. `rate`: tokens a second that one worker runs while it is busy, 0 while nobody knows.
    `age_s`: how long its oldest work waits. `all_resident`: whether every host has it loaded. `load_s`: what a load takes.

    `demand` over 0.7 of `rate`, at least 1 and at most `most`, at once. One more when work waits longer than `adopt_after_s` although all
    hosts have the model and the last raise was longer ago than a load. One fewer for each 60 s in which fewer would do.
    """
    planned = USED * rate
    needed = 1
    if planned > 0:
        needed = most if demand >= most * planned else max(1, math.ceil(demand / planned))
    if prev is None or needed > prev.count:
        return Replicas(needed, now_s)
    count = max(1, min(prev.count, most))
    late = age_s > adopt_after_s
    if late and all_resident and count < most and now_s - prev.raised_s > load_s:
        return Replicas(count + 1, now_s)
    if needed >= count or late:
        return Replicas(count, prev.raised_s)
    below_s = now_s if prev.below_s is None else prev.below_s
    if now_s - below_s >= LOWER_AFTER_S:
        return Replicas(count - 1, prev.raised_s, now_s)
    return Replicas(count, prev.raised_s, below_s)


@dataclass(frozen=True)
class Holdings:
    """The models of one live worker: what it has loaded, what it is loading, and what just did not fit there."""

    loaded: frozenset[str] = frozenset()
    loading: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()

    def has(self, model: str) -> bool:
        return model in self.loaded or model in self.loading


@dataclass
class _Worker:
    name: str
    holdings: Holdings
    slots: int
    use: float = 0.0
    models: set[str] = field(default_factory=set)

    @property
    def free(self) -> int:
        return self.slots - len(self.models)


class _Plan:
    """The table under construction, with what it would mean for each worker."""

    def __init__(self, wanted: Mapping[str, int], workers: Mapping[str, Holdings], demand: Mapping[str, float], slots: Mapping[str, int]):
        unlimited = len(wanted) + 1
        self.workers = {name: _Worker(name, workers[name], slots.get(name, 0) or unlimited) for name in sorted(workers)}
        self.wanted = wanted
        self.demand = demand
        self.hosts: dict[str, list[str]] = {}
        self.leaving: dict[str, str] = {}

    def has_loaded(self, model: str, name: str) -> bool:
        return model in self.workers[name].holdings.loaded

    def share(self, model: str) -> float:
        return self.demand.get(model, 0.0) / self.wanted[model]

    def add(self, model: str, name: str) -> None:
        self.hosts.setdefault(model, []).append(name)
        self.workers[name].models.add(model)
        self.workers[name].use += self.share(model)

    def drop(self, model: str, name: str) -> None:
        self.hosts[model].remove(name)
        self.workers[name].models.discard(model)
        self.workers[name].use -= self.share(model)

    def others(self, model: str) -> Iterable[_Worker]:
        taken = (*self.hosts.get(model, ()), self.leaving.get(model))
        return (worker for name, worker in self.workers.items() if name not in taken)

    def fill(self, model: str) -> None:
        """Give a model the hosts that it still lacks, the best first."""
        for _ in range(min(self.wanted[model], len(self.workers)) - len(self.hosts.get(model, ()))):
            self.add(model, min(self.others(model), key=lambda worker: self._rank(model, worker)).name)

    @staticmethod
    def _rank(model: str, worker: _Worker) -> tuple[bool, bool, int, bool, int, bytes]:
        """The least is the best: it did not refuse the model, has room for it, little to do, has it, has few others; then by chance."""
        resident = worker.holdings.has(model)
        full = worker.free <= 0 and not resident
        use = int(worker.use * _LOAD_STEPS + 1e-6)
        return (model in worker.holdings.refused, full, use, not resident, len(worker.models), _lot(model, worker.name))


def place(
    prev: Mapping[str, tuple[str, ...]], wanted: Mapping[str, int], workers: Mapping[str, Holdings], demand: Mapping[str, float],
    slots: Mapping[str, int],
) -> Table:  # fmt: skip
    """The hosts of each model of `wanted`: as many live workers as it asks for, or all of them.

    `prev`: the table before. `wanted`: hosts per model, at least 1. `workers`: the live ones. `demand`: of each model, in workers' worth of
    time (1.0: it keeps one worker busy); missing is 0. `slots`: how many models fit on a worker at once; 0 or missing is no bound.

    By falling demand a model keeps its live hosts, or, having none, takes workers that have it. The rest is filled by (room, planned use,
    residency, number of models, rendezvous hash). A model that is not loaded leaves a worker with more models than slots where another
    one has room. At most one model moves off a hot worker per call; the host that it leaves stays in the table, before the `wanted`
    others, until all of these have it loaded. Hosts that have the model come first. So a lost worker moves no model but its own, and equal
    inputs move nothing once no worker is hot. A table that asks for fewer hosts than it had is to be cut by the caller, who knows it.
    """
    if not workers:
        return {}
    plan = _Plan(wanted, workers, demand, slots)
    ranked = sorted(wanted, key=lambda model: (-demand.get(model, 0.0), model))
    for model in ranked:
        _keep(plan, model, prev.get(model, ()))
    for model in ranked:
        plan.fill(model)
    _relieve_full(plan, ranked)
    _relieve_hot(plan)
    table: Table = {}
    for model in sorted(plan.hosts):
        hosts = sorted(plan.hosts[model], key=lambda name: not plan.has_loaded(model, name))
        table[model] = (plan.leaving[model], *hosts) if model in plan.leaving else tuple(hosts)
    return table


def _keep(plan: _Plan, model: str, before: tuple[str, ...]) -> None:
    live = [name for name in before if name in plan.workers]
    able = [name for name in live if model not in plan.workers[name].holdings.refused]
    if len(able) < len(live) and any(model not in worker.holdings.refused for worker in plan.workers.values()):
        live = able
    kept = bool(live)
    if not live:
        having = [worker for worker in plan.workers.values() if worker.holdings.has(model)]
        live = [worker.name for worker in sorted(having, key=lambda worker: (model not in worker.holdings.loaded, worker.use))]
    count = plan.wanted[model]
    if kept and len(live) > count:
        ready = all(plan.has_loaded(model, name) for name in live[1 : count + 1])
        if plan.has_loaded(model, live[0]) and not ready:
            plan.leaving[model] = live[0]
        live = live[1:]
    for name in live[:count]:
        plan.add(model, name)


def _relieve_full(plan: _Plan, ranked: list[str]) -> None:
    """Move what is not loaded, the least wanted first, from workers with more models than slots to those with room."""
    room = sum(max(0, worker.free) for worker in plan.workers.values())
    for model in reversed(ranked):
        for name in list(plan.hosts[model]):
            worker = plan.workers[name]
            if room <= 0:
                return
            if worker.free >= 0 or worker.holdings.has(model):
                continue
            free = [other for other in plan.others(model) if other.free > 0 and model not in other.holdings.refused]
            if free:
                plan.drop(model, name)
                plan.add(model, min(free, key=lambda other: plan._rank(model, other)).name)
                room -= 1


def _relieve_hot(plan: _Plan) -> None:
    """Move one model off the worker with the most to do, if that helps."""
    hot = max(plan.workers.values(), key=lambda worker: worker.use)
    if hot.use <= HOT or hot.name in plan.leaving.values():
        return
    best: tuple[float, str, _Worker] | None = None
    for model in sorted(hot.models):
        if model in plan.leaving or not plan.share(model):
            continue
        for other in plan.others(model):
            if not other.holdings.has(model) and (other.free <= 0 or other.holdings.loading or model in other.holdings.refused):
                continue
            fuller = max(hot.use - plan.share(model), other.use + plan.share(model))
            if fuller <= hot.use - MOVE_GAIN and (best is None or fuller < best[0]):
                best = (fuller, model, other)
    if best is not None:
        _, model, other = best
        plan.drop(model, hot.name)
        plan.add(model, other.name)
        if model in hot.holdings.loaded and model not in other.holdings.loaded:
            plan.leaving[model] = hot.name


def _lot(model: str, worker: str) -> bytes:
    """Rendezvous hashing: each model ranks the workers in an order of its own, which a worker that comes or goes does not change."""
    return hashlib.blake2b(f"{model} {worker}".encode(), digest_size=8).digest()
