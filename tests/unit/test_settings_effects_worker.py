"""Effects of the worker's settings: the real sidecar with a fake adapter on a real socket, and with a gateway where
a test needs it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_adapter import TOKENIZER, toy_entry
from inprocess import InProcess, SidecarProcess, Source, free_port, settings_of, until, until_told

from sie_contracts.errors import ModelLoadFailed
from sie_contracts.models.catalogue import Catalogue
from sie_contracts.settings import SettingError
from sie_contracts.wire import ipc, messages, topology
from sie_contracts.wire.configs import ConfigDelta
from sie_sidecar.models import Hosting

ONE, TWO = toy_entry(), toy_entry("toy/two")


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, ONE, TWO) as cluster:
        yield cluster


# batches in flight


async def peak_of_batches(cluster: InProcess, expected: int, **environ: str) -> float:
    """Return the most batches that a held adapter gets while the sidecar has more work. The gauge of batches must show
    the same number.
    """
    gateway = await cluster.gateway()
    adapter = await cluster.adapter()
    sidecar = await cluster.sidecar(adapter, SIE_BATCHER_MAX_BATCH_REQUESTS="1", **environ)
    adapter.hold_batches = True
    sent = [asyncio.create_task(gateway.encode(str(number))) for number in range(expected + 4)]
    await adapter.until(lambda adapter: adapter.running >= expected, f"{expected} batches at the adapter")

    async with asyncio.timeout(30):
        while await sidecar.metric("sie_queue_depth") <= expected:
            pass  # the scrape yields to the event loop
    gauge = await sidecar.metric("sie_batches_in_progress")
    adapter.let_go()
    assert [answer.status_code for answer in await asyncio.gather(*sent)] == [200] * len(sent)
    assert gauge == adapter.peak_running
    return gauge


@pytest.mark.parametrize(
    ("variable", "depth"), [({}, 2), ({"SIE_RUST_PIPELINE_DEPTH": "1"}, 1), ({"SIE_RUST_PIPELINE_DEPTH": "3"}, 3)]
)
async def test_the_pipeline_depth_is_how_many_batches_are_sent_ahead(
    cluster: InProcess, variable: dict[str, str], depth: int
) -> None:
    """SIE_RUST_PIPELINE_DEPTH."""
    assert await peak_of_batches(cluster, depth, SIE_MAX_CONCURRENT_BATCHES="8", **variable) == depth


@pytest.mark.parametrize(
    ("lanes", "environ", "most", "connections"),
    [
        (2, {}, 3, 7),
        (80, {}, 64, 65),
        (8, {"SIE_MAX_CONCURRENT_BATCHES": "4"}, 4, 5),
        (8, {"SIE_IPC_POOL_SIZE": "5"}, 5, 6),
        (8, {"SIE_MACHINE_PROFILE": "mine"}, 4, 5),
    ],
)
async def test_a_worker_on_a_cpu_has_a_batch_for_each_lane_unless_somebody_wrote_how_many(
    tmp_path: Path, lanes: int, environ: dict[str, str], most: int, connections: int
) -> None:
    """SIE_MAX_CONCURRENT_BATCHES: `sie serve` and the chart set the machine profile cpu. The number of connections
    follows the number of batches that can run.
    """
    entries = [toy_entry(f"toy/model-{number}") for number in range(most + 2)]
    async with InProcess(tmp_path, *entries) as cluster:
        gateway = await cluster.gateway()
        adapter = await cluster.adapter(lanes=lanes)
        sidecar = await cluster.sidecar(adapter, **{"SIE_MACHINE_PROFILE": "cpu", **environ})
        assert adapter.connections == connections
        adapter.hold_batches = True
        sent = [asyncio.create_task(gateway.encode("x", model=entry.id)) for entry in entries]
        await adapter.until(lambda adapter: adapter.running >= most, f"{most} batches at the adapter")
        async with asyncio.timeout(30):
            while await sidecar.metric("sie_queue_depth") < len(entries):
                pass  # the scrape yields to the event loop
        assert adapter.peak_running == most
        adapter.let_go()
        assert [answer.status_code for answer in await asyncio.gather(*sent)] == [200] * len(sent)


SHOWN: list[tuple[dict[str, str], dict[str, Any], int]] = [  # variables, fields of the heartbeat, connections
    ({}, {"worker": "w0", "gpu_count": 1, "machine_profile": "_default", "gpu": "NVIDIA H100", "pool": "_default"}, 5),
    ({"SIE_WORKER_ID": "Rack-7.gpu-1"}, {"worker": "rack-7.gpu-1"}, 5),
    ({"SIE_GPU_COUNT": "2"}, {"gpu_count": 2}, 5),
    ({"SIE_GPU_COUNT": "0"}, {"gpu_count": 0}, 7),  # the values of a CPU
    ({"SIE_GPU_TYPE": "L4"}, {"gpu": "l4", "machine_profile": "l4"}, 5),
    ({"SIE_GPU_TYPE": "l4", "SIE_MACHINE_PROFILE": "l4-spot"}, {"gpu": "l4", "machine_profile": "l4-spot"}, 5),
    ({"SIE_MACHINE_PROFILE": "h100"}, {"gpu": "NVIDIA H100", "machine_profile": "h100"}, 5),
    ({"SIE_MAX_CONCURRENT_BATCHES": "6"}, {}, 7),
    ({"SIE_IPC_POOL_SIZE": "2"}, {}, 3),
]


async def test_what_a_worker_is_shows_in_its_heartbeat_and_at_its_adapter(cluster: InProcess) -> None:
    """SIE_WORKER_ID, SIE_GPU_COUNT, SIE_GPU_TYPE, SIE_MACHINE_PROFILE, SIE_IPC_POOL_SIZE: unset, the size of the pool
    follows SIE_MAX_CONCURRENT_BATCHES, and one more connection carries control.
    """
    await cluster.gateway()
    for environ, fields, connections in SHOWN:
        adapter = await cluster.adapter(f"{len(cluster.adapters)}.sock", gpu="NVIDIA H100")
        sidecar = await cluster.sidecar(adapter, **{"SIE_WORKER_ID": "w0", **environ})
        beat = cluster.last_beat(fields.get("worker", "w0"), ready=True)
        assert {name: getattr(beat, name) for name in fields} == fields, environ
        assert adapter.connections == connections, environ
        await sidecar.end()


# the adapter's health


async def test_the_sidecar_speaks_on_its_socket_path_and_its_log_names_it_while_nobody_is_there(
    cluster: InProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIE_IPC_SOCKET_PATH: the probes do not show the path."""
    monkeypatch.setattr("sie_runtime.process.QUIET_S", 0.0)
    caplog.set_level(logging.INFO, "sie")
    gateway = await cluster.gateway()
    path = str(cluster.folder / "elsewhere.sock")
    sidecar = await cluster.sidecar(ready=False, SIE_IPC_SOCKET_PATH=path)
    beat = await until(lambda: cluster.last_beat("w0", ready=False), "a heartbeat that says not ready")
    assert not beat.ready
    answer = await sidecar.get("/readyz")
    assert (answer.status_code, answer.text) == (503, "not ready: no adapter is connected")
    await until(lambda: path in caplog.text, "a line that names the path")
    adapter = await cluster.adapter("elsewhere.sock")
    assert (await gateway.encode("x")).status_code == 200
    assert adapter.batches


