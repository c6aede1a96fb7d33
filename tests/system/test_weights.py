"""Weights that arrive by themselves: a cluster whose model comes from a hub on loopback, killed on the way."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import local_models
import numpy as np
import psutil
import pytest
from cluster import Cluster, until
from hub_stub import COMMIT, HubStub
from unit.adapter import toys

from sie_store.weights.cache import LocalCache
from sie_store.weights.manifest import verify

WIDTH, WAIT_S = 128, 90.0
REPOSITORY, BIG = "org/model", "model.safetensors"
ENTRY = {"family": "text-encoder", "outputs": {"dense": WIDTH}, "max_tokens": 64, "run": {"pooling": "mean"}}
TEXT = " ".join(f"w{number}" for number in range(9))


def serving_adapters(cluster: Cluster) -> list[int]:
    """Return the adapters that serve: the parent of each is the adapter that forked it."""
    pids = cluster.pids("adapter")
    adapter_pids = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).ppid() in pids:
                adapter_pids.append(pid)
    return adapter_pids


def vector(url: str, model: str) -> np.ndarray:
    answer = httpx.post(f"{url}/v1/encode/{model}", json={"items": [{"text": TEXT}]}, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["items"][0]["dense"]["values"])


@pytest.mark.long
def test_two_workers_fetch_once_and_go_on_where_they_were_killed(tmp_path: Path) -> None:
    """Every adapter of the node gets kill -9 during the download, twice.

    1. Two workers are to load a model that only the hub has: one fetches, and both report how far it is.
    2. After a third and after two thirds of its bytes all adapters are killed.
    3. Bytes on the disk are not asked for again. In the end both have loaded what the hub has.
    """
    models = local_models.under(tmp_path / "models")
    folder = toys.save(models.weights / "path", "bert", hidden_size=WIDTH, intermediate_size=4 * WIDTH)
    models.add("path", ENTRY)
    models.add("hub", {**ENTRY, "weights": {"hub": REPOSITORY, "revision": COMMIT}})
    cache = LocalCache(tmp_path / "cache")
    size = (folder / BIG).stat().st_size
    go = threading.Event()
    bounds = [size // 3, 2 * size // 3, 1 << 60]

    def hold(name: str, sent: int) -> None:
        if name == BIG and sent >= bounds[0]:
            assert go.wait(WAIT_S)

    def on_disk() -> int:
        return max((path.stat().st_size for path in (tmp_path / "cache").rglob(f"{BIG}*")), default=0)

    with HubStub(before_piece=hold).serving() as hub, ThreadPoolExecutor(1) as threads:
        hub.add(REPOSITORY, folder)
        environ = {"HF_ENDPOINT": hub.url, "SIE_LOCAL_CACHE": str(cache.folder), "SIE_PRELOAD_MODELS": "test/hub"}
        cluster = Cluster(tmp_path / "data", *models.arguments, environ=environ, workers=2)
        try:
            starting = threads.submit(cluster.start, 2 * WAIT_S)

            def downloads() -> list[dict[str, Any]]:
                with contextlib.suppress(httpx.TransportError):
                    return list(httpx.get(f"{cluster.url}/v1/models/test/hub", timeout=5).json()["downloads"])
                return []

            def told_by_both(bound: int) -> list[dict[str, Any]]:
                progress = downloads()
                is_known = len(progress) == 2 and all(report["total_bytes"] for report in progress)
                return progress if is_known and max(report["done_bytes"] for report in progress) >= bound else []

            starts = [0]
            for bound in bounds[:2]:
                until(lambda bound=bound: on_disk() >= bound, WAIT_S, "so much is there")  # type: ignore[misc]
                if len(starts) == 1:  # a heartbeat, which brings the progress, takes seconds to come
                    reports = until(functools.partial(told_by_both, bound), WAIT_S, "both workers tell of it")
                    assert isinstance(reports, list)
                    assert {report["total_bytes"] for report in reports} == {
                        sum(map(len, hub.repositories[REPOSITORY].values()))
                    }
                    assert {report["worker"] for report in reports} == {"worker-0", "worker-1"}
                until(lambda: len(serving_adapters(cluster)) == 2, WAIT_S, "both adapters are there")
                assert len(hub.of("/api/models/")) == len(starts)
                killed = serving_adapters(cluster)
                assert len(killed) == 2
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)
                until(lambda killed=killed: not any(map(psutil.pid_exists, killed)), WAIT_S, "they are gone")  # type: ignore[misc]
                assert cache.find(REPOSITORY, COMMIT) is None
                starts.append(on_disk())
                bounds.pop(0)
                go.set()
                go = threading.Event()
            starting.result()
            np.testing.assert_allclose(vector(cluster.url, "test/hub"), vector(cluster.url, "test/path"), atol=1e-6)
            info = httpx.get(f"{cluster.url}/v1/models/test/hub", timeout=30).json()
            assert (info["worker_count"], info["downloads"]) == (2, [])
        finally:
            bounds[:] = [1 << 60]
            go.set()
            cluster.stop()
    manifest = cache.manifest(REPOSITORY, COMMIT)
    assert manifest is not None
    assert verify(cache.place(REPOSITORY, COMMIT), manifest) == []
    assert [request.start for request in hub.of("/cdn/") if request.path.endswith(BIG)] == starts
    assert len(hub.of("/api/models/")) == len(starts)
