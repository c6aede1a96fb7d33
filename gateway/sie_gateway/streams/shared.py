"""Tasks with a key. Callers that need the same key at the same time share one task."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from sie_broker import BrokerUnavailable
from sie_runtime.process import cancel_all


class SharedTasks:
    """Running tasks by key. A task continues even if all its callers are cancelled; nobody then sees its exception."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._tasks

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def begin(self, key: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Return the running task of this key. If no task runs, start a task with `work`."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(work(), name=key)
            task.add_done_callback(functools.partial(self._ended, key))
        return task

    async def run(self, key: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the task of this key; start a task if none runs. Raises the task's exception. If `stop` cancelled
        the task, raise BrokerUnavailable: CancelledError would wrongly mean that the caller itself was cancelled.
        """
        task = self.begin(key, work)
        await asyncio.wait([task])
        if task.cancelled():
            raise BrokerUnavailable(f"{key}: this gateway is shutting down")
        task.result()

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()

    async def stop(self) -> None:
        await cancel_all(self._tasks.values())
