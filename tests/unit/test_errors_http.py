"""Every code of the error tree, provoked at a gateway in this process and checked in the format of each client family.

    Case ──► a situation in a cluster of its own ──► native, OpenAI, Cohere, TEI and Ollama requests, and our own client
    ──► one set of checks

A code without a case fails `test_every_code_of_the_tree_has_a_case_and_a_class_of_our_client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import errors_page
import httpx
import of_extras
import pages
import pytest
from errors_page import CONFIG_ONLY
from fake_adapter import FakeAdapter, toy_entry
from inprocess import GatewayProcess, InProcess, Source, until

from sie_broker import Write
from sie_client import SIEAsyncClient
from sie_client import errors as client_errors
from sie_client.core import Received, failure_of
from sie_contracts.errors import ErrorInfo, LoraLoadFailed, ModelLoadFailed, catalogue
from sie_contracts.wire.configs import ConfigExport
from sie_gateway.http import app
from sie_gateway.http.routes import ROUTES, inference_route
from sie_gateway.operations import handlers
from sie_gateway.streams import publish
from sie_runtime import keys
from sie_runtime.http.routes import OPEN
from sie_runtime.keys import KeyLimits
from sie_sidecar import in_flight

ONE = "toy/one"
CANARY = "canary-7031"  # the prefix of every text; no answer contains it
POOL = {"name": "team", "gpus": {"l4": 1}}

Body = Callable[[str, Sequence[str]], Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """The embedding request of a client family. `path` may contain {model}."""

    name: str
    path: str
    body: Body


_FORMATS = (
    Family("native", "/v1/encode/{model}", lambda model, texts: {"items": texts}),
    Family("openai", "/v1/embeddings", lambda model, texts: {"model": model, "input": texts}),
    Family(
        "cohere", "/v2/embed", lambda model, texts: {"model": model, "input_type": "search_document", "texts": texts}
    ),
    Family("tei", "/tei/{model}/embed", lambda model, texts: {"inputs": texts}),
    Family("ollama", "/api/embed", lambda model, texts: {"model": model, "input": texts}),
)
FAMILIES = [family for family in _FORMATS if inference_route(family.path)]  # others than of the core: if installed
Heard = tuple[str, httpx.Response]
Provoke = Callable[["Place"], Awaitable[list[Heard]]]


@dataclass
class Place:
    """The cluster of a case. `raised` is the error of our own client in the same situation, or None if that client sent
    no request.
    """

    cluster: InProcess
    patch: pytest.MonkeyPatch
    raised: client_errors.SIEError | None = None

    async def ask(self, gateway: GatewayProcess, *texts: str, model: str = ONE, **headers: str) -> list[Heard]:
        """Send the requests of all families and of our own client concurrently. Return the answers of the families."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = [CANARY + text for text in texts or ("",)]

        async def as_client() -> client_errors.SIEError:
            async with SIEAsyncClient(gateway.url, wait_for_capacity=False, headers=named) as client:
                with pytest.raises(client_errors.SIEError) as caught:
                    await client.encode(model, sent)
            return caught.value

        async def post(family: Family) -> Heard:
            path = family.path.replace("{model}", model)
            return family.name, await gateway.client.post(path, json=family.body(model, sent), headers=named)

        *answers, self.raised = await asyncio.gather(*(post(family) for family in FAMILIES), as_client())
        return answers

    async def failing(self, *failures: ErrorInfo | None) -> list[Heard]:
        """Return the answers to one input for each failure, which the adapter returns; None: the input succeeds."""
        adapter, gateway = await self.cluster.adapter(), await self.cluster.gateway()
        await self.cluster.sidecar(adapter)
        adapter.failures = {
            f"{CANARY}{number}": failure for number, failure in enumerate(failures) if failure is not None
        }
        return await self.ask(gateway, *(str(number) for number in range(len(failures))))

    async def key(self, *scopes: str, **limits: int) -> str:
        """Create a key and return its token."""
        key, token = keys.create("a test", scopes, now_s=time.time(), limits=KeyLimits(**limits))
        bucket = await keys.bucket_of(self.cluster.server.connect("operator"), 1).open()
        await bucket.write([Write(key.id, keys.encode(key))])
        return token

    @contextlib.asynccontextmanager
    async def busy(self, **environ: str) -> AsyncIterator[GatewayProcess]:
        """Start a gateway on which one request runs until the end of the context."""
        adapter, gateway = await self.cluster.adapter(), await self.cluster.gateway(**environ)
        await self.cluster.sidecar(adapter)
        adapter.hold_batches = True
        occupant = asyncio.create_task(gateway.encode("occupant"))
        await until(lambda: adapter.running, "a batch runs")
        yield gateway
        adapter.let_go()
        assert (await occupant).status_code == 200


