"""Work that concurrent callers share, and the pause of a task that may be woken."""

from __future__ import annotations

import asyncio
import time

import pytest

from sie_broker import BrokerUnavailable
from sie_gateway.streams.shared import SharedTasks
from sie_runtime.process import Stop


class Work:
    """Work that ends when `let` is set, in `error` if there is one."""

    def __init__(self) -> None:
        self.starts = 0
        self.let = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> None:
        self.starts += 1
        await self.let.wait()
        if self.error is not None:
            raise self.error


async def test_whoever_comes_meanwhile_shares_the_attempt_and_whoever_leaves_does_not_end_it() -> None:
    shared, work = SharedTasks(), Work()
    first, second = (asyncio.create_task(shared.run("a", work)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert ("a" in shared, work.starts) == (True, 1)
    work.let.set()
    await second
    assert list(shared) == []
    await shared.run("a", work)
    assert work.starts == 2, "an attempt that ended is not shared"


async def test_an_error_reaches_all_who_wait_and_troubles_nobody_where_none_does() -> None:
    shared, work = SharedTasks(), Work()
    work.error = ValueError("no")
    waiting = [asyncio.create_task(shared.run("a", work)) for _ in range(3)]
    await asyncio.sleep(0)
    work.let.set()
    assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [ValueError] * 3
    unawaited = shared.begin("a", work)  # pytest fails if the exception of a task is never read
    await asyncio.wait({unawaited})
    assert "a" not in shared


async def test_stopping_ends_what_is_under_way() -> None:
    shared, work = SharedTasks(), Work()
    task = shared.begin("a", work)
    waiting = asyncio.create_task(shared.run("a", work))
    await asyncio.sleep(0)
    await shared.stop()
    assert (task.cancelled(), list(shared)) == (True, [])
    with pytest.raises(BrokerUnavailable):
        await waiting


@pytest.mark.parametrize("by", ["waker", "stop", "time"])
async def test_a_pause_ends_by_its_waker_by_the_end_or_in_time(by: str) -> None:
    stop, waker = Stop(), asyncio.Event()
    pausing = asyncio.create_task(stop.wait_woken(waker, 0.05 if by == "time" else 30.0))
    await asyncio.sleep(0)
    if by == "waker":
        waker.set()
    elif by == "stop":
        stop.request()
    began_s = time.monotonic()
    assert await pausing is (by == "stop")
    assert time.monotonic() - began_s < 20.0
    assert not waker.is_set(), "the next pause is a pause again"


async def test_no_pause_begins_after_the_end() -> None:
    stop, waker = Stop(), asyncio.Event()
    stop.request()
    async with asyncio.timeout(30):
        assert await stop.wait_woken(waker) is True
