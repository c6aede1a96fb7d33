"""First stages of a worker. `WorkSource` pulls messages for the models that this worker hosts. `WorkIntake` decodes
deliveries to work items, and gathers work items that arrive together in groups, which are tokenised together. It drops
cancelled work items. `Prepare` prepares each group.

    pulled ──► delivery ──► lease ──► InFlight ──► gathered ──► groups that can be tokenised in one call (`groups`)
                              └──► message delivered again after its lease ended, work item still in flight: renew the
                                   lease

    group ──► same revision of the model as at the gateway ──► model loaded ──► images, sounds ──► tokens ──► device
       │                                                             └──► operations tokenize, decode: send the result
       ├──► this worker's catalogue is older: wait, then return the work items to the queue for other workers
       └──► this worker's catalogue is newer: send an error, after which the gateway publishes the work again

Gateways write a placement table for each lane (a pool, machine profile and bundle): it names the hosts of each model,
which are the workers that serve it.

    watch of the table ──► HostAssignment.table ──► role of this worker for each model:
                                                    pull, probe (pull one message), ahead (load in advance) or none

Before the first table, the worker pulls nothing for FIRST_S seconds. A gateway writes the table within a second after
the first heartbeat. Without this wait, each new worker would load every model that has work. If there is no table after
FIRST_S, no gateway seems to run, and the worker pulls the work of all models. If no adapter was connected when the wait
began, the wait is repeated, because gateways place models only on workers with an adapter.

If no gateway confirms the table for OLD_S seconds, the table is old: no gateway runs. Hosts still serve their models.
In addition, a worker that has loaded a model but is no host of it pulls work of this model that waits in the stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from sie_broker import Broker, BrokerError, CoreMessage, Delivery, Pulls, Queue, Subscription
from sie_broker import tables as stored_tables
from sie_broker.record import Record, RecordBucket
from sie_broker.tables import StoredTable
from sie_contracts.errors import UNDECODABLE, InternalFailure, InvalidInput, ModelLoadFailed, NotReady
from sie_contracts.media.images import Recipe
from sie_contracts.media.sounds import SoundRecipe
from sie_contracts.wire import messages, topology
from sie_contracts.wire.ipc import Rows
from sie_contracts.wire.messages import WorkItem
from sie_contracts.wire.records import Placement, PlacementPart
from sie_contracts.wire.topology import Lane
from sie_runtime.clock import BrokerClock
from sie_sidecar import batch, spans
from sie_sidecar.batch import BatchLimits, Load, Quantum
from sie_sidecar.dispatch import DeviceQueues
from sie_sidecar.in_flight import InFlight, Inventory, Loading, changed
from sie_sidecar.metrics import SidecarMetrics
from sie_sidecar.models import ModelState
from sie_sidecar.prepare import layouts, tokenizer_requests
from sie_sidecar.prepare.fetching import PayloadFetching
from sie_sidecar.prepare.media_frames import PreparedImage, SoundFeatures
from sie_sidecar.prepare.media_pool import MediaPool
from sie_sidecar.prepare.rows import OF_QUERY, ModelTokenizer, PreparedImages, TokenizerPool, WorkItemInput, effort_of
from sie_sidecar.settle import Leases, Settle

if TYPE_CHECKING:
    from sie_runtime.spans import Tracer

FIRST_S = 5.0
OLD_S = 15.0
# seconds until another attempt to load a model in advance, if the last attempt failed or the model was evicted
AHEAD_AGAIN_S = 60.0
Role = Literal["pull", "probe", "ahead", "none"]
_ORDER: dict[Role, int] = {"none": 0, "ahead": 1, "probe": 2, "pull": 3}
_logger = logging.getLogger("sie.sidecar.pull")


def role(hosts: tuple[str, ...], worker: str, *, loaded: bool, held: bool, waits: bool) -> Role:
    """Return the role of `worker` for a model with these hosts. `held`: the worker should pull no more of the model's
    work, because work of the model waits here already, or because the model is closed to new work while another model
    needs its memory. `waits`: work of the model waits in the stream, and no gateway runs that could place the model.

    A host that has loaded the model pulls. The table puts such hosts first. If the first host has not loaded the model,
    it pulls one message, which waits for the load. The other hosts load the model in advance, then pull.
    """
    if worker not in hosts:
        return "pull" if loaded and waits else "none"
    if loaded:
        return "pull"
    if hosts[0] != worker:
        return "ahead"
    return "none" if held else "probe"


class HostAssignment:
    """The placement table of one lane, and the roles of this worker that follow from it."""

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
        """Create the assignment without a table. `now_s`: the broker's clock. `loaded(model)`: the model is loaded here
        and accepts work. `held(model)`: the worker should pull no more work of the model. `on_change` is called after a
        change of the table. `is_up()`: an adapter is connected; gateways place models only on workers with a connected
        adapter.
        """
        self._broker = broker
        self._lane = lane
        self._worker = worker
        self._now_s = now_s
        self._loaded = loaded
        self._held = held
        self._on_change = on_change
        self._is_up = is_up
        self._was_up = False  # true if an adapter was connected when waiting for the first table began
        # timer that ends the wait for the first table; None if this worker does not wait
        self._first: asyncio.TimerHandle | None = None
        # while the table is old: loaded models that it does not place here and whose work waited in the last two checks
        self._waiting: frozenset[str] = frozenset()
        self._seen: frozenset[str] = frozenset()
        self._consumers: dict[str, set[str]] = {}  # name of a consumer -> models whose messages it may deliver
        self._ahead_s: dict[str, float] = {}
        self.table: Placement | None = None
        self._stored = StoredTable(topology.lane_key(lane))
        self._mine: frozenset[str] | None = None
        self._record = Record(
            RecordBucket(broker, topology.PLACEMENT_BUCKET),
            stored_tables.decode,
            self._on_value,
            # `clear` removes the parts of the table that were read from the lost bucket, but not `table`: the worker
            # uses this last table until the new bucket has a table
            on_lost=self._stored.clear,
            read=functools.partial(stored_tables.read_lane, lane_key=self._stored.key),
            wants=self._stored.has,
        )
        self._is_stopped = False

    async def start(self) -> None:
        """Read the placement table, and watch it. Raises BrokerError."""
        await self._record.follow()
        if self.table is None:
            self._await_table()

    def _await_table(self) -> None:
        self._end_wait()  # ends the wait of an earlier call of `start`
        self._was_up = self._is_up()
        self._first = asyncio.get_running_loop().call_later(FIRST_S, self._no_table)

    def _no_table(self) -> None:
        # this worker had no adapter when the wait began, so gateways could not place models on it: wait again
        if not self._was_up:
            self._await_table()
            return
        _logger.warning(
            "no placement table arrived within %g s, so no gateway seems to run: this worker takes work of all models",
            FIRST_S,
        )
        self._first = None
        self._on_change()

    async def stop(self) -> None:
        self._is_stopped = True
        self._end_wait()
        await self._record.close()

    def _end_wait(self) -> None:
        if self._first is not None:
            self._first.cancel()
            self._first = None

    def _on_value(self, key: str, value: Placement | PlacementPart | None, revision: int) -> None:
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
        """Store for each consumer the models whose work it may deliver to this worker: the models that the table places
        here (`_mine`), and the loaded models in `_waiting`, which an old table does not place here.
        """
        self._consumers = {}
        mine = self.models() or ()
        for model in {*mine, *self._waiting}:
            for priority in get_args(messages.Priority):
                for consumer_name in (topology.work_consumer, topology.slot_consumer):
                    self._consumers.setdefault(consumer_name(self._lane, priority, model, 0.0).name, set()).add(model)
        self._ahead_s = {model: at_s for model, at_s in self._ahead_s.items() if model in mine}

    def models(self) -> frozenset[str] | None:
        """Return the models that are placed on this worker by the table, or None if there is no table."""
        return self._mine

    def models_of(self, consumer: str) -> Collection[str]:
        """Return the models of this worker whose messages this consumer may deliver. Empty if this is unknown."""
        return self._consumers.get(consumer, ())

    def is_old(self) -> bool:
        return self.table is not None and self._now_s() - self.table.at_s > OLD_S

    def role(self, consumer: str) -> Role:
        """Return the highest role of this worker for a consumer's models, in the order pull, probe, ahead, none."""
        if self.table is None:
            return "pull" if self._first is None else "none"
        highest: Role = "none"
        for model in self._consumers.get(consumer, ()):
            model_role = self._model_role(model)
            if _ORDER[model_role] > _ORDER[highest]:
                highest = model_role
        return highest

    def _model_role(self, model: str) -> Role:
        hosts = self.table.hosts.get(model, ()) if self.table else ()
        loaded = self._loaded(model)
        held = not loaded and self._held(model)
        return role(hosts, self._worker, loaded=loaded, held=held, waits=model in self._waiting)

    def ahead(self) -> list[str]:
        """Return the models to load in advance: models that are placed here, have another worker as their first host,
        are not loaded, and were not returned in the last AHEAD_AGAIN_S seconds. Empty without a table or with an old
        table.
        """
        if self.table is None or self.is_old():
            return []
        now_s = self._now_s()
        due = (
            model
            for model in sorted(self._mine or ())
            if now_s - self._ahead_s.get(model, -AHEAD_AGAIN_S) >= AHEAD_AGAIN_S
        )
        models = [model for model in due if self._model_role(model) == "ahead"]
        self._ahead_s.update(dict.fromkeys(models, now_s))
        return models

    def unloaded(self, model: str) -> None:
        """Record that an operator unloaded a model: it is not loaded in advance for AHEAD_AGAIN_S seconds."""
        self._ahead_s[model] = self._now_s()

    async def check_unassigned(self, loaded: Iterable[str]) -> None:
        """If the table is old, find the `loaded` models that the table does not place on this worker. Let this worker
        pull a model's work if work of the model waited in this check and in the previous check. Raises BrokerError.
        """
        if self._is_stopped:
            return
        if self._record.is_stale:
            await self._record.follow()
        before, self._seen = self._seen, frozenset()
        if self.is_old():
            unassigned = set(loaded) - (self.models() or frozenset())
            stream = topology.stream_name(self._lane.pool)
            counts = await self._broker.subject_counts(stream, topology.lane_filter(self._lane)) if unassigned else {}
            self._seen = frozenset(
                model
                for model in unassigned
                for subject in (topology.work_subject, topology.slot_subject)
                if any(counts.get(subject(self._lane, priority, model)) for priority in get_args(messages.Priority))
            )
        waiting = before & self._seen
        if waiting != self._waiting:
            self._waiting = waiting
            self._index()
            self._on_change()


