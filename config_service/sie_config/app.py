"""The config service over HTTP: reads of the catalogue, its epoch and export, and the writes that nobody else takes.

request ──► Gate ──► body, at most 1 MiB ──► Document ──► Writer ──► reply with the new revision as ETag
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import sie_contracts
from sie_broker import BrokerError
from sie_config.access import Gate
from sie_config.documents import Document, difference, read
from sie_config.metrics import Metrics
from sie_config.mirror import Held, bundles_of
from sie_config.store import CatalogueStore, digest_of
from sie_config.workers import Workers
from sie_config.writes import Asked, Edit, Edits, Writer, profiles_of
from sie_contracts import configs
from sie_contracts.aliases import is_alias
from sie_contracts.errors import (
    GatewayTimeout,
    InternalFailure,
    InvalidInput,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    QueueUnavailable,
    SIEError,
)
from sie_contracts.names import did_you_mean
from sie_contracts.settings import Settings
from sie_contracts.trust import Trust
from sie_runtime.http import App, Receive, Scope, Send, common_headers, headers_of, probes, uuid7
from sie_runtime.tracing import begin_request, end_request

if TYPE_CHECKING:
    from sie_runtime.spans import Tracer

CLIENT_GONE = 499  # in metrics only, as at a gateway
MAX_BODY_BYTES = 1 << 20
BODY_S = 30.0
MAX_KEY_CHARS = 255
WORKER_TIMEOUT_S = 15.0  # silence after which a worker no longer counts
_MODELS = "/v1/configs/models"
_POLLED = ("/v1/configs/epoch", "/v1/configs/export")  # by every gateway and worker, and not traced
_logger = logging.getLogger("sie.config")


class ConfigService:
    """What the routes share. `store` is None until the broker was reached and the catalogue seeded."""

    def __init__(self, settings: Settings) -> None:
        self.leaving = False  # no new connections are wanted; what comes is answered
        self.store: CatalogueStore | None = None
        self.writer: Writer | None = None
        self.trust: Trust | None = None
        self.workers = Workers(WORKER_TIMEOUT_S)
        self.gate = Gate(settings)
        self.tracer: Tracer | None = None
        self.metrics = Metrics(lambda: self.store.last_read if self.store is not None else None)

    def begin(self, store: CatalogueStore, trust: Trust) -> None:
        """The catalogue is there. `trust` says what an entry that is written over HTTP may ask for."""
        self.store, self.writer, self.trust = store, Writer(store), trust

    def not_ready(self) -> str | None:
        if self.leaving:
            return "draining"
        return None if self.store is not None else "the catalogue is not built"

    def require(self) -> CatalogueStore:
        if self.store is None:
            raise QueueUnavailable("the catalogue is not built yet: no broker")
        return self.store

    async def edits(self) -> Edits:
        store = self.require()
        assert self.trust is not None
        return Edits(store, await store.bundles(), self.trust)

    async def write(
        self,
        request: Request,
        operation: str,
        model: str,
        edit: Edit,
        body: bytes,
        profiles: Collection[str] | None = None,
    ) -> Response:
        """Do one write and answer it."""
        self.require()
        assert self.writer is not None
        dry_run, force = _flags(request, "dry_run", "force")
        answered = await self.writer.write(
            Asked(
                operation,
                model,
                edit,
                digest_of(operation.encode(), model.encode(), body),
                _key(request),
                _if_match(request),
                dry_run,
                profiles,
                force,
                request.scope["sie.author"],
            )
        )
        status = 201 if answered.created and not answered.replayed else 200
        return _json(answered.body, {"ETag": f'"{answered.body["revision"]}"'}, status)


def create_app(service: ConfigService) -> App:
    app = FastAPI(title="SIE config service", version=sie_contracts.__version__, redoc_url=None, redirect_slashes=False)
    _reads(app, service)
    _writes(app, service)
    for kind in (SIEError, BrokerError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    inner = probes(service.not_ready, service.metrics.registry)

    async def edge(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if not scope["path"].startswith(("/v1/", "/docs", "/openapi.json")):
            await inner(scope, receive, send)
            return
        received_s, path = time.perf_counter(), scope["path"]
        request_id = scope["sie.request_id"] = uuid7()
        headers = headers_of(scope)
        status, code = 0, b""  # none yet
        tracer = None if path in _POLLED else service.tracer
        _, span = begin_request(tracer, headers, scope["method"], request_id, received_s)

        async def tagged(message: Any) -> None:
            nonlocal status, code
            if message["type"] == "http.response.start":
                status, code = message["status"], dict(message.get("headers", ())).get(b"x-sie-error-code", b"")
                own = common_headers(headers, request_id, span.trace_id if span is not None else None)
                message["headers"] = [*message.get("headers", ()), *own]
            await send(message)

        try:
            scope["sie.author"] = service.gate.check(scope["method"], path, headers.get("authorization", ""))
            if ".." in path.split("/"):
                raise InvalidInput("path: expected no `..` in it", reason="malformed", param="path")
            await app({**scope, "path": path.removesuffix("/")}, receive, tagged)  # one final slash says nothing
        except Exception as error:  # noqa: BLE001  the root of a request; what FastAPI has answered already it raises again
            if not status:
                await _answer_to(error, request_id)(scope, receive, tagged)
        finally:
            status = status or InternalFailure.status  # cancelled: this process ends, and its server says as much
            service.metrics.answered(scope["path"], scope["method"], status, time.perf_counter() - received_s)
            if span is not None:
                end_request(span, "configs", status, code.decode())

    return edge


def _reads(app: FastAPI, service: ConfigService) -> None:
    @app.get(_MODELS, summary="All models")
    async def models() -> Response:
        found = (await service.require().snapshot()).live
        return _json(
            {
                "models": [
                    configs.listed(model, stored.entry or {}, stored.source) for model, stored in sorted(found.items())
                ]
            }
        )

    @app.get(_MODELS + "/{model:path}/history", summary="The revisions of a model, newest first")
    async def history(model: str) -> Response:
        revisions = await service.require().history(model)
        if not revisions:
            raise await service.require().not_found(model)
        return _json(
            {
                "model_id": model,
                "revisions": [
                    {
                        "revision": each.revision,
                        "created_at": each.created_at,
                        "operation": each.operation,
                        "author": each.author or each.source,
                        "changes": [] if before is None else difference(before.entry, each.entry),
                    }
                    for each, before in itertools.zip_longest(revisions, revisions[1:])
                ],
            }
        )

    @app.get(_MODELS + "/{model:path}/status", summary="Which gateways and workers serve which revision of a model")
    async def status(model: str) -> Response:
        store = service.require()
        read = await store.snapshot()
        held = read.held.get(model, Held())
        if held.stored is None or held.entry is None:
            raise await store.not_found(model)
        bundles = (
            None
            if is_alias(held.entry)
            else {
                bundle: (configs.bundle_hash(read.revisions(bundle)), service.workers.of(bundle))
                for bundle in bundles_of(read.bundles, held.entry)
            }
        )
        since = f"{read.created}:{held.written}"
        return _json(
            configs.model_status(
                model,
                held.revision,
                read.epoch,
                since,
                bundles,
                service.workers.gateways(),
                await store.revisions_at(model),
                held.stored.source,
            )
        )

    @app.get(_MODELS + "/{model:path}", summary="One model")
    async def model(model: str, request: Request) -> Response:
        held = await service.require().held(model)
        if held.entry is None:
            raise await service.require().not_found(model)
        return _document(request, held.entry, configs.JSON, {"ETag": f'"{held.revision}"'})

    @app.get("/v1/configs/bundles", summary="All bundles")
    async def bundles() -> Response:
        return _json(configs.bundle_list(await service.require().bundles()))

    @app.get("/v1/configs/bundles/{bundle:path}", summary="One bundle")
    async def bundle(bundle: str, request: Request) -> Response:
        return _document(request, configs.bundle_of(await service.require().bundles(), bundle), configs.YAML)

    @app.post("/v1/configs/resolve", summary="What a model's name means")
    async def resolve(request: Request) -> Response:
        body = await _body(request)
        return _json(configs.resolution(await service.require().catalogue(), body))

    @app.get("/v1/configs/epoch", summary="The epoch: equal epochs are equal catalogues")
    async def epoch() -> Response:
        return _json(msgspec.to_builtins(await service.require().told()))

    @app.get("/v1/configs/export", summary="The whole catalogue at one epoch")
    async def export() -> Response:
        return Response(await service.require().exported(), media_type=configs.JSON)


def _writes(app: FastAPI, service: ConfigService) -> None:
    async def document(request: Request) -> tuple[Document, bytes]:
        body = await _body(request)
        # a large YAML takes seconds
        return (
            await asyncio.to_thread(read, body, request.headers.get("content-type", "")),
            body,
        )

    @app.post(_MODELS, summary="Add a model, or profiles to one", status_code=201)
    async def create(request: Request) -> Response:
        given, body = await document(request)
        edits = await service.edits()
        wanted = edits.entry(given.value, given)
        return await service.write(request, "create", wanted["id"], edits.create(wanted), body, profiles_of(wanted))

    @app.post(_MODELS + "/{model:path}/rollback", summary="Make a former revision the newest again")
    async def rollback(model: str, request: Request) -> Response:
        given, body = await document(request)
        return await service.write(request, "rollback", model, (await service.edits()).rollback(model, given), body)

    @app.put(_MODELS + "/{model:path}", summary="Replace a model")
    async def put(model: str, request: Request) -> Response:
        given, body = await document(request)
        return await service.write(request, "put", model, (await service.edits()).put(model, given), body)

    @app.patch(_MODELS + "/{model:path}", summary="Change a model by a JSON merge patch")
    async def patch(model: str, request: Request) -> Response:
        given, body = await document(request)
        return await service.write(request, "patch", model, (await service.edits()).patch(model, given), body)

    @app.delete(_MODELS + "/{model:path}", summary="Remove a model")
    async def delete(model: str, request: Request) -> Response:
        return await service.write(request, "delete", model, (await service.edits()).delete(model), b"")


async def _body(request: Request) -> bytes:
    """The whole body. Raises PayloadTooLarge, GatewayTimeout."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    message = (
                        f"body: expected at most {MAX_BODY_BYTES} bytes, got more; the configuration of a model has "
                        "some thousand"
                    )
                    raise PayloadTooLarge(message, param="body", extras={"limit": MAX_BODY_BYTES})
    except TimeoutError:
        raise GatewayTimeout(f"the body was not complete within {BODY_S:g} s", param="body") from None
    return bytes(data)


