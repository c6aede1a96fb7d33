"""Exceptions that a call may raise. No other exception leaves the client.

SIEError
├── SIEConnectionError              nobody answered
├── RequestError                    the request can never succeed as written (4xx), or could not even be sent
│   ├── InvalidInputError             INVALID_INPUT; `reason` says what kind
│   ├── AuthenticationError           UNAUTHENTICATED
│   │   └── PermissionDeniedError       PERMISSION_DENIED
│   │       └── PoolOperationForbiddenError  POOL_OPERATION_FORBIDDEN
│   ├── NotFoundError                 NOT_FOUND
│   │   ├── ModelNotFoundError          MODEL_NOT_FOUND, with `suggestions` in `details`
│   │   └── PoolNotFoundError           POOL_NOT_FOUND
│   ├── MethodNotAllowedError         METHOD_NOT_ALLOWED
│   ├── ConflictError
│   │   ├── BundleConflictError         BUNDLE_CONFLICT
│   │   ├── PoolConflictError           POOL_CONFLICT
│   │   └── ContentConflictError        CONTENT_CONFLICT
│   ├── PayloadTooLargeError          PAYLOAD_TOO_LARGE, with `limit` in `details`
│   ├── UnsupportedMediaTypeError     UNSUPPORTED_MEDIA_TYPE
│   ├── ValidationFailedError         VALIDATION_ERROR
│   ├── IdempotencyMismatchError      IDEMPOTENCY_MISMATCH
│   └── RateLimitedError              RATE_LIMITED: the key's quota, for longer than the client was willing to wait
├── JobFailedError                  a job that was waited for has failed, has expired or was cancelled
├── JobTimeoutError                 a job has not ended within the time that `wait` was given; it goes on
├── AllItemsFailedError             ALL_ITEMS_FAILED: every item, for different causes; `details["errors"]` has each
└── ServerError                     the server failed, or had no capacity within the client's patience (5xx)
    ├── InferenceError                INFERENCE_ERROR
    ├── InternalServerError           INTERNAL_ERROR
    ├── ModelLoadFailedError          MODEL_LOAD_FAILED
    ├── LoraLoadFailedError           LORA_LOAD_FAILED
    ├── ProvisioningError             PROVISIONING
    ├── ModelLoadingError             MODEL_LOADING
    ├── LoraLoadingError              LORA_LOADING
    ├── ResourceExhaustedError        RESOURCE_EXHAUSTED
    ├── QueueFullError                QUEUE_FULL
    ├── QueueUnavailableError         QUEUE_UNAVAILABLE
    ├── NotReadyError                 NOT_READY
    ├── ShuttingDownError             SHUTTING_DOWN
    └── RequestTimeoutError           GATEWAY_TIMEOUT
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BY_CODE: dict[str, type[SIEError]] = {}


class SIEError(Exception):
    """`code` is the server's (empty where it sent none), `status` the HTTP status (0: none), `details` the whole error
    map of the body.

    `retryable`: whether the same request may succeed later. `request_id` finds it in the server's logs.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        status: int = 0,
        request_id: str = "",
        retryable: bool = False,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retryable = retryable
        self.details = dict(details or {})

    def __init_subclass__(cls, code: str = "") -> None:
        if code:
            _BY_CODE[code] = cls

    @property
    def reason(self) -> str:
        """Refines the code; empty where there is none."""
        return str(self.details.get("reason") or "")

    @property
    def param(self) -> str:
        """Path of the offending field; empty where there is none."""
        return str(self.details.get("param") or "")


class SIEConnectionError(SIEError):
    """The server could not be reached, or the connection broke."""


class RequestError(SIEError):
    """The request can never succeed as written."""


class InvalidInputError(RequestError, code="INVALID_INPUT"):
    """The body, a parameter or a file is invalid, or the model does not support it."""


class AuthenticationError(RequestError, code="UNAUTHENTICATED"):
    """The token is missing or wrong."""


class PermissionDeniedError(AuthenticationError, code="PERMISSION_DENIED"):
    """The token lacks the scope."""


class PoolOperationForbiddenError(PermissionDeniedError, code="POOL_OPERATION_FORBIDDEN"):
    """A limit of reservations is reached, or the pool is not a reservation."""


class NotFoundError(RequestError, code="NOT_FOUND"):
    """No such path, or the object that the path names does not exist."""


class ModelNotFoundError(NotFoundError, code="MODEL_NOT_FOUND"):
    """No such model, profile or revision: `details` has `suggestions`."""


