"""`sie migrate` on a live cluster: an alias in use moves to another model and back, and no client sees an error; a
gateway is killed while the corpus is encoded; models that agree too little change nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import local_models
import pytest
from click.testing import CliRunner, Result
from cluster import SIE, Cluster, running, until
from qdrant_server import QdrantServer

from sie_cli.main import main

ADMIN = "canary-of-migrations"
OLD, NEW, OTHER = "test/mini", "test/prompted", "test/dense"
CONFIGS = "/v1/configs/models"
ROWS = 700
CLIENT_S = 0.02  # from an answer to the next request
PLACES, THINGS = ("Paris", "the mill", "Lagos", "the harbour", "a desert"), ("river", "engine", "violin", "law", "fox")
DEEDS = ("passes", "is described by", "was sold to", "is older than", "waits for")
TEXT = "A violin that waits in Lagos."


def sentences(count: int) -> list[str]:
    draw = random.Random(7)
    words = ("quiet", "long", "red", "broken", "famous", "wooden", "early", "northern")
    return [
        f"The {draw.choice(words)} {draw.choice(THINGS)} {draw.choice(DEEDS)} {draw.choice(PLACES)}, "
        f"said a {draw.choice(words)} {draw.choice(THINGS)} in {1200 + number}."
        for number in range(count)
    ]


@pytest.fixture(scope="module")
def qdrant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QdrantServer]:
    server = QdrantServer(tmp_path_factory.mktemp("qdrant"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, qdrant: QdrantServer) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("migrate")
    models = local_models.under(folder)
    models.build("mini")
    models.build("dense")
    entry = json.loads((models.folder / "mini.yaml").read_text())
    models.add("prompted", {**entry, "id": NEW, "prompts": {"document": "text: {text}"}})
    environ = {"SIE_ADMIN_TOKEN": ADMIN, "SIE_JOBS_SINKS": f"main={qdrant.url}"}
    with running(folder / "data", *models.arguments, "--no-spare", environ=environ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "docs.jsonl"
    lines = [json.dumps({"id": f"d{number}", "body": text}) for number, text in enumerate(sentences(ROWS))]
    path.write_text("\n".join(lines))
    return path


def command(cluster: Cluster, *arguments: object) -> list[str]:
    return [SIE, *map(str, arguments), "--data-dir", str(cluster.data_dir)]


def sie(cluster: Cluster, *arguments: object, status: int = 0) -> Result:
    result = CliRunner().invoke(main, command(cluster, *arguments)[1:])
    assert result.exit_code == status, result.output + repr(result.exception) + cluster.log(20)
    return result


def migration(alias: str, model: str, corpus: Path, *more: object) -> list[object]:
    how = ["--corpus", corpus, "--text", "{body}", "--id", "id", "--sample", 120, "--min-agreement", 0.5]
    return ["migrate", alias, model, *how, "--shadow-share", 1, "--shadow-s", 2, *more]


def history(cluster: Cluster, alias: str) -> list[dict[str, Any]]:
    url = f"{cluster.health()['config_url']}{CONFIGS}/{alias}/history"
    revisions: list[dict[str, Any]] = httpx.get(url, headers={"authorization": f"Bearer {ADMIN}"}, timeout=60).json()[
        "revisions"
    ]
    return revisions


def ask(cluster: Cluster, name: str, client: httpx.Client | None = None) -> httpx.Response:
    post = client.post if client else httpx.post
    return post(f"{cluster.url}/v1/encode/{name}", json={"items": [TEXT]}, timeout=60)


def alias(cluster: Cluster, name: str, model: str) -> None:
    sie(cluster, "models", "alias", name, model)
    until(lambda: ask(cluster, name).status_code == 200, 60, f"{name} to be served", cluster.log)


class Client(threading.Thread):
    """Asks for an alias again and again until `end`. Keeps status, model and fingerprint of each answer."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(daemon=True)
        self._cluster, self._name = cluster, name
        self._over = threading.Event()
        self.seen: list[tuple[int, str, str]] = []

    def run(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._over.wait(CLIENT_S):
                answer = ask(self._cluster, self._name, client)
                headers = answer.headers
                self.seen.append(
                    (answer.status_code, headers.get("x-sie-model", ""), headers.get("x-sie-fingerprint", ""))
                )

    def end(self) -> None:
        self._over.set()
        self.join(60)
        assert not self.is_alive()


def test_an_index_never_gets_vectors_of_two_models(
    cluster: Cluster, corpus: Path, qdrant: QdrantServer, tmp_path: Path
) -> None:
    """A job of the old model fills a collection: a migration into it is refused before a job runs. No job made a
    collection of another width: the database refuses, the job is paused, the command says how to go on, and the alias
    stays. A third collection is new: it has each row once, and the alias is flipped.
    """
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(corpus.read_text().splitlines()[:30]))
    collections = f"http://127.0.0.1:{qdrant.port}/collections"
    alias(cluster, "library", OLD)
    into = ["--sink", "main", "--collection"]
    sie(cluster, "jobs", "submit", OLD, few, "--text", "{body}", "--id", "id", *into, "docs", "--wait")
    arguments = [*migration("library", OTHER, few), "--min-agreement", 0, "--shadow-s", 0, *into]
    before = json.loads(sie(cluster, "jobs", "list", "--json").stdout)
    refused = sie(cluster, *arguments, "docs", status=1)
    assert f"the collection docs of main has vectors of {OLD}" in refused.stderr
    assert json.loads(sie(cluster, "jobs", "list", "--json").stdout) == before

    response = httpx.put(f"{collections}/foreign", json={"vectors": {"size": 7, "distance": "Cosine"}}, timeout=60)
    assert response.status_code == 200, response.text
    paused = sie(cluster, *arguments, "foreign", status=1)
    assert "is paused by SINK_REFUSED" in paused.stderr
    assert "sie jobs resume" in paused.stderr
    assert len(history(cluster, "library")) == 1
    newest = json.loads(sie(cluster, "jobs", "list", "--json").stdout)[0]
    sie(cluster, "jobs", "cancel", newest["id"])

    done = sie(cluster, *arguments, "docs-2")
    assert f"library names {OTHER} since revision 2" in done.stdout
    counted = httpx.post(f"{collections}/docs-2/points/count", json={"exact": True}, timeout=60).json()
    assert counted["result"]["count"] == 30


