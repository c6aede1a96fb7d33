"""Slots for work of clients, limited in total and per key, and threads in which keys take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from sie_contracts.errors import RateLimited, ResourceExhausted

T = TypeVar("T")


class KeySlots:
    """`total` slots, of which one API key may use `per_key` at the same time. Error texts name the `work`, for example
    uploads. `reason`: field `reason` of the errors.
    """

    def __init__(self, total: int, per_key: int, work: str, reason: str) -> None:
        self._total, self._per_key, self._work, self._reason = total, per_key, work, reason
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def hold(self, key: str) -> Iterator[None]:
        """Occupy a slot. Raises RateLimited if the key has `per_key` slots, ResourceExhausted if no slot is free."""
        if self._taken[key] >= self._per_key:
            raise RateLimited(
                f"this key has {self._per_key} {self._work} at once, the limit for one key at this gateway",
                reason=self._reason,
            )
        if self._taken.total() >= self._total:
            raise ResourceExhausted(
                f"this gateway has {self._total} {self._work} at once, the limit for all keys", reason=self._reason
            )
        self._taken[key] += 1
        try:
            yield
        finally:
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]


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
