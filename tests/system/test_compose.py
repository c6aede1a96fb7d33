"""Services of docker-compose.yml without containers: the command and the variables of each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from cluster import MODEL, Cluster, running
from dockerfiles import composed, last_stage

from sie_contracts.settings import BY_NAME, load

TEXTS = [f"text {number}" for number in range(96)]


@contextmanager
def standalone(folder: Path, **environ: str) -> Iterator[Cluster]:
    """Run the process of `docker compose up standalone` with these variables, on a port of its own."""
    service = composed(environ)["services"]["standalone"]
    image = service["build"]["args"]["COMPONENT"]
    assert dict(last_stage(image))["ENTRYPOINT"] == '["sie", "serve"]'
    (folder / "models").mkdir()
    variables = {**service["environment"], "SIE_MODELS_DIR": str(folder / "models"), "SIE_PRELOAD_MODELS": MODEL}
    command = ["127.0.0.1" if word == "0.0.0.0" else word for word in service["command"]]
    with running(folder / "data", *command, environ=variables) as cluster:
        yield cluster


def batches(cluster: Cluster) -> list[int]:
    """Encode TEXTS, 32 at a time, and return the number of requests in the batch of each."""

    def encode(text: str) -> int:
        answer = cluster.encode([text], **{"x-sie-explain": "1"})
        assert answer.status_code == 200, answer.text
        (part,) = answer.json()["explain"]
        return int(part["batch"]["chunks"])

    with ThreadPoolExecutor(32) as threads:
        return list(threads.map(encode, TEXTS))


def test_the_requests_of_a_batch_of_the_standalone_service_are_bounded_by_its_variable(tmp_path: Path) -> None:
    with standalone(tmp_path, SIE_MAX_BATCH_REQUESTS="3") as cluster:
        assert max(batches(cluster)) in range(1, 4)


def test_without_the_variable_the_standalone_service_has_the_default() -> None:
    environ = composed({})["services"]["standalone"]["environment"]
    assert (
        load(environ=environ, mode="standalone").settings.max_batch_requests
        == BY_NAME["SIE_MAX_BATCH_REQUESTS"].default
    )
