"""Requests of a job to its model, each with one or more items (inputs). A request waits while the cluster has no
capacity. After a retryable error of an item, the client sends this item again in a separate request.

    items ──► Room: limit of items in flight ──► Inference.execute at priority `bulk` ──► outcome of each item
                 └ no capacity now: wait for the time in the error, then try again, any number of times

A job never ends because the cluster is busy, scaled to zero, or unreachable. A job ends with an error only if one of
its requests can never succeed, for example because the model was removed.
"""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sie_contracts.errors import (
    ErrorInfo,
    InternalFailure,
    InvalidInput,
    ModelLoadFailed,
    PayloadTooLarge,
    PermissionDenied,
    ResourceExhausted,
    SIEError,
)
from sie_contracts.wire.messages import Failed, Ok, Operation, WorkResult
from sie_gateway.admission.grant import Charge, Grant
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import Call, EntryChanged
from sie_gateway.inference.handler import Inference
from sie_gateway.inference.reply import Placed
from sie_gateway.inference.results import FailedRequest, InferRequest
from sie_runtime.http.asgi import uuid7

ATTEMPTS = 3  # largest number of attempts for an input with a retryable error, such as a lack of memory
MAX_PAUSE_S = 30.0
FIRST_ROOM, MAX_ROOM = 512, 8192  # limit of the items in flight at the start of a job, and largest value of this limit
ROOM_S = 4.0  # a job has as many items in flight as its workers answer in this number of seconds
_T = TypeVar("_T")


class ItemsRefused(Exception):
    """Raised if a request can never succeed because of its items. A request with fewer of these items may succeed."""

    def __init__(self, error: SIEError) -> None:
        super().__init__(error.message)
        self.error = error


