"""`/v1/configs` at a gateway: reads of the catalogue that it serves by. Writes are for the config service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from sie_contracts import configs
from sie_contracts.aliases import Alias
from sie_contracts.errors import ModelNotFound

if TYPE_CHECKING:
    from sie_contracts.catalogue import Catalogue, ModelEntry
    from sie_gateway.app import Gateway

PATHS = "/v1/configs/"
SOURCE = "catalogue"  # who wrote an entry, the config service knows alone


def config_routes(app: FastAPI, gateway: Gateway) -> None:
    """Serve what reads."""

    def catalogue() -> Catalogue:
        return gateway.inference.catalogue  # NotReady before there is one

    def answer(
        request: Request, document: Any, default: str = configs.JSON, headers: dict[str, str] | None = None
    ) -> Response:
        content_type = configs.negotiated(request.headers.get("accept", ""), default)
        return Response(configs.rendered(document, content_type), headers=headers, media_type=content_type)

    @app.get("/v1/configs/models", summary="All models")
    async def models() -> Response:
        present = catalogue()
        documents: dict[str, dict[str, Any]] = {
            model: {"profiles": entry.profiles} for model, entry in present.entries.items()
        }
        documents |= {name: {"alias": msgspec.to_builtins(alias.alias)} for name, alias in present.aliases.items()}
        return _json(
            {"models": [configs.listed(name, document, SOURCE) for name, document in sorted(documents.items())]}
        )

    @app.get(
        "/v1/configs/models/{id:path}/status", summary="Which gateways and workers serve which revision of a model"
    )
    async def status(request: Request) -> Response:
        present = catalogue()
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
        gateways = gateway.admission.peers.epochs()

        def revision_at(epoch: str) -> int | None:  # of others that lag, or lead, this gateway knows no revision
            return revision if configs.has_seen(epoch, since) and configs.has_seen(present.epoch, epoch) else None

        served = None if isinstance(entry, Alias) else bundles
        return _json(
            configs.model_status(entry.id, revision, present.epoch, since, served, gateways, revision_at, SOURCE)
        )

    @app.get("/v1/configs/models/{id:path}", summary="The configuration of a model")
    async def model(request: Request) -> Response:
        present = catalogue()
        entry = _entry(present, request.path_params["id"])
        return answer(request, msgspec.to_builtins(entry), headers={"ETag": f'"{present.revisions[entry.id]}"'})

    @app.get("/v1/configs/bundles", summary="All bundles")
    async def bundles() -> Response:
        return _json(configs.bundle_list(catalogue().bundles))

    @app.get("/v1/configs/bundles/{id:path}", summary="One bundle")
    async def bundle(request: Request) -> Response:
        return answer(request, configs.bundle_of(catalogue().bundles, request.path_params["id"]), configs.YAML)

    @app.post("/v1/configs/resolve", summary="What a model's name means", openapi_extra=_DOCUMENT)
    async def resolve(request: Request) -> Response:
        return _json(configs.resolution(catalogue(), await request.body()))


def _entry(catalogue: Catalogue, model: str) -> ModelEntry | Alias:
    entry = catalogue.find(model) or catalogue.find_alias(model)
    if entry is None:
        like = catalogue.near(model)
        fix = f"did you mean {' or '.join(like)}?" if like else "GET /v1/configs/models lists all"
        raise ModelNotFound(f"no model named {model[:200]!r}; {fix}", param="id", extras={"suggestions": like})
    return entry


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type=configs.JSON)


_DOCUMENT = {
    "requestBody": {
        "required": True,
        "content": {
            configs.JSON: {
                "schema": {
                    "type": "object",
                    "required": ["model"],
                    "properties": {"model": {"type": "string"}, "bundle": {"type": ["string", "null"]}},
                },
                "example": {"model": "sentence-transformers/all-MiniLM-L6-v2"},
            }
        },
    }
}
