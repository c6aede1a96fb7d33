"""`/v1/configs` at a gateway: handlers that read the catalogue that it serves by. Writes are for the config service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from sie_contracts import configs
from sie_contracts.aliases import Alias
from sie_contracts.errors import ModelNotFound
from sie_gateway.operations import json_response

if TYPE_CHECKING:
    from sie_contracts.catalogue import Catalogue
    from sie_contracts.entries import ModelEntry
    from sie_gateway.state import Gateway

SOURCE = "catalogue"  # who wrote an entry, the config service knows alone


def _catalogue(gateway: Gateway) -> Catalogue:
    return gateway.inference.catalogue  # NotReady before there is one


def _document(
    request: Request, document: Any, default: str = configs.JSON, headers: dict[str, str] | None = None
) -> Response:
    content_type = configs.negotiated(request.headers.get("accept", ""), default)
    return Response(configs.rendered(document, content_type), headers=headers, media_type=content_type)


async def models(gateway: Gateway, _request: Request) -> Response:
    """All models and aliases."""
    present = _catalogue(gateway)
    documents: dict[str, dict[str, Any]] = {
        model: {"profiles": entry.profiles} for model, entry in present.entries.items()
    }
    documents |= {name: {"alias": msgspec.to_builtins(alias.alias)} for name, alias in present.aliases.items()}
    return json_response(
        {"models": [configs.listed(name, document, SOURCE) for name, document in sorted(documents.items())]}
    )


async def status(gateway: Gateway, request: Request) -> Response:
    """Which gateways and workers serve which revision of a model."""
    present = _catalogue(gateway)
    entry = _entry(present, request.path_params["id"])
    bundles = {}
    for bundle in () if isinstance(entry, Alias) else present.bundles_of(entry):
        workers = [beat for beat in gateway.fleet.healthy() if beat.bundle == bundle]
        revisions = {
            each.id: present.revisions[each.id]
            for each in present.entries.values()
            if bundle in present.bundles_of(each)
        }
        bundles[bundle] = configs.bundle_hash(revisions), workers
    revision, since = present.revisions[entry.id], present.since(entry.id)
    gateways = gateway.peers.epochs()

    def revision_at(epoch: str) -> int | None:  # of others that lag, or lead, this gateway knows no revision
        return revision if configs.has_seen(epoch, since) and configs.has_seen(present.epoch, epoch) else None

    served = None if isinstance(entry, Alias) else bundles
    return json_response(
        configs.model_status(entry.id, revision, present.epoch, since, served, gateways, revision_at, SOURCE)
    )


async def model(gateway: Gateway, request: Request) -> Response:
    """The configuration of a model."""
    present = _catalogue(gateway)
    entry = _entry(present, request.path_params["id"])
    return _document(request, msgspec.to_builtins(entry), headers={"ETag": f'"{present.revisions[entry.id]}"'})


async def bundles(gateway: Gateway, _request: Request) -> Response:
    """All bundles."""
    return json_response(configs.bundle_list(_catalogue(gateway).bundles))


async def bundle(gateway: Gateway, request: Request) -> Response:
    """One bundle."""
    found = configs.bundle_of(_catalogue(gateway).bundles, request.path_params["id"])
    return _document(request, found, configs.YAML)


async def resolve(gateway: Gateway, request: Request) -> Response:
    """The model and profile that a name stands for, and the bundles that can serve it."""
    return json_response(configs.resolution(_catalogue(gateway), await request.body()))


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
        fix = f"did you mean {' or '.join(like)}?" if like else "GET /v1/configs/models lists all"
        raise ModelNotFound(f"no model named {model[:200]!r}; {fix}", param="id", extras={"suggestions": like})
    return entry
