"""A request to a model, and the results that workers send, from their arrival to the data of a reply.

    part of a result ──► `fragments` ──► whole result
    whole result ──► ResultInbox ──► OutcomeCollector of its request: the first outcome of a chunk counts
    ──► confirmation to the sidecar, which acks the message; results of several requests have one confirmation
    all chunks arrived ──► RequestResult: the outcome of each input, in order, usage, timing, errors, headers

One subscription of the gateway receives the results of all requests. Each request has a result subject of its own. If
the NATS client library drops a message because the subscription is slow, the subject names the request that has lost a
result: of several results in one message the first. Workers send the others again, one by one.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast, get_args

import msgspec

from sie_broker import BrokerError, Bus, CoreMessage, Subscription
from sie_contracts import arrays
from sie_contracts.errors import UNDECODABLE, AllItemsFailed, InternalFailure, InvalidInput, ResourceExhausted, SIEError
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.options import RequestOptions, Side
from sie_contracts.stages import STAGES
from sie_contracts.wire import messages
from sie_contracts.wire.messages import (
    Confirmation,
    Confirmations,
    Failed,
    Fragment,
    Ok,
    Operation,
    Priority,
    RunOptions,
    Stages,
    Verdict,
    WorkResult,
    WorkResults,
)
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.slots import KeyTurns
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.fragments import Assembly, Damaged, Fragments, InboxFull, put_together
from sie_gateway.inference.reply import Placed, array_of, slot_error
from sie_gateway.metrics import Metrics
from sie_runtime.failpoints import failpoint
from sie_runtime.process import Tasks

_TIMING_HEADERS = (
    ("X-Queue-Time", "queue_time"),
    ("X-Load-Time", "load_time"),
    ("X-Tokenization-Time", "preprocess_time"),
    ("X-Inference-Time", "inference_time"),
    ("X-Postprocessing-Time", "postprocess_time"),
    ("X-Total-Time", "total_time"),
    ("X-Batch-Wait-Time", "batch_wait_time"),
    ("X-Device-Wait-Time", "device_wait_time"),
)
FOUND_VALUES = 20  # an entity or label of a reply takes as long to write as this many numbers


UNMERGED = RequestOptions(RunOptions())
UNPLANNED = Lane("", "", "")


class InferRequest(msgspec.Struct, frozen=True):
    """Request to a model, independent of the client's API. `parameters` has the same fields as the body of a native
    request. `Inference.understand` plans a request: it merges `parameters` into `options`, and chooses the lane (pool,
    machine profile and bundle).

    `options`: given only for operations without parameters of a model (tokenize, decode); UNMERGED for all others.
    `side`: the texts of an encode request are of this kind (`query` or `document`), unless a parameter sets the kind.
    For routes in the API format of another server, `side` is empty, so that these routes return the same vectors as the
    model's own library. `inputs_field`: field of the client's body with the inputs, for errors.
    """

    operation: Operation
    resolved: Resolved
    items: tuple[RequestItem, ...]
    parameters: Mapping[str, Any]
    query: RequestItem | None = None
    priority: Priority = "interactive"  # the header X-SIE-Priority has precedence
    side: Side = "document"
    inputs_field: str = "items"
    options: RequestOptions = UNMERGED
    lane: Lane = UNPLANNED

    def with_run(self, run: RunOptions) -> InferRequest:
        return msgspec.structs.replace(self, options=replace(self.options, run=run))

    def with_warnings(self, *warnings: str) -> InferRequest:
        if not warnings:
            return self
        options = replace(self.options, warnings=(*self.options.warnings, *warnings))
        return msgspec.structs.replace(self, options=options)


class Chunk(msgspec.Struct, frozen=True):
    """Inputs `start` to `stop - 1` of a request. `cost`: estimated tokens of all rows (token sequences) that the model
    runs for these inputs. `squares`: sum of the squared token counts of the rows.
    """

    start: int
    stop: int
    cost: int
    squares: int = 0


class RequestResult:
    """Outcomes of a request, in the order of its inputs."""

    def __init__(self, request: InferRequest, refused: Mapping[int, Failed]) -> None:
        self.request = request
        self.publish_ms = 0.0  # milliseconds from the admission until the first messages were stored in the queue
        self.last: WorkResult | None = None  # result of the last chunk that finished
        self.reported_times: Mapping[str, float] = {}  # stage -> milliseconds in the reply; empty until `timing` ran
        # "hit", "partial", "miss" or "off"; empty if the gateway has no cache, or if all inputs were refused
        self.cache_status = ""
        self.cached_items = 0  # number of inputs whose answers came from the cache or from another request
        self.cached_tokens = 0  # number of tokens of the inputs in `cached_items`
        self.written_ms = 0.0  # milliseconds in which the reply was built; part of the stage `postprocess_time`
        # number of a chunk -> milliseconds from the admission of the request to the arrival of the chunk's result
        self._waits_ms: dict[int, float] = {}
        self._results: list[WorkResult] = []
        # results that workers sent, but no cached answers, and no failures that the gateway added
        self.worker_results: list[WorkResult] = []
        # outcome of each input, with the result that contains it; None until the outcome is added
        self.outcomes: list[Placed] = cast("list[Placed]", [None] * len(request.items))
        self.fingerprint = ""
        for index, failure in refused.items():
            self.add_failure(index, failure)

    def add_results(
        self, indices: Sequence[int], chunks: list[Chunk], results: list[WorkResult], waits_ms: list[float]
    ) -> None:
        """Store the result of each chunk at the positions of the chunk's inputs. A later call numbers its chunks after
        the chunks of the earlier calls. Raises InvalidOutcomeCount.
        """
        before = len(self._waits_ms)
        if before:
            results = [msgspec.structs.replace(result, chunk=before + result.chunk) for result in results]
        for piece, result in zip(chunks, results, strict=True):
            places = indices[piece.start : piece.stop]
            if len(places) != len(result.outcomes):
                raise InvalidOutcomeCount(len(result.outcomes), len(places))
            self._add(places, result)
        self.worker_results += results
        self._waits_ms.update(enumerate(waits_ms, before))
        self.last = results[max(range(len(waits_ms)), key=waits_ms.__getitem__)]

    def add_cached(self, index: int, result: WorkResult) -> None:
        """Store the answer of one input that came from the cache or from another request."""
        self.cached_items += 1
        self.cached_tokens += work_of((result,))[0]
        self._add((index,), result)

    def add_failure(self, index: int, failure: Failed) -> None:
        """Store the failure of one input for which this request sent no work."""
        self._add((index,), WorkResult("", -1, "", (failure,)))

    def _add(self, places: Sequence[int], result: WorkResult) -> None:
        self._results.append(result)
        self.fingerprint = self.fingerprint or result.fingerprint
        for place, outcome in zip(places, result.outcomes, strict=True):
            self.outcomes[place] = result, outcome

    @cached_property
    def usage(self) -> dict[str, Any]:
        """Return the usage: tokens of all inputs, including cached inputs; positions of truncated inputs; number of
        images; number of cached inputs and of their tokens. Counts of images and cached inputs are absent if zero.
        """
        tokens, images, truncated = 0, 0, []
        for place, (_, outcome) in enumerate(self.outcomes):
            if not isinstance(outcome, Failed):
                tokens += outcome.tokens
                images += len(self.request.items[place].images)
                if outcome.truncated:
                    truncated.append(place)
        usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens, "truncated_items": truncated}
        if images:
            usage["images"] = images
        if self.cached_items:
            usage |= {"cached_items": self.cached_items, "cached_tokens": self.cached_tokens}
        return usage

    @property
    def values(self) -> int:
        """Return the approximate count of numbers in the reply. The time to write the reply grows with this count."""
        count = size = 0
        for result in self._results:
            size += len(result.block)
            for outcome in result.outcomes:
                if isinstance(outcome, Ok) and outcome.data:
                    count += sum(len(listed) for listed in outcome.data.values() if isinstance(listed, list))
        return size // 4 + FOUND_VALUES * count

    def check(self, name: str = "", **names: str) -> None:
        """Raise FailedRequest if all inputs failed, or if one failed and the client set `on_item_error` to `fail`.

        `name`: name of the field of inputs in an API format whose replies cannot report the error of a single input.
        With `name`, any failed input fails the request, and the error names the input. `names` maps a parameter of SIE
        to the field of the API format that sets the parameter. An error about such a parameter names this field, not
        the input.
        """
        for _, outcome in self.outcomes:
            if isinstance(outcome, Failed):
                break
        else:
            return
        any_fails = bool(name) or self.request.options.on_item_error == "fail"
        failure = failure_of(self.request.items, self.outcomes, any_fails=any_fails)
        if failure is None:
            return
        error, listed = failure
        is_input = isinstance(error, InvalidInput)  # an error other than InvalidInput is not caused by this input
        if is_input and error.param in names:
            error.message = names[error.param] + error.message.removeprefix(error.param)
            error.param = names[error.param]
            raise FailedRequest(error, listed)
        # An error may name a field of the input. Only native replies name a field of images or chunks, because other
        # API formats have other names for these fields.
        own = error.param.startswith(("images[", "chunks"))
        field = error.param if error.param == "text" or (not name and own) else ""
        place = f"{name or 'items'}[{listed[0]['index']}]" + (f".{field}" if is_input and field else "")
        if is_input and error.param.startswith(place):  # the message already has the path of the input
            raise FailedRequest(error, listed)
        if name or is_input:
            error.param = place
        if is_input:
            error.message = f"{place}: {error.message.removeprefix((field or 'text') + ': ')}"
        raise FailedRequest(error, listed)

    def succeeded(self, name: str, **names: str) -> list[tuple[WorkResult, Ok]]:
        """Return (result, outcome) of each input, for API formats that cannot report the error of a single input.
        Raises FailedRequest if an input failed. `name` and `names`: see `check`.
        """
        self.check(name, **names)
        return [(result, outcome) for result, outcome in self.outcomes if isinstance(outcome, Ok)]

    def arrays(self, name: str, output: str) -> list[arrays.Array]:
        """Return one output array of each input, as views of the results' bytes. Raises FailedRequest."""
        return [array_of(result, outcome, output) for result, outcome in self.succeeded(name)]

    @property
    def waited_ms(self) -> float:
        """Return the milliseconds from the admission to the arrival of the last result."""
        return max(self._waits_ms.values(), default=0.0)

    def timing(self, received_s: float) -> dict[str, float]:
        """Return the milliseconds of each stage until now. Also store these values in `reported_times`, so that the log
        and the trace report the same values as the reply.
        """
        wait_ms = self._waits_ms[self.last.chunk] if self.last else 0.0
        total_ms = (time.perf_counter() - received_s) * 1000
        load_ms = 0.0
        for result in self.worker_results:
            load_ms = max(load_ms, result.stages.load_ms)
        self.reported_times = times = stage_times(
            total_ms=total_ms, wait_ms=wait_ms, last=self.last, written_ms=self.written_ms, load_ms=load_ms
        )
        return times

    def late(self, received_s: float, prepared_s: float, spent_s: float) -> dict[str, Any]:
        """Return `timing`, the last entry of a reply. `prepared_s`: seconds in which the other entries were made.
        `spent_s`: seconds in which they were written.
        """
        self.written_ms = 1000 * (prepared_s + spent_s)
        return {"timing": self.timing(received_s)}

    def item_timings(self) -> list[dict[str, float]]:
        """Return the milliseconds of the stages of each input, from the admission to the arrival of its result. The
        inputs of a chunk have the same times. The times are zero for an input that the gateway refused, and for a
        cached answer.
        """
        none = stage_times(total_ms=0.0, wait_ms=0.0, last=None)
        timings = {}
        for result in self.worker_results:
            wait_ms = self._waits_ms[result.chunk]
            timings[result.chunk] = stage_times(total_ms=wait_ms, wait_ms=wait_ms, last=result)
        return [timings.get(result.chunk, none) for result, _ in self.outcomes]

    def shared(self, *, explain: bool) -> dict[str, Any]:
        """Return the fields of a reply other than the results and `timing`: usage, fingerprint, warnings, explain."""
        fields: dict[str, Any] = {"usage": self.usage, "fingerprint": self.fingerprint}
        warnings, half_read, total = [*self.request.options.warnings], 0, len(self.outcomes)
        for _, outcome in self.outcomes:
            half_read += isinstance(outcome, Ok) and outcome.first_of_several
        if half_read:
            warnings.append(
                f"images: {half_read} of {total} inputs have a file of several images, of which only the first was read"
            )
        if warnings:
            fields["warnings"] = warnings
        if explain:
            lane, priority = str(self.request.lane), self.request.priority
            fields["explain"] = [
                {
                    "worker": result.worker,
                    "lane": lane,
                    "priority": priority,
                    "chunk": result.chunk,
                    "batch": msgspec.structs.asdict(result.batch),
                    "stages": msgspec.structs.asdict(result.stages),
                }
                for result in self.worker_results
            ]
        return fields

    def headers(self, received_s: float, *, timed: bool) -> dict[str, str]:
        """Return the headers of the reply. `timed`: with the times of the stages, because the body has no `timing`, or
        because the client requests explanations. If the body is sent in pieces, the gateway sends the headers first, so
        these times exclude the time to write the body.
        """
        resolved, truncated = self.request.resolved, len(self.usage["truncated_items"])
        failed, workers = 0, set[str]()
        for _, outcome in self.outcomes:
            failed += isinstance(outcome, Failed)
        for result in self.worker_results:
            workers.add(result.worker)
        headers = {
            "X-SIE-Model": resolved.canonical,
            "X-SIE-Model-Revision": resolved.revision,
            "X-SIE-Fingerprint": self.fingerprint,
            "X-SIE-Bundle": self.request.lane.bundle,
            "X-SIE-Served-By": "local",
            "X-SIE-Units-Input-Tokens": str(self.usage["prompt_tokens"]),
            "X-SIE-Worker": ",".join(sorted(workers)),
        }
        if self.request.operation == "score":
            headers["X-SIE-Units-Pairs"] = str(len(self.outcomes) - failed)
        if "images" in self.usage:
            headers["X-SIE-Units-Images"] = str(self.usage["images"])
        if self.cache_status:
            headers["X-SIE-Cache-Status"] = self.cache_status
        if resolved.alias:
            headers["X-SIE-Alias"] = resolved.alias
        if failed:
            headers["X-SIE-Failed-Items"] = str(failed)
        if truncated:
            headers["X-SIE-Truncated-Items"] = str(truncated)
        if not timed:
            return headers
        timing = self.reported_times or self.timing(received_s)
        for header, name in _TIMING_HEADERS:
            headers[header] = f"{timing[name]:.2f}"
        if self.publish_ms:
            headers["X-Queue-Publish-Time"] = f"{self.publish_ms:.2f}"
        if self.last is not None and (fetch_ms := self.last.stages.fetch_ms):
            headers["X-Payload-Fetch-Time"] = f"{fetch_ms:.2f}"
        return headers


