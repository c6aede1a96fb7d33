"""Forward requests of the console (the page at `/`) to the config service: writes, and the history of models. The
browser lets the page send requests only to the gateway that served it, so this gateway forwards them. Programs use the
config service directly.

 /console/configs/ID ──► the gateway checks the scope ──► /v1/configs/models/ID at the config service ──► its answer

The gateway forwards a write with the caller's own token, and a read with the gateway's token if it has one. The
functions in `HANDLERS` answer reads of `/v1/configs` from the catalogue of this gateway.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
from fastapi import Request
from fastapi.responses import Response

from sie_contracts.errors import InvalidInput, ModelNotFound, NotFound, NotReady
from sie_contracts.loopback import verification
from sie_contracts.models.aliases import Alias
from sie_contracts.url_names import quoted
from sie_contracts.wire import configs
from sie_contracts.wire.configs import config_shape
from sie_gateway.http.route_kinds import GatewayRoute
from sie_gateway.operations.handlers import json_response
from sie_runtime.http import config_routes
from sie_runtime.http.routes import JSON, YAML, Route

if TYPE_CHECKING:
    from sie_contracts.models.catalogue import Catalogue
    from sie_contracts.models.entries import ModelEntry
    from sie_gateway.state import Gateway

MODELS = f"{config_routes.PREFIX}models"
OWN = "/console/configs"
LIMIT_S = 30.0
_SENT = ("content-type", "accept", "if-match", "idempotency-key", "authorization")
_RETURNED = ("content-type", "etag", "location", "retry-after")
_logger = logging.getLogger("sie.gateway.configs")


async def forward(gateway: Gateway, request: Request, after: str = "") -> Response:
    """Forward a request to the config service. `after`: text that is appended to the path. Raises NotFound if there is
    no config service, InvalidInput for a too long path or query, NotReady if the config service does not answer.
    """
    url = gateway.settings.config_service_url
    if url is None:
        raise NotFound("this gateway has no config service: set SIE_CONFIG_SERVICE_URL to its URL")
    # header values are bytes, because the HTTP client accepts only ASCII in values of type str
    headers = {name.encode(): request.headers[name].encode("latin-1") for name in _SENT if name in request.headers}
    reader = gateway.settings.config_read_token
    # this gateway has checked that the caller may read, so it replaces the caller's token by the gateway's token
    if request.method == "GET" and reader is not None:
        headers[b"authorization"] = f"Bearer {reader.reveal()}".encode()
    path = f"{url.rstrip('/')}{MODELS}{_named(request.path_params.get('id', ''))}{after}"
    body = await request.body()
    try:
        async with (
            asyncio.timeout(LIMIT_S),  # for the whole reply; httpx bounds only each read
            httpx.AsyncClient(timeout=LIMIT_S, trust_env=False, verify=verification(url)) as client,
        ):
            answer = await client.request(
                request.method,
                path,
                params=httpx.QueryParams(request.url.query),
                headers=headers,
                content=body,
            )
    except httpx.InvalidURL as error:  # the escaped path or query is too long for the HTTP client
        raise InvalidInput(f"this path and query cannot be forwarded: {error}", reason="malformed") from error
    except (httpx.HTTPError, TimeoutError) as error:
        _logger.warning("the config service did not answer a forwarded request: %s", type(error).__name__)
        raise NotReady("the config service does not answer: try again; the present catalogue stays in use") from error
    forwarded = {name: answer.headers[name] for name in _RETURNED if name in answer.headers}
    return Response(answer.content, answer.status_code, forwarded)


def _named(model: str) -> str:
    """Return the path of a model at the config service. Raises NotFound for a name that may lead to another route."""
    try:
        return f"/{quoted(model, 'id')}" if model else ""
    except ValueError:
        raise NotFound("no such path") from None


_HANDLERS = {
    ("GET", "history"): functools.partial(forward, after="/history"),
    ("POST", "models"): forward,
    ("PUT", "model"): forward,
    ("PATCH", "model"): forward,
    ("DELETE", "model"): forward,
    ("POST", "rollback"): functools.partial(forward, after="/rollback"),
}


def _own(route: Route) -> GatewayRoute:
    path, summary = route.path.replace(MODELS, OWN), f"{route.summary}, for the console"
    return GatewayRoute(**vars(replace(route, path=path, endpoint="other", summary=summary)), shape=config_shape)


CONFIG_FORWARD = tuple(_own(row) for row in config_routes.bound(_HANDLERS) if row.handler is not None)
# field `source` of each listed entry; always the same, because this gateway does not know who wrote an entry
SOURCE = "catalogue"


def _document(request: Request, document: Any, default: str = JSON, headers: dict[str, str] | None = None) -> Response:
    body, content_type = config_routes.rendered(document, request.headers.get("accept", ""), default)
    return Response(body, headers=headers, media_type=content_type)


async def models(gateway: Gateway, _request: Request) -> Response:
    present = gateway.inference.catalogue
    documents: dict[str, dict[str, Any]] = {
        model: {
            "profiles": entry.profiles,
            "outputs": entry.outputs,
            "languages": entry.languages,
            "download_bytes": entry.download_bytes,
        }
        for model, entry in present.entries.items()
    }
    documents |= {name: {"alias": msgspec.to_builtins(alias.alias)} for name, alias in present.aliases.items()}
    return json_response(
        {"models": [configs.listed(name, document, SOURCE) for name, document in sorted(documents.items())]}
    )


async def status(gateway: Gateway, request: Request) -> Response:
    """Return which revision of a model each gateway serves now, and which revision the workers of each bundle serve."""
    present = gateway.inference.catalogue
    entry = _entry(present, request.path_params["id"])
    bundles = {}
    for bundle in () if isinstance(entry, Alias) else present.bundles_of(entry):
        workers = [beat for beat in gateway.fleet.healthy() if beat.bundle == bundle]
        revisions = {
            stored.id: present.revisions[stored.id]
            for stored in present.entries.values()
            if bundle in present.bundles_of(stored)
        }
        bundles[bundle] = configs.digest(revisions), workers
    revision, since = present.revisions[entry.id], present.since(entry.id)
    gateways = gateway.peers.epochs()

    def revision_at(epoch: str) -> int | None:
        # None (unknown) if the catalogue of the version `epoch` lacks the revision, or contains writes that `present`
        # lacks
        return revision if configs.has_seen(epoch, since) and configs.has_seen(present.epoch, epoch) else None

    served = None if isinstance(entry, Alias) else bundles
    return json_response(
        configs.model_status(entry.id, revision, present.epoch, since, served, gateways, revision_at, SOURCE)
    )


async def model(gateway: Gateway, request: Request) -> Response:
    present = gateway.inference.catalogue
    entry = _entry(present, request.path_params["id"])
    return _document(request, msgspec.to_builtins(entry), headers={"ETag": f'"{present.revisions[entry.id]}"'})


async def bundles(gateway: Gateway, _request: Request) -> Response:
    return json_response(configs.bundle_list(gateway.inference.catalogue.bundles))


async def bundle(gateway: Gateway, request: Request) -> Response:
    bundle_entry = configs.bundle_of(gateway.inference.catalogue.bundles, request.path_params["id"])
    return _document(request, bundle_entry, YAML)


async def resolve(gateway: Gateway, request: Request) -> Response:
    return json_response(configs.resolution(gateway.inference.catalogue, await request.body()))


HANDLERS = {
    ("GET", "models"): models,
    ("GET", "model"): model,
    ("GET", "status"): status,
    ("GET", "bundles"): bundles,
    ("GET", "bundle"): bundle,
    ("POST", "resolve"): resolve,
}


def _entry(catalogue: Catalogue, model: str) -> ModelEntry | Alias:
    entry = catalogue.find(model) or catalogue.find_alias(model)
    if entry is None:
        like = catalogue.near(model)
        fix = f"did you mean {' or '.join(like)}?" if like else "GET /v1/configs/models lists all models"
        raise ModelNotFound(f"no model named {model[:200]!r}; {fix}", param="id", extras={"suggestions": like})
    return entry