async def test_the_adapter_is_pinged_at_the_interval(cluster: InProcess) -> None:
    """SIE_WORKER_PING_INTERVAL_MS: in the time of ten pings at 100 ms there are one or two at 1000 ms."""
    await cluster.gateway()
    often, seldom = await cluster.adapter("often.sock"), await cluster.adapter("seldom.sock")
    await cluster.sidecar(often, SIE_WORKER_PING_INTERVAL_MS="100")
    await cluster.sidecar(seldom, SIE_WORKER_PING_INTERVAL_MS="1000")
    start, seldom_start, start_s = len(often.pings), len(seldom.pings), asyncio.get_running_loop().time()
    await often.until(lambda adapter: len(adapter.pings) >= start + 10, "ten pings")
    seconds = asyncio.get_running_loop().time() - start_s  # 1 s, or more on a slow machine
    assert len(seldom.pings) - seldom_start <= seconds + 1
    assert min(later - earlier for earlier, later in zip(often.pings, often.pings[1:], strict=False)) >= 0.09


async def test_a_frozen_adapter_makes_the_worker_unready_after_so_many_intervals(cluster: InProcess) -> None:
    """SIE_WORKER_READYZ_STALE_MULT: the default is three intervals. With a larger value the worker is unready later."""
    await cluster.gateway()
    soon, late = await cluster.adapter("soon.sock"), await cluster.adapter("late.sock")
    quick = await cluster.sidecar(soon, SIE_WORKER_PING_INTERVAL_MS="100")
    patient = await cluster.sidecar(late, SIE_WORKER_PING_INTERVAL_MS="100", SIE_WORKER_READYZ_STALE_MULT="30")
    soon.freeze()
    late.freeze()
    since_s = asyncio.get_running_loop().time()

    async def unready(sidecar: SidecarProcess) -> float:
        async def refused() -> httpx.Response | None:
            answer = await sidecar.get("/readyz")
            return None if answer.status_code == 200 else answer

        answer = await until_told(refused, "a worker that is not ready")
        assert answer.text == "not ready: the adapter does not answer"
        return asyncio.get_running_loop().time() - since_s

    assert await unready(quick) >= 0.2
    assert await unready(patient) >= 2.9


