"""Jobs at a gateway with toy models: refusals, the course of a job, and its output."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from fake_adapter import FakeAdapter, ids_of, toy_entry, vector_of
from inprocess import GatewayProcess, InProcess, until, until_told
from msgspec.structs import replace

from sie_broker import Write
from sie_broker.record import LeaderLease, leases_of
from sie_bulk_jobs import records
from sie_bulk_jobs.datasets import rows as dataset_rows
from sie_bulk_jobs.gateway import client as asking
from sie_bulk_jobs.gateway import pace, run, scheduler, service, suspects, values
from sie_bulk_jobs.records import JobRecord, Suspect
from sie_contracts.errors import ErrorInfo, ModelLoadFailed
from sie_contracts.wire import topology
from sie_contracts.wire.topology import Lane
from sie_sidecar import models

MODEL = "toy/one"
TOKENS = {"SIE_AUTH_MODE": "static", "SIE_AUTH_TOKENS": "one-token-of-a-test,two-token-of-a-test"}


LANE = Lane("_default", "_default", "default")


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InProcess]:
    monkeypatch.setattr(scheduler, "EVERY_S", 0.05)
    monkeypatch.setattr(run, "FLUSH_S", 0.05)
    monkeypatch.setattr("sie_gateway.process.EPOCH_POLL_S", 0.5)  # for tests that change the catalogue
    async with InProcess(tmp_path, toy_entry(MODEL), toy_entry("toy/two")) as cluster:
        yield cluster


class Place:
    """A cluster whose gateway runs jobs, and a folder that they may use."""

    def __init__(self, cluster: InProcess, gateway: GatewayProcess, adapter: FakeAdapter) -> None:
        self.cluster, self.gateway, self.adapter = cluster, gateway, adapter
        self.folder = cluster.folder / "jobs"
        self.payloads = cluster.folder / "payloads"

    async def upload(self, rows: list[Any], name: str = "a.jsonl") -> str:
        data = b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)
        answer = await self.gateway.client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "jobs"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def submit(self, input: dict[str, Any], status: int = 201, **more: Any) -> Any:
        headers = more.pop("headers", {})
        body = {"model": MODEL, "input": input, **more}
        answer = await self.gateway.client.post("/v1/jobs", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json() if status == 201 else answer.json()["error"]

    async def get(self, path: str) -> httpx.Response:
        return await self.gateway.client.get(f"/v1/jobs/{path}")

    async def job(self, job: str, state: str = "completed") -> Any:
        async def reached() -> Any:
            info = (await self.get(job)).json()
            return info if info["state"] == state else None

        return await until_told(reached, f"the job is {state}")

    def asked(self) -> int:
        """Return the number of inputs that the adapter ran."""
        return sum(len(batch.lengths) // 4 for batch in self.adapter.batches)

    async def table(self, job: str) -> Any:
        """Return the output as one list of rows."""
        rows: list[Any] = []
        for part in (await self.get(f"{job}/manifest")).json()["parts"]:
            data = (await self.get(f"{job}/part?name={part['name']}")).content
            assert hashlib.sha256(data).hexdigest() == part["sha256"]
            assert len(data) == part["bytes"]
            rows += parquet.read_table(io.BytesIO(data)).to_pylist()
        return rows


async def place_of(cluster: InProcess, **settings: str) -> Place:
    folder = cluster.folder / "jobs"
    folder.mkdir()
    adapter = await cluster.adapter()
    defaults = {"SIE_PAYLOAD_STORE_URL": str(cluster.folder / "payloads"), "SIE_JOBS_URLS": str(folder)}
    gateway = await cluster.gateway(**{**defaults, **settings})
    await cluster.sidecar(adapter)
    return Place(cluster, gateway, adapter)


@pytest.fixture
async def place(cluster: InProcess) -> Place:
    return await place_of(cluster)


def texts(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{number}", "t": f"text {number}", "n": number} for number in range(count)]


@pytest.mark.parametrize(("error_class", "passes"), [("NETWORK", True), ("GATED", False)])
async def test_a_model_that_cannot_be_loaded_is_no_error_of_rows(
    place: Place, monkeypatch: pytest.MonkeyPatch, error_class: str, passes: bool
) -> None:
    """A job waits while the load is tried again, and then completes. It is paused if only an operator can help."""
    monkeypatch.setattr(models, "OTHER_COOL_DOWN_S", 0.1)
    place.adapter.refusals[MODEL] = ModelLoadFailed("no weights", extras={"error_class": error_class})
    job = (await place.submit({"file": await place.upload(texts(30)), "text": "{t}"}))["id"]
    if passes:

        async def waits() -> Any:
            return ((await place.get(job)).json()["trouble"] or {}).get("code") == "MODEL_LOAD_FAILED"

        await until_told(waits, "the job waits for its model")
        del place.adapter.refusals[MODEL]
    else:
        info = await place.job(job, "paused")
        assert (info["error"]["code"], info["counts"]["failed"]) == ("MODEL_LOAD_FAILED", 0)
        await place.gateway.client.post(f"/v1/jobs/{job}/cancel")
        return
    assert (await place.job(job))["counts"]["failed"] == 0


async def test_every_row_has_its_vector_in_its_place(place: Place) -> None:
    """The rows have faults, duplicates and a column that is kept, and fill several shards."""
    rows: list[Any] = [*texts(50), b"no json", {"id": "x"}, {"id": "same", "t": "text 3", "n": 1}]
    file = await place.upload(rows)
    job = (await place.submit({"file": file, "text": "{t}", "id": "id", "keep": ["n"]}, shard_rows=20))["id"]
    info = await place.job(job)
    assert info["counts"] == {
        "rows": 53,
        "done": 53,
        "failed": 2,
        "reused": 0,
        "tokens": info["counts"]["tokens"],
        "shards": 3,
        "shards_done": 3,
        "shards_failed": 0,
    }
    assert info["errors"] == {"INVALID_INPUT": 2}
    assert info["model"] == MODEL
    rows_read = await place.table(job)
    assert [row["id"] for row in rows_read] == [*(f"r{n}" for n in range(50)), "a.jsonl#50", "x", "same"]
    assert [row["n"] for row in rows_read] == [*range(50), None, None, 1]
    for number in (0, 17, 49):
        assert np.allclose(rows_read[number]["dense"], vector_of(ids_of(f"text {number}")))
    assert rows_read[52]["dense"] == rows_read[3]["dense"]
    assert [row["error"] is None for row in rows_read] == [True] * 50 + [False, False, True]
    assert rows_read[50]["dense"] is None
    assert "no json" not in json.dumps(rows_read[50]["error"])
    manifest = json.loads((place.payloads / "jobs" / job / "output" / "manifest.json").read_text())
    assert manifest == {**(await place.get(f"{job}/manifest")).json(), "parts": manifest["parts"]}
    sample = (await place.get(f"{job}/rows?failed=true")).json()["rows"]
    misspelt = (await place.get(f"{job}/rows?failed=TRUE")).json()["error"]
    assert (misspelt["code"], misspelt["param"]) == ("INVALID_INPUT", "failed")
    assert [(row["id"], row["error"]["code"]) for row in sample] == [
        ("a.jsonl#50", "INVALID_INPUT"),
        ("x", "INVALID_INPUT"),
    ]


async def test_a_job_reads_and_writes_below_the_named_places_alone(place: Place) -> None:
    """SIE_JOBS_URLS."""
    (place.folder / "in").mkdir()
    for name in ("b", "a"):
        (place.folder / "in" / f"{name}.jsonl").write_text(f'{{"t": "{name}"}}\n')
    url = f"{place.folder}/in/"
    job = (await place.submit({"url": url, "text": "{t}"}, output={"url": f"{place.folder}/out", "format": "jsonl"}))[
        "id"
    ]
    await place.job(job)
    lines = [
        json.loads(line)
        for path in sorted((place.folder / "out").glob("part-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert [line["id"] for line in lines] == ["a.jsonl#0", "b.jsonl#0"]
    assert json.loads((place.folder / "out/manifest.json").read_text())["rows"] == 2
    for elsewhere in (f"{place.folder}2/in/", "/etc/passwd", f"{place.folder}/../x", "s3://bucket/a"):
        refused = await place.submit({"url": elsewhere, "text": "{t}"}, 400)
        assert (refused["reason"], refused["param"]) == ("not_allowed", "input.url"), elsewhere
    refused = await place.submit({"url": url, "text": "{t}"}, 400, output={"url": "/tmp/elsewhere"})
    assert refused["param"] == "output.url"


@pytest.mark.parametrize(
    ("input", "more", "param"),
    [
        ({"text": "{t}"}, {}, "input"),
        ({"file": "file-" + "0" * 32, "text": "{t}"}, {}, "file_id"),
        ({"file": "FILE", "text": "{t!r}"}, {}, "input.text"),
        ({"file": "FILE"}, {}, "input.text"),
        ({"file": "FILE", "text": "{t}", "txt": 1}, {}, "input"),
        ({"file": "FILE", "text": "{t}"}, {"model": "toy/nobody"}, ""),
        ({"file": "FILE", "text": "{t}"}, {"operation": "extract"}, "operation"),
        ({"file": "FILE", "text": "{t}"}, {"params": {"output_types": ["sparse"]}}, "params.output_types"),
        ({"file": "FILE", "text": "{t}", "keep": [f"k{column}" for column in range(101)]}, {}, "input.keep"),
        ({"file": "FILE", "text": "{t}"}, {"time_zone": "Nowhere"}, "time_zone"),
        ({"file": "FILE", "text": "{t}"}, {"windows": ["25:00-26:00"]}, "windows"),
        ({"file": "FILE", "text": "{t}"}, {"shard_rows": 0}, "shard_rows"),
        ({"file": "FILE", "text": "{t}"}, {"deadline": 1_790_000_000_000}, "deadline"),
        ({"file": "FILE", "text": "{t}", "chunks": {"max_tokens": 9}}, {}, "input.chunks"),
        ({"file": "FILE", "text": "{t}", "chunks": {"max_tokens": 9, "tokens": 1}}, {}, "input.chunks"),
        ({"file": "FILE", "text": "{t}", "chunks": {"max_tokens": 0}}, {}, "input.chunks.max_tokens"),
        ({"file": "FILE", "text": "{t}", "chunks": {"max_tokens": 9, "overlap_tokens": 5}}, {}, "input.chunks.overlap"),
        ({"file": "FILE", "text": "{t}", "chunks": ""}, {}, "input.chunks"),
        ({"file": "FILE", "text": "{t}", "chunks": "t"}, {"params": {"is_query": True}}, "params.is_query"),
    ],
)
async def test_what_could_never_run_is_refused_before_it_is_kept(
    place: Place, input: dict[str, Any], more: dict[str, Any], param: str
) -> None:
    file = await place.upload(texts(1))
    body = {"model": MODEL, "input": {**input, **({"file": file} if input.get("file") == "FILE" else {})}, **more}
    answer = await place.gateway.client.post("/v1/jobs", json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"].get("param", "").startswith(param), answer.text
    assert (await place.gateway.client.get("/v1/jobs")).json()["data"] == []


async def test_two_jobs_never_share_a_folder(place: Place) -> None:
    """A second job would take the parts of the first job for its own. A retry writes into a subfolder of its job."""
    file, second_file = await place.upload(texts(3)), await place.upload([{"t": "other"}] * 3)
    output = {"url": f"{place.folder}/out", "format": "jsonl"}
    place.adapter.failures = {"text 1": ErrorInfo("INFERENCE_ERROR", "why")}
    first = (await place.submit({"file": file, "text": "{t}"}, output=output))["id"]
    await place.job(first)
    second = (await place.submit({"file": second_file, "text": "{t}"}, output=output))["id"]
    info = await place.job(second, "failed")
    assert info["error"]["param"] == "output.url"
    (place.folder / "out/.sie-job").unlink()
    third = (await place.submit({"file": second_file, "text": "{t}"}, output=output))["id"]
    assert (await place.job(third, "failed"))["error"]["param"] == "output.url"
    place.adapter.failures = {}
    again = (await place.gateway.client.post(f"/v1/jobs/{first}/retry")).json()
    info = await place.job(again["id"])
    assert info["output_url"] == f"{place.folder}/out/retry-{again['id']}/"
    (part,) = (place.folder / "out" / f"retry-{again['id']}").glob("part-*")
    assert json.loads(part.read_text())["id"] == "a.jsonl#1"


async def test_a_job_names_a_database_of_the_installation(cluster: InProcess) -> None:
    """SIE_JOBS_SINKS."""
    place = await place_of(cluster, SIE_JOBS_SINKS="main=qdrant://127.0.0.1:1")
    file = await place.upload(texts(1))
    source = {"file": file, "text": "{t}"}
    refused = await place.submit(source, 400, output={"sink": "other", "collection": "c"})
    assert refused["param"] == "output.sink"
    assert "main" in refused["message"]
    assert "127.0.0.1" not in refused["message"]
    assert (await place.submit(source, 400, output={"sink": "main"}))["param"] == "output.collection"
    assert (await place.submit(source, output={"sink": "main", "collection": "c"}))["state"] == "queued"


async def test_a_gateway_runs_so_many_jobs_at_once(cluster: InProcess) -> None:
    """SIE_JOBS_AT_ONCE."""
    place = await place_of(cluster, SIE_JOBS_AT_ONCE="1")
    place.adapter.hold_batches = True
    file = await place.upload(texts(1))
    jobs = [(await place.submit({"file": file, "text": "{t}"}))["id"] for _ in range(2)]
    await place.job(jobs[0], "running")
    assert (await place.get(jobs[1])).json()["state"] == "queued"
    place.adapter.hold_batches = False
    place.adapter.let_go()
    assert (await place.job(jobs[1]))["started_at"] >= (await place.job(jobs[0]))["ended_at"]


def suspecting(monkeypatch: pytest.MonkeyPatch, left_out: int, *pieces: range) -> None:
    """Let each job begin with pieces of its only shard as suspects, and with one row left out."""
    claimed_by = suspects.claimed_by
    pieces_of_shard = tuple(Suspect(0, piece.start, len(piece)) for piece in pieces)

    def claimed(job: JobRecord, leader: str) -> JobRecord:
        job = claimed_by(job, leader)
        return job if job.is_planned else replace(job, suspects=pieces_of_shard, left_out=((0, left_out),))

    monkeypatch.setattr(suspects, "claimed_by", claimed)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
async def test_a_shard_is_put_together_from_its_pieces_without_the_row_that_is_left_out(
    place: Place, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each piece is asked once. The row that is left out is not decoded; it has an error and no id of its own."""
    rows = texts(10)
    decoded: list[Any] = []
    make = dataset_rows._RowMaker.__call__

    def numbered(self: Any, at: int, row: Any) -> Any:
        decoded.append((at, isinstance(row, ErrorInfo)))
        return make(self, at, row)

    monkeypatch.setattr(dataset_rows._RowMaker, "__call__", numbered)
    suspecting(monkeypatch, 7, range(4), range(4, 7), range(8, 10))
    match kind:
        case "jsonl":
            data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        case "csv":
            data = b"id,t\n" + b"".join(f"{row['id']},{row['t']}\n".encode() for row in rows)
        case _:
            file = io.BytesIO()
            parquet.write_table(pa.Table.from_pylist(rows), file)
            data = file.getvalue()
    (place.folder / f"a.{kind}").write_bytes(data)
    source = {"url": f"file://{place.folder}/a.{kind}", "text": "{t}", "id": "id"}
    job = await place.job((await place.submit(source))["id"])
    assert (job["counts"]["done"], job["counts"]["failed"], job["errors"]) == (10, 1, {"LEADERS_LOST": 1})
    assert (place.asked(), decoded.count((7, True)), decoded.count((7, False))) == (9, 1, 0)
    table = await place.table(job["id"])
    assert [row["id"] for row in table] == [*(f"r{number}" for number in range(7)), f"a.{kind}#7", "r8", "r9"]
    assert [row["error"] and row["error"]["code"] for row in table] == [None] * 7 + ["LEADERS_LOST"] + [None] * 2


