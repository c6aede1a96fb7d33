"""Planner of the placement table of one lane (pool, machine profile and bundle): which workers (hosts) should load each
model. Each step computes a new table from the heartbeats, the backlog and the last table.

The demand for a model is computed from the tokens per second that workers accept and from the messages in the stream;
all gateways can see both. A waiting message counts as the mean tokens of a message that this gateway has measured for
the model, or as UNKNOWN_COST. The planner computes the demand for all models with arrays. Loops visit only changed
models and workers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sie_contracts.errors import ErrorInfo
from sie_contracts.hosts import Holdings
from sie_contracts.models.layout import Layout
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.placement import USED, Replicas, replicas
from sie_contracts.wire.records import Placement
from sie_gateway.fleet.lanes import mean_rate

# If a lane has work but its table does not change, the planner writes the table again after this number of seconds,
# with a new time `at_s`: a sidecar whose table is old assumes that no gateway is alive.
REFRESH_S = 5.0
# The rate of arrival is the waiting tokens divided by the age of the oldest message. The age counts as at least this
# number of seconds, so that a burst does not count as a high rate.
MIN_SPAN_S = 5.0
FORGET_S = 3600.0  # seconds without work after which the planner drops a model that no worker has loaded
UNKNOWN_LOAD_S = 10.0
UNKNOWN_COST = 32.0  # tokens assumed per message, for a model whose messages this gateway has not published
# largest number of models of a lane; above it, the planner drops models that no worker has loaded, longest unused first
MAX_MODELS = 10_000
SLICE_S = 0.001
# length in seconds of each pause of the planner's thread; during it, the event loop gets the interpreter lock at once,
# without the wait for Python's switch interval
SLICE_PAUSE_S = 0.0001


@dataclass(frozen=True)
class ModelBacklog:
    """Number of messages of one model in the stream, leased ones included, and the oldest one's age in seconds."""

    count: int
    oldest_s: float = 0.0


_NOTHING = ModelBacklog(0)


@dataclass(slots=True, eq=False)
class _PlannedWorker:
    """State of a worker according to its last heartbeat.

    `statuses`: (model, state, error) of each reported model. `taking`: float64 [2, models]. Row 0 has the index of each
    model in the lane's arrays (`layout`), row 1 the tokens per second that the worker accepts for this model.
    """

    beat: Heartbeat
    statuses: Sequence[tuple[str, str, ErrorInfo | None]]
    taking: NDArray[np.float64]
    rate: float
    arriving: float
    load_s: float


