"""HTTP server of MiniLM embeddings with LitServe and sentence-transformers, on all cores. `servers.py` starts it.

FOLDER/litserve/bin/python bench/litserve_server.py WEIGHTS PORT PRECISION
"""

from __future__ import annotations

import os
import sys
from typing import Any

import litserve
import torch
from litserve.specs.openai_embedding import OpenAIEmbeddingSpec
from sentence_transformers import SentenceTransformer

MAX_BATCH = 32
BATCH_TIMEOUT_S = 0.002
WEIGHTS, PORT, PRECISION = sys.argv[1:]


class Embeddings(litserve.LitAPI):  # type: ignore[misc]  # litserve has no types
    """LitServe API: one text a request, one vector a reply."""

    def setup(self, device: str) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        options = {"model_kwargs": {"dtype": PRECISION}}
        self.model = SentenceTransformer(WEIGHTS, device="cpu", **options)

    def decode_request(self, request: Any, context: dict[str, Any]) -> str:
        return str(request.input)

    def predict(self, texts: list[str], context: list[dict[str, Any]]) -> Any:
        return self.model.encode(texts, show_progress_bar=False)

    def encode_response(self, output: Any, context: dict[str, Any]) -> dict[str, Any]:
        return {"embeddings": [output.tolist()]}


if __name__ == "__main__":
    api = Embeddings(max_batch_size=MAX_BATCH, batch_timeout=BATCH_TIMEOUT_S, spec=OpenAIEmbeddingSpec())
    server = litserve.LitServer(api, accelerator="cpu")
    server.run(host="127.0.0.1", port=int(PORT), generate_client_file=False)
