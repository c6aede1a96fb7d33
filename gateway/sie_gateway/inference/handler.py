"""Handling of an inference request, from its route to its reply.

    answer: resolve the model's name ─► read the body ─► handler of the API format ─► run
    run:    choose the lane ─► merge options ─► Runner: check items ─► split ─► admit ─► publish ─► collect

A lane is a pool, a machine profile and a bundle. All checks of the gateway run before `publish`, so a refused request
never makes a worker load a model.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from sie_contracts import plain
from sie_contracts.errors import (
    CONFIG_CHANGED,
    ErrorInfo,
    GatewayTimeout,
    InvalidInput,
    ModelNotFound,
    NotReady,
    QueueFull,
)
from sie_contracts.models import families
from sie_contracts.models.catalogue import Catalogue, Resolved
from sie_contracts.models.entries import ModelEntry
from sie_contracts.models.options import RequestOptions, Side, run_options
from sie_contracts.settings import Settings
from sie_contracts.wire import topology
from sie_contracts.wire.heartbeats import Heartbeat
from sie_contracts.wire.messages import Operation, Priority
from sie_contracts.wire.topology import Lane
from sie_gateway.admission.admission import Admission
from sie_gateway.admission.model_queue import AnswerPace, SharedLimit
from sie_gateway.admission.slots import KeyTurns
from sie_gateway.fleet.capabilities import CAN, Able, any_model
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.http.route_kinds import GatewayRoute
from sie_gateway.inference import body as bodies
from sie_gateway.inference.body import RequestItem
from sie_gateway.inference.call import (
    CACHE,
    MAX_KEY_CHARS,
    ROUTE_KEY,
    BodyReader,
    Call,
    ClientGone,
    EncodedReply,
    EntryChanged,
    cache_mode,
    decode_body,
    route_key,
)
from sie_gateway.inference.reattach import Attachments
from sie_gateway.inference.results import UNMERGED, InferRequest, RequestResult
from sie_gateway.inference.runner import Runner
from sie_gateway.inference.shadow import Shadows
from sie_gateway.metrics import Metrics
from sie_runtime.feed import CatalogueFeed
from sie_runtime.http.asgi import Send, reply
from sie_runtime.http.routes import FORM

BODY_THREADS = 2  # threads that read large bodies
WATCH_AFTER_S = 1.0  # a run must take this many seconds before the gateway checks whether its client disconnects
MAX_ATTEMPTS = 4  # largest number of restarts of a request because the catalogue entry of its model has changed
RENEWED_WITHIN_S = 1.0  # longest wait in seconds for a catalogue entry that a worker has and this gateway lacks
MAX_NAMES = 1024  # largest number of names of models that are cached with their entries
_HUB_ID = re.compile(r"[a-zA-Z0-9][\w.-]*/[\w.-]+", re.ASCII)
_NO_PARAMETERS = frozenset({"items", "inputs", "input", "query", "model"})


class ImageFetcher(Protocol):
    """Fetches the images at the URLs of requests."""

    def check(self, items: Sequence[RequestItem], query: RequestItem | None) -> None:
        """Raise InvalidInput for a URL that may not be fetched, before the request is queued."""

    def fetched(
        self, items: Sequence[RequestItem], until_s: float, key: str, name: str
    ) -> AbstractAsyncContextManager[Sequence[RequestItem]]:
        """Return a context with the items, which have files in place of their URLs, or the reason in `unfit`.
        `until_s`: deadline on the event loop's clock. `key`: API key of the request. `name`: field with the inputs, for
        errors. Entering the context raises PayloadTooLarge, QueueFull.
        """


class Inference:
    """Handles inference requests. `shadows` sends copies of some requests to a second model. `away` lets a run continue
    for some seconds after its client has disconnected.
    """

    def __init__(
        self,
        settings: Settings,
        feed: CatalogueFeed,
        fleet: Fleet,
        pools: Collection[str],
        metrics: Metrics,
        admission: Admission,
        runner: Runner,
    ) -> None:
        self._settings = settings
        self._feed = feed
        self._fleet = fleet
        self._pools = pools
        self._metrics = metrics
        self._admission = admission
        self._runner = runner
        self._fetcher: ImageFetcher | None = None
        self.max_budget_s = settings.gateway_request_timeout  # longest time in seconds from request to reply
        # capability, such as `embed` -> model for requests that need this capability and name no model
        self.default_models: Mapping[str, str] = dict(settings.default_models or ())
        self._plain: dict[tuple[str, str, Operation, str, Side], tuple[ModelEntry, RequestOptions]] = {}
        self._resolved: dict[str, Resolved] = {}  # models of the present catalogue by the names of requests
        self.shadows = Shadows(lambda: feed.catalogue, fleet, admission, metrics, self.run)
        self.away = Attachments()
        self.watch_after_s = WATCH_AFTER_S
        # runs whose clients are not watched for a disconnect yet, with their calls and start times, the oldest first
        self._unwatched: dict[asyncio.Task[Any], tuple[Call, float]] = {}
        self._is_timed = False  # true if a call of `_watch` is scheduled
        self.slots = SharedLimit(settings.max_concurrent_requests)  # limits the requests in progress
        self._pace = AnswerPace()
        self.idle = asyncio.Event()  # set while no request is in progress
        self.idle.set()
        # Threads for work that computes for seconds, and for bodies of requests. While n of them are busy, the event
        # loop gets 1/(n + 1) of the interpreter's time.
        self.one_thread = KeyTurns(1)
        self.body_threads = KeyTurns(BODY_THREADS)
        feed.on_change(self._on_catalogue)

    def use_fetcher(self, fetcher: ImageFetcher) -> None:
        """Fetch images at URLs with `fetcher`. Without one, requests with URLs are refused."""
        self._fetcher = fetcher

    @property
    def catalogue(self) -> Catalogue:
        """Return the catalogue of models. Raises NotReady before it is loaded."""
        if not self._feed.first.is_set():
            raise NotReady("the catalogue is not loaded yet")
        return self._feed.catalogue

    def workers_of(self, bundle: str) -> list[Heartbeat]:
        return [beat for beat in self._fleet.healthy() if beat.bundle == bundle]

    def max_items(self, call: Call) -> int:
        """Return the largest number of inputs of a request: the smaller of the key's limit and the gateway's limit."""
        most = self._settings.max_items_per_request
        return min(most, call.grant.limits.items or most)

    def resolve(self, spec: str, call: Call | None = None, able: Able = any_model) -> Resolved:
        """Return the model that a request names. For an alias, `route_key(call)` selects one of its targets. The error
        for an unknown name suggests models for which `able` returns True. If the name looks like a model of a company
        in `_FOREIGN`, the error suggests loaded models. Otherwise it suggests models with similar names. Raises
        NotReady before the catalogue is loaded, InvalidInput, ModelNotFound, BundleConflict.
        """
        if (resolved := self._resolved.get(spec)) is not None:
            return resolved
        catalogue = self.catalogue
        if ".." in spec.split("/"):
            raise InvalidInput.at("model", "'..' is not part of any name")
        try:
            resolved = catalogue.resolve(spec.removesuffix("/"), route_key(call) if catalogue.aliases else "")
        except ModelNotFound as error:
            if "suggestions" in error.extras:
                name = spec.rpartition(":/")[2].partition("@")[0].partition(":")[0]
                owner = next((owner for start, owner in _FOREIGN.items() if name.startswith(start)), "")
                like = self._loaded(catalogue, able) if owner else catalogue.near(name, able)
                error.extras["suggestions"] = like
                error.message += _foreign(name, owner, like) if owner else _remedy(name, like)
            raise
        if not resolved.alias:
            if len(self._resolved) >= MAX_NAMES:
                self._resolved.clear()
            self._resolved[spec] = resolved
        return resolved

    def _loaded(self, catalogue: Catalogue, able: Able) -> list[str]:
        loaded = {status.model for beat in self._fleet.healthy() for status in beat.models if status.state == "loaded"}
        entries = (catalogue.find(name) for name in sorted(loaded))
        return [entry.id for entry in entries if entry is not None and able(entry)][:2]

    async def answer(self, call: Call, route: InferenceRoute, reader: BodyReader, send: Send) -> None:
        """Handle a request of an inference route, and send the reply. If the path names a model, resolve the name
        before the body is read, so that a client with a wrong name need not upload its body.

        The request counts as in progress until its reply is sent, because its results occupy memory until that time. To
        limit slow uploads, the budget of the request includes the time to read its body.
        """
        headers, key = call.headers, call.grant.key
        call.resolved = self._resolved.get(call.model or "")
        if call.resolved is None:
            self._resolve(call, route)
        if not _CHECKED.isdisjoint(headers):
            _check_headers(headers)
        call.budget_s = self._budget_s(headers) if "x-sie-timeout-ms" in headers else self.max_budget_s
        if not self.slots.accepts(key, 1, time.perf_counter()):
            raise self._too_many(call)
        self._enter(key, 1)
        try:
            # a body that has arrived needs no time limit, which takes 1 % of the time of a request
            call.body = await (reader.read() if reader.is_whole else _body_of(call, reader))
            if self.away.count and (detached := self.away.find(call)) is not None:
                answer = await detached.join(call, call.received_s + call.budget_s - time.perf_counter())
            else:
                answer = await self._watched(call, route)
            await reply(send, answer.status, answer.body, answer.content_type, answer.headers)
        finally:
            self._enter(key, -1)

    async def answered(self, call: Call, route: InferenceRoute, raw: bytes) -> EncodedReply:
        """Return the reply to a request in a batch. `raw`: the body of the request. Raises SIEError, FailedRequest."""
        call.body, call.shape = raw, route.shape
        self._resolve(call, route)
        call.budget_s = self.max_budget_s
        return await self._handled(call, route)

    def _resolve(self, call: Call, route: InferenceRoute) -> None:
        if call.model is not None:
            call.resolved = self.resolve(call.model, call, CAN.get(route.endpoint, any_model))

    async def _watched(self, call: Call, route: InferenceRoute) -> EncodedReply:
        task = asyncio.current_task()
        assert task is not None, "a request has a task of its own"
        # To notice that the client disconnects, the gateway needs a second task. Most runs end soon, so `_watch` starts
        # this task only for runs that last longer than `watch_after_s`.
        loop = asyncio.get_running_loop()
        self._unwatched[task] = call, loop.time()
        if not self._is_timed:
            self._is_timed = True
            loop.call_later(self.watch_after_s, self._watch)
        try:
            answer = await self._handled(call, route)
        except BaseException as error:
            if self._unwatched.pop(task, None) is None:
                self.away.ended(task, error)
            raise
        if self._unwatched.pop(task, None) is None and self.away.ended(task, None, answer):
            raise ClientGone
        return answer

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() - self.watch_after_s
        for task, (call, began_s) in list(self._unwatched.items()):
            if began_s > until_s:
                break
            del self._unwatched[task]
            if call.receive is not None:
                self.away.watch(task, call)
        self._is_timed = bool(self._unwatched)
        if self._is_timed:
            loop.call_later(self.watch_after_s, self._watch)

    async def _handled(self, call: Call, route: InferenceRoute) -> EncodedReply:
        """Run the handler of the route. If the catalogue entry of the model changes during the run, run the handler
        again with the new entry. Raises NotReady if the entry changes again after MAX_ATTEMPTS restarts, or after the
        budget has ended.
        """
        body: Mapping[str, Any] = {}
        if route.body is not None and FORM not in route.body.media:
            if len(call.body) <= plain.SMALL_BYTES:
                body = bodies.decode(call.body, msgpack=call.is_msgpack)
            else:
                body = await decode_body(call, self.body_threads)
        restarts = 0
        while True:
            try:
                return await route.handler(self, call, body)
            except EntryChanged as error:
                left_s, entry = call.received_s + call.budget_s - time.perf_counter(), error.entry
                if restarts >= MAX_ATTEMPTS or left_s <= 0:
                    message = f"the entry of {entry.id} is being changed, and the workers do not have the new entry yet"
                    raise NotReady(message, reason=CONFIG_CHANGED, retry_after_s=1) from None
            restarts += 1
            call.again()
            await self._renewed(entry, min(RENEWED_WITHIN_S, left_s))
            self._resolve(call, route)

    async def _renewed(self, entry: ModelEntry, timeout_s: float) -> None:
        """Read the catalogue again until it has another entry of this model, for at most `timeout_s` seconds."""
        await self._feed.renewed(lambda catalogue: catalogue.entries.get(entry.id) != entry, timeout_s)

    def _too_many(self, call: Call) -> QueueFull:
        slots = self.slots
        lane = self.lane(call.headers, call.resolved) if call.resolved is not None else None
        self._metrics.rejected.labels(
            lane.machine_profile if lane else "", lane.bundle if lane else "", "concurrency"
        ).inc()
        return QueueFull(
            f"{slots.used} requests are in progress, {slots.used_by[call.grant.key]} of them of this client's key; "
            f"{slots.total} are allowed at this gateway (SIE_MAX_CONCURRENT_REQUESTS), shared by the active keys",
            extras={"queue_depth": slots.used},
            retry_after_s=self._pace.retry_s(time.perf_counter()),
        )

    def understand(self, call: Call, request: InferRequest) -> InferRequest:
        """Return the request with merged options and a lane. Raises SIEError if the request is not valid or has no
        lane.
        """
        headers, resolved, call.infer_request = call.headers, request.resolved, request
        lane = self.lane(headers, resolved)  # first, so that an unknown pool is reported before wrong parameters
        is_plain = bodies.all_plain(request.items, request.query)
        if not is_plain and bodies.has_links(request.items, request.query):
            if self._fetcher is None:
                bodies.refuse_links(request.items, request.query)
            else:
                self._fetcher.check(request.items, request.query)
        options = request.options
        if options is UNMERGED:
            resolved, options = self._options(call, request)
            # if the options select another profile, the lane may differ
            if resolved is not request.resolved:
                lane = self.lane(headers, resolved)
        if (
            not is_plain
            and bodies.has_images(request.items, None)
            and families.row(resolved.entry.family).ignores_text_beside_images
            and (message := bodies.unread_texts(request.items, resolved.entry.id))
        ):
            options = replace(options, warnings=(*options.warnings, *message))
        call.labels["machine_profile"], call.labels["model"] = lane.machine_profile, resolved.canonical
        priority = _priority(headers["x-sie-priority"]) if "x-sie-priority" in headers else request.priority
        return msgspec.structs.replace(request, resolved=resolved, options=options, lane=lane, priority=priority)

    def fault_of(self, request: InferRequest) -> ErrorInfo | None:
        """Return the error of the first item that the model cannot run; None if all items pass the gateway's checks."""
        failure = next(iter(self._runner.refused(request).values()), None)
        return None if failure is None else failure.error

    async def run(self, call: Call, request: InferRequest) -> RequestResult:
        """Run a request until the deadline of the call, and return the outcome of each input. Raises SIEError,
        EntryChanged.
        """
        return await self.execute(call, self.understand(call, request))

    async def execute(self, call: Call, request: InferRequest) -> RequestResult:
        """Fetch images at URLs, run a planned request, and return the outcome of each input. Raises SIEError,
        EntryChanged.
        """
        if self._fetcher is not None and not bodies.all_plain(request.items, request.query):
            reads = "image" in request.resolved.entry.inputs and request.operation in ("encode", "score", "extract")
            if reads and bodies.has_links(request.items, request.query):
                return await self._fetched(call, request, self._fetcher)
        try:
            finished = await self._runner.run(call, request)
        except QueueFull as error:  # QueueFull from the broker lacks the depth of the queue
            error.extras.setdefault("queue_depth", self._admission.queue_depth(request.lane))
            raise
        call.finished = finished
        if request.resolved.alias:
            self.shadows.after(call, finished)
        return finished

    async def _fetched(self, call: Call, request: InferRequest, fetcher: ImageFetcher) -> RequestResult:
        left_s = call.received_s + call.budget_s - time.perf_counter()
        items = [*request.items, *([request.query] if request.query else ())]
        until_s = asyncio.get_running_loop().time() + left_s
        async with fetcher.fetched(items, until_s, call.grant.key, request.inputs_field) as files:
            # an image that could not be fetched has left its URL
            files = [msgspec.structs.replace(item, links=()) if item.links else item for item in files]
            count = len(request.items)
            query = files[count] if request.query else None
            request = msgspec.structs.replace(request, items=tuple(files[:count]), query=query)
            return await self.execute(call, request)

    def _options(self, call: Call, request: InferRequest) -> tuple[Resolved, RequestOptions]:
        """Return the result of `run_options`. Cache the results for bodies without parameters, by model, operation,
        error mode and side (query or document), because the computation takes a tenth of the gateway's time for a
        request.
        """
        headers, resolved, body = call.headers, request.resolved, request.parameters
        strict = "x-sie-strict" in headers and headers["x-sie-strict"].lower() == "true"
        on_item_error = _error_mode(call) if "x-sie-on-item-error" in headers else call.dialect.on_item_error
        for name, value in body.items():
            if value != {} if name in ("params", "options") else name not in _NO_PARAMETERS:
                return run_options(resolved, body, request.operation, on_item_error, strict=strict, side=request.side)
        key = resolved.entry.id, resolved.profile, request.operation, on_item_error, request.side
        cached = self._plain.get(key)
        if cached is None or cached[0] is not resolved.entry:
            cached = resolved.entry, run_options(resolved, {}, request.operation, on_item_error, side=request.side)[1]
            self._plain[key] = cached
        return resolved, cached[1]

    def _on_catalogue(self) -> None:
        """Drop what is cached of the catalogue, and the measurements of aliases that the new one does not have."""
        self._plain.clear()
        self._resolved.clear()
        self.shadows.drop_deleted()

    def _enter(self, key: str, change: int) -> None:
        self.slots.use(key, change)
        self._pace.changed(time.perf_counter(), self.slots.used)
        if self.slots.used:
            self.idle.clear()
        else:
            self.idle.set()

    def _budget_s(self, headers: Mapping[str, str]) -> float:
        raw = headers["x-sie-timeout-ms"]
        if not raw.isascii() or not raw.isdigit() or len(raw) > 6 or not 1 <= int(raw) <= 600_000:
            raise InvalidInput.at("X-SIE-Timeout-Ms", "expected a whole number from 1 to 600000")
        return min(int(raw) / 1000, self.max_budget_s)

    def lane(self, headers: Mapping[str, str], resolved: Resolved) -> Lane:
        """Return the lane (pool, machine profile and bundle) of a request. Raises InvalidInput, PoolNotFound,
        BundleConflict, NotFound, NotProvisioned.
        """
        if "x-sie-pool" not in headers and "x-sie-machine-profile" not in headers:
            return self._fleet.lane(resolved, pool="", machine_profile="", known_pools=self._pools)
        machine_profile = headers.get("x-sie-machine-profile", "").strip().lower()
        pool_header = headers.get("x-sie-pool", "").strip()
        pool = _pool_name(pool_header) if pool_header else ""
        if "/" in machine_profile:
            before, _, machine_profile = machine_profile.partition("/")
            named = _pool_name(before)
            if pool_header and pool != named:
                raise InvalidInput.at(
                    "X-SIE-Pool", "differs from the pool in X-SIE-MACHINE-PROFILE", reason="pool_conflict"
                )
            pool = named
        return self._fleet.lane(resolved, pool=pool, machine_profile=machine_profile, known_pools=self._pools)


