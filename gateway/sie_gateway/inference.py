"""The life of an inference request.

    answer: resolve name ─► read body ─► a client family's handler, which calls
    run:    choose lane ─► merge options ─► check items ─► split ─► admit ─► publish ─► collect

Everything before `publish` refuses at once, in the order of the contract, so no bad request ever causes a load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from sie_contracts import families, messages, topology
from sie_contracts.catalogue import Catalogue, Resolved
from sie_contracts.entries import ModelEntry
from sie_contracts.errors import (
    CONFIG_CHANGED,
    ErrorInfo,
    GatewayTimeout,
    InvalidInput,
    ModelNotFound,
    NotReady,
    PayloadTooLarge,
    Provisioning,
    QueueFull,
)
from sie_contracts.heartbeats import Heartbeat
from sie_contracts.messages import Failed, Input, Operation, Priority, RunOptions, Vectors, WorkItem, WorkResult
from sie_contracts.option_values import describe
from sie_contracts.options import TOKEN_STATES, RequestOptions, run_options
from sie_contracts.settings import Settings
from sie_contracts.topology import Lane
from sie_gateway import body as bodies
from sie_gateway import chunk, spans
from sie_gateway.admission import Admission
from sie_gateway.aliases import route_key
from sie_gateway.attach import Attachments, ClientGone
from sie_gateway.body import Item
from sie_gateway.call import Answer, Asked, Call, EntryChanged
from sie_gateway.capabilities import CAN, Able, anything
from sie_gateway.cold import ColdStarts
from sie_gateway.finished import Finished, Understood
from sie_gateway.fleet import Fleet
from sie_gateway.inbox import Collector, Inbox
from sie_gateway.metrics import Metrics
from sie_gateway.queue import WorkQueue
from sie_gateway.sending import Sending
from sie_gateway.shadow import Shadows
from sie_gateway.turns import Pace
from sie_runtime.feed import CatalogueFeed

if TYPE_CHECKING:
    from sie_gateway.routes import InferenceRoute

ITEM_RESULT_OVERHEAD_BYTES = 64
EXTRACTED_TOKEN_BYTES = 64
LABEL_RESULT_BYTES = 48
TOKENIZED_BYTES = 48  # of a token: its id, its text and where it lies
MAX_ATTEMPTS = 4  # of a request whose model's entry changes on its way
RENEWED_WITHIN_S = 1.0  # by then this gateway's catalogue has what a worker's has
BARE_OPTIONS_BYTES = 64  # of options without texts
MAX_RESULT_BYTES = 1 << 30
CHECK_AGAIN_S = 1.0
STORED_CHUNK_BYTES = 8 << 20  # of inputs beside a query that no message holds
SPARSE_IDS_PER_TOKEN = 32
_NO_PARAMETERS = frozenset({"items", "inputs", "input", "query", "model"})


class Inference:
    """Runs inference requests against the queue."""

    def __init__(
        self,
        settings: Settings,
        feed: CatalogueFeed,
        fleet: Fleet,
        queue: WorkQueue,
        inbox: Inbox,
        metrics: Metrics,
        pools: Collection[str],
        admission: Admission,
        cold: ColdStarts,
    ) -> None:
        self._settings = settings
        self._feed = feed
        self._fleet = fleet
        self._queue = queue
        self._inbox = inbox
        self._metrics = metrics
        self._pools = pools
        self._admission = admission
        self._cold = cold
        self._default_models = dict(settings.default_models or ())
        self._plain: dict[tuple[str, Operation], tuple[ModelEntry, RequestOptions]] = {}
        self.shadows = Shadows(lambda: feed.catalogue, fleet, admission, metrics, self.run)
        self.away: Attachments[Answer] = Attachments()
        self.in_progress = 0
        self._pace = Pace()
        inbox.on_late = admission.answered_late
        self.idle = asyncio.Event()  # set while nothing is in progress
        self.idle.set()

    @property
    def catalogue(self) -> Catalogue:
        """What can be asked for. Raises NotReady before it is there."""
        if not self._feed.loaded:
            raise NotReady("the catalogue is not loaded yet")
        return self._feed.catalogue

    @property
    def max_concurrent(self) -> int:
        """Requests that may be in progress at this gateway."""
        return self._settings.max_concurrent_requests

    def workers_of(self, bundle: str) -> list[Heartbeat]:
        """The workers that live and serve a bundle."""
        return [beat for beat in self._fleet.healthy() if beat.bundle == bundle]

    @property
    def default_models(self) -> Mapping[str, str]:
        """The model that answers where a request names none, by capability."""
        return self._default_models

    def max_items(self, call: Call) -> int:
        """Inputs that a request may have: what its key may send, at most what anybody may."""
        most = self._settings.max_items_per_request
        return min(most, call.grant.limits.items or most)

    @property
    def unfinished_bytes(self) -> int:
        """Held of results of which parts are missing."""
        return self._inbox.unfinished_bytes

    def resolve(self, spec: str, call: Call | None = None, able: Able = anything) -> Resolved:
        """The model of a request, an alias' by who calls. A name that is unknown is told with those like it of models
        that are `able`.

        Raises NotReady before the catalogue is there, InvalidInput, ModelNotFound, BundleConflict.
        """
        catalogue = self.catalogue
        if ".." in spec.split("/"):
            raise InvalidInput("model: '..' is not part of any name", reason="schema", param="model")
        try:
            return catalogue.resolve(spec.removesuffix("/"), route_key(call) if catalogue.aliases else "")
        except ModelNotFound as error:
            if "suggestions" in error.extras:
                like = catalogue.near(spec.partition("@")[0].partition(":")[0], able)
                error.extras["suggestions"] = like
                error.message += (
                    f"; did you mean {' or '.join(like)}?" if like else "; GET /v1/models lists those that there are"
                )
            raise

    async def answer(
        self,
        call: Call,
        route: InferenceRoute,
        read: Callable[[], Awaitable[bytes]],
        send: Callable[[Answer], Awaitable[None]],
    ) -> None:
        """`POST` of an inference route. A model that the path names comes first: an unknown one is refused before the
        body is read.

        The request counts as in progress from here until its reply is sent, which holds its results, and its budget
        runs, so that slow uploads are bounded like everything else.
        """
        self._resolve(call, route)
        call.budget_s = self._budget_s(call.headers)
        self._check_concurrency(call)
        self._enter(1)
        try:
            await send(await self._answer(call, route, read))
        finally:
            self._enter(-1)
            self._pace.ended(time.perf_counter())

    def _resolve(self, call: Call, route: InferenceRoute) -> None:
        if call.model is not None:
            call.resolved = self.resolve(call.model, call, CAN.get(route.endpoint, anything))

    async def _answer(self, call: Call, route: InferenceRoute, read: Callable[[], Awaitable[bytes]]) -> Answer:
        try:
            raw = call.body = await _within(read, call.budget_s)
            kept = self.away.find(call, raw)
            if kept is not None:
                return await kept.join(call, call.received_s + call.budget_s - time.perf_counter())
            with self.away.attend(call, raw) as run:
                run.answer = await self._handled(call, route, raw)
            if run.left:
                raise ClientGone
            return run.answer
        except Provisioning as error:
            if not route.is_native or "x-sie-sdk-version" not in call.headers:
                raise
            call.code = error.code
            headers = {
                "Retry-After": str(error.retry_after_s),
                "x-should-retry": "true",
                "X-SIE-Error-Code": error.code,
            }
            return Answer(orjson.dumps(error.extras), "application/json", headers, 202)

    async def _handled(self, call: Call, route: InferenceRoute, raw: bytes) -> Answer:
        """The route's answer by one entry of the model from start to end: anew, all of it, where that changed on the
        way.
        """
        while True:
            try:
                return await route.handler(self, call, raw)
            except EntryChanged as error:
                left_s, entry = call.received_s + call.budget_s - time.perf_counter(), error.entry
                if call.attempt == MAX_ATTEMPTS or left_s <= 0:
                    message = f"the entry of {entry.id} is being changed, and its workers do not know it yet"
                    raise NotReady(message, reason=CONFIG_CHANGED, retry_after_s=1) from None
            call.again()
            await self._renewed(entry, min(RENEWED_WITHIN_S, left_s))
            self._resolve(call, route)

    async def _renewed(self, entry: ModelEntry, timeout_s: float) -> None:
        """Have the catalogue read again, until it has another entry of this model."""
        await self._feed.renewed(lambda catalogue: catalogue.entries.get(entry.id) != entry, timeout_s)

    def _check_concurrency(self, call: Call) -> None:
        if self.in_progress < self._settings.max_concurrent_requests:
            return
        lane = self._lane(call.headers, call.resolved) if call.resolved is not None else None
        self._metrics.rejected.labels(
            lane.machine_profile if lane else "", lane.bundle if lane else "", "concurrency"
        ).inc()
        raise QueueFull(
            f"{self.in_progress} requests are in progress, the limit of this gateway",
            extras={"queue_depth": self.in_progress},
            retry_after_s=self._pace.retry_s(time.perf_counter(), self.in_progress),
        )

    def understand(self, call: Call, asked: Asked) -> Understood:
        """Merge the parameters and choose the lane. Raises SIEError: what is asked can never be done."""
        headers, resolved, call.asked = call.headers, asked.resolved, asked
        lane = self._lane(headers, resolved)  # a pool that is not there comes before parameters that are wrong
        if asked.run is None:
            strict = headers.get("x-sie-strict", "").lower() == "true"
            parameters = _with_error_mode(asked.parameters, headers.get("x-sie-on-item-error", ""))
            resolved, options = self._options(resolved, parameters, asked.operation, strict=strict)
            if resolved is not asked.resolved:  # another profile, which other workers may have loaded
                lane = self._lane(headers, resolved)
        else:
            options = RequestOptions(asked.run)
        call.labels.update(machine_profile=lane.machine_profile, model=resolved.canonical)
        return Understood(
            asked.operation, resolved, options, asked.items, asked.query, lane, self._priority(headers, asked.priority)
        )

    async def run(self, call: Call, asked: Asked) -> Finished:
        """Have a model do what is asked, within the call's budget. Raises SIEError; what became of each input is in the
        result.
        """
        return await self.execute(call, self.understand(call, asked))

    async def execute(self, call: Call, request: Understood) -> Finished:
        """As `run`, for what was understood before."""
        try:
            finished = await self._execute(call, request)
        except QueueFull as error:  # the broker's own refusal knows no depth
            error.extras.setdefault("queue_depth", self._admission.queue_depth(request.lane))
            raise
        call.finished = finished
        self.shadows.after(call, finished)
        return finished

    def _options(
        self, resolved: Resolved, body: Mapping[str, Any], operation: Operation, *, strict: bool
    ) -> tuple[Resolved, RequestOptions]:
        """`run_options`; the outcome for a body without parameters is kept: it is that of every such body, and a tenth
        of a request.
        """
        if any(
            value != {} if name in ("params", "options") else name not in _NO_PARAMETERS for name, value in body.items()
        ):
            return run_options(resolved, body, operation, strict=strict)
        kept = self._plain.get((resolved.canonical, operation))
        if kept is None or kept[0] is not resolved.entry:
            kept = resolved.entry, run_options(resolved, {}, operation)[1]
            self._plain[resolved.canonical, operation] = kept
        return resolved, kept[1]

    def _enter(self, change: int) -> None:
        self.in_progress += change
        if self.in_progress:
            self.idle.clear()
        else:
            self.idle.set()

    def _budget_s(self, headers: Mapping[str, str]) -> float:
        raw = headers.get("x-sie-timeout-ms")
        if raw is None:
            return self._settings.gateway_request_timeout
        if not raw.isascii() or not raw.isdigit() or len(raw) > 6 or not 1 <= int(raw) <= 600_000:
            raise InvalidInput(
                "X-SIE-Timeout-Ms: expected a whole number from 1 to 600000", reason="schema", param="X-SIE-Timeout-Ms"
            )
        return min(int(raw) / 1000, self._settings.gateway_request_timeout)

    @staticmethod
    def _priority(headers: Mapping[str, str], asked: Priority | None) -> Priority:
        raw = headers.get("x-sie-priority", asked or "interactive").lower()
        if raw == "bulk":
            return "bulk"
        if raw == "interactive":
            return "interactive"
        raise InvalidInput("X-SIE-Priority: expected interactive or bulk", reason="schema", param="X-SIE-Priority")

    def _lane(self, headers: Mapping[str, str], resolved: Resolved) -> Lane:
        machine_profile = headers.get("x-sie-machine-profile", "").strip().lower()
        given = headers.get("x-sie-pool", "").strip()
        pool = _pool_name(given)
        if "/" in machine_profile:
            before, _, machine_profile = machine_profile.partition("/")
            named = _pool_name(before)
            if given and pool != named:
                raise InvalidInput(
                    "X-SIE-Pool: differs from the pool in X-SIE-MACHINE-PROFILE",
                    reason="pool_conflict",
                    param="X-SIE-Pool",
                )
            pool = named
        return self._fleet.lane(resolved, pool=pool, machine_profile=machine_profile, known_pools=self._pools)

    async def _execute(self, call: Call, request: Understood) -> Finished:
        """Publish what can run, wait for all of it, put it beside what could not."""
        resolved, run, lane = request.resolved, request.options.run, request.lane
        bad_query = None if request.query is None else _unusable(request.query, request)
        if bad_query is not None:
            raise InvalidInput(f"query: {bad_query.error.message}", reason=bad_query.error.reason, param="query")
        refused = {
            index: failure
            for index, item in enumerate(request.items)
            if (failure := _unusable(item, request)) is not None
        }
        runnable = [(index, item) for index, item in enumerate(request.items) if index not in refused]
        finished = Finished(request, refused)
        if not runnable:
            return finished
        query = request.query
        query_bytes = query.size if query else 0
        # what every message of the request repeats, beside its inputs
        options_bytes = len(messages.encode(run))
        shared_bytes = query_bytes + (options_bytes if options_bytes > BARE_OPTIONS_BYTES else 0)
        inline_bytes, any_size = self._queue.payload_bytes, self._queue.holds_any_size
        payload_bytes = inline_bytes - shared_bytes
        if payload_bytes < inline_bytes // 2:
            if not any_size or shared_bytes - query_bytes > inline_bytes // 2:  # options always travel in the message
                limit = inline_bytes // 2
                name = "query" if query_bytes > shared_bytes // 2 else "labels" if run.labels else "instruction"
                raise PayloadTooLarge(f"{name}: at most {limit} bytes are allowed", param=name, extras={"limit": limit})
            payload_bytes = STORED_CHUNK_BYTES
        sizes = bodies.sizes([item for _, item in runnable], limit=bodies.MAX_BODY_BYTES if any_size else payload_bytes)
        chunk_cost = self._admission.chunk_cost(lane, request.priority, resolved.residency)
        limits = chunk.Limits(chunk_cost, payload_bytes, self._queue.result_bytes)
        max_tokens = resolved.entry.max_tokens
        item_bytes, token_bytes = _result_bytes(request.operation, resolved.entry, run)
        _check_reply(
            item_bytes * len(sizes) + token_bytes * sum(chunk.estimated_tokens(size, max_tokens) for size in sizes)
        )
        chunks = chunk.split(
            sizes,
            max_tokens=max_tokens,
            item_result_bytes=item_bytes,
            token_result_bytes=token_bytes,
            limits=limits,
            # one row for each label of such a model, and its hypothesis in each; elsewhere everything shared is read
            # with each input
            rows=len(run.labels) if families.row(resolved.entry.family).has_row_per_label else 1,
            each_tokens=chunk.estimated_tokens(shared_bytes, max_tokens) if shared_bytes else 0,
        )
        if shared_bytes * len(chunks) > bodies.MAX_BODY_BYTES:
            name = "query" if query_bytes > shared_bytes // 2 else "instruction"
            message = (
                f"{name}: its {shared_bytes} bytes go with each of {len(chunks)} messages, {bodies.MAX_BODY_BYTES} are "
                "allowed in all"
            )
            raise PayloadTooLarge(message, param=name, extras={"limit": bodies.MAX_BODY_BYTES // len(chunks)})
        catalogue, entry = self._feed.catalogue, resolved.entry
        if (now := catalogue.entries.get(entry.id)) is not entry and now != entry:
            raise EntryChanged(entry)
        revision = catalogue.revisions.get(entry.id, 0)
        deadline_s = call.received_s + call.budget_s

        # the one route that workers count apart from its operation
        endpoint = "embeddings" if call.labels.get("endpoint") == "embeddings" else ""

        def work_item(number: int) -> WorkItem:
            piece = chunks[number]
            return WorkItem(
                request=call.work_id,
                chunk=number,
                model=entry.id,
                revision=entry.revision,
                operation=request.operation,
                inputs=tuple(_input(item) for _, item in runnable[piece.start : piece.stop]),
                options=run,
                reply=self._inbox.address(call.work_id),
                budget_ms=max(1, int((deadline_s - time.perf_counter()) * 1000)),
                first=piece.start,
                profile=resolved.profile,
                config_revision=revision,
                priority=request.priority,
                cost=piece.cost,
                traceparent=call.context.traceparent,
                query=None if query is None else _input(query),
                endpoint=endpoint,
                tracestate=call.context.tracestate,
            )

        if request.operation in ("tokenize", "decode"):  # nothing of the device
            chunks = [replace(piece, cost=1, squares=0) for piece in chunks]
        costs, squares = [piece.cost for piece in chunks], [piece.squares for piece in chunks]
        left_s = deadline_s - time.perf_counter()
        self._admission.check(
            call.key, lane, request.priority, resolved.residency, sum(costs), left_s, call.digest, sum(squares)
        )
        call.charge.take(sum(costs))
        permits = self._admission.enter(
            call.key,
            lane,
            request.priority,
            resolved.residency,
            costs,
            sum(sizes),
            left_s,
            call.digest,
            call.work_id,
            squares,
        )

        def on_taken(result: WorkResult) -> None:
            permits.taken(result)
            if any(
                isinstance(outcome, Failed) and outcome.error.reason == CONFIG_CHANGED for outcome in result.outcomes
            ):
                collector.fail(EntryChanged(entry))

        published_s = time.perf_counter()
        try:
            if permits.is_cold:
                self._cold.asked(lane)
            collector = self._inbox.open(call.work_id, len(chunks), lane.pool)
            try:
                collector.on_taken = on_taken
                permits.on_refused = collector.fail
                sending = Sending(
                    self._queue,
                    self._admission.peers,
                    lane,
                    request.priority,
                    permits,
                    work_item,
                    collector,
                    deadline_s,
                )
                try:
                    await sending.start()
                    finished.publish_ms = (time.perf_counter() - published_s) * 1000
                    await self._results(call, request, collector, deadline_s)
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
        finished.take([index for index, _ in runnable], chunks, results, waits_ms)
        spans.ran(call, published_s, finished.publish_ms, results, waits_ms)
        call.charge.settle(finished.usage["total_tokens"])
        self._metrics.used(call.grant.name, finished)
        return finished

    async def _results(self, call: Call, request: Understood, collector: Collector, deadline_s: float) -> None:
        """Wait for all of them to the end of the budget, and from the end of the hold, until a worker has the model,
        see whether that makes sense.

        Raises ModelLoading, Provisioning, GatewayTimeout, and what the collector was failed with.
        """
        until_s, hosted = call.received_s + min(call.budget_s, self._settings.load_hold_s), False
        while True:
            try:
                await collector.wait(max(0.0, until_s - time.perf_counter()))
                return
            except TimeoutError as error:
                # a load that begins after the hold, or a worker that leaves, is told like one before its end
                hosted = hosted or self._cold.check(request.lane, request.resolved.residency)
                if until_s >= deadline_s:
                    raise GatewayTimeout(f"no result within the budget of {call.budget_s:g} s") from error
            until_s = deadline_s if hosted else min(deadline_s, time.perf_counter() + CHECK_AGAIN_S)


def _pool_name(given: str) -> str:
    """The pool that a header names, the default one where it names none. Raises InvalidInput with reason pool_name."""
    try:
        return topology.pool_name(given or "_default")
    except ValueError as error:
        raise InvalidInput(f"X-SIE-Pool: {error}", reason="pool_name", param="X-SIE-Pool") from error


def _with_error_mode(parameters: Mapping[str, Any], mode: str) -> Mapping[str, Any]:
    """The parameters with what the header says of failed inputs, which any word of the body outweighs. Raises
    InvalidInput.
    """
    if not mode:
        return parameters
    if mode not in ("slot", "fail"):
        raise InvalidInput("X-SIE-On-Item-Error: expected slot or fail", reason="schema", param="X-SIE-On-Item-Error")
    options = parameters.get("options")
    if options is not None and not isinstance(options, dict):
        return parameters  # refused with all others of its kind
    return {**parameters, "options": {"on_item_error": mode, **(options or {})}}


def _result_bytes(operation: Operation, entry: ModelEntry, run: RunOptions) -> tuple[int, int]:
    """What the result of an input may take in a message, roughly: bytes of its own and bytes for each of its tokens."""
    if operation in ("tokenize", "decode"):
        return ITEM_RESULT_OVERHEAD_BYTES, TOKENIZED_BYTES
    if operation == "extract":
        labels = (
            sum(len(label.encode()) + LABEL_RESULT_BYTES for label in run.labels)
            if "classifications" in entry.outputs
            else 0
        )
        return ITEM_RESULT_OVERHEAD_BYTES + labels, EXTRACTED_TOKEN_BYTES
    values = token_values = 0
    for name in run.outputs if operation == "encode" else ():
        if name == "dense":
            values = run.muvera.width(entry.outputs["multivector"]) if run.muvera else entry.outputs["dense"]
        else:
            width = entry.outputs["dense" if name == TOKEN_STATES else name]
            token_values += 2 * SPARSE_IDS_PER_TOKEN if name == "sparse" else width
    return ITEM_RESULT_OVERHEAD_BYTES + 4 * values, 4 * token_values


def _check_reply(expected_bytes: int) -> None:
    """Refuse what would fill this process: all results of a request are held until its reply is sent. Raises
    PayloadTooLarge.
    """
    if expected_bytes > MAX_RESULT_BYTES:
        limit = MAX_RESULT_BYTES >> 20
        message = (
            f"items: the reply would hold about {expected_bytes >> 20} MiB of results, at most {limit} are allowed: "
            "send fewer items"
        )
        raise PayloadTooLarge(message, param="items", extras={"limit": MAX_RESULT_BYTES})


async def _within(read: Callable[[], Awaitable[bytes]], budget_s: float) -> bytes:
    try:
        async with asyncio.timeout(budget_s):
            return await read()
    except TimeoutError as error:
        raise GatewayTimeout(f"the body was not complete within the budget of {budget_s:g} s", param="body") from error


def _unusable(item: Item, request: Understood) -> Failed | None:
    """Why this item cannot be run by this model, before anything is queued; None if it can."""
    entry = request.resolved.entry
    taken = [*entry.inputs]
    if "multivector" in entry.outputs and (request.operation == "score" or request.options.run.muvera):
        taken.append("multivector")
    foreign = [modality for modality in item.modalities if modality not in taken]
    if foreign:
        message = f"{entry.id} takes {', '.join(taken)}, not {foreign[0]}"
        return Failed(ErrorInfo("INVALID_INPUT", message, reason="unsupported_modality"))
    if item.is_empty:
        message = f"text: expected a string, got {describe(None)}{item.instead}"
        return Failed(ErrorInfo("INVALID_INPUT", message, reason="empty_item", param="text"))
    return None


def _input(item: Item) -> Input:
    """What travels of an item."""
    if item.tokens is None and item.pair is None and item.vectors is None:
        return Input(item.text)
    return Input(
        item.text,
        tokens=item.tokens,
        pair=item.pair,
        vectors=None if item.vectors is None else Vectors.of(item.vectors),
    )
