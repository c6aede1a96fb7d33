"""A work item's way through the worker. All state belongs to one event loop; every path out of a stage resolves what it
held.

    delivery ─► held (leased) ─► prepared: model loaded, texts tokenised ─► waiting ─► batch ─► answered, acked
                     │                    └─► load failed: answered with the error          │
                     └─► unknown here: handed back, in the end a dead letter  adapter died: its inputs run one by one

Before it is tokenised, before its model is loaded and before its batch is sent, work whose budget is over by the
broker's clock, and work that was cancelled, is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sie_broker import Broker, BrokerError, CoreMessage, Delivery, Subscription
from sie_contracts import costs, ipc, messages, topology
from sie_contracts.errors import BundleConflict, GatewayTimeout, InternalFailure, ModelNotFound, SIEError
from sie_contracts.messages import BatchNote, Failed, Outcome, WorkItem, WorkResult
from sie_contracts.settings import Settings
from sie_contracts.topology import Lane
from sie_contracts.trace_context import Context
from sie_runtime.clock import BrokerClock
from sie_runtime.failpoints import failpoint
from sie_runtime.feed import CatalogueFeed
from sie_runtime.process import Tasks
from sie_runtime.tracing import set_current
from sie_sidecar import batch as batches
from sie_sidecar import recording, spans
from sie_sidecar import rows as rowing
from sie_sidecar.assignment import Assignment, Role
from sie_sidecar.batch import Batch, BatchKey, Device, Job, Limits, Wait, Waiting
from sie_sidecar.deadletter import DeadLetters
from sie_sidecar.held import Held, changed, cut, merge, runnable, stages_of
from sie_sidecar.hosting import Hosting
from sie_sidecar.inventory import Inventory
from sie_sidecar.lease import Lease, Leases
from sie_sidecar.ledger import open_ledger
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.loras import Loras
from sie_sidecar.metrics import Metrics
from sie_sidecar.models import Hosted
from sie_sidecar.poison import Marks, content_keys, refusal
from sie_sidecar.preparing import Preparing, wanted
from sie_sidecar.pulling import Pulling
from sie_sidecar.rate import Rate
from sie_sidecar.rows import Part, Work
from sie_sidecar.settlement import Settlement
from sie_sidecar.sizing import Ahead
from sie_sidecar.trial import Trials
from sie_store.payloads import PayloadStore

if TYPE_CHECKING:
    from sie_runtime.spans import Span, Tracer

HAND_BACK_DELAY_S = 0.5
LATE_S = 0.25  # beyond what is known of the broker's clock
_logger = logging.getLogger("sie.sidecar.worker")


class Worker:
    """Pulls, prepares, batches, runs and answers."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        feed: CatalogueFeed,
        link: AdapterLink,
        lane: Lane,
        worker_id: str,
        limits: Limits,
        metrics: Metrics,
        on_failure: Callable[[], None],
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        ledger: Path | None = None,
        store: PayloadStore | None = None,
    ) -> None:
        """`ledger`: the file of the deliveries in our hands, None where a broker does not outlive this process.
        `store`: large inputs.
        """
        self._settings = settings
        self._broker = broker
        self._feed = feed
        self._link = link
        self.lane = lane  # whose placement table and stream it goes by
        self.pool: str | None = None  # that it pulls from, None while from none
        self._id = worker_id
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self.tracer: Tracer | None = None
        self.broker_clock = BrokerClock(broker, topology.stream_name(lane.pool), clock)
        broker_s = self.broker_clock.now_s
        self._ledger = open_ledger(ledger, broker_s) if ledger else None
        self.leases = Leases(float(settings.ack_wait_s), link.is_fresh, clock, self._ledger, broker.flush)
        self.hosting = Hosting(
            link,
            clock,
            on_change,
            settings.swap_after_ms / 1000,
            assigned=lambda: self.assignment.models(),
            on_loaded=self._on_loaded,
            on_failed=lambda hosted, error: metrics.not_loaded(hosted.name, error),
            on_role=lambda hosted: self.pulling.refill_all(),
        )
        self._loras = Loras(link, clock)
        self._settlement = Settlement(broker, self.leases, metrics, clock)
        self._marks = Marks(broker, worker_id, broker_s)
        self._trials = Trials(self, link, self._marks, clock, metrics.poisoned.inc)
        self._dead_letters = DeadLetters(broker, lane.pool, worker_id, metrics, broker_s)
        self._waiting: Waiting[Held] = Waiting()
        self.inventory = Inventory(self.refill_soon, clock)
        self._cancels: list[Subscription] = []  # one, once it began
        self._wake = asyncio.Event()
        self.rate = Rate()
        self._ahead = Ahead()
        self._refilling = False
        self._sent = 0
        self._batch_number = 0
        self._work = Tasks(_logger, on_failure)
        self._loops = Tasks(_logger, on_failure)
        self.preparing = Preparing(
            settings, self, feed, link, self.hosting, self._loras, limits, metrics, self._work, clock, store
        )
        self._is_up: Callable[[], bool] = lambda: link.connected
        self._open(lane)
        broker.on_reconnect(lambda: self.pulling.look())
        link.listeners.append(self._on_link)

    def _open(self, lane: Lane) -> None:
        """Go by the table and the stream of a lane from now on."""
        self.lane = lane
        now_s = self.broker_clock.now_s
        self.assignment = Assignment(
            self._broker, lane, self._id, now_s, self.hosting.takes, self._holds, self._on_assignment, self._is_up
        )
        pulling = Pulling(
            self._broker,
            lane,
            self._limits,
            lambda delivery: self._on_delivery(delivery, pulling),
            self._room,
            self._clock,
            self._role,
        )
        self.pulling = pulling

    def _role(self, consumer: str) -> Role:
        return "none" if consumer in self.preparing.behind else self.assignment.role(consumer)

    # taking in

    async def start(self) -> None:
        """Hand back what a killed predecessor held, and take in what comes. `pull` has it come. Raises BrokerError."""
        with contextlib.suppress(BrokerError):  # then by this machine's clock, until an answer comes
            await self.broker_clock.measure()
        if left := await self.leases.release_left(self._broker):
            _logger.warning("%d deliveries that this worker held when it was killed are handed back", left)
        with contextlib.suppress(BrokerError):  # `run` tries again
            await self._marks.open()
        self._loops.start(self.broker_clock.run(), "broker clock")
        self._loops.start(self._marks.run(), "marks")
        self._loops.start(self._trials.run(), "trials")
        self._cancels.append(await self._broker.subscribe(topology.cancel_subject("*"), self._on_cancel))
        self._loops.start(self.preparing.run(), "intake")
        self._loops.start(self._dispatch(), "dispatch")
        self._loops.start(self.leases.run(), "leases")

    async def pull(self) -> bool:
        """Follow the placement table and begin to pull; may be tried again. The lane's stream must exist. Raises
        BrokerError.
        """
        await self.assignment.start()
        await self.pulling.start()
        self.pool = self.lane.pool
        return True

    async def serve(self, pool: str | None) -> bool:
        """Pull from this pool alone, or from none. What was pulled before is finished here. May be tried again.

        Raises BrokerError, also where the pool has no stream yet: then nothing is pulled.
        """
        if pool == self.pool:
            return True
        self.pool = None
        await asyncio.gather(self.assignment.stop(), self.pulling.stop())
        if pool is None:
            return True
        await self._broker.stream_state(topology.stream_name(pool))
        self._open(dataclasses.replace(self.lane, pool=pool))
        return await self.pull()

    def _on_assignment(self) -> None:
        self.pulling.refill_all()
        self._load_ahead()

    def _load_ahead(self) -> None:
        """Load what this worker hosts beside others, so that it pulls only what it can run."""
        if self._link.connected and self.pool is not None:
            self.load(self.assignment.ahead())

    def load(self, names: Iterable[str]) -> None:
        """Load these, each a model or model:profile, beside everything else, before work needs them; what cannot be
        loaded is told in the log.
        """
        for name in names:
            with contextlib.suppress(
                ModelNotFound, BundleConflict
            ):  # this worker's catalogue lags, or another one's did
                hosted = self.hosting.of(self._feed.catalogue.resolve(name))
                self._work.start(self._load(hosted), "load ahead")

    async def _load(self, hosted: Hosted) -> None:
        try:
            await self.hosting.ensure(hosted)
        except (SIEError, AdapterGone) as error:  # nobody waits for it; work that comes is answered with the reason
            _logger.warning("%s could not be loaded ahead: %s", hosted.name, error, extra={"model": hosted.name})

    async def upkeep(self, *, look: bool) -> None:
        """Once a second: credit and loads that depend on time. With `look`, every ten, what the broker knows. Raises
        BrokerError.
        """
        self.pulling.level()
        self._load_ahead()
        if look:
            self.pulling.refill_all()
            await self.pulling.find_consumers()
            if self.pool is not None:
                await self.assignment.look(self.hosting.loaded_models())

    def _room(self, bulk: bool) -> batches.Load | None:
        """Interactive work does not wait at the broker for bulk work that is here."""
        if not self._link.connected:
            return None
        return batches.Load(*self.inventory.load(bulk=bulk), self._lanes)

    def refill_soon(self) -> None:
        """Once in this turn of the loop, however many call."""
        if not self._refilling:
            self._refilling = True
            asyncio.get_running_loop().call_soon(self._refill)

    def _refill(self) -> None:
        self._refilling = False
        self.pulling.refill()

    def _holds(self, model: str) -> bool:
        """Whether no more work of it is to wait here: some does, or it could not even be loaded for now."""
        return self.inventory.is_coming(model) or self.hosting.holds(model) or self.hosting.makes_room(model)

    @property
    def _lanes(self) -> int:
        return self._link.description.lanes if self._link.description else 1

    def _on_delivery(self, delivery: Delivery, pulling: Pulling) -> None:
        now_s = self._clock()
        self._metrics.deliveries.labels("true" if delivery.delivered > 1 else "false").inc()
        pulling.note(delivery)
        if (known := self.leases.adopt(delivery)) is not None:
            _logger.info("delivery %d of work that is already in hand: its lease had lapsed", known.delivery.delivered)
            self.refill_soon()
            return
        lease = self.leases.hold(delivery)
        try:
            item = messages.decode_work(delivery.data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _logger.error("a work item could not be read and is removed: %s", error)
            self.refill_soon()
            self._work.start(self._bury(lease, InternalFailure("not a work item", reason="undecodable")), "bury")
            return
        pulling.estimate(delivery.consumer, item.cost)
        span = spans.of_work(self.tracer, delivery, item)
        left_s, doubt_s = self._left_s(delivery, item)
        held = Held(lease, item, now_s, now_s + left_s + doubt_s, now_s + left_s, span=span)
        self.inventory.add(held)
        self.preparing.add(held)

    def _left_s(self, delivery: Delivery, item: WorkItem) -> tuple[float, float]:
        """Seconds until the budget of a delivery is over, and how many more until that is certain: a redelivery keeps
        its age, and no doubt about the time counts against it.
        """
        left_s = item.budget_ms / 1000
        if not math.isfinite(self.broker_clock.margin_s):
            return left_s, 0.0
        return left_s - (self.broker_clock.now_s() - delivery.sent_s), self.broker_clock.margin_s + LATE_S

    async def _bury(self, lease: Lease, error: SIEError) -> None:
        """Give up what nobody can read."""
        if self.leases.is_mine(lease):
            await self._dead_letters.write(lease.delivery, error.info())
        await self.leases.refuse(lease, error.message)

    async def _on_cancel(self, message: CoreMessage) -> None:
        try:
            self.cancel(messages.decode_cancel(message.data).requests)
        except msgspec.DecodeError as error:
            _logger.error("a cancellation could not be read: %s", error)

    def cancel(self, requests: Collection[str]) -> int:
        """Drop what is held for these requests and is not at the device yet: nobody waits for it. Returns how many work
        items that were.
        """
        dropped = [
            held for held in self.inventory if held.item.request in requests and not held.sealed_s and not held.settled
        ]
        for held in dropped:
            held.settled = True
            if held.job is not None:
                self._waiting.remove(held.job)
                held.took_off()
            self.inventory.count(held, 0)
            self._metrics.settlements.labels("cancelled").inc()
            self._work.start(self._finish_cancelled(held), "cancelled")
        if dropped:
            self._wake.set()
        return len(dropped)

    async def _finish_cancelled(self, held: Held) -> None:
        failpoint("worker.before_cancelled_ack")
        await self.leases.finish(held.lease)
        self._let_go(held)

    def still_wanted(self, group: list[Held]) -> list[Held]:
        """Without what was cancelled, what is too late, and what was made for an entry that has changed; both of these
        are answered.
        """
        now_s = self._clock()
        self.answer_changed([held for held in group if not held.settled and held.is_outdated])
        late = [held for held in group if not held.settled and now_s >= held.deadline_s]
        if late:
            self._metrics.settlements.labels("late").inc(len(late))
            self.answer_all(late, GatewayTimeout("the budget of the request was over before it could run"))
        return [held for held in group if not held.settled and now_s < held.deadline_s]

    def answer_changed(self, group: list[Held]) -> None:
        """Their gateway understands them anew, by the entry as it is now."""
        if group:
            self._metrics.settlements.labels("changed").inc(len(group))
            self.answer_all(group, changed())

    def _on_loaded(self, hosted: Hosted) -> None:
        self._metrics.loaded(hosted.name, certified=hosted.ready is not None and bool(hosted.ready.loaded.certificate))
        self.pulling.refill_all()
        self._work.start(self._loras.preload(hosted), "loras")

    # what preparing uses

    def enqueue(self, held: Held) -> None:
        if held.settled:
            return
        if held.refused is not None:
            self.answer_all([held], held.refused)
            return
        if not runnable(held)[0]:
            self._settle(held, merge(held, ()), b"")
            return
        if self._is_suspect(held):
            self._trials.add(held)
            return
        job = self._job(held, self._clock())
        self.pulling.weigh(held.lease.delivery.consumer, job.cost)
        held.job = job
        self._waiting.add(job)

    def _is_suspect(self, held: Held) -> bool:
        """Whether an input of it ended an adapter before, here or elsewhere."""
        return self._marks.any_of(held.item.model) and any(self._marks.of(key) for key in content_keys(held.item))

    def _job(self, held: Held, arrived_s: float) -> Job[Held]:
        assert held.hosted is not None
        item = held.item
        padded = held.hosted.ready is not None and held.hosted.ready.loaded.attention.endswith(" padded")
        key = BatchKey(held.hosted.name, item.revision, item.operation, item.options.pooling, item.options.lora, padded)
        rows = runnable(held)[0]
        cost = sum(row.cost for row in rows)
        self.inventory.count(held, cost)
        alone = held.lease.delivery.delivered > 1
        crossover = held.hosted.ready.loaded.crossover_tokens if held.hosted.ready is not None else 0
        time_cost = costs.text_cost(cost, sum(row.cost**2 for row in rows), crossover)
        return Job(
            key, cost, arrived_s, held, item.priority == "bulk", alone, held.due_s, item.budget_ms / 1000, time_cost
        )

    # running

    @property
    def _depth(self) -> int:
        """Batches that may be at the adapter at once."""
        ahead = self._lanes + self._settings.rust_pipeline_depth - 1
        return min(ahead, self._settings.max_concurrent_batches, self._settings.pool_size)

    def _device(self) -> Device:
        depth = self._depth
        more_expected = self.preparing.is_under_way or self.pulling.more_expected()
        is_ours = self._link.connected and not self._trials.holds_device
        busy_s = self._ahead.busy_s(self._clock(), self._lanes)
        return Device(self._sent, min(self._lanes, depth), depth if is_ours else 0, more_expected, busy_s)

    async def _dispatch(self) -> None:
        while True:
            self._wake.clear()
            action = batches.next_batch(self._waiting, self._clock(), self._limits, self._device())
            if isinstance(action, Batch):
                for job in action.jobs:
                    job.work.took_off()
                    self.inventory.count(job.work, 0)
                self._to_device(action)
                self._work.start(self._run(action), "batch")
                continue
            timeout_s = max(0.0, action.until_s - self._clock()) if isinstance(action, Wait) else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()

    async def _run(self, batch: Batch[Held], *, in_turn: bool = False) -> bool:
        """Run a batch and answer it, or have it run again. False if its LoRA was not there and it is the caller's
        `in_turn`.
        """
        sent, batch = batch, self._fit(batch)
        if not batch.jobs:
            self._left_device(sent)
            return True
        jobs = [job.work for job in batch.jobs]
        sealed_s = self._clock()
        for held in jobs:
            held.sealed_s = sealed_s
            if held.hosted is not None:
                held.hosted.used(sealed_s)
                held.fingerprint = held.hosted.fingerprint(held.item.profile, held.item.options.lora)
        self._metrics.batches.set(self._sent)
        self.rate.sent(sealed_s)
        started, ran = False, 0

        def on_started() -> None:
            nonlocal started
            started = True
            started_s = self._clock()
            for held in jobs:
                held.started_s = started_s

        self._batch_number += 1
        name = f"{self._id}-{self._batch_number}"
        try:
            with spans.batch(self.tracer, jobs) as span:
                frame, note = self._frame(batch, name, span)
                done = await self._link.run_batch(frame, on_started)
            ran = batch.cost
            self._waiting.ran(batch, (done.preprocess_ms + done.inference_ms + done.postprocess_ms) / 1000)
            recording.ran(batch, note, done, self._lanes)
            self._answer_batch(jobs, done, note)
            answered_s = self._clock()
            for held in jobs:
                self.preparing.quantum.answered(answered_s - held.received_s, answered_s)
        except AdapterGone as gone:
            self._on_gone(jobs, suspects=started and gone.died)
        except SIEError as error:
            if error.code == "MODEL_LOADING":  # evicted since it was prepared
                self._again(jobs)
            elif error.code == "LORA_LOADING":  # dropped for others since
                if in_turn:
                    return False
                self._work.start(self._run_in_turn(batch), "lora")
            else:
                self.answer_all(jobs, error)
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("a batch failed")
            self.answer_all(jobs, InternalFailure("the worker failed while running the batch"))
        finally:
            self.rate.ended(ran, self._clock())
            self._left_device(sent)
        return True

    def _fit(self, batch: Batch[Held]) -> Batch[Held]:
        """Without what must not run: late or cancelled since it was prepared, or suspect by what was learnt since."""
        wanted = self.still_wanted([job.work for job in batch.jobs])
        suspects = [held for held in wanted if self._is_suspect(held)]
        for held in suspects:
            self._trials.add(held)
        if len(wanted) == len(batch.jobs) and not suspects:
            return batch
        jobs = tuple(job for job in batch.jobs if job.work in wanted and job.work not in suspects)
        return Batch(batch.key, jobs, sum(job.cost for job in jobs))

    def _to_device(self, batch: Batch[Held]) -> None:
        self._sent += 1
        self._ahead.sent(id(batch), self._waiting.seconds(batch), self._clock(), self._lanes)

    def _left_device(self, batch: Batch[Held]) -> None:
        self._sent -= 1
        self._ahead.ended(id(batch), self._clock(), self._lanes)
        self._metrics.batches.set(self._sent)
        self._trials.batch_ended()
        self._wake.set()

    # what trials use

    def is_idle(self) -> bool:
        return not self._sent

    def has_waiting(self) -> bool:
        return len(self._waiting) > 0

    def batches_sent(self) -> int:
        return self._batch_number

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        self._work.start(work, "marks")

    def park(self, held: Held) -> Callable[[], None]:
        assert held.hosted is not None
        count = functools.partial(wanted, [held])
        self.hosting.park(held.hosted, count)
        return functools.partial(self.hosting.unpark, held.hosted, count)

    def wake(self) -> None:
        self._wake.set()

    async def ensure_ready(self, held: Held) -> None:
        assert held.hosted is not None
        count = functools.partial(wanted, [held])
        await self.preparing.ensure_ready(
            held.hosted, held.item.options.lora, count, past_gate=True, until_s=held.deadline_s
        )

    def span_of(self, held: Held) -> AbstractContextManager[Span | None]:
        return spans.batch(self.tracer, [held])

    def frame_of(self, held: Held, span: Span | None) -> tuple[ipc.RunBatch, BatchNote]:
        if held.is_outdated:
            raise changed()
        job = self._job(held, held.received_s)
        self.inventory.count(held, 0)  # it does not wait for the device
        self._batch_number += 1
        return self._frame(Batch(job.key, (job,), job.cost), f"{self._id}-{self._batch_number}", span)

    async def _run_in_turn(self, batch: Batch[Held]) -> None:
        """Load the LoRA of a batch again and run it before another one can take the place."""
        jobs, lora = [job.work for job in batch.jobs], batch.key.lora
        hosted = jobs[0].hosted
        assert hosted is not None
        try:
            async with self._loras.turn(hosted):
                done = False
                while not done:
                    hosted.loras.discard(lora)
                    until_s, count = max(held.deadline_s for held in jobs), functools.partial(wanted, jobs)
                    await self.preparing.ensure_ready(
                        hosted, lora, count, past_gate=True, in_turn=True, until_s=until_s
                    )
                    if not count():
                        break
                    self._to_device(batch)
                    done = await self._run(batch, in_turn=True)
        except SIEError as error:
            self.answer_all(jobs, error)
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("loading a LoRA again failed")
            self.answer_all(jobs, InternalFailure("the worker failed while loading the LoRA"))
        self._wake.set()

    @staticmethod
    def _frame(batch: Batch[Held], name: str, span: Span | None) -> tuple[ipc.RunBatch, BatchNote]:
        """The batch as the adapter reads it, and what is told of it. `span`: its own, without one it belongs to its
        first work item.
        """
        parts = []
        for job in batch.jobs:
            item = job.work.item
            run, chosen = runnable(job.work)
            work = Work([item.inputs[index] for index in chosen], item.query, item.options)
            parts.append(Part(run, work, spans.context_of(job.work)))
        first, key = batch.jobs[0].work, batch.key
        ready = first.hosted.ready if first.hosted is not None else None
        above = span or first.span
        context = above.context if above is not None else Context(first.item.traceparent, first.item.tracestate)
        frame = rowing.to_batch(
            name,
            key.residency,
            first.item.operation,
            first.layout,
            parts,
            pooling=key.pooling,
            lora=key.lora,
            context=context,
            fingerprint=ready.loaded.fingerprint if ready is not None else "",
        )
        attention = sum(len(row.ids) ** 2 for part in parts for row in part.rows)
        note = BatchNote(name, sum(len(part.work.inputs) for part in parts), len(parts), batch.cost, attention)
        if span is not None:
            spans.sealed(span, note, key.residency)
        return frame, note

    def _on_gone(self, jobs: list[Held], *, suspects: bool) -> None:
        """The adapter went away with this batch. If the device had it, its inputs are suspects: from now on each runs
        alone.
        """
        for held in jobs:
            if held.hosted is not None:
                held.hosted.unload()
        if suspects:
            self._work.start(self._suspect(jobs), "suspects")
        else:
            self._again(jobs)

    async def _suspect(self, jobs: list[Held]) -> None:
        await self._marks.suspected(jobs[0].item.model, [key for held in jobs for key in content_keys(held.item)])
        failpoint("worker.suspects_marked")
        for held in jobs:
            held.sealed_s = 0.0  # it may be cancelled again
            self._trials.add(held)

    def _again(self, jobs: list[Held]) -> None:
        for held in jobs:
            if held.hosted is not None:
                held.hosted.unload()
            held.sealed_s = 0.0
        for held in self.still_wanted(jobs):
            self._work.start(self._once_ready(held), "again")

    async def _once_ready(self, held: Held) -> None:
        assert held.hosted is not None
        try:
            count = functools.partial(wanted, [held])
            await self.preparing.ensure_ready(held.hosted, held.item.options.lora, count, until_s=held.deadline_s)
            if held.settled:
                return
            held.job = self._job(held, held.received_s)
            self._waiting.put_back(held.job)
        except SIEError as error:
            self.answer_all([held], error)
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("running a work item again failed")
            self.answer_all([held], InternalFailure("the worker failed while preparing the input"))
        self._wake.set()

    def _on_link(self, connected: bool) -> None:
        if not connected:
            self._metrics.adapter_deaths.inc()
        self.pulling.refill()
        self._wake.set()

    # answering

    def _answer_batch(self, jobs: list[Held], done: ipc.BatchDone, note: BatchNote) -> None:
        if len(done.outcomes) != note.items:
            raise RuntimeError(f"the adapter answered {note.items} inputs with {len(done.outcomes)} outcomes")
        hosted = jobs[0].hosted if jobs else None
        view, start = memoryview(done.block), 0
        for held in jobs:
            count = len(runnable(held)[1])
            outcomes, block = cut(done.outcomes[start : start + count], view)
            start += count
            self._settle(held, merge(held, outcomes), block, done, note)
        if hosted is not None:
            hosted.filled(note.tokens / self._limits.cost)
            self._metrics.ran(hosted.name, note, done, self._limits.cost)

    def answer_all(self, group: list[Held], error: SIEError) -> None:
        """The same error for every input."""
        info = error.info()
        for held in group:
            self._settle(held, (Failed(info),) * (held.item.count or len(held.item.inputs)), b"")

    def settle(
        self,
        held: Held,
        outcomes: tuple[Outcome, ...],
        block: bytes,
        done: ipc.BatchDone | None,
        note: BatchNote | None,
    ) -> None:
        self._settle(held, outcomes, block, done, note)

    def _settle(
        self,
        held: Held,
        outcomes: tuple[Outcome, ...],
        block: bytes,
        done: ipc.BatchDone | None = None,
        note: BatchNote | None = None,
    ) -> None:
        if held.settled:
            return
        held.settled = True
        item, hosted, now_s = held.item, held.hosted, self._clock()
        self.inventory.count(held, 0)
        stages = stages_of(held, now_s, done)
        spans.settled(held, stages, outcomes, note.id if note else "")
        batch = msgspec.structs.replace(
            note or BatchNote(),
            deliveries=held.lease.delivery.delivered,
            padding=done.padding if done else 0,
            swapped=hosted.swapped if hosted else False,
        )
        fingerprint = held.fingerprint or (hosted.fingerprint(item.profile, item.options.lora) if hosted else "")
        result = WorkResult(
            item.request, item.chunk, self._id, outcomes, block, item.attempt, item.revision, fingerprint, stages, batch
        )
        self._let_model_go(held)  # a result that nobody confirms needs its lease, not its model
        self._work.start(self._answer(held, result, hosted.name if hosted else "other"), "answer")

    async def _answer(self, held: Held, result: WorkResult, name: str) -> None:
        set_current(Context(held.item.traceparent, held.item.tracestate))
        try:
            await self._settlement.answer(held.lease, held.item, result, held.deadline_s, self._burial(held))
        finally:
            self._let_go(held)
            self._metrics.answered(name, held.item.endpoint or held.item.operation, result)

    def _burial(self, held: Held) -> Callable[[], Awaitable[object]] | None:
        """What is to be done once the client has its answer and before the message goes: work that was given up is
        kept.
        """
        delivery = held.lease.delivery
        if held.given_up is not None:
            return functools.partial(self._dead_letters.write, delivery, held.given_up.info())
        if held.dead:
            workers = tuple(worker for mark in held.dead for worker in mark.workers)
            deaths = max(mark.deaths for mark in held.dead)
            return functools.partial(
                self._dead_letters.write, delivery, refusal().info(), deaths=deaths, workers=workers
            )
        return None

    async def hand_back(self, held: Held) -> None:
        if held.settled:
            return
        held.settled = True
        self.inventory.count(held, 0)
        self._metrics.settlements.labels("handed_back").inc()
        await self.leases.hand_back(held.lease, HAND_BACK_DELAY_S)
        self._let_go(held)

    def _let_go(self, held: Held) -> None:
        if held.span is not None:
            held.span.end()
        self.inventory.remove(held)
        if held.coming:
            self.inventory.known(held)
            # it stood for others that its model's load would have served
            self.pulling.refill_one(held.lease.delivery.consumer)
        if self.preparing.fetching is not None:
            self.preparing.fetching.let_go(held)
        self._let_model_go(held)

    def _let_model_go(self, held: Held) -> None:
        if held.hosted is not None:
            self.hosting.let_go(held.hosted)
            if held.hosted.state != "loaded":  # its load failed: the next one to wait for it may come
                self.pulling.refill_one(held.lease.delivery.consumer)
            held.hosted = None

    # ending

    @property
    def depth(self) -> int:
        return len(self.leases)

    def gathering(self) -> tuple[float | None, float]:
        """The median time at this worker lately, None without answers, and how long deliveries are
        gathered, seconds.
        """
        quantum = self.preparing.quantum
        return quantum.p50_s, quantum.seconds(self._clock())

    def most(self) -> tuple[int, int]:
        """The tokens and the work items of one priority that this worker takes in at most: full batches that wait, and
        those that are at the adapter.
        """
        full = batches.READY_PER_LANE * self._lanes + self._depth
        return full * self._limits.cost, full * self._limits.requests

    def ahead(self) -> tuple[int, int]:
        """The tokens of a full batch, and how many batches are at the adapter at most."""
        return self._limits.cost, self._depth

    async def drain(self, grace_s: float) -> None:
        """Stop pulling, finish what is held, hand back what does not finish in time. `grace_s` is for all of it: a
        broker that does not answer has its share of it.
        """
        end_s = self._clock() + grace_s
        await asyncio.gather(self.assignment.stop(), self.pulling.stop())
        try:
            async with asyncio.timeout(max(0.0, end_s - self._clock())):
                await self.leases.empty.wait()
        except TimeoutError:
            _logger.warning(
                "draining took longer than %.0f s: %d work items are handed back", grace_s, len(self.leases)
            )
        await self._work.cancel()
        for held in self.inventory:
            if held.span is not None:
                held.span.end()
        for lease in self.leases.all():
            failpoint("worker.before_hand_back")
            await self.leases.hand_back(lease)
        await self._loops.cancel()
        await asyncio.gather(
            self.hosting.stop(), self._loras.stop(), self._marks.close(), *(each.stop() for each in self._cancels)
        )
        if self._ledger:
            self._ledger.close()
        self.preparing.close()
