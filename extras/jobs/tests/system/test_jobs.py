"""Jobs at a real `sie serve`: what a job writes for each operation is what a request to the same model answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from cluster import MODEL, Cluster, running
from job_client import JobClient, Rows, jsonl
from local_models import LocalModels
from parity.toys import image, png

KINDS = ("cross", "zero-shot", "clip")
TEXTS = [
    *oracle.ragged_texts(57, seed=4, longest=40),
    "Zürich, 東京 and 😀",
    'a "quoted" text,\nof two lines',
    "the end",
]
TOLERANCE = 2e-6  # float32 results of batches of other sizes differ by less


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one place that jobs may read from and write to."""
    return tmp_path_factory.mktemp("jobs") / "data"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, folder: Path, every_family: LocalModels) -> Iterator[Cluster]:
    models = LocalModels(tmp_path_factory.mktemp("jobs-models"), every_family.weights)
    for kind in KINDS:
        models.add(kind, json.loads((every_family.folder / f"{kind}.yaml").read_text()))
    arguments = ["--models-dir", str(models.folder), "--model-filter", ",".join([MODEL, *models.names]), "--no-spare"]
    arguments += ["--default-compute-precision", "float32"]
    data = tmp_path_factory.mktemp("jobs-cluster")
    with running(data, *arguments, environ={"SIE_JOBS_URLS": f"file://{folder}"}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> Iterator[JobClient]:
    with JobClient(cluster.url) as jobs:
        yield jobs


def numbered(texts: Sequence[str] = TEXTS) -> Rows:
    return [{"key": f"k{number}", "text": text, "size": len(text)} for number, text in enumerate(texts)]


def written(folder: Path, files: dict[str, bytes]) -> str:
    """Write files into a folder that jobs may read, and return its URL."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return f"file://{folder}/"


def direct(jobs: JobClient, items: Sequence[Any], model: str = MODEL, **params: Any) -> list[dict[str, Any]]:
    """Return the answer to a single request."""
    body = {"items": list(items), "params": params}
    results: list[dict[str, Any]] = jobs.ask("POST", f"/v1/encode/{model}", json=body)["items"]
    return results


def test_scores_are_those_of_a_request(jobs: JobClient) -> None:
    queries = ("where is the river", "who sings")
    rows = [{"q": queries[number % 2], "d": text} for number, text in enumerate(TEXTS[:20])]
    file = jobs.upload("pairs.jsonl", jsonl(rows))
    source = {"file": file, "query": "{q}", "document": "{d}", "keep": ["q"]}
    job = jobs.submit("test/cross", source, operation="score")
    jobs.done(job["id"])
    output_rows = jobs.rows(job["id"])
    for place, query in enumerate(queries):
        items = [{"id": str(number), "text": row["d"]} for number, row in enumerate(rows) if row["q"] == query]
        answer = jobs.ask("POST", "/v1/score/test/cross", json={"query": query, "items": items})
        scores = {int(entry["item_id"]): entry["score"] for entry in answer["scores"]}
        assert sorted(scores) == list(range(place, 20, 2))
        for number, score in scores.items():
            assert output_rows[number]["q"] == query
            assert abs(output_rows[number]["score"] - score) < 1e-5


def test_extractions_are_those_of_a_request(jobs: JobClient) -> None:
    file = jobs.upload("texts.jsonl", jsonl(numbered(TEXTS[:20])))
    params = {"labels": ["person", "river mountain"]}
    job = jobs.submit("test/zero-shot", {"file": file, "text": "{text}"}, operation="extract", params=params)
    jobs.done(job["id"])
    items = [{"text": text} for text in TEXTS[:20]]
    expected = jobs.ask("POST", "/v1/extract/test/zero-shot", json={"items": items, "params": params})["items"]
    for row, slot in zip(jobs.rows(job["id"]), expected, strict=True):
        classifications = json.loads(row["classifications"])
        assert (
            [element["label"] for element in classifications]
            == [element["label"] for element in slot["classifications"]]
            != []
        )
        for entry, reference in zip(classifications, slot["classifications"], strict=True):
            assert abs(entry["score"] - reference["score"]) < 1e-5


def test_the_images_of_a_folder_are_answered_by_their_names(jobs: JobClient, folder: Path) -> None:
    """A file that is no image costs its own row."""
    files = {f"{number:02}.png": png(image(40 + number, 30, number)) for number in range(10)}
    files["05b.jpg"] = b"this is no image"
    url = written(folder / "pictures", {**files, "notes.txt": b"no image"})
    job = jobs.submit("test/clip", {"url": url}, shard_rows=4)
    done = jobs.done(job["id"])
    assert (done["counts"]["rows"], done["counts"]["failed"], done["errors"]) == (11, 1, {"INVALID_INPUT": 1})
    rows = jobs.rows(job["id"])
    assert [row["id"] for row in rows] == sorted(files)
    (bad,) = [row for row in rows if row["error"] is not None]
    assert (bad["id"], bad["error"]["code"], bad["dense"]) == ("05b.jpg", "INVALID_INPUT", None)
    good = [row for row in rows if row["error"] is None]
    items = [{"images": [base64.b64encode(files[row["id"]]).decode()]} for row in good]
    for row, slot in zip(good, direct(jobs, items, "test/clip"), strict=True):
        assert np.abs(np.array(row["dense"]) - np.array(slot["dense"]["values"])).max() < 10 * TOLERANCE
