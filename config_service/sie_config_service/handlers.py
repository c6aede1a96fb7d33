"""Handlers of the catalogue's routes: reads and writes. Only this service accepts writes.

request ──► body, at most 1 MiB ──► ParsedDocument ──► CatalogueWriter ──► reply with the new revision as ETag
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sie_config_service.documents import ParsedDocument, difference, read
from sie_config_service.mirror import HeldModel, bundles_of
from sie_config_service.store import digest_of
from sie_config_service.writes import Edit, WriteRequest, profiles_of
from sie_contracts.errors import GatewayTimeout, InvalidInput, PayloadTooLarge
from sie_contracts.models.aliases import is_alias
from sie_contracts.names import did_you_mean
from sie_contracts.wire import configs
from sie_runtime.http import config_routes
from sie_runtime.http.routes import JSON, YAML

if TYPE_CHECKING:
    from sie_config_service.state import ConfigService

MAX_BODY_BYTES = 1 << 20
BODY_S = 30.0
MAX_KEY_CHARS = 255


async def models(service: ConfigService, _request: Request) -> Response:
    live = (await service.require().snapshot()).live
    return json_response(
        {
            "models": [
                configs.listed(model, stored.entry or {}, stored.source, stored.note)
                for model, stored in sorted(live.items())
            ]
        }
    )


async def history(service: ConfigService, request: Request) -> Response:
    """Return the revisions of a model, newest first."""
    model = request.path_params["id"]
    revisions = await service.require().history(model)
    if not revisions:
        raise await service.require().not_found(model)
    return json_response(
        {
            "model_id": model,
            "revisions": [
                {
                    "revision": revision.revision,
                    "created_at": revision.created_at,
                    "operation": revision.operation,
                    "author": revision.author or revision.source,
                    "note": revision.note,
                    "changes": [] if before is None else difference(before.entry, revision.entry),
                }
                for revision, before in itertools.zip_longest(revisions, revisions[1:])
            ],
        }
    )


async def status(service: ConfigService, request: Request) -> Response:
    """Report which gateways and workers serve which revision of a model."""
    model = request.path_params["id"]
    store = service.require()
    read = await store.snapshot()
    held = read.held.get(model, HeldModel())
    if held.stored is None or held.entry is None:
        raise await store.not_found(model)
    bundles = (
        None
        if is_alias(held.entry)
        else {
            bundle: (configs.digest(read.revisions(bundle)), service.workers.of_bundle(bundle))
            for bundle in bundles_of(read.bundles, held.entry)
        }
    )
    since = f"{read.created}:{held.written}"
    return json_response(
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


async def model(service: ConfigService, request: Request) -> Response:
    """Return the configuration of one model. Its revision is the ETag."""
    model = request.path_params["id"]
    held = await service.require().held(model)
    if held.entry is None:
        raise await service.require().not_found(model)
    return _document(request, held.entry, JSON, {"ETag": f'"{held.revision}"'})


async def bundles(service: ConfigService, _request: Request) -> Response:
    return json_response(configs.bundle_list(await service.require().bundles()))


async def bundle(service: ConfigService, request: Request) -> Response:
    bundle = request.path_params["id"]
    return _document(request, configs.bundle_of(await service.require().bundles(), bundle), YAML)


async def resolve(service: ConfigService, request: Request) -> Response:
    """Return the model and profile of a name, and the bundles that can serve it."""
    body = await _body(request)
    return json_response(configs.resolution(await service.require().catalogue(), body))


async def epoch(service: ConfigService, _request: Request) -> Response:
    """Return the epochs (states) and the hashes of the catalogue. Equal epochs mean equal catalogues."""
    return json_response(msgspec.to_builtins(await service.require().catalogue_epoch()))


async def export(service: ConfigService, _request: Request) -> Response:
    """Return the whole catalogue at one epoch."""
    return Response(await service.require().exported(), media_type=JSON)


async def create(service: ConfigService, request: Request) -> Response:
    """Add a model, or add profiles to an existing model."""
    parameters, body = await _read(request)
    edits = await service.edits()
    document, ignored = await edits.public(parameters)
    desired = edits.entry(document.value, document)
    edit, profiles = edits.create(desired), profiles_of(desired)
    return await _write(service, request, "create", desired["id"], edit, body, profiles, ignored)


async def rollback(service: ConfigService, request: Request) -> Response:
    """Write the content of an earlier revision of a model as its newest revision."""
    model = request.path_params["id"]
    parameters, body = await _read(request)
    return await _write(service, request, "rollback", model, (await service.edits()).rollback(model, parameters), body)


async def put(service: ConfigService, request: Request) -> Response:
    model = request.path_params["id"]
    parameters, body = await _read(request)
    edits = await service.edits()
    document, ignored = await edits.public(parameters, model)
    edit = edits.put(model, document, parameters)
    return await _write(service, request, "put", model, edit, body, warnings=ignored)


async def patch(service: ConfigService, request: Request) -> Response:
    """Change a model by a JSON merge patch."""
    model = request.path_params["id"]
    parameters, body = await _read(request)
    return await _write(service, request, "patch", model, (await service.edits()).patch(model, parameters), body)


async def delete(service: ConfigService, request: Request) -> Response:
    model = request.path_params["id"]
    return await _write(service, request, "delete", model, (await service.edits()).delete(model), b"")


async def _write(
    service: ConfigService,
    request: Request,
    operation: str,
    model: str,
    edit: Edit,
    body: bytes,
    profiles: Collection[str] | None = None,
    warnings: tuple[str, ...] = (),
) -> Response:
    dry_run, force = _flags(request, "dry_run", "force")
    answered = await service.require_writer().write(
        WriteRequest(
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
            warnings=warnings,
        )
    )
    status = 201 if answered.created and not answered.replayed else 200
    return json_response(answered.body, {"ETag": f'"{answered.body["revision"]}"'}, status)


async def _read(request: Request) -> tuple[ParsedDocument, bytes]:
    body = await _body(request)
    # in a thread: parsing a large YAML document would block the event loop
    return await asyncio.to_thread(read, body, request.headers.get("content-type", "")), body


async def _body(request: Request) -> bytes:
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    message = (
                        f"body: expected at most {MAX_BODY_BYTES} bytes, got more; the configuration of a model "
                        "usually has a few thousand"
                    )
                    raise PayloadTooLarge(message, param="body", extras={"limit": MAX_BODY_BYTES})
    except TimeoutError:
        raise GatewayTimeout(f"the body was not complete within {BODY_S:g} s", param="body") from None
    return bytes(data)


def _key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key) > MAX_KEY_CHARS:
        message = f"Idempotency-Key: expected at most {MAX_KEY_CHARS} characters, got {len(key)}"
        raise InvalidInput(message, reason="schema", param="Idempotency-Key")
    return key


def _if_match(request: Request) -> int | None:
    header = request.headers.get("if-match")
    if header is None:
        return None
    # accept W/: a proxy that compresses a reply makes its ETag weak
    text = header.strip().removeprefix("W/").removeprefix('"').removesuffix('"')
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        message = f"If-Match: expected the number of a revision, as the ETag of the model gives it, got {header[:60]!r}"
        raise InvalidInput(message, reason="schema", param="If-Match")
    return int(text)


def _flags(request: Request, *names: str) -> list[bool]:
    """Read the flags of a write. Unknown parameters are refused: a write with a misspelt `dry_run` would be stored."""
    for name in request.query_params:
        if name not in names:
            message = f"{name[:60]}: no such parameter of a write{did_you_mean(name, names)}"
            raise InvalidInput(message, reason="schema", param=name[:60])
    values = [request.query_params.get(name, "false") for name in names]
    for name, value in zip(names, values, strict=True):
        if value not in ("true", "false"):
            raise InvalidInput(f"{name}: expected true or false, got {value[:60]!r}", reason="schema", param=name)
    return [value == "true" for value in values]


def _document(request: Request, document: Any, default: str, headers: dict[str, str] | None = None) -> Response:
    content, content_type = config_routes.rendered(document, request.headers.get("accept", ""), default)
    return Response(content, 200, headers, media_type=content_type)


def json_response(body: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type=JSON)


HANDLERS = {
    ("GET", "models"): models,
    ("GET", "model"): model,
    ("GET", "status"): status,
    ("GET", "history"): history,
    ("GET", "bundles"): bundles,
    ("GET", "bundle"): bundle,
    ("POST", "resolve"): resolve,
    ("GET", "epoch"): epoch,
    ("GET", "export"): export,
    ("POST", "models"): create,
    ("PUT", "model"): put,
    ("PATCH", "model"): patch,
    ("DELETE", "model"): delete,
    ("POST", "rollback"): rollback,
}