class PoolNotFoundError(NotFoundError, code="POOL_NOT_FOUND"):
    """No such pool, or its lease has lapsed."""


class MethodNotAllowedError(RequestError, code="METHOD_NOT_ALLOWED"):
    """The path does not support that method."""


class ConflictError(RequestError):
    """The request contradicts what exists."""


class BundleConflictError(ConflictError, code="BUNDLE_CONFLICT"):
    """The bundle does not serve the model: `details` has `compatible_bundles`."""


class PoolConflictError(ConflictError, code="POOL_CONFLICT"):
    """A pool of that name has another specification."""


class ContentConflictError(ConflictError, code="CONTENT_CONFLICT"):
    """The configuration was changed by somebody else: `details` has `revision` and `diff`."""


class PayloadTooLargeError(RequestError, code="PAYLOAD_TOO_LARGE"):
    """The body, or one item, is larger than the server takes: `details` has `limit`."""


class UnsupportedMediaTypeError(RequestError, code="UNSUPPORTED_MEDIA_TYPE"):
    """The server takes no body of this `Content-Type` or `Content-Encoding`."""


class ValidationFailedError(RequestError, code="VALIDATION_ERROR"):
    """A configuration that cannot be used."""


class IdempotencyMismatchError(RequestError, code="IDEMPOTENCY_MISMATCH"):
    """The idempotency key was used for another request."""


class RateLimitedError(RequestError, code="RATE_LIMITED"):
    """The key's quota was still used up when the client's budget of waiting ended."""


class AllItemsFailedError(SIEError, code="ALL_ITEMS_FAILED"):
    """Every item failed, not all for the same cause: `details["errors"]` has each, `status` is 400, 500 or 503."""


class JobFailedError(SIEError):
    """A job that was waited for ended otherwise than completed. `code` is that of its error, `details` have its `job`
    and `state`.
    """


class JobTimeoutError(SIEError):
    """A job has not ended within the time that `wait` was given. It goes on: `details` have its `job` and `state`."""


class ServerError(SIEError):
    """The server failed, or stayed without capacity for as long as the client was willing to wait."""


class InferenceError(ServerError, code="INFERENCE_ERROR"):
    """The model could not compute this input."""


class InternalServerError(ServerError, code="INTERNAL_ERROR"):
    """A fault of the server; its log has the details under `request_id`."""


class ModelLoadFailedError(ServerError, code="MODEL_LOAD_FAILED"):
    """The model cannot be loaded: `details` has `error_class`, `attempts` and `permanent`."""


class LoraLoadFailedError(ServerError, code="LORA_LOAD_FAILED"):
    """The LoRA cannot be loaded: `details` has `lora_id`."""


class ProvisioningError(ServerError, code="PROVISIONING"):
    """No worker was ready when the client's budget of waiting ended: `details` has `gpu`, `bundle` and
    `estimated_wait_s`.
    """


class ModelLoadingError(ServerError, code="MODEL_LOADING"):
    """The model was still loading when the client's budget of waiting ended."""


class LoraLoadingError(ServerError, code="LORA_LOADING"):
    """The LoRA was still loading when the client's budget of waiting ended."""


class ResourceExhaustedError(ServerError, code="RESOURCE_EXHAUSTED"):
    """The device had no memory for this request."""


class QueueFullError(ServerError, code="QUEUE_FULL"):
    """The queue was still full when the client's budget of waiting ended."""


class QueueUnavailableError(ServerError, code="QUEUE_UNAVAILABLE"):
    """The server's broker could not be reached."""


class NotReadyError(ServerError, code="NOT_READY"):
    """The server had not read its catalogue yet."""


class ShuttingDownError(ServerError, code="SHUTTING_DOWN"):
    """The server was leaving, and no other took its place."""


class RequestTimeoutError(ServerError, code="GATEWAY_TIMEOUT"):
    """The request's own deadline passed."""


_BY_STATUS: dict[int, type[SIEError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    405: MethodNotAllowedError,
    409: ConflictError,
    413: PayloadTooLargeError,
    415: UnsupportedMediaTypeError,
    429: RateLimitedError,
}


def error_class(code: str, status: int) -> type[SIEError]:
    """The class for a server's code, else for its status."""
    return _BY_CODE.get(code) or _BY_STATUS.get(status) or (RequestError if 400 <= status < 500 else ServerError)


def codes() -> dict[str, type[SIEError]]:
    """Every code of the server and its class."""
    return dict(_BY_CODE)
