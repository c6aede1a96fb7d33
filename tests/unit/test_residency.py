"""Models that an operator has loaded before their first request, and unloaded: real gateways and sidecars before fake
adapters.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fake_adapter import FakeAdapter, toy_entry
from inprocess import GatewayProcess, InProcess, placing, until_told

from sie_broker import CoreMessage
from sie_contracts.wire import records, topology
from sie_contracts.wire.topology import Lane
from sie_sidecar.in_flight import Loading
from sie_sidecar.models import Hosting, ModelState

ADMIN, USER = "admin-token-of-a-test", "user-token-of-a-test"
TOKENS = {"SIE_ADMIN_TOKEN": ADMIN, "SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": USER}
LANE = Lane("_default", "_default", "default")
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, toy_entry("toy/one"), toy_entry("toy/two")) as cluster:
        yield cluster


async def served(cluster: InProcess) -> tuple[GatewayProcess, FakeAdapter]:
    """Return a gateway and the adapter of its only worker."""
    gateway, adapter = await cluster.gateway(**TOKENS), await cluster.adapter()
    await cluster.sidecar(adapter)
    await placing(cluster)
    return gateway, adapter


async def asked(gateway: GatewayProcess, action: str, model: str = "toy/one", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await gateway.client.post(f"/v1/models/{model}/{action}", headers={**AS_ADMIN, **named})


async def eventually(gateway: GatewayProcess, state: str, model: str = "toy/one") -> None:
    async def is_so() -> bool:
        answer = await gateway.client.get(f"/v1/models/{model}", headers=AS_ADMIN)
        return bool(answer.json()["state"] == state)

    await until_told(is_so, f"{model} is {state}")


async def test_a_model_is_loaded_without_any_request_and_a_second_load_says_that_it_is(cluster: InProcess) -> None:
    gateway, adapter = await served(cluster)
    adapter.hold_loads = True
    first = await asked(gateway, "load")
    assert (first.status_code, first.json()["state"]) == (202, "loading"), first.text
    await adapter.until(lambda it: it.loads == ["toy/one"], "the load")
    await eventually(gateway, "loading")
    again = await asked(gateway, "load")
    assert again.status_code == 202
    adapter.hold_loads = False
    adapter.let_go()
    await eventually(gateway, "loaded")
    done = await asked(gateway, "load")
    assert done.status_code == 200
    assert done.json() == {
        "name": "toy/one",
        "state": "loaded",
        "lanes": [
            {
                "model": "toy/one",
                "lane": str(LANE),
                "state": "loaded",
                "workers": [{"worker": "w0", "state": "loaded", "in_flight": 0}],
            }
        ],
    }
    answer = await gateway.encode("a", authorization=f"Bearer {USER}")
    assert (answer.status_code, adapter.loads) == (200, ["toy/one"])


async def test_a_worker_that_comes_later_loads_what_was_asked_for(cluster: InProcess) -> None:
    """The lane counts as wanted, so that a worker of it is started."""
    gateway = await cluster.gateway(**TOKENS)
    reply = await asked(gateway, "load")
    assert (reply.status_code, reply.json()["lanes"][0]["state"]) == (202, "provisioning")

    async def wanted() -> bool:
        bucket = await cluster.server.connect("reader").key_value(topology.DEMAND_BUCKET)
        entry = await bucket.get(topology.lane_key(LANE))
        return entry is not None and entry.value is not None and records.decode_demand(entry.value).at_s > 0

    await until_told(wanted, "the record of demand")
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    await eventually(gateway, "loaded")
    assert adapter.loads == ["toy/one"]


async def test_an_unload_waits_for_what_runs_and_the_next_request_loads_it_again(cluster: InProcess) -> None:
    gateway, adapter = await served(cluster)
    adapter.hold_batches = True
    request = asyncio.create_task(gateway.encode("a", authorization=f"Bearer {USER}"))
    await adapter.until(lambda it: it.running == 1, "the batch")
    reply = await asked(gateway, "unload")
    assert (reply.status_code, reply.json()["state"]) == (202, "unloading")
    assert reply.json()["lanes"][0]["workers"][0]["worker"] == "w0"
    assert (await asked(gateway, "unload")).status_code == 202  # a second unload is accepted too
    assert adapter.releases == []
    adapter.hold_batches = False
    adapter.let_go()
    assert (await request).status_code == 200
    await adapter.until(lambda it: it.releases == ["toy/one"], "the unload")
    await eventually(gateway, "available")
    repeated = await asked(gateway, "unload")
    assert (repeated.status_code, repeated.json()["state"], repeated.json()["lanes"]) == (200, "available", [])
    answer = await gateway.encode("b", authorization=f"Bearer {USER}")
    assert answer.status_code == 200
    assert (adapter.loads, adapter.releases) == (["toy/one", "toy/one"], ["toy/one"])


async def test_a_load_ahead_of_work_does_not_load_a_model_that_is_being_unloaded(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapter has the request to unload, and has not replied yet."""
    loading: list[Loading] = []
    ahead: list[asyncio.Task[None]] = []
    release = Hosting._release

    async def releasing(hosting: Hosting, hosted: ModelState) -> None:
        loading[0].ahead(["toy/one"])
        ahead.extend(task for task in asyncio.all_tasks() if task.get_name() == "load ahead")
        await release(hosting, hosted)

    async def noted(self: Loading, message: CoreMessage) -> None:
        loading.append(self)
        await on_residency(self, message)

    on_residency = Loading.on_residency
    monkeypatch.setattr(Loading, "on_residency", noted)
    monkeypatch.setattr(Hosting, "_release", releasing)
    gateway, adapter = await served(cluster)
    assert (await gateway.encode("a", authorization=f"Bearer {USER}")).status_code == 200
    await asked(gateway, "unload")
    await adapter.until(lambda it: it.releases, "the unload")
    assert len(ahead) == 1
    await asyncio.gather(*ahead)
    assert (adapter.loads, adapter.releases) == (["toy/one"], ["toy/one"])


