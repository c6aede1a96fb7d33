"""The placement table of each lane: any gateway computes it, the first to write a change wins, the others read what it wrote.

    heartbeats, backlog, table ──Planner.step, each 0.5 s or at once for a cold model──► changed table ──compare-and-set──► sidecars

Demand is what every gateway can see, so that all compute the same: tokens that workers take in, and what waits in the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sie_contracts import messages, topology
from sie_contracts.broker import Broker, BrokerError, Entry, KeyValue, Write, WrongRevision
from sie_contracts.messages import PRIORITIES, Heartbeat, ModelStatus, Placement, WorkItem
from sie_contracts.placement import Holdings, Replicas, place, replicas
from sie_contracts.runtime.failpoints import failpoint
from sie_contracts.runtime.process import Stop, Trouble
from sie_contracts.topology import Lane
from sie_gateway.backlog import Backlog
from sie_gateway.fleet import Fleet, worker_rate

EVERY_S = 0.5
COLD_GAP_S = 0.02  # between two looks for cold models: a burst of them is placed together
REFRESH_S = 5.0  # a lane with work gets a fresh `at_s` this often: sidecars take an old table with work for a gateway that is gone
LEAST_SPAN_S = 5.0  # over which what waits counts as demand: a burst is no rate
FORGET_S = 3600.0  # without work, on no worker
UNKNOWN_LOAD_S = 10.0
UNKNOWN_COST = 32.0  # tokens of a message of a model that this gateway published nothing for
UNHEARD_S = 15.0  # a gateway that starts waits this long for a first heartbeat of each host before it places elsewhere
MOST_MODELS = 10_000  # of a lane that are remembered; the longest unused goes first
MOST_ASKED = 32
_SUBJECTS = (topology.work_subject, topology.slot_subject)
_logger = logging.getLogger("sie.gateway.placement")


@dataclass(frozen=True)
class Waiting:
    """What the stream holds of one model: messages, leased ones included, and the age of the oldest in seconds."""

    count: int
    oldest_s: float = 0.0


class Planner:
    """The table of one lane as this gateway would write it: a pure function of its inputs and of the demand seen before."""

    def __init__(self, adopt_after_s: float) -> None:
        self._adopt_after_s = adopt_after_s
        self._scales: dict[str, Replicas] = {}
        self._wanted_s: dict[str, float] = {}  # when work was last seen; the order is that of the last use
        self._resident_s: dict[str, float] = {}  # since when all hosts of a model have it
        self._cost: dict[str, float] = {}
        self._fresh: set[str] = set()  # published since the last step

    def note(self, model: str, messages: int, cost: int, now_s: float) -> None:
        """Work of `model` is being published: so many messages of so many tokens together."""
        mean = cost / max(1, messages)
        known = self._cost.get(model)
        self._cost[model] = mean if known is None else 0.9 * known + 0.1 * mean
        self._touch(model, now_s)
        self._fresh.add(model)

    @property
    def models(self) -> Sequence[str]:
        """All that had work within FORGET_S."""
        return list(self._wanted_s)

    def _touch(self, model: str, now_s: float) -> None:
        self._wanted_s.pop(model, None)
        self._wanted_s[model] = now_s
        while len(self._wanted_s) > MOST_MODELS:
            self._forget(next(iter(self._wanted_s)))

    def _forget(self, model: str) -> None:
        memories: tuple[dict[str, Any], ...] = (self._wanted_s, self._scales, self._resident_s, self._cost)
        for memory in memories:
            memory.pop(model, None)
        self._fresh.discard(model)

    def step(
        self, table: Placement | None, beats: Sequence[Heartbeat], silent: Sequence[Heartbeat], backlog: Mapping[str, Waiting], now_s: float
    ) -> Placement | None:
        """The table to write, or None while the present one stands. `now_s`: the broker's time.

        `beats`: of the live workers. `silent`: the last ones of workers whose heartbeats are overdue; they stay hosts while no work of what
        they host waits past the bound, because lost heartbeats are cheaper than models that move for nothing.
        """
        before = dict(table.hosts) if table else {}
        beats = [*beats, *(beat for beat in silent if self._is_served(beat.worker, before, backlog))]
        standing = dict(before)
        statuses = {beat.worker: {_model_of(status): status for status in _by_state(beat.models)} for beat in beats}
        workers = {name: _holdings(of_model) for name, of_model in statuses.items()}
        present = {model for holdings in workers.values() for model in holdings.loaded | holdings.loading}
        self._remember(before, present, backlog, now_s)
        if not workers:
            return None  # nobody to place on; who comes back finds the table as it was
        rate = worker_rate(beats)
        load_s = max((status.load_s for of_model in statuses.values() for status in of_model.values()), default=0.0) or UNKNOWN_LOAD_S
        models = sorted(present | self._wanted_s.keys())
        wanted, raised, demand = {}, {}, {}
        for model in models:
            waiting = backlog.get(model, Waiting(0))
            served = sum(of_model[model].cost_rate for of_model in statuses.values() if model in of_model)
            # served in order of arrival, what waits has come since the oldest came: also while nothing of it can run yet
            arriving = waiting.count * self._cost.get(model, UNKNOWN_COST) / max(waiting.oldest_s, LEAST_SPAN_S)
            tokens_s = max(served, arriving)
            resident = _all_have(model, before, workers) and _is_spare(model, before, workers)
            since_s = self._resident_s.setdefault(model, now_s) if resident else self._resident_s.pop(model, now_s)
            known = self._known(model, table)
            scale = replicas(
                known, tokens_s, rate, min(waiting.oldest_s, now_s - since_s), resident, now_s,  # a wait for a load asks for no host
                most=len(workers), adopt_after_s=self._adopt_after_s, load_s=load_s,
            )  # fmt: skip
            if known is not None and scale.count < known.count and model in before:
                hosts = sorted(before[model], key=lambda name: name not in workers or model not in workers[name].loaded)
                before[model] = tuple(hosts[: scale.count])
            self._scales[model] = scale
            wanted[model], demand[model] = scale.count, tokens_s / rate if rate else 0.0
            if scale.count > 1:
                raised[model] = scale.raised_s
        slots = {beat.worker: beat.slots for beat in beats}
        placed = place(before, wanted, workers, demand, slots)
        # an empty table also says something: that nobody pulls what it does not name
        is_due = table is None or placed != standing or (bool(backlog) and now_s - table.at_s >= REFRESH_S)
        return Placement(now_s, placed, raised) if is_due else None

    def _is_served(self, worker: str, hosts: Mapping[str, tuple[str, ...]], backlog: Mapping[str, Waiting]) -> bool:
        """Whether this worker hosts anything, and nothing of that waits past the bound."""
        ages_s = [backlog[model].oldest_s if model in backlog else 0.0 for model, names in hosts.items() if worker in names]
        return bool(ages_s) and max(ages_s) <= self._adopt_after_s

    def _remember(self, before: Mapping[str, object], present: set[str], backlog: Mapping[str, Waiting], now_s: float) -> None:
        for model in before:
            self._wanted_s.setdefault(model, now_s)  # another gateway, or this one before it was started again, knew it
        for model in [*present, *backlog, *self._fresh]:
            self._touch(model, now_s)
        self._fresh.clear()
        for model in [model for model, wanted_s in self._wanted_s.items() if now_s - wanted_s > FORGET_S]:
            self._forget(model)

    def _known(self, model: str, table: Placement | None) -> Replicas | None:
        """How many hosts the model had: as this gateway remembers, unless another one has raised or lowered them since."""
        ours = self._scales.get(model)
        if table is None or model not in table.hosts:
            return ours
        count, raised_s = len(table.hosts[model]), table.raised_s.get(model, 0.0)
        if ours is None or (count > 1 and raised_s > ours.raised_s):
            return Replicas(count, raised_s)
        return Replicas(count, ours.raised_s) if count < ours.count else ours


def _model_of(status: ModelStatus) -> str:
    """The model whose queue a residency is served from: profiles with other weights share it."""
    return status.model.partition(":")[0]


def _by_state(statuses: Sequence[ModelStatus]) -> list[ModelStatus]:
    """With the loaded ones last, so that they stand for their model."""
    return sorted(statuses, key=lambda status: (status.state == "loaded", status.state == "loading"))


def _holdings(of_model: Mapping[str, ModelStatus]) -> Holdings:
    loaded, loading, refused = set(), set(), set()
    for model, status in of_model.items():
        if status.state == "loaded":
            loaded.add(model)
        elif status.state == "loading":
            loading.add(model)
        elif status.state == "failed" and status.error is not None and status.error.extras.get("error_class") == "OOM":
            refused.add(model)  # another worker may have the memory; of any other failure all fail alike
    return Holdings(frozenset(loaded), frozenset(loading), frozenset(refused))


def _is_spare(model: str, before: Mapping[str, tuple[str, ...]], workers: Mapping[str, Holdings]) -> bool:
    """Whether one more host could begin to load the model: else it would only make others wait longer for their first."""
    return any(not holdings.loading for name, holdings in workers.items() if name not in before.get(model, ()))


def _all_have(model: str, before: Mapping[str, tuple[str, ...]], workers: Mapping[str, Holdings]) -> bool:
    hosts = [workers[name] for name in before.get(model, ()) if name in workers]
    return bool(hosts) and all(model in holdings.loaded for holdings in hosts)


def _by_lane(beats: Sequence[Heartbeat]) -> dict[Lane, list[Heartbeat]]:
    found: dict[Lane, list[Heartbeat]] = {}
    for beat in beats:
        found.setdefault(Lane(beat.pool, beat.machine_profile, beat.bundle), []).append(beat)
    return found


def _unheard(lane: Lane, table: Placement, heard: Collection[str]) -> list[Heartbeat]:
    """Of hosts that this gateway has not heard of, what the table says of them."""
    models: dict[str, list[ModelStatus]] = {}
    for model, hosts in table.hosts.items():
        for worker in hosts:
            if worker not in heard:
                models.setdefault(worker, []).append(ModelStatus(model, "loaded"))
    return [
        Heartbeat(worker, lane.pool, lane.machine_profile, lane.bundle, ready=True, version="", models=tuple(hosted))
        for worker, hosted in models.items()
    ]


class Placer:
    """Keeps the tables of all lanes that have a worker or work. `run` belongs to one task; `note` may be called by any."""

    def __init__(
        self, broker: Broker, adopt_after_s: float, fleet: Fleet,
        waiting: Callable[[Lane, Sequence[str]], Awaitable[Mapping[str, Waiting]]], now_s: Callable[[], float],
    ) -> None:  # fmt: skip
        """`waiting(lane, models)`: what waits, by model. `now_s`: the broker's time."""
        self._broker = broker
        self._adopt_after_s = adopt_after_s
        self._fleet = fleet
        self._waiting = waiting
        self._now_s = now_s
        self._bucket: KeyValue | None = None
        self._kept = ("file", 1)
        self._first_s: float | None = None
        self._hosts: frozenset[str] = frozenset()  # workers that may host, as of the last look
        self._tables: dict[str, tuple[int, Placement]] = {}
        self._planners: dict[Lane, Planner] = {}
        self._cold = asyncio.Event()
        self.serves: Callable[[str], bool] = lambda pool: True  # whether a pool is there

    async def start(self, *, storage: str, replicas: int) -> None:
        """Open the bucket, making it if it is not there, and learn what it holds. May be called again. Raises BrokerError."""
        self._kept = (storage, replicas)
        bucket = await self._broker.key_value(topology.PLACEMENT_BUCKET, storage=storage, replicas=replicas)
        if self._bucket is None:
            for entry in await bucket.entries():
                await self._on_entry(entry)
            await bucket.watch(self._on_entry)
        self._bucket = bucket

    async def _on_entry(self, entry: Entry) -> None:
        known = self._tables.get(entry.key)
        if entry.value is None:
            self._tables.pop(entry.key, None)
        elif known is None or entry.revision != known[0]:
            with contextlib.suppress(msgspec.DecodeError):  # then it is written anew: its revision is not known here, and read again
                self._tables[entry.key] = (entry.revision, messages.decode_placement(entry.value))

    def table(self, lane: Lane) -> Placement | None:
        known = self._tables.get(topology.lane_key(lane))
        return known[1] if known else None

    def forget(self, pool: str) -> None:
        """The pool is there no more."""
        for lane in [lane for lane in self._planners if lane.pool == pool]:
            del self._planners[lane]

    def note(self, lane: Lane, items: Sequence[WorkItem]) -> None:
        """Work of one model is being published. Without a live host it is placed at once."""
        model = items[0].model
        self._planner(lane).note(model, len(items), sum(item.cost for item in items), self._now_s())
        table = self.table(lane)
        hosts = table.hosts.get(model, ()) if table else ()
        if self._hosts and self._hosts.isdisjoint(hosts):
            self._cold.set()

    def _planner(self, lane: Lane) -> Planner:
        planner = self._planners.get(lane)
        if planner is None:
            planner = self._planners[lane] = Planner(self._adopt_after_s)
        return planner

    async def run(self, stop: Stop) -> None:
        """Until `stop`: look at all lanes each EVERY_S, and at once when a model without a host gets work."""
        trouble = Trouble(_logger, "the placement tables stand still")
        while not await stop.wait_for(COLD_GAP_S) and not await stop.wait_woken(self._cold, EVERY_S):
            try:
                if trouble.lasting:  # the bucket may have been lost with its broker
                    await self.start(storage=self._kept[0], replicas=self._kept[1])
                await self.step()
                trouble.passed()
            except BrokerError as error:
                trouble.met(error)

    async def step(self) -> None:
        """One look at every lane. Raises BrokerError."""
        workers = self._fleet.workers()
        live = _by_lane([beat for beat, is_healthy in workers if is_healthy])
        silent = _by_lane([beat for beat, is_healthy in workers if not is_healthy and beat.ready and not beat.leaving])
        heard = {beat.worker for beat, _ in workers}
        if self._first_s is None:
            self._first_s = self._now_s()
        self._hosts = frozenset(beat.worker for beats in (*live.values(), *silent.values()) for beat in beats)
        for lane in [lane for lane in live.keys() | self._planners.keys() if self.serves(lane.pool)]:
            planner, of_lane = self._planner(lane), live.get(lane, [])
            table = self.table(lane)
            if table is not None and self._now_s() - self._first_s < UNHEARD_S:
                unheard = _unheard(lane, table, heard)
                silent.setdefault(lane, []).extend(unheard)
                self._hosts |= {beat.worker for beat in unheard}
            backlog = await self._waiting(lane, list({*planner.models, *(table.hosts if table else ())}))
            placement = planner.step(table, of_lane, silent.get(lane, []), backlog, self._now_s())
            if placement is not None:
                await self._write(lane, placement)
            elif not of_lane and not planner.models:
                del self._planners[lane]

    async def _write(self, lane: Lane, placement: Placement) -> None:
        """Write a changed table unless another gateway was first; then its table is read, and the next look goes on from there."""
        assert self._bucket is not None
        revision = self._tables[topology.lane_key(lane)][0] if topology.lane_key(lane) in self._tables else 0
        failpoint("gateway.before_placement")
        try:
            revision = await self._bucket.write([Write(topology.lane_key(lane), messages.encode(placement), revision)])
        except WrongRevision:
            entry = await self._bucket.get(topology.lane_key(lane))
            if entry is None:
                self._tables.pop(topology.lane_key(lane), None)
            else:
                await self._on_entry(entry)
            return
        failpoint("gateway.placement_written")
        self._tables[topology.lane_key(lane)] = (revision, placement)


