"""API formats of other servers: refusals before anything is queued, and replies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fake_adapter import ids_of, toy_entry, vector_of
from format_requests import CHAT, ONE, RERANK, STREAM, vectors
from inprocess import GatewayProcess, InProcess

from sie_contracts.errors import SIEError, catalogue, envelope
from sie_dialects import infinity, ollama, tei
from sie_gateway.http.routes import TABLE


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as cluster:
        cluster.source.put(toy_entry("toy/score", outputs={"score": 0}))
        cluster.source.put(toy_entry("toy/wide", outputs={"sparse": 10}))
        for name in ("toy/classes", "toy/kinds"):
            cluster.source.put(toy_entry(name, outputs={"classifications": 0}))
        cluster.source.put(toy_entry("toy/find", outputs={"entities": 0}, family="token-classifier"))
        yield cluster


@pytest.fixture
async def gateway(cluster: InProcess) -> GatewayProcess:
    return await cluster.gateway()


async def post(gateway: GatewayProcess, path: str, body: Any) -> httpx.Response:
    return await gateway.client.post(path, content=json.dumps(body).encode())


# routes and errors


@pytest.mark.parametrize(
    ("path", "row"),
    [("/tei/a/embed/embed", "/tei/{model:path}/embed"), ("/tei/a/embedded", "/tei/{model:path}"), ("//embed", "")],
)
def test_the_most_specific_row_of_a_path_is_meant(path: str, row: str) -> None:
    assert {route.path for route in TABLE.match(path).methods.values()} == ({row} if row else set())


OVERLOADED = {"RATE_LIMITED", "RESOURCE_EXHAUSTED", "QUEUE_FULL"}
UNHEALTHY = {*("MODEL_LOADING", "PROVISIONING", "LORA_LOADING", "QUEUE_UNAVAILABLE", "NOT_READY", "SHUTTING_DOWN")}
BACKEND = {
    *("INFERENCE_ERROR", "INTERNAL_ERROR", "ALL_ITEMS_FAILED", "MODEL_LOAD_FAILED", "LORA_LOAD_FAILED"),
    "GATEWAY_TIMEOUT",
}


@pytest.mark.parametrize("leaf", catalogue(), ids=lambda leaf: leaf.code)
def test_every_format_has_what_its_clients_read_and_no_more(leaf: type[SIEError]) -> None:
    """TEI clients read `error_type`, and a text in `error`, as Ollama's do."""
    error = leaf("message text", reason="the_reason", param="items[3].text", extras={"limit": 7})
    every, code = envelope(error, "request-1")["error"], leaf.code
    kinds = {
        **dict.fromkeys(OVERLOADED, "Overloaded"),
        **dict.fromkeys(UNHEALTHY, "Unhealthy"),
        **dict.fromkeys(BACKEND, "Backend"),
    }
    kind = kinds.get(code, "Validation")
    bodies = {
        infinity.shape: {"error": every, "code": code},
        tei.shape: {"error": "message text", "error_type": kind, "detail": every, "code": code},
        ollama.shape: {"error": "message text", "detail": every, "code": code},
    }
    for shape, expected in bodies.items():
        _, body = shape(error, "request-1", None)
        assert body == expected, shape.name
        assert msgspec.json.decode(msgspec.json.encode(body)) == body


# refusals

