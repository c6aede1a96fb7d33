"""Requests of applications that do not install beside the project, with the fields that their public sources send, and
the parts of a reply that they read. docs/clients.md has the settings of each.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import shared
from cluster import Cluster

from sie_gateway.http.routes import inference_route

KEY = shared.USER
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
_ALL = [
    Application("Open WebUI, engine openai", "/v1/embeddings", OPENAI, of_openai),
    Application("Open WebUI, engine ollama", "/api/embed", OPENAI, of_ollama),
    Application("Open WebUI, external reranker", "/v1/rerank", RERANK, by_results),
    Application("Dify, OpenAI-API-compatible", "/v1/embeddings", {**OPENAI, "encoding_format": "float"}, of_openai),
    Application("Dify, OpenAI-API-compatible rerank", "/v1/rerank", {**RERANK, "return_documents": True}, with_texts),
    Application("Dify, Ollama", "/api/embed", {"model": MINI, "input": TEXTS}, of_ollama),
    Application("Dify, Ollama rerank", "/api/rerank", {**RERANK, "model": f"{CROSS}:latest"}, by_results),
    Application("Dify, Text Embeddings Inference", f"/tei/{MINI}/v1/embeddings", {"input": TEXTS}, of_openai),
    Application("Dify, Text Embeddings Inference rerank", f"/tei/{CROSS}/rerank", TEI_RERANK, tei_ranks),
    Application("Dify, Xinference", "/v1/embeddings", OPENAI, of_openai),
    Application("Dify, Xinference rerank", "/v1/rerank", {**RERANK, "return_documents": True}, with_texts),
    Application("RAGFlow, OpenAI-API-Compatible", "/v1/embeddings", {**OPENAI, "encoding_format": "float"}, of_openai),
    Application("RAGFlow, OpenAI-API-Compatible rerank", "/v1/rerank", RERANK, by_results),
    Application("RAGFlow, NVIDIA rerank", "/v1/reranking", {**PASSAGES, "top_n": COUNT}, logits),
    Application("RAGFlow, Xinference rerank", "/v1/rerank", XINFERENCE, with_texts),
    Application("AnythingLLM, generic OpenAI", "/v1/embeddings", {**OPENAI, "encoding_format": "base64"}, of_base64),
    Application("AnythingLLM, Ollama", "/api/embed", {**OPENAI, "options": {"num_ctx": 8192}}, of_ollama),
    Application("LibreChat, reranker jina", "/v1/rerank", {**RERANK, "return_documents": True}, with_texts),
    Application("Continue, rerank", "/v1/rerank", {name: RERANK[name] for name in RERANK if name != "top_n"}, by_data),
    Application("Weaviate, text2vec-openai", "/v1/embeddings", {**OPENAI, "dimensions": 384}, of_openai),
    Application("Weaviate, text2vec-ollama", "/api/embed", {"model": MINI, "input": TEXTS}, of_ollama),
    Application("Weaviate, text2vec-databricks", f"/tei/{MINI}/v1/embeddings", {"input": TEXTS}, of_openai),
    Application(
        "Weaviate, reranker-cohere",
        "/v2/rerank",
        {"documents": DOCUMENTS, "query": QUERY, "model": CROSS, "return_documents": False},
        by_results,
    ),
    Application("Milvus, openai", "/v1/embeddings", OPENAI, of_openai),
    Application("Elasticsearch, openai", "/v1/embeddings", {**OPENAI, "user": "search"}, of_openai),
    Application("Elasticsearch, hugging_face", f"/tei/{MINI}/embed", {"inputs": TEXTS}, of_tei),
    Application(
        "Elasticsearch, hugging_face rerank",
        f"/tei/{CROSS}/rerank",
        {**TEI_RERANK, "return_text": True, "top_n": COUNT},
        tei_ranks,
    ),
    Application("OpenSearch, connector of OpenAI", "/v1/embeddings", OPENAI, of_openai),
    Application("OpenSearch, connector of Cohere rerank", "/v1/rerank", RERANK, by_results),
    Application("pgai, openai_embed", "/v1/embeddings", {**OPENAI, "encoding_format": "float"}, of_openai),
    Application("pgai, ollama_embed", "/api/embeddings", {"model": MINI, "prompt": TEXTS[0]}, lambda reply: []),
    Application("NVIDIA, ranking", "/v1/ranking", PASSAGES, logits),
    Application("vLLM, pooling", "/pooling", OPENAI, of_pooling),
    Application("vLLM, score", "/v1/score", {"model": CROSS, "text_1": QUERY, "text_2": DOCUMENTS}, by_score),
    Application(
        "vLLM, score of pairs",
        "/score",
        {"model": CROSS, "queries": [QUERY] * COUNT, "documents": DOCUMENTS},
        by_score,
    ),
    Application("llama.cpp, reranking", "/v1/reranking", RERANK, by_results),
]

# these clients drop the path of the configured address, so the default models answer
APPLICATIONS = [application for application in _ALL if inference_route(application.path)]
_WITHOUT_A_PATH = [
    Application("Milvus, TEI", "/embed", {"inputs": TEXTS, "truncate": True, "truncation_direction": "Left"}, of_tei),
    Application("Milvus, TEI ranker", "/rerank", {**TEI_RERANK, "truncate": True}, tei_ranks),
]
WITHOUT_A_PATH = [application for application in _WITHOUT_A_PATH if inference_route(application.path)]


@pytest.fixture(scope="module")
def client(guarded_cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded_cluster.url, timeout=60, trust_env=False) as client:
        yield client


def native(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def vectors(client: httpx.Client) -> np.ndarray:
    items = native(client, f"/v1/encode/{MINI}", {"items": TEXTS, "params": {"prompt_name": None}})["items"]
    return np.array([item["dense"]["values"] for item in items], np.float32)


@pytest.fixture(scope="module")
def scores(client: httpx.Client) -> list[float]:
    entries = native(client, f"/v1/score/{CROSS}", {"query": QUERY, "items": DOCUMENTS})["scores"]
    by_item = {entry["item_id"]: entry["score"] for entry in entries}
    return [by_item[f"item-{index}"] for index in range(COUNT)]


@pytest.mark.parametrize("application", APPLICATIONS, ids=lambda application: application.name)
def test_the_request_of_an_application_gets_the_numbers_of_the_native_route(
    client: httpx.Client, vectors: np.ndarray, scores: list[float], application: Application
) -> None:
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "accept": "*/*"}
    answer = client.post(application.path, json=application.body, headers=headers)
    assert answer.status_code == 200, answer.text
    numbers = application.read(answer.json())
    if application.path == "/api/embeddings":
        embedding = np.array(answer.json()["embedding"])
        assert np.allclose(embedding / np.linalg.norm(embedding), vectors[0], atol=1e-5)
    elif application.ranks:
        assert np.allclose(numbers, scores, atol=1e-5)
    else:
        assert np.allclose(np.array(numbers), vectors, atol=1e-5)


@pytest.mark.parametrize("application", WITHOUT_A_PATH, ids=lambda application: application.name)
def test_an_application_that_names_no_model_gets_the_numbers_of_the_default_one(
    open_cluster: Cluster, application: Application
) -> None:
    answer = httpx.post(f"{open_cluster.url}{application.path}", json=application.body, timeout=60)
    model = answer.headers["x-sie-model"]
    verb, body = ("score", {"query": QUERY, "items": DOCUMENTS}) if application.ranks else ("encode", {"items": TEXTS})
    own = httpx.post(f"{open_cluster.url}/v1/{verb}/{model}", json=body, timeout=60).json()
    if application.ranks:
        by_item = {entry["item_id"]: entry["score"] for entry in own["scores"]}
        expected: Any = [by_item[f"item-{index}"] for index in range(COUNT)]
    else:
        expected = [item["dense"]["values"] for item in own["items"]]
    assert np.allclose(application.read(answer.json()), expected, atol=1e-5)


@pytest.mark.parametrize("application", APPLICATIONS, ids=lambda application: application.name)
def test_an_application_with_a_wrong_key_is_told_so(client: httpx.Client, application: Application) -> None:
    answer = client.post(application.path, json=application.body, headers={"authorization": "Bearer wrong"})
    assert answer.status_code == 401
    assert "token is not known" in answer.text


def test_every_application_has_its_settings_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/clients.md").read_text("utf-8")
    _, _, section = page.partition("## Settings of applications")
    names = {application.name.partition(",")[0] for application in APPLICATIONS}
    assert not [name for name in names if f"**{name}**" not in section]
