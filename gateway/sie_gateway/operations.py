"""Handlers of models, health, scaling, metrics and the console: what operators and programs ask a gateway."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.datastructures import QueryParams

from sie_contracts.errors import InvalidInput, NotFound
from sie_gateway.history import STEP_S
from sie_gateway.models import alias_info, model_info, model_list
from sie_gateway.status import CONSOLE_FILES, CONSOLE_POLICY, console
from sie_runtime.http import scrape

if TYPE_CHECKING:
    from sie_gateway.app import Gateway


def json_response(body: Any, status: int = 200) -> Response:
    """A struct or builtins as JSON."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


async def _listed(gateway: Gateway, query: QueryParams) -> list[dict[str, Any]]:
    return await model_list(
        gateway.inference.catalogue,
        gateway.fleet,
        task=query.get("task", ""),
        output=query.get("output", ""),
        loaded=query.get("loaded", "") == "true",
        variants=query.get("variants", "") != "false",
    )


async def models(gateway: Gateway, request: Request) -> Response:
    """The catalogue."""
    infos = await _listed(gateway, request.query_params)
    return json_response({"object": "list", "data": infos, "models": infos})


async def models_of_infinity(gateway: Gateway, request: Request) -> Response:
    """The catalogue, as Infinity's client reads it: it takes no other owner than Infinity."""
    infos = [{**info, "owned_by": "infinity"} for info in await _listed(gateway, request.query_params)]
    return json_response({"object": "list", "data": infos, "models": infos})


async def model(gateway: Gateway, request: Request) -> Response:
    """One model or alias."""
    resolved = gateway.inference.resolve(request.path_params["model"])
    catalogue = gateway.inference.catalogue
    info = model_info(catalogue, gateway.fleet, resolved.entry, resolved.profile)
    alias = catalogue.aliases.get(resolved.alias)
    return json_response(info if alias is None else alias_info(info, alias))


async def health(gateway: Gateway, _request: Request) -> Response:
    """The catalogue in use, and the workers."""
    return json_response(gateway.status.health())


async def history(gateway: Gateway, request: Request) -> Response:
    """What this gateway answered over the last hour. Raises InvalidInput."""
    query = request.query_params
    since_s = _number(query, "since", 0.0, 0.0, math.inf)
    step_s = int(_number(query, "step_s", STEP_S, STEP_S, 600))
    if step_s % STEP_S:
        raise InvalidInput(f"step_s: expected a multiple of {STEP_S}", reason="schema", param="step_s")
    return json_response(gateway.status.history.since(since_s, step_s))


async def requests(gateway: Gateway, request: Request) -> Response:
    """The requests of the last hour that are kept. Raises InvalidInput."""
    most = int(_number(request.query_params, "limit", 50, 1, 1000))
    return json_response({"requests": gateway.status.history.requests(most)})


async def request(gateway: Gateway, request: Request) -> Response:
    """One of them. Raises NotFound."""
    found = gateway.status.history.find(request.path_params["request"])
    if found is None:
        raise NotFound(
            "this gateway keeps no request with this id: it keeps the slowest and some failed ones of each minute, for "
            "an hour; its log and the trace have all"
        )
    return json_response(found)


def _number(query: QueryParams, name: str, default: float, least: float, most: float) -> float:
    """A number of the query. Raises InvalidInput."""
    try:
        value = float(query.get(name, default))
    except ValueError:
        value = math.nan
    if not least <= value <= most:  # nan neither
        raise InvalidInput(f"{name}: expected a number from {least:g} to {most:g}", reason="schema", param=name)
    return value


async def page(_gateway: Gateway, request: Request) -> Response:
    """The console, or one of its files. Raises NotFound."""
    name = request.path_params.get("file", "index.html")
    if name not in CONSOLE_FILES:
        raise NotFound("no such path")
    headers = {
        "Content-Security-Policy": CONSOLE_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(console(name), media_type=f"{CONSOLE_FILES[name]}; charset=utf-8", headers=headers)


async def cluster(gateway: Gateway, request: Request) -> Response:
    """What the console shows of the cluster."""
    return json_response(gateway.status.shown(request.query_params.get("filter", "")))


async def scaling(gateway: Gateway, request: Request) -> Response:
    """What a lane has to do."""
    return json_response(await gateway.scaling.answer(request.path_params["lane"]))


async def metrics(gateway: Gateway, request: Request) -> Response:
    """What Prometheus reads. Raises NotFound where SIE_GATEWAY_API_METRICS is off."""
    if not gateway.settings.gateway_api_metrics:
        raise NotFound(
            "/metrics is on the port SIE_GATEWAY_METRICS_PORT; SIE_GATEWAY_API_METRICS=true serves it here as well"
        )
    text, content_type = scrape(gateway.metrics.registry, request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})
