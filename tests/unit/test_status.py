"""Views of the installation: `/health`, the websockets of gateway and worker, and the source of the view. The
mechanism of the websockets is in test_websocket.py, discovery in test_kubernetes.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_adapter import toy_entry
from inprocess import GatewayProcess, InProcess, SidecarProcess, closing_code, free_port, until, until_told
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

import sie_contracts
from sie_contracts.api.operations import DeviceInfo
from sie_contracts.errors import ErrorInfo, ResourceExhausted
from sie_contracts.wire import topology
from sie_contracts.wire.heartbeats import DeviceBeat, GatewayBeat, Heartbeat, ModelStatus
from sie_gateway.admission.admission import Peers
from sie_gateway.fleet import workers
from sie_gateway.fleet.workers import DeviceStatus, WorkerFrame
from sie_gateway.operations import status as statuses
from sie_gateway.operations.status import ViewedWorker, failures, of_heartbeat, of_socket, summaries
from sie_runtime.http.websocket import Seats

ONE, TWO = toy_entry(), toy_entry("toy/two")
TOKEN = "read-token"


def seated(held: contextlib.ExitStack, seats: Seats, address: str, key: str = "") -> bool:
    """Return True if a websocket of this client gets a seat. `held` keeps the seat."""
    try:
        held.enter_context(seats.seat({"client": (address, 1234)}, key))
    except ResourceExhausted:
        return False
    return True


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[InProcess]:
    async with InProcess(tmp_path, ONE, TWO) as cluster:
        yield cluster


def address(process: GatewayProcess | SidecarProcess, path: str) -> str:
    base = process.url if isinstance(process, GatewayProcess) else process.side_url
    return base.replace("http:", "ws:") + path


def looking(process: GatewayProcess | SidecarProcess, path: str, **headers: str) -> connect:
    return connect(address(process, path), additional_headers=headers, proxy=None, compression=None, max_size=8 << 20)


async def frame(socket: ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(30):
        payload: dict[str, Any] = json.loads(await socket.recv(decode=True))
    return payload


async def refusal(
    process: GatewayProcess | SidecarProcess, path: str, **headers: str
) -> tuple[int, dict[str, Any], str]:
    """Return the status, body and content type of a refused upgrade."""
    with pytest.raises(InvalidStatus) as refused:
        async with looking(process, path, **headers):
            pass
    answer = refused.value.response
    return answer.status_code, json.loads(answer.body or b"{}"), answer.headers["content-type"]


# the gateway's frames


CLUSTER_FRAME = "timestamp version cluster workers models queues model_queues failures"


async def test_the_cluster_frame_holds_what_health_holds(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    await cluster.sidecar(SIE_GPU_COUNT="2", SIE_MACHINE_PROFILE="l4", SIE_HEALTH_PUBLISH_INTERVAL_MS="100")
    assert (await gateway.encode("x")).status_code == 200
    async with looking(gateway, "/ws/cluster-status") as socket:
        await until(lambda: _is_idle(cluster), "the model in a heartbeat, without work")
        for _ in range(2):  # these two frames may be older than the heartbeat
            await frame(socket)
        cluster_frame, health = await frame(socket), (await gateway.client.get("/health")).json()
    assert set(cluster_frame) == set(CLUSTER_FRAME.split())
    assert cluster_frame["version"] == health["version"] == sie_contracts.__version__
    (worker,) = cluster_frame["workers"]
    assert worker == health["workers"][0]
    assert (worker["name"], worker["gpu"], worker["gpu_count"], worker["loaded_models"]) == ("w0", "l4", 2, ["toy/one"])
    assert (
        cluster_frame["models"]
        == health["models"]
        == [
            {"name": "toy/one", "state": "loaded", "worker_count": 1, "gpu_types": ["l4"], "total_queue_depth": 0},
            {"name": "toy/two", "state": "available", "worker_count": 0, "gpu_types": [], "total_queue_depth": 0},
        ]
    )
    assert {name: cluster_frame["cluster"][name] for name in ("worker_count", "gpu_count", "models_loaded")} == {
        "worker_count": 1,
        "gpu_count": 2,
        "models_loaded": 1,
    }
    assert health["live_gpu_types"] == ["l4"]


def _is_idle(cluster: InProcess) -> bool:
    beat = cluster.last_beat("w0")
    return beat is not None and any(status.state == "loaded" and not status.queued for status in beat.models)


async def test_health_without_a_worker_is_degraded_and_hides_credentials(cluster: InProcess) -> None:
    gateway = await cluster.gateway(
        SIE_NATS_URL="nats://user:secret@one:4222", SIE_CONFIG_SERVICE_URL="http://u:secret@config:8081"
    )
    answer = await gateway.client.get("/health")
    assert answer.json()["status"] == "degraded"
    assert answer.json()["nats_url"] == "nats://one:4222"
    assert answer.json()["config_url"] == "http://config:8081"
    assert answer.json()["nats_monitor_url"] is None
    assert "secret" not in answer.text


async def test_an_upgrade_is_refused_before_the_handshake_by_the_rules_of_other_calls(
    cluster: InProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """A 401, a 403 and the 404 of an unknown path are plain HTTP responses with the usual error body. None is an error
    of the server in the log.
    """
    gateway = await cluster.gateway(SIE_AUTH_MODE="static", SIE_AUTH_TOKEN="good")
    for path in ("/ws/cluster-status", "/ws/status", "/ws/nothing"):
        status, body, kind = await refusal(gateway, path)
        assert (status, body["code"], kind) == (401, "UNAUTHENTICATED", "application/json")
        assert (await refusal(gateway, path, Authorization="Bearer bad"))[0] == 401
    status, body, _ = await refusal(gateway, "/ws/nothing", Authorization="Bearer good")
    assert (status, body["code"]) == (404, "NOT_FOUND")
    status, body, _ = await refusal(
        gateway, "/ws/cluster-status", Authorization="Bearer good", Origin="https://evil.example"
    )
    assert (status, body["code"]) == (403, "PERMISSION_DENIED")
    own = gateway.url
    async with looking(gateway, "/ws/cluster-status", Authorization="Bearer good", Origin=own) as socket:
        assert (await frame(socket))["cluster"]["worker_count"] == 0
        assert socket.response is not None
        assert socket.response.headers["x-sie-version"] == sie_contracts.__version__
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert await gateway.metric("sie_gateway_requests_total", endpoint="ws", status="401") == 6
    assert await gateway.metric("sie_gateway_request_latency_seconds_count", endpoint="ws") == 0, (
        "they last as long as clients like"
    )


async def test_there_are_so_many_websockets_and_not_one_more(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statuses, "MAX_SOCKETS", 8)
    gateway = await cluster.gateway()
    async with looking(gateway, "/ws/cluster-status") as first, looking(gateway, "/ws/cluster-status") as second:
        await frame(first)
        await frame(second)
        assert await gateway.metric("sie_gateway_websockets") == 2
        status, body, _ = await refusal(gateway, "/ws/cluster-status")
        assert (status, body["code"]) == (503, "RESOURCE_EXHAUSTED")
        assert "of this client" in body["error"]["message"], "others have the rest"
    assert await gateway.metric("sie_gateway_websockets") == 0
    async with looking(gateway, "/ws/cluster-status") as again:
        await frame(again)


# the worker's frames


FRAME = """
    timestamp ready name machine_profile pool_name gpu_count bundle bundle_config_hash loaded_models max_batch_requests
    server gpus models counters histograms
