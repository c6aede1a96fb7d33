"""The error tree: the attributes of each leaf, and the fields that each client family finds in the body of an error."""

from __future__ import annotations

from typing import Any

import api_page
import jsonschema_rs
import msgspec
import pytest

from sie_contracts.errors import (
    FAMILIES,
    AllItemsFailed,
    ErrorInfo,
    InternalFailure,
    InvalidInput,
    ModelLoading,
    SIEError,
    catalogue,
    envelope,
)

# code: status, seconds of Retry-After (0: never sent, and not retryable), type; as documented
DOCUMENTED = {
    "INVALID_INPUT": (400, 0, "invalid_request_error"),
    "UNAUTHENTICATED": (401, 0, "authentication_error"),
    "PERMISSION_DENIED": (403, 0, "permission_error"),
    "POOL_OPERATION_FORBIDDEN": (403, 0, "permission_error"),
    "MODEL_NOT_FOUND": (404, 0, "invalid_request_error"),
    "POOL_NOT_FOUND": (404, 0, "invalid_request_error"),
    "NOT_FOUND": (404, 0, "invalid_request_error"),
    "METHOD_NOT_ALLOWED": (405, 0, "invalid_request_error"),
    "BUNDLE_CONFLICT": (409, 0, "invalid_request_error"),
    "POOL_CONFLICT": (409, 0, "invalid_request_error"),
    "CONTENT_CONFLICT": (409, 0, "invalid_request_error"),
    "PAYLOAD_TOO_LARGE": (413, 0, "invalid_request_error"),
    "UNSUPPORTED_MEDIA_TYPE": (415, 0, "invalid_request_error"),
    "VALIDATION_ERROR": (422, 0, "invalid_request_error"),
    "IDEMPOTENCY_MISMATCH": (422, 0, "invalid_request_error"),
    "RATE_LIMITED": (429, 1, "rate_limit_error"),
    "INFERENCE_ERROR": (500, 0, "server_error"),
    "INTERNAL_ERROR": (500, 0, "server_error"),
    "ALL_ITEMS_FAILED": (500, 0, "server_error"),
    "MODEL_LOAD_FAILED": (500, 0, "server_error"),
    "LORA_LOAD_FAILED": (500, 0, "server_error"),
    "MODEL_LOADING": (503, 5, "server_error"),
    "PROVISIONING": (503, 5, "server_error"),
    "LORA_LOADING": (503, 1, "server_error"),
    "RESOURCE_EXHAUSTED": (503, 5, "server_error"),
    "QUEUE_FULL": (503, 1, "server_error"),
    "QUEUE_UNAVAILABLE": (503, 2, "server_error"),
    "NOT_READY": (503, 2, "server_error"),
    "SHUTTING_DOWN": (503, 1, "server_error"),
    "GATEWAY_TIMEOUT": (504, 5, "server_error"),
}

each_leaf = pytest.mark.parametrize("leaf", catalogue(), ids=lambda leaf: leaf.code)


def test_every_leaf_is_documented() -> None:
    assert [leaf.code for leaf in catalogue()] == list(DOCUMENTED)


@each_leaf
def test_a_leaf_has_its_documented_status_and_says_whether_to_retry(leaf: type[SIEError]) -> None:
    """An error is retryable if and only if it has a time for Retry-After."""
    status, retry_after_s, _ = DOCUMENTED[leaf.code]
    error = leaf("what happened")
    assert (error.status, error.retry_after_s) == (status, retry_after_s)
    assert error.retryable == (retry_after_s > 0)
    assert str(error) == error.message == "what happened"


