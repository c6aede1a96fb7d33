"""A request is served by one entry of its model. A worker without this entry waits for it. A worker with a newer entry
sends the work back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from direct import ENTRY, Direct, is_right, reasons
from inprocess import InProcess, Source, until, until_told

from sie_adapter.engine.device import MemoryUse
from sie_adapter.engine.engines import TORCH
from sie_adapter.memory.residency import DeviceMemory, ResidentModels
from sie_contracts.errors import ModelLoading
from sie_contracts.models.entries import Profile, RunDefaults
from sie_gateway.inference import handler
from sie_sidecar import intake

CHANGED = ["NOT_READY config_changed"]
OTHER = msgspec.structs.replace(ENTRY, run=RunDefaults(pooling="cls"))


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Direct]:
    async with Direct(tmp_path) as cluster:
        yield cluster


async def test_a_worker_reads_what_a_gateway_knows_already_and_sends_back_what_is_older(cluster: Direct) -> None:
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter, SIE_WORKER_CONFIG_POLL_INTERVAL_MS="600000")
    first = await cluster.result(await cluster.publish("a", config_revision=1))
    assert reasons(first) == [""]
    cluster.source.put(OTHER)
    newer = await cluster.publish("b", config_revision=2)
    second = await cluster.result(newer)
    assert is_right(second, newer, 0)
    assert (cluster.source.exports, len({first.fingerprint, second.fingerprint, ""})) == (2, 3)
    assert reasons(await cluster.result(await cluster.publish("c", config_revision=1))) == CHANGED
    assert reasons(await cluster.result(await cluster.publish("d"))) == [""]  # the gateway names no revision
    await cluster.left(0)


async def test_a_worker_that_cannot_learn_of_an_entry_leaves_the_work_to_others(
    cluster: Direct, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "CATCH_UP_S", 0.05)
    lagging, knowing = Source(ENTRY), cluster.source
    await cluster.sidecar(source=lagging)
    item = await cluster.publish("a", config_revision=2)
    await until(lambda: lagging.polls, "a look at the catalogue")
    knowing.put(OTHER)
    await cluster.sidecar(source=knowing)
    result = await cluster.result(item)
    assert (result.worker, reasons(result)) == ("w1", [""])


async def test_work_that_waits_for_a_load_goes_back_when_the_entry_changes(cluster: Direct) -> None:
    adapter = await cluster.adapter()
    adapter.hold_loads = True
    await cluster.sidecar(adapter)
    before = await cluster.publish("a", config_revision=1)
    await adapter.until(lambda adapter: adapter.loads, "the load")
    cluster.source.put(OTHER)
    after = await cluster.publish("b", config_revision=2)
    await until(lambda: cluster.source.exports >= 2, "the newer entry")
    adapter.let_go()
    assert reasons(await cluster.result(after)) == [""]
    assert reasons(await cluster.result(before)) == CHANGED


@pytest.mark.parametrize("waits_for", ["the load", "the device"])
async def test_work_of_a_profile_that_the_changed_entry_lacks_goes_back(cluster: Direct, waits_for: str) -> None:
    cluster.source.put(msgspec.structs.replace(ENTRY, profiles={"fast": Profile(run=RunDefaults(normalize=False))}))
    adapter = await cluster.adapter()
    adapter.hold_loads, adapter.hold_batches = waits_for == "the load", waits_for == "the device"
    sidecar = await cluster.sidecar(adapter)
    earlier = [await cluster.publish("b", config_revision=2)]
    if waits_for == "the device":
        await adapter.until(lambda adapter: adapter.running == 1, "a batch that runs")
        earlier.append(await cluster.publish("c", config_revision=2))
        await adapter.until(lambda adapter: adapter.running == 2, "a batch that waits at the adapter")
    before = await cluster.publish("a", config_revision=2, profile="fast")

    async def held() -> bool:
        return await sidecar.metric("sie_queue_depth", model=ENTRY.id) == len(earlier) + 1

    await until_told(held, "all work at the worker")
    cluster.source.put(OTHER)
    after = await cluster.publish("d", config_revision=3)
    await until(lambda: cluster.source.exports == 2, "the newer entry")
    if waits_for == "the device":
        await adapter.until(lambda adapter: len(adapter.loads) == 2, "the load of the newer entry")
    adapter.let_go()
    assert reasons(await cluster.result(after)) == [""]
    assert reasons(await cluster.result(before)) == CHANGED
    await cluster.left(0)


async def test_what_is_at_the_device_keeps_the_fingerprint_of_the_copy_that_runs_it(cluster: Direct) -> None:
    adapter = await cluster.adapter()
    await cluster.sidecar(adapter)
    first = await cluster.result(await cluster.publish("a", config_revision=1))
    adapter.hold_batches = True
    running = await cluster.publish("b", config_revision=1)
    await adapter.until(lambda adapter: len(adapter.batches) == 2, "the batch")
    cluster.source.put(OTHER)
    after = await cluster.publish("c", config_revision=2)
    await adapter.until(lambda adapter: len(adapter.loads) == 2, "the load of the changed entry")
    adapter.let_go()
    old, new = await cluster.result(running), await cluster.result(after)
    assert (reasons(old), reasons(new)) == ([""], [""])
    assert old.fingerprint == first.fingerprint != new.fingerprint
    assert {batch.fingerprint for batch in adapter.batches} == {first.fingerprint, new.fingerprint}


def test_an_adapter_does_not_run_a_batch_on_another_copy_than_its_own() -> None:
    weights = SimpleNamespace(precision="float32", attention="toy", memory_bytes=1, engine_choice=TORCH)
    residency = ResidentModels(lambda resolved: weights, DeviceMemory(lambda more: MemoryUse(0, 1), lambda: None, 90.0))
    resident = residency.ensure(ENTRY.id, ENTRY)
    before = resident.fingerprint
    with residency.use(ENTRY.id, before):
        pass
    residency.ensure(ENTRY.id, OTHER)
    with pytest.raises(ModelLoading), residency.use(ENTRY.id, before):
        pass
    with residency.use(ENTRY.id):
        pass


async def test_a_gateway_understands_a_request_anew_when_its_workers_know_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has the changed entry. The gateway reads it when the work comes back, and the client sees one answer.
    If the gateway does not get the entry, the client gets 503 with Retry-After.
    """
    monkeypatch.setattr(handler, "RENEWED_WITHIN_S", 0.05)
    own, workers = Source(ENTRY), Source(ENTRY)
    async with InProcess(tmp_path) as cluster:
        gateway = await cluster.gateway(source=own)
        workers.put(OTHER)
        await cluster.sidecar(source=workers)
        refused = await gateway.encode("x")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["reason"]) == (503, "NOT_READY", "config_changed")
        assert refused.headers["retry-after"] == "1"
        monkeypatch.setattr(handler, "RENEWED_WITHIN_S", 30.0)
        own.put(OTHER)
        answer = await gateway.encode("x")
        assert answer.status_code == 200
        assert answer.headers["x-sie-fingerprint"] != ""
