"""Public clients with too many dependencies for the environment of the project. Another Python runs them, a call each.

heavy.py CLIENT URL KEY MODEL RETRIES INPUT... ──► one line of JSON: {"found": ...} or {"status": ...}
"""

from __future__ import annotations

import json
import sys
from typing import Any


def llama_index(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    from llama_index.embeddings.openai import OpenAIEmbedding

    embedder = OpenAIEmbedding(model_name=model, api_base=f"{url}/v1", api_key=key, max_retries=retries, timeout=30)
    return embedder.get_text_embedding_batch(inputs)


def litellm_embedding(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    import litellm

    answer = litellm.embedding(
        f"openai/{model}", inputs, api_base=f"{url}/v1", api_key=key, max_retries=retries, encoding_format="float"
    )
    return [entry["embedding"] for entry in answer.data]


def litellm_rerank(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    import litellm

    query, *documents = inputs
    answer = litellm.rerank(
        f"cohere/{model}",
        query,
        documents,
        api_base=f"{url}/v2/rerank",
        api_key=key,
        max_retries=retries,
        num_retries=retries,
    )
    return [[result["index"], result["relevance_score"]] for result in answer.results or []]


def litellm_infinity(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    import litellm

    answer = litellm.embedding(
        f"infinity/{model}", inputs, api_base=url, api_key=key, max_retries=retries, dimensions=384
    )
    return [entry["embedding"] for entry in answer.data]


def litellm_infinity_rerank(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    return _reranked(f"infinity/{model}", url, key, inputs)


def litellm_jina(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    import litellm

    answer = litellm.embedding(
        f"jina_ai/{model}", inputs, api_base=f"{url}/v1", api_key=key, max_retries=retries, dimensions=384
    )
    return [entry["embedding"] for entry in answer.data]


def litellm_jina_rerank(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    return _reranked(f"jina_ai/{model}", url, key, inputs)


def litellm_voyage_rerank(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    return _reranked(f"voyage/{model}", url, key, inputs, documents=False)


def litellm_nvidia_rerank(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    return _reranked(f"nvidia_nim/ranking/{model}", f"{url}/v1", key, inputs, documents=False)


def _reranked(model: str, url: str, key: str, inputs: list[str], *, documents: bool = True) -> Any:
    """Return scores by index, and check that the returned documents are those that were sent."""
    import litellm

    query, *sent = inputs
    results = litellm.rerank(model, query, sent, api_base=url, api_key=key, return_documents=True).results or []
    if documents:
        assert [result["document"]["text"] for result in results] == [sent[result["index"]] for result in results]
    return [[result["index"], result["relevance_score"]] for result in results]


def langchain_cohere(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    from langchain_cohere import CohereEmbeddings

    embedder = CohereEmbeddings(model=model, base_url=url, cohere_api_key=key, max_retries=retries + 1)
    return embedder.embed_documents(inputs)


def langchain_cohere_rerank(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    from langchain_cohere import CohereRerank

    query, *documents = inputs
    ranking = CohereRerank(model=model, base_url=url, cohere_api_key=key, top_n=len(documents)).rerank(documents, query)
    return [[rank["index"], rank["relevance_score"]] for rank in ranking]


def mistral(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    from mistralai.client import Mistral

    answer = Mistral(api_key=key, server_url=url, timeout_ms=30_000).embeddings.create(model=model, inputs=inputs)
    return [entry.embedding for entry in answer.data]


def together(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    from together import Together

    client = Together(api_key=key, base_url=url, max_retries=retries, timeout=30)
    return [entry.embedding for entry in client.embeddings.create(model=model, input=inputs).data]


def together_rerank(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    from together import Together

    query, *documents = inputs
    client = Together(api_key=key, base_url=url, max_retries=retries, timeout=30)
    results = client.rerank.create(model=model, query=query, documents=documents, return_documents=True).results
    assert [result.document.text for result in results] == [documents[result.index] for result in results]
    return [[result.index, result.relevance_score] for result in results]


def mixedbread_rerank(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    from mixedbread import Mixedbread

    query, *documents = inputs
    client = Mixedbread(api_key=key, base_url=url, max_retries=retries, timeout=30)
    answer = client.rerank(model=model, query=query, input=documents, top_k=len(documents), return_input=True)
    assert [result.input for result in answer.data] == [documents[result.index] for result in answer.data]
    return [[result.index, result.score] for result in answer.data]


CLIENTS = {
    "llama-index": llama_index,
    "litellm": litellm_embedding,
    "litellm-rerank": litellm_rerank,
    "litellm-infinity": litellm_infinity,
    "litellm-infinity-rerank": litellm_infinity_rerank,
    "litellm-jina": litellm_jina,
    "litellm-jina-rerank": litellm_jina_rerank,
    "litellm-voyage-rerank": litellm_voyage_rerank,
    "litellm-nvidia-rerank": litellm_nvidia_rerank,
    "langchain-cohere": langchain_cohere,
    "langchain-cohere-rerank": langchain_cohere_rerank,
    "mistral": mistral,
    "together": together,
    "together-rerank": together_rerank,
    "mixedbread-rerank": mixedbread_rerank,
}


def main() -> None:
    client, url, key, model, retries, *inputs = sys.argv[1:]
    try:
        report: dict[str, Any] = {"found": CLIENTS[client](url, key, model, int(retries), inputs)}
    except Exception as error:  # noqa: BLE001  the error that a user of the client would see
        report = {"status": getattr(error, "status_code", None), "error": f"{type(error).__name__}: {error}"[:2000]}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
