"""Malformed bodies and odd values at every inference route: each request is answered in time, with a success or an
error that names the fault.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator

import fuzz
import httpx
import pytest
import shared
from fuzz import Case
from stack import Stack

CLIENTS = 16
ADMIN = shared.ADMIN
ANSWERED_S = 30.0
GROWTH_BYTES = 24 << 20  # of a process over all requests, with its caches and a fragmented heap


pytestmark = shared.TOY


@pytest.fixture(scope="module")
def stack(toy_stack: Stack) -> Stack:
    return toy_stack


async def send_all(url: str, cases: Iterator[Case]) -> Counter[tuple[int, str]]:
    """Return the answers by status and code. Raises AssertionError for an answer that must not come."""
    tally: Counter[tuple[int, str]] = Counter()
    findings: list[str] = []

    async def client(http: httpx.AsyncClient) -> None:
        for case in cases:
            answer = await http.request(case.method, case.path, content=case.body, headers=case.headers)
            code, fault = judged(answer)
            tally[answer.status_code, code] += 1
            if fault:
                findings.append(f"{fault}: {case} {answer.status_code} {answer.text[:300]}")

    async with httpx.AsyncClient(base_url=url, timeout=ANSWERED_S, trust_env=False) as http:
        await asyncio.gather(*(client(http) for _ in range(CLIENTS)))
    assert not findings, "\n".join([f"{len(findings)} findings", *findings[:5]])
    return tally


def judged(answer: httpx.Response) -> tuple[str, str]:
    """Return the code of an error, and what is wrong with an answer, or nothing."""
    if 200 <= answer.status_code < 300:
        return "", ""
    if not 400 <= answer.status_code < 500:
        return "", "a fault of ours"
    try:
        error = json.loads(answer.content)
        code = str(error["code"])
    except (ValueError, KeyError, TypeError):
        return "", "no envelope"
    message = error["error"] if isinstance(error["error"], str) else error["error"]["message"]
    wrong = not message or answer.headers.get("x-sie-error-code") != code
    return code, "no message, or another code in its header" if wrong else ""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("count", [150, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
async def test_bent_bodies(stack: Stack, count: int) -> None:
    # the first requests of each kind load libraries: 25 MiB in the gateway
    tally = await send_all(stack.urls[0], fuzz.cases(count, count // 2))
    before = stack.rss_bytes()
    tally += await send_all(stack.urls[0], fuzz.cases(count + 1, count - count // 2))
    after = stack.rss_bytes()
    assert sum(count for (status, _), count in tally.items() if status < 300) > count / 50, "some pass"
    for role in ("gateway", "sidecar"):
        assert after[role] - before[role] < GROWTH_BYTES, f"{role} grew by {(after[role] - before[role]) >> 20} MiB"
    async with httpx.AsyncClient(base_url=stack.urls[0], timeout=ANSWERED_S, trust_env=False) as http:
        assert (await http.post(f"/v1/encode/{fuzz.MODEL}", json={"items": ["still there"]})).status_code == 200


@pytest.mark.parametrize("every", [151, pytest.param(1, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
async def test_odd_values_in_every_place(stack: Stack, every: int) -> None:
    """Extension types of msgpack, bytes, arrays of any size and invalid text are values of any parameter. One of
    `every` cases is sent; 151 is prime, so no place and no value that the list combines is always left out.
    """
    tally = await send_all(stack.urls[0], fuzz.part(fuzz.everywhere(), every))
    assert tally.total() > 20_000 / every
    assert sum(count for (status, _), count in tally.items() if status == 400) > 10_000 / every
