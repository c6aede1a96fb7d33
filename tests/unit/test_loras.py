"""LoRAs from the request to the adapter: real gateway and sidecar before a fake adapter that keeps a few of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from fake_adapter import FakeAdapter, ids_of, toy_entry, vector_of
from inprocess import GatewayProcess, InProcess

from sie_contracts.errors import LoraLoadFailed
from sie_sidecar import in_flight

TUNED = {
    "tuned": {"run": {"lora": "org/tuned"}},
    "other": {"run": {"lora": "org/other"}, "load": {"precision": "float32"}},
}
ENTRY = toy_entry(family="text-encoder")
WITH_PROFILES = toy_entry("toy/profiles", family="text-encoder", profiles=TUNED)


class Toy:
    """A cluster with one worker."""

    def __init__(self, adapter: FakeAdapter, gateway: GatewayProcess) -> None:
        self.adapter = adapter
        self.gateway = gateway

    async def ask(self, text: str, lora: str = "", model: str = "toy/one", **options: Any) -> httpx.Response:
        params = {**({"lora_id": lora} if lora else {}), **options}
        return await self.gateway.client.post(f"/v1/encode/{model}", json={"items": [text], "params": params})


@pytest.fixture
async def toy(tmp_path: Path) -> AsyncIterator[Toy]:
    async with InProcess(tmp_path, ENTRY, WITH_PROFILES) as cluster:
        adapter, gateway = await cluster.adapter(), await cluster.gateway()
        # with more, the LoRA of a batch that is sent ahead is checked too early
        await cluster.sidecar(adapter, SIE_RUST_PIPELINE_DEPTH="1")
        yield Toy(adapter, gateway)


def vector(answer: httpx.Response) -> list[float]:
    assert answer.status_code == 200, answer.text
    return list(msgspec.json.decode(answer.content)["items"][0]["dense"]["values"])


def right(answer: httpx.Response, text: str, lora: str = "") -> bool:
    return bool(np.allclose(vector(answer), vector_of(ids_of(text), lora), atol=1e-6))


async def test_a_lora_is_loaded_once_and_its_answers_have_another_fingerprint(toy: Toy) -> None:
    base = await toy.ask("a")
    answers = [await toy.ask("a", "org/x"), await toy.ask("b", "org/x"), await toy.ask("a", lora="", lora_id="org/y")]
    assert right(base, "a")
    assert [
        right(answer, text, lora)
        for answer, text, lora in zip(answers, "aba", ("org/x", "org/x", "org/y"), strict=True)
    ] == [True] * 3
    assert toy.adapter.lora_loads == ["org/x", "org/y"], "what is there is not asked for again"
    prints = [answer.headers["x-sie-fingerprint"] for answer in (base, *answers)]
    assert prints[1] == prints[2]
    assert len(set(prints)) == 3
    assert right(await toy.ask("a"), "a")


async def test_the_fingerprint_is_that_of_the_files_of_a_lora(toy: Toy) -> None:
    """The files of a LoRA may change under one name, and may have several names."""
    toy.adapter.digests = {"org/x": "1", "org/copy": "1", "org/y": "2"}
    prints = {
        name: (await toy.ask("a", name)).headers["x-sie-fingerprint"] for name in ("", "org/x", "org/copy", "org/y")
    }
    assert prints["org/x"] == prints["org/copy"]
    assert len(set(prints.values())) == 3
    await toy.adapter.die()
    toy.adapter.digests["org/x"] = "2"
    assert (await toy.ask("a", "org/x")).headers["x-sie-fingerprint"] == prints["org/y"]


async def test_only_equal_loras_share_a_batch(toy: Toy) -> None:
    await asyncio.gather(*(toy.ask("warm", lora) for lora in ("", "org/x", "org/y")))
    toy.adapter.hold_batches = True
    first = asyncio.create_task(toy.ask("first"))
    await toy.adapter.until(lambda adapter: adapter.running, "the first batch")
    names = ["", "org/x", "org/y"] * 4
    tasks = [asyncio.create_task(toy.ask(f"text {number}", lora)) for number, lora in enumerate(names)]
    await asyncio.sleep(0)
    toy.adapter.let_go()
    await first
    for number, (answer, lora) in enumerate(zip(await asyncio.gather(*tasks), names, strict=True)):
        assert right(answer, f"text {number}", lora)


async def test_a_lora_that_was_dropped_while_its_batch_waited_is_loaded_again(toy: Toy) -> None:
    """The client sees its answer, not the eviction."""
    toy.adapter.most_loras = 1
    toy.adapter.hold_batches = True
    first = asyncio.create_task(toy.ask("first"))
    await toy.adapter.until(lambda adapter: adapter.running, "the first batch")
    waiting = asyncio.create_task(toy.ask("a", "org/x"))
    await toy.adapter.until(lambda adapter: adapter.lora_loads == ["org/x"], "the first LoRA")
    task = asyncio.create_task(toy.ask("b", "org/y"))
    await toy.adapter.until(
        lambda adapter: adapter.loras["toy/one"] == ["org/y"], "the second LoRA in place of the first"
    )
    toy.adapter.let_go()
    assert right(await first, "first")
    assert right(await waiting, "a", "org/x")
    assert right(await task, "b", "org/y")
    assert toy.adapter.lora_loads.count("org/x") >= 2


async def test_more_loras_than_are_kept_all_get_their_answers(toy: Toy) -> None:
    toy.adapter.most_loras = 1
    names = [f"org/{number % 4}" for number in range(40)]
    answers = await asyncio.gather(*(toy.ask(f"text {number}", lora) for number, lora in enumerate(names)))
    for number, (answer, lora) in enumerate(zip(answers, names, strict=True)):
        assert right(answer, f"text {number}", lora)


async def test_a_cold_lora_is_held_for_a_while_and_then_the_client_is_told_to_come_back(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is 503 LORA_LOADING with Retry-After 1. The load goes on, and the base model is served meanwhile."""
    monkeypatch.setattr(in_flight, "HOLD_S", 0.05)
    await toy.ask("warm")
    toy.adapter.hold_loads = True
    answer = await toy.ask("a", "org/x")
    assert (answer.status_code, answer.json()["code"], answer.headers["retry-after"]) == (503, "LORA_LOADING", "1")
    assert right(await toy.ask("a"), "a")
    monkeypatch.setattr(in_flight, "HOLD_S", 30.0)
    again = asyncio.create_task(toy.ask("a", "org/x"))
    toy.adapter.let_go()
    assert right(await again, "a", "org/x")
    assert toy.adapter.lora_loads == ["org/x"]


