"""Run of a planned request: check its inputs, split them into chunks, publish each chunk when it gets a permit for the
queue, and collect the results.

    check items ─► chunks ─► admission ─► publish, as permits are granted ─► results ─► RequestResult
                                             └ on any failure: withdraw the messages without a result from the queue
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from sie_contracts.errors import (
    CONFIG_CHANGED,
    ErrorInfo,
    GatewayTimeout,
    InternalFailure,
    InvalidInput,
    NotFound,
    SIEError,
)
from sie_contracts.models import families
from sie_contracts.models.costs import ImageCost
from sie_contracts.models.entries import ModelEntry, is_joinable
from sie_contracts.wire.messages import Failed, Operation, TextChunks, WorkItem, WorkResult
from sie_gateway.admission.admission import Admission, Permits
from sie_gateway.fleet.capabilities import Able
from sie_gateway.fleet.demand import ColdStarts
from sie_gateway.inference import chunk, telemetry
from sie_gateway.inference.body import RequestItem, has_images, input_of
from sie_gateway.inference.call import CACHE, Call, EntryChanged, cache_mode
from sie_gateway.inference.chunk import Chunk
from sie_gateway.inference.entities import mentions
from sie_gateway.inference.results import (
    OutcomeCollector,
    PlannedRequest,
    RequestResult,
    ResultInbox,
    charged_tokens,
    device_seconds,
    tokens_of,
)
from sie_gateway.metrics import Metrics
from sie_gateway.streams.publish import StreamPosition, WorkQueue
from sie_runtime.failpoints import failpoint
from sie_runtime.feed import CatalogueFeed

CHECK_AGAIN_S = 1.0  # seconds between two checks in `Runner._results`
MAX_TAKERS = 3  # largest number of models that an error names as an alternative
CHUNKED_FAMILY = "text-encoder"  # only models of this family return vectors of the chunks of a text
_logger = logging.getLogger("sie.gateway.runner")


OnChunk = Callable[[int, WorkResult], None]
"""Function to call with each result of a chunk. Arguments: the index of the chunk's first input, and the result."""
Compute = Callable[
    [Call, Sequence[int], Sequence[RequestItem], RequestResult, OnChunk | None], Awaitable[list[WorkResult]]
]
"""Function that computes some inputs of a request. Arguments: the call, the positions of the inputs in the request, the
inputs, the RequestResult to which the function adds the result of each chunk, and the OnChunk to call with each of
these results. Returns the results of all chunks.
"""


class AnswerCache(Protocol):
    """Cache that answers inputs in place of the workers."""

    async def run(
        self,
        call: Call,
        request: PlannedRequest,
        refused: Mapping[int, Failed],
        positions: Sequence[int],
        items: Sequence[RequestItem],
        compute: Compute,
    ) -> RequestResult:
        """Return the results of a request. `refused`: failures of the items that the gateway refused, by index.
        `items`: the other items. `positions`: the indices of `items` in the request. `compute` is called for the items
        that the cache does not answer.

        Raises SIEError, EntryChanged. Raises NotFound (reason `not_cached`) if the client allows only cached answers,
        and an item has none.
        """


