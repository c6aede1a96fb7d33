"""Calls that are independent of one another, for example for the streams of several pools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from sie_broker import BrokerError

R = TypeVar("R")


async def independently(calls: Iterable[Callable[[], Awaitable[R]]]) -> list[R]:
    """Await the calls one after the other. If a call fails, for example because a stream is lost or has no leader, the
    later calls are still executed. Returns the results of the calls that succeeded. If a call failed, raises the last
    BrokerError after all calls were made.
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
