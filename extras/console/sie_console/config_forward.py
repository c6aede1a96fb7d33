"""Requests of the page to the config service: writes, and the history of models. The browser lets the page send
requests only to the gateway that served it, so this gateway forwards them. Programs use the config service directly.

 /console/configs/ID ──► the gateway checks the scope ──► /v1/configs/models/ID at the config service ──► its answer

The gateway forwards a write with the caller's own token, and a read with the gateway's token if it has one.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
from starlette.requests import Request
from starlette.responses import Response

from sie_contracts.errors import InvalidInput, NotFound, NotReady
from sie_contracts.loopback import verification
from sie_contracts.url_names import quoted
from sie_contracts.wire.configs import config_shape
from sie_gateway.http.route_kinds import GatewayRoute
from sie_runtime.http import config_routes
from sie_runtime.http.routes import Route

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

MODELS = f"{config_routes.PREFIX}models"
OWN = "/console/configs"
LIMIT_S = 30.0
_SENT = ("content-type", "accept", "if-match", "idempotency-key", "authorization")
_RETURNED = ("content-type", "etag", "location", "retry-after")
_logger = logging.getLogger("sie.gateway.console")


async def forward(gateway: Gateway, request: Request, after: str = "") -> Response:
    """Forward a request to the config service. `after`: text that is appended to the path. Raises NotFound if there is
    no config service, InvalidInput for a too long path or query, NotReady if the config service does not answer.
    """
    url = gateway.settings.config_service_url
    if url is None:
        raise NotFound("this gateway has no config service: set SIE_CONFIG_SERVICE_URL to its URL")
    # header values are bytes, because the HTTP client accepts only ASCII in values of type str
    headers = {name.encode(): request.headers[name].encode("latin-1") for name in _SENT if name in request.headers}
    reader = gateway.settings.config_read_token
    # this gateway has checked that the caller may read, so it replaces the caller's token by the gateway's token
    if request.method == "GET" and reader is not None:
        headers[b"authorization"] = f"Bearer {reader.reveal()}".encode()
    path = f"{url.rstrip('/')}{MODELS}{_named(request.path_params.get('id', ''))}{after}"
    body = await request.body()
    try:
        async with (
            asyncio.timeout(LIMIT_S),  # for the whole reply; httpx bounds only each read
            httpx.AsyncClient(timeout=LIMIT_S, trust_env=False, verify=verification(url)) as client,
        ):
            answer = await client.request(
                request.method,
                path,
                params=httpx.QueryParams(request.url.query),
                headers=headers,
                content=body,
            )
    except httpx.InvalidURL as error:  # the escaped path or query is too long for the HTTP client
        raise InvalidInput(f"this path and query cannot be forwarded: {error}", reason="malformed") from error
    except (httpx.HTTPError, TimeoutError) as error:
        _logger.warning("the config service did not answer a forwarded request: %s", type(error).__name__)
        raise NotReady("the config service does not answer: try again; the present catalogue stays in use") from error
    forwarded = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
    return Response(answer.content, answer.status_code, forwarded)


def _named(model: str) -> str:
    """Return the path of a model at the config service. Raises NotFound for a name that may lead to another route."""
    try:
        return f"/{quoted(model, 'id')}" if model else ""
    except ValueError:
        raise NotFound("no such path") from None


_HANDLERS = {
    ("GET", "history"): functools.partial(forward, after="/history"),
    ("POST", "models"): forward,
    ("PUT", "model"): forward,
    ("PATCH", "model"): forward,
    ("DELETE", "model"): forward,
    ("POST", "rollback"): functools.partial(forward, after="/rollback"),
}


def _own(route: Route) -> GatewayRoute:
    path, summary = route.path.replace(MODELS, OWN), f"{route.summary}, for the console"
    return GatewayRoute(**vars(replace(route, path=path, endpoint="other", summary=summary)), shape=config_shape)


CONFIG_FORWARD = tuple(_own(row) for row in config_routes.bound(_HANDLERS) if row.handler is not None)
