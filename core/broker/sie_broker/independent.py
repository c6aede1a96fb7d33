"""Runs calls that do not depend on one another, for example for the streams of several pools."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from sie_broker import BrokerError

R = TypeVar("R")


async def independently(calls: Iterable[Callable[[], Awaitable[R]]]) -> list[R]:
    """Await the calls one after the other, and return their results. A call that raises BrokerError does not prevent
    the later calls; the last BrokerError is raised after all calls.
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