# identity


async def test_requests_are_routed_by_the_machine_profile(cluster: InProcess) -> None:
    """SIE_MACHINE_PROFILE: a worker of another profile gets none of the work. With SIE_GPU_TYPE the gateway queues work
    for this type before any worker is up.
    """
    gateway = await cluster.gateway(SIE_GPU_TYPE="l4")
    early = asyncio.create_task(gateway.encode("before any worker"))
    await until(lambda: cluster.server.streams["WORK__default"].messages, "the message in the stream")
    named, idle_adapter = await cluster.adapter("named.sock"), await cluster.adapter("other.sock")
    sidecar = await cluster.sidecar(named, SIE_GPU_TYPE="L4")
    await cluster.sidecar(idle_adapter, SIE_MACHINE_PROFILE="other")
    for answer in (await early, await gateway.encode("x", X_SIE_Machine_Profile="L4")):
        assert answer.headers["x-sie-worker"] == sidecar.worker
    assert not idle_adapter.batches


async def test_work_of_a_pool_is_taken_by_workers_of_that_pool_only(cluster: InProcess) -> None:
    """SIE_POOL."""
    gateways = {pool: await cluster.gateway(SIE_POOL=pool) for pool in ("a", "b")}
    adapters = {pool: await cluster.adapter(f"{pool}.sock") for pool in gateways}
    for pool, adapter in adapters.items():
        await cluster.sidecar(adapter, SIE_POOL=pool)
    for _ in range(3):
        assert (await gateways["a"].encode("x", X_SIE_Pool="A")).headers["x-sie-worker"] == "w0"
    assert adapters["a"].batches
    assert not adapters["b"].batches
    assert (await gateways["a"].encode("x", X_SIE_Pool="b")).json()["code"] == "POOL_NOT_FOUND"
    assert {name for name in cluster.server.streams if name.startswith("WORK_")} == {
        "WORK__default",
        "WORK_a",
        "WORK_b",
    }


