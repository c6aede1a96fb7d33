"""Worker: it creates and connects the stages below, runs them on one event loop, and drains them at shutdown. If a
stage raises an exception while it processes work items, the gateway gets an error for these work items. If a task ends
with an exception, the worker drains: unfinished messages return to the queue.

    Source ──► Intake ──► Prepare ──► Dispatch ──► Settle
    (pulls)   (groups)   (device,    (batches) └─► Isolate (runs inputs alone after
                          model,                            a crash of an adapter)
                          tokens)

Each device has its own `AdapterLink`, `Hosting` (its models), `DeviceQueue`, `Dispatch` and `Isolate`. All devices
share the other objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sie_broker import Broker, BrokerError, Subscription
from sie_contracts.settings import Settings
from sie_contracts.wire import topology
from sie_contracts.wire.topology import Lane
from sie_runtime.clock import BrokerClock
from sie_runtime.failpoints import failpoint
from sie_runtime.feed import CatalogueFeed
from sie_runtime.process import Stop, Tasks, retry, wait_set
from sie_sidecar.batch import BatchLimits, quantum_of
from sie_sidecar.dead_letters import DeadLetterWriter
from sie_sidecar.dispatch import DeviceQueue, DeviceQueues, Dispatch
from sie_sidecar.in_flight import InFlight, Inventory, Loading
from sie_sidecar.intake import CHARACTERS_PER_TOKEN, Prepare, WorkIntake, WorkSource
from sie_sidecar.isolate import Isolate
from sie_sidecar.link import AdapterLink, AdapterLinks
from sie_sidecar.metrics import SidecarMetrics
from sie_sidecar.models import Hosting, ModelState, WorkerModels
from sie_sidecar.poison import PoisonMarks
from sie_sidecar.prepare.fetching import PayloadFetching
from sie_sidecar.prepare.media_pool import MediaPool
from sie_sidecar.prepare.rows import TokenizerPool
from sie_sidecar.settle import Leases, ResultDelivery, Settle, open_ledger
from sie_store.payloads import PayloadStore

if TYPE_CHECKING:
    from sie_runtime.spans import Tracer

_logger = logging.getLogger("sie.sidecar.worker")


@dataclass(frozen=True)
class WorkerIdentity:
    """Identity and limits of a worker. `lane`: its pool, machine profile and bundle. `ledger`: path of the file that
    records leased deliveries; None if the broker runs in this process. `store`: payload store with large inputs, or
    None.
    """

    id: str
    lane: Lane
    limits: BatchLimits
    ledger: Path | None = None
    store: PayloadStore | None = None
    tracer: Tracer | None = None


class Worker:
    """Worker: pulls work items, prepares them, runs them in batches, and sends the results to the gateways."""

    def __init__(
        self,
        identity: WorkerIdentity,
        settings: Settings,
        broker: Broker,
        feed: CatalogueFeed,
        links: AdapterLinks,
        metrics: SidecarMetrics,
        on_failure: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        worker_id, lane, limits, clock = identity.id, identity.lane, identity.limits, time.monotonic
        self._identity = identity
        self._settings = settings
        self._broker = broker
        self._links = links
        self._metrics = metrics
        self._on_change = on_change
        self._heard: list[Subscription] = []  # subscriptions to messages from gateways, opened by `start`
        self._work = Tasks(_logger, on_failure)
        self._loops = Tasks(_logger, on_failure)
        self.broker_clock = BrokerClock(broker, topology.stream_name(lane.pool), clock)
        broker_s = self.broker_clock.now_s
        self._ledger = open_ledger(identity.ledger, broker_s) if identity.ledger else None
        self.leases = Leases(float(settings.ack_wait_s), links.is_fresh, clock, self._ledger, broker.flush)
        self.models = WorkerModels()
        self._marks = PoisonMarks(broker, worker_id, broker_s)
        self._tokenizers = TokenizerPool(settings.preprocessor_workers)
        self._media = MediaPool(settings.image_workers, metrics.count_file)
        self.inventory = Inventory(self.models)
        self.loading = Loading(feed, links, self.models, self.inventory, self._work, self._on_unloaded)
        self.queues = DeviceQueues(self.models, self.inventory, limits)
        self._quantum = quantum_of(settings)
        results = ResultDelivery(broker, self.leases, metrics)
        dead_letters = DeadLetterWriter(broker, lane.pool, worker_id, metrics, broker_s)
        fetching = PayloadFetching(identity.store, clock) if identity.store is not None else None
        # created in reverse order, because each stage needs the later stages
        self._settle = Settle(worker_id, results, dead_letters, self.inventory, fetching, metrics, self._work)
        self._isolates: list[Isolate] = []  # the index is the number of the device
        self._dispatches: list[Dispatch] = []
        self.intake = WorkIntake(
            self.leases,
            self.inventory,
            self.queues,
            self._settle,
            self.broker_clock,
            self._quantum,
            metrics,
            identity.tracer,
        )
        self.source = WorkSource(
            broker, lane, worker_id, broker_s, self.queues, self.loading, self.inventory, self.intake.accept
        )
        self._prepare = Prepare(
            self.source, self.loading, self.inventory, self._settle, fetching, self._tokenizers, self._media
        )
        broker.on_reconnect(lambda: self.source.pulling.refresh_consumers())
        links.for_every(self._add_device)

    def _add_device(self, link: AdapterLink) -> None:
        self.models.devices.append(
            Hosting(
                link,
                time.monotonic,
                self._on_change,
                self._settings.swap_after_ms / 1000,
                assigned=lambda: self.source.assignment.models(),
                on_loaded=self._on_loaded,
                on_failed=lambda hosted, error: self._metrics.not_loaded(hosted.name, error),
                on_role=lambda hosted: self.source.pulling.refill_all(),
                everywhere=lambda: self.models,
                device=link.number,
            )
        )
        identity, metrics = self._identity, self._metrics
        queue = DeviceQueue(self._settings, identity.id, identity.limits, link, self.inventory, identity.tracer)
        self.queues.all.append(queue)
        isolate = Isolate(queue, self._marks, self.loading, self._settle, metrics, self._work, self._isolates)
        dispatch = Dispatch(queue, self.queues, isolate, self.loading, self._settle, self._quantum, metrics, self._work)
        self._isolates.append(isolate)
        self._dispatches.append(dispatch)
        link.listeners.append(lambda connected: self._on_link(link, connected))

    @property
    def depth(self) -> int:
        return len(self.leases)

    async def start(self, stop: Stop) -> None:
        """Start the loops of all stages. If an earlier process of this worker was killed, first return its deliveries
        to the queue. If the broker is unreachable, repeat the subscription to messages of gateways until it succeeds or
        `stop` is set. No work arrives before `WorkSource.pull`.
        """
        with contextlib.suppress(BrokerError):  # without a reply of the broker, use the clock of this machine
            await self.broker_clock.measure()
        if left := await self.leases.hand_back_left(self._broker):
            _logger.warning("an earlier process of this worker was killed: %d deliveries returned to the queue", left)
        with contextlib.suppress(BrokerError):  # if this fails, `PoisonMarks.run` reads the poison marks later
            await self._marks.open()
        self._loops.start(self.broker_clock.run(), "broker clock")
        self._loops.start(self._marks.run(), "marks")
        self._links.for_every(lambda link: self._loops.start(self._isolates[link.number].run(), "isolate"))
        await retry(self._listen, errors=(BrokerError,), stop=stop, logger=_logger, task="listening to gateways")
        self._loops.start(self._take_in(), "intake")
        self._links.for_every(
            lambda link: self._loops.start(self._dispatches[link.number].run(self._more_expected), "dispatch")
        )
        self._loops.start(self.leases.run(), "leases")

    async def _listen(self) -> None:
        for subject, handler in (
            (topology.cancel_subject("*"), self.intake.on_cancel),
            (topology.residency_subject(self._identity.id), self.loading.on_residency),
        )[len(self._heard) :]:
            self._heard.append(await self._broker.subscribe(subject, handler))

    async def _take_in(self) -> None:
        while True:
            here: list[InFlight] = []  # work items whose inputs need not be read from the payload store
            characters = 0
            for flight in await self.intake.next(self._prepare, self.source):
                if not flight.item.payload:
                    here.append(flight)
                    characters += CHARACTERS_PER_TOKEN * flight.item.cost
                    continue
                # begin to load the model now, while the inputs are read from the payload store
                self.loading.ahead([f"{flight.item.model}:{flight.item.profile}"], for_work=True)
                self._work.start(self._fetch_and_prepare(flight), "fetch")
            for group in self.intake.groups(here):
                self._work.start(self._prepare_and_dispatch(group, characters), "prepare")
            self.source.refill_soon()

    async def _fetch_and_prepare(self, flight: InFlight) -> None:
        if await self._prepare.fetch(flight):
            await self._prepare_and_dispatch([flight], 0)

    async def _prepare_and_dispatch(self, group: list[InFlight], together: int) -> None:
        with self._settle.answering(group, "preparing the input"):
            for flight in await self._prepare.run(group, together):
                if flight.hosted is not None:  # None if the work item was settled meanwhile
                    self._dispatches[flight.hosted.device].add(flight)
                self.source.pulling.weigh(flight)
        self.queues.wake()

    def _more_expected(self) -> bool:
        """Return True if more work may soon wait for a device."""
        return bool(self.intake.arrived or self._prepare.tokenising) or self.source.more_expected()

    def _on_loaded(self, hosted: ModelState) -> None:
        self._metrics.loaded(hosted.name, certified=hosted.ready is not None and bool(hosted.ready.loaded.certificate))
        self.source.pulling.refill_all()
        self._work.start(self.loading.loras.preload(hosted), "loras")

    def _on_unloaded(self, model: str) -> None:
        self.source.assignment.unloaded(model)

    def _on_link(self, link: AdapterLink, connected: bool) -> None:
        if not connected:
            self._metrics.adapter_deaths.inc()
        self.source.pulling.refill()
        self.queues.wake()

    def check_copies(self) -> None:
        """Load a model on one more device if its devices cannot keep up with its work. Called once per second."""
        for hosted in self.models.second_copies(lambda hosted: self.queues.all[hosted.device].is_behind(hosted)):
            self.loading.copy(hosted)

    async def drain(self, grace_s: float) -> None:
        """Stop pulling. Wait at most `grace_s` seconds for the work in flight, then return the rest to the queue."""
        end_s = time.monotonic() + grace_s
        await self.source.stop()
        if not await wait_set(self.leases.empty, max(0.0, end_s - time.monotonic())):
            _logger.warning(
                "not all work ended within %g s of draining: %d work items are returned to the queue",
                grace_s,
                len(self.leases),
            )
        await self._work.cancel()
        for flight in self.inventory:
            if flight.span is not None:
                flight.span.end()
        for lease in self.leases.all():
            failpoint("worker.before_hand_back")
            await self.leases.hand_back(lease)
        await self._loops.cancel()
        await asyncio.gather(
            self.models.stop(),
            self.loading.loras.stop(),
            self._marks.close(),
            self._media.close(),
            *(subscription.stop() for subscription in self._heard),
        )
        if self._ledger:
            self._ledger.close()
        self._tokenizers.close()
