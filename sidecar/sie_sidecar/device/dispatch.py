"""Tokenised work items run: queued for the device, sent in batches, and answered; or queued again, where the model, its
LoRA or the adapter went away meanwhile.

    add ──► DeviceQueue ──► batch ──► adapter ──► answered
             ▲                          ├──► model evicted, adapter gone: loaded, then put back ──┐
             └──────────────────────────┼─────────────────────────────────────────────────────────┘
                                        ├──► LoRA evicted: loaded and run in its turn
                                        └──► adapter died with the batch: `isolate`
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from sie_contracts.errors import LoraLoading, ModelLoading
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import BatchNote
from sie_runtime.process import Tasks
from sie_sidecar.batching.batch import Batch, WaitUntil
from sie_sidecar.batching.sizing import Quantum
from sie_sidecar.device import recording
from sie_sidecar.device.device import DeviceQueue
from sie_sidecar.device.in_flight import InFlight, cut, merge, runnable, unsettled
from sie_sidecar.device.isolate import Isolate
from sie_sidecar.device.link import AdapterGone
from sie_sidecar.metrics import SidecarMetrics
from sie_sidecar.models.loading import Loading
from sie_sidecar.results.settle import Settle


class Dispatch:
    """Sends batches to the device. One task runs `run`; `work` keeps those of single batches."""

    def __init__(
        self,
        device: DeviceQueue,
        isolate: Isolate,
        loading: Loading,
        settle: Settle,
        quantum: Quantum,
        metrics: SidecarMetrics,
        work: Tasks,
    ) -> None:
        """`quantum` learns how long answers take."""
        self._device = device
        self._isolate = isolate
        self._loading = loading
        self._settle = settle
        self._quantum = quantum
        self._metrics = metrics
        self._work = work
        self._clock = device.clock

    def add(self, flight: InFlight) -> None:
        """It is tokenised."""
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
        """Send batches until cancelled. `more_expected`: whether deliveries are on their way or being prepared."""
        device = self._device
        while True:
            device.wake.clear()
            action = device.next(more_expected=more_expected())
            if isinstance(action, Batch):
                self._work.start(self._run(action), "batch")
                continue
            timeout_s = max(0.0, action.until_s - self._clock()) if isinstance(action, WaitUntil) else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await device.wake.wait()

    async def _run(self, batch: Batch[InFlight], *, in_turn: bool = False) -> bool:
        """Run a batch and answer it, or have it run again. False if its LoRA was not there and it is the caller's
        `in_turn`.
        """
        sent, batch = batch, self._fit(batch)
        if not batch.jobs:
            self._device.end(sent)
            return True
        flights = [job.work for job in batch.jobs]
        sealed_s = self._clock()
        for flight in flights:
            flight.move("running")
            flight.sealed_s = sealed_s
            if flight.hosted is not None:
                flight.hosted.used(sealed_s)
                flight.fingerprint = flight.hosted.fingerprint(flight.item.profile, flight.item.options)
        self._device.note_sent()
        self._device.rate.sent(sealed_s)
        started, ran = False, 0

        def on_started() -> None:
            nonlocal started
            started = True
            started_s = self._clock()
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
                except ModelLoading:  # evicted since it was prepared
                    self._again(flights)
                except LoraLoading:  # evicted for others since
                    if in_turn:
                        return False
                    self._work.start(self._run_in_turn(batch), "lora")
        finally:
            self._device.rate.ended(ran, self._clock())
            self._device.end(sent)
        return True

    def _fit(self, batch: Batch[InFlight]) -> Batch[InFlight]:
        """Without what must not run: late or cancelled since it was prepared, or suspect by what was learnt since."""
        pending = self._settle.still_wanted([job.work for job in batch.jobs])
        suspects = []
        if batch.jobs[0].work.item.model in self._isolate.marked_models:
            suspects = [flight for flight in pending if self._isolate.is_suspect(flight)]
        for flight in suspects:
            self._isolate.add(flight)
        if len(pending) == len(batch.jobs) and not suspects:
            return batch
        jobs = tuple(job for job in batch.jobs if job.work in pending and job.work not in suspects)
        return Batch(batch.key, jobs, sum(job.cost for job in jobs))

    def _answer(self, batch: Batch[InFlight], done: ipc.BatchDone, note: BatchNote) -> None:
        device, hosted = self._device, batch.jobs[0].work.hosted
        device.ran(batch, (done.preprocess_ms + done.inference_ms + done.postprocess_ms) / 1000)
        if recording.current is not None:
            recording.current.ran(batch, note, done, device.lanes)
        view, start = memoryview(done.block), 0
        for job in batch.jobs:
            count = len(runnable(job.work)[1])
            outcomes, block = cut(done.outcomes[start : start + count], view)
            start += count
            self._settle.answer(job.work, merge(job.work, outcomes), block, done, note)
        if hosted is not None:
            fill = batch.cost / device.limits.cost
            hosted.filled(fill)
            self._metrics.ran(hosted.name, note, done, fill)
        if batch.writes:  # an answer takes as long as it is: no reason to gather less
            return
        answered_s = self._clock()
        for job in batch.jobs:
            self._quantum.answered(answered_s - job.work.received_s, answered_s)

    async def _run_in_turn(self, batch: Batch[InFlight]) -> None:
        """Load the LoRA of a batch again and run it before another one can take the place."""
        flights, lora = [job.work for job in batch.jobs], batch.key.lora
        hosted = flights[0].hosted
        assert hosted is not None
        for flight in flights:
            flight.sealed_s = 0.0
        with self._settle.answering(flights, "loading the LoRA"):
            evicted_s = self._clock()
            async with self._loading.loras.turn(hosted):
                for flight in flights:
                    flight.waited_for_load(self._clock() - evicted_s)
                done = False
                while not done:
                    hosted.loras.discard(lora)
                    await self._loading.ensure(hosted, flights, past_gate=True, in_turn=True)
                    if not unsettled(flights):
                        break
                    self._device.begin(batch)
                    done = await self._run(batch, in_turn=True)
        self._device.wake.set()

    def _on_gone(self, flights: list[InFlight], *, suspects: bool) -> None:
        """The adapter went away with this batch. If the device had it, its inputs are suspects."""
        for flight in flights:
            if flight.hosted is not None:
                flight.hosted.mark_unloaded()
        if suspects:
            self._work.start(self._isolate.suspect(flights), "suspects")
        else:
            self._again(flights)

    def _again(self, flights: list[InFlight]) -> None:
        for flight in flights:
            if flight.hosted is not None:
                flight.hosted.mark_unloaded()
            flight.move("preparing")
            flight.sealed_s = 0.0
        for flight in self._settle.still_wanted(flights):
            self._work.start(self._put_back(flight), "again")

    async def _put_back(self, flight: InFlight) -> None:
        assert flight.hosted is not None
        with self._settle.answering([flight], "preparing the input"):
            await self._loading.ensure(flight.hosted, [flight])
            if flight.settled:
                return
            self._device.put(flight, back=True)
        self._device.wake.set()
