"""ASGI application of the gateway. `Edge` answers probes at once. For every other call, `Edge` checks the credential,
refuses a POST while the gateway drains, dispatches the call by `routes.TABLE`, and writes errors and metrics. With
SIE_CORS_ORIGINS, the CORS middleware in front of `Edge` answers preflight requests. FastAPI serves only the OpenAPI
document and its page. The headers of every reply come from `common_headers` in `sie_runtime/http/asgi.py`.

`Gate` checks the credential: each row of `routes.ROUTES` has a scope, and credentials have scopes.

    method, path ──► row of ROUTES ──► its scope ──► does the credential have it? ──► Grant
                       └ no row: NotFound, or 405 with `Allow`, for a caller with scope `read`

A path that is not in ROUTES is not served, so every route has a scope. Tests call each row of the table with each
credential (`tests/unit/test_auth.py`).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections.abc import MutableMapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

import sie_contracts
from sie_contracts import sdk_versions
from sie_contracts.errors import (
    SHUTTING_DOWN,
    GatewayTimeout,
    InternalFailure,
    InvalidInput,
    MethodNotAllowed,
    NotFound,
    NotReady,
    PermissionDenied,
    ShuttingDown,
    SIEError,
    Unauthenticated,
)
from sie_contracts.loopback import is_loopback
from sie_contracts.settings import Secret, SettingError, Settings
from sie_contracts.wire.configs import config_shape
from sie_gateway.admission.admission import key_of
from sie_gateway.admission.grant import ANYBODY, WORKERS_NAME, Grant
from sie_gateway.http.route_kinds import GatewayRoute
from sie_gateway.http.routes import PLUGINS, PROBES, TABLE, openapi_document
from sie_gateway.inference import telemetry
from sie_gateway.inference.call import (
    BodyIntake,
    BodyReader,
    Call,
    ClientGone,
    body_memory,
    bounded,
    check_length,
    native_shape,
)
from sie_gateway.inference.handler import InferenceRoute
from sie_gateway.inference.results import FailedRequest
from sie_gateway.operations import handlers
from sie_gateway.state import Gateway, GatewayReadiness
from sie_runtime import current_trace
from sie_runtime.http import config_routes
from sie_runtime.http.asgi import (
    BODY_ARRIVED,
    FIRST_BYTE,
    INCOMPRESSIBLE,
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
from sie_runtime.http.routes import ANY, FORM, OPEN, SCOPES, Match, bearer, check_type, plain_path
from sie_runtime.http.server import probes
from sie_runtime.keys import Key, Keys

if TYPE_CHECKING:
    from sie_runtime.spans import Tracer


USER_SCOPES = frozenset({"infer", "read", "pools"})
POLICY_VIOLATION = 1008  # close code of a websocket (RFC 6455)
# scopes that require a token even in auth mode `none`. Exception: routes with `local` require no token while the
# gateway listens only on loopback.
GUARDED = frozenset({"config", "admin"})


def require_tokens(settings: Settings) -> None:
    """Raise SettingError if the auth mode is `static` and no user token is set: no user could call the gateway."""
    if settings.auth_mode == "static" and not (settings.auth_token or settings.auth_tokens):
        raise SettingError("SIE_AUTH_MODE", "the mode `static` needs SIE_AUTH_TOKEN or SIE_AUTH_TOKENS")


# pairs (pattern of paths, error message): paths that clients often try, but that no gateway serves
_ELSEWHERE = (
    (
        re.compile(r"/v1/(chat/completions|completions|responses|generate|estimate|recommend)(/|$)"),
        "this server does not generate text: use /v1/encode, /v1/score or /v1/extract here, and a server of language"
        " models for generation",
    ),
    (
        re.compile(r"(/v1)?/(embed|embeddings)/."),
        "no such path; did you mean /v1/encode/{model}? /v1/embeddings takes the model in the body",
    ),
    (
        re.compile(r"(/v1)?/rerank/."),
        "no such path; did you mean /v1/score/{model}? /v1/rerank takes the model in the body",
    ),
    *(row for plugin in PLUGINS.loaded.values() for row in plugin.unserved),
)


class Gate:
    """Check of the credentials of a call. The comparison with static tokens takes constant time: it continues after a
    match.
    """

    def __init__(self, settings: Settings, keys: Keys | None = None, host: str = "") -> None:
        """Auth mode `token` requires `keys`; in every other mode, `keys` must be None. `host`: the address on which the
        gateway listens. Raises SettingError.
        """
        require_tokens(settings)
        if (settings.auth_mode == "token") != (keys is not None):
            raise SettingError(
                "SIE_AUTH_MODE", "the mode `token` requires the keys of a broker; no other mode may use them"
            )
        self._guarded = settings.auth_mode != "none"
        self._is_private = not self._guarded and is_loopback(host)
        self._pools = "admin" if settings.pool_write_role == "admin" else "pools"
        self._keys = keys
        self._reader = settings.config_read_token
        users = [*([settings.auth_token] if settings.auth_token else []), *(settings.auth_tokens or ())]
        self._static = [
            (token, _static(token, USER_SCOPES, f"static-{number}")) for number, token in enumerate(users, 1)
        ]
        self._has_admin = settings.admin_token is not None
        if settings.admin_token is not None:
            self._static.append((settings.admin_token, _static(settings.admin_token, frozenset(SCOPES), "admin")))

    def check(self, method: str, path: str, authorization: str, match: Match[GatewayRoute] | None = None) -> Grant:
        """Return the grant of a call that is allowed. The handshake of a websocket counts as a GET. `match`: routes of
        the path, if the caller has looked them up.

        Raises Unauthenticated, PermissionDenied, and NotReady if the keys are not read yet. For a key with an expiry
        time, NotReady also means that the broker's time is not read yet. An unknown path or method requires the scope
        `read`. A caller with this scope gets NotFound for an unknown path, and MethodNotAllowed for a method that this
        gateway does not serve.
        """
        if match is None:
            match = TABLE.match(path)
        row = match.methods.get("GET" if method == "HEAD" else method)
        grant = ANYBODY
        if row is None or row.scope != OPEN:
            scope = "read" if row is None else self._pools if row.scope == "pools" else row.scope
            is_open = row is not None and row.local and self._is_private
            if self._guarded or (scope in GUARDED and not is_open):
                grant = self._granted(scope, authorization, reads_config=row is not None and row.reader)
            # auth mode `none` requires no token, but an admin token allows more on routes with scope `pools` or ANY
            elif scope in ("pools", ANY) and authorization:
                # in auth mode `none`, all callers have the same owner key, so every caller may use the jobs, files and
                # pools of every other caller
                grant = replace(self._static_grant(bearer(authorization)) or ANYBODY, key=ANYBODY.key)
            if scope == ANY:
                grant = replace(grant, scopes=self._usable(grant.scopes))
        if row is None or not row.served:
            if not match.methods:
                for pattern, message in _ELSEWHERE:
                    if pattern.match(path):
                        raise NotFound(message)
                for name, remedy in PLUGINS.missing.items():
                    if name in path.split("/"):
                        raise NotFound(f"{name} is not installed at this gateway: {remedy}", reason="not_installed")
                near, is_double = TABLE.near(path), path.startswith("/v1/v1/")
                fault = "no such path: it begins with /v1 twice" if is_double else "no such path"
                base = ", and a base URL without /v1" if is_double else ""
                raise NotFound(f"{fault}; did you mean {near}{base}?" if near else f"{fault}; see /docs")
            elsewhere = (
                "; the config service (config_url in /health) takes the other methods"
                if path.startswith(config_routes.PREFIX)
                else ""
            )
            raise MethodNotAllowed(f"this path takes {match.allow} here{elsewhere}", allow=match.allow)
        return grant

    def of_key(self, key: str) -> Grant | None:
        """Return the current grant of the credential with this key; None if the credential is not valid any more. Used
        for work that continues after its call has ended, such as a job. Raises NotReady if the keys are not read yet.
        For a key with an expiry time, NotReady also means that the broker's time is not read yet.
        """
        if not key and not self._guarded:
            return replace(ANYBODY, scopes=self._usable(frozenset()))
        for _, grant in self._static:
            if grant.key == key:
                return grant
        if self._keys is None or not key:
            return None
        if not self._keys.loaded:
            raise NotReady("the keys have not been read from the broker yet")
        key_record = self._keys.of_id(key)
        return None if key_record is None or self._keys.ended(key_record) else _grant_of(key_record)

    def watched(self, path: str, authorization: str, send: Send) -> Send:
        """Wrap `send` of a websocket so that the credential is checked before each frame. If the credential is not
        valid any more, the websocket is closed with code 1008 in place of the frame.
        """

        async def checked(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "websocket.send":
                try:
                    self.check("GET", path, authorization)
                except SIEError as error:
                    message = {"type": "websocket.close", "code": POLICY_VIOLATION, "reason": error.code}
            await send(message)

        return checked

    def _granted(self, scope: str, authorization: str, *, reads_config: bool) -> Grant:
        token = bearer(authorization)
        grant = self._static_grant(token)
        if reads_config and self._reader is not None and self._reader.matches(token):
            return _static(self._reader, frozenset({scope}), WORKERS_NAME)
        if grant is None and token and self._keys is not None:
            grant = self._of_key(self._keys, token)
        if grant is not None and (scope == ANY or scope in grant.scopes):
            return grant
        if grant is not None:
            raise PermissionDenied(f"this token lacks the scope {scope}")
        if scope in GUARDED and not self._has_admin and self._keys is None:
            raise PermissionDenied(
                "this route needs SIE_ADMIN_TOKEN, which is not set: set it and start the gateway again"
            )
        raise Unauthenticated(
            "a token is needed: send it as Authorization: Bearer TOKEN" if not token else "this token is not known"
        )

    def _usable(self, scopes: frozenset[str]) -> frozenset[str]:
        """Return the scopes of all routes that a credential with `scopes` may call. In auth mode `none`, every
        credential has all scopes except GUARDED.
        """
        lets = (scopes & frozenset(SCOPES)) | (frozenset() if self._guarded else frozenset(SCOPES) - GUARDED)
        return lets | {"pools"} if self._pools in lets else lets - {"pools"}

    def _static_grant(self, token: str) -> Grant | None:
        grant = None
        for static_token, its_grant in self._static:
            if static_token.matches(token):
                grant = its_grant
        return grant

    def _of_key(self, keys: Keys, token: str) -> Grant | None:
        key = keys.find(token)
        if key is None:
            if not keys.loaded:
                raise NotReady("the keys have not been read from the broker yet")
            return None
        ended = keys.ended(key)
        if ended:
            raise Unauthenticated(f"this key {ended}")
        return _grant_of(key)


def _grant_of(key: Key) -> Grant:
    return Grant(key.id, frozenset(key.scopes), key.limits, key.id, key.caches)


def _static(token: Secret, scopes: frozenset[str], name: str) -> Grant:
    return Grant(key_of(token.reveal()), scopes, name=name)


_logger = logging.getLogger("sie.gateway")
# status of a call whose client disconnected before the reply was sent, as in nginx; appears only in metrics and logs
CLIENT_GONE = 499
CORS_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
CORS_AGE_S = 600  # seconds for which a browser caches the reply to a preflight request
MAX_VERSIONS = 1024  # largest number of client versions that are logged; further versions are ignored
_SDK = sdk_versions.HEADER
# beginnings of the names of endpoints whose replies are vectors; these replies stay uncompressed, as gzip hardly helps
_VECTORS = ("encode", "embed")
_MINOR = re.compile(r"[0-9]{1,6}\.[0-9]{1,6}(?![0-9])")
# (prefix of a path, format of its errors) for paths without a route
_SHAPES = ((config_routes.PREFIX, config_shape), *(row for plugin in PLUGINS.loaded.values() for row in plugin.shapes))
_STARTS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})


def create_app(gateway: Gateway, gate: Gate, readiness: GatewayReadiness, tracer: Tracer | None = None) -> App:
    """Build the application of the main port."""
    return _with_cors(Edge(gateway, gate, readiness, tracer), gateway.settings.cors_origins or ())


@functools.cache
def _pages() -> App:
    """Return the application of the OpenAPI document and its page. It is built for the first request for one of them,
    because FastAPI and pydantic take 0.4 s and 15 MB.
    """
    from fastapi_offline import FastAPIOffline

    app = FastAPIOffline(  # unlike FastAPI, serves the scripts of the API page itself, for use without internet
        title="SIE",
        version=sie_contracts.__version__,
        description="encode, score, extract: the small models behind search and RAG",
        docs_url="/docs",
        redoc_url=None,
        static_url="/docs/static",
        redirect_slashes=False,
    )
    about = app.openapi()
    # replaces FastAPI's schema, as the documentation of FastAPI advises; cached, because the build takes 0.4 s
    app.openapi = functools.cache(lambda: openapi_document(about))  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return cast(App, app)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope["sie.call"])


def _with_cors(app: App, origins: Sequence[str]) -> App:
    """Wrap `app` so that browsers let pages of these origins read its replies (https://fetch.spec.whatwg.org). Browser
    credentials stay forbidden: a page sends its key in a header, and the gateway sets no cookies.
    """
    if not origins:
        return app
    return cast(
        App,
        CORSMiddleware(
            cast(Any, app),
            allow_origins=origins,
            allow_methods=CORS_METHODS,
            allow_headers=["*"],
            expose_headers=["*"],
            max_age=CORS_AGE_S,
        ),
    )


def error_response(error: Exception, call: Call) -> Response:
    """Return the error reply for any exception. Any exception except SIEError, FailedRequest and HTTPException is a
    fault of the server: log it with its traceback, and report INTERNAL_ERROR.
    """
    errors: list[dict[str, Any]] | None = None
    headers: dict[str, str] = {}
    if isinstance(error, FailedRequest):
        errors = error.errors
        error = error.error
    elif isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        if error.status_code == 404:
            error = NotFound("no such path")
        else:
            error = InvalidInput(str(error.detail), reason="malformed")
    if not isinstance(error, SIEError):
        _logger.error("request %s failed unexpectedly", call.id, exc_info=error, extra={"request_id": call.id})
        error = InternalFailure("the server failed; its log has the details under this request id")
    call.code, call.message = error.code, error.message
    error = call.dialect.spoken(error) if call.shape is native_shape else error
    headers |= error_headers(error)
    status, body = call.shape(error, call.id, errors)
    return JSONResponse(error.extras if status == 202 else body, status, headers)


class ClientVersions:
    """Log of the minor versions of client libraries, each once: operators see which clients a change would break."""

    def __init__(self) -> None:
        self._met: set[str] = set()

    def met(self, version: str) -> None:
        """Log the minor version of a client once, `1.2` for `1.2.3`. No other text of the client enters the log."""
        match = _MINOR.match(version)
        if match is not None and match[0] not in self._met and len(self._met) < MAX_VERSIONS:
            self._met.add(match[0])
            _logger.info("a client library of version %s is in use", match[0])


class Edge:
    """ASGI application that authorises, dispatches and counts every call except probes.

    It calls the handlers of routes without FastAPI, whose layers would double the gateway's time for a request. FastAPI
    serves only the OpenAPI document and its page.
    """

    def __init__(self, gateway: Gateway, gate: Gate, readiness: GatewayReadiness, tracer: Tracer | None) -> None:
        self._gateway = gateway
        self._gate = gate
        self._readiness = readiness
        self._tracer = tracer
        self._intake = BodyIntake(body_memory(gateway.settings))
        self._probes = probes(readiness.not_ready, None, functools.partial(_details, gateway))
        self._root = gateway.settings.root_path or ""
        self._versions = ClientVersions()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_socket = scope["type"] == "websocket"
        if scope["type"] != "http" and not is_socket:
            return
        # the HTTP server sets FIRST_BYTE, the time of the request's first byte, except for a websocket's handshake
        received_s: float = scope.get(FIRST_BYTE) or time.perf_counter()
        headers = headers_of(scope)
        path = scope["path"]
        if "//" in path or path.endswith("/"):
            path = plain_path(path, scope.get("raw_path") or b"")
        if self._root and (path + "/").startswith(self._root + "/"):
            path = path[len(self._root) :] or "/"
        if path in PROBES and not is_socket:
            await self._probes({**scope, "path": path}, receive, send)
            return
        connection = scope
        # ASGI requires the root path at the start of `path`; the table of routes uses `path` without the root path.
        scope = {**scope, "path": self._root + path, "root_path": self._root}
        call = Call(
            scope[REQUEST_ID],
            received_s,
            headers,
            path=path,
            receive=receive,
            client=(scope.get("client") or ("",))[0],
            dialect=sdk_versions.dialect_of(headers[_SDK]) if _SDK in headers else sdk_versions.NATIVE,
        )
        scope["sie.call"] = call
        # A pipelined request runs in the previous request's task. Without `begin_trace`, it would inherit that
        # request's trace.
        if self._tracer is not None or "traceparent" in headers or current_trace.TRACE_ID.get() is not None:
            telemetry.begin_trace(None if is_socket else self._tracer, call, scope.get("method", "GET"))
            connection[TRACE_ID] = call.span.trace_id if call.span is not None else None
        if version := headers.get(_SDK) or headers.get(sdk_versions.OWN_HEADER):
            self._versions.met(version)
        status, is_whole = 0, False

        async def observed(message: Any) -> None:
            nonlocal status, is_whole
            if message["type"] in _STARTS:
                status, is_whole = message.get("status", 101), is_socket
            elif message["type"] == "http.response.body":
                is_whole = not message.get("more_body")
            await send(message)

        method = scope.get("method", "GET")
        route: GatewayRoute | None = None
        try:
            match = TABLE.match(path)
            scope["path_params"] = match.parameters
            # if the path has no route with this method, take another route of the path: it sets the metric label and
            # the format of the error
            route = match.methods.get(method) or match.route("GET") or next(iter(match.methods.values()), None)
            if route is not None and not is_socket:
                call.shape = route.shape
                if isinstance(route, InferenceRoute):
                    call.labels["endpoint"] = route.endpoint
                    connection[INCOMPRESSIBLE] = route.endpoint.startswith(_VECTORS)
            else:
                call.shape = next((shape for prefix, shape in _SHAPES if path.startswith(prefix)), call.shape)
            call.grant = grant = self._gate.check(method, path, headers.get("authorization", ""), match)
            for admitted in self._gateway.listeners.admitted:
                admitted(call)
            if grant.limits.tokens_per_minute:
                call.charge = self._gateway.quotas.charge(grant.key, grant.limits)
            if self._readiness.draining and method == "POST":
                raise ShuttingDown(SHUTTING_DOWN)
            if is_socket:
                watched = self._gate.watched(path, headers.get("authorization", ""), observed)
                await self._gateway.status.show(
                    path, scope["query_string"].decode("latin-1"), call.grant, scope, receive, watched
                )
            else:
                assert route is not None, "`Gate.check` refuses a path without a route"
                await self._dispatch(call, route, scope, receive, observed)
        except (ClientGone, ClientDisconnect):  # the client has disconnected, so it would not read a reply
            status = CLIENT_GONE
        # This is the outermost handler of errors. If `status` is set, a reply has begun: either FastAPI has sent a
        # whole error reply and then raised the error again, or the reply is incomplete.
        except Exception as error:
            # no row of the table has the method OPTIONS: `Gate.check` raises this error for a caller with access
            if method == "OPTIONS" and isinstance(error, MethodNotAllowed):
                await reply_to_options(observed, error.allow)
            elif not status:
                await error_response(error, call)(scope, receive, observed)
            elif is_socket:
                raise
            elif not is_whole:  # the server closes the connection of an incomplete reply, so that the client notices
                status = InternalFailure.status
                _logger.error(
                    "request %s: its reply broke off before it was complete",
                    call.id,
                    exc_info=error,
                    extra={"request_id": call.id},
                )
        except asyncio.CancelledError:  # the process ends; the HTTP server replies or closes the connection
            status = status if is_whole else InternalFailure.status
            raise
        finally:
            # Put the charged tokens of a failed call back, except after status 499 or 504, when its work may have run.
            # A call with a result has settled its charge, so that this refund does nothing.
            if call.charge is not None and status not in (CLIENT_GONE, GatewayTimeout.status):
                call.charge.refund()
            seconds = None if is_socket else time.perf_counter() - received_s
            endpoint = "ws" if is_socket else route.endpoint if route is not None else "other"
            self._gateway.metrics.answered(endpoint, status, call.labels.get("machine_profile", ""), seconds)
            if call.span is not None:
                telemetry.end_trace(call, call.span, endpoint, status)
            if "endpoint" in call.labels and seconds is not None:
                if status != CLIENT_GONE:
                    self._gateway.peers.answered()
                for ended in self._gateway.listeners.ended:
                    ended(call, endpoint, status, seconds)

    async def _dispatch(self, call: Call, route: GatewayRoute, scope: Scope, receive: Receive, send: Send) -> None:
        headers, content = call.headers, route.body
        if content is not None and headers.get("content-type") not in content.media and FORM not in content.media:
            check_type(headers, content.media)  # an uploaded file may have any content type
        if isinstance(route, InferenceRoute):
            call.model = scope["path_params"].get("model")
            if "content-encoding" in headers:
                receive = decoded(scope["method"], headers, receive)
            most = self._gateway.settings.max_body_bytes
            most = min(most, call.grant.limits.body_bytes or most)
            call.reader = reader = BodyReader(
                self._intake,
                call.grant.key,
                receive,
                most,
                announced=headers.get("content-length", ""),
                is_whole=BODY_ARRIVED in scope,
            )
            try:
                await self._gateway.inference.answer(call, route, reader, send)
            finally:
                reader.close()
            return
        check_length(headers.get("content-length", ""), route.body_bytes)
        plain = self._intake.paced(receive)
        if "content-encoding" in headers:
            plain = decoded(scope["method"], headers, plain)
        receive = bounded(plain, limit=route.body_bytes, within_s=route.body_s)
        scope = {**scope, "method": route.method}  # a HEAD is a GET; the HTTP server omits the reply's body
        if route.handler is None:
            pages = await asyncio.to_thread(_pages)
            await pages(scope, receive, documented(send))
            return
        response = await route.handler(self._gateway, Request(scope, receive))
        await response(scope, receive, send)


def _details(gateway: Gateway) -> dict[str, Any]:
    healthy = sum(worker.info.healthy for worker in gateway.status.workers())
    return {
        "healthy_workers": healthy,
        **({"plugins": dict(faults)} if (faults := gateway.status.plugin_faults) else {}),
    }


def metrics_app(gateway: Gateway, readiness: GatewayReadiness) -> App:
    """Build the application of the metrics port, which requires no token. The port serves metrics, probes and the
    figures that an autoscaler polls, and nothing else.
    """
    inner = probes(readiness.not_ready, gateway.metrics.registry, functools.partial(_details, gateway))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        match = TABLE.match(scope["path"])
        route = match.route("GET")
        if scope["type"] == "http" and route is not None and route.handler is handlers.scaling:
            await _scaling(gateway, match, scope, receive, send)
            return
        await inner(scope, receive, send)

    return app


async def _scaling(gateway: Gateway, match: Match[GatewayRoute], scope: Scope, receive: Receive, send: Send) -> None:
    if scope["method"] == "OPTIONS":
        await reply_to_options(send, match.allow)
        return
    try:
        if match.route(scope["method"]) is None:
            raise MethodNotAllowed(f"this path takes {match.allow}", allow=match.allow)
        answer = await handlers.scaling(gateway, Request({**scope, "path_params": match.parameters}, receive))
    except Exception as error:  # noqa: BLE001 the outermost handler of a request
        answer = error_response(error, Call(scope[REQUEST_ID], time.perf_counter(), {}))
    await answer(scope, receive, send)
