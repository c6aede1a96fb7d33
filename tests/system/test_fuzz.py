"""Bent bodies at every inference route: each is answered, in time, with a success or an error that says what is wrong with it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fuzz
import httpx
import pytest
from fuzz import Case
from stack import Plan, Stack

CLIENTS = 16
ANSWERED_S = 30.0
GROWTH_BYTES = 24 << 20  # of a process over all of it, caches and the heap's own ways included


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    defaults = ",".join(f"{name}={fuzz.MODEL}" for name in ("embed", "embed_sparse", "embed_all", "rerank", "predict"))
    with Stack(tmp_path_factory.mktemp("fuzz"), Plan(environ={"SIE_DEFAULT_MODELS": defaults})) as stack:
        yield stack


async def send_all(url: str, cases: Iterator[Case]) -> Counter[tuple[int, str]]:
    """What came back, by status and code. Raises AssertionError for what must not."""
    seen: Counter[tuple[int, str]] = Counter()

    async def client(http: httpx.AsyncClient) -> None:
        for case in cases:
            answer = await http.post(case.path, content=case.body, headers=case.headers)
            told = f"{case.path} {case.headers} {case.body!r}: {answer.status_code} {answer.text[:500]}"
            assert 200 <= answer.status_code < 300 or 400 <= answer.status_code < 500, told
            code = ""
            if answer.status_code >= 400:
                error = json.loads(answer.content)
                code = error["code"]
                assert error["message"], told
                assert answer.headers["x-sie-error-code"] == code, told
            seen[answer.status_code, code] += 1

    async with httpx.AsyncClient(base_url=url, timeout=ANSWERED_S, trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    return seen


async def fuzzed(stack: Stack, count: int, seed: int) -> None:
    await send_all(stack.urls[0], fuzz.cases(seed, count // 5))
    before = stack.rss_bytes()
    seen = await send_all(stack.urls[0], fuzz.cases(seed + 1, count - count // 5))
    after = stack.rss_bytes()
    print("\n", dict(seen), {role: (after[role] - before[role]) >> 10 for role in after})
    assert sum(count for (status, _), count in seen.items() if status < 300) > count / 50, "some pass"
    for role in ("gateway", "sidecar"):
        assert after[role] - before[role] < GROWTH_BYTES, f"{role} grew by {(after[role] - before[role]) >> 20} MiB"
    async with httpx.AsyncClient(base_url=stack.urls[0], timeout=ANSWERED_S, trust_env=False) as http:
        assert (await http.post(f"/v1/encode/{fuzz.MODEL}", json={"items": ["still there"]})).status_code == 200


@pytest.mark.timeout(180)
async def test_5000_bent_bodies(stack: Stack) -> None:
    await fuzzed(stack, 5_000, seed=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_200000_bent_bodies(stack: Stack) -> None:
    await fuzzed(stack, 200_000, seed=2)


def test_a_seed_is_one_sequence(tmp_path: Path) -> None:
    assert list(fuzz.cases(7, 50)) == list(fuzz.cases(7, 50))
