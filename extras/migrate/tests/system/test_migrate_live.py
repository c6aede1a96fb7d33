"""`sie migrate` of an index in use, in PostgreSQL and Qdrant's engine: an application writes all the time, the
command is killed again and again, and each row ends with the new model's vector of its latest text.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import local_models
import numpy as np
import pytest
from click.testing import CliRunner
from cluster import SIE, Cluster, running, until
from databases import with_extension
from live_application import Application, Points, Table, is_close
from postgres_server import PASSWORD, PostgresServer
from qdrant_server import QdrantServer

from sie_cli.main import main

OLD, NEW = "test/old", "test/new"
KEY = "k3y-of-qdrant"
ROWS, KILLS = 1500, 2
CLIENT_S = 0.02  # between two writes of the application: each flushes the engine of Qdrant

pytestmark = [pytest.mark.xdist_group("migrate live"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    try:
        server.begin()
        asyncio.run(with_extension(server))
        yield server
    finally:
        server.remove()


@pytest.fixture(scope="module")
def qdrant(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QdrantServer]:
    server = QdrantServer(tmp_path_factory.mktemp("qdrant"), key=KEY)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two models of one width and random weights: only their prompts differ, so they find the same neighbours."""
    folder = tmp_path_factory.mktemp("migrate-live")
    models = local_models.under(folder)
    models.build("old", "dense")
    entry = json.loads((models.folder / "old.yaml").read_text())
    models.add("new", {**entry, "id": NEW, "prompts": {"document": "red: {text}"}})
    with running(folder / "data", *models.arguments, "--no-spare") as cluster:
        yield cluster


# by name: the fixture of the engine, and the application over it
APPLICATIONS: dict[str, tuple[str, Callable[[Any, str], Application]]] = {
    "postgres": ("postgres", Table),
    "qdrant": ("qdrant", Points),
}


@pytest.fixture(params=APPLICATIONS)
def application(request: pytest.FixtureRequest) -> Iterator[Application]:
    name = f"docs-{re.sub('[^a-z]', '-', request.node.name.split('[')[0])[-30:]}"
    engine, opened_application = APPLICATIONS[request.param]
    application = opened_application(request.getfixturevalue(engine), name)
    yield application
    application.close()


_encoded: dict[tuple[str, str], list[float]] = {}  # by model and text: encoding all of them again takes minutes


def vectors(cluster: Cluster, model: str, texts: Sequence[str]) -> list[list[float]]:
    """Return the vectors that a model makes of texts, each computed once."""
    missing = [text for text in dict.fromkeys(texts) if (model, text) not in _encoded]
    for text, vector in zip(missing, encode(cluster, model, missing), strict=True):
        _encoded[model, text] = vector
    return [_encoded[model, text] for text in texts]


def encode(cluster: Cluster, model: str, texts: Sequence[str]) -> list[list[float]]:
    rows: list[list[float]] = []
    for start in range(0, len(texts), 1000):
        body = {"items": list(texts[start : start + 1000]), "params": {"priority": "bulk"}}
        answer = httpx.post(f"{cluster.url}/v1/encode/{model}", json=body, timeout=300)
        assert answer.status_code == 200, answer.text[:500]
        rows += [item["dense"]["values"] for item in answer.json()["items"]]
    return rows


def text_of(number: int) -> str:
    draw = random.Random(number)
    words = ("river", "engine", "violin", "law", "fox", "harbour", "desert", "mill", "quiet", "wooden", "early")
    return f"{' '.join(draw.choices(words, k=6))} {number}"


