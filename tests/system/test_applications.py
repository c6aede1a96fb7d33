"""Requests of applications that do not install beside the project, with the fields that their public sources send, and
the parts of a reply that they read. docs/clients.md has the settings of each.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
import shared
from cluster import Cluster

from sie_gateway.http.routes import inference_route

pytestmark = shared.OPEN
MINI, CROSS = "test/mini", "test/cross"
TEXTS = ["The river runs past the old mill.", "Zürich, 東京 and 😀"]
QUERY = "river search queue"
DOCUMENTS = ["the winter garden (of music)", "kernel", "river river", "Zürich, 東京 and 😀"]
COUNT = len(DOCUMENTS)
Read = Callable[[Any], list[Any]]


@dataclass(frozen=True)
class Application:
    """A request of an application, and what it reads: vectors of TEXTS, or scores of DOCUMENTS in their order."""

    name: str
    path: str
    body: dict[str, Any]
    read: Read

    @property
    def ranks(self) -> bool:
        return not {"query", "text_1", "queries"}.isdisjoint(self.body)


def of_openai(reply: Any) -> list[Any]:
    return [entry["embedding"] for entry in sorted(reply["data"], key=lambda entry: entry["index"])]


def of_base64(reply: Any) -> list[Any]:
    return [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in reply["data"]]


def of_ollama(reply: Any) -> list[Any]:
    return list(reply["embeddings"])


def of_tei(reply: Any) -> list[Any]:
    return list(reply)


def by_results(reply: Any) -> list[Any]:
    """Return the scores in `results`, in the order of the documents."""
    scores = {entry["index"]: entry["relevance_score"] for entry in reply["results"]}
    return [scores[index] for index in range(COUNT)]


def with_texts(reply: Any) -> list[Any]:
    """Check that the texts come back, and return the scores."""
    assert all(entry["document"]["text"] == DOCUMENTS[entry["index"]] for entry in reply["results"])
    return by_results(reply)


def by_data(reply: Any) -> list[Any]:
    """Return the scores in `data`, which Continue reads as Voyage's clients do."""
    return [entry["relevance_score"] for entry in sorted(reply["data"], key=lambda entry: entry["index"])]


def of_pooling(reply: Any) -> list[Any]:
    return [entry["data"] for entry in reply["data"]]


def by_score(reply: Any) -> list[Any]:
    return [entry["score"] for entry in sorted(reply["data"], key=lambda entry: entry["index"])]


def tei_ranks(reply: Any) -> list[Any]:
    return [entry["score"] for entry in sorted(reply, key=lambda entry: entry["index"])]


def logits(reply: Any) -> list[Any]:
    by_index = {entry["index"]: entry["logit"] for entry in reply["rankings"]}
    assert [entry["logit"] for entry in reply["rankings"]] == sorted(by_index.values(), reverse=True)
    return [1 / (1 + np.exp(-by_index[index])) for index in range(COUNT)]


