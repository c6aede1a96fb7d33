"""Jobs at a real `sie serve`: every format of input and output, every operation, and rows that cannot be answered. What
a job writes is what a request to the same model answers.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import local_models
import numpy as np
import oracle
import pyarrow as pa
import pytest
from cluster import MODEL, Cluster, running
from job_client import JobClient, Rows, jsonl, parquet_file
from local_models import LocalModels
from parity.toys import image, png
from pyarrow import parquet

KINDS = ("cross", "zero-shot", "clip", "m3")
TEXTS = [
    *oracle.ragged_texts(57, seed=4, longest=40),
    "Zürich, 東京 and 😀",
    'a "quoted" text,\nof two lines',
    "the end",
]
POISON = " ".join(["river"] * (local_models.FAR + 50))
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
    poisoned = LocalModels(models.folder, tmp_path_factory.mktemp("jobs-weights"))
    local_models.poison(poisoned.build("poisoned", "dense"), POISON, [])
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


def csv_file(rows: Rows) -> bytes:
    sink = io.StringIO()
    writer = csv.DictWriter(sink, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


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


def check_close(rows: Rows, expected: Sequence[dict[str, Any]]) -> None:
    assert len(rows) == len(expected)
    for row, slot in zip(rows, expected, strict=True):
        assert row.get("error") is None
        assert row["tokens"] == slot["usage"]["prompt_tokens"]
        assert np.abs(np.array(row["dense"]) - np.array(slot["dense"]["values"])).max() < TOLERANCE


@pytest.mark.parametrize("output", ["parquet", "jsonl", "npy"])
def test_a_folder_of_files_of_every_format_is_answered_in_its_order(jobs: JobClient, folder: Path, output: str) -> None:
    """Files are in the order of their names, rows in that of their file. Ids and kept columns come with the vectors."""
    rows = numbered()
    files = {
        "a/1.parquet": parquet_file(rows[:20], group=7),
        "b.jsonl": jsonl(rows[20:30]),
        "c.csv": csv_file(rows[30:50]),
        "d/2.parquet": parquet_file(rows[50:]),
        ".hidden.jsonl": b"{}",
        "README.md": b"no rows",
    }
    url = written(folder / f"in-{output}", files)
    source = {"url": url, "text": "{text}", "id": "key", "keep": ["size", "text"]}
    place = f"file://{folder}/out-{output}/"
    job = jobs.submit(MODEL, source, output={"url": place, "format": output}, shard_rows=8)
    done = jobs.done(job["id"])
    counts = done["counts"]
    assert (counts["rows"], counts["done"], counts["failed"], counts["shards"]) == (60, 60, 0, 10)
    assert done["output_url"] == place
    output_rows = jobs.rows(job["id"])
    assert [row["id"] for row in output_rows] == [row["key"] for row in rows]
    assert [row["text"] for row in output_rows] == TEXTS
    assert [int(row["size"]) for row in output_rows] == [row["size"] for row in rows], "CSV has no numbers"
    check_close(output_rows, direct(jobs, TEXTS))
    on_disk = json.loads((folder / f"out-{output}" / "manifest.json").read_bytes())
    over_http = jobs.manifest(job["id"])
    assert on_disk == {name: value for name, value in over_http.items() if name != "next"} | {"next": None}
    names = sorted(path.name for path in (folder / f"out-{output}").iterdir())
    assert names == sorted([*(part["name"] for part in over_http["parts"]), "manifest.json", ".sie-job"])
    assert over_http["fingerprint"] == done["fingerprint"] != ""


def test_an_uploaded_file_is_answered_and_its_output_is_kept_with_the_job(jobs: JobClient) -> None:
    """Rows without a column of ids are named by the file and their numbers."""
    rows = [{"title": "A", "body": text} for text in TEXTS[:12]]
    file = jobs.upload("texts.jsonl", jsonl(rows))
    job = jobs.submit(MODEL, {"file": file, "text": "{title}: {body}"}, output={"format": "jsonl"}, shard_rows=5)
    done = jobs.done(job["id"])
    assert done["output_url"] == ""
    output_rows = jobs.rows(job["id"])
    assert [row["id"] for row in output_rows] == [f"texts.jsonl#{number}" for number in range(12)]
    check_close(output_rows, direct(jobs, [f"A: {text}" for text in TEXTS[:12]]))
    listed = jobs.ask("GET", "/v1/jobs", params={"limit": 1000})["data"]
    assert [entry for entry in listed if entry["id"] == job["id"]] == [done]
    assert jobs.ask("DELETE", f"/v1/jobs/{job['id']}")["deleted"]
    assert jobs.ask("GET", f"/v1/jobs/{job['id']}", 404)["error"]["code"] == "NOT_FOUND"
    assert jobs.http.get(f"/v1/jobs/{job['id']}/part", params={"name": "part-00000.jsonl"}).status_code == 404


@pytest.mark.parametrize("dtype", ["int8", "binary", "float16"])
def test_vectors_of_other_types_have_the_codes_of_a_request(jobs: JobClient, dtype: str) -> None:
    file = jobs.upload("texts.jsonl", jsonl(numbered(TEXTS[:20])))
    for output in ("parquet", "npy"):
        job = jobs.submit(
            MODEL, {"file": file, "text": "{text}"}, params={"output_dtype": dtype}, output={"format": output}
        )
        jobs.done(job["id"])
        expected = direct(jobs, TEXTS[:20], output_dtype=dtype)
        for row, slot in zip(jobs.rows(job["id"]), expected, strict=True):
            codes, expected_codes = np.array(row["dense"], np.float64), np.array(slot["dense"]["values"], np.float64)
            assert codes.shape == expected_codes.shape
            if dtype == "binary":
                differing = np.unpackbits(codes.astype(np.uint8) ^ expected_codes.astype(np.uint8)).sum()
                assert differing <= 1, "a number next to 0"
            else:
                assert np.abs(codes - expected_codes).max() <= (1 if dtype == "int8" else 1e-3)
            assert ("scale" in slot["dense"]) == (output == "parquet" and row.get("dense_scale") is not None) or (
                output == "npy"
            )


def test_sparse_vectors_and_those_of_tokens(jobs: JobClient) -> None:
    file = jobs.upload("texts.jsonl", jsonl(numbered(TEXTS[:15])))
    types = ["dense", "sparse", "multivector"]
    job = jobs.submit("test/m3", {"file": file, "text": "{text}"}, params={"output_types": types})
    jobs.done(job["id"])
    rows = jobs.rows(job["id"])
    for row, slot in zip(rows, direct(jobs, TEXTS[:15], "test/m3", output_types=types), strict=True):
        assert np.abs(np.array(row["dense"]) - np.array(slot["dense"]["values"])).max() < TOLERANCE
        assert row["sparse_indices"] == slot["sparse"]["indices"]
        assert np.allclose(row["sparse_values"], slot["sparse"]["values"], atol=TOLERANCE)
        assert np.abs(np.array(row["multivector"]) - np.array(slot["multivector"]["values"])).max() < 10 * TOLERANCE


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


@pytest.mark.parametrize("output", ["parquet", "jsonl", "npy"])
def test_rows_that_cannot_be_answered_say_why_and_the_others_are(jobs: JobClient, output: str) -> None:
    """The faults: no JSON, no object, a column that is missing or null, a vector that is not finite. An empty text is
    valid.
    """
    texts = ["river", "", POISON, "mountain"]
    lines = [json.dumps({"text": text}) for text in texts]
    lines += ["{no json", "[1, 2]", json.dumps({"other": 1}), json.dumps({"text": None}), json.dumps({"text": "last"})]
    file = jobs.upload("rows.jsonl", "\n".join(lines).encode())
    job = jobs.submit(
        "test/poisoned",
        {"file": file, "text": "{text}"},
        params={"truncate": "END"},
        output={"format": output},
        shard_rows=4,
    )
    done = jobs.done(job["id"])
    assert (done["counts"]["rows"], done["counts"]["done"], done["counts"]["failed"]) == (9, 9, 5)
    assert done["errors"] == {"INVALID_INPUT": 4, "INFERENCE_ERROR": 1}
    rows = jobs.rows(job["id"])
    errors = [None if row.get("error") is None else row["error"] for row in rows]
    assert [error and error["code"] for error in errors] == [
        None,
        None,
        "INFERENCE_ERROR",
        None,
        *["INVALID_INPUT"] * 4,
        None,
    ]
    assert [error["message"] for error in errors[4:8] if error] == [
        "the line is no valid JSON",
        "the line is no JSON object",
        "column 'text' is missing",
        "column 'text' is null",
    ]
    for row in rows:
        vector = row.get("dense")
        assert (vector is None) == (row.get("error") is not None)
        assert vector is None or np.isfinite(np.array(vector, np.float64)).all()
    expected = direct(jobs, ["river", "", "mountain", "last"], "test/poisoned")
    check_close([row for row in rows if row.get("error") is None], expected)
    sample = jobs.ask("GET", f"/v1/jobs/{job['id']}/rows", params={"failed": "true"})["rows"]
    assert [row["id"] for row in sample] == [f"rows.jsonl#{number}" for number in (2, 4, 5, 6, 7)]
    again = jobs.steer(job["id"], "retry", 201)
    retried = jobs.done(again["id"])
    assert (retried["counts"]["rows"], retried["counts"]["failed"]) == (5, 5), "exactly these are asked again"
    assert [row["id"] for row in jobs.rows(again["id"])] == [row["id"] for row in sample]


def test_texts_that_are_too_long_cost_their_rows_and_those_that_are_empty_are_texts(jobs: JobClient) -> None:
    long = "river " * 1000
    pairs = [("river", "a river"), ("", "b"), ("river", long), (long, "c"), ("river", ""), ("river", "last")]
    file = jobs.upload("pairs.jsonl", jsonl([{"q": query, "d": text} for query, text in pairs]))
    source = {"file": file, "query": "{q}", "document": "{d}"}
    job = jobs.submit("test/cross", source, operation="score", params={"truncate": "NONE"})
    errors = [row["error"] and row["error"]["code"] for row in jobs.rows(jobs.done(job["id"])["id"])]
    assert errors == [None, None, "INVALID_INPUT", "INVALID_INPUT", None, None]


def test_what_can_never_run_is_refused_at_once(jobs: JobClient, folder: Path, tmp_path: Path) -> None:
    written(folder / "plain", {"a.jsonl": jsonl(numbered(TEXTS[:2]))})
    outside = written(tmp_path / "outside", {"a.jsonl": jsonl(numbered(TEXTS[:2]))})
    source = {"url": f"file://{folder}/plain/", "text": "{text}"}
    for url in (outside, f"file://{folder}/../", f"{source['url']}../../", f"file://{folder}-other/", "s3://bucket/a/"):
        error = jobs.refusal(MODEL, {**source, "url": url})
        assert (error["code"], error["reason"], error["param"]) == ("INVALID_INPUT", "not_allowed", "input.url")
    assert jobs.refusal(MODEL, source, output={"url": outside})["param"] == "output.url"
    assert jobs.refusal(MODEL, source, operation="score")["param"] in ("operation", "input.text")
    assert jobs.refusal(MODEL, {**source, "text": "{a.__class__}"})["param"] == "input.text"
    assert jobs.refusal(MODEL, source, params={"dimensions": 7})["param"] == "params.dimensions"
    assert jobs.refusal(MODEL, source, params={"dimension": 7})["param"] == "params.dimension"
    assert jobs.refusal(MODEL, source, output={"sink": "none", "collection": "a"})["param"] == "output.sink"
    assert jobs.refusal(MODEL, source, windows=["25:00-26:00"])["code"] == "INVALID_INPUT"
    assert jobs.refusal(MODEL, source, windows=["22:00-06:00"], time_zone="Mars/Base")["param"] == "time_zone"
    assert jobs.submit("no/model", source, status=404)["error"]["code"] == "MODEL_NOT_FOUND"
    assert jobs.submit(MODEL, {"file": "file-none", "text": "{text}"}, status=404)["error"]["code"] == "NOT_FOUND"


def test_a_job_whose_columns_are_wrong_fails_and_names_those_that_there_are(jobs: JobClient, folder: Path) -> None:
    rows = numbered(TEXTS[:3])
    kinds = {"a.parquet": parquet_file(rows), "b.csv": csv_file(rows)}
    for name, data in kinds.items():
        url = written(folder / f"columns-{name[0]}", {name: data})
        job = jobs.submit(MODEL, {"url": url, "text": "{title}\n{text}"})
        failed = jobs.reaches(job["id"], "failed")
        assert failed["error"]["message"] == f"input.text: {name} has no column 'title'; it has key, text, size"
        assert (failed["error"]["code"], failed["error"]["param"]) == ("INVALID_INPUT", "input.text")


def test_a_symbolic_link_does_not_lead_out_of_the_folder(jobs: JobClient, folder: Path, tmp_path: Path) -> None:
    """A link to a file and a link to a folder: neither is read, and the files beside them are."""
    secret = tmp_path / "secret"
    written(secret, {"a.jsonl": jsonl([{"text": "a secret"}])})
    url = written(folder / "links", {"b.jsonl": jsonl([{"text": "river"}])})
    (folder / "links" / "a.jsonl").symlink_to(secret / "a.jsonl")
    (folder / "links" / "z").symlink_to(secret)
    done = jobs.done(jobs.submit(MODEL, {"url": url, "text": "{text}"})["id"])
    assert [row["id"] for row in jobs.rows(done["id"])] == ["b.jsonl#0"]
    assert "a secret" not in json.dumps(done)
    job = jobs.submit(MODEL, {"url": f"{url}a.jsonl", "text": "{text}"})
    failed = jobs.reaches(job["id"], "failed")
    assert failed["error"]["code"] == "INVALID_INPUT"
    assert "symbolic link" in failed["error"]["message"] or "no such object" in failed["error"]["message"]


def test_one_broken_file_of_a_hundred_is_named_and_the_others_are_answered(jobs: JobClient, folder: Path) -> None:
    """One file lacks its end, one has a damaged page, and one is no Parquet."""
    generator = random.Random(1)
    texts = [f"{TEXTS[number % 57]} {number}" for number in range(100)]
    files = {f"{number:03}.parquet": parquet_file([{"text": text}]) for number, text in enumerate(texts)}
    cut, flipped, noise = "007.parquet", "031.parquet", "064.parquet"
    files[cut] = files[cut][:-20]
    page = bytearray(files[flipped])
    page[30] ^= 0xFF
    files[flipped] = bytes(page)
    files[noise] = generator.randbytes(200)
    url = written(folder / "hundred", files)
    done = jobs.done(jobs.submit(MODEL, {"url": url, "text": "{text}"})["id"])
    assert done["counts"]["shards_failed"] == 3
    assert sorted(line.split(":")[0] for line in done["broken"]) == [cut, flipped, noise], done["broken"]
    assert all("no valid Parquet" in line for line in done["broken"]), done["broken"]
    answered = [f"{number:03}.parquet#0" for number in range(100) if number not in (7, 31, 64)]
    assert [row["id"] for row in jobs.rows(done["id"])] == answered
    manifest = jobs.manifest(done["id"])
    assert len(manifest["broken"]) == 3, manifest["broken"]


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_hundred_thousand_texts_have_the_vectors_of_direct_calls(jobs: JobClient, folder: Path) -> None:
    """Each text is compared with the answer to a request of 32 texts of many lengths."""
    count = 100_000
    texts = [f"{text} {number}" for number, text in enumerate(oracle.ragged_texts(count, seed=11, longest=24))]
    url = written(folder / "many", {"rows.parquet": parquet_file([{"text": text} for text in texts])})
    job = jobs.done(jobs.submit(MODEL, {"url": f"{url}rows.parquet", "text": "{text}"})["id"], timeout_s=700)
    assert (job["counts"]["done"], job["counts"]["failed"]) == (count, 0)
    tables = [parquet.read_table(io.BytesIO(part), columns=["dense"]) for part in jobs.parts(job["id"])]
    dense = pa.concat_tables(tables).column("dense").combine_chunks()
    vectors = dense.flatten().to_numpy().reshape(count, -1)

    def worst(start: int) -> float:
        answers = direct(jobs, texts[start : start + 32])
        expected = np.array([answer["dense"]["values"] for answer in answers])
        return float(np.abs(vectors[start : start + 32] - expected).max())

    with ThreadPoolExecutor(4) as threads:
        difference = max(threads.map(worst, range(0, count, 32)))
    print(f"{count} texts in {job['ended_at'] - job['started_at']:.0f} s, worst difference {difference:.2e}")
    assert difference < TOLERANCE