class Writer(threading.Thread):
    """An application that writes: texts with the vectors of the alias, new rows, changed ones, deletions."""

    def __init__(self, cluster: Cluster, alias: str, application: Application) -> None:
        super().__init__(daemon=True)
        self._cluster, self._alias, self._application = cluster, alias, application
        self._over = threading.Event()
        self.writes = 0
        self.gone: set[str] = set()
        self.failure: BaseException | None = None

    def run(self) -> None:
        draw = random.Random(3)
        try:
            while not self._over.wait(CLIENT_S):
                self.writes += 1
                (row_id,) = draw.choices([str(draw.randrange(ROWS // 2)), str(ROWS + self.writes)])
                text = f"{text_of(self.writes)} written"
                (vector,) = encode(self._cluster, self._alias, [text])
                asyncio.run(self._application.write({row_id: (text, vector)}))
                if self.writes % 10 == 0:
                    row_id = str(ROWS // 2 + self.writes)
                    asyncio.run(self._application.delete(row_id))
                    self.gone.add(row_id)
        except BaseException as error:
            self.failure = error
            raise

    def end(self) -> None:
        self._over.set()
        self.join(60)
        assert not self.is_alive()
        assert self.failure is None


def arguments(cluster: Cluster, alias: str, application: Application, *more: object) -> list[str]:
    how = ["--sink", "main", "--collection", application.collection, "--text", "{body}", "--sample", 40]
    return [str(word) for word in (SIE, "migrate", alias, NEW, *how, "--data-dir", cluster.data_dir, *more)]


def environ(application: Application) -> dict[str, str]:
    return {**os.environ, "SIE_JOBS_SINKS": f"main={application.url}"}


def sie(
    cluster: Cluster, alias: str, application: Application, *more: object, status: int = 0, url: str | None = None
) -> str:
    """Return the output of the command, run in this process: imports take most of a process of its own. `url` names
    another database.
    """
    sinks = {"SIE_JOBS_SINKS": f"main={url or application.url}"}
    done = CliRunner().invoke(main, arguments(cluster, alias, application, *more)[1:], env=sinks)
    assert done.exit_code == status, done.output + repr(done.exception) + cluster.log(20)
    assert isinstance(done.exception, SystemExit | None)
    output = done.stdout + done.stderr
    assert PASSWORD not in output
    assert KEY not in output
    return output


def filled(cluster: Cluster, alias: str, application: Application, rows: int) -> None:
    """Create an index of the old model, and its alias."""
    result = CliRunner().invoke(main, ["models", "alias", alias, OLD, "--data-dir", str(cluster.data_dir)])
    assert result.exit_code == 0, result.output

    def answers() -> bool:
        return httpx.post(f"{cluster.url}/v1/encode/{alias}", json={"items": ["a"]}, timeout=60).status_code == 200

    until(answers, 60, f"{alias} to be served", cluster.log)

    async def fill() -> None:
        first = vectors(cluster, OLD, ["a"])[0]
        await application.create(len(first))
        for start in range(0, rows, 5000):
            texts = [text_of(number) for number in range(start, min(rows, start + 5000))]
            encoded = vectors(cluster, OLD, texts)
            await application.write(
                {str(start + at): (text, vector) for at, (text, vector) in enumerate(zip(texts, encoded, strict=True))}
            )

    asyncio.run(fill())


def kill_after(cluster: Cluster, alias: str, application: Application, share: float) -> None:
    """Start the command, and kill it when `share` of the rows have a new vector."""
    process = subprocess.Popen(
        arguments(cluster, alias, application, "--step", "embed", "--min-agreement", 0),
        env=environ(application),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(
            lambda: process.poll() is not None or asyncio.run(application.new_vectors()) >= share * ROWS,
            400,
            f"{share:.0%} of the rows",
            cluster.log,
        )
        assert process.poll() is None, process.communicate()[0]
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()


def migrates(cluster: Cluster, alias: str, application: Application) -> tuple[object, Writer]:
    """Migrate under writes and kills, and go back. Return the rows from before, and the writer."""
    filled(cluster, alias, application, ROWS)
    original = asyncio.run(application.stored_rows())
    writer = Writer(cluster, alias, application)
    writer.start()
    try:
        for kill in range(KILLS):
            kill_after(cluster, alias, application, (kill + 0.5) / (KILLS + 1))
        printed = sie(cluster, alias, application, "--min-agreement", 0.01, "--json")
        facts, _ = json.JSONDecoder().raw_decode(printed)  # messages follow
        until(
            lambda: (
                httpx.post(f"{cluster.url}/v1/encode/{alias}", json={"items": ["a"]}, timeout=60).headers["x-sie-model"]
                == NEW
            ),
            30,
            "the flip",
        )
        writes = writer.writes
        until(lambda: writer.writes > writes + 5, 60, "the application to go on")
    finally:
        writer.end()
    assert facts["embed"]["gaps"] == {}
    assert facts["embed"]["embedded"] < ROWS, "what earlier runs have embedded is not embedded again"
    assert 0.01 <= facts["quality"]["recall"] <= 1

    sie(cluster, alias, application)  # a further run embeds what the application has written since
    complete(cluster, application, NEW, original, writer)
    output = sie(cluster, alias, application, "--step", "back")
    assert f"names {OLD} again" in output
    complete(cluster, application, OLD, original, writer)
    again = sie(cluster, alias, application, "--step", "back")
    assert "0 rows that were written during the switch were embedded again" in again
    complete(cluster, application, OLD, original, writer)
    return original, writer


def goes_on_and_ends(cluster: Cluster, alias: str, application: Application, original: object, writer: Writer) -> None:
    """Migrate again after the way back, and clean up."""
    sie(cluster, alias, application, "--min-agreement", 0)
    complete(cluster, application, NEW, original, writer)
    output = sie(cluster, alias, application, "--step", "clean-up")
    assert "there is no way back" in output
    assert asyncio.run(application.is_clean())
    assert f"names {NEW} already" in sie(cluster, alias, application)
    assert "no vectors of test/old" in sie(cluster, alias, application, "--step", "back", status=1)
    complete(cluster, application, NEW, original, writer)


def complete(cluster: Cluster, application: Application, model: str, original: object, writer: Writer) -> None:
    """Check that no row is lost, and that each has the vector that a model makes of its text."""
    stored_rows = asyncio.run(application.stored_rows())
    assert isinstance(original, dict)
    assert original.keys() - writer.gone <= stored_rows.keys()
    texts = {row_id: text for row_id, (text, _) in stored_rows.items()}
    expected = vectors(cluster, model, [text or "" for text in texts.values()])
    wrong = [
        row_id
        for row_id, vector in zip(texts, expected, strict=True)
        if not is_close(stored_rows[row_id][1], np.array(vector))
    ]
    assert wrong == []


# each takes a minute; extras/jobs/tests/contract/test_live_collections.py writes to every store while it is migrated
@pytest.mark.parametrize(
    "application",
    [pytest.param(name, marks=() if name == "postgres" else pytest.mark.long) for name in APPLICATIONS],
    indirect=True,
)
def test_each_row_has_the_new_vector_of_its_latest_text_after_kills_and_under_writes(
    cluster: Cluster, application: Application
) -> None:
    alias = f"live-{type(application).__name__.lower()}"
    goes_on_and_ends(cluster, alias, application, *migrates(cluster, alias, application))
