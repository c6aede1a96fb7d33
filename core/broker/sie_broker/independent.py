"""Calls that do not depend on each other, for example for the streams of several pools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from sie_broker import BrokerError

R = TypeVar("R")


async def independently(calls: Iterable[Callable[[], Awaitable[R]]]) -> list[R]:
    """Make one call after another. A call that fails, for example for a stream that is lost or has no leader, does not
    stop the calls after it. Returns the results of the calls that succeeded. If a call failed, raises the last
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
