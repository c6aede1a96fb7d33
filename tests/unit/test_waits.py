"""Waits and groups of tasks of `sie_runtime.process`."""

from __future__ import annotations

import asyncio

import pytest

from sie_runtime.process import task_group, wait_set


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
