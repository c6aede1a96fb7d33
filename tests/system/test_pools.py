"""Reservations at a real broker and with real processes: two gateways, two workers, fixed costs. All tests but
the last share one cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import until
from stack import Device, Plan, Stack

MODEL = "toy/one"
SPEC = {"name": "team", "gpus": {"cpu": 1}}
ADMIN = {"authorization": "Bearer admin"}  # reservations with it may take the last worker
FAST = {
    "SIE_ADMIN_TOKEN": "admin",
    "SIE_HEALTH_PUBLISH_INTERVAL_MS": "250",
    "SIE_HEARTBEAT_TIMEOUT_MS": "3000",
    "SIE_LOAD_HOLD_S": "2",
}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    plan = Plan(gateways=2, workers=[Device(batch_ms=1.0), Device(batch_ms=1.0)], environ=FAST)
    with Stack(tmp_path_factory.mktemp("pools"), plan) as stack:
        yield stack


def call(stack: Stack, method: str, path: str, gateway: int = 0, **more: object) -> httpx.Response:
    headers = ADMIN | dict(more.pop("headers", {}))  # type: ignore[call-overload]
    return httpx.request(method, stack.urls[gateway] + path, timeout=30, trust_env=False, headers=headers, **more)  # type: ignore[arg-type]


def encode(stack: Stack, pool: str, gateway: int = 0) -> httpx.Response:
    headers = {"X-SIE-Pool": pool} if pool else {}
    return call(stack, "POST", f"/v1/encode/{MODEL}", gateway, json={"items": ["x"]}, headers=headers)


def workers_of(stack: Stack, name: str, gateway: int = 0, state: str = "active") -> list[str]:
    """Return the workers of the reservation, empty while it is not in this state."""
    pool = call(stack, "GET", f"/v1/pools/{name}", gateway).json()
    if pool.get("status", {}).get("state") != state:
        return []
    return [worker["name"] for worker in pool["status"]["assigned_workers"]]


def pool_of(stack: Stack, worker: str) -> str:
    """Return the pool that the worker itself reports, as gateways show it, while it is healthy."""
    return next(
        (info["pool"] for info in call(stack, "GET", "/health").json()["workers"] if info["name"] == worker), ""
    )


def streams(stack: Stack) -> set[str]:
    """Return the streams of work, by the broker's monitor."""
    report = httpx.get(f"{stack.monitor_urls[0]}/jsz?streams=true", timeout=30, trust_env=False).json()
    names = {
        stream["name"] for account in report.get("account_details", []) for stream in account.get("stream_detail") or []
    }
    return {name for name in names if name.startswith("WORK_")}


def free(stack: Stack) -> bool:
    return [pool_of(stack, f"w{number}") for number in range(2)] == ["_default", "_default"]


def test_a_reserved_worker_serves_its_pool_alone_and_its_lease_gives_it_back(stack: Stack) -> None:
    """A worker is reserved over one gateway, and serves over both. After the lease requests get POOL_NOT_FOUND, the
    worker is back in the default pool, and the stream is removed.
    """
    until(lambda: free(stack), 60, "both workers serve the default pool")
    assert call(stack, "POST", "/v1/pools", json={**SPEC, "ttl_seconds": 7}).status_code == 201
    for gateway in range(2):
        until(lambda gateway=gateway: workers_of(stack, "team", gateway), 60, "active")
    [mine] = workers_of(stack, "team")
    [free_worker] = {"w0", "w1"} - {mine}
    for gateway in range(2):
        answers = [encode(stack, "team", gateway) for _ in range(3)]
        assert [(answer.status_code, answer.headers["x-sie-worker"]) for answer in answers] == [(200, mine)] * 3
        answers = [encode(stack, "", gateway) for _ in range(3)]
        assert [(answer.status_code, answer.headers["x-sie-worker"]) for answer in answers] == [(200, free_worker)] * 3
    assert streams(stack) == {"WORK__default", "WORK_team"}
    until(lambda: call(stack, "GET", "/v1/pools/team").status_code == 404, 60, "the end of the lease")
    until(lambda: encode(stack, "team", 1).json().get("code") == "POOL_NOT_FOUND", 60, "also at the other gateway")
    until(lambda: free(stack), 60, "both workers serve the default pool again")
    until(lambda: streams(stack) == {"WORK__default"}, 60, "the stream is removed")


