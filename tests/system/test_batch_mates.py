"""An answer does not depend on what shares its batch."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import numpy as np
import oracle
import pytest
import shared
from cluster import MODEL, Cluster

pytestmark = shared.OPEN


@pytest.mark.timeout(300)
@pytest.mark.parametrize("rounds", [3, pytest.param(200, marks=pytest.mark.long)])
async def test_ragged_batches_equal_one_by_one(open_cluster: Cluster, rounds: int) -> None:
    """Concurrent requests share at least `rounds` forward passes. Each vector equals that of its text alone, in
    float32.
    """
    rng = random.Random(5)
    texts = oracle.ragged_texts(60, seed=5, longest=80)
    async with httpx.AsyncClient(timeout=60) as client:

        async def vectors(part: list[str]) -> tuple[np.ndarray, list[tuple[str, int]]]:
            content = json.dumps({"items": part})
            answer = await client.post(
                f"{open_cluster.url}/v1/encode/{MODEL}", content=content, headers={"x-sie-explain": "1"}
            )
            body = answer.json()
            batches = [(entry["batch"]["id"], entry["batch"]["chunks"]) for entry in body["explain"]]
            return np.array([slot["dense"]["values"] for slot in body["items"]], np.float32), batches

        alone = {text: (await vectors([text]))[0][0] for text in dict.fromkeys(texts)}
        worst, shared_batches = 1.0, set[str]()
        while len(shared_batches) < rounds:
            requests = [rng.choices(texts, k=rng.randint(1, 6)) for _ in range(rng.randint(2, 6))]
            answers = await asyncio.gather(*(vectors(part) for part in requests))
            for part, (got, batches) in zip(requests, answers, strict=True):
                worst = min(worst, float(oracle.cosines(got, np.array([alone[text] for text in part])).min()))
                shared_batches |= {name for name, chunks in batches if chunks > 1}
    assert worst >= 0.9999
    sample = texts[:32]
    assert oracle.cosines(np.array([alone[text] for text in sample]), oracle.encode(sample)).min() >= 0.9999
