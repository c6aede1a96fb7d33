"""Fixtures that all files of this folder share: one set of small models, and the clusters of `shared`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import fuzz
import local_models
import pytest
import shared
from browser import browsing
from cluster import MODEL, Cluster, running
from groups import group
from local_models import LocalModels
from stack import Plan, Stack

OPEN_DEFAULTS = "embed=test/dense,rerank=test/cross,embed_sparse=test/sparse"
# kinds that the guarded cluster serves, and kinds that it also serves as `watched/...` for tests that count requests
GUARDED_KINDS = ("mini", "cross", "m3", "late", "reranker", "classes")
WATCHED_KINDS = ("mini", "late", "tags")
CLUSTERS = shared.Shared()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """End the objects of a group with its last test, after the fixtures of that test."""
    try:
        yield
    finally:
        if nextitem is None or group(nextitem) != group(item):
            CLUSTERS.end()


def pytest_sessionfinish() -> None:
    """End the shared objects also after Ctrl-C, when pytest tears down no test."""
    CLUSTERS.end()


# A fixture that several conftest.py files take is one for each of them, but the cluster that has these models is one.
_models: dict[str, LocalModels] = {}


def _every_family(factory: pytest.TempPathFactory) -> LocalModels:
    models = local_models.under(factory.mktemp("every-family"))
    for name in local_models.KINDS:
        models.build(name)
    return models


def _open_models(factory: pytest.TempPathFactory, every_family: LocalModels) -> LocalModels:
    models = LocalModels(factory.mktemp("open-models"), every_family.weights)
    for file in every_family.folder.iterdir():
        entry = json.loads(file.read_text())
        models.add(file.stem, entry)
        if file.stem in local_models.PUBLISHED:
            models.add(f"readme-{file.stem}", {**entry, "id": local_models.PUBLISHED[file.stem]})
    return models


@pytest.fixture(scope="session")
def every_family(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    """One model of each kind in `local_models.KINDS`, under the name of its kind."""
    if "every" not in _models:
        _models["every"] = _every_family(tmp_path_factory)
    return _models["every"]


@pytest.fixture(scope="session")
def open_models(tmp_path_factory: pytest.TempPathFactory, every_family: LocalModels) -> LocalModels:
    """Return the models that the open cluster serves beside the packaged ones. A test file adds its own models."""
    if "open" not in _models:
        _models["open"] = _open_models(tmp_path_factory, every_family)
    return _models["open"]


@pytest.fixture(scope="module")
def open_cluster(tmp_path_factory: pytest.TempPathFactory, open_models: LocalModels) -> Cluster:
    """A cluster of two gateways without tokens and one worker. It has the packaged models and one of each kind, in
    float32.
    """
    arguments = ["--preload", MODEL, "--models-dir", str(open_models.folder), "--default-models", OPEN_DEFAULTS]
    # in bfloat16 a CPU with AMX takes another kernel for few rows than for many
    arguments += ["--default-compute-precision", "float32", "--batcher-coalesce-ms", "20", "--no-spare"]
    environ = {"SIE_ADMIN_TOKEN": shared.ADMIN, "SIE_HF_FALLBACK": "false"}
    return CLUSTERS.get(
        "open", lambda: running(tmp_path_factory.mktemp("open"), *arguments, environ=environ, gateways=2)
    )


@pytest.fixture(scope="module")
def guarded_cluster(tmp_path_factory: pytest.TempPathFactory, every_family: LocalModels) -> Cluster:
    """A cluster with tokens, with secrets of other services in its environment, with a data directory that exists
    before the start and that everybody may enter, and with inputs of 1 KiB or more in the payload store.
    """

    @contextmanager
    def start() -> Iterator[Cluster]:
        models = LocalModels(tmp_path_factory.mktemp("guarded-models"), every_family.weights)
        for kind in GUARDED_KINDS:
            shutil.copy(every_family.folder / f"{kind}.yaml", models.folder)
        for kind in WATCHED_KINDS:
            entry = json.loads((every_family.folder / f"{kind}.yaml").read_text())
            models.add(f"watched-{kind}", {**entry, "id": f"watched/{kind}"})
        arguments = [
            "--models-dir",
            str(models.folder),
            "--model-filter",
            ",".join([MODEL, *models.names]),
            "--no-spare",
        ]
        environ = {
            "SIE_AUTH_MODE": "token",
            "SIE_AUTH_TOKEN": shared.USER,
            "SIE_ADMIN_TOKEN": shared.GUARDED_ADMIN,
            "SIE_INLINE_PAYLOAD_BYTES": "1024",
            "SIE_MAX_CONCURRENT_REQUESTS": str(shared.PLACES),
            **shared.CANARIES,
        }
        with tempfile.TemporaryDirectory(prefix="sie-guarded-", dir="/tmp") as folder:
            data = Path(folder, "data")
            data.mkdir()
            for directory in (Path(folder), data):
                directory.chmod(0o755)
            with running(data, *arguments, environ=environ) as cluster:
                yield cluster

    return CLUSTERS.get("guarded", start)


@pytest.fixture(scope="module")
def toy_stack(tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """A stack with the fixed-cost adapter. Its only model is the default of every task."""
    defaults = ",".join(f"{name}={fuzz.MODEL}" for name in ("embed", "embed_sparse", "embed_all", "rerank", "predict"))
    environ = {
        "SIE_DEFAULT_MODELS": defaults,
        "SIE_ADMIN_TOKEN": shared.ADMIN,
        "SIE_GATEWAY_CONFIGURED_GPUS": "cpu",
    }

    def start() -> Stack:
        folder = tmp_path_factory.mktemp("toy")
        store = {"SIE_PAYLOAD_STORE_URL": str(folder / "payloads")}
        return Stack(folder, Plan((fuzz.MODEL,), environ={**environ, **store}))

    return CLUSTERS.get("toy", start)


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a browser and return the address of its DevTools."""
    with browsing(tmp_path_factory.mktemp("chromium")) as devtools:
        yield devtools
