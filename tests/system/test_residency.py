"""Models that an operator loads before the first request, and unloads: a real `sie serve`, with a broker and without
one, over HTTP and by `sie models load` and `unload`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import local_models
import pytest
from click.testing import CliRunner, Result
from cluster import MODEL, Cluster, running, until
from local_models import LocalModels

from sie_cli.main import main

ADMIN = "admin-token-of-a-test"
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}
LONG = ["the river runs through the winter garden " * 12] * 80  # seconds of work


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalModels:
    models = local_models.under(tmp_path_factory.mktemp("models"))
    models.build("cross")
    return models


@pytest.fixture(scope="module", params=[(), ("--standalone",)], ids=["broker", "standalone"])
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: LocalModels
) -> Iterator[Cluster]:
    arguments = [*request.param, "--no-spare", "--models-dir", str(models.folder)]
    environ = {
        "SIE_ADMIN_TOKEN": ADMIN,
        "SIE_LOAD_HOLD_S": "29",
    }  # on a busy machine a load takes longer than the default
    with running(tmp_path_factory.mktemp("residency"), *arguments, environ=environ) as cluster:
        yield cluster


def sie(cluster: Cluster, *args: str, token: str = ADMIN) -> Result:
    environ = {"SIE_ADMIN_TOKEN": token or None, "SIE_AUTH_TOKEN": None}
    return CliRunner().invoke(main, ["models", *args, "--url", cluster.url], env=environ)


def info(cluster: Cluster, model: str) -> dict[str, object]:
    record: dict[str, object] = httpx.get(f"{cluster.url}/v1/models/{model}", timeout=10).json()
    return record


def scored(cluster: Cluster) -> object:
    """Return the answer of test/cross, without the times."""
    body = {"query": "river", "items": ["a river", "a garden"]}
    answer = httpx.post(f"{cluster.url}/v1/score/test/cross", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name != "timing"}


def test_a_model_is_loaded_before_its_first_request_and_unloaded_again(cluster: Cluster) -> None:
    assert info(cluster, "test/cross")["state"] == "available"
    loaded = sie(cluster, "load", "test/cross", "--wait")
    assert loaded.exit_code == 0, loaded.output
    assert loaded.stdout.startswith("test/cross: loaded by "), loaded.output
    assert "test/cross: loading in _default." in loaded.stderr
    assert info(cluster, "test/cross")["loaded"] is True
    before = scored(cluster)
    again = sie(cluster, "load", "test/cross")
    assert (again.exit_code, "test/cross: loaded in _default." in again.stderr) == (0, True), again.output
    unload = sie(cluster, "unload", "test/cross", "--wait")
    assert unload.exit_code == 0, unload.output
    assert unload.stdout.startswith("test/cross: unloaded by "), unload.output
    assert info(cluster, "test/cross")["state"] == "available"
    assert "no worker has it loaded" in sie(cluster, "unload", "test/cross").stdout
    assert scored(cluster) == before  # the request loads it
    assert info(cluster, "test/cross")["loaded"] is True


def test_an_unload_leaves_a_request_that_runs_alone(cluster: Cluster) -> None:
    assert info(cluster, MODEL)["state"] == "available"
    with ThreadPoolExecutor(1) as threads:
        request = threads.submit(httpx.post, f"{cluster.url}/v1/encode/{MODEL}", json={"items": LONG}, timeout=120)
        until(  # the load is for this request, and its work follows at once
            lambda: request.done() or info(cluster, MODEL)["loaded"], 60, "the load", lambda: cluster.log()
        )
        assert not request.done(), request.result().text
        reply = httpx.post(f"{cluster.url}/v1/models/{MODEL}/unload", headers=AS_ADMIN, timeout=10)
        assert (reply.status_code, request.done()) == (202, False), reply.text
        answer = request.result()
    assert answer.status_code == 200, answer.text
    assert [slot for slot in answer.json()["items"] if "dense" not in slot] == []
    until(lambda: info(cluster, MODEL)["state"] == "available", 30, "the unload", lambda: cluster.log())
    short = httpx.post(f"{cluster.url}/v1/encode/{MODEL}", json={"items": ["a"]}, timeout=120)
    assert short.status_code == 200, short.text


def test_what_cannot_be_done_is_said_with_what_to_do(cluster: Cluster) -> None:
    unknown = sie(cluster, "load", "test/cros", "--wait")
    assert (unknown.exit_code, "did you mean test/cross?" in unknown.output) == (1, True), unknown.output
    refused = sie(cluster, "unload", "test/cross", token="")
    assert refused.exit_code == 1
    assert "SIE_ADMIN_TOKEN" in refused.output
    wrong = sie(cluster, "load", "test/cross", "--machine-profile", "h100")
    assert (wrong.exit_code, "no worker matches 'h100'" in wrong.output) == (1, True), wrong.output
    nobody = CliRunner().invoke(main, ["models", "load", "test/cross", "--url", "http://127.0.0.1:1"])
    assert (nobody.exit_code, "no gateway answers at http://127.0.0.1:1" in nobody.output) == (1, True)