CONTEXTUAL: list[tuple[Any, str, str]] = [
    ({"model": ONE}, "schema", "inputs"),
    ({"model": ONE, "inputs": []}, "empty_items", "inputs"),
    ({"model": ONE, "inputs": ["a"]}, "schema", "inputs[0]"),
    ({"model": ONE, "inputs": [["a"], []]}, "empty_items", "inputs[1]"),
    ({"model": ONE, "inputs": [["a"], ["b", 3]]}, "schema", "inputs[1][1]"),
    ({"model": ONE, "inputs": [["a", ""]]}, "empty_item", "inputs[0][1]"),
    ({"model": ONE, "inputs": [["a"]] * 1001}, "too_many_items", "inputs"),
    ({"model": ONE, "inputs": [["a"] * 4097]}, "too_many_items", "inputs[0]"),
    ({"model": ONE, "inputs": [["a"] * 4000] * 5}, "too_many_chunks", "inputs"),
    ({"model": ONE, "inputs": [["a" * 200_000] * 2]}, "too_long", "inputs[0]"),
    ({"model": ONE, "inputs": [["a", "b"]]}, "unsupported_modality", "inputs[0]"),
    ({"model": ONE, "inputs": [["a", "b"]], "input_type": "query"}, "schema", "inputs[0]"),
    ({"model": ONE, "inputs": [["a"]], "input_type": "classification"}, "schema", "input_type"),
    ({"model": ONE, "inputs": [["a"]], "output_dimension": 3}, "bad_dimensions", "output_dimension"),
    ({"model": ONE, "inputs": [["a"]], "output_dtype": "int4"}, "unsupported_dtype", "output_dtype"),
    ({"model": ONE, "inputs": [["a"]], "encoding_format": "hex"}, "schema", "encoding_format"),
    ({"model": ONE, "inputs": [["a"]], "chunk_size": 9}, "schema", "chunk_size"),
    ({"model": ONE, "inputs": [["a"]], "chunk_overlap": 9}, "schema", "chunk_overlap"),
    ({"model": ONE, "inputs": [["a"]], "enable_auto_chunking": True}, "schema", "enable_auto_chunking"),
    *(
        ({"model": ONE, "input_type": "document", "enable_auto_chunking": True, **body}, reason, param)
        for body, reason, param in [
            ({"inputs": [["a", "b"]]}, "schema", "inputs[0]"),
            ({"inputs": [["a"]], "chunk_size": 0}, "schema", "chunk_size"),
            ({"inputs": [["a"]], "chunk_size": 8, "chunk_overlap": 5}, "schema", "chunk_overlap"),
            ({"inputs": [["a"]]}, "unsupported_modality", "inputs[0]"),
        ]
    ),
    ({"model": "toy/score", "inputs": [["a"]]}, "unsupported_output", "model"),
]
COHERE: list[tuple[Any, str, str]] = [
    ({"model": ONE, "texts": ["a"]}, "schema", "input_type"),
    ({"model": ONE, "texts": ["a"], "input_type": "query"}, "schema", "input_type"),
    ({"model": ONE, "input_type": "search_query"}, "empty_items", "texts"),
    ({"model": ONE, "input_type": "search_query", "texts": ["a"], "images": ["b"]}, "schema", "texts"),
    ({"model": ONE, "input_type": "search_query", "texts": [], "images": []}, "empty_items", "texts"),
    ({"model": ONE, "input_type": "search_query", "texts": ["a", 1]}, "schema", "texts[1]"),
    (
        {"model": ONE, "input_type": "image", "images": ["data:image/png;base64,aGk="]},
        "unsupported_modality",
        "images[0]",
    ),
    ({"model": ONE, "input_type": "image", "images": ["https://h/a.png"]}, "invalid_media", "images[0]"),
    ({"model": ONE, "input_type": "image", "images": [["aGk="]]}, "schema", "images[0]"),
    ({"model": ONE, "input_type": "search_query", "inputs": [{"content": []}]}, "schema", "inputs[0].content"),
    (
        {"model": ONE, "input_type": "search_query", "inputs": [{"content": [{"type": "x"}]}]},
        "schema",
        "inputs[0].content[0].type",
    ),
    (
        {"model": ONE, "input_type": "search_query", "texts": ["a"], "embedding_types": ["int4"]},
        "unsupported_dtype",
        "embedding_types[0]",
    ),
    ({"model": ONE, "input_type": "search_query", "texts": ["a"], "truncate": "MIDDLE"}, "schema", "truncate"),
    (
        {"model": ONE, "input_type": "search_query", "texts": ["a"], "output_dimension": 3},
        "bad_dimensions",
        "output_dimension",
    ),
]
CLASSIFY: list[tuple[Any, str, str]] = [
    ({"model": ONE, "input": ["a"]}, "unsupported_task", "model"),
    ({"model": "toy/classes", "input": []}, "empty_items", "input"),
    ({"model": "toy/classes", "input": [1]}, "schema", "input[0]"),
    ({"input": ["a"]}, "model_required", "model"),
    ({"model": "default/not-specified", "input": ["a"]}, "model_required", "model"),
]
REFUSED = [
    *((f"/tei/{ONE}/embeddings", *case) for case in CHAT),
    *(("/rerank", *case) for case in RERANK),
    *(("/v1/contextualizedembeddings", *case) for case in CONTEXTUAL),
    *(("/v2/embed", *case) for case in COHERE),
    *(("/v1/embed", *case) for case in COHERE[1:]),  # the first version requires no input type
    *(("/classify", *case) for case in CLASSIFY),
]
LARGE = "z" * 1_100_000
SCORED = {"model": "toy/score", "query": "q"}
TOO_LARGE: dict[str, tuple[str, Any, str]] = {
    "cohere": ("/v2/embed", {"model": ONE, "texts": ["a", LARGE], "input_type": "search_document"}, "texts[1]"),
    "tei": ("/embed", {"model": ONE, "inputs": ["a", LARGE]}, "inputs[1]"),
    "tei, source": (
        "/similarity",
        {"inputs": {"source_sentence": LARGE, "sentences": ["a"]}},
        "inputs.source_sentence",
    ),
    "tei, sentences": (
        "/similarity",
        {"inputs": {"source_sentence": "a", "sentences": ["b", LARGE]}},
        "inputs.sentences[1]",
    ),
    "tei, rerank": ("/rerank", {**SCORED, "texts": ["a", LARGE]}, "texts[1]"),
    "tei, tokenize": ("/tokenize", {"model": ONE, "inputs": ["a", LARGE]}, "inputs[1]"),
    "tei, predict": ("/predict", {"model": "toy/classes", "inputs": [["a"], [LARGE]]}, "inputs[1]"),
    "infinity": ("/classify", {"model": "toy/classes", "input": ["a", LARGE]}, "input[1]"),
    "ollama": ("/api/embed", {"model": ONE, "input": ["a", LARGE]}, "input[1]"),
}
# members of an error's body beside `error` and `code`
MEMBERS = {
    f"/tei/{ONE}/embeddings": "detail",
    "/v1/contextualizedembeddings": "detail error_details",
    "/v1/embed": "message id",
    "/v2/embed": "message id",
    "/rerank": "",
    "/classify": "",
}