ACTIVE_S = 1.0  # seconds after its last delivery during which a consumer counts as active


class _DeliveryStatistics:
    """Recent deliveries of one durable consumer. `mean_cost`: mean number of tokens of a delivery. `delivered_s`: time
    of the last delivery.
    """

    def __init__(self) -> None:
        self.mean_cost = 0.0
        self.delivered_s = -1e9


class Pulling:
    """Open pull requests to the consumers of a lane. The pull requests of a consumer determine its credit: the number
    of messages that it may still deliver.

    `backlog(bulk)`: work that this worker already has, and that runs before a new work item of priority bulk (True) or
    interactive (False); None if nothing may be pulled. `role(consumer)`: what this worker does for the consumer's
    models: pull, probe, load ahead or nothing (`HostAssignment.role`). `narrowed(load, consumer)`: the part of `load`
    on the devices that would run the consumer's work.
    """

    def __init__(
        self,
        queue: Queue,
        lane: Lane,
        limits: BatchLimits,
        on_delivery: Callable[[Pulling, Delivery], None],
        backlog: Callable[[bool], Load | None],
        clock: Callable[[], float],
        role: Callable[[str], Role] = lambda consumer: "pull",
        narrowed: Callable[[Load, str], Load] = lambda load, consumer: load,
    ) -> None:
        self._queue = queue
        self._lane = lane
        self._limits = limits
        self._backlog = backlog
        self._clock = clock
        self._role = role
        self._narrowed = narrowed
        self._stream = topology.stream_name(lane.pool)
        self.bulk_prefix = f"{lane.consumer_prefix()}bulk__"
        self._consumers: dict[str, _DeliveryStatistics] = {}
        self._active: dict[str, _DeliveryStatistics] = {}
        # consumers that `refill` checks: they have delivered since the last refill, or have less credit than usual
        # because too much work waited at this worker
        self._short: dict[str, None] = {}
        self.more: set[str] = set()  # consumers whose last delivery said that more messages wait
        # consumers whose creation the broker reported since the last listing began: the listing may lack these
        # consumers
        self._announced: set[str] = set()
        self._open = False  # true if the last call of `refill` allowed pull requests
        self._pulls: Pulls = queue.pulls(self._stream, functools.partial(on_delivery, self))
        self.outstanding = self._pulls.outstanding
        self._notices: Subscription | None = None
        self._stopped = False

    async def start(self) -> None:
        """Subscribe to notices about created and deleted consumers, and list the consumers. Raises BrokerError."""
        self._notices = await self._queue.watch_consumers(self._stream, self._on_consumer)
        await self.refresh_consumers()

    async def refresh_consumers(self) -> None:
        """List the consumers now, because notices may have been missed. If the broker does not reply, log a warning."""
        try:
            await self.find_consumers()
        except BrokerError as error:
            _logger.warning("the consumers could not be listed; this is tried again within ten seconds: %s", error)

    async def find_consumers(self) -> None:
        """List the durable consumers of this lane, and set how many messages they may deliver. Raises BrokerError."""
        if self._notices is None:  # before `start` (after a reconnect) or after `stop`
            return
        before, self._announced = set(self._consumers), set()
        names = [
            name for name in await self._queue.consumers(self._stream) if name.startswith(self._lane.consumer_prefix())
        ]
        for name in before.difference(names, self._announced):
            self._discard(name)
        for name in names:
            self._consumers.setdefault(name, _DeliveryStatistics())
        self.refill_all()

    async def _on_consumer(self, name: str, exists: bool) -> None:
        if not name.startswith(self._lane.consumer_prefix()):
            return
        if exists:
            self._announced.add(name)
            self._consumers.setdefault(name, _DeliveryStatistics())
            self.refill([name])
        else:
            self._discard(name)

    def _discard(self, name: str) -> None:
        self._consumers.pop(name, None)
        for consumers in (self._active, self._short):
            consumers.pop(name, None)
        self.more.discard(name)
        self._pulls.want(name, 0)

    def note(self, delivery: Delivery, cost: int) -> None:
        """Record a delivery, valid or not: its consumer is active, and `refill` may let the consumer deliver more.
        `cost`: its tokens, as a gateway has estimated them, 0 if unknown. They are the mean cost of a consumer that has
        no mean cost yet.
        """
        name = delivery.consumer
        if (consumer := self._consumers.get(name)) is None:
            consumer = self._consumers[name] = _DeliveryStatistics()
        if not consumer.mean_cost:
            consumer.mean_cost = cost
        self._active[name] = consumer
        consumer.delivered_s = self._clock()
        self._short[name] = None
        if delivery.pending:
            self.more.add(name)
        else:
            self.more.discard(name)

    def weigh(self, flight: InFlight) -> None:
        """Add the tokens of a work item that waits for a device to the mean cost of its consumer. This mean limits how
        many messages the consumer may deliver.
        """
        consumer = self._consumers.get(flight.lease.delivery.consumer)
        if consumer is not None and flight.stage == "waiting":
            cost = 0
            for row in flight.rows:
                cost += row.cost
            consumer.mean_cost += 0.1 * (cost - consumer.mean_cost)

    def refill_all(self) -> None:
        """Set how many messages each consumer may deliver. Called regularly and after changes of the models."""
        self.refill(list(self._consumers))

    def refill_one(self, consumer: str) -> None:
        if consumer in self._consumers:
            self.refill([consumer])

    def level(self) -> None:
        """Raise or lower the credit of the active consumers. The broker may still deliver the old number of messages
        for some seconds after the credit was lowered.
        """
        self.refill(list(self._active))

    def refill(self, names: list[str] | None = None) -> None:
        """Set how many messages these consumers may deliver. Without `names`: raise the credit (number of messages to
        deliver) of all consumers whose credit may be too low.
        """
        if self._stopped:
            return
        if names is None:
            names = list(self._short)
        now_s, backlogs = self._clock(), (self._backlog(False), self._backlog(True))
        if (backlogs[0] is not None) != self._open:
            self._open, names = backlogs[0] is not None, list(self._consumers)
        for name in names:
            consumer = self._consumers[name]
            target = ideal = 0
            backlog = backlogs[name.startswith(self.bulk_prefix)]
            if backlog is not None and (role := self._role(name)) in ("pull", "probe"):
                # an inactive consumer may deliver one message, even if the device has enough work
                target = ideal = 1
                if role == "pull" and now_s - consumer.delivered_s < ACTIVE_S:
                    backlog = self._narrowed(backlog, name)
                    share = len(self._active)
                    target = batch.credit(backlog, consumer.mean_cost, self._limits, share)
                    ideal = batch.credit(Load(0, 0, backlog.lanes), consumer.mean_cost, self._limits, share)
            # pull again only when half of the credit is used: a busy consumer then needs one request for many messages
            if target == 0 or self._pulls.outstanding(name) <= target // 2:
                self._pulls.want(name, target)
            if target >= ideal:
                self._short.pop(name, None)
            else:
                self._short[name] = None
            if now_s - consumer.delivered_s >= ACTIVE_S:
                self._active.pop(name, None)
                self.more.discard(name)

    async def stop(self) -> None:
        """Send no more pull requests. Return when messages on their way have been delivered."""
        self._stopped = True
        notices, self._notices = self._notices, None
        await asyncio.gather(self._pulls.stop(), *([notices.stop()] if notices is not None else []))