def charged_tokens(least: Sequence[int], results: Sequence[WorkResult]) -> int:
    """Return the tokens that a key pays for inputs with these results: for each input those that the model read, and at
    least `least`. An input that the worker refuses as invalid costs the latter, because the worker has
    read it. An input that the cluster could not finish costs nothing.
    """
    outcomes = (outcome for result in results for outcome in result.outcomes)
    return sum(
        max(outcome.tokens, tokens) if isinstance(outcome, Ok) else tokens
        for tokens, outcome in zip(least, outcomes, strict=True)
        if isinstance(outcome, Ok) or outcome.error.code == InvalidInput.code
    )


def work_of(results: Sequence[WorkResult]) -> tuple[int, float]:
    """Return the tokens that the model read for chunks, and the seconds for which a device worked on them. For each
    chunk, these are the time of its batch, multiplied by the chunk's share of the batch's tokens.
    """
    total, total_ms = 0, 0.0
    for result in results:
        tokens = 0
        for outcome in result.outcomes:
            tokens += outcome.tokens if isinstance(outcome, Ok) else 0
        total += tokens
        if result.batch.tokens and tokens:
            share = min(1.0, tokens / result.batch.tokens)
            total_ms += share * (result.stages.inference_ms + result.stages.postprocess_ms)
    return total, total_ms / 1000


