"""Choice of the hosts (workers that should load a model) for all models of a lane (pool, machine profile and bundle). A
`Layout` keeps the table of hosts between planning steps. The inputs of a model are its state on the workers, its number
of hosts, and its hosts in the previous table. A step places only the models whose inputs have changed.

    workers, number of hosts per model, previous table ──► models whose inputs have changed
    `settle`, for these models:  keep live hosts ─► adopt workers that have loaded the model ─► add free workers
    `settle`, then:              move models away from workers that are too full or too busy

With W workers and M models, a new table takes O((W + M) log W), and a step without a change takes O(W + M) array
operations. The module uses no clock, no I/O and no randomness, so gateways with equal inputs compute equal tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sie_contracts.hosts import UNLIMITED, Holdings, HostWorker, Order, lot_of, pair

HOT = 0.8  # planned use of a worker (share of its time, 0 to 1) above which a model is moved to another worker
# minimum gain of a move: after it, the planned use of the old worker and that of the new worker must both be at least
# this much below the planned use of the old worker before the move
MOVE_GAIN = 0.1
PAUSE_EVERY = 16  # number of models that are placed between two calls of `pause`
_FIRST_MODELS = 64  # initial length of the arrays that are indexed by model; it doubles when needed


@dataclass(slots=True, eq=False)
class _ModelHosts:
    """Hosts of one model. `leaving`: a former host that serves until the new hosts have loaded the model."""

    model: str
    index: int
    target_count: int
    hosts: list[HostWorker] = field(default_factory=list)
    leaving: str = ""
    before: tuple[str, ...] = ()  # hosts of the model in the stored table

    def table(self) -> tuple[str, ...]:
        """Return the hosts' names in the order of the stored table: first the host that is `leaving`, then the hosts
        that have loaded the model, then the other hosts.
        """
        hosts = tuple(
            worker.name for worker in sorted(self.hosts, key=lambda worker: self.model not in worker.holdings.loaded)
        )
        return (self.leaving, *hosts) if self.leaving else hosts

    def is_loaded(self, hosts: Iterable[HostWorker]) -> bool:
        return all(self.model in worker.holdings.loaded for worker in hosts)

    def takes(self, name: str) -> bool:
        return name != self.leaving and all(worker.name != name for worker in self.hosts)


class Layout:
    """Table of the hosts of all models of one lane, and the inputs from which it is computed. Not thread-safe.

    A step of `settle` does the following, in this order. A model keeps its live hosts. A model without a host gets
    workers that have loaded it or are loading it; models with the highest demand come first. Missing hosts are added:
    workers are compared by (free slot, planned use, model already loaded, number of models, hash). A model that is not
    loaded moves away from a worker that has more models than slots, if another worker has a free slot. At most one
    model moves away from a worker that is above HOT. A former host that has loaded the model stays in the table as the
    first host until all new hosts have loaded the model.

    So the loss of a worker moves only its models, except if other workers become too full or hot. If no worker is above
    HOT, a step with equal inputs moves no model. To reduce the number of hosts, the caller passes a shorter list to
    `set_before`.
    """

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        """Create an empty table. `pause` is called regularly during a long `settle`, so that other work can run."""
        self.rows: dict[str, _ModelHosts] = {}
        self.workers: dict[str, HostWorker] = {}
        self._hosts: dict[int, HostWorker] = {}
        # index of a model -> its demand divided by its number of hosts, in workers (1.0 keeps one worker busy)
        self._share = np.zeros(_FIRST_MODELS)
        self.having: dict[str, set[str]] = {}  # model -> workers that have loaded it or are loading it
        self.loading: set[str] = set()  # workers that are loading at least one model
        self.indices: dict[str, int] = {}  # model -> its index in the arrays; index 0 is unused
        self.names = [""]  # index of a model -> its name
        self._pause = pause
        self._refused: dict[str, set[str]] = {}
        self._dirty: set[str] = set()
        # models that each step must check, because a host is leaving, is missing, or has refused the model
        self._unsettled: set[str] = set()
        self._overfull: set[str] = set()
        self._free_models: list[int] = []
        self._free_workers: list[int] = []
        self._target_counts = np.ones(_FIRST_MODELS)
        self._first = np.zeros(_FIRST_MODELS, np.intp)  # index of a model -> index of the worker that is its first host
        self._several: set[str] = set()  # models with more than one host
        self._order: Order | None = None  # order of workers for new hosts; None outside of `settle`

    def set_worker(self, name: str, holdings: Holdings, slots: int) -> set[str]:
        """Set the state of a live worker. `slots`: number of models that the worker can have loaded; 0: no limit.

        Return the models whose state on this worker (loaded, loading or refused) has changed.
        """
        worker = self.workers.get(name)
        if worker is None:
            index = self._free_workers.pop() if self._free_workers else len(self.workers) + 1
            worker = self.workers[name] = self._hosts[index] = HostWorker(
                name, index, lot_of(name), Holdings(), UNLIMITED
            )
        if worker.slots != (slots or UNLIMITED):
            worker.slots = slots or UNLIMITED
            self._count(worker)
        if holdings == worker.holdings:
            return set()
        changed: set[str] = set()
        for before, after in zip(worker.holdings.kinds, holdings.kinds, strict=True):
            changed |= before ^ after
        for model in changed:
            _note(self.having, model, name, is_in=holdings.has(model))
            _note(self._refused, model, name, is_in=model in holdings.refused)
        worker.holdings = holdings
        if holdings.loading:
            self.loading.add(name)
        else:
            self.loading.discard(name)
        self._dirty |= changed & self.rows.keys()
        return changed

    def drop_worker(self, name: str) -> set[str]:
        """Remove a worker that is no longer live. Return the models that it had loaded, was loading or had refused."""
        changed = self.set_worker(name, Holdings(), 0)
        worker = self.workers.pop(name)
        del self._hosts[worker.index]
        for model in list(worker.models):
            row = self.rows[model]
            self._assign(row, [host for host in row.hosts if host is not worker])
            self._dirty.add(model)
        self._overfull.discard(name)
        self._free_workers.append(worker.index)
        return changed

    def set_model(self, model: str, count: int) -> None:
        """Set the number of hosts that a model needs, at least 1. If the model is unknown, add it."""
        row = self.rows.get(model)
        if row is None:
            index = self._free_models.pop() if self._free_models else len(self.rows) + 1
            if index >= len(self._target_counts):
                self._target_counts = np.concatenate([self._target_counts, np.ones(len(self._target_counts))])
                self._first = np.concatenate([self._first, np.zeros(len(self._first), np.intp)])
            row = self.rows[model] = _ModelHosts(model, index, 0)
            self.indices[model] = index
            if index == len(self.names):
                self.names.append(model)
            self.names[index] = model
        if row.target_count != count:
            row.target_count = count
            self._target_counts[row.index] = count
            self._dirty.add(model)

    def set_before(self, model: str, hosts: tuple[str, ...]) -> None:
        """Set a model's hosts at the start of the next `settle`: its hosts in the stored table, or some of them."""
        row = self.rows[model]
        row.before = hosts
        self._dirty.add(model)

    def drop_model(self, model: str) -> None:
        row = self.rows.pop(model)
        self._assign(row, [])
        self._target_counts[row.index] = 1
        del self.indices[model]
        self._free_models.append(row.index)
        self._dirty.discard(model)
        self._unsettled.discard(model)

    @property
    def size(self) -> int:
        """Return the length of the arrays that are indexed by model."""
        return len(self._target_counts)

    def settle(self, demand: NDArray[np.float64]) -> dict[str, tuple[str, ...]]:
        """Choose hosts for the models that other calls have changed since the last `settle`, and for the models in
        `_unsettled`. Then relieve workers that are too full or too busy. Return model -> new hosts, for each model
        whose hosts changed.

        `demand`: float64, shape (size,), by index of the model, in workers (1.0 keeps one worker busy).
        """
        if not self.workers:
            return {}
        touched = {model for model in self._dirty | self._unsettled if model in self.rows}
        self._dirty = set()
        for number, model in enumerate(touched):
            if number % PAUSE_EVERY == 0:
                self._pause()
            self._keep(self.rows[model])
        lacking = [row for row in map(self.rows.__getitem__, touched) if len(row.hosts) < self._complete(row)]
        self._share = demand / self._target_counts
        use = self._use()
        if lacking or self._overfull or self._is_movable(use):
            for worker in self.workers.values():
                worker.use = float(use[worker.index])
            self._place(lacking, demand, touched)
        return self._changes(touched)

    def _is_movable(self, use: NDArray[np.float64]) -> bool:
        most = use.max()
        if most <= HOT:
            return False
        least = np.delete(use, [0, *self._free_workers]).min()
        for index in np.flatnonzero(use == most):
            for model in self._hosts[int(index)].models:
                part = self._share[self.indices[model]]
                if part >= MOVE_GAIN and (least + part <= most - MOVE_GAIN):
                    return True
        return False

    def _place(self, lacking: list[_ModelHosts], demand: NDArray[np.float64], touched: set[str]) -> None:
        lacking.sort(key=lambda row: (-demand[row.index], row.model))
        for row in lacking:
            if not row.hosts:
                self._adopt(row)
        if any(len(row.hosts) < self._complete(row) for row in lacking):
            self._order = Order(self.workers.values())
            for number, row in enumerate(lacking):
                if number % PAUSE_EVERY == 0:
                    self._pause()
                while len(row.hosts) < self._complete(row):
                    worker = self._best(row, only_free=False)
                    assert worker is not None
                    self._add(row, worker)
        self._relieve_full(demand, touched)
        self._relieve_hot(touched)
        self._order = None

    def _changes(self, touched: set[str]) -> dict[str, tuple[str, ...]]:
        changes: dict[str, tuple[str, ...]] = {}
        self._unsettled = set()
        for model in touched:
            row = self.rows[model]
            if len(row.hosts) == self._complete(row) and row.is_loaded(row.hosts):
                row.leaving = ""
            hosts = row.table()
            if hosts != row.before:
                row.before = changes[model] = hosts
            refused = self._refused.get(model, ())
            if row.leaving or len(row.hosts) < row.target_count or any(worker.name in refused for worker in row.hosts):
                self._unsettled.add(model)
        return changes

    def _complete(self, row: _ModelHosts) -> int:
        return min(row.target_count, len(self.workers))

    def _use(self) -> NDArray[np.float64]:
        """Return the planned use of each worker (share of its time that its models need), by index of the worker. The
        sums are rounded, so that they do not depend on the order of the additions.
        """
        size = len(self.workers) + len(self._free_workers) + 1
        use = np.bincount(self._first, self._share, size)
        for model in self._several:
            row = self.rows[model]
            for worker in row.hosts[1:]:
                use[worker.index] += self._share[row.index]
        use[0] = 0.0  # no worker has index 0; this entry is the demand of models without a host
        return np.round(use, 9)

    def _assign(self, row: _ModelHosts, hosts: list[HostWorker]) -> None:
        for worker in row.hosts:
            worker.models.discard(row.model)
            self._count(worker)
        for worker in hosts:
            worker.models.add(row.model)
            self._count(worker)
        row.hosts = hosts
        self._hosted(row)

    def _hosted(self, row: _ModelHosts) -> None:
        self._first[row.index] = row.hosts[0].index if row.hosts else 0
        if len(row.hosts) > 1:
            self._several.add(row.model)
        else:
            self._several.discard(row.model)

    def _count(self, worker: HostWorker) -> None:
        if len(worker.models) > worker.slots:
            self._overfull.add(worker.name)
        else:
            self._overfull.discard(worker.name)

    def _add(self, row: _ModelHosts, worker: HostWorker) -> None:
        row.hosts.append(worker)
        worker.models.add(row.model)
        self._count(worker)
        self._hosted(row)
        self._used(worker, float(self._share[row.index]))

    def _drop(self, row: _ModelHosts, worker: HostWorker) -> None:
        row.hosts.remove(worker)
        worker.models.discard(row.model)
        self._count(worker)
        self._hosted(row)
        self._used(worker, -float(self._share[row.index]))

    def _used(self, worker: HostWorker, more: float) -> None:
        worker.use = round(worker.use + more, 9)
        if self._order is not None:
            self._order.moved(worker)

    def _keep(self, row: _ModelHosts) -> None:
        """Keep the live hosts of a model. Drop hosts that refused the model, except if all workers refused it."""
        live = [self.workers[name] for name in row.before if name in self.workers]
        refused = self._refused.get(row.model, set())
        able = [worker for worker in live if worker.name not in refused]
        if len(able) < len(live) and len(refused) < len(self.workers):
            live = able
        row.leaving = ""
        if len(live) > row.target_count:
            first, *rest = live
            if row.is_loaded([first]) and not row.is_loaded(rest[: row.target_count]):
                row.leaving = first.name
            live = rest
        self._assign(row, live[: row.target_count])

    def _adopt(self, row: _ModelHosts) -> None:
        having = [self.workers[name] for name in self.having.get(row.model, ())]
        having.sort(key=lambda worker: (row.model not in worker.holdings.loaded, worker.use, worker.name))
        for worker in having[: row.target_count]:
            self._add(row, worker)

    def _best(self, row: _ModelHosts, *, only_free: bool) -> HostWorker | None:
        """Return the next host for a model; None if no worker is left. The order is: free slot, low planned use, model
        already loaded, few models; a hash decides between equal workers. Workers that refused the model come last. With
        `only_free`, workers that refused the model and workers without a free slot are left out.
        """
        if self._order is None:
            self._order = Order(self.workers.values())
        having, refused = self.having.get(row.model, set()), self._refused.get(row.model, set())
        placed = {worker.name for worker in row.hosts} | {row.leaving}
        lot = lot_of(row.model)
        choice = self._order.first(lot, placed | having | refused, only_free=only_free)
        resident = [
            worker
            for worker in map(self.workers.__getitem__, having - placed - refused)
            if worker.free > 0 or not only_free
        ]
        if resident:
            best = min(resident, key=lambda worker: (worker.key[1], worker.key[2], pair(lot, worker.lot), worker.name))
            if choice is None or (False, best.key[1]) <= choice[0][:2]:
                return best
        if choice is not None:
            return self.workers[choice[1]]
        left = [] if only_free else [self.workers[name] for name in refused - placed]
        return min(left, key=lambda worker: (worker.key, pair(lot, worker.lot), worker.name), default=None)

    def _relieve_full(self, demand: NDArray[np.float64], touched: set[str]) -> None:
        """Move models away from workers with more models than slots, to workers with a free slot. A model that its
        worker has loaded or is loading stays. Models with the lowest demand move first.
        """
        if not self._overfull:
            return
        free_slots = sum(max(0, worker.free) for worker in self.workers.values())
        full = {model for name in self._overfull for model in self.workers[name].models} if free_slots else set()
        rows = map(self.rows.__getitem__, full)
        for row in sorted(rows, key=lambda row: (-demand[row.index], row.model), reverse=True):
            for worker in list(row.hosts):
                if free_slots <= 0:
                    return
                if worker.free >= 0 or worker.holdings.has(row.model):
                    continue
                better = self._best(row, only_free=True)
                if better is not None:
                    self._drop(row, worker)
                    self._add(row, better)
                    touched.add(row.model)
                    free_slots -= 1

    def _relieve_hot(self, touched: set[str]) -> None:
        """Move one model from the busiest worker if this worker is above HOT and the move gains at least MOVE_GAIN."""
        hot = min(self.workers.values(), key=lambda worker: (-worker.use, worker.name))
        if hot.use <= HOT or any(
            self.rows[model].leaving == hot.name for model in self._unsettled | touched if model in self.rows
        ):
            return
        spare = [worker for worker in self.workers.values() if worker.free > 0 and not worker.holdings.loading]
        spare.sort(key=lambda worker: worker.name)
        best: tuple[float, str, str] | None = None
        for model in hot.models:
            row, part = self.rows[model], float(self._share[self.rows[model].index])
            if row.leaving or part < MOVE_GAIN:
                continue
            having, refused = self.having.get(model, set()), self._refused.get(model, set())
            able = [self.workers[name] for name in having]
            able += [worker for worker in spare if worker.name not in refused and worker.name not in having]
            for candidate in able:
                fuller = max(hot.use - part, candidate.use + part)
                move = (fuller, model, candidate.name)
                if fuller <= hot.use - MOVE_GAIN and (best is None or move < best) and row.takes(candidate.name):
                    best = move
        if best is not None:
            self._move(self.rows[best[1]], hot, self.workers[best[2]])
            touched.add(best[1])

    def _move(self, row: _ModelHosts, worker: HostWorker, target: HostWorker) -> None:
        self._drop(row, worker)
        self._add(row, target)
        if row.model in worker.holdings.loaded and row.model not in target.holdings.loaded:
            row.leaving = worker.name


def _note(index: dict[str, set[str]], model: str, name: str, *, is_in: bool) -> None:
    if is_in:
        index.setdefault(model, set()).add(name)
    elif model in index:
        index[model].discard(name)
        if not index[model]:
            del index[model]
