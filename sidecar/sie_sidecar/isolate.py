"""Search for the input that crashed an adapter. The inputs of the batches that the device had begun are run again, one
input at a time, while nothing else is at the device. If the adapter dies again, the input that ran is the cause. There
is no search if the adapter only stopped replying and the sidecar closed the connection.

    batch during which an adapter died ──► its inputs, one by one ──► input succeeds: it is not the cause
                                                     └──► the adapter dies again, twice: the input is poison, and is
                                                          refused from now on

An input is no longer suspected when an input with the same content has run alone without a crash, here or at another
worker. While an input runs alone, other work waits. After SLICE_S of such runs, one waiting batch runs before the next
input.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from sie_contracts.errors import GatewayTimeout, LoraLoading, ModelLoading, SIEError
from sie_contracts.media.contents import content_keys
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import BatchNote, Failed, Outcome
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Tasks
from sie_sidecar.dispatch import DeviceQueue
from sie_sidecar.in_flight import InFlight, Loading, joined, merge, only, runnable
from sie_sidecar.link import AdapterGone
from sie_sidecar.metrics import SidecarMetrics
from sie_sidecar.models import ModelState
from sie_sidecar.poison import PoisonMarks, refusal
from sie_sidecar.settle import Settle

SLICE_S = 0.05
# when inputs have run alone for SLICE_S, a waiting batch runs; the next input waits at most this number of seconds for
# the end of the batch
BATCH_BETWEEN_S = 1.0


class Isolate:
    """Work items that may have crashed the adapter of a device. Their inputs run on this device, one at a time. One
    task calls `run`.
    """

    def __init__(
        self,
        device: DeviceQueue,
        marks: PoisonMarks,
        loading: Loading,
        settle: Settle,
        metrics: SidecarMetrics,
        work: Tasks,
        isolates: Sequence[Isolate],
    ) -> None:
        """`isolates`: the `Isolate` of each device by its number, because a work item may move to another device."""
        self._isolates = isolates
        self._device = device
        self._marks = marks
        self.marked_models: Mapping[str, int] = marks.models
        self._loading = loading
        self._settle = settle
        self._metrics = metrics
        self._work = work
        # Work items that wait to run alone, each with the function that `Loading.park` returned. The credit of the
        # consumers limits how many items wait. The model of a waiting item may be evicted, because an earlier item may
        # need the memory for another model. The function ends the permission to evict.
        self._suspects: deque[tuple[InFlight, Callable[[], None]]] = deque()
        self._news = asyncio.Event()
        self._slice_s = 0.0

    def is_suspect(self, flight: InFlight) -> bool:
        """Return True if an input has a poison mark. The check is slow: call it only for models in `marked_models`."""
        return any(self._marks.get(key) for key in content_keys(flight.item))

    async def suspect(self, flights: Sequence[InFlight]) -> None:
        """Mark the inputs of these work items as suspects, visible to all workers, and queue the items to run alone."""
        keys = [key for flight in flights for key in content_keys(flight.item)]
        await self._marks.suspected(flights[0].item.model, keys)
        failpoint("isolate.suspects_marked")
        for flight in flights:
            flight.dispatched_s = 0.0
            self.add(flight)

    def add(self, flight: InFlight) -> None:
        """Add a work item whose inputs run one at a time, after the inputs of the items that were added before."""
        if flight.settled:
            return
        flight.move("isolated")
        self._suspects.append((flight, self._loading.park(flight)))
        self._news.set()

    async def run(self) -> None:
        """Run the added work items until cancelled."""
        while True:
            self._news.clear()
            while self._suspects:
                flight, unpark = self._suspects.popleft()
                unpark()
                hosted = flight.hosted  # None if the work item was settled
                # inputs with the same content have run alone meanwhile without a crash, so this item runs in a batch
                if hosted is not None and hosted.state == "loaded" and not self.is_suspect(flight):
                    self._device.put(flight, back=True)
                    self._device.wake.set()
                    continue
                with self._settle.answering([flight], "running the input alone"):
                    await self._retry(flight)
            self._device.end_reservation()
            await self._news.wait()

    async def _retry(self, flight: InFlight) -> None:
        _, chosen = runnable(flight)
        keys = content_keys(flight.item)
        parts = []
        done: ipc.BatchDone | None = None
        note: BatchNote | None = None
        for index in chosen:
            if flight.settled:
                return
            try:
                outcome, block, ran = await self._outcome(flight, index, keys[index])
            except AdapterGone:  # no adapter, or no memory for the model: another device runs the item
                if flight.hosted is not None:  # None if the work item was settled meanwhile
                    self._isolates[self._loading.moved(flight.hosted, [flight]).device].add(flight)
                return
            parts.append((outcome, block))
            if ran is not None:
                done, note = ran
        outcomes, block = joined(parts)
        self._settle.answer(flight, merge(flight, outcomes), block, done, note)

    async def _outcome(
        self, flight: InFlight, index: int, key: str
    ) -> tuple[Outcome, bytes, tuple[ipc.BatchDone, BatchNote] | None]:
        """Run an input alone and return its outcome. The outcome is an error if the input is poison or
        is late, or if the model cannot be loaded or run. Raises AdapterGone if another device must run the input.
        """
        hosted, lora = flight.hosted, flight.item.options.lora
        assert hosted is not None
        single = only(flight, index)
        while True:
            mark = self._marks.get(key)
            if mark is not None and mark.is_poison:
                flight.dead.append(mark)
                self._metrics.poisoned.inc()
                return Failed(refusal().info()), b"", None
            try:
                if time.monotonic() >= flight.deadline_s:
                    raise GatewayTimeout("the time limit of the request passed before its work could run")
                if hosted.state != "loaded" or (lora and lora not in hosted.loras):
                    self._device.end_reservation()
                await self._loading.ensure(hosted, [flight], past_gate=True)
                await self._take_device()
                if flight.settled:  # the work item was cancelled meanwhile, so this outcome is not used
                    raise GatewayTimeout("the request was withdrawn before it could run")
                try:
                    done, note = await self._run_alone(flight, single, key, hosted)
                except AdapterGone:
                    continue
            except ModelLoading:  # the model was evicted after `ensure`: load it again
                hosted.mark_unloaded()
                continue
            except LoraLoading:  # other LoRAs have replaced the LoRA after `ensure`: load it again
                hosted.loras.discard(lora)
                continue
            except SIEError as error:
                return Failed(error.info()), b"", None
            # not awaited, because the device would idle while the broker is unreachable
            self._work.start(self._marks.clear(key), "marks")
            return done.outcomes[0], done.block, (done, note)

    async def _run_alone(
        self, flight: InFlight, single: InFlight, key: str, hosted: ModelState
    ) -> tuple[ipc.BatchDone, BatchNote]:
        started = False

        def on_started() -> None:
            nonlocal started
            started = True
            flight.started_s = flight.started_s or time.monotonic()

        flight.dispatched_s = flight.dispatched_s or time.monotonic()
        flight.fingerprint = hosted.fingerprint(flight.item.profile, flight.item.options)
        batch, number = self._device.alone(single), self._device.number + 1
        failpoint("isolate.before_run")
        try:
            return await self._device.run(batch, on_started)
        except AdapterGone as gone:
            hosted.mark_unloaded()
            self._device.end_reservation()
            if started and gone.died and self._device.number == number:
                await self._marks.died(flight.item.model, [key])
            raise

    async def _take_device(self) -> None:
        """Reserve the device for inputs that run alone. After SLICE_S of reservation, first let a waiting batch run."""
        device = self._device
        if device.is_reserved and time.monotonic() - self._slice_s > SLICE_S and len(device.waiting):
            before = device.number
            device.end_reservation()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BATCH_BETWEEN_S):
                    while device.number <= before:
                        await device.next_end()
        if not device.is_reserved:
            await device.reserve()
            self._slice_s = time.monotonic()