class Runner:
    """Runs requests through the queue. `load_hold_s`: seconds after which a request ends with an error if its model is
    still loading, or if its lane (pool, machine profile and bundle) has no worker.
    """

    def __init__(
        self,
        feed: CatalogueFeed,
        queue: WorkQueue,
        inbox: ResultInbox,
        metrics: Metrics,
        admission: Admission,
        cold: ColdStarts,
        load_hold_s: float,
    ) -> None:
        self._feed = feed
        self._queue = queue
        self._inbox = inbox
        self._metrics = metrics
        self._admission = admission
        self._cold = cold
        self._load_hold_s = load_hold_s
        self._cache: AnswerCache | None = None

    def use_cache(self, cache: AnswerCache) -> None:
        """Run requests with `cache`. Without one, workers compute all inputs."""
        self._cache = cache

    def refused(self, request: PlannedRequest, takers: _Takers | None = None) -> dict[int, Failed]:
        """Return the failures of items that the model cannot run, by index. A worker may reject further items."""
        takers = takers or _Takers(self._feed, request.operation)
        return {
            index: failure
            for index, item in enumerate(request.items)
            if (failure := _unusable(item, request, takers)) is not None
        }

    async def run(self, call: Call, request: PlannedRequest) -> RequestResult:
        """Publish the items that the model can run, wait for their results, and add the failures of the other items.
        Raises SIEError, and EntryChanged if the catalogue or a worker has another entry of the model than the request.
        """
        takers = _Takers(self._feed, request.operation)
        if request.query is not None and (failed := _unusable(request.query, request, takers)) is not None:
            error = failed.error
            if error.param.startswith("query"):  # the message already names the query
                raise InvalidInput(error.message, reason=error.reason, param=error.param)
            raise InvalidInput.at("query", f"{error.message}", reason=error.reason)
        refused = self.refused(request, takers)
        runnable: Sequence[int] = range(len(request.items))
        items: Sequence[RequestItem] = request.items
        if refused:
            runnable = [index for index in runnable if index not in refused]
            if not runnable:
                return RequestResult(request, refused)
            items = [request.items[index] for index in runnable]
        if _reads_mentions(request):
            items = [msgspec.structs.replace(item, mentions=mentions(item)) for item in items]
        if self._cache is not None:
            return await self._cache.run(call, request, refused, runnable, items, self._computed)
        if cache_mode(call.headers) == "only":
            raise not_cached(len(items))
        finished = RequestResult(request, refused)
        await self._computed(call, runnable, items, finished)
        return finished

    async def _computed(
        self,
        call: Call,
        positions: Sequence[int],
        items: Sequence[RequestItem],
        finished: RequestResult,
        on_chunk: OnChunk | None = None,
    ) -> list[WorkResult]:
        """Publish items and add their results to `finished`. `positions`: indices of `items` in the request. Return the
        results in the order of the items. Raises SIEError, EntryChanged.
        """
        request = finished.request
        lane, priority, resolved = request.lane, request.priority, request.resolved
        limits = chunk.ChunkLimits(
            self._admission.chunk_cost(lane, priority, resolved.residency),
            self._queue.payload_bytes,
            self._queue.result_bytes,
            self._queue.holds_any_size,
        )
        with_images = has_images(items, request.query)
        if with_images:
            await chunk.check_pixels(items, request.query, request.inputs_field)
        chunks, size_bytes = chunk.plan(
            items,
            request.query,
            request.operation,
            resolved.entry,
            request.options.run,
            limits,
            self._admission.image_cost(resolved.residency) if with_images else ImageCost(),
            name=request.inputs_field,
            positions=positions,
        )
        revision = self._revision(resolved.entry)
        costs, squares = [piece.cost for piece in chunks], [piece.squares for piece in chunks]
        deadline_s = call.received_s + call.budget_s
        left_s = deadline_s - time.perf_counter()
        queue_key = call.key, lane, priority, resolved.residency
        self._admission.check(*queue_key, sum(costs), left_s, call.digest, sum(squares))
        if call.charge is not None:
            shared = request.query.least_charge if request.query else 0
            least = [item.least_charge + shared for item in items]
            call.charge.spend(max(sum(costs), sum(least)), request.inputs_field)
        permits = self._admission.enter(*queue_key, costs, size_bytes, left_s, call.digest, call.work_id, squares)
        published_s = time.perf_counter()
        try:
            if permits.is_cold:
                self._cold.requested(lane)
            collector = self._inbox.open(call.work_id, len(chunks), lane.pool, call.key)
            try:
                collector.on_taken = _result_listener(permits, collector, resolved.entry, chunks, on_chunk)
                permits.on_refused = collector.fail
                asker = call.grant.name if with_images else ""
                reply = self._inbox.address(call.work_id)
                build = _builder(call, request, items, positions, chunks, revision, reply, asker)
                sending = _Sending(self._queue, self._admission, request, permits, build, collector, deadline_s)
                try:
                    await sending.start()
                    finished.publish_ms = (time.perf_counter() - published_s) * 1000
                    await self._results(call, request, collector, deadline_s, was_hosted=not permits.is_cold)
                    await sending.finish()
                except BaseException:
                    self._queue.undo(sending.withdraw())
                    raise
            finally:
                self._inbox.close(collector)
        finally:
            permits.close()
        results = [result for result in collector.results if result is not None]
        self._metrics.result_wait.labels(request.operation).observe(max(collector.arrivals_s) - published_s)
        waits_ms = [(arrival_s - published_s) * 1000 for arrival_s in collector.arrivals_s]
        finished.add_results(positions, chunks, results, waits_ms)
        if call.span is not None:
            telemetry.trace_chunks(call.span, published_s, finished.publish_ms, results, waits_ms)
        tokens = sum(map(tokens_of, results))
        if call.charge is not None:
            call.charge.settle(charged_tokens(least, results))
        self._metrics.used(call.grant.name, tokens, device_seconds(results))
        return results

    def _revision(self, entry: ModelEntry) -> int:
        catalogue = self._feed.catalogue
        if (now := catalogue.entries.get(entry.id)) is not entry and now != entry:
            raise EntryChanged(entry)
        return catalogue.revisions.get(entry.id, 0)

    async def _results(
        self, call: Call, request: PlannedRequest, collector: OutcomeCollector, deadline_s: float, *, was_hosted: bool
    ) -> None:
        """Wait for all results until the end of the budget. From `load_hold_s` on, or at once if the dialect's requests
        do not wait for a load (`holds`), call `ColdStarts.check` every CHECK_AGAIN_S seconds. `was_hosted`: a worker
        had the model loaded when the request was admitted, so the request may wait longer (see `check`). Raises
        ModelLoading, NotProvisioned, GatewayTimeout, and the error that was passed to `OutcomeCollector.fail`.
        """
        until_s = call.received_s + min(call.budget_s, self._load_hold_s if call.dialect.holds else 0.0)
        while True:
            try:
                await collector.wait(max(0.0, until_s - time.perf_counter()))
                return
            except TimeoutError as error:
                was_hosted = self._cold.check(request.lane, request.resolved.residency, was_hosted=was_hosted)
                if until_s >= deadline_s:
                    raise GatewayTimeout(f"no result within the budget of {call.budget_s:g} s") from error
            until_s = min(deadline_s, time.perf_counter() + CHECK_AGAIN_S)


