"""The OpenAPI document is complete and valid, and a running gateway conforms to it: schemathesis sends what the
document allows, and what it does not allow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import api_page
import httpx
import jsonschema_rs
import msgspec
import pytest
import requests
import schemathesis
import shared
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR
from selection import long_but
from stack import Stack

from sie_gateway.http.routes import ROUTES

MODEL = "toy/one"
Document = dict[str, Any]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
ANSWERED_S = 30.0


pytestmark = shared.TOY


@pytest.fixture(scope="module")
def stack(toy_stack: Stack) -> Stack:
    return toy_stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.urls[0], timeout=ANSWERED_S, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def document(client: httpx.Client) -> Document:
    content: Document = client.get("/openapi.json").json()
    return content


def operations(document: Document) -> Iterator[tuple[str, str, Document]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def schema_of(document: Document, schema: Any) -> jsonschema_rs.Validator:
    """Return a validator of `schema`, which may refer to the components of the document."""
    return jsonschema_rs.validator_for({"components": document["components"], "allOf": [schema]})


def test_the_document_is_valid_and_has_a_summary_of_each_operation(document: Document) -> None:
    assert document["openapi"].startswith("3.1")
    OPENAPI_31_VALIDATOR.validate(document)
    names = Counter(operation["operationId"] for _, _, operation in operations(document))
    assert set(names.values()) == {1}
    for method, path, operation in operations(document):
        assert operation["summary"], (method, path)
        assert operation["tags"], (method, path)
        declared = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
        assert declared == set(re.findall(r"\{(\w+)\}", path)), (method, path)


def test_all_that_is_served_is_documented_and_nothing_else(document: Document) -> None:
    served = {(row.method.lower(), row.path.replace(":path", "")) for row in ROUTES if row.served}
    documented = {(method, path) for method, path, _ in operations(document)}
    assert documented == served


def test_every_body_and_every_json_reply_has_an_example_that_fits_its_schema(document: Document) -> None:
    for method, path, operation in operations(document):
        contents = [operation["requestBody"]["content"]] if "requestBody" in operation else []
        assert (
            contents
            or method != "post"
            or path.endswith(("/renew", "/replay", "/load", "/unload", "/pause", "/resume", "/cancel", "/retry"))
        ), path
        contents += [answer["content"] for status, answer in operation["responses"].items() if status in ("200", "201")]
        for content in contents:
            media_type = content.get("application/json")
            if media_type is not None and path != "/openapi.json":
                assert "example" in media_type, (method, path)
                schema_of(document, media_type["schema"]).validate(media_type["example"])
        for parameter in operation.get("parameters", ()):
            assert parameter["in"] != "path" or "example" in parameter, (method, path)


def reason_of(body: dict[str, Any]) -> str:
    """Return the reason of an error. At routes of TEI and of Voyage `error` is a text."""
    members = (body["error"], body.get("error_details"), body.get("detail"))
    return str(next(member for member in members if isinstance(member, dict))["reason"])


def test_the_examples_of_requests_work(document: Document, client: httpx.Client) -> None:
    """An example runs unchanged except for the model. It succeeds, or is refused for a model of another kind."""
    succeeded = set()
    for method, path, operation in operations(document):
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("example")
        if (
            body is None
            or path in ("/v1/pools", "/v1/jobs", "/v1/batches", "/v1/cache/erase")
            or path.startswith("/console/configs")
        ):
            continue  # these write, or name a file that was uploaded
        body = {**body, "model": MODEL} if "model" in body else body
        answer = client.request(method, path.replace("{model}", MODEL), json=body)
        message = f"{path}: {answer.status_code} {answer.text[:300]}"
        if answer.status_code == 200:
            succeeded.add(path)
            schema_of(document, operation["responses"]["200"]["content"]["application/json"]["schema"]).validate(
                answer.json()
            )
        else:
            assert reason_of(answer.json()).startswith(("unsupported_", "model_required")), message
    assert succeeded >= {"/v1/encode/{model}", "/v1/embeddings", "/v1/configs/resolve"}


# all that the document allows


def aimed(document: Document) -> Document:
    """Return the document with changes that make a success likely: a model that exists, enough time, msgpack that is
    made as JSON is, and no reservation that would take the only worker.
    """
    aimed_document: Document = msgspec.json.decode(
        msgspec.json.encode({**document, "paths": api_page.inlined(document)})
    )
    for _, path, operation in operations(aimed_document):
        for parameter in operation.get("parameters", ()):
            if parameter["name"] == "model":
                parameter["schema"] = {"enum": [MODEL]}
            elif parameter["name"] == "X-SIE-Timeout-Ms":
                parameter["schema"] = {"type": "integer", "minimum": 20_000, "maximum": 600_000}
        content = operation.get("requestBody", {}).get("content", {})
        body = content.get("application/json")
        if body is not None:
            del body["example"]
            _aim(body["schema"])
        if "application/msgpack" in content:
            content["application/msgpack"] = body
        if path == "/v1/pools" and body is not None:
            body["schema"]["properties"]["gpus"] = {
                "type": "object",
                "required": ["cpu"],
                "properties": {"cpu": {"enum": [2, 3]}},
            }
    return aimed_document


def _aim(schema: Document) -> None:
    for variant in (schema, *schema.get("anyOf", ())):
        if "model" in variant.get("properties", {}):
            variant["properties"]["model"] = {"enum": [MODEL]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", long_but(GenerationMode, [GenerationMode.POSITIVE]), ids=lambda mode: mode.value)
def test_whatever_is_asked_is_answered_as_documented(stack: Stack, document: Document, mode: GenerationMode) -> None:
    """Each operation gets a request that it allows, and in a long run one that it does not allow, which test_fuzz.py
    sends more cheaply: schemathesis takes far longer to make one than a gateway to answer it.
    """
    schema = schemathesis.openapi.from_dict(aimed(document))
    tally: Counter[tuple[str, int]] = Counter()
    failures: list[str] = []
    session = requests.Session()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path.startswith("/ws/"):  # a handshake, which tests/unit/test_status.py makes
            continue
        if mode == GenerationMode.NEGATIVE and not (operation.body or operation.query):
            continue  # requests with a path alone are hardly ever wrong

        @settings(
            max_examples=1,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Case) -> None:
            budget_ms = str((case.headers or {}).get("X-SIE-Timeout-Ms", ""))
            if budget_ms.isascii() and budget_ms.isdigit() and 1 <= int(budget_ms[:7]) <= 600_000:
                case.headers["X-SIE-Timeout-Ms"] = "30000"  # at a shorter budget 504 is the right answer
            answer = case.call_and_validate(base_url=stack.urls[0], session=session, checks=CHECKS, timeout=ANSWERED_S)
            tally[case.operation.label, answer.status_code] += 1

        try:
            ask()
        except FailureGroup as error:  # the failures of all operations are reported together
            failures.append(f"{operation.label} ({mode.value}): {error}"[:3000])
    assert not failures, "\n\n".join(failures) + stack.log(100)
    if mode == GenerationMode.NEGATIVE:
        return
    succeeded = {label for label, status in tally if status < 300}
    assert {"GET /v1/models", "POST /v1/encode/{model}", "GET /health"} <= succeeded
    posts = {label for label, _ in tally if label.startswith("POST")}
    assert len(posts & succeeded) >= len(posts) / 10  # generated requests do reach the models
