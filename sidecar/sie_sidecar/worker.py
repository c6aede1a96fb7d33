"""A work item's way through the worker. All state belongs to one event loop; every path out of a stage resolves what it held.

    delivery ─► held (leased) ─► prepared: model loaded, texts tokenised ─► waiting ─► batch at the adapter ─► answered, acked
                     │                    └─► load failed: answered with the error          │
                     └─► unknown here: handed back                adapter died: suspects run alone, the second death is poison
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable

import msgspec

from sie_contracts import ipc, messages
from sie_contracts.broker import Broker, Delivery
from sie_contracts.errors import GatewayTimeout, InferenceFailed, InternalFailure, InvalidInput, ModelLoading, NotReady, SIEError
from sie_contracts.messages import BatchNote, Failed, Outcome, WorkResult
from sie_contracts.runtime.feed import CatalogueFeed
from sie_contracts.runtime.process import Tasks
from sie_contracts.settings import Settings
from sie_contracts.topology import Lane
from sie_sidecar import batch as batches
from sie_sidecar import rows as rowing
from sie_sidecar.batch import Batch, BatchKey, Device, Job, Limits, Wait, Waiting
from sie_sidecar.held import Held, cut, merge, runnable, stages_of
from sie_sidecar.hosting import Hosted, Hosting
from sie_sidecar.lease import Leases
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.loras import Loras
from sie_sidecar.metrics import Metrics
from sie_sidecar.pulling import Pulling
from sie_sidecar.rows import Part, Work, effort_of
from sie_sidecar.settlement import Settlement
from sie_sidecar.tokens import TokenizerPool

HAND_BACK_DELAY_S = 0.5
MOST_HAND_BACKS = 5  # deliveries of work whose model nobody here knows: time enough for a catalogue that lags, not for one that moved on
POISON_DEATHS = 2
_logger = logging.getLogger("sie.sidecar.worker")


class Worker:
    """Pulls, prepares, batches, runs and answers."""

    def __init__(
        self, settings: Settings, broker: Broker, feed: CatalogueFeed, link: AdapterLink, lane: Lane, worker_id: str, limits: Limits,
        metrics: Metrics, on_failure: Callable[[], None], on_change: Callable[[], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._broker = broker
        self._feed = feed
        self._link = link
        self._lane = lane
        self._id = worker_id
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self.leases = Leases(float(settings.ack_wait_s), link.is_fresh, clock)
        self.hosting = Hosting(link, clock, on_change, settings.swap_after_ms / 1000)
        self._loras = Loras(link, clock)
        self.hosting.on_loaded = self._on_loaded
        self._settlement = Settlement(broker, self.leases, metrics, clock)
        self._tokenizers = TokenizerPool(settings.preprocessor_workers)
        self._waiting: Waiting[Held] = Waiting()
        self._arrived: list[Held] = []
        self._arrival = asyncio.Event()
        self._wake = asyncio.Event()
        self._tokenising = 0
        self._held_cost = 0
        self._sent = 0
        self._batch_number = 0
        self._work = Tasks(_logger, on_failure)
        self._loops = Tasks(_logger, on_failure)
        self.pulling = Pulling(broker, lane, limits, self._on_delivery, self._room, clock)
        link.listeners.append(self._on_link)

    # taking in

    async def start(self) -> None:
        """Begin to pull. The lane's stream must exist. Raises BrokerError."""
        self._loops.start(self._prepare_arrivals(), "intake")
        self._loops.start(self._dispatch(), "dispatch")
        self._loops.start(self.leases.run(), "leases")
        await self.pulling.start()

    def _room(self) -> tuple[int, int] | None:
        return (self._held_cost, self._lanes) if self._link.connected else None

    @property
    def _lanes(self) -> int:
        return self._link.description.lanes if self._link.description else 1

    def _on_delivery(self, delivery: Delivery) -> None:
        now_s = self._clock()
        self._metrics.deliveries.labels("true" if delivery.delivered > 1 else "false").inc()
        if (known := self.leases.adopt(delivery)) is not None:
            _logger.info("delivery %d of work that is already in hand: its lease had lapsed", known.delivery.delivered)
            return
        lease = self.leases.hold(delivery)
        try:
            item = messages.decode_work(delivery.data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _logger.error("a work item could not be read and is removed: %s", error)
            self._work.start(self.leases.refuse(lease, "not a work item"), "refuse")
            return
        self.pulling.note(delivery, item.cost)
        held = Held(lease, item, now_s, now_s + item.budget_ms / 1000)
        self._count(held, item.cost)
        self._arrived.append(held)
        self._arrival.set()

    def _on_loaded(self, hosted: Hosted) -> None:
        self._metrics.loads.labels(hosted.name).inc()
        self._work.start(self._loras.preload(hosted), "loras")

    def _count(self, held: Held, cost: int) -> None:
        self._held_cost += cost - held.counted
        held.counted = cost

    # preparing

    async def _prepare_arrivals(self) -> None:
        while True:
            await self._arrival.wait()
            self._arrival.clear()
            arrived, self._arrived = self._arrived, []
            groups: dict[tuple[str | int, ...], list[Held]] = defaultdict(list)
            for held in arrived:
                item, options = held.item, held.item.options
                key = (item.model, item.profile, item.config_revision, item.operation, options.lora, options.truncate, options.max_tokens)
                groups[key].append(held)
            for group in groups.values():
                self._work.start(self._prepare(group), "prepare")
            self.pulling.refill()

    async def _prepare(self, group: list[Held]) -> None:
        """Bring work items of one model and one truncation to the waiting queue, or answer them with why not."""
        try:
            hosted = self._host(group)
            if hosted is None:
                for held in group:
                    if held.lease.delivery.delivered < MOST_HAND_BACKS:
                        await self._hand_back(held)
                    else:
                        self._answer_all([held], NotReady("the model was changed or removed while this request was on its way"))
                return
            await self._ensure_ready(hosted, group[0].item.options.lora, len(group))
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
        return hosted

    async def _ensure_ready(self, hosted: Hosted, lora: str, items: int = 1, *, in_turn: bool = False) -> None:
        """As Hosting.ensure, over any number of adapters: leases bound the wait, not this loop."""
        while True:
            try:
                await self.hosting.ensure(hosted, items)
                if lora:
                    await self._loras.ensure(hosted, lora, in_turn=in_turn)
            except AdapterGone:
                await self._link.wait_connected()
            except ModelLoading:  # evicted before its LoRA came
                hosted.unload()
            else:
                return

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
        if held.refused is not None:
            self._answer_all([held], held.refused)
            return
        if not runnable(held)[0]:
            self._settle(held, merge(held, ()), b"")
            return
        self._waiting.add(self._job(held, self._clock()))

    def _job(self, held: Held, arrived_s: float) -> Job[Held]:
        assert held.hosted is not None
        item = held.item
        key = BatchKey(held.hosted.name, item.revision, item.operation, item.options.pooling, item.options.lora)
        cost = sum(row.cost for row in runnable(held)[0])
        self._count(held, cost)
        return Job(key, cost, arrived_s, held, bulk=item.priority == "bulk", alone=held.deaths > 0)

    # running

    def _device(self) -> Device:
        lanes = self._lanes
        depth = min(lanes + self._settings.rust_pipeline_depth - 1, self._settings.max_concurrent_batches, self._settings.pool_size)
        more_expected = bool(self._arrived or self._tokenising) or self.pulling.more_expected()
        return Device(self._sent, min(lanes, depth), depth if self._link.connected else 0, more_expected)

    async def _dispatch(self) -> None:
        while True:
            self._wake.clear()
            action = batches.next_batch(self._waiting, self._clock(), self._limits, self._device())
            if isinstance(action, Batch):
                for job in action.jobs:
                    self._count(job.work, 0)
                self._sent += 1
                self._work.start(self._run(action), "batch")
                self.pulling.refill()
                continue
            timeout_s = max(0.0, action.until_s - self._clock()) if isinstance(action, Wait) else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), timeout_s)

    async def _run(self, batch: Batch[Held], *, in_turn: bool = False) -> bool:
        """Run a batch and answer it, or have it run again. False if its LoRA was not there and it is the caller's `in_turn`."""
        jobs = [job.work for job in batch.jobs]
        sealed_s = self._clock()
        for held in jobs:
            held.sealed_s = sealed_s
            if held.hosted is not None:
                held.hosted.used_s = sealed_s
        self._metrics.batches.set(self._sent)
        started = False

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
            self._answer_batch(jobs, done, note)
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
            self._sent -= 1
            self._metrics.batches.set(self._sent)
            self._wake.set()
        return True

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
                    await self._ensure_ready(hosted, lora, len(jobs), in_turn=True)
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
        """The adapter went away with this batch. If the device had it, its items are suspects: alone from now on, poison at the second."""
        self._metrics.adapter_deaths.inc()
        poisoned = []
        for held in jobs:
            held.deaths += suspects
            if held.deaths >= POISON_DEATHS:
                poisoned.append(held)
        if poisoned:
            _logger.error("%d work items ended two adapters and are refused", len(poisoned))
            self._answer_all(poisoned, InferenceFailed("this input ended the inference process twice", reason="poison"))
        self._again([held for held in jobs if held.deaths < POISON_DEATHS])

    def _again(self, jobs: list[Held]) -> None:
        for held in jobs:
            if held.hosted is not None:
                held.hosted.unload()
            if self._clock() >= held.deadline_s:  # nobody awaits it, and what ends every adapter must not run for ever
                self._answer_all([held], GatewayTimeout("the budget of the request was over before it could run"))
            else:
                self._work.start(self._once_ready(held), "again")

    async def _once_ready(self, held: Held) -> None:
        assert held.hosted is not None
        try:
            await self._ensure_ready(held.hosted, held.item.options.lora)
            self._waiting.put_back(self._job(held, held.received_s))
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
        view, start = memoryview(done.block), 0
        for held in jobs:
            count = len(runnable(held)[1])
            outcomes, block = cut(done.outcomes[start : start + count], view)
            start += count
            self._settle(held, merge(held, outcomes), block, done, note)
        if jobs and jobs[0].hosted is not None:
            self._metrics.batch_size.labels(jobs[0].hosted.name).observe(note.items)
            self._metrics.tokens.labels(jobs[0].hosted.name).inc(note.tokens)

    def _answer_all(self, group: list[Held], error: SIEError) -> None:
        """The same error for every input."""
        info = error.info()
        for held in group:
            self._settle(held, tuple(Failed(info) for _ in held.item.inputs), b"")

    def _settle(
        self, held: Held, outcomes: tuple[Outcome, ...], block: bytes, done: ipc.BatchDone | None = None, note: BatchNote | None = None
    ) -> None:
        item, hosted, now_s = held.item, held.hosted, self._clock()
        self._count(held, 0)
        stages = stages_of(held, now_s, done)
        batch = msgspec.structs.replace(note or BatchNote(), deliveries=held.lease.delivery.delivered)
        fingerprint = hosted.fingerprint(item.profile, item.options.lora) if hosted else ""
        result = WorkResult(
            item.request, item.chunk, self._id, outcomes, block, item.attempt, item.revision, fingerprint, stages, batch
        )
        self._work.start(self._answer(held, result), "answer")

    async def _answer(self, held: Held, result: WorkResult) -> None:
        name = held.hosted.name if held.hosted else "other"
        try:
            await self._settlement.answer(held.lease, held.item, result, held.deadline_s)
        finally:
            self._let_go(held)
            self._metrics.answered(name, held.item.operation, result)

    async def _hand_back(self, held: Held) -> None:
        self._count(held, 0)
        self._metrics.settlements.labels("handed_back").inc()
        await self.leases.hand_back(held.lease, HAND_BACK_DELAY_S)
        self._let_go(held)

    def _let_go(self, held: Held) -> None:
        if held.hosted is not None:
            self.hosting.let_go(held.hosted)
            held.hosted = None

    # ending

    @property
    def depth(self) -> int:
        return len(self.leases)

    async def drain(self, grace_s: float) -> None:
        """Stop pulling, finish what is held, hand back what does not finish in time."""
        await self.pulling.stop()
        try:
            await asyncio.wait_for(self.leases.empty.wait(), grace_s)
        except TimeoutError:
            _logger.warning("draining took longer than %.0f s: %d work items are handed back", grace_s, len(self.leases))
        await self._work.cancel()
        for lease in self.leases.all():
            await self.leases.hand_back(lease)
        await self._loops.cancel()
        self._tokenizers.close()
