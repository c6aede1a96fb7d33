"""Reads of `/v1/configs`, which a gateway answers from its catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sie_contracts.errors import ModelNotFound
from sie_contracts.models.aliases import Alias
from sie_contracts.wire import configs
from sie_gateway.operations.handlers import json_response
from sie_runtime.http import config_routes
from sie_runtime.http.routes import JSON, YAML

if TYPE_CHECKING:
    from sie_contracts.models.catalogue import Catalogue
    from sie_contracts.models.entries import ModelEntry
    from sie_gateway.state import Gateway

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
