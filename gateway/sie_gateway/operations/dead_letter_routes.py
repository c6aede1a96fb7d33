"""Routes of `/v1/dead-letters` and their handlers, for administrators. Dead letters: work that workers gave up."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from sie_contracts.api import dead_letters as api
from sie_contracts.errors import InvalidInput
from sie_gateway.http.route_kinds import GatewayRoute, control
from sie_gateway.operations.dead_letters import EXAMINED, FILTERS, LETTER_S, REPLAY_S, Filter
from sie_gateway.operations.handlers import call_of, json_response, number, whole
from sie_runtime.http.routes import Parameter

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

PATH = "/v1/dead-letters"
_logger = logging.getLogger("sie.gateway.dead_letters")


def _checked(request: Request, *more: str) -> None:
    """Raise InvalidInput for an unknown parameter: a misspelt filter must not match all letters."""
    for name in request.query_params:
        if name not in ("pool", *more):
            raise InvalidInput.at(name, f"unknown parameter, expected {', '.join(('pool', *more))}")


def _pool(gateway: Gateway, request: Request) -> str:
    return request.query_params.get("pool") or gateway.dead_letters.pool


def _filter(gateway: Gateway, request: Request) -> Filter:
    named = {name: request.query_params.get(name, "") for name in FILTERS}
    return Filter(_pool(gateway, request), **named)


async def page(gateway: Gateway, request: Request) -> Response:
    _checked(request, *FILTERS, "before", "limit")
    before = whole(request.query_params, "before", 0, 0, 1 << 53)
    limit = whole(request.query_params, "limit", 50, 1, 200)
    return json_response(await gateway.dead_letters.page(_filter(gateway, request), before, limit))


async def show(gateway: Gateway, request: Request) -> Response:
    _checked(request)
    return json_response(await gateway.dead_letters.show(_pool(gateway, request), request.path_params["letter"]))


async def replay(gateway: Gateway, request: Request) -> Response:
    _checked(request, "timeout_s")
    timeout_s = number(request.query_params, "timeout_s", LETTER_S, 1, REPLAY_S)
    name, pool = request.path_params["letter"], _pool(gateway, request)
    done = await gateway.dead_letters.replay(pool, name, timeout_s)
    _logger.info("%s ran dead letter %s of pool %s again: %s", call_of(request).grant.name, done.id, pool, done.state)
    return json_response(done)


async def replay_all(gateway: Gateway, request: Request) -> Response:
    _checked(request, *FILTERS, "after", "limit", "timeout_s")
    timeout_s = number(request.query_params, "timeout_s", LETTER_S, 1, REPLAY_S)
    after, limit = whole(request.query_params, "after", 0, 0, 1 << 53), whole(request.query_params, "limit", 20, 1, 100)
    letters = _filter(gateway, request)
    done = await gateway.dead_letters.replay_all(letters, after, limit, timeout_s)
    answered = sum(entry.removed for entry in done.replayed)
    summary = call_of(request).grant.name, len(done.replayed), letters.pool, answered
    _logger.info("%s ran %d dead letters of pool %s again: %d were answered", *summary)
    return json_response(done)


async def purge(gateway: Gateway, request: Request) -> Response:
    _checked(request)
    name, pool = request.path_params["letter"], _pool(gateway, request)
    done = await gateway.dead_letters.purge(pool, name)
    if done.removed:
        _logger.info("%s permanently removed dead letter %s of pool %s", call_of(request).grant.name, name, pool)
    return json_response(done)


async def purge_all(gateway: Gateway, request: Request) -> Response:
    """Remove the letters that match the filters. Raises InvalidInput if neither a filter nor `all` is set, or if both
    are set.
    """
    _checked(request, *FILTERS, "all")
    letters = _filter(gateway, request)
    if letters.is_all != (request.query_params.get("all") == "true"):
        raise InvalidInput.at(
            "all",
            f"expected either true, to remove all dead letters of pool {letters.pool}, or one of the filters "
            f"{', '.join(FILTERS)}",
        )
    done = await gateway.dead_letters.purge_all(letters)
    _logger.info(
        "%s permanently removed %d dead letters of pool %s", call_of(request).grant.name, done.removed, letters.pool
    )
    return json_response(done)


_POOL = Parameter("pool", "query", str, "A pool that is no reservation. Default: the pool of the gateway.")
_WANTED = (
    _POOL,
    Parameter("lane", "query", str, "Only work of this lane: pool.machine_profile.bundle."),
    Parameter("model", "query", str, "Only work of this model."),
    Parameter("code", "query", str, "Only letters whose error has this code."),
    Parameter("reason", "query", str, "Only letters whose error has this reason."),
)
_SEQUENCE = Annotated[int, Meta(ge=0)]
_TIMEOUT = Parameter(
    "timeout_s",
    "query",
    Annotated[float, Meta(ge=1, le=REPLAY_S)],
    f"Time budget in seconds for a dead letter's work, and longest wait for its answer; {LETTER_S:g} by default.",
)
_ONE = Parameter("letter", "path", str, "The id of the letter, as the list has it.", "3f1c0a9be274")


def _row(
    method: str, path: str, handler: Any, summary: str, reply: Any, parameters: tuple[Parameter, ...]
) -> GatewayRoute:
    names = ("Dead letters", summary)
    return control(method, PATH + path, "other", handler, names, reply, scope="admin", parameters=parameters)


DEAD_LETTERS: tuple[GatewayRoute, ...] = (
    _row(
        "GET",
        "",
        page,
        f"Dead letters (work that workers gave up), newest first, without inputs; at most {EXAMINED} are examined",
        api.DeadLetterPage,
        (
            *_WANTED,
            Parameter("before", "query", _SEQUENCE, "Only letters with a lower sequence: `next` of the previous page."),
            Parameter("limit", "query", Annotated[int, Meta(ge=1, le=200)], "How many at most; 50 by default."),
        ),
    ),
    _row(
        "DELETE",
        "",
        purge_all,
        "Delete the dead letters that match the filters, with the inputs in them",
        api.Purged,
        (*_WANTED, Parameter("all", "query", Literal["true"], "Required if there is no filter other than `pool`.")),
    ),
    _row(
        "POST",
        "/replay",
        replay_all,
        f"Run again the dead letters that match the filters, oldest first, for at most {REPLAY_S:g} seconds",
        api.ReplayedAll,
        (
            *_WANTED,
            Parameter("after", "query", _SEQUENCE, "Only letters with a higher sequence: `next` of the last answer."),
            Parameter("limit", "query", Annotated[int, Meta(ge=1, le=100)], "How many at most; 20 by default."),
            _TIMEOUT,
        ),
    ),
    _row("GET", "/{letter}", show, "One dead letter, without its inputs", api.DeadLetterInfo, (_POOL, _ONE)),
    _row("DELETE", "/{letter}", purge, "Delete one dead letter", api.Purged, (_POOL, _ONE)),
    _row(
        "POST",
        "/{letter}/replay",
        replay,
        "Run one dead letter again; it is removed when every input has a value",
        api.Replayed,
        (_POOL, _ONE, _TIMEOUT),
    ),
)
