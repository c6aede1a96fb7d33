"""Run of a planned request: check its inputs, split them into chunks, publish each chunk when it gets a permit for the
queue, and collect the results.

    check items ─► chunks ─► admission ─► publish, as permits are granted ─► results ─► RequestResult
                                             └ on any failure: withdraw the messages without a result from the queue

A chunk has consecutive inputs of a request and becomes one queue message. Its cost, its message and its result
have limits.

    items, query, options ──plan──► sizes ──► upper bounds of the result sizes ──split──► chunks
                              └ too large for any message or reply: PayloadTooLarge
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol

import msgspec

from sie_contracts.errors import (
    CONFIG_CHANGED,
    ErrorInfo,
    GatewayTimeout,
    InternalFailure,
    InvalidInput,
    NotFound,
    PayloadTooLarge,
    SIEError,
)
from sie_contracts.media import documents
from sie_contracts.media.images import MAX_DECODED_PIXELS
from sie_contracts.models import families
from sie_contracts.models.costs import ImageCost
from sie_contracts.models.entries import ModelEntry, is_joinable
from sie_contracts.models.options import TOKEN_STATES
from sie_contracts.models.output_schemas import decisions_of, parts_of, questions_of
from sie_contracts.wire import messages
from sie_contracts.wire.messages import Failed, Input, Operation, RunOptions, TextChunks, WorkItem, WorkResult
from sie_gateway.admission.admission import Admission, Permits
from sie_gateway.fleet.demand import ColdStarts
from sie_gateway.inference import chunk_fields, telemetry
from sie_gateway.inference.body import MAX_BODY_BYTES, RequestItem, all_plain, has_images, input_of
from sie_gateway.inference.call import CACHE, Call, EntryChanged, cache_mode
from sie_gateway.inference.entities import mentions
from sie_gateway.inference.images import pixels
from sie_gateway.inference.results import (
    Chunk,
    InferRequest,
    OutcomeCollector,
    RequestResult,
    ResultInbox,
    charged_tokens,
    work_of,
)
from sie_gateway.metrics import Metrics
from sie_gateway.streams.publish import StreamPosition, WorkQueue
from sie_runtime.failpoints import failpoint
from sie_runtime.feed import CatalogueFeed

# bytes of a token of English text in UTF-8: an estimate only for the split of requests; the sidecar counts the tokens
BYTES_PER_TOKEN = 4
SPECIAL_TOKENS = 2
ITEM_RESULT_OVERHEAD_BYTES = 64  # bytes of a result in addition to its values
EXTRACTED_TOKEN_BYTES = 64  # estimated bytes that an extraction returns for each token of a text
LABEL_RESULT_BYTES = 48  # bytes of a class in a result in addition to the name of the class
TOKENIZED_BYTES = 48  # bytes of a token in a result: its id, its text and its position
SPARSE_IDS_PER_TOKEN = 32  # estimated number of weights in a sparse vector for each token of a text
# options of at most this number of encoded bytes do not count in the size of a message: HEADROOM_BYTES in
# `streams/publish` reserves space for them
BARE_OPTIONS_BYTES = 64
# largest number of bytes of the inputs of a chunk whose query takes more than half of a message; the payload store
# holds the query and inputs of such a chunk
STORED_CHUNK_BYTES = 8 << 20
MAX_RESULT_BYTES = 1 << 30  # largest number of bytes of all results of a request
MAX_PIXELS = 400_000_000  # largest number of pixels in all images of a request
PIXELS_STEP = 16  # number of image headers that are read before the event loop may run other tasks


class ItemFiles(NamedTuple):
    """Files of an input. `images`: number of images and sounds that the model reads for the input, including the files
    of the query. `own_bytes`: bytes of the files of the input itself, without those of the query. `document`: cost of
    the input's document in tokens.
    """

    images: int = 0
    own_bytes: int = 0
    document: int = 0


class TextParts(NamedTuple):
    """Size of an input's text. `longest`: upper bound of its number of tokens. `vectors`: number of its chunks; 1 for a
    text without chunks.
    """

    longest: int
    vectors: int = 1


_NO_FILES, _IMAGE = ItemFiles(), ImageCost()
_NO_PARTS: Mapping[int, TextParts] = MappingProxyType({})


class ChunkLimits(NamedTuple):
    """Limits of one chunk: estimated tokens, bytes of its inputs in the message, bytes of its results. `any_size`: true
    if the payload store takes an input above `payload_bytes`.
    """

    cost: int
    payload_bytes: int
    result_bytes: int
    any_size: bool = False


def plan(
    items: Sequence[RequestItem],
    query: RequestItem | None,
    operation: Operation,
    entry: ModelEntry,
    run: RunOptions,
    limits: ChunkLimits,
    image: ImageCost = _IMAGE,
    *,
    name: str = "items",
    positions: Sequence[int] | None = None,
) -> tuple[list[Chunk], int]:
    """Return the chunks of a request, and the bytes of its items. `image`: cost of an image or a sound. `name`: field
    with the inputs, for errors. `positions`: indices of `items` in this field, if they are not all inputs. Raises
    PayloadTooLarge.
    """
    query_bytes = query.size if query else 0
    # `shared_bytes`: bytes that every message of the request has in addition to its inputs
    options_bytes = len(messages.encode(run))
    shared_bytes = query_bytes + (options_bytes if options_bytes > BARE_OPTIONS_BYTES else 0)
    inline_bytes = limits.payload_bytes
    payload_bytes = inline_bytes - shared_bytes
    is_query = query_bytes > shared_bytes // 2
    if payload_bytes < inline_bytes // 2:
        # The payload store can take the query, but the options are always in the message. So refuse the request if
        # there is no payload store, or if the options alone take more than half of the message.
        if not limits.any_size or shared_bytes - query_bytes > inline_bytes // 2:
            limit = inline_bytes // 2
            shared = "query" if is_query else "labels" if run.labels else "instruction"
            raise PayloadTooLarge(f"{shared}: at most {limit} bytes are allowed", param=shared, extras={"limit": limit})
        payload_bytes = STORED_CHUNK_BYTES
    item_sizes = [item.size for item in items]
    limit = MAX_BODY_BYTES if limits.any_size else payload_bytes
    if max(item_sizes, default=0) > limit:
        raise _too_large(item_sizes, limit, name, range(len(items)) if positions is None else positions)
    max_tokens = entry.max_tokens
    item_bytes, token_bytes = result_bytes(operation, entry, run)
    is_plain = all_plain(items, query)
    files = [] if is_plain else _files(items, query)
    parts = _NO_PARTS if is_plain else _chunked_parts(items, max_tokens)
    whole = TextParts(max_tokens)
    expected_bytes = item_bytes * len(item_sizes)
    for text in parts.values():
        expected_bytes += item_bytes * (text.vectors - 1)
    if token_bytes:
        expected_bytes += token_bytes * sum(
            estimated_tokens(size - own.own_bytes, parts.get(index, whole).longest)
            + own.images * image.vectors
            + own.document
            for index, (size, own) in enumerate(zip(item_sizes, files or itertools.repeat(_NO_FILES), strict=False))
        )
    if expected_bytes > MAX_RESULT_BYTES:  # the gateway keeps all results in memory until its reply is sent
        limit = MAX_RESULT_BYTES >> 20
        message = (
            f"{name}: the reply would have about {expected_bytes >> 20} MiB of results, at most {limit} are allowed: "
            "send fewer inputs"
        )
        raise PayloadTooLarge(message, param=name, extras={"limit": MAX_RESULT_BYTES})
    shared_text_bytes = shared_bytes - (query.file_bytes if query else 0)
    chunks = split(
        item_sizes,
        max_tokens=max_tokens,
        item_result_bytes=item_bytes,
        token_result_bytes=token_bytes,
        limits=limits._replace(payload_bytes=payload_bytes),
        rows=_rows(entry, run) if run.labels or run.parameters else 1,
        each_tokens=estimated_tokens(shared_text_bytes, max_tokens) if shared_text_bytes else 0,
        files=files,
        image=image,
        parts=parts,
    )
    if shared_bytes * len(chunks) > MAX_BODY_BYTES:
        shared = "query" if is_query else "instruction"
        message = (
            f"{shared}: its {shared_bytes} bytes are in each of the {len(chunks)} messages of this request; all copies "
            f"together may have at most {MAX_BODY_BYTES} bytes"
        )
        raise PayloadTooLarge(message, param=shared, extras={"limit": MAX_BODY_BYTES // len(chunks)})
    if operation in ("tokenize", "decode"):  # these operations do not use the device: a chunk costs only 1 token
        chunks = [msgspec.structs.replace(piece, cost=1, squares=0) for piece in chunks]
    return chunks, sum(item_sizes)


def _too_large(item_sizes: Sequence[int], limit: int, name: str, positions: Sequence[int]) -> PayloadTooLarge:
    """Return the error for the first item above `limit` bytes."""
    remedy = "" if limit >= MAX_BODY_BYTES else "; if SIE_PAYLOAD_STORE_URL is set, larger items are allowed"
    position, size = next(pair for pair in zip(positions, item_sizes, strict=True) if pair[1] > limit)
    message = f"{name}[{position}]: {size} bytes, one item may have at most {limit}{remedy}"
    return PayloadTooLarge(message, param=f"{name}[{position}]", extras={"limit": limit})


def _rows(entry: ModelEntry, run: RunOptions) -> int:
    """Return how many times the model reads the text of an input. A run with neither labels nor parts of an extraction
    schema reads it once. For any other run, the model's family decides: once for each question, once for each label, or
    once for each part of the schema and once more for all labels together.
    """
    parts = len(run.parameters.get("parts", ()))
    if not parts and not run.labels:
        return 1
    family = families.row(entry.family)
    if family.reads_questions:
        return len(questions_of(run))
    return len(run.labels) if run.labels and family.has_row_per_label else parts + bool(run.labels)


def _chunked_parts(items: Sequence[RequestItem], max_tokens: int) -> dict[int, TextParts]:
    """Return the TextParts of each text with chunks, by the index of its input. The model reads a text with chunks as a
    whole, even if it has more than `max_tokens` tokens.
    """
    parts = {}
    for index, item in enumerate(items):
        if item.chunks is not None:
            tokens = item.size // BYTES_PER_TOKEN + SPECIAL_TOKENS
            parts[index] = TextParts(max(max_tokens, item.size), chunk_fields.estimated_chunks(item.chunks, tokens))
    return parts


def _files(items: Sequence[RequestItem], query: RequestItem | None) -> list[ItemFiles]:
    """Return the files of each input; empty if neither inputs nor query have files. The files of the query count for
    each input, because the model reads the query with each input.
    """
    shared = len(query.files) if query else 0
    for item in items:
        if item.images or item.audio or item.document is not None:
            break
    else:
        if not shared:
            return []
    return [
        ItemFiles(
            len(item.images) + bool(item.audio) + shared,
            item.file_bytes,
            0 if item.document is None else documents.cost(len(item.document.data)),
        )
        for item in items
    ]


def estimated_tokens(size_bytes: int, max_tokens: int) -> int:
    return min(max_tokens, size_bytes // BYTES_PER_TOKEN + SPECIAL_TOKENS)


def result_bytes(operation: Operation, entry: ModelEntry, run: RunOptions) -> tuple[int, int]:
    """Return the estimated size of a result, as a pair: bytes for each input, and bytes for each token of an input."""
    if operation in ("tokenize", "decode"):
        return ITEM_RESULT_OVERHEAD_BYTES, TOKENIZED_BYTES
    if operation == "extract":
        decisions = decisions_of(parts_of(run.parameters))
        labels = [*run.labels] if "classifications" in entry.outputs else []
        labels += [label for decision in decisions for label in decision.classes]
        size = sum(len(label.encode()) + LABEL_RESULT_BYTES for label in labels)
        return ITEM_RESULT_OVERHEAD_BYTES + size, EXTRACTED_TOKEN_BYTES
    values = token_values = 0
    for name in run.outputs if operation == "encode" else ():
        if name == "dense":
            values = run.muvera.width(entry.outputs["multivector"]) if run.muvera else entry.outputs["dense"]
        else:
            width = entry.outputs["dense" if name == TOKEN_STATES else name]
            token_values += 2 * SPARSE_IDS_PER_TOKEN if name == "sparse" else width
    return ITEM_RESULT_OVERHEAD_BYTES + 4 * values, 4 * token_values


async def check_pixels(items: Sequence[RequestItem], query: RequestItem | None, name: str) -> None:
    """Raise PayloadTooLarge if the images have too many pixels in total. The time to decode an image depends on its
    pixels, and even a small file may have many pixels. An image that is too large for a worker does not count, because
    the worker rejects the image without decoding it. `name`: name of the field with the inputs.
    """
    total = 0
    files = (file for item in (*items, *filter(None, (query,))) for file in item.images)
    for number, file in enumerate(files, 1):
        count = pixels(file)
        total += count if count <= MAX_DECODED_PIXELS else 0
        if number % PIXELS_STEP == 0:
            await asyncio.sleep(0)
    if total > MAX_PIXELS:
        message = (
            f"{name}: the images have {total} pixels in all, at most {MAX_PIXELS} are allowed: send fewer images in a "
            "request"
        )
        raise PayloadTooLarge(message, param=name, extras={"limit": MAX_PIXELS})


def split(
    sizes_bytes: Sequence[int],
    *,
    max_tokens: int,
    item_result_bytes: int,
    limits: ChunkLimits,
    token_result_bytes: int = 0,
    each_tokens: int = 0,
    rows: int = 1,
    files: Sequence[ItemFiles] = (),
    image: ImageCost = _IMAGE,
    parts: Mapping[int, TextParts] = _NO_PARTS,
) -> list[Chunk]:
    """Split inputs of these sizes into chunks. Each chunk has at least one input. A chunk of several inputs is within
    the limits.

    The result of an input has at most `item_result_bytes`, plus `token_result_bytes` for each token. For this upper
    bound, each byte of the input counts as a token. `each_tokens`: number of tokens that are added to every input, for
    example the tokens of a query. Each input becomes `rows` rows of a batch. `files`: the files of each input, if there
    are any. `image`: cost of an image or a sound. `parts`: result of `_chunked_parts`.
    """
    chunks: list[Chunk] = []
    start = cost = squares = payload = result = 0
    whole = TextParts(max_tokens)
    for index, size in enumerate(sizes_bytes):
        longest, vectors = parts.get(index, whole)
        own = files[index] if files else _NO_FILES
        text, shown = size - own.own_bytes, own.images * image.tokens + own.document
        length = min(longest, text // BYTES_PER_TOKEN + SPECIAL_TOKENS + each_tokens)
        tokens = rows * length + shown
        expected = item_result_bytes * vectors + token_result_bytes * (
            min(longest, text + SPECIAL_TOKENS + each_tokens) + own.images * image.vectors + own.document
        )
        full = (
            cost + tokens > limits.cost
            or payload + size > limits.payload_bytes
            or result + expected > limits.result_bytes
        )
        if full and index > start:
            chunks.append(Chunk(start, index, cost, squares))
            start, cost, squares, payload, result = index, 0, 0, 0, 0
        cost += tokens
        squares += rows * length * min(length, max_tokens) + own.images * image.tokens * image.tokens
        payload += size
        result += expected
    if start < len(sizes_bytes):
        chunks.append(Chunk(start, len(sizes_bytes), cost, squares))
    return chunks


CHECK_AGAIN_S = 1.0  # seconds between two checks in `Runner._wait_on`
_NONE_REFUSED: Mapping[int, Failed] = MappingProxyType({})
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
        request: InferRequest,
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
        self._takers: dict[tuple[str, Operation], str] = {}  # results of `_takers_of` for the present catalogue
        feed.on_change(self._takers.clear)

    def use_cache(self, cache: AnswerCache) -> None:
        """Run requests with `cache`. Without one, workers compute all inputs."""
        self._cache = cache

    def refused(self, request: InferRequest) -> dict[int, Failed]:
        """Return the failures of items that the model cannot run, by index. A worker may reject further items."""
        refused = {}
        for index, item in enumerate(request.items):
            if (failure := self._unusable(item, request)) is not None:
                refused[index] = failure
        return refused

    def _unusable(self, item: RequestItem, request: InferRequest) -> Failed | None:
        """Return the failure of an item that this model cannot run; None if the item passes all checks."""
        if item.modalities and (fault := self._foreign(item, request)) is not None:
            return Failed(fault)
        if item.unfit is not None:
            return Failed(item.unfit)
        if item.text is None and item.is_empty:
            message = f"text: missing{item.instead}"
            return Failed(ErrorInfo("INVALID_INPUT", message, reason="empty_item", param="text"))
        if item.chunks is not None and (fault := self._fault_of_chunks(item.chunks, request)) is not None:
            return Failed(fault)
        if _reads_mentions(request):
            try:
                mentions(item)
            except InvalidInput as error:
                return Failed(error.info())
        return None

    def _foreign(self, item: RequestItem, request: InferRequest) -> ErrorInfo | None:
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
            models = self._takers_of(foreign, request.operation)
            message += (
                f"; models that take it: {models}" if models else f"; no model here takes it for {request.operation}"
            )
        return ErrorInfo("INVALID_INPUT", message, reason="unsupported_modality")

    def _fault_of_chunks(self, chunks: TextChunks, request: InferRequest) -> ErrorInfo | None:
        """Return the error if this model returns no vectors of chunks; the error names models that return them. Return
        None if the gateway finds no fault. If the entry has no `pooling`, only the worker can check the pooling.
        """
        entry, run = request.resolved.entry, request.options.run
        if request.operation != "encode":
            return ErrorInfo(
                "INVALID_INPUT", "chunks: only encode supports them", reason="unsupported_task", param="chunks"
            )
        if entry.family != CHUNKED_FAMILY:
            message = f"chunks: {entry.id} gives no vectors of chunks{self._models_with_chunks()}"
            return ErrorInfo("INVALID_INPUT", message, reason="unsupported_modality", param="chunks")
        is_pooled = chunks.context and "dense" in run.outputs and run.muvera is None
        if is_pooled and run.pooling and not is_joinable(run.pooling):
            message = (
                f"chunks: the pooling of {entry.id} is {run.pooling}, and with context the dense vector of a chunk is "
                f"a mean or maximum over its tokens{self._models_with_chunks()}; without context, every pooling works"
            )
            return ErrorInfo("INVALID_INPUT", message, reason="unsupported_pooling", param="chunks")
        return None

    def _models_with_chunks(self) -> str:
        models = self._takers_of("chunks", "encode")
        return f"; models that support chunks: {models}" if models else "; no model here supports chunks"

    def _takers_of(self, kind: str, operation: Operation) -> str:
        """Return the names of the first few models that accept an operation on inputs of this kind (see `_accepts`)."""
        key = kind, operation
        if key not in self._takers:
            entries = self._feed.catalogue.entries.values()
            names = (entry.id for entry in entries if _accepts(entry, kind, operation))
            self._takers[key] = ", ".join(heapq.nsmallest(MAX_TAKERS, names))
        return self._takers[key]

    async def run(self, call: Call, request: InferRequest) -> RequestResult:
        """Publish the items that the model can run, wait for their results, and add the failures of the other items.
        Raises SIEError, and EntryChanged if the catalogue or a worker has another entry of the model than the request.
        """
        items: Sequence[RequestItem] = request.items
        runnable: Sequence[int] = range(len(items))
        refused: Mapping[int, Failed] = _NONE_REFUSED
        # every model takes a plain text; a model of extraction may also read its metadata
        if request.operation == "extract" or not all_plain(items, request.query):
            if request.query is not None and (failed := self._unusable(request.query, request)) is not None:
                error = failed.error
                if error.param.startswith("query"):  # the message already names the query
                    raise InvalidInput(error.message, reason=error.reason, param=error.param)
                raise InvalidInput.at("query", f"{error.message}", reason=error.reason)
            refused = self.refused(request)
            if refused:
                runnable = [index for index in runnable if index not in refused]
                if not runnable:
                    return RequestResult(request, refused)
                items = [items[index] for index in runnable]
            if _reads_mentions(request):
                items = [msgspec.structs.replace(item, mentions=mentions(item)) for item in items]
        if self._cache is not None:
            return await self._cache.run(call, request, refused, runnable, items, self._computed)
        if "x-sie-cache" in call.headers and cache_mode(call.headers) == "only":
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
        limits = ChunkLimits(self._admission.chunk_cost(lane, priority, resolved.residency), *self._queue.limits())
        with_images = not all_plain(items, request.query) and has_images(items, request.query)
        if with_images:
            await check_pixels(items, request.query, request.inputs_field)
        chunks, size_bytes = plan(
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
        catalogue, entry = self._feed.catalogue, resolved.entry
        if (now := catalogue.entries.get(entry.id)) is not entry and now != entry:
            raise EntryChanged(entry)
        revision = catalogue.revisions.get(entry.id, 0)
        costs, squares = [piece.cost for piece in chunks], [piece.squares for piece in chunks]
        deadline_s = call.received_s + call.budget_s
        left_s = deadline_s - time.perf_counter()
        permits = self._admission.admit(
            call.grant.key,
            lane,
            priority,
            resolved.residency,
            costs,
            size_bytes,
            left_s,
            call.digest,
            call.work_id,
            squares,
            judge=True,
        )
        published_s = time.perf_counter()
        try:
            if call.charge is not None:
                shared = request.query.least_charge if request.query else 0
                least = [item.least_charge + shared for item in items]
                call.charge.spend(max(sum(costs), sum(least)), request.inputs_field)
            if permits.is_cold:
                self._cold.requested(lane)
            collector = self._inbox.open(call.work_id, len(chunks), lane.pool, call.grant.key)
            try:
                collector.on_taken = partial(_release_permit, permits, collector, entry, chunks, on_chunk)
                permits.on_refused = collector.fail
                query = None if request.query is None else input_of(request.query)
                asker = call.grant.name if with_images else ""
                build = partial(_work_item, call, collector, request, items, positions, chunks, query, revision, asker)
                sent: dict[int, StreamPosition] = {}
                rest: asyncio.Task[None] | None = None
                publish = partial(self._publish, request, permits, build, deadline_s, sent)
                try:
                    if granted := permits.pop():
                        await publish(granted)
                    if len(granted) < len(chunks):
                        rest = asyncio.create_task(_publish_further(publish, permits, collector), name="publishing")
                    finished.publish_ms = (time.perf_counter() - published_s) * 1000
                    hold_s = min(call.budget_s, self._load_hold_s if call.dialect.holds else 0.0)
                    try:
                        await collector.wait(max(0.0, call.received_s + hold_s - time.perf_counter()))
                    except TimeoutError:
                        await self._wait_on(call, request, collector, hold_s, was_hosted=not permits.is_cold)
                    if rest is not None:  # a result may arrive before the broker has acknowledged the last message
                        await rest
                except BaseException:
                    self._queue.undo(self._withdraw(lane.pool, sent, rest, collector))
                    raise
            finally:
                self._inbox.close(collector)
        finally:
            self._admission.end(permits)
        results = [result for result in collector.results if result is not None]
        self._metrics.result_wait[request.operation].observe(max(collector.arrivals_s) - published_s)
        waits_ms = [(arrival_s - published_s) * 1000 for arrival_s in collector.arrivals_s]
        finished.add_results(positions, chunks, results, waits_ms)
        if call.span is not None:
            telemetry.trace_chunks(call.span, published_s, finished.publish_ms, results, waits_ms)
        if call.charge is not None:
            call.charge.settle(charged_tokens(least, results))
        self._metrics.used(call.grant.name, *work_of(results))
        return results

    async def _publish(
        self,
        request: InferRequest,
        permits: Permits,
        build: Callable[[int], WorkItem],
        deadline_s: float,
        sent: dict[int, StreamPosition],
        chunks: list[int],
    ) -> None:
        """Publish chunks that have permits, and store the positions of their messages in `sent`."""
        failpoint("gateway.before_publish")
        work = [build(number) for number in chunks]
        stored = await self._queue.publish(request.lane, work, deadline_s)
        sent.update(zip(chunks, stored, strict=True))
        failpoint("gateway.published")
        tokens = sum([permits.tokens[number] for number in chunks])
        self._admission.peers.sent(request.lane, request.priority, len(work), tokens)

    async def _withdraw(
        self,
        pool: str,
        sent: Mapping[int, StreamPosition],
        rest: asyncio.Task[None] | None,
        collector: OutcomeCollector,
    ) -> None:
        """Stop publishing, and remove the messages without a result from the queue."""
        if rest is not None:
            rest.cancel()
            await asyncio.gather(rest, return_exceptions=True)
        failpoint("gateway.before_withdraw")
        missing = [position for number, position in sent.items() if collector.results[number] is None]
        await self._queue.withdraw(pool, missing, collector.request if missing else "")

    async def _wait_on(
        self, call: Call, request: InferRequest, collector: OutcomeCollector, waited_s: float, *, was_hosted: bool
    ) -> None:
        """Wait for all results until the end of the budget, of which `waited_s` seconds are over, and call
        `ColdStarts.check` every CHECK_AGAIN_S seconds. `was_hosted`: a worker had the model loaded when the request was
        admitted, so the request may wait longer (see `check`). Raises ModelLoading, NotProvisioned, GatewayTimeout, and
        the error that was passed to `OutcomeCollector.fail`.
        """
        deadline_s = call.received_s + call.budget_s
        until_s = call.received_s + waited_s
        while True:
            was_hosted = self._cold.check(request.lane, request.resolved.residency, was_hosted=was_hosted)
            if until_s >= deadline_s:
                raise GatewayTimeout(f"no result within the budget of {call.budget_s:g} s")
            now_s = time.perf_counter()
            until_s = min(deadline_s, now_s + CHECK_AGAIN_S)
            with contextlib.suppress(TimeoutError):
                await collector.wait(max(0.0, until_s - now_s))
                return


async def _publish_further(
    publish: Callable[[list[int]], Awaitable[None]], permits: Permits, collector: OutcomeCollector
) -> None:
    """Publish the other chunks in the order in which their permits are granted. An error fails the request."""
    try:
        while not permits.complete:
            await publish(await permits.more())
    except SIEError as error:
        collector.fail(error)
    except Exception:  # outermost handler of a task: the request of this task must get the error
        _logger.exception("request %s could not be published", collector.request)
        collector.fail(InternalFailure("the gateway failed while it queued this request"))


def not_cached(count: int) -> NotFound:
    """Return the error for a request with `X-SIE-Cache: only` in which `count` inputs have no cached answer."""
    return NotFound(f"{CACHE} is `only`, but {count} inputs have no cached answer", reason="not_cached", param=CACHE)


def _work_item(
    call: Call,
    collector: OutcomeCollector,
    request: InferRequest,
    items: Sequence[RequestItem],
    positions: Sequence[int],
    chunks: Sequence[Chunk],
    query: Input | None,
    revision: int,
    asker: str,
    number: int,
) -> WorkItem:
    """Return the message of a chunk. Its budget is the time left until the request's deadline, so the message is built
    just before it is published, perhaps when the next attempt of the call has begun: its id is that of the `collector`
    of its attempt. `asker`: name of the API key; empty if the request has no images, because workers use the name only
    for images.
    """
    resolved, piece = request.resolved, chunks[number]
    left_s = call.received_s + call.budget_s - time.perf_counter()
    return WorkItem(
        request=collector.request,
        chunk=number,
        model=resolved.entry.id,
        revision=resolved.revision,
        operation=request.operation,
        inputs=tuple([input_of(item) for item in items[piece.start : piece.stop]]),
        options=request.options.run,
        reply=collector.reply,
        budget_ms=max(1, int(left_s * 1000)),
        first=positions[piece.start],
        profile=resolved.profile,
        config_revision=revision,
        priority=request.priority,
        cost=piece.cost,
        traceparent=call.context.traceparent,
        query=query,
        # metrics of workers count /v1/embeddings as an endpoint of its own, although its operation is encode
        endpoint="embeddings" if call.labels.get("endpoint") == "embeddings" else "",
        tracestate=call.context.tracestate,
        asker=asker,
        together=True,
    )


def _release_permit(
    permits: Permits,
    collector: OutcomeCollector,
    entry: ModelEntry,
    chunks: Sequence[Chunk],
    on_chunk: OnChunk | None,
    result: WorkResult,
) -> None:
    """Release the permit of a chunk whose result has arrived. Call `on_chunk` if the result has an outcome for each
    input. If the result reports another revision of the model's entry, end the attempt with EntryChanged.
    """
    permits.result_arrived(result)
    for outcome in result.outcomes:
        if isinstance(outcome, Failed) and outcome.error.reason == CONFIG_CHANGED:
            collector.fail(EntryChanged(entry))
    if on_chunk is not None:
        piece = chunks[result.chunk]
        if len(result.outcomes) == piece.stop - piece.start:
            on_chunk(piece.start, result)


def _accepts(entry: ModelEntry, kind: str, operation: Operation) -> bool:
    """Return True if a model supports an operation on inputs of a kind: a modality, or `chunks` with context. Models
    whose dense vectors are a mean or a maximum over tokens support the latter.
    """
    if kind != "chunks":
        return kind in entry.inputs and operation in entry.tasks
    return entry.family == CHUNKED_FAMILY and "dense" in entry.outputs and is_joinable(entry.run.pooling or "")


def _reads_mentions(request: InferRequest) -> bool:
    return request.operation == "extract" and families.row(request.resolved.entry.family).reads_mentions