async def test_what_cannot_be_done_is_refused_by_its_name_before_anything_is_queued(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    """A refusal has a code, a reason, the path of the field, and no input text."""
    for path, body, reason, param in REFUSED:
        answer = await post(gateway, path, body)
        report = answer.json()
        code = "invalid_input" if MEMBERS[path] == "detail" else "INVALID_INPUT"
        error = report.get("error_details") or report["error"]
        assert (answer.status_code, error["code"], error.get("reason"), error["param"]) == (400, code, reason, param), (
            path,
            body,
            report,
        )
        assert report["code"] == "INVALID_INPUT"
        assert set(report) - {"errors"} == {"error", "code", *MEMBERS[path].split()}, path
        assert answer.headers["x-should-retry"] == "false"
        assert "aGk" not in answer.text
    assert STREAM not in cluster.server.streams or cluster.server.streams[STREAM].last_sequence == 0


@pytest.mark.parametrize("path", ["/rerank", "/v1/embed", "/v2/embed", "/classify"])
async def test_an_unknown_model_comes_before_a_bad_body(gateway: GatewayProcess, path: str) -> None:
    answer = await post(gateway, path, {"model": "toy/on", "input": 3, "documents": 3, "texts": None})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "MODEL_NOT_FOUND")
    assert "embed" not in path or error["suggestions"][0] == ONE  # other routes may have no model with a similar name


