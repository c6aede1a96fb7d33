"""Errors of SIE in one class tree. HTTP bodies, SDK exceptions, metric labels and the documentation use this tree.

A message about an invalid field names the path of the field, the expected value and usually the received value. No
message contains text of an input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal, NamedTuple

import msgspec

# Errors that a decoder of msgspec raises: DecodeError for a wrong form, UnicodeDecodeError for a text that is not
# UTF-8, and RecursionError for deep nesting. DecodeError and UnicodeDecodeError are ValueErrors.
UNDECODABLE = (ValueError, RecursionError)


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as processes of the cluster send it to each other. `extras`: further members for the HTTP body."""

    code: str
    message: str
    reason: str = ""
    param: str = ""
    retry_after_s: int = 0
    extras: dict[str, Any] = {}


_BY_CODE: dict[str, type[SIEError]] = {}


class SIEError(Exception):
    """Base class of all errors that a client may see. `reason` is more specific than the code. `param` is the path of
    the faulty field.
    """

    code: ClassVar[str] = "INTERNAL_ERROR"
    status: int = 500
    retryable: bool = False
    retry_after_s: int = 0

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        param: str = "",
        retry_after_s: int | None = None,
        status: int | None = None,
        extras: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.param = param
        self.extras = extras or {}
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s
        if status is not None:
            self.status = status

    def __init_subclass__(cls) -> None:
        _BY_CODE[cls.code] = cls

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.reason, self.param, self.retry_after_s, self.extras)

    @staticmethod
    def from_info(info: ErrorInfo) -> SIEError:
        """Return the error that `info` describes. An unknown code, from a newer sender, becomes INTERNAL_ERROR."""
        cls = _BY_CODE.get(info.code)
        if cls is None:
            return InternalFailure(
                f"{info.code}: {info.message}", reason=info.reason, param=info.param, extras=info.extras
            )
        retry_after_s = info.retry_after_s or cls.retry_after_s
        return cls(info.message, reason=info.reason, param=info.param, retry_after_s=retry_after_s, extras=info.extras)


class InvalidInput(SIEError):
    """The body, a parameter, a header or a file is invalid, or the model does not support it: `reason` and `param` say
    which.
    """

    code, status = "INVALID_INPUT", 400

    @classmethod
    def at(
        cls, param: str, message: str, *, reason: str = "schema", extras: dict[str, Any] | None = None
    ) -> InvalidInput:
        """Return the error of one field. The message begins with `param`, the path of the field."""
        return cls(f"{param}: {message}", reason=reason, param=param, extras=extras)


class Unauthenticated(SIEError):
    """The token is missing or unknown."""

    code, status = "UNAUTHENTICATED", 401


class PermissionDenied(SIEError):
    """The token lacks the required scope, or the operation requires an admin token and the server has none. Or the
    request has a foreign host name or comes from a foreign web page (`reason` is `host` or `origin`). Or the entry of a
    model names code or a path that the operator has not allowed.
    """

    code, status = "PERMISSION_DENIED", 403


class PoolOperationForbidden(SIEError):
    """A limit on the number, the size or the lifetime of reservations is exceeded, or the operation is not possible for
    this pool, because it is not a reservation.
    """

    code, status = "POOL_OPERATION_FORBIDDEN", 403


class ModelNotFound(SIEError):
    """No such model, profile or revision. `suggestions` has the most similar names."""

    code, status = "MODEL_NOT_FOUND", 404


class PoolNotFound(SIEError):
    """No such pool, or the lease of the reservation has ended."""

    code, status = "POOL_NOT_FOUND", 404


class NotFound(SIEError):
    """No such path, or an object that the request names does not exist."""

    code, status = "NOT_FOUND", 404


class MethodNotAllowed(SIEError):
    """The path does not support this method. `Allow` lists the supported methods."""

    code, status = "METHOD_NOT_ALLOWED", 405

    def __init__(self, message: str, *, allow: str = "", **more: Any) -> None:
        """`allow`: value of the header `Allow`."""
        super().__init__(message, **more)
        self.allow = allow


class BundleConflict(SIEError):
    """The requested bundle does not serve the model, or no bundle does. `compatible_bundles` lists the bundles that
    serve it.
    """

    code, status = "BUNDLE_CONFLICT", 409


class PoolConflict(SIEError):
    """The name belongs to a pool that is not a reservation (`pool` describes it), or to a reservation of another
    key.
    """

    code, status = "POOL_CONFLICT", 409


class ContentConflict(SIEError):
    """The object is in another state than the request needs: for example, another client has changed it. For a model,
    `revision` is the present revision and `diff` lists the changes.
    """

    code, status = "CONTENT_CONFLICT", 409


class PayloadTooLarge(SIEError):
    """The body, a file, one input or the expected reply has more than `limit` bytes, or the images have more than
    `limit` pixels. Or one request needs more than `limit` tokens, the number that the key may use in a minute.
    """

    code, status = "PAYLOAD_TOO_LARGE", 413