async def test_a_job_that_has_ended_is_forgotten_after_a_time_with_what_it_kept(
    cluster: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIE_JOBS_KEEP_S."""
    monkeypatch.setattr(service, "EVERY_S", 0.05)
    place = await place_of(cluster, SIE_JOBS_KEEP_S="3600")
    file = await place.upload(texts(1))
    old, new = [(await place.submit({"file": file, "text": "{t}"}))["id"] for _ in range(2)]
    for job in (old, new):
        await place.job(job)
    bucket = await cluster.server.connect("operator").key_value(topology.JOBS_BUCKET)
    entry = await bucket.get(f"job.{old}")
    assert entry is not None
    assert entry.value is not None
    ended = replace(msgspec.msgpack.decode(entry.value, type=records.JobRecord), ended_s=time.time() - 3601)
    await bucket.write([Write(entry.key, records.encode(ended))])

    async def gone() -> bool:
        return (await place.get(old)).status_code == 404

    await until_told(gone, "the older one is forgotten")
    assert not [path for path in (place.payloads / "jobs" / old).rglob("*") if path.is_file()]
    assert (await place.get(new)).status_code == 200
    shards = await cluster.server.connect("operator").key_value(topology.SHARDS_BUCKET)
    assert {entry.key.partition(".")[0] for entry in await shards.entries()} == {new}


@pytest.mark.parametrize("is_cached", [True, False])
async def test_what_changed_is_computed_where_answers_are_kept(cluster: InProcess, is_cached: bool) -> None:
    """SIE_JOBS_CACHE_BYTES."""
    place = await place_of(cluster, **({} if is_cached else {"SIE_JOBS_CACHE_BYTES": "0"}))
    rows = texts(100)
    source = {"text": "{t}", "id": "id"}
    first = (await place.submit({"file": await place.upload(rows), **source}, shard_rows=30, cache=True))["id"]
    assert (await place.job(first))["counts"]["reused"] == 0
    rows[7]["t"] = "another text"
    asked_before = place.asked()
    second = (await place.submit({"file": await place.upload(rows), **source}, shard_rows=30, cache=True))["id"]
    info = await place.job(second)
    computed = place.asked() - asked_before
    assert info["counts"]["reused"] == (99 if is_cached else 0)
    # a job computes one input more to learn the fingerprint of the model
    assert computed <= 2 if is_cached else computed == 100
    table = await place.table(second)
    assert np.allclose(table[7]["dense"], vector_of(ids_of("another text")))
    assert np.allclose(table[99]["dense"], vector_of(ids_of("text 99")))


async def test_equal_rows_are_computed_once(place: Place) -> None:
    rows = [{"t": f"text {number % 4}"} for number in range(40)]
    source = {"file": await place.upload(rows), "text": "{t}"}
    job = (await place.submit(source))["id"]
    info = await place.job(job)
    assert info["counts"]["reused"] == 36
    assert place.asked() == 4
    assert len({tuple(row["dense"]) for row in await place.table(job)}) == 4


async def test_the_rows_that_failed_are_answered_again_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ATTEMPTS", 1)
    rows = texts(40)
    failing = {f"text {number}": ErrorInfo("INFERENCE_ERROR", "why") for number in (3, 25, 26)}
    place.adapter.failures = failing
    job = (await place.submit({"file": await place.upload(rows), "text": "{t}", "id": "id"}, shard_rows=10))["id"]
    assert (await place.job(job))["counts"]["failed"] == 3
    place.adapter.failures = {"text 26": failing["text 26"]}
    again = (await place.gateway.client.post(f"/v1/jobs/{job}/retry")).json()["id"]
    info = await place.job(again)
    assert (info["counts"]["rows"], info["counts"]["failed"], info["counts"]["shards"]) == (3, 1, 2)
    output_rows = await place.table(again)
    assert [(row["id"], row["error"] is None) for row in output_rows] == [("r3", True), ("r25", True), ("r26", False)]
    place.adapter.failures = {}
    last = (await place.gateway.client.post(f"/v1/jobs/{again}/retry")).json()["id"]
    assert (await place.job(last))["counts"]["rows"] == 1
    assert [row["id"] for row in await place.table(last)] == ["r26"]
    answer = await place.gateway.client.post(f"/v1/jobs/{last}/retry")
    assert answer.status_code == 409


async def test_another_state_of_the_model_pauses_the_job_and_the_former_one_resumes_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SHARDS_AT_ONCE", 1)
    place.adapter.hold_batches = True
    file = await place.upload(texts(30))
    job = (await place.submit({"file": file, "text": "{t}"}, shard_rows=10))["id"]
    await place.adapter.until(lambda adapter: adapter.running, "the first shard is computed")
    place.adapter.let_go(1)

    async def some() -> bool:
        return bool((await place.get(job)).json()["counts"]["shards_done"])

    await until_told(some, "a shard is done")
    place.cluster.source.put(toy_entry(MODEL, max_tokens=300))
    await until_told(lambda: _max_tokens(place, 300), "the gateway knows the entry")
    place.adapter.let_go()
    info = await place.job(job, "paused")
    assert info["error"]["code"] == "MODEL_CHANGED"
    place.cluster.source.put(toy_entry(MODEL))
    await until_told(lambda: _max_tokens(place, 512), "the former entry is there again")
    assert (await place.gateway.client.post(f"/v1/jobs/{job}/resume")).json()["state"] == "queued"
    info = await place.job(job)
    assert info["counts"]["done"] == 30
    assert len(await place.table(job)) == 30


async def _max_tokens(place: Place, limit: int) -> bool:
    info = (await place.gateway.client.get(f"/v1/models/{MODEL}")).json()
    return bool(info["max_sequence_length"] == limit)


async def test_a_window_that_closes_lets_no_request_begin_that_was_in_line(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window closes while one group is computed and nine groups of its shard wait for room. The group is answered.
    No other group begins before the window opens again.
    """
    opens_in_s = 0.0
    monkeypatch.setattr(pace, "opens_in_s", lambda *_: opens_in_s)
    monkeypatch.setattr(run, "MAX_PAUSE_S", 0.05)
    monkeypatch.setattr(values, "GROUP_ITEMS", 20)
    monkeypatch.setattr(asking, "FIRST_ROOM", 20)
    monkeypatch.setattr(asking, "MAX_ROOM", 20)
    place.adapter.hold_batches = True
    source = {"file": await place.upload(texts(200)), "text": "{t}"}
    job = (await place.submit(source, cache=False, windows=["00:00-00:00"]))["id"]
    await until(lambda: place.adapter.batches, "a group is computed")
    opens_in_s = 3600.0
    place.adapter.let_go()

    async def waits() -> bool:
        job_info = (await place.get(job)).json()
        return bool(
            job_info["trouble"] and job_info["trouble"]["code"] == "OUTSIDE_WINDOW" and job_info["counts"]["done"]
        )

    await until_told(waits, "it waits")
    assert place.asked() == 20
    opens_in_s = 0.0
    info = await place.job(job)
    assert (info["counts"]["done"], info["trouble"], place.asked()) == (200, None, 200)


async def test_jobs_belong_to_their_keys(cluster: InProcess) -> None:
    place = await place_of(cluster, SIE_ADMIN_TOKEN="admin-token-of-a-test", **TOKENS)
    client = place.gateway.client
    client.headers["authorization"] = "Bearer one-token-of-a-test"
    job = (await place.submit({"file": await place.upload(texts(2)), "text": "{t}"}))["id"]
    assert (await place.job(job))["counts"]["done"] == 2
    client.headers["authorization"] = "Bearer two-token-of-a-test"
    assert (await client.get("/v1/jobs")).json()["data"] == []
    for path in (job, f"{job}/manifest", f"{job}/part?name=part-00000.parquet", f"{job}/rows"):
        assert (await place.get(path)).status_code == 404, path
    for action in ("pause", "resume", "cancel", "retry"):
        assert (await client.post(f"/v1/jobs/{job}/{action}")).status_code == 404, action
    assert (await client.delete(f"/v1/jobs/{job}")).status_code == 404
    client.headers["authorization"] = "Bearer admin-token-of-a-test"
    assert [entry["id"] for entry in (await client.get("/v1/jobs")).json()["data"]] == [job]
    assert (await client.delete(f"/v1/jobs/{job}")).json() == {"id": job, "object": "job", "deleted": True}
    assert (await place.get(job)).status_code == 404


@pytest.mark.parametrize("shared", [True, False])
async def test_answers_of_another_key_are_taken_where_keys_share_them(cluster: InProcess, shared: bool) -> None:
    """SIE_CACHE_SHARED: another key with the same input gets the stored answer only if keys share answers. The first
    key always gets it.
    """
    place = await place_of(cluster, SIE_CACHE_SHARED=str(shared).lower(), **TOKENS)

    async def reused(key: str) -> int:
        place.gateway.client.headers["authorization"] = f"Bearer {key}-token-of-a-test"
        source = {"file": await place.upload([{"t": "a secret"}]), "text": "{t}"}
        return int((await place.job((await place.submit(source, cache=True))["id"]))["counts"]["reused"])

    assert await reused("one") == 0
    assert await reused("two") == int(shared)
    assert await reused("one") == 1


async def test_jobs_are_bounded_by_number_for_a_key_and_in_all(cluster: InProcess) -> None:
    """SIE_JOBS_PER_KEY, SIE_MAX_JOBS: concurrent submissions do not pass the bounds. Batches count. A deletion makes
    room.
    """
    bounds = {"SIE_JOBS_PER_KEY": "3", "SIE_MAX_JOBS": "5"}
    place = await place_of(cluster, SIE_ADMIN_TOKEN="admin-token-of-a-test", **bounds, **TOKENS)
    client = place.gateway.client

    def use(key: str) -> None:
        client.headers["authorization"] = f"Bearer {key}-token-of-a-test"

    async def submitted(file: str) -> httpx.Response:
        return await client.post("/v1/jobs", json={"model": MODEL, "input": {"file": file, "text": "{t}"}})

    async def batch(file: str) -> httpx.Response:
        body = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        return await client.post("/v1/batches", json=body)

    use("one")
    file = await place.upload(texts(1))
    answers = await asyncio.gather(*(submitted(file) for _ in range(10)))
    assert sorted(answer.status_code for answer in answers) == [201] * 3 + [429] * 7
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 30
    assert "SIE_JOBS_PER_KEY" in refused.text
    assert (await batch(file)).status_code == 429
    use("two")
    file = await place.upload(texts(1))
    assert [(await batch(file)).status_code, (await submitted(file)).status_code] == [200, 201]
    refused = await submitted(file)
    assert (refused.status_code, "SIE_MAX_JOBS" in refused.text) == (429, True)
    use("one")
    first = next(answer.json()["id"] for answer in answers if answer.status_code == 201)
    await place.job(first)
    assert (await client.delete(f"/v1/jobs/{first}")).status_code == 200
    assert (await submitted(await place.upload(texts(1)))).status_code == 201


@pytest.mark.parametrize("setting", ["SIE_JOBS_BYTES_PER_KEY", "SIE_MAX_JOBS_BYTES"])
async def test_records_of_jobs_are_bounded_by_bytes(cluster: InProcess, setting: str) -> None:
    """SIE_JOBS_BYTES_PER_KEY, SIE_MAX_JOBS_BYTES."""
    place = await place_of(cluster, **{setting: "65536"})
    file = await place.upload(texts(1))
    wide = {"metadata": {f"k{number}": "x" * 512 for number in range(16)}}
    source = {"file": file, "text": "{t}"}
    for _ in range(7):  # of about 8.6 KiB each
        await place.submit(source, **wide)
    refused = await place.submit(source, 429, **wide)
    assert f"65536 bytes of records of jobs and batches ({setting}): delete some" in refused["message"]
    await place.submit(source)


async def test_metrics_tell_of_jobs(place: Place) -> None:
    place.adapter.hold_batches = True
    job = (await place.submit({"file": await place.upload(texts(30)), "text": "{t}"}))["id"]
    await place.job(job, "running")

    async def waits() -> bool:
        return await place.gateway.metric("sie_gateway_job_rows_waiting") == 30

    await until_told(waits, "its rows wait")
    assert await place.gateway.metric("sie_gateway_jobs", state="running") == 1
    place.adapter.let_go()
    await place.job(job)
    assert await place.gateway.metric("sie_gateway_jobs", state="completed") == 1
    assert await place.gateway.metric("sie_gateway_job_rows_waiting") == 0


async def test_the_same_key_of_idempotency_gives_the_same_job(place: Place) -> None:
    source = {"file": await place.upload(texts(1)), "text": "{t}"}
    first_job = await place.submit(source, headers={"idempotency-key": "k"})
    second_job = await place.submit(source, headers={"idempotency-key": "k"})
    assert first_job["id"] == second_job["id"]
    again = {**source, "file": await place.upload(texts(1))}
    assert (await place.submit(again, headers={"idempotency-key": "k"}))["id"] == first_job["id"], (
        "the same bytes, sent twice"
    )
    for differs in (
        {**source, "file": await place.upload(texts(2))},
        {**source, "file": await place.upload(texts(1), "b.jsonl")},
        {**again, "text": "{t}!"},
    ):
        refused = await place.submit(differs, 422, headers={"idempotency-key": "k"})
        assert refused["code"] == "IDEMPOTENCY_MISMATCH"
    await place.job(first_job["id"])


async def test_without_a_payload_store_the_setting_is_named(cluster: InProcess) -> None:
    gateway = await cluster.gateway()
    answer = await gateway.client.post("/v1/jobs", json={"model": MODEL, "input": {"url": "/x", "text": "{t}"}})
    assert answer.status_code == 503
    assert "SIE_PAYLOAD_STORE_URL" in answer.json()["error"]["message"]


async def test_the_scaler_is_told_of_a_deadline(place: Place) -> None:
    """Another gateway leads the job with the deadline."""
    place.adapter.hold_batches = True
    job = (await place.submit({"file": await place.upload(texts(200)), "text": "{t}"}, shard_rows=10))["id"]
    await place.job(job, "running")
    jobs = place.cluster.server.connect("operator")
    bucket = await jobs.key_value(topology.JOBS_BUCKET)
    entry = await bucket.get(f"job.{job}")
    assert entry is not None
    assert entry.value is not None
    record = msgspec.msgpack.decode(entry.value, type=records.JobRecord)
    assert record.lane == str(LANE)
    assert record.request is not None
    late = replace(
        record,
        id="job-late",
        request=replace(record.request, deadline=time.time() + 100),
        rows=3000,
        done=0,
        rows_per_s=2.0,
    )
    second_leases = leases_of(jobs, storage="memory", replicas=1)  # of a gateway that leads the late job
    assert await LeaderLease(second_leases, "job.job-late").acquire()
    await bucket.write([Write("job.job-late", records.encode(late))])

    async def wanted() -> bool:
        return bool((await place.gateway.client.get(f"/v1/scaling/{LANE}")).json()["wanted_replicas"] >= 5)

    await until_told(wanted, "five workers are wanted")
    place.adapter.hold_batches = False
    place.adapter.let_go()


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({f"k{number}": "x" for number in range(17)}, "metadata"),
        ({"k" * 65: "x"}, "metadata"),
        ({"k": "x" * 513}, "metadata[...]"),
    ],
    ids=["17 pairs", "a long name", "a long value"],
)
async def test_metadata_of_a_job_or_batch_beyond_its_limits_is_refused_by_name(
    place: Place, metadata: dict[str, str], param: str
) -> None:
    file = await place.upload([{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}, "t": "x"}])
    batch = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    job = {"model": MODEL, "input": {"file": file, "text": "{t}"}}
    limits = {f"{number:064}": "x" * 512 for number in range(16)}
    for path, body, status in (("/v1/jobs", job, 201), ("/v1/batches", batch, 200)):
        refused = await place.gateway.client.post(path, json={**body, "metadata": metadata})
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["code"].upper(), error["param"]) == ("INVALID_INPUT", param)
        assert "x" * 100 not in error["message"]
        assert "k" * 65 not in error["message"]
        reply = await place.gateway.client.post(path, json={**body, "metadata": limits})
        assert reply.status_code == status, reply.text
