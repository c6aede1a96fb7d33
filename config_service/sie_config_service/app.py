"""HTTP application of the config service. A request for a route passes access control, then the route's handler. Probes
and /metrics need no token.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from typing import Any, cast

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import sie_contracts
from sie_broker import BrokerError
from sie_config_service.handlers import json_response
from sie_config_service.routes import TABLE, openapi_document
from sie_config_service.state import ConfigService
from sie_contracts.errors import (
    InternalFailure,
    InvalidInput,
    MethodNotAllowed,
    NotFound,
    QueueUnavailable,
    SIEError,
)
from sie_contracts.wire import configs
from sie_runtime.http.asgi import (
    REQUEST_ID,
    TRACE_ID,
    App,
    Receive,
    Scope,
    Send,
    documented,
    error_headers,
    headers_of,
    reply_to_options,
)
from sie_runtime.http.coding import decoded
from sie_runtime.http.routes import check_type, plain_path
from sie_runtime.http.server import probes
from sie_runtime.metrics_table import OTHER
from sie_runtime.tracing import begin_request, end_request

# origins of the scripts and styles that FastAPI's page /docs loads
PAGE_FILES = "https://cdn.jsdelivr.net https://fastapi.tiangolo.com"
CLIENT_GONE = 499  # status, in metrics only, of a request whose client disconnected; gateways use the same number
_POLLED = ("epoch", "export")  # endpoints without traces, because every gateway and worker polls them
_logger = logging.getLogger("sie.config")


@functools.cache
def _pages() -> App:
    """Return the application of the OpenAPI document and its page. It is built for the first request for one of them,
    because FastAPI and pydantic take 0.3 s and 15 MB.
    """
    from fastapi import FastAPI

    app = FastAPI(title="SIE config service", version=sie_contracts.__version__, redoc_url=None, redirect_slashes=False)
    about = app.openapi()
    # FastAPI's documented way to replace the OpenAPI document; the result is cached, because building it takes 0.4 s
    app.openapi = functools.cache(lambda: openapi_document(about))  # type: ignore[method-assign]
    for kind in (HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    return cast(App, app)


def create_app(service: ConfigService) -> App:
    inner = probes(service.not_ready, service.metrics.registry)

    async def edge(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = plain_path(scope["path"], scope.get("raw_path") or b"")
        connection, scope = scope, {**scope, "path": path}
        if not path.startswith(("/v1/", "/docs", "/openapi.json")):
            await inner(scope, receive, send)
            return
        match = TABLE.match(path)
        route = match.route(scope["method"]) or next(iter(match.methods.values()), None)
        endpoint = OTHER if route is None else route.endpoint
        received_s = time.perf_counter()
        request_id = scope[REQUEST_ID]
        headers = headers_of(scope)
        status, code = 0, b""  # status 0: no reply was sent yet
        tracer = None if endpoint in _POLLED else service.tracer
        _, span = begin_request(tracer, headers, scope["method"], request_id, received_s)
        if span is not None:
            connection[TRACE_ID] = span.trace_id

        async def tagged(message: Any) -> None:
            nonlocal status, code
            if message["type"] == "http.response.start":
                status, code = message["status"], dict(message.get("headers", ())).get(b"x-sie-error-code", b"")
            await send(message)

        try:
            scope["sie.author"] = service.gate.check(scope["method"], match, headers.get("authorization", ""))
            if ".." in path.split("/"):
                raise InvalidInput("path: expected no `..` in it", reason="malformed", param="path")
            assert route is not None, "a path without a route is not let in"
            scope["method"] = route.method  # a HEAD is a GET; the HTTP server omits the reply's body
            if route.handler is None:
                page = documented(tagged, PAGE_FILES)
                pages = await asyncio.to_thread(_pages)
                await pages(scope, receive, page)
            else:
                if route.body is not None:
                    check_type(headers, route.body.media)
                body = decoded(scope["method"], headers, receive) if "content-encoding" in headers else receive
                request = Request({**scope, "path_params": match.parameters}, body)
                await (await route.handler(service, request))(scope, receive, tagged)
        except ClientDisconnect:  # the client disconnected before it had sent the whole body
            status = CLIENT_GONE
        except Exception as error:  # noqa: BLE001 outermost handler; FastAPI raises an error again after its reply
            # no row of the table has the method OPTIONS: the gate raises this error for a caller with access
            if connection["method"] == "OPTIONS" and isinstance(error, MethodNotAllowed):
                await reply_to_options(tagged, error.allow)
            elif not status:
                await _answer_to(error, request_id)(scope, receive, tagged)
        finally:
            # no status: the request was cancelled, because this process ends
            status = status or InternalFailure.status
            service.metrics.answered(endpoint, connection["method"], status, time.perf_counter() - received_s)
            if span is not None:
                end_request(span, "configs", status, code.decode())

    return edge


async def _on_error(request: Request, error: Exception) -> Response:
    return _answer_to(error, request.scope[REQUEST_ID])


def _answer_to(error: Exception, request_id: str) -> Response:
    """Return the reply to an exception. An unexpected exception is logged; its reply has the code INTERNAL_ERROR."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        error = NotFound("no such path; see /docs")
    elif isinstance(error, BrokerError):
        _logger.warning("request %s: %s", request_id, error)
        error = QueueUnavailable("the config service could not reach the broker: try again")
    if not isinstance(error, SIEError):
        _logger.error("request %s failed", request_id, exc_info=error)
        error = InternalFailure("the config service failed; its log has the details under this request id")
    headers |= error_headers(error)
    status, body = configs.config_shape(error, request_id, None)
    return json_response(body, headers, status)