"""
DEVICE = "device name gpu_type utilization_pct memory_used_bytes memory_total_bytes memory_threshold_pct"
BATCHING = "calibrated target_p50_ms wait_ms batch_cost p50_ms headroom_ms fill_ratio"


async def test_the_workers_frame_tells_all_that_the_contract_names(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    sidecar = await cluster.sidecar(SIE_GPU_TYPE="l4", SIE_BATCHER_MAX_BATCH_REQUESTS="7")
    assert (await gateway.encode("one", "two", "three")).status_code == 200
    async with looking(sidecar, "/ws/status") as socket:
        worker_frame = await frame(socket)
    assert set(worker_frame) == set(FRAME.split())
    assert (worker_frame["ready"], worker_frame["name"], worker_frame["pool_name"], worker_frame["bundle"]) == (
        True,
        "w0",
        "_default",
        "default",
    )
    assert (worker_frame["max_batch_requests"], worker_frame["loaded_models"]) == (7, ["toy/one"])
    assert set(worker_frame["server"]) == {"version", "uptime_seconds", "user", "working_dir", "pid"}
    (device,) = worker_frame["gpus"]
    assert set(device) == set(DEVICE.split())
    assert (device["device"], device["gpu_type"], device["memory_total_bytes"]) == ("fake", "l4", 1 << 30)
    first, second = worker_frame["models"]  # sorted by memory, the largest first
    assert (first["name"], first["state"], first["device"], first["memory_bytes"]) == (
        "toy/one",
        "loaded",
        "fake",
        1 << 20,
    )
    assert first["config"] == {
        "hf_id": None,
        "adapter": "toy",
        "inputs": ["text"],
        "outputs": ["dense"],
        "dims": {"dense": 8},
        "max_sequence_length": 512,
    }
    batching = first["adaptive_batching"]
    assert set(batching) == set(BATCHING.split())
    assert batching["calibrated"] is True
    assert batching["headroom_ms"] == pytest.approx(batching["target_p50_ms"] - batching["p50_ms"], abs=0.01)
    assert 0 < batching["fill_ratio"] < 1
    assert (second["name"], second["state"], second["memory_bytes"]) == ("toy/two", "available", 0)
    assert "adaptive_batching" not in second
    assert worker_frame["counters"]["sie_requests_total"] == {"toy/one": 1}
    assert worker_frame["counters"]["sie_tokens_processed_total"]["toy/one"] > 3
    sizes = worker_frame["histograms"]["sie_batch_size"]["toy/one"]
    assert len(sizes["counts"]) == len(sizes["buckets"]) + 1
    assert sizes["counts"][-1] == 1
    duration = worker_frame["histograms"]["sie_request_duration_seconds"]["toy/one"]
    assert duration["counts"][-1] == 1, "phases are not added up"
    assert sorted(duration["buckets"]) == duration["buckets"]


async def test_a_worker_is_looked_at_with_the_read_token_alone_where_there_is_one(cluster: InProcess) -> None:
    """SIE_CONFIG_READ_TOKEN: others are refused before the handshake. The metrics stay open."""
    await cluster.gateway()
    sidecar = await cluster.sidecar(SIE_CONFIG_READ_TOKEN=TOKEN)
    for headers in ({}, {"Authorization": "Bearer bad"}):
        status, body, kind = await refusal(sidecar, "/ws/status", **headers)
        assert (status, body["code"], kind) == (401, "UNAUTHENTICATED", "application/json")
    token = {"Authorization": f"Bearer {TOKEN}"}
    assert (await refusal(sidecar, "/ws/other", **token))[0] == 404
    assert (await refusal(sidecar, "/ws/status", **token, Origin="http://evil.example"))[0] == 403
    assert (await sidecar.get("/metrics")).status_code == 200
    async with looking(sidecar, "/ws/status", **token) as socket:
        assert (await frame(socket))["name"] == "w0"


# the gateway shows a worker of its own


async def test_the_gateway_shows_its_own_workers_by_number(cluster: InProcess) -> None:
    """SIE_GATEWAY_WORKERS, SIE_CONFIG_READ_TOKEN: the gateway authenticates to its workers with its own token."""
    ports = [free_port(), free_port()]
    own = ",".join(f"http://127.0.0.1:{port}" for port in ports)
    gateway = await cluster.gateway(SIE_GATEWAY_WORKERS=own, SIE_CONFIG_READ_TOKEN=TOKEN)
    plain = await cluster.gateway()
    for port in ports:
        await cluster.sidecar(SIE_WORKER_METRICS_PORT=str(port), SIE_CONFIG_READ_TOKEN=TOKEN)
    async with looking(gateway, "/ws/status") as socket, looking(gateway, "/ws/status?worker=1") as second_socket:
        assert [(await frame(socket))["name"], (await frame(second_socket))["name"]] == ["w0", "w1"]
        at_s = [(await frame(socket))["timestamp"] for _ in range(4)]
        assert at_s == sorted(set(at_s)), "each is a new one"
    for query in ("2", "-1", "x", "9" * 5):
        assert (await refusal(gateway, f"/ws/status?worker={query}"))[0] == 404
    status, body, _ = await refusal(plain, "/ws/status")
    assert (status, body["code"]) == (404, "NOT_FOUND")


# where the view comes from


async def test_in_mode_ws_workers_are_known_by_their_sockets_and_in_mode_nats_by_their_heartbeats(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIE_GATEWAY_HEALTH_MODE, SIE_GATEWAY_WORKERS: in mode ws both URLs are in the view, the one without a worker as
    unhealthy. A worker that only sends heartbeats is not in the view, and serves all the same.
    """
    monkeypatch.setattr(workers, "RETRY_S", 0.05)
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    by_socket = await cluster.gateway(SIE_GATEWAY_HEALTH_MODE="ws", SIE_GATEWAY_WORKERS=",".join(urls))
    by_beats = await cluster.gateway(SIE_GATEWAY_HEALTH_MODE="nats", SIE_GATEWAY_WORKERS=",".join(urls))
    default = await cluster.gateway(SIE_GATEWAY_HEALTH_MODE="ws")
    await cluster.sidecar(SIE_WORKER_METRICS_PORT=str(ports[0]))

    async def view(gateway: GatewayProcess) -> tuple[dict[str, str | None], list[str]]:
        health = (await gateway.client.get("/health")).json()
        return {worker["name"]: worker["url"] for worker in health["workers"]}, [
            unhealthy["name"] for unhealthy in health["unhealthy_workers"]
        ]

    async def is_seen() -> bool:
        return await view(by_socket) == ({"w0": urls[0]}, [urls[1]])

    await until_told(is_seen, "both workers")
    assert await view(by_beats) == ({"w0": None}, [])
    assert await view(default) == ({}, []), "a worker that only sends heartbeats is not known"
    for gateway in (by_socket, by_beats, default):
        assert (await gateway.encode("x")).headers["x-sie-worker"] == "w0", "work goes through the queue"
    assert await by_socket.metric("sie_gateway_workers", status="unhealthy") == 1
    assert await default.metric("sie_gateway_workers") == 0

    async def is_loaded() -> bool:
        return bool((await by_socket.client.get("/health")).json()["models"][0]["state"] == "loaded")

    await until_told(is_loaded, "a loaded model")