async def test_a_failed_lora_is_told_at_once_and_tried_again_after_a_while(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with this LoRA get 500 without Retry-After. Requests with another LoRA succeed."""
    toy.adapter.refusals["org/x"] = LoraLoadFailed(
        "the LoRA org/x could not be loaded: no", extras={"lora_id": "org/x"}
    )
    for _ in range(2):
        answer = await toy.ask("a", "org/x")
        assert (answer.status_code, answer.json()["code"]) == (500, "LORA_LOAD_FAILED")
        assert "retry-after" not in answer.headers
        assert answer.json()["error"]["lora_id"] == "org/x"
    assert toy.adapter.lora_loads == ["org/x"]
    assert right(await toy.ask("a", "org/y"), "a", "org/y")
    toy.adapter.refusals.clear()
    monkeypatch.setattr(in_flight, "COOL_DOWN_S", 0.0)
    assert right(await toy.ask("a", "org/x"), "a", "org/x")


async def test_a_model_that_was_unloaded_gets_its_lora_again(toy: Toy) -> None:
    assert right(await toy.ask("a", "org/x"), "a", "org/x")
    await toy.adapter.die()
    assert right(await toy.ask("b", "org/x"), "b", "org/x")
    assert toy.adapter.lora_loads == ["org/x", "org/x"]
    toy.adapter.loaded.clear()  # evicted without a message to the sidecar
    toy.adapter.loras.clear()
    assert right(await toy.ask("c", "org/y"), "c", "org/y")
    assert toy.adapter.loads.count("toy/one") == 3


async def test_loras_of_profiles_load_with_the_model_that_serves_them(toy: Toy) -> None:
    """A profile with load options of its own is a separate copy of the weights, and its LoRA loads with this copy."""
    await toy.ask("a", model="toy/profiles")
    await toy.adapter.until(lambda adapter: adapter.lora_loads == ["org/tuned"], "the LoRA of the profile")
    answer = await toy.ask("a", model="toy/profiles:tuned")
    assert right(answer, "a", "org/tuned")
    assert right(await toy.ask("a", model="toy/profiles", profile="tuned"), "a", "org/tuned")
    assert toy.adapter.lora_loads == ["org/tuned"]
    assert right(await toy.ask("a", model="toy/profiles:other"), "a", "org/other")
    assert toy.adapter.lora_loads == ["org/tuned", "org/other"]


async def test_a_family_without_loras_refuses_and_two_names_must_agree(tmp_path: Path) -> None:
    async with InProcess(tmp_path, ENTRY, toy_entry("toy/two", family="toy")) as cluster:
        gateway = await cluster.gateway()
        await cluster.sidecar()

        async def reason(model: str, **params: str) -> tuple[int, str]:
            answer = await gateway.client.post(f"/v1/encode/{model}", json={"items": ["a"], "params": params})
            return answer.status_code, answer.json()["error"]["reason"]

        assert await reason("toy/two", lora_id="org/x") == (400, "lora_unsupported")
        assert await reason("toy/one", lora_id="org/x", lora="org/y") == (400, "lora_conflict")