class UnsupportedMediaType(SIEError):
    """The path does not accept the format in `Content-Type`, or `Content-Encoding` is not gzip. The status is 501 if
    `Transfer-Encoding` names a coding besides chunked.
    """

    code, status = "UNSUPPORTED_MEDIA_TYPE", 415


class ValidationFailed(SIEError):
    """The configuration is invalid. `errors` has the path and the text of the first fault."""

    code, status = "VALIDATION_ERROR", 422


def faulty(loc: str, message: str, line: int | None = None) -> ValidationFailed:
    """Return the error for one field of a document. `loc`: path, such as `$.weights`. `line`: line of the field."""
    place = {} if line is None else {"line": line}
    where = loc if line is None else f"{loc} (line {line})"
    return ValidationFailed(
        f"{where}: {message}", param=loc, extras={"errors": [{"loc": loc, "message": message, **place}]}
    )


class IdempotencyMismatch(SIEError):
    """The `Idempotency-Key` was used before, with another body."""

    code, status = "IDEMPOTENCY_MISMATCH", 422


class RateLimited(SIEError):
    """A limit is reached: tokens per minute of the key, requests of one kind that the key has at once (such as
    uploads), or stored records such as jobs. A lack of worker capacity never has this code.
    """

    code, status, retryable, retry_after_s = "RATE_LIMITED", 429, True, 1


class InferenceFailed(SIEError):
    """The model could not compute the input. `reason`: `non_finite` if the result has NaN or infinity or is a zero
    vector, `poison` if adapter processes died twice while it ran alone.
    """

    code, status = "INFERENCE_ERROR", 500


class InternalFailure(SIEError):
    """A fault of the server; its log has the details under the request id."""

    code, status = "INTERNAL_ERROR", 500


