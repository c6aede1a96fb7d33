"""Exceptions that a call may raise. The client also raises TypeError for an unknown argument and for a table in place
of a list, and ValueError for a base URL that does not begin with http:// or https://.

SIEError
├── SIEConnectionError              no response: no server was reached, or the connection broke
├── RequestError                    status 4xx, or the client refused to send the request
│   ├── InvalidInputError             INVALID_INPUT, with the kind of the fault in `reason`
│   ├── AuthenticationError           UNAUTHENTICATED
│   │   └── PermissionDeniedError       PERMISSION_DENIED
│   │       └── PoolOperationForbiddenError  POOL_OPERATION_FORBIDDEN
│   ├── NotFoundError                 NOT_FOUND
│   │   ├── ModelNotFoundError          MODEL_NOT_FOUND, with similar or existing names in `details`
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
│   └── RateLimitedError              RATE_LIMITED: a limit of the API key was reached for as long as the client waited
├── JobFailedError                  a job that the client waited for failed, expired or was cancelled
├── JobTimeoutError                 a job has not ended within the `timeout_s` of `wait`; the job continues
├── AllItemsFailedError             ALL_ITEMS_FAILED: every item failed, for different causes; see `details["errors"]`
└── ServerError                     the server failed, or had no capacity while the client waited; 5xx, or an
    │                               unreadable reply (200)
    ├── InferenceError                INFERENCE_ERROR
    ├── InternalServerError           INTERNAL_ERROR
    ├── ModelLoadFailedError          MODEL_LOAD_FAILED
    ├── LoraLoadFailedError           LORA_LOAD_FAILED; 404 or 400 if the request names a wrong LoRA
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
    """Base of all errors of the client. `code`: the server's error code, empty if it sent none. `status`: the HTTP
    status, 0 if there was no response. `details`: all fields of the error in the response's body.

    `retryable`: True if the same request may succeed later. `request_id`: id of the request, as in the server's logs.
    `may_have_run`: True if an attempt got no response; the server may have run the request nevertheless.
    """

    may_have_run = False

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
        """Return the server's reason, a finer category than `code`; empty if the server sent none."""
        return str(self.details.get("reason") or "")

    @property
    def param(self) -> str:
        """Return the path of the invalid field in the request; empty if the error is not about a field."""
        return str(self.details.get("param") or "")


class SIEConnectionError(SIEError):
    """The server could not be reached, or the connection broke before the response."""


class RequestError(SIEError):
    """The request must be changed to succeed. After `RateLimitedError`, the same request may succeed later."""


class InvalidInputError(RequestError, code="INVALID_INPUT"):
    """The body, a parameter or a file is invalid, or the model does not support it."""


class AuthenticationError(RequestError, code="UNAUTHENTICATED"):
    """The token is missing, unknown, expired or revoked."""


class PermissionDeniedError(AuthenticationError, code="PERMISSION_DENIED"):
    """The token is valid but lacks the scope that the path requires, or the server does not allow the operation."""


class PoolOperationForbiddenError(PermissionDeniedError, code="POOL_OPERATION_FORBIDDEN"):
    """The request exceeds a limit for reservations, or would change a pool that is not a reservation."""


class NotFoundError(RequestError, code="NOT_FOUND"):
    """The path, or the object that it names, does not exist."""


class ModelNotFoundError(NotFoundError, code="MODEL_NOT_FOUND"):
    """The model, profile or revision does not exist. `details` has `suggestions` for an unknown model, `profiles` for
    an unknown profile, `revisions` for an unknown revision.
    """


class PoolNotFoundError(NotFoundError, code="POOL_NOT_FOUND"):
    """The pool does not exist, or its lease has ended."""


class MethodNotAllowedError(RequestError, code="METHOD_NOT_ALLOWED"):
    """The path does not support this method."""


class ConflictError(RequestError):
    """The request conflicts with the present state of an object on the server."""


class BundleConflictError(ConflictError, code="BUNDLE_CONFLICT"):
    """The bundle does not serve the model. `details` has `compatible_bundles`."""


class PoolConflictError(ConflictError, code="POOL_CONFLICT"):
    """The name belongs to a pool that is not a reservation, or to a reservation of another API key."""


