"""An event loop without waiting: when nothing is ready, time jumps to the next timer. It replaces sockets, threads,
clocks and randomness.

Everything that could differ between two runs comes from the seed. Tasks and futures hash by their number, so sets of
them have one order. Tasks and callbacks of a simulated process carry its `Scope`, so it can be ended at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import heapq
import itertools
import os
import random
import sys
import time
import types
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

EPOCH_S = 1_700_000_000.0  # the broker's wall clock when a simulation begins
_CLOCKS: dict[str, tuple[float, bool]] = {  # by name in `time`: units of a second, and True for a wall clock
    "monotonic": (1, False),
    "perf_counter": (1, False),
    "time": (1, True),
    "monotonic_ns": (1e9, False),
    "perf_counter_ns": (1e9, False),
    "time_ns": (1e9, True),
}


class StandsStill(Exception):
    """Raised if nothing is ready and no timer is set: an awaited event will never come."""


@dataclass(eq=False)
class Scope:
    """One simulated process. `skew_s` is the error of its wall clock."""

    name: str
    skew_s: float = 0.0
    dead: bool = False


OUTSIDE = Scope("world")
SCOPE: contextvars.ContextVar[Scope] = contextvars.ContextVar("scope", default=OUTSIDE)


class _Numbered:
    """An object whose hash is its number of creation instead of its address."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task, _Numbered):  # type: ignore[type-arg]
    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, **more: Any) -> None:
        self.number = number
        self.scope = SCOPE.get()
        super().__init__(coro, **more)

    __hash__ = _Numbered.__hash__


class _Future(asyncio.Future, _Numbered):  # type: ignore[type-arg]
    def __init__(self, number: int, **more: Any) -> None:
        self.number = number
        super().__init__(**more)

    __hash__ = _Numbered.__hash__