class Halted(Exception):
    """Raised if a job cannot continue until a person acts. The record of the job gets `info` as its error."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


@dataclass(frozen=True)
class JobIdentity:
    """Owner of a job. The requests of the job use the owner's rights and quota. `grant` returns the current grant of
    `key`; None if the key is not valid any more. `charge` returns a counter of the tokens of one call; None if the key
    has no quota.
    """

    key: str
    grant: Callable[[str], Grant | None]
    charge: Callable[[Grant], Charge | None]

    def granted(self) -> Grant:
        """Return the current grant. Raises Halted if the credential is no longer valid, or lacks the scope `infer`."""
        grant = self.grant(self.key)
        if grant is None or "infer" not in grant.scopes:
            message = "the key of this job is not valid any more, or lacks the scope infer"
            raise Halted(ErrorInfo(PermissionDenied.code, message))
        return grant


class Room:
    """Limit of the items that a job has in flight: as many as the workers of its lane (pool, machine profile and
    bundle) answer in ROOM_S seconds. So workers do not wait for the job, and its items do not wait long in the queue.
    Callers of `enter` continue in the order of their calls.
    """

    def __init__(self) -> None:
        self.most = FIRST_ROOM
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, count: int) -> None:
        """Wait until `count` more items may be in flight, and count them. If no item is in flight, any `count` may
        enter.
        """
        entered = asyncio.get_running_loop().create_future()
        self._waiting.append((count, entered))
        self._admit()
        try:
            await entered
        except asyncio.CancelledError:
            if not entered.cancelled():  # `_admit` has already counted the items, so subtract them
                self._used -= count
            self._admit()
            raise

    def leave(self, count: int, seconds: float) -> None:
        """Release `count` items that are done, and adapt the limit. `seconds`: time since these items entered."""
        rate = self._used / max(0.001, seconds)
        self._used -= count
        self.most = int(min(MAX_ROOM, max(FIRST_ROOM, 0.8 * self.most + 0.2 * rate * ROOM_S)))
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            count, entered = self._waiting[0]
            if not entered.cancelled():
                if self._used and self._used + count > self.most:
                    return
                self._used += count
                entered.set_result(None)
            self._waiting.popleft()


class Throttle:
    """Limit of the mean rate of a job, in tokens per second (0: no limit). A request with n tokens delays the next
    request by n / rate seconds. Before the reply, n is estimated from the mean of earlier inputs. `until_open` waits
    for the time of day at which the job may run. Requests call `until_open` one after the other, so that they do not
    all start at the same moment.
    """

    def __init__(
        self,
        tokens_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        until_open: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._rate = tokens_per_s
        self._clock = clock
        self._until_open = until_open
        self._turn = asyncio.Lock()
        self._free_s = 0.0  # time of `clock` at which the next request may start
        self._mean: float | None = None  # mean number of tokens of an input; None before the first answer

    async def enter(self, count: int) -> float:
        """Wait until `count` inputs may start. Return their expected tokens."""
        if not self._rate:
            return 0.0
        async with self._turn:
            if (wait_s := self._free_s - self._clock()) > 0:
                await asyncio.sleep(wait_s)
            if self._until_open is not None:
                await self._until_open()
            expected = self._rate if self._mean is None else count * self._mean
            self._free_s = max(self._free_s, self._clock()) + expected / self._rate
            return expected

    def settle(self, expected: float, count: int, tokens: int) -> None:
        """Replace the expected tokens of `count` inputs by their actual tokens."""
        if self._rate:
            self._free_s += (tokens - expected) / self._rate
            if tokens:
                mean = tokens / count
                self._mean = mean if self._mean is None else 0.8 * self._mean + 0.2 * mean


class JobClient:
    """Client for the requests of one job. The client calls `on_trouble(error)` if an error makes a request wait, and
    `on_trouble(None)` after the last attempt of this request. Each request first calls `until_open`, which waits for
    the time of day at which the job may run.
    """

    def __init__(
        self,
        inference: Inference,
        identity: JobIdentity,
        headers: Mapping[str, str],
        on_trouble: Callable[[SIEError | None], None],
        until_open: Callable[[], Awaitable[None]],
        tokens_per_s: float = 0.0,
    ) -> None:
        self.inference = inference
        self.room = Room()
        self._throttle = Throttle(tokens_per_s, until_open=until_open)
        self._until_open = until_open
        self._identity = identity
        # no-store: a job caches its answers in the payload store, because in the gateway's memory they would displace
        # the answers to other requests
        self._headers = {"x-sie-priority": "bulk", "x-sie-cache": "no-store", **headers}
        self._on_trouble = on_trouble

    def sibling(self, without: str) -> JobClient:
        """Return a client for another model of the same job. Its requests omit the header `without`. The two clients
        share the rate limit of the job.
        """
        client = copy.copy(self)
        client.room = Room()
        client._headers = {name: value for name, value in self._headers.items() if name != without}
        return client

    def call(self) -> Call:
        """Return a new Call without an HTTP connection, for a request of the job. Raises Halted."""
        grant = self._identity.granted()
        call = Call(uuid7(), time.perf_counter(), self._headers, grant=grant, charge=self._identity.charge(grant))
        call.budget_s = self.inference.max_budget_s
        return call

    async def patiently(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Return the result of `attempt`. After a retryable error, call `attempt` again. The number of calls is limited
        only for errors that report a lack of memory on a worker: the ATTEMPTS-th such error is raised. Raises SIEError,
        FailedRequest.
        """
        tries, exhausted, pause_s, has_trouble = 0, 0, 0.0, False
        try:
            while True:
                await self._until_open()
                try:
                    return await attempt()
                # the model's entry changed while the request waited: try again with the new entry
                except EntryChanged:
                    pause_s = 1.0
                except (FailedRequest, SIEError) as failure:
                    error = failure.error if isinstance(failure, FailedRequest) else failure
                    exhausted += isinstance(failure, FailedRequest) and _is_exhausted(failure)
                    if not _passes(error) or exhausted == ATTEMPTS:
                        raise
                    pause_s, has_trouble = error.retry_after_s, True
                    self._on_trouble(error)
                tries += 1
                pause_s = min(MAX_PAUSE_S, max(0.2, pause_s, 0.2 * 2 ** min(tries, 8)))
                await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # noqa: S311  spreads retries over time
        finally:
            if has_trouble:
                self._on_trouble(None)

    def understood(
        self,
        spec: str,
        operation: Operation,
        params: Mapping[str, Any],
        items: Sequence[RequestItem],
        query: RequestItem | None = None,
    ) -> tuple[Call, InferRequest]:
        """Return the call and the planned request of `items`, checked like the request of a client. Raises SIEError."""
        call = self.call()
        resolved = self.inference.resolve(spec, call)
        body = {"params": dict(params)} if params else {}
        request = InferRequest(operation, resolved, tuple(items), body, query, "bulk")
        return call, self.inference.understand(call, request)

    async def outcomes(
        self,
        spec: str,
        operation: Operation,
        params: Mapping[str, Any],
        items: Sequence[RequestItem],
        query: RequestItem | None = None,
    ) -> list[Placed]:
        """Return the outcome of each item: a value, or an error that is final or that remains after ATTEMPTS attempts.
        Raises SIEError for an error that every item of the job would get; Halted.
        """
        outcomes = await self._whole(spec, operation, params, items, query)
        for _ in range(ATTEMPTS - 1):
            again = [place for place, (_, outcome) in enumerate(outcomes) if _may_pass(outcome)]
            if not again:
                break
            for place in again:  # send each item in a separate request, because one item may make others fail
                (outcomes[place],) = await self._whole(spec, operation, params, [items[place]], query)
        return outcomes

    async def _whole(
        self,
        spec: str,
        operation: Operation,
        params: Mapping[str, Any],
        items: Sequence[RequestItem],
        query: RequestItem | None,
    ) -> list[Placed]:
        async def attempt() -> list[Placed]:
            call, understood = self.understood(spec, operation, params, items, query)
            try:
                outcomes = (await self.inference.execute(call, understood)).outcomes
                for _, outcome in outcomes:
                    if isinstance(outcome, Failed) and outcome.error.code == ModelLoadFailed.code:
                        # a failed load is not the fault of an input, so the whole request fails
                        raise SIEError.from_info(outcome.error)
                return outcomes
            except (InvalidInput, PayloadTooLarge) as error:
                raise ItemsRefused(error) from error
            finally:
                if call.charge is not None:
                    call.charge.refund()  # after a failed attempt; does nothing if the attempt has settled its charge

        await self.room.enter(len(items))
        began_s = time.perf_counter()
        try:
            expected, tokens = await self._throttle.enter(len(items)), 0
            try:
                finished = await self.patiently(attempt)
                tokens = sum(outcome.tokens for _, outcome in finished if isinstance(outcome, Ok))
                return finished
            finally:
                self._throttle.settle(expected, len(items), tokens)
        except ItemsRefused as refused:  # retry each half: a single item may be the cause
            if len(items) == 1:
                return [(WorkResult(uuid7(), 0, "", ()), Failed(refused.error.info()))]
        finally:
            self.room.leave(len(items), time.perf_counter() - began_s)
        half = len(items) // 2
        first = await self._whole(spec, operation, params, items[:half], query)
        return first + await self._whole(spec, operation, params, items[half:], query)


def _passes(error: SIEError) -> bool:
    """Return True if a retry may succeed, for example after a load that failed because of a network error."""
    return error.retryable or (isinstance(error, ModelLoadFailed) and error.extras.get("permanent") is False)


def _is_exhausted(error: FailedRequest) -> bool:
    return isinstance(error.error, ResourceExhausted) or any(
        entry.get("code") == ResourceExhausted.code for entry in error.errors
    )


def _may_pass(outcome: object) -> bool:
    if not isinstance(outcome, Failed):
        return False
    error = SIEError.from_info(outcome.error)
    return error.retryable or isinstance(error, InternalFailure)