def _remedy(name: str, like: list[str]) -> str:
    """Return the end of a ModelNotFound message: similar names, and the command that adds a model of the hub."""
    adds = f"`sie pull {name}` adds it if the Hugging Face Hub has it" if _HUB_ID.fullmatch(name) else ""
    if like:
        return f"; did you mean {' or '.join(like)}?{f' {adds}' if adds else ''}"
    return f"; {adds or 'GET /v1/models lists the available ones'}"


# first part of a model's name -> company whose models have such names; these models cannot be downloaded
_FOREIGN = {
    "text-embedding-": "OpenAI",
    "voyage-": "Voyage",
    "embed-english-": "Cohere",
    "embed-multilingual-": "Cohere",
    "embed-v4": "Cohere",
    "rerank-": "Cohere or Voyage",
}


def _foreign(name: str, owner: str, loaded: list[str]) -> str:
    """Return the end of a ModelNotFound message for a model that only its company can serve."""
    models = f"{' or '.join(loaded)} is loaded here" if loaded else "GET /v1/models lists the available ones"
    return f"; that is a model of {owner}: {models}, and `sie models alias {name} MODEL` lets MODEL answer for it"


def _pool_name(value: str) -> str:
    """Return the pool in a header; empty if the header names none. Raises InvalidInput (reason `pool_name`)."""
    try:
        return topology.pool_name(value) if value else ""
    except ValueError as error:
        raise InvalidInput.at("X-SIE-Pool", str(error), reason="pool_name") from error


