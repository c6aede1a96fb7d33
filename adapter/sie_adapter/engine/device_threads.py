"""Threads that run batches on the device. A thread runs one batch at a time and sends the reply itself, which saves the
time to wake another thread.

    submit(DeviceJob) ──► queue ──► thread: BatchStarted, run, reply

The queue has at most one job per connection, so it needs no limit. If the first thread is idle, it takes the next job,
because only the first thread may compute a batch with several torch threads.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sie_adapter.memory.oom import thread_state
from sie_contracts.errors import InternalFailure, ShuttingDown, SIEError
from sie_contracts.wire.ipc import BatchStarted, Refused, Reply, RunBatch
from sie_runtime.failpoints import failpoint

_MOST_TORCH_THREADS = 8  # limit for the torch threads of one batch; more threads do not make small operations faster

_logger = logging.getLogger("sie.adapter")
_thread = threading.local()


@dataclass(frozen=True)
class DeviceJob:
    """Batch for a device thread. `answer` sends a reply to the sidecar. `run`: if set, the thread calls it instead of
    the engine's `execute`. `is_started`: whether BatchStarted was already sent. `finished` is set after the last reply.
    """

    message: RunBatch
    answer: Callable[[Reply], None]
    run: Callable[[RunBatch], Reply] | None = None
    is_started: bool = False
    finished: threading.Event = field(default_factory=threading.Event)
    made_ns: int = field(default_factory=time.time_ns)


def is_alone() -> bool:
    """Return whether the calling thread is the only device thread that runs a batch now; False on other threads."""
    owner: DeviceThreads | None = getattr(_thread, "owner", None)
    return owner is not None and sum(map(bool, owner.busy_since)) <= 1


def set_torch_threads(*, is_small: bool = False) -> None:
    """Set the number of torch threads that the calling device thread may use for its batch (see `DeviceThreads`).
    `is_small`: torch computes only small operations, so it uses one thread. Threads other than device threads are not
    changed.
    """
    allowed: int | None = getattr(_thread, "torch_threads", None)
    if allowed is not None and torch.get_num_threads() != (count := 1 if is_small else allowed):
        torch.set_num_threads(count)  # 0.02 ms, also if the number stays the same


class DeviceThreads:
    """`count` device threads, which run queued batches until `stop`. `execute` runs a batch, returns its reply, and
    does not raise.

    If no other batch runs or waits, the first device thread may compute its batch with `count` torch threads, at most
    8 (`set_torch_threads`). In every other case, a device thread uses one torch thread. With more torch threads, more
    threads than cores would run, and libgomp then puts threads to sleep at barriers, which takes time.
    """

    def __init__(self, count: int, execute: Callable[[RunBatch], Reply]) -> None:
        # functions that are called after each batch, with its job, its reply, and begin and end of its run, both in ns
        # since 1970
        self.listeners: list[Callable[[DeviceJob, Reply, int, int], None]] = []
        self._execute = execute
        self._jobs: queue.SimpleQueue[DeviceJob | None] = queue.SimpleQueue()
        self._job_of_first: queue.SimpleQueue[DeviceJob | None] = queue.SimpleQueue()
        self._is_first_idle = False
        self._choice = threading.Lock()
        self._most_torch_threads = min(count, _MOST_TORCH_THREADS)
        # for each thread, when its running batch began, in seconds of the monotonic clock; 0 if it runs none
        self.busy_since = [0.0] * count
        self._batches = [0] * count
        self._stopping = threading.Event()
        self._threads = [self._start(number) for number in range(count)]

    def submit(self, job: DeviceJob) -> None:
        """Queue a job for a device thread, which sends the reply. After a call of `stop`, reply with ShuttingDown."""
        with self._choice:
            if not self._stopping.is_set():
                (self._job_of_first if self._is_first_idle else self._jobs).put(job)
                self._is_first_idle = False
                return
        # no device thread takes a job that is queued after `stop`
        _refuse(job, _stopped())
        job.finished.set()

    def __len__(self) -> int:
        return len(self._threads)

    @property
    def batches(self) -> int:
        return sum(self._batches)

    def busy_s(self) -> float:
        """Return the seconds since the oldest running batch began; 0 if no batch runs. Never waits."""
        since = [start for start in self.busy_since if start]
        return time.monotonic() - min(since) if since else 0.0

    def stop(self, timeout_s: float) -> bool:
        """Let running batches end, and refuse waiting batches. Return whether all threads ended within `timeout_s`."""
        with self._choice:  # a concurrent `submit` queues its job before the None below, or refuses the job
            self._stopping.set()
        self._job_of_first.put(None)
        for _ in self._threads:
            self._jobs.put(None)
        deadline_s = time.monotonic() + timeout_s
        for number in range(len(self._threads)):
            ended = None
            # a device thread may be replaced during this wait (`_is_replaced`); the new thread must end too
            while ended is not self._threads[number]:
                ended = self._threads[number]
                ended.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self, number: int) -> threading.Thread:
        thread = threading.Thread(target=self._run, args=(number,), name=f"device-{number}", daemon=True)
        thread.start()
        return thread

    def _run(self, number: int) -> None:
        _thread.owner = self
        with torch.inference_mode():
            while (job := self._next(number)) is not None:
                self._serve(number, job)
                if thread_state.is_unusable and self._is_replaced(number):
                    return

    def _next(self, number: int) -> DeviceJob | None:
        if number:
            return self._jobs.get()
        with self._choice:
            try:
                return self._jobs.get_nowait()
            except queue.Empty:
                self._is_first_idle = True
        return self._job_of_first.get()

    def _is_replaced(self, number: int) -> bool:
        try:
            self._threads[number] = self._start(number)
        except RuntimeError as error:
            # There is no memory for the stack of a new thread. This thread continues, although each of its passes then
            # needs a new thread (`on_usable_thread`). It tries to start its replacement again after its next batch.
            _logger.warning(
                "thread %s could not be replaced and continues, although oneDNN cannot run new shapes on it: %s",
                threading.current_thread().name,
                error,
            )
            return False
        return True

    def _serve(self, number: int, job: DeviceJob) -> None:
        ran: tuple[Reply, int, int] | None = None
        try:
            if self._stopping.is_set():
                _refuse(job, _stopped())
                return
            self.busy_since[number] = time.monotonic()
            if not job.is_started:
                job.answer(BatchStarted(job.message.batch))
            failpoint("adapter.batch_started")
            is_only = number == 0 and is_alone() and self._jobs.empty()
            _thread.torch_threads = self._most_torch_threads if is_only else 1
            began_ns, start_ns = time.time_ns(), time.perf_counter_ns()
            answer = (job.run or self._execute)(job.message)
            ended_ns = began_ns + time.perf_counter_ns() - start_ns  # a monotonic clock measures the difference
            self.busy_since[number] = 0.0
            self._batches[number] += 1
            failpoint("adapter.batch_ran")
            job.answer(answer)
            ran = answer, began_ns, ended_ns
        except Exception:
            # `execute` and `answer` should not raise. After an unexpected exception, this thread must continue, because
            # no other thread would replace it.
            _logger.exception("a batch failed on a device thread, which continues with the next batch")
            _refuse(job, InternalFailure("a device thread of the adapter failed, see its log"))
        finally:
            self.busy_since[number] = 0.0
            job.finished.set()
        if ran is not None and self.listeners:
            self.notify(job, *ran)

    def notify(self, job: DeviceJob, reply: Reply, began_ns: int, ended_ns: int) -> None:
        for listener in self.listeners:
            try:
                listener(job, reply, began_ns, ended_ns)
            except Exception:  # an exception of a listener must not end the device thread
                _logger.exception("a listener of the device threads failed for batch %s", job.message.batch)


def _stopped() -> ShuttingDown:
    return ShuttingDown("the adapter is stopping")


def _refuse(job: DeviceJob, error: SIEError) -> None:
    """Reply Refused to a batch without a result: the sidecar waits for a batch's last reply without a timeout."""
    try:
        job.answer(Refused(error.info(), job.message.batch))
    except Exception:  # usually the sidecar has ended; the device thread must continue with the next batch
        _logger.exception("the reply to batch %s could not be sent", job.message.batch)
