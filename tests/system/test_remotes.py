"""A remote server of real processes is killed with SIGKILL and started again, while the local cluster has no worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import MODEL, until
from prometheus_client.parser import text_string_to_metric_families
from stack import Plan, Stack


class Clusters:
    """Two clusters: `here` has the gateway of `there` as a remote server."""

    def __init__(self, here: Stack, there: Stack) -> None:
        self.here = here
        self.there = there

    def encode(self, text: str = "a text") -> httpx.Response:
        url = f"{self.here.urls[0]}/v1/encode/{MODEL}"
        return httpx.post(url, json={"items": [text]}, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        text = httpx.get(f"{self.here.metrics_urls[0]}/metrics", timeout=10).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def is_ready(self) -> bool:
        return self.metric("sie_gateway_remote_ready", remote="spare") == 1


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    with Stack(tmp_path / "there", Plan()) as there:
        server = {"name": "spare", "model": MODEL, "kind": "openai", "url": there.urls[0], "monthly_tokens": 100_000}
        environ = {"SIE_REMOTES": json.dumps({"remotes": [server]}), "SIE_LOAD_HOLD_S": "0"}
        with Stack(tmp_path / "here", Plan(environ=environ)) as here:
            yield Clusters(here, there)


@pytest.mark.long
def test_a_killed_remote_server_is_out_within_two_requests_and_comes_back_by_itself(clusters: Clusters) -> None:
    local = clusters.encode()
    assert local.headers["x-sie-served-by"] == "local"
    until(clusters.is_ready, 60, "the remote server is proven")
    for part in clusters.here.workers[0].parts:
        part.kill()

    def answers_elsewhere() -> bool:
        answer = clusters.encode()
        return answer.status_code == 200 and answer.headers["x-sie-served-by"] == "spare"

    until(answers_elsewhere, 60, "the remote server answers")
    remote = clusters.encode()
    assert remote.json()["items"] == local.json()["items"]
    gateway = clusters.there.gateways[0]
    gateway.kill()
    for _ in range(2):
        assert clusters.encode().status_code == 503
    assert not clusters.is_ready()
    assert clusters.metric("sie_gateway_remote_requests_total", result="failed") == 2
    assert clusters.encode().status_code == 503
    assert clusters.metric("sie_gateway_remote_requests_total", result="failed") == 2
    gateway.start()
    gateway.wait_ready()
    until(clusters.is_ready, 60, "the remote server is proven again")
    assert clusters.encode().json()["items"] == local.json()["items"]
