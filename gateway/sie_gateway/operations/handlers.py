"""Handlers of the routes for models, health, scaling and metrics."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from sie_contracts.api import models as models_api
from sie_contracts.api.residency import LaneResidency, ModelResidency, ResidencyState, WorkerResidency
from sie_contracts.errors import InvalidInput, NotFound
from sie_contracts.models.alias_checks import resolve_all
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import LISTED_OUTPUTS
from sie_contracts.plain import struct_of
from sie_contracts.schema_faults import invalid_input
from sie_gateway.fleet.residency import SLOWEST_FIRST, Placed, Where
from sie_gateway.http.route_kinds import HEADERS, GatewayRoute, control
from sie_gateway.inference import body as bodies
from sie_gateway.inference.call import Call
from sie_gateway.operations.models import alias_info, model_info, model_list
from sie_runtime.http.asgi import Send
from sie_runtime.http.routes import Content, Parameter
from sie_runtime.http.server import scrape

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

T = TypeVar("T")
_logger = logging.getLogger("sie.gateway.residency")


def call_of(request: Request) -> Call:
    call: Call = request.scope["sie.call"]
    return call


def json_response(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


class PieceResponse(StreamingResponse):
    """Response whose body an async generator yields. The generator is closed when the response ends, even if the client
    disconnects.
    """

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(cast("AsyncGenerator[bytes]", self.body_iterator)):
            await super().stream_response(cast(Any, send))


async def json_of(request: Request) -> Mapping[str, Any]:
    """Return the body of a request, a map in JSON. Raises InvalidInput."""
    raw = await request.body()
    bodies.count(raw, msgpack=False)
    return bodies.decode(raw, msgpack=False)


def converted(body: Mapping[str, Any], kind: type[T]) -> T:
    """Return a decoded body as a struct. Raises InvalidInput, which names the faulty field."""
    try:
        return struct_of(body, kind)
    except msgspec.ValidationError as error:
        raise invalid_input(kind, error) from error


def number(query: QueryParams, name: str, default: float, least: float, most: float) -> float:
    """Return the number in a query parameter, or `default`. Raises InvalidInput below `least` or above `most`."""
    try:
        value = float(query.get(name, default))
    except ValueError:
        value = math.nan
    if not least <= value <= most:  # with `not`, the condition is also true for nan
        raise InvalidInput.at(name, f"expected a number from {least:g} to {most:g}")
    return value


def whole(query: QueryParams, name: str, default: int, least: int, most: int) -> int:
    """Return the whole number in a query parameter, or `default`. Raises InvalidInput below `least` or above `most`."""
    try:
        value = int(query.get(name, default))
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise InvalidInput.at(name, f"expected a whole number from {least} to {most}")
    return value


def flag(query: QueryParams, name: str, *, default: bool) -> bool:
    """Return the value of a query parameter, true or false, or `default`. Raises InvalidInput for another value."""
    value = query.get(name, str(default).lower())
    if value not in ("true", "false"):
        raise InvalidInput.at(name, "expected true or false")
    return value == "true"


def choice(query: QueryParams, name: str, choices: Sequence[str]) -> str:
    """Return the value of a query parameter, or an empty text if it is absent. Raises InvalidInput for another value
    than `choices`.
    """
    value = query.get(name, "")
    if value and value not in choices:
        raise InvalidInput.at(name, f"expected one of {', '.join(choices)}")
    return value


async def models(gateway: Gateway, request: Request, **fields: str) -> Response:
    """Return the models that the query selects. If the query has `limit`, also return `total`, the number of models
    without this limit. `fields`: name -> value of a field that each returned model gets.
    """
    query = request.query_params
    infos, total = await model_list(
        gateway.inference.catalogue,
        gateway.fleet,
        task=choice(query, "task", ("encode", "score", "extract")),
        output=choice(query, "output", LISTED_OUTPUTS),
        loaded=flag(query, "loaded", default=False),
        variants=flag(query, "variants", default=True),
        text=query.get("filter", ""),
        limit=whole(query, "limit", 1, 1, 1000) if "limit" in query else None,
        figures=gateway.inference.shadows.figures,
    )
    infos = [{**info, **fields} for info in infos]
    counted = {"total": total} if "limit" in query else {}
    return json_response({"object": "list", "data": infos, "models": infos, **counted})


async def model(gateway: Gateway, request: Request) -> Response:
    resolved = gateway.inference.resolve(request.path_params["model"])
    catalogue = gateway.inference.catalogue
    info = model_info(catalogue, gateway.fleet, resolved.entry, resolved.profile)
    alias = catalogue.aliases.get(resolved.alias)
    return json_response(info if alias is None else alias_info(info, alias, gateway.inference.shadows.figures))


async def health(gateway: Gateway, request: Request) -> Response:
    return json_response(gateway.status.health(call_of(request).grant))


async def scaling(gateway: Gateway, request: Request) -> Response:
    """Return the load of a lane (pool, machine profile and bundle). Raises NotFound for an unknown lane, and if the
    pool is a reservation of another key.
    """
    call = request.scope.get("sie.call")  # None on the metrics port, where an autoscaler sends no credentials
    return json_response(await gateway.scaling.answer(request.path_params["lane"], call and call.grant))


async def metrics(gateway: Gateway, request: Request) -> Response:
    if not gateway.settings.gateway_api_metrics:
        raise NotFound(
            "/metrics is served on the port SIE_GATEWAY_METRICS_PORT; set SIE_GATEWAY_API_METRICS=true to serve it on "
            "this port too"
        )
    text, content_type = scrape(gateway.metrics.registry, request.headers.get("accept", ""))
    return Response(text, headers={"content-type": content_type})


def _resolved_models(gateway: Gateway, request: Request) -> tuple[Resolved, ...]:
    """Return the model of the path, or the models of an alias. Raises ModelNotFound, BundleConflict, InvalidInput."""
    name = request.path_params["model"]
    gateway.inference.resolve(name)  # raises ModelNotFound with suggestions of similar names; the result is not used
    return resolve_all(gateway.inference.catalogue, name.removesuffix("/"))


def _residency_reply(request: Request, state: ResidencyState, status: int, placed: Iterable[Placed]) -> Response:
    lanes = [
        LaneResidency(
            model=placed_model.name,
            lane=str(placed_model.lane),
            state=placed_model.state,
            workers=[
                WorkerResidency(worker=beat.worker, state=status.state, in_flight=status.queued)
                for beat, status in placed_model.reports
            ],
        )
        for placed_model in placed
    ]
    name = request.path_params["model"].removesuffix("/")
    return json_response(ModelResidency(name=name, state=state, lanes=lanes), status)


def _log(request: Request, action: str, models: Iterable[Resolved]) -> None:
    name = call_of(request).grant.name
    _logger.info("%s requests the %s of %s", name, action, ", ".join(model.canonical for model in models))


async def load(gateway: Gateway, request: Request) -> Response:
    """Request the load of a model. The status is 200 if each lane has a worker with the model loaded, else 202.
    Raises SIEError.
    """
    models = _resolved_models(gateway, request)
    lanes = [gateway.inference.lane(request.headers, resolved) for resolved in models]
    _log(request, "load", models)
    placed = [await gateway.residencies.load(lane, resolved) for lane, resolved in zip(lanes, models, strict=True)]
    slowest = min((placed_model.state for placed_model in placed), key=SLOWEST_FIRST.index)
    return _residency_reply(request, slowest, 200 if slowest == "loaded" else 202, placed)


async def unload(gateway: Gateway, request: Request) -> Response:
    """Request the unload of a model. The status is 200 if no worker has, loads or unloads the model, else 202. Raises
    SIEError.
    """
    models, headers = _resolved_models(gateway, request), request.headers
    places: list[Where] = []
    for resolved in models:
        lane = gateway.inference.lane(headers, resolved)  # raises an error for an unknown pool or machine profile
        by_profile = bool(headers.get("x-sie-machine-profile", "").strip())
        by_pool = by_profile or bool(headers.get("x-sie-pool", "").strip())
        places.append(Where(lane.pool if by_pool else "", lane.machine_profile if by_profile else ""))
    _log(request, "unload", models)
    placed = [
        placed_model
        for resolved, where in zip(models, places, strict=True)
        for placed_model in await gateway.residencies.unload(resolved, where)
    ]
    return _residency_reply(request, "unloading" if placed else "available", 202 if placed else 200, placed)


def _residency_row(action: str, handler: Any, summary: str, done: str) -> GatewayRoute:
    path = f"/v1/models/{{model:path}}/{action}"
    row = control("POST", path, "models", handler, ("SIE", summary), ModelResidency, scope="admin", parameters=_HEADERS)
    return replace(row, replies={200: Content(ModelResidency, description=done), 202: Content(ModelResidency)})


_HEADERS = tuple(header for header in HEADERS if header.name in ("X-SIE-Pool", "X-SIE-MACHINE-PROFILE"))
RESIDENCY: tuple[GatewayRoute, ...] = (
    _residency_row("load", load, "Load a model before its first request", "Each lane has a worker that has loaded it"),
    _residency_row("unload", unload, "Unload a model from each worker as soon as it is idle there", "No worker has it"),
)


_FLAG = Literal["true", "false"]
_MODEL_QUERY = (
    Parameter("task", "query", Literal["encode", "score", "extract"], "Only models that support this operation."),
    Parameter(
        "output", "query", Literal["dense", "sparse", "multivector", "score", "json"], "Only models with this output."
    ),
    Parameter("loaded", "query", _FLAG, "Only models that a worker has loaded."),
    Parameter("variants", "query", _FLAG, "Whether the reply also lists profiles, as `model:profile`."),
    Parameter(
        "filter",
        "query",
        str,
        "Only models with each of these words in their name, description, licence, tasks, inputs or outputs.",
    ),
    Parameter(
        "limit",
        "query",
        Annotated[int, Meta(ge=1, le=1000)],
        "Maximum number of models in the reply; `total` counts all that match.",
    ),
)
MODELS = (
    control(
        "GET",
        "/v1/models",
        "models",
        models,
        ("SIE", "The catalogue"),
        models_api.Models,
        parameters=_MODEL_QUERY,
    ),
    control("GET", "/v1/models/{model:path}", "models", model, ("SIE", "One model"), models_api.ModelInfo),
)
