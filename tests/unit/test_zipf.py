"""Hosting and residency under Zipf traffic in virtual time, with 20 models and memory for 5: loads and waits against a
plain LRU cache.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

import numpy as np
import pytest
from fake_adapter import TOKENIZER, toy_entry
from unit.adapter.test_residency import World

from sie_contracts.errors import ModelLoading
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.wire import ipc
from sie_sidecar.models import Hosting

MODELS, CAPACITY, REQUESTS, LOAD_S, RUN_S = 20, 5, 800, 1.0, 0.01


class _Jumping(selectors.DefaultSelector):
    """A selector that advances its clock instead of waiting."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now_s += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which time passes only while nothing is ready."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


class SlowLink:
    """An adapter with a residency: a load takes LOAD_S, an answer without a load no time."""

    def __init__(self) -> None:
        self.listeners: list[Any] = []
        self.description: ipc.Description | None = None
        self.dropped: Any = None
        self.world = World(sizes={f"toy/{number}": 170 for number in range(MODELS)}, known=True)

    def attach(self, may_drop: Any, dropped: Any) -> None:
        self.dropped = dropped

    async def ensure_ready(self, question: ipc.EnsureReady) -> ipc.Ready:
        before = len(self.world.loads)
        dropped = self.world.ensure(question.model, question.may_drop)
        if len(self.world.loads) > before:
            await asyncio.sleep(LOAD_S)
        loaded = ipc.LoadedModel(question.model, "local", "f", "float32", "toy")
        if dropped:
            self.dropped(dropped)
        return ipc.Ready(loaded, TOKENIZER, 512, {"encode": ipc.Rows()})


def traffic(seed: int) -> list[tuple[float, str]]:
    """Return Poisson arrivals, one in 0.8 s, of models by Zipf's law."""
    generator = np.random.default_rng(seed)
    shares = 1 / np.arange(1, MODELS + 1)
    ranks = generator.choice(MODELS, REQUESTS, p=shares / shares.sum())
    return [
        (float(at), f"toy/{rank}")
        for at, rank in zip(np.cumsum(generator.exponential(0.8, REQUESTS)), ranks, strict=True)
    ]


async def served(arrivals: list[tuple[float, str]]) -> tuple[int, list[float]]:
    """Return the number of loads, and the time of each request."""
    loop, link, took_s = asyncio.get_running_loop(), SlowLink(), []
    connection: Any = link
    hosting = Hosting(connection, loop.time, lambda: None, 1.0)
    catalogue = Catalogue({f"toy/{number}": toy_entry(f"toy/{number}") for number in range(MODELS)})

    async def request(at_s: float, name: str) -> None:
        hosted = hosting.obtain(catalogue.resolve(name))
        hosting.add_items(hosted)
        while True:
            await hosting.ensure(hosted)
            try:
                link.world.use(name)
                break
            except ModelLoading:  # it was evicted for a load that still runs; the worker does the same
                hosted.mark_unloaded()
        await asyncio.sleep(RUN_S)
        hosting.let_go(hosted)
        took_s.append(loop.time() - at_s)

    async with asyncio.TaskGroup() as group:
        for at_s, name in arrivals:
            await asyncio.sleep(at_s - loop.time())
            group.create_task(request(at_s, name))
    return len(link.world.loads), took_s


def plain(arrivals: list[tuple[float, str]]) -> tuple[int, list[float]]:
    """Return the same figures for a plain LRU cache that knows of each eviction at once."""
    ready_s: dict[str, float] = {}
    used_s: dict[str, float] = {}
    loads, took_s = 0, []
    for at_s, name in arrivals:
        if name not in ready_s:
            loads += 1
            if len(ready_s) == CAPACITY:
                # like a real cache it cannot evict a model that loads or runs
                idle = [candidate for candidate, loaded_s in ready_s.items() if loaded_s + RUN_S <= at_s]
                del ready_s[min(idle or ready_s, key=used_s.__getitem__)]
            ready_s[name] = at_s + LOAD_S
        used_s[name] = max(at_s, ready_s[name])
        took_s.append(used_s[name] - at_s + RUN_S)
    return loads, took_s


@pytest.mark.usefixtures("quick_collections")
@pytest.mark.parametrize("seed", range(2))
def test_loads_and_the_99th_percentile_are_no_worse_than_plain_lru(seed: int) -> None:
    arrivals = traffic(seed)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loads, took_s = runner.run(served(arrivals))
    lru_loads, lru_took_s = plain(arrivals)
    p99, lru_p99 = np.quantile(took_s, 0.99), np.quantile(lru_took_s, 0.99)
    print(f"\nloads {loads}, plain {lru_loads}; p99 {p99:.3f} s, plain {lru_p99:.3f} s; longest {max(took_s):.3f} s")
    assert len(took_s) == REQUESTS
    assert loads <= lru_loads
    assert p99 <= 1.01 * lru_p99
