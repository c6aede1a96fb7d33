"""Class of the rows in the gateway's table of routes, and the request parameters that several routes have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from sie_contracts.api.shapes import MINI
from sie_gateway.inference.call import CONTROL_BYTES, CONTROL_S, ErrorShape, native_shape
from sie_runtime.http import config_routes
from sie_runtime.http.routes import Content, Parameter, Route


@dataclass(frozen=True, kw_only=True)
class GatewayRoute(Route):
    """Route of a gateway. `handler` is called with the Gateway and a Request. A route without a handler is a probe, a
    websocket, or a path of the FastAPI application that serves the OpenAPI document. `shape` builds the body of an
    error reply, in the format of the route's clients. `shapes`: further such functions, for requests whose body has the
    format of another API.
    """

    body_bytes: int = CONTROL_BYTES  # largest number of bytes of a body that the handler reads
    body_s: float = CONTROL_S  # seconds in which the whole body must arrive
    shape: ErrorShape = native_shape
    shapes: tuple[ErrorShape, ...] = ()


_ShortText = Annotated[str, Meta(max_length=128)]
_TimeoutMs = Annotated[int, Meta(ge=1, le=600_000)]
HEADERS = (
    Parameter("X-SIE-Timeout-Ms", "header", _TimeoutMs, "Time budget. Work of the request after this time is dropped."),
    Parameter("X-SIE-Priority", "header", Literal["interactive", "bulk"], "bulk: interactive work may go first."),
    Parameter("X-SIE-Pool", "header", str, "The pool that serves the request."),
    Parameter("X-SIE-MACHINE-PROFILE", "header", str, "The machine profile that serves the request, or pool/profile."),
    Parameter(
        "X-SIE-Route-Key",
        "header",
        _ShortText,
        "For an alias with several models: requests with the same key get the same model.",
    ),
    Parameter(
        "X-SIE-Explain",
        "header",
        Literal["1", "0"],
        "1: the reply has `explain`, the worker and times of each chunk, and headers with the times of the stages.",
    ),
    Parameter(
        "X-SIE-Strict",
        "header",
        Literal["true", "false"],
        "true: an option that the model does not know is an error, not a warning.",
    ),
    Parameter(
        "X-SIE-On-Item-Error",
        "header",
        Literal["slot", "fail"],
        "slot: an error replaces a failed input. fail: the request fails. Public SDKs of SIE get fail by default.",
    ),
    Parameter(
        "X-SIE-Remote", "header", Literal["forbid"], "No other server gets the inputs. Another value is refused."
    ),
    Parameter(
        "X-SIE-Cache",
        "header",
        Literal["no-store", "only"],
        "no-store: answers are neither taken from the cache nor cached. only: 404 if an answer is not cached.",
    ),
    Parameter("X-Request-ID", "header", _ShortText, "Returned with the reply."),
)
PLACEHOLDERS = {
    **config_routes.PLACEHOLDERS,
    "model": Parameter(
        "model", "path", str, "[bundle:/]id[@revision][:profile]; slashes as they are or as %2F", example=MINI
    ),
    "name": Parameter("name", "path", example="search"),
    "lane": Parameter("lane", "path", str, "pool.machine_profile.bundle", "_default.l4.default"),
    "file": Parameter("file", "path", example="swagger-ui.css"),
}


def control(
    method: str,
    path: str,
    endpoint: str,
    handler: Any,
    names: tuple[str, str],
    reply: Any,
    *,
    scope: str = "read",
    status: int = 200,
    body: Any = None,
    **more: Any,
) -> GatewayRoute:
    """Build a route of the control API. `names`: (tag, summary)."""
    return GatewayRoute(
        method=method,
        path=path,
        scope=scope,
        summary=names[1],
        tag=names[0],
        endpoint=endpoint,
        handler=handler,
        body=body if body is None or isinstance(body, Content) else Content(body),
        replies={status: reply if isinstance(reply, Content) else Content(reply)},
        **more,
    )