@pytest.mark.long
def test_reservations_outlive_their_gateways_and_nobody_moves(stack: Stack) -> None:
    """Both gateways are killed and started again. The reservation has the same lease and the same worker."""
    assert call(stack, "POST", "/v1/pools", json=SPEC).status_code == 201
    until(lambda: workers_of(stack, "team"), 60, "active")
    before = call(stack, "GET", "/v1/pools/team").json()
    for gateway in stack.gateways:
        gateway.kill()
    for gateway in stack.gateways:
        gateway.start()
    for gateway in stack.gateways:
        gateway.wait_ready()
    for number in range(2):
        until(lambda number=number: call(stack, "GET", "/v1/pools/team", number).json() == before, 60, "the same pool")
        assert encode(stack, "team", number).status_code == 200
    renewed = call(stack, "POST", "/v1/pools/team/renew", 1).json()
    assert renewed["expires_at"] > before["status"]["expires_at"]
    assert call(stack, "DELETE", "/v1/pools/team", 1).json() == {"message": "Pool deleted"}
    # the name is free, also while the worker still leaves
    assert call(stack, "POST", "/v1/pools", json=SPEC).status_code == 201
    until(lambda: workers_of(stack, "team"), 60, "active again")
    assert encode(stack, "team").status_code == 200
    assert call(stack, "DELETE", "/v1/pools/team").status_code == 200
    until(lambda: free(stack), 60, "both workers serve the default pool again")


@pytest.mark.long
def test_the_death_of_its_worker_makes_it_pending_until_another_one_is_there(stack: Stack) -> None:
    """Two reservations have one worker each. One worker dies: its reservation is pending, and requests wait, then get
    PROVISIONING. The other reservation ends, and its worker takes the place.
    """
    for name in ("team", "spare"):
        assert call(stack, "POST", "/v1/pools", json={**SPEC, "name": name}).status_code == 201
        until(lambda name=name: workers_of(stack, name), 60, f"{name} is active")
    [dead_worker], [left] = workers_of(stack, "team"), workers_of(stack, "spare")
    worker = stack.workers[int(dead_worker.removeprefix("w"))]
    worker.sidecar.kill()
    worker.adapter.kill()
    until(lambda: call(stack, "GET", "/v1/pools/team").json()["status"]["state"] == "pending", 60, "pending")
    answer = encode(stack, "team")
    assert (answer.status_code, answer.json()["code"]) == (503, "PROVISIONING")
    scaling = call(stack, "GET", "/v1/scaling/_default.cpu.default").json()
    assert (scaling["reserved"], scaling["demand"], scaling["ready_workers"]) == (2, 1, 0)
    assert call(stack, "DELETE", "/v1/pools/spare").status_code == 200
    until(lambda: workers_of(stack, "team") == [left], 60, "the other worker took the place")
    answer = encode(stack, "team", 1)
    assert (answer.status_code, answer.headers["x-sie-worker"]) == (200, left)
    worker.adapter.start()
    worker.sidecar.start()
    worker.adapter.wait_ready()
    worker.sidecar.wait_ready()
    until(lambda: pool_of(stack, dead_worker) == "_default", 60, "the first worker serves the default pool")
    assert workers_of(stack, "team") == [left]
    assert encode(stack, "").headers["x-sie-worker"] == dead_worker


def test_plain_requests_and_reservations_go_to_the_pool_of_the_installation(tmp_path: Path) -> None:
    """The gateways and one worker have the pool `blue`, another worker has the pool `_default`."""
    plan = Plan(workers=[Device(), Device(pool="default")], environ={**FAST, "SIE_POOL": "blue"})
    with Stack(tmp_path, plan) as stack:
        until(
            lambda: (pool_of(stack, "w0"), pool_of(stack, "w1")) == ("blue", "_default"), 60, "both workers are known"
        )
        answers = [encode(stack, pool) for pool in ("", "blue", "default", "")]
        assert [(answer.status_code, answer.headers.get("x-sie-worker")) for answer in answers] == [
            (200, "w0"),
            (200, "w0"),
            (200, "w1"),
            (200, "w0"),
        ]
        assert call(stack, "POST", "/v1/pools", json=SPEC).status_code == 201
        until(lambda: workers_of(stack, "team") == ["w0"], 60, "the reservation has the worker of the installation")
        assert encode(stack, "team").headers["x-sie-worker"] == "w0"
        assert call(stack, "GET", "/v1/scaling/blue.cpu.default").json()["reserved"] == 1
        assert encode(stack, "default").headers["x-sie-worker"] == "w1"
        assert call(stack, "DELETE", "/v1/pools/team").status_code == 200
        until(lambda: pool_of(stack, "w0") == "blue", 60, "the worker serves the installation again")
        assert encode(stack, "").headers["x-sie-worker"] == "w0"