class _NoSelector:
    """The selector of a loop without I/O: `select` lets the time pass."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None or timeout > 0:
            self._loop.jump()
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time. It calls `on_jump` each time before the time moves, when nothing is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _NoSelector(self)
        self._clock_resolution = 1e-9
        self.now_s = 1000.0
        self.jumps = 0
        self.on_jump: Callable[[], None] = lambda: None
        self.failures: list[dict[str, Any]] = []
        self.tasks: dict[_Task, None] = {}
        self._numbers = itertools.count(1)
        self._listening: dict[str, Listening] = {}
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    # time

    def time(self) -> float:
        return self.now_s

    def jump(self) -> None:
        self.on_jump()
        if self._ready:
            return
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False
        if not scheduled:
            raise StandsStill("nothing is ready and no timer is set")
        self.jumps += 1
        self.now_s = max(self.now_s, scheduled[0].when())

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there are no events."""

    def _write_to_self(self) -> None:
        """Do nothing: the loop never sleeps in its selector."""

    # tasks

    def create_future(self) -> _Future:
        return _Future(next(self._numbers), loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: contextvars.Context | None = None) -> Any:
        self._check_closed()
        make = functools.partial(_Task, coro, next(self._numbers), loop=self, name=name)
        task = make() if context is None else context.run(make, context=context)
        self.tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: Any) -> None:
        self.tasks.pop(task, None)

    def of(self, scope: Scope) -> list[_Task]:
        """Return the unfinished tasks of a process, in order of creation."""
        return [task for task in self.tasks if task.scope is scope and not task.done()]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run the function at once in this thread. Its result is visible on the next turn of the loop."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  as a thread would hand it over
            done.set_exception(error)
        return done

    # Unix sockets

    async def create_unix_connection(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        await asyncio.sleep(0)
        listening = self._listening.get(str(path))
        if listening is None:
            raise ConnectionRefusedError(111, "Connection refused")
        protocol, peer = protocol_factory(), listening.factory()
        ours, theirs = End(self, protocol, contextvars.copy_context()), End(self, peer, listening.context)
        ours.peer, theirs.peer = theirs, ours
        listening.ends.append(theirs)
        protocol.connection_made(ours)
        self.call_soon(peer.connection_made, theirs, context=listening.context)
        return ours, protocol

    async def create_unix_server(self, protocol_factory: Any, path: Any = None, **_: Any) -> Any:
        listening = self._listening[str(path)] = Listening(self, str(path), protocol_factory)
        return listening

    def stop_listening(self, listening: Listening) -> None:
        if self._listening.get(listening.path) is listening:
            del self._listening[listening.path]


class Listening:
    """A listening socket. `close` refuses new connections. `cut` also ends every open one, as the death of its process
    does.
    """

    def __init__(self, loop: VirtualLoop, path: str, factory: Callable[[], Any]) -> None:
        self.path, self.factory = path, factory
        self.context = contextvars.copy_context()
        self.ends: list[End] = []
        self._loop = loop

    def close(self) -> None:
        self._loop.stop_listening(self)

    def cut(self) -> None:
        self.close()
        for end in self.ends:
            end.close()


class End(asyncio.Transport):
    """One end of a connected pair: bytes arrive in order on the next turn of the loop."""

    def __init__(self, loop: VirtualLoop, protocol: Any, context: contextvars.Context) -> None:
        super().__init__()
        self.peer: End = self
        self._loop, self._protocol, self._context = loop, protocol, context
        self._closing = False

    def write(self, data: Any) -> None:
        if not self._closing:
            self._loop.call_soon(self.peer._receive, bytes(data), context=self.peer._context)

    def _receive(self, data: bytes) -> None:
        if not self._closing:
            self._protocol.data_received(data)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, None, context=self._context)
            self._loop.call_soon(self.peer.close, context=self.peer._context)

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        """Do nothing: the peers of a simulation are never fast enough to overflow."""

    resume_reading = pause_reading

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Writes are never held."""


@contextlib.contextmanager
def virtual_time(loop: VirtualLoop, seed: int) -> Iterator[None]:
    """Replace within the block every clock of Python by that of the loop, and draw every random number from `seed`."""
    source = random.Random(seed)
    state = random.getstate()
    random.seed(seed)
    real = {name: getattr(time, name) for name in _CLOCKS}

    def clock(name: str) -> Callable[[], Any]:
        units, dated = _CLOCKS[name]

        def read() -> Any:
            value = loop.now_s + (EPOCH_S + SCOPE.get().skew_s if dated else 0.0)
            return int(value * units) if name.endswith("_ns") else value

        return read

    fakes = {name: clock(name) for name in _CLOCKS}
    replacements = {id(function): fakes[name] for name, function in real.items()}
    defaults = [
        (clock_function, clock_function.__defaults__, clock_function.__kwdefaults__)
        for clock_function in _with_a_clock(replacements.keys())
    ]
    sources = [(os, "urandom", source.randbytes), (random, "_urandom", source.randbytes)]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in sources]
    try:
        for name, fake in fakes.items():
            setattr(time, name, fake)
        for owner, name, fake in sources:
            setattr(owner, name, fake)
        for function, by_place, by_name in defaults:
            function.__defaults__ = by_place and tuple(replacements.get(id(value), value) for value in by_place)
            function.__kwdefaults__ = by_name and {
                name: replacements.get(id(value), value) for name, value in by_name.items()
            }
        yield
    finally:
        for function, by_place, by_name in defaults:
            function.__defaults__, function.__kwdefaults__ = by_place, by_name
        for owner, name, value in originals:
            setattr(owner, name, value)
        for name, value in real.items():
            setattr(time, name, value)
        random.setstate(state)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in virtual time that waits only for timers and its own tasks. A pause of the machine takes no time."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, VirtualLoop)
            with virtual_time(loop, seed=0):
                runner.run(test(*args, **fixtures))

    return run


def _with_a_clock(clocks: Collection[int]) -> list[types.FunctionType]:
    """Return the functions of the product that have a clock as the default of an argument. `clocks`: ids of clocks."""
    clock_functions = []
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("sie_"):
            continue
        for member in list(vars(module).values()):
            if getattr(member, "__module__", None) != module_name:
                continue
            members = vars(member).values() if isinstance(member, type) else [member]
            functions = [value for value in members if isinstance(value, types.FunctionType)]
            for function in functions:
                defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
                if any(id(value) in clocks for value in defaults):
                    clock_functions.append(function)
    return clock_functions
