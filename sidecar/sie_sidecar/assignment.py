"""Which models this worker hosts, by the placement table of its lane, and what that means for its pulls.

    KV watch ──► Assignment.table ──role(model)──► pull with credit · probe with 1 · load ahead of the work · leave it
    alone

Where there never was a table nothing is pulled until the first one comes, FIRST_S at most: a gateway writes it within a
second of the first worker's heartbeat, and workers that begin without it each load every model that has work. After
that, without any gateway, everything is pulled. A table that nobody confirmed for OLD_S while work waits means that no
gateway is there: hosts stay hosts, and a worker that has a model loaded also takes work of it that waits.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Literal, get_args

from sie_broker import Broker
from sie_broker import tables as stored_tables
from sie_broker.record import Bucket, Record
from sie_broker.tables import Stored, StoredTable
from sie_contracts import messages, topology
from sie_contracts.records import Placement
from sie_contracts.topology import Lane

FIRST_S = 5.0
OLD_S = 15.0
AHEAD_AGAIN_S = 60.0  # a model that went after it was loaded ahead had to make room: not at once again

Role = Literal["pull", "probe", "ahead", "none"]
_ORDER: dict[Role, int] = {"none": 0, "ahead": 1, "probe": 2, "pull": 3}
_logger = logging.getLogger("sie.sidecar.assignment")


def role(hosts: tuple[str, ...], worker: str, *, loaded: bool, held: bool, waits: bool) -> Role:
    """What `worker` does about a model with these `hosts`. `held`: it has work of it in hand, or the model makes room
    for another one here: what came would wait for two loads, and might run elsewhere before the first has ended.
    `waits`: work of it waits in the stream and no gateway is there to place it.

    Where it is not loaded only the first host asks for one message, which then waits here for the load: the table has a
    host first that has the model, if there is one, so that no work is locked up by a load elsewhere. The others load it
    without any work, then pull.
    """
    if worker not in hosts:
        return "pull" if loaded and waits else "none"
    if loaded:
        return "pull"
    if hosts[0] != worker:
        return "ahead"
    return "none" if held else "probe"


class Assignment:
    """The table of one lane as this worker knows it."""

    def __init__(
        self,
        broker: Broker,
        lane: Lane,
        worker: str,
        now_s: Callable[[], float],
        loaded: Callable[[str], bool],
        held: Callable[[str], bool],
        on_change: Callable[[], None],
        is_up: Callable[[], bool],
    ) -> None:
        """`now_s`: the broker's time. `loaded`, `held`: whether this worker has the model loaded, has work of it in
        hand. `on_change` is called when the table has changed. `is_up`: whether the adapter is there, without which no
        gateway places anything here.
        """
        self._broker = broker
        self._lane = lane
        self._worker = worker
        self._now_s = now_s
        self._loaded = loaded
        self._held = held
        self._on_change = on_change
        self._is_up = is_up
        self._was_up = False  # when the wait for the first table began
        self._first: asyncio.TimerHandle | None = None  # while the first table is waited for
        self._waiting: frozenset[str] = frozenset()  # models with work at two looks in a row while the table was old
        self._seen: frozenset[str] = frozenset()
        self._consumers: dict[str, set[str]] = {}  # consumer name -> models that it may bring
        self._ahead_s: dict[str, float] = {}
        self.table: Placement | None = None
        self._stored = StoredTable(topology.lane_key(lane))
        self._mine: frozenset[str] | None = None
        self._record = Record(
            Bucket(broker, topology.PLACEMENT_BUCKET),
            stored_tables.decode,
            self._on_value,
            on_lost=self._stored.forget,  # the last table counts until the new bucket has one
            read=functools.partial(stored_tables.read_lane, lane_key=self._stored.key),
            wants=self._stored.has,
        )
        self._is_stopped = False

    async def start(self) -> None:
        """Read the table, and learn of each change. Raises BrokerError."""
        await self._record.follow()
        if self.table is None:
            self._await_table()

    def _await_table(self) -> None:
        self._was_up = self._is_up()
        self._first = asyncio.get_running_loop().call_later(FIRST_S, self._no_table)

    def _no_table(self) -> None:
        if not self._was_up:  # only now may a gateway have heard of this worker
            self._await_table()
            return
        _logger.warning("no placement table within %g s: no gateway is there, all work is pulled", FIRST_S)
        self._first = None
        self._on_change()

    async def stop(self) -> None:
        """Hear of no change any more."""
        self._is_stopped = True
        self._end_wait()
        await self._record.close()

    def _end_wait(self) -> None:
        if self._first is not None:
            self._first.cancel()
            self._first = None

    def _on_value(self, key: str, value: Stored | None, revision: int) -> None:
        if self._stored.put(key, value, revision):
            self._changed()

    def _changed(self) -> None:
        self._end_wait()
        self.table = self._stored.table
        self._mine = (
            None
            if self.table is None
            else frozenset(model for model, hosts in self.table.hosts.items() if self._worker in hosts)
        )
        self._index()
        self._on_change()

    def _index(self) -> None:
        """Which consumers bring work of the models that concern this worker."""
        self._consumers = {}
        mine = self.models() or ()
        for model in {*mine, *self._waiting}:
            for priority in get_args(messages.Priority):
                for made in (topology.work_consumer, topology.slot_consumer):
                    self._consumers.setdefault(made(self._lane, priority, model, 0.0).name, set()).add(model)
        self._ahead_s = {model: at_s for model, at_s in self._ahead_s.items() if model in mine}

    def models(self) -> frozenset[str] | None:
        """The models that this worker hosts; None while there is no table."""
        return self._mine

    def is_old(self) -> bool:
        return self.table is not None and self._now_s() - self.table.at_s > OLD_S

    def role(self, consumer: str) -> Role:
        """What to do about the consumer of this name: the most that any of its models asks for."""
        if self.table is None:
            return "pull" if self._first is None else "none"
        return max(
            (self._of(model) for model in self._consumers.get(consumer, ())), key=_ORDER.__getitem__, default="none"
        )

    def _of(self, model: str) -> Role:
        hosts = self.table.hosts.get(model, ()) if self.table else ()
        loaded, held = self._loaded(model), self._held(model)
        return role(hosts, self._worker, loaded=loaded, held=held, waits=model in self._waiting)

    def ahead(self) -> list[str]:
        """The models to load now without waiting for work: hosted beside others, not loaded, not tried within
        AHEAD_AGAIN_S.
        """
        if self.table is None or self.is_old():
            return []
        now_s = self._now_s()
        due = (
            model
            for model in sorted(self._mine or ())
            if now_s - self._ahead_s.get(model, -AHEAD_AGAIN_S) >= AHEAD_AGAIN_S
        )
        found = [model for model in due if self._of(model) == "ahead"]
        self._ahead_s.update(dict.fromkeys(found, now_s))
        return found

    def unloaded(self, model: str) -> None:
        """An operator had it unloaded: it is not loaded ahead of work within AHEAD_AGAIN_S."""
        self._ahead_s[model] = self._now_s()

    async def look(self, loaded: Iterable[str]) -> None:
        """Every few seconds: while the table is old, which `loaded` models of other hosts have work that waits. Raises
        BrokerError.
        """
        if self._is_stopped:
            return
        if self._record.is_stale:
            await self._record.follow()
        before, self._seen = self._seen, frozenset()
        if self.is_old():
            others = set(loaded) - (self.models() or frozenset())
            stream = topology.stream_name(self._lane.pool)
            counts = await self._broker.subject_counts(stream, topology.lane_filter(self._lane)) if others else {}
            self._seen = frozenset(
                model
                for model in others
                for subject in (topology.work_subject, topology.slot_subject)
                if any(counts.get(subject(self._lane, priority, model)) for priority in get_args(messages.Priority))
            )
        waiting = before & self._seen
        if waiting != self._waiting:
            self._waiting = waiting
            self._index()
            self._on_change()
