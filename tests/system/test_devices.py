"""Four devices of one worker: one sidecar, four adapters, under `sie serve` and with the fixed-cost adapter."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from cluster import MODEL, Cluster, running, scraped, until
from load import Load, answered
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


def loaded(cluster: Cluster) -> list[str]:
    """Return the devices that have the model."""
    names = [f"cpu:{number}" for number in range(DEVICES)]
    return [name for name in names if cluster.metric("sie_model_loaded", model=MODEL, device=name)]


def test_every_device_is_told(cluster: Cluster) -> None:
    for number in range(DEVICES):
        assert cluster.metric("sie_device_lanes", device=f"cpu:{number}") >= 1
    (worker,) = httpx.get(f"{cluster.url}/health", timeout=30).json()["workers"]
    assert worker["device"] == ",".join(f"cpu:{number}" for number in range(DEVICES))
    assert worker["gpu_count"] == 0


async def test_a_killed_adapter_loses_nothing(cluster: Cluster) -> None:
    """The adapter that runs everything gets kill -9, under a light load."""
    load = Load(cluster.urls, pause_s=0.5, expected=answered(cluster.url))
    tasks = load.start(4)
    try:
        await load.successes_after(time.monotonic(), 4, WITHIN_S)
        victim = loaded(cluster)[0]
        killed_s = time.monotonic()
        os.kill(ready(cluster)[victim], signal.SIGKILL)
        await load.successes_after(killed_s, 12, WITHIN_S)
    finally:
        await load.stop(tasks)
    assert not load.wrong()
    assert {(outcome.status, outcome.code) for outcome in load.outcomes} == {(200, "")}


def test_a_model_moves_to_another_device(cluster: Cluster) -> None:
    """The adapters of all devices that have the model are killed, one after the other."""
    assert cluster.encode(["before"]).status_code == 200
    for name in loaded(cluster):
        os.kill(ready(cluster)[name], signal.SIGKILL)
        answer = cluster.encode(["after"])
        assert answer.status_code == 200, answer.text
    assert loaded(cluster)


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