def _priority(value: str) -> Priority:
    name = value.lower()
    if name == "bulk":
        return "bulk"
    if name == "interactive":
        return "interactive"
    raise InvalidInput.at("X-SIE-Priority", "expected interactive or bulk")


def _error_mode(call: Call) -> str:
    """Return the mode for errors of single inputs that applies if the body names no mode: the value of
    X-SIE-On-Item-Error, or the default of the client's SDK version if this header is absent. Raises InvalidInput.
    """
    mode = call.headers.get("x-sie-on-item-error") or call.dialect.on_item_error
    if mode not in ("slot", "fail"):
        raise InvalidInput.at("X-SIE-On-Item-Error", "expected slot or fail")
    return mode


# Permitted values of headers; `_check_headers` refuses other values, so that a client notices a mistake in a header.
# X-SIE-Remote belongs to the public SDKs: no other server gets inputs, so only `forbid` can be obeyed.
_HEADER_VALUES = {"X-SIE-Remote": ("forbid",), "X-SIE-Strict": ("true", "false"), "X-SIE-Explain": ("1", "0")}


_CHECKED = frozenset(name.lower() for name in (*_HEADER_VALUES, ROUTE_KEY, CACHE))


def _check_headers(headers: Mapping[str, str]) -> None:
    for name, values in _HEADER_VALUES.items():
        value = headers.get(name.lower())
        if value is not None and value.strip().lower() not in values:
            raise InvalidInput.at(name, f"expected {' or '.join(values)}")
    key = headers.get(ROUTE_KEY.lower(), "")
    if len(key) > MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
        message = f"expected at most {MAX_KEY_CHARS} printable ASCII characters, got {len(key)} characters"
        raise InvalidInput.at(ROUTE_KEY, message)
    cache_mode(headers)


async def _body_of(call: Call, reader: BodyReader) -> bytes:
    left_s = call.received_s + call.budget_s - time.perf_counter()
    try:
        async with asyncio.timeout(left_s):
            return await reader.read()
    except TimeoutError as error:
        message = f"the body was not complete within the budget of {call.budget_s:g} s"
        raise GatewayTimeout(message, param="body") from error


Handler = Callable[[Inference, Call, Mapping[str, Any]], Awaitable[EncodedReply]]
"""Function that answers a request from its decoded body, which is empty for a form and for a GET."""


@dataclass(frozen=True, kw_only=True)
class InferenceRoute(GatewayRoute):
    handler: Handler