class Ages:
    """What waits of each model, and how long the oldest has: counts from the shared backlog, ages from the oldest message itself.

    Ages are asked for where work was there at two looks in a row, of MOST_ASKED subjects a look, those first that waited longest for it.
    """

    def __init__(self, broker: Broker, backlog: Backlog, now_s: Callable[[], float]) -> None:
        self._broker = broker
        self._backlog = backlog
        self._now_s = now_s
        self._looks: dict[str, int] = {}  # subject -> looks since its age was asked for
        self._ages_s: dict[str, float] = {}

    async def of(self, lane: Lane, models: Sequence[str]) -> Mapping[str, Waiting]:
        """By model, without those of which nothing waits. Raises BrokerError."""
        await self._backlog.fresh(lane.pool, EVERY_S / 2)
        counts = {model: [self._backlog.of_model(lane, priority, model) or 0 for priority in PRIORITIES] for model in models}
        busy = {model: found for model, found in counts.items() if any(found)}
        subjects = {
            of(lane, priority, model): model
            for model, found in busy.items() for priority, count in zip(PRIORITIES, found, strict=True) if count for of in _SUBJECTS
        }  # fmt: skip
        prefix = topology.lane_filter(lane).removesuffix(">")
        for gone in [subject for subject in self._looks if subject.startswith(prefix) and subject not in subjects]:
            del self._looks[gone]
            self._ages_s.pop(gone, None)
        due = sorted((subject for subject in subjects if subject in self._looks), key=lambda subject: -self._looks[subject])[:MOST_ASKED]
        for subject in subjects:
            self._looks[subject] = self._looks.get(subject, 0) + 1
        stream = topology.stream_name(lane.pool)
        questions = (self._broker.first_stored(stream, subject=subject) for subject in due)
        for subject, first in zip(due, await asyncio.gather(*questions, return_exceptions=True), strict=True):  # none outlasts this
            if isinstance(first, BaseException):
                raise first
            self._looks[subject] = 0
            self._ages_s[subject] = max(0.0, self._now_s() - first.sent_s) if first is not None else 0.0
        oldest_s: dict[str, float] = {}
        for subject, model in subjects.items():
            oldest_s[model] = max(oldest_s.get(model, 0.0), self._ages_s.get(subject, 0.0))
        return {model: Waiting(sum(found), oldest_s[model]) for model, found in busy.items()}