@each_leaf
def test_every_family_has_what_its_clients_read_and_no_more(leaf: type[SIEError]) -> None:
    """SIE and OpenAI clients read `error`, raw HTTP clients `detail`. TypeScript and Cohere clients read the top-level
    `code` and `message`.
    """
    _, _, kind = DOCUMENTED[leaf.code]
    error = leaf("message text", reason="the_reason", param="items[3].text", extras={"limit": 7})
    code = leaf.code
    every = {
        "code": code,
        "message": "message text",
        "type": kind,
        "param": "items[3].text",
        "reason": "the_reason",
        "retryable": error.retryable,
        "request_id": "request-1",
        "limit": 7,
    }
    lower, short, cohere = (
        code.lower(),
        {"code": code, "message": "message text"},
        {"message": "message text", "id": "request-1"},
    )
    bodies: dict[str, dict[str, Any]] = {
        "native": {"error": every, "detail": every, "code": code},
        "openai": {"error": {**every, "code": lower}, "detail": {**short, "code": lower}, "code": code},
        "jina": {"error": every, "detail": short, **cohere, "code": code},
        "cohere": {"error": every, **cohere, "code": code},
        "voyage": {"error": "message text", "detail": "message text", "error_details": every, "code": code},
    }
    assert bodies.keys() == FAMILIES.keys()
    for family, expected in bodies.items():
        body = envelope(error, "request-1", family=FAMILIES[family])
        assert body == expected, family
        assert msgspec.json.decode(msgspec.json.encode(body)) == body


async def test_the_openapi_document_describes_the_body_of_each_family() -> None:
    document = await api_page.document()
    schema = {"components": document["components"], "$ref": "#/components/schemas/Error"}
    for family in FAMILIES.values():
        for error in (InvalidInput("m", reason="schema", param="items", extras={"limit": 3}), ModelLoading("m")):
            jsonschema_rs.validator_for(schema).validate(envelope(error, "request-1", [{"index": 0}], family))


@each_leaf
def test_an_error_is_the_same_after_its_way_over_the_wire(leaf: type[SIEError]) -> None:
    error = leaf("message", reason="r", param="p", extras={"error_class": "GATED", "attempts": 2})
    info = msgspec.msgpack.decode(msgspec.msgpack.encode(error.info()), type=ErrorInfo)
    decoded_error = SIEError.from_info(info)
    assert type(decoded_error) is leaf
    for name in ("status", "retryable", "retry_after_s", "message", "reason", "param", "extras"):
        assert getattr(decoded_error, name) == getattr(error, name), name


def test_a_time_to_retry_after_that_was_given_stays() -> None:
    assert SIEError.from_info(ModelLoading("m", retry_after_s=3).info()).retry_after_s == 3
    assert SIEError.from_info(ErrorInfo("MODEL_LOADING", "m")).retry_after_s == 5


def test_a_code_of_a_newer_sender_becomes_an_internal_error_that_names_it() -> None:
    failure = SIEError.from_info(ErrorInfo("TEAPOT", "short and stout", reason="r"))
    assert type(failure) is InternalFailure
    assert (failure.message, failure.reason, failure.status) == ("TEAPOT: short and stout", "r", 500)


@pytest.mark.parametrize(
    ("codes", "status", "retry_after_s"),
    [
        (["INVALID_INPUT", "QUEUE_FULL"], 503, 5),
        (["INFERENCE_ERROR", "RESOURCE_EXHAUSTED"], 503, 5),
        (["INVALID_INPUT", "INFERENCE_ERROR"], 500, 0),
        (["INVALID_INPUT", "MODEL_LOAD_FAILED"], 500, 0),
        (["INVALID_INPUT", "PAYLOAD_TOO_LARGE"], 400, 0),
    ],
)
def test_when_all_items_failed_the_worst_decides(codes: list[str], status: int, retry_after_s: int) -> None:
    """The status is 503 if any failure is retryable, else 500 if any status is 5xx, else 400."""
    failures = [SIEError.from_info(ErrorInfo(code, "m")) for code in codes]
    error = AllItemsFailed("all failed", failures=failures)
    assert (error.status, error.retryable, error.retry_after_s) == (status, retry_after_s > 0, retry_after_s)
    assert AllItemsFailed.status == 500, "the class is untouched"
