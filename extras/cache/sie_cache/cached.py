"""Requests at a gateway with a cache. Workers compute only inputs without a cached answer. If several requests have
equal inputs at the same time, a worker computes them once.

    inputs ──► AnswerMemory ──hit──────────────────────────────────────┐
                 └ miss ──► in flight? ──yes──► wait for its answer ────┼──► RequestResult, in input order
                              │                   └ none in time ──┐    │
                              └ no ──► Runner computes it ◄────────┘ ───┘

The key of an answer contains the fingerprint that the workers of the lane (pool, machine profile and bundle) report: a
digest of the model's entry, precision and LoRA, so that a change of one of them changes the key. The gateway does not
use the cache if these workers report no fingerprint or different fingerprints, or have another entry of the model than
the request. If a computed answer has another fingerprint than the cached answers of the same request, workers compute
all inputs of the request, so that a reply never mixes two versions of a model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from sie_cache.memory import AnswerMemory, AnswerSpace
from sie_cache.values import pack, unpack
from sie_contracts.errors import InvalidInput, PayloadTooLarge, SIEError
from sie_contracts.models.catalogue import Resolved, answer_fingerprint, fingerprint, profile_fingerprint
from sie_contracts.models.entries import ModelEntry
from sie_contracts.wire.heartbeats import ModelStatus
from sie_contracts.wire.messages import Failed, Ok, Outcome, Priority, WorkResult
from sie_contracts.wire.topology import Lane
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.inference import answers
from sie_gateway.inference.answers import CachePolicy, digests_of
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import LARGE_BYTES, Call, cache_mode
from sie_gateway.inference.results import InferRequest, RequestResult
from sie_gateway.inference.runner import Compute, not_cached

CACHED_OPERATIONS = ("encode", "score", "extract")
STEP = 256  # number of inputs after which the event loop may run other tasks
MAX_FINGERPRINTS = 1024  # largest number of computed fingerprints that are stored
# Limits in `patience_s` on the wait for answers that other requests compute. LONGEST_WAIT has precedence.
SHORTEST_WAIT_S = 0.25  # shortest wait in seconds
LONGEST_WAIT = 0.25  # longest wait, as a share of the request's remaining time

FlightKey = tuple[Lane, Priority, int, bytes]
"""Key of an input that a request computes now: lane, priority, number of cache erasures when the request began, and key
of the answer. Only requests with an equal key wait for its outcome.
"""
Flight = asyncio.Future[tuple[WorkResult, Ok] | Failed | None]
"""Outcome of an input that a request computes now. It is None if the request ended without an outcome that other
requests can use.
"""


class CachedRuns:
    """Runs requests with the cache of this gateway. `count` is called with a result of inputs (`hit`, `joined` or
    `miss`) and their number. `expected_s`: function that returns the expected wait in seconds in
    the queue of a lane and priority; None if it is unknown. A flight is a future: the outcome of an input
    that a request computes now.
    """

    def __init__(
        self,
        memory: AnswerMemory,
        policy: CachePolicy,
        fleet: Fleet,
        count: Callable[[str, int], None],
        expected_s: Callable[[Lane, Priority], float | None],
    ) -> None:
        self.memory = memory
        self._policy = policy
        self._fleet = fleet
        self.count = count
        self._expected_s = expected_s
        self.flights: dict[FlightKey, Flight] = {}  # futures of the inputs that are being computed now
        self._fingerprints: dict[tuple[str, str], tuple[ModelEntry, str]] = {}

    async def run(
        self,
        call: Call,
        request: InferRequest,
        refused: Mapping[int, Failed],
        positions: Sequence[int],
        items: Sequence[RequestItem],
        compute: Compute,
    ) -> RequestResult:
        """Return the results of a request, as `AnswerCache.run` describes it. Raises SIEError, EntryChanged."""
        finished = RequestResult(request, refused)
        mode = cache_mode(call.headers)
        signed = "" if mode == "no-store" else self._fingerprint(request)
        owner = self._policy.owner(call.grant, request.resolved.entry.id)
        if not signed or owner is None:
            if mode == "only":
                raise not_cached(len(items))
            finished.cache_status = "off"
            await compute(call, positions, items, finished, None)
            return finished
        name = answers.space_of(owner, signed, request.operation, request.options.run)
        space = AnswerSpace(name, request.resolved.entry.id, call.grant.name if owner else "")
        run = _CachedRun(self, call, finished, refused, positions, items, space, signed, compute)
        return await run.results()

    def _fingerprint(self, request: InferRequest) -> str:
        """Return the fingerprint that the workers of the lane report for answers of this request. Return an empty text
        if no worker reports a fingerprint, if fingerprints differ, or if answers of the operation are not cached.
        """
        if request.operation not in CACHED_OPERATIONS:
            return ""
        resolved = request.resolved
        statuses = self._fleet.loaded(request.lane, resolved.residency)
        signed = {self._signed(resolved, status, request) for status in statuses}
        return signed.pop() if len(signed) == 1 else ""

    def _signed(self, resolved: Resolved, status: ModelStatus, request: InferRequest) -> str:
        run = request.options.run
        lora = next((lora.digest for lora in status.loras if lora.name == run.lora), "")
        if status.precision is None or status.engine is None or (run.lora and not lora):
            return ""
        entry = resolved.entry
        key = resolved.canonical, status.fingerprint
        cached = self._fingerprints.get(key)
        if cached is None or cached[0] is not entry:
            loaded = fingerprint(entry, resolved.load, status.precision.served, status.engine.served)
            # if the fingerprints differ, the worker has loaded another entry, whose answers are not cached
            own = profile_fingerprint(loaded, entry, resolved.profile) if loaded == status.fingerprint else ""
            if len(self._fingerprints) >= MAX_FINGERPRINTS:
                self._fingerprints.clear()
            cached = self._fingerprints[key] = entry, own
        return answer_fingerprint(cached[1], lora, run.variant) if cached[1] else ""

    def patience_s(self, request: InferRequest, left_s: float) -> float:
        """Return the longest time, in seconds, for which a request waits for answers that other requests compute. This
        time is as long as the expected wait in the queue, but at least SHORTEST_WAIT_S, and at most LONGEST_WAIT times
        `left_s` (seconds until the request's deadline). If the expected wait is unknown, return this maximum.
        """
        expected_s = self._expected_s(request.lane, request.priority)
        longest_s = LONGEST_WAIT * max(0.0, left_s)
        return longest_s if expected_s is None else min(longest_s, max(SHORTEST_WAIT_S, expected_s))

    def end(self, key: FlightKey) -> None:
        """Remove a flight. If it has no outcome, the requests that wait for it get None."""
        flight = self.flights.pop(key)
        if not flight.done():
            flight.set_result(None)


class _CachedRun:
    """Run of one request with the cache. Adds the results to `finished`. `signed`: fingerprint of the cached answers
    that the request may use. The other parameters are those of `CachedRuns.run`.
    """

    def __init__(
        self,
        runs: CachedRuns,
        call: Call,
        finished: RequestResult,
        refused: Mapping[int, Failed],
        positions: Sequence[int],
        items: Sequence[RequestItem],
        space: AnswerSpace,
        signed: str,
        compute: Compute,
    ) -> None:
        self._runs = runs
        self._call = call
        self._request = finished.request
        self._finished = finished
        self._refused = refused
        self._positions = positions
        self._items = items
        self._space = space
        self._signed = signed
        self._compute = compute
        self._keys: list[bytes] = []  # key of the answer to each input
        self._erasures = runs.memory.erasures
        self._flights: dict[FlightKey, Flight] = {}  # flights of inputs that this request computes now
        self._failures: dict[bytes, Failed] = {}  # failures of inputs that this request has computed
        # time when the wait for answers of other requests ends; None before the first wait
        self._until_s: float | None = None

    async def results(self) -> RequestResult:
        self._keys = [self._space.key(digest) for digest in await self._digests()]
        count = len(self._items)
        missing = await self._find(range(count))
        if missing and cache_mode(self._call.headers) == "only":
            raise not_cached(len(missing))
        hits, computed, is_uniform = count - len(missing), 0, True
        try:
            # `is_uniform`: all computed answers have the fingerprint of the cached answers, so they may be mixed
            while missing and is_uniform:
                own, joined = self._divide(missing)
                if own and computed:
                    self._call.again()
                is_uniform = await self._computed(own)
                computed += len(own)
                if is_uniform:
                    # look up inputs without an outcome again: other requests may have cached their answers
                    missing = await self._find(await self._joined(joined))
        finally:
            for key in self._flights:
                self._runs.end(key)
        if not is_uniform and computed < count:
            # fingerprints differ: a worker has another precision, engine or entry than its heartbeat reported
            self._call.again()
            self._finished = RequestResult(self._request, self._refused)
            await self._compute(self._call, self._positions, self._items, self._finished, None)
            hits, computed = 0, count
        for result, number in (("hit", hits), ("joined", count - hits - computed), ("miss", computed)):
            if number:
                self._runs.count(result, number)
        finished = self._finished
        finished.cache_status = "miss" if computed == count else "partial" if computed else "hit"
        return finished

    async def _digests(self) -> list[bytes]:
        items, query = self._items, self._request.query
        size = sum(item.size for item in items) + (query.size if query is not None else 0)
        if size <= LARGE_BYTES:
            return list(digests_of(items, query))
        return await asyncio.to_thread(lambda: list(digests_of(items, query)))

    async def _find(self, places: Sequence[int]) -> list[int]:
        """Look up the inputs at indices `places` in the cache, and add the answers to the result. Return the indices
        without a cached answer.
        """
        missing = []
        for number, place in enumerate(places):
            value = self._runs.memory.find(self._keys[place])
            if value is None:
                missing.append(place)
            else:
                self._finished.add_cached(self._positions[place], unpack(value, self._signed))
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
        return missing

    def _divide(self, missing: Sequence[int]) -> tuple[list[int], list[tuple[int, Flight]]]:
        """Return the inputs that this request computes, and the inputs that it waits for, each with its flight. If an
        input occurs twice in the request, the request computes the first occurrence and waits for it at the second.
        """
        own, joined = [], []
        for place in missing:
            key = self._flight_key(self._keys[place])
            flight = self._runs.flights.get(key)
            if flight is not None and (key in self._flights or self._left_s() > 0):
                joined.append((place, flight))
                continue
            own.append(place)
            if flight is None:
                self._flights[key] = self._runs.flights[key] = asyncio.get_running_loop().create_future()
        return own, joined

    def _left_s(self) -> float:
        """Return the seconds that this request may still wait for answers that other requests compute."""
        now_s = time.perf_counter()
        if self._until_s is None:
            left_s = self._call.received_s + self._call.budget_s - now_s
            self._until_s = now_s + self._runs.patience_s(self._request, left_s)
        return max(0.0, self._until_s - now_s)

    def _flight_key(self, key: bytes) -> FlightKey:
        return self._request.lane, self._request.priority, self._erasures, key

    async def _computed(self, places: Sequence[int]) -> bool:
        """Compute inputs and cache their answers. Return True if all answers have the fingerprint `_signed`."""
        if not places:
            return True

        def on_chunk(first: int, result: WorkResult) -> None:
            for place, outcome in zip(places[first : first + len(result.outcomes)], result.outcomes, strict=True):
                self._arrived(self._keys[place], result, outcome)

        positions, items = [self._positions[place] for place in places], [self._items[place] for place in places]
        results = await self._compute(self._call, positions, items, self._finished, on_chunk)
        outcomes = [(result, outcome) for result in results for outcome in result.outcomes]
        is_uniform = True
        for number, (place, (result, outcome)) in enumerate(zip(places, outcomes, strict=True)):
            if isinstance(outcome, Ok):
                if result.fingerprint != self._signed:
                    is_uniform = False
                elif self._runs.memory.erasures == self._erasures:
                    self._runs.memory.keep(self._space, self._keys[place], pack(result, outcome))
            else:
                self._failures[self._keys[place]] = outcome
            key = self._flight_key(self._keys[place])
            if self._flights.pop(key, None) is not None:
                self._runs.end(key)
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
        return is_uniform

    def _arrived(self, key: bytes, result: WorkResult, outcome: Outcome) -> None:
        """Set the outcome of an input in its flight (future), so that other requests get the outcome. `_computed`
        removes the flight when the answer is cached. If no other request can use the outcome, remove the flight now.
        """
        flight_key = self._flight_key(key)
        flight = self._flights.get(flight_key)
        if flight is None or flight.done():
            return
        if isinstance(outcome, Ok) and result.fingerprint == self._signed:
            flight.set_result((result, outcome))
        elif isinstance(outcome, Failed) and _is_of_input(outcome):
            flight.set_result(outcome)
        else:
            del self._flights[flight_key]
            self._runs.end(flight_key)

    async def _joined(self, joined: Sequence[tuple[int, Flight]]) -> list[int]:
        """Wait for the outcomes of other requests until `_left_s` is 0, and add them to the result. Return the indices
        of the inputs without an outcome. If this request failed to compute an input, a second occurrence of the input
        gets the same failure.
        """
        missing = []
        for number, (place, flight) in enumerate(joined):
            if not flight.done():
                await asyncio.wait((flight,), timeout=self._left_s())
            outcome = (flight.result() if flight.done() else None) or self._failures.get(self._keys[place])
            if outcome is None:
                missing.append(place)
            elif isinstance(outcome, Failed):
                self._finished.add_failure(self._positions[place], outcome)
            else:
                self._finished.add_cached(self._positions[place], unpack(pack(*outcome), self._signed))
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
        return missing


def _is_of_input(failed: Failed) -> bool:
    """Return True if the input itself caused the failure, so that it would fail in every request."""
    return isinstance(SIEError.from_info(failed.error), InvalidInput | PayloadTooLarge)