class _Sending:
    """Publisher of the chunks of one request, in the order in which their permits are granted. `build` builds a message
    just before it is published, because the message contains the remaining time budget.
    """

    def __init__(
        self,
        queue: WorkQueue,
        admission: Admission,
        request: PlannedRequest,
        permits: Permits,
        build: Callable[[int], WorkItem],
        collector: OutcomeCollector,
        deadline_s: float,
    ) -> None:
        self._queue = queue
        self._peers = admission.peers
        self._lane = request.lane
        self._priority = request.priority
        self._permits = permits
        self._build = build
        self._collector = collector
        self._deadline_s = deadline_s
        self._stored: dict[int, StreamPosition] = {}
        self._rest: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Publish the chunks that have permits. A task publishes the others later; its errors fail the request."""
        granted = self._permits.pop()
        if granted:
            await self._publish(granted)
        if not self._permits.complete:
            self._rest = asyncio.create_task(self._follow(), name="publishing")

    async def _publish(self, chunks: list[int]) -> None:
        failpoint("gateway.before_publish")
        work = [self._build(number) for number in chunks]
        stored = await self._queue.publish(self._lane, work, self._deadline_s)
        self._stored.update(zip(chunks, stored, strict=True))
        failpoint("gateway.published")
        self._peers.sent(self._lane, self._priority, len(work), self._permits.tokens(chunks))

    async def _follow(self) -> None:
        try:
            while not self._permits.complete:
                await self._publish(await self._permits.more())
        except SIEError as error:
            self._collector.fail(error)
        except Exception:  # outermost handler of a task: the request of this task must get the error
            _logger.exception("request %s could not be published", self._collector.request)
            self._collector.fail(InternalFailure("the gateway failed while it queued this request"))

    async def finish(self) -> None:
        """Wait until the broker has acknowledged the last message. A result may arrive before this acknowledgement."""
        if self._rest is not None:
            await self._rest

    async def withdraw(self) -> None:
        """Stop publishing, and remove the messages without a result from the queue."""
        if self._rest is not None:
            self._rest.cancel()
            await asyncio.gather(self._rest, return_exceptions=True)
        failpoint("gateway.before_withdraw")
        results, request = self._collector.results, self._collector.request
        missing = [stored for number, stored in self._stored.items() if results[number] is None]
        await self._queue.withdraw(self._lane.pool, missing, request if missing else "")


def not_cached(count: int) -> NotFound:
    """Return the error for a request with `X-SIE-Cache: only` in which `count` inputs have no cached answer."""
    return NotFound(f"{CACHE} is `only`, but {count} inputs have no cached answer", reason="not_cached", param=CACHE)


def _builder(
    call: Call,
    request: PlannedRequest,
    items: Sequence[RequestItem],
    positions: Sequence[int],
    chunks: Sequence[Chunk],
    revision: int,
    reply: str,
    asker: str,
) -> Callable[[int], WorkItem]:
    """Return a function that builds the work item of a chunk from the chunk's number. The item's budget is the time
    left until the request's deadline when the function is called. `asker`: name of the API key; empty if the request
    has no images, because workers use the name only for images.
    """
    resolved = request.resolved
    deadline_s = call.received_s + call.budget_s
    query = None if request.query is None else input_of(request.query)
    # metrics of workers count /v1/embeddings as an endpoint of its own, although its operation is encode
    endpoint = "embeddings" if call.labels.get("endpoint") == "embeddings" else ""

    def work_item(number: int) -> WorkItem:
        piece = chunks[number]
        return WorkItem(
            request=call.work_id,
            chunk=number,
            model=resolved.entry.id,
            revision=resolved.entry.revision,
            operation=request.operation,
            inputs=tuple(map(input_of, items[piece.start : piece.stop])),
            options=request.options.run,
            reply=reply,
            budget_ms=max(1, int((deadline_s - time.perf_counter()) * 1000)),
            first=positions[piece.start],
            profile=resolved.profile,
            config_revision=revision,
            priority=request.priority,
            cost=piece.cost,
            traceparent=call.context.traceparent,
            query=query,
            endpoint=endpoint,
            tracestate=call.context.tracestate,
            asker=asker,
            together=True,
        )

    return work_item


def _result_listener(
    permits: Permits,
    collector: OutcomeCollector,
    entry: ModelEntry,
    chunks: Sequence[Chunk],
    on_chunk: OnChunk | None,
) -> Callable[[WorkResult], None]:
    """Return the function that is called with each result. The function releases the permit of the chunk, and calls
    `on_chunk` if the result has an outcome for each input. If the result reports another revision of the model's entry,
    the function ends the attempt with EntryChanged.
    """

    def on_result(result: WorkResult) -> None:
        permits.result_arrived(result)
        if any(isinstance(outcome, Failed) and outcome.error.reason == CONFIG_CHANGED for outcome in result.outcomes):
            collector.fail(EntryChanged(entry))
        piece = chunks[result.chunk]
        if on_chunk is not None and len(result.outcomes) == piece.stop - piece.start:
            on_chunk(piece.start, result)

    return on_result


class _Takers:
    """Names of models that accept a kind of input, for error texts. Searches the catalogue at most once for each kind
    of input, and only for an error that names models.
    """

    def __init__(self, feed: CatalogueFeed, operation: Operation) -> None:
        self._feed = feed
        self._operation = operation
        self._models: dict[str, str] = {}

    def models_of(self, modality: str) -> str:
        """Return text for the end of an error message: the first few models that accept the modality."""
        models = self._first(modality, lambda entry: modality in entry.inputs and self._operation in entry.tasks)
        return f"; models that take it: {models}" if models else f"; no model here takes it for {self._operation}"

    def models_with_chunks(self) -> str:
        """Return text for the end of an error message: the first few models that support chunks with context. These are
        the models whose dense vectors are a mean or a maximum over tokens.
        """
        models = self._first("chunks", _gives_chunks)
        return f"; models that support chunks: {models}" if models else "; no model here supports chunks"

    def _first(self, kind: str, able: Able) -> str:
        if kind not in self._models:
            names = (entry.id for entry in self._feed.catalogue.entries.values() if able(entry))
            self._models[kind] = ", ".join(heapq.nsmallest(MAX_TAKERS, names))
        return self._models[kind]


def _gives_chunks(entry: ModelEntry) -> bool:
    return entry.family == CHUNKED_FAMILY and "dense" in entry.outputs and is_joinable(entry.run.pooling or "")


def _unusable(item: RequestItem, request: PlannedRequest, takers: _Takers) -> Failed | None:
    """Return the failure of an item that this model cannot run; None if the item passes all checks."""
    if item.modalities and (fault := _foreign(item, request, takers)) is not None:
        return Failed(fault)
    if item.unfit is not None:
        return Failed(item.unfit)
    if item.is_empty:
        message = f"text: missing{item.instead}"
        return Failed(ErrorInfo("INVALID_INPUT", message, reason="empty_item", param="text"))
    if item.chunks is not None and (fault := _fault_of_chunks(item.chunks, request, takers)) is not None:
        return Failed(fault)
    if _reads_mentions(request):
        try:
            mentions(item)
        except InvalidInput as error:
            return Failed(error.info())
    return None


def _foreign(item: RequestItem, request: PlannedRequest, takers: _Takers) -> ErrorInfo | None:
    """Return the error if the item has a modality that this model does not accept; otherwise None."""
    entry = request.resolved.entry
    accepted = [*entry.inputs]
    if "multivector" in entry.outputs and (request.operation == "score" or request.options.run.muvera):
        accepted.append("multivector")
    foreign = next((modality for modality in item.modalities if modality not in accepted), None)
    if foreign is None:
        return None
    message = f"{entry.id} takes {', '.join(accepted)}, not {foreign}"
    if foreign != "multivector":  # no entry lists `multivector` in `inputs`, so the message can name no model
        message += takers.models_of(foreign)
    return ErrorInfo("INVALID_INPUT", message, reason="unsupported_modality")


def _fault_of_chunks(chunks: TextChunks, request: PlannedRequest, takers: _Takers) -> ErrorInfo | None:
    """Return the error if this model returns no vectors of chunks; the error names models that return them. Return None
    if the gateway finds no fault. If the entry has no `pooling`, only the worker can check the pooling.
    """
    entry, run = request.resolved.entry, request.options.run
    if request.operation != "encode":
        return ErrorInfo(
            "INVALID_INPUT", "chunks: only encode supports them", reason="unsupported_task", param="chunks"
        )
    if entry.family != CHUNKED_FAMILY:
        message = f"chunks: {entry.id} gives no vectors of chunks{takers.models_with_chunks()}"
        return ErrorInfo("INVALID_INPUT", message, reason="unsupported_modality", param="chunks")
    is_pooled = chunks.context and "dense" in run.outputs and run.muvera is None
    if is_pooled and run.pooling and not is_joinable(run.pooling):
        message = (
            f"chunks: the pooling of {entry.id} is {run.pooling}, and with context the dense vector of a chunk is a "
            f"mean or maximum over its tokens{takers.models_with_chunks()}; without context, every pooling works"
        )
        return ErrorInfo("INVALID_INPUT", message, reason="unsupported_pooling", param="chunks")
    return None


def _reads_mentions(request: PlannedRequest) -> bool:
    return request.operation == "extract" and families.row(request.resolved.entry.family).reads_mentions
