"""Jobs whose texts have chunks: formats, columns of spans, documents, refusals, and processes that are killed in the
middle. A stand-in for docling parses the documents.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from cluster import MODEL, Cluster, running, until
from databases import Qdrant
from job_client import ENDED, JobClient, Rows, jsonl, parquet_file
from qdrant_server import QdrantServer
from shared import SERVED_S

from sie_contracts.models.catalogue import packaged_folder

RULE = {"max_tokens": 48, "min_tokens": 8}
WORDS = ("river", "mill", "inn", "captain", "harbour", "flood", "bridge", "winter", "letter", "garden")
PARSER_ENTRY = yaml.safe_load((packaged_folder() / "models" / "docling.yaml").read_text("utf-8"))
TOLERANCE = 2e-5  # float32 results of batches of other sizes differ by less
DOCUMENTS = {"documents": "file", "id": "key", "chunks": RULE}
# every Python process runs this at its start: it replaces the module that imports docling. A document is JSON.
STAND_IN = """
import sys, types

class DoclingParser:
    def parse(self, job):
        import json
        from sie_models_readers.documents.parser_frames import Parsed
        from sie_contracts.media.media import fault
        try:
            content = json.loads(job.document.data)
        except ValueError:
            raise fault("undecodable", "the document is damaged or encrypted")
        starts = tuple(map(tuple, content["page_starts"]))
        tree = b"{}" if job.has_tree else b""
        return Parsed(job.number, "pdf", "", content["markdown"], tree, len(starts), True, starts)

