"""Routes of `/v1/cache` and their handlers, for administrators: number and size of cached answers, and their erasure.

POST /v1/cache/erase ──► AnswerErasure ──► memory of this gateway
                             └──► announcement ──► memory of each other gateway
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from fastapi import Request
from fastapi.responses import Response

from sie_broker import BrokerError
from sie_contracts.api import cache as api
from sie_contracts.errors import InvalidInput, QueueUnavailable
from sie_contracts.wire.heartbeats import AnswerErasure
from sie_gateway.http.route_kinds import GatewayRoute, control
from sie_gateway.inference.answers import digests_of
from sie_gateway.inference.body import RequestItem, utf8
from sie_gateway.operations.handlers import call_of, converted, json_of, json_response

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

PATH = "/v1/cache"
MAX_LISTED = 1000
_logger = logging.getLogger("sie.gateway.cache")


async def show(gateway: Gateway, request: Request) -> Response:
    """Return the size of this gateway's cache. Also return the number of its answers for each pair (model, API key); at
    most MAX_LISTED pairs are listed.
    """
    memory = gateway.memory
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
    count = await gateway.memory.erase(erasure)
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


CACHE: tuple[GatewayRoute, ...] = (
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
