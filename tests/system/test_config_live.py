"""A model is added, changed, rolled back and removed in a live cluster under load: no request fails, and none mixes two
entries.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from cluster import until
from stack import Plan, Stack
from unit.adapter import toys

ADMIN = {"Authorization": "Bearer admin-token-of-a-test"}
MODELS = "/v1/configs/models"
MODEL = "live/bert"
TEXTS = [" ".join(f"w{(word * place) % 90 + 6}" for word in range(1, place + 2)) for place in range(40)]
SEEN_WITHIN_S = 1.0
CLIENTS = 4


@dataclass
class Clients:
    """Clients that send requests without a pause. `vectors` has the vector of each text by fingerprint; later answers
    must equal it.
    """

    urls: list[str]
    http: httpx.AsyncClient
    vectors: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    newest: dict[str, str] = field(default_factory=dict)  # the fingerprint of the last answer, by gateway
    answers: int = 0
    refusals: list[str] = field(default_factory=list)
    removed: bool = False  # whether the model may be unknown by now

    async def ask(self, url: str, texts: list[str]) -> None:
        answer = await self.http.post(f"{url}/v1/encode/{MODEL}", json={"items": texts})
        self.answers += 1
        if answer.status_code == 404 and self.removed:
            return
        if answer.status_code != 200:
            self.refusals.append(answer.text)
            return
        body, fingerprint = answer.json(), answer.headers["x-sie-fingerprint"]
        assert body["fingerprint"] == fingerprint != ""
        vector_by_text = self.vectors.setdefault(fingerprint, {})
        for text, item in zip(texts, body["items"], strict=True):
            vector = np.array(item["dense"]["values"])
            np.testing.assert_allclose(
                vector,
                vector_by_text.setdefault(text, vector),
                atol=1e-3,
                err_msg=f"{fingerprint} of {len(self.vectors)}",
            )
        self.newest[url] = fingerprint

    async def run(self, number: int) -> None:
        """Run one client: it sends single texts, and requests of many messages that several workers answer."""
        for turn in itertools.count(number):
            texts = TEXTS * 8 if turn % 5 == 0 else [TEXTS[turn % len(TEXTS)]]
            await self.ask(self.urls[turn % len(self.urls)], texts)

    async def until(self, condition: Any, event: str) -> float:
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(60):
                while not condition():
                    assert not self.refusals, self.refusals[0]
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"{event} did not come: {self.newest}") from None
        return time.perf_counter() - began_s


def entry_of(weights: Path) -> dict[str, Any]:
    return {
        "id": MODEL,
        "weights": {"path": str(weights)},
        "family": "text-encoder",
        "outputs": {"dense": 32},
        "max_tokens": 280,
        "run": {"pooling": "mean"},
        "load": {"precision": "float32"},
    }


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    environ = {"SIE_ADMIN_TOKEN": "admin-token-of-a-test", "SIE_HF_FALLBACK": "false", "SIE_MODEL_PATHS": str(tmp_path)}
    with Stack(
        tmp_path, Plan(models=("toy/other",), gateways=2, workers=(None, None), preload=False, environ=environ)
    ) as stack:
        yield stack


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_under_load_no_request_fails_and_each_is_of_one_revision(stack: Stack, tmp_path: Path) -> None:
    """Each answer's vectors are those of its fingerprint, whichever worker and gateway gave it."""
    weights = toys.save(tmp_path / "bert", "bert", marked=True)
    entry = entry_of(weights)
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        clients = Clients(stack.urls, http)

        async def write(method: str, path: str, body: Any = None) -> None:
            answer = await http.request(method, stack.config_url + MODELS + path, json=body, headers=ADMIN)
            assert answer.status_code in (200, 201), answer.text

        await write("POST", "", entry)
        began_s = time.perf_counter()
        while (await http.get(f"{stack.urls[1]}{MODELS}/{MODEL}")).status_code != 200:
            assert time.perf_counter() - began_s < 3 * SEEN_WITHIN_S, "the other gateway does not see the model"
        for url in stack.urls:
            await clients.ask(url, TEXTS)
        assert not clients.refusals, clients.refusals[0]
        (first,) = clients.vectors

        def status(url: str) -> dict[str, Any]:
            report: dict[str, Any] = httpx.get(f"{url}{MODELS}/{MODEL}/status", headers=ADMIN, timeout=60).json()
            return report

        await asyncio.to_thread(until, lambda: status(stack.urls[0])["all_bundles_acked"], 60, "both workers know it")
        (bundle,) = (await asyncio.to_thread(status, stack.config_url))["bundles"]
        assert (bundle["total_eligible_workers"], bundle["pending_workers"]) == (2, [])
        async with asyncio.TaskGroup() as group:  # a failed check of a client ends the group
            load = [group.create_task(clients.run(number)) for number in range(CLIENTS)]
            await write("PATCH", f"/{MODEL}", {"run": {"pooling": "cls"}})
            await clients.until(lambda: set(clients.newest.values()) == set(clients.vectors) - {first}, "the change")
            await write("POST", f"/{MODEL}/rollback", {"revision": 1})
            await clients.until(lambda: set(clients.newest.values()) == {first}, "the roll-back")
            for pooling in ("cls", "mean", "cls", "mean"):  # faster than loads can follow
                await write("PATCH", f"/{MODEL}", {"run": {"pooling": pooling}})
            await clients.until(lambda: set(clients.newest.values()) == {first}, "the last of many changes")
            answers = clients.answers
            await clients.until(lambda: clients.answers > answers + 20, "further answers")
            clients.removed = True
            await write("DELETE", f"/{MODEL}")
            answers = clients.answers
            await clients.until(lambda: clients.answers > answers + 20, "answers after the removal")
            for task in load:
                task.cancel()
        assert not clients.refusals, clients.refusals[0]
        mean, cls = clients.vectors[first], next(vectors for name, vectors in clients.vectors.items() if name != first)
        assert len(clients.vectors) == 2
        assert max(np.abs(mean[text] - cls[text]).max() for text in mean.keys() & cls.keys()) > 0.01
        for url in stack.urls:
            assert (await http.post(f"{url}/v1/encode/{MODEL}", json={"items": ["w7"]})).status_code == 404
