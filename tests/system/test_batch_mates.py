"""An answer does not depend on what shares its batch."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import httpx
import numpy as np
import oracle
import pytest
from cluster import MODEL, running

ROUNDS = 200


@pytest.mark.timeout(300)
async def test_two_hundred_ragged_batches_equal_one_by_one(tmp_path: Path) -> None:
    """W1, W4: concurrent requests of several clients, seen to have run in one forward pass, against each text alone,
    float32.
    """
    rng = random.Random(5)
    texts = oracle.ragged_texts(120, seed=5, longest=120)
    args = ["--preload", MODEL, "--default-compute-precision", "float32", "--batcher-coalesce-ms", "50", "--no-spare"]
    with running(tmp_path, *args) as cluster:
        async with httpx.AsyncClient(timeout=60) as client:

            async def vectors(part: list[str]) -> tuple[np.ndarray, list[tuple[str, int]]]:
                content = json.dumps({"items": part})
                answer = await client.post(
                    f"{cluster.url}/v1/encode/{MODEL}", content=content, headers={"x-sie-explain": "1"}
                )
                body = answer.json()
                batches = [(entry["batch"]["id"], entry["batch"]["chunks"]) for entry in body["explain"]]
                return np.array([slot["dense"]["values"] for slot in body["items"]], np.float32), batches

            alone = {text: (await vectors([text]))[0][0] for text in dict.fromkeys(texts)}
            worst, shared, seen = 1.0, 0, set()
            while shared < ROUNDS:
                requests = [rng.choices(texts, k=rng.randint(1, 6)) for _ in range(rng.randint(2, 6))]
                answers = await asyncio.gather(*(vectors(part) for part in requests))
                for part, (got, batches) in zip(requests, answers, strict=True):
                    worst = min(worst, float(oracle.cosines(got, np.array([alone[text] for text in part])).min()))
                    for name, chunks in batches:
                        if chunks > 1 and name not in seen:
                            seen.add(name)
                            shared += 1
        assert shared >= ROUNDS
        assert worst >= 0.9999
        sample = texts[:32]
        assert oracle.cosines(np.array([alone[text] for text in sample]), oracle.encode(sample)).min() >= 0.9999
