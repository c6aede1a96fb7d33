"""Table of all routes of a gateway, with one row for each method and path. Scopes, dispatch, labels in metrics and the
OpenAPI document are derived from the table. A path that is not in the table is not served.

To add a route, see "Where to add what" in ARCHITECTURE.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sie_contracts.api import operations as operations_api
from sie_contracts.wire.configs import config_shape
from sie_gateway import plugin
from sie_gateway.dialects import rows
from sie_gateway.fleet import assignments
from sie_gateway.http.route_kinds import PLACEHOLDERS, GatewayRoute, control
from sie_gateway.inference.handler import InferenceRoute
from sie_gateway.operations import configs, dead_letter_routes, handlers, pools, whoami
from sie_gateway.operations.status import CLUSTER_PATH, WORKER_PATH
from sie_runtime.http import config_routes, openapi
from sie_runtime.http.routes import HTML, JSON, OPEN, TEXT, Content, Parameter, Route, Table

_WORKER = Parameter("worker", "query", str, "The id of the worker, as in its heartbeats.", "w0", required=True)
CONTROL: tuple[GatewayRoute, ...] = (
    *handlers.MODELS,
    control("GET", "/v1/pools", "pools", pools.pools, ("Pools", "All pools"), operations_api.Pools),
    control(
        "POST",
        "/v1/pools",
        "pools",
        pools.create,
        ("Pools", "Reserve workers, or change or renew a reservation of the caller"),
        operations_api.Pool,
        scope="pools",
        status=201,
        body=operations_api.PoolRequest,
        body_bytes=pools.MAX_BODY_BYTES,
    ),
    control(
        "GET",
        assignments.PATH,
        "pools",
        pools.assignment,
        ("Pools", "The pool that a worker is to serve"),
        operations_api.Assignment,
        parameters=(_WORKER,),
        reader=True,
    ),
    control("GET", "/v1/pools/{name}", "pools", pools.pool, ("Pools", "One pool"), operations_api.Pool),
    control(
        "DELETE",
        "/v1/pools/{name}",
        "pools",
        pools.delete,
        ("Pools", "End a reservation"),
        operations_api.PoolDeleted,
        scope="pools",
    ),
    control(
        "POST",
        "/v1/pools/{name}/renew",
        "pools",
        pools.renew,
        ("Pools", "Renew the lease of a reservation"),
        operations_api.PoolRenewed,
        scope="pools",
    ),
)
CATALOGUE = tuple(
    GatewayRoute(**vars(route), shape=config_shape) for route in config_routes.bound(configs.HANDLERS, "configs")
)


def _operated(path: str, summary: str, media: str, handler: Any = None, **more: Any) -> GatewayRoute:
    """Build a GET route for metrics, the OpenAPI document, the page that shows this document, or a file of the page."""
    reply = Content(dict[str, Any], (media,))
    return control("GET", path, "other", handler, ("Operations", summary), reply, **more)


def _probe(path: str, summary: str, ready: tuple[str, ...], refused: dict[int, Content]) -> GatewayRoute:
    return GatewayRoute(
        method="GET",
        path=path,
        scope=OPEN,
        summary=summary,
        tag="Operations",
        replies={200: Content(operations_api.Readiness, ready), **refused},
        errors=None,
    )


def _socket(path: str, summary: str) -> GatewayRoute:
    frames = Content(media=(), description="A websocket: frames of JSON, from the server to the client")
    return control("GET", path, "ws", None, ("Operations", summary), frames, status=101)


OPERATIONS = (
    *(_probe(path, "Whether the process is alive", (TEXT,), {}) for path in ("/healthz", "/livez", "/ping")),
    _probe(
        "/readyz",
        "Whether the process is ready: 503 with the reason if not; JSON if `Accept` allows it",
        (TEXT, JSON),
        {
            503: Content(
                operations_api.Readiness,
                (TEXT, JSON),
                "Not ready",
                {"status": "not ready", "reason": "starting", "healthy_workers": 0},
            )
        },
    ),
    control(
        "GET",
        "/health",
        "health",
        handlers.health,
        ("Operations", "The catalogue in use, and the workers"),
        operations_api.Health,
    ),
    control(
        "GET",
        "/v1/scaling/{lane}",
        "scaling",
        handlers.scaling,
        ("Operations", "The load of a lane, and the number of workers that it needs"),
        operations_api.LaneFigures,
    ),
    _operated(
        "/metrics",
        "The metrics for Prometheus, if SIE_GATEWAY_API_METRICS is on",
        TEXT,
        handlers.metrics,
        scope="metrics",
    ),
    _operated("/docs", "The OpenAPI document as a web page", HTML),
    _operated("/docs/static/{file}", "Scripts and styles of the page `/docs`", "*/*"),
    _operated("/openapi.json", "The OpenAPI document", JSON),
    _socket(CLUSTER_PATH, "The status of workers and models, every second"),
    _socket(WORKER_PATH, "The status of a worker of this gateway, every 200 ms"),
)

CORE: tuple[GatewayRoute, ...] = (
    *rows.NATIVE,
    *rows.DIALECTS,
    *CONTROL,
    *handlers.RESIDENCY,
    *CATALOGUE,
    *dead_letter_routes.DEAD_LETTERS,
    *whoami.WHOAMI,
    *OPERATIONS,
)
PLUGINS = plugin.load(CORE)
# inference routes first, as in the OpenAPI document
ROUTES = tuple(sorted((*CORE, *PLUGINS.routes), key=lambda route: not isinstance(route, InferenceRoute)))
TABLE = Table(ROUTES)


def inference_route(path: str) -> InferenceRoute | None:
    """Return the inference route that answers POST of this path; None if the path runs no inference."""
    route = TABLE.match(path).route("POST")
    return route if isinstance(route, InferenceRoute) else None


PROBES = frozenset(route.path for route in ROUTES if route.scope == OPEN and route.handler is None)


def _errors(route: Route) -> openapi.Statuses:
    assert isinstance(route, GatewayRoute)
    return openapi.statuses(route.shape, *route.shapes)


def openapi_document(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the OpenAPI document of a gateway. `about`: top-level members such as `openapi` and `info`."""
    return openapi.document(ROUTES, PLACEHOLDERS, _errors, about=about)
