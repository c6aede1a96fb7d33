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
from pathlib import Path
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
ROWS, KILLS = 2500, 2
MANY_ROWS, MANY_KILLS = 100_000, 5
CLIENT_S, MANY_CLIENT_S = 0.02, 0.2  # between two writes of the application: each flushes the engine of Qdrant

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


# what the command says does not depend on the store
POSTGRES = pytest.mark.parametrize("application", ["postgres"], indirect=True)


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

    def __init__(self, cluster: Cluster, alias: str, application: Application, rows: int, client_s: float) -> None:
        super().__init__(daemon=True)
        self._client_s = client_s
        self._cluster, self._alias, self._application, self._rows = cluster, alias, application, rows
        self._over = threading.Event()
        self.writes = 0
        self.gone: set[str] = set()
        self.failure: BaseException | None = None

    def run(self) -> None:
        draw = random.Random(3)
        try:
            while not self._over.wait(self._client_s):
                self.writes += 1
                (row_id,) = draw.choices([str(draw.randrange(self._rows // 2)), str(self._rows + self.writes)])
                text = f"{text_of(self.writes)} written"
                (vector,) = encode(self._cluster, self._alias, [text])
                asyncio.run(self._application.write({row_id: (text, vector)}))
                if self.writes % 10 == 0:
                    row_id = str(self._rows // 2 + self.writes)
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


def kill_after(cluster: Cluster, alias: str, application: Application, share: float, rows: int) -> None:
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
            lambda: process.poll() is not None or asyncio.run(application.new_vectors()) >= share * rows,
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


def migrates(
    cluster: Cluster, alias: str, application: Application, rows: int, kills: int, client_s: float
) -> tuple[object, Writer]:
    """Migrate under writes and kills, and go back. Return the rows from before, and the writer."""
    filled(cluster, alias, application, rows)
    original = asyncio.run(application.stored_rows())
    writer = Writer(cluster, alias, application, rows, client_s)
    writer.start()
    try:
        for kill in range(kills):
            kill_after(cluster, alias, application, (kill + 0.5) / (kills + 1), rows)
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
    assert facts["embed"]["embedded"] < rows, "what earlier runs have embedded is not embedded again"
    assert 0.01 <= facts["quality"]["recall"] <= 1
    print(f"{rows} rows, {kills} kills, {writer.writes} writes: {facts}")

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
    goes_on_and_ends(cluster, alias, application, *migrates(cluster, alias, application, ROWS, KILLS, CLIENT_S))


@POSTGRES
def test_ctrl_c_ends_the_command_and_says_how_to_go_on(cluster: Cluster, application: Application) -> None:
    alias = f"stopped-{type(application).__name__.lower()}"
    filled(cluster, alias, application, 2000)
    process = subprocess.Popen(
        arguments(cluster, alias, application),
        env=environ(application),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        until(lambda: asyncio.run(application.new_vectors()) > 0, 120, "the first new vectors", cluster.log)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, output
    assert "stopped in the step embed: searches did not change; repeat the command to continue" in output
    assert "Traceback" not in output


@POSTGRES
def test_what_cannot_be_migrated_is_refused_and_nothing_changes(
    cluster: Cluster, application: Application, tmp_path: Path
) -> None:
    """The cases: rows without a text, models that agree too little, a column that no row has, a collection and a
    database that are not there. Each refusal names the remedy, and the index is as it was.
    """
    alias = f"refused-{type(application).__name__.lower()}"
    filled(cluster, alias, application, 200)
    width = len(vectors(cluster, OLD, ["a"])[0])
    asyncio.run(application.write({"201": (None, [1.0] * width)}))
    before = asyncio.run(application.stored_rows())
    output = sie(cluster, alias, application, "--min-agreement", 0, status=1)
    assert "1 row: column 'body' is" in output
    assert "1 row without the new vector" in output
    assert "--yes" in output
    output = sie(cluster, alias, application, "--min-agreement", 1, status=1)
    assert "is below --min-agreement 1; nothing was switched" in output
    assert asyncio.run(application.stored_rows()) == before
    for more, why, status in (
        (("--vector", "other"), "--vector", 1),
        (("--sink", "none"), "SIE_JOBS_SINKS has no database of this name", 2),
        (("--step", "shadow"), "has no such step", 2),
        (("--text", "{titel}"), "titel", 1),
        (("--collection", "nothing"), "nothing", 1),
    ):
        assert why in sie(cluster, alias, application, *more, status=status)
    nobody = re.sub(r":\d+(/|$)", r":1\1", application.url)
    assert "cannot be reached" in sie(cluster, alias, application, status=1, url=nobody)
    asyncio.run(application.write({"7": (None, before["7"][1])}))
    output = sie(cluster, alias, application, "--min-agreement", 0, status=1)
    assert "2 rows without the new vector" in output
    assert "2 rows: column 'body' is" in output
    assert "(ids 7, 201)" in output
    assert asyncio.run(application.beside("new"))["7"] == (None, None), "the vector of its earlier text is removed"
    output = sie(cluster, alias, application, "--min-agreement", 0, "--yes")
    assert "2 rows: column 'body' is" in output
    stored_rows = asyncio.run(application.stored_rows())
    assert stored_rows.keys() == before.keys()
    assert stored_rows["201"][1] is None
    assert stored_rows["7"] == (None, None)
    asyncio.run(application.write({"202": (None, [1.0] * width)}))
    output = sie(cluster, alias, application, "--step", "back", status=1)
    assert "1 row without the old vector" in output
    assert "ids 202" in output
    assert asyncio.run(application.stored_rows()).keys() == before.keys() | {"202"}
    sie(cluster, alias, application, "--step", "back", "--yes")
    back = asyncio.run(application.stored_rows())
    assert back["202"][1] is None
    assert {key: back[key] for key in before.keys() - {"7"}} == {key: before[key] for key in before.keys() - {"7"}}