async def test_a_load_takes_an_unload_back_that_still_waits(cluster: InProcess) -> None:
    gateway, adapter = await served(cluster)
    adapter.hold_batches = True
    request = asyncio.create_task(gateway.encode("a", authorization=f"Bearer {USER}"))
    await adapter.until(lambda it: it.running == 1, "the batch")
    await asked(gateway, "unload")
    assert (await asked(gateway, "load")).json()["state"] == "loaded"
    adapter.hold_batches = False
    adapter.let_go()
    assert (await request).status_code == 200
    await asked(gateway, "load", "toy/two")
    await eventually(gateway, "loaded", "toy/two")
    assert (adapter.loads, adapter.releases) == (["toy/one", "toy/two"], [])


@pytest.mark.parametrize("action", ["load", "unload"])
async def test_what_is_not_there_is_refused_as_for_inference(cluster: InProcess, action: str) -> None:
    gateway, adapter = await served(cluster)
    unknown = await asked(gateway, action, "toy/on")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "MODEL_NOT_FOUND")
    assert "did you mean toy/one" in unknown.json()["error"]["message"]
    pool = await asked(gateway, action, X_SIE_Pool="none")
    assert (pool.status_code, pool.json()["error"]["code"]) == (404, "POOL_NOT_FOUND")
    profile = await asked(gateway, action, X_SIE_MACHINE_PROFILE="h100")
    assert (profile.status_code, profile.json()["error"]["reason"]) == (404, "gpu_not_found")
    for token, status in ((USER, 403), ("", 401)):
        headers = {"authorization": f"Bearer {token}"} if token else {}
        refused = await gateway.client.post(f"/v1/models/toy/one/{action}", headers=headers)
        assert refused.status_code == status
    assert (adapter.loads, adapter.releases) == ([], [])
