"""Background tasks of a broker connection, and safe calls of callbacks that code outside the connection registered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sie_broker import BrokerError, BrokerUnavailable

log = logging.getLogger("sie.broker")


class OwnedTasks:
    """Tasks of one connection, cancelled when it ends. `crashed` is True if one of them ended with an error."""

    def __init__(self, owner: str) -> None:
        self.crashed = False
        self._owner = owner
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], work_name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}: {work_name}")
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel(self) -> None:
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crashed = True
            log.critical("%s crashed", task.get_name(), exc_info=error)


class ReconnectHandlers:
    """Handlers that are called after each reconnect, one after the other, by the task `run`."""

    def __init__(self) -> None:
        self._handlers: list[Callable[[], Awaitable[None]]] = []
        self._reconnected = asyncio.Event()

    def add(self, handler: Callable[[], Awaitable[None]]) -> bool:
        """Add a handler. Return whether it is the first handler: the caller must then start `run`."""
        self._handlers.append(handler)
        return len(self._handlers) == 1

    def reconnected(self) -> None:
        self._reconnected.set()

    async def run(self) -> None:
        while True:
            await self._reconnected.wait()
            self._reconnected.clear()
            for handler in list(self._handlers):
                await guarded("a reconnect handler", handler())


async def guarded(work_name: str, work: Awaitable[None]) -> None:
    """Await a callback that a user of the connection registered. Errors are logged by `log_failure` and not raised."""
    try:
        await work
    except (asyncio.CancelledError, Exception) as error:  # noqa: BLE001  `log_failure` logs it
        log_failure(work_name, error)


def log_failure(work_name: str, error: BaseException) -> None:
    """Log the error of a user's callback, also a CancelledError that was raised inside it. A BrokerError is no fault of
    the callback: it is logged in one line without a traceback. If the current task itself was cancelled, raise the
    CancelledError again.
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
