"""Tasks whose result several callers wait for: at most one attempt runs at a time for each key."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from sie_broker import BrokerUnavailable


class SharedTasks:
    """Tasks by key. A caller that stops waiting does not end the task for the other callers. The exception of a task is
    retrieved even if no caller waits for it.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._tasks

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def begin(self, key: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Return the running task of this key, or start a new one."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(work(), name=key)
            task.add_done_callback(functools.partial(self._ended, key))
        return task

    async def run(self, key: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for the task of this key. Raises the exception of the task, or BrokerUnavailable if the task was
        stopped: the callers themselves were not cancelled.
        """
        task = self.begin(key, work)
        await asyncio.wait([task])
        if task.cancelled():
            raise BrokerUnavailable(f"{key}: this gateway has ended")
        task.result()

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
