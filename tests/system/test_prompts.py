"""Prompts of a folder of sentence-transformers, by route: routes of other servers give what the library's `encode`
gives, the native route what its `encode_document` and `encode_query` give.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import shared
from cluster import Cluster
from inspected_models import inspected
from local_models import LocalModels
from parity.checkpoints import ARCHITECTURES, NORMALIZE, add_modules, build, pooling
from sentence_transformers import SentenceTransformer

from sie_gateway.http.routes import inference_route

PROMPTS = {"query": "river queue: ", "document": "winter garden: ", "poem": "kernel music of "}
DEFAULTS = {"plain": None, "poetic": "poem"}  # names of models, with their default_prompt_name
TEXTS = ["The river runs north.", "Zürich, 東京 and 😀"]
NEAR = 1e-5
pytestmark = shared.OPEN


@dataclass(frozen=True)
class Route:
    """A route with its fields, and the call of the library with the same numbers."""

    path: str
    texts: str
    read: Callable[[Any], Any]
    fields: dict[str, Any] = field(default_factory=dict)
    library: str = "encode"
    options: dict[str, Any] = field(default_factory=dict)


def data(reply: Any) -> Any:
    return [row["embedding"] for row in reply["data"]]


def items(reply: Any) -> Any:
    return [row["dense"]["values"] for row in reply["items"]]


def floats(reply: Any) -> Any:
    return reply["embeddings"]["float"]


def bare(reply: Any) -> Any:
    return reply


OPENAI, TEI, COHERE, NATIVE = "/v1/embeddings", "/tei/MODEL/embed", "/v2/embed", "/v1/encode/MODEL"
_ALL = {
    "OpenAI": Route(OPENAI, "input", data),
    "OpenAI, a side": Route(OPENAI, "input", data, {"is_query": True}, "encode_query"),
    "OpenAI, a prompt": Route(OPENAI, "input", data, {"prompt_name": "query"}, options={"prompt_name": "query"}),
    "OpenAI, no prompt": Route(OPENAI, "input", data, {"options": {"prompt_name": None}}, options={"prompt": ""}),
    "Infinity": Route("/embeddings", "input", data),
    "Voyage, documents": Route(OPENAI, "input", data, {"input_type": "document"}, "encode_document"),
    "Voyage, queries": Route(OPENAI, "input", data, {"input_type": "query"}, "encode_query"),
    "Jina": Route(OPENAI, "input", data, {"task": "text-matching"}),
    "Jina, passages": Route(OPENAI, "input", data, {"task": "retrieval.passage"}, "encode_document"),
    "Jina, queries": Route(OPENAI, "input", data, {"task": "retrieval.query"}, "encode_query"),
    "Cohere": Route(COHERE, "texts", floats, {"input_type": "clustering", "embedding_types": ["float"]}),
    "Cohere, documents": Route(COHERE, "texts", floats, {"input_type": "search_document"}, "encode_document"),
    "Cohere, queries": Route(COHERE, "texts", floats, {"input_type": "search_query"}, "encode_query"),
    "Cohere's first version": Route("/v1/embed", "texts", lambda reply: reply["embeddings"]),
    "TEI": Route(TEI, "inputs", bare),
    "TEI, model in the body": Route("/embed", "inputs", bare),
    "TEI, main task": Route("/tei/MODEL", "inputs", bare),
    "TEI, a prompt": Route(TEI, "inputs", bare, {"prompt_name": "document"}, "encode_document"),
    "TEI, a query": Route(TEI, "inputs", bare, {"prompt_name": "query"}, "encode_query"),
    "native": Route(NATIVE, "items", items, library="encode_document"),
    "native, queries": Route(NATIVE, "items", items, {"params": {"is_query": True}}, "encode_query"),
    "native, a prompt": Route(NATIVE, "items", items, {"prompt_name": "poem"}, options={"prompt_name": "poem"}),
    "native, no prompt": Route(NATIVE, "items", items, {"params": {"prompt_name": None}}, options={"prompt": ""}),
}
ROUTES = {name: route for name, route in _ALL.items() if inference_route(route.path)}


@pytest.fixture(scope="module")
def libraries(open_cluster: Cluster, open_models: LocalModels) -> dict[str, SentenceTransformer]:
    """Return the models in the library. The cluster serves them too, by what inspection says of their folders."""
    encoders = {}
    for name, default in DEFAULTS.items():
        folder = open_models.weights / name
        add_modules(build(folder, ARCHITECTURES["bert"]), [pooling("mean"), NORMALIZE], PROMPTS)
        settings = folder / "config_sentence_transformers.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"default_prompt_name": default}))
        open_models.add(name, {**msgspec.to_builtins(inspected(folder)), "load": {"precision": "float32"}})
        encoders[name] = SentenceTransformer(str(folder), device="cpu")
    for name in DEFAULTS:
        shared.wait_until_served(open_cluster, f"test/{name}")
    return encoders


@pytest.fixture(scope="module")
def client(open_cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=open_cluster.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("route", ROUTES)
def test_vectors_are_those_of_the_library(
    client: httpx.Client, libraries: dict[str, SentenceTransformer], route: str, name: str
) -> None:
    case = ROUTES[route]
    model = f"test/{name}"
    body = {"model": model, case.texts: TEXTS, **case.fields}
    answer = client.post(case.path.replace("MODEL", model), json=body)
    assert answer.status_code == 200, answer.text
    expected = getattr(libraries[name], case.library)(TEXTS, **case.options)
    np.testing.assert_allclose(case.read(answer.json()), expected, atol=NEAR)


def test_a_prompt_that_nobody_named_is_a_warning_of_the_native_route(
    client: httpx.Client, libraries: dict[str, SentenceTransformer]
) -> None:
    for params, count in (({}, 1), ({"is_query": False}, 0), ({"prompt_name": None}, 0)):
        reply = client.post("/v1/encode/test/plain", json={"items": TEXTS, "params": params}).json()
        warnings = reply.get("warnings", [])
        assert [warning.partition(":")[0] for warning in warnings] == ["prompt_name"] * count
    assert "warnings" not in client.post("/v1/embeddings", json={"model": "test/plain", "input": TEXTS}).json()