class WorkSource:
    """Source of deliveries from one pool at a time. `accept` returns the work item of a delivery; None if the item is
    already in flight here, or if the message cannot be decoded.
    """

    def __init__(
        self,
        broker: Broker,
        lane: Lane,
        worker_id: str,
        now_s: Callable[[], float],
        queues: DeviceQueues,
        loading: Loading,
        inventory: Inventory,
        accept: Callable[[Delivery], InFlight | None],
    ) -> None:
        """Create the source for the pool of `lane`; `pull` starts it. `now_s` is the broker's clock."""
        self._broker = broker
        self._worker_id = worker_id
        self._now_s = now_s
        self._queues = queues
        self._loading = loading
        self._inventory = inventory
        self._accept = accept
        self.pool: str | None = None  # pool from which this worker pulls now, None if it does not pull
        self._paused: Counter[str] = Counter()  # name of a consumer -> number of `paused` blocks that pause it
        self._refilling = False
        self._open(lane)
        inventory.attach(self.refill_soon, lambda consumer: self.pulling.refill_one(consumer))

    def _open(self, lane: Lane) -> None:
        """Use the placement table and the stream of this lane from now on."""
        self.lane = lane
        self.assignment = HostAssignment(
            self._broker,
            lane,
            self._worker_id,
            self._now_s,
            self._loading.models.is_open,
            self._holds,
            self._on_assignment,
            lambda: bool(self._queues.connected),
        )
        self.pulling = Pulling(
            self._broker,
            lane,
            self._queues.limits,
            self._on_delivery,
            self._queues.backlog,
            time.monotonic,
            self._role,
            self._narrowed,
        )

    def _role(self, consumer: str) -> Role:
        held = consumer in self._paused or self._queues.is_full_of(consumer)
        return "none" if held else self.assignment.role(consumer)

    def _narrowed(self, load: Load, consumer: str) -> Load:
        """Return the part of a load that waits for the devices that would run this consumer's work."""
        if len(self._queues.all) == 1:
            return load
        is_bulk = consumer.startswith(self.pulling.bulk_prefix)
        return self._queues.narrowed(load, is_bulk, self.assignment.models_of(consumer))

    def _holds(self, model: str) -> bool:
        """Return True if this worker should pull no more work of this model: a work item of the model waits here, or
        the model is closed to new work.
        """
        models = self._loading.models
        return model in self._inventory.coming or models.holds(model) or models.is_closed(model)

    async def pull(self) -> None:
        """Watch the placement table and begin to pull from an existing stream; may be repeated. Raises BrokerError."""
        await self.assignment.start()
        await self.pulling.start()
        self.pool = self.lane.pool

    async def serve(self, pool: str | None) -> None:
        """Pull only from this pool; with None, pull nothing. The worker finishes the work that it has already pulled.
        Raises BrokerError if the pool has no stream or the broker fails. After an error, the worker pulls nothing, and
        the call may be repeated.
        """
        if pool == self.pool:
            return
        self.pool = None
        await self.stop()
        if pool is None:
            return
        await self._broker.stream_state(topology.stream_name(pool))
        self._open(dataclasses.replace(self.lane, pool=pool))
        await self.pull()

    async def stop(self) -> None:
        """Stop pulling. Returns when messages on their way have been delivered."""
        await asyncio.gather(self.assignment.stop(), self.pulling.stop())

    async def upkeep(self, *, is_check: bool) -> None:
        """Set how many messages the active consumers may deliver, and load models in advance; called once per second.
        `is_check` (true every ten seconds): also list the consumers and check the placement table. Raises BrokerError.
        """
        self.pulling.level()
        self._load_ahead()
        if is_check:
            self.pulling.refill_all()
            await self.pulling.find_consumers()
            if self.pool is not None:
                await self.assignment.check_unassigned(self._loading.models.loaded_models())

    def _on_assignment(self) -> None:
        self.pulling.refill_all()
        self._load_ahead()

    def _load_ahead(self) -> None:
        """Load the models of `HostAssignment.ahead` before their work is pulled, so that no work waits for a load."""
        if self._queues.connected and self.pool is not None:
            self._loading.ahead(self.assignment.ahead())

    def _on_delivery(self, pulling: Pulling, delivery: Delivery) -> None:
        flight = self._accept(delivery)
        pulling.note(delivery, 0 if flight is None else flight.item.cost)
        if flight is None:
            self.refill_soon()

    def more_expected(self) -> bool:
        """Return True if more messages wait at the broker, and the broker may send them to this worker."""
        return max(map(self.pulling.outstanding, self.pulling.more), default=0) > 0

    def refill_soon(self) -> None:
        """Schedule a call of `Pulling.refill`. Further calls before it runs schedule nothing."""
        if not self._refilling:
            self._refilling = True
            asyncio.get_running_loop().call_soon(self._refill)

    def _refill(self) -> None:
        self._refilling = False
        self.pulling.refill()

    @contextlib.contextmanager
    def paused(self, consumers: set[str]) -> Iterator[None]:
        """Context manager: pull nothing from these consumers until the block ends. Callers use it while they wait for
        newer catalogue entries of the consumers' models.
        """
        self._paused += Counter(consumers)
        for consumer in consumers:
            self.pulling.refill_one(consumer)
        try:
            yield
        finally:
            self._paused -= Counter(consumers)
            self.pulling.refill_all()


