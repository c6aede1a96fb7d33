"""The HTTP surface. FastAPI routes and documents; `Edge`, around it, is what every call passes: ids, auth, drain, errors, metrics."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import Counter, Histogram
from starlette.exceptions import HTTPException

import sie_contracts
from sie_contracts.broker import Broker
from sie_contracts.errors import (
    InternalFailure,
    InvalidInput,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    ShuttingDown,
    SIEError,
    envelope,
)
from sie_contracts.messages import Operation
from sie_contracts.runtime.feed import CatalogueFeed
from sie_contracts.runtime.http import App, Receive, Scope, Send, probes, reply
from sie_contracts.settings import Settings, public_url
from sie_gateway import assignments
from sie_gateway.admission import Admission, key_of
from sie_gateway.attach import ClientGone
from sie_gateway.auth import Gate
from sie_gateway.body import MAX_BODY_BYTES
from sie_gateway.demand import DemandRecords
from sie_gateway.fleet import Fleet
from sie_gateway.inference import Call, FailedRequest, Inference
from sie_gateway.metrics import Metrics
from sie_gateway.models import model_info, model_list
from sie_gateway.scaling import Scaling

_logger = logging.getLogger("sie.gateway")
INFERENCE: dict[str, Operation] = {"/v1/encode/": "encode", "/v1/score/": "score", "/v1/extract/": "extract"}
_SCALING = "/v1/scaling/"
CLIENT_GONE = 499  # in metrics and logs only, as proxies have it: nobody was there to read a status
_PROBES = ("/healthz", "/readyz", "/livez", "/ping")


def uuid7() -> str:
    """A time-ordered UUID (RFC 9562, version 7), as text."""
    chance = secrets.randbits(74)
    value = (time.time_ns() // 1_000_000 << 80) | (0x7 << 76) | (chance >> 62 << 64) | (0b10 << 62) | (chance & (1 << 62) - 1)
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class Gateway:
    """What the routes share."""

    def __init__(
        self, settings: Settings, broker: Broker, feed: CatalogueFeed, fleet: Fleet, inference: Inference, metrics: Metrics,
        nats_monitor_url: str | None, scaling: Scaling, admission: Admission, demand: DemandRecords,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.broker = broker
        self.feed = feed
        self.fleet = fleet
        self.inference = inference
        self.metrics = metrics
        self.nats_monitor_url = nats_monitor_url
        self.scaling = scaling
        self.admission = admission
        self.demand = demand
        self.draining = False
        self.started = False

    def not_ready(self) -> str | None:
        """Why this gateway is not ready, or None. Workers do not count: they may be scaled to zero."""
        if self.draining:
            return "draining"
        if not self.feed.loaded:
            return "the catalogue is not loaded"
        if not self.broker.connected:
            return "no connection to the broker"
        return None if self.started else "starting"

    def health(self) -> dict[str, Any]:
        healthy, unhealthy = self.fleet.worker_infos()
        settings = self.settings
        models = []
        for model in sorted(self.feed.catalogue.entries):
            state, reports = self.fleet.model(model)
            models.append({
                "name": model, "state": state, "worker_count": sum(status.state == "loaded" for _, status in reports),
                "gpu_types": sorted({beat.machine_profile for beat, _ in reports}),
                "total_queue_depth": sum(status.queued for _, status in reports),
            })  # fmt: skip
        return {
            "status": "healthy" if healthy else "degraded", "type": "gateway", "version": sie_contracts.__version__,
            "nats_url": public_url(settings.nats_url) if settings.nats_url else None, "nats_monitor_url": self.nats_monitor_url,
            "config_url": settings.config_service_url, "configured_gpu_types": list(settings.gateway_configured_gpus or ()),
            "live_gpu_types": sorted({info["gpu"] for info in healthy}),
            "cluster": {
                "worker_count": len(healthy), "gpu_count": sum(info["gpu_count"] for info in healthy),
                "models_loaded": len({model for info in healthy for model in info["loaded_models"]}), "total_qps": 0.0,
            },
            "workers": healthy, "unhealthy_workers": unhealthy, "models": models,
        }  # fmt: skip


async def read_body(headers: Mapping[str, str], receive: Receive) -> bytes:
    """The body, at most MAX_BODY_BYTES. Raises PayloadTooLarge, before reading where Content-Length already says so."""
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise PayloadTooLarge(f"body: {declared} bytes, at most {MAX_BODY_BYTES}", param="body", extras={"limit": MAX_BODY_BYTES})
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"body: more than {MAX_BODY_BYTES} bytes", param="body", extras={"limit": MAX_BODY_BYTES})
        pieces.append(piece)
        if not message.get("more_body"):
            return b"".join(pieces)


def _document(summary: str, returned: str, example: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: {"type": "array" if isinstance(value, list) else "object"} for name, value in example.items()}
    required = [name for name in ("query", "items") if name in example]
    schema = {"type": "object", "required": required, "properties": {**fields, "params": {"type": "object"}}}
    return {
        "post": {
            "summary": summary,
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}, "description": "id[@revision][:profile]"}
            ],
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": dict(example)}}},
            "responses": {"200": {"description": returned}},
        }
    }


_INFERENCE_DOCS: dict[str, Any] = {
    "/v1/encode/{model}": _document("Vectors of inputs", "One slot per input, in order", {"items": [{"text": "Hello"}]}),
    "/v1/score/{model}": _document(
        "Scores of inputs against a query", "One entry per input, best first", {"query": {"text": "Who?"}, "items": [{"text": "Ada"}]}
    ),
    "/v1/extract/{model}": _document(
        "What is found in inputs", "One slot per input, in order", {"items": [{"text": "Ada met Bob"}], "params": {"labels": ["person"]}}
    ),
}


def create_app(gateway: Gateway) -> App:
    """The application of the main port."""
    app = FastAPI(
        title="SIE", version=sie_contracts.__version__, description="encode, score, extract: the small models behind search and RAG",
        redoc_url=None, redirect_slashes=False,
    )  # fmt: skip

    @app.get("/v1/models", summary="The catalogue")
    @app.get("/models", include_in_schema=False)
    async def models(request: Request) -> Response:
        query = request.query_params
        infos = model_list(
            gateway.feed.catalogue, gateway.fleet, task=query.get("task", ""), output=query.get("output", ""),
            loaded=query.get("loaded", "") == "true", variants=query.get("variants", "") != "false",
        )  # fmt: skip
        return _json({"object": "list", "data": infos, "models": infos})

    @app.get("/v1/models/{model:path}", summary="One model")
    @app.get("/models/{model:path}", include_in_schema=False)
    async def model(model: str) -> Response:
        resolved = gateway.inference.resolve(model)
        return _json(model_info(gateway.feed.catalogue, gateway.fleet, resolved.entry, resolved.profile))

    @app.get("/health", summary="What is in use, and who serves")
    async def health() -> Response:
        return _json(gateway.health())

    @app.get("/v1/scaling/{lane}", summary="What a lane has to do, and how many workers it wants")
    async def scaling(lane: str) -> Response:
        return _json(await gateway.scaling.answer(lane))

    @app.get(assignments.PATH, summary="The pools that a worker serves")
    async def assignment(worker: str = "") -> Response:
        workers = [beat for beat, _ in gateway.fleet.workers()]
        return _json({"worker": worker, "pools": list(assignments.assigned(worker, workers, {}))})

    own_documents = app.openapi

    def documents() -> dict[str, Any]:
        found = own_documents()
        return {**found, "paths": {**_INFERENCE_DOCS, **found["paths"]}}

    app.openapi = documents  # type: ignore[method-assign]  # FastAPI's documented way to extend its schema
    app.add_exception_handler(SIEError, _on_error)
    app.add_exception_handler(FailedRequest, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)
    return Edge(app, gateway)


def _json(body: Any) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope["sie.call"])


def error_response(error: Exception, call: Call) -> Response:
    """The envelope of any exception. What is not of the tree is a fault of ours: logged with its traceback, told as INTERNAL_ERROR."""
    errors: list[dict[str, Any]] | None = None
    headers: dict[str, str] = {}
    if isinstance(error, FailedRequest):
        errors = error.errors
        error = error.error
    elif isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        if error.status_code == 404:
            error = NotFound("no such path")
        elif error.status_code == 405:
            error = MethodNotAllowed("this path does not take that method")
        else:
            error = InvalidInput(str(error.detail), reason="malformed")
    if not isinstance(error, SIEError):
        _logger.error("request %s failed", call.id, exc_info=error, extra={"request_id": call.id})
        error = InternalFailure("the server failed; its log has the details under this request id")
    headers |= {"X-SIE-Error-Code": error.code, "x-should-retry": "true" if error.retryable else "false"}
    if error.retryable:
        headers["Retry-After"] = str(max(1, error.retry_after_s))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(envelope(error, call.id, errors), error.status, headers)


class Edge:
    """Pure ASGI. Gives every call its id, lets it in or not, and counts it.

    Inference is answered here: FastAPI's layers around a route took half of the gateway's time for it. FastAPI answers all the rest.
    """

    def __init__(self, app: FastAPI, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway
        self._gate = Gate(gateway.settings)
        self._keyed = gateway.settings.auth_mode != "none"  # else no header may make a key of its own
        self._probes = probes(gateway.not_ready, None)
        self._root = gateway.settings.root_path or ""
        self._counted: dict[tuple[str, int, str], tuple[Counter, Histogram]] = {}  # looking one up costs more than counting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        received_s = time.perf_counter()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path = scope["path"]
        if self._root and path.startswith(self._root + "/"):
            path = path[len(self._root) :]
        if path in _PROBES:
            await self._probes({**scope, "path": path}, receive, send)
            return
        scope = {**scope, "path": self._root + path, "root_path": self._root}  # as ASGI has it: the path begins with the root path
        call = Call(uuid7(), received_s, headers, path=path, receive=receive)
        scope["sie.call"] = call
        status = 0

        async def tagged(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *self._common_headers(call)]
            await send(message)

        try:
            self._admit(scope["method"], path, headers)
            if self._keyed:
                call.key = key_of(headers.get("authorization", ""))
            prefix = next((prefix for prefix in INFERENCE if path.startswith(prefix)), "")
            if prefix:
                await self._infer(call, INFERENCE[prefix], scope["method"], path.removeprefix(prefix), receive, tagged)
            else:
                await self._app(scope, receive, tagged)
        except ClientGone:
            status = CLIENT_GONE
        except Exception as error:  # noqa: BLE001  the root of a request; what FastAPI has answered already it raises again
            if not status:
                await error_response(error, call)(scope, receive, tagged)
        self._count(path, call, status, time.perf_counter() - received_s)

    async def _infer(self, call: Call, operation: Operation, method: str, model: str, receive: Receive, send: Send) -> None:
        if method != "POST":
            raise HTTPException(405, headers={"Allow": "POST"})
        inference = self._gateway.inference
        resolved = inference.resolve(model)
        if call.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidInput("Content-Encoding: only identity is accepted", reason="malformed", param="Content-Encoding")
        answer = await inference.answer(call, operation, resolved, functools.partial(read_body, call.headers, receive))
        await reply(send, answer.status, answer.body, answer.content_type, answer.headers)

    def _admit(self, method: str, path: str, headers: dict[str, str]) -> None:
        self._gate.check(method, path, headers.get("authorization", ""))
        if self._gateway.draining and method == "POST":
            raise ShuttingDown("this gateway is shutting down; another one takes the request")

    @staticmethod
    def _common_headers(call: Call) -> list[tuple[bytes, bytes]]:
        given = call.headers.get("x-request-id", "")
        client_id = given if 0 < len(given) <= 128 and given.isascii() and given.isprintable() else call.id
        return [
            (b"x-sie-request-id", call.id.encode()),
            (b"x-request-id", client_id.encode()),
            (b"x-sie-version", sie_contracts.__version__.encode()),
        ]

    def _count(self, path: str, call: Call, status: int, seconds: float) -> None:
        names = ("encode", "score", "extract", "models", "health")
        endpoint = next((name for name in names if path.startswith((f"/v1/{name}", f"/{name}"))), "other")
        profile = call.labels.get("machine_profile", "")
        counted = self._counted.get((endpoint, status, profile))
        if counted is None:
            metrics = self._gateway.metrics
            counted = metrics.requests.labels(endpoint, str(status), profile), metrics.latency.labels(endpoint, profile)
            self._counted[endpoint, status, profile] = counted
        counted[0].inc()
        counted[1].observe(seconds)
        if endpoint in INFERENCE.values():
            _logger.info(
                "%s %s in %.1f ms", endpoint, status, seconds * 1000,
                extra={"request_id": call.id, "model": call.labels.get("model"), "latency_ms": round(seconds * 1000, 2)},
            )  # fmt: skip


def metrics_app(gateway: Gateway) -> App:
    """The application of the metrics port: metrics, probes and what an autoscaler polls, never behind a token, nothing else."""
    metrics = gateway.metrics
    inner = probes(gateway.not_ready, metrics.registry)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"].startswith(_SCALING):
            await _scaling(gateway, scope, receive, send)
            return
        workers = gateway.fleet.workers()
        healthy = sum(is_healthy for _, is_healthy in workers)
        metrics.workers.labels("healthy").set(healthy)
        metrics.workers.labels("unhealthy").set(len(workers) - healthy)
        metrics.in_progress.set(gateway.inference.in_progress)
        metrics.unfinished.set(gateway.inference.unfinished_bytes)
        metrics.reattached.set(gateway.inference.away.joined)
        metrics.abandoned.set(gateway.inference.away.abandoned)
        metrics.nats_connected.set(1 if gateway.broker.connected else 0)
        for result, count in gateway.feed.deltas.items():
            metrics.config_deltas.labels(result).set(count)
        tokens, items, waiting_bytes = gateway.admission.occupied()
        metrics.permits.labels("tokens").set(tokens)
        metrics.permits.labels("messages").set(items)
        metrics.waiting_bytes.set(waiting_bytes)
        metrics.gateways.set(gateway.admission.peers.count())
        metrics.pending_demand.clear()
        for lane in gateway.demand.pending():
            metrics.pending_demand.labels(lane.machine_profile, lane.bundle).set(1)
        await inner(scope, receive, send)

    return app


async def _scaling(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    try:
        answer = _json(await gateway.scaling.answer(scope["path"].removeprefix(_SCALING)))
    except Exception as error:  # noqa: BLE001  the root of a request
        answer = error_response(error, Call(uuid7(), time.perf_counter(), {}))
    await answer(scope, receive, send)
