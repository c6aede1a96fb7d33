"""The config service over HTTP: what is in the catalogue, at which epoch, and all of it at once."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, Gauge
from starlette.exceptions import HTTPException

import sie_contracts
from sie_config.store import CatalogueStore
from sie_contracts.broker import BrokerError
from sie_contracts.errors import (
    InternalFailure,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    PermissionDenied,
    QueueUnavailable,
    SIEError,
    Unauthenticated,
    envelope,
)
from sie_contracts.runtime.http import App, Receive, Scope, Send, probes
from sie_contracts.settings import Secret, Settings

_logger = logging.getLogger("sie.config")


class ConfigService:
    """What the routes share. `store` is None until the broker was reached and the catalogue seeded."""

    def __init__(self, settings: Settings) -> None:
        self.store: CatalogueStore | None = None
        self.registry = CollectorRegistry()
        self.models = Gauge("sie_config_models", "Models in the catalogue", registry=self.registry)
        self._tokens: list[Secret] = [token for token in (settings.config_read_token, settings.admin_token) if token is not None]

    def not_ready(self) -> str | None:
        return None if self.store is not None else "the catalogue is not built"

    def require(self) -> CatalogueStore:
        if self.store is None:
            raise QueueUnavailable("the catalogue is not built yet: no broker")
        return self.store

    def guard(self, request: Request) -> None:
        """Let in the read token and the admin token, and nobody where neither is configured."""
        if not self._tokens:
            raise PermissionDenied("neither SIE_CONFIG_READ_TOKEN nor SIE_ADMIN_TOKEN is configured, so nobody may read this")
        given = request.headers.get("authorization", "")
        token = (given[7:] if given[:7].lower() == "bearer " else given).strip()
        if not any([known.matches(token) for known in self._tokens]):  # noqa: C419  all are compared, whatever matches
            raise Unauthenticated("a bearer token is needed: SIE_CONFIG_READ_TOKEN or SIE_ADMIN_TOKEN")


def create_app(service: ConfigService) -> App:
    app = FastAPI(title="SIE config service", version=sie_contracts.__version__, redoc_url=None, redirect_slashes=False)

    @app.get("/v1/configs/models", summary="All models")
    async def models() -> Response:
        found = await service.require().models()
        return _json({
            "models": [
                {"model_id": model, "profiles": ["default", *stored.entry.get("profiles", {})], "source": stored.source}
                for model, (stored, _) in sorted(found.items())
            ]
        })  # fmt: skip

    @app.get("/v1/configs/models/{model:path}", summary="One model")
    async def model(model: str) -> Response:
        found = (await service.require().models()).get(model)
        if found is None:
            raise ModelNotFound(f"no model named {model[:200]!r}", param="model")
        stored, revision = found
        return _json(stored.entry, {"ETag": f'"{revision}"'})

    @app.get("/v1/configs/epoch", summary="The epoch: equal epochs are equal catalogues")
    async def epoch(request: Request) -> Response:
        service.guard(request)
        return _json({"epoch": await service.require().epoch()})

    @app.get("/v1/configs/export", summary="The whole catalogue at one epoch")
    async def export(request: Request) -> Response:
        service.guard(request)
        exported = await service.require().export()
        service.models.set(len(exported.models))
        return _json(exported)

    async def on_error(request: Request, error: Exception) -> Response:
        call_id = str(uuid.uuid4())
        if isinstance(error, HTTPException):
            error = MethodNotAllowed("not here") if error.status_code == 405 else NotFound("no such path")
        elif isinstance(error, BrokerError):
            error = QueueUnavailable("the broker could not be reached")
        if not isinstance(error, SIEError):
            _logger.error("request %s failed", call_id, exc_info=error)
            error = InternalFailure("the config service failed; its log has the details under this request id")
        headers = {"Retry-After": str(max(1, error.retry_after_s))} if error.retryable else {}
        return _json(envelope(error, call_id), headers, error.status)

    for kind in (SIEError, BrokerError, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
    inner = probes(service.not_ready, service.registry)

    async def edge(scope: Scope, receive: Receive, send: Send) -> None:
        own = scope["type"] == "http" and not scope["path"].startswith(("/v1/", "/docs", "/openapi.json"))
        await (inner if own else app)(scope, receive, send)

    return edge


def _json(body: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
