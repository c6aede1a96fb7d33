"""Placement tables: for each lane (pool, machine profile and bundle), the hosts of each model (workers that should load
it). All gateways compute all tables. The first gateway that writes a change wins, and the others read its table.

    heartbeats, backlog, table ──Planner.step, each 0.5 s or at once for a model without a host──► changed table
    ──compare-and-set──► sidecars

A thread computes the tables. The thread pauses every millisecond, so that the event loop can run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

from sie_broker import BrokerError, Store, WrongRevision
from sie_broker import tables as stored_tables
from sie_broker.independent import independently
from sie_broker.record import Record, RecordBucket
from sie_broker.tables import StoredTable, TableChange
from sie_contracts.wire import topology
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus
from sie_contracts.wire.messages import WorkItem
from sie_contracts.wire.records import Placement, PlacementPart
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.fleet.planner import ModelBacklog, Planner, Slices
from sie_gateway.streams.backlog import Backlog
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Stop, Trouble

EVERY_S = 0.5
IDLE_S = 2.5  # seconds between two steps while no model gets work and no worker comes or goes
# shortest time in seconds between two steps, so that one step places all models that get their first work in this time
COLD_GAP_S = 0.02
# seconds that a new gateway waits for the first heartbeat of a host before it moves the models of the host
UNHEARD_S = 15.0
MAX_ASKED = 32  # one `Placer.step` reads the oldest message of at most this many NATS subjects of a lane
_logger = logging.getLogger("sie.gateway.placement")


def _unheard(lane: Lane, table: Placement, workers: Collection[str]) -> list[Heartbeat]:
    """Build a heartbeat for each host in the stored table that has not sent a heartbeat to this new gateway yet. With
    these heartbeats, the planner does not move the models of the hosts.
    """
    models: dict[str, list[ModelStatus]] = {}
    for model, hosts in table.hosts.items():
        for worker in hosts:
            if worker not in workers:
                models.setdefault(worker, []).append(ModelStatus(model, "loaded"))
    return [
        Heartbeat(worker, lane.pool, lane.machine_profile, lane.bundle, ready=True, version="", models=tuple(hosted))
        for worker, hosted in models.items()
    ]


class Placer:
    """Computes and stores the placement tables of all lanes that have workers or work. One task calls `run`."""

    def __init__(
        self,
        broker: Store,
        adopt_after_s: float,
        fleet: Fleet,
        waiting: Callable[[Lane, Collection[str]], Awaitable[Mapping[str, ModelBacklog]]],
        now_s: Callable[[], float],
        *,
        serves: Callable[[str], bool] = lambda pool: True,
        storage: str = "file",
        replicas: int = 1,
    ) -> None:
        """`waiting(lane, models)` returns the waiting work of these models. `now_s` returns the broker's time.
        `serves(pool)` returns True if the pool exists; lanes of other pools get no table. `storage` and `replicas` are
        settings of the bucket, used if this gateway creates it.
        """
        self._broker = broker
        self._adopt_after_s = adopt_after_s
        self.fleet = fleet
        self._waiting = waiting
        self.now_s = now_s
        self._serves = serves
        self._first_s: float | None = None
        self._hosts: frozenset[str] = frozenset()  # workers that could host models at the last step
        self._tables: dict[str, StoredTable] = {}  # key of a lane -> placement table
        # changes of stored tables that arrive during a step, to apply after the step; None while no step runs
        self._held: list[Callable[[], object]] | None = None
        self._planners: dict[Lane, Planner] = {}
        # lane -> model -> (calls of `note` and `want`, published messages, tokens of these messages) since the last
        # step
        self._noted: dict[Lane, dict[str, tuple[int, int, int]]] = {}
        self._cold = asyncio.Event()
        self._is_busy = True  # the last step changed a table or found waiting work
        self._workers: frozenset[tuple[str, bool, bool]] = frozenset()  # result of `_present` at the last step
        self._stepped_s = -IDLE_S  # time of the last step, by `time.monotonic`
        # a stored table that cannot be decoded counts as removed: the next step then writes a new table
        self._record = Record(
            RecordBucket(broker, topology.PLACEMENT_BUCKET, storage=storage, replicas=replicas),
            stored_tables.decode,
            self._on_value,
            on_lost=self._on_lost,
            drops_unreadable=True,
        )
        broker.on_reconnect(self._record.reconnected)
        fleet.first_listeners.append(self._cold.set)

    async def start(self) -> None:
        """Create the bucket if it is missing, read all tables, and watch the bucket. Repeated calls are allowed. Raises
        BrokerError.
        """
        await self._record.follow()

    def _on_value(self, key: str, value: Placement | PlacementPart | None, revision: int) -> None:
        self._between_steps(lambda: self._put(key, value, revision))

    def _put(self, key: str, value: Placement | PlacementPart | None, revision: int) -> None:
        lane_key = topology.lane_key_of(key)
        if value is None and lane_key not in self._tables:
            return
        stored = self._stored(lane_key)
        stored.put(key, value, revision)
        if value is None and stored.table is None and lane_key not in map(topology.lane_key, self._planners):
            del self._tables[lane_key]

    def _on_lost(self) -> None:
        self._between_steps(self._tables.clear)

    def _between_steps(self, take: Callable[[], object]) -> None:
        """Call `take` now; while a step runs, call it at the end of this step."""
        if self._held is not None:
            self._held.append(take)
        else:
            take()

    def _stored(self, key: str) -> StoredTable:
        return self._tables.setdefault(key, StoredTable(key))

    def table(self, lane: Lane) -> Placement | None:
        stored = self._tables.get(topology.lane_key(lane))
        return stored.table if stored is not None else None

    def tables(self) -> dict[Lane, Placement]:
        """Return the tables of all lanes that have a worker or work."""
        lanes = {*self._planners, *self._noted, *self.fleet.lanes()}
        return {lane: table for lane in lanes if (table := self.table(lane)) is not None}

    def drop_pool(self, pool: str) -> None:
        for by_lane in (self._planners, self._noted):
            for lane in [lane for lane in by_lane if lane.pool == pool]:
                del by_lane[lane]
        for key in [key for key in self._tables if key.startswith(f"{pool}.")]:
            del self._tables[key]

    def want(self, lane: Lane, model: str) -> None:
        """Request a host for a model, even without work. If workers exist, but none hosts it, `step` runs at once."""
        self.note(lane, (), model)

    def note(self, lane: Lane, items: Sequence[WorkItem], model: str = "") -> None:
        """Count published work of one model, `model` if there is no item. If workers exist, but none hosts the model,
        `step` runs at once.
        """
        count, cost, model = len(items), 0, model or items[0].model
        for item in items:
            cost += item.cost
        noted = self._noted.setdefault(lane, {})
        calls, messages, tokens = noted.get(model, (0, 0, 0))
        noted[model] = calls + 1, messages + count, tokens + cost
        if self._hosts:
            stored = self._tables.get(topology.lane_key(lane))
            hosts = stored.table.hosts.get(model, ()) if stored is not None and stored.table is not None else ()
            if self._hosts.isdisjoint(hosts):
                self._cold.set()

    async def run(self, stop: Stop) -> None:
        """Update all tables until `stop`: every EVERY_S seconds, at once when a model without a host gets work or a
        lane gets its first worker, and every IDLE_S seconds while nothing happens, because a step asks the broker and
        wakes a thread.
        """
        trouble = Trouble(_logger, "not every placement table could be computed")
        while not await stop.wait_woken(self._cold, EVERY_S):
            is_idle = self._is_idle() and not trouble.lasting
            if is_idle and time.monotonic() - self._stepped_s < IDLE_S:
                continue
            with trouble.logged(BrokerError):
                # after an error or a lost connection, the broker may have lost the bucket of the tables
                if trouble.lasting or self._record.is_stale:
                    await self.start()
                await self.step()
            if await stop.wait_for(COLD_GAP_S):
                break

    def _is_idle(self) -> bool:
        return not self._is_busy and not self._noted and not self._record.is_stale and self._present() == self._workers

    def _present(self) -> frozenset[tuple[str, bool, bool]]:
        """Return the name of each worker, whether its heartbeat is overdue, and whether it leaves."""
        lanes = ((False, self.fleet.lanes()), (True, self.fleet.silent()))
        return frozenset(
            (beat.worker, overdue, beat.leaving) for overdue, of in lanes for beats in of.values() for beat in beats
        )

    async def step(self) -> None:
        """Update the table of every lane once. Raises BrokerError."""
        self._stepped_s, self._workers, self._is_busy = time.monotonic(), self._present(), False
        # While `_held` is a list, changes of the stored tables are appended to it and applied at the end of the step,
        # because the threads that compute new tables read the stored tables during the step.
        self._held = []
        try:
            await self._refresh()
        finally:
            held, self._held = self._held, None
            for take in held:
                take()

    async def _refresh(self) -> None:
        """Update the tables of all lanes. An error of one lane, such as a missing stream, stops no other update."""
        live, silent, workers = self.fleet.lanes(), self.fleet.silent(), set(self.fleet.worker_names())
        if self._first_s is None:
            self._first_s = self.now_s()
        self._hosts = frozenset(beat.worker for beats in (*live.values(), *silent.values()) for beat in beats)
        await independently(
            functools.partial(self._update_lane, lane, live.get(lane, []), silent.get(lane, []), workers)
            for lane in live.keys() | self._planners.keys() | self._noted.keys()
            # skip the lanes of an ended reservation: its workers may report its pool for some time after the end
            if self._serves(lane.pool)
        )

    async def _update_lane(self, lane: Lane, live: list[Heartbeat], silent: list[Heartbeat], workers: set[str]) -> None:
        """Update the table of one lane. `live`: heartbeats of its healthy workers. `silent`: last heartbeats of workers
        whose heartbeats are overdue. `workers`: ids of all workers that this gateway knows.
        """
        if lane not in self._planners:
            self._planners[lane] = Planner(self._adopt_after_s, Slices())
        planner, stored = self._planners[lane], self._stored(topology.lane_key(lane))
        planner.note(self._noted.pop(lane, {}))
        if stored.table is not None and self.now_s() - (self._first_s or 0.0) < UNHEARD_S:
            unheard = _unheard(lane, stored.table, workers)
            silent = [*silent, *unheard]
            self._hosts |= {beat.worker for beat in unheard}
        backlog = await self._waiting(lane, planner.models)
        self._is_busy |= bool(backlog)
        planner.note(self._noted.pop(lane, {}))
        look = functools.partial(planner.step, stored.table, live, silent, backlog, self.now_s())
        change = await asyncio.to_thread(self._changed, stored, look)
        if change is not None:
            self._is_busy = True
            await self._write(stored, change)
        elif not live and not planner.models:
            self._planners.pop(lane, None)  # `drop_pool` may have removed the planner already
            if stored.table is None:
                self._tables.pop(stored.key, None)

    def _changed(self, stored: StoredTable, look: Callable[[], Placement | None]) -> TableChange | None:
        """Run a step of the planner. Called in a thread. Return the change of the table; None if nothing changes."""
        placement = look()
        return stored.change(placement, self._broker.max_payload) if placement is not None else None

    async def _write(self, stored: StoredTable, change: TableChange) -> None:
        """Write a changed table. If another gateway has written the table first, read its table for the next step."""
        bucket = self._record.bucket
        failpoint("gateway.before_placement")
        try:
            revision = await bucket.write(change.writes)
        except WrongRevision:
            entries, _ = await bucket.use(functools.partial(stored_tables.read_lane, lane_key=stored.key))
            stored.clear()
            for entry in entries:
                self._record.apply(entry, stored.put)
            return
        failpoint("gateway.placement_written")
        stored.written(change, revision)


class Ages:
    """Number of waiting messages of each model, from `Backlog`, and the age of the oldest message, from the stream.

    A step reads an age only if the model's NATS subject also had messages at the previous step, because a message that
    came after that step is not old. A step reads at most MAX_ASKED ages of a lane, first the ages that were read
    longest ago.
    """

    def __init__(self, backlog: Backlog, now_s: Callable[[], float]) -> None:
        self._backlog = backlog
        self.now_s = now_s
        self._looks: dict[str, int] = {}  # subject -> number of steps since the age of its oldest message was read
        self._ages_s: dict[str, float] = {}
        self._names: dict[Lane, dict[str, str]] = {}

    async def waiting_of(self, lane: Lane, models: Collection[str]) -> Mapping[str, ModelBacklog]:
        """Return the waiting work by model. Models without waiting work are omitted. Raises BrokerError."""
        await self._backlog.fresh(lane.pool, EVERY_S / 2)
        prefix = topology.lane_filter(lane).removesuffix(">")
        stored = {
            subject: count
            for subject, count in (self._backlog.by_subject(lane.pool) or {}).items()
            if subject.startswith(prefix)
        }
        names = self._names_of(lane, models, stored)
        subjects = {subject: names[token] for subject in stored if (token := subject.rpartition(".")[2]) in names}
        for subject in [name for name in self._looks if name.startswith(prefix) and name not in subjects]:
            del self._looks[subject]
            self._ages_s.pop(subject, None)
        seen_before = [subject for subject in subjects if subject in self._looks]
        due = sorted(seen_before, key=self._looks.__getitem__, reverse=True)[:MAX_ASKED]
        for subject in subjects:
            self._looks[subject] = self._looks.get(subject, 0) + 1
        for subject, first in zip(due, await self._backlog.oldest(lane.pool, due), strict=True):
            self._looks[subject] = 0
            self._ages_s[subject] = max(0.0, self.now_s() - first.sent_s) if first is not None else 0.0
        counts: Counter[str] = Counter()
        oldest_s: dict[str, float] = {}
        for subject, model in subjects.items():
            counts[model] += stored[subject]
            oldest_s[model] = max(oldest_s.get(model, 0.0), self._ages_s.get(subject, 0.0))
        return {model: ModelBacklog(count, oldest_s[model]) for model, count in counts.items()}

    def drop_pool(self, pool: str) -> None:
        for lane in [lane for lane in self._names if lane.pool == pool]:
            prefix = topology.lane_filter(lane).removesuffix(">")
            for subject in [subject for subject in self._looks if subject.startswith(prefix)]:
                del self._looks[subject]
                self._ages_s.pop(subject, None)
            del self._names[lane]

    def _names_of(self, lane: Lane, models: Collection[str], stored: Iterable[str]) -> Mapping[str, str]:
        """Return a map: last token of a NATS subject -> model. The token of a long name is shortened and cannot be
        decoded, so compute the tokens from `models`.
        """
        names = self._names.setdefault(lane, {})
        if any(subject.rpartition(".")[2] not in names for subject in stored):
            names.clear()
            names.update((topology.model_token(model), model) for model in models)
        return names
