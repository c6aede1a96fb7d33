"""Routes of the page at `/`: its files, the JSON that it shows, and its requests to the config service."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from sie_console import api
from sie_console.config_forward import CONFIG_FORWARD
from sie_console.history import STEP_S
from sie_console.overview import Overview
from sie_contracts.errors import InvalidInput, NotFound
from sie_gateway.http.route_kinds import GatewayRoute, control
from sie_gateway.operations.handlers import call_of, json_response, number, whole
from sie_gateway.plugin import Plugin
from sie_runtime.http.routes import HTML, OPEN, Content, Parameter

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

BUILT = Path(__file__).parent / "built"
CONSOLE_FILES = {"index.html": "text/html", "main.js": "text/javascript", "style.css": "text/css"}
CONSOLE_POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


@functools.cache
def console(name: str, root: str = "") -> bytes:
    """Return a file of the console page. The paths of other files in the page get the prefix `root`, the path at which
    a reverse proxy serves the gateway. Relative paths would not work if the page was opened without the final slash.
    """
    content = (BUILT / name).read_bytes()
    return content.replace(b'="console/', f'="{root}/console/'.encode()) if root and name == "index.html" else content


async def page(_gateway: Gateway, request: Request) -> Response:
    name = request.path_params.get("file", "index.html")
    if name not in CONSOLE_FILES:
        raise NotFound("no such path")
    headers = {
        "Content-Security-Policy": CONSOLE_POLICY,
        "Cache-Control": "no-cache",
    }
    content = console(name, request.scope.get("root_path", ""))
    return Response(content, media_type=f"{CONSOLE_FILES[name]}; charset=utf-8", headers=headers)


async def cluster(gateway: Gateway, request: Request) -> Response:
    return json_response(
        gateway.service(Overview).shown(request.query_params.get("filter", ""), call_of(request).grant)
    )


async def placement(gateway: Gateway, request: Request) -> Response:
    return json_response(
        gateway.service(Overview).placed(request.query_params.get("filter", ""), call_of(request).grant)
    )


async def history(gateway: Gateway, request: Request) -> Response:
    query = request.query_params
    since_s = number(query, "since", 0.0, 0.0, math.inf)
    step_s = whole(query, "step_s", STEP_S, STEP_S, 600)
    if step_s % STEP_S:
        raise InvalidInput.at("step_s", f"expected a multiple of {STEP_S}")
    return json_response(gateway.service(Overview).history.since(since_s, step_s))


async def requests(gateway: Gateway, request: Request) -> Response:
    most = whole(request.query_params, "limit", 50, 1, 1000)
    return json_response({"requests": gateway.service(Overview).history.requests(most, call_of(request).grant)})


async def request(gateway: Gateway, request: Request) -> Response:
    note = gateway.service(Overview).history.find(request.path_params["request"], call_of(request).grant)
    if note is None:
        raise NotFound(
            "this gateway has no record of a request of yours with this id: it keeps records for one hour, and only of "
            "the slowest and the last failed requests of each minute; its log has lines of more requests"
        )
    return json_response(note)


async def request_log(gateway: Gateway, request: Request) -> Response:
    """Return the log lines of a request. Memory has only the newest lines, so the list may be empty."""
    return json_response(
        {"lines": gateway.service(Overview).log.lines_of(request.path_params["request"], call_of(request).grant)}
    )


_REQUEST = Parameter("request", "path", str, "Value of X-SIE-Request-ID.", "0192f0c1-7d3e-7000-8000-000000000000")
_FILTER = Parameter("filter", "query", str, "Only models with this in their name.")


def _row(path: str, handler: Any, summary: str, reply: Any, **more: Any) -> GatewayRoute:
    return control("GET", path, "other", handler, ("Operations", summary), reply, **more)


def _file(path: str, summary: str, media: str) -> GatewayRoute:
    """Return the route of a console file. The route needs no credential, because the file contains no data: the page
    asks its user for a key.
    """
    return _row(path, page, summary, Content(dict[str, Any], (media,)), scope=OPEN)


PLUGIN = Plugin(
    routes=(
        _row(
            "/v1/cluster",
            cluster,
            "The state of the cluster in brief: counts, workers and models, at most 50 of each",
            api.ClusterView,
            parameters=(_FILTER,),
        ),
        _row(
            "/v1/placement",
            placement,
            "The workers that should load each model, by lane, at most 50 models of a lane",
            api.PlacementView,
            parameters=(_FILTER,),
        ),
        _row(
            "/v1/history",
            history,
            "Requests, errors and latency by stage of the last hour, at this gateway",
            api.History,
            parameters=(
                Parameter("since", "query", float, "Only steps that end after this time, seconds since the epoch."),
                Parameter(
                    "step_s", "query", Annotated[int, Meta(ge=10, le=600, multiple_of=10)], "Seconds of a step.", "10"
                ),
            ),
        ),
        _row(
            "/v1/requests",
            requests,
            "Your slowest and some failed requests of the last hour at this gateway, the slowest first",
            api.SlowRequests,
            parameters=(Parameter("limit", "query", Annotated[int, Meta(ge=1, le=1000)], "How many at most."),),
        ),
        _row(
            "/v1/requests/{request}",
            request,
            "The record of one slow or failed request",
            api.SlowRequest,
            parameters=(_REQUEST,),
        ),
        _row(
            "/v1/requests/{request}/log",
            request_log,
            "What this gateway's log says of a request",
            api.RequestLog,
            parameters=(_REQUEST,),
        ),
        _file("/", "The console: try models, see the cluster", HTML),
        _file("/console/{file}", "Files of the console", "*/*"),
        *CONFIG_FORWARD,
    ),
    build=Overview.build,
)
