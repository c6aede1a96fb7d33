"""The placement table of one lane, kept from look to look: heartbeats, backlog and the table before make the next one.

Demand is what every gateway can see, so that all compute the same: tokens that workers take in, and what waits in the
stream. What each model asks for is computed over arrays, and only models and workers of which something has changed are
looked at one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sie_contracts.errors import ErrorInfo
from sie_contracts.hosts import Holdings
from sie_contracts.models.layout import Layout
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.placement import USED, Replicas, replicas
from sie_contracts.wire.records import Placement
from sie_gateway.fleet.lanes import mean_rate

# a lane with work gets a fresh `at_s` this often: sidecars take an old table with work for a gateway that is gone
REFRESH_S = 5.0
MIN_SPAN_S = 5.0  # over which what waits counts as demand: a burst is no rate
FORGET_S = 3600.0  # without work, on no worker
UNKNOWN_LOAD_S = 10.0
UNKNOWN_COST = 32.0  # tokens of a message of a model that this gateway published nothing for
MAX_MODELS = 10_000  # of a lane that are remembered without a worker that has them; the longest unused goes first
SLICE_S = 0.001
SLICE_PAUSE_S = 0.0001  # enough for the event loop to take its turn, which waits 5 ms for one otherwise


@dataclass(frozen=True)
class ModelBacklog:
    """Messages of one model in the stream: messages, leased ones included, and the age of the oldest in seconds."""

    count: int
    oldest_s: float = 0.0


_NOTHING = ModelBacklog(0)


@dataclass(slots=True, eq=False)
class _PlannedWorker:
    """State of a worker by its last heartbeat.

    `statuses`: model, state and error of each of its statuses. `taking`: shape (2, models), float64, the index of each
    model in the layout and the tokens a second that are taken in for it.
    """

    beat: Heartbeat
    statuses: Sequence[tuple[str, str, ErrorInfo | None]]
    taking: NDArray[np.float64]
    rate: float
    arriving: float
    load_s: float


class Slices:
    """Calls of it pause a thread that computes for long, so that the event loop of its process takes its turn each
    SLICE_S.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._until_s = clock() + SLICE_S

    def __call__(self) -> None:
        if self._clock() >= self._until_s:
            time.sleep(SLICE_PAUSE_S)
            self._until_s = self._clock() + SLICE_S