@pytest.mark.parametrize(
    ("path", "model"),
    [
        *(
            (f"/tei/toy/find{name}", "toy/find")
            for name in ("", "/embed", "/embed_sparse", "/embed_all", "/rerank", "/predict", "/similarity")
        ),
        *((f"/tei/toy/score/{name}", "toy/score") for name in ("embed", "predict")),
        *((f"/tei/toy/one/{name}", "toy/one") for name in ("rerank", "predict")),
        *((path, "toy/find") for path in ("/v1/embed", "/classify")),
    ],
)
async def test_a_route_for_something_else_names_the_route_of_what_the_model_does(
    gateway: GatewayProcess, path: str, model: str
) -> None:
    """The body may have other fields than the route expects. The error does not mention them."""
    answer = await post(gateway, path, {"model": model, "inputs": "a text", "input": "a text"})
    verb = {"toy/find": "extract", "toy/score": "score", "toy/one": "encode"}[model]
    is_tei = path.startswith("/tei/")
    error = answer.json()["detail" if is_tei else "error"]
    assert (answer.status_code, error["param"]) == (424 if is_tei else 400, "model")
    assert error["message"].endswith(f"; use POST /v1/{verb}/{model}"), error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"model": "toy/one", "inputs": [[1.0, 2.0]]}),
        ("/decode", {"model": "toy/one", "ids": [1.0]}),
        ("/api/embed", {"model": "toy/one", "input": "a", "options": {"num_ctx": 2048.0}}),
    ],
)
async def test_a_list_of_whole_numbers_may_have_floats(cluster: InProcess, path: str, body: Any) -> None:
    gateway = await cluster.gateway(SIE_LOAD_HOLD_S="0")  # without a worker each request ends with 503
    assert (await post(gateway, path, body)).status_code == 503
    fraction = json.loads(json.dumps(body).replace(".0", ".5"))
    assert (await post(gateway, path, fraction)).status_code in (400, 422)


async def test_an_input_that_no_message_holds_is_named_by_its_field_and_its_position(cluster: InProcess) -> None:
    gateway = await cluster.gateway(SIE_DEFAULT_MODELS=f"embed={ONE}")
    await cluster.sidecar()
    for name, (path, body, place) in TOO_LARGE.items():
        refused = await post(gateway, path, body)
        assert refused.status_code == 413, (name, refused.text)
        assert f'"{place}: 1100000 bytes' in refused.text, (name, refused.text)


TEI_REFUSED: tuple[tuple[str, Any, int, str, str], ...] = (
    ("/embed", {"inputs": []}, 400, "Empty", "empty_items"),
    ("/embed", {}, 400, "Empty", "empty_items"),
    ("/embed", {"inputs": 3}, 422, "Validation", "schema"),
    ("/embed", b"{", 422, "Validation", "malformed"),
    ("/embed", {"inputs": "a", "dimensions": 3}, 422, "Validation", "bad_dimensions"),
    ("/embed", {"inputs": "a", "prompt_name": "none"}, 422, "Validation", "schema"),
    ("/embed", {"inputs": "a" * 600, "truncate": False}, 422, "Validation", "input_too_long"),
    ("/embed", {"inputs": ["a"] * 2049}, 413, "Validation", "too_many_items"),
    ("/embed", {"inputs": [1, -1]}, 422, "Tokenizer", "bad_token_id"),
    ("/embed", {"inputs": "a", "model": "toy/score"}, 424, "Backend", "unsupported_output"),
    ("/predict", {"inputs": "a", "model": ONE}, 424, "Backend", "unsupported_task"),
    ("/embed_sparse", {"inputs": "a", "model": ONE}, 424, "Backend", "unsupported_output"),
    ("/predict", {"inputs": "a"}, 400, "Validation", "model_required"),
    ("/rerank", {"query": 3, "texts": ["a"]}, 422, "Validation", "schema"),
    ("/similarity", {"inputs": "a"}, 422, "Validation", "schema"),
    ("/tokenize", {"inputs": [3]}, 422, "Validation", "schema"),
    ("/decode", {"ids": [[-1]]}, 422, "Tokenizer", "bad_token_id"),
)