class Slices:
    """Callable that pauses a long computation in a thread, at most every SLICE_S seconds, to let the event loop run."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._until_s = clock() + SLICE_S

    def __call__(self) -> None:
        if self._clock() >= self._until_s:
            time.sleep(SLICE_PAUSE_S)
            self._until_s = self._clock() + SLICE_S


class Planner:
    """Planner of one lane. Its layout (`models.layout`) assigns models to hosts. `step` may run in a thread. Callers
    must not call two methods at the same time.
    """

    def __init__(self, adopt_after_s: float, pause: Callable[[], None] = lambda: None) -> None:
        """`pause` is called between parts of a long `step`."""
        self._adopt_after_s = adopt_after_s
        self._pause = pause
        self._layout = Layout(pause)
        self._workers: dict[str, _PlannedWorker] = {}
        # table of the last step: computed by this planner, or written by another planner and copied into `_layout`
        self._table: Placement | None = None
        self._scales: dict[str, Replicas] = {}
        self._lowering: set[str] = set()  # models with more hosts than they need
        # model with several hosts -> time of the last increase of their number
        self._raised_s: dict[str, float] = {}
        self._counts = np.ones(1)  # index of a model in the layout -> number of hosts that it needs; 0 while unknown
        self._wanted_s: dict[str, float] = {}  # model -> time of its last work, the oldest first
        self._resident_s: dict[str, float] = {}  # model -> time since which all its hosts have it loaded
        self._moved: set[str] = set()  # models whose hosts, or whose state at a host, changed since the last step
        # time since which at least one worker has no load in progress; None if every worker is loading a model
        self._spare_s: float | None = None
        # models whose hosts include every worker without a load in progress: no other worker can load these models now
        self._alone: set[str] = set()
        self._cost: dict[str, float] = {}  # model -> mean tokens of a message
        # model -> (calls of the Placer's `note` and `want`, messages, tokens) since the last step
        self._noted: dict[str, tuple[int, int, int]] = {}
        self._dropped = False  # true if a model or a host was dropped from the layout after the last table was computed
        self._hosting: tuple[Placement | None, frozenset[str]] = (None, frozenset())

    def note(self, published: Mapping[str, tuple[int, int, int]]) -> None:
        """Record published work. `published`: model -> (calls that reported work, messages, tokens)."""
        for model, (calls, messages, cost) in published.items():
            calls_before, count, tokens = self._noted.get(model, (0, 0, 0))
            self._noted[model] = calls_before + calls, count + messages, tokens + cost

    @property
    def models(self) -> Collection[str]:
        """Return the models in the table, on a worker, or with work in the last FORGET_S seconds."""
        return self._layout.rows.keys() | self._noted.keys()

    def step(
        self,
        table: Placement | None,
        beats: Sequence[Heartbeat],
        silent: Sequence[Heartbeat],
        backlog: Mapping[str, ModelBacklog],
        now_s: float,
    ) -> Placement | None:
        """Return the table to write; None if the present table need not change. `now_s`: the broker's time.

        `beats`: heartbeats of the live workers. `silent`: last heartbeats of workers whose heartbeats are overdue. A
        silent worker loses its models only if messages for them wait longer than `adopt_after_s`: the broker may have
        lost only heartbeats, and an unnecessary move of models costs more than this wait.
        """
        if silent:
            beats = [*beats, *self._served(silent, table, backlog)]
        self._remember(table, backlog, now_s)
        if not beats:
            return None  # no worker is live: the table stays, so that a worker that returns keeps its models
        self._sync_workers(beats, now_s)
        self._forget_unused(now_s)
        if table is not self._table:
            self._sync_table(table)
        self._note_residency(now_s)
        demand = self._scale(backlog, now_s)
        changes = self._layout.settle(demand)
        self._moved |= changes.keys()
        # an empty table is written too, because sidecars without a table pull the work of all models
        if table is None or changes or self._dropped:
            hosts = {model: row.before for model, row in self._layout.rows.items()}
        elif backlog and now_s - table.at_s >= REFRESH_S:
            hosts = table.hosts
        else:
            return None
        self._dropped = False
        self._table = Placement(now_s, hosts, dict(self._raised_s))
        return self._table

    def _served(
        self, silent: Sequence[Heartbeat], table: Placement | None, backlog: Mapping[str, ModelBacklog]
    ) -> list[Heartbeat]:
        """Return the heartbeats of the silent hosts that keep their models. A silent host keeps its models if the
        oldest message of each of them has waited for at most `adopt_after_s` seconds.
        """
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
            # the planner does not know when a model of another planner's table was last used: assume now
            for model in table.hosts:
                if model not in self._wanted_s:
                    self._touch(model, now_s)
        noted, self._noted = self._noted, {}
        for model, (calls, count, tokens) in noted.items():
            if not count:  # `Placer.want` requested a host for the model, and reported no messages
                continue
            mean, previous, weight = tokens / count, self._cost.get(model), 0.9**calls
            self._cost[model] = mean if previous is None else weight * previous + (1 - weight) * mean
        for model in [*backlog, *noted]:
            self._touch(model, now_s)

    def _touch(self, model: str, now_s: float) -> None:
        """Record that a model has work now, or that a worker has loaded it. Add a row to the layout for a new model."""
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
        """Record models that workers have loaded or unloaded."""
        for model in models:
            self._moved.add(model)
            if model in self._wanted_s or model in self._layout.having:
                self._touch(model, now_s)

    def _read(self, beat: Heartbeat, now_s: float) -> None:
        ordered = in_order(beat.models)  # the models in the columns of `worker.taking` have this order too
        statuses_read = [(status.model, status.state, status.error) for status in ordered]
        rates = [status.cost_rate for status in ordered]
        worker = self._workers.get(beat.worker)
        if (
            worker is not None
            and worker.statuses == statuses_read
            and worker.taking.shape[1] == len(statuses_read)
            and worker.beat.slots == beat.slots
        ):
            # the usual case: the worker reports the same models and states as in its last heartbeat, with other rates
            taking = np.array([worker.taking[0], rates])
        else:
            statuses = {model_of(status): status for status in ordered}
            self._changed(self._layout.set_worker(beat.worker, holdings(statuses), beat.slots), now_s)
            accepted = dict.fromkeys(statuses, 0.0)  # model -> tokens per second that the worker accepts for it
            for status in ordered:
                accepted[model_of(status)] += status.cost_rate
            served = [
                (model, accepted[model]) for model, entry in statuses.items() if entry.state in ("loaded", "loading")
            ]
            taking = np.array([[self._layout.indices[model] for model, _ in served], [rate for _, rate in served]])
        load_s = max((status.load_s for status in beat.models), default=0.0)
        self._workers[beat.worker] = _PlannedWorker(beat, statuses_read, taking, beat.rate, sum(rates), load_s)

    def _forget_unused(self, now_s: float) -> None:
        """Drop models that no worker has loaded and that had no work for FORGET_S. Above MAX_MODELS models, drop the
        longest unused model even earlier.
        """
        for _ in range(len(self._wanted_s)):
            model, wanted_s = next(iter(self._wanted_s.items()))
            if now_s - wanted_s <= FORGET_S and len(self._wanted_s) <= MAX_MODELS:
                return
            if model in self._layout.having:
                self._touch(model, now_s)
            else:
                self._discard(model)

    def _discard(self, model: str) -> None:
        self._wanted_s.pop(model, None)
        self._scales.pop(model, None)
        self._resident_s.pop(model, None)
        self._cost.pop(model, None)
        self._raised_s.pop(model, None)
        self._lowering.discard(model)
        self._counts[self._layout.indices[model]] = 1
        self._layout.drop_model(model)
        self._dropped = True

    def _sync_table(self, table: Placement | None) -> None:
        """Copy the hosts of another planner's table into the layout. If the table is None, models have no hosts."""
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
        """Return the number of hosts of a model; None if it is unknown. Another gateway may have written `table`: the
        number of hosts in the table replaces this planner's number if the table's number is lower, or was raised later.
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

    def _note_residency(self, now_s: float) -> None:
        """Update `_resident_s` for the models in `_moved`: the time since which all hosts of the model have it loaded.
        Also update `_spare_s`: the time since which at least one worker has no load in progress. If every worker is
        loading a model, one more host would only delay these loads.
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
        # A model can be on all idle workers (without a load in progress) only if it has at least as many hosts.
        # The + 1 is for a worker that leaves the lane: it may have the model, but is not counted as a host.
        if 0 < idle <= 1 + int(self._counts.max(initial=1)):
            names = layout.workers.keys() - layout.loading
            alone = {model for model in layout.workers[min(names)].models if names.issubset(layout.rows[model].before)}
        for model in self._alone - alone:
            if model in self._resident_s:
                self._resident_s[model] = now_s
        self._alone = alone

    def _resident(self, model: str) -> float | None:
        """Return the time since which two conditions hold: all hosts of the model have it loaded, and one more worker
        can load it. Return None if one of the conditions does not hold now.
        """
        since_s = self._resident_s.get(model)
        if since_s is None or self._spare_s is None or model in self._alone:
            return None
        return max(since_s, self._spare_s)

    def _scale(self, backlog: Mapping[str, ModelBacklog], now_s: float) -> NDArray[np.float64]:
        """Set the number of hosts of each model by its demand. The earlier number counts only if a worker has the
        model, or if work for the model waits. Return an array [layout.size]: for each model, the number of workers that
        its demand keeps busy.
        """
        layout, workers = self._layout, self._workers.values()
        self._grow()
        rate = mean_rate(*np.array([(worker.rate, worker.arriving) for worker in workers]).T)
        models, rates = np.concatenate([worker.taking for worker in workers], axis=1)
        tokens_s = np.bincount(models.astype(np.intp), rates, layout.size)
        # Workers serve messages in the order of arrival, so all waiting messages arrived since the oldest one. The rate
        # of arrival is therefore the waiting tokens divided by the age of the oldest message.
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
        roomy, crowded = self._room(backlog) if due else (set(), set())
        for number, model in enumerate(dict.fromkeys(due)):
            if number % 16 == 0:
                self._pause()
            if model not in layout.rows:
                continue
            previous, since_s = self._scales.get(model), self._resident(model)
            waiting = backlog.get(model, _NOTHING)
            # do not count the wait during a load, because one more host would not have shortened this wait
            age_s = 0.0 if since_s is None else min(waiting.oldest_s, now_s - since_s)
            scale = replicas(
                # Without this condition, other hosts would load a model again that an operator has unloaded.
                previous if waiting.count or model in layout.having else None,
                float(tokens_s[layout.indices[model]]),
                rate,
                age_s,
                since_s is not None,
                now_s,
                most=most,
                adopt_after_s=self._adopt_after_s,
                load_s=load_s,
                has_room=not roomy.issubset(layout.rows[model].before),
                is_crowded=not crowded.isdisjoint(layout.rows[model].before),
            )
            if previous is not None and scale.count < previous.count:
                self._cut(model, scale.count, crowded)
            if scale != previous:
                self._set_scale(model, scale)
        tokens_s[0] = 0.0
        return tokens_s / rate if rate else np.zeros(layout.size)

    def _room(self, backlog: Iterable[str]) -> tuple[set[str], set[str]]:
        """Return the workers that can load one more model without unloading one that has work, and the workers whose
        models with work do not fit into memory together.
        """
        rows, workers = self._layout.rows, self._layout.workers
        busy = Counter(name for model in backlog if model in rows for name in rows[model].before)
        roomy = {name for name, worker in workers.items() if busy[name] < worker.slots}
        return roomy, {name for name, worker in workers.items() if busy[name] > worker.slots}

    def _cut(self, model: str, count: int, crowded: Collection[str]) -> None:
        """Reduce the hosts of a model to `count`. First remove hosts that have not loaded it, then crowded ones."""
        row, workers = self._layout.rows[model], self._layout.workers

        def rank(name: str) -> tuple[bool, bool]:
            return name not in workers or model not in workers[name].holdings.loaded, name in crowded

        hosts = sorted(row.before, key=rank)
        self._layout.set_before(model, tuple(hosts[:count]))
        self._dropped = True


def model_of(status: ModelStatus) -> str:
    """Return the model of a status (`model` or `model:profile`) without the profile: all profiles of a model share one
    queue.
    """
    return status.model.partition(":")[0]


def in_order(statuses: Sequence[ModelStatus]) -> Sequence[ModelStatus]:
    """Return the statuses with those of loaded models last. A dict by model (without the profile) that is built in this
    order then has the status of a loaded profile, if the model has one.
    """
    if not any(":" in status.model for status in statuses):
        return statuses
    return sorted(statuses, key=lambda status: (status.state == "loaded", status.state == "loading"))


def holdings(of_model: Mapping[str, ModelStatus]) -> Holdings:
    """Return the models that a worker has loaded, is loading, or has refused for lack of memory."""
    loaded, loading, refused = set(), set(), set()
    for model, status in of_model.items():
        if status.state == "loaded":
            loaded.add(model)
        elif status.state == "loading":
            loading.add(model)
        elif status.state == "failed" and status.error is not None and status.error.extras.get("error_class") == "OOM":
            refused.add(model)  # another worker may have more memory; other failures would occur on all workers
    return Holdings(frozenset(loaded), frozenset(loading), frozenset(refused))
