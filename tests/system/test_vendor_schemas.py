"""Replies of every route in the format of another server, against the schema that its vendor publishes: the models of
its client package where that is installed, else the required fields and the literal values of its API reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cohere
import httpx
import infinity_client.models as infinity
import jsonschema_rs
import ollama
import pages
import pytest
import shared
from cluster import Cluster
from openai.pagination import SyncPage
from openai.types import CreateEmbeddingResponse
from openai.types import Model as OpenAIModel
from pydantic import BaseModel

from sie_gateway.http.routes import PLUGINS, ROUTES, TABLE
from sie_gateway.inference.handler import InferenceRoute

pytestmark = shared.OPEN
Check = Callable[[Any], object]
DENSE, MINI, CROSS, LATE, CLASSES = "test/dense", "test/mini", "test/cross", "test/late", "test/classes"
RANK: dict[str, Any] = {"model": CROSS, "query": "river", "documents": ["river", "kernel"]}
ASKED: dict[str, Any] = {"model": DENSE, "input": ["river", "kernel"]}
WHOLE, NUMBER, TEXT = {"type": "integer"}, {"type": "number"}, {"type": "string"}
VECTOR = {"type": "array", "items": NUMBER, "minItems": 1}
MATRIX = {"type": "array", "items": VECTOR, "minItems": 1}


def rows(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1, **more}


def literal(value: Any) -> dict[str, Any]:
    return {"const": value}


def required(**fields: Any) -> dict[str, Any]:
    """Return the schema of a map that must have these fields, of these schemas, and may have others."""
    return {"type": "object", "required": list(fields), "properties": fields}


def by_schema(schema: Mapping[str, Any]) -> Check:
    return jsonschema_rs.validator_for(dict(schema)).validate


def by_model(model: type[BaseModel]) -> Check:
    """Check a reply by a pydantic model, without conversions such as of texts to numbers."""
    return lambda reply: model.model_validate_json(json.dumps(reply), strict=True)


def by_model_of_each(model: type[BaseModel]) -> Check:
    def check(reply: Any) -> None:
        assert reply["data"]
        for entry in reply["data"]:
            by_model(model)(entry)

    return check


USAGE = required(prompt_tokens=WHOLE, total_tokens=WHOLE, completion_tokens=WHOLE)
HEAD: dict[str, Any] = {"id": TEXT, "object": literal("list"), "created": WHOLE, "model": TEXT, "usage": USAGE}
# docs.jina.ai, docs.mistral.ai, docs.vllm.ai (OpenAI-compatible server), docs.voyageai.com
EMBEDDINGS = required(**HEAD, data=rows(required(object=literal("embedding"), index=WHOLE, embedding=VECTOR)))
MULTI_VECTOR = required(**HEAD, data=rows(required(object=literal("embeddings"), index=WHOLE, embeddings=MATRIX)))
POOLED = required(**HEAD, data=rows(required(object=literal("pooling"), index=WHOLE, data=VECTOR)))
SCORES = required(**HEAD, data=rows(required(object=literal("score"), index=WHOLE, score=NUMBER)))
CONTEXTUALIZED = required(
    object=literal("list"),
    model=TEXT,
    usage=required(total_tokens=WHOLE),
    data=rows(
        required(
            object=literal("list"),
            index=WHOLE,
            data=rows(required(object=literal("embedding"), index=WHOLE, embedding=VECTOR)),
        )
    ),
)
# docs.together.ai and the schema of @ai-sdk/togetherai; Jina and Voyage require less
RANKED = required(
    id=TEXT,
    object=literal("rerank"),
    model=TEXT,
    usage=USAGE,
    results=rows(required(index=WHOLE, relevance_score=NUMBER, document=required(text=TEXT))),
    data=rows(required(index=WHOLE, relevance_score=NUMBER)),  # Voyage
)
# the package mixedbread: types/rerank_response.py
MIXEDBREAD = required(
    object=literal("list"),
    model=TEXT,
    usage=USAGE,
    data=rows(required(object=literal("rank_result"), index=WHOLE, score=NUMBER)),
    top_k=WHOLE,
    return_input={"type": "boolean"},
)
# docs.nvidia.com: NeMo Retriever
RANKINGS = required(rankings=rows(required(index=WHOLE, logit=NUMBER)), usage=required(total_tokens=WHOLE))
# huggingface.github.io/text-embeddings-inference: its OpenAPI document
CLASS = required(label=TEXT, score=NUMBER)
SPARSE = rows(rows(required(index=WHOLE, value=NUMBER)))
RANKS = rows(required(index=WHOLE, score=NUMBER))
TOKENS = rows(rows(required(id=WHOLE, text=TEXT, special={"type": "boolean"})))
PROMPT_TOKENS = required(count=WHOLE, max_model_len=WHOLE, tokens=rows(WHOLE))  # vLLM
INFO = required(
    model_id=TEXT,
    model_dtype=TEXT,
    model_type={"type": "object"},
    max_concurrent_requests=WHOLE,
    max_input_length=WHOLE,
    max_batch_tokens=WHOLE,
    max_client_batch_size=WHOLE,
    auto_truncate={"type": "boolean"},
    tokenization_workers=WHOLE,
    version=TEXT,
)
INPUTS: dict[str, Any] = {"inputs": "river"}
TEI_RANK: dict[str, Any] = {"query": "river", "texts": ["river", "kernel"]}
SENTENCES: dict[str, Any] = {"inputs": {"source_sentence": "river", "sentences": ["river", "kernel"]}}
COHERE: dict[str, Any] = {"model": DENSE, "texts": ["river"], "input_type": "search_document"}


@dataclass(frozen=True)
class Reply:
    """A request, and the check of its reply. `model`: the model in the path; the method is GET without a body."""

    path: str
    body: dict[str, Any] | None
    check: Check
    model: str = DENSE
    label: str = field(default="", kw_only=True)


def openai_and_others(path: str, model: str = DENSE) -> tuple[Reply, ...]:
    return (
        Reply(path, ASKED, by_model(CreateEmbeddingResponse), model, label="openai"),
        Reply(path, ASKED, infinity.OpenAIEmbeddingResult.from_dict, model, label="infinity"),
        Reply(path, ASKED, by_schema(EMBEDDINGS), model, label="mistral, jina, vllm"),
    )


_ALL = [
    *(reply for end in ("/v1/embeddings", "/embeddings") for reply in openai_and_others(end)),
    *(reply for end in ("/v1/embeddings", "/embeddings") for reply in openai_and_others(f"/tei/{{model:path}}{end}")),
    Reply(
        "/v1/embeddings", {**ASKED, "model": LATE, "return_multivector": True}, by_schema(MULTI_VECTOR), label="jina v4"
    ),
    Reply(
        "/v1/embeddings",
        {"model": DENSE, "messages": [{"role": "user", "content": [{"type": "text", "text": "river"}]}]},
        by_schema(EMBEDDINGS),
        label="vllm, messages",
    ),
    Reply("/v1/multi-vector", {**ASKED, "model": LATE}, by_schema(MULTI_VECTOR)),
    Reply("/pooling", ASKED, by_schema(POOLED)),
    Reply(
        "/pooling",
        {**ASKED, "model": LATE},
        by_schema(required(**HEAD, data=rows(required(object=literal("pooling"), index=WHOLE, data=MATRIX)))),
        label="tokens",
    ),
    *(
        Reply(path, {"model": CROSS, "text_1": "river", "text_2": ["river", "kernel"]}, by_schema(SCORES))
        for path in ("/v1/score", "/score")
    ),
    Reply(
        "/v1/contextualizedembeddings",
        {"model": DENSE, "inputs": [["river", "kernel"]], "input_type": "document"},
        by_schema(CONTEXTUALIZED),
    ),
    Reply("/v1/rerank", RANK, by_schema(RANKED), label="together, jina, voyage"),
    Reply("/v1/rerank", RANK, by_model(cohere.RerankResponse), label="cohere"),
    Reply("/v2/rerank", RANK, by_model(cohere.V2RerankResponse)),
    Reply("/rerank", {**RANK, "return_documents": True}, infinity.ReRankResult.from_dict, label="infinity"),
    Reply("/rerank", {**TEI_RANK, "model": CROSS}, by_schema(RANKS), label="tei"),
    *(
        reply
        for path in ("/v1/reranking", "/reranking")
        for reply in (
            Reply(path, RANK, by_schema(RANKED), label="llama.cpp"),
            Reply(path, {"model": CROSS, "query": {"text": "a"}, "passages": [{"text": "b"}]}, by_schema(RANKINGS)),
            Reply(
                path, {"model": CROSS, "query": "river", "input": ["a", "b"]}, by_schema(MIXEDBREAD), label="mixedbread"
            ),
        )
    ),
    Reply("/v1/ranking", {"model": CROSS, "query": {"text": "a"}, "passages": [{"text": "b"}]}, by_schema(RANKINGS)),
    Reply("/v1/embed", COHERE, by_model(cohere.EmbeddingsFloatsEmbedResponse)),
    Reply(
        "/v1/embed",
        {**COHERE, "embedding_types": ["float"]},
        by_model(cohere.EmbeddingsByTypeEmbedResponse),
        label="types",
    ),
    Reply("/v2/embed", {**COHERE, "embedding_types": ["float", "int8"]}, by_model(cohere.EmbedByTypeResponse)),
    *(
        Reply(path, {"model": CLASSES, "input": ["river"]}, infinity.ClassifyResult.from_dict)
        for path in ("/v1/classify", "/classify")
    ),
    Reply("/api/embed", ASKED, by_model(ollama.EmbedResponse)),
    Reply("/api/embeddings", {"model": DENSE, "prompt": "river"}, by_model(ollama.EmbeddingsResponse)),
    Reply("/api/rerank", RANK, by_schema(RANKED)),
    Reply("/api/tags", None, by_model(ollama.ListResponse)),
    Reply("/api/ps", None, by_model(ollama.ProcessResponse)),
    Reply("/api/show", {"model": DENSE}, by_model(ollama.ShowResponse)),
    Reply("/api/version", None, by_schema(required(version=TEXT))),
    *(
        reply
        for start in ("", "/tei/{model:path}")
        for reply in (
            Reply(f"{start}/embed", {"inputs": ["river", "kernel"]}, by_schema(MATRIX)),
            Reply(f"{start}/embed_all", INPUTS, by_schema(rows(MATRIX))),
            Reply(f"{start}/embed_sparse", INPUTS, by_schema(SPARSE), "test/sparse"),
            Reply(f"{start}/predict", {**INPUTS, "model": CLASSES}, by_schema(rows(CLASS)), CLASSES),
            Reply(f"{start}/similarity", SENTENCES, by_schema(VECTOR)),
            Reply(f"{start}/tokenize", INPUTS, by_schema(TOKENS)),
            Reply(f"{start}/tokenize", {"prompt": "river"}, by_schema(PROMPT_TOKENS), label="vllm"),
            Reply(f"{start}/decode", {"ids": [5, 6]}, by_schema(rows(TEXT))),
            Reply(f"{start}/info", None, by_schema(INFO)),
        )
    ),
    Reply("/tei/{model:path}/rerank", TEI_RANK, by_schema(RANKS), CROSS),
    *(Reply(f"/tei/{{model:path}}/{name}", None, by_schema({"type": "object"})) for name in ("health", "ping")),
    *(
        Reply(path, body, by_schema(schema), model, label=model.removeprefix("test/"))
        for path in ("/tei/{model:path}", "/tei/{model:path}/invocations")
        for body, schema, model in (
            (INPUTS, MATRIX, DENSE),
            (INPUTS, rows(rows(CLASS)), CLASSES),  # huggingface_hub and @huggingface/inference read a list in a list
            (TEI_RANK, RANKS, CROSS),
        )
    ),
    Reply("/", INPUTS, by_schema(MATRIX)),
    Reply("/v1/models", None, by_model_of_each(OpenAIModel), label="openai"),
    Reply("/v1/models", None, by_model(SyncPage[OpenAIModel]), label="openai, page"),
    Reply("/models", None, infinity.OpenAIModelInfo.from_dict),
    *(
        Reply(f"/v1/models/{model}", None, by_schema(required(model_type=literal(kind))), label="xinference")
        for model, kind in ((DENSE, "embedding"), (CROSS, "rerank"), (CLASSES, "flexible"))
    ),
]
REPLIES = [reply for reply in _ALL if TABLE.match(reply.path.replace("{model:path}", reply.model)).methods]
# the routes of recordings need a model that hears: the unit tests of these routes check their replies
ELSEWHERE = {"/v1/audio/transcriptions", "/v1/audio/translations"}


@pages.WHOLE
def test_every_reply_has_its_route() -> None:
    assert REPLIES == _ALL


def test_every_route_of_another_server_has_a_schema() -> None:
    """Inference routes and lists of models, of the core and of plug-ins."""
    routes = [route for route in ROUTES if isinstance(route, InferenceRoute) and route.tag != "SIE"]
    routes += [route for route in PLUGINS.routes if route.endpoint == "models" and "{" not in route.path]
    assert {route.path for route in routes} - {reply.path for reply in REPLIES} <= ELSEWHERE


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: f"{reply.path} {reply.label}")
def test_a_reply_fits_the_schema_of_its_vendor(open_cluster: Cluster, reply: Reply) -> None:
    method = "GET" if reply.body is None else "POST"
    url = open_cluster.url + reply.path.replace("{model:path}", reply.model)
    answer = httpx.request(method, url, json=reply.body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    reply.check(answer.json())


def test_a_vector_of_a_token_is_the_one_of_the_native_route(open_cluster: Cluster) -> None:
    """Weaviate's module for Jina's ColBERT sends these fields."""
    body = {"model": LATE, "input": ["river"], "embedding_type": "float", "input_type": "document"}
    vectors = httpx.post(f"{open_cluster.url}/v1/multi-vector", json=body, timeout=60).json()["data"][0]["embeddings"]
    native = {"items": ["river"], "output_types": ["multivector"]}
    slot = httpx.post(f"{open_cluster.url}/v1/encode/{LATE}", json=native, timeout=60).json()["items"][0]
    assert vectors == slot["multivector"]["values"]
