"""Public clients that bring too much to be installed beside the project: run by a Python of their own, one call each.

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

    answer = litellm.embedding(f"openai/{model}", inputs, api_base=f"{url}/v1", api_key=key, max_retries=retries, encoding_format="float")
    return [entry["embedding"] for entry in answer.data]


def litellm_rerank(url: str, key: str, model: str, retries: int, inputs: list[str]) -> Any:
    import litellm

    query, *documents = inputs
    answer = litellm.rerank(
        f"cohere/{model}", query, documents, api_base=f"{url}/v2/rerank", api_key=key, max_retries=retries, num_retries=retries
    )  # fmt: skip
    return [[each["index"], each["relevance_score"]] for each in answer.results or []]


CLIENTS = {"llama-index": llama_index, "litellm": litellm_embedding, "litellm-rerank": litellm_rerank}


def main() -> None:
    client, url, key, model, retries, *inputs = sys.argv[1:]
    try:
        told: dict[str, Any] = {"found": CLIENTS[client](url, key, model, int(retries), inputs)}
    except Exception as error:  # noqa: BLE001  what a user of the client would see
        told = {"status": getattr(error, "status_code", None), "error": f"{type(error).__name__}: {error}"[:2000]}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
