"""The quota of an adapter's processor time: lanes, admission and texts per second follow it."""

from __future__ import annotations

import asyncio
import re
import time

import httpx
import psutil
import pytest
from cluster import MODEL
from kubelet import Container, Node
from kubelet.release import CLIENT, GATEWAY, MARKS, SECRETS, WORKER, check_images, rendered

pytestmark = [pytest.mark.long, pytest.mark.serial, *MARKS]

FILE = "values-kind.yaml"
QUOTAS = (0.2, 0.5, 1.0, 2.0)
USERS = 6  # each has one request under way
WARM_S, MEASURED_S = 10.0, 30.0
LONG = ["harbour kernel winter planet " * 30] * 4  # the adapter then has nearly all of the work


@pytest.mark.parametrize("cores", QUOTAS)
async def test_an_adapter_runs_as_its_quota_has_cores(cores: float, rates: dict[float, float]) -> None:
    """The adapter has as many lanes as whole cores, at least one. A request to an idle worker is never refused."""
    check_images()
    adapter_has = {"adapter": {"resources": {"limits": {"cpu": str(cores), "memory": "6Gi"}}}}
    with Node.started(secrets=SECRETS) as node:
        await asyncio.to_thread(node.apply, rendered(FILE, workers={"common": adapter_has}))
        (pod,) = node.of(WORKER)
        adapter = pod.container("adapter")
        assert quota_of(adapter) == pytest.approx(cores)
        (lanes,) = {int(number) for line in adapter.log() for number in re.findall(r"lanes (\d+)", line)}
        assert lanes == min(psutil.cpu_count() or 1, max(1, int(cores)))
        async with httpx.AsyncClient(base_url=node.url(GATEWAY, 8080), headers=CLIENT, timeout=300) as client:
            assert await encoded(client, ["the model loads"]) == 200
            for texts in (["one"], LONG, ["two"], LONG):  # each is sent when the one before is answered
                assert await encoded(client, texts) == 200
            rates[cores] = await rate(client)
    print(f"{cores} cores: {rates[cores]:.1f} texts/s")


def test_texts_per_second_are_proportional_to_the_quota(rates: dict[float, float]) -> None:
    """The tolerance is 15 %. A quota of all cores is left out: clients and the other containers need some."""
    if rates.keys() != set(QUOTAS):
        pytest.skip("the tests of the quotas, which measure the rates, did not all run")
    within = {cores: rates[cores] / cores for cores in (0.5, 1.0, 2.0) if cores < (psutil.cpu_count() or 1)}
    assert len(within) >= 2, "this machine has too few cores"
    for cores, per_core in within.items():
        assert per_core == pytest.approx(rates[1.0], rel=0.15), (cores, rates)


@pytest.fixture(scope="module")
def rates() -> dict[float, float]:
    """Texts per second by quota, which the tests of the quotas fill in."""
    return {}


async def encoded(client: httpx.AsyncClient, texts: list[str]) -> int:
    answer = await client.post(f"/v1/encode/{MODEL}", json={"items": texts})
    return answer.status_code


async def rate(client: httpx.AsyncClient) -> float:
    """Return the texts per second between two marks, while there is always work."""
    began_s = time.monotonic() + WARM_S
    end_s = began_s + MEASURED_S
    counted = 0

    async def one() -> None:
        nonlocal counted
        while (asked_s := time.monotonic()) < end_s:
            assert await encoded(client, LONG) == 200
            answered_s = time.monotonic()
            # a request counts by the part of it that falls between the marks
            within_s = min(answered_s, end_s) - max(asked_s, began_s)
            counted += max(0.0, within_s) / (answered_s - asked_s) * len(LONG)

    await asyncio.gather(*(one() for _ in range(USERS)))
    return counted / MEASURED_S


def quota_of(container: Container) -> float:
    folder = container.cgroup("cpu")
    if (folder / "cpu.max").exists():
        quota, period = map(int, (folder / "cpu.max").read_text().split())
    else:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return quota / period
