"""What a call may raise. No other exception leaves the client.

SIEError
├── SIEConnectionError      nobody answered
├── RequestError            the server says that the request can never succeed as written (4xx)
│   ├── AuthenticationError     401, 403
│   └── ModelNotFoundError      MODEL_NOT_FOUND, with `suggestions` in `details`
└── ServerError             the server failed, or had no capacity within the client's patience (5xx)
    ├── ProvisioningError       PROVISIONING, as 202 or 503
    ├── ModelLoadingError       MODEL_LOADING
    ├── ModelLoadFailedError    MODEL_LOAD_FAILED
    ├── LoraLoadingError        LORA_LOADING
    ├── LoraLoadFailedError     LORA_LOAD_FAILED
    ├── QueueFullError          QUEUE_FULL
    ├── ResourceExhaustedError  RESOURCE_EXHAUSTED
    └── RequestTimeoutError     GATEWAY_TIMEOUT
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SIEError(Exception):
    """`code` is the server's (empty where it sent none), `status` the HTTP status, `details` the whole error map of the body."""

    def __init__(
        self, message: str, *, code: str = "", status: int = 0, request_id: str = "", details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.request_id = request_id
        self.details = dict(details or {})


class SIEConnectionError(SIEError):
    """The server could not be reached, or the connection broke."""


class RequestError(SIEError):
    """The request can never succeed as written."""


class AuthenticationError(RequestError):
    """The token is missing, wrong, or lacks the scope."""


class ModelNotFoundError(RequestError):
    """No such model, profile or revision."""


class ServerError(SIEError):
    """The server failed, or stayed without capacity for as long as the client was willing to wait."""


class ProvisioningError(ServerError):
    """No worker was ready when the client's patience ended: `details` has `gpu`, `bundle` and `estimated_wait_s`."""


class ModelLoadingError(ServerError):
    """The model was still loading when the client's patience ended."""


class ModelLoadFailedError(ServerError):
    """The model cannot be loaded: `details` has `error_class`, `attempts` and `permanent`."""


class LoraLoadingError(ServerError):
    """The LoRA was still loading when the client's patience ended."""


class LoraLoadFailedError(ServerError):
    """The LoRA cannot be loaded: `details` has `lora_id`."""


class QueueFullError(ServerError):
    """The queue was still full when the client's patience ended."""


class ResourceExhaustedError(ServerError):
    """The device had no memory for this request."""


class RequestTimeoutError(ServerError):
    """The request's own deadline passed."""


_BY_CODE: dict[str, type[SIEError]] = {
    "MODEL_NOT_FOUND": ModelNotFoundError,
    "PROVISIONING": ProvisioningError,
    "MODEL_LOADING": ModelLoadingError,
    "MODEL_LOAD_FAILED": ModelLoadFailedError,
    "LORA_LOADING": LoraLoadingError,
    "LORA_LOAD_FAILED": LoraLoadFailedError,
    "QUEUE_FULL": QueueFullError,
    "RESOURCE_EXHAUSTED": ResourceExhaustedError,
    "GATEWAY_TIMEOUT": RequestTimeoutError,
}


def error_class(code: str, status: int) -> type[SIEError]:
    """The class for a server's code, else for its status."""
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status in (401, 403):
        return AuthenticationError
    return RequestError if 400 <= status < 500 else ServerError