def _key(request: Request) -> str:
    given = request.headers.get("idempotency-key", "")
    if len(given) > MAX_KEY_CHARS:
        message = f"Idempotency-Key: expected at most {MAX_KEY_CHARS} characters, got {len(given)}"
        raise InvalidInput(message, reason="schema", param="Idempotency-Key")
    return given


def _if_match(request: Request) -> int | None:
    given = request.headers.get("if-match")
    if given is None:
        return None
    # a proxy that compresses makes an ETag a weak one
    text = given.strip().removeprefix("W/").removeprefix('"').removesuffix('"')
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        message = f"If-Match: expected the number of a revision, as the ETag of the model gives it, got {given[:60]!r}"
        raise InvalidInput(message, reason="schema", param="If-Match")
    return int(text)


def _flags(request: Request, *names: str) -> list[bool]:
    """Those of a write's address. Any other parameter is refused: a misspelt `dry_run` would write."""
    for name in request.query_params:
        if name not in names:
            message = f"{name[:60]}: no such parameter of a write{did_you_mean(name, names)}"
            raise InvalidInput(message, reason="schema", param=name[:60])
    found = [request.query_params.get(name, "false") for name in names]
    for name, given in zip(names, found, strict=True):
        if given not in ("true", "false"):
            raise InvalidInput(f"{name}: expected true or false, got {given[:60]!r}", reason="schema", param=name)
    return [given == "true" for given in found]


