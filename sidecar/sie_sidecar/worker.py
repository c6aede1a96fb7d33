"""A work item's way through the worker. All state belongs to one event loop; every path out of a stage resolves what it held.

    delivery ─► held (leased) ─► prepared: model loaded, texts tokenised ─► waiting ─► batch at the adapter ─► answered, acked
                     │                    └─► load failed: answered with the error          │
                     └─► unknown here: handed back, in the end a dead letter      adapter died: its inputs are tried one by one

Before it is tokenised, before its model is loaded and before its batch is sent, work whose budget is over by the broker's clock, and work
that was cancelled, is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from sie_contracts import ipc, messages, topology
from sie_contracts.broker import Broker, BrokerError, CoreMessage, Delivery, Subscription
from sie_contracts.errors import GatewayTimeout, InternalFailure, InvalidInput, ModelLoading, NotReady, SIEError
from sie_contracts.messages import BatchNote, Failed, Outcome, WorkItem, WorkResult
from sie_contracts.payloads import PayloadStore
from sie_contracts.runtime.clock import BrokerClock
from sie_contracts.runtime.failpoints import failpoint
from sie_contracts.runtime.feed import CatalogueFeed
from sie_contracts.runtime.process import Tasks
from sie_contracts.settings import Settings
from sie_contracts.topology import Lane
from sie_sidecar import batch as batches
from sie_sidecar import recording
from sie_sidecar import rows as rowing
from sie_sidecar.assignment import Assignment
from sie_sidecar.batch import Batch, BatchKey, Device, Job, Limits, Wait, Waiting
from sie_sidecar.deadletter import DeadLetters
from sie_sidecar.fetching import Fetching
from sie_sidecar.held import Held, cut, merge, runnable, stages_of
from sie_sidecar.hosting import Hosted, Hosting
from sie_sidecar.lease import Lease, Leases
from sie_sidecar.ledger import open_ledger
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.loras import Loras
from sie_sidecar.metrics import Metrics
from sie_sidecar.poison import Marks, content_keys, refusal
from sie_sidecar.pulling import Pulling
from sie_sidecar.quantum import quantum_of
from sie_sidecar.rate import Rate
from sie_sidecar.rows import Part, Work, effort_of
from sie_sidecar.settlement import Settlement
from sie_sidecar.tokens import TokenizerPool
from sie_sidecar.trial import Trials

HAND_BACK_DELAY_S = 0.5
MOST_HAND_BACKS = 5  # deliveries of work whose model nobody here knows: time enough for a catalogue that lags, not for one that moved on
LATE_S = 0.25  # beyond what is known of the broker's clock
_logger = logging.getLogger("sie.sidecar.worker")


class Worker:
    """Pulls, prepares, batches, runs and answers."""

    def __init__(
        self, settings: Settings, broker: Broker, feed: CatalogueFeed, link: AdapterLink, lane: Lane, worker_id: str, limits: Limits,
        metrics: Metrics, on_failure: Callable[[], None], on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic,
        ledger: Path | None = None, store: PayloadStore | None = None,
    ) -> None:  # fmt: skip
        """`ledger`: the file of the deliveries in our hands, None where a broker does not outlive this process. `store`: large inputs."""
        self._settings = settings
        self._broker = broker
        self._feed = feed
        self._link = link
        self._lane = lane
        self._id = worker_id
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self.broker_clock = BrokerClock(broker, topology.stream_name(lane.pool), clock)
        broker_s = self.broker_clock.now_s
        self._ledger = open_ledger(ledger, broker_s) if ledger else None
        self.leases = Leases(float(settings.ack_wait_s), link.is_fresh, clock, self._ledger, broker.flush)
        self.hosting = Hosting(link, clock, on_change, settings.swap_after_ms / 1000)
        self._loras = Loras(link, clock)
        self.hosting.on_loaded = self._on_loaded
        self.hosting.on_role = lambda hosted: self.pulling.refill_all()
        self._settlement = Settlement(broker, self.leases, metrics, clock)
        self._marks = Marks(broker, worker_id, broker_s)
        self._trials = Trials(self, link, self._marks, clock, metrics.poisoned.inc)
        self._dead_letters = DeadLetters(broker, lane.pool, worker_id, metrics, broker_s)
        self._fetching = Fetching(store, clock) if store is not None else None
        self._tokenizers = TokenizerPool(settings.preprocessor_workers)
        self._waiting: Waiting[Held] = Waiting()
        self._arrived: list[Held] = []
        self._in_hand: dict[Lease, Held] = {}  # what was taken out of _arrived and is not settled
        self._cancels: list[Subscription] = []  # one, once it began
        self._arrival = asyncio.Event()
        self._wake = asyncio.Event()
        self._quantum = quantum_of(settings)
        self.rate = Rate()
        self._tokenising = 0
        self._held = ([0, 0], [0, 0])  # cost and work items, interactive and bulk, of what is not at the device yet
        self._coming: Counter[str] = Counter()  # deliveries of each model of which hosting does not know yet
        self._refilling = False
        self._sent = 0
        self._batch_number = 0
        self._work = Tasks(_logger, on_failure)
        self._loops = Tasks(_logger, on_failure)
        self.admits: Callable[[], bool] = lambda: True  # whether this worker's pool may be pulled from
        self.assignment = Assignment(broker, lane, worker_id, broker_s, self.hosting.takes, self._holds, self._on_assignment)
        self.hosting.assigned = self.assignment.models
        self.pulling = Pulling(broker, lane, limits, self._on_delivery, self._room, clock, self.assignment.role)
        link.listeners.append(self._on_link)

    # taking in

    async def start(self) -> None:
        """Hand back what a killed predecessor held, and take in what comes. `pull` has it come. Raises BrokerError."""
        with contextlib.suppress(BrokerError):  # then by this machine's clock, until an answer comes
            await self.broker_clock.measure()
        if (left := await self.leases.release_left(self._broker)):
            _logger.warning("%d deliveries that this worker held when it was killed are handed back", left)
        with contextlib.suppress(BrokerError):  # `run` tries again
            await self._marks.open()
        self._loops.start(self.broker_clock.run(), "broker clock")
        self._loops.start(self._marks.run(), "marks")
        self._loops.start(self._trials.run(), "trials")
        self._cancels.append(await self._broker.subscribe(topology.cancel_subject(self._lane.pool), self._on_cancel))
        self._loops.start(self._prepare_arrivals(), "intake")
        self._loops.start(self._dispatch(), "dispatch")
        self._loops.start(self.leases.run(), "leases")

    async def pull(self) -> bool:
        """Follow the placement table and begin to pull; may be tried again. The lane's stream must exist. Raises BrokerError."""
        await self.assignment.start()
        await self.pulling.start()
        return True

    def _on_assignment(self) -> None:
        self.pulling.refill_all()
        self._load_ahead()

    def _load_ahead(self) -> None:
        """Load what this worker hosts beside others, so that it pulls only what it can run."""
        entries = self._feed.catalogue.entries
        for model in self.assignment.ahead() if self._link.connected else ():
            if model in entries:
                hosted = self.hosting.of(self._feed.catalogue.resolve_profile(entries[model], "default", model))
                self._work.start(self._load(hosted), "load ahead")

    async def _load(self, hosted: Hosted) -> None:
        try:
            await self.hosting.ensure(hosted, lambda: 0)
        except (SIEError, AdapterGone) as error:  # nobody waits for it; work that comes is answered with the reason
            _logger.warning("%s could not be loaded ahead: %s", hosted.name, error, extra={"model": hosted.name})

    async def upkeep(self, *, look: bool) -> None:
        """Once a second: credit and loads that depend on time. With `look`, every ten, what the broker knows. Raises BrokerError."""
        self.pulling.level()
        self._load_ahead()
        if look:
            self.pulling.refill_all()
            await self.pulling.find_consumers()
            await self.assignment.look(self.hosting.loaded_models())

    def _room(self, bulk: bool) -> batches.Load | None:
        """Interactive work does not wait at the broker for bulk work that is here."""
        if not self._link.connected or not self.admits():
            return None
        (cost, items), (bulk_cost, bulk_items) = self._held
        return batches.Load(cost + bulk * bulk_cost, items + bulk * bulk_items, self._lanes)

    def _refill_soon(self) -> None:
        """Once in this turn of the loop, however many call."""
        if not self._refilling:
            self._refilling = True
            asyncio.get_running_loop().call_soon(self._refill)

    def _refill(self) -> None:
        self._refilling = False
        self.pulling.refill()

    def _holds(self, model: str) -> bool:
        return model in self._coming or self.hosting.holds(model)

    def _known(self, held: Held) -> None:
        """Hosting counts it from now on, or it is gone."""
        if held.coming:
            held.coming = False
            self._coming[held.item.model] -= 1
            if not self._coming[held.item.model]:
                del self._coming[held.item.model]

    @property
    def _held_cost(self) -> int:
        return self._held[False][0] + self._held[True][0]

    @property
    def _lanes(self) -> int:
        return self._link.description.lanes if self._link.description else 1

    def _on_delivery(self, delivery: Delivery) -> None:
        now_s = self._clock()
        self._metrics.deliveries.labels("true" if delivery.delivered > 1 else "false").inc()
        self.pulling.note(delivery)
        if (known := self.leases.adopt(delivery)) is not None:
            _logger.info("delivery %d of work that is already in hand: its lease had lapsed", known.delivery.delivered)
            self._refill_soon()
            return
        lease = self.leases.hold(delivery)
        try:
            item = messages.decode_work(delivery.data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _logger.error("a work item could not be read and is removed: %s", error)
            self._refill_soon()
            self._work.start(self._bury(lease, InternalFailure("not a work item", reason="undecodable")), "bury")
            return
        self.pulling.estimate(delivery.consumer, item.cost)
        held = Held(lease, item, now_s, now_s + self._left_s(delivery, item), coming=True)
        self._coming[item.model] += 1
        self._count(held, max(1, item.cost))
        self._arrived.append(held)
        self._arrival.set()

    def _left_s(self, delivery: Delivery, item: WorkItem) -> float:
        """Seconds after which a delivery is late for certain: a redelivery keeps its age, and no doubt about the time counts against it."""
        left_s = item.budget_ms / 1000
        if math.isfinite(self.broker_clock.margin_s):
            left_s += self.broker_clock.margin_s + LATE_S - (self.broker_clock.now_s() - delivery.sent_s)
        return left_s

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
        """Drop what is held for these requests and is not at the device yet: nobody waits for it. Returns how many work items that were."""
        dropped = [
            held
            for held in (*self._arrived, *self._in_hand.values())
            if held.item.request in requests and not held.sealed_s and not held.settled
        ]
        for held in dropped:
            held.settled = True
            if held.job is not None:
                self._waiting.remove(held.job)
                held.job = None
            self._count(held, 0)
            self._metrics.settlements.labels("cancelled").inc()
            self._work.start(self._finish_cancelled(held), "cancelled")
        if dropped:
            self._wake.set()
        return len(dropped)

    async def _finish_cancelled(self, held: Held) -> None:
        failpoint("worker.before_cancelled_ack")
        await self.leases.finish(held.lease)
        self._let_go(held)

    def _still_wanted(self, group: list[Held]) -> list[Held]:
        """Without what was cancelled and what is too late; the latter is answered."""
        now_s = self._clock()
        late = [held for held in group if not held.settled and now_s >= held.deadline_s]
        if late:
            self._metrics.settlements.labels("late").inc(len(late))
            self._answer_all(late, GatewayTimeout("the budget of the request was over before it could run"))
        return [held for held in group if not held.settled and now_s < held.deadline_s]

    def _on_loaded(self, hosted: Hosted) -> None:
        self._metrics.loads.labels(hosted.name).inc()
        self.pulling.refill_all()
        self._work.start(self._loras.preload(hosted), "loras")

    def _count(self, held: Held, cost: int) -> None:
        if cost < held.counted:
            self._refill_soon()
        load = self._held[held.item.priority == "bulk"]
        load[0] += cost - held.counted
        load[1] += (cost > 0) - (held.counted > 0)
        held.counted = cost

    # preparing

    async def _prepare_arrivals(self) -> None:
        while True:
            await self._gather()
            arrived, self._arrived = [held for held in self._arrived if not held.settled], []
            self._in_hand.update((held.lease, held) for held in arrived)
            self._metrics.gathered.observe(len(arrived))
            groups: dict[tuple[str | int, ...], list[Held]] = defaultdict(list)
            for held in arrived:
                if held.item.payload:
                    self._work.start(self._fetch(held), "fetch")
                    continue
                item, options = held.item, held.item.options
                key = (item.model, item.profile, item.config_revision, item.operation, options.lora, options.truncate, options.max_tokens)
                groups[key].append(held)
            for group in groups.values():
                self._work.start(self._prepare(group), "prepare")
            self._refill_soon()

    async def _gather(self) -> None:
        """Wait for a delivery, then for those that are on their way, so that they are tokenised in one call."""
        await self._arrival.wait()
        began_s = last_s = self._clock()
        while (left_s := self._quantum.until_s(began_s, last_s) - self._clock()) > 0 and self._is_more_coming():
            self._arrival.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._arrival.wait()
            except TimeoutError:
                break
            last_s = self._clock()
        self._arrival.clear()

    def _is_more_coming(self) -> bool:
        """Whether what has arrived may get company: not if it fills a batch, nor if the broker told with it that this was all."""
        if len(self._arrived) >= self._limits.requests or sum(held.item.cost for held in self._arrived) >= self._limits.cost:
            return False
        told = {held.lease.delivery.consumer: held.lease.delivery.pending for held in self._arrived}
        return self._tokenising > 0 or (any(told.values()) and self.pulling.more_expected())

    async def _fetch(self, held: Held) -> None:
        """Get the inputs that its message could not hold, beside all other work, then prepare it by itself."""
        if self._fetching is None:
            if held.lease.delivery.delivered < MOST_HAND_BACKS:
                await self._hand_back(held)
            else:
                self._answer_all([held], NotReady("this worker has no SIE_PAYLOAD_STORE_URL to read the inputs of this request from"))
            return
        try:
            await self._fetching.fetch(held)
        except SIEError as error:
            self._answer_all([held], error)
            return
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("fetching failed")
            self._answer_all([held], InternalFailure("the worker failed while fetching the input"))
            return
        if held.settled:  # meanwhile, and let go before there was anything to give back
            self._fetching.let_go(held)
            return
        held.fetched_s = self._clock()
        await self._prepare([held])

    async def _prepare(self, group: list[Held]) -> None:
        """Bring work items of one model and one truncation to the waiting queue, or answer them with why not."""
        try:
            group = self._still_wanted(group)
            if not group:
                return
            hosted = self._host(group)
            if hosted is None:
                await self._not_ours(group)
                return
            count = functools.partial(_wanted, group)
            await self._ensure_ready(hosted, group[0].item.options.lora, count, until_s=max(held.deadline_s for held in group))
            group = self._still_wanted(group)
            if not group:
                return
            loaded_s = self._clock()
            self._tokenising += 1
            try:
                await self._tokenise(group, hosted)
            finally:
                self._tokenising -= 1
            for held in group:
                held.loaded_s = loaded_s
                held.tokenised_s = self._clock()
                self._enqueue(held)
        except SIEError as error:
            self._answer_all(group, error)
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("preparing failed")
            self._answer_all(group, InternalFailure("the worker failed while preparing the input"))
        self._wake.set()

    async def _not_ours(self, group: list[Held]) -> None:
        """This worker's catalogue does not know the model, or not its revision. Another one's may."""
        for held in group:
            if held.lease.delivery.delivered < MOST_HAND_BACKS:
                await self._hand_back(held)
                continue
            held.given_up = NotReady("the model was changed or removed while this request was on its way")
            self._answer_all([held], held.given_up)

    def _host(self, group: list[Held]) -> Hosted | None:
        """The residency for this work, or None if this worker's catalogue does not know that revision of the model."""
        item = group[0].item
        entry = self._feed.catalogue.entries.get(item.model)
        if entry is None or entry.revision != item.revision:
            return None
        hosted = self.hosting.of(self._feed.catalogue.resolve_profile(entry, item.profile, item.model))
        for held in group:
            held.hosted = hosted
            self.hosting.take(hosted)
            self._known(held)
            hosted.came_in(held.item.cost, held.received_s)
        return hosted

    async def ensure_ready(self, hosted: Hosted, lora: str, until_s: float) -> None:
        await self._ensure_ready(hosted, lora, until_s=until_s)

    async def _ensure_ready(
        self, hosted: Hosted, lora: str, items: Callable[[], int] | None = None, *, in_turn: bool = False, until_s: float
    ) -> None:
        """As Hosting.ensure, over any number of adapters, until `until_s`: what ends every adapter must not run for ever, nor keep its
        place while a load does not end. Without `items` it does not wait before the gate. Raises SIEError."""
        while (left_s := until_s - self._clock()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self.hosting.ensure(hosted, items or int, past_gate=items is None)
                if lora:
                    await self._loras.ensure(hosted, lora, in_turn=in_turn)
            except TimeoutError:
                break
            except AdapterGone:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_s - self._clock()):
                        await self._link.wait_connected()
            except ModelLoading:  # evicted before its LoRA came
                hosted.unload()
            else:
                if hosted.state == "loaded":  # else it went while its LoRA came
                    return
        raise GatewayTimeout("the budget of the request was over before its model was loaded")

    async def _tokenise(self, group: list[Held], hosted: Hosted) -> None:
        assert hosted.tokenizer is not None
        assert hosted.ready is not None
        operation = group[0].item.operation
        layout = hosted.ready.rows.get(operation)
        if layout is None:
            raise InvalidInput(f"{hosted.name} does not {operation}", reason="unsupported_task")
        work = [Work(held.item.inputs, held.item.query, held.item.options) for held in group]
        effort = sum(effort_of(layout, each) for each in work)
        made = await self._tokenizers.run(effort, functools.partial(rowing.make, hosted.tokenizer, layout, work))
        for held, each in zip(group, made, strict=True):
            held.layout, held.rows, held.shared, held.refused = layout.layout, each.rows, each.shared, each.error

    def _enqueue(self, held: Held) -> None:
        if held.settled:
            return
        if held.refused is not None:
            self._answer_all([held], held.refused)
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
        cost = sum(row.cost for row in runnable(held)[0])
        self._count(held, cost)
        return Job(key, cost, arrived_s, held, bulk=item.priority == "bulk", alone=held.lease.delivery.delivered > 1)

    # running

    @property
    def _depth(self) -> int:
        """Batches that may be at the adapter at once."""
        ahead = self._lanes + self._settings.rust_pipeline_depth - 1
        return min(ahead, self._settings.max_concurrent_batches, self._settings.pool_size)

    def _device(self) -> Device:
        depth = self._depth
        more_expected = bool(self._arrived or self._tokenising) or self.pulling.more_expected()
        is_ours = self._link.connected and not self._trials.holds_device
        return Device(self._sent, min(self._lanes, depth), depth if is_ours else 0, more_expected)

    async def _dispatch(self) -> None:
        while True:
            self._wake.clear()
            action = batches.next_batch(self._waiting, self._clock(), self._limits, self._device())
            if isinstance(action, Batch):
                for job in action.jobs:
                    job.work.job = None
                    self._count(job.work, 0)
                self._sent += 1
                self._work.start(self._run(action), "batch")
                continue
            timeout_s = max(0.0, action.until_s - self._clock()) if isinstance(action, Wait) else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()

    async def _run(self, batch: Batch[Held], *, in_turn: bool = False) -> bool:
        """Run a batch and answer it, or have it run again. False if its LoRA was not there and it is the caller's `in_turn`."""
        batch = self._fit(batch)
        if not batch.jobs:
            self._left_device()
            return True
        jobs = [job.work for job in batch.jobs]
        sealed_s = self._clock()
        for held in jobs:
            held.sealed_s = sealed_s
            if held.hosted is not None:
                held.hosted.used_s = sealed_s
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
        try:
            frame, note = self._frame(batch, f"{self._id}-{self._batch_number}")
            done = await self._link.run_batch(frame, on_started)
            ran = batch.cost
            recording.ran(batch, note, done, self._lanes)
            self._answer_batch(jobs, done, note)
            answered_s = self._clock()
            for held in jobs:
                self._quantum.answered(answered_s - held.received_s, answered_s)
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
                self._answer_all(jobs, error)
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("a batch failed")
            self._answer_all(jobs, InternalFailure("the worker failed while running the batch"))
        finally:
            self.rate.ended(ran, self._clock())
            self._left_device()
        return True

    def _fit(self, batch: Batch[Held]) -> Batch[Held]:
        """Without what must not run: late or cancelled since it was prepared, or suspect by what was learnt since."""
        wanted = self._still_wanted([job.work for job in batch.jobs])
        suspects = [held for held in wanted if self._is_suspect(held)]
        for held in suspects:
            self._trials.add(held)
        if len(wanted) == len(batch.jobs) and not suspects:
            return batch
        jobs = tuple(job for job in batch.jobs if job.work in wanted and job.work not in suspects)
        return Batch(batch.key, jobs, sum(job.cost for job in jobs))

    def _left_device(self) -> None:
        self._sent -= 1
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
        count = functools.partial(_wanted, [held])
        self.hosting.park(held.hosted, count)
        return functools.partial(self.hosting.unpark, held.hosted, count)

    def wake(self) -> None:
        self._wake.set()

    def frame_of(self, held: Held) -> tuple[ipc.RunBatch, BatchNote]:
        job = self._job(held, held.received_s)
        self._count(held, 0)  # it does not wait for the device
        self._batch_number += 1
        return self._frame(Batch(job.key, (job,), job.cost), f"{self._id}-{self._batch_number}")

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
                    await self._ensure_ready(hosted, lora, in_turn=True, until_s=max(held.deadline_s for held in jobs))
                    self._sent += 1
                    done = await self._run(batch, in_turn=True)
        except SIEError as error:
            self._answer_all(jobs, error)
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("loading a LoRA again failed")
            self._answer_all(jobs, InternalFailure("the worker failed while loading the LoRA"))
        self._wake.set()

    @staticmethod
    def _frame(batch: Batch[Held], name: str) -> tuple[ipc.RunBatch, BatchNote]:
        """The batch as the adapter reads it, and what is told of it."""
        parts = []
        for job in batch.jobs:
            item = job.work.item
            run, chosen = runnable(job.work)
            parts.append(Part(run, Work([item.inputs[index] for index in chosen], item.query, item.options)))
        first, key = batch.jobs[0].work, batch.key
        frame = rowing.to_batch(
            name, key.residency, first.item.operation, first.layout, parts, pooling=key.pooling, lora=key.lora,
            traceparent=first.item.traceparent,
        )  # fmt: skip
        attention = sum(len(row.ids) ** 2 for part in parts for row in part.rows)
        return frame, BatchNote(name, sum(len(part.work.inputs) for part in parts), len(parts), batch.cost, attention)

    def _on_gone(self, jobs: list[Held], *, suspects: bool) -> None:
        """The adapter went away with this batch. If the device had it, its inputs are suspects: from now on each runs alone."""
        self._metrics.adapter_deaths.inc()
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
        for held in self._still_wanted(jobs):
            self._work.start(self._once_ready(held), "again")

    async def _once_ready(self, held: Held) -> None:
        assert held.hosted is not None
        try:
            count = functools.partial(_wanted, [held])
            await self._ensure_ready(held.hosted, held.item.options.lora, count, until_s=held.deadline_s)
            if held.settled:
                return
            held.job = self._job(held, held.received_s)
            self._waiting.put_back(held.job)
        except SIEError as error:
            self._answer_all([held], error)
        except Exception:  # the root of a task: what it held must be answered
            _logger.exception("running a work item again failed")
            self._answer_all([held], InternalFailure("the worker failed while preparing the input"))
        self._wake.set()

    def _on_link(self, connected: bool) -> None:
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
            self._metrics.batch_size.labels(hosted.name).observe(note.items)
            self._metrics.tokens.labels(hosted.name).inc(note.tokens)

    def _answer_all(self, group: list[Held], error: SIEError) -> None:
        """The same error for every input."""
        info = error.info()
        for held in group:
            self._settle(held, (Failed(info),) * (held.item.count or len(held.item.inputs)), b"")

    def settle(
        self, held: Held, outcomes: tuple[Outcome, ...], block: bytes, done: ipc.BatchDone | None, note: BatchNote | None
    ) -> None:
        self._settle(held, outcomes, block, done, note)

    def _settle(
        self, held: Held, outcomes: tuple[Outcome, ...], block: bytes, done: ipc.BatchDone | None = None, note: BatchNote | None = None
    ) -> None:
        if held.settled:
            return
        held.settled = True
        item, hosted, now_s = held.item, held.hosted, self._clock()
        self._count(held, 0)
        stages = stages_of(held, now_s, done)
        batch = msgspec.structs.replace(note or BatchNote(), deliveries=held.lease.delivery.delivered)
        fingerprint = hosted.fingerprint(item.profile, item.options.lora) if hosted else ""
        result = WorkResult(
            item.request, item.chunk, self._id, outcomes, block, item.attempt, item.revision, fingerprint, stages, batch
        )
        self._let_model_go(held)  # a result that nobody confirms needs its lease, not its model
        self._work.start(self._answer(held, result, hosted.name if hosted else "other"), "answer")

    async def _answer(self, held: Held, result: WorkResult, name: str) -> None:
        try:
            await self._settlement.answer(held.lease, held.item, result, held.deadline_s, self._burial(held))
        finally:
            self._let_go(held)
            self._metrics.answered(name, held.item.operation, result)

    def _burial(self, held: Held) -> Callable[[], Awaitable[object]] | None:
        """What is to be done once the client has its answer and before the message goes: work that was given up is kept."""
        delivery = held.lease.delivery
        if held.given_up is not None:
            return functools.partial(self._dead_letters.write, delivery, held.given_up.info())
        if held.dead:
            workers = tuple(worker for mark in held.dead for worker in mark.workers)
            deaths = max(mark.deaths for mark in held.dead)
            return functools.partial(self._dead_letters.write, delivery, refusal().info(), deaths=deaths, workers=workers)
        return None

    async def _hand_back(self, held: Held) -> None:
        if held.settled:
            return
        held.settled = True
        self._count(held, 0)
        self._metrics.settlements.labels("handed_back").inc()
        await self.leases.hand_back(held.lease, HAND_BACK_DELAY_S)
        self._let_go(held)

    def _let_go(self, held: Held) -> None:
        self._in_hand.pop(held.lease, None)
        self._known(held)
        if self._fetching is not None:
            self._fetching.let_go(held)
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

    def held(self) -> tuple[int, dict[str, float]]:
        """Of all that is taken in and not settled: its tokens, as estimated until it is tokenised, and for each model the seconds since the
        oldest was delivered."""
        cost, oldest_s = 0, dict[str, float]()
        now_s = self._clock()
        for held in (*self._arrived, *self._in_hand.values()):
            cost += sum(row.cost for row in held.rows) or held.item.cost
            if held.hosted is not None:
                oldest_s[held.hosted.name] = max(oldest_s.get(held.hosted.name, 0.0), now_s - held.received_s)
        return cost, oldest_s

    def most(self) -> tuple[int, int]:
        """The tokens and the work items of one priority that this worker takes in at most: full batches that wait, and those that are at
        the adapter."""
        full = batches.READY_PER_LANE * self._lanes + self._depth
        return full * self._limits.cost, full * self._limits.requests

    def ahead(self) -> tuple[int, int]:
        """The tokens of a full batch, and how many batches are at the adapter at most."""
        return self._limits.cost, self._depth

    async def drain(self, grace_s: float) -> None:
        """Stop pulling, finish what is held, hand back what does not finish in time. `grace_s` is for all of it: a broker that does not
        answer has its share of it."""
        end_s = self._clock() + grace_s
        await asyncio.gather(self.assignment.stop(), self.pulling.stop())
        try:
            async with asyncio.timeout(max(0.0, end_s - self._clock())):
                await self.leases.empty.wait()
        except TimeoutError:
            _logger.warning("draining took longer than %.0f s: %d work items are handed back", grace_s, len(self.leases))
        await self._work.cancel()
        for lease in self.leases.all():
            failpoint("worker.before_hand_back")
            await self.leases.hand_back(lease)
        await self._loops.cancel()
        await asyncio.gather(self.hosting.stop(), self._loras.stop(), self._marks.close(), *(each.stop() for each in self._cancels))
        if self._ledger:
            self._ledger.close()
        self._tokenizers.close()


def _wanted(group: list[Held]) -> int:
    """How many of them still need their model."""
    return sum(not held.settled for held in group)
