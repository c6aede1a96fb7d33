"""Jobs whose texts have chunks: formats, columns of spans, refusals, and processes that are killed in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from cluster import MODEL, Cluster, running
from databases import Qdrant
from job_client import ENDED, JobClient, Rows, jsonl, parquet_file
from qdrant_server import QdrantServer

RULE = {"max_tokens": 48, "min_tokens": 8}
WORDS = ("river", "mill", "inn", "captain", "harbour", "flood", "bridge", "winter", "letter", "garden")
TOLERANCE = 2e-5  # between batches of other sizes, in float32


def documents(count: int, sentences: int, seed: int = 1) -> Rows:
    """Rows with texts of some sentences, all of them different."""
    generator = random.Random(seed)

    def sentence(number: int) -> str:
        words = " ".join(generator.choices(WORDS, k=generator.randrange(4, 14)))
        return f"The {words} {number}."

    return [
        {
            "key": f"d{row:05}",
            "body": "\n\n".join(
                " ".join(sentence(row * 1000 + place) for place in range(start, start + 5))
                for start in range(0, generator.randrange(sentences // 2, sentences), 5)
            ),
        }
        for row in range(count)
    ]


def split_by_id(lines: Rows) -> dict[str, Rows]:
    """Return the lines of each row. Raises AssertionError if the lines of a row are not neighbours."""
    groups = [(key, list(own)) for key, own in itertools.groupby(lines, key=lambda line: line["id"])]
    assert len(groups) == len(dict(groups))
    return dict(groups)


def check_tiles(rows: Rows, lines: Rows, most: int) -> None:
    """Every row has its chunks once and in order, and their spans tile its text."""
    by_id = split_by_id(lines)
    assert list(by_id) == [row["key"] for row in rows]
    for row in rows:
        own = by_id[row["key"]]
        assert [line["chunk"] for line in own] == list(range(len(own)))
        assert (own[0]["start"], own[-1]["end"]) == (0, len(row["body"]))
        assert all(before["end"] == after["start"] for before, after in itertools.pairwise(own))
        assert "".join(line["text"] for line in own) == row["body"]
        assert all(0 < line["tokens"] <= most for line in own)
        assert len({line["row_tokens"] for line in own}) == 1


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Qdrant]:
    server = QdrantServer(tmp_path_factory.mktemp("qdrant"))
    try:
        server.start()
        yield Qdrant(server)
    finally:
        server.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, database: Qdrant) -> Iterator[Cluster]:
    arguments = ["--model-filter", MODEL, "--no-spare", "--default-compute-precision", "float32"]
    data = tmp_path_factory.mktemp("chunk-jobs")
    with running(data, *arguments, environ={"SIE_JOBS_SINKS": f"main={database.url}"}) as cluster:
        yield cluster


@pytest.fixture
def jobs(cluster: Cluster) -> Iterator[JobClient]:
    with JobClient(cluster.url) as jobs:
        yield jobs


@pytest.mark.parametrize("output", ["parquet", "jsonl", "npy"])
def test_a_job_writes_the_chunks_that_requests_return(jobs: JobClient, output: str) -> None:
    rows = documents(6, 30)
    source = {"file": jobs.upload("a.jsonl", jsonl(rows)), "text": "{body}", "id": "key", "chunks": RULE}
    job = jobs.submit(MODEL, source, output={"format": output}, shard_rows=4)["id"]
    counts = jobs.done(job)["counts"]
    assert (counts["rows"], counts["done"], counts["failed"]) == (6, 6, 0)
    lines = jobs.rows(job)
    check_tiles(rows, lines, RULE["max_tokens"])
    items = [{"text": row["body"], "chunks": RULE} for row in rows]
    slots = jobs.ask("POST", f"/v1/encode/{MODEL}", json={"items": items})["items"]
    chunks = [chunk for slot in slots for chunk in slot["chunks"]]
    assert [(line["start"], line["end"], line["tokens"]) for line in lines] == [
        (chunk["start"], chunk["end"], chunk["tokens"]) for chunk in chunks
    ]
    for line, chunk in zip(lines, chunks, strict=True):
        assert np.abs(np.array(line["dense"]) - np.array(chunk["dense"]["values"])).max() < TOLERANCE
    tokens = [slot["usage"]["total_tokens"] for slot in slots]
    assert [own[0]["row_tokens"] for own in split_by_id(lines).values()] == tokens
    assert counts["tokens"] == sum(tokens)
    sampled = jobs.ask("GET", f"/v1/jobs/{job}/rows")["rows"]
    assert [(row["id"], row["tokens"]) for row in sampled] == [
        (row["key"], own) for row, own in zip(rows, tokens, strict=True)
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_column_names_the_chunks_of_each_row_and_wrong_ones_cost_their_row(jobs: JobClient, kind: str) -> None:
    rows: Rows = [
        {"key": "a", "body": "one two three four", "spans": [[0, 7], [4, 18]], "context": False},
        {"key": "b", "body": "one two", "spans": [[0, 99]]},
        {"key": "c", "body": "one two", "spans": None},
        {"key": "d", "body": "one two", "spans": [[4, 7]]},
    ]
    data = jsonl(rows) if kind == "jsonl" else parquet_file(rows)
    source = {"file": jobs.upload(f"a.{kind}", data), "text": "{body}", "id": "key", "chunks": "spans"}
    job = jobs.submit(MODEL, {**source, "context": False})["id"]
    done = jobs.done(job)
    assert (done["counts"]["done"], done["counts"]["failed"], done["errors"]) == (4, 2, {"INVALID_INPUT": 2})
    lines = jobs.rows(job)
    assert [(line["id"], line["chunk"], line["text"]) for line in lines] == [
        ("a", 0, "one two"),
        ("a", 1, "two three four"),
        ("b", None, None),
        ("c", None, None),
        ("d", 0, "two"),
    ]
    assert lines[2]["error"]["message"].startswith("input.chunks[0]: expected 0 <= start < end <= 7")
    assert "'spans' is null" in lines[3]["error"]["message"]
    (alone,) = jobs.ask("POST", f"/v1/encode/{MODEL}", json={"items": ["two three four"]})["items"]
    assert np.abs(np.array(lines[1]["dense"]) - np.array(alone["dense"]["values"])).max() < TOLERANCE
    # a retry answers the rows that failed, and no others
    again = jobs.steer(job, "retry", 201)["id"]
    assert jobs.done(again)["counts"]["rows"] == 2
    assert [line["id"] for line in jobs.rows(again)] == ["b", "c"]


def test_a_second_job_with_the_cache_computes_no_chunk(jobs: JobClient) -> None:
    rows = documents(3, 20, seed=9)
    source = {"file": jobs.upload("a.jsonl", jsonl(rows)), "text": "{body}", "id": "key", "chunks": RULE}
    outcomes = []
    for _ in range(2):
        job = jobs.submit(MODEL, source, cache=True)["id"]
        outcomes.append((jobs.done(job)["counts"]["reused"], jobs.rows(job)))
    assert [reused for reused, _ in outcomes] == [0, 3]
    assert outcomes[0][1] == outcomes[1][1]


def progress(cluster: Cluster, job: str) -> dict[str, Any] | None:
    """Return a job; None while no gateway answers."""
    with contextlib.suppress(httpx.TransportError):
        answer = httpx.get(f"{cluster.url}/v1/jobs/{job}", trust_env=False, timeout=5)
        if answer.status_code == 200:
            record: dict[str, Any] = answer.json()
            return record
    return None


@pytest.mark.parametrize(
    ("count", "sentences", "tokens_per_s"),
    [
        pytest.param(48, 60, 12_000.0, id="48"),
        pytest.param(1000, 60, 0.0, id="1000", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(1200)
async def test_every_chunk_is_written_once_while_processes_are_killed(
    cluster: Cluster, database: Qdrant, jobs: JobClient, count: int, sentences: int, tokens_per_s: float
) -> None:
    """The gateway, the adapter and the gateway again are killed, each after a further quarter of the rows."""
    rows = documents(count, sentences, seed=count)
    collection = f"chunks-{count}"
    source = {"file": jobs.upload("a.parquet", parquet_file(rows, group=4)), "text": "{body}", "id": "key"}
    output = {"sink": "main", "collection": collection}
    job = jobs.submit(
        MODEL, {**source, "chunks": RULE}, output=output, shard_rows=max(4, count // 40), tokens_per_s=tokens_per_s
    )["id"]

    def run() -> dict[str, Any]:
        victims = iter(("gateway", "adapter", "gateway"))
        killed = 0
        end_s = time.monotonic() + 1000
        while True:
            record = progress(cluster, job)
            if record is not None and record["state"] in (*ENDED, "paused"):
                assert killed == 3, "the job ended before all was killed"
                return record
            if record is not None and killed < 3 and record["counts"]["done"] > count * killed // 4:
                pids = cluster.pids(next(victims))
                os.kill(pids[-1], signal.SIGKILL)
                killed += 1
            assert time.monotonic() < end_s, (record, cluster.log())
            time.sleep(0.05)

    ended = await asyncio.to_thread(run)
    assert ended["state"] == "completed", ended
    assert (ended["counts"]["done"], ended["counts"]["failed"]) == (count, 0)
    lines = jobs.rows(job)
    check_tiles(rows, lines, RULE["max_tokens"])
    points = await database.found(collection)
    assert points.keys() == {f"{line['id']}#{line['chunk']}" for line in lines}
    for line in lines[:: max(1, len(lines) // 100)]:
        vector, payload = points[f"{line['id']}#{line['chunk']}"]
        assert payload == {name: line[name] for name in ("id", "chunk", "start", "end", "text")}
        assert np.abs(np.array(vector) - np.array(line["dense"])).max() < TOLERANCE
