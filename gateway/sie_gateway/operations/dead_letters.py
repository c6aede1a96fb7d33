"""Operations of administrators on dead letters, which store work that workers gave up. No reply contains a client's
input. The routes are in `dead_letter_routes.py`.

page, show     letters, with the reason why workers gave up the work, and the number of attempts
replay         run the work again (`replay.py`): the letter is removed only if all inputs of the work were answered
purge          remove a letter, with the inputs in it
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass

from sie_broker import Broker, BrokerError
from sie_broker.dead_letters import DeadLetterEntry, Letters
from sie_contracts.api import dead_letters as api
from sie_contracts.errors import NotFound, PoolNotFound, QueueUnavailable, SIEError
from sie_contracts.settings import Settings
from sie_contracts.wire.messages import Failed, WorkItem
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.lag import lane_of
from sie_gateway.metrics import Metrics
from sie_gateway.operations.replay import Replays, Unreadable, open_replays

LOOK_S = 10.0  # time limit in seconds for reading a list of letters, and for the search for one letter
EXAMINED = 1000  # largest number of letters that one call of `page` reads from the broker
EXAMINED_BYTES = 16 << 20
PURGE_S = 30.0  # seconds after which `purge_all` stops and returns the number of letters removed so far
REPLAY_S = 110.0  # seconds for which a replay of several letters waits for results; below the time-outs of clients
LETTER_S = 60.0  # default time in seconds for which the replay of one letter waits for its result
AROUND_S = 15.0  # seconds for the broker requests of a replay, in addition to the wait for its result
# largest number of simultaneous replays; each has a letter in memory, which may be as large as a NATS message
AT_ONCE = 4
MAX_PLACES = 4096
FILTERS = ("lane", "model", "code", "reason")
_ID = re.compile(r"[0-9a-f]{1,64}")
_logger = logging.getLogger("sie.gateway.dead_letters")
_Errors = Counter[tuple[str, str]]  # number of errors by code and reason


@dataclass(frozen=True)
class Filter:
    """Filter for dead letters of a pool. A letter matches if it equals the filter in all fields that are not empty."""

    pool: str
    lane: str = ""
    model: str = ""
    code: str = ""
    reason: str = ""

    def fits(self, letter: DeadLetterEntry) -> bool:
        error = letter.letter.error
        had = {"lane": _lane(letter), "model": letter.model, "code": error.code, "reason": error.reason}
        return all(getattr(self, name) in ("", had[name]) for name in FILTERS)

    @property
    def is_all(self) -> bool:
        """Return whether all fields except the pool are empty. Such a filter matches every letter."""
        return not any(getattr(self, name) for name in FILTERS)


class DeadLetterOperations:
    """Operations on the dead letters of an installation's own pools. Dead letters of work in a reservation (a pool that
    an API key created) are in these pools too. The methods read all letters from the broker; memory has only their
    sequence numbers. The methods raise NotFound, PoolNotFound, and QueueUnavailable if the broker sends no reply.
    """

    def __init__(
        self,
        broker: Broker,
        settings: Settings,
        metrics: Metrics,
        pools: Iterable[str],
        on_publish: Callable[[Lane, Sequence[WorkItem]], None],
    ) -> None:
        """A replay calls `on_publish` with the work item that it publishes again, so that a worker loads the item's
        model.
        """
        self._broker = broker
        self._metrics = metrics
        self._ack_wait_s = float(settings.ack_wait_s)
        self.pool = settings.pool
        self.pools = sorted(pools)
        self._on_publish = on_publish
        # (pool, id of a letter) -> last known sequence number in the stream
        self._places: OrderedDict[tuple[str, str], int] = OrderedDict()

    async def page(self, filters: Filter, before: int, limit: int) -> api.DeadLetterPage:
        """Return at most `limit` matching letters, newest first, with sequence numbers below `before` (0: no bound)."""
        letters, more, last, size, examined = self._letters(filters.pool), False, 0, 0, 0
        shown = list[api.DeadLetterInfo]()
        counts: _Errors = Counter()
        async with _bounded(LOOK_S):
            total = (await letters.state()).messages
            async with contextlib.aclosing(letters.newest(before)) as newest:
                async for letter in newest:
                    if examined >= EXAMINED or size >= EXAMINED_BYTES:
                        more = True
                        break
                    examined, size = examined + 1, size + len(letter.letter.item)
                    fits = filters.fits(letter)
                    if fits:
                        counts[letter.letter.error.code, letter.letter.error.reason] += 1
                    if fits and len(shown) == limit:
                        more = True
                    elif len(shown) < limit:
                        last = letter.sequence
                        if fits:
                            shown.append(self._info(filters.pool, letter))
        return api.DeadLetterPage(
            pool=filters.pool,
            pools=self.pools,
            total=total,
            examined=examined,
            counts=_counted(counts),
            letters=shown,
            next=last if more else None,
        )

    async def letter(self, pool: str, name: str) -> DeadLetterEntry:
        async with _bounded(LOOK_S):
            return await self._find(pool, name)

    async def _find(self, pool: str, name: str) -> DeadLetterEntry:
        letters, place = self._letters(pool), self._places.get((pool, name))
        if place is not None and (located := await letters.at(place)) is not None and located.letter.id == name:
            return located
        if _ID.fullmatch(name):
            async with contextlib.aclosing(letters.newest()) as newest:
                async for located in newest:
                    if located.letter.id == name:
                        self._note(pool, located)
                        return located
        raise NotFound(f"pool {pool} has no dead letter with this id; GET /v1/dead-letters lists them")

    async def show(self, pool: str, name: str) -> api.DeadLetterInfo:
        return self._info(pool, await self.letter(pool, name))

    async def replay(self, pool: str, name: str, timeout_s: float) -> api.Replayed:
        """Run the work of a letter again, and return its outcome. If no result arrives within `timeout_s` seconds, the
        state of the outcome is `waiting`.
        """
        letter = await self.letter(pool, name)
        async with self._replays(pool) as replays:
            return await _replayed(replays, letter, timeout_s)

    async def replay_all(self, filters: Filter, after: int, limit: int, timeout_s: float) -> api.ReplayedAll:
        """Run again at most `limit` letters with a sequence number above `after`, AT_ONCE at a time. Wait at most
        REPLAY_S seconds for results; requests to the broker may take longer. Omit letters that are written during the
        replay, because work that fails again becomes a new letter.
        """
        letters, end_s = self._letters(filters.pool), time.monotonic() + REPLAY_S
        done = list[api.Replayed]()
        async with self._replays(filters.pool) as replays:
            async with _bounded(LOOK_S):
                last = (await letters.state()).last_sequence
            while len(done) < limit:
                async with _bounded(LOOK_S):
                    together = await _first(letters, filters, after, last, min(AT_ONCE, limit - len(done)))
                if not together:
                    return api.ReplayedAll(replayed=done, next=None)
                left_s = end_s - time.monotonic()
                if left_s < 1.0:
                    break
                budget_s = min(timeout_s, left_s)
                done += await asyncio.gather(*(_replayed(replays, letter, budget_s) for letter in together))
                after = together[-1].sequence
            async with _bounded(LOOK_S):
                more = await _first(letters, filters, after, last, 1)
        return api.ReplayedAll(replayed=done, next=after if more else None)

    async def purge(self, pool: str, name: str) -> api.Purged:
        letter = await self.letter(pool, name)
        async with _bounded(LOOK_S):
            return api.Purged(removed=int(await self._letters(pool).remove(letter)), complete=True)

    async def purge_all(self, filters: Filter) -> api.Purged:
        """Remove all letters that exist now and match the filters. Stop after PURGE_S seconds."""
        letters, removed = self._letters(filters.pool), 0
        end_s = time.monotonic() + PURGE_S
        async with _bounded(PURGE_S + LOOK_S):
            last = (await letters.state()).last_sequence
            async with contextlib.aclosing(letters.all()) as every:
                async for letter in every:
                    if letter.sequence > last:
                        break
                    if time.monotonic() >= end_s:
                        return api.Purged(removed=removed, complete=False)
                    if filters.fits(letter):
                        removed += await letters.remove(letter)
        return api.Purged(removed=removed, complete=True)

    def _letters(self, pool: str) -> Letters:
        if pool not in self.pools:
            raise PoolNotFound(
                f"pool: dead letters are stored only in these pools: {', '.join(self.pools)}", param="pool"
            )
        return Letters(self._broker, pool)

    @contextlib.asynccontextmanager
    async def _replays(self, pool: str) -> AsyncIterator[Replays]:
        try:
            async with open_replays(
                self._broker,
                self._letters(pool),
                self._metrics,
                self._ack_wait_s,
                lambda subject, item: self._on_publish(lane_of(subject), [item]),
            ) as replays:
                yield replays
        except BrokerError as error:
            raise QueueUnavailable(f"the broker could not read or change the dead letters: {error}") from error

    def _info(self, pool: str, located: DeadLetterEntry) -> api.DeadLetterInfo:
        self._note(pool, located)
        letter, item = located.letter, located.item
        return api.DeadLetterInfo(
            id=letter.id,
            sequence=located.sequence,
            at=round(letter.at_s, 3),
            pool=pool,
            lane=_lane(located),
            code=letter.error.code,
            reason=letter.error.reason,
            message=letter.error.message,
            is_readable=item is not None,
            request=item.request if item else "",
            model=item.model if item else "",
            profile=item.profile if item else "",
            revision=item.revision if item else "",
            operation=item.operation if item else "",
            priority=item.priority if item else "",
            inputs=located.inputs,
            attempt=item.attempt if item else 0,
            deliveries=letter.deliveries,
            deaths=letter.deaths,
            workers=list(letter.workers),
            bytes=len(letter.item),
        )

    def _note(self, pool: str, located: DeadLetterEntry) -> None:
        self._places[pool, located.letter.id] = located.sequence
        if len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)


async def _first(letters: Letters, filters: Filter, after: int, last: int, most: int) -> list[DeadLetterEntry]:
    """Return at most `most` letters that match, oldest first, with sequence numbers above `after` and up to `last`."""
    together = list[DeadLetterEntry]()
    async with contextlib.aclosing(letters.all(after)) as every:
        async for located in every:
            if located.sequence > last:
                break
            if filters.fits(located):
                together.append(located)
                if len(together) == most:
                    break
    return together


async def _replayed(replays: Replays, letter: DeadLetterEntry, timeout_s: float) -> api.Replayed:
    """Run a letter again. The outcome has the codes of errors, but no messages: a message may contain input."""

    def outcome(state: api.State, errors: _Errors | None = None) -> api.Replayed:
        return api.Replayed(
            id=letter.letter.id,
            state=state,
            removed=state == "answered",
            inputs=letter.inputs,
            errors=_counted(errors or Counter()),
        )

    try:
        async with asyncio.timeout(timeout_s + AROUND_S):
            result = await replays.run(letter, timeout_s)
    except Unreadable:
        return outcome("unreadable")
    except TimeoutError:
        return outcome("waiting")
    except BrokerError as error:
        _logger.warning("the gateway cannot replay dead letter %s: %s", letter.letter.id, error)
        return outcome("unavailable")
    except SIEError as error:  # this gateway had no memory for the result
        return outcome("failed", Counter({(error.code, error.reason): 1}))
    failed = (outcome.error for outcome in result.outcomes if isinstance(outcome, Failed))
    errors = Counter((error.code, error.reason) for error in failed)
    return outcome("failed" if errors else "answered", errors)


def _counted(errors: _Errors) -> list[api.DeadLetterCount]:
    return [
        api.DeadLetterCount(code=code, reason=reason, count=count) for (code, reason), count in errors.most_common()
    ]


def _lane(located: DeadLetterEntry) -> str:
    """Return the lane (pool, machine profile and bundle) in the NATS subject of a letter's work; an empty text if the
    subject has no lane.
    """
    try:
        return str(lane_of(located.letter.subject))
    except ValueError:
        return ""


@contextlib.asynccontextmanager
async def _bounded(limit_s: float) -> AsyncIterator[None]:
    """Raise QueueUnavailable if the broker fails, or if the block takes longer than `limit_s` seconds."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise QueueUnavailable("the broker did not answer in time: try again") from error
    except BrokerError as error:
        raise QueueUnavailable(f"the broker failed, try again: {error}") from error
