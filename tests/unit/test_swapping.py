"""Models that do not fit into memory together: none waits for ever, and no pulled work is dropped."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_adapter import TOKENIZER, toy_entry
from inprocess import settings_of
from simulation.virtual import VirtualLoop

from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.wire import ipc
from sie_sidecar.link import AdapterLink
from sie_sidecar.models import MAX_TURN_S, Hosting, ModelState


class OneModel:
    """An adapter that holds one model, and gives it up only where the sidecar allows it. A load takes `load_s`."""

    describe: Any = AdapterLink.describe

    def __init__(self, load_s: float = 0.0) -> None:
        self.load_s = load_s
        self.listeners: list[Any] = []
        self.description: ipc.Description | None = None
        self.loaded = ""
        self.evictions = 0

    def attach(self, may_drop: Any, dropped: Any) -> None:
        self.dropped = dropped

    async def ensure_ready(self, question: ipc.EnsureReady) -> ipc.Ready:
        if self.loaded and self.loaded != question.model:
            if self.loaded not in question.may_drop:
                raise ModelLoadFailed("no memory", reason="no_room", extras={"error_class": "OOM"})
            self.evictions += 1
            self.dropped((self.loaded,))
        self.loaded = question.model
        if self.load_s:
            await asyncio.sleep(self.load_s)
        loaded = ipc.LoadedModel(question.model, "local", "f", "float32", "toy")
        return ipc.Ready(loaded, TOKENIZER, 512, {"encode": ipc.Rows()})

    async def request(self, question: ipc.Request) -> ipc.Reply:
        """Answer Describe, the only request of a load."""
        models = (ipc.LoadedModel(self.loaded, "local", "f", "float32", "toy"),) if self.loaded else ()
        return ipc.Description(ipc.PROTOCOL, 1, "cpu", "0", models=models)


class Worker:
    """Worker that does with a hosting what the sidecar does: it takes in work, ensures its model, runs the work, and
    lets it go.
    """

    def __init__(self, swap_after_s: float, *, load_s: float = 0.0) -> None:
        self.link = OneModel(load_s)
        loop = asyncio.get_running_loop()
        link: Any = self.link
        self.hosting = Hosting(link, loop.time, lambda: None, swap_after_s)
        catalogue = Catalogue({name: toy_entry(name) for name in ("toy/a", "toy/b", "toy/c", "toy/d")})
        self.all = [self.hosting.obtain(catalogue.resolve(name)) for name in catalogue.entries]
        self.a, self.b = self.all[:2]

    async def run(self, hosted: ModelState, running_s: float = 0.002, items: int = 1) -> str:
        """Run work items that came together. Return the model that was loaded from their start to their end."""
        self.hosting.add_items(hosted, items)
        try:
            await self.hosting.ensure(hosted, lambda: items)
            before = self.link.loaded
            await asyncio.sleep(running_s)  # the forward pass
            assert self.link.loaded == before
            return before
        finally:
            for _ in range(items):
                self.hosting.let_go(hosted)


@pytest.mark.parametrize("variable", [{"SIE_SWAP_AFTER_MS": "30"}, {"SIE_SWAP_AFTER_MS": "400"}])
async def test_a_busy_model_makes_room_for_one_that_waited_so_long(variable: dict[str, str]) -> None:
    """SIE_SWAP_AFTER_MS: without the swap the second model would wait until the first one's clients pause, which they
    never do.
    """
    after_s = settings_of(**variable).swap_after_ms / 1000
    worker = Worker(after_s)
    stop = asyncio.Event()

    async def client() -> None:
        while not stop.is_set():
            assert await worker.run(worker.a) == "toy/a"

    clients = [asyncio.create_task(client()) for _ in range(4)]
    async with asyncio.timeout(30):
        await worker.run(worker.a)
        asked_s = asyncio.get_running_loop().time()
        assert await worker.run(worker.b) == "toy/b"
        waited_s = asyncio.get_running_loop().time() - asked_s
    stop.set()
    await asyncio.gather(*clients)
    assert waited_s >= after_s
    assert worker.hosting.swaps >= 1
    assert worker.a.parked == worker.b.parked == worker.a.held == worker.b.held == 0


@pytest.mark.parametrize("swap_after_s", [0.2, 1.0])
@pytest.mark.parametrize("models", [2, 3, 4])
@pytest.mark.parametrize("load_s", [0.3, 5.0, 20.0])
def test_loads_of_a_few_seconds_take_half_of_the_time_at_most_and_every_model_has_its_turn(
    load_s: float, models: int, swap_after_s: float
) -> None:
    """All models have work all the time, under virtual time. No work item waits longer than a round of loads and turns
    and one more load.
    """
    turn_s = max(min(load_s, MAX_TURN_S), swap_after_s)
    round_s = models * (load_s + turn_s)
    for_s, pass_s = 10 * round_s, turn_s / 20
    longest_s = 0.0

    async def client(worker: Worker, hosted: ModelState, end_s: float) -> None:
        nonlocal longest_s
        while (asked_s := loop.time()) < end_s:
            await worker.run(hosted, pass_s)
            longest_s = max(longest_s, loop.time() - asked_s)

    async def all_clients() -> Worker:
        worker = Worker(swap_after_s, load_s=load_s)
        end_s = loop.time() + for_s
        await asyncio.gather(*(client(worker, hosted, end_s) for hosted in worker.all[:models] for _ in range(3)))
        return worker

    loop = VirtualLoop()
    try:
        worker = loop.run_until_complete(all_clients())
    finally:
        loop.close()
    loads = worker.link.evictions
    assert loads * load_s <= 1.1 * for_s * max(0.5, load_s / (load_s + turn_s))
    assert longest_s <= round_s + load_s + 2 * pass_s
    assert loads >= 0.8 * for_s / (load_s + turn_s), "and they do take turns"
    assert worker.hosting.swaps <= loads, "one model is closed for a load"


async def test_a_model_that_falls_idle_goes_soon() -> None:
    worker = Worker(1000.0)
    async with asyncio.timeout(30):
        await worker.run(worker.a)
        busy = asyncio.create_task(worker.run(worker.a, 0.05))
        await asyncio.sleep(0)
        assert await worker.run(worker.b) == "toy/b"
        await busy
    assert worker.hosting.swaps == 0


async def test_a_model_that_is_too_large_for_an_empty_device_is_refused() -> None:
    worker = Worker(0.01)

    async def refuse(question: ipc.EnsureReady) -> ipc.Ready:
        raise ModelLoadFailed("no memory", reason="no_room", extras={"error_class": "OOM"})

    worker.link.ensure_ready = refuse  # type: ignore[method-assign]
    with pytest.raises(ModelLoadFailed, match="no memory"):
        await worker.run(worker.a)


async def test_two_loads_that_do_not_fit_at_once_are_made_one_after_the_other() -> None:
    """Neither load is refused because of the other one. Both need few attempts."""
    worker = Worker(0.02)
    models: list[str] = []
    inside = 0
    ensure_ready = worker.link.ensure_ready

    async def one_at_a_time(question: ipc.EnsureReady) -> ipc.Ready:
        nonlocal inside
        models.append(question.model)
        inside += 1
        try:
            await asyncio.sleep(0)  # both loads begin, and both run out of memory
            if inside > 1:
                await asyncio.sleep(0)
                raise ModelLoadFailed("no memory", extras={"error_class": "OOM"})
            return await ensure_ready(question)
        finally:
            inside -= 1

    worker.link.ensure_ready = one_at_a_time  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        assert await asyncio.gather(worker.run(worker.a), worker.run(worker.b)) == ["toy/a", "toy/b"]
    assert len(models) <= 6


async def test_work_that_was_cancelled_before_the_gate_is_not_counted_there() -> None:
    """Otherwise a model with only parked work would be neither idle nor busy, and no model could be loaded in its
    place.
    """
    worker = Worker(1000.0)
    await worker.run(worker.a)
    worker.hosting._close(worker.a)
    left = 3
    worker.hosting.add_items(worker.a, left)
    waiting = asyncio.create_task(worker.hosting.ensure(worker.a, lambda: left))
    await asyncio.sleep(0)
    assert worker.hosting.idle(0.0) == [worker.a]
    left = 2
    worker.hosting.let_go(worker.a)
    assert worker.hosting.idle(0.0) == [worker.a]
    worker.hosting.add_items(worker.a)
    assert worker.hosting.idle(0.0) == [], "one that is past the gate"
    worker.hosting._open(worker.a)
    await waiting


async def test_a_load_that_nobody_waits_for_any_more_takes_no_room() -> None:
    """toy/b waits for the work of toy/a to end, until its own work is withdrawn. Then toy/a stays loaded."""
    worker = Worker(1000.0)
    await worker.run(worker.a)
    worker.hosting.add_items(worker.a)
    left = 1
    worker.hosting.add_items(worker.b)
    waiting = asyncio.create_task(worker.hosting.ensure(worker.b, lambda: left))
    await asyncio.sleep(0.01)
    assert worker.b.state == "loading"
    left = 0
    worker.hosting.let_go(worker.b)
    async with asyncio.timeout(30):
        await waiting
    assert (worker.b.state, worker.link.loaded) == ("available", "toy/a")
    worker.hosting.let_go(worker.a)
    assert await worker.run(worker.b) == "toy/b", "what comes later is loaded for"