def asked(*texts: str, model: str = ONE, environ: Mapping[str, str] | None = None, **headers: str) -> Provoke:
    """Return a situation in which a request is refused by a gateway without a worker."""

    async def provoke(place: Place) -> list[Heard]:
        return await place.ask(await place.cluster.gateway(**environ or {}), *texts, model=model, **headers)

    return provoke


def failing(*codes: str, **details: str) -> Provoke:
    """Return a situation in which an adapter answers inputs with these errors."""
    return lambda place: place.failing(*(ErrorInfo(code, "a failure", **details) for code in codes))


def posted(path: str, body: Any, **environ: str) -> Provoke:
    async def provoke(place: Place) -> list[Heard]:
        gateway = await place.cluster.gateway(**environ)
        return [("native", await gateway.client.post(path, json=body))]

    return provoke


async def permission_denied(place: Place) -> list[Heard]:
    token = await place.key("read")
    return await place.ask(await place.cluster.gateway(SIE_AUTH_MODE="token"), authorization=token)


async def pool_operation_forbidden(place: Place) -> list[Heard]:
    gateway = await place.cluster.gateway(SIE_GATEWAY_CONFIGURED_GPUS="l4")
    return [
        ("native", await gateway.client.delete("/v1/pools/default")),
        ("native", await gateway.client.post("/v1/pools", json={**POOL, "ttl_seconds": 3601})),
    ]


async def model_not_found(place: Place) -> list[Heard]:
    gateway = await place.cluster.gateway()
    answers = await place.ask(gateway, model="toy/on")
    assert {facts(response)["suggestions"][0] for _, response in answers} == {ONE}
    return [*answers, ("native", await gateway.client.get("/v1/models/toy/on"))]


async def pool_not_found(place: Place) -> list[Heard]:
    gateway = await place.cluster.gateway()
    by_name = [
        await gateway.client.request(method, f"/v1/pools/none{end}")
        for method, end in (("GET", ""), ("DELETE", ""), ("POST", "/renew"))
    ]
    return [*await place.ask(gateway, X_SIE_Pool="none"), *(("native", response) for response in by_name)]


async def not_found(place: Place) -> list[Heard]:
    gateway = await place.cluster.gateway()
    paths = ("/v1/chat/completions", "/vertex", "/invocations", "/v1/job", "/v1/job/a", "/nope")
    responses = [await gateway.client.request(method, path) for path in paths for method in ("GET", "POST")]
    return [("native", response) for response in [*responses, await gateway.client.get("/v1/scaling/nope")]]


async def method_not_allowed(place: Place) -> list[Heard]:
    gateway = await place.cluster.gateway()
    answers = [
        (family.name, await gateway.client.put(family.path.replace("{model}", ONE), json={})) for family in FAMILIES
    ]
    assert {response.headers["allow"] for _, response in answers} == {"POST, OPTIONS"}
    return [
        *answers,
        ("native", await gateway.client.post("/health")),
        ("native", await gateway.client.post("/v1/models")),
    ]


async def payload_too_large(place: Place) -> list[Heard]:
    token = await place.key("infer", body_bytes=200)
    answers = await place.ask(await place.cluster.gateway(SIE_AUTH_MODE="token"), "x" * 300, authorization=token)
    assert {facts(response)["limit"] for _, response in answers} == {200}
    return answers


