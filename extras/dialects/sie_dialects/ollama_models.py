"""Ollama's routes about models. As in Ollama, each listed name ends with a tag: the profile, or `latest`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

import sie_contracts
from sie_contracts.models.catalogue import Resolved
from sie_contracts.models.entries import widths
from sie_dialects import ollama
from sie_dialects.api import ollama as api
from sie_gateway.dialects import fields
from sie_gateway.fleet.capabilities import CAN
from sie_gateway.fleet.lanes import Fleet
from sie_gateway.http.route_kinds import GatewayRoute, control
from sie_gateway.operations.handlers import json_of, json_response
from sie_gateway.operations.models import listed_names

if TYPE_CHECKING:
    from sie_gateway.state import Gateway

NEVER_MODIFIED = "1970-01-01T00:00:00Z"  # constant, because the catalogue stores no time of change
NEVER_EXPIRES = "9999-12-31T23:59:59Z"
_LEVELS = {"": "", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8"}
_SLICE = 200  # number of models that are described (in 1 to 2 ms) before other tasks may run


async def _listed(gateway: Gateway) -> AsyncIterator[tuple[str, Resolved]]:
    """Yield a pair for each model that returns dense vectors: its name with a tag, and the model."""
    catalogue = gateway.inference.catalogue
    for number, (name, profile) in enumerate(listed_names(catalogue, (), variants=True), 1):
        if profile is None:
            resolved = catalogue.resolve(catalogue.aliases[name].heaviest.model, follow=False)
        else:
            resolved = catalogue.resolve_profile(catalogue.entries[name], profile, name)
        if CAN["embed"](resolved.entry):
            yield ollama.tagged(name, resolved, profile), resolved
        if number % _SLICE == 0:
            await asyncio.sleep(0)


def _described(fleet: Fleet, name: str, resolved: Resolved) -> dict[str, Any]:
    entry = resolved.entry
    _, reports = fleet.model(resolved.residency)
    served = next((status.precision.served for _, status in reports if status.precision), None)
    precision = resolved.load.precision or served or ""
    return {
        "name": name,
        "model": name,
        "modified_at": NEVER_MODIFIED,
        "size": max((status.memory_bytes for _, status in reports), default=0),
        "digest": hashlib.sha256(f"{resolved.canonical}@{entry.revision}".encode()).hexdigest(),
        "details": api.OllamaDetails(
            family=entry.family, families=[entry.family], quantization_level=_LEVELS.get(precision, precision)
        ),
    }


async def tags(gateway: Gateway, request: Request) -> Response:
    models = [api.OllamaModel(**_described(gateway.fleet, *named)) async for named in _listed(gateway)]
    return json_response(api.OllamaModels(models=models))


async def running(gateway: Gateway, request: Request) -> Response:
    models = []
    async for name, resolved in _listed(gateway):
        # true if this variant uses the loaded weights of another variant: only that other variant is listed
        is_shared = resolved.residency != resolved.canonical
        state, _ = gateway.fleet.model(resolved.residency)
        if state == "loaded" and not is_shared:
            description = _described(gateway.fleet, name, resolved)
            size, length = description["size"], resolved.entry.max_tokens
            models.append(
                api.OllamaLoadedModel(**description, expires_at=NEVER_EXPIRES, size_vram=size, context_length=length)
            )
    return json_response(api.OllamaLoadedModels(models=models))


async def show(gateway: Gateway, request: Request) -> Response:
    body = await json_of(request)
    name = fields.text(body, "model" if body.get("model") is not None or "name" not in body else "name")
    resolved = gateway.inference.resolve(ollama.untagged(gateway.inference.catalogue, name))
    entry = resolved.entry
    description = _described(gateway.fleet, name, resolved)
    info: dict[str, Any] = {
        "general.architecture": entry.family,
        f"{entry.family}.context_length": entry.max_tokens,
    }
    if (width := widths(entry, resolved.run).get("dense")) is not None:
        info[f"{entry.family}.embedding_length"] = width
    shown = api.OllamaShown(
        license=entry.license or "",
        modified_at=NEVER_MODIFIED,
        details=description["details"],
        model_info=info,
        capabilities=["embedding"] if CAN["embed"](entry) else [],
    )
    return json_response(shown)


async def version(gateway: Gateway, request: Request) -> Response:
    return json_response(api.OllamaVersion(version=sie_contracts.__version__))


def _row(method: str, path: str, handler: Any, summary: str, reply: Any, **more: Any) -> GatewayRoute:
    names = ("Ollama", summary)
    return control(method, ollama.PREFIX + path, "models", handler, names, reply, shape=ollama.shape, **more)


MODELS = (
    _row("GET", "tags", tags, "The models that give vectors", api.OllamaModels),
    _row("GET", "ps", running, "The loaded models that give vectors", api.OllamaLoadedModels),
    _row("POST", "show", show, "One model", api.OllamaShown, body=api.OllamaShow),
    _row("GET", "version", version, "The version of this server", api.OllamaVersion),
)
