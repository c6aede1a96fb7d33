"""Four devices of one worker: one sidecar, four adapters, under `sie serve` and with the fixed-cost adapter."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator

import pytest
from cluster import MODEL, Cluster, running, scraped, until
from load import Load
from stack import Device, Plan, Stack

DEVICES = 4
CLIENTS = 48  # more than one device can answer at once
TOY = "toy/one"
WITHIN_S = 60.0  # bound of what must happen, on a busy machine
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="several devices need Linux")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # four adapters on few cores: imports and loads take longer than the default
    environ = {"SIE_DEVICE": ",".join(DEVICES * ["cpu"]), "SIE_LOAD_HOLD_S": "29"}
    with running(tmp_path_factory.mktemp("devices"), "--preload", MODEL, environ=environ) as cluster:
        until(lambda: len(ready(cluster)) == DEVICES, WITHIN_S, "an adapter for each device", cluster.log)
        yield cluster


def ready(cluster: Cluster) -> dict[str, int]:
    """Return the present process of each device, from the adapters' log."""
    pids = {}
    for line in cluster.lines:
        if "adapter ready on" in line:
            path, _, pid = line.rpartition("adapter ready on ")[2].partition(", pid ")
            number = path.rpartition(".sock")[2].lstrip(".") or "0"
            pids[f"cpu:{number}"] = int(pid)
    return pids


# a device whose speed does not depend on the machine


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    device = Device(batch_ms=200.0, devices=DEVICES)
    with Stack(tmp_path_factory.mktemp("stack"), Plan((TOY,), 1, (device,))) as stack:
        yield stack


def copies(stack: Stack) -> list[str]:
    url = f"{stack.workers[0].url}/metrics"
    names = [f"clock:{number}" for number in range(DEVICES)]
    return [name for name in names if scraped(url, "sie_model_loaded", model=TOY, device=name)]


@pytest.mark.timeout(240)
async def test_a_killed_adapter_slows_its_share_alone_and_loses_nothing(stack: Stack) -> None:
    """More load than one device can bear spreads over the devices; then one of them is killed and stays away for a
    while.
    """
    worker, load = stack.workers[0], Load(stack.urls, model=TOY)
    tasks = load.start(CLIENTS)
    try:
        await asyncio.to_thread(until, lambda: len(copies(stack)) > 1, WITHIN_S, "a copy of the model", stack.log)
        killed_s = time.monotonic()
        worker.adapter.kill()
        await load.successes_after(killed_s, 2 * CLIENTS, WITHIN_S)
        assert "clock:0" not in copies(stack)
        worker.adapter.start()
        await asyncio.to_thread(until, lambda: "clock:0" in copies(stack), WITHIN_S, "its copy again", stack.log)
    finally:
        await load.stop(tasks)
    assert not load.wrong()
    assert {(outcome.status, outcome.code) for outcome in load.outcomes} == {(200, "")}
