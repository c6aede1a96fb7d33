"""The life of an inference request.

    resolve name ─► decode ─► merge options ─► check items ─► choose lane ─► split ─► admit ─► publish ─► collect ─► reply

Everything before `publish` refuses at once, in the order of the contract, so no bad request ever causes a load.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import orjson

from sie_contracts import messages, topology
from sie_contracts.catalogue import ModelEntry, Resolved
from sie_contracts.errors import ErrorInfo, GatewayTimeout, InvalidInput, NotReady, PayloadTooLarge, Provisioning, QueueFull, SIEError
from sie_contracts.messages import Failed, Input, Operation, Priority, RunOptions, WorkItem, WorkResult
from sie_contracts.options import RequestOptions, describe, run_options
from sie_contracts.runtime.feed import CatalogueFeed
from sie_contracts.runtime.http import Receive
from sie_contracts.settings import Settings
from sie_contracts.topology import Lane
from sie_gateway import body as bodies
from sie_gateway import chunk, reply
from sie_gateway.admission import Admission
from sie_gateway.attach import Attachments, ClientGone
from sie_gateway.body import Item
from sie_gateway.cold import ColdStarts
from sie_gateway.fleet import Fleet
from sie_gateway.inbox import Collector, Inbox
from sie_gateway.metrics import Metrics
from sie_gateway.prediction import retry_after_s
from sie_gateway.queue import WorkQueue
from sie_gateway.sending import Sending

ITEM_RESULT_OVERHEAD_BYTES = 64
EXTRACTED_TOKEN_BYTES = 64
LABEL_RESULT_BYTES = 48
BARE_OPTIONS_BYTES = 64  # of options without texts
MAX_RESULT_BYTES = 1 << 30
STORED_CHUNK_BYTES = 8 << 20  # of inputs beside a query that no message holds
SPARSE_IDS_PER_TOKEN = 32
_NO_PARAMETERS = frozenset({"items", "inputs", "input", "query", "model"})
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass
class Call:
    """One HTTP request: what the edge knows of it. `labels` are filled in as the request is understood, for metrics and logs."""

    id: str
    received_s: float
    headers: Mapping[str, str]
    labels: dict[str, str] = field(default_factory=dict)
    path: str = ""
    receive: Receive | None = None  # tells when the client goes away
    key: str = ""  # whose turn it takes among others: one name per credential, the same for all who need none


@dataclass(frozen=True)
class Answer:
    """A success, or what a client that waits for capacity takes for "not yet"."""

    body: bytes
    content_type: str
    headers: dict[str, str]
    status: int = 200


@dataclass(frozen=True)
class _Request:
    """A request that was understood."""

    operation: Operation
    resolved: Resolved
    options: RequestOptions
    items: tuple[Item, ...]
    query: Item | None
    lane: Lane
    priority: Priority
    budget_s: float


class FailedRequest(Exception):
    """A request that ends in `error`, with one entry per failed input."""

    def __init__(self, error: SIEError, errors: list[dict[str, Any]]) -> None:
        super().__init__(error.message)
        self.error = error
        self.errors = errors


class Inference:
    """Runs inference requests against the queue."""

    def __init__(
        self, settings: Settings, feed: CatalogueFeed, fleet: Fleet, queue: WorkQueue, inbox: Inbox, metrics: Metrics, pools: set[str],
        admission: Admission, cold: ColdStarts,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._feed = feed
        self._fleet = fleet
        self._queue = queue
        self._inbox = inbox
        self._metrics = metrics
        self._pools = pools
        self._admission = admission
        self._cold = cold
        self._plain: dict[tuple[str, Operation], tuple[ModelEntry, RequestOptions]] = {}
        self.away: Attachments[Answer] = Attachments()
        self.in_progress = 0
        self.idle = asyncio.Event()  # set while nothing is in progress
        self.idle.set()

    @property
    def unfinished_bytes(self) -> int:
        """Held of results of which parts are missing."""
        return self._inbox.unfinished_bytes

    def resolve(self, spec: str) -> Resolved:
        """The model of a request. Raises NotReady before the catalogue is there, InvalidInput, ModelNotFound, BundleConflict."""
        if not self._feed.loaded:
            raise NotReady("the catalogue is not loaded yet")
        if ".." in spec.split("/"):
            raise InvalidInput("model: '..' is not part of any name", reason="schema", param="model")
        return self._feed.catalogue.resolve(spec.removesuffix("/"))

    async def answer(self, call: Call, operation: Operation, resolved: Resolved, read: Callable[[], Awaitable[bytes]]) -> Answer:
        """`POST /v1/{operation}/{model}`. `resolved` comes first: an unknown model is refused before the body is read.

        The request counts as in progress from here on, and its budget runs, so that slow uploads are bounded like everything else.
        """
        budget_s = self._budget_s(call.headers)
        if self.in_progress >= self._settings.max_concurrent_requests:
            lane, priority = self._lane(call.headers, resolved), self._priority(call.headers)
            self._metrics.rejected.labels(lane.machine_profile, lane.bundle, "concurrency").inc()
            raise QueueFull(
                f"{self.in_progress} requests are in progress, the limit of this gateway", extras={"queue_depth": self.in_progress},
                retry_after_s=retry_after_s(self._admission.estimate_s(call.key, lane, priority, resolved.residency, 0), 0.0),
            )  # fmt: skip
        self._enter(1)
        try:
            raw = await _within(read, budget_s)
            kept = self.away.find(call, raw)
            if kept is not None:
                return await kept.join(call, budget_s)
            with self.away.attend(call, raw) as run:
                run.answer = await self._answer(call, operation, resolved, raw, budget_s)
            if run.left:
                raise ClientGone
            return run.answer
        except Provisioning as error:
            if "x-sie-sdk-version" not in call.headers:
                raise
            headers = {"Retry-After": str(error.retry_after_s), "x-should-retry": "true", "X-SIE-Error-Code": error.code}
            return Answer(orjson.dumps(error.extras), "application/json", headers, 202)
        finally:
            self._enter(-1)

    async def _answer(self, call: Call, operation: Operation, resolved: Resolved, raw: bytes, budget_s: float) -> Answer:
        headers = call.headers
        is_msgpack = "msgpack" in headers.get("content-type", "")
        body = bodies.decode(raw, msgpack=is_msgpack)
        items = bodies.items(body, limit=self._settings.max_items_per_request)
        query = bodies.query(body) if operation == "score" else None
        resolved, options = self._options(resolved, body, operation, strict=headers.get("x-sie-strict", "").lower() == "true")
        lane = self._lane(headers, resolved)
        call.labels.update(machine_profile=lane.machine_profile, model=resolved.canonical)
        options = _with_warning(options, headers, lane)
        request = _Request(operation, resolved, options, items, query, lane, self._priority(headers), budget_s)
        try:
            done = await self._run(call, request)
        except QueueFull as error:  # the broker's own refusal knows no depth
            error.extras.setdefault("queue_depth", self._admission.queue_depth(lane))
            raise
        return await self._reply(call, request, done, reply.wants_msgpack(headers.get("accept", ""), is_msgpack))

    def _options(
        self, resolved: Resolved, body: Mapping[str, Any], operation: Operation, *, strict: bool
    ) -> tuple[Resolved, RequestOptions]:
        """`run_options`; the outcome for a body without parameters is kept: it is that of every such body, and a tenth of a request."""
        if any(value != {} if name in ("params", "options") else name not in _NO_PARAMETERS for name, value in body.items()):
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
            raise InvalidInput("X-SIE-Timeout-Ms: expected a whole number from 1 to 600000", reason="schema", param="X-SIE-Timeout-Ms")
        return min(int(raw) / 1000, self._settings.gateway_request_timeout)

    @staticmethod
    def _priority(headers: Mapping[str, str]) -> Priority:
        raw = headers.get("x-sie-priority", "interactive").lower()
        if raw == "bulk":
            return "bulk"
        if raw == "interactive":
            return "interactive"
        raise InvalidInput("X-SIE-Priority: expected interactive or bulk", reason="schema", param="X-SIE-Priority")

    def _lane(self, headers: Mapping[str, str], resolved: Resolved) -> Lane:
        machine_profile = headers.get("x-sie-machine-profile", "").strip().lower()
        pool = headers.get("x-sie-pool", "").strip()
        if "/" in machine_profile:
            named, _, machine_profile = machine_profile.partition("/")
            if pool and topology.pool_name(pool) != topology.pool_name(named):
                raise InvalidInput("X-SIE-Pool: differs from the pool in X-SIE-MACHINE-PROFILE", reason="pool_conflict", param="X-SIE-Pool")
            pool = named
        try:
            pool = topology.pool_name(pool or "_default")
        except ValueError as error:
            raise InvalidInput(f"X-SIE-Pool: {error}", reason="pool_name", param="X-SIE-Pool") from error
        return self._fleet.lane(resolved, pool=pool, machine_profile=machine_profile, known_pools=self._pools)

    async def _run(self, call: Call, request: _Request) -> _Collected:
        """Publish what can run, wait for all of it, put it beside what could not."""
        resolved, run, lane, budget_s = request.resolved, request.options.run, request.lane, request.budget_s
        bad_query = None if request.query is None else _unusable(request.query, resolved)
        if bad_query is not None:
            raise InvalidInput(f"query: {bad_query.error.message}", reason=bad_query.error.reason, param="query")
        refused = {index: failure for index, item in enumerate(request.items) if (failure := _unusable(item, resolved)) is not None}
        runnable = [(index, item.text) for index, item in enumerate(request.items) if index not in refused and item.text is not None]
        collected = _Collected(len(request.items), refused)
        if not runnable:
            return collected
        query = request.query.text if request.query else None
        query_bytes = len(query.encode()) if query else 0
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
        sizes = bodies.sizes([text for _, text in runnable], limit=bodies.MAX_BODY_BYTES if any_size else payload_bytes)
        chunk_cost = self._admission.chunk_cost(lane, request.priority, resolved.residency)
        limits = chunk.Limits(chunk_cost, payload_bytes, self._queue.result_bytes)
        max_tokens = resolved.entry.max_tokens
        item_bytes, token_bytes = _result_bytes(request.operation, resolved.entry, run)
        _check_reply(item_bytes * len(sizes) + token_bytes * sum(chunk.estimated_tokens(size, max_tokens) for size in sizes))
        chunks = chunk.split(
            sizes, max_tokens=max_tokens, item_result_bytes=item_bytes, token_result_bytes=token_bytes, limits=limits,
            # one row for each label of such a model, and its hypothesis in each; elsewhere everything shared is read with each input
            rows=len(run.labels) if resolved.entry.family == "zero-shot-classifier" else 1,
            each_tokens=chunk.estimated_tokens(shared_bytes, max_tokens) if shared_bytes else 0,
        )  # fmt: skip
        if shared_bytes * len(chunks) > bodies.MAX_BODY_BYTES:
            name = "query" if query_bytes > shared_bytes // 2 else "instruction"
            message = f"{name}: its {shared_bytes} bytes go with each of {len(chunks)} messages, {bodies.MAX_BODY_BYTES} are allowed in all"
            raise PayloadTooLarge(message, param=name, extras={"limit": bodies.MAX_BODY_BYTES // len(chunks)})
        revision = self._feed.catalogue.revisions.get(resolved.entry.id, 0)
        deadline_s = call.received_s + budget_s

        def work_item(number: int) -> WorkItem:
            piece = chunks[number]
            return WorkItem(
                request=call.id, chunk=number, model=resolved.entry.id, revision=resolved.entry.revision, operation=request.operation,
                inputs=tuple(Input(text) for _, text in runnable[piece.start : piece.stop]), options=run,
                reply=self._inbox.address(call.id), budget_ms=max(1, int((deadline_s - time.perf_counter()) * 1000)), first=piece.start,
                profile=resolved.profile, config_revision=revision, priority=request.priority, cost=piece.cost,
                traceparent=_traceparent(call.headers), query=None if query is None else Input(query),
            )  # fmt: skip

        costs = [piece.cost for piece in chunks]
        self._admission.check(call.key, lane, request.priority, resolved.residency, sum(costs), deadline_s - time.perf_counter())
        permits = self._admission.enter(call.key, lane, request.priority, resolved.residency, costs, sum(sizes))
        published_s = time.perf_counter()
        try:
            if permits.is_cold:
                self._cold.asked(lane)
            collector = self._inbox.open(call.id, len(chunks))
            try:
                collector.on_taken = permits.taken
                sending = Sending(
                    self._queue, self._admission.peers, lane, request.priority, permits, work_item, collector, deadline_s
                )
                try:
                    await sending.start()
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
        self._metrics.result_wait.labels(request.operation).observe(collector.last_arrival_s - published_s)
        collected.take([index for index, _ in runnable], chunks, results)
        collected.wait_ms = (collector.last_arrival_s - published_s) * 1000
        return collected

    async def _results(self, call: Call, request: _Request, collector: Collector, deadline_s: float) -> None:
        """Wait for all of them to the end of the budget, and at the end of the hold see whether that makes sense.

        Raises ModelLoading, Provisioning, GatewayTimeout, and what the collector was failed with.
        """
        hold_s = call.received_s + min(request.budget_s, self._settings.load_hold_s)
        try:
            await collector.wait(max(0.0, hold_s - time.perf_counter()))
        except TimeoutError:
            self._cold.check(request.lane, request.resolved.residency)
            try:
                await collector.wait(max(0.0, deadline_s - time.perf_counter()))
            except TimeoutError as error:
                raise GatewayTimeout(f"no result within the budget of {request.budget_s:g} s") from error

    async def _reply(self, call: Call, request: _Request, done: _Collected, msgpack: bool) -> Answer:
        resolved, options, items = request.resolved, request.options, request.items
        outcomes = reply.placed(len(items), done.results, done.positions)
        failures = reply.failures_of(outcomes)
        failure = reply.failure_of(items, failures, any_fails=options.on_item_error == "fail")
        if failure is not None:
            raise FailedRequest(*failure)
        tokens, truncated = done.usage()
        real = done.worker_results()
        fingerprint = real[0].fingerprint if real else ""
        content: dict[str, Any] = {"model": resolved.requested}
        slots: list[dict[str, Any]] = []
        if request.operation == "score":
            if request.query is not None and request.query.id is not None:
                content["query_id"] = request.query.id
            content["scores"] = reply.score_entries(items, outcomes)
        elif request.operation == "extract":
            content["items"] = reply.extract_slots(items, outcomes)
        else:
            slots = content["items"] = reply.encode_slots(items, outcomes, resolved.entry, options.run, msgpack=msgpack)
        timing = reply.timing(total_ms=(time.perf_counter() - call.received_s) * 1000, wait_ms=done.wait_ms, last=done.last)
        if options.item_timing:
            for slot in slots:
                slot["timing"] = timing
        content["timing"] = timing
        content["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens, "truncated_items": truncated}
        content["fingerprint"] = fingerprint
        if options.run.muvera is not None:
            content["muvera"] = msgspec.to_builtins(options.run.muvera)
        if options.warnings:
            content["warnings"] = list(options.warnings)
        if call.headers.get("x-sie-explain") == "1":
            content["explain"] = [
                msgspec.to_builtins({"worker": result.worker, "chunk": result.chunk, "batch": result.batch, "stages": result.stages})
                for result in real
            ]
        values = sum(len(result.block) for result in real) // 4
        data, content_type = await reply.encode_in_turns(content, values, msgpack=msgpack)
        failed = sum(1 for entry in failures if entry is not None)
        headers = {
            "X-SIE-Model": resolved.canonical,
            "X-SIE-Model-Revision": resolved.entry.revision,
            "X-SIE-Fingerprint": fingerprint,
            "X-SIE-Bundle": resolved.entry.bundle,
            "X-SIE-Worker": ",".join(sorted({result.worker for result in real})),
            **reply.timing_headers(timing),
            **({"X-Payload-Fetch-Time": f"{done.last.stages.fetch_ms:.2f}"} if done.last and done.last.stages.fetch_ms else {}),
            **({"X-SIE-Failed-Items": str(failed)} if failed else {}),
            **({"X-SIE-Truncated-Items": str(len(truncated))} if truncated else {}),
        }
        return Answer(data, content_type, headers)


def _with_warning(options: RequestOptions, headers: Mapping[str, str], lane: Lane) -> RequestOptions:
    """The options, with a warning where another machine profile serves than the one that was named."""
    named = headers.get("x-sie-machine-profile", "").rpartition("/")[2].strip().lower()
    if named in ("", lane.machine_profile, lane.machine_profile.removesuffix("-spot")):
        return options
    told = f"X-SIE-MACHINE-PROFILE: no machine profiles are configured here; {lane.machine_profile} serves this request"
    return replace(options, warnings=(*options.warnings, told))


def _result_bytes(operation: Operation, entry: ModelEntry, run: RunOptions) -> tuple[int, int]:
    """What the result of an input may take in a message, roughly: bytes of its own and bytes for each of its tokens."""
    if operation == "extract":
        labels = sum(len(label.encode()) + LABEL_RESULT_BYTES for label in run.labels) if "classifications" in entry.outputs else 0
        return ITEM_RESULT_OVERHEAD_BYTES + labels, EXTRACTED_TOKEN_BYTES
    values = token_values = 0
    for name in run.outputs if operation == "encode" else ():
        if name == "dense":
            values = run.muvera.width(entry.outputs["multivector"]) if run.muvera else entry.outputs["dense"]
        else:
            token_values += 2 * SPARSE_IDS_PER_TOKEN if name == "sparse" else entry.outputs[name]
    return ITEM_RESULT_OVERHEAD_BYTES + 4 * values, 4 * token_values


def _check_reply(expected_bytes: int) -> None:
    """Refuse what would fill this process: all results of a request are held until its reply is sent. Raises PayloadTooLarge."""
    if expected_bytes > MAX_RESULT_BYTES:
        limit = MAX_RESULT_BYTES >> 20
        message = f"items: the reply would hold about {expected_bytes >> 20} MiB of results, at most {limit} are allowed: send fewer items"
        raise PayloadTooLarge(message, param="items", extras={"limit": MAX_RESULT_BYTES})


async def _within(read: Callable[[], Awaitable[bytes]], budget_s: float) -> bytes:
    try:
        async with asyncio.timeout(budget_s):
            return await read()
    except TimeoutError as error:
        raise GatewayTimeout(f"the body was not complete within the budget of {budget_s:g} s", param="body") from error


def _traceparent(headers: Mapping[str, str]) -> str:
    """The W3C trace context of the caller; what is not one is dropped, as the specification asks."""
    given = headers.get("traceparent", "")
    return given if len(given) <= 64 and _TRACEPARENT.fullmatch(given) else ""


def _unusable(item: Item, resolved: Resolved) -> Failed | None:
    """Why this item cannot be run by this model, before anything is queued; None if it can."""
    foreign = [modality for modality in item.modalities if modality not in resolved.entry.inputs]
    if foreign:
        message = f"{resolved.entry.id} takes {', '.join(resolved.entry.inputs)}, not {foreign[0]}"
        return Failed(ErrorInfo("INVALID_INPUT", message, reason="unsupported_modality"))
    if item.text is None:
        return Failed(ErrorInfo("INVALID_INPUT", f"the item has no text (got {describe(None)})", reason="empty_item"))
    return None


class _Collected:
    """Outcomes at their places among the inputs, those that were refused here included."""

    def __init__(self, count: int, refused: Mapping[int, Failed]) -> None:
        self.results: list[WorkResult] = [WorkResult("", -1, "", (failure,)) for failure in refused.values()]
        self.positions: list[list[int]] = [[index] for index in refused]
        self.wait_ms = 0.0
        self.last: WorkResult | None = None
        self._count = count

    def take(self, indices: list[int], chunks: list[chunk.Chunk], results: list[WorkResult]) -> None:
        for piece, result in zip(chunks, results, strict=True):
            places = indices[piece.start : piece.stop]
            if len(places) != len(result.outcomes):
                raise InvalidOutcomeCount(len(result.outcomes), len(places))
            self.results.append(result)
            self.positions.append(places)
        self.last = max(results, key=lambda result: result.stages.worker_ms)

    def worker_results(self) -> list[WorkResult]:
        return [result for result in self.results if result.chunk >= 0]

    def usage(self) -> tuple[int, list[int]]:
        """Tokens that were run, and the positions of inputs that were cut."""
        tokens, truncated = 0, []
        for result, places in zip(self.results, self.positions, strict=True):
            for place, outcome in zip(places, result.outcomes, strict=True):
                if not isinstance(outcome, Failed):
                    tokens += outcome.tokens
                    if outcome.truncated:
                        truncated.append(place)
        return tokens, sorted(truncated)


class InvalidOutcomeCount(Exception):
    """A worker answered a chunk with another number of outcomes than it has inputs: nothing of it can be trusted."""

    def __init__(self, got: int, expected: int) -> None:
        super().__init__(f"a chunk of {expected} inputs came back with {got} outcomes")
