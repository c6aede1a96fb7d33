"""Plug-in of the gateway: the cache, and the routes of `/v1/cache`, by which administrators see the number and size of
cached answers, and erase answers.

POST /v1/cache/erase ──► AnswerErasure ──► memory of this gateway
                             └──► announcement ──► memory of each other gateway
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from sie_broker import BrokerError
from sie_cache import api
from sie_cache.cached import CachedRuns
from sie_cache.memory import AnswerMemory, PeerErasures
from sie_cache.settings import CacheSettings
from sie_contracts.errors import InvalidInput, QueueUnavailable
from sie_contracts.wire.heartbeats import AnswerErasure, GatewayBeat
from sie_gateway.http.route_kinds import GatewayRoute, control
from sie_gateway.inference.answers import CachePolicy, digests_of
from sie_gateway.inference.body import RequestItem, utf8
from sie_gateway.operations.handlers import call_of, converted, json_of, json_response
from sie_gateway.plugin import Plugin, PluginContext, Service
from sie_runtime.metrics import Scrape

if TYPE_CHECKING:
    from sie_gateway.admission.admission import Peers
    from sie_gateway.state import Gateway
    from sie_runtime.process import Stop, Tasks

PATH = "/v1/cache"
MAX_LISTED = 1000
RESULTS = ("hit", "joined", "miss")  # of an input, in the metric
_logger = logging.getLogger("sie.gateway.cache")


class Cache(Service):
    """Cached answers of one gateway, and the erasures that `peers` announce."""

    def __init__(self, memory: AnswerMemory, peers: Peers) -> None:
        self.memory = memory
        self._peers = peers

    def start(self, tasks: Tasks, stop: Stop) -> None:
        """Carry out the erasures of other gateways. One that was announced before is due at the next beat."""
        erasures = PeerErasures()

        def on_gateway(beat: GatewayBeat) -> None:
            erasure = erasures.due(beat)
            if erasure is not None:
                tasks.start(self.memory.erase(erasure), "erasure of cached answers")

        self._peers.listeners.append(on_gateway)


class CacheFigures(Collector):
    """Metrics of the memory of cached answers."""

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory
        self._scrape = Scrape("gateway")

    def collect(self) -> Iterator[Metric]:
        yield self._scrape.gauge("sie_gateway_cache_answers", len(self._memory))
        yield self._scrape.gauge("sie_gateway_cache_bytes", self._memory.held_bytes)
        yield self._scrape.counter("sie_gateway_cache_evictions", self._memory.evictions)


def build(context: PluginContext) -> Cache:
    """Build the cache. Without SIE_CACHE_BYTES it has no memory, and requests run without it."""
    settings, admission = context.settings, context.admission
    assert isinstance(settings, CacheSettings), "the table of settings has the rows of this package"
    memory = AnswerMemory(settings.cache_bytes, settings.cache_ttl_s)
    inputs = context.metrics.make.counters("sie_gateway_cache_inputs")
    for result in RESULTS:
        inputs.labels(result)
    context.metrics.registry.register(CacheFigures(memory))
    if settings.cache_bytes:

        def count(result: str, number: int) -> None:
            inputs.labels(result).inc(number)

        policy = CachePolicy.from_settings(context.settings)
        context.runner.use_cache(CachedRuns(memory, policy, context.fleet, count, admission.expected_s))
    return Cache(memory, admission.peers)


async def show(gateway: Gateway, request: Request) -> Response:
    """Return the size of this gateway's cache. Also return the number of its answers for each pair (model, API key); at
    most MAX_LISTED pairs are listed.
    """
    memory = gateway.service(Cache).memory
    models = [api.CachedModel(model=model, key=owner, answers=count) for (model, owner), count in memory.counts()]
    return json_response(
        api.CacheState(
            max_bytes=memory.max_bytes,
            bytes=memory.held_bytes,
            answers=len(memory),
            evictions=memory.evictions,
            gateways=gateway.peers.count(),
            models=models[:MAX_LISTED],
        )
    )


async def erase(gateway: Gateway, request: Request) -> Response:
    """Erase the selected answers from the memory of all gateways. Raises InvalidInput, QueueUnavailable."""
    erasure = _erasure(converted(await json_of(request), api.CacheErasure))
    count = await gateway.service(Cache).memory.erase(erasure)
    try:
        await gateway.peers.announce(erasure)
    except BrokerError as error:
        message = f"this gateway erased {count} answers, but cannot reach the other gateways: send the request again"
        raise QueueUnavailable(message) from error
    selected = ", ".join(name for name in ("model", "key", "digest") if getattr(erasure, name)) or "all"
    _logger.info("%s erased %d cached answers, selected by: %s", call_of(request).grant.name, count, selected)
    return json_response(api.CacheErased(answers=count, gateways=gateway.peers.count()))


def _erasure(selection: api.CacheErasure) -> AnswerErasure:
    model, key = selection.model or "", selection.key or ""
    if selection.query is not None and selection.text is None:
        raise InvalidInput.at("text", "expected the document that was scored for the query")
    digest = b""
    if selection.text is not None:
        query = None if selection.query is None else RequestItem(utf8(selection.query, "query"))
        (digest,) = digests_of((RequestItem(utf8(selection.text, "text")),), query)
    if (selection.all is True) == bool(model or key or digest):
        raise InvalidInput.at("all", "expected true, to erase all answers, or one of the fields model, key and text")
    return AnswerErasure(model, key, digest)


_ROUTES: tuple[GatewayRoute, ...] = (
    control(
        "GET",
        PATH,
        "other",
        show,
        ("Operations", "The cache of answers of this gateway"),
        api.CacheState,
        scope="admin",
    ),
    control(
        "POST",
        f"{PATH}/erase",
        "other",
        erase,
        ("Operations", "Erase cached answers, at all gateways"),
        api.CacheErased,
        scope="admin",
        body=api.CacheErasure,
    ),
)
PLUGIN = Plugin(routes=_ROUTES, build=build)