class InvalidOutcomeCount(Exception):
    """Raised if a result has more or fewer outcomes than its chunk has inputs, so no outcome can be assigned."""

    def __init__(self, got: int, expected: int) -> None:
        super().__init__(f"the result of a chunk of {expected} inputs has {got} outcomes")


def failure_of(
    items: Sequence[RequestItem], outcomes: Sequence[Placed], *, any_fails: bool
) -> tuple[SIEError, list[dict[str, Any]]] | None:
    """Return the error of the whole request and one entry per failed input. The request fails if all inputs failed, or
    if any input failed and `any_fails` is true. Return None if the request does not fail.
    """
    failed = [(index, outcome) for index, (_, outcome) in enumerate(outcomes) if isinstance(outcome, Failed)]
    if not failed or (len(failed) < len(items) and not any_fails):
        return None
    listed = [
        {
            "index": index,
            **({"id": items[index].id} if items[index].id is not None else {}),
            **slot_error(failure.error),
        }
        for index, failure in failed
    ]
    errors = [SIEError.from_info(failure.error) for _, failure in failed]
    if len({error.code for error in errors}) == 1:
        return errors[0], listed
    return AllItemsFailed(f"{len(failed)} of {len(items)} inputs failed, see errors", failures=errors), listed


def stage_times(
    *, total_ms: float, wait_ms: float, last: WorkResult | None, written_ms: float = 0.0, load_ms: float = 0.0
) -> dict[str, float]:
    """Return the milliseconds of the stages of the chunk that finished last, `last`. The stages add up to `total_ms`.
    `wait_ms`: time from the admission to the arrival of `last`. `written_ms`: time to build the reply. `load_ms`:
    longest time that a chunk of the request waited for the model to load. The chunk of `last` waited in the queue for
    the same load, so up to `load_ms` of its time in the queue counts as load time.
    """
    worker = last.stages if last else Stages()
    # the time to fetch a large input from the payload store counts as time in the queue
    queue = max(0.0, wait_ms - worker.worker_ms) + worker.fetch_ms
    load = min(queue + worker.load_ms, max(load_ms, worker.load_ms))
    queue += worker.device_wait_ms - (load - worker.load_ms)
    times = (
        queue,
        load,
        worker.preprocess_ms,
        worker.batch_wait_ms,
        worker.inference_ms,
        worker.postprocess_ms + written_ms,
    )
    stages = {name: round(ms, 3) for name, ms in zip(STAGES, (*times, max(0.0, total_ms - sum(times))), strict=True)}
    stages["total_time"] = total = round(total_ms, 3)
    stages["device_wait_time"] = round(worker.device_wait_ms, 3)
    stages["queue_ms"] = round(queue + load + worker.batch_wait_ms, 3)
    stages["tokenization_ms"] = stages["preprocess_time"]
    stages["inference_ms"] = stages["inference_time"]
    stages["postprocessing_ms"] = stages["postprocess_time"]
    stages["unattributed_ms"] = stages["unattributed_time"]
    stages["total_ms"] = total
    return stages


