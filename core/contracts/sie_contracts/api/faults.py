"""Errors over HTTP: one envelope, of which each client family reads a part."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from sie_contracts.api.shapes import Text, one_of
from sie_contracts.errors import InvalidInput, envelope


class ErrorDetail(Struct, kw_only=True):
    """All facts of an error."""

    code: str
    message: str
    type: str
    param: str | None
    reason: Text = UNSET
    retryable: bool
    request_id: str


class _ShortDetail(Struct, kw_only=True):
    code: str
    message: str


class Error(Struct, kw_only=True):
    """An error in the form that the client family of the route reads. `error` is a map of all facts; at routes of Text
    Embeddings Inference it is a message. `detail` is a map; it is a text if the body has `truncation`, which Voyage's
    client sends. docs/errors.md has a table.
    """

    EXAMPLE: ClassVar[Any] = envelope(
        InvalidInput("items[0].text: expected a string or null, got 5", reason="schema", param="items[0].text"),
        "01994...",
    )

    error: ErrorDetail | str
    detail: Annotated[Any, one_of(_ShortDetail, str)] = UNSET
    code: str
    message: Text = UNSET
    error_type: Text = UNSET
    id: Text = UNSET
    errors: list[dict[str, Any]] | UnsetType = UNSET


class Provisioning(Struct, kw_only=True):
    """Answer for a request that cannot be served yet: a worker is being started."""

    status: Literal["provisioning"]
    gpu: str
    bundle: str
    estimated_wait_s: float
    message: str
