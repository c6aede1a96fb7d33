"""Ollama's routes: refusals and their form, the names of models, the same vectors as the native route, and lists of
models.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_adapter import WIDTH, ids_of, toy_entry, vector_of
from inprocess import GatewayProcess, InProcess, until_told

ONE = "toy/one"
LATEST = "toy/latest"
STREAM = "WORK__default"


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path) as cluster:
        cluster.source.put(toy_entry("toy/score", outputs={"score": 0}))
        profile = {"run": {"normalize": True}}
        cluster.source.put(toy_entry(LATEST, profiles={"latest": profile, "small": profile}))
        yield cluster


@pytest.fixture
async def gateway(cluster: InProcess) -> GatewayProcess:
    return await cluster.gateway()


@pytest.fixture
async def served(cluster: InProcess, gateway: GatewayProcess) -> GatewayProcess:
    """A gateway with a worker."""
    await cluster.sidecar(await cluster.adapter())
    return gateway


async def post(gateway: GatewayProcess, path: str, body: Any) -> httpx.Response:
    return await gateway.client.post(path, json=body)


REFUSED = [
    ("embed", {"model": ONE, "input": 3}, 400, "schema", "input"),
    ("embed", {"model": ONE, "input": ["a", 3]}, 400, "schema", "input[1]"),
    ("embed", {"model": ONE, "input": ["a"] * 2049}, 400, "too_many_items", "input"),
    ("embed", {"model": ONE, "input": "a", "truncate": "no"}, 400, "schema", "truncate"),
    ("embed", {"model": ONE, "input": "a", "dimensions": -1}, 400, "schema", "dimensions"),
    ("embed", {"model": ONE, "input": "a", "dimensions": 3}, 400, "bad_dimensions", "dimensions"),
    ("embed", {"model": ONE, "input": "a", "options": []}, 400, "schema", "options"),
    ("embed", {"model": ONE, "input": "a", "options": {"num_ctx": 0}}, 400, "schema", "options.num_ctx"),
    ("embed", {"model": 3, "input": "a"}, 400, "schema", "model"),
    ("embed", {"input": "a"}, 400, "model_required", "model"),
    ("embed", {"model": "toy/score", "input": "a"}, 400, "unsupported_output", "model"),
    ("embed", {"model": "toy/on", "input": ""}, 404, None, "model"),
    ("embed", {"model": "toy/one:q4_0", "input": "a"}, 404, "profile_not_found", "model"),
    ("embeddings", {"model": ONE, "prompt": ["a"]}, 400, "schema", "prompt"),
    ("embeddings", {"model": "toy/on", "prompt": "a"}, 404, None, "model"),
    ("show", {"model": "toy/on"}, 404, None, "model"),
    ("show", {}, 400, "schema", "model"),
    ("show", {"name": 3}, 400, "schema", "name"),
]


@pytest.mark.parametrize(("route", "body", "status", "reason", "param"), REFUSED)
async def test_a_refusal_has_its_text_in_error_and_queues_nothing(
    cluster: InProcess, gateway: GatewayProcess, route: str, body: Any, status: int, reason: str | None, param: str
) -> None:
    answer = await post(gateway, f"/api/{route}", body)
    error = answer.json()
    detail = error["detail"]
    assert (answer.status_code, detail.get("reason"), detail["param"]) == (status, reason, param), error
    assert error["error"] == detail["message"] != ""
    assert STREAM not in cluster.server.streams or cluster.server.streams[STREAM].last_sequence == 0


@pytest.mark.parametrize("name", [ONE, f"{ONE}:latest", "Toy/One:latest"])
async def test_embed_returns_the_models_vectors_under_the_name_of_the_request(
    served: GatewayProcess, name: str
) -> None:
    body = {"model": name, "input": ["a", "", "bc"], "keep_alive": "5m", "options": {"temperature": 0}}
    answer = await post(served, "/api/embed", body)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    expected = [vector_of(ids_of(text)).tolist() for text in body["input"]]
    assert np.array_equal(np.array(reply["embeddings"], np.float32), np.array(expected, np.float32))
    assert reply["model"] == name
    assert reply["prompt_eval_count"] == reply["usage"]["total_tokens"] == 9
    assert reply["total_duration"] == round(reply["timing"]["total_time"] * 1_000_000) > 100_000
    assert reply["load_duration"] >= 0
    assert answer.headers["x-sie-model"] == ONE


@pytest.mark.parametrize("body", [{"input": ""}, {"input": []}, {}])
async def test_an_empty_input_is_answered_without_vectors_and_without_work(
    cluster: InProcess, gateway: GatewayProcess, body: Any
) -> None:
    answer = await post(gateway, "/api/embed", {"model": f"{ONE}:latest", **body})
    assert answer.json() == {"model": f"{ONE}:latest", "embeddings": []}
    assert (await post(gateway, "/api/embeddings", {"model": ONE})).json() == {"embedding": []}
    assert STREAM not in cluster.server.streams or cluster.server.streams[STREAM].last_sequence == 0


async def test_a_text_that_is_too_long_is_truncated_unless_truncate_is_false(served: GatewayProcess) -> None:
    cut = {"model": ONE, "input": ["a", "abcdefgh"], "options": {"num_ctx": 6}}
    answer = (await post(served, "/api/embed", cut)).json()
    assert answer["usage"]["truncated_items"] == [1]
    assert np.array_equal(np.array(answer["embeddings"][1], np.float32), vector_of(ids_of("abcd")))
    refused = await post(served, "/api/embed", {**cut, "truncate": False})
    assert refused.status_code == 400
    assert "input[1]" in refused.json()["error"]
    assert "the limit is 6" in refused.json()["error"]
    # more context than the model has is no error: Ollama's clients send a constant
    assert (await post(served, "/api/embed", {**cut, "options": {"num_ctx": 1 << 20}})).status_code == 200


async def test_embeddings_returns_one_vector_and_nothing_else(served: GatewayProcess) -> None:
    answer = await post(served, "/api/embeddings", {"model": f"{ONE}:latest", "prompt": "a"})
    reply = answer.json()
    assert reply.keys() == {"embedding"}
    assert np.array_equal(np.array(reply["embedding"], np.float32), vector_of(ids_of("a")))


async def test_lists_name_models_with_tags_that_embed_takes(served: GatewayProcess) -> None:
    listed = (await served.client.get("/api/tags")).json()["models"]
    names = [model["name"] for model in listed]
    assert names == [LATEST, f"{LATEST}:latest", f"{LATEST}:small", f"{ONE}:latest"]
    assert len({model["digest"] for model in listed}) == len(listed)
    for model in listed:
        assert model["model"] == model["name"]
        assert len(model["digest"]) == 64
        assert datetime.fromisoformat(model["modified_at"]).year == 1970
        assert model["details"] == {
            "parent_model": "",
            "format": "safetensors",
            "family": "toy",
            "families": ["toy"],
            "parameter_size": "",
            "quantization_level": "",
        }
        assert (await post(served, "/api/embed", {"model": model["name"], "input": "a"})).status_code == 200


async def test_ps_lists_what_workers_have_loaded(served: GatewayProcess) -> None:
    assert (await served.client.get("/api/ps")).json() == {"models": []}
    await post(served, "/api/embed", {"model": ONE, "input": "a"})

    async def loaded() -> Any:
        return (await served.client.get("/api/ps")).json()["models"]

    (model,) = await until_told(loaded, "the loaded model in the list")
    assert (model["name"], model["context_length"], model["size"]) == (f"{ONE}:latest", 512, model["size_vram"])
    assert datetime.fromisoformat(model["expires_at"]).year == 9999


async def test_show_describes_a_model(gateway: GatewayProcess) -> None:
    for body in ({"model": ONE}, {"name": f"{ONE}:latest", "verbose": True}):
        shown = (await post(gateway, "/api/show", body)).json()
        assert shown["model_info"] == {
            "general.architecture": "toy",
            "toy.context_length": 512,
            "toy.embedding_length": WIDTH,
        }
        assert shown["capabilities"] == ["embedding"]
    shown = (await post(gateway, "/api/show", {"model": "toy/score"})).json()
    assert (shown["capabilities"], "toy.embedding_length" in shown["model_info"]) == ([], False)
