"""Suspects run again: one input at a time with nothing else at the device, so that a death names the input that caused
it.

    work that an adapter died with ──► its inputs in turn ──► answered: cleared of suspicion
                                                     └──► the adapter dies: one death more, poison at the second,
                                                     refused without a run

All other work waits while an input runs alone, for TRIAL_SLICE_S at a time: then a batch goes first, if one waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from sie_contracts import ipc
from sie_contracts.errors import GatewayTimeout, InternalFailure, LoraLoading, ModelLoading, SIEError
from sie_contracts.messages import BatchNote, Failed, Outcome
from sie_runtime.failpoints import failpoint
from sie_sidecar.held import Held, joined, merge, only, runnable
from sie_sidecar.link import AdapterGone, AdapterLink
from sie_sidecar.models import Hosted
from sie_sidecar.poison import Marks, content_keys, refusal

if TYPE_CHECKING:
    from sie_runtime.spans import Span

TRIAL_SLICE_S = 0.05
BATCH_BETWEEN_S = 1.0  # at most, for the batch that goes first
_logger = logging.getLogger("sie.sidecar.trial")


class Bench(Protocol):
    """What trials need of the worker whose device they use."""

    def is_idle(self) -> bool:
        """No batch is at the adapter."""

    def has_waiting(self) -> bool:
        """There is other work to run."""

    def batches_sent(self) -> int: ...

    def park(self, held: Held) -> Callable[[], None]:
        """Let the model of a suspect go until it is its turn. Returns what to call then."""

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Have this done while the device goes on."""

    def wake(self) -> None:
        """Look again at what may be sent."""

    async def ensure_ready(self, held: Held) -> None:
        """Have the model loaded. Raises SIEError."""

    def span_of(self, held: Held) -> AbstractContextManager[Span | None]:
        """A span for the batch that it is to be, where it is traced."""

    def frame_of(self, held: Held, span: Span | None) -> tuple[ipc.RunBatch, BatchNote]:
        """One work item as a batch of its own."""

    def settle(
        self,
        held: Held,
        outcomes: tuple[Outcome, ...],
        block: bytes,
        done: ipc.BatchDone | None,
        note: BatchNote | None,
    ) -> None: ...


class Trials:
    """All suspects of this worker. One task runs `run`."""

    def __init__(
        self, bench: Bench, link: AdapterLink, marks: Marks, clock: Callable[[], float], poisoned: Callable[[], None]
    ) -> None:
        self._bench = bench
        self._link = link
        self._marks = marks
        self._clock = clock
        self._poisoned = poisoned
        # bounded by the pull credit, as all that is held; parked, else the model that one needs would wait for those
        # behind it
        self._suspects: deque[tuple[Held, Callable[[], None]]] = deque()
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._slice_s = 0.0
        self.holds_device = False

    def add(self, held: Held) -> None:
        if held.settled:
            return
        self._suspects.append((held, self._bench.park(held)))
        self._news.set()

    def batch_ended(self) -> None:
        """A batch left the device."""
        self._ended.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._news.clear()
            while self._suspects:
                held, unpark = self._suspects.popleft()
                unpark()
                await self._try(held)
            self._give_device_back()
            await self._news.wait()

    async def _try(self, held: Held) -> None:
        outcomes: tuple[Outcome, ...]
        try:
            _, chosen = runnable(held)
            keys = content_keys(held.item)
            parts = []
            done: ipc.BatchDone | None = None
            note: BatchNote | None = None
            for index in chosen:
                if held.settled:
                    return
                outcome, block, ran = await self._outcome(held, index, keys[index])
                parts.append((outcome, block))
                if ran is not None:
                    done, note = ran
            outcomes, block = joined(parts)
            self._bench.settle(held, merge(held, outcomes), block, done, note)
        except Exception:  # the root of a work item: what was held must be answered
            _logger.exception("running suspects alone failed")
            info = InternalFailure("the worker failed while running the input alone").info()
            self._bench.settle(held, tuple(Failed(info) for _ in held.item.inputs), b"", None, None)

    async def _outcome(
        self, held: Held, index: int, key: str
    ) -> tuple[Outcome, bytes, tuple[ipc.BatchDone, BatchNote] | None]:
        """What became of one input: run until it is answered, judged, or late."""
        hosted, lora = held.hosted, held.item.options.lora
        assert hosted is not None
        single = only(held, index)
        while True:
            mark = self._marks.of(key)
            if mark is not None and mark.is_poison:
                held.dead.append(mark)
                self._poisoned()
                return Failed(refusal().info()), b"", None
            try:
                if self._clock() >= held.deadline_s:
                    raise GatewayTimeout("the budget of the request was over before it could run")
                if hosted.state != "loaded" or (lora and lora not in hosted.loras):
                    self._give_device_back()
                await self._bench.ensure_ready(held)
                if held.settled:  # withdrawn meanwhile: nobody reads what became of it
                    raise GatewayTimeout("the request was withdrawn before its model was loaded")
                await self._take_device()
                done, note = await self._run_alone(held, single, key, hosted)
            except AdapterGone:
                continue
            except ModelLoading:  # evicted since
                hosted.unload()
                continue
            except LoraLoading:  # dropped for others since
                hosted.loras.discard(lora)
                continue
            except SIEError as error:
                return Failed(error.info()), b"", None
            self._bench.beside(self._marks.clear([key]))  # the broker may be away, and the device is ours
            return done.outcomes[0], done.block, (done, note)

    async def _run_alone(self, held: Held, single: Held, key: str, hosted: Hosted) -> tuple[ipc.BatchDone, BatchNote]:
        started = False

        def on_started() -> None:
            nonlocal started
            started = True
            single.started_s = held.started_s = held.started_s or self._clock()

        held.sealed_s = held.sealed_s or self._clock()
        held.fingerprint = hosted.fingerprint(held.item.profile, held.item.options.lora)
        try:
            with self._bench.span_of(single) as span:
                frame, note = self._bench.frame_of(single, span)
                sent = self._bench.batches_sent()
                failpoint("trial.before_run")
                done = await self._link.run_batch(frame, on_started)
        except AdapterGone as gone:
            hosted.unload()
            self._give_device_back()
            if started and gone.died and self._bench.batches_sent() == sent:
                await self._marks.died(held.item.model, [key])
            raise
        if len(done.outcomes) != 1:
            raise RuntimeError(f"the adapter answered one input with {len(done.outcomes)} outcomes")
        return done, note

    async def _take_device(self) -> None:
        """Return when nothing else is there; nothing is sent until it is given back."""
        if self.holds_device and self._clock() - self._slice_s > TRIAL_SLICE_S and self._bench.has_waiting():
            before = self._bench.batches_sent()
            self._give_device_back()
            await self._until(lambda: self._bench.batches_sent() > before, BATCH_BETWEEN_S)
        if not self.holds_device:
            self.holds_device = True
            while not self._bench.is_idle():
                self._ended.clear()
                await self._ended.wait()
            self._slice_s = self._clock()

    async def _until(self, condition: Callable[[], bool], most_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while not condition():
                    self._ended.clear()
                    await self._ended.wait()

    def _give_device_back(self) -> None:
        if self.holds_device:
            self.holds_device = False
            self._bench.wake()