class ContentConflictError(ConflictError, code="CONTENT_CONFLICT"):
    """The present state of the object does not allow the request, for example because another client has changed the
    object. For a model, `details` has `revision` and `diff`.
    """


class PayloadTooLargeError(RequestError, code="PAYLOAD_TOO_LARGE"):
    """The body, one item or the reply is too large, or the call needs more tokens than the API key may use in a
    minute. `details` has `limit`.
    """


class UnsupportedMediaTypeError(RequestError, code="UNSUPPORTED_MEDIA_TYPE"):
    """The server accepts no body of this `Content-Type` or `Content-Encoding`."""


class ValidationFailedError(RequestError, code="VALIDATION_ERROR"):
    """The config service received an invalid configuration, for example of a model."""


class IdempotencyMismatchError(RequestError, code="IDEMPOTENCY_MISMATCH"):
    """The idempotency key was used earlier for a different request."""


class RateLimitedError(RequestError, code="RATE_LIMITED"):
    """A limit was reached for as long as the client waited. Such limits are the tokens of the API key per minute, its
    simultaneous uploads, and its stored jobs and files.
    """


class AllItemsFailedError(SIEError, code="ALL_ITEMS_FAILED"):
    """Every item of the request failed, for different reasons: see `details["errors"]`. `status` is 400, 500 or 503."""


class JobFailedError(SIEError):
    """A job ended without being completed. `code`: code of its error. `details` has `job` and `state`."""


class JobTimeoutError(SIEError):
    """A job has not ended within the `timeout_s` of `wait`. The job continues. `details` has `job` and `state`."""


class ServerError(SIEError):
    """The server failed, sent an unreadable reply, or had no capacity for as long as the client waited."""


class InferenceError(ServerError, code="INFERENCE_ERROR"):
    """The model could not compute this input."""


class InternalServerError(ServerError, code="INTERNAL_ERROR"):
    """The server has an internal fault. Its log has the details under `request_id`."""


class ModelLoadFailedError(ServerError, code="MODEL_LOAD_FAILED"):
    """The model cannot be loaded. `details` has `error_class`, `attempts` and `permanent`."""


class LoraLoadFailedError(ServerError, code="LORA_LOAD_FAILED"):
    """The LoRA cannot be loaded. `details` has `lora_id`."""


class ProvisioningError(ServerError, code="PROVISIONING"):
    """No worker became ready while the client waited. `details` has `gpu`, `bundle` and `estimated_wait_s`."""


class ModelLoadingError(ServerError, code="MODEL_LOADING"):
    """The model was still being loaded when the client stopped waiting."""


class LoraLoadingError(ServerError, code="LORA_LOADING"):
    """The LoRA was still being loaded when the client stopped waiting."""


class ResourceExhaustedError(ServerError, code="RESOURCE_EXHAUSTED"):
    """A device, a store or another limited resource of the server was full for this request."""


class QueueFullError(ServerError, code="QUEUE_FULL"):
    """The queue stayed full, or the gateway stayed at a limit, for as long as the client waited."""


class QueueUnavailableError(ServerError, code="QUEUE_UNAVAILABLE"):
    """The server could not use its broker or its payload store for as long as the client waited."""


class NotReadyError(ServerError, code="NOT_READY"):
    """The server had not read its catalogue or its keys yet, lacks a service that the request needs, or did not receive
    a model's new configuration in time.
    """


class ShuttingDownError(ServerError, code="SHUTTING_DOWN"):
    """The server was shutting down, and no other server took its place."""


class RequestTimeoutError(ServerError, code="GATEWAY_TIMEOUT"):
    """The request was not finished within its deadline (`timeout_s`)."""


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
    """Return the exception class for an error code of the server, or for the HTTP status if the code is unknown."""
    return _BY_CODE.get(code) or _BY_STATUS.get(status) or (RequestError if 400 <= status < 500 else ServerError)


def invalid(message: str, *, param: str = "", reason: str = "") -> InvalidInputError:
    """Return the exception for an argument that the client refuses before it sends a request."""
    details = {name: value for name, value in (("param", param), ("reason", reason)) if value}
    return InvalidInputError(message, code="INVALID_INPUT", details=details)


def codes() -> dict[str, type[SIEError]]:
    """Return all error codes of the server, each with its exception class."""
    return dict(_BY_CODE)