class Planner:
    """The table of one lane as this gateway would write it. `step` may run in a thread, one call at a time, and
    nothing else is called meanwhile.
    """

    def __init__(self, adopt_after_s: float, pause: Callable[[], None] = lambda: None) -> None:
        """`pause` is called between parts of a long `step`."""
        self._adopt_after_s = adopt_after_s
        self._pause = pause
        self._layout = Layout(pause)
        self._workers: dict[str, _PlannedWorker] = {}
        self._table: Placement | None = None  # that the rows are those of
        self._scales: dict[str, Replicas] = {}
        self._lowering: set[str] = set()  # models of which fewer hosts would do
        self._raised_s: dict[str, float] = {}  # of models with more than one host
        self._counts = np.ones(1)  # by index: how many hosts a model is to have, 0 before that is known
        self._wanted_s: dict[str, float] = {}  # when work was last seen; the order is that of the last use
        self._resident_s: dict[str, float] = {}  # since when all hosts of a model have it
        self._moved: set[str] = set()  # models whose hosts, or what these have, are others than at the last look
        self._spare_s: float | None = None  # since when a worker loads nothing
        self._alone: set[str] = set()  # models whose hosts are all the workers that load nothing
        self._cost: dict[str, float] = {}
        self._noted: dict[str, tuple[int, int, int]] = {}  # since the last step: calls, messages and their tokens
        self._dropped = False  # whether a row went since the table was made
        self._hosting: tuple[Placement | None, frozenset[str]] = (None, frozenset())

    def note(self, published: Mapping[str, tuple[int, int, int]]) -> None:
        """Work was published, by model: calls, their messages, and the tokens of these together."""
        for model, (calls, messages, cost) in published.items():
            calls_before, count, tokens = self._noted.get(model, (0, 0, 0))
            self._noted[model] = calls_before + calls, count + messages, tokens + cost

    @property
    def models(self) -> Collection[str]:
        """All that had work within FORGET_S, and those that the table or a worker has."""
        return self._layout.rows.keys() | self._noted.keys()

    def step(
        self,
        table: Placement | None,
        beats: Sequence[Heartbeat],
        silent: Sequence[Heartbeat],
        backlog: Mapping[str, ModelBacklog],
        now_s: float,
    ) -> Placement | None:
        """The table to write, or None while the present one stands. `now_s`: the broker's time.

        `beats`: of the live workers. `silent`: the last ones of workers whose heartbeats are overdue; they stay hosts
        while no work of what they host waits past the bound, because lost heartbeats are cheaper than models that move
        for nothing.
        """
        if silent:
            beats = [*beats, *self._served(silent, table, backlog)]
        self._remember(table, backlog, now_s)
        if not beats:
            return None  # nobody to place on; who comes back finds the table as it was
        self._sync_workers(beats, now_s)
        self._forget_unused(now_s)
        if table is not self._table:
            self._sync_table(table, now_s)
        self._note_residency(now_s)
        demand = self._scale(backlog, now_s)
        changes = self._layout.settle(demand)
        self._moved |= changes.keys()
        # an empty table also says something: that nobody pulls what it does not name
        if table is None or changes or self._dropped:
            hosts = {model: row.before for model, row in self._layout.rows.items()}
        elif backlog and now_s - table.at_s >= REFRESH_S:
            hosts = table.hosts
        else:
            return None
        self._dropped = False
        self._table = Placement(now_s, hosts, dict(self._raised_s))
        return self._table

    # ---- what there is

    def _served(
        self, silent: Sequence[Heartbeat], table: Placement | None, backlog: Mapping[str, ModelBacklog]
    ) -> list[Heartbeat]:
        """The workers that host anything of which nothing waits past the bound."""
        hosts = table.hosts if table is not None else {}
        if self._hosting[0] is not table:
            self._hosting = table, frozenset(name for names in hosts.values() for name in names)
        late = {
            name
            for model, waiting in backlog.items()
            if waiting.oldest_s > self._adopt_after_s
            for name in hosts.get(model, ())
        }
        return [beat for beat in silent if beat.worker in self._hosting[1] and beat.worker not in late]

    def _remember(self, table: Placement | None, backlog: Mapping[str, ModelBacklog], now_s: float) -> None:
        if table is not None and table is not self._table:
            for model in table.hosts:  # another gateway, or this one before it was started again, knew it
                if model not in self._wanted_s:
                    self._touch(model, now_s)
        noted, self._noted = self._noted, {}
        for model, (calls, count, tokens) in noted.items():
            if not count:  # it is wanted without any work, which tells nothing of its cost
                continue
            mean, previous, weight = tokens / count, self._cost.get(model), 0.9**calls
            self._cost[model] = mean if previous is None else weight * previous + (1 - weight) * mean
        for model in [*backlog, *noted]:
            self._touch(model, now_s)

    def _touch(self, model: str, now_s: float) -> None:
        """A model is wanted now, or on a worker: it has a row."""
        self._wanted_s.pop(model, None)
        self._wanted_s[model] = now_s
        if model not in self._layout.rows:
            scale = self._scales.get(model)
            self._layout.set_model(model, scale.count if scale is not None else 1)
            self._grow()
            self._counts[self._layout.indices[model]] = scale.count if scale is not None else 0
            self._moved.add(model)

    def _sync_workers(self, beats: Sequence[Heartbeat], now_s: float) -> None:
        workers = self._workers
        changed = [beat for beat in beats if (worker := workers.get(beat.worker)) is None or worker.beat is not beat]
        for number, beat in enumerate(changed):
            if number % 8 == 0:
                self._pause()
            self._read(beat, now_s)
        if len(workers) > len(beats):
            for name in workers.keys() - {beat.worker for beat in beats}:
                del workers[name]
                self._moved |= self._layout.workers[name].models
                self._changed(self._layout.drop_worker(name), now_s)

    def _changed(self, models: Iterable[str], now_s: float) -> None:
        """Workers have these models now and had not, or the reverse."""
        for model in models:
            self._moved.add(model)
            if model in self._wanted_s or model in self._layout.having:
                self._touch(model, now_s)

    def _read(self, beat: Heartbeat, now_s: float) -> None:
        statuses_read = [(status.model, status.state, status.error) for status in beat.models]
        rates = [status.cost_rate for status in beat.models]
        worker = self._workers.get(beat.worker)
        if (
            worker is not None
            and worker.statuses == statuses_read
            and worker.taking.shape[1] == len(statuses_read)
            and worker.beat.slots == beat.slots
        ):
            taking = np.array([worker.taking[0], rates])  # the usual case: it has what it had
        else:
            statuses = {model_of(status): status for status in in_order(beat.models)}
            self._changed(self._layout.set_worker(beat.worker, holdings(statuses), beat.slots), now_s)
            served = [
                (model, entry.cost_rate) for model, entry in statuses.items() if entry.state in ("loaded", "loading")
            ]
            taking = np.array([[self._layout.indices[model] for model, _ in served], [rate for _, rate in served]])
        load_s = max((status.load_s for status in beat.models), default=0.0)
        self._workers[beat.worker] = _PlannedWorker(beat, statuses_read, taking, beat.rate, sum(rates), load_s)

    def _forget_unused(self, now_s: float) -> None:
        """Rows to drop: models unused for FORGET_S, or too many, that no worker has. The longest unused come first."""
        for _ in range(len(self._wanted_s)):
            model, wanted_s = next(iter(self._wanted_s.items()))
            if now_s - wanted_s <= FORGET_S and len(self._wanted_s) <= MAX_MODELS:
                return
            if model in self._layout.having:
                self._touch(model, now_s)
            else:
                self._discard(model)

    def _discard(self, model: str) -> None:
        memories: tuple[dict[str, Any], ...] = (
            self._wanted_s,
            self._scales,
            self._resident_s,
            self._cost,
            self._raised_s,
        )
        for memory in memories:
            memory.pop(model, None)
        self._lowering.discard(model)
        self._counts[self._layout.indices[model]] = 1
        self._layout.drop_model(model)
        self._dropped = True

    def _sync_table(self, table: Placement | None, now_s: float) -> None:
        """Another one than this planner made last, or none: go on from there."""
        hosts = table.hosts if table is not None else {}
        for number, (model, row) in enumerate(self._layout.rows.items()):
            if number % 64 == 0:
                self._pause()
            if row.before != (before := hosts.get(model, ())):
                self._layout.set_before(model, before)
                self._moved.add(model)
            replicas = self._replicas(model, table)
            if replicas is not None and replicas is not self._scales.get(model):
                self._set_scale(model, replicas)
        self._table = table

    def _replicas(self, model: str, table: Placement | None) -> Replicas | None:
        """How many hosts the model had: as this gateway remembers, unless another one has raised or
        lowered them since.
        """
        ours = self._scales.get(model)
        if table is None or model not in table.hosts:
            return ours
        count, raised_s = len(table.hosts[model]), table.raised_s.get(model, 0.0)
        if ours is None or (count > 1 and raised_s > ours.raised_s):
            return Replicas(count, raised_s)
        return Replicas(count, ours.raised_s) if count < ours.count else ours

    def _set_scale(self, model: str, scale: Replicas) -> None:
        self._scales[model] = scale
        if scale.below_s is not None:
            self._lowering.add(model)
        else:
            self._lowering.discard(model)
        if scale.count > 1:
            self._raised_s[model] = scale.raised_s
        else:
            self._raised_s.pop(model, None)
        self._layout.set_model(model, scale.count)
        self._counts[self._layout.indices[model]] = scale.count

    def _grow(self) -> None:
        if len(self._counts) < self._layout.size:
            self._counts = np.concatenate([self._counts, np.ones(self._layout.size - len(self._counts))])

    # ---- how many hosts

    def _note_residency(self, now_s: float) -> None:
        """Since when all hosts of a model have it, and another one could begin to load it: else it would only make
        others wait longer.
        """
        for model in self._moved:
            row = self._layout.rows.get(model)
            if row is None:
                self._resident_s.pop(model, None)
                continue
            hosts = [self._layout.workers[name] for name in row.before if name in self._layout.workers]
            if hosts and all(model in host.holdings.loaded for host in hosts):
                self._resident_s.setdefault(model, now_s)
            else:
                self._resident_s.pop(model, None)
        self._moved = set()
        layout, idle = self._layout, len(self._layout.workers) - len(self._layout.loading)
        if not idle:
            self._spare_s = None
        elif self._spare_s is None:
            self._spare_s = now_s
        alone: set[str] = set()
        if 0 < idle <= self._most_hosts():
            names = layout.workers.keys() - layout.loading
            alone = {model for model in layout.workers[min(names)].models if names.issubset(layout.rows[model].before)}
        for model in self._alone - alone:
            if model in self._resident_s:
                self._resident_s[model] = now_s
        self._alone = alone

    def _most_hosts(self) -> int:
        """Workers of one model, the leaving one included."""
        return 1 + int(self._counts.max(initial=1))

    def _resident(self, model: str) -> float | None:
        """Since when all hosts of the model have it and a worker is there that could be one more, or None."""
        since_s = self._resident_s.get(model)
        if since_s is None or self._spare_s is None or model in self._alone:
            return None
        return max(since_s, self._spare_s)

    def _scale(self, backlog: Mapping[str, ModelBacklog], now_s: float) -> NDArray[np.float64]:
        """Have each model get as many hosts as it asks for. Returns the demand, shape (size,), in workers' worth of
        time.
        """
        layout, workers = self._layout, self._workers.values()
        self._grow()
        rate = mean_rate(*np.array([(worker.rate, worker.arriving) for worker in workers]).T)
        models, rates = np.concatenate([worker.taking for worker in workers], axis=1)
        tokens_s = np.bincount(models.astype(np.intp), rates, layout.size)
        # served in order of arrival, what waits has come since the oldest came: also while nothing of it can run yet
        late: set[str] = set()
        for model, entry in backlog.items():
            arriving = entry.count * self._cost.get(model, UNKNOWN_COST) / max(entry.oldest_s, MIN_SPAN_S)
            index = layout.indices.get(model, 0)
            if arriving > tokens_s[index]:
                tokens_s[index] = arriving
            if entry.oldest_s > self._adopt_after_s:
                late.add(model)
        most, planned = len(workers), USED * rate
        needed = np.ones(layout.size)
        if planned > 0:
            with np.errstate(over="ignore"):
                needed = np.maximum(1, np.ceil(np.minimum(tokens_s / planned, most)))
        due = [*late, *self._lowering, *(layout.names[index] for index in np.flatnonzero(needed != self._counts))]
        load_s = max((worker.load_s for worker in workers), default=0.0) or UNKNOWN_LOAD_S
        for number, model in enumerate(dict.fromkeys(due)):
            if number % 16 == 0:
                self._pause()
            if model not in layout.rows:
                continue
            previous, since_s = self._scales.get(model), self._resident(model)
            waiting = backlog.get(model, _NOTHING)
            # a wait for a load asks for no host
            age_s = 0.0 if since_s is None else min(waiting.oldest_s, now_s - since_s)
            scale = replicas(
                previous,
                float(tokens_s[layout.indices[model]]),
                rate,
                age_s,
                since_s is not None,
                now_s,
                most=most,
                adopt_after_s=self._adopt_after_s,
                load_s=load_s,
            )
            if previous is not None and scale.count < previous.count:
                self._cut(model, scale.count)
            if scale != previous:
                self._set_scale(model, scale)
        tokens_s[0] = 0.0
        return tokens_s / rate if rate else np.zeros(layout.size)

    def _cut(self, model: str, count: int) -> None:
        """Take hosts away, first those that do not have the model."""
        row, workers = self._layout.rows[model], self._layout.workers
        hosts = sorted(row.before, key=lambda name: name not in workers or model not in workers[name].holdings.loaded)
        self._layout.set_before(model, tuple(hosts[:count]))


def model_of(status: ModelStatus) -> str:
    """The model whose queue a residency is served from: profiles with other weights share it."""
    return status.model.partition(":")[0]


def in_order(statuses: Sequence[ModelStatus]) -> Iterable[ModelStatus]:
    """With the loaded ones last, so that they stand for their model."""
    if not any(":" in status.model for status in statuses):
        return statuses
    return sorted(statuses, key=lambda status: (status.state == "loaded", status.state == "loading"))


def holdings(of_model: Mapping[str, ModelStatus]) -> Holdings:
    """Models that a worker has, by its statuses."""
    loaded, loading, refused = set(), set(), set()
    for model, status in of_model.items():
        if status.state == "loaded":
            loaded.add(model)
        elif status.state == "loading":
            loading.add(model)
        elif status.state == "failed" and status.error is not None and status.error.extras.get("error_class") == "OOM":
            refused.add(model)  # another worker may have the memory; of any other failure all fail alike
    return Holdings(frozenset(loaded), frozenset(loading), frozenset(refused))
