"""Suggestions for an unknown model: models that could do the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_adapter import toy_entry
from inprocess import InProcess, until

from sie_gateway.inference.handler import _FOREIGN
from sie_runtime.feed import packaged_catalogue

NAMED: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
}
IN_PATH: dict[str, dict[str, Any]] = {
    "/v1/encode/{}": {"items": ["a"]},
    "/v1/score/{}": {"query": "a", "items": ["b"]},
    "/v1/extract/{}": {"items": ["a"]},
}
HUB = "BAAI/bge-medium-en-v1.5"
TASK = {"embeddings": "encode", "rerank": "score"}


@pytest.mark.parametrize("name", ["bge-reranker-base", "gliner_small", "bge-m33", HUB])
async def test_a_name_that_is_unknown_brings_models_that_do_what_was_asked(tmp_path: Path, name: str) -> None:
    entries = packaged_catalogue().entries
    async with InProcess(tmp_path, *entries.values()) as cluster:
        gateway = await cluster.gateway()
        requests = [(path, {"model": name, **body}) for path, body in NAMED.items()]
        requests += [(path.format(name), body) for path, body in IN_PATH.items()]
        for path, body in requests:
            answer = await gateway.client.post(path, json=body)
            reply = answer.json()
            error = reply["error"]
            assert (answer.status_code, reply["code"]) == (404, "MODEL_NOT_FOUND"), error
            part = next(part for part in (*TASK, "encode", "score", "extract") if f"/{part}" in path)
            like = error["suggestions"]
            assert all(TASK.get(part, part) in entries[model_id].tasks for model_id in like), (path, like)
            hint = f"; did you mean {' or '.join(like)}?" if like else ";"
            lists = "" if like else " GET /v1/models lists the available ones"
            adds = f" `sie pull {HUB}` adds it if the Hugging Face Hub has it" if name == HUB else lists
            assert error["message"].endswith(hint + adds)
        assert (await gateway.client.post("/v1/embeddings", json={"model": "bge-m33", "input": "a"})).json()["error"][
            "suggestions"
        ]


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


def test_no_model_of_the_catalogue_begins_like_one_of_a_company() -> None:
    assert not [name for name in packaged_catalogue().entries if name.startswith(tuple(_FOREIGN))]