def test_a_model_is_summed_up_over_all_healthy_workers_and_copies() -> None:
    def worker(name: str, gpu: str, **models: tuple[str, int]) -> Heartbeat:
        model_states = tuple(
            ModelStatus(model.replace("_", ":"), state, queued=queued) for model, (state, queued) in models.items()
        )  # type: ignore[arg-type]
        return Heartbeat(name, "_default", gpu, "default", True, "test", models=model_states)

    viewed_workers = [
        of_heartbeat(worker("a", "l4", m=("loaded", 2), m_half=("loaded", 1)), healthy=True),
        of_heartbeat(worker("b", "t4", m=("failed", 0), other=("loaded", 9)), healthy=True),
    ]
    (model_summary,) = summaries(["m"], viewed_workers)
    assert msgspec.to_builtins(model_summary) == {
        "name": "m",
        "state": "loaded",
        "worker_count": 1,
        "gpu_types": ["l4", "t4"],
        "total_queue_depth": 3,
    }
    loading = of_heartbeat(worker("c", "l4", m=("loading", 0)), healthy=True)
    assert [summary.state for summary in summaries(["m", "nobody"], [*viewed_workers, loading])] == [
        "loading",
        "available",
    ]


def test_the_reason_of_a_failed_load_is_that_of_workers_that_are_healthy_or_start() -> None:
    def worker(name: str, *models: ModelStatus, healthy: bool = True, starting: bool = False) -> ViewedWorker:
        beat = Heartbeat(
            name, "_default", "l4", "default", healthy, "test", models=models, unready="" if healthy else "x"
        )
        return of_heartbeat(beat, healthy=healthy, starting=starting)

    def failed(model: str, why: str) -> ModelStatus:
        return ModelStatus(model, "failed", error=ErrorInfo("MODEL_LOAD_FAILED", why))

    viewed_workers = [
        worker("a", failed("m:half", "no such file"), ModelStatus("n", "loaded")),
        worker("b", failed("m", "another reason")),
        worker("c", failed("gone", "not seen any more"), healthy=False),
        worker("d", failed("p", "no network"), ModelStatus("q", "loaded"), healthy=False, starting=True),
    ]
    assert failures(viewed_workers) == {"m": "no such file", "p": "no network"}
    assert [worker.info.reason for worker in viewed_workers] == ["", "", "its heartbeats have stopped", "x"]
    assert [model.state for model in summaries(["gone", "p", "q"], viewed_workers)] == [
        "available",
        "failed",
        "available",
    ]


