"""Running of tokenised work items: they wait for a device, the adapter runs them in batches, and their results are sent
to the gateways. If the model was evicted or the adapter is lost before the device has begun a batch, its work items
wait again.

    add ──► DeviceQueue ──► batch ──► adapter ──► results sent
             ▲                          ├──► model evicted, or adapter lost: load it, then put back ──┐
             └──────────────────────────┼─────────────────────────────────────────────────────────────┘
                                        ├──► LoRA evicted: load it, and run before another LoRA replaces it
                                        └──► adapter died during the batch: `isolate` runs the inputs one by one

`DeviceQueue` has the work that waits for one device and counts the batches at its adapter. It decides which batch is
sent next.

    put ──► waiting ──► next: a batch (`batch.next_batch`) ──► run ──► end
       └──► writing ──► next: one work item ──► run ──► end

Some work items generate text token by token. They wait in a separate queue (`writing`). They use no lane of the device
(a lane runs one batch at a time), because the adapter runs all of them together. They do not lower the credit, which is
the number of deliveries that the broker may still send.

Each device has its own queue and its own dispatch. `DeviceQueues` has the queues of all devices. If the adapter of a
device is lost, the work that waits for this device moves to devices with an adapter.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from sie_contracts.errors import LoraLoading, ModelLoading
from sie_contracts.models import costs
from sie_contracts.settings import Settings
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import BatchNote
from sie_contracts.wire.trace_context import NONE, Context
from sie_runtime.process import Tasks, wait_set
from sie_sidecar import batch as batches
from sie_sidecar import spans
from sie_sidecar.batch import Batch, BatchKey, BatchLimits, DeviceForecast, Load, Quantum, Rate, Waiting, WaitUntil
from sie_sidecar.in_flight import InFlight, Inventory, Loading, changed, cut, merge, runnable, unsettled
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.metrics import SidecarMetrics
from sie_sidecar.models import ModelState, WorkerModels
from sie_sidecar.prepare import rows
from sie_sidecar.prepare.rows import BatchPart, WorkItemInput
from sie_sidecar.settle import Settle

if TYPE_CHECKING:
    from sie_runtime.spans import Span, Tracer

WRITTEN_AT_ONCE = 16  # maximum number of text-generating work items at one adapter; each item needs a connection
# maximum number of work items that generate text and wait for a device; further work items stay in the broker's queue
WRITTEN_READY = 16
_LONGEST_S = 86_400.0  # seconds after which the adapter stops generating a text, even if its deadline is later


class DeviceQueue:
    """Tokenised work items for one device, and the batches at its adapter."""

    def __init__(
        self,
        settings: Settings,
        worker_id: str,
        limits: BatchLimits,
        link: AdapterLink,
        inventory: Inventory,
        tracer: Tracer | None,
    ) -> None:
        self._pipeline_depth = settings.rust_pipeline_depth
        # limit of the number of batches at the adapter, from the worker's settings
        self._most = min(settings.max_concurrent_batches, settings.pool_size)
        # names of batches must be unique in a worker with several devices
        self._name = f"{worker_id}.{link.number}" if link.number else worker_id
        self.limits = limits
        self.link = link
        self._inventory = inventory
        self._tracer = tracer
        self.waiting: Waiting[InFlight] = Waiting()
        self.writing: Waiting[InFlight] = Waiting()
        self.wake = asyncio.Event()  # set when a batch may be due
        self._ended = asyncio.Event()  # set when a batch has ended
        self.is_reserved = False  # true while the device is reserved for an input that runs alone
        self.sent = 0  # number of batches at the adapter, not counting batches that generate text
        # id() of a work item for which the adapter generates text -> event that makes the adapter stop, and timer that
        # sets the event at the work item's deadline
        self._written: dict[int, tuple[asyncio.Event, asyncio.TimerHandle]] = {}
        self.writers: set[str] = set()  # names of consumers that delivered work items that generate text
        self.number = 0  # number of the last sent batch; the name of a batch ends with its number
        self.rate = Rate()
        self._ahead = DeviceForecast()

    @property
    def depth(self) -> int:
        """Return how many batches may run or wait at the adapter."""
        ahead = self.link.lanes + self._pipeline_depth - 1
        return min(ahead, self._most)

    def capacity(self) -> tuple[int, int]:
        """Return how many tokens and work items of one priority may wait for this device or be at its adapter."""
        full = batches.READY_PER_LANE * self.link.lanes + self.depth
        return full * self.limits.cost, full * self.limits.requests

    @property
    def at_adapter(self) -> int:
        """Return how many batches are at the adapter, including batches that generate text."""
        return self.sent + len(self._written)

    def is_behind(self, hosted: ModelState) -> bool:
        """Return True if this model has work and the device cannot keep up: it runs as many batches as it can, and in
        addition a batch waits at the adapter or work of this model waits in the queue.
        """
        lanes = min(self.link.lanes, self.depth)
        is_queued = any(hosted.name in line.models for line in self.waiting.lines)
        return bool(hosted.held) and (self.sent > lanes or (self.sent == lanes and is_queued))

    def _weigh(self, flight: InFlight, arrived_s: float) -> None:
        """Set the key and the costs of a tokenised work item, and count its tokens as waiting."""
        assert flight.hosted is not None
        item, ready = flight.item, flight.hosted.ready
        padded = ready is not None and ready.loaded.attention.endswith(" padded")
        flight.key = BatchKey(
            flight.hosted.name, item.revision, item.operation, item.options.pooling, item.options.lora, padded
        )
        cost = uncounted = squares = media_bytes = 0
        for row in runnable(flight)[0]:
            tokens = row.cost
            cost += tokens
            uncounted += row.uncounted
            squares += tokens**2
            media_bytes += row.media_bytes
        self._inventory.count(flight, cost)
        flight.cost, flight.media_bytes, flight.arrived_s = cost - uncounted, media_bytes, arrived_s
        flight.alone = flight.lease.delivery.delivered > 1
        crossover = ready.loaded.crossover_tokens if ready is not None else 0
        flight.time_cost = costs.text_cost(cost, squares, crossover)
        rows = ready.rows.get(item.operation) if ready is not None else None
        flight.writes = rows is not None and rows.writes

    def put(self, flight: InFlight, *, back: bool = False) -> None:
        """Queue a tokenised work item. With `back`, insert the item by its time of delivery, because it comes back from
        a lost batch or from `Isolate`.
        """
        self._weigh(flight, flight.received_s if back else time.monotonic())
        flight.move("waiting")
        if flight.writes:
            self._inventory.count(flight, 0)
            self.writers.add(flight.lease.delivery.consumer)
        (self.writing if flight.writes else self.waiting).add(flight, back=back)

    def withdraw(self, flight: InFlight) -> None:
        """Remove a work item from its queue if it waits in a queue of this device."""
        if flight.stage == "waiting":
            (self.writing if flight.writes else self.waiting).remove(flight)

    def withdraw_all(self) -> list[InFlight]:
        """Remove all work items that wait for this device. Return them in the order of arrival."""
        flights = sorted([*self.waiting, *self.writing], key=lambda flight: flight.arrived_s)
        for flight in flights:
            self.withdraw(flight)
        return flights

    def abandon(self, flight: InFlight) -> bool:
        """Let the adapter stop a work item that generates text. Return False if no such item is at the adapter."""
        if id(flight) not in self._written:
            return False
        self._written[id(flight)][0].set()
        return True

    def next(self, *, more_expected: bool) -> Batch[InFlight] | WaitUntil | None:
        """Return the batch to send now, and count it as sent; WaitUntil if no batch is due yet; None if nothing can be
        sent before `wake` is set. `more_expected`: more deliveries are on their way or being tokenised.
        """
        now_s, lanes, depth = time.monotonic(), self.link.lanes, self.depth
        allowed = depth if self.link.connected and not self.is_reserved else 0
        busy_s = self._ahead.busy_s(now_s, lanes) if self.sent else 0.0
        device = batches.DeviceLoad(self.sent, min(lanes, depth), allowed, more_expected, busy_s)
        action = batches.next_batch(self.waiting, now_s, self.limits, device)
        if not isinstance(action, Batch) and allowed and len(self._written) < WRITTEN_AT_ONCE:
            single = replace(self.limits, requests=1)
            device = batches.DeviceLoad(0, WRITTEN_AT_ONCE, WRITTEN_AT_ONCE, False)
            action = batches.next_batch(self.writing, now_s, single, device) or action
        if isinstance(action, Batch):
            for flight in action.entries:
                flight.move("sealed")
                self._inventory.count(flight, 0)
            self.begin(action)
        return action

    def begin(self, batch: Batch[InFlight]) -> None:
        """Count a batch as being at the adapter until `end` is called, even if the batch waits for a connection."""
        if batch.writes:
            flight = batch.entries[0]
            abandoned = asyncio.Event()
            # nobody waits for the text after the request's deadline: stop the adapter then, which frees memory
            timer = asyncio.get_running_loop().call_later(
                min(max(0.0, flight.deadline_s - time.monotonic()), _LONGEST_S), abandoned.set
            )
            self._written[id(flight)] = abandoned, timer
            return
        self.sent += 1
        self._ahead.sent(
            id(batch),
            self.waiting.times_of(batch.key.residency).seconds(batch.time_cost),
            time.monotonic(),
            self.link.lanes,
        )

    def end(self, batch: Batch[InFlight]) -> None:
        if batch.writes:
            flight = batch.entries[0]
            self._written.pop(id(flight))[1].cancel()
            self._inventory.written_ended(flight)
        else:
            self.sent -= 1
            self._ahead.ended(id(batch), time.monotonic(), self.link.lanes)
        self._ended.set()
        self.wake.set()

    async def run(self, batch: Batch[InFlight], on_started: Callable[[], None]) -> tuple[ipc.BatchDone, BatchNote]:
        """Run a batch at the adapter. Call `on_started` when the device begins. Raises AdapterGone, SIEError."""
        self.number += 1
        flights = batch.entries
        with spans.batch(self._tracer, flights) if self._tracer is not None else contextlib.nullcontext() as span:
            frame, note = _frame(batch, f"{self._name}-{self.number}", span)
            # event that makes the adapter stop generating text; None if the batch generates no text
            abandoned, _ = self._written.get(id(flights[0]), (None, None))
            done = await self.link.run_batch(frame, on_started, abandoned)
        if len(done.outcomes) != note.items:
            raise RuntimeError(f"the adapter got {note.items} inputs and returned {len(done.outcomes)} outcomes")
        return done, note

    def alone(self, flight: InFlight) -> Batch[InFlight]:
        """Return a batch of only this work item, for `run`. Raises NotReady if the model's catalogue entry has changed;
        the gateway then publishes the work item again.
        """
        if flight.is_outdated:
            raise changed()
        self._weigh(flight, flight.received_s)
        self._inventory.count(flight, 0)
        return batches.batch_of([flight])

    async def reserve(self) -> None:
        """Send no more batches until `end_reservation` is called. Wait until no batch is left at the adapter."""
        self.is_reserved = True
        while self.sent or self._written:
            await self.next_end()

    async def next_end(self) -> None:
        self._ended.clear()
        await self._ended.wait()

    def end_reservation(self) -> None:
        if self.is_reserved:
            self.is_reserved = False
            self.wake.set()


class DeviceQueues:
    """Queues of all devices of a worker."""

    def __init__(self, models: WorkerModels, inventory: Inventory, limits: BatchLimits) -> None:
        self._models = models
        self._inventory = inventory
        self.limits = limits
        self.all: list[DeviceQueue] = []  # the index is the number of the device

    def queue_of(self, flight: InFlight) -> DeviceQueue:
        """Return the queue of the device to which this work item is assigned."""
        assert flight.hosted is not None
        return self.all[flight.hosted.device]

    def wake(self) -> None:
        """Let every device check again whether a batch is due."""
        for queue in self.all:
            queue.wake.set()

    @property
    def connected(self) -> list[DeviceQueue]:
        return [queue for queue in self.all if queue.link.connected]

    def capacity(self) -> tuple[int, int]:
        """Return the sums of `DeviceQueue.capacity` over connected devices. If none is connected, return the capacity
        of the first device.
        """
        capacities = [queue.capacity() for queue in self.connected or self.all[:1]]
        return sum(cost for cost, _ in capacities), sum(items for _, items in capacities)

    @property
    def depth(self) -> int:
        """Return how many batches may be at all adapters together."""
        return sum(queue.depth for queue in self.connected or self.all[:1])

    @property
    def tokens_per_s(self) -> float:
        """Return the sum of tokens per second over the devices; 0 while no device has finished a batch. For a device
        that has not finished a batch, add the mean of the other devices.
        """
        queues = self.connected or self.all
        rates = [rate for queue in queues if (rate := queue.rate.tokens_per_s)]
        return sum(rates) * len(queues) / len(rates) if rates else 0.0

    def backlog(self, bulk: bool) -> Load | None:
        """Return the work at this worker that runs before a new work item of this priority: for an interactive item,
        bulk work does not count. None if no device is connected.
        """
        lanes = 0
        for queue in self.all:
            if queue.link.connected:
                lanes += queue.link.lanes
        return Load(*self._inventory.load(bulk=bulk), lanes) if lanes else None

    def narrowed(self, load: Load, bulk: bool, models: Collection[str]) -> Load:
        """Return the load of the connected devices on which at least one of `models` accepts work. If there is no such
        device, return `load`.
        """
        open_on = {hosted.device for model in models for hosted in self._models.of_model(model) if hosted.is_open}
        able = [queue.link.number for queue in self.connected if queue.link.number in open_on]
        if not able:
            return load
        return Load(*self._inventory.load(bulk=bulk, devices=able), sum(self.all[number].link.lanes for number in able))

    def is_full_of(self, consumer: str) -> bool:
        """Return True if this consumer's work generates text, and WRITTEN_READY items of such work wait for each device
        that got such work from it.
        """
        is_full = False
        for queue in self.all:
            if consumer in queue.writers:
                if len(queue.writing) < WRITTEN_READY:
                    return False
                is_full = True
        return is_full


def _frame(batch: Batch[InFlight], name: str, span: Span | None) -> tuple[ipc.RunBatch, BatchNote]:
    """Return the frame that sends a batch to the adapter, and the note about the batch for results and metrics. `span`:
    the batch's span in a trace; if None, the batch belongs to the trace of its first work item. Raises ModelLoading if
    the model is not loaded: without its fingerprint, the adapter could run another catalogue entry of the model.
    """
    first, key = batch.entries[0], batch.key
    ready = first.hosted.ready if first.hosted is not None else None
    if ready is None:
        raise ModelLoading(f"{key.residency} is not loaded any more: it was unloaded, or its adapter ended")
    parts = []
    tokens = attention = items = 0
    for flight in batch.entries:
        item, own = flight.item, flight.span
        run, chosen = runnable(flight)
        inputs, chunked = item.inputs, flight.chunked
        if len(chosen) < len(inputs):
            inputs = tuple([inputs[index] for index in chosen])
            chunked = tuple([chunked[index] for index in chosen]) if chunked else ()
        context = own.context if own is not None and own.is_recording else NONE
        parts.append(BatchPart(run, WorkItemInput(inputs, item.query, item.options), context, item.asker, chunked))
        items += len(inputs)
        for row in run:
            tokens += row.cost
            attention += len(row.ids) ** 2
    above = span or first.span
    frame = rows.to_batch(
        name,
        key.residency,
        first.item.operation,
        first.layout,
        parts,
        pooling=key.pooling,
        lora=key.lora,
        context=above.context if above is not None else Context(first.item.traceparent, first.item.tracestate),
        fingerprint=ready.loaded.fingerprint,
    )
    note = BatchNote(name, items, len(parts), tokens, attention)
    if span is not None:
        spans.describe_batch(span, note, key.residency)
    return frame, note


class SuspectRuns(Protocol):
    """Methods of `Isolate` that the dispatch calls for inputs that may have crashed an adapter. `marked_models`:
    model -> number of its inputs with a poison mark (stored note that the input may have crashed an adapter).
    """

    marked_models: Mapping[str, int]

    def is_suspect(self, flight: InFlight) -> bool: ...

    def add(self, flight: InFlight) -> None: ...

    async def suspect(self, flights: Sequence[InFlight]) -> None: ...


class Dispatch:
    """Sends the batches of one device. One task calls `run`; each batch has a task in `work`."""

    def __init__(
        self,
        device: DeviceQueue,
        queues: DeviceQueues,
        isolate: SuspectRuns,
        loading: Loading,
        settle: Settle,
        quantum: Quantum,
        metrics: SidecarMetrics,
        work: Tasks,
    ) -> None:
        """Create the dispatch of `device`. `quantum` gets the seconds from delivery to result of each work item, and
        computes for how long deliveries are gathered before they are tokenised.
        """
        self._device = device
        self._queues = queues
        self._isolate = isolate
        self._loading = loading
        self._settle = settle
        self._quantum = quantum
        self._metrics = metrics
        self._work = work

    def add(self, flight: InFlight) -> None:
        """Queue a tokenised work item. If none of its inputs can run, send their errors at once."""
        if flight.settled:
            return
        if flight.refused is not None:
            self._settle.answer_all([flight], flight.refused)
        elif not runnable(flight)[0]:
            self._settle.answer(flight, merge(flight, ()))
        elif flight.item.model in self._isolate.marked_models and self._isolate.is_suspect(flight):
            self._isolate.add(flight)
        else:
            self._device.put(flight)

    async def run(self, more_expected: Callable[[], bool]) -> None:
        """Send batches until cancelled. `more_expected()` returns True if more work may soon wait for a device."""
        device = self._device
        while True:
            device.wake.clear()
            if not device.link.connected and self._queues.connected:
                self._again(device.withdraw_all())  # the waiting work moves to devices that have an adapter
            action = device.next(more_expected=more_expected())
            if isinstance(action, Batch):
                self._work.start(self._run(action), "batch")
                continue
            timeout_s = None
            if isinstance(action, WaitUntil):  # in whole milliseconds, as timers of uvloop: they end early otherwise
                timeout_s = max(0.0, math.ceil(1000 * (action.until_s - time.monotonic())) / 1000)
            await wait_set(device.wake, timeout_s)

    async def _run(self, batch: Batch[InFlight], *, in_turn: bool = False) -> bool:
        """Run a batch and send the results of its work items. If the model was evicted or the adapter is lost, queue
        the work items again. If the LoRA was evicted, start `_run_in_turn`, which loads the LoRA and runs the batch;
        but with `in_turn` (the caller is `_run_in_turn`), only return False.
        """
        sent, fit = batch, self._fit(batch)
        if fit is None:
            self._device.end(sent)
            return True
        batch, flights, lora = fit, fit.entries, batch.key.lora
        hosted = flights[0].hosted
        assert hosted is not None
        if lora and lora not in hosted.lora_digests and not in_turn:
            # the adapter was lost after the LoRA was loaded: load the LoRA again (`fingerprint` needs its digest)
            self._device.end(sent)
            self._work.start(self._run_in_turn(batch, hosted), "lora")
            return True
        dispatched_s = time.monotonic()
        hosted.used_s = dispatched_s
        for flight in flights:
            flight.move("running")
            flight.dispatched_s = dispatched_s
            flight.fingerprint = hosted.fingerprint(flight.item.profile, flight.item.options)
        self._device.rate.sent(dispatched_s)
        started, ran = False, 0

        def on_started() -> None:
            nonlocal started
            started = True
            started_s = time.monotonic()
            for flight in flights:
                flight.started_s = started_s

        try:
            with self._settle.answering(flights, "running the batch"):
                try:
                    done, note = await self._device.run(batch, on_started)
                    ran = note.tokens
                    self._answer(batch, done, note)
                except AdapterGone as gone:
                    self._on_gone(flights, suspects=started and gone.died)
                except ModelLoading:  # the model was unloaded, or its adapter was lost, after this work was prepared
                    self._again(flights)
                except LoraLoading:  # the adapter evicted the batch's LoRA for other LoRAs after this work was prepared
                    if in_turn:
                        return False
                    self._work.start(self._run_in_turn(batch, hosted), "lora")
        finally:
            self._device.rate.ended(ran, time.monotonic())
            self._device.end(sent)
        return True

    def _fit(self, batch: Batch[InFlight]) -> Batch[InFlight] | None:
        """Return the batch without late, cancelled, outdated and suspect work items; None if none is left. `Isolate`
        runs the suspects.
        """
        pending = self._settle.still_wanted(batch.entries)
        if batch.entries[0].item.model in self._isolate.marked_models:
            for flight in [flight for flight in pending if self._isolate.is_suspect(flight)]:
                self._isolate.add(flight)
                pending.remove(flight)
        if len(pending) == len(batch.entries):
            return batch
        return batches.batch_of(pending) if pending else None

    def _answer(self, batch: Batch[InFlight], done: ipc.BatchDone, note: BatchNote) -> None:
        device, hosted = self._device, batch.entries[0].hosted
        ran_s = (done.preprocess_ms + done.inference_ms + done.postprocess_ms) / 1000
        waiting = device.writing if batch.writes else device.waiting
        waiting.times_of(batch.key.residency).note(batch.time_cost, ran_s)
        view, start = memoryview(done.block), 0
        for flight in batch.entries:
            count = len(runnable(flight)[1])
            outcomes, block = cut(done.outcomes[start : start + count], view)
            start += count
            self._settle.answer(flight, merge(flight, outcomes), block, done, note)
        if hosted is not None:
            fill = batch.cost / device.limits.cost
            hosted.filled(fill)
            self._metrics.ran(hosted.name, note, done, fill)
        # the time to generate a text depends on the text's length: it must not affect how long deliveries are gathered
        if batch.writes:
            return
        answered_s = time.monotonic()
        for flight in batch.entries:
            self._quantum.answered(answered_s - flight.received_s, answered_s)

    async def _run_in_turn(self, batch: Batch[InFlight], hosted: ModelState) -> None:
        """Load the LoRA of a batch again. Run the batch before other LoRAs can replace it."""
        flights, lora = batch.entries, batch.key.lora
        for flight in flights:
            flight.dispatched_s = 0.0
        with self._settle.answering(flights, "loading the LoRA"):
            evicted_s = time.monotonic()
            async with hosted.lora_lock:
                for flight in flights:
                    flight.waited_for_load(time.monotonic() - evicted_s)
                done = False
                while not done:
                    hosted.loras.discard(lora)
                    try:
                        await self._loading.ensure(hosted, flights, past_gate=True, in_turn=True)
                    except AdapterGone:
                        self._again(flights)
                        return
                    if not unsettled(flights):
                        break
                    self._device.begin(batch)
                    done = await self._run(batch, in_turn=True)
        self._device.wake.set()

    def _on_gone(self, flights: Sequence[InFlight], *, suspects: bool) -> None:
        """Handle a lost adapter. `suspects`: the adapter died after it had begun the batch, so an input may be the
        cause.
        """
        if not suspects:
            self._again(flights)
            return
        for flight in flights:
            if flight.hosted is not None:
                flight.hosted.mark_unloaded()
        self._work.start(self._isolate.suspect(flights), "suspects")

    def _again(self, flights: Sequence[InFlight]) -> None:
        for flight in flights:
            if flight.hosted is not None:
                flight.hosted.mark_unloaded()
            flight.move("preparing")
            flight.dispatched_s = 0.0
        for flight in self._settle.still_wanted(flights):
            self._work.start(self._put_back(flight), "again")

    async def _put_back(self, flight: InFlight) -> None:
        if flight.hosted is None:  # the work item was settled before this task began
            return
        with self._settle.answering([flight], "preparing the input"):
            await self._loading.ensure(flight.hosted, [flight])
            if flight.settled:
                return
            device = self._queues.queue_of(flight)
            device.put(flight, back=True)
            device.wake.set()
