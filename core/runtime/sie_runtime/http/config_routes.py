"""Routes of the catalogue. The config service serves all of them, a gateway only routes that read the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec

from sie_contracts.api import configs as api
from sie_contracts.api.shapes import MINI
from sie_contracts.wire.configs import ConfigEpoch, ConfigExport
from sie_runtime.http.asgi import accept_weights
from sie_runtime.http.routes import JSON, YAML, Content, Parameter, Route

PREFIX = "/v1/configs/"
_MODELS = f"{PREFIX}models"
_MODEL = f"{_MODELS}/{{id:path}}"
_TAG = "Configuration"
_BUNDLE = Parameter("id", "path", example="default")
_FLAG = Literal["true", "false"]
_WRITE = (
    Parameter("dry_run", "query", _FLAG, "Reply with what the write would do, and write nothing."),
    Parameter("force", "query", _FLAG, "Write even if an alias would lose its model."),
    Parameter(
        "If-Match", "header", str, "ETag of a revision. The write is refused if this is not the newest revision."
    ),
    Parameter(
        "Idempotency-Key",
        "header",
        str,
        "Key of this write. If the write is sent again with this key, it has no effect and gets the first reply.",
    ),
)
# media type in `Accept` -> content type of the document
_DOCUMENT_TYPES = {JSON: JSON} | dict.fromkeys((YAML, "application/yaml", "text/yaml", "text/x-yaml"), YAML)
_DOCUMENT = Content(api.ModelDocument, (JSON, YAML))
_WRITTEN = Content(api.Written)
PLACEHOLDERS = {"id": Parameter("id", "path", example=MINI)}


def _read(endpoint: str, path: str, summary: str, reply: Any, media: tuple[str, ...] = (JSON,), **more: Any) -> Route:
    replies = {200: Content(reply, media)}
    return Route(
        method="GET", path=path, scope="read", summary=summary, tag=_TAG, endpoint=endpoint, replies=replies, **more
    )


def _write(method: str, endpoint: str, path: str, summary: str, body: Content | None, status: int = 200) -> Route:
    return Route(
        method=method,
        path=path,
        scope="config",
        summary=summary,
        tag=_TAG,
        endpoint=endpoint,
        body=body,
        replies={200: _WRITTEN, status: _WRITTEN},
        parameters=_WRITE,
    )


CONFIG_ROUTES: tuple[Route, ...] = (
    _read("models", _MODELS, "All models", api.ConfigModels),
    _read("model", _MODEL, "The configuration of a model", api.ModelDocument, (JSON, YAML)),
    _read(
        "status", f"{_MODEL}/status", "Which gateways and workers serve which revision of a model", api.ModelRevisions
    ),
    _read("history", f"{_MODEL}/history", "The revisions of a model, newest first", api.ModelHistory),
    _read("bundles", f"{PREFIX}bundles", "All bundles", api.ConfigBundles),
    _read(
        "bundle", f"{PREFIX}bundles/{{id:path}}", "One bundle", api.ConfigBundle, (JSON, YAML), parameters=(_BUNDLE,)
    ),
    Route(
        method="POST",
        path=f"{PREFIX}resolve",
        scope="read",
        summary="The model and profile that a name stands for, and the bundles that can serve it",
        tag=_TAG,
        endpoint="resolve",
        body=Content(api.Resolve),
        replies={200: Content(api.Resolution)},
    ),
    _read("epoch", f"{PREFIX}epoch", "The epoch of the catalogue; every write changes it", ConfigEpoch, reader=True),
    replace(
        _read("export", f"{PREFIX}export", "The whole catalogue at one epoch", ConfigExport, reader=True),
        scope="config",
    ),
    _write("POST", "models", _MODELS, "Add a model, or profiles to one", _DOCUMENT, 201),
    _write("PUT", "model", _MODEL, "Replace a model", _DOCUMENT),
    _write(
        "PATCH", "model", _MODEL, "Change a model by a JSON merge patch", Content(dict[str, Any], example={"run": {}})
    ),
    _write("DELETE", "model", _MODEL, "Remove a model", None),
    _write("POST", "rollback", f"{_MODEL}/rollback", "Make a former revision the newest again", Content(api.Rollback)),
)


def rendered(document: Any, accept: str, default: str) -> tuple[bytes, str]:
    """Return (encoded document, content type) in JSON or YAML. `document`: maps, lists, texts and numbers. `accept`: an
    Accept header, of which the format with the highest weight is used; if weights are equal, the format named first.
    `default`: content type if `accept` names neither JSON nor YAML.
    """
    weights = {
        name: weight for name, weight in accept_weights(accept).items() if name in _DOCUMENT_TYPES and weight > 0
    }
    content_type = _DOCUMENT_TYPES[max(weights, key=weights.__getitem__)] if weights else default
    if content_type == JSON:
        return msgspec.json.encode(document), JSON
    import yaml

    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, encoding="utf-8"), YAML


def bound(handlers: Mapping[tuple[str, str], Any], endpoint: str = "") -> tuple[Route, ...]:
    """Return the routes of a process. `handlers`: handler by (method, endpoint). A request to a route without a handler
    gets status 405. `endpoint`: name of all these routes in the metrics; if empty, each route has its own name.

    Raises ValueError for a handler that belongs to no route.
    """
    if unknown := handlers.keys() - {(route.method, route.endpoint) for route in CONFIG_ROUTES}:
        raise ValueError(f"handlers without a route: {sorted(unknown)}")
    return tuple(
        replace(
            route,
            handler=handlers.get((route.method, route.endpoint)),
            served=(route.method, route.endpoint) in handlers,
            endpoint=endpoint or route.endpoint,
        )
        for route in CONFIG_ROUTES
    )
