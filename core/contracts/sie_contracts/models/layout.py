"""Placement of models on workers. The table remains between planning steps. A step places only the models whose inputs
have changed.

    workers, wanted hosts, the table before ──► changed models ──settle(demand)──► keep live hosts ─► adopt ─► fill ─►
    relieve

With W workers and M models, a table from scratch takes O((W + M) log W), and a step without a change takes O(W + M)
array operations. The module uses no clock, no I/O and no randomness: gateways that compute from equal inputs write
equal tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sie_contracts.hosts import UNLIMITED, Holdings, HostWorker, Order, lot_of, pair

HOT = 0.8  # planned use of a worker, from 0 to 1; above it a model is moved to another worker
MOVE_GAIN = 0.1  # share of a worker's time: a move must reduce the higher planned use of the two workers by this amount
PAUSE_EVERY = 16  # models between two calls of `pause`
_FIRST_MODELS = 64


@dataclass(slots=True, eq=False)
class _ModelHosts:
    """Hosts of one model. A host in `leaving` still serves, in addition to `target_count` hosts, until these hosts have
    the model loaded.
    """

    model: str
    index: int
    target_count: int
    hosts: list[HostWorker] = field(default_factory=list)
    leaving: str = ""
    before: tuple[str, ...] = ()  # the hosts in the stored table

    def table(self) -> tuple[str, ...]:
        """Return the row of the table. Hosts that have the model loaded are first."""
        hosts = tuple(
            worker.name for worker in sorted(self.hosts, key=lambda worker: self.model not in worker.holdings.loaded)
        )
        return (self.leaving, *hosts) if self.leaving else hosts

    def is_loaded(self, hosts: Iterable[HostWorker]) -> bool:
        """Return whether each of `hosts` has loaded the model."""
        return all(self.model in worker.holdings.loaded for worker in hosts)

    def takes(self, name: str) -> bool:
        return name != self.leaving and all(worker.name != name for worker in self.hosts)


class Layout:
    """Placement table of one lane and its inputs. Not thread-safe.

    Rules: a model keeps its live hosts. Then models without a host get workers that have or load them, the models with
    the highest demand first. Then missing hosts are filled in, by (room, planned use, residency, number of models,
    consistent hash). A model that is not loaded moves off a worker with more models than slots if another worker has
    room. At most one model per call moves off a hot worker. The host that it leaves stays in the table, before the new
    hosts, until all new hosts have it loaded. Hosts that have the model loaded are first.

    So a lost worker moves only its own models, and with equal inputs no model moves while no worker is hot. If a table
    must have fewer hosts than before, the caller removes hosts.
    """

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        """Create an empty table. `pause` is called between parts of a long `settle`."""
        self.rows: dict[str, _ModelHosts] = {}
        self.workers: dict[str, HostWorker] = {}
        self._hosts: dict[int, HostWorker] = {}  # index of a worker -> worker
        self._share = np.zeros(_FIRST_MODELS)  # index of a model -> demand on one of its hosts, in workers
        self.having: dict[str, set[str]] = {}  # model -> workers that have it loaded or load it
        self.loading: set[str] = set()  # workers that load a model now
        self.indices: dict[str, int] = {}  # model -> its index in arrays; index 0 means no model
        self.names = [""]  # index of a model -> its name
        self._pause = pause
        self._refused: dict[str, set[str]] = {}
        self._dirty: set[str] = set()
        # models that each step checks: a host leaves, a host is missing, or a host refused the model
        self._unsettled: set[str] = set()
        self._overfull: set[str] = set()
        self._free_models: list[int] = []
        self._free_workers: list[int] = []
        self._target_counts = np.ones(_FIRST_MODELS)
        self._first = np.zeros(_FIRST_MODELS, np.intp)  # index of a model -> index of its first host
        self._several: set[str] = set()  # models with more than one host
        self._order: Order | None = None  # set during `settle`

    # ---- inputs

    def set_worker(self, name: str, holdings: Holdings, slots: int) -> set[str]:
        """Set the state of a live worker. `slots`: number of models that fit at the same time; 0: no limit.

        Returns the models whose state on this worker changed: loaded, loading or refused.
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
        """Remove a worker that is no longer live. Returns the models whose state changed, like `set_worker`."""
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
        """Set the number of hosts that a model needs, at least 1."""
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
        """Set the stored hosts of a model: hosts that another gateway wrote, or a reduced list of hosts."""
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
        """Return the length of arrays that are indexed by model."""
        return len(self._target_counts)

    # ---- the placement table

    def settle(self, demand: NDArray[np.float64]) -> dict[str, tuple[str, ...]]:
        """Place the models whose inputs have changed. Returns the hosts of each model whose row changed.

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
        """Return whether moving a model off the busiest worker could help."""
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
        """Return the planned use by worker index. Each value is rounded, so that it does not depend on the order of the
        sum.
        """
        size = len(self.workers) + len(self._free_workers) + 1
        use = np.bincount(self._first, self._share, size)
        for model in self._several:
            row = self.rows[model]
            for worker in row.hosts[1:]:
                use[worker.index] += self._share[row.index]
        use[0] = 0.0  # index 0: the demand of models without a host
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
        """Keep the live hosts of a model, except hosts that refused it while another worker did not."""
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
        """Make workers the hosts of a model without a host: workers that have it loaded, or else load it."""
        having = [self.workers[name] for name in self.having.get(row.model, ())]
        having.sort(key=lambda worker: (row.model not in worker.holdings.loaded, worker.use, worker.name))
        for worker in having[: row.target_count]:
            self._add(row, worker)

    def _best(self, row: _ModelHosts, *, only_free: bool) -> HostWorker | None:
        """Return the next host: a worker that did not refuse the model, with room for it, low planned use, the model
        loaded and few other models. A hash decides between equal workers. A worker that refused the model is last, and
        is not returned with `only_free`.
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
        """Move models that are not loaded, lowest demand first, from workers with more models than slots to workers
        with room.
        """
        if not self._overfull:
            return
        room = sum(max(0, worker.free) for worker in self.workers.values())
        full = {model for name in self._overfull for model in self.workers[name].models} if room else set()
        for row in sorted(map(self.rows.__getitem__, full), key=lambda row: (demand[row.index], _reversed(row.model))):
            for worker in list(row.hosts):
                if room <= 0:
                    return
                if worker.free >= 0 or worker.holdings.has(row.model):
                    continue
                better = self._best(row, only_free=True)
                if better is not None:
                    self._drop(row, worker)
                    self._add(row, better)
                    touched.add(row.model)
                    room -= 1

    def _relieve_hot(self, touched: set[str]) -> None:
        """Move one model away from the worker with the highest planned use, if that lowers the use."""
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


def _reversed(name: str) -> tuple[int, ...]:
    """Return a sort key that puts names in reverse order."""
    return (*(-ord(char) for char in name), 1)
