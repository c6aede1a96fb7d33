"""The models API: the entry of one model, lists of models, and suggestions for an unknown one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_adapter import toy_entry
from inprocess import GatewayProcess, InProcess, Source, settings_of

from sie_broker.memory import MemoryServer
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.wire.heartbeats import Heartbeat, ModelStatus, ServedPrecision
from sie_gateway.fleet.lanes import ON_DISK_S, Fleet
from sie_gateway.operations.models import model_info
from sie_runtime.feed import packaged_catalogue

LACKS = "this CPU has neither AVX512-BF16 nor AMX instructions"


def told(precision: str | None, *served: ServedPrecision | None) -> dict[str, Any]:
    """Return the field `precision` of a model whose entry has this precision, with one worker for each of `served`."""
    entry = toy_entry("toy/one", load={"precision": precision} if precision else {})
    fleet = Fleet(MemoryServer().connect("gateway"), settings_of())
    for number, served_precision in enumerate(served):
        status = ModelStatus("toy/one", "loaded", precision=served_precision)
        fleet.note(Heartbeat(f"w{number}", "_default", "cpu", "default", ready=True, version="0", models=(status,)))
    precision_info: dict[str, Any] = model_info(Catalogue({entry.id: entry}), fleet, entry)["precision"]
    return precision_info


@pytest.mark.parametrize(
    ("precision", "served", "expected"),
    [
        ("bfloat16", (), ("bfloat16", [], None)),
        (None, (), (None, [], None)),
        (None, (ServedPrecision("bfloat16", "float16", "a reason"),), ("float16", ["bfloat16"], "a reason")),
        ("bfloat16", (ServedPrecision("float32", "bfloat16", LACKS),), ("bfloat16", ["float32"], LACKS)),
        ("float32", (ServedPrecision("float32", "float32"),), ("float32", ["float32"], None)),
        (
            "bfloat16",
            (ServedPrecision("float32", "bfloat16", LACKS), ServedPrecision("bfloat16", "bfloat16"), None),
            ("bfloat16", ["bfloat16", "float32"], LACKS),
        ),
    ],
)
def test_the_precision_that_is_asked_for_what_is_served_and_why(
    precision: str | None,
    served: tuple[ServedPrecision | None, ...],
    expected: tuple[str | None, list[str], str | None],
) -> None:
    assert tuple(told(precision, *served).values()) == expected


def test_the_size_of_a_download_is_that_of_the_entry_or_unknown() -> None:
    entries = [msgspec.structs.replace(toy_entry("toy/one"), download_bytes=91_000_000), toy_entry("toy/two")]
    catalogue = Catalogue({entry.id: entry for entry in entries})
    fleet = Fleet(MemoryServer().connect("gateway"), settings_of(), lambda: 0.0)
    assert [model_info(catalogue, fleet, entry)["download_bytes"] for entry in entries] == [91_000_000, None]


def test_a_model_is_on_disk_where_a_healthy_worker_says_so() -> None:
    now_s = 0.0
    fleet = Fleet(MemoryServer().connect("gateway"), settings_of(), lambda: now_s)
    entries = [toy_entry("toy/one"), toy_entry("toy/two")]
    catalogue = Catalogue({entry.id: entry for entry in entries})

    def told() -> list[bool]:
        return [model_info(catalogue, fleet, entry)["on_disk"] for entry in entries]

    assert told() == [False, False]
    now_s = ON_DISK_S
    fleet.note(Heartbeat("w0", "_default", "cpu", "default", ready=True, version="0", on_disk=("toy/two",)))
    assert told() == [False, True]
    now_s += settings_of().heartbeat_timeout_ms / 1000 + 1  # the worker is gone
    assert told() == [False, False]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry("toy/one")) as cluster:
        yield cluster


async def names(gateway: GatewayProcess, query: str) -> tuple[list[str], int | None]:
    reply = (await gateway.client.get(f"/v1/models{query}")).json()
    return [model["name"] for model in reply["models"]], reply.get("total")


async def test_a_part_of_the_catalogue_is_told_with_its_size(cluster: InProcess) -> None:
    cluster.source = Source(*(toy_entry(f"toy/{name}") for name in ("ant", "bee", "bear", "cat")))
    gateway = await cluster.gateway()
    assert await names(gateway, "") == (["toy/ant", "toy/bear", "toy/bee", "toy/cat"], None)
    assert await names(gateway, "?limit=2") == (["toy/ant", "toy/bear"], 4)
    assert await names(gateway, "?limit=1&filter=%20BE") == (["toy/bear"], 2)
    assert await names(gateway, "?filter=zebra&limit=5") == ([], 0)
    assert await names(gateway, "?loaded=true&limit=5") == ([], 0)
    assert await names(gateway, "?task=encode&limit=3") == (["toy/ant", "toy/bear", "toy/bee"], 4)
    for wrong in ("0", "1001", "x", "nan"):
        refused = await gateway.client.get(f"/v1/models?limit={wrong}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


@pytest.mark.parametrize(("accepted", "is_compressed"), [("gzip", True), ("gzip;q=0.00", False)])
async def test_long_answers_are_compressed_for_whoever_takes_that(
    cluster: InProcess, accepted: str, is_compressed: bool
) -> None:
    cluster.source = Source(*(toy_entry(f"toy/{number}") for number in range(20)))
    gateway = await cluster.gateway()
    answer = await gateway.client.get("/v1/models", headers={"accept-encoding": accepted})
    assert (answer.headers.get("content-encoding") == "gzip") == is_compressed
    assert answer.headers["vary"] == "Accept-Encoding"
    assert len(answer.json()["models"]) == 20
    short = await gateway.client.get("/v1/whoami", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in short.headers


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
