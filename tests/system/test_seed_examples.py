"""The two examples that end the documentation of the configuration, each unchanged except for device, bucket and
collector: `sie serve` starts with it, and answers from what the example names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import local_models
import pytest
from cluster import SIE, running
from documented_examples import DEVELOPMENT, PRODUCTION, exported
from object_stores import BUCKET, Place, s3_server
from otlp import Collector

pytestmark = pytest.mark.long

DISK = Path("/mnt/nvme")  # of PRODUCTION


def values(url: str, model: str) -> list[float]:
    answer = httpx.post(f"{url}/v1/encode/{model}", json={"items": [{"text": "river"}]}, timeout=180, trust_env=False)
    assert answer.status_code == 200, answer.text
    vector: list[float] = answer.json()["items"][0]["dense"]["values"]
    return vector


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started


@pytest.fixture
def bucket(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A bucket that speaks S3, to which the variables of a client lead."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        place = Place.at(server, monkeypatch)
        yield Place(f"s3://{BUCKET}/models", place.server)


@pytest.fixture
def disk() -> Iterator[None]:
    """The disk of the example, which this test makes and removes."""
    if DISK.exists() or not os.access(DISK.parent, os.W_OK):
        pytest.skip(f"{DISK} is to be made by this test, and may not")
    yield
    shutil.rmtree(DISK, ignore_errors=True)


def test_the_production_example_serves(bucket: Place, collector: Collector, disk: None, tmp_path: Path) -> None:
    """A model is in the bucket: its entry in models/, its weights in weights/; `sie serve` reads both, keeps the
    weights on the disk, logs JSON, and sends its traces to the collector.
    """
    replaced = {"=cuda": "=cpu", "my-bucket": BUCKET, "http://collector:4317": collector.url}
    environ = exported(PRODUCTION, replaced)
    models = local_models.under(tmp_path)
    folder = models.build("dense")
    argv = [SIE, "weights", "push", str(folder), "--as", "my/model"]
    pushed = subprocess.run(argv, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    assert pushed.returncode == 0, pushed.stdout + pushed.stderr
    (revision,) = set(re.findall(r"revision: (\w+)", pushed.stdout))
    entry = json.loads((models.folder / "dense.yaml").read_text())
    bucket.put(
        "model.yaml",
        json.dumps({**entry, "id": "my/model", "weights": {"hub": "my/model", "revision": revision}}).encode(),
    )
    with running(tmp_path / "data", environ=environ) as cluster:
        assert len(values(cluster.url, "my/model")) == local_models.WIDTH
        collector.until(
            lambda spans: {"gateway", "sidecar", "adapter"} <= {span.component for span in spans},
            "spans of every component",
        )
        records = [json.loads(line) for line in cluster.lines]
        assert {"timestamp", "level", "logger", "message", "model", "request_id", "trace_id", "latency_ms"} <= records[
            -1
        ].keys()
    assert list((DISK / "cache").rglob("*.safetensors"))
    assert {span.resource["service.name"] for span in collector.spans} == {"sie-server"}


def test_the_development_example_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in the folder `models` of the working directory is served."""
    models = local_models.under(tmp_path)
    models.build("dense")
    monkeypatch.chdir(tmp_path)
    with running(tmp_path / "data", environ=exported(DEVELOPMENT, {"=mps": "=cpu"})) as cluster:
        assert len(values(cluster.url, "test/dense")) == local_models.WIDTH
