"""Calls that have nothing to do with each other, such as those for the streams of several pools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from sie_broker import BrokerError

R = TypeVar("R")


async def independently(calls: Iterable[Callable[[], Awaitable[R]]]) -> list[R]:
    """Make one call after another. One that fails, such as that of a stream which is lost or has no leader, stops none
    of the others. Returns what they returned. Raises the last BrokerError when all were made.
    """
    results: list[R] = []
    failure: BrokerError | None = None
    for call in calls:
        try:
            results.append(await call())
        except BrokerError as error:
            failure = error
    if failure is not None:
        raise failure
    return results
