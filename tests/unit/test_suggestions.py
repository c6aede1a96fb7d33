"""Suggestions for an unknown model: models that could do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_adapter import toy_entry
from inprocess import InProcess, until

from sie_runtime.feed import packaged_catalogue


async def test_a_model_of_a_company_is_no_misspelling_of_one_that_is_here(tmp_path: Path) -> None:
    async with InProcess(tmp_path, *packaged_catalogue().entries.values(), toy_entry("toy/one")) as cluster:
        gateway = await cluster.gateway()

        async def told(path: str, model: str) -> dict[str, Any]:
            answer = await gateway.client.post(
                path, json={"model": model, "input": "a", "query": "a", "documents": ["b"]}
            )
            assert answer.status_code == 404
            error: dict[str, Any] = answer.json()["error"]
            return error

        alias = "`sie models alias text-embedding-3-small MODEL` lets MODEL answer for it"
        cold = await told("/v1/embeddings", "text-embedding-3-small")
        assert cold["suggestions"] == []
        assert cold["message"].endswith(
            f"; that is a model of OpenAI: GET /v1/models lists the available ones, and {alias}"
        )
        await cluster.sidecar(await cluster.adapter())
        assert (await gateway.client.post("/v1/encode/toy/one", json={"items": ["a"]})).status_code == 200
        await until(lambda: (beat := cluster.last_beat("w0")) and beat.models[0].state == "loaded", "it is loaded")
        warm = await told("/v1/embeddings", "text-embedding-3-small")
        assert warm["suggestions"] == ["toy/one"]
        assert warm["message"].endswith(f"; that is a model of OpenAI: toy/one is loaded here, and {alias}")
        assert "a model of Cohere or Voyage: GET" in (await told("/v1/rerank", "rerank-2"))["message"], (
            "it does not rank"
        )
