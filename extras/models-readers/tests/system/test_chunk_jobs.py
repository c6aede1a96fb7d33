"""Jobs whose texts have chunks: rules, columns of spans and documents, which a stand-in for docling parses."""

from __future__ import annotations

import base64
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import MODEL, Cluster, running
from job_client import JobClient, Rows, jsonl, parquet_file

RULE = {"max_tokens": 48, "min_tokens": 8}
WORDS = ("river", "mill", "inn", "captain", "harbour", "flood", "bridge", "winter", "letter", "garden")
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
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "sitecustomize.py").write_text(STAND_IN)
    package(folder)
    (folder / "models" / "bundles").mkdir(parents=True)
    (folder / "models" / "bundles" / "all.yaml").write_text("{id: all, families: [built-in, docling]}")
    environ = {
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


def test_a_job_writes_the_chunks_that_requests_return(jobs: JobClient) -> None:
    rows = documents(6, 30)
    source = {"file": jobs.upload("a.jsonl", jsonl(rows)), "text": "{body}", "id": "key", "chunks": RULE}
    job = jobs.submit(MODEL, source, output={"format": "parquet"}, shard_rows=4)["id"]
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


def test_a_column_names_the_chunks_of_each_row_and_wrong_ones_cost_their_row(jobs: JobClient) -> None:
    rows: Rows = [
        {"key": "a", "body": "one two three four", "spans": [[0, 7], [4, 18]], "context": False},
        {"key": "b", "body": "one two", "spans": [[0, 99]]},
        {"key": "c", "body": "one two", "spans": None},
        {"key": "d", "body": "one two", "spans": [[4, 7]]},
    ]
    source = {"file": jobs.upload("a.parquet", parquet_file(rows)), "text": "{body}", "id": "key", "chunks": "spans"}
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


def test_a_job_writes_the_chunks_of_documents_with_page_and_heading(jobs: JobClient) -> None:
    rows = parsable(documents(5, 30, seed=3))
    forms = [{"data": rows[0]["file"], "format": "pdf"}, f"data:application/pdf;base64,{rows[1]['file']}"]
    files = [*forms, *(row["file"] for row in rows[2:])]
    data = jsonl([{"key": row["key"], "file": file} for row, file in zip(rows, files, strict=True)])
    source = {"file": jobs.upload("a.jsonl", data), **DOCUMENTS}
    job = jobs.submit(MODEL, source, output={"format": "npy"})["id"]
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
