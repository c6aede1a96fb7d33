"""Work that those who want it at once share, one attempt at a time for each key."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from sie_broker import BrokerUnavailable


class SharedTasks:
    """Whoever stops waiting does not end it for the others. How it ended is read also when nobody waits any more."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._tasks

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def begin(self, key: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """The attempt that is under way, or a new one."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.get_running_loop().create_task(work(), name=key)
            task.add_done_callback(functools.partial(self._ended, key))
        return task

    async def run(self, key: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for it. Raises what it raises; BrokerUnavailable where it was stopped: nobody has cancelled those who
        wait.
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