class FailedRequest(Exception):
    """Raised for a request that ends in `error`. `errors`: one entry for each failed input."""

    def __init__(self, error: SIEError, errors: list[dict[str, Any]]) -> None:
        super().__init__(error.message)
        self.error = error
        self.errors = errors


# largest number of messages that wait in the NATS client until the event loop handles them: enough for 13 seconds in
# which 5,000 results arrive per second
HELD_MESSAGES = 1 << 16
HELD_BYTES = 256 << 20  # largest number of bytes of the messages that wait in the NATS client
CHECKING_THREADS = 2  # threads that join results from their parts
_CONFIRMATIONS: dict[Verdict, bytes] = {
    verdict: messages.encode(Confirmation(verdict)) for verdict in get_args(Verdict)
}
_logger = logging.getLogger("sie.gateway.inbox")


class OutcomeCollector:
    """Outcomes of one request, by chunk. The first result of each chunk counts; further results are ignored."""

    def __init__(self, request: str, reply: str, chunks: int, pool: str, key: str) -> None:
        self.request = request
        self.reply = reply  # subject to which results of the request are sent
        self.key = key  # API key of the request
        self.pool = pool
        self.results: list[WorkResult | None] = [None] * chunks
        self.missing = chunks
        self.arrivals_s = [0.0] * chunks  # time when the result of each chunk was accepted
        self.on_taken: Callable[[WorkResult], None] | None = None  # function to call with each accepted result
        self._is_over = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def offer(self, result: WorkResult) -> bool:
        """Accept a result. Return False if its chunk has a result already or does not exist."""
        chunk = result.chunk
        if not 0 <= chunk < len(self.results) or self.results[chunk] is not None:
            return False
        self.results[chunk] = result
        self.missing -= 1
        self.arrivals_s[chunk] = time.perf_counter()
        if self.on_taken is not None:
            self.on_taken(result)
        if not self.missing and not self._is_over:
            self._is_over = True
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)
        return True

    def fail(self, error: Exception) -> None:
        """End the request with an error. Does nothing if all results have arrived."""
        if not self._is_over:
            self._is_over, self._error = True, error
            if self._waiter is not None:
                _wake(self._waiter)

    async def wait(self, timeout_s: float) -> None:
        """Wait until all results have arrived. Raises TimeoutError, or the argument of `fail`. One task may wait."""
        if not self._is_over:
            # `asyncio.wait` and `asyncio.timeout` take 4 to 6 us more
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, _wake, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
        if not self._is_over:
            raise TimeoutError
        if self._error is not None:
            # `fail_all` gives one error to many requests: each raise would add its frames to those of the others
            raise self._error.with_traceback(None)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class ResultInbox:
    """Inbox for the results of all open requests of this gateway. The subject of the inbox has 122 random bits, so
    nobody can guess the subject.
    """

    def __init__(
        self,
        bus: Bus,
        metrics: Metrics,
        fragments: Fragments | None = None,
        *,
        on_late: Callable[[WorkResult], None] = lambda result: None,
    ) -> None:
        """`on_late` is called with each result that arrives after its request has ended."""
        self.subject = f"sie.result.{uuid.uuid4().hex}"
        self._on_late = on_late
        self._bus = bus
        self._metrics = metrics
        self._open: dict[str, OutcomeCollector] = {}
        self._subscription: Subscription | None = None
        self._fragments = Fragments() if fragments is None else fragments
        # each check handles its own errors, so the callback for failed tasks does nothing
        self._checks = Tasks(_logger, lambda: None)
        self._threads = KeyTurns(CHECKING_THREADS)

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(
            f"{self.subject}.*",
            self._on_result,
            held_messages=HELD_MESSAGES,
            held_bytes=HELD_BYTES,
            on_dropped=self._on_dropped,
        )

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()
        await self._checks.cancel()

    def open(self, request: str, chunks: int, pool: str = "", key: str = "") -> OutcomeCollector:
        collector = self._open[request] = OutcomeCollector(request, f"{self.subject}.{request}", chunks, pool, key)
        return collector

    def close(self, collector: OutcomeCollector) -> None:
        self._open.pop(collector.request, None)
        if self._fragments.held.used:
            self._fragments.drop_request(collector.request)

    @property
    def unfinished_bytes(self) -> int:
        """Return the bytes that parts of incomplete results occupy."""
        return self._fragments.held.used

    def fail_pool(self, pool: str, error: SIEError) -> None:
        for collector in list(self._open.values()):
            if collector.pool == pool:
                collector.fail(error)

    def fail_all(self, error: SIEError) -> None:
        for collector in list(self._open.values()):
            collector.fail(error)

    def _on_dropped(self, subject: str) -> None:
        """Fail the request that a message names which the NATS client library dropped because its buffer was full. The
        worker would send the result again, but the request does not wait for this, because the buffer may be full
        again. Further results of the message are sent again, one by one.
        """
        self._metrics.inbox_dropped.inc()
        self._fail(
            subject.rpartition(".")[2],
            ResourceExhausted("this gateway could not accept a result of this request in time: try again"),
        )

    def _fail(self, request: str, error: SIEError) -> Verdict:
        """End a request with an error if the request is open. Return the verdict for the sender of the result."""
        if (collector := self._open.get(request)) is not None:
            collector.fail(error)
        return "unknown"

    async def _on_result(self, message: CoreMessage) -> None:
        """Handle a message of a worker and send the reply, except after the last part of a result: `_check` replies."""
        try:
            decoded = messages.decode_results(message.data)
        except UNDECODABLE as error:
            reply = _CONFIRMATIONS[self._unreadable(message.subject.rpartition(".")[2], error)]
        else:
            if isinstance(decoded, WorkResults):
                pairs = zip(decoded.requests, decoded.results, strict=True)
                reply = messages.encode(Confirmations(tuple([self._offer_encoded(*pair) for pair in pairs])))
            elif not isinstance(decoded, Fragment):
                reply = _CONFIRMATIONS[self._offer(decoded)]
            elif (verdict := self._keep(decoded, message.reply)) is None:
                return
            else:
                reply = _CONFIRMATIONS[verdict]
        if message.reply:
            failpoint("results.before_confirm")
            await self._bus.send(message.reply, reply)

    def _offer_encoded(self, request: str, data: bytes) -> Verdict:
        try:
            return self._offer(messages.decode_result(data))
        except UNDECODABLE as error:
            return self._unreadable(request, error)

    def _unreadable(self, request: str, error: Exception) -> Verdict:
        """Fail the request of a result that cannot be decoded: if sent again, the result would have the same bytes."""
        self._metrics.outcomes["undecodable"].inc()
        _logger.error("request %s failed, because a worker's result could not be decoded: %s", request, error)
        return self._fail(request, InternalFailure("the gateway could not read a result"))

    def _offer(self, result: WorkResult) -> Verdict:
        collector = self._open.get(result.request)
        verdict: Verdict = "unknown" if collector is None else "taken" if collector.offer(result) else "duplicate"
        self._metrics.outcomes[verdict].inc()
        if verdict == "unknown":
            self._on_late(result)
        if verdict == "taken":
            self._metrics.deliveries.observe(result.batch.deliveries)
        return verdict

    def _keep(self, part: Fragment, reply: str) -> Verdict | None:
        """Store a part of a result, and return the verdict for the worker that sent the part. Return None if all parts
        have arrived; then `_check` sends the verdict.
        """
        collector = self._open.get(part.request)
        if collector is None:
            return "unknown"
        if not 0 <= part.chunk < len(collector.results) or collector.results[part.chunk] is not None:
            return "duplicate"
        try:
            assembly = self._fragments.add(part, time.monotonic(), collector.key)
        except ValueError as error:
            return self._unreadable(part.request, error)
        except InboxFull as error:
            self._metrics.outcomes["no_room"].inc()
            self._fragments.drop_request(part.request)
            return self._fail(
                part.request,
                ResourceExhausted(
                    f"the gateway has no memory for the results of this request: {error}; send fewer inputs or "
                    "request fewer outputs"
                ),
            )
        if assembly.missing:
            return "part"
        if not assembly.checking:
            assembly.checking = True
            self._checks.start(self._check(assembly, reply), "check of a result")
        return None

    async def _check(self, assembly: Assembly, reply: str) -> None:
        """Join the parts of a result and deliver it to its request. If the result is damaged, send the verdict `part`:
        the worker then sends all parts again.
        """
        try:
            parts = [part for part in assembly.parts if part is not None]
            result = await self._threads.run(assembly.owner, partial(put_together, parts, assembly.digest))
            if (result.request, result.chunk) != (assembly.request, assembly.chunk):
                raise Damaged("the result belongs to another request")
            verdict = self._offer(result)
            failpoint("results.assembled")
        except Damaged as error:
            self._metrics.outcomes["damaged"].inc()
            _logger.error(
                "request %s: a result of %d parts is damaged, so the worker must send it again: %s",
                assembly.request,
                len(assembly.parts),
                error,
            )
            verdict = "part"
        except Exception:  # outermost handler of a task: the waiting request must get a reply
            _logger.exception("request %s: a result could not be joined from its parts", assembly.request)
            verdict = self._fail(assembly.request, InternalFailure("the gateway could not process a result"))
        finally:
            self._fragments.drop(assembly)
        if reply:
            try:
                await self._bus.send(reply, _CONFIRMATIONS[verdict])
            # only logged: a worker without a confirmation sends the last part again, and the inbox confirms that part
            except BrokerError as error:
                _logger.warning("request %s: a result was not confirmed to the worker: %s", assembly.request, error)