module = sys.modules["sie_models_readers.documents.docling_parser"] = types.ModuleType("docling_parser")
module.DoclingParser = DoclingParser
"""


def documents(count: int, sentences: int, seed: int = 1) -> Rows:
    """Return rows with texts of at most `sentences` sentences, all of them different."""
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


def parsable(rows: Rows) -> Rows:
    """Return rows with documents of these texts: a page and a heading for every two paragraphs."""
    parsed_rows = []
    for row in rows:
        paragraphs = row["body"].split("\n\n")
        pages = ["\n\n".join(paragraphs[at : at + 2]) for at in range(0, len(paragraphs), 2)]
        pages = [f"## Part {number}\n\n{page}" for number, page in enumerate(pages, 1)]
        starts = itertools.accumulate((len(page) + 2 for page in pages[:-1]), initial=0)
        markdown = "\n\n".join(pages)
        content = {"markdown": markdown, "page_starts": [(start, number) for number, start in enumerate(starts, 1)]}
        parsed_rows.append(
            {"key": row["key"], "body": markdown, "file": base64.b64encode(json.dumps(content).encode()).decode()}
        )
    return parsed_rows


def check_places(lines: Rows) -> None:
    """Check that the page and the heading of each chunk are those of its first word."""
    for row in split_by_id(lines).values():
        number = 0
        for line in row:
            first, heading, _ = line["text"].partition("## Part ")
            begun = number + 1 if heading and not first.strip() else number
            assert (line["page"], line["heading"]) == (begun, f"Part {begun}"), line
            number += line["text"].count("## Part ")


def split_by_id(lines: Rows) -> dict[str, Rows]:
    """Return the lines of each row. Raises AssertionError if the lines of a row are not neighbours."""
    groups = [(key, list(own)) for key, own in itertools.groupby(lines, key=lambda line: line["id"])]
    assert len(groups) == len(dict(groups))
    return dict(groups)


def check_tiles(rows: Rows, lines: Rows, most: int) -> None:
    """Check that every row has its chunks once and in order, and that their spans tile its text."""
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
    folder = tmp_path_factory.mktemp("documents")
    (folder / "sitecustomize.py").write_text(STAND_IN)
    package(folder)
    (folder / "models" / "bundles").mkdir(parents=True)
    (folder / "models" / "bundles" / "all.yaml").write_text("{id: all, families: [built-in, docling]}")
    environ = {
        "SIE_JOBS_SINKS": f"main={database.url}",
        "SIE_BUNDLE": "all",
        "SIE_MODELS_DIR": str(folder / "models"),
        "SIE_MODEL_FILTER": f"{MODEL},docling",
        "PYTHONPATH": str(folder),
    }
    arguments = ["--no-spare", "--default-compute-precision", "float32"]
    data = tmp_path_factory.mktemp("chunk-jobs")
    with running(data, *arguments, environ=environ) as cluster:
        yield cluster


def package(folder: Path) -> None:
    """Write the files of a package `docling`, so that the model docling counts as installed."""
    (folder / "docling").mkdir()
    (folder / "docling" / "__init__.py").touch()
    info = folder / "docling_slim-2.143.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: docling-slim\nVersion: 2.143.0\n")
    (info / "RECORD").write_text("docling/__init__.py,,\n")


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


@pytest.mark.parametrize(("kind", "output"), [("jsonl", "parquet"), ("parquet", "jsonl"), ("csv", "npy")])
def test_a_job_writes_the_chunks_of_documents_with_page_and_heading(jobs: JobClient, kind: str, output: str) -> None:
    rows = parsable(documents(5, 30, seed=3))
    raw = [base64.b64decode(row["file"]) for row in rows]
    if kind == "csv":
        data = b"key,file\n" + b"".join(f"{row['key']},{row['file']}\n".encode() for row in rows)
    elif kind == "parquet":
        data = parquet_file([{"key": row["key"], "file": content} for row, content in zip(rows, raw, strict=True)])
    else:
        forms = [{"data": rows[0]["file"], "format": "pdf"}, f"data:application/pdf;base64,{rows[1]['file']}"]
        files = [*forms, *(row["file"] for row in rows[2:])]
        data = jsonl([{"key": row["key"], "file": file} for row, file in zip(rows, files, strict=True)])
    source = {"file": jobs.upload(f"a.{kind}", data), **DOCUMENTS}
    job = jobs.submit(MODEL, source, output={"format": output})["id"]
    counts = jobs.done(job)["counts"]
    assert (counts["done"], counts["failed"]) == (5, 0), jobs.rows(job)
    lines = jobs.rows(job)
    check_tiles(rows, lines, RULE["max_tokens"])
    check_places(lines)
    slots = jobs.ask(
        "POST", f"/v1/encode/{MODEL}", json={"items": [{"text": row["body"], "chunks": RULE} for row in rows]}
    )
    chunks = [chunk for slot in slots["items"] for chunk in slot["chunks"]]
    for line, chunk in zip(lines, chunks, strict=True):
        assert np.abs(np.array(line["dense"]) - np.array(chunk["dense"]["values"])).max() < TOLERANCE
    # the usage of the parser has no tokens
    tokens = [slot["usage"]["total_tokens"] for slot in slots["items"]]
    assert [own[0]["row_tokens"] for own in split_by_id(lines).values()] == tokens
    assert counts["tokens"] == sum(tokens)


def test_a_document_that_cannot_be_parsed_costs_its_row(jobs: JobClient) -> None:
    (good,) = parsable(documents(1, 20, seed=4))
    empty = {"markdown": " ", "page_starts": []}
    long = {"markdown": "word " * 60_000, "page_starts": []}
    contents = [b"%PDF- damaged", *(json.dumps(content).encode() for content in (empty, long))]
    files = [
        good["file"],
        *(base64.b64encode(content).decode() for content in contents),
        "no base64!",
        "https://a/b.pdf",
        None,
    ]
    rows = [{"key": f"r{number}", "file": file} for number, file in enumerate(files)]
    job = jobs.submit(MODEL, {"file": jobs.upload("a.jsonl", jsonl(rows)), **DOCUMENTS})["id"]
    done = jobs.done(job)
    assert (done["counts"]["done"], done["counts"]["failed"], done["errors"]) == (7, 6, {"INVALID_INPUT": 6})
    by_id = split_by_id(jobs.rows(job))
    assert "".join(line["text"] for line in by_id["r0"]) == good["body"]
    expected = [
        "undecodable: the document is damaged",
        "has no text",
        "code points of Markdown",
        "base64",
        "got a URL",
        "is null",
    ]
    for (line,), message in zip(list(by_id.values())[1:], expected, strict=True):
        assert message in line["error"]["message"]
        assert [line[name] for name in ("chunk", "page", "heading", "text")] == [None] * 4
    again = jobs.steer(job, "retry", 201)["id"]
    assert jobs.done(again)["counts"]["rows"] == 6


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"parser": MODEL}, "input.parser"),
        ({"text": "{body}"}, "input.text"),
        ({"image": "file"}, "input.image"),
        ({"chunks": None}, "input.chunks"),
        ({"keep": ["page"]}, "input.keep"),
        ({"documents": "", "text": "{file}", "parser": "docling"}, "input.parser"),
    ],
    ids=range(6),
)
def test_a_job_of_documents_that_could_never_run_is_refused(
    jobs: JobClient, change: dict[str, Any], param: str
) -> None:
    source = {"file": jobs.upload("a.jsonl", jsonl([{"key": "a", "file": "eA=="}])), **DOCUMENTS, **change}
    assert jobs.refusal(MODEL, source)["param"] == param


def test_a_job_of_documents_names_an_unknown_parser(jobs: JobClient) -> None:
    source = {"file": jobs.upload("a.jsonl", jsonl([{"key": "a", "file": "eA=="}])), **DOCUMENTS, "parser": "no/parser"}
    assert jobs.submit(MODEL, source, status=404)["error"]["code"] == "MODEL_NOT_FOUND"


def test_a_job_whose_parser_changes_is_paused_and_goes_on_with_the_one_before(
    cluster: Cluster, jobs: JobClient
) -> None:
    rows = parsable(documents(24, 40, seed=11))
    source = {"file": jobs.upload("a.jsonl", jsonl(rows)), **DOCUMENTS}
    job = jobs.submit(MODEL, source, shard_rows=2, tokens_per_s=1500.0)["id"]
    until(lambda: jobs.show(job)["counts"]["shards_done"], 60, "a shard is written", cluster.log)
    jobs.steer(job, "pause")
    assert 0 < jobs.reaches(job, "paused")["counts"]["done"] < 24

    def serve(max_tokens: int) -> None:
        headers = {"Authorization": f"Bearer {cluster.access().admin_token}"}
        entry = {**PARSER_ENTRY, "max_tokens": max_tokens}
        url = f"{cluster.url}/console/configs/docling"
        answer = httpx.put(url, json=entry, headers=headers, trust_env=False, timeout=30)
        assert answer.is_success, answer.text
        until(
            lambda: jobs.ask("GET", "/v1/models/docling")["max_sequence_length"] == max_tokens,
            SERVED_S,
            "the gateway has the entry of the parser",
            cluster.log,
        )

    serve(400)
    jobs.steer(job, "resume")
    error = jobs.reaches(job, "paused")["error"]
    assert (error["code"], error["message"].partition(":")[0]) == ("MODEL_CHANGED", "docling changed while the job ran")
    serve(512)
    jobs.steer(job, "resume")
    done = jobs.done(job)
    assert (done["counts"]["done"], done["counts"]["failed"]) == (24, 0)
    model = jobs.ask("GET", f"/v1/models/{MODEL}")["fingerprint"]
    assert done["fingerprint"] == jobs.manifest(job)["fingerprint"]
    assert done["fingerprint"].startswith(f"{model}+")
    check_tiles(rows, jobs.rows(job), RULE["max_tokens"])


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
    ("kind", "count", "sentences", "tokens_per_s"),
    [
        pytest.param("documents", 24, 30, 1200.0, id="24 documents", marks=pytest.mark.long),
        pytest.param("texts", 1000, 60, 0.0, id="1000", marks=pytest.mark.long),
        pytest.param("documents", 1000, 60, 0.0, id="1000 documents", marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(1200)
async def test_every_chunk_is_written_once_while_processes_are_killed(
    cluster: Cluster, database: Qdrant, jobs: JobClient, kind: str, count: int, sentences: int, tokens_per_s: float
) -> None:
    """The gateway, the adapter and the gateway again are killed: after the first rows, after a quarter and after half
    of them.
    """
    rows = documents(count, sentences, seed=count)
    if kind == "documents":
        rows = parsable(rows)
    collection = f"chunks-{kind}-{count}"
    columns = {"text": "{body}"} if kind == "texts" else {"documents": "file"}
    source = {"file": jobs.upload("a.parquet", parquet_file(rows, group=4)), "id": "key", **columns}
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
    names = ["id", "chunk", "start", "end", "text"]
    if kind == "documents":
        check_places(lines)
        names += ["page", "heading"]
    for line in lines[:: max(1, len(lines) // 100)]:
        vector, payload = points[f"{line['id']}#{line['chunk']}"]
        assert payload == {name: line[name] for name in names}
        assert np.abs(np.array(vector) - np.array(line["dense"])).max() < TOLERANCE
