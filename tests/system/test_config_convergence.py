"""Gateways and workers that receive no delta, start during writes, or receive a delta of a stranger: all converge to
the same catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cluster import MODEL, scraped, until
from stack import Device, Part, Plan, Stack

ADMIN = "admin-token-of-a-test"
HEADERS = {"Authorization": f"Bearer {ADMIN}"}
MODELS = "/v1/configs/models"
MINI = f"{MODELS}/{MODEL}"
DEAF, HEARING = 0, 1  # index of a gateway, and of a worker
POLLED_S = 60.0  # a gateway polls every 5 s, a worker here every second


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways and two workers. The broker lets one of each receive no delta of the catalogue."""
    environ = {
        "SIE_ADMIN_TOKEN": ADMIN,
        "SIE_WORKER_CONFIG_POLL_INTERVAL_MS": "1000",
        "SIE_HEALTH_PUBLISH_INTERVAL_MS": "200",
    }
    new_stack = Stack(
        tmp_path_factory.mktemp("stack"), Plan((), 2, (Device(), Device()), environ=environ, preload=False)
    )
    users = (
        '{user: all, password: p}, {user: deaf, password: p, permissions: {subscribe: {deny: "sie.config.models.>"}}}'
    )
    with (new_stack.folder / "broker-0" / "server.conf").open("a") as file:
        file.write(f"authorization {{ users: [{users}] }}\n")
    deaf = {new_stack.gateways[DEAF].name, new_stack.workers[DEAF].sidecar.name}
    for part in new_stack.parts:
        if "SIE_NATS_URL" in part.environ:
            part.environ["SIE_NATS_URL"] = url_of(new_stack, "deaf" if part.name in deaf else "all")
    with new_stack:
        yield new_stack


def url_of(stack: Stack, user: str) -> str:
    return stack.broker_urls.replace("nats://", f"nats://{user}:p@")


def write(stack: Stack, **change: Any) -> int:
    """Change the model and return its new revision."""
    answer = httpx.patch(stack.config_url + MINI, json=change, headers=HEADERS, timeout=30)
    assert answer.status_code == 200, answer.text
    revision: int = answer.json()["revision"]
    return revision


def revision_at(url: str, path: str = MINI) -> int:
    """Return the revision of the model at a gateway, or 0 if the gateway does not know the model."""
    answer = httpx.get(url + path, timeout=10)
    return int(answer.headers["etag"].strip('"')) if answer.status_code == 200 else 0


def status(stack: Stack, url: str = "") -> dict[str, Any]:
    answer = httpx.get((url or stack.config_url) + MINI + "/status", headers=HEADERS if not url else {}, timeout=10)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    return report


def converged(stack: Stack, revision: int, readers: int = 4) -> dict[str, Any] | None:
    """Return the report of the config service if it names at least `readers` gateways and workers that serve this
    revision.
    """
    report = status(stack)
    serve = [
        reader
        for reader in report["gateways"] + report["workers"]
        if (reader["revision"], reader["acked"]) == (revision, True)
    ]
    return report if len(serve) >= readers else None


def deltas(stack: Stack, number: int, **labels: str) -> tuple[float, float]:
    """Return how many deltas a gateway and a worker have counted."""
    gateway = scraped(f"{stack.metrics_urls[number]}/metrics", "sie_gateway_config_deltas_total", **labels)
    return gateway, scraped(f"{stack.workers[number].url}/metrics", "sie_config_deltas_total", **labels)


def test_who_misses_every_delta_converges_by_polling(stack: Stack) -> None:
    """Before they converge, the status shows who lags, and at which revision."""
    until(lambda: converged(stack, 1), POLLED_S, "the new model everywhere")
    stack.gateways[DEAF].pause()
    try:
        second = write(stack, max_tokens=64)
        report = until(lambda: converged(stack, second, 3), POLLED_S, "the delta, and the poll of the deaf worker")
        assert isinstance(report, dict)
        lag = [(gateway["revision"], gateway["acked"]) for gateway in report["gateways"]]
        assert sorted(lag) == [(1, False), (second, True)]
        assert report["revision"] == second
    finally:
        stack.gateways[DEAF].resume()
    report = until(lambda: converged(stack, second), POLLED_S, "the poll of the deaf ones")
    assert isinstance(report, dict)
    assert report["all_bundles_acked"] is True
    (bundle,) = report["bundles"]
    assert (bundle["acked_workers"], bundle["pending_workers"], bundle["total_eligible_workers"]) == (
        ["w0", "w1"],
        [],
        2,
    )
    assert {reader["epoch"] for reader in report["gateways"] + report["workers"]} == {report["config_epoch"]}
    assert [revision_at(url) for url in stack.urls] == [second, second]
    assert deltas(stack, DEAF) == (0, 0)
    assert min(deltas(stack, HEARING, result="applied")) >= 1
    for url in stack.urls:
        own = status(stack, url)
        assert (own["revision"], own["config_epoch"], len(own["gateways"])) == (second, report["config_epoch"], 2)
        until(
            lambda url=url: status(stack, url)["all_bundles_acked"], POLLED_S, "the workers' heartbeats at the gateway"
        )


def test_without_the_config_service_nobody_who_serves_stops_and_nobody_new_is_ready(stack: Stack) -> None:
    stack.config.kill()
    before = revision_at(stack.urls[HEARING])
    gateway = stack.gateways[DEAF]
    gateway.kill()
    gateway.start()
    url = stack.metrics_urls[DEAF]

    def said() -> str:
        try:
            answer = httpx.get(f"{url}/readyz", timeout=5)
        except httpx.TransportError:
            return ""
        assert answer.status_code == 503
        return answer.text

    until(lambda: "the catalogue is not loaded" in said(), POLLED_S, "the reason why the gateway is not ready")
    assert (
        httpx.post(f"{stack.urls[DEAF]}/v1/encode/{MODEL}", json={"items": ["x"]}, timeout=60).json()["code"]
        == "NOT_READY"
    )
    assert revision_at(stack.urls[HEARING]) == before
    assert httpx.get(f"{stack.metrics_urls[HEARING]}/readyz", timeout=60).status_code == 200
    stack.config.start()
    stack.config.wait_ready()
    gateway.wait_ready()
    assert revision_at(stack.urls[DEAF]) == before


def cpu_s(*parts: Part) -> list[float]:
    return [part.cpu_s() for part in parts]