OPENAI: dict[str, Any] = {"input": TEXTS, "model": MINI}
RERANK: dict[str, Any] = {"model": CROSS, "query": QUERY, "documents": DOCUMENTS, "top_n": COUNT}
TEI_RERANK: dict[str, Any] = {"query": QUERY, "texts": DOCUMENTS}
PASSAGES: dict[str, Any] = {
    "model": CROSS,
    "query": {"text": QUERY},
    "passages": [{"text": text} for text in DOCUMENTS],
    "truncate": "END",
}
XINFERENCE: dict[str, Any] = {**RERANK, "return_documents": "true", "return_len": "true"}
# the first name is that of the application whose source was read; those behind it send the same
_ALL = [
    # Dify's Xinference, Weaviate's text2vec-databricks, Milvus, OpenSearch
    Application("Open WebUI, engine openai", "/v1/embeddings", OPENAI, of_openai),
    Application("Dify, OpenAI-API-compatible", "/v1/embeddings", {**OPENAI, "encoding_format": "float"}, of_openai),
    Application("AnythingLLM, generic OpenAI", "/v1/embeddings", {**OPENAI, "encoding_format": "base64"}, of_base64),
    Application("Weaviate, text2vec-openai", "/v1/embeddings", {**OPENAI, "dimensions": 384}, of_openai),
    Application("Elasticsearch, openai", "/v1/embeddings", {**OPENAI, "user": "search"}, of_openai),
    Application("Dify, Text Embeddings Inference", f"/tei/{MINI}/v1/embeddings", {"input": TEXTS}, of_openai),
    Application("AnythingLLM, Ollama", "/api/embed", {**OPENAI, "options": {"num_ctx": 8192}}, of_ollama),
    Application("pgai, ollama_embed", "/api/embeddings", {"model": MINI, "prompt": TEXTS[0]}, lambda reply: []),
    Application("Elasticsearch, hugging_face", f"/tei/{MINI}/embed", {"inputs": TEXTS}, of_tei),
    Application("vLLM, pooling", "/pooling", OPENAI, of_pooling),
    # RAGFlow, OpenSearch
    Application("Open WebUI, external reranker", "/v1/rerank", RERANK, by_results),
    # LibreChat
    Application("Dify, OpenAI-API-compatible rerank", "/v1/rerank", {**RERANK, "return_documents": True}, with_texts),
    Application("RAGFlow, Xinference rerank", "/v1/rerank", XINFERENCE, with_texts),
    Application("Continue, rerank", "/v1/rerank", {name: RERANK[name] for name in RERANK if name != "top_n"}, by_data),
    Application("Weaviate, reranker-cohere", "/v2/rerank", {**RERANK, "return_documents": False}, by_results),
    Application("Dify, Ollama rerank", "/api/rerank", {**RERANK, "model": f"{CROSS}:latest"}, by_results),
    Application(
        "Elasticsearch, hugging_face rerank", f"/tei/{CROSS}/rerank", {**TEI_RERANK, "return_text": True}, tei_ranks
    ),
    Application("RAGFlow, NVIDIA rerank", "/v1/reranking", {**PASSAGES, "top_n": COUNT}, logits),
    Application("NVIDIA, ranking", "/v1/ranking", PASSAGES, logits),
    Application("llama.cpp, reranking", "/v1/reranking", RERANK, by_results),
    Application("vLLM, score", "/v1/score", {"model": CROSS, "text_1": QUERY, "text_2": DOCUMENTS}, by_score),
    Application(
        "vLLM, score of pairs", "/score", {"model": CROSS, "queries": [QUERY] * COUNT, "documents": DOCUMENTS}, by_score
    ),
    # these drop the path of the configured address, so the default models answer
    Application("Milvus, TEI", "/embed", {"inputs": TEXTS, "truncate": True, "truncation_direction": "Left"}, of_tei),
    Application("Milvus, TEI ranker", "/rerank", {**TEI_RERANK, "truncate": True}, tei_ranks),
]
APPLICATIONS = [application for application in _ALL if inference_route(application.path)]


@functools.cache
def native(url: str, model: str, *, ranks: bool) -> np.ndarray:
    """Return the scores of DOCUMENTS or the vectors of TEXTS."""
    verb, body = ("score", {"query": QUERY, "items": DOCUMENTS}) if ranks else ("encode", {"items": TEXTS})
    answer = httpx.post(f"{url}/v1/{verb}/{model}", json=body, timeout=60).json()
    if not ranks:
        return np.array([item["dense"]["values"] for item in answer["items"]], np.float32)
    by_item = {entry["item_id"]: entry["score"] for entry in answer["scores"]}
    return np.array([by_item[f"item-{index}"] for index in range(COUNT)])


@pytest.mark.parametrize("application", APPLICATIONS, ids=lambda application: application.name)
def test_the_request_of_an_application_gets_the_numbers_of_the_native_route(
    open_cluster: Cluster, application: Application
) -> None:
    url = open_cluster.url
    answer = httpx.post(url + application.path, json=application.body, headers={"accept": "*/*"}, timeout=60)
    assert answer.status_code == 200, answer.text
    expected = native(url, answer.headers["x-sie-model"], ranks=application.ranks)
    if application.path == "/api/embeddings":
        embedding = np.array(answer.json()["embedding"])
        assert np.allclose(embedding / np.linalg.norm(embedding), expected[0], atol=1e-5)
    else:
        assert np.allclose(np.array(application.read(answer.json())), expected, atol=1e-5)
