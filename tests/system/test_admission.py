"""Refusals by real processes with the fixed-cost adapter: no request that an idle or slow machine can answer is
refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import pytest
from cgroups import limited
from stack import Device, Plan, Stack

MODEL = "toy/one"
AT_A_CLIENT = 16  # connections of one httpx client: its cost per connection grows with their number


async def at_once(url: str, count: int, **headers: str) -> list[httpx.Response]:
    """Send `count` requests at once, each over a connection of its own."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}

    async def some(numbers: range) -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=AT_A_CLIENT)) as client:
            bodies = (msgspec.json.encode({"items": [f"word{number}"]}) for number in numbers)
            posts = (client.post(f"{url}/v1/encode/{MODEL}", content=body, headers=sent) for body in bodies)
            return await asyncio.gather(*posts)

    parts = (range(start, min(start + AT_A_CLIENT, count)) for start in range(0, count, AT_A_CLIENT))
    return [answer for answers in await asyncio.gather(*map(some, parts)) for answer in answers]


def codes(answers: list[httpx.Response]) -> Counter[str]:
    return Counter(
        "200" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}" for answer in answers
    )


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(300)
async def test_a_slow_machine_refuses_nothing_that_it_can_answer(tmp_path: Path) -> None:
    """All processes share 0.4 of a core. One request warms up the worker, then 40, 40 and 200 requests with budgets of
    10 s follow. A batch of one text costs nearly as much as one of hundreds: an estimate from batches of one text would
    refuse nearly all requests.
    """
    plan = Plan((MODEL,), workers=(Device(batch_ms=300.0, token_us=500.0),))
    with Stack(tmp_path, plan) as stack, limited([part.pid for part in stack.parts], 0.4):
        assert codes(await at_once(stack.urls[0], 1)) == {"200": 1}
        tallies = [codes(await at_once(stack.urls[0], count, x_sie_timeout_ms="10000")) for count in (40, 40, 200)]
    assert [tally["200"] for tally in tallies] == [40, 40, 200], tallies