CHARACTERS_PER_TOKEN = 4  # a gateway estimates the tokens of a text as its characters divided by this number
# a work item counts as late only after its time limit plus the possible error of the broker's clock plus these seconds
LATE_S = 0.25
_intake_logger = logging.getLogger("sie.sidecar.intake")


class WorkIntake:
    """Accepts deliveries of the broker, and gathers work items for tokenising."""

    def __init__(
        self,
        leases: Leases,
        inventory: Inventory,
        queues: DeviceQueues,
        settle: Settle,
        broker_clock: BrokerClock,
        quantum: Quantum,
        metrics: SidecarMetrics,
        tracer: Tracer | None,
    ) -> None:
        self._leases = leases
        self._inventory = inventory
        self._queues = queues
        self._settle = settle
        self._broker_clock = broker_clock
        self._quantum = quantum
        self._metrics = metrics
        self._tracer = tracer
        self._limits = queues.limits
        self.arrived: list[InFlight] = []  # accepted work items that are not gathered yet
        self._arrival = asyncio.Event()

    def accept(self, delivery: Delivery) -> InFlight | None:
        """Return the work item of a delivery; None if the message cannot be decoded or the item is in flight here."""
        now_s = time.monotonic()
        self._metrics.deliveries.labels("true" if delivery.delivered > 1 else "false").inc()
        lease = self._leases.hold(delivery)
        if lease is None:
            # not logged at INFO: after a restart of the broker, every work item in flight here is delivered again
            _intake_logger.debug(
                "a work item in flight here was delivered again (delivery %d): its lease had ended and is renewed",
                delivery.delivered,
            )
            return None
        try:
            item = messages.decode_work(delivery.data)
        except UNDECODABLE as error:
            _intake_logger.error("a message could not be decoded as a work item and becomes a dead letter: %s", error)
            self._settle.bury(lease, InternalFailure("not a work item", reason="undecodable"))
            return None
        # the time limit counts from the publication of the message, also after a redelivery; while the clock of the
        # broker is not measured, from now
        left_s, doubt_s, margin_s = item.budget_ms / 1000, 0.0, self._broker_clock.margin_s
        if math.isfinite(margin_s):
            left_s -= self._broker_clock.now_s() - delivery.sent_s
            doubt_s = margin_s + LATE_S
        span = spans.of_work(self._tracer, delivery, item) if self._tracer is not None else None
        flight = InFlight(
            lease,
            item,
            now_s,
            now_s + left_s + doubt_s,
            span=span,
            due_s=now_s + left_s,
            budget_s=item.budget_ms / 1000,
            bulk=item.priority == "bulk",
        )
        self._inventory.add(flight)
        self.arrived.append(flight)
        self._arrival.set()
        return flight

    async def on_cancel(self, message: CoreMessage) -> None:
        """Decode a gateway's message about cancelled requests, and drop their work items."""
        try:
            notice = messages.decode_cancel(message.data)
        except UNDECODABLE as error:
            _intake_logger.error(
                "a message about cancelled requests was ignored, because it could not be decoded: %s", error
            )
        else:
            self.cancel(notice.requests)

    def cancel(self, requests: Collection[str]) -> None:
        """Drop the work items of these requests. A running work item is dropped only if it generates text."""
        dropped = [
            flight
            for flight in self._inventory
            if flight.item.request in requests
            and flight.stage != "settled"
            and (flight.stage != "running" or self._queues.queue_of(flight).abandon(flight))
        ]
        for flight in dropped:
            if flight.hosted is not None:
                self._queues.queue_of(flight).withdraw(flight)
            self._settle.cancel(flight)
        if dropped:
            self._queues.wake()

    def gathering(self) -> tuple[float | None, float]:
        """Return two values in seconds: the median time of recent work items from delivery to answer (None before
        the first answer), and the time for which the sidecar gathers deliveries now.
        """
        return self._quantum.p50_s, self._quantum.seconds(time.monotonic())

    async def next(self, prepare: Prepare, source: WorkSource) -> list[InFlight]:
        """Wait for a delivery, then a short time for more deliveries. Return the work items that are not settled. The
        wait ends when the work items fill a batch, or when two conditions hold: `prepare` tokenises no earlier work,
        and the broker will send no more messages to `source` now.
        """
        await self._arrival.wait()
        began_s = last_s = time.monotonic()
        while (left_s := self._quantum.until_s(began_s, last_s) - time.monotonic()) > 0 and self._is_more_coming(
            prepare, source
        ):
            self._arrival.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._arrival.wait()
            except TimeoutError:
                break
            last_s = time.monotonic()
        self._arrival.clear()
        arrived, self.arrived = [flight for flight in self.arrived if not flight.settled], []
        if arrived:  # empty if all work items were cancelled
            self._metrics.gathered.observe(len(arrived))
        return arrived

    def groups(self, flights: Sequence[InFlight]) -> list[list[InFlight]]:
        """Return the work items in groups. Each group can be tokenised in one call. With several devices, a group fits
        into one batch, because each group can run on another device.
        """
        groups: dict[tuple[str | int, ...], list[InFlight]] = defaultdict(list)
        for flight in flights:
            item, options = flight.item, flight.item.options
            cut = (options.truncate, options.max_tokens, options.document_tokens)
            groups[item.model, item.profile, item.config_revision, item.operation, options.lora, *cut].append(flight)
        if len(self._queues.all) == 1:
            return list(groups.values())
        return [part for group in groups.values() for part in batch_parts(group, self._limits)]

    def _is_more_coming(self, prepare: Prepare, source: WorkSource) -> bool:
        """Return True if waiting is useful: the gathered work items do not fill a batch, and the broker has more
        messages to send or the tokeniser is busy with earlier work.
        """
        cost, pending = 0, dict[str, int]()
        for flight in self.arrived:
            cost += flight.item.cost
            pending[flight.lease.delivery.consumer] = flight.lease.delivery.pending
        if len(self.arrived) >= self._limits.requests or cost >= self._limits.cost:
            return False
        return prepare.tokenising > 0 or (any(pending.values()) and source.more_expected())


