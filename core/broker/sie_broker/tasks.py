"""State and background tasks of a broker connection. `guarded` awaits a callback and logs its errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sie_broker import BrokerError, BrokerUnavailable

log = logging.getLogger("sie.broker")


class ConnectionState:
    """State that the connections of all implementations have: liveness, background tasks, reconnect handlers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.troubles: dict[str, str] = {}
        self._live = False
        self._closed = False
        self._up = asyncio.Event()  # set while `reach` need not wait: connected, or closed for ever
        self._crashed = False  # True if a task ended with an error
        self._tasks: set[asyncio.Task[None]] = set()
        self._reconnect_handlers: list[Callable[[], Awaitable[None]]] = []
        self._reconnected = asyncio.Event()

    @property
    def live(self) -> bool:
        """Return whether the connection exists. `connected` is also False if a task of the connection crashed."""
        return self._live

    @property
    def connected(self) -> bool:
        return self.live and not self._crashed

    async def reach(self, timeout_s: float) -> float:
        """Wait for the connection. Return the remaining seconds of `timeout_s`. Raises BrokerUnavailable after
        `timeout_s`, or if the connection is closed.
        """
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        if not self._closed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._up.wait()
            except TimeoutError:
                raise BrokerUnavailable(f"{self.name}: no connection to the broker for {timeout_s} s") from None
        if self._closed:
            raise BrokerUnavailable(f"{self.name}: the connection to the broker is closed")
        return timeout_s - (loop.time() - start_s)

    def own(self, work: Coroutine[Any, Any, None], work_name: str) -> asyncio.Task[None]:
        """Run `work` as a task, which `close` cancels. If the task raises an exception, `connected` becomes False."""
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}: {work_name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crashed = True
            log.critical("%s crashed, so the connection counts as lost", task.get_name(), exc_info=error)

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def on_reconnect(self, handler: Callable[[], Awaitable[None]]) -> None:
        self._reconnect_handlers.append(handler)
        if len(self._reconnect_handlers) == 1:
            self.own(self._call_reconnect_handlers(), "reconnect handlers")

    async def _call_reconnect_handlers(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            for handler in list(self._reconnect_handlers):
                await guarded("a reconnect handler", handler())


async def guarded(work_name: str, work: Awaitable[None]) -> None:
    """Await a callback. `log_failure` logs its errors; they are not raised."""
    try:
        await work
    except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001  `log_failure` logs it
        log_failure(work_name, error)


def log_failure(work_name: str, error: BaseException) -> None:
    """Log an error that a callback raised. Log a BrokerError without a traceback, because the callback did not cause
    it. If the current task was cancelled, raise the CancelledError again.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
        log.error("%s raised CancelledError, although its task was not cancelled", work_name, exc_info=error)
    elif isinstance(error, BrokerError):
        log.warning("%s was not completed, because the broker failed: %s", work_name, error)
    else:
        log.error("%s failed", work_name, exc_info=error)


def expire(answer: asyncio.Future[Any], subject: str, timeout_s: float) -> None:
    if not answer.done():
        answer.set_exception(BrokerUnavailable(f"{subject}: no answer within {timeout_s:.3g} s"))
