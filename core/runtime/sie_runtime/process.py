"""Start and end of a process: logs, signals, a graceful stop, the exit status. In the lame-duck time after the first
signal, a process with an HTTP API still serves until load balancers have noticed that it will end.

start ──► run(main) ──► main(stop) ... SIGTERM, SIGINT or SIGHUP sets stop ──► main drains and returns its status
                                      a second signal during the lame-duck time ends that time; at any other time it
                                      ends the process at once
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

import msgspec

from sie_runtime.current_trace import TRACE_ID

EXIT_BAD_SETTING = 2
GC_THRESHOLDS = (20_000, 20, 20)
# Seconds after which a thread gives the interpreter lock to the event loop. While a thread decodes a large body, a
# short request waits for this time several times. With Python's default of 5 ms, these waits were most of the p99
# latency of short requests.
SWITCH_INTERVAL_S = 0.0005
# value of `Trouble.grace_s`: seconds that a failure must last before it is logged as a warning, because another process
# may still be starting
START_S = 30.0
# seconds that a failure must last before it is logged at level info: shorter failures occur at every start
QUIET_S = 10.0
FLUSH_S = 0.1  # longest time in seconds from a log line of an event loop to its writing
MAX_LINES = 1000  # largest number of lines that wait to be written
_FIELDS = ("model", "request_id", "trace_id", "latency_ms", "worker", "key")
_SHOWN = ("model", "worker", "key", "request_id", "trace_id")  # fields that a text log line shows (`_Plain`)
# id of the worker to which the current task belongs; tasks that this task starts inherit the value
WORKER: ContextVar[str | None] = ContextVar("sie_worker", default=None)


# exceptions whose messages are left out of logged tracebacks, because they may quote a client's values
QUOTING = (LookupError, ValueError, TypeError, AttributeError, AssertionError, SyntaxError)


def end_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that drain and end a process: SIGTERM, SIGINT, and SIGHUP unless it is ignored (nohup)."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, signal.SIGINT, *hangup)


def traceback_of(error: BaseException | None) -> str:
    """Return the tracebacks of an exception, of its causes, and of the members of exception groups: at most 10
    exceptions of a chain, and 10 members of a group. Messages of the types in QUOTING are left out.
    """
    parts: list[str] = []
    while error is not None and len(parts) < 10:
        shown = "" if isinstance(error, QUOTING) else f": {error}"
        parts.append(
            "".join(traceback.format_tb(error.__traceback__))
            + f"{type(error).__module__}.{type(error).__qualname__}{shown}"
        )
        if isinstance(error, BaseExceptionGroup):
            parts[-1] += "".join(f"\nof which one is\n{traceback_of(member)}" for member in error.exceptions[:10])
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\ncame from\n".join(parts)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the fields of a log line. A record without a trace id gets the trace id of the current task."""
    attributes = record.__dict__
    fields = {name: attributes.get(name) for name in _FIELDS}
    if fields["trace_id"] is None:
        fields["trace_id"] = TRACE_ID.get()
    return fields


class _Plain(logging.Formatter):
    """Formats log lines as text for people. The fields in _SHOWN follow the message."""

    _second = 0  # time of the last line, in whole seconds since 1970, and its text
    _stamp = ""

    def format(self, record: logging.LogRecord) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._stamp = second, time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(second))
        line = f"{self._stamp},{int(record.msecs):03d} {record.levelname} {record.name}: {record.getMessage()}"
        fields = _fields(record)
        for name in _SHOWN:
            if fields[name]:
                line += f" {name}={fields[name]}"
        return f"{line}\n{traceback_of(record.exc_info[1])}" if record.exc_info else line