def batch_parts(group: list[InFlight], limits: BatchLimits) -> list[list[InFlight]]:
    """Split a group into parts that each fit into one batch, by the costs that the gateway has estimated. A work item
    that is larger than a batch is a part of its own.
    """
    parts: list[list[InFlight]] = []
    cost = 0
    for flight in group:
        if not parts or len(parts[-1]) >= limits.requests or cost + flight.item.cost > limits.cost:
            parts.append([])
            cost = 0
        parts[-1].append(flight)
        cost += flight.item.cost
    return parts


# a worker that lacks a work item's model or payload store returns the item to the queue so many times, then it sends an
# error; the number of deliveries does not count, because it grows also when workers die or drain
MAX_HAND_BACKS = 4
MAX_COUNTED = 4096  # items whose hand-backs are counted; one more replaces the oldest, whose count begins again
CATCH_UP_S = 2.0  # seconds to wait for a newer catalogue, if the gateway's catalogue is newer than this worker's


class Prepare:
    """Prepares groups of work items of one model. Items that cannot run get an error or return to the queue."""

    def __init__(
        self,
        source: WorkSource,
        loading: Loading,
        inventory: Inventory,
        settle: Settle,
        fetching: PayloadFetching | None,
        tokenizers: TokenizerPool,
        media: MediaPool,
    ) -> None:
        """Create the stage. `fetching` is None if this worker has no payload store."""
        self._source = source
        self._loading = loading
        self._inventory = inventory
        self._settle = settle
        self._fetching = fetching
        self._tokenizers = tokenizers
        self._media = media
        self.tokenising = 0  # number of groups of work items whose texts are being tokenised now
        # (request, chunk, attempt) of a work item -> number of times that this worker has handed it back
        self._hand_backs: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    async def fetch(self, flight: InFlight) -> bool:
        """Read the inputs of a work item from the payload store. Return False if the item is settled."""
        if self._fetching is None:
            if await self._handed_back(flight):
                return False
            error = NotReady("this worker cannot read the inputs of this request: its SIE_PAYLOAD_STORE_URL is not set")
            self._settle.answer_all([flight], error)
            return False
        with self._settle.answering([flight], "fetching the input"):
            await self._fetching.fetch(flight)
        # if the work item was settled during the read, nothing else releases the memory of its inputs
        if flight.settled:
            self._fetching.let_go(flight)
            return False
        flight.fetched_s = time.monotonic()
        return True

    async def run(self, group: list[InFlight], together: int) -> list[InFlight]:
        """Prepare a group and return the work items that can be dispatched. `together`: characters of all groups that
        were gathered at the same time; a small number lets texts be tokenised on the event loop. Raises SIEError, which
        is the error of all work items of the group.
        """
        group = self._settle.still_wanted(group)
        if not group:
            return []
        item = group[0].item
        if self._loading.revision(item.model) < item.config_revision:
            await self._catch_up(group)
            group = self._settle.still_wanted(group)
            if not group:
                return []
        if item.config_revision and self._loading.revision(item.model) > item.config_revision:
            self._settle.answer_changed(group)
            return []
        hosted = self._loading.find(item)
        if hosted is None:
            await self._not_ours(group)
            return []
        for flight in group:
            self._inventory.keep_model(flight, hosted)
        is_tokenizers = item.operation in tokenizer_requests.OPERATIONS
        if hosted.tokenizer is None if is_tokenizers else not hosted.is_ready(item.options.lora):
            try:
                await self._loading.ensure(hosted, group)
            except ModelLoadFailed:
                if not await self._loading.restored(item, hosted):
                    raise
                self._settle.answer_changed(self._settle.still_wanted(group))
                return []
            group = self._settle.still_wanted(group)
            if not group:
                return []
        hosted = group[0].hosted or hosted  # the model's state on another device, if the group was moved there
        loaded_s = time.monotonic()
        for flight in group:
            flight.loaded_s = loaded_s
        if is_tokenizers:
            await self._answer_by_tokenizer(group, hosted, together)
            return []
        self.tokenising += 1
        try:
            group = await self._tokenise(group, hosted, together)
        finally:
            self.tokenising -= 1
        for flight in group:
            flight.tokenised_s = time.monotonic()
        return group

    async def _catch_up(self, group: Sequence[InFlight]) -> None:
        """Wait for a catalogue as new as the gateway's. Meanwhile pull nothing from the consumers of this group."""
        consumers = {flight.lease.delivery.consumer for flight in group}
        until_s = min(time.monotonic() + CATCH_UP_S, max(flight.deadline_s for flight in group))
        with self._source.paused(consumers):
            await self._loading.renewed(group[0].item, until_s - time.monotonic())

    async def _not_ours(self, group: Sequence[InFlight]) -> None:
        """Return work items of an unknown model or revision to the queue; after MAX_HAND_BACKS, send an error."""
        for flight in group:
            if await self._handed_back(flight):
                continue
            flight.given_up = changed()
            self._settle.answer_all([flight], flight.given_up)

    async def _handed_back(self, flight: InFlight) -> bool:
        """Return a work item to the queue, for other workers. Return False if it was returned MAX_HAND_BACKS times."""
        item = flight.item
        key = (item.request, item.chunk, item.attempt)
        count = self._hand_backs.pop(key, 0)
        if count == MAX_HAND_BACKS:
            return False
        self._hand_backs[key] = count + 1
        if len(self._hand_backs) > MAX_COUNTED:
            self._hand_backs.popitem(last=False)
        await self._settle.hand_back(flight)
        return True

    async def _tokenise(self, group: Sequence[InFlight], hosted: ModelState, together: int) -> list[InFlight]:
        """Build the rows of each work item. Return the work items for `Dispatch`. If the rows of an item cannot be
        built, send an error for this item only, because the other items may be of other clients.
        """
        # read before the first `await`, because the model may be unloaded while this method waits
        tokenizer, ready = hosted.tokenizer, hosted.ready
        assert tokenizer is not None
        assert ready is not None
        operation = group[0].item.operation
        layout = ready.rows.get(operation)
        if layout is None:
            raise InvalidInput(f"{hosted.name} does not {operation}", reason="unsupported_task")
        if _has_files(group):
            decoded = await asyncio.gather(*(self._decoded(flight, layout) for flight in group))
            work = [entry for entry in decoded if entry is not None]
            if not work:
                return []
        else:  # without files, start no tasks: they would add 0.13 ms to the time of a short text
            work = [
                (flight, WorkItemInput(flight.item.inputs, flight.item.query, flight.item.options)) for flight in group
            ]
        try:
            await self._build_rows(work, tokenizer, layout, together)
        except Exception:
            if len(work) == 1:
                raise
        else:
            return [flight for flight, _ in work]
        for pair in work:  # the call for all items failed: call for each item alone, so that only the faulty item fails
            with self._settle.answering([pair[0]], "preparing the input"):
                await self._build_rows([pair], tokenizer, layout, together)
        return [flight for flight, _ in work if not flight.settled]

    async def _build_rows(
        self, work: Sequence[tuple[InFlight, WorkItemInput]], tokenizer: ModelTokenizer, layout: Rows, together: int
    ) -> None:
        inputs: list[WorkItemInput] = []
        effort = 0
        for _, item_input in work:
            inputs.append(item_input)
            effort += effort_of(layout, item_input)
        results = await self._tokenizers.run(
            effort, functools.partial(layouts.make, tokenizer, layout, inputs), together
        )
        for (flight, _), rows in zip(work, results, strict=True):
            flight.layout, flight.rows, flight.shared = layout.layout, rows.rows, rows.shared
            flight.refused, flight.unfit, flight.chunked = rows.error, rows.unfit, rows.chunked

    async def _decoded(self, flight: InFlight, layout: Rows) -> tuple[InFlight, WorkItemInput] | None:
        """Return the data from which the rows of a work item are built. Decode its images and sounds if the model reads
        images or sounds. If this fails, send the error for the work item, and return None.
        """
        item = flight.item
        with self._settle.answering([flight], "preparing the input"):
            images, sounds = await asyncio.gather(self._images(item, layout.images), self._sounds(item, layout.sounds))
            return flight, WorkItemInput(item.inputs, item.query, item.options, images, sounds)
        return None

    async def _images(self, item: WorkItem, recipe: Recipe | None) -> Mapping[int, PreparedImages | InvalidInput]:
        """Return the decoded images of each input and of the query, or the error of an unusable image, by index."""
        if recipe is None:
            return {}
        files = {index: source.images for index, source in enumerate(item.inputs) if source.images}
        if item.query is not None and item.query.images:
            files[OF_QUERY] = item.query.images
        pixels = await asyncio.gather(*(self._pixels(images, recipe) for images in files.values()))
        return dict(zip(files, pixels, strict=True))

    async def _sounds(self, item: WorkItem, recipe: SoundRecipe | None) -> Mapping[int, SoundFeatures | InvalidInput]:
        """Return the features of each input that has a sound, or the error of an unusable sound, by index."""
        if recipe is None:
            return {}
        sounds = {index: source.audio for index, source in enumerate(item.inputs) if source.audio}
        from_s = item.options.sound_from_s
        features = await asyncio.gather(*(self._features(audio, recipe, from_s) for audio in sounds.values()))
        return dict(zip(sounds, features, strict=True))

    async def _features(self, audio: bytes, recipe: SoundRecipe, from_s: float | None) -> SoundFeatures | InvalidInput:
        try:
            return await self._media.prepare(audio, recipe, from_s)
        except InvalidInput as error:
            error.message, error.param = f"audio: {error.message}", "audio"
            return error

    async def _pixels(self, images: Sequence[bytes], recipe: Recipe) -> PreparedImages | InvalidInput:
        outcomes = await asyncio.gather(
            *(self._media.prepare(image, recipe) for image in images), return_exceptions=True
        )
        for place, outcome in enumerate(outcomes):
            if isinstance(outcome, InvalidInput):
                outcome.message, outcome.param = f"images[{place}]: {outcome.message}", f"images[{place}]"
                return outcome
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in outcomes if isinstance(outcome, PreparedImage)]

    async def _answer_by_tokenizer(self, group: Sequence[InFlight], hosted: ModelState, together: int) -> None:
        """Run the operations tokenize and decode, and send their results. They need only the tokenizer, which may be in
        memory even if the model is not loaded.
        """
        tokenizer = hosted.tokenizer
        assert tokenizer is not None

        async def answer(flight: InFlight) -> None:
            item = flight.item
            work = WorkItemInput(item.inputs, None, item.options)
            flight.fingerprint = hosted.fingerprint(item.profile, item.options)
            work_call = functools.partial(tokenizer_requests.answer, tokenizer, item.operation, work)
            with self._settle.answering([flight], "preparing the input"):
                outcomes = await self._tokenizers.run(tokenizer_requests.effort_of(work), work_call, together)
                flight.tokenised_s = time.monotonic()
                self._settle.answer(flight, outcomes)

        await asyncio.gather(*map(answer, group))


def _has_files(group: Sequence[InFlight]) -> bool:
    for flight in group:
        query = flight.item.query
        for source in flight.item.inputs if query is None else (query, *flight.item.inputs):
            if source.images or source.audio:
                return True
    return False
