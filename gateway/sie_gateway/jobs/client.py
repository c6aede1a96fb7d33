"""A job asks its model: with patience where capacity is short, one input alone where it failed for a moment.

    items ──► room (items in flight) ──► Inference.execute, bulk ──► outcome of each item
                 └ no capacity now: wait as long as was said, then ask again, for as long as the job may take

A job never gives work up because the cluster is busy, scaled to zero, or away. What ends it is a request that can
never succeed, such as a model that is gone.
"""

from __future__ import annotations

import asyncio
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
from sie_gateway.inference.call import Call, EntryChanged, InferRequest
from sie_gateway.inference.handler import Inference
from sie_gateway.inference.reply import Placed
from sie_gateway.inference.results import FailedRequest, PlannedRequest
from sie_runtime.http.server import uuid7

ATTEMPTS = 3  # of an input that fails for a moment, such as by a lack of memory
MAX_PAUSE_S = 30.0
FIRST_ROOM, MAX_ROOM = 512, 8192  # items in flight
ROOM_S = 4.0  # of work is in flight
_T = TypeVar("_T")


class ItemsRefused(Exception):
    """These items together, or one of them, can never be answered: the parameters are right, and others may be."""

    def __init__(self, error: SIEError) -> None:
        super().__init__(error.message)
        self.error = error


class Halted(Exception):
    """Only people can change why the job does not go on, so it is paused. No error of a client: see `info`."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info


@dataclass(frozen=True)
class JobIdentity:
    """Identity that a job works for. `grant` looks the credential up as it is now, None where it is not valid any more;
    `charge` opens what one call uses of its quota.
    """

    key: str
    grant: Callable[[str], Grant | None]
    charge: Callable[[Grant], Charge | None]

    def granted(self) -> Grant:
        """Raises Halted where the credential is not valid any more."""
        grant = self.grant(self.key)
        if grant is None or "infer" not in grant.scopes:
            message = "the key of this job is not valid any more, or lacks the scope infer"
            raise Halted(ErrorInfo(PermissionDenied.code, message))
        return grant


class Room:
    """How many items a job may have in flight: what its lane does in ROOM_S, so that workers never wait for it and
    nothing of it waits for long. Items come in the order in which they asked.
    """

    def __init__(self) -> None:
        self.most = FIRST_ROOM
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, count: int) -> None:
        """Wait until there is room. One group always may run."""
        entered = asyncio.get_running_loop().create_future()
        self._waiting.append((count, entered))
        self._admit()
        try:
            await entered
        except asyncio.CancelledError:
            if not entered.cancelled():  # it was let in meanwhile
                self._used -= count
            self._admit()
            raise

    def leave(self, count: int, seconds: float) -> None:
        """`count` items are done, `seconds` after they entered."""
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
    """At most `tokens_per_s` over time; 0: no limit. A request starts when those before it are paid for: by what inputs
    of the job had so far until their tokens are known, by these from then on. `until_open`: returns when a request may
    start. The turns wait for it too, so that those which were paid for meanwhile do not all start when it opens.
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
        self._free_s = 0.0  # when what was started is paid for
        self._mean: float | None = None  # tokens of an input

    async def enter(self, count: int) -> float:
        """Return when `count` inputs may start, with the tokens that they are expected to have."""
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
        """So many were computed."""
        if self._rate:
            self._free_s += (tokens - expected) / self._rate
            if tokens:
                mean = tokens / count
                self._mean = mean if self._mean is None else 0.8 * self._mean + 0.2 * mean


class JobClient:
    """The requests of one job. `on_trouble` is called with the error that it waits for, None when that has passed.
    `until_open` returns when the job may work: each request waits for it, however long it was in line before.
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
        self._headers = {"x-sie-priority": "bulk", **headers}
        self._on_trouble = on_trouble

    def call(self) -> Call:
        """A call that no connection made. Raises Halted."""
        grant = self._identity.granted()
        call = Call(uuid7(), time.perf_counter(), self._headers, grant=grant, charge=self._identity.charge(grant))
        call.budget_s = self.inference.max_budget_s
        return call

    async def patiently(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """The result of `attempt`, which is made again while it raises an error that may pass: ATTEMPTS times where the
        memory of a worker did not suffice for its input. Raises SIEError, FailedRequest.
        """
        tries, exhausted, pause_s, is_told = 0, 0, 0.0, False
        try:
            while True:
                await self._until_open()
                try:
                    return await attempt()
                except EntryChanged:  # gateway and worker read the catalogue at different moments
                    pause_s = 1.0
                except FailedRequest as error:
                    exhausted += _is_exhausted(error)
                    if not _passes(error.error) or exhausted == ATTEMPTS:
                        raise
                    pause_s, is_told = error.error.retry_after_s, True
                    self._on_trouble(error.error)
                except SIEError as error:
                    if not _passes(error):
                        raise
                    pause_s, is_told = error.retry_after_s, True
                    self._on_trouble(error)
                tries += 1
                pause_s = min(MAX_PAUSE_S, max(0.2, pause_s, 0.2 * 2 ** min(tries, 8)))
                await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))  # noqa: S311  spreads groups
        finally:
            if is_told:
                self._on_trouble(None)

    def understood(
        self,
        spec: str,
        operation: Operation,
        params: Mapping[str, Any],
        items: Sequence[RequestItem],
        query: RequestItem | None = None,
    ) -> tuple[Call, PlannedRequest]:
        """A request of the job, as one of a client is understood. Raises SIEError."""
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
        """Outcome of each item: a value, or an error that asking again does not change. Raises SIEError for what
        no item of the job can escape.
        """
        outcomes = await self._whole(spec, operation, params, items, query)
        for _ in range(ATTEMPTS - 1):
            again = [place for place, (_, outcome) in enumerate(outcomes) if _may_pass(outcome)]
            if not again:
                break
            for place in again:  # alone: it may be what the others failed by
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
                        raise SIEError.from_info(outcome.error)  # no fault of an input
                return outcomes
            except (InvalidInput, PayloadTooLarge) as error:
                raise ItemsRefused(error) from error
            finally:
                if call.charge is not None:
                    call.charge.refund()  # of what did not run; what ran is settled

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
        except ItemsRefused as refused:  # by one of them, by their query, or more than fits together
            if len(items) == 1:
                return [(WorkResult(uuid7(), 0, "", ()), Failed(refused.error.info()))]
        finally:
            self.room.leave(len(items), time.perf_counter() - began_s)
        half = len(items) // 2
        first = await self._whole(spec, operation, params, items[:half], query)
        return first + await self._whole(spec, operation, params, items[half:], query)


def _passes(error: SIEError) -> bool:
    """Whether asking again may help. A worker tries a load again that failed by what may pass, such as its network."""
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