async def test_a_model_is_served_by_workers_of_its_bundle_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SIE_BUNDLE: a delta for one bundle does not reach workers of another. A worker whose bundle does not exist logs
    that.
    """
    async with InProcess(
        tmp_path, ONE, toy_entry("toy/vision", bundle="vision"), toy_entry("toy/any", bundle="")
    ) as cluster:
        gateway = await cluster.gateway()
        adapters = {bundle: await cluster.adapter(f"{bundle}.sock") for bundle in ("default", "vision")}
        sidecars = {bundle: await cluster.sidecar(adapter, SIE_BUNDLE=bundle) for bundle, adapter in adapters.items()}
        for model, bundle in (("toy/one", "default"), ("toy/vision", "vision")):
            answer = await gateway.encode("x", model=model)
            assert (answer.headers["x-sie-worker"], answer.headers["x-sie-bundle"]) == (sidecars[bundle].worker, bundle)
        refused = (await gateway.encode("x", model="vision:/toy/one")).json()["error"]
        assert (refused["code"], refused["compatible_bundles"]) == ("BUNDLE_CONFLICT", ["default"])
        assert {bundle: adapter.loads for bundle, adapter in adapters.items()} == {
            "default": ["toy/one"],
            "vision": ["toy/vision"],
        }
        delta = ConfigDelta("sie-config", cluster.source.present_epoch, "test:2", "toy/vision", 2, None)
        await cluster.send(topology.config_subject("vision"), messages.encode(delta))
        assert await sidecars["vision"].metric("sie_config_deltas_total", result="applied") == 1
        assert await sidecars["default"].metric("sie_config_deltas_total", result="applied") == 0
        for model, bundle in (("toy/any", "default"), ("vision:/toy/any", "vision")):  # no bundle, so both can
            answer = await gateway.encode("x", model=model)
            assert (answer.headers["x-sie-worker"], answer.headers["x-sie-bundle"]) == (sidecars[bundle].worker, bundle)
        await cluster.sidecar(await cluster.adapter("other.sock"), SIE_BUNDLE="nowhere")
        message = (
            "SIE_BUNDLE: the catalogue has no bundle nowhere, so this worker gets no work; "
            "it has the bundles default, vision"
        )
        await until(lambda: message in caplog.text, "the log")


# ports


async def test_metrics_and_probes_of_the_sidecar_answer_on_its_port(cluster: InProcess) -> None:
    """SIE_WORKER_METRICS_PORT: a taken port is a start error."""
    port = free_port()
    await cluster.gateway()
    sidecar = await cluster.sidecar(SIE_WORKER_METRICS_PORT=str(port))
    assert sidecar.side_url.endswith(f":{port}")
    assert [(await sidecar.get(path)).status_code for path in ("/metrics", "/healthz", "/readyz", "/v1/models")] == [
        200,
        200,
        200,
        404,
    ]
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        second = await cluster.sidecar(ready=False, SIE_WORKER_METRICS_PORT=str(holder.getsockname()[1]))
        with pytest.raises(SettingError, match=r"^SIE_WORKER_METRICS_PORT: cannot listen"):
            await second.task


# heartbeats and configuration


async def test_heartbeats_come_at_the_interval(cluster: InProcess) -> None:
    """SIE_HEALTH_PUBLISH_INTERVAL_MS: in the time of ten heartbeats at 100 ms there are one or two at 1000 ms."""
    await cluster.gateway()
    await cluster.sidecar(SIE_HEALTH_PUBLISH_INTERVAL_MS="100")
    await cluster.sidecar(SIE_HEALTH_PUBLISH_INTERVAL_MS="1000")
    cluster.beats.clear()
    start_s = asyncio.get_running_loop().time()
    await until(lambda: sum(beat.worker == "w0" for beat in cluster.beats) >= 10, "ten heartbeats")
    seconds = asyncio.get_running_loop().time() - start_s  # 1 s, or more on a slow machine
    assert sum(beat.worker == "w1" for beat in cluster.beats) <= seconds + 1


async def test_a_heartbeat_follows_a_reconnect_at_once(cluster: InProcess) -> None:
    await cluster.gateway()
    sidecar = await cluster.sidecar(SIE_HEALTH_PUBLISH_INTERVAL_MS="100000", SIE_HEARTBEAT_TIMEOUT_MS="200000")
    sidecar.broker.disconnect()
    cluster.beats.clear()
    sidecar.broker.reconnect()
    await until(lambda: cluster.last_beat("w0", ready=True), "a heartbeat")


async def test_a_changed_catalogue_is_noticed_at_the_poll_and_a_corrupted_one_at_the_full_export(
    cluster: InProcess,
) -> None:
    """SIE_WORKER_CONFIG_POLL_INTERVAL_MS, SIE_WORKER_CONFIG_FULL_EXPORT_INTERVAL_MS: there are no deltas. Each worker
    has a source of its own.

    1. four workers know toy/one; 2. toy/two appears, with a new epoch at `polled` and `slow`, without one at `full` and
      `never`;
    3. work for toy/two is done by `polled` and `full`, while `slow` polls every 30 s, or when such work comes, and
    `never` reads the whole export only at start.
    """
    short, off = {"SIE_WORKER_CONFIG_POLL_INTERVAL_MS": "1000"}, {"SIE_WORKER_CONFIG_FULL_EXPORT_INTERVAL_MS": "0"}
    environs = {
        "polled": {**short, **off},
        "slow": {},
        "full": {**short, "SIE_WORKER_CONFIG_FULL_EXPORT_INTERVAL_MS": "1000"},
    }
    environs["never"] = {**short, **off}
    gateway = await cluster.gateway(SIE_GATEWAY_CONFIGURED_GPUS=",".join(environs))
    sources = {name: Source(ONE) for name in environs}
    for name, environ in environs.items():
        await cluster.sidecar(source=sources[name], SIE_MACHINE_PROFILE=name, **environ)
    for name, source in sources.items():
        source.put(TWO, silent=name in ("full", "never"))
    served = [gateway.encode("x", model="toy/two", X_SIE_Machine_Profile=name) for name in ("polled", "full")]
    assert [answer.status_code for answer in await asyncio.gather(*served)] == [200, 200]
    await until(lambda: sources["never"].polls >= 2, "two polls")
    assert sources["full"].exports >= 2
    assert {name: source.exports for name, source in sources.items() if name != "full"} == {
        "polled": 2,
        "slow": 1,
        "never": 1,
    }
    assert sources["slow"].polls == 0
    left = await gateway.encode("x", model="toy/two", X_SIE_Machine_Profile="never", X_SIE_Timeout_Ms="100")
    assert left.status_code == 504


# models


async def test_preloaded_models_are_loaded_before_the_worker_is_ready(cluster: InProcess) -> None:
    """SIE_PRELOAD_MODELS: the first request finds its model loaded."""
    gateway = await cluster.gateway()
    adapter = await cluster.adapter()
    adapter.hold_loads = True
    sidecar = await cluster.sidecar(adapter, ready=False, SIE_PRELOAD_MODELS="toy/one, TOY/two")
    for left in ("toy/one, toy/two", "toy/two"):
        await adapter.until(
            lambda adapter, left=left: adapter.loads and adapter.loads[-1] == left.split(", ")[0], "the load"
        )
        answer = await sidecar.get("/readyz")
        assert (answer.status_code, answer.text) == (503, f"not ready: preloading {left}")
        adapter.let_go(1)
    await until(lambda: cluster.last_beat("w0", ready=True), "ready")
    assert (await sidecar.get("/readyz")).status_code == 200
    assert (await gateway.encode("x")).status_code == 200
    assert adapter.loads == ["toy/one", "toy/two"]


async def test_a_preload_that_fails_shows_in_readiness_while_it_is_tried_again_and_does_not_hold_the_rest_for_ever(
    cluster: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """SIE_PRELOAD_MODELS: a worker that cannot load one model serves the others. An unknown name ends the start."""
    gateway = await cluster.gateway()
    adapter = await cluster.adapter()
    adapter.refusals["toy/one"] = ModelLoadFailed("too little memory", extras={"error_class": "OOM"})
    adapter.refusals["toy/two"] = ModelLoadFailed("no such file", extras={"error_class": "NOT_FOUND"})
    passing = await cluster.sidecar(adapter, ready=False, SIE_PRELOAD_MODELS="toy/one,toy/two")
    await until(
        lambda: (beat := cluster.last_beat("w0")) and [model_state.state for model_state in beat.models] == ["failed"],
        "the failure",
    )
    reason = "preloading toy/one, toy/two (try 1 of 3 failed: too little memory)"
    assert (await passing.get("/readyz")).text == f"not ready: {reason}"
    await until(lambda: (beat := cluster.last_beat("w0")) and beat.unready == reason, "the heartbeat has the reason")
    model = (await gateway.client.get("/v1/models/toy/one")).json()
    assert (model["state"], model["last_error"]["attempts"]) == ("failed", 1), "the models API has it meanwhile"
    (worker,) = (await gateway.client.get("/health")).json()["unhealthy_workers"]
    assert worker["reason"] == reason
    second_adapter = await cluster.adapter("other.sock")
    second_adapter.refusals["toy/two"] = adapter.refusals["toy/two"]
    await cluster.sidecar(second_adapter, SIE_PRELOAD_MODELS="toy/two,toy/one")
    beat = cluster.last_beat("w1", ready=True)
    assert [(model_state.model, model_state.state) for model_state in beat.models] == [
        ("toy/two", "failed"),
        ("toy/one", "loaded"),
    ]
    assert "toy/two of SIE_PRELOAD_MODELS could not be loaded" in caplog.text
    unknown = await cluster.sidecar(ready=False, SIE_PRELOAD_MODELS="toy/none")
    with pytest.raises(SettingError, match=r"^SIE_PRELOAD_MODELS: no model named 'toy/none'"):
        await asyncio.wait_for(unknown.task, 30)


async def test_an_idle_model_is_unloaded_and_without_the_setting_it_stays(cluster: InProcess) -> None:
    """SIE_IDLE_EVICT_S: 1 s is the smallest value."""
    gateway = await cluster.gateway(SIE_GATEWAY_CONFIGURED_GPUS="evicts,keeps")
    evicting, keeping = await cluster.adapter("evicts.sock"), await cluster.adapter("keeps.sock")
    await cluster.sidecar(evicting, SIE_MACHINE_PROFILE="evicts", SIE_IDLE_EVICT_S="1")
    await cluster.sidecar(keeping, SIE_MACHINE_PROFILE="keeps", SIE_IDLE_EVICT_S="")
    for name in ("evicts", "keeps"):
        assert (await gateway.encode("x", X_SIE_Machine_Profile=name)).status_code == 200
    await evicting.until(lambda adapter: adapter.releases == ["toy/one"], "the release")
    await until(lambda: (beat := cluster.last_beat("w0")) and beat.models[0].state == "available", "the report of it")
    assert keeping.releases == []
    assert (await gateway.encode("x", X_SIE_Machine_Profile="evicts")).status_code == 200
    assert evicting.loads == ["toy/one", "toy/one"]


class LoadsAtOnce:
    """The part of an adapter link that hosting uses."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[bool], None]] = []
        self.description: ipc.Description | None = None

    def attach(self, may_drop: object, dropped: object) -> None:
        """Do nothing: no model is dropped."""

    async def ensure_ready(self, question: ipc.EnsureReady) -> ipc.Ready:
        return ipc.Ready(
            ipc.LoadedModel(question.model, "local", "f", "float32", "toy"), TOKENIZER, 512, {"encode": ipc.Rows()}
        )


async def test_a_model_is_idle_when_its_last_use_is_that_long_ago_and_nothing_is_held_for_it() -> None:
    """SIE_IDLE_EVICT_S: 300 s on a virtual clock. A request every 299 s keeps the model."""
    now_s = 0.0
    idle_s = settings_of(SIE_IDLE_EVICT_S="300").idle_evict_s
    assert idle_s is not None
    link: Any = LoadsAtOnce()
    hosting = Hosting(link, lambda: now_s, lambda: None)
    hosted = hosting.obtain(Catalogue({ONE.id: ONE}).resolve(ONE.id))
    await hosting.ensure(hosted)
    for _ in range(3):
        now_s += 299
        assert hosting.idle(idle_s) == []
        hosted.used_s = now_s  # as a batch does
    now_s += 301
    hosted.held = 1
    assert hosting.idle(idle_s) == []
    hosted.held = 0
    assert hosting.idle(idle_s) == [hosted]
