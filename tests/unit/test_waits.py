"""Waits and groups of tasks, and work that concurrent callers share."""

from __future__ import annotations

import asyncio
import time

import pytest

from sie_broker import BrokerUnavailable
from sie_gateway.streams.shared import SharedTasks
from sie_runtime.process import Stop, task_group, wait_set


async def run_all(expected: type[Exception], errors: list[Exception]) -> None:
    async def fail(error: Exception) -> None:
        raise error

    async with task_group(expected) as tasks:
        for error in errors:
            tasks.create_task(fail(error))


async def test_a_group_of_tasks_raises_the_first_expected_error_alone() -> None:
    errors: list[Exception] = [KeyError("a"), IndexError("b")]
    with pytest.raises(LookupError) as raised:
        await run_all(LookupError, errors)
    assert raised.value is errors[0]


async def test_a_group_of_tasks_raises_an_unexpected_error_with_all_others() -> None:
    errors: list[Exception] = [KeyError("a"), ValueError("b")]
    with pytest.raises(ExceptionGroup) as raised:
        await run_all(LookupError, errors)
    assert list(raised.value.exceptions) == errors


async def test_a_cancelled_task_can_still_wait_for_an_event_until_a_limit() -> None:
    """The last steps of a cancelled task are not cut short by the end of a wait."""
    steps = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            steps.append(await wait_set(asyncio.Event(), 0.01))
            steps.append(await wait_set(asyncio.Event(), 0.01))

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == [False, False]


async def test_a_wait_for_an_event_can_be_cancelled() -> None:
    task = asyncio.create_task(wait_set(asyncio.Event(), 30))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


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
