"""Routes of the config service: the catalogue's routes with their handlers, and the pages that describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sie_config_service.handlers import HANDLERS
from sie_contracts.wire.configs import config_shape
from sie_runtime.http import config_routes, openapi
from sie_runtime.http.routes import HTML, JSON, Content, Route, Table


def _page(path: str, summary: str, media: str) -> Route:
    replies = {200: Content(dict[str, Any], (media,))}
    return Route(method="GET", path=path, scope="read", summary=summary, tag="Operations", replies=replies)


ROUTES: tuple[Route, ...] = (
    *config_routes.bound(HANDLERS),
    _page("/docs", "The OpenAPI document as a web page", HTML),
    _page("/docs/oauth2-redirect", "A file of the page /docs", HTML),
    _page("/openapi.json", "The OpenAPI document", JSON),
)
TABLE = Table(ROUTES)


def openapi_document(about: Mapping[str, Any]) -> dict[str, Any]:
    """Build the OpenAPI document of the config service. `about`: its title and version."""
    return openapi.document(ROUTES, config_routes.PLACEHOLDERS, lambda _: openapi.statuses(config_shape), about=about)