class _Json(logging.Formatter):
    """Formats log lines as JSON objects, one per line, with only the documented keys. The fields in _FIELDS come from
    `extra={...}` of the logging call. `worker`: worker id for lines that have none.
    """

    def __init__(self, worker: str | None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(_fields(record))
        line["worker"] = line["worker"] or WORKER.get() or self._worker
        if record.exc_info:
            line["message"] += "\n" + traceback_of(record.exc_info[1])
        # file names in a message may contain bytes that are not valid UTF-8
        line["message"] = line["message"].encode(errors="backslashreplace").decode()
        return msgspec.json.encode(line).decode()


class LineWriter(logging.Handler):
    """Handler that writes lines to a stream. A line that the event loop logs is written after FLUSH_S, together with
    all lines of this time: each write wakes the reader of the stream. A line of level WARNING or above, and a line of a
    thread without an event loop, is written at once, with all earlier lines.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: list[str] = []
        self._flushing: asyncio.AbstractEventLoop | None = None  # event loop that will call `flush`

    def emit(self, record: logging.LogRecord) -> None:
        """Write or keep a line. `logging` calls this method under the handler's lock."""
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001  arguments that do not fit the message: `handleError` prints where it is
            self.handleError(record)
        loop = asyncio._get_running_loop()
        if loop is None or record.levelno >= logging.WARNING or len(self._lines) >= MAX_LINES:
            self.flush()
        elif loop is not self._flushing:
            self._flushing = loop
            loop.call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        assert self.lock is not None
        with self.lock, contextlib.suppress(OSError, ValueError):  # a closed pipe or stream, a full disk, an encoding
            lines, self._lines, self._flushing = self._lines, [], None
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()


def configure_logging(*, json: bool, worker: str | None = None) -> None:
    """Log to standard error, as text or as JSON. `worker`: id of this process's worker, which only JSON lines show."""
    handler = LineWriter(sys.stderr)
    handler.setFormatter(_Json(worker) if json else _Plain())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # The lines show no source, thread or process, so `logging` need not collect these fields. This saves a fifth of the
    # time of a line (logging HOWTO, section Optimization).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # HTTP clients log each URL at level info, and a URL may contain a signature
    for noisy in ("httpx", "httpcore", "httpx2", "httpcore2", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def own_stderr(*, json: bool, worker: str | None = None) -> None:
    """Call `configure_logging`. Also log Python's warnings, and uncaught exceptions as `traceback_of` shows them."""
    configure_logging(json=json, worker=worker)
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: _uncaught("this process", kind, error, trace)
    threading.excepthook = lambda hook_args: _uncaught(
        f"thread {hook_args.thread and hook_args.thread.name}", *hook_args[:3]
    )


def _uncaught(origin: str, kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None:
        logger = logging.getLogger("sie.process")
        logger.critical("%s ended because of an uncaught exception", origin, exc_info=(kind, error, trace))


async def wait_set(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait until `event` is set, at most `seconds` (None: without a limit). Returns whether it is set."""
    task = asyncio.current_task()
    assert task is not None, "asyncio.timeout needs a task"
    cancels = task.cancelling()
    try:
        async with asyncio.timeout(seconds) as limit:
            await event.wait()
    except TimeoutError:
        pass
    # Python before 3.11.4 raises CancelledError, not TimeoutError, at the timeout of a task that was cancelled earlier.
    except asyncio.CancelledError:
        if not limit.expired() or task.cancelling() > cancels:
            raise
    return event.is_set()


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel these tasks, and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class Stop:
    """Request to end the process. Every long-lived task waits for it, or is cancelled by the task that started it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._wakers: set[asyncio.Event] = set()
        self._lame: asyncio.Event | None = None  # set to end the lame-duck time; None outside of this time

    def request(self) -> None:
        self._event.set()
        for waker in self._wakers:
            waker.set()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    async def wait_for(self, seconds: float) -> bool:
        """Wait at most `seconds` until the end of the process is requested. Returns whether it was requested. Periodic
        tasks use this method to pause.
        """
        return await wait_set(self._event, seconds)

    async def lame_duck(self, seconds: float) -> None:
        """Wait at most `seconds`, while the process still serves and load balancers notice that it will end."""
        self._lame = asyncio.Event()
        try:
            await wait_set(self._lame, seconds)
        finally:
            self._lame = None

    def cut_short(self) -> bool:
        """End the lame-duck time. Returns False if the process is not in its lame-duck time."""
        if self._lame is None:
            return False
        self._lame.set()
        return True

    async def wait_woken(self, waker: asyncio.Event, seconds: float | None = None) -> bool:
        """Wait at most `seconds` until the end is requested or `waker` is set, and clear `waker`. Returns whether the
        end is requested. Only one task may wait for a waker, because this call clears it.
        """
        self._wakers.add(waker)
        try:
            await wait_set(waker, 0 if self.requested else seconds)
        finally:
            self._wakers.discard(waker)
        waker.clear()
        return self._event.is_set()


def run(main: Callable[[Stop], Coroutine[Any, Any, int]]) -> int:
    """Run `main` on uvloop, and return its exit status.

    Garbage collection skips the objects of modules imported before this call, and its thresholds are raised: with the
    defaults, a gateway would spend a fifth of its CPU time on garbage collection (bench/results/queue.md).
    """
    import uvloop

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)

    async def guarded() -> int:
        stop = Stop()
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if not stop.requested:
                stop.request()
            elif not stop.cut_short():
                logging.shutdown()
                os._exit(128 + number)

        for number in end_signals():
            loop.add_signal_handler(number, on_signal, number)
        return await main(stop)

    status: int = uvloop.run(guarded())
    return status


class Trouble:
    """Logs a lasting failure once as a warning. After a success, the next failure is logged again.

    `grace_s`: seconds in which the cause may be another process that is still starting. In this time, the failure is
    logged once at level info, after QUIET_S. The warning follows when the failure has lasted `grace_s`.
    """

    def __init__(
        self, logger: logging.Logger, purpose: str, grace_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._purpose = purpose
        self._grace_s = grace_s
        self._clock = clock
        self._since_s = 0.0
        self._is_logged = self._is_warned = False
        self.lasting = False

    def met(self, error: Exception | str) -> None:
        """Record that the failure has occurred. Log it at the level that the class describes, once at each level."""
        reason = str(error) or type(error).__name__  # a TimeoutError has no text
        if not self.lasting:
            self.lasting, self._is_logged, self._is_warned, self._since_s = True, False, False, self._clock()
        lasts_s = self._clock() - self._since_s
        if not self._is_warned and lasts_s >= self._grace_s:
            self._is_logged = self._is_warned = True
            self._logger.warning("%s: %s", self._purpose, reason)
        elif not self._is_logged and lasts_s >= QUIET_S:
            self._is_logged = True
            self._logger.info("%s: %s", self._purpose, reason)

    def passed(self) -> None:
        """Record a success. The next failure is logged again."""
        self.lasting = False

    @contextlib.contextmanager
    def logged(self, *errors: type[Exception]) -> Iterator[None]:
        """Record a success, or a failure if the block raises one of `errors`. The error is not raised again."""
        try:
            yield
        except errors as error:
            self.met(error)
        else:
            self.passed()


@contextlib.asynccontextmanager
async def task_group(*expected: type[Exception]) -> AsyncIterator[asyncio.TaskGroup]:
    """Open a TaskGroup. If all errors of its tasks have a type of `expected`, raise the first error alone. This code
    avoids `except*`: Python before 3.11.4 puts every error that is raised in such a block into an ExceptionGroup.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as group:
        if all(isinstance(error, expected) for error in group.exceptions):
            raise group.exceptions[0] from group
        raise


class Tasks:
    """Long-lived tasks of a component. If a task ends with an exception, the exception is logged, `failed` becomes
    true, and `on_failure` is called, which must end the component. Every background task must be started by `start`:
    any other task could end unnoticed, and the component would do no work.
    """

    def __init__(self, logger: logging.Logger, on_failure: Callable[[], None]) -> None:
        self._logger = logger
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failed = False

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        self._logger.error("task %s failed", task.get_name(), exc_info=task.exception())
        self.failed = True
        self._on_failure()

    def __len__(self) -> int:
        return len(self._tasks)

    async def settle(self, timeout_s: float) -> bool:
        """Wait for all tasks without cancelling them. Returns False if some still run after `timeout_s`."""
        if not self._tasks:
            return True
        _, pending = await asyncio.wait(self._tasks, timeout=timeout_s)
        return not pending

    async def cancel(self) -> None:
        await cancel_all(self._tasks)


async def retry(
    attempt: Callable[[], Awaitable[Any]],
    *,
    errors: tuple[type[Exception], ...],
    stop: Stop,
    logger: logging.Logger,
    task: str,
) -> Any:
    """Call `attempt` until it succeeds, and return its result; None if the process must stop. The pauses grow from 0.1
    s to 5 s.

    A failure that lasts QUIET_S is logged once at level info, because processes that start at the same time wait for
    each other. A failure that lasts START_S is logged once as a warning.
    """
    delay_s, trouble = 0.1, Trouble(logger, task, START_S)
    while not stop.requested:
        try:
            return await attempt()
        except errors as error:
            trouble.met(f"{error}; trying again")
        if await stop.wait_for(delay_s):
            break
        delay_s = min(delay_s * 2, 5.0)
    return None
