"""Jobs with databases: a refusal pauses a job, a temporary failure is retried, and no row is computed twice."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pyarrow.parquet as parquet
import pytest
from fake_adapter import FakeAdapter, toy_entry
from inprocess import GatewayProcess, InProcess, until_told

from sie_bulk_jobs.datasets.answers import RowAnswer
from sie_bulk_jobs.datasets.rows import InputRow
from sie_bulk_jobs.gateway import native, run, scheduler
from sie_bulk_jobs.sinks import opening
from sie_bulk_jobs.sinks.sink import CollectionMissing, Kind, Output, Sink, SinkRows, Widths
from sie_contracts.errors import ErrorInfo
from sie_contracts.settings import SettingError
from sie_store.object_stores import AccessRefused, StoreError

MODEL = "toy/one"
OUTPUT = {"sink": "main", "collection": "c"}


class Database:
    """A database in memory. `errors`: exceptions of its next calls of `upsert`. `refused`: ids of rows that it cannot
    store.
    """

    def __init__(self) -> None:
        self.prepared: list[tuple[str, Widths]] = []
        self.errors: list[Exception] = []
        self.refused: set[str] = set()
        self.upserts = 0
        self.rows: dict[str, Mapping[str, Any]] = {}

    async def prepare(self, collection: str, widths: Widths, kinds: Mapping[str, Kind]) -> None:
        self.prepared.append((collection, widths))

    async def upsert(self, rows: SinkRows) -> None:
        self.upserts += 1
        if self.errors:
            raise self.errors.pop(0)
        self.rows |= dict(zip(rows.ids, rows.payloads, strict=True))

    def refusals(self, rows: SinkRows) -> dict[int, str]:
        return {number: "too long" for number, row_id in enumerate(rows.ids) if row_id in self.refused}

    async def close(self) -> None:
        """There is nothing to release."""


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Database:
    database = Database()

    def opened(url: str, setting: str) -> Sink:
        if not url.startswith("qdrant:"):
            raise SettingError(setting, "no such database")
        return database

    monkeypatch.setattr(opening, "opened", opened)
    return database


class Place:
    """A cluster whose gateway runs jobs."""

    def __init__(self, gateway: GatewayProcess, adapter: FakeAdapter) -> None:
        self._client, self._adapter = gateway.client, adapter

    async def submit(self, rows: int, status: int = 201, *, keep: tuple[str, ...] = (), **more: Any) -> Any:
        """Submit a job over `rows` rows. Return the job, or the error of its refusal."""
        data = b"".join(
            json.dumps({"id": f"r{number}", "t": f"text {number}", "_id": number}).encode() + b"\n"
            for number in range(rows)
        )
        sent = await self._client.post("/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "jobs"})
        texts = {"query": "q", "document": "{t}"} if more.get("operation") == "score" else {"text": "{t}"}
        source = {"file": sent.json()["id"], "id": "id", "keep": keep, **texts}
        answer = await self._client.post("/v1/jobs", json={"model": MODEL, "input": source, **more})
        assert answer.status_code == status, answer.text
        return answer.json() if status == 201 else answer.json()["error"]

    async def until(self, job: str, *states: str) -> Any:
        """Wait until the job is in one of these states, and return it. `waits`: the job has a `trouble`."""

        async def reached() -> Any:
            info = (await self._client.get(f"/v1/jobs/{job}")).json()
            return info if info["state"] in states or ("waits" in states and info["trouble"]) else None

        return await until_told(reached, f"the job is {' or '.join(states)}")

    async def rows(self, job: str) -> int:
        """Return the number of rows in the only part of the job."""
        data = (await self._client.get(f"/v1/jobs/{job}/part?name=part-00000.parquet")).content
        return int(parquet.read_table(io.BytesIO(data)).num_rows)

    async def errors(self, job: str) -> dict[str, str]:
        """Return the code of each failed row."""
        rows = (await self._client.get(f"/v1/jobs/{job}/rows?failed=true")).json()["rows"]
        return {row["id"]: row["error"]["code"] for row in rows}

    def asked(self) -> int:
        """Return the number of inputs that the adapter ran."""
        return sum(len(batch.lengths) // 4 for batch in self._adapter.batches)


@pytest.fixture
async def place(tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(scheduler, "EVERY_S", 0.05)
    monkeypatch.setattr(run, "FLUSH_S", 0.05)
    monkeypatch.setattr(run, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(run, "MAX_PAUSE_S", 0.05)
    async with InProcess(tmp_path, toy_entry(MODEL, outputs={"dense": 8, "sparse": 100, "multivector": 8})) as cluster:
        adapter = await cluster.adapter()
        gateway = await cluster.gateway(
            SIE_PAYLOAD_STORE_URL=str(cluster.folder / "payloads"),
            SIE_JOBS_SINKS="main=qdrant://127.0.0.1:1,other=postgresql://127.0.0.1:1/db",
        )
        await cluster.sidecar(adapter)
        yield Place(gateway, adapter)


async def test_a_database_that_is_away_gets_its_rows_later_and_no_model_is_asked_again(
    place: Place, database: Database
) -> None:
    database.errors = [StoreError("away")] * 3
    job = (await place.submit(20, output=OUTPUT))["id"]
    info = await place.until(job, "completed")
    assert (info["counts"]["done"], place.asked(), database.upserts) == (20, 20, 4)
    assert database.rows.keys() == {f"r{number}" for number in range(20)}
    assert await place.rows(job) == 20


async def test_a_store_that_is_away_after_the_database_has_its_rows_does_not_send_them_again(
    place: Place, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_async, refused = obstore.put_async, 0

    async def put(store: Any, path: str, *arguments: Any, **options: Any) -> Any:
        nonlocal refused
        if "/part-" in path and not refused:
            refused += 1
            raise PermissionError("status code: 403")
        return await put_async(store, path, *arguments, **options)

    monkeypatch.setattr(obstore, "put_async", put)
    job = (await place.submit(5, output=OUTPUT))["id"]
    await place.until(job, "completed")
    assert (refused, database.upserts, place.asked()) == (1, 1, 5)


@pytest.mark.parametrize(
    ("error", "upserts"),
    [(AccessRefused("Qdrant refuses the API key"), 1), (CollectionMissing("Qdrant has no such collection"), 2)],
)
async def test_what_only_people_can_change_at_a_database_pauses_the_job(
    place: Place, database: Database, error: Exception, upserts: int
) -> None:
    database.errors = [error] * 10
    job = (await place.submit(5, output=OUTPUT))["id"]
    info = await place.until(job, "paused", "waits")
    assert info["error"] == {"code": "SINK_REFUSED", "message": f"main: {error}", "param": "output.sink"}
    assert (database.upserts, place.asked()) == (upserts, 5)


async def test_a_row_that_the_database_cannot_store_fails_alone(place: Place, database: Database) -> None:
    database.refused = {"r3", "r4"}
    job = (await place.submit(20, output=OUTPUT))["id"]
    info = await place.until(job, "completed", "paused")
    assert (info["state"], info["counts"]["done"], info["counts"]["failed"]) == ("completed", 20, 2)
    assert database.rows.keys() == {f"r{number}" for number in range(20)} - {"r3", "r4"}
    assert await place.errors(job) == {"r3": "SINK_REFUSED", "r4": "SINK_REFUSED"}


async def test_a_collection_that_was_removed_is_made_again(place: Place, database: Database) -> None:
    database.errors = [CollectionMissing("Qdrant has no such collection")]
    job = (await place.submit(20, output=OUTPUT))["id"]
    await place.until(job, "completed")
    assert database.prepared == [("c", {"dense": 8}), ("c", {"dense": 8})]
    assert (len(database.rows), place.asked()) == (20, 20)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"output": {"sink": "nobody", "collection": "c"}}, "output.sink"),
        ({"output": {"sink": "main"}}, "output.collection"),
        ({"output": {"sink": "main", "collection": "-c"}}, "output.collection"),
        ({"output": {"sink": "main", "collection": "c" * 64}}, "output.collection"),
        (
            {"params": {"output_types": ["dense", "multivector"]}, "output": {**OUTPUT, "sink": "other"}},
            "params.output_types",
        ),
        ({"params": {"output_dtype": "int8"}}, "params.output_dtype"),
        ({"params": {"output_dtype": "binary"}}, "params.output_dtype"),
        ({"params": {"dimensions": 7}}, "params.dimensions"),
        ({"keep": ("_id",)}, "input.keep"),
        ({"operation": "score"}, "operation"),
    ],
)
async def test_what_a_database_cannot_have_is_refused_before_it_is_computed(
    place: Place, more: dict[str, Any], param: str
) -> None:
    assert (await place.submit(1, 400, **{"output": OUTPUT, **more}))["param"] == param


@pytest.mark.parametrize("outputs", [["dense", "sparse", "multivector"], ["sparse"], ["multivector"]])
def test_each_output_of_a_row_is_written_with_its_width(outputs: list[Output]) -> None:
    """Vectors have half precision. Sparse vectors are unordered and contain a zero."""
    widths: Widths = {"dense": 8, "sparse": 100, "multivector": 4}
    vectors = {
        "dense": {"dense": np.ones(8, np.float16)},
        "sparse": {
            "sparse.indices": np.array([99, 3, 50], np.int32),
            "sparse.values": np.array([0.5, 2, 0], np.float16),
        },
        "multivector": {"multivector": np.ones((3, 4), np.float16)},
    }
    arrays = {name: array for output in outputs for name, array in vectors[output].items()}
    answers = [RowAnswer(arrays=arrays), RowAnswer(error=ErrorInfo("INTERNAL", "")), RowAnswer(arrays=arrays)]
    rows, _ = native._for_sink(Database(), [InputRow(str(number)) for number in range(3)], answers)
    assert rows is not None
    assert native._widths(rows, widths) == {name: widths[name] for name in outputs}
    written = rows.latest(native._widths(rows, widths))
    assert written.ids == ["0", "2"]
    assert written.vectors.shape == (2, 8 if "dense" in outputs else 0)
    assert [(row.indices.tolist(), row.values.tolist()) for row in written.sparse] == (
        [([3, 99], [2.0, 0.5])] * 2 if "sparse" in outputs else []
    )
    assert [row.shape for row in written.multivectors] == ([(3, 4)] * 2 if "multivector" in outputs else [])
    assert {row.dtype for row in written.multivectors} <= {np.dtype(np.float32)}