async def test_the_rate_of_requests_is_that_of_all_gateways(cluster: InProcess) -> None:
    """One gateway answers 10 requests a second, the other 4. Each sends its rate to all."""
    now_s = 0.0
    sent: list[GatewayBeat] = []
    peers = [Peers(cluster.server.connect(f"g{number}"), dict, lambda: now_s) for number in range(2)]
    for _ in range(12):
        now_s += 1.0
        for peer, count in zip(peers, (10, 4), strict=True):
            for _ in range(count):
                peer.answered()
            sent.append(peer.beat())
        for beat in sent[-2:]:
            for peer in peers:
                peer.note(beat)
    assert [peer.qps() for peer in peers] == [pytest.approx(14.0)] * 2
    for _ in range(10):
        now_s += 1.0
        for peer in peers:
            beat = peer.beat()
            for gateway in peers:
                gateway.note(beat)
    assert [peer.qps() for peer in peers] == [0.0] * 2


async def test_dead_letters_are_counted_from_the_stream_that_keeps_them(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letters that other processes write count, too."""
    monkeypatch.setattr(statuses, "DEAD_EVERY_S", 0.02)
    gateway = await cluster.gateway()
    assert await gateway.metric("sie_gateway_dlq_events_total") == 0
    broker = cluster.server.connect("worker")
    for number in range(3):
        await broker.publish(topology.dead_letter_subject("_default"), b"letter", f"letter-{number}")
    async with asyncio.timeout(30):
        while await gateway.metric("sie_gateway_dlq_events_total") != 3:
            pass
    await broker.close()


def test_a_worker_with_several_devices_is_described_with_each() -> None:
    beat = Heartbeat(
        "w",
        "_default",
        "l4",
        "default",
        True,
        "test",
        gpu_count=2,
        device="cuda:0,cuda:1",
        devices=(DeviceBeat("cuda:0", True, "NVIDIA L4", 1, 2, 3, ("m",)), DeviceBeat("cuda:1", False)),
    )
    assert of_heartbeat(beat, healthy=True).info.devices == [
        DeviceInfo("cuda:0", True, "NVIDIA L4", 1, 2, 3, ["m"]),
        DeviceInfo("cuda:1", False, "", 0, 0, 0, []),
    ]
    gpus = [DeviceStatus("cuda:0", 1, 2), DeviceStatus("cuda:1", 3, 4)]
    info = of_socket("http://w", WorkerFrame("w", gpus=gpus)).info
    assert (info.device, info.memory_used_bytes, info.memory_total_bytes) == ("cuda:0,cuda:1", 4, 6)


def test_one_client_cannot_take_all_websockets() -> None:
    """A client is limited by its address and by its key. Others get seats until all are taken. A websocket that ends
    frees its seat.
    """
    seats = Seats(16, "gateway")
    with contextlib.ExitStack() as held:
        assert [seated(held, seats, "10.0.0.1", f"k{number}") for number in range(6)] == [True] * 4 + [False] * 2
        assert [seated(held, seats, f"10.0.1.{number}", "key") for number in range(6)] == [True] * 4 + [False] * 2
        assert [seated(held, seats, f"2001:db8::{number:x}") for number in range(6)] == [True] * 4 + [False] * 2, (
            "one /64 is one host"
        )
        assert [seated(held, seats, f"127.0.0.{number}") for number in range(1, 4)] == [True] * 3
        assert seated(held, seats, "10.0.2.1")
        assert not seated(held, seats, "10.0.3.1"), "16 are there"
        assert seats.taken == 16
    assert seats.taken == 0
    with contextlib.ExitStack() as held:
        assert all(seated(held, seats, "::ffff:10.0.0.1", "key") for _ in range(4))
        assert not seated(held, seats, "10.0.0.1", "other")
        assert not seated(held, seats, "10.9.9.9", "key")


async def test_a_worker_that_is_away_is_told_of_and_ends_what_is_shown_of_it(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    gateway = await cluster.gateway(SIE_GATEWAY_WORKERS=f"http://127.0.0.1:{port}")
    with monkeypatch.context() as hasty:
        hasty.setattr(statuses, "FIRST_FRAME_S", 0.1)
        status, body, _ = await refusal(gateway, "/ws/status")
    assert (status, body["code"]) == (503, "NOT_READY")
    sidecar = await cluster.sidecar(SIE_WORKER_METRICS_PORT=str(port))
    async with looking(gateway, "/ws/status") as socket:
        await frame(socket)
        await sidecar.end()
        assert await asyncio.wait_for(closing_code(socket), 10) == 1013


async def test_frames_follow_the_work_that_is_held(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    adapter = await cluster.adapter()
    sidecar = await cluster.sidecar(adapter)
    adapter.hold_batches = True
    sent = asyncio.create_task(gateway.encode("one", "two", "three"))
    await adapter.until(lambda adapter: adapter.running == 1, "the batch at the device")
    async with looking(sidecar, "/ws/status") as socket:
        model = next(model for model in (await frame(socket))["models"] if model["name"] == "toy/one")
        assert (model["queue_depth"], model["queue_pending_items"]) == (1, 3)
        adapter.let_go()
        assert (await sent).status_code == 200
        async with asyncio.timeout(30):
            while model["queue_depth"]:
                model = next(model for model in (await frame(socket))["models"] if model["name"] == "toy/one")
        assert model["queue_pending_items"] == 0
        # the metrics in the frames are summed up once a second
        async with asyncio.timeout(30):
            while not (await frame(socket))["counters"].get("sie_requests_total"):
                pass
