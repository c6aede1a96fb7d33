"""Threads in which keys take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class KeyTurns:
    """`threads` threads for work that takes long. While all are busy, keys take turns: each free thread does the oldest
    work of the key whose turn it is, so a key with much work delays another one by one piece of work for each thread.
    """

    def __init__(self, threads: int) -> None:
        self._free = threads
        # by key, the one whose turn it is first: its work that waits, the oldest first
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, key: str, work: Callable[[], T]) -> T:
        """Return the result of `work`, which runs in a thread. The thread stays busy until `work` has ended, even if
        the caller is cancelled.
        """
        await self._turn(key)
        thread = asyncio.get_running_loop().run_in_executor(None, work)
        thread.add_done_callback(lambda _: self._pass_on())
        try:
            return await asyncio.shield(thread)
        finally:
            # An error of `work` has this frame in its traceback, and the future has the error. Without this statement
            # they would keep what `work` has read until the garbage collector runs.
            del thread

    async def _turn(self, key: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # cancelled after the turn had come
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            key = next(iter(self._waiting))
            waiting = deque(turn for turn in self._waiting.pop(key) if not turn.done())  # without cancelled work
            if not waiting:
                continue
            turn = waiting.popleft()
            if waiting:
                self._waiting[key] = waiting
            turn.set_result(None)
            return
        self._free += 1