async def rate_limited(place: Place) -> list[Heard]:
    token = await place.key("infer", tokens_per_minute=100)
    gateway = await place.cluster.gateway(SIE_AUTH_MODE="token")
    await place.cluster.sidecar()
    assert (await gateway.encode("x" * 78, authorization=token)).json()["usage"]["total_tokens"] == 80
    return await place.ask(gateway, "x" * 150, authorization=token)


async def unhandled_error(place: Place) -> list[Heard]:
    """Provoke an exception inside and outside of a route. No answer contains its message, and the gateway goes on."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError(CANARY)

    gateway = await place.cluster.gateway()
    with place.patch.context() as patched:
        patched.setattr(handlers, "model_list", broken)
        in_route = await gateway.client.get("/v1/models")
    with place.patch.context() as patched:
        patched.setattr(app, "check_length", broken)
        around = await gateway.client.get("/v1/models")
    assert (await gateway.client.get("/v1/models")).status_code == 200
    return [("native", in_route), ("native", around)]


async def model_load_failed(place: Place) -> list[Heard]:
    adapter, gateway = await place.cluster.adapter(), await place.cluster.gateway()
    adapter.refusals[ONE] = ModelLoadFailed("the files are gated", extras={"error_class": "GATED"})
    await place.cluster.sidecar(adapter)
    answers = await place.ask(gateway)
    for _, response in answers:
        details = facts(response)
        assert (details["error_class"], details["permanent"], details["attempts"] >= 1) == ("GATED", True, True)
    return answers


async def with_lora(place: Place) -> tuple[FakeAdapter, GatewayProcess]:
    """Start a cluster with a loaded model that accepts LoRAs."""
    place.cluster.source.put(toy_entry(family="text-encoder"))
    adapter, gateway = await place.cluster.adapter(), await place.cluster.gateway()
    await place.cluster.sidecar(adapter)
    assert (await gateway.encode("warm")).status_code == 200
    return adapter, gateway


async def ask_lora(gateway: GatewayProcess) -> list[Heard]:
    """Send a request with a LoRA by each family that has a field for it: TEI and Ollama have none."""
    lora = {"options": {"lora_id": "org/tuned"}}
    answers = [
        (
            family.name,
            await gateway.client.post(family.path.replace("{model}", ONE), json={**family.body(ONE, [CANARY]), **lora}),
        )
        for family in FAMILIES
        if family.name not in ("tei", "ollama")
    ]
    assert {facts(response)["lora_id"] for _, response in answers} == {"org/tuned"}
    return answers


async def lora_load_failed(place: Place) -> list[Heard]:
    adapter, gateway = await with_lora(place)
    adapter.refusals["org/tuned"] = LoraLoadFailed(
        "no such files", reason="lora_not_found", extras={"lora_id": "org/tuned"}
    )
    return await ask_lora(gateway)


async def lora_loading(place: Place) -> list[Heard]:
    adapter, gateway = await with_lora(place)
    place.patch.setattr(in_flight, "HOLD_S", 0.02)
    adapter.hold_loads = True
    return await ask_lora(gateway)


async def model_loading(place: Place) -> list[Heard]:
    adapter, gateway = await place.cluster.adapter(), await place.cluster.gateway(SIE_LOAD_HOLD_S="0.2")
    adapter.hold_loads = True
    sidecar = await place.cluster.sidecar(adapter, SIE_HEALTH_PUBLISH_INTERVAL_MS="100")
    assert (await gateway.encode("first")).status_code == 503  # any code: no heartbeat may have reported the load yet

    def loads() -> bool:
        beat = place.cluster.last_beat(sidecar.worker)
        return beat is not None and any(status.state == "loading" for status in beat.models)

    await until(loads, "the worker says that it loads")
    answers = await place.ask(gateway)
    assert all(facts(response)["estimated_wait_s"] >= 0 for _, response in answers)
    return answers


async def provisioning(place: Place) -> list[Heard]:
    """A native route answers a public SDK below 0.6.5 with 202. No other route does."""
    gateway = await place.cluster.gateway(SIE_LOAD_HOLD_S="0.02")
    answers = await place.ask(gateway)
    raised = place.raised
    native, *family_answers = await place.ask(gateway, X_SIE_SDK_Version="0.6.4")
    place.raised = raised  # our client never gets the 202
    body = native[1].json()
    assert (native[1].status_code, body["status"], body["bundle"], body["estimated_wait_s"] >= 1) == (
        202,
        "provisioning",
        "default",
        True,
    )
    assert set(body) == {"status", "gpu", "bundle", "estimated_wait_s", "message"}
    assert 1 <= int(native[1].headers["retry-after"]) <= 5
    for _, response in answers:
        assert {name: facts(response)[name] for name in ("status", "gpu", "bundle")} == {
            "status": "provisioning",
            "gpu": body["gpu"],
            "bundle": "default",
        }
    return [*answers, *family_answers]


async def queue_full(place: Place) -> list[Heard]:
    async with place.busy(SIE_MAX_CONCURRENT_REQUESTS="1") as gateway:
        answers = await place.ask(gateway)
    assert {facts(response)["queue_depth"] for _, response in answers} == {1}
    return answers


async def queue_unavailable(place: Place) -> list[Heard]:
    place.patch.setattr(publish, "PUBLISH_PATIENCE_S", 0.0)
    gateway = await place.cluster.gateway()
    await place.cluster.sidecar(SIE_MACHINE_PROFILE="l4")
    place.cluster.server.disconnect()
    answers = await place.ask(gateway)
    lane = await gateway.client.get("/v1/scaling/_default.l4.default")
    place.cluster.server.reconnect()
    return [*answers, ("native", lane)]


class Late(Source):
    """A config service that does not answer until `answers` is set."""

    def __init__(self) -> None:
        super().__init__(toy_entry())
        self.answers = asyncio.Event()

    async def export(self) -> ConfigExport:
        await self.answers.wait()
        return await super().export()


async def not_ready(place: Place) -> list[Heard]:
    source = Late()
    gateway = await place.cluster.gateway(source, ready=False)
    answers = await place.ask(gateway)
    source.answers.set()
    return answers


async def shutting_down(place: Place) -> list[Heard]:
    """Return the answers during a shutdown, in which running work is answered and reads go on."""
    async with place.busy() as gateway:
        gateway.stop.request()
        answers = await place.ask(gateway)
        assert (await gateway.client.get("/v1/models")).status_code == 200
    return answers


async def gateway_timeout(place: Place) -> list[Heard]:
    async with place.busy() as gateway:
        return await place.ask(gateway, X_SIE_Timeout_Ms="100")


STATIC = {"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": "right"}


@dataclass(frozen=True)
class Case:
    """A code with its status. `tei` is the status and the error type on a TEI route; None: no TEI route returns the
    code.
    """

    code: str
    status: int
    provoke: Provoke
    tei: tuple[int, str] | None = None
    told: Mapping[str, Any] = field(default_factory=dict)  # details, or headers, that every answer has


INVALID, DOWN, BUSY = "Validation", "Unhealthy", "Overloaded"
CASES = (
    Case("INVALID_INPUT", 400, asked(X_SIE_Timeout_Ms="soon"), (422, INVALID)),
    Case(
        "UNAUTHENTICATED",
        401,
        asked(environ=STATIC, authorization="wrong"),
        (401, INVALID),
        {"www-authenticate": "Bearer"},
    ),
    Case("PERMISSION_DENIED", 403, permission_denied, (403, INVALID)),
    Case("PERMISSION_DENIED", 403, posted("/v1/configs/models", {})),  # without an admin token
    Case("POOL_OPERATION_FORBIDDEN", 403, pool_operation_forbidden),
    Case("MODEL_NOT_FOUND", 404, model_not_found, (404, INVALID)),
    Case("POOL_NOT_FOUND", 404, pool_not_found, (404, INVALID)),
    Case("NOT_FOUND", 404, not_found),
    Case("METHOD_NOT_ALLOWED", 405, method_not_allowed, (405, INVALID)),
    Case("BUNDLE_CONFLICT", 409, asked(model=f"other:/{ONE}"), (409, INVALID), {"compatible_bundles": ["default"]}),
    Case("POOL_CONFLICT", 409, posted("/v1/pools", {**POOL, "name": "default"}, SIE_GATEWAY_CONFIGURED_GPUS="l4")),
    Case("PAYLOAD_TOO_LARGE", 413, payload_too_large, (413, INVALID)),
    Case("UNSUPPORTED_MEDIA_TYPE", 415, asked(content_encoding="br"), (415, INVALID), {"accept-encoding": "gzip"}),
    Case("RATE_LIMITED", 429, rate_limited, (429, BUSY)),
    Case(
        "INFERENCE_ERROR",
        500,
        failing("INFERENCE_ERROR", reason="non_finite"),
        (424, "Backend"),
        {"reason": "non_finite"},
    ),
    Case("INTERNAL_ERROR", 500, failing("TEAPOT"), (500, "Backend")),  # a code that this gateway does not know
    Case("INTERNAL_ERROR", 500, unhandled_error),
    Case("ALL_ITEMS_FAILED", 500, failing("INFERENCE_ERROR", "INVALID_INPUT"), (424, "Backend")),
    Case("ALL_ITEMS_FAILED", 503, failing("INVALID_INPUT", "RESOURCE_EXHAUSTED"), (503, DOWN)),
    Case("ALL_ITEMS_FAILED", 400, failing("INVALID_INPUT", "PAYLOAD_TOO_LARGE"), (400, INVALID)),
    Case("MODEL_LOAD_FAILED", 500, model_load_failed, (500, "Backend")),
    Case("LORA_LOAD_FAILED", 404, lora_load_failed),
    Case("MODEL_LOADING", 503, model_loading, (503, DOWN)),
    Case("PROVISIONING", 503, provisioning, (503, DOWN)),
    Case("LORA_LOADING", 503, lora_loading),
    Case("RESOURCE_EXHAUSTED", 503, failing("RESOURCE_EXHAUSTED"), (429, BUSY)),
    Case("QUEUE_FULL", 503, queue_full, (429, BUSY)),
    Case("QUEUE_UNAVAILABLE", 503, queue_unavailable, (503, DOWN)),
    Case("NOT_READY", 503, not_ready, (503, DOWN)),
    Case("SHUTTING_DOWN", 503, shutting_down, (503, DOWN)),
    Case("GATEWAY_TIMEOUT", 504, gateway_timeout, (504, "Backend")),
    *(Case(*row) for module in of_extras.modules("errors") for row in module.CASES),
)
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    async with InProcess(tmp_path) as cluster:
        yield Place(cluster, monkeypatch)


def check_retry(status: int, headers: Mapping[str, str]) -> bool:
    """Return whether the status is retryable, and check that X-Should-Retry and Retry-After agree with it."""
    retryable = status in (429, 503, 504)
    assert headers["x-should-retry"] == str(retryable).lower()
    assert ("retry-after" in headers) == retryable
    assert not retryable or 1 <= int(headers["retry-after"]) <= (60 if status == 429 else 5)
    return retryable


def check(case: Case, family: str, response: httpx.Response) -> None:
    """Check that the body has the fields that clients of the route read, that the headers agree with it, and that
    neither contains any of the input.
    """
    body = response.json()
    request_id = response.headers["x-sie-request-id"]
    assert response.headers["content-type"] == "application/json", response.text
    assert response.headers["x-sie-error-code"] == body["code"] == case.code
    assert CANARY not in response.text + str(response.headers)
    every = facts(response)
    told = {**response.headers, **every}
    assert {name: told[name] for name in case.told} == case.told
    assert (every["retryable"], every["request_id"]) == (check_retry(case.status, response.headers), request_id)
    assert every["message"] != ""
    assert every["type"] == _KINDS.get(case.status, "server_error" if case.status >= 500 else "invalid_request_error")
    assert isinstance(every["param"], str | None)
    assert every["code"] == (case.code.lower() if family == "openai" else case.code)
    assert {name: value for name, value in body.items() if name != "errors"} == expected_of(family, body, request_id)
    status = case.status
    if family == "tei":
        assert case.tei is not None
        status, kind = case.tei
        assert body["error_type"] == kind
    assert response.status_code == status


def facts(response: httpx.Response) -> dict[str, Any]:
    """Return all details of an error: `error`; where it is a text, `error_details` for the client of Voyage, and
    `detail` on the routes of TEI and Ollama.
    """
    body = response.json()
    members = (body["error"], body.get("error_details"), body.get("detail"))
    return next(member for member in members if isinstance(member, dict))


def expected_of(family: str, body: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """Return the fields that the clients of a family read, each in its place, and nothing else."""
    every = body[{"tei": "detail", "ollama": "detail", "voyage": "error_details"}.get(family, "error")]
    code, message = body["code"], every["message"]
    if family == "tei":  # huggingface_hub and TEI's own clients: a text and a type; raw HTTP: the map
        return {"error": message, "error_type": body["error_type"], "detail": every, "code": code}
    if family == "ollama":  # Ollama's clients print the text
        return {"error": message, "detail": every, "code": code}
    if family == "openai":  # OpenAI: the map; Haystack's components for Jina read `detail`
        return {"error": every, "detail": {"code": code.lower(), "message": message}, "code": code}
    if family == "cohere":
        return {"error": every, "message": message, "id": request_id, "code": code}
    if family == "voyage":  # Voyage's client prints `detail`
        return {"error": message, "detail": message, "error_details": every, "code": code}
    snake = {"error": code.lower()} if "error" in body["detail"] else {}  # for older clients of the config API
    return {"error": every, "detail": every | snake, "code": code}


def check_raised(case: Case, raised: client_errors.SIEError) -> None:
    """Check that our client raises the class that is documented for the code, with all details of the server."""
    assert type(raised) is client_errors.codes()[case.code]
    assert (raised.code, raised.retryable) == (case.code, case.status in (429, 503, 504))
    assert raised.status == case.status
    assert raised.request_id
    assert CANARY not in str(raised)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.status}")
async def test_a_code_is_told_to_every_client_family(place: Place, case: Case) -> None:
    answers = await case.provoke(place)
    assert answers
    for family, response in answers:
        check(case, family, response)
        if family in ("native", "cohere"):
            check_raised(case, failure_of(Received(response.status_code, response.headers, response.content)))
    if place.raised is not None:
        check_raised(case, place.raised)
    if case.code == "ALL_ITEMS_FAILED":
        assert all([entry["index"] for entry in response.json()["errors"]] == [0, 1] for _, response in answers)


@pages.WHOLE
def test_every_code_of_the_tree_has_a_case_and_a_class_of_our_client() -> None:
    """A code without a case is raised by the config service alone."""
    tree = [leaf.code for leaf in catalogue()]
    assert {case.code for case in CASES} == set(tree) - set(CONFIG_ONLY)
    assert set(client_errors.codes()) == set(tree)
    assert len(set(client_errors.codes().values())) == len(tree)


# requests that no route handles


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    async with InProcess(tmp_path) as cluster:
        yield await cluster.gateway()


ODD_PATHS = (
    *("/", "/nope", "/v1/", "/v1/encode", "/v1/encode/", "/v1/models/none", "/tei/", "/%2e%2e/%2e%2e/etc/passwd"),
    *("/v1/encode/..%2f..", "/v1/encode/%00", "/%ff", "/docs/static/../app.py", "/v1/configs/models/a", "/ws/status"),
    *("/openapi.json/", "/metrics", "/v1/embeddings?" + "x" * 5000),
)


async def test_no_path_and_no_method_has_an_error_that_is_not_the_envelope(gateway: GatewayProcess) -> None:
    """No error is plain text or HTML (contract 22.1). All requests use one connection, which stays open."""
    paths = {*ODD_PATHS, *(row.path.replace(":path", "") for row in ROUTES if row.scope != OPEN)}
    ports = set()
    async with httpx.AsyncClient(
        base_url=gateway.url, trust_env=False, limits=httpx.Limits(max_connections=1)
    ) as client:
        for path in sorted(paths):
            for method in ("GET", "HEAD", "OPTIONS", "POST", "DELETE", "PROPFIND"):
                response = await client.request(method, path, content=b"{" if method == "POST" else None)
                assert "connection" not in response.headers, (method, path)
                ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
                if response.status_code < 300:
                    assert method in ("GET", "HEAD", "OPTIONS"), (method, path)
                    continue
                summary = f"{method} {path}: {response.status_code} {response.text}"
                assert 400 <= response.status_code < 500 or response.headers["x-sie-error-code"] == "NOT_READY", summary
                assert response.headers["content-type"] == "application/json", summary
                assert response.headers["x-sie-error-code"], summary
                check_retry(response.status_code, response.headers)
                if response.status_code == 405:
                    assert response.headers["allow"].endswith("OPTIONS"), summary
                if method == "HEAD":
                    assert not response.content, summary
                else:
                    body = response.json()
                    every = facts(response)
                    assert body["code"] == response.headers["x-sie-error-code"], summary
                    assert every["request_id"] == response.headers["x-sie-request-id"], summary
                    assert every["message"], summary
    assert len(ports) == 1, "the connection stayed open"


# the order of precedence of errors (contract 5.5)

STEPS: tuple[tuple[str, str], ...] = (  # a fault, and the code or reason of the answer if no earlier fault is present
    ("route", "NOT_FOUND"),
    ("auth", "UNAUTHENTICATED"),
    ("size", "PAYLOAD_TOO_LARGE"),
    ("model", "MODEL_NOT_FOUND"),
    ("body", "malformed"),
    ("pool", "POOL_NOT_FOUND"),
    ("machine profile", "gpu_not_configured"),
    ("task", "unsupported_task"),
    ("parameters", "bad_dimensions"),
    ("modality", "unsupported_modality"),
    ("load", "PROVISIONING"),
)


async def test_the_first_of_several_faults_is_told(place: Place) -> None:
    """Each request has one fault and all later faults of STEPS. Only the last request is queued."""
    place.cluster.source.put(toy_entry("toy/score", outputs={"score": 0}))
    token = await place.key("infer", "read", body_bytes=500)
    gateway = await place.cluster.gateway(
        SIE_AUTH_MODE="token", SIE_GATEWAY_CONFIGURED_GPUS="l4", SIE_LOAD_HOLD_S="0.02"
    )
    stream = place.cluster.server.streams["WORK__default"]
    for number, (_, expected) in enumerate(STEPS):
        wrong = {name for name, _ in STEPS[number:]}
        model = "toy/none" if "model" in wrong else "toy/score" if "task" in wrong else ONE
        item = {"images": ["aGk="]} if "modality" in wrong else {"text": "a"}
        body = json.dumps({"items": [item], "params": {"dimensions": 3} if "parameters" in wrong else {}})
        body = body[:-1] if "body" in wrong else body
        headers = {
            "authorization": "wrong" if "auth" in wrong else token,
            "x-sie-machine-profile": "h100" if "machine profile" in wrong else "l4",
            "x-sie-pool": "none" if "pool" in wrong else "default",
        }
        path = "/v1/encoder/" if "route" in wrong else "/v1/encode/"
        if "route" in wrong:  # an unauthorised client is refused before it learns which paths exist
            headers["authorization"] = token
        answer = await gateway.client.post(path + model, content=body + " " * 500 * ("size" in wrong), headers=headers)
        details = facts(answer)
        assert expected in (details["code"], details.get("reason")), (STEPS[number], details)
        if expected != "PROVISIONING":
            assert stream.last_sequence == 0, STEPS[number]


# the page


@pages.WHOLE
def test_the_page_is_the_code() -> None:
    """`python tests/errors_page.py` generates the page."""
    text = errors_page.PAGE.read_text("utf-8")
    assert errors_page.table() in text
    assert errors_page.page(text) == text


async def test_two_headers_that_name_pools_are_both_looked_at(gateway: GatewayProcess) -> None:
    for pool, profile, reason in (
        ("a b", "default/l4", "pool_name"),
        ("default", "a b/l4", "pool_name"),
        ("a b", "c d/l4", "pool_name"),
        ("team", "default/l4", "pool_conflict"),
        ("team", "/l4", "pool_conflict"),
    ):
        answer = await gateway.encode("a", X_SIE_Pool=pool, X_SIE_MACHINE_PROFILE=profile)
        assert (answer.status_code, facts(answer)["reason"]) == (400, reason), (pool, profile)
