"""The fixed-cost adapter: the link of a sidecar speaks to its process, and its batches and loads take the configured
time.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cluster import until
from fake_adapter import WIDTH, ids_of, toy_entry, vector_of
from fixed_cost_adapter import POISONED, Device
from stack import Device as Options
from stack import Part, listens

from sie_contracts.errors import ModelLoading
from sie_contracts.wire import ipc
from sie_contracts.wire.messages import Ok
from sie_runtime.process import Stop
from sie_sidecar.link import AdapterGone, AdapterLink

NUMBERS = itertools.count()


def batch(*texts: str, model: str = "toy/one") -> ipc.RunBatch:
    ids = [ids_of(text) for text in texts]
    lengths = np.array([len(row) for row in ids], "<i4").tobytes()
    block = np.concatenate(ids).astype("<i4").tobytes()
    return ipc.RunBatch(f"b{next(NUMBERS)}", model, "encode", lengths, block, (ipc.Group(0, len(ids)),))


@asynccontextmanager
async def linked(part: Part, path: Path) -> AsyncIterator[AdapterLink]:
    """Start the process and connect a sidecar's link to it, with the toy model loaded."""
    stop = Stop()
    part.start()
    link = AdapterLink(str(path), size=4, ping_s=0.2, stale_s=20.0)
    running = asyncio.create_task(link.run(stop))
    try:
        async with asyncio.timeout(30):
            await link.wait_connected()
        entry = msgspec.to_builtins(toy_entry())
        await link.ensure_ready(ipc.EnsureReady("toy/one", entry))
        yield link
    finally:
        stop.request()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        part.stop()


def process(tmp_path: Path, options: Options) -> tuple[Part, Path]:
    path = tmp_path / "a.sock"
    return Part("adapter", "adapter", options.argv(path), {}, lambda: listens(path)), path


async def test_its_vectors_are_those_that_tests_know(tmp_path: Path) -> None:
    texts = ["hello", "", "höhe über ß", "x" * 300]
    async with linked(*process(tmp_path, Options())) as link:
        done = await link.run_batch(batch(*texts), lambda: None)
    vectors = np.frombuffer(done.block, "<f4").reshape(-1, WIDTH)
    assert [outcome.tokens for outcome in done.outcomes if isinstance(outcome, Ok)] == [
        len(ids_of(text)) for text in texts
    ]
    np.testing.assert_allclose(vectors, [vector_of(ids_of(text)) for text in texts], rtol=1e-6)


async def test_a_model_that_is_not_loaded_is_refused(tmp_path: Path) -> None:
    async with linked(*process(tmp_path, Options())) as link:
        with pytest.raises(ModelLoading):
            await link.run_batch(batch("a", model="toy/two"), lambda: None)


async def test_a_load_takes_its_time_once(tmp_path: Path) -> None:
    part, path = process(tmp_path, Options(load_s=0.3))
    started_s = time.monotonic()
    async with linked(part, path) as link:
        assert time.monotonic() - started_s >= 0.3
        ready = await link.ensure_ready(ipc.EnsureReady("toy/one", msgspec.to_builtins(toy_entry())))
        assert ready.loaded.model == "toy/one"


async def test_batches_take_their_time_and_no_processor(tmp_path: Path) -> None:
    """Four batches of 100 ms on two lanes take at least 200 ms and almost no processor time."""
    part, path = process(tmp_path, Options(batch_ms=60, token_us=2000, lanes=2))
    async with linked(part, path) as link:
        before_s, started_s = part.cpu_s(), time.monotonic()
        await asyncio.gather(*(link.run_batch(batch("x" * 18), lambda: None) for _ in range(4)))
        taken_s = time.monotonic() - started_s
        assert part.cpu_s() - before_s < 0.05
    assert taken_s >= 0.2


def test_a_lane_goes_on_where_its_last_batch_ended() -> None:
    device = Device(2, 0.010, 0.001)
    assert device.take(10, 100.0) == pytest.approx((100.0, 100.02))
    assert device.take(0, 100.0) == pytest.approx((100.0, 100.01))
    assert device.take(5, 100.001) == pytest.approx((100.01, 100.025))
    assert device.busy_for_s(100.005) == pytest.approx(0.005)
    assert device.busy_for_s(101.0) == 0.0


async def test_the_deadly_text_ends_the_process_after_the_device_took_the_batch(tmp_path: Path) -> None:
    """A batch without the deadly text is answered. A batch with it is reported as started, so its items are the
    suspects; then the process ends.
    """
    part, path = process(tmp_path, Options(deadly="the end"))
    async with linked(part, path) as link:
        await link.run_batch(batch("the middle"), lambda: None)
        started: list[bool] = []
        with pytest.raises(AdapterGone) as raised:
            await link.run_batch(batch("fine", "this is the end"), lambda: started.append(True))
        assert raised.value.died
        assert started == [True]
        await asyncio.to_thread(until, lambda: not part.alive, 30, "the process is gone")
        assert part.status == POISONED


async def test_a_killed_process_is_followed_on_the_same_socket(tmp_path: Path) -> None:
    part, path = process(tmp_path, Options())
    async with linked(part, path) as link:
        part.kill()
        assert path.exists()
        part.start()
        await asyncio.to_thread(part.wait_ready)
        async with asyncio.timeout(30):
            while True:  # the link notices a death when it next sends something
                await link.wait_connected()
                try:
                    await link.ensure_ready(ipc.EnsureReady("toy/one", msgspec.to_builtins(toy_entry())))
                except AdapterGone:
                    continue
                break
        done = await link.run_batch(batch("hello"), lambda: None)
    assert len(done.outcomes) == 1
