"""Who is refused by a real cluster: nobody whom an idle or slow machine can answer; above capacity those that it
cannot, with a turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from cgroups import limited
from cluster import MODEL, Cluster, running

pytestmark = pytest.mark.serial


def pids(cluster: Cluster) -> list[int]:
    assert cluster.process is not None
    own = psutil.Process(cluster.process.pid)
    return [own.pid, *(child.pid for child in own.children(recursive=True))]


async def at_once(client: httpx.AsyncClient, url: str, count: int, **headers: str) -> list[httpx.Response]:
    sent = {name.replace("_", "-"): value for name, value in headers.items()}

    async def one(number: int) -> httpx.Response:
        return await client.post(
            f"{url}/v1/encode/{MODEL}", content=msgspec.json.encode({"items": [f"word{number}"]}), headers=sent
        )

    return await asyncio.gather(*map(one, range(count)))


def codes(answers: list[httpx.Response]) -> Counter[str]:
    return Counter(
        "200" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}" for answer in answers
    )


@pytest.mark.timeout(180)
async def test_as_many_requests_at_once_as_may_be_in_progress_are_all_answered_by_a_fresh_server(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as cluster:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=512)) as client:
            assert codes(await at_once(client, cluster.url, 512)) == {"200": 512}


@pytest.mark.timeout(300)
async def test_a_slow_machine_refuses_nothing_that_it_can_answer(tmp_path: Path) -> None:
    """Four tenths of a core for all processes, one request to warm up, then 40, 40 and 200 with budgets of 10 s: an
    estimate from batches of one text, of a worker without work, refused nearly all of them.
    """
    with running(tmp_path, "--no-spare") as cluster:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=256)) as client:
            with limited(pids(cluster), 0.4):
                assert codes(await at_once(client, cluster.url, 1)) == {"200": 1}
                found = [
                    codes(await at_once(client, cluster.url, count, x_sie_timeout_ms="10000"))
                    for count in (40, 40, 200)
                ]
    assert [each["200"] for each in found] == [40, 40, 200], found