class AllItemsFailed(SIEError):
    """All inputs, or with `on_item_error: fail` at least two, failed with different codes. The status is 503 if one of
    the errors may be retried, otherwise 500 if one of the errors has a status of 5xx, otherwise 400.
    """

    code, status = "ALL_ITEMS_FAILED", 500

    def __init__(self, message: str, *, failures: Sequence[SIEError] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        if any(failure.retryable for failure in failures):
            self.retry_after_s = 5
        # an error from `from_info` has no `failures`; a `retry_after_s` above 0 shows that its status was 503
        if self.retry_after_s:
            self.status, self.retryable = 503, True
        elif failures and not any(failure.status >= 500 for failure in failures):
            self.status = 400


class ModelLoadFailed(SIEError):
    """The model cannot be loaded. `error_class`: the kind of failure. `attempts`: number of attempts. `permanent`:
    whether another attempt is useless. Public SDKs get status 502.
    """

    code, status = "MODEL_LOAD_FAILED", 500


class LoraLoadFailed(SIEError):
    """The LoRA `lora_id` cannot be loaded. The status is 404 or 400 if the client named a wrong LoRA, otherwise 500."""

    code, status = "LORA_LOAD_FAILED", 500

    def __init__(self, message: str, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.status = {"lora_not_found": 404, "lora_rejected": 400}.get(self.reason, self.status)


class ModelLoading(SIEError):
    """A worker is loading the model. `estimated_wait_s`: expected seconds until it is loaded."""

    code, status, retryable, retry_after_s = "MODEL_LOADING", 503, True, 5


class NotProvisioned(SIEError):
    """No worker is ready for this request. `gpu` and `bundle`: the kind of worker that it needs. `estimated_wait_s`:
    expected seconds until one is ready. On native routes, public SDKs below 0.6.5 get status 202.
    """

    code, status, retryable, retry_after_s = "PROVISIONING", 503, True, 5


class LoraLoading(SIEError):
    """A worker is loading the LoRA `lora_id`."""

    code, status, retryable, retry_after_s = "LORA_LOADING", 503, True, 1


class ResourceExhausted(SIEError):
    """The server lacks a resource for the request: device memory, even if the input runs alone; space for a file; or a
    free slot, because too many other requests use it at this moment.
    """

    code, status, retryable, retry_after_s = "RESOURCE_EXHAUSTED", 503, True, 5


class QueueFull(SIEError):
    """So much work is waiting that the request would not be done within its time budget, or the gateway is at a limit.
    `queue_depth`: number of waiting messages or requests.
    """

    code, status, retryable, retry_after_s = "QUEUE_FULL", 503, True, 1


class QueueUnavailable(SIEError):
    """The broker, or a store of large inputs, files or outputs of jobs, does not answer or does not accept the work. Or
    the store of large inputs is full (reason `store_full`). A full queue is QueueFull.
    """

    code, status, retryable, retry_after_s = "QUEUE_UNAVAILABLE", 503, True, 2


CONFIG_CHANGED = "config_changed"


class NotReady(SIEError):
    """The process has not read its catalogue, its keys or other records yet, or a service that it needs is not
    configured or does not answer. Reason `config_changed`: gateway and worker did not get the same revision of the
    model in time.
    """

    code, status, retryable, retry_after_s = "NOT_READY", 503, True, 2


SHUTTING_DOWN = (
    "this gateway is shutting down: send the request again, to another gateway or after the restart of this gateway"
)


class ShuttingDown(SIEError):
    """This gateway is shutting down. Send the request again, to another gateway."""

    code, status, retryable, retry_after_s = "SHUTTING_DOWN", 503, True, 1


class GatewayTimeout(SIEError):
    """The time budget of the request ended before its work was done, or its body did not arrive in time."""

    code, status, retryable, retry_after_s = "GATEWAY_TIMEOUT", 504, True, 5


def catalogue() -> list[type[SIEError]]:
    """Return all error classes with a code, in the order of this module."""
    return list(_BY_CODE.values())


_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def each_error() -> Iterator[SIEError]:
    """Yield examples of all errors, for the documents of the API. The examples are: one error of each class except
    AllItemsFailed; for each of these errors, an AllItemsFailed with this error as its only failure; and one
    InvalidInput or LoraLoadFailed for each reason that changes the HTTP status in some API format.
    """
    for reason in ("empty_items", "too_many_items", "model_required", "unsupported_output"):
        yield InvalidInput("message", reason=reason)
    for reason in ("lora_not_found", "lora_rejected"):
        yield LoraLoadFailed("message", reason=reason)
    leaves = [leaf("message") for leaf in catalogue() if leaf is not AllItemsFailed]
    yield from leaves
    yield from (AllItemsFailed("message", failures=[failure]) for failure in leaves)


Facts = Literal["all", "code and message", "message", "code", "request id"]
"""Possible contents of one member of an error's JSON body. `all`: a map with the code, the message, the request id and
all other fields of the error.
"""


class Member(NamedTuple):
    """One member of an error's HTTP body: its name, its contents or a function that returns them, and the client that
    reads it.
    """

    name: str
    holds: Facts | Callable[[SIEError], str]
    reader: str


@dataclass(frozen=True)
class ErrorFormat:
    """Format of errors that several routes share. It is called with the error, the request id, and the failures of
    single inputs, and returns the HTTP status and the JSON body.
    """

    name: str
    members: tuple[Member, ...]
    status: Callable[[SIEError], int] = attrgetter("status")

    def __call__(
        self, error: SIEError, request_id: str, errors: list[dict[str, Any]] | None
    ) -> tuple[int, dict[str, Any]]:
        return self.status(error), envelope(error, request_id, errors, self)


CODE = Member(
    "code", "code", "the TypeScript client of SIE, and clients that read the errors of all routes in the same way"
)
ERROR = Member("error", "all", "the Python client of SIE")
RAW = Member("error", "all", "raw HTTP: no other member has `reason` and `param`")
_COHERE = (Member("message", "message", "Cohere"), Member("id", "request id", "Cohere"))
_JINA = Member("detail", "code and message", "Haystack's components for Jina, which put it into their exceptions")
_MEMBERS: dict[str, tuple[Member, ...]] = {
    "native": (ERROR, Member("detail", "all", "raw HTTP, and callers of the pool routes, which expect a map"), CODE),
    "openai": (ERROR._replace(reader="OpenAI, LangChain, LlamaIndex, LiteLLM"), _JINA, CODE),
    "jina": (RAW, _JINA, *_COHERE, CODE),
    "cohere": (RAW, *_COHERE, CODE),
    "voyage": (
        # the client of Voyage 0.3 raises AttributeError if `error` is a map
        Member("error", "message", "raw HTTP, as on the routes of Text Embeddings Inference"),
        Member("detail", "message", "Voyage, whose client prints it"),
        RAW._replace(name="error_details"),
        CODE,
    ),
}
FAMILIES = {name: ErrorFormat(name, members) for name, members in _MEMBERS.items()}
"""The formats of errors in the core. A fact appears twice in a body only if clients of the route read it from different
members. If no route is known, for example for an unknown path, the family is `native`.
"""


def envelope(
    error: SIEError,
    request_id: str,
    errors: list[dict[str, Any]] | None = None,
    family: ErrorFormat = FAMILIES["native"],
) -> dict[str, Any]:
    """Return the HTTP body of `error` in an API format. `errors`: errors of single inputs."""
    code = error.code.lower() if family.name == "openai" else error.code
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    every: dict[str, Any] = {
        "code": code,
        "message": error.message,
        "type": kind,
        "param": error.param or None,
        "retryable": error.retryable,
        "request_id": request_id,
        **error.extras,
    }
    if error.reason:
        every["reason"] = error.reason
    facts: dict[Facts, Any] = {
        "all": every,
        "code and message": {"code": code, "message": error.message},
        "message": error.message,
        "code": error.code,
        "request id": request_id,
    }
    body = {name: holds(error) if callable(holds) else facts[holds] for name, holds, _ in family.members}
    return body if errors is None else {**body, "errors": errors}