async def test_tei_has_its_own_statuses(cluster: InProcess) -> None:
    """Contract 17.2 defines the statuses."""
    gateway = await cluster.gateway(SIE_DEFAULT_MODELS=f"embed={ONE}")
    await cluster.sidecar()
    for path, body, status, kind, reason in TEI_REFUSED:
        answer = await gateway.client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))
        reply = answer.json()
        assert (answer.status_code, reply["error_type"], reply["detail"]["reason"]) == (status, kind, reason), (
            path,
            reply,
        )
        assert (reply["error"], reply["code"]) == (reply["detail"]["message"], "INVALID_INPUT")
        assert (answer.headers["x-should-retry"], "retry-after" in answer.headers) == ("false", False)


# replies


async def test_contextualized_embeddings_of_queries_are_those_of_embeddings(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    await cluster.adapter()
    await cluster.sidecar()
    body = {"model": ONE, "inputs": [["a b"], ["c"]], "input_type": "query"}
    answer = await post(gateway, "/v1/contextualizedembeddings", body)
    plain = vectors(await post(gateway, "/v1/embeddings", {"model": ONE, "input": ["a b", "c"], "is_query": True}))
    reply = answer.json()
    assert [(entry["object"], entry["index"], len(entry["data"])) for entry in reply["data"]] == [
        ("list", 0, 1),
        ("list", 1, 1),
    ]
    embeddings = np.array([entry["data"][0]["embedding"] for entry in reply["data"]], np.float32)
    assert np.array_equal(embeddings, plain)
    assert (reply["model"], reply["usage"]["total_tokens"] > 0) == (ONE, True)


@pytest.mark.parametrize(
    ("path", "body"), [("/v2/embed", {"texts": ["a"], "input_type": "search_query"}), ("/embed", {"inputs": "a"})]
)
async def test_clients_may_send_more_fields_than_the_format_has(
    cluster: InProcess, gateway: GatewayProcess, path: str, body: dict[str, Any]
) -> None:
    await cluster.sidecar()
    answer = await post(gateway, path, {"model": ONE, **body, "itmes": ["a"], "paramz": {}, "user": "u"})
    assert answer.status_code == 200, answer.text
    assert "itmes" not in answer.text


async def test_the_default_model_answers_what_names_none(cluster: InProcess) -> None:
    cluster.source.put(toy_entry("toy/two"))
    plain, configured = await cluster.gateway(), await cluster.gateway(SIE_DEFAULT_MODELS=f"embed={ONE}")
    await cluster.sidecar()
    assert "model_required" in (await post(plain, "/embed", {"inputs": "x"})).text
    answer = await post(configured, "/embed", {"inputs": "x"})
    assert (answer.status_code, answer.headers["x-sie-model"]) == (200, ONE)


async def test_token_ids_below_the_path_of_a_model_are_its_own(cluster: InProcess, gateway: GatewayProcess) -> None:
    await cluster.sidecar()
    own = ids_of("hello")
    answer = await post(gateway, f"/tei/{ONE}/v1/embeddings", {"model": ONE, "input": [own.tolist()]})
    assert np.array_equal(vectors(answer)[0], vector_of(own))


async def test_similarities_are_computed_from_vectors_of_length_1_whatever_the_parameters(
    cluster: InProcess, gateway: GatewayProcess
) -> None:
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    inputs = {"source_sentence": "a", "sentences": ["a", "b"]}
    answer = await post(gateway, "/similarity", {"model": ONE, "inputs": inputs, "parameters": {"normalize": False}})
    assert answer.json()[0] == pytest.approx(1.0)
    assert all(group.options.normalize for batch in adapter.batches for group in batch.groups)


async def test_fields_of_a_body_choose_the_format_of_its_errors(gateway: GatewayProcess) -> None:
    """The fields of the body say which format a `/rerank` request has."""
    for more, kind in (({"texts": ["a"]}, str), ({"documents": ["a"]}, dict)):
        answer = await post(gateway, "/rerank", {"model": ONE, "query": "q", **more})
        assert isinstance(answer.json()["error"], kind)
