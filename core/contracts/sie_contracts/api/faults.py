"""Bodies of error replies. A body repeats its facts in several fields, because clients of different families (OpenAI,
Cohere, ...) read different fields.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Struct, UnsetType

from sie_contracts.api.shapes import Text, one_of
from sie_contracts.errors import InvalidInput, envelope


class ErrorDetail(Struct, kw_only=True):
    """All facts of an error: code, message, reason, faulty field, and whether the request may be repeated."""

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
    """An error in the form that clients of this route expect. `error` is an object with all facts. On some routes,
    `detail` is an object too. On routes of Text Embeddings Inference and Ollama, `error` is the message. If the request
    body has `truncation`, which Voyage's client sends, `error` and `detail` are the message, and `error_details` is the
    object. docs/errors.md has the table of forms.
    """

    EXAMPLE: ClassVar[Any] = envelope(
        InvalidInput.at("items[0].text", "expected a string or null, got 5"),
        "01994...",
    )

    error: ErrorDetail | str
    detail: Annotated[Any, one_of(_ShortDetail, str)] = UNSET
    error_details: ErrorDetail | UnsetType = UNSET
    code: str
    message: Text = UNSET
    error_type: Text = UNSET
    id: Text = UNSET
    errors: list[dict[str, Any]] | UnsetType = UNSET


class Provisioning(Struct, kw_only=True):
    """Reply to a request that cannot be served yet, because a worker is being started."""

    status: Literal["provisioning"]
    gpu: str
    bundle: str
    estimated_wait_s: float
    message: str
