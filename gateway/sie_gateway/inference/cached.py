"""Requests at a gateway with a cache: inputs whose answers are cached are not sent to workers, and equal inputs that
several requests have at the same time are computed once.

    inputs ──► AnswerMemory ──hit──────────────────────────────────────┐
                 └ miss ──► in flight? ──yes──► wait for its answer ────┼──► RequestResult, in input order
                              └ no ──► Runner computes it, and stores it┘

The key of an answer has the fingerprint that the workers of the lane (pool, machine profile and bundle) report now. It
is checked against the entry of the request, so a change of the entry, the precision or a LoRA changes the key. If
workers of the lane report several fingerprints, or none, the request is not cached. If a computed answer has another
fingerprint than the cached answers of the same request, all inputs of the request are computed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from sie_contracts.errors import GatewayTimeout, InvalidInput, NotFound, PayloadTooLarge, SIEError
from sie_contracts.models.catalogue import Resolved, answer_fingerprint, fingerprint, profile_fingerprint
from sie_contracts.models.entries import ModelEntry
from sie_contracts.settings import Settings
from sie_contracts.wire.heartbeats import ModelStatus
from sie_contracts.wire.messages import Failed, Ok, Outcome, Priority, WorkResult
from sie_gateway.admission.grant import Grant
from sie_gateway.answers.keys import digests_of, space_of
from sie_gateway.answers.memory import AnswerMemory, AnswerSpace
from sie_gateway.answers.values import pack, unpack
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import CACHE, LARGE_BYTES, Call, cache_mode
from sie_gateway.inference.results import PlannedRequest, RequestResult
from sie_gateway.metrics import Metrics

CACHED_OPERATIONS = ("encode", "score", "extract")
STEP = 256  # number of inputs after which the event loop may run other tasks
MAX_FINGERPRINTS = 1024
Compute = Callable[[Call, list[int], Sequence[RequestItem], RequestResult], Awaitable[list[WorkResult]]]
"""Function that computes the inputs at these positions, adds their results to the RequestResult, and returns them."""


class CachePolicy(NamedTuple):
    """Rule which answers are cached. `is_shared`: all API keys use the same answers. `excluded`: ids of models whose
    answers are not cached.
    """

    is_shared: bool
    excluded: frozenset[str]

    @classmethod
    def from_settings(cls, settings: Settings) -> CachePolicy:
        return cls(settings.cache_shared, frozenset(settings.cache_excluded_models or ()))

    def owner(self, grant: Grant, model: str) -> str | None:
        """Return the owner of the answers of a model to a credential; None if they are not cached."""
        if not grant.caches or model in self.excluded:
            return None
        return "" if self.is_shared else grant.key


class _Flight:
    """Input that a request computes now. The answer is packed. It is None if the request ended without an answer that
    other requests can use.
    """

    def __init__(self, priority: Priority) -> None:
        self.priority = priority
        self.answer: asyncio.Future[bytes | Failed | None] = asyncio.get_running_loop().create_future()

    def end(self, answer: bytes | Failed | None) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class CachedRuns:
    """Runs of requests with the cache of this gateway."""

    def __init__(self, memory: AnswerMemory, policy: CachePolicy, fleet: Fleet, metrics: Metrics) -> None:
        self.memory = memory
        self._policy = policy
        self._fleet = fleet
        self._metrics = metrics
        self._flights: dict[bytes, _Flight] = {}
        self._fingerprints: dict[tuple[str, str], tuple[ModelEntry, str]] = {}

    async def run(
        self,
        call: Call,
        request: PlannedRequest,
        refused: Mapping[int, Failed],
        positions: list[int],
        items: Sequence[RequestItem],
        compute: Compute,
    ) -> RequestResult:
        """Return the results of a request. `positions` are those of the items in the request, without the refused ones.

        Raises SIEError, EntryChanged, and NotFound with reason not_cached if the client allows only cached answers.
        """
        finished = RequestResult(request, refused)
        mode = cache_mode(call.headers)
        signed = "" if mode == "no-store" else self._fingerprint(request)
        owner = self._policy.owner(call.grant, request.resolved.entry.id)
        if not signed or owner is None:
            if mode == "only":
                raise not_cached(len(items))
            finished.cache_status = "off"
            await compute(call, positions, items, finished)
            return finished
        name = space_of(owner, signed, request.operation, request.options.run)
        space = AnswerSpace(name, request.resolved.entry.id, call.grant.name if owner else "")
        run = _CachedRun(self, call, request, space, signed, compute)
        return await run.results(finished, refused, positions, items)

    def _fingerprint(self, request: PlannedRequest) -> str:
        """Return the fingerprint that the workers of the lane give to answers of this request; empty if it is unknown,
        or if they differ.
        """
        if request.operation not in CACHED_OPERATIONS:
            return ""
        resolved = request.resolved
        statuses = self._fleet.loaded(request.lane, resolved.residency)
        signed = {self._signed(resolved, status, request) for status in statuses}
        return signed.pop() if len(signed) == 1 else ""

    def _signed(self, resolved: Resolved, status: ModelStatus, request: PlannedRequest) -> str:
        run = request.options.run
        lora = next((lora.digest for lora in status.loras if lora.name == run.lora), "")
        if status.precision is None or status.engine is None or (run.lora and not lora):
            return ""
        entry = resolved.entry
        key = resolved.canonical, status.fingerprint
        cached = self._fingerprints.get(key)
        if cached is None or cached[0] is not entry:
            loaded = fingerprint(entry, resolved.load, status.precision.served, status.engine.served)
            # a worker that reports another fingerprint has loaded another entry
            own = profile_fingerprint(loaded, entry, resolved.profile) if loaded == status.fingerprint else ""
            if len(self._fingerprints) >= MAX_FINGERPRINTS:
                self._fingerprints.clear()
            cached = self._fingerprints[key] = entry, own
        return answer_fingerprint(cached[1], lora, run.variant) if cached[1] else ""

    # flights

    def flight(self, key: bytes, priority: Priority) -> _Flight | None:
        """Return the flight of an input, if a request of this priority may wait for it: interactive work does not wait
        for bulk work.
        """
        flight = self._flights.get(key)
        return None if flight is not None and flight.priority == "bulk" != priority else flight

    def begin(self, key: bytes, priority: Priority) -> _Flight | None:
        """Begin the flight of an input. Return None if there is one already."""
        if key in self._flights:
            return None
        flight = self._flights[key] = _Flight(priority)
        return flight

    def end(self, key: bytes, flight: _Flight, answer: bytes | Failed | None) -> None:
        """End a flight, and give its answer to the requests that wait for it."""
        if self._flights.get(key) is flight:
            del self._flights[key]
        flight.end(answer)

    def count(self, hits: int, joined: int, misses: int) -> None:
        """Count the inputs of a request: cached, computed by another request, and computed by this request."""
        for result, number in (("hit", hits), ("joined", joined), ("miss", misses)):
            if number:
                self._metrics.cache_inputs.labels(result).inc(number)


class _CachedRun:
    """Run of one request with the cache. `signed`: fingerprint of the cached answers."""

    def __init__(
        self,
        runs: CachedRuns,
        call: Call,
        request: PlannedRequest,
        space: AnswerSpace,
        signed: str,
        compute: Compute,
    ) -> None:
        self._runs = runs
        self._call = call
        self._request = request
        self._space = space
        self._signed = signed
        self._compute = compute
        self._erasures = runs.memory.erasures
        self._flights: dict[bytes, _Flight] = {}  # flights that this request has begun

    async def results(
        self,
        finished: RequestResult,
        refused: Mapping[int, Failed],
        positions: list[int],
        items: Sequence[RequestItem],
    ) -> RequestResult:
        """Return the results of the request. The arguments are those of `CachedRuns.run`."""
        digests = await self._digests(items)
        keys = [self._space.key(digest) for digest in digests]
        missing = await self._find(finished, positions, keys)
        if missing and cache_mode(self._call.headers) == "only":
            raise not_cached(len(missing))
        hits = len(items) - len(missing)
        try:
            own, joined = self._divide(missing, keys)
            is_uniform = await self._computed(finished, own, positions, items, keys)
        finally:
            for key, flight in self._flights.items():
                self._runs.end(key, flight, None)
        # further inputs are computed only if their answers can stand beside those of `own`
        rest = []
        if is_uniform:
            rest = [place for place, flight in joined if not await self._joined(finished, positions[place], flight)]
        if rest:
            self._call.again()
            is_uniform = await self._computed(finished, rest, positions, items, keys)
        computed = len(own) + len(rest)
        if not is_uniform and computed < len(items):
            # cached and computed answers differ: a worker has another precision, engine or entry than it reported
            self._call.again()
            finished = RequestResult(self._request, refused)
            await self._compute(self._call, positions, items, finished)
            hits, computed = 0, len(items)
        self._runs.count(hits, len(items) - hits - computed, computed)
        finished.cache_status = "miss" if computed == len(items) else "partial" if computed else "hit"
        return finished

    async def _digests(self, items: Sequence[RequestItem]) -> list[bytes]:
        query = self._request.query
        size = sum(item.size for item in items) + (query.size if query is not None else 0)
        if size <= LARGE_BYTES:
            return list(digests_of(items, query))
        return await asyncio.to_thread(lambda: list(digests_of(items, query)))

    async def _find(self, finished: RequestResult, positions: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Add the cached answers to the result. Return the places of the other inputs."""
        missing = []
        for place, key in enumerate(keys):
            value = self._runs.memory.find(key)
            if value is None:
                missing.append(place)
            else:
                finished.add_cached(positions[place], unpack(value, self._signed))
            if place % STEP == STEP - 1:
                await asyncio.sleep(0)
        return missing

    def _divide(self, missing: Sequence[int], keys: Sequence[bytes]) -> tuple[list[int], list[tuple[int, _Flight]]]:
        """Return the inputs that this request computes, and the inputs with their flights for whose answers it waits.
        An input that occurs twice in the request waits for itself.
        """
        own, joined = [], []
        for place in missing:
            flight = self._runs.flight(keys[place], self._request.priority)
            if flight is not None:
                joined.append((place, flight))
                continue
            own.append(place)
            begun = self._runs.begin(keys[place], self._request.priority)
            if begun is not None:
                self._flights[keys[place]] = begun
        return own, joined

    async def _computed(
        self,
        finished: RequestResult,
        places: Sequence[int],
        positions: Sequence[int],
        items: Sequence[RequestItem],
        keys: Sequence[bytes],
    ) -> bool:
        """Compute inputs and cache their answers. Return whether all answers have the fingerprint of cached ones."""
        if not places:
            return True
        results = await self._compute(
            self._call, [positions[place] for place in places], [items[place] for place in places], finished
        )
        outcomes = [(result, outcome) for result in results for outcome in result.outcomes]
        is_uniform = True
        for number, (place, (result, outcome)) in enumerate(zip(places, outcomes, strict=True)):
            answer: bytes | Failed | None = None
            if isinstance(outcome, Ok):
                if result.fingerprint == self._signed:
                    answer = pack(result, outcome)
                    if self._runs.memory.erasures == self._erasures:
                        self._runs.memory.keep(self._space, keys[place], answer)
                else:
                    is_uniform = False
            elif _is_of_input(outcome):
                answer = outcome
            if (flight := self._flights.pop(keys[place], None)) is not None:
                self._runs.end(keys[place], flight, answer)
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
        return is_uniform

    async def _joined(self, finished: RequestResult, position: int, flight: _Flight) -> bool:
        """Wait for the answer of another request until the deadline of this one, and add it to the result. Return False
        if the other request ended without an answer. Raises GatewayTimeout.
        """
        if not flight.answer.done():
            call = self._call
            left_s = call.received_s + call.budget_s - time.perf_counter()
            done, _ = await asyncio.wait((flight.answer,), timeout=max(0.0, left_s))
            if not done:
                raise GatewayTimeout(f"no result within the budget of {call.budget_s:g} s")
        answer = flight.answer.result()
        if isinstance(answer, Failed):
            finished.add_failure(position, answer)
        elif answer is not None:
            finished.add_cached(position, unpack(answer, self._signed))
        return answer is not None


def _is_of_input(outcome: Outcome) -> bool:
    """Return whether an input failed by its own fault, so that it fails in every request."""
    return isinstance(outcome, Failed) and isinstance(SIEError.from_info(outcome.error), InvalidInput | PayloadTooLarge)


def not_cached(count: int) -> NotFound:
    """Return the error for a request with `X-SIE-Cache: only` of which `count` inputs have no cached answer."""
    return NotFound(f"{CACHE}: only, but {count} inputs have no cached answer", reason="not_cached", param=CACHE)