@contextlib.contextmanager
def paused(pids: Sequence[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_a_migration_goes_on_after_a_killed_gateway_and_no_client_sees_it(
    cluster: Cluster, corpus: Path, tmp_path: Path
) -> None:
    """A migration is to stop after the step embed; its gateway is killed in the middle of the job. The command waits
    for the next gateway, the job completes, and the alias stays. From then on a client asks for the alias all the time.
    The same command is stopped by Ctrl-C in the step shadow, and run again: it takes the same job and the same shadow,
    and flips the alias. Each answer is of one of the two models. The step back restores the revision before the shadow.
    The client saw no error.
    """
    alias(cluster, "search", OLD)
    output = tmp_path / "vectors"
    arguments = migration("search", NEW, corpus, "--output", output)
    stdout = ""
    embedding = command(cluster, *arguments, "--step", "embed")
    with subprocess.Popen(embedding, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            while "3/5 embed: submitted" not in stdout:
                line = process.stdout.readline()
                assert line, stdout
                stdout += line

            def working() -> bool:
                counts = [job["counts"] for job in httpx.get(f"{cluster.url}/v1/jobs", timeout=60).json()["data"]]
                return any(count["rows"] == ROWS and count["done"] < ROWS for count in counts)

            with paused(cluster.pids("adapter")):  # otherwise the job may end before its gateway is killed
                until(working, 120, "a job that runs", cluster.log)
                (gateway,) = cluster.pids("gateway")
                os.kill(gateway, signal.SIGKILL)
            stdout += process.stdout.read()
        finally:
            process.kill()
    assert process.returncode == 0, stdout + cluster.log(40)
    assert cluster.pids("gateway") != [gateway]
    assert f"{ROWS:,} of {ROWS:,} rows" in stdout
    assert (output / "manifest.json").exists()
    assert len(history(cluster, "search")) == 1
    job = json.loads(sie(cluster, "jobs", "list", "--json").stdout)[0]
    prints = {model: ask(cluster, model).headers["x-sie-fingerprint"] for model in (OLD, NEW)}
    assert job["fingerprint"] == prints[NEW] != prints[OLD]

    client = Client(cluster, "search")
    client.start()
    try:
        stopped = subprocess.Popen(
            command(cluster, *arguments, "--shadow-s", 600), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        until(lambda: len(history(cluster, "search")) == 2 or stopped.poll() is not None, 60, "a shadow", cluster.log)
        stopped.send_signal(signal.SIGINT)
        stdout, _ = stopped.communicate(timeout=60)
        assert stopped.returncode == 130, stdout
        assert "stopped in the step shadow: the shadow stays; repeat the command to continue" in stdout
        assert "the same `sie migrate`" not in stdout, "the job had ended"
        done = sie(cluster, *arguments, "--json")
        facts = json.loads(done.stdout)
        assert facts["embed"]["job"] == job["id"], "the same job"
        assert facts["shadow"]["copies"]["done"] > 0, facts
        assert facts["flip"]["before"] == OLD
        until(lambda: client.seen[-1][1] == NEW, 30, "the client to be answered by the new model")
        again = sie(cluster, *arguments)
        assert f"search names {NEW} already" in again.stdout
        undone = sie(cluster, "migrate", "search", "--step", "back")
        assert f"search names {OLD} again: revision 4 repeats revision 1" in undone.stdout
        until(lambda: client.seen[-1][1] == OLD, 30, "the client to be answered by the old model")
    finally:
        client.end()
    assert {status for status, *_ in client.seen} == {200}
    assert {(model, fingerprint) for _, model, fingerprint in client.seen} == set(prints.items())
    turns = [
        model
        for (_, model, _), before in zip(client.seen, [(0, "", ""), *client.seen], strict=False)
        if model != before[1]
    ]
    assert turns == [OLD, NEW, OLD]
    told_history = history(cluster, "search")
    assert [revision["operation"] for revision in told_history] == ["rollback", "patch", "patch", "create"]
    assert all(revision["author"] for revision in told_history)
    twice = sie(cluster, "migrate", "search", "--step", "back", status=1)
    assert "is already a rollback" in twice.stderr