async def _on_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # in the middle of its body, and nobody reads this


async def _on_error(request: Request, error: Exception) -> Response:
    return _answer_to(error, request.scope["sie.request_id"])


def _answer_to(error: Exception, request_id: str) -> Response:
    """The envelope of any exception. What is not of the tree is a fault of ours: logged with its traceback, told as
    INTERNAL_ERROR.
    """
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        allowed = headers.get("Allow", headers.get("allow", "another one"))
        is_method = error.status_code == 405
        error = (
            MethodNotAllowed(f"this path takes {allowed}") if is_method else NotFound("no such path; /docs lists all")
        )
    elif isinstance(error, BrokerError):
        _logger.warning("request %s: %s", request_id, error)
        error = QueueUnavailable("the broker could not be reached")
    if not isinstance(error, SIEError):
        _logger.error("request %s failed", request_id, exc_info=error)
        error = InternalFailure("the config service failed; its log has the details under this request id")
    headers |= {"X-SIE-Error-Code": error.code, "x-should-retry": "true" if error.retryable else "false"}
    if error.retryable:
        headers["Retry-After"] = str(max(1, error.retry_after_s))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    status, body = configs.config_shape(error, request_id, None)
    return _json(body, headers, status)


def _document(request: Request, document: Any, default: str, headers: dict[str, str] | None = None) -> Response:
    content_type = configs.negotiated(request.headers.get("accept", ""), default)
    return Response(configs.rendered(document, content_type), 200, headers, media_type=content_type)


def _json(body: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(configs.rendered(body, configs.JSON), status, headers, media_type=configs.JSON)
