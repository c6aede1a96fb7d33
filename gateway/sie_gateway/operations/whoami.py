"""Route that returns the name and the scopes of the caller's credential."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from sie_contracts.api import dead_letters as api
from sie_gateway.http.route_kinds import GatewayRoute, control
from sie_gateway.operations.handlers import call_of, json_response
from sie_runtime.http.routes import ANY, SCOPES

if TYPE_CHECKING:
    from sie_gateway.state import Gateway


async def whoami(gateway: Gateway, request: Request) -> Response:
    grant = call_of(request).grant
    return json_response(
        api.Whoami(
            name=grant.name,
            scopes=[scope for scope in SCOPES if scope in grant.scopes],
            auth_mode=gateway.settings.auth_mode,
        )
    )


WHOAMI: tuple[GatewayRoute, ...] = (
    control(
        "GET",
        "/v1/whoami",
        "other",
        whoami,
        ("Operations", "The scopes of the caller's credential"),
        api.Whoami,
        scope=ANY,
        reader=True,
    ),
)
