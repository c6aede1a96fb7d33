"""What the page at `/` asks of the config service, passed on by the gateway: writes and the history of models. A page
may ask nobody but the gateway that it came from. Programs ask the config service itself.

    /console/configs/ID ──► scope at the gateway ──► /v1/configs/models/ID, with the caller's own token ──► its answer
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
from fastapi import Request
from fastapi.responses import Response

from sie_contracts.configs import config_shape
from sie_contracts.errors import NotFound, NotReady
from sie_gateway.route_kinds import GatewayRoute
from sie_runtime import config_routes
from sie_runtime.routes import Route

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

MODELS = f"{config_routes.PREFIX}models"
OWN = "/console/configs"
LIMIT_S = 30.0
_SENT = ("content-type", "accept", "if-match", "idempotency-key", "authorization")
_TOLD = ("content-type", "etag", "location", "retry-after")
_logger = logging.getLogger("sie.gateway.configs")


async def _forward(gateway: Gateway, request: Request, after: str = "") -> Response:
    """Raises NotFound where there is no config service, and NotReady while it does not answer."""
    url = gateway.settings.config_service_url
    if url is None:
        raise NotFound("this gateway has no config service: SIE_CONFIG_SERVICE_URL names it")
    headers = {name: request.headers[name] for name in _SENT if name in request.headers}
    reader = gateway.settings.config_read_token
    if request.method == "GET" and reader is not None:  # who may read is for this gateway to say
        headers["authorization"] = f"Bearer {reader.reveal()}"
    path = f"{url.rstrip('/')}{MODELS}{_named(request.path_params.get('id', ''))}{after}"
    try:
        async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as client:
            answer = await client.request(
                request.method,
                path,
                params=httpx.QueryParams(request.url.query),
                headers=headers,
                content=await request.body(),
            )
    except httpx.HTTPError as error:
        _logger.warning("the config service does not answer: %s", type(error).__name__)
        raise NotReady("the config service does not answer; what it wrote before stays in use") from error
    told = {name: answer.headers[name] for name in _TOLD if name in answer.headers}
    return Response(answer.content, answer.status_code, told)


def _named(model: str) -> str:
    """Raises NotFound for a name that would leave the folder of models."""
    if any(part in (".", "..") for part in model.split("/")):
        raise NotFound("no such path")
    return f"/{quote(model, safe='/:@')}" if model else ""


async def forward(gateway: Gateway, request: Request) -> Response:
    """A write of a model, or a new one."""
    return await _forward(gateway, request)


async def history(gateway: Gateway, request: Request) -> Response:
    """The revisions of a model, newest first."""
    return await _forward(gateway, request, "/history")


async def rollback(gateway: Gateway, request: Request) -> Response:
    """Make a former revision the newest again."""
    return await _forward(gateway, request, "/rollback")


_HANDLERS = {
    ("GET", "history"): history,
    ("POST", "models"): forward,
    ("PUT", "model"): forward,
    ("PATCH", "model"): forward,
    ("DELETE", "model"): forward,
    ("POST", "rollback"): rollback,
}


def _own(route: Route) -> GatewayRoute:
    path, summary = route.path.replace(MODELS, OWN), f"{route.summary}, for the console"
    return GatewayRoute(**vars(replace(route, path=path, endpoint="other", summary=summary)), shape=config_shape)


CONFIG_FORWARD = tuple(_own(each) for each in config_routes.bound(_HANDLERS) if each.handler is not None)
