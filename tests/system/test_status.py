"""Status, websockets and metrics of a real `sie serve`: every stable name is there, and requests move the metrics that
they should.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import local_models
import psutil
import pytest
import shared
from cluster import Cluster, running, until
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

import sie_contracts

pytestmark = shared.FIRST_GUARDED

TOKEN = shared.USER
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
ENCODER, LATE, EXTRACTOR = "watched/mini", "watched/late", "watched/tags"  # no other file sends them requests

# every stable name with its labels; after requests of each verb it "moves" above zero, or "is" there with any value
GATEWAY = {
    "sie_gateway_requests_total": ({"endpoint", "status", "machine_profile"}, "moves"),
    "sie_gateway_request_latency_seconds_count": ({"endpoint", "machine_profile"}, "moves"),
    "sie_gateway_rejected_requests_total": ({"machine_profile", "bundle", "reason"}, "is"),
    "sie_gateway_provisioning_responses_total": (set(), "is"),
    "sie_gateway_pending_demand": ({"machine_profile", "bundle"}, "is"),
    "sie_gateway_active_lease_gpus": (set(), "is"),
    "sie_gateway_workers": ({"status"}, "moves"),
    "sie_gateway_worker_queue_depth": ({"worker"}, "is"),
    "sie_gateway_worker_memory_used_bytes": ({"worker"}, "moves"),
    "sie_gateway_model_workers": ({"model"}, "moves"),
    "sie_gateway_queue_publish_seconds_count": ({"operation"}, "moves"),
    "sie_gateway_queue_result_wait_seconds_count": ({"operation"}, "moves"),
    "sie_gateway_queue_payload_offloads_total": (set(), "is"),
    "sie_gateway_queue_ack_failures_total": (set(), "is"),
    "sie_gateway_dlq_events_total": (set(), "is"),
    "sie_gateway_config_epoch": (set(), "moves"),
    "sie_gateway_config_deltas_total": ({"kind", "result"}, "is"),
    "sie_gateway_config_behind": (set(), "is"),
    "sie_gateway_nats_connected": (set(), "moves"),
    "sie_gateway_pool_events_total": ({"event"}, "is"),
}
WORKER = {
    "sie_requests_total": ({"model", "endpoint", "status"}, "moves"),
    "sie_request_duration_seconds_count": ({"model", "endpoint", "phase"}, "moves"),
    "sie_batch_size_count": ({"model"}, "moves"),
    "sie_tokens_processed_total": ({"model"}, "moves"),
    "sie_queue_depth": ({"model"}, "is"),
    "sie_model_loaded": ({"model", "device"}, "moves"),
    "sie_model_memory_bytes": ({"model"}, "moves"),
    "sie_model_engine": ({"model", "engine"}, "moves"),
    **{
        f"sie_oom_{remedy}_total": ({"model"}, "is")
        for remedy in (
            "recoveries_attempted",
            "recoveries_succeeded",
            "terminal_failures",
            "cache_clears",
            "evictions_triggered",
            "batch_splits",
        )
    },
    "sie_idle_evictions_total": (set(), "is"),
}


@pytest.fixture(scope="module", params=["cluster", pytest.param("standalone", marks=pytest.mark.long)])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with tokens and the three models."""
    if request.param == "cluster":
        yield request.getfixturevalue("guarded_cluster")
        return
    models = local_models.under(tmp_path_factory.mktemp("status-models"))
    for model in (ENCODER, LATE, EXTRACTOR):
        kind = model.partition("/")[2]
        models.add(kind, {**local_models.KINDS[kind](models.weights / kind), "id": model})
    environ = {"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": TOKEN}
    arguments = [*models.arguments, "--no-spare", "--standalone"]
    with running(tmp_path_factory.mktemp("status"), *arguments, environ=environ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[httpx.Client]:
    """A client that has sent one request of each verb, and one to the OpenAI route."""
    with httpx.Client(base_url=cluster.url, timeout=60, headers=AUTHORIZATION) as client:
        for path, body in (
            (f"/v1/encode/{ENCODER}", {"items": ["one", "two"]}),
            ("/v1/embeddings", {"model": ENCODER, "input": "three"}),
            (f"/v1/score/{LATE}", {"query": "river", "items": ["winter", "garden"]}),
            (f"/v1/extract/{EXTRACTOR}", {"items": ["Ada met Bob"]}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 200, answer.text
        yield client


def looking(cluster: Cluster, path: str, **headers: str) -> ClientConnection:
    url = cluster.url.replace("http:", "ws:") + path
    return connect(url, additional_headers={**AUTHORIZATION, **headers}, proxy=None, compression=None, max_size=8 << 20)


def frame(socket: ClientConnection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(socket.recv(10))
    return message


def samples(url: str) -> dict[str, list[tuple[set[str], float]]]:
    """Return labels and values of a scrape, by name. A metric without any series yet has its name all the same."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    series: dict[str, list[tuple[set[str], float]]] = {}
    for family in text_string_to_metric_families(text):
        suffix = {"counter": "_total", "histogram": "_count"}.get(family.type, "")
        series.setdefault(family.name + suffix, [])
        for sample in family.samples:
            series.setdefault(sample.name, []).append((set(sample.labels), sample.value))
    return series


def metrics_url(cluster: Cluster, role: str) -> str:
    if role == "worker":
        return f"http://127.0.0.1:{cluster.worker_port}"
    line = next(line for line in reversed(cluster.lines) if "gateway listening on" in line)
    return f"http://127.0.0.1:{line.rpartition('metrics on ')[2]}"


def test_the_start_message_says_where_to_look_and_how_a_token_is_sent(cluster: Cluster) -> None:
    assert cluster.said(f"docs: {cluster.url}/docs")
    (line,) = (line for line in cluster.lines if "try     curl" in line)
    assert "-H 'Authorization: Bearer TOKEN'" in line
    assert cluster.said("sie keys create") == ("--standalone" not in cluster.argv), "there are keys in mode token alone"


@pytest.mark.parametrize(("role", "names"), [("gateway", GATEWAY), ("worker", WORKER)])
def test_every_stable_metric_is_there_and_moves_with_requests(
    cluster: Cluster, client: httpx.Client, role: str, names: dict[str, tuple[set[str], str]]
) -> None:
    """Names and labels are those of the contract."""
    url = metrics_url(cluster, role)
    moving = [name for name, (_, how) in names.items() if how == "moves"]
    until(
        lambda: all(any(value > 0 for _, value in samples(url).get(name, ())) for name in moving),
        60,
        f"{moving} above zero",
    )
    series = samples(url)
    for name, (labels, _) in names.items():
        assert name in series, name
        for sample_labels, _ in series[name]:
            assert sample_labels == labels, name
    text = httpx.get(f"{url}/metrics", timeout=30).text
    build = "sie_gateway_build_info" if role == "gateway" else "sie_build_info"
    assert f'{build}{{version="{sie_contracts.__version__}"}} 1.0' in text
    assert TOKEN not in text


def test_requests_are_counted_by_verb_and_route_at_the_worker(cluster: Cluster, client: httpx.Client) -> None:
    sent = {(ENCODER, "encode"), (ENCODER, "embeddings"), (LATE, "score"), (EXTRACTOR, "extract")}
    phases = {"total", "queue", "tokenize", "batch_wait", "inference", "postprocess"}

    def counted() -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
        """Return the labels for which each of the two metrics is 1."""
        text = httpx.get(f"http://127.0.0.1:{cluster.worker_port}/metrics", timeout=30).text
        series = [
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.value == 1 and sample.labels.get("model") in (ENCODER, LATE, EXTRACTOR)
        ]
        return (
            {_labels(sample, "status") for sample in series if sample.name == "sie_requests_total"},
            {_labels(sample, "phase") for sample in series if sample.name == "sie_request_duration_seconds_count"},
        )

    expected = (
        {(*call, "success") for call in sent},
        {(*call, phase) for call in sent for phase in phases},
    )
    until(lambda: counted() == expected, 60, "one request each")


def test_the_frames_of_the_cluster_come_at_once_and_tell_what_health_tells(
    cluster: Cluster, client: httpx.Client
) -> None:
    with looking(cluster, "/ws/cluster-status") as socket:
        until(lambda: {ENCODER, LATE, EXTRACTOR} <= _loaded(frame(socket)), 60, "the three models")
        status = frame(socket)
        assert status["cluster"]["models_loaded"] == len(_loaded(status))
    health = client.get("/health").json()
    assert status["version"] == health["version"] == sie_contracts.__version__
    assert {model["name"] for model in status["models"]} == {model["name"] for model in health["models"]}
    assert [worker["name"] for worker in status["workers"]] == [worker["name"] for worker in health["workers"]]
    assert health["cluster"]["total_qps"] >= 0
    assert ENCODER in status["workers"][0]["loaded_models"]


def test_the_gateway_shows_its_worker_as_the_worker_shows_itself(cluster: Cluster, client: httpx.Client) -> None:
    """`/ws/status` on the main port sends the frames of the machine's worker, real in every field."""
    with looking(cluster, "/ws/status") as socket:
        first = frame(socket)
        later = [frame(socket) for _ in range(3)]
        stamps = [snapshot["timestamp"] for snapshot in (first, *later)]
        assert stamps == sorted(set(stamps))
        until(
            lambda: frame(socket)["counters"].get("sie_requests_total", {}).get(ENCODER) == 2,
            60,
            "the metrics of the requests",
        )
        status = frame(socket)
    server = status["server"]
    assert server["version"] == sie_contracts.__version__
    assert server["pid"] in {*cluster.pids("sidecar"), *cluster.pids("standalone")}
    assert server["user"] == psutil.Process().username()
    assert 0 < server["uptime_seconds"] < 3600
    (device,) = status["gpus"]
    assert device["device"] == "cpu"
    assert 0 < device["memory_used_bytes"] < device["memory_total_bytes"]
    assert device["memory_threshold_pct"] == 85
    assert 0 <= device["utilization_pct"] <= 100
    memory = [model["memory_bytes"] for model in status["models"]]
    assert memory == sorted(memory, reverse=True)
    loaded = {model["name"]: model for model in status["models"] if model["state"] == "loaded"}
    assert set(loaded) == set(status["loaded_models"]) >= {ENCODER, LATE, EXTRACTOR}
    assert loaded[ENCODER]["config"]["dims"] == {"dense": 384}
    assert loaded[ENCODER]["device"] == "cpu"
    assert loaded[ENCODER]["config"]["max_sequence_length"] == 256
    assert loaded[LATE]["config"]["outputs"] == ["multivector", "score"]
    assert loaded[EXTRACTOR]["config"]["outputs"] == ["json"]
    assert 0 < loaded[ENCODER]["adaptive_batching"]["fill_ratio"] < 1


def test_upgrades_need_a_token_on_every_port_that_takes_them(cluster: Cluster) -> None:
    """The refusal is a 401 before the handshake. The worker accepts the config read token alone, which `sie serve`
    makes for each run.
    """
    for path in ("/ws/cluster-status", "/ws/status"):
        for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as refused:
                looking(cluster, path, **headers)
            assert refused.value.response.status_code == 401
            assert json.loads(refused.value.response.body or b"")["code"] == "UNAUTHENTICATED"
    with pytest.raises(InvalidStatus) as refused:
        connect(f"ws://127.0.0.1:{cluster.worker_port}/ws/status", additional_headers=AUTHORIZATION, proxy=None)
    assert refused.value.response.status_code == 401
    assert httpx.get(f"{cluster.url}/health", timeout=60).status_code == 401
    assert not cluster.said(TOKEN)


@pytest.mark.long
@pytest.mark.parametrize("arguments", [(), ("--standalone",)], ids=["cluster", "standalone"])
def test_a_reader_that_stops_holds_up_neither_others_nor_the_end(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Clients that read get 1001 inside the grace period, and the process ends with 0. tests/unit/test_status.py checks
    the same of one gateway.
    """
    environ = {"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKEN": TOKEN}
    with running(tmp_path, "--no-spare", *arguments, environ=environ) as cluster:
        check_the_end(cluster)


def check_the_end(cluster: Cluster) -> None:
    deaf = socket.create_connection(("127.0.0.1", cluster.port))
    head = (
        "GET /ws/status HTTP/1.1",
        "Host: localhost",
        f"Authorization: Bearer {TOKEN}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "",
        "",
    )
    deaf.sendall("\r\n".join(head).encode())
    with looking(cluster, "/ws/status") as worker, looking(cluster, "/ws/cluster-status") as whole:
        frame(worker)
        frame(whole)
        assert cluster.process is not None
        os.kill(cluster.process.pid, signal.SIGTERM)
        assert [_closed(worker), _closed(whole)] == [1001, 1001]
    assert cluster.process.wait(60) == 0
    deaf.close()


def _loaded(status: dict[str, Any]) -> set[str]:
    """Return the models of a frame that are loaded."""
    return {model["name"] for model in status["models"] if model["state"] == "loaded"}


def _labels(sample: Sample, last: str) -> tuple[str, ...]:
    return sample.labels["model"], sample.labels["endpoint"], sample.labels[last]


def _closed(socket: ClientConnection) -> int | None:
    with contextlib.suppress(TimeoutError):
        try:
            while True:
                socket.recv(15)
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else None
    return None
